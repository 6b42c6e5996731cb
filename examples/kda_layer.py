"""A whole KDA layer on kdagen: checkpoint, tensor-parallel shards, staged weights, a paged pool, a decode loop.

Run it: `python examples/kda_layer.py`. It writes a small checkpoint, loads it on 1, 2 and 4 ranks, decodes 64 tokens of
three requests with padding rows in the batch, and compares every step with an unsharded fp64 layer. It needs no GPU; to
run on one, add `--device cuda`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import kdagen
from kdagen import reference
from kdagen.weights import StagedWeights

HEAD_DIM, CONV_WIDTH, LOW_RANK = 128, 4, 128
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Config:
    """Dimensions of the layer; `lower_bound` None chooses the softplus gate."""

    hidden: int = 256
    num_heads: int = 4
    lower_bound: float | None = -5.0
    norm_eps: float = 1e-5

    @property
    def channels(self) -> int:
        return self.num_heads * HEAD_DIM


def make_checkpoint(config: Config, path: Path, seed: int = 0) -> None:
    """Write a state dict with the names and shapes of KDA checkpoints: A_log [1, 1, H, 1], conv weights [C, 1, 4]."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(size, generator=g) * scale).to(BF16)

    c, h = config.channels, config.num_heads
    save_file(
        {
            **{f"{name}_proj.weight": normal(c, config.hidden, scale=config.hidden**-0.5) for name in "qkv"},
            **{f"{name}_conv1d.weight": normal(c, 1, CONV_WIDTH, scale=0.5) for name in "qkv"},
            "f_a_proj.weight": normal(LOW_RANK, config.hidden, scale=config.hidden**-0.5),
            "f_b_proj.weight": normal(c, LOW_RANK, scale=LOW_RANK**-0.5),
            "g_a_proj.weight": normal(LOW_RANK, config.hidden, scale=config.hidden**-0.5),
            "g_b_proj.weight": normal(c, LOW_RANK, scale=LOW_RANK**-0.5),
            "b_proj.weight": normal(h, config.hidden, scale=config.hidden**-0.5),
            "A_log": torch.rand(1, 1, h, 1, generator=g).mul(15).add(1).log(),
            "dt_bias": torch.randn(c, generator=g),
            "o_norm.weight": 1 + normal(HEAD_DIM, scale=0.1),
            "o_proj.weight": normal(config.hidden, c, scale=c**-0.5),
        },
        path,
    )


class KdaLayer(torch.nn.Module):
    """One rank's shard of a KDA layer that decodes one token per row."""

    def __init__(self, config: Config, tp_size: int = 1, tp_rank: int = 0) -> None:
        super().__init__()
        self.config, self.tp_size, self.tp_rank = config, tp_size, tp_rank
        self.local_heads = config.num_heads // tp_size
        local = self.local_heads * HEAD_DIM

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False, dtype=BF16)

        self.qkv_proj = linear(config.hidden, 3 * local)
        self.f_a_proj, self.f_b_proj = linear(config.hidden, LOW_RANK), linear(LOW_RANK, local)
        self.g_a_proj, self.g_b_proj = linear(config.hidden, LOW_RANK), linear(LOW_RANK, local)
        self.b_proj = linear(config.hidden, self.local_heads)
        self.o_proj = linear(local, config.hidden)
        self.conv1d_weight = torch.nn.Parameter(torch.empty(3 * local, 1, CONV_WIDTH, dtype=BF16), requires_grad=False)
        self.norm_weight = torch.nn.Parameter(torch.empty(HEAD_DIM, dtype=BF16), requires_grad=False)
        # What the kernel reads: fp32, width-major, at addresses that stay.
        self.decode_conv1d_weight = torch.empty(3, CONV_WIDTH, local)
        self.decode_norm_weight = torch.empty(HEAD_DIM)
        self.A_log = self.dt_bias = torch.empty(0)
        self.staged: StagedWeights

    @torch.no_grad()
    def load(self, checkpoint: Path, device: str) -> None:
        """Load this rank's shard of every tensor, and stage the mirrors that the kernel reads."""
        config, tensors = self.config, load_file(checkpoint, device=device)

        def rows(name: str) -> torch.Tensor:
            return tensors[name].chunk(self.tp_size)[self.tp_rank]

        self.qkv_proj.weight.copy_(torch.cat([rows(f"{name}_proj.weight") for name in "qkv"]))
        for name in ("f_b_proj", "g_b_proj", "b_proj"):
            getattr(self, name).weight.copy_(rows(f"{name}.weight"))
        for name in ("f_a_proj", "g_a_proj"):
            getattr(self, name).weight.copy_(tensors[f"{name}.weight"])
        self.o_proj.weight.copy_(tensors["o_proj.weight"].chunk(self.tp_size, dim=1)[self.tp_rank])

        load_conv = kdagen.make_decode_conv1d_weight_loader(
            [config.channels] * 3, self.tp_size, self.tp_rank, self.decode_conv1d_weight
        )
        for shard, name in enumerate("qkv"):
            load_conv(self.conv1d_weight, tensors[f"{name}_conv1d.weight"], shard)
        kdagen.make_decode_norm_weight_loader(self.decode_norm_weight)(self.norm_weight, tensors["o_norm.weight"])
        shard_of = (config.num_heads, self.tp_size, self.tp_rank)
        self.A_log = kdagen.shard_A_log(tensors["A_log"], *shard_of)
        self.dt_bias = kdagen.shard_dt_bias(tensors["dt_bias"], *shard_of)
        self.staged = kdagen.stage(
            self.conv1d_weight,
            norm_weight=self.norm_weight,
            mirrors={"weight": self.decode_conv1d_weight, "norm_weight": self.decode_norm_weight},
        )

    def inputs(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """The op's per-token arguments of a batch [B, hidden]."""
        rows = hidden.size(0)
        heads = (rows, self.local_heads, HEAD_DIM)
        return {
            "x": self.qkv_proj(hidden),
            "raw_g": self.f_b_proj(self.f_a_proj(hidden)).view(1, *heads),
            "raw_beta": self.b_proj(hidden).unsqueeze(0),
            "output_gate": self.g_b_proj(self.g_a_proj(hidden)).view(heads),
        }

    def constants(self) -> dict[str, object]:
        """The op's arguments that do not change between tokens; refuses weights whose mirrors are stale."""
        return {
            "bias": None,
            **self.staged.op_arguments(),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.config.lower_bound,
            "norm_eps": self.config.norm_eps,
        }

    @torch.no_grad()
    def decode(self, hidden: torch.Tensor, pool: Pool, indices: torch.Tensor) -> torch.Tensor:
        """One token per row: [B, hidden] to this rank's part of [B, hidden]; the pool's slots are updated in place."""
        out = kdagen.fused_kda_decode(
            **self.inputs(hidden), **self.constants(), **pool.arguments(), state_indices=indices
        )
        return self.o_proj(out.reshape(hidden.size(0), -1))


class Pool:
    """A paged pool: a slot's page holds its state (fp32), then its conv window (bf16); slot 0 is padding."""

    def __init__(self, slots: int, num_heads: int, device: str) -> None:
        state, window = num_heads * HEAD_DIM * HEAD_DIM, 3 * num_heads * HEAD_DIM * (CONV_WIDTH - 1)
        page = state + (window // 2 + 3) // 4 * 4  # in fp32 words, a multiple of 16 bytes
        pages = torch.zeros(slots, page, device=device)
        self.state = pages[:, :state].unflatten(1, (num_heads, HEAD_DIM, HEAD_DIM))
        halves = pages.view(BF16)[:, 2 * state : 2 * state + window]
        self.conv_state = halves.unflatten(1, (CONV_WIDTH - 1, 3 * num_heads * HEAD_DIM)).transpose(1, 2)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {"state": self.state, "conv_state": self.conv_state}


def run(config: Config, checkpoint: Path, tp_size: int, tokens: int, device: str) -> tuple[float, float]:
    """Decode on `tp_size` ranks; the largest errors of any state and of any output, against an unsharded fp64 run."""
    with torch.device(device):
        ranks = [KdaLayer(config, tp_size, rank) for rank in range(tp_size)]
        whole = KdaLayer(config)
    for layer in (*ranks, whole):
        layer.load(checkpoint, device)
    slots, live = 6, [4, 1, 3]
    indices = torch.tensor([*live, 0, 0], dtype=torch.int32, device=device)  # two padding rows fill the batch
    pools = [Pool(slots, layer.local_heads, device) for layer in ranks]
    state = torch.zeros(slots, config.num_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float64, device=device)
    window = torch.zeros(slots, 3 * config.channels, CONV_WIDTH - 1, dtype=BF16, device=device)
    g = torch.Generator().manual_seed(1)
    state_error = output_error = 0.0
    for _ in range(tokens):
        hidden = torch.randn(len(indices), config.hidden, generator=g).to(device, BF16)
        partial = [layer.decode(hidden, pool, indices) for layer, pool in zip(ranks, pools, strict=True)]
        output = torch.stack([part.double() for part in partial]).sum(0)  # the all-reduce

        with torch.no_grad():
            exact = reference.fused_kda_decode(
                **whole.inputs(hidden), **whole.constants(), state=state, conv_state=window, state_indices=indices
            )
            expected = exact.out[0].flatten(1) @ whole.o_proj.weight.double().t()
        rows = range(len(live))
        state[live], window[live] = exact.state[rows], exact.conv_state[rows]
        sharded = torch.cat([pool.state[live] for pool in pools], dim=1).double()
        state_error = max(state_error, float((sharded - state[live]).abs().max() / state.abs().max()))
        output_error = max(output_error, float((output - expected).abs().max() / expected.abs().max()))
        assert (output[len(live) :] == 0).all(), "a padding row has an output"
    assert all((pool.state[[0, 2, 5]] == 0).all() for pool in pools), "a slot that no row named was touched"
    return state_error, output_error


def main() -> int:
    """Run every combination and print what held; 1 if something did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode (default: 64)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU (default: cpu)")
    arguments = parser.parse_args()
    tokens, device = arguments.tokens, arguments.device
    kdagen.prepare([1, 2, 4], device=device)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "layer.safetensors"
        for bound in (-5.0, None):
            config = Config(lower_bound=bound)
            make_checkpoint(config, checkpoint)
            for tp_size in (1, 2, 4):
                start = time.monotonic()
                state_error, output_error = run(config, checkpoint, tp_size, tokens, device)
                # The state: fp32 in place of fp64. The output: bf16 roundings of the op's and each rank's result.
                good = state_error < 1e-5 and output_error < 2e-2
                failed |= not good
                print(
                    f"{'bounded ' if bound else 'softplus'} gate, {tp_size} ranks, {tokens} tokens, 3 requests and 2 "
                    f"padding rows: state within {state_error:.1e}, output within {output_error:.1e} of the unsharded "
                    f"fp64 layer, {time.monotonic() - start:.1f} s{'' if good else '  FAILED'}"
                )
    print("failed" if failed else "Shards, staged weights and the paged pool give what one fp64 layer gives.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
