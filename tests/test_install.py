"""The wheel in environments of its own, outside the checkout: one with torch and numpy alone, one with every extra."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import encke
from encke.cli import COMMANDS
from encke.tools.extras import PACKAGES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOOP = """
import torch
from torch import nn

import encke

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
handle = encke.attach(model, optimizer=optimizer)
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(96, 3, 32, 32)).square().mean().backward()
    optimizer.step()
assert handle.report().ratio > 2
print(encke.__file__)
"""

NEEDS = {
    **dict.fromkeys(("bench memory", "bench speed", "bench max-batch", "bench same-memory"), ("--models", "resnet18")),
    **dict.fromkeys(("bench first-hour", "estimate"), ("resnet18",)),
}
"""Arguments with which a command needs a package that is not installed."""
OVERVIEWS = ((), ("--help",), ("--version",))
ENDS = ("out", "err")
IMPORTED_ONCE = """
import json, os, sys

from encke.cli import main

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.exit(main(arguments))
"""
"""Commands in processes of their own, after one import of torch for all of them. Prints their exit codes."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel in it, and an empty folder to run commands in."""

    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment without any variable that could lead back to the checkout."""
        program, *arguments = command
        away = self.folder / "away"
        away.mkdir(exist_ok=True)
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=away,
            env={"PATH": "/usr/bin:/bin", "HOME": str(away), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "encke", source / "encke", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


def install(wheel: Path, folder: Path, packages: Path) -> Environment:
    """Make an environment that holds the wheel and imports everything else from the folder `packages`."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps"]
    subprocess.run([*command, "--no-index", "--disable-pip-version-check", wheel], check=True)
    # A path in a .pth file is searched, but .pth files in it are not read: no editable install comes along.
    (own / "packages.pth").write_text(f"{packages}\n")
    return Environment(folder)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with torch, numpy and what these two require."""
    packages = tmp_path_factory.mktemp("required")
    for name in required(["torch", "numpy"]):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return install(wheel, tmp_path_factory.mktemp("bare"), packages)


@pytest.fixture(scope="module")
def answers(bare: Environment) -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """The answers of the commands of a bare install, and of `encke` alone, by their arguments."""
    commands = [*OVERVIEWS, *((*name.split(), *NEEDS.get(name, ())) for name in COMMANDS)]
    found = bare.run("python", "-c", IMPORTED_ONCE, json.dumps(commands))
    assert found.returncode == 0, found.stderr
    codes, away = map(int, found.stdout.split()), bare.folder / "away"
    return {
        arguments: subprocess.CompletedProcess(arguments, code, *((away / f"{i}.{end}").read_text() for end in ENDS))
        for i, (arguments, code) in enumerate(zip(commands, codes, strict=True))
    }


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all packages that the tests run with."""
    return install(wheel, tmp_path_factory.mktemp("full"), Path(sysconfig.get_path("purelib")))


def required(names: list[str]) -> list[str]:
    """Return the installed packages that these need, themselves included and extras left out."""
    chosen: list[str] = []
    while names:
        name = names.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # one for another system or Python
            continue
        if name not in chosen:
            chosen.append(name)
            names += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return chosen


def test_the_project_file_says_what_the_package_says() -> None:
    first = (encke.__doc__ or "").splitlines()[0]
    assert first.lower() == f"encke: {PROJECT['description']}".lower()
    assert "version" in PROJECT["dynamic"] and "classifiers" in PROJECT


def test_every_hint_names_an_extra_that_installs_the_package() -> None:
    packages = {"yaml": "pyyaml", "PIL": "pillow"}
    for module, extra in PACKAGES.items():
        assert packages.get(module, module) in PROJECT["optional-dependencies"][extra], module


def test_the_wheel_brings_its_data_files(full: Environment) -> None:
    files = {str(file) for file in Path(*full.folder.glob("lib/python*/site-packages/encke")).rglob("*")}
    ends = {"py.typed", "recipes/digits.yaml", "train/report/page.css", "train/report/page.js"}
    assert all(any(file.endswith(f"encke/{end}") for file in files) for end in ends)
    recipes = [file for file in files if "/recipes/" in file]
    assert len(recipes) == len(list((ROOT / "encke" / "recipes").glob("*.yaml")))


def test_a_training_loop_runs_in_a_bare_install_and_names_the_missing_kernels_once(bare: Environment) -> None:
    found = bare.run("python", "-c", LOOP)
    assert found.returncode == 0, found.stderr
    assert str(bare.folder) in found.stdout
    assert found.stderr.count("encke[cpu]") == 1


@pytest.mark.soak
def test_a_training_loop_runs_in_a_full_install_without_a_word(full: Environment) -> None:
    found = full.run("python", "-c", LOOP)
    assert found.returncode == 0 and not found.stderr, found.stderr
    assert str(full.folder) in found.stdout


def test_the_bare_environment_holds_no_optional_package(bare: Environment) -> None:
    names = ("numba", "yaml", "matplotlib", "torchvision", "PIL")
    find = f"import importlib.util as i; print([n for n in {names} if i.find_spec(n)])"
    assert bare.run("python", "-c", find).stdout == "[]\n"
    assert bare.run("python", "-c", "import numba").returncode == 1


def test_the_program_of_a_bare_install_answers(bare: Environment) -> None:
    found = bare.run("encke", "--version")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"encke {encke.__version__}\n", "")


@pytest.mark.parametrize("arguments", [*OVERVIEWS, ("check",)])
def test_a_bare_install_answers(arguments: tuple[str, ...], answers) -> None:
    found = answers[arguments]
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr and ("encke" in found.stdout or "0.2.0" in found.stdout)
    if arguments == ("check",):
        assert "CPU kernels: reference, install encke[cpu] for speed" in found.stdout


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "check"])
def test_a_command_of_a_bare_install_names_the_extra_to_install(command: str, answers) -> None:
    found = answers[*command.split(), *NEEDS.get(command, ())]
    assert "Traceback" not in found.stderr
    assert found.returncode == 2 and len(found.stderr.strip().splitlines()) == 1, found.stderr
    extra = re.search(r"pip install 'encke\[(\w+)\]'", found.stderr)
    assert extra is not None and extra[1] in PROJECT["optional-dependencies"], found.stderr


@pytest.mark.parametrize("command", ["bench codec", "train"])
def test_a_command_explains_itself_in_a_full_install(command: str, full: Environment) -> None:
    found = full.run("encke", *command.split(), "--help")
    assert found.returncode == 0 and "usage" in found.stdout.lower(), found.stderr


@pytest.mark.soak
def test_the_demo_runs_from_the_wheel(full: Environment) -> None:
    found = full.run("encke", "demo", "--epochs", "1", "--image", "96", "--batch", "16", "--out", "demo")
    assert found.returncode == 0, found.stderr
    assert (full.folder / "away" / "demo" / "report.html").is_file()
