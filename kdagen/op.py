"""The torch op: loading it, making it ready for graph capture, and calling it."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections.abc import Iterable, Sequence

import torch

from kdagen import build as _build
from kdagen import dispatch
from kdagen.abi import OP_NAME, KdaDecodeParams
from kdagen.errors import ArgumentError, LaunchError, NotReadyError, ToolchainError
from kdagen.paths import generated_dir
from kdagen.spec import KernelSpec
from kdagen.target import Target

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_ready: set[tuple[str, int, int]] = set()  # (device, heads, index of the kernel by work) that have been launched
_limits: dict[int, list[int]] = {}  # by head count: the most work of each of its kernels but the last


def is_loaded() -> bool:
    """Whether torch.ops.kdagen.fused_kda_decode exists in this process."""
    return _library is not None


def load(heads: Iterable[int] = (), *, archs: Sequence[str] = ()) -> None:
    """Make torch.ops.kdagen.fused_kda_decode exist: built if its sources or tools changed, else from the cache.

    On a ROCm build of torch, or a CUDA build that sees a GPU, the op has the kernels of the table; on any other it runs
    on CPU tensors alone.

    Args:
        heads: local head counts to have kernels for besides the table's; needs jinja2.
        archs: architectures to build for; empty takes torch's own variable, else those of the visible GPUs.

    Raises:
        SpecError: a head count that no kernel can have.
        ToolchainError: a tool is missing, no architecture is named, or `heads` is given where there is no GPU.
        BuildError: a compiler failed.
    """
    global _library
    wanted = [spec.num_heads for spec in map(KernelSpec, heads)]
    with _lock:
        target = _build.torch_target()
        chosen = _build.resolve_archs(target, archs) if target is not None else ()
        if _library is None:
            path = _build.build(table_request(target, chosen))
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            _library = ctypes.CDLL(str(path))
            torch.library.register_fake(f"kdagen::{OP_NAME}", _fake)
        have = {kernel.num_heads for kernel in dispatch.kernels() if target and kernel.target == target.name}
        for count in sorted(set(wanted) - have):
            if target is None:
                raise ToolchainError(
                    f"heads: expected a torch that sees a GPU to build a kernel for {count} heads, got torch "
                    f"{torch.__version__} without one; the op on CPU tensors takes every head count as it is"
                )
            _load_on_demand(count, target, chosen)


def _fake(*arguments: object) -> None:
    """The op on meta and fake tensors: nothing is returned, and all there is to check is that devices agree."""
    schema = torch.ops.kdagen.fused_kda_decode.default._schema
    named = {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=False)}
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.device != tensors["x"].device:
            raise ArgumentError(f"{name}: expected the device of x, {tensors['x'].device}, got {tensor.device}")


def table_request(target: Target | None, archs: Sequence[str]) -> _build.Request:
    """The extension of the committed sources: the binding with a target's kernels, or the binding alone."""
    names = {name: name for name in ("binding.cpp", "checks.h", "cpu.h")}
    if target is not None:
        names["kernels.inc"] = f"{target.name}.inc"
        names |= {kernel.source: kernel.source for kernel in dispatch.table() if kernel.target == target.name}
    texts = {name: (generated_dir() / file).read_text(encoding="utf-8") for name, file in names.items()}
    return _build.Request(texts, target, tuple(archs))


def _load_on_demand(num_heads: int, target: Target, archs: Sequence[str]) -> None:
    from kdagen.render import render
    from kdagen.variants import variants_of

    variants = variants_of(num_heads, target)
    path = _build.build(_build.Request({v.file_name: render(v) for v in variants}, target, tuple(archs)))
    library = ctypes.CDLL(str(path))
    assert _library is not None
    for variant in variants:
        launcher = ctypes.cast(getattr(library, variant.launch_symbol), ctypes.c_void_p)
        work = variant.band.most_work
        _library.kdagen_register_kernel(ctypes.c_int64(num_heads), ctypes.c_int64(work or 0), launcher)
        names = (variant.file_name, variant.launch_symbol)
        _limits.pop(num_heads, None)
        dispatch.register(dispatch.Kernel(variant.name, num_heads, work, target.name, target.archs, *names))


def prepare(heads: Iterable[int], *, device: torch.device | str | None = None, archs: Sequence[str] = ()) -> None:
    """Make a process ready to capture the op in a graph: load it and launch each kernel once on null rows.

    Args:
        heads: local head counts that will be called.
        device: where; None takes the current GPU, or the CPU where there is none.
        archs: as for `load`.

    Raises:
        what `load` raises, and NotReadyError inside a capture.
    """
    counts = list(heads)
    if _capturing():
        raise NotReadyError("expected kdagen.prepare() before the graph capture, got it inside one")
    load(counts if _build.torch_target() is not None else (), archs=archs)
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    place = _indexed(place)
    for count in counts:
        batches = [1] if place.index is None else dispatch.least_rows(count, dispatch.arch_of(place.index))
        for index, rows in enumerate(batches):
            for bound, norm, ds in itertools.product((-5.0, None), (True, False), (True, False)):
                _launch_on_null_rows(count, rows, place, bound, norm, ds)
            _ready.add((str(place), count, index))


def _launch_on_null_rows(
    num_heads: int, rows: int, device: torch.device, bound: float | None, norm: bool, ds: bool
) -> None:
    channels, bf16 = num_heads * 128, torch.bfloat16

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    conv = zeros(1, 3 * channels, 3, dtype=bf16) if ds else zeros(1, 3, 3 * channels, dtype=bf16).transpose(1, 2)
    torch.ops.kdagen.fused_kda_decode(
        zeros(rows, 3 * channels, dtype=bf16),
        zeros(3, 4, channels),
        None,
        conv,
        zeros(1, rows, num_heads, 128, dtype=bf16),
        zeros(1, rows, num_heads, dtype=bf16),
        zeros(num_heads),
        zeros(channels),
        torch.full((rows,), -1, dtype=torch.int32, device=device),
        zeros(1, num_heads, 128, 128),
        zeros(1, rows, num_heads, 128, dtype=bf16),
        bound,
        zeros(rows, num_heads, 128, dtype=bf16) if norm else None,
        zeros(128) if norm else None,
    )


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
    check_indices: bool = False,
) -> torch.Tensor:
    """One decode step of KDA for B rows and H heads: conv1d update, gated delta rule, gated RMSNorm, in one launch.

    All tensors are on one device. conv_state, state and out are written in place.

    Args:
        x: [B, 3*H*128] bf16, packed q, k, v; row stride free.
        weight: [3, 4, H*128] fp32, contiguous; taps oldest first.
        bias: [3*H*128] fp32 or None.
        conv_state: [slots, 3*H*128, 3] bf16; slot stride free; SD (strides 1, 3*H*128) or DS (strides 3, 1).
        raw_g: [1, B, H, 128] bf16; row stride free.
        raw_beta: [1, B, H] bf16, logits; row stride free.
        A_log: [H] fp32.
        dt_bias: [H*128] fp32.
        state_indices: [B] int32, any stride. A row is null if its slot is below `first_live_slot` or not below the
            number of slots: its output is zero and no slot is touched. Two rows must not name one live slot.
        state: [slots, H, 128 (v), 128 (k)] fp32; slot stride free, 16-byte aligned.
        out: [1, B, H, 128] bf16, row stride free; None allocates it.
        lower_bound: of the bounded decay gate exp(lower_bound * sigmoid(z)), below 0; None for the softplus gate.
        output_gate: [B, H, 128] or [1, B, H, 128] bf16, row stride free; with norm_weight, or None for no output norm.
        norm_weight: [128] fp32.
        norm_eps: added to the mean square of the output.
        first_live_slot: slots below it are padding; 0 where slot 0 is live.
        check_indices: first read state_indices back to the host and refuse slots past the pool and duplicates.

    Returns:
        out.

    Raises:
        NotReadyError: the op is not loaded, or a first call is made inside a graph capture.
        ValueError: an argument is wrong; the message names it, what was expected and what came. Nothing was written.
        RuntimeError: the launch failed.
    """
    if _library is None:
        raise NotReadyError(
            "expected kdagen.load() before the first call (kdagen.prepare() before a graph capture), got none"
        )
    if out is None:
        out = torch.empty((1, x.size(0), *state.shape[1:3]), dtype=x.dtype, device=x.device)
    if check_indices:
        _check_indices(state_indices, first_live_slot, state.size(0))
    if not torch.compiler.is_compiling() and x.is_cuda:
        _note_first_call(x.device, state.size(1), x.size(0))
    torch.ops.kdagen.fused_kda_decode(
        x,
        weight,
        bias,
        conv_state,
        raw_g,
        raw_beta,
        A_log,
        dt_bias,
        state_indices,
        state,
        out,
        lower_bound,
        output_gate,
        norm_weight,
        norm_eps,
        first_live_slot,
    )
    return out


def launch(num_heads: int, params: KdaDecodeParams, stream: int = 0) -> None:
    """Launch a kernel by raw device addresses, for an engine without torch tensors. Nothing is checked.

    Args:
        num_heads: local head count; with params.rows it chooses the kernel.
        params: addresses, strides in elements and numbers; see `kdagen.abi.PARAMS`.
        stream: address of the HIP stream; 0 is the default stream.

    Raises:
        NotReadyError: the op is not loaded.
        LaunchError: there is no such kernel, or the device refused it.
    """
    if _library is None:
        raise NotReadyError("expected kdagen.load() before the first launch, got none")
    _library.kdagen_launch.restype = ctypes.c_char_p
    error = _library.kdagen_launch(ctypes.c_int64(num_heads), ctypes.byref(params), ctypes.c_void_p(stream))
    if error is not None:
        raise LaunchError(error.decode())


def _check_indices(state_indices: torch.Tensor, first_live_slot: int, slots: int) -> None:
    indices = state_indices.tolist()
    for slot in indices:
        if slot >= slots:
            raise ArgumentError(f"state_indices: expected slots below {slots}, got {slot}")
    live = [slot for slot in indices if slot >= first_live_slot]
    for slot in live:
        if live.count(slot) > 1:
            raise ArgumentError(f"state_indices: expected each live slot once, got {slot} {live.count(slot)} times")


def _note_first_call(device: torch.device, num_heads: int, rows: int) -> None:
    """The first launch of a kernel loads it onto the device, which a capture does not survive."""
    if num_heads not in _limits and device.index is not None:
        kernels = dispatch.by_work(num_heads, dispatch.arch_of(device.index))
        _limits[num_heads] = [kernel.most_work for kernel in kernels if kernel.most_work is not None]
    key = (str(device), num_heads, bisect.bisect_left(_limits.get(num_heads, []), rows * num_heads))
    if key in _ready:
        return
    if _capturing():
        raise NotReadyError(
            f"expected kdagen.prepare(heads=[{num_heads}]) before the graph capture, got the first call inside one"
        )
    _ready.add(key)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
