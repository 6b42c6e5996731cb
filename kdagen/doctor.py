"""`kdagen doctor`: every tool for every target, tried on a real kernel, and what to install for those that fail."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kdagen import toolchain
from kdagen.errors import ToolchainError
from kdagen.table import aligned
from kdagen.target import TARGETS


@dataclass(frozen=True)
class Finding:
    """One tool for one purpose. `problem` is None if it works; `needed` marks what rendering and verifying need."""

    tool: str
    purpose: str
    path: str
    version: str
    problem: str | None
    remedy: str
    needed: bool = False


def diagnose() -> list[Finding]:
    """Try every tool; takes a few seconds, in parallel."""
    archs = {target.compiler: list(target.archs) for target in TARGETS}
    checks: list[Callable[[], list[Finding]]] = [
        _torch,
        lambda: _compilers("host", ["emulator"], toolchain.INSTALL_CXX, needed=True),
        lambda: _compilers("hip", archs["hip"], toolchain.INSTALL_HIP),
        lambda: _compilers("cuda", archs["cuda"], toolchain.INSTALL_NVCC),
        *(lambda name=name: [_llvm_tool(name)] for name in ("llvm-objdump", "llvm-mca", "clang-offload-bundler")),
        lambda: [_ninja()],
    ]
    with ThreadPoolExecutor() as pool:
        return [finding for findings in pool.map(lambda check: check(), checks) for finding in findings]


def _compilers(kind: str, archs: list[str], remedy: str, *, needed: bool = False) -> list[Finding]:
    names = {"hip": "HIP compiler", "cuda": "CUDA compiler", "host": "C++ compiler"}
    found = toolchain.candidates(kind)
    if not found:
        return [Finding(names[kind], ", ".join(archs), "-", "-", "not found", remedy, needed)]
    with ThreadPoolExecutor() as pool:
        findings = [
            Finding(names[kind], arch, compiler.path, _short(compiler.version), problem, remedy)
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
        return Finding(name, purpose, "-", "-", "not found", toolchain.INSTALL_HIP)
    return Finding(name, purpose, path, _short(toolchain._version(path)), None, toolchain.INSTALL_HIP)


def _ninja() -> Finding:
    path = shutil.which("ninja") or "-"
    version = _short(toolchain._version(path)) if path != "-" else "-"
    problem = None if path != "-" else "not found"
    return Finding("ninja", "building the op", path, version, problem, "pip install ninja")


def _torch() -> list[Finding]:
    """torch without importing it: its version and what it was built for are in its version.py."""
    remedy = "pip install torch"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return [Finding("torch", "oracle and op", "-", "-", "not found", remedy, needed=True)]
    version = importlib.metadata.version("torch")
    return [Finding("torch", f"oracle and op, {_torch_build(Path(spec.origin))}", spec.origin, version, None, remedy)]


def _torch_build(init: Path) -> str:
    text = (init.parent / "version.py").read_text(encoding="utf-8")
    for name, word in (("hip", "ROCm"), ("cuda", "CUDA")):
        match = re.search(rf"^{name}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        if match:
            return f"{word} {match[1]} build"
    return "CPU build"


def traps(findings: list[Finding]) -> list[str]:
    """Warnings about what would go wrong later on this machine, one sentence each."""
    warnings = []
    by_tool = {tool: [f for f in findings if f.tool == tool] for tool in {f.tool for f in findings}}
    works = [f for f in by_tool.get("HIP compiler", []) if f.problem is None]
    for finding in by_tool.get("HIP compiler", []):
        if finding.path.endswith("hipcc") and finding.problem is not None:
            warnings.append(f"{finding.path} is found and cannot compile for {finding.purpose}: its clang is too old")
    hipcc, nvcc = shutil.which("hipcc"), shutil.which("nvcc")
    if hipcc and nvcc and os.environ.get("HIP_PLATFORM") != "amd":
        warnings.append(f"hipcc compiles for NVIDIA because {nvcc} is on PATH; set HIP_PLATFORM=amd")
    bundler = by_tool.get("clang-offload-bundler", [])
    if works and any(f.problem for f in bundler):
        warnings.append(
            "clang-offload-bundler is missing: linking will fail with `posix_spawn failed`; "
            "on Debian: apt-get install clang-tools-22"
        )
    for variable in ("ROCM_HOME", "ROCM_PATH"):
        root = os.environ.get(variable)
        if root and not Path(root, "bin", "hipcc").is_file():
            warnings.append(f"{variable} is {root}, which has no bin/hipcc")
    able = {f.purpose for f in works}
    for arch in re.split(r"[;, ]+", os.environ.get("PYTORCH_ROCM_ARCH", "")):
        if arch and arch.split(":")[0] not in able:
            warnings.append(f"PYTORCH_ROCM_ARCH names {arch}, which no HIP compiler here compiles for")
    if any(f.tool == "torch" and "ROCm" not in f.purpose and f.problem is None for f in findings):
        warnings.append("torch is not a ROCm build: GPU kernels are rendered and checked here, but not loaded")
    headers = _hip_header_version()
    if headers is not None and headers < (6, 0):
        warnings.append(
            f"HIP headers are {headers[0]}.{headers[1]}: only hip/hip_runtime_api.h compiles with a current clang; "
            "the generated kernels need nothing else"
        )
    return warnings


def _hip_header_version() -> tuple[int, int] | None:
    for path in (*glob.glob("/opt/rocm/include/hip/hip_version.h"), "/usr/include/hip/hip_version.h"):
        if Path(path).is_file():
            text = Path(path).read_text(encoding="utf-8")
            numbers = [re.search(rf"#define HIP_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
            if numbers[0] and numbers[1]:
                return int(numbers[0][1]), int(numbers[1][1])
    return None


def main_report(stream: TextIO) -> int:
    """Print the table, what to install and the warnings; 0 if rendering and `kdagen verify` will work, else 1."""
    if sys.stderr.isatty():
        print("trying every compiler on a small kernel ...", end="\r", file=sys.stderr, flush=True)
    findings = diagnose()
    if sys.stderr.isatty():
        print("\033[K", end="", file=sys.stderr)
    rows = [(f.tool, f.purpose, "ok" if f.problem is None else "FAILED", f.version, f.path) for f in findings]
    table = aligned(("tool", "for", "state", "version", "path"), rows)
    if stream.isatty() and not os.environ.get("NO_COLOR"):
        table = re.sub(r"\bok\b", "\033[32mok\033[0m", table).replace("FAILED", "\033[31mFAILED\033[0m")
    print(table, file=stream)
    broken = [f for f in findings if f.problem is not None]
    for finding in broken:
        print(f"\n{finding.tool} for {finding.purpose}: {finding.problem}\n  {finding.remedy}", file=stream)
    for warning in traps(findings):
        print(f"\nwarning: {warning}", file=stream)
    unmet = [f for f in broken if f.needed]
    print(
        (
            "\nRendering and `kdagen verify` will not work here yet: see above."
            if unmet
            else "\nRendering and `kdagen verify` work here."
        ),
        file=stream,
    )
    return 1 if unmet else 0
