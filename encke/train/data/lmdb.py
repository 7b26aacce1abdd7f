"""`encke data lmdb`: a folder of images as one LMDB, checked image by image.

Images, sums and progress are written in the same transaction. If the process is killed, the next one continues after
the last transaction, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from encke.tools import units
from encke.tools.errors import UsageError
from encke.tools.progress import progress
from encke.tools.terminal import note
from encke.train.data.lmdb_file import check_file
from encke.train.data.readers import classes_of, is_split, list_images
from encke.train.data.records import FORMAT, LABELS, META, NAMES, PROGRESS, close, key, library, reason
from encke.train.data.verify import Brightness, Checked, Wanted, checks, file_sizes, worker_count

SPLITS = ("train", "val", "test")
PAGE = 4096
COMMIT_BYTES, COMMIT_SECONDS = 64_000_000, 2.0
"""Size and age of a transaction: the most that is lost when the process is killed."""


@dataclass(frozen=True)
class Source:
    """The images of a folder with one folder for each class."""

    root: Path
    classes: tuple[str, ...]
    names: list[str]
    labels: list[int]
    sizes: list[int]

    def fingerprint(self, wanted: Wanted) -> str:
        """Return a hash of the files and of the processing."""
        made = [wanted.size, wanted.quality] if wanted.size is not None else None
        content = json.dumps([self.classes, self.names, self.sizes, made])
        return hashlib.sha256(content.encode()).hexdigest()

    def space(self, done: int) -> int:
        """Return about how many bytes the files from `done` on will take."""
        return sum(-(-(size + 32) // PAGE) * PAGE if size > PAGE // 3 else size + 32 for size in self.sizes[done:])


@dataclass
class State:
    """Progress of an LMDB."""

    fingerprint: str
    done: int = 0
    good: int = 0
    brightness: Brightness = field(default_factory=Brightness)
    broken: list[tuple[str, str]] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def read(cls, text: bytes) -> State:
        found = json.loads(text)
        return cls(**found | {"brightness": Brightness(**found["brightness"])})


def lmdb(src: Path, dst: Path, workers: int | None = None, size: int | None = None, quality: int = 95) -> None:
    """Turn a folder of images into an LMDB, which is faster to read and leaves no broken image to the training.

    SRC holds one folder for each class, or train and val with such folders in them, which become DST/train and DST/val.
    Each image is decoded; broken ones are left out and listed in DST/broken.txt. Files are stored as they are. When
    interrupted, the same command goes on where it was.

    Args:
        src: The folder of images.
        dst: The folder to make.
        workers: Processes that decode; by default one for each core.
        size: Scale the shorter side of larger images down to this many pixels, stored as JPEG.
        quality: JPEG quality of scaled images, 1 to 100.
    """
    if size is not None and size < 1:
        raise UsageError(f"--size must be at least 1, got {size}")
    if not 1 <= quality <= 100:
        raise UsageError(f"--quality must be between 1 and 100, got {quality}")
    if dst.resolve().is_relative_to(src.resolve()):
        raise UsageError(f"DST {dst} is inside SRC {src}, where it would be taken for images: name another folder")
    close()
    processes, wanted = worker_count(workers), Wanted(True, size, quality)
    found = find(src)
    if "" not in found:
        refuse_other_files(dst, {*SPLITS, "broken.txt"})
    sources = {dst / name: source for name, source in found.items()}
    states = {place: progress_of(place, source, wanted) for place, source in sources.items()}
    check_space(dst, sum(source.space(states[place].done) for place, source in sources.items()))
    begin = time.monotonic()
    for place, source in sources.items():
        states[place] = pack(source, place, wanted, processes)
    report(dst, sources, states, time.monotonic() - begin)


def find(src: Path) -> dict[str, Source]:
    """Return the folders to pack: the folder itself, or those in it called train, val and test."""
    parts = [name for name in SPLITS if is_split(src / name)]
    if "train" not in parts:
        return {"": listed(src)}
    found = {name: listed(src / name) for name in parts}
    for name, source in found.items():
        lone = sorted(set(source.classes) ^ set(found["train"].classes))
        if lone:
            raise UsageError(
                f"{src / name} and {src / 'train'} must have the same classes; {lone[0]!r} is in one alone"
            )
    return found


def listed(root: Path) -> Source:
    classes = classes_of(root, "SRC")
    found = list_images(root, classes, keep_lost=True)
    sizes = file_sizes([os.path.join(root, name) for name, _ in found])
    return Source(root, classes, [name for name, _ in found], [label for _, label in found], sizes)


@contextmanager
def opened(place: Path, space: int = 0) -> Iterator[Any]:
    """Open an LMDB for writing; its errors become one-line errors."""
    package = library()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"DST {place} cannot be made ({error.strerror}): name another folder") from None
    try:
        # The map is a range of addresses; the file grows with the data written.
        with closing(package.open(str(place), map_size=2 * space + (256 << 20), metasync=False)) as environment:
            yield environment
    except package.Error as error:
        free = units.size(shutil.disk_usage(place).free)
        raise UsageError(
            f"DST {place} cannot be written ({reason(error)}; {free} are free): when that is mended, the same "
            "command goes on"
        ) from None


def progress_of(place: Path, source: Source, wanted: Wanted) -> State:
    """Return the progress of the LMDB at `place`; raise an error if it was made from other files or settings."""
    fingerprint = source.fingerprint(wanted)
    refuse_other_files(place, {"data.mdb", "lock.mdb", "broken.txt"})
    if not (place / "data.mdb").exists():
        return State(fingerprint)
    try:
        check_file(place / "data.mdb")
    except (ValueError, OSError) as error:
        raise UsageError(f"DST {place}: data.mdb is damaged ({error}): remove {place}, and start again") from None
    with opened(place) as environment, environment.begin() as transaction:
        found = transaction.get(META) or transaction.get(PROGRESS)
        if found is None and environment.stat()["entries"]:
            raise UsageError(f"DST {place} holds another LMDB: name a new folder")
        try:
            state = State(fingerprint) if found is None else state_of(found, len(source.names))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(
                f"DST {place}: the record of its progress is damaged ({error}): remove {place}, and start again"
            ) from None
    if state.fingerprint != fingerprint:
        raise UsageError(f"DST {place} was made from other files or with another --size: remove it or name another")
    return state


def refuse_other_files(place: Path, ours: set[str]) -> None:
    """Raise an error if the folder holds anything that this command does not make."""
    if place.is_file():
        raise UsageError(f"DST {place} is a file: name a folder")
    others = sorted({each.name for each in place.iterdir()} - ours) if place.exists() else []
    if others:
        raise UsageError(f"DST {place} holds other files ({others[0]}): name a new folder")


def state_of(text: bytes, files: int) -> State:
    """Read the progress from the record of a finished or unfinished LMDB."""
    found = json.loads(text)
    if "format" not in found:
        return State.read(text)
    return State(found["fingerprint"], files, found["count"], broken=found["broken"], finished=True)


def check_space(dst: Path, needed: int) -> None:
    place = next(each for each in (dst, *dst.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UsageError(f"DST {dst} needs about {units.size(needed)}, {units.size(free)} are free: make room there")


def pack(source: Source, place: Path, wanted: Wanted, workers: int) -> State:
    """Write the images that the LMDB does not have yet."""
    state = progress_of(place, source, wanted)
    if state.done:
        note(f"{place}: {state.done:,} of {len(source.names):,} images are done already")
    if state.finished:
        return state
    paths = [os.path.join(source.root, name) for name in source.names]
    with (
        checks(paths, source.sizes, workers, wanted, state.done) as results,
        progress(place.name, len(source.names), state.done) as advance,
        opened(place, source.space(0)) as environment,
    ):
        waiting: list[Checked] = []
        held, last = 0, time.monotonic()
        for found in results:
            waiting.append(found)
            held += sum(map(len, found.contents))
            if held > COMMIT_BYTES or time.monotonic() - last > COMMIT_SECONDS:
                write(environment, source, state, waiting)
                waiting, held, last = [], 0, time.monotonic()
            advance(len(found.problems))
        write(environment, source, state, waiting)
        finish(environment, source, state)
    return state


def write(environment: Any, source: Source, state: State, waiting: list[Checked]) -> None:
    """Write images and progress in one transaction. A map that is too small grows."""
    full = library().MapFullError
    while True:
        new = deepcopy(state)
        try:
            with environment.begin(write=True) as transaction:
                before = transaction.get(PROGRESS)
                if (State.read(before).done if before else 0) != state.done:
                    raise UsageError(f"another process writes to {environment.path()}: wait for it")
                for found in waiting:
                    add(transaction, source, new, found)
                transaction.put(PROGRESS, json.dumps(asdict(new)).encode())
        except full:
            environment.set_mapsize(2 * environment.info()["map_size"])
        else:
            vars(state).update(vars(new))
            return


def add(transaction: Any, source: Source, state: State, found: Checked) -> None:
    for content, problem in zip(found.contents, found.problems, strict=True):
        if problem:
            state.broken.append((source.names[state.done], problem))
        else:
            transaction.put(key(state.good), content, append=True)
            state.good += 1
        state.done += 1
    state.brightness.add(found.brightness)


def finish(environment: Any, source: Source, state: State) -> None:
    """Write labels, names and description; from then on the LMDB is complete."""
    if not state.good:
        raise UsageError(f"SRC {source.root}: none of {len(source.names):,} images can be decoded; see its files")
    broken = {name for name, _ in state.broken}
    kept = [place for place, name in enumerate(source.names) if name not in broken]
    mean, std = state.brightness.mean_and_std()
    meta = {
        "format": FORMAT,
        "classes": source.classes,
        "count": state.good,
        "mean": mean,
        "std": std,
        "fingerprint": state.fingerprint,
        "broken": state.broken,
    }
    with environment.begin(write=True) as transaction:
        transaction.put(LABELS, np.array([source.labels[place] for place in kept], dtype="<u4").tobytes())
        transaction.put(NAMES, json.dumps([source.names[place] for place in kept]).encode())
        transaction.put(META, json.dumps(meta).encode())
        transaction.delete(PROGRESS)
    environment.sync(True)


def report(dst: Path, sources: dict[Path, Source], states: dict[Path, State], seconds: float) -> None:
    """Print a summary, and list broken images in DST/broken.txt."""
    listing = dst / "broken.txt"
    lines = [
        f"{source.root / name}\t{problem}\n"
        for place, source in sources.items()
        for name, problem in states[place].broken
    ]
    if lines:
        listing.write_text("".join(lines), errors="surrogateescape")
    else:
        listing.unlink(missing_ok=True)
    for place, source in sources.items():
        used = units.size(os.stat(place / "data.mdb").st_size)
        note(f"{place}: {states[place].good:,} images of {len(source.classes)} classes, {used}")
    if lines:
        note(f"broken images left out: {len(lines):,}, listed in {listing}")
    note(f"done in {units.duration(seconds)}; train with --data.kind lmdb --data.path {dst}")
