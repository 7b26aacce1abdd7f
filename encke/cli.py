"""The command line: `encke demo`, `encke bench speed`, `encke study gradients`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from encke import __version__
from encke.tools.errors import UsageError

DESCRIPTION = """Encke keeps what PyTorch's autograd saves compressed, under an error bound that holds for every value.
Start with `encke demo`. Each command explains its options: `encke bench codec --help`."""
FOLDERS = {
    "bench": "Measurements, beside the alternatives in the same run.",
    "study": "What compression does to gradients and to training.",
    "data": "Makes training data ready.",
}


@dataclass(frozen=True)
class Command:
    """A function that is a command: its options are its parameters."""

    module: str
    function: str
    needs: tuple[str, ...] = ()
    """Packages without which it cannot run."""
    extra: str = "cli"
    """The extra of this package that brings them."""
    raw: bool = False
    """It reads its arguments itself."""

    def load(self) -> Callable[..., None]:
        return getattr(importlib.import_module(self.module), self.function)


COMMANDS = {
    ("demo",): Command("encke.demo", "demo", ("rich", "mlxtend")),
    ("train",): Command("encke.train.command", "train", ("yaml",), "train", raw=True),
    ("report",): Command("encke.train.report.page", "report", ("yaml",), "train"),
    ("data", "lmdb"): Command("encke.train.data.lmdb_tool", "lmdb", ("lmdb", "PIL"), "train"),
    ("data", "dogs"): Command("encke.train.data.dogs", "dogs", ("PIL",), "train"),
    ("bench", "codec"): Command("encke.bench.codec", "codec", ("rich", "matplotlib", "safetensors")),
    ("bench", "memory"): Command("encke.bench.memory", "memory"),
    ("bench", "speed"): Command("encke.bench.speed", "speed"),
    ("bench", "max-batch"): Command("encke.bench.maxbatch", "max_batch"),
    ("study", "gradients"): Command("encke.study.gradients", "gradients", ("rich", "matplotlib", "mlxtend")),
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs `encke` with the given arguments, by default those of the process. Exits with 2 on a user's error."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments in (["--version"], ["-V"]):
        print(f"encke {__version__}")
        return
    words = next((words for words in COMMANDS if words == tuple(arguments[: len(words)])), ())
    command = COMMANDS.get(words)
    for package in command.needs if command is not None else ():
        if not importable(package):
            fail(f"this command needs {package}: pip install 'encke[{command.extra if command else 'cli'}]'")
    try:
        if command is not None and command.raw:
            command.load()(arguments[len(words) :])
        else:
            dispatch(arguments)
    except (UsageError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)


def importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return False
    return True


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr."""
    print(f"encke: {message}", file=sys.stderr)
    raise SystemExit(code)


def dispatch(arguments: Sequence[str]) -> None:
    """Parses the arguments and runs the command; with argparse where tyro is not installed."""
    if not importable("tyro"):
        options = vars(plain_parser().parse_args(arguments or ["--help"]))
        options.pop("run")(**options)
        return
    from tyro.conf import PositionalRequiredArgs
    from tyro.extras import SubcommandApp

    app = SubcommandApp()
    folders = {name: SubcommandApp() for name in FOLDERS}
    for words, command in COMMANDS.items():
        (folders[words[0]] if len(words) > 1 else app).command(name=words[-1])(command.load())
    for name, folder in folders.items():
        app.command(folder, name=name, help=FOLDERS[name])
    app.cli(prog="encke", description=DESCRIPTION, args=arguments or ["--help"], config=(PositionalRequiredArgs,))


def plain_parser() -> argparse.ArgumentParser:
    """The same commands for argparse."""
    parser = argparse.ArgumentParser("encke", description=DESCRIPTION)
    top = parser.add_subparsers(required=True)
    folders = {name: top.add_parser(name, help=text).add_subparsers(required=True) for name, text in FOLDERS.items()}
    for words, command in COMMANDS.items():
        function = command.load()
        about = (inspect.getdoc(function) or "").partition("Args:")[0]
        place = folders[words[0]] if len(words) > 1 else top
        mine = place.add_parser(words[-1], help=about.splitlines()[0], description=about)
        mine.set_defaults(run=function)
        add_options(mine, function)
    return parser


def add_options(parser: argparse.ArgumentParser, function: Callable[..., None]) -> None:
    """An option for each parameter, explained as in the docstring."""
    explained = argument_lines(inspect.getdoc(function) or "")
    kinds = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        text = explained.get(name, "").replace("%", "%%")
        if parameter.default is parameter.empty:
            parser.add_argument(name, help=text, **argparse_kind(kinds[name]))
            continue
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, default=parameter.default, help=text, **argparse_kind(kinds[name]))


def argument_lines(doc: str) -> dict[str, str]:
    """What a docstring says about each argument."""
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc.partition("Args:\n")[2], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def argparse_kind(kind: Any) -> dict[str, Any]:
    """What argparse is to do with a value of a type: X, X | None, tuple[X, ...], bool or a Literal."""
    if isinstance(kind, UnionType) or type(None) in get_args(kind):
        (kind,) = [each for each in get_args(kind) if each is not type(None)]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {"nargs": "+", **argparse_kind(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind}
