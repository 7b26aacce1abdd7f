"""The command line: what users see when something is wrong, in one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import encke
from encke.bench.options import StepOptions
from encke.cli import COMMANDS, call, main, options_of
from encke.tools.extras import PACKAGES
from encke.train.command import recipes
from encke.train.settings import SECTIONS, fields


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
        (["bench", "--help"], ["codec", "memory", "speed", "max-batch", "same-memory"]),
        (["bench", "speed", "--help"], ["--models", "--methods", "--memory", "--compile"]),
        (["bench", "codec", "--help"], ["--data", "--bound", "--device", "--out"]),
        (["demo", "--help"], ["--epochs", "--out"]),
    ],
)
def test_help_names_what_there_is(args, words, capsys):
    with contextlib.suppress(SystemExit):
        main(args)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_the_overview_fits_a_terminal_and_begins_with_the_package_s_own_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert " ".join((encke.__doc__ or "").split("\n\n")[0].split()) in " ".join(shown.split())
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(("name", "hint"), [("fly", "encke --help"), ("ben", "did you mean bench?"), ("bench fly", "")])
def test_an_unknown_command_is_an_error(name, hint, capsys):
    line = failure(capsys, *name.split())
    assert repr(name) in line and hint in line


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
    folder = tmp_path / "file" / "folder"
    assert failure(capsys, "demo", "--out", str(folder)) == f"encke: {folder}: Not a directory"


@pytest.mark.parametrize(("option", "value"), [("--epochs", "0"), ("--batch", "1"), ("--image", "8"), ("--seed", "-1")])
def test_the_demo_names_a_senseless_number(option, value, capsys):
    line = failure(capsys, "demo", option, value)
    assert option in line and value in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "digit"], ["digit", "did you mean digits"]),
        (["train", "runs/none", "--resume"], ["no recipe and no run 'runs/none'; name a YAML file", "digits"]),
        (["train", "."], ["settings.yaml", "folder of a run"]),
        (["train", "digits", "--policy", "commet"], ["the command line: policy.name: takes", "did you mean comet"]),
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


def test_a_training_that_runs_out_of_memory_says_what_needs_less(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError(message)

    monkeypatch.setattr("encke.train.loop.train", fail)
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes"
    line = failure(capsys, "train", "digits", "--accumulate", "5", "--out", str(tmp_path))
    assert message in line and "batch smaller" in line and line.endswith("--accumulate 25")  # which divides the batch
    message = "shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match=message):
        main(["train", "digits", "--out", str(tmp_path)])


def test_train_help_names_every_setting_and_recipe(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert not end.value.code
    assert all(f"--{name.replace('_', '-')}" in shown for name in (*fields(), "resume", "overwrite"))
    assert all(name in shown for name in recipes())
    assert "sgd: momentum." in shown
    assert "one-cycle" in shown and "(default: cosine)" in shown


def test_train_help_shows_the_values_of_a_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help"])
    shown = capsys.readouterr().out
    assert "(default: one-cycle)" in shown and "Train from the recipe digits." in shown


def test_a_missing_extra_is_named_with_the_way_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    line = failure(capsys, "demo")
    assert "mlxtend" in line and "pip install 'encke[cli]'" in line


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
        (["--batch", "many"], ["--batch", "int", "'many'"]),
        (["--precision", "bf61"], ["--precision", "'bf61'", "did you mean bf16"]),
        (["--steps"], ["--steps"]),
        (["--model", "gpt"], ["'--model'", "did you mean --models"]),
        (["resnet50"], ["'resnet50'", "--help"]),
    ],
)
def test_bench_names_what_makes_no_sense(options, words, capsys):
    line = failure(capsys, "bench", "speed", *options)
    assert all(word in line for word in words)


def test_bench_names_a_folder_that_cannot_be_made(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in failure(capsys, "bench", "memory", "--out", str(tmp_path / "file" / "folder"))


def test_a_command_gets_its_options(tmp_path):
    seen = []

    def command(options: StepOptions) -> None:
        seen.append(options)

    command.__annotations__["options"] = StepOptions
    arguments = ["--batch", "4", "8", "--rounds", "3", "--compile", "--models", "gpt2", "vgg16", "--image", "none"]
    call("bench speed", command, [*arguments, "--out", str(tmp_path)])
    assert seen == [StepOptions(models=("gpt2", "vgg16"), compile=True, batch=(4, 8), rounds=3, out=tmp_path)]


def test_arguments_and_options_may_be_mixed():
    seen = []

    def command(runs: tuple[Path, ...], out: Path | None = None) -> None:
        seen.append((runs, out))

    command.__annotations__.update(runs=tuple[Path, ...], out=Path | None)
    call("report", command, ["a", "--out", "page", "b"])
    call("report", command, [])
    assert seen == [((Path("a"), Path("b")), Path("page")), ((), None)]


def help_of(*words: str) -> str:
    """Return the help of a command as it is shown in a terminal of 80 columns."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return shown.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_speaks_of_no_python(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(*name.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"None|default: \)|default: False|PATH PATH|''|\bSTR\b", shown), shown
    assert shown.count("--help") == 1


def test_arguments_have_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert help_of("data", "lmdb").startswith("usage: encke data lmdb [options] SRC DST\n")
    assert help_of("data", "dogs").startswith("usage: encke data dogs [options] SRC DST\n")
    assert help_of("estimate").startswith("usage: encke estimate [options] MODEL\n")
    assert help_of("report").startswith("usage: encke report [options] [RUNS ...]\n")


def test_the_common_settings_of_a_training_come_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    headings = re.findall(r"^(\w[\w ]*):$", help_of("train"), re.MULTILINE)
    assert headings == ["Recipes", "common settings", "training", "files and screen", *SECTIONS]


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.reads_arguments])
def test_every_option_is_explained(name):
    assert all(option.help for option in options_of(COMMANDS[name].load())), name


BARE = """
import sys
for package in sys.argv.pop(1).split(","):
    sys.modules[package] = None
from encke.cli import main
main(sys.argv[1:])
"""


def bare(*args: str) -> subprocess.CompletedProcess[str]:
    """`encke args` in a process that can import torch and numpy, and no optional package of ours."""
    command = [sys.executable, "-c", BARE, ",".join(PACKAGES), *args]
    environment = {**os.environ, "COLUMNS": "80", "TRITON_INTERPRET": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_bare_installation_shows_the_overview_with_hints():
    ended = bare()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "needs yaml: pip install 'encke[train]'" in " ".join(ended.stdout.split())


def test_extras_are_those_of_the_project_file():
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {"pyyaml": "yaml", "pillow": "PIL"}
    listed = {
        names.get(package, package): extra
        for extra, packages in extras["optional-dependencies"].items()
        for package in packages
        if extra in set(PACKAGES.values()) and not package.startswith("encke")
    }
    assert listed == PACKAGES
