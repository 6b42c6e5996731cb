"""What is chosen: (spec, target, tuning) -> a frozen Plan, by pure arithmetic.

One workgroup owns one row and head, so that the conv window is shifted by its only reader. The threads of a
workgroup are used twice: in the prologue thread t owns two neighbouring channels of section t / pairs (q, k, v or the
gates); in the recurrence 16 lanes own one row of the state, four neighbouring columns at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdagen.dpp import ROW_LANES, SumPlan, plan_sum
from kdagen.errors import PlanError
from kdagen.spec import KernelSpec
from kdagen.target import Target

SECTIONS = 4
"""q, k, v and the gates."""
CHANNELS_PER_THREAD = 2
"""Two bf16 channels are one 4-byte access."""
VECTOR = 4
"""State columns per access: 4 fp32, 16 bytes."""
NON_STATE_VGPRS = 48
"""Registers beside the slice: q, k, decay (24), one row's dots and delta, the output rows and the addresses."""


@dataclass(frozen=True)
class Tuning:
    """What a table row may choose.

    Attributes:
        min_waves_per_simd: occupancy the compiler must keep, which caps the registers of a lane.
    """

    min_waves_per_simd: int = 4


DEFAULT_TUNING = Tuning()


@dataclass(frozen=True)
class Plan:
    """Numbers a template prints; everything else is derived from them.

    Attributes:
        threads: threads of a workgroup.
        waves: waves of a workgroup.
        pairs: channel pairs of a section, one per thread.
        lanes_per_row: lanes that share a row of the state and its two dot products: a DPP row.
        rows_per_wave: consecutive state rows (v channels) that one wave owns.
        rows_at_once: rows that one wave's access covers.
        rows_per_lane: rows that one lane holds a part of.
        parts: 16-byte accesses per lane and row.
        row_sum: the reduction over the lanes of a row; there are as many row groups, so it also sums their partials.
        lds_bytes: LDS of a workgroup.
        max_vgprs: registers per lane at the wanted occupancy.
        min_waves_per_simd: waves resident on one SIMD.
    """

    threads: int
    waves: int
    pairs: int
    lanes_per_row: int
    rows_per_wave: int
    rows_at_once: int
    rows_per_lane: int
    parts: int
    row_sum: SumPlan
    lds_bytes: int
    max_vgprs: int
    min_waves_per_simd: int

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
    rows_per_lane = dim * lanes // threads
    slice_vgprs = rows_per_lane * parts * VECTOR
    waves = tuning.min_waves_per_simd
    if not isinstance(waves, int) or waves < 1:
        raise PlanError(f"min_waves_per_simd: expected an int of 1 or more, got {waves!r}")
    max_vgprs = target.vgprs // waves
    if slice_vgprs + NON_STATE_VGPRS > max_vgprs:
        raise PlanError(
            f"min_waves_per_simd: expected room for {slice_vgprs} state registers and {NON_STATE_VGPRS} others, "
            f"got {max_vgprs} per lane at {waves} waves"
        )
    row_groups = threads // lanes
    lds_bytes = 4 * (SECTIONS * dim + dim + row_groups)
    if lds_bytes > target.lds_bytes:
        raise PlanError(f"lds_bytes: expected at most {target.lds_bytes} on {target.name}, got {lds_bytes}")
    return Plan(
        threads=threads,
        waves=threads // target.wave_size,
        pairs=pairs,
        lanes_per_row=lanes,
        rows_per_wave=dim // (threads // target.wave_size),
        rows_at_once=target.wave_size // lanes,
        rows_per_lane=rows_per_lane,
        parts=parts,
        row_sum=plan_sum(lanes),
        lds_bytes=lds_bytes,
        max_vgprs=max_vgprs,
        min_waves_per_simd=waves,
    )
