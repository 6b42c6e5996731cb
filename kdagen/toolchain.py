"""Finds the compilers for each target and tries each on a real kernel: a compiler is never trusted by its name."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdagen.errors import BuildError, ToolchainError

HIP_PACKAGES = "clang-22 lld-22 llvm-22 clang-tools-22 libamdhip64-dev rocm-device-libs"
INSTALL_HIP = f"on Debian: apt-get install --no-install-recommends {HIP_PACKAGES}"
INSTALL_NVCC = (
    "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt nvidia-nvvm, "
    "or the CUDA toolkit of your system"
)
INSTALL_CXX = "on Debian: apt-get install g++"
NAMES = {"hip": "HIP compiler", "cuda": "CUDA compiler", "host": "C++ compiler"}
PROBE_SECONDS = 60
CHOICES = {"hip": "HIPCXX", "cuda": "CUDACXX", "host": "CXX"}
"""Variables by which a user names the compiler of a kind, as CMake reads them."""
ROCM_DEFAULT = "/opt/rocm"
CUDA_DEFAULT = "/usr/local/cuda"
SYSTEM_ROOT = "/usr"

_HIP_PROBE = """\
#include <hip/hip_runtime_api.h>
#if !defined(__global__)
#define __global__ __attribute__((global))
#endif
__global__ void probe(float *a) { a[__builtin_amdgcn_workitem_id_x()] = __builtin_amdgcn_rcpf(a[0]); }
"""
_CUDA_PROBE = "__global__ void probe(float *a) { a[threadIdx.x] = __frcp_rn(a[0]); }\n"
_HOST_PROBE = "#include <atomic>\n#include <thread>\nint probe(int *a) { return *a; }\n"


@dataclass(frozen=True)
class Compiler:
    """A compiler and the arguments that every call of it needs.

    Attributes:
        kind: "hip", "cuda" or "host".
        command: argument vector to which a call adds its own.
        version: first line of its version that has a number in it.
    """

    kind: str
    command: tuple[str, ...]
    version: str

    @property
    def path(self) -> str:
        """The executable."""
        return self.command[0]


def candidates(kind: str) -> list[Compiler]:
    """The compilers of a kind that are on this machine, the one to prefer first; none of them is tried yet."""
    find = {"hip": _hip_commands, "cuda": _cuda_commands, "host": _host_commands}[kind]
    found: dict[str, Compiler] = {}
    for command in (*filter(None, [_chosen(kind)]), *find()):
        path = shutil.which(command[0])
        if path is not None and os.path.realpath(path) not in found:
            compiler = Compiler(kind, (path, *command[1:]), version(path))
            found[os.path.realpath(path)] = compiler
    return list(found.values())


def missing_choice(kind: str) -> str | None:
    """What is wrong if the user's variable names a compiler that is not here; None if it is, or is not set."""
    chosen = _chosen(kind)
    if not chosen or shutil.which(chosen[0]) is not None:
        return None
    return f"{CHOICES[kind]}: expected a {NAMES[kind]}, got {shlex.join(chosen)!r}, which is not found"


def _chosen(kind: str) -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get(CHOICES[kind], "")))


def rocm_roots() -> list[str]:
    """Where a ROCm installation may be, the user's choice first."""
    return [root for root in (os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), ROCM_DEFAULT) if root]


def _hip_commands() -> Iterator[tuple[str, ...]]:
    for root in rocm_roots():
        yield (f"{root}/bin/hipcc",)
        yield (f"{root}/llvm/bin/clang++", "-x", "hip", f"--rocm-path={root}")
    yield ("hipcc",)
    versioned = [name for folder in os.get_exec_path() for name in glob.glob(f"{folder}/clang++-[0-9]*")]
    for path in sorted(versioned, key=lambda name: -int(re.sub(r".*-(\d+).*", r"\1", name))):
        yield (path, "-x", "hip", f"--rocm-path={SYSTEM_ROOT}")
    yield ("clang++", "-x", "hip", f"--rocm-path={SYSTEM_ROOT}")


def _cuda_commands() -> Iterator[tuple[str, ...]]:
    root = os.environ.get("CUDA_HOME")
    if root:
        yield (f"{root}/bin/nvcc",)
    yield ("nvcc",)
    for path in sorted(glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/cu*/bin/nvcc"), reverse=True):
        yield (path,)
    yield (f"{CUDA_DEFAULT}/bin/nvcc",)


def _host_commands() -> Iterator[tuple[str, ...]]:
    yield from (("c++",), ("g++",), ("clang++",))


def version(path: str) -> str:
    """The line of `path --version` that has the release in it, or "unknown"."""
    lines = [line.strip() for line in version_text(path).splitlines() if re.search(r"\d+\.\d+", line)]
    release = [line for line in lines if "release" in line]
    return (release or lines or ["unknown"])[0]


def version_text(path: str) -> str:
    """All that `path --version` prints, or nothing."""
    try:
        return _call([path, "--version"], PROBE_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _call(command: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    # A compiler may quote a source or a path in any encoding.
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
    )


def probe(compiler: Compiler, arch: str) -> str | None:
    """Compile one small kernel for `arch` (any word for a host compiler); None if it worked, else the first error."""
    suffix, text = {"hip": (".hip", _HIP_PROBE), "cuda": (".cu", _CUDA_PROBE), "host": (".cpp", _HOST_PROBE)}[
        compiler.kind
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / f"probe{suffix}", Path(folder) / "probe.o"
        source.write_text(text)
        command = compile_command(compiler, arch, source, output)
        try:
            done = _call(command, PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer in {PROBE_SECONDS} s"
        except OSError as error:
            return str(error)
        if done.returncode == 0 and output.is_file():
            return None
        return first_error(done.stderr + done.stdout) or f"exit code {done.returncode}"


def first_error(output: str) -> str:
    """The first line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def find_compiler(kind: str, archs: Sequence[str]) -> Compiler:
    """The first compiler of a kind that compiles a kernel for all of `archs`.

    Raises:
        ToolchainError: none does; the message lists what was tried, and what to install. Or the user's variable names
            one that is not here.
    """
    if (wrong := missing_choice(kind)) is not None:
        raise ToolchainError(wrong)
    tried = []
    for compiler in candidates(kind):
        failures = {arch: why for arch in archs if (why := probe(compiler, arch)) is not None}
        if not failures:
            return compiler
        arch, why = next(iter(failures.items()))
        tried.append(f"{compiler.path} ({arch}: {why})")
    install = {"hip": INSTALL_HIP, "cuda": INSTALL_NVCC, "host": INSTALL_CXX}[kind]
    raise ToolchainError(
        f"expected a {NAMES[kind]} for {', '.join(archs)}, found none; "
        f"tried {'; '.join(tried) if tried else 'nothing, none is here'}; {install}"
    )


def compile_command(compiler: Compiler, arch: str, source: Path, output: Path) -> list[str]:
    """The command that compiles a source for one arch: device code alone of a GPU's, an object of the host's."""
    if compiler.kind == "host":  # what the emulator needs of it
        return [*compiler.command, "-std=c++17", "-fPIC", "-fsanitize=thread", "-c", str(source), "-o", str(output)]
    if compiler.kind == "cuda":
        return [*compiler.command, f"-arch={arch}", "-cubin", str(source), "-o", str(output)]
    device_only = ["--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", f"--offload-arch={arch}"]
    return [*compiler.command, *device_only, "-c", str(source), "-o", str(output)]


def compile_device(compiler: Compiler, arch: str, source: Path, output: Path, flags: Iterable[str]) -> Path:
    """Compile the device code of a generated source for one arch into a code object.

    Raises:
        BuildError: the compiler fails; the message has the command, its first error line and the log's place.
    """
    run([*compile_command(compiler, arch, source, output), *flags], output.with_suffix(".log"))
    return output


def host_compiler() -> Compiler:
    """The C++ compiler of the host: $CXX, else c++, g++ or clang++; untried.

    Raises:
        ToolchainError: $CXX is not found, or there is none.
    """
    if (wrong := missing_choice("host")) is not None:
        raise ToolchainError(wrong)
    found = candidates("host")
    if not found:
        raise ToolchainError(f"expected a C++ compiler (c++, g++ or clang++), found none; {INSTALL_CXX}")
    return found[0]


def run(command: Sequence[str], log: Path) -> None:
    """Run a compiler.

    Raises:
        BuildError: it fails; the message has the command, its first error line and the place of the log.
    """
    done = _call(command)
    if done.returncode != 0:
        log.write_text(shlex.join(command) + "\n" + done.stdout + done.stderr, encoding="utf-8")
        why = first_error(done.stderr + done.stdout) or f"exit code {done.returncode}"
        raise BuildError(f"expected {shlex.join(command)} to succeed, got: {why} (all of it in {log})")


def find_tool(name: str) -> str:
    """An LLVM tool: ROCm's own, else the newest on PATH.

    Raises:
        ToolchainError: there is none; the message says what to install.
    """
    found = [path for folder in os.get_exec_path() for path in glob.glob(f"{folder}/{name}-*")]
    versioned = [path for path in found if path.rsplit("-", 1)[1].isdecimal()]
    # A plain name may be years old and know no AMD GPU: versioned ones first.
    newest_first = sorted(versioned, key=lambda path: -int(path.rsplit("-", 1)[1]))
    for place in (*(f"{root}/llvm/bin/{name}" for root in rocm_roots()), *newest_first, name):
        path = shutil.which(place)
        if path is not None:
            return path
    raise ToolchainError(f"expected {name}, found none; {INSTALL_HIP}")


INSTALL_NINJA = "pip install ninja"


def find_ninja() -> str:
    """The ninja program: on PATH, or of the Python package, whose folder need not be on PATH.

    Raises:
        ToolchainError: there is none; the message says what to install.
    """
    found = shutil.which("ninja")
    if found is None:
        with contextlib.suppress(ImportError):
            import ninja

            found = shutil.which("ninja", path=ninja.BIN_DIR)
    if found is None:
        raise ToolchainError(f"expected ninja, found none; {INSTALL_NINJA}")
    return found
