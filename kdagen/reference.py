"""The oracle: one decode step of Kimi Delta Attention in torch, written to be read as the math.

Source of the math: "Kimi Linear: An Expressive, Efficient Attention Architecture" (Kimi Team, 2025), and the fused
decode kernels' contract for paged states and null rows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kdagen.bf16 import rounded_to_bf16
from kdagen.errors import ArgumentError

L2_NORM_EPS = 1e-6
"""Added inside the SUM of squares of q and k, not to their mean."""

ROWS_AT_ONCE = 16
"""Rows computed together, so that a batch of 128 rows of 96 heads needs 0.2 GB of fp64 state at a time, not 1.6."""


class Rounding(enum.Enum):
    """FP32: nothing is rounded between the bf16 inputs and the one rounding of out. CHAIN: q, k, v and o are each
    rounded to bf16 on the way, as kernels that run one after another do: the loose oracle."""

    FP32 = "fp32"
    CHAIN = "chain"


@dataclass(frozen=True)
class DecodeResult:
    """What one step gives; N rows, H heads. Nothing is written to the arguments.

    Attributes:
        out: [1, N, H, 128] in the computing dtype, before the rounding to bf16; zeros in null rows.
        unnormed: [1, N, H, 128], the output before the gated RMSNorm.
        state: [N, H, 128 (v), 128 (k)], each row's new state; zeros in null rows.
        conv_state: [N, 3*H*128, 3] bf16, each row's new window; zeros in null rows.
        live_rows: the rows that are not null, ascending.
        live_slots: the slot of each of them.
    """

    out: torch.Tensor
    unnormed: torch.Tensor
    state: torch.Tensor
    conv_state: torch.Tensor
    live_rows: tuple[int, ...]
    live_slots: tuple[int, ...]

    @property
    def out_bf16(self) -> torch.Tensor:
        """[1, N, H, 128] bf16: `out`, rounded once."""
        return rounded_to_bf16(self.out)

    def pools_after(self, conv_state: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole copies of both pools, in their shapes and dtypes, with every live row's slot replaced."""
        conv_state, state = conv_state.clone(), state.clone()
        rows, slots = list(self.live_rows), list(self.live_slots)
        conv_state[slots] = self.conv_state[rows]
        state[slots] = self.state[rows].to(state.dtype)
        return conv_state, state


def fused_kda_decode(
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
    out: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    first_live_slot: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = Rounding.FP32,
) -> DecodeResult:
    """One decode step with the op's arguments (N rows, H heads, D = 128), which are left as they are.

    Args:
        x: [N, 3*H*D], packed q, k, v.
        weight: [3, 4, H*D], taps oldest first.
        bias: [3*H*D] or None.
        conv_state: [slots, 3*H*D, 3], taps oldest first.
        raw_g: [1, N, H, D].
        raw_beta: [1, N, H], logits.
        A_log: [H].
        dt_bias: [H*D].
        state_indices: [N]; a row is null if its slot is below `first_live_slot` or not below the number of slots.
        state: [slots, H, D (v), D (k)].
        out: ignored; here so that the op's arguments fit.
        lower_bound: of the bounded gate, below 0; None for the softplus gate.
        output_gate: [N, H, D] or [1, N, H, D]; with norm_weight, or None for no output norm.
        norm_weight: [D].
        norm_eps: added to the mean square of the output.
        first_live_slot: slots below it are padding.
        dtype: dtype of all arithmetic, float64 or float32.
        rounding: policy for the values between the steps.

    Raises:
        ArgumentError: two live rows name the same slot, or one of output_gate and norm_weight is given alone.
    """
    _refuse_half_a_norm(output_gate, norm_weight)
    num_heads, dim = state.size(1), state.size(2)
    rows, slots = _live_rows(state_indices, first_live_slot, state.size(0))
    _refuse_duplicates(slots)
    result = DecodeResult(
        out=x.new_zeros(1, x.size(0), num_heads, dim, dtype=dtype),
        unnormed=x.new_zeros(1, x.size(0), num_heads, dim, dtype=dtype),
        state=x.new_zeros(x.size(0), num_heads, dim, dim, dtype=dtype),
        conv_state=x.new_zeros(x.size(0), x.size(1), conv_state.size(2), dtype=conv_state.dtype),
        live_rows=tuple(rows),
        live_slots=tuple(slots),
    )
    for start in range(0, len(rows), ROWS_AT_ONCE):
        n, s = rows[start : start + ROWS_AT_ONCE], slots[start : start + ROWS_AT_ONCE]
        result.conv_state[n] = torch.cat([conv_state[s][:, :, 1:], x[n].unsqueeze(2)], dim=2)
        q, k, v = _conv1d_silu(x[n].to(dtype), conv_state[s].to(dtype), weight.to(dtype), bias, num_heads)
        q, k, v = (_rounded(a, rounding) for a in (q, k, v))
        q, k = _l2_normalised(q) * dim**-0.5, _l2_normalised(k)
        decay = _decay(raw_g[0, n].to(dtype), A_log.to(dtype), dt_bias.to(dtype).view(num_heads, dim), lower_bound)
        beta = raw_beta[0, n].to(dtype).sigmoid()

        S = state[s].to(dtype) * decay.unsqueeze(-2)
        u = torch.einsum("nhvk,nhk->nhv", S, k)
        delta = beta.unsqueeze(-1) * (v - u)
        S = S + delta.unsqueeze(-1) * k.unsqueeze(-2)
        o = _rounded(torch.einsum("nhvk,nhk->nhv", S, q), rounding)

        result.state[n] = S
        result.unnormed[0, n] = o
        if output_gate is not None and norm_weight is not None:
            gate = output_gate.reshape(x.size(0), num_heads, dim)[n].to(dtype)
            inverse_rms = (o.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
            o = o * inverse_rms * norm_weight.to(dtype) * gate.sigmoid()
        result.out[0, n] = o
    return result


def _live_rows(state_indices: torch.Tensor, first_live_slot: int, slots: int) -> tuple[list[int], list[int]]:
    live = [(row, slot) for row, slot in enumerate(state_indices.tolist()) if first_live_slot <= slot < slots]
    return [row for row, _ in live], [slot for _, slot in live]


def _refuse_duplicates(slots: list[int]) -> None:
    if len(set(slots)) != len(slots):
        twice = next(slot for slot in slots if slots.count(slot) > 1)
        raise ArgumentError(f"state_indices: expected each live slot once, got slot {twice} {slots.count(twice)} times")


def _refuse_half_a_norm(output_gate: torch.Tensor | None, norm_weight: torch.Tensor | None) -> None:
    if (output_gate is None) != (norm_weight is None):
        missing = "output_gate" if output_gate is None else "norm_weight"
        raise ArgumentError(f"output_gate and norm_weight: expected both or neither, got {missing}=None alone")


def _conv1d_silu(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_heads: int
) -> tuple[torch.Tensor, ...]:
    """y = bias + sum over taps of history * weight + x * last weight; SiLU; q, k, v as [n, H, D] each."""
    taps = weight.transpose(1, 2).reshape(x.size(1), weight.size(1))
    y = torch.einsum("nct,ct->nc", torch.cat([history, x.unsqueeze(2)], dim=2), taps)
    if bias is not None:
        y = y + bias.to(x.dtype)
    return F.silu(y).view(x.size(0), 3, num_heads, -1).unbind(1)


def _l2_normalised(a: torch.Tensor) -> torch.Tensor:
    return a * (a.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()


def _decay(raw_g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Decay per k channel: bounded exp(lb * sigmoid(exp(A_log) * g)), or exp(-exp(A_log) * softplus(g))."""
    g, a = raw_g + dt_bias, A_log.exp().unsqueeze(-1)
    if lower_bound is not None:
        return (lower_bound * (a * g).sigmoid()).exp()
    return (-a * torch.logaddexp(g, torch.zeros_like(g))).exp()


def _rounded(a: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    return rounded_to_bf16(a).to(a.dtype) if rounding is Rounding.CHAIN else a
