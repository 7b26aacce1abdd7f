"""The command line: what users see when something is wrong, in one line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import encke
from encke.bench.methods import METHODS
from encke.bench.options import StepOptions
from encke.cli import COMMANDS, call, main, options_of, plain_parser
from encke.tools.extras import PACKAGES
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
    assert "(default: one-cycle)" in capsys.readouterr().out


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


def test_without_tyro_options_have_the_same_types():
    options = ["--models", "gpt2", "vgg16", "--batch", "4", "8", "--compile", "--image", "32", "--out", "here"]
    parsed = plain_parser("bench speed", COMMANDS["bench speed"].load()).parse_args(options)
    assert (parsed.models, parsed.batch, parsed.compile, parsed.image) == (["gpt2", "vgg16"], [4, 8], True, 32)
    assert (parsed.memory, parsed.out, list(parsed.precision)) == (None, Path("here"), ["fp32"])
    parsed = plain_parser("data lmdb", COMMANDS["data lmdb"].load()).parse_args(["from", "to"])
    assert [value for value in vars(parsed).values()][:2] == [Path("from"), Path("to")]


def test_without_tyro_a_command_gets_its_options(monkeypatch, tmp_path):
    seen = []

    def command(options: StepOptions) -> None:
        seen.append(options)

    command.__annotations__["options"] = StepOptions
    monkeypatch.setitem(sys.modules, "tyro", None)
    arguments = ["--batch", "4", "8", "--rounds", "3", "--out", str(tmp_path)]
    call("bench speed", command, arguments)
    monkeypatch.delitem(sys.modules, "tyro")
    call("bench speed", command, arguments)
    assert seen[0] == seen[1] == StepOptions(batch=(4, 8), rounds=3, out=tmp_path)


def test_without_tyro_help_explains_the_options(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(SystemExit) as end:
        main(["bench", "max-batch", "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--memory" in shown and "A cap on memory, such as 16GiB" in shown
    assert all(name in shown for name in METHODS)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_bare_installation_says_what_to_install(name):
    ended = bare(*name.split(), *BENCH.get(name, ()))
    if name == "check":
        assert ended.returncode == 0 and "CPU kernels: reference, install encke[cpu] for speed" in ended.stdout
        return
    (line,) = ended.stderr.strip().splitlines()
    assert ended.returncode == 2 and "pip install 'encke[" in line


BENCH = {
    **dict.fromkeys(("bench memory", "bench speed", "bench max-batch"), ("--models", "resnet18")),
    **dict.fromkeys(("bench first-hour", "estimate"), ("resnet18",)),
}
"""Arguments with which a command needs a package that is not installed."""


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
