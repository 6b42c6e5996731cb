"""What a row of the table may choose: where the state waits, when the next kernel starts, what is asked for early."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SliceIn(enum.Enum):
    """Where a workgroup's part of the state waits for the recurrence."""

    REGISTERS = "registers"
    LDS = "LDS"


class NextStarts(enum.Enum):
    """When the kernel behind may take its place beside this one, on a target where kernels overlap."""

    AT_END = "at the end"
    AT_ONCE = "at once"
    AFTER_PROLOGUE = "after the prologue"


class Prefetch(enum.Enum):
    """What a kernel that took its place early asks into the L2 while the one before still runs."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    SLOT = "slot"
    """The inputs and all that the row's slot holds."""


@dataclass(frozen=True)
class Tuning:
    """What a table row may choose.

    Attributes:
        min_waves_per_simd: occupancy the compiler must keep, which caps the registers of a lane.
        workgroups_per_head: workgroups that share a row and head, each with as many rows of the state: 1, 2, 4 or 8.
        rows_together: state rows of a lane whose dot products are reduced at once, at most all: 1, 2, 4, 8 or 16.
        slice_in: where the state waits.
        next_starts: when the kernel behind may start.
        prefetch: what is asked for while waiting for the kernel before.
        lookahead: workgroups ahead in the launch whose slot is prefetched, 0 for none; needs prefetch SLOT.
    """

    min_waves_per_simd: int = 4
    workgroups_per_head: int = 1
    rows_together: int = 8
    slice_in: SliceIn = SliceIn.REGISTERS
    next_starts: NextStarts = NextStarts.AT_END
    prefetch: Prefetch = Prefetch.NOTHING
    lookahead: int = 0

    def __str__(self) -> str:
        parts = [
            f"at least {_counted(self.min_waves_per_simd, 'wave')} per SIMD",
            f"{_counted(self.workgroups_per_head, 'workgroup')} a head",
            f"{_counted(self.rows_together, 'row')} of a lane reduced together",
            f"state in {self.slice_in.value}",
            f"next kernel starts {self.next_starts.value}",
        ]
        if self.prefetches:
            ahead = f" of {_counted(self.lookahead, 'workgroup')} ahead" if self.lookahead else ""
            parts.append(f"prefetches {self.prefetch.value}{ahead}")
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
        """Whether anything is prefetched while waiting."""
        return self.prefetch is not Prefetch.NOTHING

    @property
    def prefetches_slot(self) -> bool:
        """Whether the slot is prefetched, too."""
        return self.prefetch is Prefetch.SLOT

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
