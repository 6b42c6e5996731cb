"""What a row of the table may choose: who shares a head, where the state waits, what is asked for early."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SliceIn(enum.Enum):
    """Where a workgroup's part of the state waits for the recurrence."""

    REGISTERS = "registers"
    LDS = "LDS"


class Prefetch(enum.Enum):
    """What a kernel asks into the L2 while the one before still runs: with any but NOTHING it takes its place early."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    SLOT = "slot"
    """The inputs and all that the row's slot holds."""
    KEPT_SLOT = "slot, evicted last"
    """The same; the state is evicted last from the L2, until it is stored."""


LEADERS = 132
"""Workgroups that prefetch for themselves where the others are prefetched for: the first on each multiprocessor of an
H200. With a lookahead of 99, 99 leaders took 26.9 us and 132 took 26.6 for 64 rows of 12 heads, 201.5 and 200.3 for 64
of 96 (H200, 2026-12-02)."""


@dataclass(frozen=True)
class Tuning:
    """What a table row may choose.

    Attributes:
        min_waves_per_simd: occupancy the compiler must keep, which caps the registers of a lane.
        workgroups_per_head: workgroups that share a row and head, each with as many rows of the state: 1, 2, 4 or 8.
        rows_together: state rows of a lane whose dot products are reduced at once, at most all: 1, 2, 4, 8 or 16.
        slice_in: where the state waits.
        prefetch: what is asked for while waiting for the kernel before.
        lookahead: workgroups ahead in the launch whose slot is prefetched, 0 for none; needs a prefetch of the slot.
        inputs_ahead: whether their inputs are, too.
    """

    min_waves_per_simd: int = 4
    workgroups_per_head: int = 1
    rows_together: int = 8
    slice_in: SliceIn = SliceIn.REGISTERS
    prefetch: Prefetch = Prefetch.NOTHING
    lookahead: int = 0
    inputs_ahead: bool = False

    def __str__(self) -> str:
        parts = [
            f"at least {_counted(self.min_waves_per_simd, 'wave')} per SIMD",
            f"{_counted(self.workgroups_per_head, 'workgroup')} a head",
            f"{_counted(self.rows_together, 'row')} of a lane reduced together",
            f"state in {self.slice_in.value}",
        ]
        if self.prefetches:
            ahead = f" of {_counted(self.lookahead, 'workgroup')} ahead" if self.lookahead else ""
            what = "inputs and slot" if self.inputs_ahead else "slot" if self.prefetches_slot else "inputs"
            parts.append(f"prefetches {what}{ahead}")
        if self.keeps_slot:
            parts.append("has its state evicted last")
        return ", ".join(parts)

    @property
    def slice_in_lds(self) -> bool:
        """Whether the state waits in LDS."""
        return self.slice_in is SliceIn.LDS

    @property
    def has_team(self) -> bool:
        """Whether workgroups share a head."""
        return self.workgroups_per_head > 1

    @property
    def prefetches(self) -> bool:
        """Whether anything is prefetched while waiting, and so whether kernels overlap."""
        return self.prefetch is not Prefetch.NOTHING

    @property
    def prefetches_slot(self) -> bool:
        """Whether the slot is prefetched, too."""
        return self.prefetch in (Prefetch.SLOT, Prefetch.KEPT_SLOT)

    @property
    def keeps_slot(self) -> bool:
        """Whether the prefetched state is evicted last."""
        return self.prefetch is Prefetch.KEPT_SLOT

    @property
    def leaders(self) -> int:
        """The first workgroups, which prefetch for themselves: at least those that no other looks ahead to."""
        return max(LEADERS, self.lookahead) if self.lookahead else 0

    @property
    def trusts_slot(self) -> bool:
        """Whether the slot read early is used before it is read again.

        It saves a small launch the latency of one load. Where later workgroups are prefetched for it gains nothing.
        """
        return self.prefetches_slot and not self.lookahead


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


DEFAULT_TUNING = Tuning()


@dataclass(frozen=True)
class Band:
    """The tuning of the batches up to a size.

    Attributes:
        most_work: rows times heads up to which it serves, inclusive; None for all that are larger than other bands'.
        tuning: what serves them.
        reason: why: device, date and figures, or what speaks for it without any.
    """

    most_work: int | None
    tuning: Tuning
    reason: str
