"""Launches a compiled kernel on memory that is declared interval by interval, and reports every fault."""

from __future__ import annotations

import ctypes
import enum
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kdagen.errors import EmulatorError

if TYPE_CHECKING:
    import torch


class FaultKind(enum.Enum):
    """What the emulator finds that a GPU would hide; in the order of FaultKind in runtime.h."""

    RACE = "race"
    UNINITIALISED_LDS = "uninitialised LDS"
    LDS_BOUNDS = "LDS out of bounds"
    GLOBAL_BOUNDS = "memory out of bounds"
    READ_ONLY = "write to an input"
    DIVERGENCE = "divergence"
    NOT_UNIFORM = "not uniform"
    MISSING_FENCE = "missing fence"
    BAD_DPP = "bad DPP control"


@dataclass(frozen=True)
class Fault:
    """The first fault of a kind, with how often that kind was found."""

    kind: FaultKind
    message: str
    count: int


@dataclass(frozen=True)
class LaunchReport:
    """What one launch did; `launch_status` is what the launcher returned, 0 for success."""

    faults: tuple[Fault, ...]
    workgroups: int
    seconds: float
    launch_status: int


@dataclass(frozen=True)
class EmulatorOptions:
    """Settings of one launch.

    Attributes:
        math: how exp2, log2, rcp and rsq err: "exact", "low", "high" (by math_ulps) or "random" (within them).
        math_ulps: their error bound in units of the last place; AMD states 1.
        math_seed: chooses the errors of "random".
        lane_order_seed: None runs lanes and workgroups in order; a number shuffles them, each number differently.
        threads: host threads; None takes every core.
        allow_inactive_lanes: lanes that have returned count as switched off, instead of missing from a DPP or barrier.
    """

    math: str = "random"
    math_ulps: float = 1.0
    math_seed: int = 0
    lane_order_seed: int | None = None
    threads: int | None = None
    allow_inactive_lanes: bool = False


DEFAULT_OPTIONS = EmulatorOptions()


@dataclass(frozen=True)
class Interval:
    """Memory that a launch may touch: [begin, end) addresses; races are found in units of `granule` bytes."""

    name: str
    begin: int
    end: int
    writable: bool
    granule: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor, *, writable: bool) -> Interval:
        """All of a contiguous tensor."""
        assert tensor.is_contiguous(), f"{name}: expected a contiguous tensor"
        size = tensor.element_size()
        return Interval(name, tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size, writable, size)


class _CInterval(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("granule", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    ]


class _COptions(ctypes.Structure):
    _fields_ = [
        ("math", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("math_ulps", ctypes.c_float),
        ("allow_inactive_lanes", ctypes.c_int32),
        ("math_seed", ctypes.c_uint64),
        ("lane_order_seed", ctypes.c_int64),
        ("lds_bytes", ctypes.c_int64),
    ]


class _CFault(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("count", ctypes.c_int64), ("message", ctypes.c_char * 320)]


class _CReport(ctypes.Structure):
    _fields_ = [("workgroups", ctypes.c_int64), ("faults", ctypes.c_int32), ("fault", _CFault * len(FaultKind))]


_MATH = {"exact": 0, "low": 1, "high": 2, "random": 3}


class EmulatedKernel:
    """A generated source compiled for the emulator."""

    def __init__(self, library: Path, runtime: Path, lds_bytes: int) -> None:
        # Not RTLD_GLOBAL: each module must find the runtime it was linked to, and a process may hold two.
        self._runtime = ctypes.CDLL(str(runtime))
        self._library = ctypes.CDLL(str(library))
        self._lds_bytes = lds_bytes

    def launch(
        self,
        symbol: str,
        params: ctypes.Structure,
        intervals: Iterable[Interval],
        options: EmulatorOptions = DEFAULT_OPTIONS,
    ) -> LaunchReport:
        """Call the extern "C" launcher `symbol` of the source; `params` is laid out as its own KdaDecodeParams.

        Raises:
            EmulatorError: the source has no such launcher, the options are wrong or intervals overlap.
        """
        if options.math not in _MATH:
            raise EmulatorError(f"math: expected one of {', '.join(_MATH)}, got {options.math!r}")
        try:
            launcher = getattr(self._library, symbol)
        except AttributeError:
            raise EmulatorError(f'symbol: expected an extern "C" launcher of the source, got {symbol!r}') from None
        declared = _merged(intervals)
        c_intervals = (_CInterval * len(declared))(
            *(_CInterval(i.begin, i.end, i.writable, i.granule, i.name.encode()) for i in declared)
        )
        c_options = _COptions(
            _MATH[options.math],
            options.threads or len(os.sched_getaffinity(0)),
            options.math_ulps,
            options.allow_inactive_lanes,
            options.math_seed,
            -1 if options.lane_order_seed is None else options.lane_order_seed,
            self._lds_bytes,
        )
        report = _CReport()
        start = time.monotonic()
        status = self._runtime.kdaemu_run(
            launcher,
            ctypes.byref(params),
            c_intervals,
            ctypes.c_int64(len(declared)),
            ctypes.byref(c_options),
            ctypes.byref(report),
        )
        kinds = list(FaultKind)
        faults = tuple(Fault(kinds[f.kind], f.message.decode(), f.count) for f in report.fault[: report.faults])
        return LaunchReport(faults, report.workgroups, time.monotonic() - start, status)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted; the same inputs named twice become one; anything that may be written overlaps nothing."""
    merged: list[Interval] = []
    for interval in sorted((i for i in intervals if i.begin < i.end), key=lambda i: (i.begin, i.end)):
        last = merged[-1] if merged else None
        if last is None or interval.begin >= last.end:
            merged.append(interval)
        elif interval.writable or last.writable:
            raise EmulatorError(f"intervals: expected {last.name} and {interval.name} apart, got an overlap")
        elif interval.end > last.end:
            merged[-1] = Interval(last.name, last.begin, interval.end, False, last.granule)
    return merged
