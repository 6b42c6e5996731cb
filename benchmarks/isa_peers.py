"""Machine code of peers' KDA decode kernels beside kdagen's: built here, for one architecture, without a GPU.

vLLM's ROCm kernel comes from a source tree that the user has; nothing of it is kept. Exit codes: 0 success (a missed
target is printed, not an error), 1 a compiler failed on a source, 2 the request was wrong or a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kdagen import machine_code, toolchain
from kdagen.errors import BuildError, KdagenError, SpecError, ToolchainError
from kdagen.paths import generated_dir
from kdagen.table import aligned
from kdagen.target import CDNA

VLLM_FILE = "csrc/kimi_k3/fused_kda_decode_kernel_rocm.cu"
VLLM_KERNEL = "kda_decode_fusion_kernel"
VLLM_FLAGS = ("-std=c++17", "-O3", "-fdeclspec")  # __declspec(property) gives threadIdx.x its builtin
HEAD_DIM = 128
STAND_INS = {
    "hip/hip_runtime.h": """\
#pragma once
#include <cstdint>
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define INDEX(axis, builtin) \\
  __declspec(property(get = get_##axis)) unsigned axis; \\
  static __device__ __forceinline__ unsigned get_##axis() { return builtin(); }
struct ThreadIndex { INDEX(x, __builtin_amdgcn_workitem_id_x) };
struct BlockIndex { INDEX(x, __builtin_amdgcn_workgroup_id_x) INDEX(y, __builtin_amdgcn_workgroup_id_y) };
static constexpr ThreadIndex threadIdx{};
static constexpr BlockIndex blockIdx{};
struct alignas(16) float4 { float x, y, z, w; };
static __device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ __forceinline__ float __expf(float x) { return __builtin_amdgcn_exp2f(x * 0x1.715476p+0f); }
static __device__ __forceinline__ float rsqrtf(float x) { return __builtin_amdgcn_rsqf(x); }
// In place of the device library's; only the softplus gate calls it, which is not the instance measured here.
static __device__ __forceinline__ float log1pf(float x) { return __builtin_amdgcn_logf(1.0f + x) * 0x1.62e43p-1f; }
""",
    "hip/hip_bf16.h": """\
#pragma once
#include <hip/hip_runtime.h>
struct __hip_bfloat16 { __bf16 bits; };
static __device__ __forceinline__ float __bfloat162float(__hip_bfloat16 a) { return static_cast<float>(a.bits); }
static __device__ __forceinline__ __hip_bfloat16 __float2bfloat16(float a) { return {static_cast<__bf16>(a)}; }
""",
}
FLA_NOTE = "fla-core: the recurrence alone, 32 of 128 value channels a workgroup; built by Triton's own LLVM"
_AT_MOST_OF_VLLM = {"instructions": 0.75, "mca_cycles": 0.85, "s_nop": 0.5}
_AT_MOST = {"barriers": 2, "dpp": 60}
_FLA_TYPES = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "o"), "*bf16"),
    **dict.fromkeys(("A_log", "dt_bias", "h0", "ht"), "*fp32"),
    **{"ssm_state_indices": "*i32", "lower_bound": "fp32", "N": "i32", "T": "i32"},
}


@dataclass(frozen=True)
class Row:
    """One kernel's machine code: whole-kernel counts, registers per lane; cycles of llvm-mca's model for one pass."""

    kernel: str
    instructions: int
    mca_cycles: int
    barriers: int
    dpp: int
    permutes: int
    s_nop: int
    waits: int
    vgprs: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    code_bytes: int


def row_of(
    kernel: str, code_object: Path, arch: str, instance: str, variant: str = "", dynamic_lds_bytes: int = 0
) -> Row:
    """The row of the one kernel of a code object that is `instance` of `variant`, or has `instance` in its symbol."""
    found = [p for p in machine_code.read_profiles(code_object, variant, arch, state_bytes=0) if instance in p.instance]
    if len(found) != 1:
        raise BuildError(f"{kernel}: expected one kernel with {instance!r} in its symbol, got {len(found)}")
    (profile,) = found
    return Row(
        kernel=kernel,
        instructions=len(profile.lines),
        mca_cycles=profile.cycles,
        barriers=profile.classes["barrier"],
        dpp=profile.classes["DPP"],
        permutes=sum(line.startswith(("ds_bpermute", "ds_swizzle")) for line in profile.lines),
        s_nop=profile.classes["nop"],
        waits=profile.classes["wait"],
        vgprs=profile.vgprs,
        spills=profile.vgpr_spills + profile.sgpr_spills,
        scratch_bytes=profile.scratch_bytes,
        lds_bytes=profile.lds_bytes + dynamic_lds_bytes,
        code_bytes=profile.code_bytes,
    )


def device_part(text: str, kernel: str, arguments: str) -> str:
    """A source up to the end of `kernel`, without its own and torch's includes, that asks for one instance of it."""
    text = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', lambda m: m[1] or " ", text, flags=re.DOTALL)
    text = re.sub(r'^\s*#\s*include\s*("|<(torch|ATen|c10)/).*$', "", text, flags=re.MULTILINE)
    head = re.search(rf"\b{kernel}\s*\([^;{{}}]*\)\s*{{", text)
    if head is None:
        raise SpecError(f"--vllm-src: expected a kernel {kernel!r} in {VLLM_FILE}, got none")
    end, depth = head.end(), 1
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    text = text[:end]
    # A host variable with the kernel's address has the compiler emit that one instance of the template.
    instance = f"\nextern const void *const wanted = reinterpret_cast<const void *>(&{kernel}<{arguments}>);\n"
    return text + instance + "}" * (text.count("{") - text.count("}")) + "\n"


def checked_sources(root: Path, arch: str, heads: int) -> tuple[Path, Path]:
    """vLLM's source and kdagen's, or SpecError: there is no such folder, file, architecture or head count."""
    if arch not in CDNA.archs:
        raise SpecError(f"--arch: expected one of {', '.join(CDNA.archs)}, got {arch!r}")
    if not root.is_dir():
        raise SpecError(f"--vllm-src: expected the folder of vLLM's sources, got {str(root)!r}, which is none")
    if not (root / VLLM_FILE).is_file():
        raise SpecError(f"--vllm-src: expected a folder with {VLLM_FILE}, got {str(root)!r} without it")
    own = generated_dir() / f"kda_decode_h{heads}_cdna{CDNA.suffix}"
    if not own.is_file():
        raise SpecError(f"--heads: expected a head count that `kdagen list` shows, got {heads}")
    return root / VLLM_FILE, own


def vllm_row(peer: Path, compiler: toolchain.Compiler, arch: str, heads: int, folder: Path) -> Row:
    """vLLM's kernel: output norm, SD window, window updated, bounded gate, beta a logit."""
    for name, text in STAND_INS.items():
        (folder / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / name).write_text(text, encoding="utf-8")
    arguments = f"true, 1, {3 * heads * HEAD_DIM}, {heads}, true, true, true"  # 1, 3 H K: of channels, taps
    source, text = folder / "vllm.hip", peer.read_text(encoding="utf-8", errors="replace")
    source.write_text(device_part(text, VLLM_KERNEL, arguments), encoding="utf-8")
    flags = [*VLLM_FLAGS, f"-I{folder / 'include'}"]
    built = toolchain.compile_device(compiler, arch, source, folder / "vllm.co", flags)
    return row_of("vLLM", built, arch, VLLM_KERNEL)


def kdagen_row(own: Path, compiler: toolchain.Compiler, arch: str, folder: Path) -> Row:
    """kdagen's instance bounded-norm-sd."""
    built = toolchain.compile_device(compiler, arch, own, folder / "kdagen.co", CDNA.flags)
    return row_of("kdagen", built, arch, "bounded-norm-sd", own.stem)


def fla_row(arch: str, heads: int, folder: Path) -> Row:
    """fla-core's recurrence of one token a row on a paged state, as its caller sets it; no conv, norm or gate."""
    warnings.simplefilter("ignore")  # fla-core says that it sees no GPU
    import triton
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd_kernel
    from triton.backends.compiler import GPUTarget

    function = fused_recurrent_kda_fwd_kernel.fn
    on = "USE_INITIAL_STATE INPLACE_FINAL_STATE USE_QK_L2NORM_IN_KERNEL IS_CONTINUOUS_BATCHING STORE_FINAL_STATE HAS_A"
    on += " HAS_BIAS USE_GATE_IN_KERNEL USE_LOWER_BOUND APPLY_BETA_SIGMOID STATE_V_FIRST"
    values: dict[str, object] = {name: False for name in function.arg_names if name.isupper() and len(name) > 2}
    values |= dict.fromkeys(on.split(), True) | dict.fromkeys(("cu_seqlens", "num_accepted_tokens"))
    values |= {"scale": HEAD_DIM**-0.5, "H": heads, "HV": heads, "K": HEAD_DIM, "V": HEAD_DIM, "BK": HEAD_DIM, "BV": 32}
    values |= dict.fromkeys(("stride_init_state_token", "stride_final_state_token"), heads * HEAD_DIM * HEAD_DIM)
    values |= {"stride_indices_seq": 1, "stride_indices_tok": 1, "num_stages": 2}
    signature = {name: _FLA_TYPES.get(name, "constexpr") for name in function.arg_names}
    constants = {(i,): values[name] for i, name in enumerate(function.arg_names) if name not in _FLA_TYPES}
    aligned16 = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = triton.compiler.ASTSource(function, signature, constants, aligned16)
    built = triton.compile(source, GPUTarget("hip", arch, CDNA.wave_size), {"num_warps": 4, "num_stages": 2})
    (folder / "fla.co").write_bytes(built.asm["hsaco"])
    return row_of("fla-core", folder / "fla.co", arch, function.__name__, dynamic_lds_bytes=built.metadata.shared)


def verdict(ours: Row, theirs: Row) -> str:
    """Every target with kdagen's figure beside it."""
    mine, peer, parts = asdict(ours), asdict(theirs), []
    for name, limit in _AT_MOST_OF_VLLM.items():
        if peer[name]:
            ratio = mine[name] / peer[name]
            parts.append(f"{name} {ratio:.2f} (<= {limit:.2f}{_missed(ratio, limit)})")
    for name, most in _AT_MOST.items():
        parts.append(f"{name} {mine[name]} against {peer[name]} (<= {most}{_missed(mine[name], most)})")
    return "kdagen / vLLM: " + ", ".join(parts)


def _missed(value: float, limit: float) -> str:
    return "" if value <= limit else ", MISSED"


def report(rows: Sequence[Row]) -> str:
    """A line for each kernel, under the same columns."""
    header = [name.replace("_bytes", " B") for name in asdict(rows[0])]
    cells = [[str(value) for value in asdict(row).values()] for row in rows]
    return aligned(header, cells, right=range(1, len(header)))


def main(argv: Sequence[str] | None = None) -> int:
    """Build, count, print; returns the exit code and never raises for a user's error."""
    parser = argparse.ArgumentParser("isa_peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm-src", type=Path, required=True, metavar="DIR", help="vLLM's source tree (0.33)")
    parser.add_argument("--arch", default="gfx942", help=f"one of {', '.join(CDNA.archs)} (default: gfx942)")
    parser.add_argument("--heads", type=int, default=12, metavar="N", help="local head count (default: 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments.vllm_src, arguments.arch, arguments.heads, arguments.json)
    except KdagenError as error:
        print(f"isa_peers: {error}", file=sys.stderr)
        return 2 if isinstance(error, (SpecError, ToolchainError)) else 1


def _run(root: Path, arch: str, heads: int, json_path: Path | None) -> int:
    peer, own = checked_sources(root, arch, heads)
    compiler = toolchain.find_compiler("hip", [arch])
    folder = Path(tempfile.mkdtemp(prefix="isa_peers."))
    theirs, ours = vllm_row(peer, compiler, arch, heads, folder), kdagen_row(own, compiler, arch, folder)
    fla = _fla_row_or_reason(arch, heads, folder)
    shutil.rmtree(folder)  # and left where it is on an error, whose message may name a log in it
    rows = [theirs, *([fla] if isinstance(fla, Row) else []), ours]
    flags = {"vLLM": " ".join(VLLM_FLAGS), "kdagen": " ".join(CDNA.flags)}
    print(f"{arch}, {heads} heads, bounded gate, output norm, SD window; {compiler.version}")
    print(*(f"{name}: {text}" for name, text in flags.items()), "", report(rows), sep="\n")
    print("\n" + (FLA_NOTE if isinstance(fla, Row) else f"fla-core: skipped: {fla}"), verdict(ours, theirs), sep="\n")
    if json_path is not None:
        shape = {"arch": arch, "heads": heads, "compiler": compiler.version, "flags": flags}
        try:
            json_path.write_text(json.dumps({**shape, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
        except OSError as error:
            raise SpecError(f"--json: expected a file to write, got {str(json_path)!r}: {error.strerror}") from error
    return 0


def _fla_row_or_reason(arch: str, heads: int, folder: Path) -> Row | str:
    try:
        return fla_row(arch, heads, folder)
    except ImportError as error:
        return f"expected triton and fla-core, got: {error}; pip install fla-core triton"
    except Exception as error:  # another release of either may have other arguments, or raise what it likes
        return f"expected triton to compile it, got: {type(error).__name__}: {str(error).splitlines()[:1]}"


if __name__ == "__main__":
    sys.exit(main())
