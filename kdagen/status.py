"""The status line of a command that takes its time, on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Show(Protocol):
    """Shows a text; `lasting`: also where a line cannot be rewritten."""

    def __call__(self, text: str, lasting: bool = False) -> None: ...


@contextlib.contextmanager
def status_line() -> Iterator[Show]:
    """A function that shows how far a command is.

    On a terminal a text takes the place of the one before, and the last is gone at the end. Elsewhere, in a log, a
    lasting text is a line of its own, and any other is left out.
    """
    terminal = sys.stderr.isatty()

    def show(text: str, lasting: bool = False) -> None:
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif lasting:
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
