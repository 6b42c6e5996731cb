"""Where a kernel runs: one frozen row per target family."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kdagen.errors import SpecError


class Feature(enum.Enum):
    """What hardware of some targets can do, and some tunings need."""

    CLUSTERS = "clusters of workgroups"
    BULK_COPIES = "bulk copies into LDS"
    EARLY_START = "kernels that start before the one before has ended"


@dataclass(frozen=True)
class Target:
    """A family of architectures that share one primitives file.

    Attributes:
        name: token of the family, last in a variant's name.
        archs: architectures the family is built for, oldest first.
        wave_size: lanes that execute in lock step.
        lds_bytes: on-chip memory one workgroup may use (the least over archs).
        vgprs: vector registers per lane of a SIMD (a warp scheduler), shared by the waves resident on it.
        primitives: template with the target's primitives, below templates/targets/.
        include: header that declares the runtime's launch function.
        error_text: the runtime's function from a status to its text.
        compiler: kind of compiler, as kdagen.toolchain names it.
        suffix: file suffix of generated sources.
        flags: what the compiler is told beyond the arch.
        features: what its primitives have beyond those that every target has.
    """

    name: str
    archs: tuple[str, ...]
    wave_size: int
    lds_bytes: int
    vgprs: int
    primitives: str
    include: str
    error_text: str
    compiler: str
    suffix: str
    flags: tuple[str, ...]
    features: tuple[Feature, ...] = ()


CDNA = Target(
    name="cdna",
    # gfx942: MI300X, MI325X. gfx950: MI350X, MI355X. gfx90a (MI250X) compiles from the same text.
    archs=("gfx90a", "gfx942", "gfx950"),
    wave_size=64,
    lds_bytes=64 * 1024,
    vgprs=512,
    primitives="cdna.hip.j2",
    include="<hip/hip_runtime_api.h>",
    error_text="hipGetErrorString",
    compiler="hip",
    suffix=".hip",
    # The text says which fp32 operations are packed. Left on, the SLP vectoriser also packs the adds of two reductions:
    # 2 v_mov_b32_dpp and a v_pk_add_f32 in place of 2 v_add_f32_dpp (gfx942, clang 22: 838 instructions against 815).
    flags=("-std=c++17", "-O3", "-fno-slp-vectorize"),
)

CUDA = Target(
    name="cuda",
    archs=("sm_90",),  # H100, H200
    wave_size=32,
    lds_bytes=227 * 1024,
    vgprs=64 * 1024 // (4 * 32),  # a register file of 64 K words, four schedulers, 32 lanes
    primitives="cuda.cu.j2",
    include="<cuda_runtime.h>",
    error_text="cudaGetErrorString",
    compiler="cuda",
    suffix=".cu",
    flags=("-std=c++17", "-O3"),
    features=tuple(Feature),
)

TARGETS: tuple[Target, ...] = (CDNA, CUDA)


def target_of(arch: str) -> Target:
    """The target that is built for an architecture; raises SpecError that lists the known ones."""
    for target in TARGETS:
        if arch in target.archs:
            return target
    known = ", ".join(known for target in TARGETS for known in target.archs)
    raise SpecError(f"arch: expected one of {known}, got {arch!r}")


def find_target(name: str) -> Target:
    """The target with this name; raises SpecError that lists the known ones."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise SpecError(f"target: expected one of {', '.join(t.name for t in TARGETS)}, got {name!r}")
