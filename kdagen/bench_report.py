"""What `kdagen bench` makes of its timings: bytes, rates, ratios, the table, the JSON and the plot. Needs no GPU."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kdagen.errors import ToolchainError
from kdagen.table import aligned

STATE_BYTES = 2 * 64 * 1024
"""Bytes counted per row and head: 64 KiB of state read and 64 KiB written; all else is under 5% more."""

MODEL_LAYERS = 69
"""KDA layers of Kimi-K3: between two touches of one layer's state a decode step runs all the others."""

OWN_TIMINGS = ("op", "warm", "limit", "copy")
"""What every run times; all other names are peers."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per layer: the median of the replays, and the 10th and 90th percentile."""

    median_us: float
    low_us: float
    high_us: float

    @staticmethod
    def of(samples_us: Sequence[float]) -> Timing:
        """The timing of some samples, at least one."""
        if len(samples_us) == 1:
            return Timing(samples_us[0], samples_us[0], samples_us[0])
        tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
        return Timing(statistics.median(samples_us), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Point:
    """One shape. `layers` distinct states were cycled through; `cold`: they do not fit the last-level cache."""

    heads: int
    rows: int
    layers: int
    cold: bool
    timings: Mapping[str, Timing]

    @property
    def state_bytes(self) -> int:
        """Bytes of state read and written per layer."""
        return state_bytes(self.heads, self.rows)

    def gigabytes_per_second(self, name: str) -> float:
        """Rate of a timing, with the bytes of the state alone."""
        return self.state_bytes / self.timings[name].median_us / 1e3

    @property
    def peers(self) -> list[str]:
        """Names of the other implementations that were timed."""
        return [name for name in self.timings if name not in OWN_TIMINGS]

    def times_faster_than(self, peer: str) -> float:
        """How many times the op's time the peer took."""
        return self.timings[peer].median_us / self.timings["op"].median_us

    def of_limit(self) -> float:
        """Share of the limit that the op reaches: the limit's time over the op's."""
        return self.timings["limit"].median_us / self.timings["op"].median_us


def state_bytes(heads: int, rows: int) -> int:
    """Bytes of state that one call reads and writes."""
    return STATE_BYTES * heads * rows


def ring_layers(heads: int, rows: int, cache_bytes: int, free_bytes: int) -> tuple[int, bool]:
    """How many layers to cycle through, and whether their states exceed twice the cache.

    MODEL_LAYERS, or as many as that takes, within 60% of the free memory.
    """
    one = state_bytes(heads, rows) // 2
    layers = max(MODEL_LAYERS, 2 * cache_bytes // one + 1)
    layers = max(1, min(layers, int(0.6 * free_bytes) // one))
    return layers, layers * one > 2 * cache_bytes


def replays_for(milliseconds: float) -> int:
    """How often to replay a graph that takes so long: 30 times, or fewer if that takes over 150 ms, but at least 10."""
    return max(10, min(30, int(150 / max(milliseconds, 1e-3))))


def table(points: Sequence[Point]) -> str:
    """One aligned row per shape; times in microseconds per layer."""
    peers = list(dict.fromkeys(name for point in points for name in point.peers))
    header = ["heads", "rows", "layers", "us", "10-90%", "GB/s", "limit us", "of limit", "copy us", "warm us"]
    header += [column for peer in peers for column in (f"{peer} us", "times")]
    rows = []
    for point in points:
        op = point.timings["op"]
        rows.append(
            (
                str(point.heads),
                str(point.rows),
                f"{point.layers}{'' if point.cold else ' (cached)'}",
                f"{op.median_us:.2f}",
                f"{op.low_us:.2f}-{op.high_us:.2f}",
                f"{point.gigabytes_per_second('op'):.0f}",
                f"{point.timings['limit'].median_us:.2f}",
                f"{point.of_limit():.2f}",
                f"{point.timings['copy'].median_us:.2f}",
                f"{point.timings['warm'].median_us:.2f}",
                *(
                    cell
                    for peer in peers
                    for cell in (
                        (f"{point.timings[peer].median_us:.2f}", f"{point.times_faster_than(peer):.2f}")
                        if peer in point.timings
                        else ("-", "-")
                    )
                ),
            )
        )
    note = (
        "us: per layer, median of graph replays over a ring of distinct states (cold);\n"
        "limit: the best in-place kernel on the same state bytes in the same run;\n"
        "copy: a device copy of as many bytes; warm: one state over and over"
        + ("\ntimes: how many times the op's time the peer before it took" if peers else "")
    )
    return aligned(header, rows, right=range(len(header))) + "\n" + note


def write_json(path: Path, points: Sequence[Point], environment: Mapping[str, str]) -> None:
    """The environment and every timing."""
    record = {
        "environment": dict(environment),
        "bytes_per_row_and_head": STATE_BYTES,
        "points": [
            {
                **asdict(point),
                "gigabytes_per_second": point.gigabytes_per_second("op"),
                "of_limit": point.of_limit(),
                "times_faster_than": {peer: point.times_faster_than(peer) for peer in point.peers},
            }
            for point in points
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, points: Sequence[Point], title: str) -> None:
    """PNG: time and share of the limit by batch, a line for each head count.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ToolchainError(f"expected matplotlib to plot, got: {error}; pip install 'kdagen[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, shares) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for heads in sorted({point.heads for point in points}):
        chosen = sorted((point for point in points if point.heads == heads), key=lambda point: point.rows)
        batches = [point.rows for point in chosen]
        (line,) = times.plot(batches, [p.timings["op"].median_us for p in chosen], "o-", label=f"{heads} heads")
        limits = [p.timings["limit"].median_us for p in chosen]
        times.plot(batches, limits, "--", color=line.get_color(), linewidth=1)
        for peer, style in zip(dict.fromkeys(name for p in chosen for name in p.peers), ("x", "+", "1"), strict=False):
            timed = [p for p in chosen if peer in p.timings]
            label = peer if heads == min(point.heads for point in points) else None
            marks = [p.timings[peer].median_us for p in timed]
            times.plot([p.rows for p in timed], marks, style, color=line.get_color(), alpha=0.7, label=label)
        shares.plot(batches, [p.of_limit() for p in chosen], "o-", color=line.get_color())
    for axes, label in ((times, "us per layer (dashed: in-place limit)"), (shares, "share of the in-place limit")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    times.set_yscale("log")
    times.legend()
    shares.set_ylim(0, 1.05)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
