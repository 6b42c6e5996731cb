"""What `kdagen inspect` prints: profiles as tables, two sets of profiles compared, and the audit's verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kdagen.audit import RULES, Broken
from kdagen.machine_code import CLASSES, Profile
from kdagen.table import aligned

FIGURES: tuple[tuple[str, str, Callable[[Profile], int]], ...] = (
    ("vgprs", "VGPRs", lambda p: p.vgprs),
    ("agprs", "AGPRs", lambda p: p.agprs),
    ("sgprs", "SGPRs", lambda p: p.sgprs),
    ("lds_bytes", "LDS B", lambda p: p.lds_bytes),
    ("spills", "spills", lambda p: p.vgpr_spills + p.sgpr_spills),
    ("scratch_bytes", "scratch B", lambda p: p.scratch_bytes),
    ("waves_per_simd", "waves/SIMD", lambda p: p.waves_per_simd),
    ("workgroups_per_cu", "groups/CU", lambda p: p.workgroups_per_cu),
    ("state_bytes_in_flight_per_cu", "state B/CU", lambda p: p.state_bytes_in_flight),
    ("code_bytes", "code B", lambda p: p.code_bytes),
    ("state_loads_before_wait", "loads<wait", lambda p: p.state_loads_before_wait),
    ("recurrence_waits", "waits in rec.", lambda p: p.recurrence_waits),
    ("cycles", "mca cycles", lambda p: p.cycles),
    ("instructions", "instructions", lambda p: len(p.lines)),
)
"""Figures of a profile: key in the JSON, heading in the table, value."""

LEGEND = """\
VGPRs per lane, with AGPRs. loads<wait: state loads that every wave has issued when it first waits on vector memory.
waits in rec.: waits on vector memory from the barrier before the first state store to the last store. mca cycles: one
pass through the text, no branch taken, by llvm-mca's model of the arch. Memory: bytes per lane, then cache policy."""


def figures(profile: Profile) -> dict[str, int]:
    """Every figure of a profile, by one flat name: those of FIGURES, `class <name>` and `memory <kind>`."""
    return {
        **{key: value(profile) for key, _, value in FIGURES},
        **{f"class {name}": count for name, count in profile.classes.items()},
        **{f"memory {kind}": count for kind, count in profile.memory.items()},
    }


def tables(profiles: Sequence[Profile]) -> str:
    """Three tables with a row per instance: registers to cycles, instructions by class, vector memory by kind."""
    names = ("variant", "instance", "arch")
    kinds = sorted({kind for profile in profiles for kind in profile.memory})
    classes = [name for name, _ in CLASSES]
    parts = [
        _table((*names, *(heading for _, heading, _ in FIGURES)), profiles, lambda p: [f(p) for _, _, f in FIGURES]),
        _table((*names, *classes), profiles, lambda p: [p.classes[name] for name in classes]),
        _table((*names, *kinds), profiles, lambda p: [p.memory.get(kind, 0) for kind in kinds]),
    ]
    return "\n\n".join([*parts, LEGEND])


def _table(header: Sequence[str], profiles: Sequence[Profile], cells: Callable[[Profile], list[int]]) -> str:
    rows = [(p.variant, p.instance, p.arch, *(f"{cell:,}" for cell in cells(p))) for p in profiles]
    return aligned(header, rows, right=range(3, len(header)))


def as_json(profiles: Sequence[Profile], broken: Sequence[Broken], compiler: str) -> dict[str, Any]:
    """The figures of many profiles, the compiler's version and the broken rules, ready for json.dumps."""
    rows = [
        {
            "variant": profile.variant,
            "instance": profile.instance,
            "arch": profile.arch,
            **{key: value(profile) for key, _, value in FIGURES},
            "classes": profile.classes,
            "memory": profile.memory,
        }
        for profile in profiles
    ]
    return {"compiler": compiler, "instances": rows, "broken": [asdict(rule) for rule in broken]}


def difference(before: Sequence[Profile], after: Sequence[Profile]) -> list[tuple[str, str, str, str, int, int]]:
    """Every figure that differs: variant, instance, arch, figure, before, after; a figure that one lacks is 0 there."""
    old = {(p.variant, p.instance, p.arch): figures(p) for p in before}
    changes = []
    for profile in after:
        key = (profile.variant, profile.instance, profile.arch)
        was, now = old.get(key, {}), figures(profile)
        for name in dict.fromkeys((*now, *was)):
            if was.get(name, 0) != now.get(name, 0):
                changes.append((*key, name, was.get(name, 0), now.get(name, 0)))
    return changes


def difference_table(changes: Sequence[tuple[str, str, str, str, int, int]], revision: str) -> str:
    """The changes as a table; one line that says so if there are none."""
    if not changes:
        return f"no figure differs from {revision}"
    rows = [(*names, f"{was:,}", f"{now:,}", f"{now - was:+,}") for *names, was, now in changes]
    return aligned(("variant", "instance", "arch", "figure", revision, "now", "change"), rows, right=(4, 5, 6))


def verdict(profiles: Sequence[Profile], broken: Sequence[Broken], compiler: str) -> str:
    """Every broken rule on a line of its own, and what was audited with which compiler."""
    lines = [str(rule) for rule in broken]
    count = f"{len(broken)} broken" if broken else "none broken"
    lines.append(f"audit: {len(RULES)} rules on {len(profiles)} instances: {count} ({compiler})")
    return "\n".join(lines)
