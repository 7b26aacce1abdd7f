"""Settings: what a recipe and the command line may say, and the one line that names what they may not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from encke.tools.errors import UsageError
from encke.train.settings import RECIPES, Policy, Settings, load, read, to_yaml


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def changed(*arguments: str) -> Settings:
    return read("digits", arguments)


def test_a_recipe_holds_what_differs_from_the_defaults(tmp_path):
    settings = read(recipe(tmp_path, "epochs: 7\noptimizer:\n  lr: 1e-3\n  betas: [0.8, 0.9]\n"))
    assert settings.epochs == 7 and settings.optimizer.lr == 1e-3 and settings.optimizer.betas == (0.8, 0.9)
    rest = dataclasses.replace(settings, epochs=Settings().epochs, optimizer=Settings().optimizer)
    assert rest == Settings()


def test_an_empty_recipe_is_the_defaults(tmp_path):
    assert read(recipe(tmp_path, "")) == Settings()


def test_settings_written_as_yaml_are_read_back_equal(tmp_path):
    before = changed("--schedule.milestones", "1", "2.5", "--policy", "none", "--optimizer.clip", "1", "--save", "none")
    assert read(recipe(tmp_path, to_yaml(before))) == before


def test_settings_of_a_run_that_were_cut_short_are_refused_wherever_they_end(tmp_path):
    text = to_yaml(changed("--table", "10"))
    path = tmp_path / "settings.yaml"
    for length in range(0, len(text), 7):
        path.write_text(text[:length])
        with pytest.raises(UsageError, match=re.escape(str(path))):
            load(path)
    path.write_text(text)
    load(path)
    path.write_text("".join(text.splitlines(True)[1:-1]))  # as earlier releases wrote it
    assert read(str(path)).table == 10


def test_the_settings_file_of_a_run_stands_for_its_folder(tmp_path):
    (tmp_path / "settings.yaml").write_text(to_yaml(changed("--out", "elsewhere")))
    assert read(str(tmp_path / "settings.yaml")).out == "elsewhere"
    (tmp_path / "metrics.jsonl").write_text("")
    assert read(str(tmp_path / "settings.yaml")).out == read(str(tmp_path)).out == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--optimizer.lr", "0.5"], "optimizer.lr", 0.5),
        (["--optimizer.lr=5e-1"], "optimizer.lr", 0.5),
        (["--label-smoothing", "0.1"], "label_smoothing", 0.1),
        (["--compile"], "compile", True),
        (["--no-compile"], "compile", False),
        (["--optimizer.nesterov", "--epochs", "2"], "optimizer.nesterov", True),
        (["--optimizer.no-decay-norms"], "optimizer.decay_norms", False),
        (["--policy", "none"], "policy.name", "none"),
        (["--policy.bits", "4"], "policy.bits", 4),
        (["--schedule.milestones", "1", "2", "--epochs", "3"], "schedule.milestones", (1.0, 2.0)),
        (["--data.size", "none"], "data.size", None),
        (["--save=none"], "save", None),
        (["--data.path", "-"], "data.path", "-"),
    ],
)
def test_every_field_can_be_changed_on_the_command_line(arguments, name, value):
    found = changed(*arguments)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", "1"], ["'lr'", "optimizer.lr"]),
        (["--optimizr.lr", "1"], ["optimizr.lr", "did you mean optimizer.lr"]),
        (["--optimizer.lr", "fast"], ["optimizer.lr", "float", "'fast'"]),
        (["--policy", "group"], ["policy.name", "'group'", "did you mean group"]),
        (["--policy.name", "commet"], ["policy.name", "'commet'", "did you mean comet"]),
        (["--policy", "zip"], ["policy.name", "'zip'", "comet, division"]),
        (["--batch", "1.5"], ["batch", "int", "'1.5'"]),
        (["--batch", "0"], ["batch", "at least 1", "0"]),
        (["--optimizer.momentum", "1"], ["optimizer.momentum", "below 1"]),
        (["--epochs", "nan"], ["epochs", "nan"]),
        (["--epochs", "0"], ["epochs", "above 0"]),
        (["--batch", "10", "--accumulate", "3"], ["batch", "10", "accumulate", "3"]),
        (["--schedule.name", "step"], ["schedule.milestones"]),
        (["--data", "folder"], ["data.path", "folder"]),
        (["--compile", "maybe"], ["'maybe'", "--name value"]),
        (["--optimizer.betas", "0.9"], ["optimizer.betas", "2 arguments"]),
        (["--epochs"], ["epochs", "one argument"]),
        (["--zebra"], ["zebra"]),
        (["zebra"], ["'zebra'", "--name value"]),
    ],
)
def test_what_makes_no_sense_is_named_in_one_line(arguments, words):
    with pytest.raises(UsageError) as error:
        changed(*arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3\n", ["'epoch'", "did you mean epochs"]),
        ("optimizer:\n  rate: 3\n", ["optimizer.rate"]),
        ("epochs: [1, 2]\n", ["epochs", "float"]),
        ("epochs: true\n", ["epochs", "float"]),
        ("compile: 3\n", ["compile", "bool", "3"]),
        ("epochs: {a: 1}\n", ["epochs.a"]),
        ("- 1\n- 2\n", ["list"]),
        ("epochs 3\n", ["(epochs: 10), got 'epochs 3'"]),
        ("a: [1\nb: 2\n", ["line", "not YAML"]),
    ],
)
def test_a_broken_recipe_is_named_with_its_file(tmp_path, text, words):
    path = recipe(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read(path)
    assert all(word in str(error.value) for word in [path, *words]), str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_that_is_not_there_names_the_nearest_one(tmp_path):
    with pytest.raises(UsageError, match="did you mean digits"):
        read("digit")
    with pytest.raises(UsageError, match="is a folder"):
        read(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UsageError, match="binary.yaml"):
        read(str(tmp_path / "binary.yaml"))


OLD = """
model: {name: resnet18, stem: cifar}
epochs: 2
policy: {name: NAME, sigma: null, rounding: stochastic, bits: 4, block: 8, bound: 0.01, mode: rel}
layers: 50
"""


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", Policy("none")),
        ("comet", Policy("default", rounding="stochastic")),
        ("division", Policy("division", bits=4, block=8)),
        ("group", Policy("group4")),
        ("bounded", Policy("bounded", rounding="stochastic", bound=0.01, mode="rel")),
    ],
)
def test_settings_of_a_run_of_release_0_1_mean_what_they_meant(tmp_path, name, policy):
    settings = read(recipe(tmp_path, OLD.replace("NAME", name)))
    assert settings.policy == policy and settings.sites == 50
    assert load(tmp_path / "recipe.yaml")["policy.name"] == policy.name
    assert read(recipe(tmp_path, to_yaml(settings))) == settings


def test_sections_may_be_written_as_their_first_field(tmp_path):
    settings = read(recipe(tmp_path, "model: vgg16\npolicy: careful\nschedule: constant\n"))
    assert (settings.model.name, settings.policy.name, settings.schedule.name) == ("vgg16", "careful", "constant")


def test_recipes_say_in_their_first_line_what_they_are_and_name_a_folder_of_their_own():
    outs = []
    for path in sorted(RECIPES.glob("*.yaml")):
        text, settings = path.read_text(), read(path.stem)
        assert text.startswith("# ")
        assert f"\nout: runs/{path.stem}\n" in text
        assert text.startswith("# DIVISION:") == (settings.policy.name == "division")
        outs.append(settings.out)
    assert len(outs) == len(set(outs)) > 15
