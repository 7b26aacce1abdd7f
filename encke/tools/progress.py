"""Progress of a long command: one live line in a terminal, otherwise plain lines at intervals."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from encke.tools.terminal import note
from encke.tools.units import duration

T = TypeVar("T")
PAUSE = 10.0
"""Seconds between plain lines."""
SLOW = 5.0
"""Seconds after which a block that should be quick explains the delay."""
CLEAR = "\r\033[K"
PATIENCE = 1.5
"""Seconds after which a status line names the reason for a wait."""


class StatusLine:
    """A line that is rewritten in place in a terminal; elsewhere it is printed every `PAUSE` seconds."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.printed = time.monotonic()

    @property
    def width(self) -> int:
        """Characters that the live line may have."""
        return shutil.get_terminal_size().columns - 1

    def show(self, text: str, at_once: bool = False) -> None:
        """Replace the line; `at_once` prints it also outside a terminal, however short the pause was."""
        if self.live:
            print(CLEAR + text[: self.width], end="", file=sys.stderr, flush=True)
        elif at_once or time.monotonic() - self.printed >= PAUSE:
            self.printed = time.monotonic()
            note(text)

    def say(self, text: str) -> None:
        """Print text that stays, above the live line."""
        self.clear()
        note(text)

    def clear(self) -> None:
        """Remove the live line."""
        if self.live:
            print(CLEAR, end="", file=sys.stderr, flush=True)


class Waiting:
    """Time that this process waits for kernel compilation; in a terminal, a status line reports long waits."""

    def __init__(self, kernels: str) -> None:
        """Store the kind of the kernels."""
        self.kernels = kernels
        self.count = 0
        """Kernels that were compiled so far."""
        self.seconds = 0.0
        """Time that this took."""
        self.began: list[float] = []
        """Start times of the compilations in progress: of one kernel, and of the functions that it calls."""

    def __enter__(self) -> None:
        self.began.append(time.monotonic())
        line = StatusLine()
        if len(self.began) == 1 and line.live and self.seconds > PATIENCE:
            so_far = f"{self.count} so far in {duration(self.seconds)}"
            line.show(f"encke: compiling {self.kernels} kernels, {so_far}; kept for later runs")

    def __exit__(self, *failure: object) -> None:
        before, began = self.seconds, self.began.pop()
        if self.began:
            return
        self.count, self.seconds = self.count + 1, before + time.monotonic() - began
        if before > PATIENCE:  # otherwise the line is the program's own
            StatusLine().clear()


@contextmanager
def told_when_slow(text: str) -> Iterator[None]:
    """Show a line if the block takes more than `SLOW` seconds."""
    line = StatusLine()
    timer = threading.Timer(SLOW, line.show, (text, True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        line.clear()


@contextmanager
def progress(name: str, total: int, done: int = 0, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of further units done, out of `total`; `done` were done before."""
    line, started, before = StatusLine(), time.monotonic(), done

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if before < done < total:
            left = (time.monotonic() - started) / (done - before) * (total - done)
            line.show(f"{name}: {done:,} of {total:,} {unit}, about {duration(left)} left")

    try:
        yield advance
    finally:
        line.clear()


def track(items: Sequence[tuple[str, T]]) -> Iterator[T]:
    """Yield the items one by one; show each item's name and the estimated time for the rest."""
    line, started = StatusLine(), time.monotonic()
    for done, (name, item) in enumerate(items):
        left = (time.monotonic() - started) / done * (len(items) - done) if done else None
        about = f", about {duration(left)} left" if left is not None else ""
        line.show(f"{done + 1} of {len(items)}: {name}{about}", at_once=True)
        try:
            yield item
        finally:
            line.clear()
