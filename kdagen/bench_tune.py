"""`kdagen bench --tune`: candidate tunings timed by batch size, merged into bands, written as kdagen/bands.py."""

from __future__ import annotations

import ctypes
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kdagen.bands import BANDS
from kdagen.errors import BuildError, PlanError, SpecError
from kdagen.plan import make_plan
from kdagen.spec import KernelSpec
from kdagen.table import aligned
from kdagen.target import Target
from kdagen.tuning import DEFAULT_TUNING, Band, Prefetch, SliceIn, Tuning

HEADS = 12
"""Head count whose kernels are timed: what counts for a band is rows times heads."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
BAND_COST = 0.03
"""Sum of the losses over the batch sizes that one more band, one more kernel per head count, must save."""


def candidates(target: Target) -> tuple[Tuning, ...]:
    """The tunings worth timing on a target: every combination of a few choices that its hardware has."""
    found = []
    for tuning in _choices():
        try:
            make_plan(KernelSpec(HEADS), target, tuning)
        except PlanError:
            continue
        found.append(tuning)
    return tuple(found)


def _choices() -> Iterator[Tuning]:
    # In registers, with or without what hides the start of a launch.
    for together, prefetch in product((1, 2, 4, 8), (Prefetch.NOTHING, Prefetch.INPUTS)):
        yield Tuning(4, 1, together, SliceIn.REGISTERS, prefetch)
    slots = (Prefetch.SLOT, Prefetch.KEPT_SLOT)
    # In LDS, small batches: few workgroups, so a head is shared, and the slot is trusted.
    small = ((4, 4, 1), (4, 4, 2), (4, 2, 2), (6, 2, 2), (4, 1, 2), (6, 1, 2))
    for (waves, team, together), prefetch in product(small, slots):
        yield Tuning(waves, team, together, SliceIn.LDS, prefetch)
    # In LDS, large batches: the L2 filled for the workgroups that come next.
    for team, lookahead, prefetch, inputs in product((1, 2), (66, 99, 132), slots, (False, True)):
        yield Tuning(4, team, 2, SliceIn.LDS, prefetch, lookahead, inputs)


@dataclass(frozen=True)
class Measured:
    """Microseconds of every candidate at every batch size, rows ascending."""

    heads: int
    rows: tuple[int, ...]
    times_us: Mapping[Tuning, tuple[float, ...]]


def merge(measured: Measured, band_cost: float = BAND_COST) -> list[tuple[int, int, Tuning]]:
    """The bands (first and last index into the rows, and the tuning) with the least loss.

    The loss of a batch size is its time over the fastest candidate's, less 1; a band costs `band_cost`.
    """
    count = len(measured.rows)
    fastest = [min(times[i] for times in measured.times_us.values()) for i in range(count)]
    losses = {
        tuning: [t / f - 1 for t, f in zip(times, fastest, strict=True)] for tuning, times in measured.times_us.items()
    }
    best: list[tuple[float, list[tuple[int, int, Tuning]]]] = [(0.0, [])]
    for end in range(1, count + 1):
        options = []
        for start in range(end):
            tuning = min(losses, key=lambda t: sum(losses[t][start:end]))
            loss = best[start][0] + band_cost + sum(losses[tuning][start:end])
            options.append((loss, [*best[start][1], (start, end - 1, tuning)]))
        best.append(min(options, key=lambda option: option[0]))
    return best[count][1]


def bands_of(measured: Measured, device: str, date: str) -> tuple[Band, ...]:
    """The merged bands of a measurement, each with its figures and, beside them, those of the neighbouring bands'."""
    merged = merge(measured)
    bands = []
    for index, (first, last, tuning) in enumerate(merged):
        own = _figures(measured, tuning, first, last)
        others = [
            f"{which} band's tuning {_figures(measured, merged[other][2], first, last)}"
            for which, other in (("the lower", index - 1), ("the upper", index + 1))
            if 0 <= other < len(merged)
        ]
        rows = ", ".join(map(str, measured.rows[first : last + 1]))
        reason = f"{device}, {date}, us a layer at {measured.heads} heads, rows {rows}: " + "; ".join([own, *others])
        limit = None if index == len(merged) - 1 else measured.heads * measured.rows[last]
        bands.append(Band(limit, tuning, reason))
    return tuple(bands)


def _figures(measured: Measured, tuning: Tuning, first: int, last: int) -> str:
    return " ".join(f"{time:.2f}" for time in measured.times_us[tuning][first : last + 1])


# ---- the file --------------------------------------------------------------------------------------------------------

_HEAD = '''"""Which tuning serves which batches, by target: that with the least limit that rows * heads do not pass.

`kdagen bench --tune FILE` times candidates on the GPU that is here, and writes this file with its target's bands new.
"""

'''


def bands_text(bands: Mapping[str, Sequence[Band]]) -> str:
    """The text of kdagen/bands.py for the bands of every target, as the formatter leaves it."""
    lines = ["BANDS: dict[str, tuple[Band, ...]] = {"]
    for target, of_target in bands.items():
        lines.append(f'    "{target}": (')
        for band in of_target:
            lines += ["        Band(", f"            most_work={band.most_work},", *_tuning_lines(band.tuning)]
            # The formatter joins lines that fit into one.
            wrapped = textwrap.wrap(band.reason, 98 if len(band.reason) <= 98 else 90, break_on_hyphens=False)
            texts = [text + " " for text in wrapped[:-1]] + wrapped[-1:]
            if len(texts) == 1:
                lines.append(f"            reason={_quoted(texts[0])},")
            else:
                lines += [
                    "            reason=(",
                    *(f"                {_quoted(text)}" for text in texts),
                    "            ),",
                ]
            lines.append("        ),")
        lines.append("    ),")
    lines.append("}")
    body = "\n".join(lines) + "\n"
    enums = [kind.__name__ for kind in (Prefetch, SliceIn) if f"{kind.__name__}." in body]
    return _HEAD + f"from kdagen.tuning import {', '.join(['Band', *enums, 'Tuning'])}\n\n" + body


def _tuning_lines(tuning: Tuning) -> list[str]:
    chosen = [f for f in fields(tuning) if getattr(tuning, f.name) != getattr(DEFAULT_TUNING, f.name)]
    if not chosen:
        return ["            tuning=Tuning(),"]
    values = [f"                {f.name}={_shown(getattr(tuning, f.name))}," for f in chosen]
    return ["            tuning=Tuning(", *values, "            ),"]


def _shown(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text else f'"{text}"'


# ---- on the device ---------------------------------------------------------------------------------------------------


def measure(target: Target, tunings: Sequence[Tuning], heads: int, rows: Sequence[int]) -> Measured:
    """Build every candidate, check it on a small batch and time it at every batch size, cold, as `bench` does."""
    import torch

    from kdagen import bench, build, reference
    from kdagen.abi import KdaDecodeParams
    from kdagen.launch_params import launch_params
    from kdagen.render import render
    from kdagen.variants import Variant

    # A band's limit is part of a kernel's name, so as many limits give as many names.
    variants = [
        Variant(KernelSpec(heads), target, "a candidate", Band(number + 1, tuning, "to be measured"))
        for number, tuning in enumerate(tunings)
    ]
    texts = {variant.file_name: render(variant) for variant in variants}
    library = ctypes.CDLL(str(build.build(build.Request(texts, target, build.resolve_archs(target)))))

    def launch(symbol: str, params: KdaDecodeParams) -> None:
        status = getattr(library, symbol)(
            ctypes.byref(params), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        )
        if status != 0:
            raise BuildError(f"{symbol}: expected the launch to succeed, got status {status}")

    small = bench.Layer(heads, 3, torch.Generator("cuda").manual_seed(0))
    on_host: dict[str, Any] = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in small.arguments.items()}
    expected = reference.fused_kda_decode(**{**on_host, "out": None})
    times: dict[Tuning, list[float]] = {tuning: [] for tuning in tunings}
    for variant in variants:
        layer = bench.Layer(heads, 3, torch.Generator("cuda").manual_seed(0))
        launch(variant.launch_symbol, launch_params(**layer.arguments))
        error = (layer.state[1:].cpu() - expected.state).abs().max().item()
        if not error < 1e-4:
            raise BuildError(f"{variant.tuning}: expected the reference's state within 1e-4, got {error:.2g}")

    with bench.progress(len(rows)) as show:
        for batch in rows:
            show(f"{heads} heads x {batch} rows, {len(tunings)} candidates")
            layers, _ = bench.ring(heads, batch)
            params = [launch_params(**layer.arguments) for layer in layers]
            for variant in variants:
                calls = [partial(launch, variant.launch_symbol, one) for one in params]
                times[variant.tuning].append(bench.time_calls(calls).median_us)
            del layers
            torch.cuda.empty_cache()
    return Measured(heads, tuple(rows), {tuning: tuple(values) for tuning, values in times.items()})


def table(measured: Measured) -> str:
    """Microseconds a layer by candidate and batch size; the fastest of a size has a star."""
    fastest = [min(times[i] for times in measured.times_us.values()) for i in range(len(measured.rows))]
    rows = [
        (str(tuning), *(f"{t:.2f}{'*' if t == f else ' '}" for t, f in zip(times, fastest, strict=True)))
        for tuning, times in measured.times_us.items()
    ]
    header = ("us a layer; rows:", *(f"{count} " for count in measured.rows))
    return aligned(header, rows, right=range(1, len(header)))


def main_report(path: Path, heads: Sequence[int] | None, rows: Sequence[int] | None) -> int:
    """Time the candidates, print them and the bands, and write the bands of every target to `path`.

    Raises:
        NotReadyError: no GPU is visible to torch.
        SpecError: more than one head count is given.
    """
    from kdagen import bench, build

    if heads is not None and len(heads) != 1:
        raise SpecError(f"--heads: expected one head count with --tune, got {len(heads)}")
    bench.require_gpu()
    target = build.torch_target()
    assert target is not None
    count = heads[0] if heads is not None else HEADS
    measured = measure(target, candidates(target), count, tuple(sorted(rows or ROWS)))
    facts = bench.environment()
    bands = bands_of(measured, facts["device"], facts["date"])
    print(bench.heading(facts))
    print(table(measured))
    for band in bands:
        limit = "any larger" if band.most_work is None else f"up to {band.most_work}"
        print(f"\nrows * heads {limit}: {band.tuning}\n  {band.reason}")
    path.write_text(bands_text({**BANDS, target.name: bands}), encoding="utf-8")
    print(f"\nwrote {path}; `kdagen build` renders its kernels", file=sys.stderr)
    return 0
