"""Shows a HIP compiler as a ROCm installation, and torch as a ROCm build, to an otherwise real extension build."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen import toolchain
from kdagen.errors import ToolchainError

ARCHS = ("gfx942", "gfx950")
ROOT = Path(__file__).parents[1]

# What torch.utils.cpp_extension looks at when it is imported.
SITE = """\
import torch
torch.version.hip = "6.4.0"
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = lambda: False
"""


def make_rocm(folder: Path) -> dict[str, str]:
    """Environment of a process that finds a ROCm in `folder`; skips the test where there is no HIP compiler."""
    try:
        compiler = toolchain.find_compiler("hip", ARCHS)
    except ToolchainError as error:
        pytest.skip(str(error))
    for name in ("bin", "lib", "site"):
        (folder / name).mkdir(parents=True)
    hipcc = folder / "bin" / "hipcc"
    hipcc.write_text(f'#!/bin/sh\nexec {shlex.join(compiler.command)} -nogpulib "$@"\n')
    hipcc.chmod(0o755)
    library = subprocess.run(
        ["c++", "-print-file-name=libamdhip64.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (folder / "lib" / "libamdhip64.so").symlink_to(library)
    for name in ("c10_hip", "torch_hip"):
        command = ["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(folder / "lib" / f"lib{name}.so")]
        subprocess.run(command, check=True)
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTORCH_ROCM_ARCH", "HIP_PLATFORM")},
        "ROCM_HOME": str(folder),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
        "KDAGEN_CACHE_DIR": str(folder / "cuda-in-the-path"),
    }


def run_python(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process; its output is shown if an assertion on it fails."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
