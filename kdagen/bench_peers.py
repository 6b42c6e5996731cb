"""The peers of `kdagen bench`: other projects' kernels for the same step, from where the user has them.

Nothing of theirs is kept here. A peer takes the arguments of one layer and gives a call that decodes that layer in
place; it is timed only where it computes what the op computes.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdagen.abi import OP_SCHEMA
from kdagen.build import changed_environment
from kdagen.errors import BuildError, SpecError, ToolchainError
from kdagen.paths import cache_dir

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


# ---- vLLM's fused kernel ---------------------------------------------------------------------------------------------

VLLM_HEADS = (12, 24, 48, 96)
VLLM_SOURCES = {False: "csrc/kimi_k3/fused_kda_decode_kernel.cu", True: "csrc/kimi_k3/fused_kda_decode_kernel_rocm.cu"}
"""By whether torch is a ROCm build."""
VLLM_FLAGS = {
    False: (
        "-O3",
        "--use_fast_math",
        # torch forbids the operators of half types by default, and vLLM's build takes that back.
        *(
            f"-U__CUDA_NO_{what}__"
            for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
        ),
    ),
    True: ("-O3",),
}
"""As vLLM's CMakeLists.txt has them for these files."""

# Its include of vLLM's torch helpers is all that the kernel needs from the rest of vLLM's C++.
_TORCH_UTILS = """#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime.h>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);

inline cudaStream_t get_current_cuda_stream(int32_t device_index) {
  void *stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream) == 0, "no current stream");
  return static_cast<cudaStream_t>(stream);
}
"""

_VLLM_BINDING = """#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;
void fused_kda_decode(Tensor const &x, Tensor const &weight, std::optional<Tensor> bias, Tensor &conv_state,
                      Tensor const &raw_g, Tensor const &raw_beta, Tensor const &a_log, Tensor const &dt_bias,
                      Tensor const &state_indices, Tensor &state, Tensor &out, std::optional<double> lower_bound,
                      std::optional<Tensor> output_gate, std::optional<Tensor> norm_weight, double norm_eps);

STABLE_TORCH_LIBRARY(kdagen_peer_vllm, m) { m.def("%s"); }
STABLE_TORCH_LIBRARY_IMPL(kdagen_peer_vllm, CUDA, m) { m.impl("fused_kda_decode", TORCH_BOX(&fused_kda_decode)); }
"""


def vllm_fused(tree: Path) -> Peer:
    """vLLM's fused decode kernel, compiled from its source tree with the flags of its own CMakeLists.txt.

    Raises:
        SpecError: the tree has no such kernel.
        BuildError: it does not compile.
    """
    source = tree / VLLM_SOURCES[torch.version.hip is not None]
    if not source.is_file():
        raise SpecError(f"--vllm-src: expected a vLLM source tree with {source.relative_to(tree)}, got {str(tree)!r}")
    _build_vllm(source, tree)
    decode = torch.ops.kdagen_peer_vllm.fused_kda_decode

    def prepare(a: Arguments) -> Call:
        names = ("x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias", "state_indices", "state")
        tensors = [a[name] for name in names]
        rest = (a["out"], a["lower_bound"], a["output_gate"], a["norm_weight"])
        return lambda: decode(*tensors, *rest)

    return Peer("vllm", VLLM_HEADS, prepare)


def _build_vllm(source: Path, tree: Path) -> None:
    from torch.utils import cpp_extension

    texts = {
        "csrc/torch_utils.h": _TORCH_UTILS,
        f"csrc/kimi_k3/{source.name}": source.read_text(encoding="utf-8"),
        "csrc/binding.cpp": _VLLM_BINDING % OP_SCHEMA.replace(", int first_live_slot=1", ""),
    }
    flags = VLLM_FLAGS[torch.version.hip is not None]
    key = hashlib.sha256(repr((texts, flags, torch.__version__)).encode()).hexdigest()[:16]
    folder = cache_dir("peers") / key
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    print("kdagen: building vLLM's kernel (about a minute, once)", file=sys.stderr, flush=True)
    chosen: dict[str, str | None] = {}
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        chosen = {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}" + ("a" if (major, minor) == (9, 0) else "")}
    try:
        with changed_environment(chosen):
            cpp_extension.load(
                f"kdagen_peer_{key}",
                [str(folder / name) for name in texts if name.endswith((".cu", ".cpp"))],
                extra_cuda_cflags=list(flags),
                extra_include_paths=[str(tree / "csrc")],
                build_directory=str(folder),
                is_python_module=False,
            )
    except RuntimeError as error:
        log = folder / "build.log"
        log.write_text(str(error), encoding="utf-8")
        raise BuildError(f"--vllm-src: expected {source.name} to compile, got an error (all of it in {log})") from error


# ---- chains of unfused kernels ---------------------------------------------------------------------------------------


class _StandIn(types.ModuleType):
    """A module of which only names are needed: each is a class that decorates with, and inherits, nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"register": staticmethod(lambda *_: lambda cls: cls)})


class _Platform:
    """What vLLM's Triton modules ask about the device."""

    def is_arch_support_pdl(self) -> bool:
        """Dependent launches: from Hopper on."""
        return torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9

    def is_cuda_alike(self) -> bool:
        """CUDA or ROCm."""
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        answers = {"is_cuda": torch.version.hip is None, "is_rocm": torch.version.hip is not None}
        return lambda *_, **__: answers.get(name, False)


_VLLM_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_VLLM_NORM = "vllm.third_party.flash_linear_attention.ops.kda"
_VLLM_DELTA = {
    False: "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent",
    True: "vllm.models.kimi_k3.amd.ops.third_party.kda.fused_recurrent",
}
_VLLM_STAND_INS = (
    "vllm.model_executor.custom_op",
    "vllm.utils.gpu_sync_debug",
    "vllm.utils.torch_utils",
)


def _import_from_tree(tree: Path, names: Sequence[str]) -> list[types.ModuleType]:
    """Import modules of vLLM's source tree without running its packages, which import all of vLLM."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    if "vllm" in sys.modules and not isinstance(sys.modules["vllm"], _StandIn):
        raise SpecError("--vllm-src: expected a process that has not imported vllm, got one that has")
    with_values: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        **{name: {} for name in _VLLM_STAND_INS},
    }
    for name in (*names, *with_values, "vllm.utils.math_utils"):
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:
                module = _StandIn(package)
                module.__path__ = [str(tree.joinpath(*parts[:length]))]
                sys.modules[package] = module
    for name, values in with_values.items():
        vars(sys.modules.setdefault(name, _StandIn(name))).update(values)
    return [importlib.import_module(name) for name in names]


def vllm_chain(tree: Path) -> Peer:
    """vLLM's unfused path: its Triton conv update, packed recurrence and gated norm, and the copy into `out`.

    Raises:
        SpecError: the tree lacks one of the modules.
        ToolchainError: triton is not installed.
    """
    names = [_VLLM_CONV, _VLLM_DELTA[torch.version.hip is not None], _VLLM_NORM]
    for name in names:
        if not tree.joinpath(*name.split(".")).with_suffix(".py").is_file():
            raise SpecError(f"--vllm-src: expected a vLLM source tree with {name}, got {str(tree)!r}")
    try:
        conv, delta, norm = _import_from_tree(tree, names)
    except ImportError as error:
        raise ToolchainError(f"--vllm-src: expected its Triton modules to import, got: {error}") from error

    def prepare(a: Arguments) -> Call:
        weight = _packed_taps(a["weight"])
        norm_weight = a["norm_weight"].to(torch.bfloat16)
        gates = (a["raw_g"], a["raw_beta"], a["A_log"], a["dt_bias"], a["lower_bound"])

        def decode() -> None:
            qkv = torch.empty_like(a["x"])
            slots = a["state_indices"]
            qkv = conv.causal_conv1d_update(
                a["x"], a["conv_state"], weight, a["bias"], activation="silu", conv_state_indices=slots, out=qkv
            )
            o, _ = delta.fused_recurrent_kda_packed_decode(qkv, *gates, a["state"], slots)
            a["out"].copy_(norm.rms_norm_gated(o, a["output_gate"], norm_weight, None, activation="sigmoid", eps=1e-5))

        return decode

    return Peer("vllm chain", None, prepare)


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
        weights = _packed_taps(a["weight"]).chunk(3)
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


def _packed_taps(weight: torch.Tensor) -> torch.Tensor:
    """[3, taps, channels] fp32, as the op takes it, to [3 * channels, taps] bf16."""
    return weight.transpose(1, 2).flatten(0, 1).to(torch.bfloat16).contiguous()


# ---- whether a peer is one -------------------------------------------------------------------------------------------


def disagreement(peer: Peer, decode: Callable[..., object], arguments: Arguments) -> str | None:
    """What a peer computes otherwise than the op on one layer, or None; works on copies.

    Args:
        peer: who is asked.
        decode: the op, taking `arguments` by name.
        arguments: of one layer.
    """
    ours, theirs = _copied(arguments), _copied(arguments)
    decode(**ours)
    peer.prepare(theirs)()
    for name, tolerance in (("out", OUTPUT_TOLERANCE), ("state", STATE_TOLERANCE)):
        difference = (ours[name].float() - theirs[name].float()).abs().max().item()
        if not difference <= tolerance:
            return f"{name}: expected the op's within {tolerance}, got a difference of {difference:.3g}"
    return None


def _copied(arguments: Arguments) -> dict[str, Any]:
    return {
        name: (
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).copy_(value)
            if isinstance(value, torch.Tensor)
            else value
        )
        for name, value in arguments.items()
    }
