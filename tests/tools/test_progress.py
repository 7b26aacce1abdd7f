"""Progress lines, in a terminal and elsewhere."""

from __future__ import annotations

import io
import threading

import pytest

from encke.tools import progress
from encke.tools.progress import StatusLine, Waiting, told_when_slow, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tracking_gives_every_item_and_tells_the_time_left(capsys):
    assert list(track([("one", 1), ("two", 2)])) == [1, 2]
    assert capsys.readouterr().out.splitlines() == ["1 of 2: one", "2 of 2: two, about 0 s left"]


def test_without_a_terminal_a_line_comes_after_a_pause_only(capsys, monkeypatch):
    with progress.progress("photos", 12, 2) as advance:
        advance(3)
        monkeypatch.setattr(progress, "PAUSE", 0.0)
        advance(1)
        advance(6)
    assert capsys.readouterr().out == "photos: 6 of 12 images, about 0 s left\n"


def test_in_a_terminal_the_line_is_rewritten_and_cleared(capsys, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    line = StatusLine()
    line.show("a" * 500)
    line.say("stays")
    shown = screen.getvalue()
    assert shown.startswith("\r\033[Kaaaa") and shown.endswith("\r\033[K") and "\n" not in shown
    assert len(shown.split("\r\033[K")[1]) < 200
    assert capsys.readouterr().out == "stays\n"


def test_the_line_is_cleared_when_the_work_fails(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with pytest.raises(ZeroDivisionError), progress.progress("photos", 12) as advance:
        advance(3)
        raise ZeroDivisionError
    assert screen.getvalue().endswith("\r\033[K")


def waiting_after(seconds: float) -> Waiting:
    waiting = Waiting("GPU")
    waiting.count, waiting.seconds = 9, seconds
    return waiting


def test_a_long_compilation_shows_a_line_in_a_terminal_and_removes_it(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    waiting = waiting_after(65.0)
    with waiting:
        shown = screen.getvalue()
        with waiting:
            """A function that the kernel calls is compiled within it."""
        assert screen.getvalue() == shown
    assert "compiling GPU kernels, 9 so far in 1 min 05 s" in shown
    assert screen.getvalue() == shown + "\r\033[K"
    assert waiting.count == 10 and waiting.seconds >= 65.0


@pytest.mark.parametrize(("seconds", "screen"), [(1.0, Terminal()), (65.0, io.StringIO())])
def test_short_waits_and_output_that_is_no_terminal_get_no_line(monkeypatch, seconds, screen):
    monkeypatch.setattr("sys.stderr", screen)
    waiting = waiting_after(seconds)
    with pytest.raises(RuntimeError), waiting:
        raise RuntimeError("a compiler may fail")
    assert not screen.getvalue() and waiting.seconds >= seconds and not waiting.began


def wait_for_timers(*_):
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_a_slow_block_says_what_it_does_and_a_quick_one_nothing(capsys, monkeypatch):
    with told_when_slow("quick"):
        pass
    monkeypatch.setattr(progress, "SLOW", 0.0)
    with told_when_slow("compiling"):
        wait_for_timers()
    wait_for_timers()
    assert capsys.readouterr().out == "compiling\n"
