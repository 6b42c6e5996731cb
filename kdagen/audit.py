"""What the machine code of every kernel must be: rules with their reasons, and budgets, as data.

A rule says which instructions of a profile offend it; a figure that offends is given as a phrase. The compiler decides
all of this anew with every release and every change of a template, so nothing here is assumed: CI compiles and audits
every instance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kdagen.machine_code import Profile
from kdagen.machine_paths import STATE_LOAD, STATE_STORE, vector_wait

MEASURED_WITH = "clang 22.1.8"
MIN_WAVES_PER_SIMD = 4
MAX_BARRIERS = 2
ROW_ACCESSES = 2
"""State accesses of a lane per row group: a row of 128 fp32 columns is 32 bytes for each of its 16 lanes."""
SHOWN = 4
"""Offending instructions that a message quotes."""


@dataclass(frozen=True)
class Budget:
    """What an instance may grow to: registers per lane, instructions of the text, cycles of llvm-mca's model."""

    vgprs: int
    instructions: int
    cycles: int


MAX_VGPRS = 128
"""Of a SIMD's 512, what four waves leave for each."""
SLACK = 1.03
"""Below what a spilled row or one more reduction costs, above what the head count changes."""
MEASURED: dict[str, dict[str, tuple[int, int]]] = {
    "gfx90a": {
        "bounded-norm-sd": (739, 1679),
        "bounded-norm-ds": (733, 1662),
        "bounded-nonorm-sd": (699, 1653),
        "bounded-nonorm-ds": (696, 1642),
        "softplus-norm-sd": (752, 1660),
        "softplus-norm-ds": (744, 1642),
        "softplus-nonorm-sd": (711, 1639),
        "softplus-nonorm-ds": (707, 1628),
    },
    "gfx942": {
        "bounded-norm-sd": (726, 1575),
        "bounded-norm-ds": (715, 1553),
        "bounded-nonorm-sd": (698, 1561),
        "bounded-nonorm-ds": (679, 1533),
        "softplus-norm-sd": (739, 1556),
        "softplus-norm-ds": (726, 1533),
        "softplus-nonorm-sd": (711, 1622),
        "softplus-nonorm-ds": (691, 1595),
    },
    "gfx950": {
        "bounded-norm-sd": (716, 1575),
        "bounded-norm-ds": (705, 1553),
        "bounded-nonorm-sd": (688, 1561),
        "bounded-nonorm-ds": (669, 1533),
        "softplus-norm-sd": (729, 1556),
        "softplus-norm-ds": (716, 1533),
        "softplus-nonorm-sd": (701, 1622),
        "softplus-nonorm-ds": (681, 1595),
    },
}
"""Instructions and cycles of each instance by arch, the most over all head counts: one row per kind of instance is
enough, because a head count changes a few address instructions and no more."""
BUDGETS: dict[str, dict[str, Budget]] = {
    arch: {kind: Budget(MAX_VGPRS, int(count * SLACK), int(cycles * SLACK)) for kind, (count, cycles) in rows.items()}
    for arch, rows in MEASURED.items()
}


@dataclass(frozen=True)
class Rule:
    """One rule: its name, why it holds, and what offends it in a profile (nothing: it is kept)."""

    name: str
    reason: str
    offending: Callable[[Profile], Sequence[str]]


@dataclass(frozen=True)
class Broken:
    """A rule that an instance breaks."""

    variant: str
    instance: str
    arch: str
    rule: str
    reason: str
    offending: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.offending) - SHOWN
        quoted = "; ".join(self.offending[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return f"{self.variant} {self.instance} {self.arch}: {self.rule}: expected {self.reason}, got: {quoted}"


def audit(profile: Profile) -> list[Broken]:
    """Every rule that a profile breaks, in the order of the table."""
    return [
        Broken(profile.variant, profile.instance, profile.arch, rule.name, rule.reason, tuple(offending))
        for rule in RULES
        if (offending := rule.offending(profile))
    ]


def _none_like(pattern: str) -> Callable[[Profile], Sequence[str]]:
    compiled = re.compile(pattern)
    return lambda profile: [line for line in profile.lines if compiled.match(line)]


def _spills(profile: Profile) -> Sequence[str]:
    counts = {"VGPR": profile.vgpr_spills, "SGPR": profile.sgpr_spills}
    return [f"{count} {kind} spills" for kind, count in counts.items() if count]


def _scratch(profile: Profile) -> Sequence[str]:
    used = [f"{profile.scratch_bytes} bytes of scratch per lane"] if profile.scratch_bytes else []
    return [*used, *_none_like(r"scratch_|buffer_")(profile)]


def _calls(profile: Profile) -> Sequence[str]:
    undefined = [f"undefined symbol {name}" for name in profile.undefined]
    return [*undefined, *_none_like(r"s_swappc|s_call|s_setpc")(profile)]


def _reductions(profile: Profile) -> Sequence[str]:
    others = _none_like(r"ds_permute|ds_append|ds_consume|ds_add|ds_\w*rtn|v_readlane|v_writelane|v_permlane|v_mfma")
    added = any(re.match(r"v_add_f32_dpp", line) for line in profile.lines)
    return [*others(profile), *([] if added else ["no v_add_f32_dpp"])]


def _state_accesses(profile: Profile) -> Sequence[str]:
    streams = {"glc", "slc"} if profile.arch == "gfx90a" else {"nt"}
    accesses = {name: [line for line in profile.lines if pattern.match(line)] for name, pattern in _STATE.items()}
    wrong = [
        line
        for lines in accesses.values()
        for line in lines
        if not line.startswith("global_") or not streams <= set(line.split())
    ]
    # A narrower state access carries the mark of the stream, which nothing else does.
    wrong += [
        line
        for line in profile.lines
        if line.startswith(("global_", "flat_", "buffer_"))
        and streams <= set(line.split())
        and not any(pattern.match(line) for pattern in _STATE.values())
    ]
    for name, lines in accesses.items():
        if len(lines) != profile.state_accesses:
            wrong.append(f"{len(lines)} {name} of 16 bytes, not {profile.state_accesses}")
    return wrong


_STATE = {"loads": STATE_LOAD, "stores": STATE_STORE}


def _early_waits(profile: Profile) -> Sequence[str]:
    return [
        f"{profile.code[wait.index]} (after {wait.state_loads} state loads, instruction {wait.index})"
        for wait in profile.first_waits
        if wait.index is not None
    ]


def _drains(profile: Profile) -> Sequence[str]:
    """Full drains from the last state load to the last state store that are more than the wait for the last row.

    Vector memory answers in order, so after a wait for vmcnt(n) at most n accesses of the state are under way.
    """
    places = [place for place, line in enumerate(profile.lines) if STATE_LOAD.match(line)]
    if not places or not profile.recurrence:
        return []
    loads, stores, wrong = len(places), 0, []
    for place in range(places[-1] + 1, profile.recurrence.stop):
        line = profile.lines[place]
        if STATE_STORE.match(line):
            stores += 1
        elif (left := vector_wait(line)) is not None:
            if left == 0 and (loads > ROW_ACCESSES or stores):
                wrong.append(f"{line} ({loads} state loads and {stores} state stores under way, instruction {place})")
            loads, stores = min(loads, max(0, left - stores)), min(stores, left)
    return wrong


def _barriers(profile: Profile) -> Sequence[str]:
    found = [
        f"{line} (instruction {place})" for place, line in enumerate(profile.lines) if line.startswith("s_barrier")
    ]
    return found if len(found) > MAX_BARRIERS else []


def _occupancy(profile: Profile) -> Sequence[str]:
    if profile.waves_per_simd >= MIN_WAVES_PER_SIMD:
        return []
    return [f"{profile.waves_per_simd} waves with {profile.vgprs} VGPRs and {profile.sgprs} SGPRs"]


def _over_budget(figure: str, value: Callable[[Profile], int]) -> Callable[[Profile], Sequence[str]]:
    def offending(profile: Profile) -> Sequence[str]:
        budget = BUDGETS.get(profile.arch, {}).get(profile.instance)
        if budget is None:  # of an instance that is new
            return [f"no budget for {profile.instance} on {profile.arch}"]
        limit, got = getattr(budget, figure), value(profile)
        return [f"{got} {figure}, budget {limit}"] if got > limit else []

    return offending


_AS_MEASURED = f"what {MEASURED_WITH} made of this text and 3% of slack"

RULES: tuple[Rule, ...] = (
    Rule("no-spill", "no spilled register: a spill in the recurrence costs more than the row's arithmetic", _spills),
    Rule("no-scratch", "no scratch: it is memory traffic beside the state's, and takes the same counters", _scratch),
    Rule(
        "no-ds-bpermute",
        "no ds_bpermute: it takes the LDS pipe and a wait where DPP takes neither",
        _none_like("ds_bpermute"),
    ),
    Rule(
        "no-ds-swizzle",
        "no ds_swizzle: it takes the LDS pipe and a wait where DPP takes neither",
        _none_like("ds_swizzle"),
    ),
    Rule(
        "no-flat",
        "no flat access: it counts as LDS and as global memory, so every wait for either waits for it",
        _none_like("flat_"),
    ),
    Rule(
        "no-ieee-division",
        "no division sequence: about ten instructions for a bit that the tolerances do not ask for; v_rcp_f32 is one",
        _none_like("v_div_(scale|fmas|fixup)"),
    ),
    Rule("no-call", "no call and no undefined symbol: a call saves registers, and no device library is linked", _calls),
    Rule("dpp-reductions", "sums over lanes by DPP alone: it costs no pipe but the adder's and no wait", _reductions),
    Rule(
        "state-accesses",
        "the state as global 16-byte non-temporal accesses, each once: it is touched once per token and must not evict "
        "weights from the caches",
        _state_accesses,
    ),
    Rule(
        "loads-before-wait",
        "every state load issued before any wave waits for vector memory: the slice hides one latency, not two",
        _early_waits,
    ),
    Rule(
        "no-drain",
        "rows taken as they come: vmcnt(0) between the first row group and the last waits for the whole slice or for "
        "stores that nobody reads",
        _drains,
    ),
    Rule("two-barriers", f"at most {MAX_BARRIERS} barriers: behind the prologue and before the output", _barriers),
    Rule(
        "four-waves",
        f"at least {MIN_WAVES_PER_SIMD} waves per SIMD: four workgroups per CU keep 256 KiB of state in flight",
        _occupancy,
    ),
    Rule("budget-vgprs", "at most the registers that four waves leave", _over_budget("vgprs", lambda p: p.vgprs)),
    Rule(
        "budget-instructions",
        f"at most as many instructions as {_AS_MEASURED}",
        _over_budget("instructions", lambda p: len(p.lines)),
    ),
    Rule("budget-cycles", f"at most as many cycles as {_AS_MEASURED}", _over_budget("cycles", lambda p: p.cycles)),
)
"""Every rule that `kdagen inspect` and CI hold every instance to."""


def audit_all(profiles: Iterable[Profile]) -> list[Broken]:
    """Every broken rule of many profiles, in their order."""
    return [broken for profile in profiles for broken in audit(profile)]
