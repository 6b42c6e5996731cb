"""The wave64 reduction DSL: a sum over lanes is planned as DPP steps, and a lane model proves the plan.

DPP (data-parallel primitives) lets a vector instruction read its operand from another lane of the wave. Control
values and lane semantics: "CDNA3 Instruction Set Architecture", section "DPP", and LLVM's AMDGPU operand syntax.
A row is 16 consecutive lanes; a quad is 4; a bank mask bit covers one quad of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdagen.errors import PlanError

WAVE_LANES = 64
ROW_LANES = 16
ALL_ROWS = 0xF
ALL_BANKS = 0xF


@dataclass(frozen=True)
class Control:
    """A DPP control: the value of the instruction field and the assembler's name for it."""

    code: int
    name: str

    def source(self, lane: int) -> int | None:
        """The lane that `lane` (0..63) reads, or None where the control reads outside its row or wave."""
        row, within = lane - lane % ROW_LANES, lane % ROW_LANES
        code = self.code
        if code <= 0xFF:
            return lane - lane % 4 + (code >> 2 * (lane % 4) & 3)
        if 0x101 <= code <= 0x10F:
            return row + within + (code & 0xF) if within + (code & 0xF) < ROW_LANES else None
        if 0x111 <= code <= 0x11F:
            return row + within - (code & 0xF) if within >= (code & 0xF) else None
        if 0x121 <= code <= 0x12F:
            return row + (within - (code & 0xF)) % ROW_LANES
        if code == ROW_MIRROR.code:
            return row + ROW_LANES - 1 - within
        if code == ROW_HALF_MIRROR.code:
            return lane - lane % 8 + 7 - lane % 8
        if code == ROW_BCAST15.code:
            return row - 1 if row else None
        if code == ROW_BCAST31.code:
            return 31 if lane >= 32 else None
        if 0x150 <= code <= 0x15F:
            return row + (code & 0xF)
        raise PlanError(f"dpp control: expected one that the lane model knows, got {code:#x}")


def quad_perm(a: int, b: int, c: int, d: int) -> Control:
    """Lane i of every quad reads lane (a, b, c, d)[i] of its quad; each 0..3."""
    return Control(a | b << 2 | c << 4 | d << 6, f"quad_perm:[{a},{b},{c},{d}]")


def row_shl(lanes: int) -> Control:
    """Lane i reads lane i + lanes of its row; lanes 1..15."""
    return Control(0x100 | lanes, f"row_shl:{lanes}")


def row_shr(lanes: int) -> Control:
    """Lane i reads lane i - lanes of its row; lanes 1..15."""
    return Control(0x110 | lanes, f"row_shr:{lanes}")


def row_ror(lanes: int) -> Control:
    """Lane i reads lane (i - lanes) mod 16 of its row; lanes 1..15."""
    return Control(0x120 | lanes, f"row_ror:{lanes}")


def row_newbcast(lane: int) -> Control:
    """Every lane reads the given lane (0..15) of its row; gfx90a and later."""
    return Control(0x150 | lane, f"row_newbcast:{lane}")


ROW_MIRROR = Control(0x140, "row_mirror")
ROW_HALF_MIRROR = Control(0x141, "row_half_mirror")
ROW_BCAST15 = Control(0x142, "row_bcast:15")
ROW_BCAST31 = Control(0x143, "row_bcast:31")


@dataclass(frozen=True)
class AddStep:
    """`v += v from the control's source lane`, in the rows and banks of the masks; elsewhere v stays."""

    control: Control
    effect: str
    row_mask: int = ALL_ROWS
    bank_mask: int = ALL_BANKS

    def writes(self, lane: int) -> bool:
        """Whether the masks let this lane take part."""
        return bool(self.row_mask >> lane // ROW_LANES & 1 and self.bank_mask >> lane % ROW_LANES // 4 & 1)


@dataclass(frozen=True)
class ReadLastStep:
    """Every lane takes the value of the last lane of its group of `lanes`, by v_readlane."""

    lanes: int
    effect: str


Step = AddStep | ReadLastStep

_BUTTERFLY = (
    AddStep(quad_perm(1, 0, 3, 2), "xor 1"),
    AddStep(quad_perm(2, 3, 0, 1), "xor 2"),
    AddStep(ROW_HALF_MIRROR, "xor 4, once every quad holds one value"),
    AddStep(ROW_MIRROR, "xor 8, once every half row holds one value"),
)
_ROW_TO_NEXT_ROW = AddStep(ROW_BCAST15, "row 0 into row 1, row 2 into row 3", row_mask=0b1010)
_HALF_TO_NEXT_HALF = AddStep(ROW_BCAST31, "rows 0 and 1 into row 3", row_mask=0b1000)


@dataclass(frozen=True)
class SumPlan:
    """A sum over groups of `lanes` consecutive lanes, with the result in every lane."""

    lanes: int
    steps: tuple[Step, ...]


def plan_sum(lanes: int) -> SumPlan:
    """Plan the sum over groups of `lanes` (a power of two, 2 to 64) lanes of a wave64, proven by the lane model.

    Raises:
        PlanError: `lanes` is not one of 2, 4, 8, 16, 32, 64.
    """
    if lanes not in (2, 4, 8, 16, 32, 64):
        raise PlanError(f"lanes: expected a power of two from 2 to {WAVE_LANES}, got {lanes!r}")
    steps: tuple[Step, ...] = _BUTTERFLY[: min(lanes, ROW_LANES).bit_length() - 1]
    if lanes >= 32:
        steps += (_ROW_TO_NEXT_ROW,)
    if lanes == 64:
        steps += (_HALF_TO_NEXT_HALF,)
    if lanes >= 32:
        ends = ", ".join(str(lane) for lane in range(lanes - 1, WAVE_LANES, lanes))
        steps += (ReadLastStep(lanes, f"every lane takes lane {ends}" + (" of its half" if lanes == 32 else "")),)
    plan = SumPlan(lanes, steps)
    prove_sum(plan)
    return plan


def run_steps(steps: Sequence[Step], values: Sequence[int]) -> list[int]:
    """The lane model: one integer per lane through the steps; a source outside its row adds 0 (bound_ctrl)."""
    current = list(values)
    for step in steps:
        if isinstance(step, ReadLastStep):
            current = [current[lane - lane % step.lanes + step.lanes - 1] for lane in range(WAVE_LANES)]
            continue
        before = current
        current = list(before)
        for lane in range(WAVE_LANES):
            source = step.control.source(lane)
            if step.writes(lane) and source is not None:
                current[lane] = before[lane] + before[source]
    return current


def prove_sum(plan: SumPlan) -> None:
    """Prove by linearity that every lane ends with each lane of its group exactly once, and no other lane.

    Lane i starts as the i-th digit of a number in base 256. No digit can carry: a plan has at most 7 steps and each
    at most doubles a digit.

    Raises:
        PlanError: a lane ends with anything else; the message names the lane and what it holds.
    """
    base = 256
    final = run_steps(plan.steps, [base**lane for lane in range(WAVE_LANES)])
    for lane, value in enumerate(final):
        counts = {source: value // base**source % base for source in range(WAVE_LANES)}
        group = lane - lane % plan.lanes
        expected = {source: int(group <= source < group + plan.lanes) for source in range(WAVE_LANES)}
        if counts != expected:
            wrong = next(source for source in counts if counts[source] != expected[source])
            raise PlanError(
                f"sum over {plan.lanes} lanes: expected lane {lane} to hold lane {wrong} {expected[wrong]} times, "
                f"got {counts[wrong]} times"
            )
