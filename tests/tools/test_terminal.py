"""Tables in plain text."""

from __future__ import annotations

from encke.tools.terminal import paragraph, table, times


def test_a_table_shows_figures_and_words(capsys):
    table("title", ["method", "ms", "GB"], [["plain", "1.0", "12.5"], ["a longer name", "not installed: trl"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["title", "method          ms    GB"]
    assert lines[4:] == ["plain          1.0  12.5", "a longer name  not installed: trl"]


def test_a_paragraph_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    paragraph("Encke, step 28 of 64: " + "loss 0.3008, " * 6, "  ", "      ")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("  Encke, step") and all(line.startswith("      ") for line in others)
    assert max(map(len, [first, *others])) <= 40


def test_a_ratio_without_a_sensible_divisor_is_left_empty():
    assert [times(3.0, 2.0), times(3.0, 0.0), times(3.0, -1.0), times(None, 2.0)] == ["1.50x", "", "", ""]


def test_columns_for_which_the_terminal_is_too_narrow_follow_below(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    table("t", ["method", "step ms", "peak GB", "less"], [["plain", "1.0", "2.0", "1.00x"], ["ours", "out of memory"]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 24
    assert lines[2:] == [
        "method  step ms  peak GB",
        "------  -------  -------",
        "plain       1.0      2.0",
        "ours    out of memory",
        "",
        "method   less",
        "------  -----",
        "plain   1.00x",
    ]
