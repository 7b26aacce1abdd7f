"""Figures for TensorBoard, read back with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest

from encke.tools.errors import UsageError
from encke.train import tensorboard
from encke.train.loop import train
from encke.train.settings import read

SMALL = "--data synthetic --data.samples 32 --data.size 12 --data.channels 1 --batch 8 --epochs 1 --metrics 2"


def settings(out: Path, *more: str):
    return read("digits", [*SMALL.split(), "--log", "tensorboard", "--out", str(out), *more])


def scalars(out: Path) -> dict[str, dict[int, float]]:
    """Every figure by tag and step, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    return {tag: {each.step: each.value for each in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_loss_learning_rate_ratio_and_peak_are_written_and_go_on_in_a_longer_run(tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    first = train(settings(out))
    found = scalars(out)
    assert {"loss/train", "loss/validation", "learning_rate", "ratio", "memory/step_peak_bytes"} <= found.keys()
    assert list(found["loss/train"]) == list(found["learning_rate"]) == [2, 4]
    assert found["ratio"][4] == pytest.approx(first["ratio"])
    assert found["loss/validation"][4] == pytest.approx(first["validation_loss"])
    assert found["memory/step_peak_bytes"] == {4: first["step_peak_bytes"]}
    train(settings(out, "--epochs", "2"), resume=True)
    assert list(scalars(out)["loss/train"]) == [2, 4, 6, 8]
    train(settings(out), overwrite=True)
    assert list(scalars(out)["loss/train"]) == [2, 4]


def test_without_the_package_there_is_one_line_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "installed", lambda module: False)
    with pytest.raises(UsageError, match="log tensorboard needs the package tensorboard: pip install tensorboard"):
        train(settings(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
