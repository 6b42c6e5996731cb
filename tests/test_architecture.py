"""The import order of the package, and what importing it does."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kdagen"

ALLOWED = {
    "errors": set(),
    "paths": set(),
    "table": set(),
    "status": set(),
    "spec": {"errors"},
    "target": {"errors"},
    "dpp": {"errors"},
    "abi": set(),
    "tuning": set(),
    "bands": {"tuning"},
    "plan": {"errors", "spec", "target", "dpp", "tuning"},
    "variants": {"spec", "target", "plan", "tuning", "bands"},
    "render": {"errors", "spec", "target", "plan", "variants", "abi", "paths"},
    "emit": {"render", "variants"},
    "bf16": set(),
    "grading": {"bf16"},
    "reference": {"bf16", "errors"},
    "cases": {"errors", "spec"},
    "dispatch": {"errors", "paths", "spec", "op"},
    "staged": {"errors", "spec"},
    "weights": {"errors", "spec", "staged"},
    "toolchain": {"errors"},
    "isa": {"errors", "toolchain"},
    "machine_paths": set(),
    "machine_code": {"errors", "isa", "machine_paths", "spec", "toolchain"},
    "audit": {"machine_code", "machine_paths"},
    "inspect_report": {"audit", "machine_code", "table"},
    "doctor": {"errors", "status", "table", "target", "toolchain"},
}
WITHOUT_JINJA = ("dispatch", "op", "weights", "staged", "reference", "cases")


def imports(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "kdagen":
                found.update(alias.name for alias in node.names)
            elif node.module.startswith("kdagen."):
                found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("module", ALLOWED)
def test_imports_run_one_way(module):
    assert imports(module) <= ALLOWED[module]


@pytest.mark.parametrize("module", WITHOUT_JINJA)
def test_what_an_engine_imports_needs_no_jinja(module):
    if not (PACKAGE / f"{module}.py").exists():
        pytest.fail(f"kdagen/{module}.py does not exist: take it out of WITHOUT_JINJA")
    script = f"import sys; sys.modules['jinja2'] = None; import kdagen.{module}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)


def test_importing_kdagen_touches_no_file_and_starts_nothing(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    script = (
        "import subprocess, os\n"
        "def refuse(*a, **k): raise AssertionError('import started a process or made a folder')\n"
        "subprocess.Popen = os.mkdir = os.makedirs = refuse\n"
        "import kdagen\n"
    )
    env = {**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)
    assert list(home.iterdir()) == []
