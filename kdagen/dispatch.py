"""From a layer's shape to the kernel that serves it: an exact match, or a reason."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kdagen.errors import NoKernelError
from kdagen.paths import generated_dir
from kdagen.spec import ConvLayout, DType, LayerShape

if TYPE_CHECKING:
    import torch

SEED_ARCHS = ("gfx942", "gfx950")
"""What `is_fused_kda_decode_supported` calls supported: MI300X/MI325X and MI350X/MI355X."""


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its variant name, what it serves, its source file and its extern "C" launcher.

    It serves batches whose rows times heads are at most `most_work` (None: all), unless one with a lower limit does.
    """

    name: str
    num_heads: int
    most_work: int | None
    target: str
    archs: tuple[str, ...]
    source: str
    launch_symbol: str


@cache
def table() -> tuple[Kernel, ...]:
    """The kernels of generated/registry.py."""
    path = generated_dir() / "registry.py"
    spec = importlib.util.spec_from_file_location("kdagen._generated_registry", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: tuple[tuple[Any, ...], ...] = module.KERNELS
    return tuple(
        Kernel(name, heads, work, target, tuple(archs), *rest) for name, heads, work, target, archs, *rest in rows
    )


_on_demand: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Add a kernel that was built on demand; a second one of the same name replaces the first."""
    _on_demand[kernel.name] = kernel


def kernels() -> tuple[Kernel, ...]:
    """Every kernel: the table's, then those built on demand."""
    return (*table(), *_on_demand.values())


def find(shape: LayerShape, arch: str, rows: int = 1) -> Kernel:
    """The kernel for batches of `rows` rows of a shape on an architecture such as "gfx942".

    Raises:
        NoKernelError: there is none; the message says why, what exists and how to add it.
    """
    reason = why_unsupported(shape, arch)
    if reason is not None:
        raise NoKernelError(reason)
    serving = by_work(shape.num_heads, arch)
    return next(k for k in serving if k.most_work is None or rows * shape.num_heads <= k.most_work)


def by_work(num_heads: int, arch: str) -> list[Kernel]:
    """The kernels of a head count on an architecture, the one for the smallest batches first."""
    found = [kernel for kernel in kernels() if kernel.num_heads == num_heads and arch in kernel.archs]
    return sorted(found, key=lambda kernel: math.inf if kernel.most_work is None else kernel.most_work)


def least_rows(num_heads: int, arch: str) -> list[int]:
    """For each kernel of a head count on an architecture, the rows of the smallest batch that it serves."""
    limits = [kernel.most_work for kernel in by_work(num_heads, arch)]
    return [1, *(limit // num_heads + 1 for limit in limits if limit is not None)]


def why_unsupported(shape: LayerShape, arch: str | None) -> str | None:
    """Why no kernel serves a shape on an architecture, or None if one does; `arch` None means that no GPU is here."""
    for name, got, expected in (
        ("head_dim", shape.head_dim, 128),
        ("conv_width", shape.conv_width, 4),
        ("num_spec", shape.num_spec, 0),
        ("input_dtype", shape.input_dtype, DType.BF16),
        ("conv_state_dtype", shape.conv_state_dtype, DType.BF16),
        ("state_dtype", shape.state_dtype, DType.FP32),
    ):
        if got != expected:
            return f"{name}: expected {_shown(expected)}, got {_shown(got)}"
    if shape.conv_layout not in tuple(ConvLayout):
        return f"conv_layout: expected one of SD, DS, got {shape.conv_layout!r}"
    served = sorted({kernel.num_heads for kernel in kernels() if arch is None or arch in kernel.archs} or _all_heads())
    if shape.num_heads not in served:
        return (
            f"num_heads: expected one of {', '.join(map(str, served))}, got {shape.num_heads}; "
            f"`kdagen.load(heads=[{shape.num_heads}])` builds one, a row in kdagen/variants.py keeps it"
        )
    archs = {a: None for kernel in kernels() if kernel.num_heads == shape.num_heads for a in kernel.archs}
    if arch not in archs:
        return f"arch: expected one of {', '.join(archs)}, got {'no GPU' if arch is None else arch}"
    return None


def _all_heads() -> set[int]:
    return {kernel.num_heads for kernel in kernels()}


def _shown(value: object) -> str:
    return value.value if isinstance(value, DType) else str(value)


def is_fused_kda_decode_supported(
    num_heads: int,
    head_dim: int,
    conv_width: int,
    num_spec: int,
    input_dtype: torch.dtype,
    conv_state_dtype: torch.dtype,
    recurrent_state_dtype: torch.dtype | None = None,
) -> bool:
    """Whether the loaded op serves a layer on the current GPU; for the reason of a False, see `kdagen.why_unsupported`.

    Called while a model is built: it compiles nothing, waits for no device and costs microseconds. False for another
    head count, head_dim other than 128, conv_width other than 4, num_spec other than 0, dtypes other than bfloat16 (and
    float32 for the recurrent state, which None means too), an op that is not loaded, or a device other than gfx942 and
    gfx950. Both conv cache layouts are served.
    """
    from kdagen import op

    shape = LayerShape(
        num_heads,
        head_dim,
        conv_width,
        num_spec,
        _dtype(input_dtype),
        _dtype(conv_state_dtype),
        DType.FP32 if recurrent_state_dtype is None else _dtype(recurrent_state_dtype),
    )
    arch = current_arch()
    return op.is_loaded() and arch in SEED_ARCHS and why_unsupported(shape, arch) is None


def _dtype(dtype: object) -> DType | str:
    return {"torch.bfloat16": DType.BF16, "torch.float32": DType.FP32}.get(str(dtype), str(dtype))


def current_arch() -> str | None:
    """Architecture of the current GPU such as "gfx942" or "sm_90", or None; asks the driver once per device."""
    import torch

    if not torch.cuda.is_available():
        return None
    return arch_of(torch.cuda.current_device())


@cache
def arch_of(device: int) -> str:
    """Architecture of a GPU by its index; asks the driver once."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    name: str = properties.gcnArchName
    return name.split(":")[0]
