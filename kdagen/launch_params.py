"""From the op's arguments to the parameters of a launch, for launches that do not go through the op."""

from __future__ import annotations

import torch

from kdagen.abi import KdaDecodeParams
from kdagen.errors import ArgumentError


def launch_params(
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
) -> KdaDecodeParams:
    """The launch parameters of a call with the op's arguments: addresses, strides and numbers. Keeps no tensor alive.

    Raises:
        ArgumentError: the pools have different numbers of slots.
    """
    slots, rows = state.size(0), x.size(0)
    if conv_state.size(0) != slots:
        raise ArgumentError(f"conv_state: expected as many slots as state, {slots}, got {conv_state.size(0)}")
    gate = output_gate.reshape(out.shape[1:]) if output_gate is not None else None
    if gate is not None and output_gate is not None:
        assert gate.data_ptr() == output_gate.data_ptr(), "output_gate: expected rows of contiguous heads"
    return KdaDecodeParams(
        **{
            name: tensor.data_ptr()
            for name, tensor in {
                "x": x,
                "weight": weight,
                "bias": bias,
                "conv_state": conv_state,
                "raw_g": raw_g,
                "raw_beta": raw_beta,
                "A_log": A_log,
                "dt_bias": dt_bias,
                "state_indices": state_indices,
                "state": state,
                "out": out,
                "output_gate": gate,
                "norm_weight": norm_weight,
            }.items()
            if tensor is not None
        },
        x_row_stride=x.stride(0),
        conv_slot_stride=conv_state.stride(0),
        raw_g_row_stride=raw_g.stride(1),
        raw_beta_row_stride=raw_beta.stride(1),
        index_stride=state_indices.stride(0),
        state_slot_stride=state.stride(0),
        out_row_stride=out.stride(1),
        output_gate_row_stride=gate.stride(0) if gate is not None else 0,
        rows=rows,
        first_live_slot=first_live_slot,
        live_slots=max(0, slots - first_live_slot),
        bounded_gate=lower_bound is not None,
        conv_ds=conv_state.stride()[1:] == (conv_state.size(2), 1),
        lower_bound=lower_bound or 0.0,
        norm_eps=norm_eps,
    )
