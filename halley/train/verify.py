"""Decodes image files in worker processes: which of them are broken, and how bright they are."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
from PIL import Image

from halley.bench import UsageError
from halley.train.augment import from_sums
from halley.train.pictures import error_line, rgb

FILES, BYTES = 64, 4_000_000
"""The most that a worker takes at a time."""
LEVELS = np.arange(256)


@dataclass
class Brightness:
    """Sums over the pixels of images: whole numbers, so that their order does not matter."""

    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    squares: list[int] = field(default_factory=lambda: [0, 0, 0])
    pixels: int = 0

    def add(self, other: Brightness) -> None:
        self.total = [a + b for a, b in zip(self.total, other.total, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]
        self.pixels += other.pixels

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return from_sums(self.total, self.squares, self.pixels)


@dataclass(frozen=True)
class Checked:
    """What a worker found out about some files, in their order."""

    problems: list[str]
    """For each file what is wrong with it; empty if it can be used."""
    contents: list[bytes]
    """For each file its bytes, or those of the scaled image; empty where they are not asked for."""
    brightness: Brightness


@dataclass(frozen=True)
class Wanted:
    """What is done with each file besides decoding it."""

    contents: bool
    size: int | None = None
    """Pixels of the shorter side to which larger images are scaled."""
    quality: int = 95
    """Of a scaled image's JPEG."""


def check(paths: Sequence[str], wanted: Wanted) -> Checked:
    """Decodes the files."""
    problems, contents, levels = [], [], np.zeros(768, dtype=np.int64)
    for path in paths:
        content, problem = b"", ""
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            with Image.open(io.BytesIO(content)) as image:
                picture = rgb(image)
                if wanted.size is not None and min(picture.size) > wanted.size:
                    picture, content = scaled(picture, wanted.size, wanted.quality)
                levels += np.fromiter(picture.histogram(), np.int64, 768)
        except Exception as error:
            content, problem = b"", error_line(error)
        problems.append(problem)
        contents.append(content if wanted.contents else b"")
    channels = levels.reshape(3, 256)
    total, squares = (channels @ LEVELS).tolist(), (channels @ LEVELS**2).tolist()
    return Checked(problems, contents, Brightness(total, squares, int(channels[0].sum())))


def scaled(picture: Image.Image, size: int, quality: int) -> tuple[Image.Image, bytes]:
    """The image with `size` pixels along its shorter side, and that as JPEG."""
    share = size / min(picture.size)
    width, height = (max(size, round(side * share)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return picture, buffer.getvalue()


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of files that a worker takes at a time."""
    begin, held = 0, 0
    for place, size in enumerate(sizes):
        if place > begin and (place - begin == FILES or held + size > BYTES):
            yield slice(begin, place)
            begin, held = place, 0
        held += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


@contextmanager
def checks(paths: Sequence[str], sizes: Sequence[int], workers: int, wanted: Wanted) -> Iterator[Iterator[Checked]]:
    """Checks the files in order, some in each worker at a time and a few ahead of what is taken.

    All workers have started when the context is entered.
    """
    # Forked workers need not import torch again, which takes longer than thousands of small images.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), watch_parent, (os.getpid(),))
    rest = portions(sizes)
    work = partial(check, wanted=wanted)
    ahead = deque(pool.submit(work, paths[portion]) for portion in islice(rest, 4 * workers))

    def results() -> Iterator[Checked]:
        try:
            while ahead:
                found = ahead.popleft().result()
                ahead.extend(pool.submit(work, paths[portion]) for portion in islice(rest, 1))
                yield found
        except BrokenProcessPool:
            raise UsageError("a worker process has died, perhaps of too little memory: try fewer --workers") from None

    try:
        yield results()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def watch_parent(parent: int) -> None:
    """Ends this worker when its parent was killed, and leaves Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # of Pillow, about an odd image

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_count(workers: int | None) -> int:
    """The number of worker processes that was asked for; by default one for each core."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    return workers
