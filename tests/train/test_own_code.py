"""Models and data sets of the user's own, named by a Python path."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from encke.cli import main
from encke.tools.errors import UsageError
from encke.train import loop
from encke.train.data.sources import batches, load
from encke.train.loop import train
from encke.train.settings import Data, read

OWN = '''
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import IterableDataset, Subset, TensorDataset, random_split

Path(__file__).with_name("was run").touch()
number, network = 3, nn.Linear(6, 3)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, classes)
        )

    def forward(self, x):
        return self.layers(x)


class Tagger(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(num_classes, 32), nn.Linear(32, num_classes))

    def forward(self, tokens):
        return self.layers(tokens)


def needs_more(classes, depth): ...
def no_module(): return "a model"
def no_parameters(): return nn.ReLU()
def two_outputs(): return nn.Linear(6, 2)
def returns_pair(): return nn.LSTM(6, 3)


class Samples:
    """Two features carry the class; the rest is drawn anew each time."""
    classes = ["a", "b", "c"]

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        noise = [random.random(), np.random.rand(), torch.rand(()).item(), 0.0]
        return torch.tensor([i % 3 == 1, i % 3 == 2, *noise]), i % 3


def datasets(seed):
    whole = Samples(120)
    return random_split(whole, [96, 24])


def tokens(path):
    words = torch.arange(24 * 8).view(24, 8) % 7
    return TensorDataset(words, (words + 1) % 7), TensorDataset(words, (words + 1) % 7)


class Listed(list):
    classes = 2


def images():
    made = [(Image.new("RGB", (5, 4), (51 * i, 0, 255)), i) for i in range(2)]
    return Listed(made), Listed(made)


def stream():
    class Stream(IterableDataset):
        def __iter__(self): ...
    return Stream(), []


def of(*samples):
    return Listed(samples), Listed()


def one(): return Listed()
def empty(): return of()
def no_pair(): return of({"image": 1})
def word(): return of(("text", 0))
def strings(): return of((np.array(["a"]), 0))
def scalar(): return of((torch.tensor(1.0), 0))
def not_finite(): return of((torch.tensor([1.0, float("nan")]), 0))
def real_label(): return of((torch.zeros(2), 0.5))
def mask(): return of((torch.zeros(2, 2), torch.zeros(2, 2).long()))
def large_label(): return of((torch.zeros(2), 2))
def negative_label(): return of((torch.zeros(2), -1))
def unlike(): return of((torch.zeros(2), 0), (torch.zeros(3), 0))
def broken():
    raise KeyError("in the user's code")
'''
MORE = "--data.workers 0 --batch 16 --epochs 3 --metrics 2 --optimizer adamw --optimizer.lr 0.01 --schedule constant"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with models and data."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def options(own: Path, out: str = "run", model: str = "Net", data: str = "datasets") -> list[str]:
    code = ["--model", f"{own}:{model}", "--data", f"{own}:{data}"]
    return [*code, *MORE.split(), "--out", str(own.parent / out)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_own_model_and_data_learn(own):
    result = train(read("digits", options(own)))
    assert result["validation_accuracy"] > 0.9 and result["ratio"] > 1
    facts = json.loads((own.parent / "run" / "environment.json").read_text())
    assert facts["classes"] == 3 and facts["train_samples"] == 96 and facts["validation_samples"] == 24


def test_the_example_of_the_page_trains(own, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    page = page.partition("## Without a loop of your own")[2]
    own.with_name("mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    command = re.search(r"encke (train digits --model .*)", page)
    assert command is not None
    monkeypatch.chdir(own.parent)
    main([*command[1].split(), "--steps", "2", "--data.workers", "0"])
    assert json.loads((own.parent / "runs" / "mine" / "result.json").read_text())["finished"]


def test_an_interrupted_run_is_resumed_bit_for_bit(own, monkeypatch, capsys):
    train(read("digits", options(own, "whole")))
    plain, calls = loop.step, []

    def step(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", step)
        train(read("digits", options(own, "part")))
    torch.rand(3)  # what a generator holds in the new process does not matter
    shown = capsys.readouterr().out.strip().splitlines()[-1]
    command = shown.partition("Go on with: encke ")[2].split()
    assert "--model.name" in command and "--data.kind" in command
    main(command)
    assert same_weights(own.parent / "whole", own.parent / "part")


@pytest.mark.slow
def test_workers_give_the_same_samples(own):
    found = []
    for workers in (0, 2):
        data = load(Data(f"{own}:datasets", workers=workers), seed=3)
        found.append(list(batches(data.train, 16, seed=3, epoch=1)))
        found[-1] += list(batches(data.validation, 16, seed=3, train=False))
    assert len(found[0]) == 8
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_samples_draw_anew_in_each_epoch_and_leave_the_generators_alone(own):
    data = load(Data(f"{own}:datasets", workers=0), seed=3)
    before = torch.get_rng_state()
    first, again, other = (
        torch.cat([x for x, _ in batches(data.train, 16, seed=3, epoch=epoch)])[:, 2:5].sort(0).values
        for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first.unique()) == first.numel()
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_train_with_a_model_of_ones_own_and_with_gpt(own):
    more = ["--data.classes", "7"]
    assert train(read("digits", [*options(own, "tagger", "Tagger", "tokens"), *more]))["validation_loss"] < 2
    gpt = [*options(own, "gpt", data="tokens"), *more, "--model", "gpt", "--model.width", "24", "--model.layers", "1"]
    assert train(read("digits", [*gpt, "--model.context", "8", "--steps", "2"]))["finished"]
    with pytest.raises(UsageError, match=r"gpt takes 4 tokens at most \(model.context\), .* have \(8,\)"):
        train(read("digits", [*gpt, "--out", str(own.parent / "long"), "--model.context", "4"]))


def test_images_of_pillow_are_values_of_0_to_1(own):
    data = load(Data(f"{own}:images", workers=0), seed=0)
    ((images, labels),) = batches(data.validation, 2, seed=0, train=False)
    assert data.shape == (3, 4, 5) and data.classes == 2 and labels.tolist() == [0, 1]
    assert images[1, :, 0, 0].tolist() == pytest.approx([0.2, 0.0, 1.0])


def test_a_module_is_found_in_the_working_directory(own, monkeypatch):
    (own.parent / "package_of_mine").mkdir()
    own.rename(own.parent / "package_of_mine" / "own.py")
    monkeypatch.chdir(own.parent)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert load(Data("package_of_mine.own:images", workers=0), seed=0).classes == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gone.py:Net", "there is no file .*gone.py"),
        ("gone_module:Net", "there is no module 'gone_module'.*folder/file.py:function"),
        ("torch.gone:Net", "there is no module 'torch.gone'"),
        ("a-b:Net", "'a-b' is not the name of a module; write package.module:function"),
        (":Net", "no module is named; write"),
        ("OWN:", "no function is named; write"),
        ("OWN:Nett", "has no 'Nett'; did you mean Net"),
        ("OWN:number", "number is of type int; it must be a function or a class"),
        ("OWN:network", "network is of type Linear; it must be a function or a class"),
        ("OWN:needs_more", "it needs an argument 'depth', and gets classes or num_classes at most"),
        ("OWN:no_module", "must return a torch.nn.Module, got str"),
        ("OWN:no_parameters", "has no parameters to train"),
        ("OWN:two_outputs", r"must return logits of shape \(2, 3\), got \(2, 2\)"),
        ("OWN:returns_pair", r"must return logits of shape \(2, 3\), got tuple"),
        ("resnet18", r"takes images \(channels, height, width\), samples of .* have \(6,\)"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(own, model, words):
    more = ["--model", model.replace("OWN", str(own))]
    with pytest.raises(UsageError, match=f"model.name .*{words}") as error:
        train(read("digits", [*options(own), *more]))
    assert "\n" not in str(error.value) and not (own.parent / "run").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("gone", "has no 'gone'"),
        ("stream", "training data .Stream. have no __len__: a map-style data set is needed"),
        ("one", "must return two data sets, for training and validation"),
        ("empty", "the training data are empty"),
        ("no_pair", "sample 0 of the training data must be a pair of input and label, got a dict"),
        ("word", "the input must be a tensor .*, got 'text'"),
        ("strings", "the input must be a tensor .*, got a ndarray"),
        ("scalar", "the input must be a tensor .*at least one dimension"),
        ("not_finite", "values that are not finite"),
        ("real_label", "the label must be a whole number, .* got 0.5"),
        ("mask", r"the label must be a whole number, .* got a tensor, int64 of shape \(2, 2\)"),
        ("large_label", "has a label 2, outside 0 to 1: set data.classes"),
        ("negative_label", "has a label -1, outside 0 to 1"),
        ("unlike", r"sample 1 .* is float32 of shape \(3,\) .*all must be alike"),
    ],
)
def test_data_that_cannot_be_used_are_named(own, data, words):
    with pytest.raises(UsageError, match=f"data.kind .*{words}") as error:
        list(batches(load(Data(f"{own}:{data}", workers=0), seed=0).train, 2, seed=0, train=False))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("more", [["--data.augment", "flip"], ["--data.size", "8"], ["--model.stem", "cifar"]])
def test_settings_that_do_not_change_ones_own_are_refused(own, more):
    with pytest.raises(UsageError, match=f"{more[0][2:]} does not change"):
        train(read("digits", [*options(own), *more]))


def test_an_error_in_the_users_code_is_raised_as_it_is(own):
    with pytest.raises(KeyError, match="in the user's code"):
        load(Data(f"{own}:broken"), seed=0)
    own.with_name("imports.py").write_text("import package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_there"):
        load(Data(f"{own.with_name('imports.py')}:datasets"), seed=0)


def test_a_misspelt_kind_of_data_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text("data: foldr\n")
    with pytest.raises(UsageError, match="recipe.yaml: data.kind takes one of .*, got 'foldr'; did you mean folder"):
        read(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("setting", ["model: {name: OWN:Net}", "data: {kind: OWN:datasets}", "data: OWN:datasets"])
@pytest.mark.parametrize("resume", [True, False])
def test_code_that_a_file_names_is_not_run(own, setting, resume):
    run = own.parent / "run"
    run.mkdir()
    text = setting.replace("OWN", f"'{own}").replace("}", "'}") if "}" in setting else setting.replace("OWN", str(own))
    (run / "settings.yaml").write_text(f"{text}\nout: {run}\n")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit):
        main(["train", str(run), *(["--resume"] if resume else [])])
    with pytest.raises(UsageError, match=r"names code that would be run, .*: if you trust it, name it on the command"):
        read(str(run / "settings.yaml"), ["--epochs", "1"])
    assert not own.with_name("was run").exists()
