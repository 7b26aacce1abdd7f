"""Lines of a training in a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from encke.train.display import Display, live_line, loss_text, ratio_lines

LINE: dict[str, Any] = {
    "step": 61234,
    "epoch": 12.2468,
    "loss": 1.23456,
    "accuracy": 0.7654,
    "per_second": 12345.6,
    "memory_bytes": 2e10,
    "peak_bytes": 123.4e9,
    "ratio": 14.32,
}


@pytest.mark.parametrize("width", [60, 79, 119])
def test_bar_epoch_and_time_left_always_fit(width):
    text = live_line(LINE, 500_000, 100.0, 3600 * 23.5, "tokens", width)
    assert len(text) <= width
    assert text.startswith("[#-----------] epoch 12.25 of 100, ") and text.endswith(", 23 h 30 min left")
    assert "loss 1.2346" in text or width == 60


def test_80_columns_have_room_for_loss_accuracy_and_ratio():
    line = {**LINE, "step": 500, "epoch": 0.28, "peak_bytes": None}
    text = live_line(line, 1000, 0.5, 15, "images", 79)
    assert text == "[######------] epoch 0.28 of 0.5, loss 1.2346, 76.5 %, ratio 14.3x, 15 s left"


def test_a_loss_that_has_diverged_has_few_digits():
    assert [loss_text(each) for each in (1.23456, 1.5e35, float("nan"))] == ["1.2346", "1.5e+35", "nan"]


def test_a_part_of_an_epoch_has_four_digits(capsys):
    display = Display(2, 2 / 31, "images", quiet=False)
    metrics = {"epoch": 2 / 31, "train_loss": 2.0, "train_accuracy": None, "validation_loss": None, "seconds": 1.0}
    display.epoch({**metrics, "validation_accuracy": None})
    assert capsys.readouterr().out == "epoch 0.06452 of 0.06452: train loss 2.0000 (1 s)\n"


def test_a_wide_terminal_shows_every_figure():
    text = live_line(LINE, 500_000, 100.0, 5, "images", 200)
    assert "loss 1.2346, 76.5 %, ratio 14.3x, peak 123.40 GB, 12,346 images/s, 5 s left" in text
    bare = {**LINE, "accuracy": None, "ratio": None, "peak_bytes": None, "step": 500_000}
    assert live_line(bare, 500_000, 100.0, 0, "tokens", 200).startswith("[############] epoch 12.25 of 100, loss")


def test_ratios_of_many_convolutions_are_split_into_lines_that_fit():
    names = {f"layer{i}.downsample.0": float(i) for i in range(1, 9)}
    pairs = ratio_lines(1234, names, 80)
    assert len(pairs) > 1 and all(len(line) <= 80 for pair in pairs for line in pair)
    assert all(heads.startswith("   step  ") and figures.startswith("  1,234  ") for heads, figures in pairs)
    heads, figures = ([word for pair in pairs for word in pair[row].split()[1:]] for row in (0, 1))
    assert dict(zip(heads, map(float, figures), strict=True)) == names


def test_names_of_ratios_are_shown_once_for_many_steps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    display = Display(100, 1.0, "images", quiet=False)
    for step in range(1, 31):
        display.ratios(step, {"conv1": 7.5, "all": 10.04})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[:2]] == [["step", "conv1", "all"], ["1", "7.5", "10.0"]]
    assert sum("conv1" in line for line in shown) == 2 and len(shown) == 32
