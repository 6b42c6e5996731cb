"""docs/kernel.md says what the machine code and the plan say, wherever it states a number that they can give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdagen import dpp, inspect_code
from kdagen.machine_code import (
    LDS_BYTES_PER_CU,
    MAX_WAVES_PER_SIMD,
    SIMDS_PER_CU,
    VGPR_GRANULE,
    VGPRS_PER_SIMD,
    Profile,
)
from kdagen.spec import KernelSpec
from kdagen.target import CDNA
from kdagen.variants import variants_of
from tests.profiles import compiler

TEXT = (Path(__file__).parents[1] / "docs" / "kernel.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
INSTANCE = "bounded-norm-sd"
ARCHS = ("gfx942", "gfx950")

(VARIANT,) = variants_of(12, CDNA)
STATE = VARIANT.spec.state_bytes
WINDOW = 3 * 128 * (VARIANT.spec.conv_width - 1) * 2
MOVED = 2 * STATE + 2 * WINDOW + 3 * 128 * 2 + 3 * 128 * 2
"""State and window read and written; x; raw_g, output_gate and out."""
FLOPS = 7 * 128 * 128

# By AMD's data sheets: memory TB/s, compute units, GHz.
PEAKS = {"gfx942": (5.3, 304, 2.1), "gfx950": (8.0, 256, 2.4)}


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    text = inspect_code.committed_text(VARIANT)
    found = {}
    for arch in ARCHS:
        job = inspect_code.Job(VARIANT, arch, text)
        found[arch] = next(p for p in inspect_code.profile(compiler(), job, CDNA.flags) if p.instance == INSTANCE)
    return found


def row(name: str, cells: list[str]) -> str:
    return "| " + " | ".join([name, *cells]) + " |"


def figures(profile: Profile) -> dict[str, int]:
    first, second = (i for i, line in enumerate(profile.lines) if line.startswith("s_barrier"))
    return {
        "registers per lane": profile.vgprs,
        "waves per SIMD": profile.waves_per_simd,
        "workgroups per CU": profile.workgroups_per_cu,
        "LDS of a workgroup, bytes": profile.lds_bytes,
        "state in flight per CU, bytes": profile.state_bytes_in_flight,
        "state loads before the first wait": profile.state_loads_before_wait,
        "instructions": len(profile.lines),
        "up to the first barrier": first + 1,
        "between the barriers": second - first,
        "after the second barrier": len(profile.lines) - second - 1,
        "DPP": profile.classes["DPP"],
        "packed fp32": profile.classes["packed fp32"],
        "transcendental": profile.classes["transcendental"],
        "waits on vector memory in the recurrence": profile.recurrence_waits,
        "`s_nop`": profile.classes["nop"],
        "cycles of one pass, llvm-mca": profile.cycles,
    }


def test_the_table_is_what_inspect_finds(profiles):
    found = [figures(profiles[arch]) for arch in ARCHS]
    expected = [row(name, [f"{of_arch[name]:,}" for of_arch in found]) for name in found[0]]
    heading = row(f"`{VARIANT.name}` `{INSTANCE}`", list(ARCHS))
    table = TEXT.split(heading)[1].strip().splitlines()[1 : 1 + len(expected)]
    assert table == expected, "\n".join(expected)


def test_the_occupancy_arithmetic(profiles):
    vgprs = {profile.vgprs for profile in profiles.values()}
    assert len(vgprs) == 1 and MAX_WAVES_PER_SIMD >= 4
    (count,) = vgprs
    taken = -(-count // VGPR_GRANULE) * VGPR_GRANULE
    assert f"A SIMD has {VGPRS_PER_SIMD} registers per lane, handed out in eights: {count} take {taken}" in PLAIN
    assert f"so {VGPRS_PER_SIMD // taken} waves fit" in PLAIN
    assert VARIANT.plan.waves == SIMDS_PER_CU == 4
    lds = VARIANT.plan.lds_bytes
    by_lds = [f"{LDS_BYTES_PER_CU[arch] // lds} on {arch} ({LDS_BYTES_PER_CU[arch] // 1024} KiB)" for arch in ARCHS]
    assert f"By LDS it would hold {by_lds[0]} and {by_lds[1]}" in PLAIN


def test_the_roofline():
    assert KernelSpec(12).state_bytes == STATE
    assert row("state", [f"{STATE:,}", f"{STATE:,}"]) in TEXT
    assert row("conv window", [f"{WINDOW:,}", f"{WINDOW:,}"]) in TEXT
    assert f"That is {MOVED:,} bytes, {2 * STATE / MOVED:.1%} of them state" in PLAIN
    assert f"({3 * VARIANT.spec.conv_width * 128 * 4:,} bytes of taps a head)" in PLAIN
    assert f"{FLOPS:,} in all: {FLOPS / MOVED:.2f} per byte" in PLAIN


def test_the_memory_time_of_a_workgroup_follows_from_the_data_sheets(profiles):
    per_cycle = [terabytes * 1e3 / units / clock for terabytes, units, clock in (PEAKS[arch] for arch in ARCHS)]
    assert row("bytes per cycle and CU", [f"{rate:.1f}" for rate in per_cycle]) in TEXT
    cycles = [round(MOVED / rate) for rate in per_cycle]
    assert row("cycles of memory per workgroup", [f"{count:,}" for count in cycles]) in TEXT
    issue = profiles["gfx942"].cycles
    shares = " and ".join(f"{issue / count:.0%}" for count in cycles)
    assert f"The {issue:,} cycles that llvm-mca counts for one wave are {shares} of that" in PLAIN


def test_the_drawings_are_the_plan():
    plan = VARIANT.plan
    assert (plan.lanes_per_row, plan.rows_per_lane, plan.parts) == (16, 8, 2)
    assert "`t` is lane `t % 16` of group `t / 16`" in PLAIN and "8 x 2 x 4 = 64 numbers" in PLAIN
    drawn = re.findall(r"^(\w+) +partner.*?(\d+) -> (\d+) +(\d+)$", TEXT, re.MULTILINE)
    halving = dpp.plan_halving(plan.rows_together)
    left, expected = plan.rows_together, []
    for step in halving.steps:
        kept = step.left or 1
        expected.append((step.control.name.split(":")[0], str(left), str(kept), str(kept)))
        left = kept
    assert drawn == expected
    assert f"{sum(int(adds) for *_, adds in drawn)} adds where one by one they take {4 * plan.rows_together}" in PLAIN


def test_the_dpp_instructions_add_up(profiles):
    terms = re.search(r"All DPP instructions of the text: (.*?): (\d+)\.", PLAIN)
    assert terms is not None
    products = [int(a) * int(b or 1) for a, b in re.findall(r"(\d+)(?: x (\d+))?", terms[1])]
    assert sum(products) == int(terms[2]) == profiles["gfx942"].classes["DPP"]
