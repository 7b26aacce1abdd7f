"""Every recipe does two steps on small synthetic data, compressed and plain."""

from __future__ import annotations

import json

import pytest

from encke.train.command import recipes
from encke.train.loop import train
from encke.train.settings import read

LONG = ("vgg16-imagenet", "densenet161-imagenet", "alexnet-imagenet", "efficientnet_b0-imagenet", "resnet50-imagenet")
QUICK = ("digits", "resnet18-cifar10", "gpt-text")
REPEATED = (
    "alexnet-dogs",
    "alexnet-dogs96",
    "resnet50-dogs96",
    "efficientnet_b0-dogs96",
    "resnet164-cifar100",
    "vgg16-dogs96",
)
"""Recipes whose large model another recipe trains: here a small one is enough for the other settings."""


def small(name: str, *more: str):
    """Return the settings of a recipe with small data in place of its own."""
    recipe = read(name)
    size = "28" if recipe.model.name == "digits" else "32" if "cifar" in name else "64"
    words = ["--data", "synthetic", "--data.path", "", "--data.samples", "8", "--data.size", size, "--batch", "4"]
    words += ["--steps", "2", "--metrics", "1", "--save", "none", "--precision", "fp32"]
    if recipe.model.name == "gpt":
        words += ["--data.classes", "0", "--data.size", "none", "--model.context", "64"]
    if name in REPEATED:
        words += ["--model", "cnn", "--model.stem", "imagenet"]
    return read(name, [*words, *more])


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.soak] * (name in LONG)])
        for name in recipes()
    ],
)
def test_a_recipe_does_two_steps(name, tmp_path):
    result = train(small(name, "--out", str(tmp_path / "run")))
    assert result["finished"] and result["steps"] == 2 and result["ratio"] > 1.5
    assert json.loads((tmp_path / "run" / "result.json").read_text())["train_loss"] > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_trains_without_compression(name, tmp_path):
    result = train(small(name, "--policy", "none", "--out", str(tmp_path / "run")))
    assert result["finished"] and result["ratio"] is None
