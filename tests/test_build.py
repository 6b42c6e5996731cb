"""The build cache: what a key covers, and that kills, locks and rivals leave it whole."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kdagen import build, toolchain
from kdagen.build import Request
from kdagen.cli import main
from kdagen.errors import BuildError, ToolchainError
from kdagen.target import CDNA, CUDA
from tests.harness import ABSENT

ROOT = Path(__file__).parents[1]
REQUEST = Request({"a.cpp": 'extern "C" int answer() { return 42; }\n', "a.h": "// nothing\n"})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDAGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "build"


def key(request=REQUEST, compilers="c++ 12"):
    return build.cache_key(request, compilers)


def test_fr_65_every_input_changes_the_key_and_nothing_else_does(monkeypatch):
    base = key()
    assert key() == base
    changed = {
        "a source byte": key(dataclasses.replace(REQUEST, texts={**REQUEST.texts, "a.h": "// nothinG\n"})),
        "a file name": key(dataclasses.replace(REQUEST, texts={"b.cpp": REQUEST.texts["a.cpp"]})),
        "an arch": key(dataclasses.replace(REQUEST, archs=("gfx942",))),
        "another arch": key(dataclasses.replace(REQUEST, archs=("gfx942", "gfx950"))),
        "the target": key(dataclasses.replace(REQUEST, target=CDNA)),
        "the compiler": key(compilers="c++ 13"),
    }
    for name, value in (
        ("__version__", "2.99.0"),
        ("compiled_with_cxx11_abi", lambda: not torch._C._GLIBCXX_USE_CXX11_ABI),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, value)
            changed[f"torch.{name}"] = key()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4.0")
        changed["torch.version.hip"] = key()
    with monkeypatch.context() as patch:
        patch.setattr(build, "CXX_FLAGS", ("-O2",))
        changed["a flag"] = key()
    assert base not in changed.values()
    assert len(set(changed.values())) == len(changed)
    assert key() == base


def test_fr_65_a_change_rebuilds_whatever_its_time_and_no_change_does_not(cache, monkeypatch):
    first = build.build(REQUEST)
    edited = dataclasses.replace(REQUEST, texts={**REQUEST.texts, "a.cpp": 'extern "C" int answer() { return 43; }\n'})
    second = build.build(edited)
    assert first != second and first.is_file() and second.is_file()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    start = time.monotonic()
    assert build.build(REQUEST) == first
    print(f"from the cache in {time.monotonic() - start:.3f} s")


BUILD = "from kdagen import build; print(build.build(build.Request({texts!r})))"
SLOW = {"a.cpp": '#include <regex>\n#include <iostream>\n#include <random>\nstd::regex slow("a*");\n'}


def start_build(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "KDAGEN_CACHE_DIR": str(cache.parent), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUILD.format(texts=SLOW)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_fr_64_a_lock_file_left_behind_locks_nobody_out(cache):
    cache.mkdir(parents=True)
    (cache / f"{build.cache_key(REQUEST, build._compiler_identity(REQUEST))}.lock").write_text("dead")
    assert build.build(REQUEST).is_file()


def test_fr_64_a_build_killed_half_way_leaves_nothing_in_the_way(cache):
    process = start_build(cache)
    deadline = time.monotonic() + 60
    while not list(cache.glob("*/build.ninja")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(cache.glob("*/build.ninja")) and not list(cache.glob("*/*.so")), "killed too late to prove anything"
    library = build.build(Request(SLOW))
    assert library.is_file()


def test_two_builds_at_once_both_succeed(cache):
    processes = [start_build(cache) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("compiling" in error for _, error in outputs) == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_failed_build_is_one_error_and_leaves_no_folder(cache):
    with pytest.raises(
        BuildError, match=r"expected c\+\+ .* to succeed, got: .*a.cpp:1:1: error: .*nonsense.* \(all of it in"
    ):
        build.build(Request({"a.cpp": "nonsense\n"}))
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert len(list(cache.glob("*.log"))) == 1


def test_fr_62_a_missing_tool_is_named_before_anything_starts(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(build.shutil, "which", lambda name, path=None: None)
        with pytest.raises(ToolchainError, match=r"^expected ninja, found none; pip install ninja$"):
            build.build(REQUEST)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "candidates", lambda kind: [])
        with pytest.raises(
            ToolchainError, match=r"^expected a C\+\+ compiler .* found none; on Debian: apt-get install g\+\+$"
        ):
            build.build(REQUEST)
    assert not cache.exists() or not list(cache.iterdir())


def test_fr_62_archs_come_from_the_request_the_variable_or_the_devices(monkeypatch):
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942;gfx950:xnack-")
    assert build.resolve_archs(CDNA, ["gfx90a"]) == ("gfx90a",)
    assert build.resolve_archs(CDNA) == ("gfx942", "gfx950")
    monkeypatch.delenv("PYTORCH_ROCM_ARCH")
    monkeypatch.setattr(build, "_visible_archs", lambda: ["gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack-"])
    assert build.resolve_archs(CDNA) == ("gfx942",)
    monkeypatch.setattr(build, "_visible_archs", lambda: [])
    with pytest.raises(ToolchainError, match="got none; set PYTORCH_ROCM_ARCH to gfx942"):
        build.resolve_archs(CDNA)
    with pytest.raises(ToolchainError, match="arch: expected some of gfx90a, gfx942, gfx950, got 'sm_90'"):
        build.resolve_archs(CDNA, ["sm_90"])


def test_cuda_archs_are_named_as_torch_names_them(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert build.resolve_archs(CUDA) == ("sm_90",)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX;7.5")
    with pytest.raises(ToolchainError, match=r"arch: expected some of sm_90, got '7\.5'"):
        build.resolve_archs(CUDA)


def test_without_a_rocm_torch_build_says_what_it_did_not_compile(capsys):
    assert main(["build"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not compiled: torch 2") and "`kdagen build --code-objects DIR`" in last


def test_code_objects_of_a_head_count(capsys, tmp_path):
    if not toolchain.candidates("hip"):
        pytest.skip("no HIP compiler")
    objects = tmp_path / "objects"
    out = ["--heads", str(ABSENT), "--out", str(tmp_path / "sources")]
    assert main(["build", *out, "--arch", "gfx942,gfx950", "--code-objects", str(objects)]) == 0
    assert sorted(path.name for path in objects.iterdir()) == [
        f"kda_decode_h{ABSENT}_cdna.gfx942.co",
        f"kda_decode_h{ABSENT}_cdna.gfx950.co",
    ]
    assert f"2 code objects for gfx942, gfx950 in {objects}" in capsys.readouterr().out
