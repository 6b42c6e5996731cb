"""Where a kernel runs: one frozen row per target family."""

from __future__ import annotations

from dataclasses import dataclass

from kdagen.errors import SpecError


@dataclass(frozen=True)
class Target:
    """A family of architectures that share one primitives file.

    Attributes:
        name: token of the family, last in a variant's name.
        archs: architectures the family is built for, oldest first.
        wave_size: lanes that execute in lock step.
        lds_bytes: on-chip memory one workgroup may use (the least over archs).
        vgprs: vector registers per lane and SIMD, arch and accumulation registers together.
        primitives: template with the target's primitives, below templates/targets/.
        suffix: file suffix of generated sources.
        flags: what the compiler is told beyond the arch.
    """

    name: str
    archs: tuple[str, ...]
    wave_size: int
    lds_bytes: int
    vgprs: int
    primitives: str
    suffix: str
    flags: tuple[str, ...]


CDNA = Target(
    name="cdna",
    # gfx942: MI300X, MI325X. gfx950: MI350X, MI355X. gfx90a (MI250X) compiles from the same text.
    archs=("gfx90a", "gfx942", "gfx950"),
    wave_size=64,
    lds_bytes=64 * 1024,
    vgprs=512,
    primitives="cdna.hip.j2",
    suffix=".hip",
    # The text says which fp32 operations are packed. Left on, the SLP vectoriser also packs the adds of two reductions:
    # 2 v_mov_b32_dpp and a v_pk_add_f32 in place of 2 v_add_f32_dpp (gfx942, clang 22: 838 instructions against 815).
    flags=("-std=c++17", "-O3", "-fno-slp-vectorize"),
)

TARGETS: tuple[Target, ...] = (CDNA,)


def find_target(name: str) -> Target:
    """The target with this name; raises SpecError that lists the known ones."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise SpecError(f"target: expected one of {', '.join(t.name for t in TARGETS)}, got {name!r}")
