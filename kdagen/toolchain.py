"""Finds the compilers for each target and tries each on a real kernel: a compiler is never trusted by its name."""

from __future__ import annotations

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
PROBE_SECONDS = 60

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
    for command in find():
        path = shutil.which(command[0])
        if path is not None and os.path.realpath(path) not in found:
            compiler = Compiler(kind, (path, *command[1:]), _version(path))
            found[os.path.realpath(path)] = compiler
    return list(found.values())


def _hip_commands() -> Iterator[tuple[str, ...]]:
    chosen = os.environ.get("HIPCXX")
    if chosen:
        yield tuple(shlex.split(chosen))
    roots = [os.environ.get(name) for name in ("ROCM_HOME", "ROCM_PATH")]
    for root in [root for root in (*roots, "/opt/rocm") if root]:
        yield (f"{root}/bin/hipcc",)
        yield (f"{root}/llvm/bin/clang++", "-x", "hip", f"--rocm-path={root}")
    yield ("hipcc",)
    versioned = [name for folder in os.get_exec_path() for name in glob.glob(f"{folder}/clang++-[0-9]*")]
    for path in sorted(versioned, key=lambda name: -int(re.sub(r".*-(\d+).*", r"\1", name))):
        yield (path, "-x", "hip", "--rocm-path=/usr")
    yield ("clang++", "-x", "hip", "--rocm-path=/usr")


def _cuda_commands() -> Iterator[tuple[str, ...]]:
    chosen = os.environ.get("CUDACXX")
    if chosen:
        yield tuple(shlex.split(chosen))
    root = os.environ.get("CUDA_HOME")
    if root:
        yield (f"{root}/bin/nvcc",)
    yield ("nvcc",)
    for path in sorted(glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/cu*/bin/nvcc"), reverse=True):
        yield (path,)
    yield ("/usr/local/cuda/bin/nvcc",)


def _host_commands() -> Iterator[tuple[str, ...]]:
    chosen = os.environ.get("CXX")
    if chosen:
        yield tuple(shlex.split(chosen))
    yield from (("c++",), ("g++",), ("clang++",))


def _version(path: str) -> str:
    lines = [line.strip() for line in version_text(path).splitlines() if re.search(r"\d+\.\d+", line)]
    release = [line for line in lines if "release" in line]
    return (release or lines or ["unknown"])[0]


def version_text(path: str) -> str:
    """All that `path --version` prints, or nothing."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


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
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
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
        ToolchainError: none does; the message lists what was tried, and what to install.
    """
    tried = []
    for compiler in candidates(kind):
        failures = {arch: why for arch in archs if (why := probe(compiler, arch)) is not None}
        if not failures:
            return compiler
        arch, why = next(iter(failures.items()))
        tried.append(f"{compiler.path} ({arch}: {why})")
    install = {"hip": INSTALL_HIP, "cuda": INSTALL_NVCC, "host": INSTALL_CXX}[kind]
    raise ToolchainError(
        f"expected a {kind} compiler for {', '.join(archs)}, found none; "
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
    found = candidates("host")
    chosen = os.environ.get("CXX")
    if chosen and shutil.which(shlex.split(chosen)[0]) is None:
        raise ToolchainError(f"CXX: expected a C++ compiler, got {chosen!r}, which is not found")
    if not found:
        raise ToolchainError(f"expected a C++ compiler (c++, g++ or clang++), found none; {INSTALL_CXX}")
    return found[0]


def run(command: Sequence[str], log: Path) -> None:
    """Run a compiler.

    Raises:
        BuildError: it fails; the message has the command, its first error line and the place of the log.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log.write_text(shlex.join(command) + "\n" + done.stdout + done.stderr, encoding="utf-8")
        why = first_error(done.stderr + done.stdout) or f"exit code {done.returncode}"
        raise BuildError(f"expected {shlex.join(command)} to succeed, got: {why} (all of it in {log})")


def find_tool(name: str, beside: Compiler | None = None) -> str:
    """An LLVM tool: the one beside a compiler, else the newest on PATH.

    Raises:
        ToolchainError: there is none; the message says what to install.
    """
    places = []
    if beside is not None:
        real = Path(os.path.realpath(beside.path))
        places += [str(real.parent / name), *glob.glob(f"{real.parent.parent}/llvm/bin/{name}")]
    versioned = [path for folder in os.get_exec_path() for path in glob.glob(f"{folder}/{name}-[0-9]*")]
    # A plain name may be years old and know no AMD GPU: versioned ones first.
    places += [*sorted(versioned, key=lambda path: -int(path.rsplit("-", 1)[1])), name]
    for place in places:
        path = shutil.which(place)
        if path is not None:
            return path
    raise ToolchainError(f"expected {name}, found none; {INSTALL_HIP}")
