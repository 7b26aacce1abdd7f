"""The callback for the Trainer of Lightning, with the real library."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.policies import Comet
from tests.integrations.common import EXACT, hooks, needs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
FEATURES, CLASSES, BATCH = 32, 8, 128


@pytest.fixture(autouse=True)
def library() -> None:
    needs("lightning")


def callback(policy: Any = "default", **options: Any) -> Any:
    from encke.integrations.lightning import EnckeCallback

    return EnckeCallback(policy, **options)


def module(manual: bool = False, compiled: bool = False) -> Any:
    """Return a module with two networks, whose loss is computed in `training_step`."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
            self.head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, CLASSES))
            if compiled:
                self.body = torch.compile(self.body, backend="aot_eager")
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 3e-3)

    return Classifier()


def fit(model: Any, folder: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Any:
    """Train for epochs of four steps."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    checkpoint = options.pop("checkpoint", None)
    x = torch.randn(4 * BATCH, FEATURES, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(1))
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, BATCH), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_bound_0_gives_the_losses_of_plain(manual: bool, tmp_path: Path) -> None:
    plain, exact, ours = module(manual), module(manual), callback(EXACT)
    fit(plain, tmp_path)
    fit(exact, tmp_path, ours)
    assert plain.losses == exact.losses and len(plain.losses) == 12
    # Under manual optimization each of the two networks is a forward pass of its own.
    assert ours.handle.report().forwards == (24 if manual else 12)


def test_default_follows_plain_and_covers_all_of_training_step(tmp_path: Path) -> None:
    plain, model, ours = module(), module(), callback()
    fit(plain, tmp_path)
    fit(model, tmp_path, ours)
    a, b = torch.tensor(plain.losses), torch.tensor(model.losses)
    assert a[-1] < 0.8 * a[0] and not torch.equal(a, b)
    assert (a - b).abs().mean() < 0.005 * a.mean()
    report = ours.handle.report()
    assert report.forwards == 12 and report.ratio > 3
    assert {row["layer"] for row in ours.handle.history} == {"body.1", "body.2", "body.3", "head.0", "head.1"}


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, first, second, policy = module(), module(), module(), Comet(every=3)
    fit(whole, tmp_path, callback(policy))
    # Saved when the training is over and Encke has been taken off.
    fit(first, tmp_path, callback(policy), epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    fit(second, tmp_path, callback(policy), checkpoint=str(tmp_path / "last.ckpt"))
    assert first.losses + second.losses == whole.losses and len(second.losses) == 4


def test_figures_and_report_are_in_the_logs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ours = callback()
    trainer = fit(module(), tmp_path, ours)
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "3", "5", "7", "9", "11"]
    ratio = ours.handle.report().ratio
    assert float(rows[-1]["encke_ratio"]) == pytest.approx(ratio) and ratio > 3
    assert all(float(row[f"encke_{name}_bytes"]) > 0 for row in rows for name in ("saved", "packed", "peak"))
    assert all(2 <= float(row["encke_bits"]) <= 8 for row in rows)
    report = json.loads((Path(trainer.log_dir) / "encke_report.json").read_text())
    assert report["ratio"] == ratio and f"(ratio {ratio:.1f})" in capsys.readouterr().out


@pytest.mark.parametrize("fails", [False, True], ids=["end", "error"])
def test_it_comes_off_cleanly(fails: bool, tmp_path: Path) -> None:
    model, plain = module(), module()
    fit(plain, tmp_path, epochs=1)
    if fails:
        model.on_train_batch_end = lambda *args: 1 / 0
        with pytest.raises(ZeroDivisionError):
            fit(model, tmp_path, callback())
        del model.on_train_batch_end
    else:
        fit(model, tmp_path, callback(), epochs=1)
    assert hooks(model) == hooks(plain)
    encke.attach(model).detach()


def test_compiled_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="attach the compiled part"):
        fit(module(compiled=True), tmp_path, callback())
    plain, model, ours = module(compiled=True), module(compiled=True), callback(module="body")
    fit(plain, tmp_path, epochs=1)
    fit(model, tmp_path, ours, epochs=1)
    assert torch.tensor(model.losses).allclose(torch.tensor(plain.losses), rtol=0.005)
    assert ours.handle.report().ratio > 2
    with pytest.raises(NotImplementedError, match=r'EnckeCallback\(module="net"\)'):
        fit(torch.compile(module()), tmp_path, callback())


def test_errors_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default"):
        callback("standard")
    with pytest.raises(AttributeError, match="nowhere"):
        fit(module(), tmp_path, callback(module="nowhere"))
