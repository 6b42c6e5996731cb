"""Tools are found where they may be, tried before they are trusted, and named when they fail."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdagen import doctor, toolchain
from kdagen.errors import ToolchainError

VARIABLES = ("HIPCXX", "ROCM_HOME", "ROCM_PATH", "CUDACXX", "CUDA_HOME", "CXX", "PYTORCH_ROCM_ARCH", "HIP_PLATFORM")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty machine: nothing on PATH but what `tool` puts there."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "ROCM_DEFAULT", str(tmp_path / "opt-rocm"))
    monkeypatch.setattr(toolchain, "CUDA_DEFAULT", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolchain, "SYSTEM_ROOT", str(tmp_path / "usr"))
    monkeypatch.setattr(toolchain, "sysconfig", SimpleNamespace(get_path=lambda name: str(tmp_path / "site")))
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
        "expected a HIP compiler for gfx942, found none; tried nothing, none is here; on Debian: apt-get install "
        "--no-install-recommends clang-22 lld-22 llvm-22 clang-tools-22 libamdhip64-dev rocm-device-libs"
    )


def test_a_compiler_that_fails_is_named_with_its_first_error(machine):
    path = machine("hipcc", archs="gfx90a")
    with pytest.raises(
        ToolchainError, match=rf"tried {path} \(gfx942: k.hip:1:1: error: unknown target CPU 'gfx942'\);"
    ):
        toolchain.find_compiler("hip", ["gfx90a", "gfx942"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "cuda",
            "expected a CUDA compiler for sm_90, found none; tried nothing, none is here; pip install nvidia-cuda-nv",
        ),
        (
            "host",
            "expected a C++ compiler for sm_90, found none; tried nothing, none is here; on Debian: apt-get instal",
        ),
    ],
)
def test_other_kinds_say_what_to_install_too(machine, kind, message):
    with pytest.raises(ToolchainError, match=re.escape(message)):
        toolchain.find_compiler(kind, ["sm_90"])


def test_a_compiler_that_never_answers_is_given_up(machine, monkeypatch):
    Path(machine("hipcc")).write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(toolchain, "PROBE_SECONDS", 0.2)
    with pytest.raises(ToolchainError, match=r"hipcc \(gfx942: no answer in 0.2 s\)"):
        toolchain.find_compiler("hip", ["gfx942"])


def test_a_compiler_that_writes_nothing_or_any_bytes_has_failed(machine):
    path = Path(machine("hipcc"))
    path.write_text("#!/bin/sh\nexit 0\n")
    assert toolchain.probe(toolchain.candidates("hip")[0], "gfx942") == "exit code 0"
    path.write_text(r"""#!/bin/sh
[ "$1" = --version ] || printf 'k.hip:1: error: \377\n' >&2
exit 1
""")
    assert toolchain.probe(toolchain.candidates("hip")[0], "gfx942") == "k.hip:1: error: \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("kind", "variable"), toolchain.CHOICES.items())
def test_a_choice_that_is_not_here_is_not_replaced_by_another(machine, monkeypatch, kind, variable):
    for name in ("hipcc", "nvcc", "c++"):
        machine(name, archs="gfx942 sm_90 host")
    monkeypatch.setenv(variable, "no-such-compiler -v")
    message = f"{variable}: expected a {toolchain.NAMES[kind]}, got 'no-such-compiler -v', which is not found"
    with pytest.raises(ToolchainError, match=f"^{re.escape(message)}$"):
        toolchain.find_compiler(kind, ["gfx942"])


def test_nvcc_is_found_in_cuda_home_and_among_the_python_packages(machine, monkeypatch, tmp_path):
    default = machine("nvcc", archs="sm_90", folder=tmp_path / "cuda" / "bin")
    package = machine("nvcc", archs="sm_90", folder=tmp_path / "site" / "nvidia" / "cu13" / "bin")
    home = machine("nvcc", archs="sm_90", folder=tmp_path / "home" / "bin")
    assert [compiler.path for compiler in toolchain.candidates("cuda")] == [package, default]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_compiler("cuda", ["sm_90"]).path == home


def test_a_missing_llvm_tool_says_what_to_install(machine, tmp_path):
    with pytest.raises(ToolchainError, match="expected llvm-mca, found none; on Debian: apt-get install"):
        toolchain.find_tool("llvm-mca")
    machine("llvm-mca")
    newest = machine("llvm-mca-22")
    machine("llvm-mca-15")
    machine("llvm-mca-99-dbg")
    assert toolchain.find_tool("llvm-mca") == newest
    rocm = machine("llvm-mca", folder=tmp_path / "opt-rocm" / "llvm" / "bin")
    assert toolchain.find_tool("llvm-mca") == rocm


def report() -> tuple[int, str]:
    stream = io.StringIO()
    code = doctor.main_report(stream)
    return code, stream.getvalue()


def test_doctor_is_content_with_a_cxx_compiler_alone(machine):
    machine("c++", archs="host")
    code, text = report()
    assert code == 0
    assert "Rendering and `kdagen verify` work here." in text
    assert "HIP compiler for gfx90a, gfx942, gfx950: not found\n  on Debian: apt-get install" in text
    assert "CUDA compiler for sm_90: not found\n  pip install nvidia-cuda-nvcc" in text
    assert "llvm-objdump for reading machine code: not found\n  on Debian: apt-get install" in text
    assert "\033[" not in text


def test_doctor_fails_without_a_cxx_compiler(machine):
    code, text = report()
    assert code == 1
    assert "C++ compiler for emulator: not found\n  on Debian: apt-get install g++" in text
    assert "will not work here yet" in text


def test_doctor_fails_with_a_cxx_compiler_that_fails(machine):
    machine("c++")
    code, text = report()
    assert code == 1
    assert "C++ compiler for emulator: k.hip:1:1: error: unknown target CPU 'host'\n  on Debian" in text
    machine("g++", archs="host")
    assert report()[0] == 0


@pytest.mark.parametrize(
    ("module", "code", "text"),
    [
        ("torch", 1, "torch for oracle and op: not found\n  pip install torch"),
        ("msgpack", 0, "pyelftools, msgpack for reading machine code: not found\n  pip install 'kdagen[inspect]'"),
        ("ninja", 0, "ninja for building the op: not found\n  pip install ninja"),
    ],
)
def test_doctor_says_which_python_package_is_missing(machine, monkeypatch, module, code, text):
    machine("c++", archs="host")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    if module == "ninja":
        monkeypatch.setitem(sys.modules, module, None)
    found, report_text = report()
    assert found == code
    assert text in report_text


def test_doctor_shows_each_arch_of_a_compiler(machine):
    machine("c++", archs="host")
    machine("clang++-22", archs="gfx90a gfx942", version="22.1.8")
    text = report()[1]
    rows = {tuple(line.split()[:5]) for line in text.splitlines() if line.startswith("HIP compiler  ")}
    states = (("gfx90a", "ok"), ("gfx942", "ok"), ("gfx950", "failed"))
    assert rows == {("HIP", "compiler", arch, state, "22.1.8") for arch, state in states}
    assert "HIP compiler for gfx950: k.hip:1:1: error: unknown target CPU 'gfx950'" in text


def test_doctor_colors_states_alone_and_on_a_terminal_alone(monkeypatch):
    findings = [
        doctor.Finding("c++", "emulator", "/opt/x  ok  y/c++", "1", None, ""),
        doctor.Finding("nvcc", "sm_90", "-", "-", "not found", ""),
        doctor.Finding("hipcc", "gfx942", "hipcc", "1", "error", ""),
    ]
    assert [finding.state for finding in findings] == ["ok", "missing", "failed"]
    monkeypatch.setattr(doctor, "diagnose", lambda: tuple(findings))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.delenv("NO_COLOR", raising=False)
    doctor.main_report(terminal)
    colored = terminal.getvalue()
    assert re.findall(r"\033\[3(\d)m(\w+)\033\[0m", colored) == [("2", "ok"), ("3", "missing"), ("1", "failed")]
    terminal.truncate(0)
    monkeypatch.setenv("NO_COLOR", "1")
    doctor.main_report(terminal)
    assert "\033[" not in terminal.getvalue()
    assert doctor.render(findings, color=False) == re.sub(r"\033\[\d*m", "", colored).removesuffix("\n")


def test_doctor_warns_of_a_rocm_that_is_not_what_it_seems(machine, monkeypatch, tmp_path):
    hipcc = machine("hipcc", archs="gfx90a")
    headers = tmp_path / "usr" / "include" / "hip"
    headers.mkdir(parents=True)
    (headers / "hip_version.h").write_text("#define HIP_VERSION_MAJOR 5\n#define HIP_VERSION_MINOR 2\n")
    monkeypatch.setenv("ROCM_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a;gfx942:sramecc+")
    monkeypatch.setenv("HIPCXX", "no-such-compiler")
    text = report()[1]
    assert warnings_in(text) == [
        "HIPCXX: expected a HIP compiler, got 'no-such-compiler', which is not found",
        f"{hipcc} does not compile for gfx942, gfx950: it is tied to the clang that it came with, and building the op "
        "takes hipcc",
        "clang-offload-bundler is missing: linking will fail with `posix_spawn failed`; on Debian: apt-get install "
        "clang-tools-22",
        f"ROCM_HOME is {tmp_path / 'nowhere'}, which has no bin/hipcc",
        "PYTORCH_ROCM_ARCH names gfx942:sramecc+, which no HIP compiler here compiles for",
        "HIP headers are 5.2: only hip/hip_runtime_api.h compiles with a current clang; the generated kernels need "
        "nothing else",
    ]


def test_doctor_has_no_warning_where_no_trap_is(machine, monkeypatch, tmp_path):
    machine("hipcc", archs="gfx90a gfx942 gfx950", folder=tmp_path / "rocm" / "bin")
    machine("nvcc", archs="sm_90")
    machine("clang-offload-bundler")
    headers = tmp_path / "rocm" / "include" / "hip"
    headers.mkdir(parents=True)
    (headers / "hip_version.h").write_text("#define HIP_VERSION_MAJOR 6\n#define HIP_VERSION_MINOR 4\n")
    monkeypatch.setenv("ROCM_HOME", str(tmp_path / "rocm"))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942:sramecc+ gfx950")
    assert warnings_in(report()[1]) == []


def test_doctor_warns_of_a_hipcc_that_compiles_for_nvidia(machine, monkeypatch):
    hipcc, nvcc = machine("hipcc"), machine("nvcc", archs="sm_90")
    assert f"{hipcc} compiles for NVIDIA because {nvcc} is on PATH; set HIP_PLATFORM=amd" in warnings_in(report()[1])
    monkeypatch.setenv("HIP_PLATFORM", "amd")
    assert "HIP_PLATFORM" not in report()[1]


def warnings_in(text: str) -> list[str]:
    """The warnings of a report, without the one about the torch that the tests run with."""
    found = [line.removeprefix("warning: ") for line in text.splitlines() if line.startswith("warning: ")]
    return [warning for warning in found if not warning.startswith("torch is")]


@pytest.mark.parametrize(
    ("text", "build", "warning"),
    [
        ("hip: Optional[str] = '6.4.0'\ncuda = None\n", "ROCm 6.4.0 build", None),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0 build", "AMD kernels"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU build", "GPU kernels"),
    ],
)
def test_doctor_names_torch_and_what_it_was_built_for(machine, tmp_path, text, build, warning):
    (tmp_path / "version.py").write_text(text)
    assert doctor._torch_build(tmp_path / "__init__.py") == build
    torch = doctor.Finding("torch", f"oracle and op, {build}", "-", "2.13.0", None, "")
    wanted = [f"torch is a {build}: {warning} are rendered and checked here, but not loaded"] if warning else []
    assert doctor.traps([torch]) == wanted
