"""The status line on a terminal and in a log."""

import io
import sys

import pytest

from kdagen.status import status_line


def shown(monkeypatch, terminal, error=None):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with status_line() as show:
        show("half of it", lasting=True)
        show("all")
        if error is not None:
            raise error
    return stream.getvalue()


def test_on_a_terminal_one_line_is_rewritten_and_gone_at_the_end(monkeypatch):
    assert shown(monkeypatch, True) == "\r\033[Khalf of it\r\033[Kall\r\033[K"


def test_a_log_gets_lasting_texts_alone_a_line_each_and_no_control_codes(monkeypatch):
    assert shown(monkeypatch, False) == "half of it\n"


def test_an_error_leaves_no_line_behind_it(monkeypatch):
    with pytest.raises(ValueError, match="broken"):
        shown(monkeypatch, True, ValueError("broken"))
    assert sys.stderr.getvalue().endswith("\r\033[K")
