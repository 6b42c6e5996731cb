"""The fp32 mirrors of a layer's weights: staged once, restaged in place, and known when stale.

A mirror is the fp32 copy of one parameter in the kernel's layout. Its values are the parameter's, bit for bit, so it
can be rebuilt from the parameter alone, and prefill and decode see one set of weights.

C_local: channels of one of q, k, v on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kdagen.errors import ArgumentError
from kdagen.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class Mirror:
    """One parameter and its fp32 copy, for an argument of the op.

    A loader made for the same mirror keeps the same record. A parameter that was replaced by another tensor object
    needs a new Mirror.

    Attributes:
        name: the op's argument: weight, bias or norm_weight.
        param: [3 * C_local, 1, 4] (weight) or [n], fp32, bf16 or fp16.
        tensor: [3, 4, C_local] (weight) or [n], fp32, contiguous, on param's device.

    Raises:
        ArgumentError: a shape, dtype, stride or device is wrong.
    """

    name: str
    param: torch.Tensor
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ArgumentError unless the parameter and its mirror still have the forms above."""
        check_mirror(self.name, self.tensor, tuple(_source(self.name, self.param).shape))
        check_device(self.name, self.tensor, self.param)

    def is_stale(self) -> bool:
        """Whether either tensor changed since the mirror was staged; reads two counters and two addresses.

        It sees what torch's version counter sees: in-place operations (copy_, an optimizer's step, writes through
        views) and storage that was swapped. It does not see writes through `.data`, nor by kernels that torch knows
        nothing of: after those, `verify` or `refresh`. Inference tensors have no counter and are compared by value.
        """
        record = _RECORDS.get(self.tensor)
        if record is None or record.missing or record.stamp != _stamp(self.param, self.tensor):
            return True
        return (self.param.is_inference() or self.tensor.is_inference()) and not self.verify()

    def verify(self) -> bool:
        """Whether the mirror equals its parameter bit for bit; reads both, and waits for the device."""
        expected = _source(self.name, self.param).float().contiguous()
        return torch.equal(expected.view(torch.int32), self.tensor.view(torch.int32))

    def refresh(self) -> None:
        """Write the parameter's values into the mirror in place, on the current stream; its address stays.

        Raises:
            ArgumentError: a form above is broken, or the mirror is an inference tensor outside inference mode.
        """
        self.check()
        check_writable(self.name, self.tensor)
        parts = 3 if self.name == "weight" else 1
        with torch.no_grad(), recording(self.param, self.tensor, parts, frozenset(range(parts))):
            self.tensor.copy_(_source(self.name, self.param))


@dataclass(frozen=True, eq=False)
class StagedWeights:
    """Every mirror of one layer, at addresses that a captured graph may keep."""

    mirrors: tuple[Mirror, ...]

    def is_stale(self) -> bool:
        """Whether a mirror is stale, as cheaply and within the limits of `Mirror.is_stale`."""
        return any(mirror.is_stale() for mirror in self.mirrors)

    def verify(self) -> bool:
        """Whether every mirror equals its parameter bit for bit."""
        return all(mirror.verify() for mirror in self.mirrors)

    def refresh(self) -> None:
        """Restage every mirror in place after an update of the parameters; all are checked before one is written."""
        for mirror in self.mirrors:
            mirror.check()
            check_writable(mirror.name, mirror.tensor)
        for mirror in self.mirrors:
            mirror.refresh()

    def op_arguments(self) -> dict[str, torch.Tensor]:
        """The mirrors by the op's argument names.

        Raises:
            ArgumentError: a mirror is stale. A replayed graph does not come by here: ask before the replay.
        """
        stale = [mirror.name for mirror in self.mirrors if mirror.is_stale()]
        if stale:
            raise ArgumentError(
                f"{', '.join(stale)}: expected a mirror of the parameter as it is now, got one not staged since the "
                "parameter or the mirror changed; call refresh()"
            )
        return {mirror.name: mirror.tensor for mirror in self.mirrors}


def stage(
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    mirrors: Mapping[str, torch.Tensor] | None = None,
) -> StagedWeights:
    """The staged weights of one layer, from its parameters.

    Args:
        weight: [3 * C_local, 1, 4], the packed conv1d weight.
        bias: [3 * C_local], the conv1d bias, or None.
        norm_weight: [128], the output norm's weight, or None.
        mirrors: mirrors that exist, by the names above: the very tensors that the loaders were made with; they are kept
            and not written, the others are allocated and filled.

    Raises:
        ArgumentError: a shape, dtype, stride or device is wrong, or a mirror has no parameter.
    """
    given = {"weight": weight, "bias": bias, "norm_weight": norm_weight}
    params = {name: param for name, param in given.items() if param is not None}
    existing = dict(mirrors or {})
    if unknown := sorted(existing.keys() - params.keys()):
        raise ArgumentError(f"mirrors: expected names among {', '.join(params)}, got {', '.join(unknown)}")
    made = [Mirror(name, param, existing.get(name, _new_mirror(name, param))) for name, param in params.items()]
    for mirror in made:
        if mirror.name not in existing:
            mirror.refresh()
    return StagedWeights(tuple(made))


@dataclass(frozen=True)
class _Record:
    """What a mirror was staged from: the tensors' stamp then, and the parts (q, k, v) that were not staged yet."""

    stamp: tuple[int | None, ...]
    missing: frozenset[int]


_RECORDS: MutableMapping[torch.Tensor, _Record] = WeakTensorKeyDictionary()
"""By mirror. Weak and beside the tensors, so that a copied or moved mirror has no record and counts as stale."""


@contextlib.contextmanager
def recording(param: torch.Tensor, mirror: torch.Tensor | None, parts: int, staged: frozenset[int]) -> Iterator[None]:
    """Record that the body stages these of a mirror's parts (3 for q, k, v; else 1).

    Parts staged before count only if nothing else wrote since: loading q anew must not hide that k is stale. A body
    that fails leaves the old stamp, which no longer matches.
    """
    if mirror is None:
        yield
        return
    record = _RECORDS.get(mirror)
    fresh = record is not None and record.stamp == _stamp(param, mirror)
    missing = record.missing if record is not None and fresh else frozenset(range(parts))
    yield
    _RECORDS[mirror] = _Record(_stamp(param, mirror), missing - staged)


def _stamp(*tensors: torch.Tensor) -> tuple[int | None, ...]:
    """Version counter and address of each; inference tensors have no counter."""
    return tuple(n for t in tensors for n in (None if t.is_inference() else t._version, t.data_ptr()))


def _source(name: str, param: torch.Tensor) -> torch.Tensor:
    """The parameter as its mirror has it: a view [3, 4, C_local] of the packed conv weight, else [n]."""
    param = param.detach()
    if name != "weight":
        check_param(name, param, (param.numel(),))
        return param
    channels = param.shape[0] // 3 if param.dim() else 0
    check_param(name, param, (3 * channels, 1, KernelSpec.conv_width))
    return param.reshape(3, channels, KernelSpec.conv_width).transpose(1, 2)


def _new_mirror(name: str, param: torch.Tensor) -> torch.Tensor:
    """Never an inference tensor, which could not be refreshed outside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(_source(name, param).shape, dtype=torch.float32, device=param.device)


def check_shape(name: str, tensor: torch.Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ArgumentError unless the tensor has one of the shapes."""
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ArgumentError(f"{name}: expected {expected}, got {list(tensor.shape)}")


def check_param(name: str, param: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless the parameter has this shape and a dtype that fp32 holds."""
    check_shape(name, param, shape)
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError(f"{name}: expected torch.float32, torch.bfloat16 or torch.float16, got {param.dtype}")


def check_mirror(name: str, mirror: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless the mirror has this shape, fp32, contiguous."""
    check_shape(name, mirror, shape)
    if mirror.dtype is not torch.float32:
        raise ArgumentError(f"{name}: expected a torch.float32 mirror, got {mirror.dtype}")
    if not mirror.is_contiguous():
        raise ArgumentError(f"{name}: expected a contiguous mirror, got strides {list(mirror.stride())}")


def check_device(name: str, mirror: torch.Tensor, param: torch.Tensor) -> None:
    """Raise ArgumentError unless both have storage, on one device."""
    if param.is_meta:
        raise ArgumentError(f"{name}: expected a parameter with values, got one on the meta device")
    if mirror.device != param.device:
        raise ArgumentError(f"{name}: expected a mirror on {param.device}, with its parameter, got {mirror.device}")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError where torch would refuse a write."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{name}: expected a tensor that can be written, got an inference tensor outside inference mode"
        )
