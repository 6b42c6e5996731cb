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
    """

    name: str
    archs: tuple[str, ...]
    wave_size: int
    lds_bytes: int
    vgprs: int
    primitives: str
    suffix: str


CDNA = Target(
    name="cdna",
    # gfx942: MI300X, MI325X. gfx950: MI350X, MI355X. gfx90a (MI250X) compiles from the same text.
    archs=("gfx90a", "gfx942", "gfx950"),
    wave_size=64,
    lds_bytes=64 * 1024,
    vgprs=512,
    primitives="cdna.hip.j2",
    suffix=".hip",
)

TARGETS: tuple[Target, ...] = (CDNA,)


def find_target(name: str) -> Target:
    """The target with this name; raises SpecError that lists the known ones."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise SpecError(f"target: expected one of {', '.join(t.name for t in TARGETS)}, got {name!r}")
