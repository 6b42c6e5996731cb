"""Generated sources become a loadable torch extension, kept in a folder named by everything that went into it.

The folder is built aside and renamed, so that it is complete or absent; an operating-system lock lets one of several
processes build while the others wait, and is gone with its process however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen import toolchain
from kdagen.errors import BuildError, ToolchainError
from kdagen.paths import cache_dir
from kdagen.status import status_line
from kdagen.target import CDNA, CUDA, TARGETS, Target

CXX_FLAGS = ("-O3", "-fvisibility=hidden", "-Wno-attributes")


@dataclass(frozen=True)
class Request:
    """One extension to build.

    Attributes:
        texts: source files by name; those that end in .cpp or the target's suffix are compiled.
        target: whose kernels are among them; None for a build without GPU kernels.
        archs: architectures of the target to compile for.
    """

    texts: Mapping[str, str]
    target: Target | None = None
    archs: tuple[str, ...] = ()

    @property
    def defines(self) -> tuple[str, ...]:
        """Preprocessor names that the C++ sources see."""
        return ("KDAGEN_KERNELS",) if self.target else ()


def torch_target() -> Target | None:
    """The target whose kernels the installed torch runs: CDNA for a ROCm build, CUDA for a CUDA build that sees a GPU.

    A CUDA build without a GPU is what `pip install torch` gives a laptop: it has the op on CPU tensors.
    """
    import torch

    if torch.version.hip is not None:
        return CDNA
    return CUDA if torch.version.cuda is not None and torch.cuda.is_available() else None


def torch_version() -> str:
    """Version of the installed torch, with its build's suffix."""
    import torch

    return torch.__version__


_ARCH_VARIABLE = {CDNA.name: "PYTORCH_ROCM_ARCH", CUDA.name: "TORCH_CUDA_ARCH_LIST"}
_ARCH_EXAMPLE = {
    CDNA.name: "gfx942 (MI300X, MI325X) or gfx950 (MI350X, MI355X)",
    CUDA.name: "9.0 (H100, H200)",
}


def resolve_archs(target: Target, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The architectures to build for: those asked for, else torch's own variable, else those of the visible GPUs.

    torch's variable is $PYTORCH_ROCM_ARCH (gfx942) on ROCm and $TORCH_CUDA_ARCH_LIST (9.0) on CUDA.

    Raises:
        ToolchainError: none of the three names one, or a name is not an architecture of the target.
    """
    variable = _ARCH_VARIABLE[target.name]
    named = list(asked) or [arch for arch in re.split(r"[;, ]+", os.environ.get(variable, "")) if arch]
    named = named or _visible_archs()
    if not named:
        raise ToolchainError(
            f"arch: expected --arch, {variable} or a visible GPU to name an architecture, got none; "
            f"set {variable} to {_ARCH_EXAMPLE[target.name]}"
        )
    archs = [re.sub(r"^(\d+)\.(\d+).*", r"sm_\1\2", arch.split(":")[0]) for arch in named]
    for name, arch in zip(named, archs, strict=True):
        if arch not in target.archs:
            raise ToolchainError(f"arch: expected some of {', '.join(target.archs)}, got {name!r}")
    return tuple(dict.fromkeys(archs))


def _visible_archs() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if torch.version.hip is not None:
        return [device.gcnArchName for device in devices]
    return [f"{device.major}.{device.minor}" for device in devices]


def build(request: Request) -> Path:
    """The extension's library: from the cache if everything that goes into it is the same, else compiled now.

    The library is loaded when this returns after compiling; loading it once more does no harm.

    Raises:
        ToolchainError: ninja or a compiler is missing; nothing was started.
        BuildError: the compiler failed; the message has its command, its first error line and the log's place.
    """
    ninja_folder = str(Path(toolchain.find_ninja()).parent)
    key = cache_key(request, _compiler_identity(request))
    folder = cache_dir("build")
    library = folder / key / f"kdagen_{key}.so"
    if library.is_file():
        return library
    with _locked(folder / f"{key}.lock"):
        if not library.is_file():
            aside = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder))
            try:
                _compile(request, aside, f"kdagen_{key}", folder / f"{key}.log", ninja_folder)
                # torch adds a version to the name when one process builds the same name again.
                os.replace(next(aside.glob("*.so")), aside / library.name)
                os.replace(aside, library.parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return library


def code_objects(texts: Mapping[str, str], target: Target, archs: Sequence[str], folder: Path) -> list[Path]:
    """Compile the device code of a target's kernel sources alone, with any compiler that passes its probe.

    Args:
        texts: kernel sources by file name.
        archs: architectures; one code object `<stem>.<arch>.co` for each source and arch.
        folder: where they go; made if missing.

    Raises:
        ToolchainError: no compiler of the target compiles for all of `archs`.
        BuildError: the compiler failed on a source.
    """
    compiler = toolchain.find_compiler(target.compiler, archs)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(name, arch, folder / f"{Path(name).stem}.{arch}.co") for name in sorted(texts) for arch in archs]
    with tempfile.TemporaryDirectory() as sources, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, text in texts.items():
            Path(sources, name).write_text(text, encoding="utf-8")
        with _progress(folder, len(jobs), archs, pattern="*.co"):
            futures = [
                pool.submit(toolchain.compile_device, compiler, arch, Path(sources, name), output, target.flags)
                for name, arch, output in jobs
            ]
            return [future.result() for future in futures]


def cache_key(request: Request, compilers: str) -> str:
    """A digest of every input: sources, archs, flags, compilers, torch and its C++ ABI."""
    import torch

    digest = hashlib.sha256()
    parts = [
        *(part for name in sorted(request.texts) for part in (name, request.texts[name])),
        *request.archs,
        *request.defines,
        *CXX_FLAGS,
        *(request.target.flags if request.target else ()),
        compilers,
        torch.__version__,
        str(torch.version.hip),
        str(torch.compiled_with_cxx11_abi()),
    ]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode("utf-8"))
    return digest.hexdigest()[:24]


def _compiler_identity(request: Request) -> str:
    """Version texts of the compilers of a request, which are looked for before anything is started."""
    identity = [repr(toolchain.host_compiler())]
    if request.target is not None:
        from torch.utils import cpp_extension

        home, tool, variable = {
            CDNA.name: (cpp_extension.ROCM_HOME or "/opt/rocm", "hipcc", "ROCM_HOME"),
            CUDA.name: (cpp_extension.CUDA_HOME or "/usr/local/cuda", "nvcc", "CUDA_HOME"),
        }[request.target.name]
        path = Path(home, "bin", tool)
        if not path.is_file():
            raise ToolchainError(f"expected {tool} at {path}, found none; install it or set {variable} to its folder")
        identity.append(f"{path} {toolchain.version_text(str(path))}")
    return "\n".join(identity)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an operating-system lock on a file; it dies with its process, so a file left behind locks nobody out."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kdagen: waiting for another process that builds the same kernels ({path})", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(request: Request, folder: Path, name: str, log: Path, ninja_folder: str) -> None:
    from torch.utils import cpp_extension

    # Copies, because torch translates CUDA names in the sources of a HIP build where they lie.
    for file_name, text in request.texts.items():
        (folder / file_name).write_text(text, encoding="utf-8")
    suffixes = (".cpp", *(target.suffix for target in TARGETS))
    sources = [str(folder / file_name) for file_name in sorted(request.texts) if file_name.endswith(suffixes)]
    arguments: dict[str, Any] = {
        "extra_cflags": [*CXX_FLAGS, *(f"-D{define}" for define in request.defines)],
        "extra_cuda_cflags": [*request.target.flags] if request.target else [],
        "with_cuda": request.target is not None,
    }
    archs = [re.sub(r"^sm_(\d+)(\d)$", r"\1.\2", arch) for arch in request.archs]
    environment = {
        **({_ARCH_VARIABLE[request.target.name]: ";".join(archs)} if request.target else {}),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0)))),
        "PATH": f"{ninja_folder}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    try:
        # torch's translation step reports on stdout, which is the command's own.
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, changed_environment(environment), _progress(folder, len(sources), request.archs):
            cpp_extension.load(name, sources, build_directory=str(folder), is_python_module=False, **arguments)
    except (RuntimeError, OSError) as error:
        output = str(error)
        log.write_text(output + "\n", encoding="utf-8")
        failed = re.search(r"^FAILED: .*\n(.*)$", output, re.MULTILINE)
        command = failed[1].strip() if failed else "the build"
        why = toolchain.first_error(_without_commands(output))
        raise BuildError(f"expected {command} to succeed, got: {why} (all of it in {log})") from error
    for file_name, text in request.texts.items():
        if (folder / file_name).read_text(encoding="utf-8") != text:
            raise BuildError(f"{file_name}: expected torch to compile it as it is, got a translated copy")


def _without_commands(output: str) -> str:
    """The compilers' own lines: not ninja's, nor the commands it repeats, whose flags may hold the word `error`."""
    ninjas = re.compile(r"\[|FAILED:|Error building|\S* -")
    return "\n".join(line for line in output.splitlines() if ": error" in line or not ninjas.match(line))


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables set (None: unset) inside, and afterwards as they were."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _progress(folder: Path, files: int, archs: Sequence[str], pattern: str = "*.o") -> Iterator[None]:
    """How many files are compiled."""
    what = f"kdagen: compiling {files} files" + (f" for {';'.join(archs)}" if archs else "")
    done = threading.Event()
    with status_line() as show:
        show(what, lasting=True)

        def count() -> None:
            while not done.wait(0.5):
                show(f"{what}: {len(list(folder.glob(pattern)))} done")

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
