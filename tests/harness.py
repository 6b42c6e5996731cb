"""What the emulator tests share: a kernel by head count, plain op arguments, and one call graded by the oracle."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kdagen import emulator, grading, reference
from kdagen.bench_peers import copied as copied
from kdagen.paths import generated_dir
from kdagen.render import render
from kdagen.variants import VARIANTS, Variant, variants_of

ABSENT = 1021
"""A head count that no table will have."""

Arguments = dict[str, Any]


def cdna_variant(num_heads: int) -> Variant:
    """The kernel of a head count for CDNA, in the table or not."""
    (variant,) = variants_of(num_heads)
    return variant


@functools.cache
def emulated(num_heads: int) -> emulator.EmulatedKernel:
    """The kernel of a head count: the committed file where the table has it, else a rendering."""
    variant = cdna_variant(num_heads)
    source = generated_dir() / variant.file_name if variant in VARIANTS else render(variant)
    return emulator.compile_source(source, lds_bytes=variant.plan.lds_bytes)


def run(arguments: Arguments, num_heads: int, **options: Any) -> emulator.LaunchReport:
    """One launch on the emulator, which must find no fault; conv_state, state and out are updated in place."""
    report = emulator.run_decode(
        emulated(num_heads),
        cdna_variant(num_heads).launch_symbol,
        **arguments,
        options=emulator.EmulatorOptions(**options),
    )
    assert report.faults == (), report.faults
    assert report.launch_status == 0
    return report


def plain_arguments(
    num_heads: int, indices: list[int], slots: int, *, seed: int = 0, norm: bool = True, bound: float | None = -5.0
) -> Arguments:
    """Dense, finite, unit-scale op arguments with SD conv state and `out` full of NaN."""
    g = torch.Generator().manual_seed(seed)
    rows, channels = len(indices), num_heads * 128

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=g).to(dtype)

    bf16 = torch.bfloat16
    return {
        "x": normal(rows, 3 * channels, dtype=bf16),
        "weight": 0.5 * normal(3, 4, channels),
        "bias": 0.1 * normal(3 * channels),
        "conv_state": normal(slots, 3, 3 * channels, dtype=bf16).transpose(1, 2),
        "raw_g": normal(1, rows, num_heads, 128, dtype=bf16),
        "raw_beta": normal(1, rows, num_heads, dtype=bf16),
        "A_log": torch.rand(num_heads, generator=g).mul(15).add(1).log(),
        "dt_bias": normal(channels),
        "state_indices": torch.tensor(indices, dtype=torch.int32),
        "state": normal(slots, num_heads, 128, 128),
        "out": torch.full((1, rows, num_heads, 128), torch.nan, dtype=bf16),
        "lower_bound": bound,
        "output_gate": normal(rows, num_heads, 128, dtype=bf16) if norm else None,
        "norm_weight": 1 + 0.1 * normal(128) if norm else None,
    }


def assert_graded(before: Arguments, after: Arguments) -> None:
    """`after` is what the oracle makes of `before`, within the tolerances of a unit-scale call."""
    expected = reference.fused_kda_decode(**{**before, "out": None})
    first_live = before.get("first_live_slot", 1)
    slots = before["state"].size(0)
    rows = [i for i, slot in enumerate(before["state_indices"].tolist()) if first_live <= slot < slots]
    live = [before["state_indices"].tolist()[i] for i in rows]
    assert grading.output_ulps(after["out"], expected.out) <= grading.OUTPUT_TOLERANCE_ULPS
    if live:
        assert grading.state_error(after["state"][live], expected.state[rows]) <= grading.STATE_TOLERANCE
    dead = [slot for slot in range(slots) if slot not in live]
    assert grading.differing_words(after["state"][dead], before["state"][dead]) == 0
    assert grading.differing_words(after["conv_state"][dead], before["conv_state"][dead]) == 0
    for row, slot in zip(rows, live, strict=True):
        window, old = after["conv_state"][slot], before["conv_state"][slot]
        shifted = torch.stack([old[:, 1], old[:, 2], before["x"][row]], dim=1)
        assert grading.differing_words(window, shifted) == 0
