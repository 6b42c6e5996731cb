"""How far a result is from the oracle, and whether anything was written that should not have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kdagen.bf16 import rounded_to_bf16

STATE_TOLERANCE = 2e-6
"""Largest error of a head's state over the largest element of that state. fp32 arithmetic of some
ten roundings and hardware functions of 1 ulp (6e-8 each) stays below it; a bf16 rounding anywhere (4e-3) does not."""

OUTPUT_TOLERANCE_ULPS = 1.0
"""Largest distance of a bf16 output from the correctly rounded oracle, in units of the last place of bf16."""

ULP_FLOOR = 2.0**-10
"""An output below this fraction of its head's largest counts ulps of that size: a sum of 128 products that cancels
keeps the absolute error of its terms, not its own relative precision."""

MISROUNDED_SHARE = 0.01
"""Largest share of outputs that are not the correctly rounded oracle. An fp32 result is close enough to a rounding
boundary to fall on its other side about once in 10,000; truncation in place of rounding misses every second one."""

SNAPSHOT_LIMIT_BYTES = 2**28
"""A larger storage is a sparse pool that a copy would make real; only the emulator's own checks watch it."""

_BF16_SIGNIFICAND_BITS = 8
_BF16_SMALLEST = 2.0**-133


def state_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of any head, over that head's largest expected element; inf where Inf or NaN differ.

    Args:
        actual: [rows, heads, 128, 128] fp32.
        expected: the same shape, fp64.
    """
    actual = actual.double()
    if not _same_specials(actual, expected):
        return math.inf
    error = _finite(actual - expected).abs().amax(dim=(-2, -1))
    scale = _finite(expected).abs().amax(dim=(-2, -1))
    return _largest(error / scale.clamp_min(torch.finfo(torch.float32).tiny))


def output_ulps(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest distance of a bf16 output from the oracle rounded to bf16, in bf16 ulps; inf where Inf or NaN differ.

    Args:
        actual: [..., 128] bf16.
        expected: the same shape, fp64, unrounded.
    """
    rounded = rounded_to_bf16(expected).double()
    actual = actual.double()
    if not _same_specials(actual, rounded):
        return math.inf
    magnitude = _finite(rounded).abs()
    floor = magnitude.amax(dim=-1, keepdim=True) * ULP_FLOOR
    _, exponent = torch.frexp(torch.maximum(magnitude, floor))
    ulp = torch.ldexp(torch.ones_like(magnitude), exponent - _BF16_SIGNIFICAND_BITS).clamp_min(_BF16_SMALLEST)
    return _largest(_finite(actual - rounded).abs() / ulp)


def misrounded_share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the outputs that differ from the oracle rounded to bf16, those below the ulp floor left out.

    Args:
        actual: [..., 128] bf16.
        expected: the same shape, fp64, unrounded.
    """
    magnitude = _finite(expected).abs()
    counted = magnitude > magnitude.amax(dim=-1, keepdim=True) * ULP_FLOOR
    wrong = (actual != rounded_to_bf16(expected)) & counted
    return float(wrong.sum()) / max(1, int(counted.sum()))


def differing_words(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ; NaN equals the same NaN."""
    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    return int((actual.contiguous().view(bits) != expected.contiguous().view(bits)).sum())


class Snapshot:
    """The bytes of every storage up to SNAPSHOT_LIMIT_BYTES behind a call, to find what it wrote beyond its outputs."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._before: dict[int, torch.Tensor] = {}
        self._tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        for tensor in self._tensors.values():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before and storage.nbytes() <= SNAPSHOT_LIMIT_BYTES:
                self._before[storage.data_ptr()] = _bytes_of(tensor).clone()

    def stray_bytes(self, live: Sequence[int]) -> int:
        """Bytes that differ from the snapshot outside `out` and the `live` slots of conv_state and state."""
        after = {
            tensor.untyped_storage().data_ptr(): _bytes_of(tensor).clone()
            for tensor in self._tensors.values()
            if tensor.untyped_storage().data_ptr() in self._before
        }
        pools = [(self._tensors[name], list(live)) for name in ("conv_state", "state") if live]
        written: list[tuple[torch.Tensor, list[int] | None]] = [(self._tensors["out"], None), *pools]
        for tensor, slots in written:
            if tensor.untyped_storage().data_ptr() in self._before:
                before = _view_in(self._before[tensor.untyped_storage().data_ptr()], tensor)
                view = _view_in(after[tensor.untyped_storage().data_ptr()], tensor)
                if slots is None:
                    view.copy_(before)
                else:
                    view[slots] = before[slots]
        changed = [(now, self._before[address]) for address, now in after.items()]
        return sum(int((now != before).sum()) for now, before in changed if not torch.equal(now, before))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _view_in(storage: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The view that `tensor` is of its storage, on another copy of that storage."""
    return storage.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    infinite = torch.isinf(a) | torch.isinf(b)
    return bool((torch.isnan(a) == torch.isnan(b)).all()) and bool((a[infinite] == b[infinite]).all())


def _finite(a: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)


def _largest(a: torch.Tensor) -> float:
    return float(a.max()) if a.numel() else 0.0
