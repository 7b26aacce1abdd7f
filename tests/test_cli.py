"""The command line: what users see when something is wrong, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import encke
from encke.cli import main, plain_parser
from encke.train.command import recipes
from encke.train.settings import fields


def failure(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr with which `encke args` ends, exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"encke {encke.__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["demo", "bench"]),
        (["--help"], ["demo", "bench", "train", "report", "data"]),
        (["data", "--help"], ["lmdb", "dogs"]),
        (["bench", "--help"], ["codec", "memory", "speed", "max-batch"]),
        (["bench", "speed", "--help"], ["--models", "--methods", "--memory", "--compile"]),
        (["bench", "codec", "--help"], ["--data", "--bound", "--device", "--out"]),
        (["demo", "--help"], ["--epochs", "--out"]),
    ],
)
def test_help_names_what_there_is(args, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_an_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        main(["fly"])
    assert end.value.code == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--bound", "0"), ("--bound", "-1"), ("--bound", "nan"), ("--bound", "inf"), ("--size", "0"), ("--repeat", "0")],
)
def test_a_senseless_number_is_named(option, value, capsys):
    line = failure(capsys, "bench", "codec", f"{option}={value}")
    assert option in line and value in line


def test_a_missing_file_is_named(tmp_path: Path, capsys):
    path = str(tmp_path / "none.safetensors")
    assert path in failure(capsys, "bench", "codec", "--data", path)


def test_a_file_of_another_kind_is_named(tmp_path: Path, capsys):
    path = tmp_path / "text.safetensors"
    path.write_text("these are not tensors")
    line = failure(capsys, "bench", "codec", "--data", str(path))
    assert str(path) in line and "not a safetensors file" in line


@pytest.mark.parametrize("meta", ["{", "[1]", '{"x": 1}', '{"x": {"bound": "small"}}', '{"x": {"bound": -1}}'])
def test_metadata_that_hold_no_bounds_are_an_error(meta, tmp_path: Path, capsys):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(8)}, path, metadata={"meta": meta})
    assert "meta" in failure(capsys, "bench", "codec", "--data", str(path))


def test_a_file_without_float_tensors_is_an_error(tmp_path: Path, capsys):
    path = tmp_path / "integers.safetensors"
    save_file({"x": torch.arange(8)}, path)
    assert "float32" in failure(capsys, "bench", "codec", "--data", str(path))


def test_a_constant_tensor_has_no_relative_bound(tmp_path: Path, capsys):
    path = tmp_path / "ones.safetensors"
    save_file({"ones": torch.ones(8)}, path)
    line = failure(capsys, "bench", "codec", "--data", str(path))
    assert "ones" in line and "--mode abs" in line


def test_size_and_data_exclude_each_other(tmp_path: Path, capsys):
    assert "--size" in failure(capsys, "bench", "codec", "--data", str(tmp_path / "x"), "--size", "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error(capsys):
    assert "--device cpu" in failure(capsys, "bench", "codec", "--device", "cuda")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in failure(capsys, "demo", "--out", str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize(("option", "value"), [("--epochs", "0"), ("--batch", "1"), ("--image", "8"), ("--seed", "-1")])
def test_the_demo_names_a_senseless_number(option, value, capsys):
    line = failure(capsys, "demo", option, value)
    assert option in line and value in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "digit"], ["digit", "did you mean digits"]),
        (["train", "digits", "--lr", "1"], ["'lr'", "optimizer.lr"]),
        (["train", "--epochs", "1"], ["recipe first"]),
        (["train", "digits", "--resume", "--overwrite"], ["choose one"]),
        (["report", "nowhere"], ["nowhere"]),
        (["data", "lmdb", "nowhere", "there"], ["nowhere"]),
        (["data", "dogs", "nowhere", "there"], ["nowhere"]),
    ],
)
def test_commands_of_the_training_program_name_what_is_wrong(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = failure(capsys, *args)
    assert all(word in line for word in words), line


def test_train_help_names_every_setting_and_recipe(capsys):
    main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name} (" in shown for name in fields())
    assert all(name in shown for name in recipes())


def test_a_missing_extra_is_named_with_the_way_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    line = failure(capsys, "demo")
    assert "mlxtend" in line and "pip install 'encke[cli]'" in line


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "resnet5"], ["resnet5", "did you mean resnet50"]),
        (["--methods", "plane"], ["plane", "did you mean plain"]),
        (["--batch", "8", "0"], ["--batch", "0"]),
        (["--image", "0"], ["--image", "0"]),
        (["--tokens", "0"], ["--tokens", "0"]),
        (["--image", "100", "--models", "vit_b_16"], ["--image", "100"]),
        (["--memory", "16 gallons"], ["--memory", "16 gallons", "16GiB"]),
    ],
)
def test_bench_names_what_makes_no_sense_with_and_without_tyro(options, words, installed, monkeypatch, capsys):
    if not installed:
        for package in ("tyro", "rich"):
            monkeypatch.setitem(sys.modules, package, None)
    line = failure(capsys, "bench", "speed", *options)
    assert all(word in line for word in words)


def test_bench_names_a_folder_that_cannot_be_made(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in failure(capsys, "bench", "memory", "--out", str(tmp_path / "file" / "folder"))


def test_bench_names_a_missing_torchvision(monkeypatch, capsys):
    monkeypatch.setattr("encke.bench.models.importlib.util.find_spec", lambda name: None)
    line = failure(capsys, "bench", "max-batch", "--models", "resnet18")
    assert "torchvision" in line and "pip install" in line


def test_without_tyro_options_have_the_same_types(monkeypatch):
    options = ["--models", "gpt2", "vgg16", "--batch", "4", "8", "--compile", "--image", "32", "--out", "here"]
    found = plain_parser().parse_args(["bench", "speed", *options])
    assert (found.models, found.batch, found.compile, found.image) == (["gpt2", "vgg16"], [4, 8], True, 32)
    assert (found.memory, found.out, list(found.precision)) == (None, Path("here"), ["fp32"])
    assert found.run.__name__ == "speed"
    assert plain_parser().parse_args(["demo", "--epochs", "2"]).epochs == 2


def test_without_tyro_help_explains_the_options(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(SystemExit) as end:
        main(["bench", "max-batch", "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--memory" in shown and "The cap, such as 16GiB" in shown
