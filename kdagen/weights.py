"""From a checkpoint to a rank's parameters and their mirrors: tensor-parallel loaders that write all or nothing.

H: heads of the model, D = 128: channels of a head, C: channels of one of q, k, v on all ranks, C_local: on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from kdagen.errors import ArgumentError, WeightDTypeError
from kdagen.spec import KernelSpec
from kdagen.staged import (
    Mirror,
    StagedWeights,
    check_device,
    check_mirror,
    check_param,
    check_shape,
    check_writable,
    recording,
    stage,
)

__all__ = [
    "Conv1dWeightLoader",
    "Mirror",
    "NormWeightLoader",
    "StagedWeights",
    "make_decode_conv1d_weight_loader",
    "make_decode_norm_weight_loader",
    "shard_A_log",
    "shard_dt_bias",
    "stage",
]

HEAD_DIM, CONV_WIDTH = KernelSpec.head_dim, KernelSpec.conv_width

_VALUES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


class Conv1dWeightLoader(Protocol):
    """Loads this rank's part of q, k or v; what `make_decode_conv1d_weight_loader` returns."""

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | None = None,
        *,
        scale: torch.Tensor | float | None = None,
    ) -> None:
        """Write the parameter and its mirror, or raise and write nothing.

        Args:
            param: [C_local of q + k + v, 1, 4], fp32, bf16 or fp16; on the meta device nothing is written.
            loaded_weight: [C, 4] or [C, 1, 4] of one of q, k, v, unsharded; with no shard id q, k and v stacked.
            loaded_shard_id: 0 (q), 1 (k), 2 (v), or None: a packed q|k|v tensor, of which each is cut.
            scale: factor of int8 or float8 codes: one number, or one per channel as [C], [C, 1] or [C, 1, 1].

        Raises:
            ArgumentError: a shape, device or shard id is wrong.
            WeightDTypeError: codes without scale, or values that param's dtype would round.
        """


class NormWeightLoader(Protocol):
    """Loads the output norm's weight; what `make_decode_norm_weight_loader` returns."""

    def __call__(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, *, scale: torch.Tensor | float | None = None
    ) -> None:
        """Write the parameter and its mirror, or raise and write nothing.

        Args:
            param: [D], fp32, bf16 or fp16; on the meta device nothing is written.
            loaded_weight: [D]; every rank has all of it.
            scale: factor of int8 or float8 codes: one number, or [D].

        Raises:
            ArgumentError: a shape or device is wrong.
            WeightDTypeError: codes without scale, or values that param's dtype would round.
        """


def make_decode_conv1d_weight_loader(
    dims: Sequence[int], tp_size: int, tp_rank: int, decode_conv1d_weight: torch.Tensor | None
) -> Conv1dWeightLoader:
    """Loader of the packed conv1d weight and of its mirror.

    Args:
        dims: channels of q, k and v on all ranks together.
        tp_size: tensor-parallel ranks, which must divide every dim, in whole heads where a dim is whole heads.
        tp_rank: this rank, from 0 to tp_size - 1.
        decode_conv1d_weight: the mirror, [3, 4, C_local] fp32 contiguous, or None: the parameter alone is loaded.

    Raises:
        ArgumentError: the channels or heads do not divide, the rank is none, or the mirror has another form.
    """
    local = _local_channels(dims, tp_size, tp_rank)
    starts = (0, *itertools.accumulate(local))
    mirror = decode_conv1d_weight
    if mirror is not None:
        if len(set(local)) > 1:
            raise ArgumentError(f"dims: expected equal channels of q, k and v for a mirror, got {list(dims)}")
        check_mirror("decode_conv1d_weight", mirror, (3, CONV_WIDTH, local[0]))

    def weight_loader(
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | None = None,
        *,
        scale: torch.Tensor | float | None = None,
    ) -> None:
        shards = _shards(loaded_shard_id)
        channels = [dims[shard] for shard in shards]
        check_param("param", param, (starts[-1], 1, CONV_WIDTH))
        total = sum(channels)
        check_shape("loaded_weight", loaded_weight, (total, CONV_WIDTH), (total, 1, CONV_WIDTH))
        taps = _dequantised(loaded_weight.reshape(total, CONV_WIDTH), scale)
        if param.is_meta:
            return
        _check_targets(param, mirror)
        parts = {
            shard: _held_by(param, of_all_ranks[tp_rank * local[shard] : (tp_rank + 1) * local[shard]])
            for shard, of_all_ranks in zip(shards, taps.split_with_sizes(channels), strict=True)
        }
        with torch.no_grad(), recording(param, mirror, 3, frozenset(shards)):
            for shard, part in parts.items():
                param[starts[shard] : starts[shard + 1], 0].copy_(part)
                if mirror is not None:
                    mirror[shard].copy_(part.t())

    return weight_loader


def make_decode_norm_weight_loader(decode_norm_weight: torch.Tensor | None) -> NormWeightLoader:
    """Loader of the output norm's weight and of its mirror: [D] fp32 contiguous, or None: the parameter alone.

    Raises:
        ArgumentError: the mirror has another form.
    """
    mirror = decode_norm_weight
    if mirror is not None:
        check_mirror("decode_norm_weight", mirror, (mirror.numel(),))

    def weight_loader(
        param: torch.Tensor, loaded_weight: torch.Tensor, *, scale: torch.Tensor | float | None = None
    ) -> None:
        size = param.numel() if mirror is None else mirror.numel()
        check_param("param", param, (size,))
        check_shape("loaded_weight", loaded_weight, (size,))
        loaded = _dequantised(loaded_weight.unsqueeze(1), scale).squeeze(1)
        if param.is_meta:
            return
        _check_targets(param, mirror)
        value = _held_by(param, loaded)
        with torch.no_grad(), recording(param, mirror, 1, frozenset({0})):
            param.copy_(value)
            if mirror is not None:
                mirror.copy_(value)

    return weight_loader


def shard_A_log(loaded: torch.Tensor, num_heads: int, tp_size: int, tp_rank: int) -> torch.Tensor:
    """This rank's A_log: a new fp32 tensor [H / tp_size] of a checkpoint's [H] or [1, 1, H, 1].

    Raises:
        ArgumentError: another shape, heads that do not divide, or a rank outside 0 to tp_size - 1.
        WeightDTypeError: quantised codes.
    """
    return _shard_heads("A_log", loaded, ((num_heads,), (1, 1, num_heads, 1)), num_heads, tp_size, tp_rank)


def shard_dt_bias(loaded: torch.Tensor, num_heads: int, tp_size: int, tp_rank: int) -> torch.Tensor:
    """This rank's dt_bias: a new fp32 tensor [H / tp_size * D] of a checkpoint's [H * D] or [H, D].

    Raises:
        ArgumentError: another shape, heads that do not divide, or a rank outside 0 to tp_size - 1.
        WeightDTypeError: quantised codes.
    """
    shapes = ((num_heads * HEAD_DIM,), (num_heads, HEAD_DIM))
    return _shard_heads("dt_bias", loaded, shapes, num_heads, tp_size, tp_rank)


def _check_count(name: str, value: int, first: int = 1, last: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < first or (last is not None and value > last):
        span = f"of {first} or more" if last is None else f"from {first} to {last}"
        raise ArgumentError(f"{name}: expected an int {span}, got {value!r}")


def _check_ranks(tp_size: int, tp_rank: int) -> None:
    _check_count("tp_size", tp_size)
    _check_count("tp_rank", tp_rank, 0, tp_size - 1)


def _local_heads(num_heads: int, tp_size: int) -> int:
    if num_heads % tp_size:
        raise ArgumentError(f"tp_size: expected a divisor of the {num_heads} heads, got {tp_size}")
    return num_heads // tp_size


def _local_channels(dims: Sequence[int], tp_size: int, tp_rank: int) -> list[int]:
    """Channels of q, k and v on this rank. Channels that are whole heads stay whole heads: 96 heads have 192 channels
    for each of 64 ranks, which is a head and a half."""
    if len(dims) != 3:
        raise ArgumentError(f"dims: expected the channels of q, k and v, got {list(dims)}")
    _check_ranks(tp_size, tp_rank)
    for dim in dims:
        _check_count("dims", dim)
        if dim % HEAD_DIM == 0:
            _local_heads(dim // HEAD_DIM, tp_size)
        elif dim % tp_size:
            raise ArgumentError(f"tp_size: expected a divisor of the {dim} channels, got {tp_size}")
    return [dim // tp_size for dim in dims]


def _shards(loaded_shard_id: int | None) -> tuple[int, ...]:
    if loaded_shard_id is None:
        return (0, 1, 2)
    if type(loaded_shard_id) is not int or loaded_shard_id not in (0, 1, 2):
        raise ArgumentError(f"loaded_shard_id: expected 0 (q), 1 (k), 2 (v) or None, got {loaded_shard_id!r}")
    return (loaded_shard_id,)


def _check_targets(param: torch.Tensor, mirror: torch.Tensor | None) -> None:
    check_writable("param", param)
    if mirror is not None:
        check_writable("mirror", mirror)
        check_device("mirror", mirror, param)


def _dequantised(rows: torch.Tensor, scale: torch.Tensor | float | None, name: str = "loaded_weight") -> torch.Tensor:
    """[n, k] values in fp32, codes times scale; fp64 is rounded once."""
    expected, form = (_VALUES, "without a scale") if scale is None else (_CODES, "with a scale")
    if rows.dtype not in expected:
        raise WeightDTypeError(f"{name}: expected one of {_listed(expected)} {form}, got {rows.dtype} {form}")
    values = rows.detach().float()
    if scale is None:
        return values
    factor = scale.detach() if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=torch.float32)
    if factor.dtype not in _VALUES:
        raise WeightDTypeError(f"scale: expected one of {_listed(_VALUES)}, got {factor.dtype}")
    n = len(rows)
    check_shape("scale", factor, (), (1,), (n,), (n, 1), (n, 1, 1))
    return values * factor.float().reshape(-1, 1).to(values.device)


def _held_by(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The fp32 value, if param's dtype holds it exactly: rounding once here is rounding for good."""
    if value.is_meta:
        raise ArgumentError("loaded_weight: expected a tensor with values, got one on the meta device")
    held = value.to(param.dtype).float()
    if not torch.allclose(held, value, rtol=0.0, atol=0.0, equal_nan=True):
        raise WeightDTypeError(
            f"param: expected torch.float32, which holds the loaded values exactly, got {param.dtype}, which rounds "
            f"them; make the parameter float32, or load loaded_weight.to({param.dtype}) if rounding is meant"
        )
    return held


def _shard_heads(
    name: str, loaded: torch.Tensor, shapes: tuple[tuple[int, ...], ...], num_heads: int, tp_size: int, tp_rank: int
) -> torch.Tensor:
    _check_count("num_heads", num_heads)
    _check_ranks(tp_size, tp_rank)
    local = _local_heads(num_heads, tp_size)
    check_shape(name, loaded, *shapes)
    heads = _dequantised(loaded.reshape(num_heads, -1), None, name)
    return heads[tp_rank * local : (tp_rank + 1) * local].flatten().clone()


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
