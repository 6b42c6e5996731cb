"""Every rule of the audit is broken once, by a real kernel that does what the rule forbids, and is seen to fail."""

from __future__ import annotations

import re

import pytest

from kdagen.audit import BUDGETS, RULES, audit
from tests.profiles import mutated, written

BUDGET = BUDGETS["gfx942"]["bounded-norm-sd"]
SWAP = "  a += dpp<0xb1, 0xf, 0xf>(a);      // quad_perm:[1,0,3,2]: xor 1\n"
SIGMOID = "DEVICE float sigmoid(float y) { return rcp_approx(1.0f + exp2_approx(-kLog2E * y)); }"
BITS = "__builtin_bit_cast(int, a)"
WAVES = "amdgpu_waves_per_eu(4)"
AFTER_BARRIER = "  const float square_sum = delta_rule("
WAIT_FOR_ALL = "__builtin_amdgcn_s_waitcnt(0x0f70);"  # vmcnt(0), the other counters at their most


def swap_by(value: str) -> dict[str, str]:
    return {SWAP: f"  a += __builtin_bit_cast(float, {value});\n"}


def inserted(statement: str) -> dict[str, str]:
    return {AFTER_BARRIER: f"  {statement}\n{AFTER_BARRIER}"}


TOO_MANY_REGISTERS = {WAVES: "amdgpu_waves_per_eu(2)", **inserted('asm volatile("" ::: "v150");')}
TOO_FEW_REGISTERS = {WAVES: "amdgpu_waves_per_eu(8, 8)"}
OUTSIDE = 'extern "C" __device__ __attribute__((weak, visibility("default"))) float outside(float);\n'

# Rule: what is changed in the generated source, the instance that shows it, and what the message quotes.
BREAKERS: dict[str, tuple[dict[str, str], str, str]] = {
    "no-spill": (TOO_FEW_REGISTERS, "bounded-norm-sd", r"got: \d+ VGPR spills"),
    "no-scratch": (TOO_FEW_REGISTERS, "bounded-norm-sd", r"got: \d+ bytes of scratch per lane; scratch_store_dword"),
    "no-ds-bpermute": (
        swap_by(f"__builtin_amdgcn_ds_bpermute(4 * (thread_index() ^ 1), {BITS})"),
        "bounded-norm-sd",
        r"got: ds_bpermute_b32 v\d+, v\d+, v\d+",
    ),
    "no-ds-swizzle": (
        swap_by(f"__builtin_amdgcn_ds_swizzle({BITS}, 0x041f)"),
        "bounded-norm-sd",
        r"got: ds_swizzle_b32 v\d+, v\d+ offset:swizzle",
    ),
    "no-flat": (
        {
            "  const float a_log = p.A_log[work.head];\n": "  const float *a_logs = p.A_log;\n"
            '  asm("" : "+v"(a_logs));\n  const float a_log = a_logs[work.head];\n'
        },
        "bounded-norm-sd",
        r"got: flat_load_dword v\d+, v\[",
    ),
    "no-ieee-division": (
        {SIGMOID: "DEVICE float sigmoid(float y) { return 1.0f / (1.0f + exp2_approx(-kLog2E * y)); }"},
        "bounded-norm-sd",
        r"got: v_div_scale_f32 .*; and \d+ more",
    ),
    "no-call": (
        {SIGMOID: f"{OUTSIDE}DEVICE float sigmoid(float y) {{ return outside(y); }}"},
        "bounded-norm-sd",
        r"got: undefined symbol outside; s_swappc_b64 s\[",
    ),
    "dpp-reductions": (
        swap_by(f"__builtin_amdgcn_readlane({BITS}, 1)"),
        "bounded-norm-sd",
        r"got: v_readlane_b32 s\d+, v\d+, 1",
    ),
    "state-accesses": (
        {"return __builtin_nontemporal_load(": "return *("},
        "bounded-norm-sd",
        r"got: global_load_dwordx4 v\[\d+:\d+\], v\d+, s\[\d+:\d+\];.*; and 12 more",
    ),
    "loads-before-wait": (
        {
            "from_slot.history = load_history<kConvDs>(from_slot.window)": "from_slot.history = "
            "in_tap_order<kConvDs>(load_history<kConvDs>(from_slot.window))"
        },
        "bounded-norm-ds",
        r"got: s_waitcnt vmcnt\(0\) \(after 0 state loads, instruction \d+\)",
    ),
    "no-drain": (
        inserted(WAIT_FOR_ALL),
        "bounded-norm-sd",
        r"got: s_waitcnt vmcnt\(0\).* \(16 state loads and 0 state stores under way",
    ),
    "two-barriers": (
        {"  publish_square_sum(lds, sq": "  workgroup_barrier();\n  publish_square_sum(lds, sq"},
        "bounded-norm-sd",
        r"got: s_barrier \(instruction \d+\); s_barrier \(instruction \d+\); s_barrier \(instruction \d+\)$",
    ),
    "four-waves": (TOO_MANY_REGISTERS, "bounded-norm-sd", r"got: 3 waves with 15\d VGPRs"),
    "budget-vgprs": (TOO_MANY_REGISTERS, "bounded-norm-sd", r"got: 15\d vgprs, budget 128"),
    "budget-instructions": (
        inserted('asm volatile(".rept 40\\n s_nop 0\\n .endr");'),
        "bounded-norm-sd",
        rf"got: \d+ instructions, budget {BUDGET.instructions}$",
    ),
    "budget-cycles": (
        inserted('float x = beta_logit; asm volatile(".rept 20\\n v_rcp_f32 %0, %0\\n .endr" : "+v"(x));'),
        "bounded-norm-sd",
        rf"got: \d+ cycles, budget {BUDGET.cycles}$",
    ),
}


def test_every_rule_has_a_kernel_that_breaks_it():
    assert set(BREAKERS) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_kernel_that_does_what_a_rule_forbids_breaks_it(rule):
    changes, instance, quoted = BREAKERS[rule.name]
    assert rule.offending(mutated({}, instance)) == []
    broken = {found.rule: str(found) for found in audit(mutated(changes, instance))}
    message = broken[rule.name]
    start = f"kda_decode_h12_cdna {instance} gfx942: {rule.name}: expected {rule.reason}, got: "
    assert message.startswith(start)
    assert re.search(quoted, message), message


def names(profile) -> set[str]:
    return {broken.rule for broken in audit(profile)}


LOAD, STORE = "global_load_dwordx4 v[2:5], v0, s[0:1] nt", "global_store_dwordx4 v0, v[2:5], s[0:1] nt"
KEPT = (*[LOAD] * 16, "s_barrier", "v_add_f32_dpp v1, v1, v1 row_mirror", *[STORE] * 16, "s_endpgm")


def test_a_hand_written_kernel_breaks_nothing():
    assert names(written(*KEPT)) == set()


@pytest.mark.parametrize(
    ("waits", "drains"),
    [
        ([(17, 14), (18, 0)], True),  # after the first row: the other seven at once
        ([(17, 8), (17, 2), (17, 0)], False),  # down to the last row, then it
        ([(20, 0)], True),  # stores under way, and every load waited for with them
        ([(17, 1), (17, 0), (21, 1), (25, 0)], True),  # the last waits for the stores alone
        ([(17, 1), (17, 0), (21, 1)], False),
        ([(33, 0), (17, 0)], True),
        ([(17, 2), (34, 0)], False),  # behind the last row group nothing is held up
    ],
)
def test_a_drain_is_a_wait_for_more_than_the_last_row(waits, drains):
    code = list(KEPT)
    for place, left in sorted(waits, key=lambda wait: -wait[0]):
        same = [wait for wait in waits if wait[0] == place]
        if (place, left) == same[-1]:
            code[place:place] = [f"s_waitcnt vmcnt({count})" for _, count in same]
    assert ("no-drain" in names(written(*code))) == drains


def test_state_accesses_must_be_global_wide_and_streamed_once():
    def with_load(line: str, *more: str, arch: str = "gfx942"):
        return "state-accesses" in names(written(line, *KEPT[1:], *more, arch=arch))

    assert not with_load(LOAD)
    assert with_load("flat_load_dwordx4 v[2:5], v[0:1] nt")
    assert with_load("global_load_dwordx4 v[2:5], v0, s[0:1] sc0")
    assert with_load("global_load_dwordx2 v[2:3], v0, s[0:1] nt")
    assert with_load("s_nop 0")  # one of sixteen is missing
    assert with_load(LOAD, LOAD)  # one is loaded twice
    assert with_load(LOAD, arch="gfx90a")  # where non-temporal is spelled glc slc


def test_a_figure_without_instructions_is_quoted():
    assert names(written(*KEPT, sgpr_spills=1)) == {"no-spill"}
    assert names(written(*KEPT, undefined=("__ocml_exp_f32",))) == {"no-call"}
    assert names(written(*KEPT, instance="new-norm-sd")) == {"budget-vgprs", "budget-instructions", "budget-cycles"}
    without = [line for line in KEPT if "dpp" not in line]
    assert [str(broken).rsplit("got: ")[1] for broken in audit(written(*without))] == ["no v_add_f32_dpp"]
