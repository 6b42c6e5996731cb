"""Where things lie: the package's data beside it in a checkout and inside it in a wheel; builds in a cache folder."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """Folder of the Jinja templates."""
    return _data_dir("templates")


def generated_dir() -> Path:
    """Folder of the generated sources."""
    return _data_dir("generated")


def cache_dir(name: str) -> Path:
    """Folder of one kind of builds, below $KDAGEN_CACHE_DIR or the user's cache folder; made if missing."""
    chosen = os.environ.get("KDAGEN_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(chosen) if chosen else base / "kdagen") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _data_dir(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
