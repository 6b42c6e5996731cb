"""Compiles a generated source and the runtime with the host's C++ compiler, once for each content."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import tempfile
from pathlib import Path

from kdagen import toolchain
from kdagen.emulator.launch import EmulatedKernel
from kdagen.paths import cache_dir

_HERE = Path(__file__).resolve().parent
_RUNTIME_HEADERS = ("runtime.h", "worker.h", "report.h", "fiber.h", "shadow.h", "memory.h", "wave.h", "math.h")
_RUNTIME_SOURCES = ("runtime.cpp", *_RUNTIME_HEADERS)
_SHIM_SOURCES = ("shim/kdaemu.h", "shim/hip/hip_runtime_api.h")

# Hidden symbols: modules share names, and so do runtimes.
_COMMON_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-w", "-fvisibility=hidden")
# -fsanitize=thread only makes the compiler call __tsan_* at every access; the runtime defines those, not libtsan.
# No contraction: a fused multiply-add in the text is one, and nothing else is.
_MODULE_FLAGS = ("-O2", "-fsanitize=thread", "-ffp-contract=off", "-fno-exceptions")
# clang checks no access wider than 16 bytes, and its vectoriser makes some of 32.
_ACCESS_FLAGS = ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")

_GLUE = """\
#include <hip/hip_runtime_api.h>
#include "{source}"
extern "C" __attribute__((visibility("hidden"), no_sanitize("thread"))) void kdaemu_invoke(const void *kernel,
                                                                                           void **arguments) {{
  using Kernel = void (*)(KdaDecodeParams);
  reinterpret_cast<Kernel>(const_cast<void *>(kernel))(*static_cast<KdaDecodeParams *>(arguments[0]));
}}
"""


def compile_source(source: Path | str, *, lds_bytes: int) -> EmulatedKernel:
    """Compile a generated source for the emulator, or take it from the cache.

    Args:
        source: a file, compiled as it is; or source text.
        lds_bytes: LDS that the kernel may use; an access past it is a fault.

    Raises:
        ToolchainError: no C++ compiler is found.
        BuildError: the compiler fails; the message has the command, its first error line and the log's place.
    """
    text = source.read_bytes() if isinstance(source, Path) else source.encode("utf-8")
    compiler, flags = toolchain.host_compiler(), (*_COMMON_FLAGS, *_MODULE_FLAGS, *_ACCESS_FLAGS, *_machine_flags())
    runtime = _runtime(compiler)
    shim = b"".join((_HERE / name).read_bytes() for name in _SHIM_SOURCES)
    key = _key(text, shim, _GLUE.encode(), runtime.name.encode(), repr(compiler).encode(), *map(str.encode, flags))
    library = cache_dir("emulator") / f"kernel-{key}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=cache_dir("emulator")) as folder:
            path = Path(folder) / "kernel.hip"
            path.write_bytes(text)
            glue = Path(folder) / "glue.cpp"
            glue.write_text(_GLUE.format(source=path if isinstance(source, str) else source.resolve()))
            # Compile and link apart, so that the link does not bring libtsan.
            built = Path(folder) / "kernel.o"
            flags = tuple(flag for flag in flags if flag != "-shared")
            toolchain.run(
                [*compiler.command, *flags, "-c", f"-I{_HERE / 'shim'}", str(glue), "-o", str(built)],
                library.with_suffix(".log"),
            )
            linked = Path(folder) / "kernel.so"
            toolchain.run(
                [*compiler.command, "-shared", str(built), str(runtime), "-o", str(linked)], library.with_suffix(".log")
            )
            os.replace(linked, library)
    return EmulatedKernel(library, runtime, lds_bytes)


def _runtime(compiler: toolchain.Compiler) -> Path:
    sources = b"".join((_HERE / name).read_bytes() for name in _RUNTIME_SOURCES)
    flags = (*_COMMON_FLAGS, "-O2", "-pthread")
    library = cache_dir("emulator") / f"libkdaemu-{_key(sources, repr(compiler).encode(), *map(str.encode, flags))}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=cache_dir("emulator")) as folder:
            built = Path(folder) / library.name
            toolchain.run(
                [
                    *compiler.command,
                    *flags,
                    str(_HERE / "runtime.cpp"),
                    f"-Wl,-soname,{library.name}",
                    "-o",
                    str(built),
                ],
                library,
            )
            os.replace(built, library)
    return library


def _key(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """-mfma where the machine has it: without it every fused multiply-add is a library call."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return ()
    return ("-mfma",) if " fma " in flags + " " else ()
