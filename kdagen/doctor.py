"""`kdagen doctor`: every tool for every target, tried on a real kernel, and what to install for those that fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kdagen import toolchain
from kdagen.errors import ToolchainError
from kdagen.status import status_line
from kdagen.table import aligned
from kdagen.target import TARGETS


@dataclass(frozen=True)
class Finding:
    """One tool for one purpose. `problem` is None if it works; `needed` marks what rendering and verifying lack."""

    tool: str
    purpose: str
    path: str
    version: str
    problem: str | None
    remedy: str
    needed: bool = False

    @property
    def state(self) -> str:
        """`ok`, `missing` or `failed`."""
        return "ok" if self.problem is None else "missing" if self.problem == _NOT_FOUND else "failed"


_NOT_FOUND = "not found"


def diagnose() -> tuple[Finding, ...]:
    """Try every tool; takes a few seconds, in parallel."""
    archs = {target.compiler: list(target.archs) for target in TARGETS}
    checks: list[Callable[[], list[Finding]]] = [
        _torch,
        lambda: _compilers("host", ["emulator"], toolchain.INSTALL_CXX, needed=True),
        lambda: _compilers("hip", archs["hip"], toolchain.INSTALL_HIP),
        lambda: _compilers("cuda", archs["cuda"], toolchain.INSTALL_NVCC),
        *(
            lambda name=name: [_llvm_tool(name)]
            for name in ("llvm-objdump", "llvm-mca", "llvm-symbolizer", "clang-offload-bundler")
        ),
        lambda: [_ninja(), _code_object_readers()],
    ]
    with ThreadPoolExecutor() as pool:
        return tuple(finding for findings in pool.map(lambda check: check(), checks) for finding in findings)


def _compilers(kind: str, archs: list[str], remedy: str, *, needed: bool = False) -> list[Finding]:
    name = toolchain.NAMES[kind]
    found = toolchain.candidates(kind)
    if not found:
        return [Finding(name, ", ".join(archs), "-", "-", _NOT_FOUND, remedy, needed)]
    with ThreadPoolExecutor() as pool:
        findings = [
            Finding(name, arch, compiler.path, _short(compiler.version), problem, remedy)
            for compiler in found
            for arch, problem in zip(archs, pool.map(lambda a, c=compiler: toolchain.probe(c, a), archs), strict=True)
        ]
    # One that works is enough: only if none does is the need unmet.
    works = any(finding.problem is None for finding in findings)
    return [Finding(f.tool, f.purpose, f.path, f.version, f.problem, f.remedy, needed and not works) for f in findings]


def _short(version: str) -> str:
    numbers = re.search(r"\d+(\.\d+)+", version)
    return numbers[0] if numbers else version


def _llvm_tool(name: str) -> Finding:
    purpose = "linking" if name == "clang-offload-bundler" else "reading machine code"
    try:
        path = toolchain.find_tool(name)
    except ToolchainError:
        return Finding(name, purpose, "-", "-", _NOT_FOUND, toolchain.INSTALL_HIP)
    return Finding(name, purpose, path, _short(toolchain.version(path)), None, toolchain.INSTALL_HIP)


def _ninja() -> Finding:
    try:
        path = toolchain.find_ninja()
    except ToolchainError:
        return Finding("ninja", "building the op", "-", "-", _NOT_FOUND, toolchain.INSTALL_NINJA)
    return Finding("ninja", "building the op", path, _short(toolchain.version(path)), None, toolchain.INSTALL_NINJA)


def _code_object_readers() -> Finding:
    """What kdagen.isa reads code objects with."""
    remedy = "pip install 'kdagen[inspect]'"
    name, purpose = "pyelftools, msgpack", "reading machine code"
    packages = {"pyelftools": "elftools", "msgpack": "msgpack"}
    lacking = [package for package, module in packages.items() if importlib.util.find_spec(module) is None]
    if lacking:
        return Finding(name, purpose, "-", "-", _NOT_FOUND, remedy)
    versions = ", ".join(importlib.metadata.version(package) for package in packages)
    return Finding(name, purpose, "-", versions, None, remedy)


def _torch() -> list[Finding]:
    """torch without importing it: its version and what it was built for are in its version.py."""
    remedy = "pip install torch"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return [Finding("torch", "oracle and op", "-", "-", _NOT_FOUND, remedy, needed=True)]
    version = importlib.metadata.version("torch")
    return [Finding("torch", f"oracle and op, {_torch_build(Path(spec.origin))}", spec.origin, version, None, remedy)]


def _torch_build(init: Path) -> str:
    text = (init.parent / "version.py").read_text(encoding="utf-8")
    for name, word in (("hip", "ROCm"), ("cuda", "CUDA")):
        match = re.search(rf"^{name}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        if match:
            return f"{word} {match[1]} build"
    return "CPU build"


def traps(findings: Sequence[Finding]) -> list[str]:
    """Warnings about what would go wrong later on this machine, one sentence each."""
    hip = [f for f in findings if f.tool == toolchain.NAMES["hip"]]
    able = {f.purpose for f in hip if f.problem is None}
    warnings = [wrong for kind in toolchain.CHOICES if (wrong := toolchain.missing_choice(kind)) is not None]
    warnings += _hipcc_traps([f for f in hip if Path(f.path).name == "hipcc"])
    if able and any(f.tool == "clang-offload-bundler" and f.problem for f in findings):
        warnings.append(
            "clang-offload-bundler is missing: linking will fail with `posix_spawn failed`; "
            "on Debian: apt-get install clang-tools-22"
        )
    for variable in ("ROCM_HOME", "ROCM_PATH"):
        root = os.environ.get(variable)
        if root and not Path(root, "bin", "hipcc").is_file():
            warnings.append(f"{variable} is {root}, which has no bin/hipcc")
    for arch in re.split(r"[;, ]+", os.environ.get("PYTORCH_ROCM_ARCH", "")):
        if arch and arch.split(":")[0] not in able:
            warnings.append(f"PYTORCH_ROCM_ARCH names {arch}, which no HIP compiler here compiles for")
    for build in (f.purpose.rpartition(", ")[2] for f in findings if f.tool == "torch" and f.problem is None):
        if "ROCm" not in build:
            kernels = "AMD kernels" if "CUDA" in build else "GPU kernels"
            warnings.append(f"torch is a {build}: {kernels} are rendered and checked here, but not loaded")
    headers = _hip_header_version()
    if headers is not None and headers < (6, 0):
        warnings.append(
            f"HIP headers are {headers[0]}.{headers[1]}: only hip/hip_runtime_api.h compiles with a current clang; "
            "the generated kernels need nothing else"
        )
    return warnings


def _hipcc_traps(findings: Sequence[Finding]) -> Iterator[str]:
    nvcc = shutil.which("nvcc")
    for path in dict.fromkeys(f.path for f in findings):
        able = [f.purpose for f in findings if f.path == path and f.problem is None]
        unable = [f.purpose for f in findings if f.path == path and f.problem is not None]
        if unable and not able and nvcc and os.environ.get("HIP_PLATFORM") != "amd":
            yield f"{path} compiles for NVIDIA because {nvcc} is on PATH; set HIP_PLATFORM=amd"
        elif unable:
            yield (
                f"{path} does not compile for {', '.join(unable)}: it is tied to the clang that it came with, "
                "and building the op takes hipcc"
            )


def _hip_header_version() -> tuple[int, int] | None:
    for root in (*toolchain.rocm_roots(), toolchain.SYSTEM_ROOT):
        path = Path(root, "include", "hip", "hip_version.h")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            numbers = [re.search(rf"#define HIP_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
            if numbers[0] and numbers[1]:
                return int(numbers[0][1]), int(numbers[1][1])
    return None


def render(findings: Sequence[Finding], *, color: bool) -> str:
    """The table of findings, what to install for those that fail, the traps, and whether verifying works here."""
    table = aligned(
        ("tool", "for", "state", "version", "path"),
        [(f.tool, f.purpose, f.state, f.version, f.path) for f in findings],
    )
    if color:
        paint = {"ok": "\033[32m", "missing": "\033[33m", "failed": "\033[31m"}
        # The first such word between two gaps is the state: a path may hold the same word.
        states = re.compile(r"^(.*?  )(ok|missing|failed)(?=  )", re.MULTILINE)
        table = states.sub(lambda match: f"{match[1]}{paint[match[2]]}{match[2]}\033[0m", table)
    broken = [f for f in findings if f.problem is not None]
    paragraphs = [table, *(f"{f.tool} for {f.purpose}: {f.problem}\n  {f.remedy}" for f in broken)]
    paragraphs += [f"warning: {warning}" for warning in traps(findings)]
    works = not any(f.needed for f in broken)
    paragraphs.append(
        "Rendering and `kdagen verify` work here."
        if works
        else "Rendering and `kdagen verify` will not work here yet: see above."
    )
    return "\n\n".join(paragraphs)


def main_report(stream: TextIO) -> int:
    """Print the report; 0 if rendering and `kdagen verify` will work, else 1."""
    with status_line() as show:
        show("trying every compiler on a small kernel ...")
        findings = diagnose()
    print(render(findings, color=stream.isatty() and not os.environ.get("NO_COLOR")), file=stream)
    return 1 if any(f.needed and f.problem is not None for f in findings) else 0
