"""The peers of `kdagen bench`: other projects' kernels for the same step, from where the user has them.

Nothing of theirs is kept here. A peer takes the arguments of one layer and gives a call that decodes that layer in
place; it is timed only where it computes what the op computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]
Arguments = Mapping[str, Any]

OUTPUT_TOLERANCE = 0.1
"""Largest difference from the op's output, of elements of size about 1: peers round to bf16 between their steps."""
STATE_TOLERANCE = 0.1
"""Largest difference from the op's state after one step from the same state of elements of size about 1."""


@dataclass(frozen=True)
class Peer:
    """Another implementation of the step.

    Attributes:
        name: its column in the table.
        heads: the head counts that it serves; None for all.
        prepare: from the op's arguments to a call that decodes in place; what it allocates or converts is not timed.
    """

    name: str
    heads: tuple[int, ...] | None
    prepare: Callable[[Arguments], Call]

    def serves(self, heads: int) -> bool:
        """Whether it takes this head count."""
        return self.heads is None or heads in self.heads


def fla_chain() -> Peer | None:
    """fla-core's unfused path: three conv updates, recurrence with the gates inside, and gated norm; None without it.

    Its conv caches have no slots, so the peer keeps dense ones of its own.
    """
    try:
        from fla.modules.causal_conv1d import causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except Exception as error:  # a broken installation of an optional peer must not end the run
        print(f"kdagen: without fla-core's chain: {error}", file=sys.stderr)
        return None

    def prepare(a: Arguments) -> Call:
        weights = packed_taps(a["weight"]).chunk(3)
        norm_weight = a["norm_weight"].to(torch.bfloat16)
        rows, heads = a["raw_beta"].shape[1:]
        slots = a["state_indices"].long()
        history = torch.nn.functional.pad(a["conv_state"][slots], (1, 0))
        caches = [cache.contiguous() for cache in history.chunk(3, dim=1)]
        starts = torch.arange(rows + 1, device=slots.device)

        def decode() -> None:
            q, k, v = (
                causal_conv1d_update(x, cache, weight=weight, activation="silu")[0].view(1, rows, heads, 128)
                for x, cache, weight in zip(a["x"].chunk(3, dim=1), caches, weights, strict=True)
            )
            o, _ = fused_recurrent_kda_fwd(
                q,
                k,
                v,
                a["raw_g"],
                a["raw_beta"],
                A_log=a["A_log"],
                dt_bias=a["dt_bias"],
                initial_state=a["state"],
                inplace_final_state=True,
                state_v_first=True,
                cu_seqlens=starts,
                ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=a["lower_bound"],
            )
            gate = a["output_gate"].view_as(o)
            a["out"].copy_(rms_norm_gated(o, gate, norm_weight, None, activation="sigmoid", eps=1e-5))

        return decode

    return Peer("fla chain", None, prepare)


def packed_taps(weight: torch.Tensor) -> torch.Tensor:
    """[3, taps, channels] fp32, as the op takes it, to [3 * channels, taps] bf16."""
    return weight.transpose(1, 2).flatten(0, 1).to(torch.bfloat16).contiguous()


def disagreement(peer: Peer, decode: Callable[..., object], arguments: Arguments) -> str | None:
    """What a peer computes otherwise than the op on one layer, or None; works on copies.

    Args:
        peer: who is asked.
        decode: the op, taking `arguments` by name.
        arguments: of one layer.
    """
    ours, theirs = copied(arguments), copied(arguments)
    decode(**ours)
    peer.prepare(theirs)()
    for name, tolerance in (("out", OUTPUT_TOLERANCE), ("state", STATE_TOLERANCE)):
        difference = (ours[name].float() - theirs[name].float()).abs().max().item()
        if not difference <= tolerance:
            return f"{name}: expected the op's within {tolerance}, got a difference of {difference:.3g}"
    return None


def copied(arguments: Arguments) -> dict[str, Any]:
    """The same call on copies of its tensors, with their strides."""
    return {
        name: (
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).copy_(value)
            if isinstance(value, torch.Tensor)
            else value
        )
        for name, value in arguments.items()
    }
