"""The decode op on the emulator: op arguments become launch parameters and the memory that the launch may touch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kdagen.emulator.launch import DEFAULT_OPTIONS, EmulatedKernel, EmulatorOptions, Interval, LaunchReport
from kdagen.launch_params import launch_params


def run_decode(
    kernel: EmulatedKernel,
    symbol: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    first_live_slot: int = 1,
    options: EmulatorOptions = DEFAULT_OPTIONS,
) -> LaunchReport:
    """One launch with the op's arguments on CPU tensors; conv_state, state and out are updated in place.

    The launch may read each row of the inputs and may write each row of `out` and the slots that the indices name, and
    nothing else: not the gaps between strided rows, not the other slots.

    Raises:
        ArgumentError: the pools have different numbers of slots.
    """
    slots = state.size(0)
    params = launch_params(
        x=x,
        weight=weight,
        bias=bias,
        conv_state=conv_state,
        raw_g=raw_g,
        raw_beta=raw_beta,
        A_log=A_log,
        dt_bias=dt_bias,
        state_indices=state_indices,
        state=state,
        out=out,
        lower_bound=lower_bound,
        output_gate=output_gate,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        first_live_slot=first_live_slot,
    )
    gate = output_gate.reshape(out.shape[1:]) if output_gate is not None else None
    live = [slot for slot in state_indices.tolist() if first_live_slot <= slot < slots]
    intervals = [
        *_rows("x", x),
        *_rows("raw_g", raw_g[0]),
        *_rows("raw_beta", raw_beta[0]),
        *_rows("state_indices", state_indices.unsqueeze(1)),
        *_rows("out", out[0], writable=True),
        *_rows("output_gate", gate),
        *_rows("state slot", state, writable=True, only=live),
        *_rows("conv_state slot", conv_state, writable=True, only=live),
    ]
    for name, whole in (
        ("weight", weight),
        ("bias", bias),
        ("A_log", A_log),
        ("dt_bias", dt_bias),
        ("norm_weight", norm_weight),
    ):
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
