"""Runs a generated kernel's own text on the CPU, lane by lane in wave64 lock step, with every memory access checked."""

from kdagen.emulator.compile import compile_source
from kdagen.emulator.decode import run_decode
from kdagen.emulator.launch import EmulatedKernel, EmulatorOptions, Fault, FaultKind, Interval, LaunchReport

__all__ = [
    "EmulatedKernel",
    "EmulatorOptions",
    "Fault",
    "FaultKind",
    "Interval",
    "LaunchReport",
    "compile_source",
    "run_decode",
]
