"""Runs of release 0.1, in which the package was called halley: they are resumed and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from encke.train.loop import train
from encke.train.report.runs import read_all
from encke.train.settings import read

OLD = Path(__file__).with_name("run_of_release_0_1")


@pytest.fixture
def old_run(tmp_path):
    """A small GPT, interrupted by Ctrl-C after step 5 of 12."""
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def test_an_old_run_is_resumed_to_its_end(old_run):
    before = (old_run / "layers.jsonl").read_text()
    result = train(read(str(old_run), ["--out", str(old_run)]), resume=True)
    assert result["finished"] and result["steps"] == 12
    # The loss of the whole training with release 0.1.
    assert result["train_loss"] == pytest.approx(5.3575, abs=0.01)
    assert not (old_run / "layers.jsonl").exists()
    sites = (old_run / "sites.jsonl").read_text()
    assert sites.startswith(before)
    assert [json.loads(line)["step"] for line in sites.splitlines()] == [1, 2, 4, 6, 8, 10, 12]
    assert torch.load(old_run / "checkpoint.pt", weights_only=True)["progress"]["step"] == 12


def test_an_old_run_is_reported(old_run):
    (run,) = read_all([old_run])
    assert run.settings["policy.name"] == "default" and run.settings["sites"] == 2
    assert run.environment["encke"] == "0.1.0" and "halley" not in run.environment
    assert run.sites and run.sites[0]["layer"] == "drop"
    assert [line["step"] for line in run.forwards] == [1, 2, 4]
    assert not any("sites.jsonl" in warning for warning in run.warnings)
