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


@dataclass(frozen=True)
class HalvingStep:
    """Lanes and their partners, the lanes that the control reads, share out the sums that they work on.

    Attributes:
        control: whom a lane reads.
        bit: bit of the lane number that partners differ in: a lane that has it keeps the upper half of its sums.
        left: sums that a lane keeps; 0 where it has one left, which both complete.
    """

    control: Control
    bit: int
    left: int


@dataclass(frozen=True)
class HalvingPlan:
    """Sums of `sums` values each lane holds, over rows of 16 lanes: lane l ends with sum l * sums // 16."""

    sums: int
    steps: tuple[HalvingStep, ...]


def plan_halving(sums: int) -> HalvingPlan:
    """Plan `sums` (a power of two, 1 to 16) sums over a row at once, proven by the lane model.

    With as many lanes as sums the work is a transposition: 15 adds for 16 sums, where one by one they take 64.

    Raises:
        PlanError: `sums` is not one of 1, 2, 4, 8, 16.
    """
    if sums not in (1, 2, 4, 8, 16):
        raise PlanError(f"sums: expected a power of two from 1 to {ROW_LANES}, got {sums!r}")
    controls = (ROW_MIRROR, ROW_HALF_MIRROR, quad_perm(2, 3, 0, 1), quad_perm(1, 0, 3, 2))
    bits = (8, 4, 2, 1)
    steps = (HalvingStep(c, bit, sums * bit // ROW_LANES) for c, bit in zip(controls, bits, strict=True))
    plan = HalvingPlan(sums, tuple(steps))
    prove_halving(plan)
    return plan


def run_halving(plan: HalvingPlan, values: Sequence[Sequence[int]]) -> list[list[int]]:
    """The lane model: `sums` integers per lane through the steps."""
    current = [list(lane_values) for lane_values in values]
    for step in plan.steps:
        before = current
        current = []
        for lane in range(WAVE_LANES):
            source = step.control.source(lane)
            assert source is not None
            high, partner_high = bool(lane & step.bit), bool(source & step.bit)
            own, other, left = before[lane], before[source], step.left
            if left == 0:
                current.append([own[0] + other[0]])
                continue
            keep = own[left:] if high else own[:left]
            sent = other[:left] if partner_high else other[left:]
            current.append([a + b for a, b in zip(keep, sent, strict=True)])
    return current


def prove_halving(plan: HalvingPlan) -> None:
    """Prove by linearity that every lane ends with each lane of its row exactly once, of its own sum and no other.

    Value v of lane i starts as digit 16 * v + i % 16 of a number in base 256, in a row alone; no digit can carry.

    Raises:
        PlanError: a lane ends with anything else.
    """
    for row in range(0, WAVE_LANES, ROW_LANES):
        start = [
            [
                256 ** (ROW_LANES * v + lane % ROW_LANES) if lane - lane % ROW_LANES == row else 0
                for v in range(plan.sums)
            ]
            for lane in range(WAVE_LANES)
        ]
        for lane, held in enumerate(run_halving(plan, start)):
            own = lane % ROW_LANES * plan.sums // ROW_LANES
            expected = sum(256 ** (ROW_LANES * own + i) for i in range(ROW_LANES))
            if held != [expected if lane - lane % ROW_LANES == row else 0]:
                raise PlanError(f"{plan.sums} sums over a row: expected lane {lane} to end with sum {own}, got another")


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
