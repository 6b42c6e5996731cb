"""vLLM as a peer of `kdagen bench`: its fused kernel and its chain of Triton kernels, from a source tree of the user's.

Nothing of vLLM is kept here: the kernel is compiled, and the modules are imported, from where they lie.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kdagen.abi import OP_SCHEMA
from kdagen.bench_peers import Arguments, Call, Peer, packed_taps
from kdagen.build import changed_environment
from kdagen.errors import BuildError, SpecError, ToolchainError
from kdagen.paths import cache_dir

HEADS = (12, 24, 48, 96)
SOURCES = {False: "csrc/kimi_k3/fused_kda_decode_kernel.cu", True: "csrc/kimi_k3/fused_kda_decode_kernel_rocm.cu"}
"""By whether torch is a ROCm build."""
FLAGS = {
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

_BINDING = """#include <optional>

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


def fused(tree: Path) -> Peer:
    """vLLM's fused decode kernel, compiled from its source tree with the flags of its own CMakeLists.txt.

    Raises:
        SpecError: the tree has no such kernel.
        BuildError: it does not compile.
    """
    source = tree / SOURCES[torch.version.hip is not None]
    if not source.is_file():
        raise SpecError(f"--vllm-src: expected a vLLM source tree with {source.relative_to(tree)}, got {str(tree)!r}")
    _build(source, tree)
    decode = torch.ops.kdagen_peer_vllm.fused_kda_decode

    def prepare(a: Arguments) -> Call:
        names = ("x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias", "state_indices", "state")
        tensors = [a[name] for name in names]
        rest = (a["out"], a["lower_bound"], a["output_gate"], a["norm_weight"])
        return lambda: decode(*tensors, *rest)

    return Peer("vllm", HEADS, prepare)


def _build(source: Path, tree: Path) -> None:
    from torch.utils import cpp_extension

    texts = {
        "csrc/torch_utils.h": _TORCH_UTILS,
        f"csrc/kimi_k3/{source.name}": source.read_text(encoding="utf-8"),
        "csrc/binding.cpp": _BINDING % OP_SCHEMA.replace(", int first_live_slot=1", ""),
    }
    flags = FLAGS[torch.version.hip is not None]
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


_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_NORM = "vllm.third_party.flash_linear_attention.ops.kda"
_DELTA = {
    False: "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent",
    True: "vllm.models.kimi_k3.amd.ops.third_party.kda.fused_recurrent",
}
_STAND_INS = (
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
        **{name: {} for name in _STAND_INS},
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


def chain(tree: Path) -> Peer:
    """vLLM's unfused path: its Triton conv update, packed recurrence and gated norm, and the copy into `out`.

    Raises:
        SpecError: the tree lacks one of the modules.
        ToolchainError: triton is not installed.
    """
    names = [_CONV, _DELTA[torch.version.hip is not None], _NORM]
    for name in names:
        if not tree.joinpath(*name.split(".")).with_suffix(".py").is_file():
            raise SpecError(f"--vllm-src: expected a vLLM source tree with {name}, got {str(tree)!r}")
    try:
        conv, delta, norm = _import_from_tree(tree, names)
    except ImportError as error:
        raise ToolchainError(f"--vllm-src: expected its Triton modules to import, got: {error}") from error

    def prepare(a: Arguments) -> Call:
        weight = packed_taps(a["weight"])
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
