"""Where the package's data lies: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """Folder of the Jinja templates."""
    return _data_dir("templates")


def generated_dir() -> Path:
    """Folder of the generated sources."""
    return _data_dir("generated")


def _data_dir(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
