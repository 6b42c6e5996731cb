"""Profiles for tests: of hand-written instructions, and of the generated kernel of 12 heads with its text changed."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from kdagen import inspect_code, toolchain
from kdagen.errors import ToolchainError
from kdagen.machine_code import Profile
from kdagen.target import CDNA
from kdagen.variants import variants_of

ARCH = "gfx942"
(VARIANT,) = variants_of(12)


@functools.cache
def _compiler() -> toolchain.Compiler | str:
    try:
        return toolchain.find_compiler("hip", CDNA.archs)
    except ToolchainError as error:
        return str(error)


def compiler() -> toolchain.Compiler:
    """The HIP compiler; without one the test is skipped."""
    found = _compiler()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def written(*code: str, **figures: object) -> Profile:
    """A profile of hand-written lines, with figures of a kernel that breaks no rule where they are not given."""
    kept = Profile(
        variant="by_hand",
        instance="bounded-norm-sd",
        arch=ARCH,
        vgprs=120,
        agprs=0,
        sgprs=40,
        vgpr_spills=0,
        sgpr_spills=0,
        scratch_bytes=0,
        lds_bytes=2624,
        workgroup_threads=256,
        code_bytes=4000,
        state_bytes=65536,
        cycles=1500,
        undefined=(),
        code=code,
    )
    return dataclasses.replace(kept, **figures)


def mutated(changes: dict[str, str], instance: str = "bounded-norm-sd") -> Profile:
    """The profile of one instance of the generated kernel of 12 heads, each text of `changes` replaced."""
    text = inspect_code.committed_text(VARIANT)
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the source"
        text = text.replace(old, new)
    profiles = inspect_code.profile(compiler(), inspect_code.Job(VARIANT, ARCH, text))
    return next(profile for profile in profiles if profile.instance == instance)
