"""Options of commands: typed names with explanations, parsed and shown with argparse."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from encke.tools.errors import UsageError
from encke.tools.suggest import suggestion

WORDS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}
"""Placeholder of a value in the help, by type."""
LONGEST_CHOICES = 45
"""Choices that take more characters are named in the explanation alone."""


@dataclass(frozen=True)
class Option:
    """One option of a command, or an argument without a name if it has no default."""

    name: str
    """Name in Python, dotted if it is part of a section: `optimizer.weight_decay`."""
    kind: Any
    """Type: bool, int, float, str, Path, a Literal, one of these or None, or a tuple of one of these."""
    default: Any
    """Its default value; MISSING if it has to be given."""
    help: str
    """Its explanation."""
    group: str = "options"
    """The heading under which the help shows it."""
    short: str = ""
    """Another name for it."""

    def flags(self) -> list[str]:
        """Return the option's words on the command line; the word that turns a switch off comes last."""
        name = f"--{self.name.replace('_', '-')}"
        if self.kind is bool:
            section, dot, last = name[2:].rpartition(".")
            return [name, f"--{section}{dot}no-{last}"]
        return [f"--{self.short}", name] if self.short else [name]


class Switch(argparse.Action):
    """Turns an option on with `--name`, and off with `--no-name`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store which of the two was given."""
        setattr(namespace, self.dest, option_string != self.option_strings[-1])


class Parser(argparse.ArgumentParser):
    """Raises an error of one line instead of printing the usage, and ends the process only after `--help`."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise UsageError(message.removeprefix("argument "))


class Layout(argparse.HelpFormatter):
    """Fits the help into the terminal, and preserves paragraphs and indented lines of the description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith(" ") else textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False)
            for part in text.split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar)
        flags = action.option_strings[:1] if action.const is False else action.option_strings
        times = action.nargs if isinstance(action.nargs, int) else 1
        values = [f"[{action.metavar} ...]"] if action.nargs == "*" else [str(action.metavar)] * times
        return " ".join([", ".join(flags), *values])


def help_width() -> int:
    """Return the number of characters in a line of help."""
    return min(shutil.get_terminal_size((80, 24)).columns, 100)


def read_options(
    program: str, about: str, options: Iterable[Option], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Parse arguments. With `--help` among them, print the help and exit.

    Returns:
        The given values, by name, and the words that belong to no option.

    Raises:
        UsageError: A value is missing or of the wrong type; the message names option and value.
    """
    options = list(options)
    given, rest = parser_of(program, about, options).parse_known_intermixed_args(list(arguments))
    return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(given).items()}, rest


def refuse_rest(rest: Sequence[str], options: Iterable[Option]) -> None:
    """Raise an error if words are left that belong to no option."""
    if rest:
        known = [flag for option in options for flag in option.flags() if option.default is not MISSING]
        hint = suggestion(rest[0].partition("=")[0], known) if rest[0].startswith("-") else ""
        raise UsageError(f"do not know what to do with {rest[0]!r}; {hint or 'see --help'}")


def parser_of(program: str, about: str, options: Sequence[Option]) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    places = " ".join(placeholder(option) for option in options if option.default is MISSING)
    parser = Parser(
        program,
        usage=f"{program} [options] {places}".rstrip().replace("%", "%%"),
        description=about.replace("%", "%%"),
        formatter_class=Layout,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(option.group for option in options)}
    for option in options:
        settings: dict[str, Any] = {"help": explanation(option), "metavar": metavar(option)}
        if option.kind is bool:
            settings |= {"action": Switch, "nargs": 0, "const": bool(option.default)}
        else:
            settings |= {"type": partial(convert, option.kind), "nargs": count(option.kind)}
        if option.default is MISSING:
            settings |= {"default": ()} if settings["nargs"] == "*" else {}
            groups[option.group].add_argument(option.name, **settings)
        else:
            groups[option.group].add_argument(*option.flags(), dest=option.name, **settings)
    named = [option.group for option in options if option.default is not MISSING]
    (groups[named[0]] if named else parser).add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser


def count(kind: Any) -> int | str | None:
    """Return argparse's `nargs` for a type."""
    if get_origin(kind) is not tuple:
        return None
    values = get_args(kind)
    return "*" if values[-1] is ... else len(values)


def convert(kind: Any, text: str) -> Any:
    """Return the value of a word."""
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    kinds = [each for each in get_args(kind) or (kind,)] if get_origin(kind) is not Literal else [kind]
    if text.lower() == "none" and NoneType in kinds:
        return None
    for each in kinds:
        if get_origin(each) is Literal:
            found = [choice for choice in get_args(each) if str(choice) == text]
            if found:
                return found[0]
        elif each is not NoneType:
            try:
                return each(text)
            except ValueError:
                continue
    hint = suggestion(text, choices_of(kind))
    raise argparse.ArgumentTypeError(f"takes {in_words(kind)}, got {text!r}{f'; {hint}' if hint else ''}")


def choices_of(kind: Any) -> list[str]:
    """Return the values of a Literal, including one in a tuple or a union with None."""
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    return [choice for each in get_args(kind) if get_args(each) for choice in choices_of(each)]


def in_words(kind: Any) -> str:
    """Return a type as text: `float`, `int | None`, or the choices of a Literal."""
    if choices := choices_of(kind):
        return f"one of {', '.join(choices)}"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


@cache
def field_help(kind: Any) -> dict[str, str]:
    """Return the text under each field of a dataclass, including its parents' fields."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(tree, ast.ClassDef)
        for before, node in itertools.pairwise(tree.body):
            if isinstance(before, ast.AnnAssign) and isinstance(node, ast.Expr):
                found[ast.unparse(before.target)] = ast.literal_eval(node.value)
    return found


def metavar(option: Option) -> Any:
    """Return the placeholder of an option's value: choices, or a word for its type."""
    kind = option.kind
    if option.default is MISSING:
        return option.name.upper()
    kinds = [each for each in get_args(kind) or (kind,) if each not in (NoneType, ...)]
    if choices := choices_of(kind):
        shown = "{" + ",".join(choices) + "}"
        return shown if len(shown) <= LONGEST_CHOICES and str not in kinds else "NAME"
    return WORDS.get(kinds[0], "")


def placeholder(option: Option) -> str:
    """Return an argument without a name as the usage line shows it."""
    name = option.name.upper()
    return f"[{name} ...]" if count(option.kind) == "*" else name


def explanation(option: Option) -> str:
    """Return the help of an option with its default, if the default says more than "nothing"."""
    default = option.default
    if default is MISSING or default is None or default is False or default in ("", ()):
        shown = ""
    elif default is True:
        shown = " (default: on)"
    elif isinstance(default, tuple):
        shown = f" (default: {' '.join(map(str, default))})"
    else:
        shown = f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    return f"{option.help}{shown}".replace("%", "%%")
