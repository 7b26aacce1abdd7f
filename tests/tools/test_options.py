"""Options of commands: words become values of the right type, or an error that names both."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from encke.tools.errors import UsageError
from encke.tools.options import Option, explanation, field_help, parser_of, read_options, refuse_rest


def value(kind: Any, *words: str) -> Any:
    """Return what `--it WORDS` stands for."""
    return read_options("encke test", "", [Option("it", kind, None, "")], ["--it", *words])[0]["it"]


@pytest.mark.parametrize(
    ("kind", "words", "wanted"),
    [
        (int, ["-3"], -3),
        (float, ["1e-3"], 1e-3),
        (float | None, ["none"], None),
        (str, ["none"], "none"),
        (Path | None, ["a/b"], Path("a/b")),
        (Literal[2, 4] | None, ["4"], 4),
        (Literal["none", "flip"], ["none"], "none"),
        (Literal["a", "b"] | str, ["file.py:c"], "file.py:c"),
        (tuple[float, float], ["1", "2"], (1.0, 2.0)),
        (tuple[int, ...], [], ()),
        (tuple[Literal["x", "y"], ...], ["y", "x"], ("y", "x")),
    ],
)
def test_words_become_values(kind: Any, words: list[str], wanted: Any) -> None:
    found = value(kind, *words)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        (int, ["1.5"], ["--it", "int", "'1.5'"]),
        (int | None, ["nine"], ["--it", "'nine'"]),
        (Literal["nearest", "stochastic"] | None, ["stochast"], ["'stochast'", "did you mean stochastic"]),
        (tuple[float, float], ["1"], ["--it", "2 arguments"]),
        (float, [], ["--it", "one argument"]),
    ],
)
def test_a_wrong_value_is_named(kind: Any, words: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        value(kind, *words)
    assert all(word in str(error.value) for word in named) and "\n" not in str(error.value)


def test_a_switch_can_be_turned_on_and_off_also_inside_a_section() -> None:
    options = [Option("sgd.nesterov", bool, False, ""), Option("compile", bool, True, "")]
    given, rest = read_options("encke test", "", options, ["--sgd.nesterov", "--no-compile", "--sgd.no-nesterov"])
    assert given == {"sgd.nesterov": False, "compile": False} and not rest


def test_words_that_belong_to_no_option_are_refused_with_the_nearest_one() -> None:
    options = [Option("src", Path, MISSING, ""), Option("size", int | None, None, "")]
    given, rest = read_options("encke test", "", options, ["--sise", "3", "from"])
    assert given == {"src": Path("3")}
    with pytest.raises(UsageError, match="'--sise'; did you mean --size"):
        refuse_rest(rest, options)


@pytest.mark.parametrize(
    ("default", "shown"),
    [(None, "x"), ("", "x"), ((), "x"), (False, "x"), (True, "x (default: on)"), (0.1, "x (default: 0.1)")]
    + [((1, 2), "x (default: 1 2)"), (0, "x (default: 0)")],
)
def test_only_defaults_that_say_something_are_shown(default: Any, shown: str) -> None:
    assert explanation(Option("it", float, default, "x")) == shown


def test_the_text_under_a_field_explains_it() -> None:
    assert field_help(Child) == {"a": "First.", "b": "Second, 100 %."}
    text = parser_of("encke test", "", [Option("b", int, 2, field_help(Child)["b"])]).format_help()
    assert "--b INT" in text and "Second, 100 %. (default: 2)" in text


@dataclass(frozen=True)
class Parent:
    """A dataclass."""

    a: int = 1
    """First."""


@dataclass(frozen=True)
class Child(Parent):
    """One with a field more."""

    b: int = 2
    """Second, 100 %."""
