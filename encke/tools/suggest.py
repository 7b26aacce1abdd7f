"""Hints at the name that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from encke.tools.errors import UsageError


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for the nearest known name, or an empty string if none is near.

    Case and punctuation are ignored, and the last part of a dotted name is enough: `lr` finds `optimizer.lr`.
    """
    names = list(known)
    same_end = [each for each in names if bare(each.rpartition(".")[2]) == bare(name.rpartition(".")[2])]
    by_bare = {bare(each): each for each in names}
    close = same_end or [by_bare[each] for each in difflib.get_close_matches(bare(name), by_bare, 1, 0.5)]
    return f"did you mean {close[0]}?" if close else ""


def pick(name: str, known: Iterable[str], option: str) -> str:
    """Return the known name that equals `name` up to case and punctuation.

    Raises:
        UsageError: There is none. The message names `option` and the nearest name, or all known names.
    """
    names = list(known)
    for each in names:
        if bare(each) == bare(name):
            return each
    hint = suggestion(name, names) or f"choose from {', '.join(names)}"
    raise UsageError(f"{option}: there is no {name!r}; {hint}")


def bare(text: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, text.lower()))
