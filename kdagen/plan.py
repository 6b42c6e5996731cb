"""What is chosen: (spec, target, tuning) -> a frozen Plan, by pure arithmetic.

One workgroup owns one row and head, so that the conv window is shifted by its only reader. The threads of a
workgroup are used twice: in the prologue thread t owns two neighbouring channels of section t / pairs (q, k, v or the
gates); in the recurrence 16 lanes own one row of the state, four neighbouring columns at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdagen.dpp import ROW_LANES, Control, HalvingPlan, SumPlan, plan_halving, plan_sum, row_newbcast
from kdagen.errors import PlanError
from kdagen.spec import KernelSpec
from kdagen.target import Feature, Target
from kdagen.tuning import DEFAULT_TUNING, Tuning

SECTIONS = 4
"""q, k, v and the gates."""
CHANNELS_PER_THREAD = 2
"""Two bf16 channels are one 4-byte access."""
VECTOR = 4
"""State columns per access: 4 fp32, 16 bytes."""
NON_STATE_VGPRS = 52
"""Registers beside the slice: q, k, decay (24), one row's dots and delta, the output rows and the addresses.

48 left two registers too few on sm_90 (nvcc 13.0: 32 of state in 80 registers spill 8 bytes)."""
BARRIER_BYTES = 8
"""Of a barrier that counts the bytes that arrive in LDS."""
ATTEMPT_BYTES = 4
"""Of the number of the attempt at the copy into LDS."""
COPY_ALIGNMENT = 128
"""Bytes that the destination of a bulk copy is aligned to."""
UNROLL_VGPRS = 128
"""Registers per lane from which batches of rows overlap. On sm_90, 80 spill (nvcc 13.0)."""


@dataclass(frozen=True)
class Plan:
    """Numbers a template prints; everything else is derived from them.

    Attributes:
        tuning: what was chosen.
        threads: threads of a workgroup.
        waves: waves of a workgroup.
        pairs: channel pairs of a section, one per thread.
        lanes_per_row: lanes that share a row of the state and its two dot products: a DPP row.
        rows_per_lane: rows that one lane holds a part of.
        rows_together: rows of a lane that are reduced at once.
        parts: 16-byte accesses per lane and row.
        row_sum: the reduction over the lanes of a row; there are as many row groups, so it also sums their partials.
        rows_sum: the reduction of rows_together rows at once.
        tell_row: the way back: the control by which every lane of a row reads each reduced row's first lane.
        lds_alignment: bytes that a workgroup's LDS is aligned to, and its size before the slice is a multiple of.
        lds_bytes: LDS of a workgroup.
        max_vgprs: registers per lane at the wanted occupancy.
    """

    tuning: Tuning
    threads: int
    waves: int
    pairs: int
    lanes_per_row: int
    rows_per_lane: int
    rows_together: int
    parts: int
    row_sum: SumPlan
    rows_sum: HalvingPlan
    tell_row: tuple[Control, ...]
    lds_alignment: int
    lds_bytes: int
    max_vgprs: int

    @property
    def unrolls_batches(self) -> bool:
        """Whether all rows of a lane are in flight: registers cannot be indexed, and it takes many."""
        return not self.tuning.slice_in_lds or self.max_vgprs >= UNROLL_VGPRS

    def __str__(self) -> str:
        return (
            f"{self.threads} threads, {self.waves} waves, {self.lanes_per_row} lanes a row, "
            f"{self.rows_per_lane} rows a lane, {self.lds_bytes} B LDS, at most {self.max_vgprs} VGPRs"
        )


def make_plan(spec: KernelSpec, target: Target, tuning: Tuning) -> Plan:
    """The launch plan of a kernel.

    Raises:
        PlanError: the tuning does not fit the target; the message names the field.
    """
    _check(tuning, target)
    dim = spec.head_dim
    pairs = dim // CHANNELS_PER_THREAD
    threads = SECTIONS * pairs
    lanes = ROW_LANES
    if pairs % target.wave_size:
        raise PlanError(
            f"target: expected a wave size that divides the {pairs} channel pairs of a section, so that a wave works "
            f"on one section, got {target.wave_size} ({target.name})"
        )
    parts = dim // (lanes * VECTOR)
    team = tuning.workgroups_per_head
    rows_per_lane = dim // team * lanes // threads
    rows_together = min(tuning.rows_together, rows_per_lane)
    in_lds = tuning.slice_in_lds
    slice_vgprs = (rows_together if in_lds else rows_per_lane) * parts * VECTOR
    max_vgprs = target.vgprs // tuning.min_waves_per_simd
    if slice_vgprs + NON_STATE_VGPRS > max_vgprs:
        raise PlanError(
            f"min_waves_per_simd: expected room for {slice_vgprs} state registers and {NON_STATE_VGPRS} others, "
            f"got {max_vgprs} per lane at {tuning.min_waves_per_simd} waves"
        )
    row_groups = threads // lanes
    lds_alignment = COPY_ALIGNMENT if in_lds else 4 * VECTOR
    shared_bytes = 4 * (SECTIONS * dim + dim + team * row_groups) + BARRIER_BYTES * tuning.has_team
    if in_lds:
        shared_bytes += BARRIER_BYTES + ATTEMPT_BYTES
    lds_bytes = -(-shared_bytes // lds_alignment) * lds_alignment + (spec.state_bytes // team if in_lds else 0)
    if lds_bytes > target.lds_bytes:
        raise PlanError(f"lds_bytes: expected at most {target.lds_bytes} on {target.name}, got {lds_bytes}")
    return Plan(
        tuning=tuning,
        threads=threads,
        waves=threads // target.wave_size,
        pairs=pairs,
        lanes_per_row=lanes,
        rows_per_lane=rows_per_lane,
        rows_together=rows_together,
        parts=parts,
        row_sum=plan_sum(lanes),
        rows_sum=plan_halving(rows_together),
        tell_row=tuple(row_newbcast(i * lanes // rows_together) for i in range(rows_together)),
        lds_alignment=lds_alignment,
        lds_bytes=lds_bytes,
        max_vgprs=max_vgprs,
    )


def _check(tuning: Tuning, target: Target) -> None:
    """The fields of a tuning that need no plan to be judged."""
    if not isinstance(tuning.min_waves_per_simd, int) or tuning.min_waves_per_simd < 1:
        raise PlanError(f"min_waves_per_simd: expected an int of 1 or more, got {tuning.min_waves_per_simd!r}")
    if tuning.workgroups_per_head not in (1, 2, 4, 8):
        raise PlanError(f"workgroups_per_head: expected 1, 2, 4 or 8, got {tuning.workgroups_per_head!r}")
    if not isinstance(tuning.lookahead, int) or tuning.lookahead < 0:
        raise PlanError(f"lookahead: expected an int of 0 or more, got {tuning.lookahead!r}")
    if tuning.lookahead and not tuning.prefetches_slot:
        raise PlanError(f"lookahead: expected 0 without a prefetch of the slot, got {tuning.lookahead}")
    if not isinstance(tuning.inputs_ahead, bool):
        raise PlanError(f"inputs_ahead: expected True or False, got {tuning.inputs_ahead!r}")
    if tuning.inputs_ahead and not tuning.lookahead:
        raise PlanError("inputs_ahead: expected False without a lookahead, got True")
    for field, used, feature in (
        ("workgroups_per_head", tuning.has_team, Feature.CLUSTERS),
        ("slice_in", tuning.slice_in_lds, Feature.BULK_COPIES),
        ("prefetch", tuning.prefetches, Feature.EARLY_START),
    ):
        if used and feature not in target.features:
            got = getattr(tuning, field)
            raise PlanError(
                f"{field}: expected {getattr(DEFAULT_TUNING, field)} on {target.name}, which has no {feature.value}, "
                f"got {got}"
            )
