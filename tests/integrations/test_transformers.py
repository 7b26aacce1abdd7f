"""The callback for the Trainer of transformers, with the real library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import encke
from encke.integrations import logits
from encke.policies import Comet
from tests.integrations.common import EXACT, hooks, llama, losses, needs, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STATED = 0.005
"""Difference of losses that docs/integrations.md states."""
FIGURES = {"encke_ratio", "encke_saved_bytes", "encke_packed_bytes", "encke_peak_bytes"}


@pytest.fixture(autouse=True)
def libraries() -> None:
    needs("transformers", "accelerate")


def callback(policy: Any = "default", **options: Any) -> Any:
    from encke.integrations.transformers import EnckeCallback

    return EnckeCallback(policy, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"bf16": True, "max_grad_norm": 0.1},
    ],
    ids=["fp32", "checkpointing", "bf16"],
)
def test_bound_0_gives_the_losses_of_plain(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [callback(EXACT)]):
        run = trainer(llama(), tmp_path, *callbacks, steps=4, **options)
        run.train()
        found.append(losses(run))
    assert callbacks[0].handle.report().forwards >= 4
    assert len(found[0]) == 4 and found[0] == found[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_default_follows_plain(compiled: bool, tmp_path: Path) -> None:
    # A collection step, such as the first, runs in eager mode.
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "steps": 4} if compiled else {"steps": 24}
    found = []
    for callbacks in ([], [callback()]):
        run = trainer(llama(), tmp_path, *callbacks, **options)
        run.train()
        found.append(torch.tensor(losses(run)))
    plain, ours = found
    assert plain[-1] < 0.95 * plain[0] and not torch.equal(plain, ours)
    assert (plain - ours).abs().mean() < STATED * plain.mean()
    assert callbacks[0].handle.report().ratio > 2


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        *(pytest.param(each, marks=pytest.mark.soak) for each in ({}, {"gradient_accumulation_steps": 2})),
    ],
    ids=str,
)
def test_loss_is_computed_in_chunks(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    chunked = logits.chunked_cross_entropy
    monkeypatch.setattr(logits, "SMALLEST", 1)
    monkeypatch.setattr(logits, "chunked_cross_entropy", lambda *a, **k: calls.append(1) or chunked(*a, **k))
    found = []
    for callbacks in ([], [callback(EXACT)], [callback(EXACT, chunk_loss=False)]):
        model = llama()
        run = trainer(model, tmp_path, *callbacks, steps=4, **options)
        run.train()
        found.append(losses(run))
        assert type(model.lm_head) is torch.nn.Linear
    plain, ours, without = found
    assert len(calls) == 4 * options.get("gradient_accumulation_steps", 1)
    assert plain == without and ours == pytest.approx(plain, rel=1e-2 if options.get("bf16") else 1e-5)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    policy = Comet(every=4)
    whole = trainer(llama(), tmp_path, callback(policy), save_strategy="steps", save_steps=6)
    whole.train()
    # Any folder will do: a checkpoint may have been moved.
    (tmp_path / "checkpoint-6").rename(tmp_path / "moved")
    resumed = trainer(llama(), tmp_path / "other", callback(policy), save_strategy="steps", save_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "moved"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 12
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoint_without_a_state_is_named(tmp_path: Path) -> None:
    trainer(llama(), tmp_path, save_strategy="steps", save_steps=2, steps=2).train()
    ours = trainer(llama(), tmp_path, callback(), steps=4)
    with pytest.warns(RuntimeWarning, match="checkpoint-2 was saved without EnckeCallback"):
        ours.train(resume_from_checkpoint=True)
    assert len(losses(ours)) == 4


def test_figures_are_in_the_logs_also_of_reporters_before_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from transformers import TrainerCallback

    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    ours = callback()
    run = trainer(llama(), tmp_path, Reporter(), ours, steps=3)
    output = run.train()
    for rows in (seen, run.state.log_history):
        assert len(rows) == 4 and all(FIGURES <= row.keys() for row in rows)
    assert seen[0]["encke_ratio"] > 2 and seen[2]["encke_ratio"] > seen[0]["encke_ratio"]
    # The first step sets the bits; they are in force in the second.
    assert 2 <= seen[2]["encke_bits"] <= 8
    assert output.metrics["encke_ratio"] == pytest.approx(ours.handle.report().ratio)
    report = json.loads((tmp_path / "encke_report.json").read_text())
    assert report["forwards"] == 3 and report["ratio"] == output.metrics["encke_ratio"]
    assert f"(ratio {report['ratio']:.1f})" in capsys.readouterr().out


def test_evaluation_is_left_alone(tmp_path: Path) -> None:
    ours = callback(EXACT)
    run = trainer(llama(), tmp_path, ours, steps=2, eval_strategy="steps", eval_steps=1)
    run.train()
    assert ours.handle.report().forwards == 2
    evaluated = [row for row in run.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 2 and not any(FIGURES & row.keys() for row in evaluated)


def test_it_comes_off_cleanly(tmp_path: Path) -> None:
    plain, model, ours = llama(), llama(), callback()
    trainer(plain, tmp_path, steps=2).train()
    run = trainer(model, tmp_path, ours, steps=2)
    run.train()
    assert hooks(model) == hooks(plain) and not ours.handle.attached
    optimizer = run.optimizer.optimizer
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    encke.attach(model).detach()


def test_training_again_after_an_error(tmp_path: Path) -> None:
    model, ours = llama(), callback()
    run = trainer(model, tmp_path, ours, steps=2)
    data, run.train_dataset = run.train_dataset, [{"input_ids": torch.tensor([1000]), "labels": torch.tensor([0])}]
    with pytest.raises(IndexError):
        run.train()
    assert ours.handle.attached
    run.train_dataset = data
    run.train()
    assert not ours.handle.attached and ours.handle.report().forwards == 2


def test_errors_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default"):
        callback("standard")
    with pytest.raises(ValueError, match="min_bytes"):
        callback(min_bytes=0)
    with pytest.raises(RuntimeError, match=r"callbacks=\[EnckeCallback\(\)\]"):
        callback().on_train_begin(None, None, None)
    with pytest.raises(ValueError, match="nowhere"):
        trainer(llama(), tmp_path, callback(overrides={"nowhere": None})).train()


def test_other_saved_tensor_hooks_are_named(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path, callback(), steps=1)
    with torch.autograd.graph.save_on_cpu(), pytest.warns(RuntimeWarning, match="first step was not compressed"):
        run.train()


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.soak), True], ids=["lora", "dora"])
def test_adapters(dora: bool, tmp_path: Path) -> None:
    needs("peft")
    from peft import LoraConfig, get_peft_model

    found = []
    for callbacks in ([], [callback(EXACT)], [callback()]):
        config = LoraConfig(r=4, use_dora=dora, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
        run = trainer(get_peft_model(llama(), config), tmp_path, *callbacks, steps=12, learning_rate=0.02)
        run.train()
        found.append(torch.tensor(losses(run)))
    plain, exact, ours = found
    assert torch.equal(plain, exact)
    assert plain[-1] < plain[0] and (plain - ours).abs().mean() < STATED * plain.mean()
    assert callbacks[0].handle.report().ratio > 2


TWO_PROCESSES = """
import os, sys, torch.distributed as dist
from pathlib import Path
from tests.integrations.common import EXACT, llama, losses, needs, trainer
needs("transformers")
from encke.integrations.transformers import EnckeCallback
folder, found = Path(sys.argv[1]), []
for callbacks in ([], [EnckeCallback(EXACT)], [EnckeCallback()]):
    run = trainer(llama(), folder, *callbacks, steps=4, save_strategy="steps", save_steps=2)
    run.train()
    found.append(losses(run))
plain, exact, whole = found
assert plain == exact and plain != whole and len(whole) == 4, found
resumed = trainer(llama(), folder, EnckeCallback(), steps=4)
resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
assert losses(resumed) == whole, (losses(resumed), whole)
assert type(resumed.model_wrapped).__name__ == "DistributedDataParallel"
print("ok", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort an ordinary exit
"""


@pytest.mark.soak
def test_two_processes(tmp_path: Path) -> None:
    script, root = tmp_path / "worker.py", Path(__file__).parents[2]
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, str(script), str(tmp_path / "out")], env=env, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.count("ok") == 2
    assert {file.name for file in (tmp_path / "out" / "checkpoint-2").glob("encke*")} == {"encke_0.pt", "encke_1.pt"}
