"""The command line: `encke demo`, `encke bench speed`, `encke study gradients`."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, NoReturn, get_type_hints

import encke
from encke.tools.errors import UsageError
from encke.tools.extras import install_hint, installed
from encke.tools.options import Option, read_options, refuse_rest
from encke.tools.suggest import suggestion

Function = Callable[..., None]
HELP = ("-h", "--help")


@dataclass(frozen=True)
class Command:
    """A function that is a command: its parameters, or the fields of its only dataclass parameter, are the options."""

    load: Callable[[], Function]
    """Imports the function, so that a command imports only what it needs."""
    needs: tuple[str, ...] = ()
    """Modules that it cannot run without."""
    reads_arguments: bool = False
    """Whether the function takes the list of arguments and parses it itself."""

    def missing(self) -> str:
        """Return a line that says what to install, or an empty string."""
        absent = next((module for module in self.needs if not installed(module)), "")
        return f"needs {absent}: {install_hint(absent)}" if absent else ""


def _check() -> Function:
    from encke.check import check

    return check


def _estimate() -> Function:
    from encke.bench.estimate import estimate

    return estimate


def _demo() -> Function:
    from encke.demo import demo

    return demo


def _train() -> Function:
    from encke.train.command import train

    return train


def _report() -> Function:
    from encke.train.report.command import report

    return report


def _lmdb() -> Function:
    from encke.train.data.lmdb import lmdb

    return lmdb


def _dogs() -> Function:
    from encke.train.data.dogs import dogs

    return dogs


def _codec() -> Function:
    from encke.bench.codec import codec

    return codec


def _memory() -> Function:
    from encke.bench.compare import memory

    return memory


def _speed() -> Function:
    from encke.bench.compare import speed

    return speed


def _max_batch() -> Function:
    from encke.bench.maxbatch import max_batch

    return max_batch


def _same_memory() -> Function:
    from encke.bench.same_memory import same_memory

    return same_memory


def _first_hour() -> Function:
    from encke.bench.first_hour import first_hour

    return first_hour


def _gradients() -> Function:
    from encke.study.gradients import gradients

    return gradients


COMMANDS = {
    "demo": Command(_demo, ("yaml", "torchvision", "mlxtend")),
    "check": Command(_check),
    "estimate": Command(_estimate),
    "train": Command(_train, ("yaml",), reads_arguments=True),
    "report": Command(_report, ("yaml",)),
    "data lmdb": Command(_lmdb, ("lmdb", "PIL")),
    "data dogs": Command(_dogs, ("PIL",)),
    "bench codec": Command(_codec, ("matplotlib", "safetensors")),
    "bench memory": Command(_memory),
    "bench speed": Command(_speed),
    "bench max-batch": Command(_max_batch),
    "bench same-memory": Command(_same_memory),
    "bench first-hour": Command(_first_hour),
    "study gradients": Command(_gradients, ("matplotlib", "mlxtend")),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run `encke` with the given arguments, by default those of the process. Exit with 2 on a user's error."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments in (["--version"], ["-V"]):
        print(f"encke {encke.__version__}")
        return
    name = next((name for name in COMMANDS if name.split() == arguments[: len(name.split())]), None)
    if name is None:
        print_overview(arguments)
        return
    command, rest = COMMANDS[name], arguments[len(name.split()) :]
    try:
        if missing := command.missing():
            raise UsageError(f"this command {missing}")
        if command.reads_arguments:
            command.load()(rest)
        else:
            call(name, command.load(), rest)
    except ModuleNotFoundError as error:
        fail(f"this command needs {error.name}: {install_hint(str(error.name).partition('.')[0])}")
    except UsageError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"encke: {message}", file=sys.stderr)
    raise SystemExit(code)


def print_overview(arguments: Sequence[str]) -> None:
    """Print all commands, or those of one group such as `bench`. Works with nothing but torch and numpy installed."""
    group = " ".join(word for word in arguments if word not in HELP)
    chosen = {name: command for name, command in COMMANDS.items() if not group or name.startswith(f"{group} ")}
    if not chosen:
        groups = dict.fromkeys(name.split()[0] for name in COMMANDS)
        fail(f"there is no command {group!r}; {suggestion(group, [*COMMANDS, *groups]) or 'try encke --help'}")
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    print(f"usage: encke {group or 'COMMAND'} ...\n")
    if not group:
        print(textwrap.fill(" ".join((encke.__doc__ or "").split("\n\n")[0].split()), width) + "\n")
    longest = max(map(len, chosen))
    for name, command in chosen.items():
        missing = command.missing()
        text = f"({missing})" if missing else summary(command.load())
        lead = f"  {name:{longest}}  "
        print(textwrap.fill(text, width, initial_indent=lead, subsequent_indent=" " * len(lead)))
    print(f"\nEach command explains its options: encke {next(iter(chosen))} --help")


def summary(function: Function) -> str:
    """Return the first sentence of a function's docstring."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def about(function: Function) -> str:
    """Return a function's docstring without the part that explains its arguments."""
    return (inspect.getdoc(function) or "").partition("Args:")[0].strip()


def options_class(function: Function) -> type[Any] | None:
    """Return the dataclass that holds a command's options, or None if the options are the function's parameters."""
    kinds = [kind for name, kind in get_type_hints(function).items() if name != "return"]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def call(name: str, function: Function, arguments: Sequence[str]) -> None:
    """Parse the arguments and call the function."""
    options = list(options_of(function))
    given, rest = read_options(f"encke {name}", about(function), options, arguments)
    refuse_rest(rest, options)
    kind = options_class(function)
    function(kind(**given)) if kind else function(**given)


def options_of(function: Function) -> Iterator[Option]:
    """Yield a command's options, from its dataclass or from its signature and docstring."""
    options = options_class(function)
    if options:
        kinds = get_type_hints(options)
        for field in fields(options):
            yield Option(field.name, kinds[field.name], field.default, field.metadata.get("help", ""))
        return
    kinds, explained = get_type_hints(function), argument_help(inspect.getdoc(function) or "")
    for name, parameter in inspect.signature(function).parameters.items():
        default = MISSING if parameter.default is parameter.empty else parameter.default
        group = "arguments" if default is MISSING else "options"
        yield Option(name, kinds[name], default, explained.get(name, ""), group)


def argument_help(doc: str) -> dict[str, str]:
    """Return the explanation of each argument in a Google-style docstring."""
    matches = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc.partition("Args:\n")[2], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in matches}
