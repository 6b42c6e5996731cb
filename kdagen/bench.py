"""`kdagen bench`: time per layer on the GPU that is here, beside what the same memory traffic costs at best."""

from __future__ import annotations

import datetime
import itertools
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kdagen import bench_peers, bench_vllm, dispatch, op
from kdagen.bench_peers import Call, Peer
from kdagen.bench_report import Point, Timing, replays_for, ring_layers, table, write_json, write_plot
from kdagen.errors import NotReadyError
from kdagen.status import status_line

DEFAULT_HEADS = (12, 24, 48, 96)
DEFAULT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP_REPLAYS = 3

LAST_LEVEL_CACHE_BYTES = {"gfx942": 256 << 20, "gfx950": 256 << 20}
"""Infinity Cache of MI300/MI350 ("AMD CDNA 3 Architecture" white paper); elsewhere the L2 that the driver reports."""


def time_calls(calls: Sequence[Call]) -> Timing:
    """Capture the calls in one graph and time its replays with device events; microseconds per call."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, warm = _event(), _event()
    begin.record()
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    warm.record()
    torch.cuda.synchronize()
    replays = replays_for(begin.elapsed_time(warm) / WARM_UP_REPLAYS)
    pairs = [(_event(), _event()) for _ in range(replays)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) * 1e3 / len(calls) for start, end in pairs])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Layer:
    """The arguments of one layer's decode call: its own state, window, weights and inputs."""

    def __init__(self, heads: int, rows: int, generator: torch.Generator) -> None:
        channels, bf16 = heads * 128, torch.bfloat16

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(size, device="cuda", generator=generator).to(dtype)

        self.state = normal(rows + 1, heads, 128, 128)
        self.arguments: dict[str, Any] = {
            "x": normal(rows, 3 * channels, dtype=bf16),
            "weight": normal(3, 4, channels) * 0.5,
            "bias": None,
            "conv_state": normal(rows + 1, 3, 3 * channels, dtype=bf16).transpose(1, 2),
            "raw_g": normal(1, rows, heads, 128, dtype=bf16),
            "raw_beta": normal(1, rows, heads, dtype=bf16),
            "A_log": normal(heads),
            "dt_bias": normal(channels),
            "state_indices": torch.arange(1, rows + 1, dtype=torch.int32, device="cuda"),
            "state": self.state,
            "out": torch.empty(1, rows, heads, 128, dtype=bf16, device="cuda"),
            "lower_bound": -5.0,
            "output_gate": normal(rows, heads, 128, dtype=bf16),
            "norm_weight": normal(128),
        }

    def decode(self) -> object:
        """The call under test."""
        return op.fused_kda_decode(**self.arguments)

    def rows_of_state(self) -> torch.Tensor:
        """The state bytes that a call reads and writes, flat."""
        return self.state[1:].view(-1)


def in_place_kernels() -> dict[str, Callable[[torch.Tensor], object]]:
    """Kernels that read and rewrite a tensor in place, the fastest of which is the limit: torch's own and triton's."""
    kernels: dict[str, Callable[[torch.Tensor], object]] = {"torch.mul_": lambda state: state.mul_(1.0)}
    try:
        import triton
    except ImportError:
        return kernels
    from kdagen.bench_triton import scale_in_place

    dependent = {"launch_pdl": True} if torch.version.hip is None else {}
    for block in (1024, 2048, 4096, 8192):
        for warps in (4, 8):

            def run(state: torch.Tensor, block: int = block, warps: int = warps) -> None:
                grid = (triton.cdiv(state.numel(), block),)
                size = state.numel()
                scale_in_place[grid](state, size, BLOCK=block, DEPENDENT=bool(dependent), num_warps=warps, **dependent)

            kernels[f"triton {block}/{warps}"] = run
    return kernels


def ring(heads: int, rows: int) -> tuple[list[Layer], bool]:
    """The layers to cycle through, and whether their states do not fit the last-level cache."""
    free, _ = torch.cuda.mem_get_info()
    # Copies need a second ring of the same size.
    count, cold = ring_layers(heads, rows, _cache_bytes(), free // 2)
    generator = torch.Generator("cuda").manual_seed(0)
    return [Layer(heads, rows, generator) for _ in range(count)], cold


def measure(heads: int, rows: int, peers: Sequence[Peer] = ()) -> Point:
    """One shape: the op cold and warm, the peers that serve it, the in-place limit and a copy, all in this run."""
    layers, cold = ring(heads, rows)
    timings = {"op": time_calls([layer.decode for layer in layers])}
    for peer in peers:
        if peer.serves(heads):
            timings[peer.name] = time_calls([peer.prepare(layer.arguments) for layer in layers])
    timings["warm"] = time_calls([layers[0].decode] * min(len(layers), 20))
    states = [layer.rows_of_state() for layer in layers]
    limits = [time_calls([partial(kernel, state) for state in states]) for kernel in in_place_kernels().values()]
    timings["limit"] = min(limits, key=lambda timing: timing.median_us)
    # As many bytes as the op moves: each element is read once and written once, to another ring.
    targets = [torch.empty_like(state) for state in states]
    timings["copy"] = time_calls([partial(a.copy_, b) for a, b in zip(targets, states, strict=True)])
    return Point(heads, rows, len(layers), cold, timings)


def _cache_bytes() -> int:
    known = LAST_LEVEL_CACHE_BYTES.get(dispatch.current_arch() or "")
    return known or int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def environment() -> dict[str, str]:
    """What a figure needs to be a figure: device, driver, versions, date, command."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "arch": dispatch.current_arch() or "",
        "driver": _driver_version(),
        "torch": torch.__version__,
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["kdagen", *sys.argv[1:]]),
    }


def heading(facts: Mapping[str, str]) -> str:
    """What was run and where, for the top of a table: a table without it is no record."""
    where = f"{facts['device']}, driver {facts['driver']}, {facts['runtime']}, torch {facts['torch']}, {facts['date']}"
    return f"{facts['command']}\n{where}\n"


def _driver_version() -> str:
    """What the vendor's tool or the kernel module says."""
    module = Path("/sys/module/amdgpu/version")
    if module.is_file():
        return module.read_text().strip()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


def find_peers(vllm_tree: Path | None, heads: Sequence[int]) -> list[Peer]:
    """The peers that are here and compute what the op computes; says which are left out, and why.

    Raises:
        SpecError: `vllm_tree` is no vLLM source tree.
        BuildError: its kernel does not compile.
    """
    found = [bench_peers.fla_chain()]
    if vllm_tree is not None:
        found += [bench_vllm.fused(vllm_tree), bench_vllm.chain(vllm_tree)]
    peers = []
    for peer in (peer for peer in found if peer is not None):
        tried = next((count for count in heads if peer.serves(count)), None)
        if tried is None:
            continue
        why = bench_peers.disagreement(peer, op.fused_kda_decode, Layer(tried, 3, torch.Generator("cuda")).arguments)
        if why is None:
            peers.append(peer)
        else:
            print(f"kdagen: without {peer.name}, which computes something else: {why}", file=sys.stderr)
    return peers


def require_gpu() -> None:
    """Raise NotReadyError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise NotReadyError(f"bench: expected a GPU that torch sees, got torch {torch.__version__} without one")


def main_report(
    heads: Sequence[int],
    rows: Sequence[int],
    json_path: Path | None,
    plot_path: Path | None,
    vllm_tree: Path | None = None,
) -> int:
    """Measure every shape and print the table; 0, or 130 if interrupted, with what was measured until then.

    The JSON is written after every shape, so that a run that is killed loses none.

    Raises:
        NotReadyError: no GPU is visible to torch.
        SpecError: `vllm_tree` is no vLLM source tree.
    """
    require_gpu()
    op.prepare(heads)
    peers = find_peers(vllm_tree, heads)
    facts = environment()
    points: list[Point] = []
    code = 0
    try:
        with progress(len(heads) * len(rows)) as show:
            for count, batch in itertools.product(heads, rows):
                show(f"{count} heads x {batch} rows")
                points.append(measure(count, batch, peers))
                torch.cuda.empty_cache()
                if json_path is not None:
                    write_json(json_path, points, facts)
    except KeyboardInterrupt:
        code = 130  # as a shell reports it
    print(heading(facts))
    print(table(points))
    if plot_path is not None and points:
        write_plot(plot_path, points, f"kdagen on {facts['device']}, cold state")
    return code


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Counts what it is told of, up to `total`."""
    numbers = itertools.count(1)
    with status_line() as show:
        yield lambda what: show(f"{next(numbers)}/{total} {what}", lasting=True)
