"""Tools are found where they may be, tried before they are trusted, and named when they fail."""

from __future__ import annotations

import io
import sys

import pytest

from kdagen import doctor, toolchain
from kdagen.errors import ToolchainError

VARIABLES = ("HIPCXX", "ROCM_HOME", "ROCM_PATH", "CUDACXX", "CUDA_HOME", "CXX", "PYTORCH_ROCM_ARCH", "HIP_PLATFORM")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty machine: nothing on PATH but what `tool` puts there."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def tool(name: str, *, archs: str = "", version: str = "1.2.3", folder=folder) -> str:
        """A compiler that knows these archs alone: it makes its output file for them and fails for any other."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(f"""#!{sys.executable}
import sys
if "--version" in sys.argv:
    print("tool of the test\\nversion {version}")
    sys.exit()
arch = next((a.split("=")[1] for a in sys.argv if a.startswith(("--offload-arch=", "-arch="))), "host")
if arch not in {archs.split()!r}:
    sys.exit(f"k.hip:1:1: error: unknown target CPU '{{arch}}'")
open(sys.argv[sys.argv.index("-o") + 1], "w").close()
""")
        path.chmod(0o755)
        return str(path)

    return tool


def test_a_compiler_is_taken_for_what_it_compiles_not_for_its_name(machine):
    machine("hipcc", archs="gfx90a")
    clang = machine("clang++-22", archs="gfx90a gfx942")
    assert toolchain.find_compiler("hip", ["gfx90a", "gfx942"]).path == clang


def test_the_newest_clang_comes_first(machine):
    machine("clang++-9", archs="gfx942")
    newest = machine("clang++-22", archs="gfx942")
    assert toolchain.candidates("hip")[0].path == newest


def test_rocm_is_looked_for_where_its_variable_points(machine, monkeypatch, tmp_path):
    hipcc = machine("hipcc", archs="gfx942", folder=tmp_path / "rocm" / "bin")
    machine("clang++-22", archs="gfx942")
    monkeypatch.setenv("ROCM_HOME", str(tmp_path / "rocm"))
    assert toolchain.find_compiler("hip", ["gfx942"]).path == hipcc


def test_the_users_own_choice_comes_first_with_its_arguments(machine, monkeypatch):
    machine("hipcc", archs="gfx942")
    mine = machine("mine", archs="gfx942")
    monkeypatch.setenv("HIPCXX", f"{mine} -x hip")
    assert toolchain.find_compiler("hip", ["gfx942"]).command == (mine, "-x", "hip")


def test_no_compiler_says_what_to_install(machine):
    with pytest.raises(ToolchainError) as raised:
        toolchain.find_compiler("hip", ["gfx942"])
    assert str(raised.value) == (
        "expected a hip compiler for gfx942, found none; tried nothing, none is here; on Debian: apt-get install "
        "--no-install-recommends clang-22 lld-22 llvm-22 clang-tools-22 libamdhip64-dev rocm-device-libs"
    )


def test_a_compiler_that_fails_is_named_with_its_first_error(machine):
    path = machine("hipcc", archs="gfx90a")
    with pytest.raises(
        ToolchainError, match=rf"tried {path} \(gfx942: k.hip:1:1: error: unknown target CPU 'gfx942'\);"
    ):
        toolchain.find_compiler("hip", ["gfx90a", "gfx942"])


@pytest.mark.parametrize(("kind", "install"), [("cuda", "pip install nvidia-cuda-nvcc"), ("host", "install g\\+\\+")])
def test_other_kinds_say_what_to_install_too(machine, monkeypatch, kind, install):
    monkeypatch.setattr(toolchain, "candidates", lambda kind: [])
    with pytest.raises(ToolchainError, match=install):
        toolchain.find_compiler(kind, ["sm_90"])


def test_a_missing_llvm_tool_says_what_to_install(machine):
    with pytest.raises(ToolchainError, match="expected llvm-mca, found none; on Debian: apt-get install"):
        toolchain.find_tool("llvm-mca")
    machine("llvm-mca")
    newest = machine("llvm-mca-22")
    machine("llvm-mca-15")
    assert toolchain.find_tool("llvm-mca") == newest


def report(monkeypatch) -> tuple[int, str]:
    monkeypatch.setattr(toolchain, "_cuda_commands", lambda: iter([("nvcc",)]))
    stream = io.StringIO()
    code = doctor.main_report(stream)
    return code, stream.getvalue()


def test_doctor_is_content_with_a_cxx_compiler_alone(machine, monkeypatch):
    machine("c++", archs="host")
    code, text = report(monkeypatch)
    assert code == 0
    assert "Rendering and `kdagen verify` work here." in text
    assert "HIP compiler for gfx90a, gfx942, gfx950: not found\n  on Debian: apt-get install" in text
    assert "CUDA compiler for sm_90: not found\n  pip install nvidia-cuda-nvcc" in text
    assert "\033[" not in text


def test_doctor_fails_without_a_cxx_compiler(machine, monkeypatch):
    code, text = report(monkeypatch)
    assert code == 1
    assert "C++ compiler for emulator: not found\n  on Debian: apt-get install g++" in text
    assert "will not work here yet" in text


def test_doctor_shows_each_arch_of_a_compiler(machine, monkeypatch):
    machine("c++", archs="host")
    machine("clang++-22", archs="gfx90a gfx942", version="22.1.8")
    _, text = report(monkeypatch)
    rows = {tuple(line.split()[:4]) for line in text.splitlines() if line.startswith("HIP compiler  ")}
    assert rows == {
        ("HIP", "compiler", arch, state) for arch, state in (("gfx90a", "ok"), ("gfx942", "ok"), ("gfx950", "FAILED"))
    }
    assert "HIP compiler for gfx950: k.hip:1:1: error: unknown target CPU 'gfx950'" in text


def test_doctor_warns_of_the_traps(machine, monkeypatch, tmp_path):
    machine("c++", archs="host")
    hipcc = machine("hipcc", archs="gfx90a")
    nvcc = machine("nvcc", archs="sm_90")
    monkeypatch.setenv("ROCM_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a;gfx942:sramecc+")
    _, text = report(monkeypatch)
    for warning in (
        f"{hipcc} is found and cannot compile for gfx942: its clang is too old",
        f"hipcc compiles for NVIDIA because {nvcc} is on PATH; set HIP_PLATFORM=amd",
        "clang-offload-bundler is missing: linking will fail with `posix_spawn failed`",
        f"ROCM_HOME is {tmp_path / 'nowhere'}, which has no bin/hipcc",
        "PYTORCH_ROCM_ARCH names gfx942:sramecc+, which no HIP compiler here compiles for",
        "torch is not a ROCm build",
    ):
        assert f"warning: {warning}" in text
    monkeypatch.setenv("HIP_PLATFORM", "amd")
    assert "HIP_PLATFORM" not in report(monkeypatch)[1]


def test_doctor_names_torch_and_what_it_was_built_for(tmp_path):
    (tmp_path / "__init__.py").touch()
    for text, build in (
        ("hip: Optional[str] = '6.4.0'\ncuda = None\n", "ROCm 6.4.0 build"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0 build"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU build"),
    ):
        (tmp_path / "version.py").write_text(text)
        assert doctor._torch_build(tmp_path / "__init__.py") == build
