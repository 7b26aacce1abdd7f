"""How far a long command is: a bar in a terminal, otherwise a plain line now and then."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from encke.tools.terminal import duration, note

PAUSE = 10.0
"""Seconds between plain lines."""


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many more images are done; `done` of them were before."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("images,"))
        with Progress(*columns, TimeRemainingColumn(), TextColumn("left")) as bars:
            task = bars.add_task(what, total=total, completed=done)
            yield lambda more: bars.advance(task, more)
        return
    begin = last = time.monotonic()
    before = done

    def advance(more: int) -> None:
        nonlocal done, last
        done += more
        now = time.monotonic()
        if now - last >= PAUSE and done < total:
            left = (now - begin) / (done - before) * (total - done)
            note(f"{what}: {done:,} of {total:,} images, about {duration(left)} left")
            last = now

    yield advance
