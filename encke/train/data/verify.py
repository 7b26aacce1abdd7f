"""Decoding image files in worker processes, to find broken ones and to measure brightness."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from PIL import Image

from encke.tools.errors import UsageError
from encke.train.data.augment import from_sums
from encke.train.data.pictures import error_line, rgb

FILES, BYTES = 64, 4_000_000
"""Largest number of files, and of bytes, in a worker's portion."""
COUNTED, GRID = 1024, 32
"""Brightness is measured on at least this many images, or all, at this many pixels down and across."""
LEVELS = np.arange(256)


@dataclass
class Brightness:
    """Sums over pixels of images: integers, so that their order does not matter."""

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
    """Result of a worker for some files, in order."""

    problems: list[str]
    """Error message of each file; empty if it is usable."""
    contents: list[bytes]
    """Content of each file, or of the scaled image; empty if not wanted."""
    brightness: Brightness


@dataclass(frozen=True)
class Wanted:
    """Results that are wanted besides decoding each file."""

    contents: bool
    size: int | None = None
    """Pixels of the shorter side to which larger images are scaled."""
    quality: int = 95
    """JPEG quality of a scaled image."""


def check(paths: Sequence[str], wanted: Wanted, counted: Container[int]) -> Checked:
    """Decode the files; those at the places in `counted` are counted for the brightness."""
    problems, contents, grids = [], [], []
    for place, path in enumerate(paths):
        content, problem = b"", ""
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            with Image.open(io.BytesIO(content)) as image:
                picture = rgb(image)
                if wanted.size is not None and min(picture.size) > wanted.size:
                    picture, content = scaled(picture, wanted.size, wanted.quality)
                if place in counted:
                    grids.append(grid(picture))
        except Exception as error:
            content, problem = b"", error_line(error)
        problems.append(problem)
        contents.append(content if wanted.contents else b"")
    return Checked(problems, contents, brightness(b"".join(grids)))


def brightness(pixels: bytes) -> Brightness:
    """Return the sums of RGB pixels, by Pillow's histogram: several times faster than integer sums in numpy."""
    if not pixels:
        return Brightness()
    counted = Image.frombytes("RGB", (len(pixels) // 3, 1), pixels).histogram()
    channels = np.array(counted, dtype=np.int64).reshape(3, 256)
    return Brightness((channels @ LEVELS).tolist(), (channels @ LEVELS**2).tolist(), len(pixels) // 3)


def grid(picture: Image.Image) -> bytes:
    """Return pixels all over an image, at most GRID in each direction, so that large images do not count more."""
    if max(picture.size) > GRID:
        picture = picture.resize((min(picture.width, GRID), min(picture.height, GRID)), Image.Resampling.NEAREST)
    return picture.tobytes()


def scaled(picture: Image.Image, size: int, quality: int) -> tuple[Image.Image, bytes]:
    """Scale an image to `size` pixels along its shorter side; return it, and its JPEG."""
    share = size / min(picture.size)
    width, height = (max(size, round(side * share)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return picture, buffer.getvalue()


def file_sizes(paths: Sequence[str]) -> list[int]:
    """Return the sizes of files; 0 for a dangling link, which is found broken later."""
    return [os.stat(path).st_size if os.path.exists(path) else 0 for path in paths]


def portions(sizes: Sequence[int], begin: int = 0) -> Iterator[slice]:
    """Split the files from `begin` on into portions for workers."""
    held = 0
    for place, size in enumerate(sizes[begin:], begin):
        if place > begin and (place - begin == FILES or held + size > BYTES):
            yield slice(begin, place)
            begin, held = place, 0
        held += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


@contextmanager
def checks(
    paths: Sequence[str], sizes: Sequence[int], workers: int, wanted: Wanted, done: int = 0
) -> Iterator[Iterator[Checked]]:
    """Check the files from `done` on in order, a few portions ahead of the consumer.

    All workers have started when the context is entered.
    """
    every = max(1, len(paths) // COUNTED)
    # Forked workers need not import torch again, which takes longer than thousands of small images.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), watch_parent, (os.getpid(),))
    rest = portions(sizes, done)

    def submit(portion: slice) -> Future[Checked]:
        counted = range(-portion.start % every, portion.stop - portion.start, every)
        return pool.submit(check, paths[portion], wanted, counted)

    ahead = deque(map(submit, islice(rest, 4 * workers)))

    def results() -> Iterator[Checked]:
        try:
            while ahead:
                found = ahead.popleft().result()
                ahead.extend(map(submit, islice(rest, 1)))
                yield found
        except BrokenProcessPool:
            raise UsageError("a worker process has died, perhaps of too little memory: try fewer --workers") from None

    try:
        yield results()
    finally:
        # Waits for the portions in work: at exit, Python would write to a pool that is being closed, with a traceback.
        pool.shutdown(cancel_futures=True)


def watch_parent(parent: int) -> None:
    """End this worker if its parent is killed, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # by Pillow, about an unusual image
    gc.freeze()  # garbage collection of the parent's objects would copy them

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_count(workers: int | None) -> int:
    """Return the number of worker processes; by default one for each core."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    return workers
