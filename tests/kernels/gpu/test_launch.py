"""The status line while kernels are compiled."""

from __future__ import annotations

import pytest

launch = pytest.importorskip("encke.kernels.gpu.launch")


@pytest.fixture
def waited(monkeypatch):
    """Seconds that the process has waited so far can be set; `True` makes a terminal of stderr."""

    def prepare(seconds: float, terminal: bool) -> None:
        monkeypatch.setattr(launch, "_waited", seconds)
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)

    return prepare


def test_a_long_compilation_shows_a_line_in_a_terminal_and_removes_it(waited, capsys):
    waited(65.0, terminal=True)
    with launch.waited_for():
        shown = capsys.readouterr()
    assert "compiling GPU kernels" in shown.err and "1 min 05 s" in shown.err and not shown.out
    assert capsys.readouterr().err == "\r\033[K"
    assert launch._waited >= 65.0


@pytest.mark.parametrize(("seconds", "terminal"), [(1.0, True), (65.0, False)])
def test_short_waits_and_output_that_is_no_terminal_get_no_line(waited, capsys, seconds, terminal):
    waited(seconds, terminal)
    with pytest.raises(RuntimeError), launch.waited_for():
        raise RuntimeError("a compiler may fail")
    shown = capsys.readouterr()
    assert not shown.err and not shown.out and launch._waited >= seconds
