"""`benchmarks/isa_peers.py` without vLLM: its errors, its counting, and a small tree built through its stand-ins."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kdagen import toolchain
from kdagen.errors import SpecError, ToolchainError

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "isa_peers.py"
_spec = importlib.util.spec_from_file_location("isa_peers", SCRIPT)
isa_peers = importlib.util.module_from_spec(_spec)
sys.modules["isa_peers"] = isa_peers  # dataclass looks its module up
_spec.loader.exec_module(isa_peers)
TREE = """
#include <array>
#include <hip/hip_runtime.h>
#include <hip/hip_bf16.h>
#include <torch/headeronly/core/ScalarType.h>
#include "../torch_utils.h"
namespace {
// A brace in a comment: {
using word = __hip_bfloat16;
template <bool kNorm, int kChannel, int kTap, int kHeads, bool kUpdate, bool kBounded, bool kSigmoid>
__global__ __launch_bounds__(256) void kda_decode_fusion_kernel(const word* in, word* out) {
  __shared__ float twice[256];
  const int i = blockIdx.y * kTap + blockIdx.x * 256 + threadIdx.x;
  twice[threadIdx.x] = 2.0f * __bfloat162float(in[i]);
  __syncthreads();
  if constexpr (kNorm) { out[i] = __float2bfloat16(rsqrtf(__expf(twice[255 - threadIdx.x]))); }
}
void launch(torch::Tensor x) { kda_decode_fusion_kernel<false, 1, 2, 3, true, true, true><<<1, 256>>>(x, x); }
}  // namespace
"""


def tree(folder: Path, text: str) -> Path:
    source = folder / "tree" / isa_peers.VLLM_FILE
    source.parent.mkdir(parents=True)
    source.write_text(text)
    return folder / "tree"


@pytest.fixture(scope="module")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler("hip", ["gfx942"])
    except ToolchainError as error:
        pytest.skip(str(error))


def test_the_device_part_ends_with_the_kernel_and_asks_for_one_instance():
    text = isa_peers.device_part(TREE, isa_peers.VLLM_KERNEL, "true, 1")
    assert text.count("{") == text.count("}")
    assert "&kda_decode_fusion_kernel<true, 1>" in text
    assert "#include <array>" in text and "#include <hip/hip_bf16.h>" in text
    assert not [word for word in ("torch", "launch(", "A brace") if word in text]
    with pytest.raises(SpecError, match=r"--vllm-src: expected a kernel 'kda_decode_fusion_kernel' in .*, got none"):
        isa_peers.device_part("int other() { return 0; }", isa_peers.VLLM_KERNEL, "true")


def test_a_small_tree_is_built_through_the_stand_ins(compiler, tmp_path, capsys):
    root, output = tree(tmp_path, TREE), tmp_path / "rows.json"
    assert isa_peers.main(["--vllm-src", str(root), "--arch", "gfx950", "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(output.read_text())
    rows = {row["kernel"]: row for row in written["rows"]}
    assert (written["arch"], written["heads"]) == ("gfx950", 12)
    assert "kdagen / vLLM: instructions" in printed and "MISSED" in printed  # the small kernel is the shorter one
    small, ours = rows["vLLM"], rows["kdagen"]
    assert (small["barriers"], small["lds_bytes"], small["spills"], small["permutes"]) == (1, 4 * 256, 0, 0)
    assert 10 < small["instructions"] < 100 and 4 * small["instructions"] <= small["code_bytes"] <= 1000
    assert 0 < small["mca_cycles"] < ours["mca_cycles"]
    assert (ours["barriers"], ours["spills"], ours["scratch_bytes"]) == (2, 0, 0)


def test_a_source_that_does_not_compile_is_one_sentence_with_its_error(compiler, tmp_path, capsys):
    root = tree(tmp_path, TREE.replace("blockIdx.y", "no_such_name"))
    assert isa_peers.main(["--vllm-src", str(root)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("isa_peers: expected ") and "no_such_name" in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def refused(capsys, *arguments: str) -> str:
    assert isa_peers.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    nowhere, empty, root = tmp_path / "nowhere", tmp_path, tree(tmp_path, TREE)
    assert refused(capsys, "--vllm-src", str(nowhere)) == (
        f"isa_peers: --vllm-src: expected the folder of vLLM's sources, got {str(nowhere)!r}, which is none\n"
    )
    assert refused(capsys, "--vllm-src", str(empty)) == (
        f"isa_peers: --vllm-src: expected a folder with {isa_peers.VLLM_FILE}, got {str(empty)!r} without it\n"
    )
    assert refused(capsys, "--vllm-src", str(root), "--arch", "sm_90") == (
        "isa_peers: --arch: expected one of gfx90a, gfx942, gfx950, got 'sm_90'\n"
    )
    assert refused(capsys, "--vllm-src", str(root), "--heads", "5") == (
        "isa_peers: --heads: expected a head count that `kdagen list` shows, got 5\n"
    )
    monkeypatch.setenv("HIPCXX", "no-such-clang")
    assert refused(capsys, "--vllm-src", str(root)) == (
        "isa_peers: HIPCXX: expected a HIP compiler, got 'no-such-clang', which is not found\n"
    )
    monkeypatch.delenv("HIPCXX")
    monkeypatch.setattr(toolchain, "candidates", lambda kind: [])
    assert refused(capsys, "--vllm-src", str(root)).startswith(
        "isa_peers: expected a HIP compiler for gfx942, found none; tried nothing, none is here; on Debian: "
    )


def test_a_peer_that_is_not_installed_is_skipped_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = isa_peers._fla_row_or_reason("gfx942", 12, tmp_path)
    assert reason.startswith("expected triton and fla-core, got: ") and reason.endswith("; pip install fla-core triton")


def test_a_missed_target_is_marked():
    figures = dict.fromkeys(("permutes", "waits", "vgprs", "spills", "scratch_bytes", "lds_bytes", "code_bytes"), 0)
    theirs = isa_peers.Row("vLLM", 1000, 2000, 5, 92, s_nop=100, **figures)
    ours = isa_peers.Row("kdagen", 700, 1800, 2, 61, s_nop=50, **figures)
    assert isa_peers.verdict(ours, theirs) == (
        "kdagen / vLLM: instructions 0.70 (<= 0.75), mca_cycles 0.90 (<= 0.85, MISSED), s_nop 0.50 (<= 0.50), "
        "barriers 2 against 5 (<= 2), dpp 61 against 92 (<= 60, MISSED)"
    )
