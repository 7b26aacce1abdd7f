"""Two real processes under torchrun: the same training, one folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from encke.cli import main
from tests.train.test_loop import NO_BATCH_NORM

SMALL = (
    "--data synthetic --data.samples 96 --data.size 12 --data.channels 1 --batch 16 --steps 12 --metrics 2 --sites 3"
)

pytestmark = pytest.mark.slow


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "encke", "train", *more, "--out", str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(out: Path, *more: str) -> str:
    process = start(out, *more)
    shown, _ = process.communicate()
    assert process.returncode == 0, shown
    return shown


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def events(out: Path, event: str) -> list[dict]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def test_two_processes_train_what_one_does_and_the_first_writes(tmp_path):
    # Without batch norm the mean over the processes' gradients is the gradient of the whole batch.
    (tmp_path / "net.py").write_text(NO_BATCH_NORM)
    more = ["digits", *SMALL.split(), "--model", f"{tmp_path / 'net.py'}:net", "--policy", "none"]
    more += ["--optimizer", "sgd", "--optimizer.lr", "0.01", "--data.samples", "64", "--steps", "4"]
    shown = run(tmp_path / "two", *more)
    main(["train", *more, "--out", str(tmp_path / "one")])
    assert shown.count("done:") == 1
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)
    one, two = (events(tmp_path / name, "epoch")[-1] for name in ("one", "two"))
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
    assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-3)
    assert one["validation_accuracy"] == two["validation_accuracy"]
    assert [line["step"] for line in events(tmp_path / "two", "step")] == [2, 4]
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["world"] == 2


@pytest.mark.soak
def test_two_compressed_processes_killed_and_resumed_end_with_the_same_weights(tmp_path):
    more = ["digits", *SMALL.split(), "--save", "0.3"]
    run(tmp_path / "whole", *more)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["ratio"] > 3
    process = start(tmp_path / "part", *more)
    while not (tmp_path / "part" / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(tmp_path / "part", *more, "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "part")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [line["loss"] for line in events(tmp_path / "whole", "step")] == [
        line["loss"] for line in events(tmp_path / "part", "step")
    ]
