"""The peers of the bench as far as a machine without a GPU can go: whom they serve, what is refused and compared."""

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from kdagen import bench_peers, bench_vllm, reference
from kdagen.bench_peers import Peer
from kdagen.errors import SpecError
from tests.harness import plain_arguments


@pytest.fixture
def modules(monkeypatch):
    """sys.modules as it was, afterwards."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def reference_call(a):
    result = reference.fused_kda_decode(**{**a, "out": None})
    live = [int(slot) for slot in a["state_indices"]]
    a["out"].copy_(result.out)
    a["state"][live] = result.state.to(a["state"].dtype)


def test_a_peer_that_computes_the_same_is_one():
    arguments = plain_arguments(4, [1, 2], 3)
    before = {name: arguments[name].clone() for name in ("state", "conv_state")}
    peer = Peer("same", None, lambda a: lambda: reference_call(a))
    assert bench_peers.disagreement(peer, lambda **a: reference_call(a), arguments) is None
    assert all(torch.equal(arguments[name], value) for name, value in before.items()), "it must work on copies"


@pytest.mark.parametrize("spoiled", ["out", "state"])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_peer_that_computes_something_else_is_told_from_one(spoiled, value):
    def prepare(a):
        def call():
            reference_call(a)
            a[spoiled] += value

        return call

    why = bench_peers.disagreement(
        Peer("other", None, prepare), lambda **a: reference_call(a), plain_arguments(4, [1, 2], 3)
    )
    assert why is not None and why.startswith(f"{spoiled}: expected the op's within 0.1, got a difference of ")


def test_a_peer_serves_its_head_counts():
    assert Peer("all", None, lambda a: lambda: None).serves(7)
    few = Peer("few", (12, 24), lambda a: lambda: None)
    assert few.serves(12) and not few.serves(16)


def test_a_folder_that_is_no_source_tree_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(SpecError, match=r"--vllm-src: expected a vLLM source tree with csrc/kimi_k3/fused_kda_decode"):
        bench_vllm.fused(tmp_path)
    with pytest.raises(SpecError, match=r"--vllm-src: expected a vLLM source tree with vllm\.model_executor"):
        bench_vllm.chain(tmp_path)


def test_modules_of_a_tree_are_imported_without_running_its_packages(tmp_path, modules, monkeypatch):
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    extra, libdevice = types.ModuleType("triton.language.extra"), types.ModuleType("triton.language.extra.libdevice")
    triton.language, language.extra, extra.libdevice = language, extra, libdevice
    for module in (triton, language, extra, libdevice):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package = tmp_path / "vllm" / "deep" / "ops"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('all of vLLM')\n")
    (package / "kernel.py").write_text(
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "from vllm.model_executor.custom_op import CustomOp\n"
        "from vllm.v1.attention.backends.utils import NULL_BLOCK_ID\n"
        "from .helper import answer\n"
        "@CustomOp.register('name')\n"
        "class Op(CustomOp):\n"
        "    pass\n"
        "null, cpu = NULL_BLOCK_ID, current_platform.is_cpu()\n"
    )
    (package / "helper.py").write_text("answer = 42\n")
    (kernel,) = bench_vllm._import_from_tree(tmp_path, ["vllm.deep.ops.kernel"])
    assert (kernel.answer, kernel.null, kernel.cpu, kernel.Op.__name__) == (42, 0, False, "Op")
    assert kernel.triton is triton


def test_a_process_that_has_vllm_is_refused(tmp_path, modules, monkeypatch):
    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["triton.language.extra"].libdevice = None
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with pytest.raises(SpecError, match="--vllm-src: expected a process that has not imported vllm"):
        bench_vllm._import_from_tree(tmp_path, [])


def test_taps_are_packed_as_the_chains_take_them():
    weight = torch.arange(3 * 4 * 5).reshape(3, 4, 5).float()
    packed = bench_peers.packed_taps(weight)
    assert packed.shape == (15, 4) and packed.dtype is torch.bfloat16
    for section in range(3):
        for channel in range(5):
            assert packed[section * 5 + channel].tolist() == weight[section, :, channel].tolist()


@pytest.mark.parametrize(("hip", "fast_math"), [(None, True), ("6.4.0", False)])
def test_vllms_kernel_is_built_with_vllms_flags_beside_a_stand_in(hip, fast_math, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    source = tmp_path / bench_vllm.SOURCES[hip is not None]
    source.parent.mkdir(parents=True)
    source.write_text('#include "../torch_utils.h"\n')
    monkeypatch.setenv("KDAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.ops, "kdagen_peer_vllm", types.SimpleNamespace(fused_kda_decode=None), raising=False)
    built = {}

    def load(name, sources, **options):
        built.update(options, sources=[Path(source) for source in sources], archs=os.environ["TORCH_CUDA_ARCH_LIST"])

    monkeypatch.setattr(cpp_extension, "load", load)
    assert bench_vllm.fused(tmp_path).heads == (12, 24, 48, 96)
    assert ("--use_fast_math" in built["extra_cuda_cflags"]) is fast_math
    assert built["archs"] == ("8.0" if hip else "9.0a") and os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0"
    kernel, binding = built["sources"]
    assert kernel.read_text() == source.read_text() and (kernel.parent / "../torch_utils.h").is_file()
    assert 'm.def("fused_kda_decode(Tensor x,' in binding.read_text() and "first_live_slot" not in binding.read_text()
