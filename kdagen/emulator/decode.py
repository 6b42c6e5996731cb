"""The decode op on the emulator: op arguments become launch parameters and the memory that the launch may touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kdagen.emulator.launch import DEFAULT_OPTIONS, EmulatedKernel, EmulatorOptions, Interval, LaunchReport
from kdagen.launch_params import launch_params


def run_decode(
    kernel: EmulatedKernel, symbol: str, *, options: EmulatorOptions = DEFAULT_OPTIONS, **arguments: Any
) -> LaunchReport:
    """One launch with the op's arguments on CPU tensors; conv_state, state and out are updated in place.

    The launch may read each row of the inputs and may write each row of `out` and the slots that the indices name, and
    nothing else: not the gaps between strided rows, not the other slots.

    Args:
        kernel: whose launch.
        symbol: its launcher.
        options: of the emulator.
        arguments: as `kdagen.launch_params.launch_params` takes them.

    Raises:
        ArgumentError: the pools have different numbers of slots.
    """
    params = launch_params(**arguments)
    out, state, indices = arguments["out"], arguments["state"], arguments["state_indices"]
    gate = arguments.get("output_gate")
    live = [slot for slot in indices.tolist() if 0 <= slot - params.first_live_slot < params.live_slots]
    intervals = [
        *_rows("x", arguments["x"]),
        *_rows("raw_g", arguments["raw_g"][0]),
        *_rows("raw_beta", arguments["raw_beta"][0]),
        *_rows("state_indices", indices.unsqueeze(1)),
        *_rows("out", out[0], writable=True),
        *_rows("output_gate", None if gate is None else gate.reshape(out.shape[1:])),
        *_rows("state slot", state, writable=True, only=live),
        *_rows("conv_state slot", arguments["conv_state"], writable=True, only=live),
    ]
    for name in ("weight", "bias", "A_log", "dt_bias", "norm_weight"):
        whole = arguments.get(name)
        if whole is not None:
            intervals.append(Interval.of(name, whole, writable=False))
    return kernel.launch(symbol, params, intervals, options)


def _rows(
    name: str, tensor: torch.Tensor | None, *, writable: bool = False, only: list[int] | None = None
) -> Iterator[Interval]:
    """An interval for each row (or each of `only`); rows lie anywhere and are packed inside."""
    if tensor is None or tensor.numel() == 0:
        return
    elements, size = tensor[0].numel(), tensor.element_size()
    spread = sum((length - 1) * stride for length, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    assert spread + 1 == elements, f"{name}: expected rows of contiguous elements"
    for row in sorted(set(range(tensor.size(0)) if only is None else only)):
        begin = tensor.data_ptr() + row * tensor.stride(0) * size
        yield Interval(f"{name} {row}", begin, begin + elements * size, writable, size)
