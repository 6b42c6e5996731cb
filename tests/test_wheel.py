"""A wheel works away from the checkout: sources, templates and the emulator's runtime are in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.emit import render_all
from kdagen.paths import generated_dir
from kdagen.render import render
from tests.harness import ABSENT, cdna_variant

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed wheel, and a function that runs a command away from the checkout with it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = folder.glob("kdagen-*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(built)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "KDAGEN_CACHE_DIR": str(folder / "cache")}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return site, run


def test_it_is_the_wheel_that_runs(installed):
    site, run = installed
    assert run("-c", "import kdagen; print(kdagen.__file__)").startswith(str(site))


def test_it_holds_the_generated_sources_and_renders_the_same_bytes(installed):
    site, run = installed
    for path in generated_dir().iterdir():
        if path.is_file():
            assert (site / "kdagen" / "generated" / path.name).read_bytes() == path.read_bytes()
    assert f"{len(render_all())} files in" in run("-m", "kdagen", "build", "--check")
    run("-m", "kdagen", "build", "--heads", str(ABSENT), "--out", "sources")
    assert (site.parent / "sources" / f"kda_decode_h{ABSENT}_cdna.hip").read_text() == render(cdna_variant(ABSENT))


def test_list_and_verify_work(installed):
    _, run = installed
    assert "kda_decode_h12_cdna" in run("-m", "kdagen", "list")
    assert "8 cases on 1 kernels: none failed" in run("-m", "kdagen", "verify", "--heads", "4", "--quick")


def test_the_op_works_on_cpu_tensors(installed):
    _, run = installed
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    run("-c", block)
