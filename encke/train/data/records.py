"""Reader of the LMDB that `encke data lmdb` writes.

Image number 17 is the content of its file under the key `00000017`. Further keys are `.labels` (uint32, one for each
image), `.names` (JSON: the original files) and `.meta` (JSON: classes, count, mean, std and how it was made). `.meta`
is written last and replaces `.progress`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from encke.tools.errors import UsageError
from encke.train.data.lmdb_file import check_file

FORMAT = "encke images 1"
OLD_FORMAT = "halley images 1"
"""Format of release 0.1, which differs only in the package's former name."""
META, LABELS, NAMES, PROGRESS = b".meta", b".labels", b".names", b".progress"
"""They sort before all numbers, so that images are always added at the end."""
WAY_OUT = "make one with encke data lmdb SRC DST"
_open: dict[Path, Any] = {}


def key(number: int) -> bytes:
    """Return the key of an image."""
    return b"%08d" % number


def library() -> Any:
    """Import the lmdb package."""
    try:
        import lmdb
    except ModuleNotFoundError:
        raise UsageError("this needs lmdb: pip install 'encke[train]'") from None
    return lmdb


def get(path: Path, name: bytes) -> bytes | None:
    """Return a value of the LMDB, which stays open in this process."""
    lmdb = library()
    if path not in _open:
        try:
            _open[path] = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
        except lmdb.Error as error:
            raise UsageError(f"{path}: cannot be read as LMDB ({reason(error)}): {WAY_OUT}") from None
    try:
        with _open[path].begin() as transaction:
            return transaction.get(name)
    except lmdb.Error as error:
        raise UsageError(f"{path}: {name.decode()} cannot be read ({reason(error)}): {WAY_OUT}") from None


def reason(error: Exception) -> str:
    """Return LMDB's own message, without the leading path."""
    return str(error).rpartition(": ")[2]


def close() -> None:
    """Close all LMDBs of this process: none may be open across a fork."""
    while _open:
        _open.popitem()[1].close()


def read_meta(text: bytes, path: Path) -> dict[str, Any]:
    """Return the description of a finished LMDB; raise an error unless `encke data lmdb` wrote it."""
    try:
        meta = json.loads(text)
        form = meta.get("format")
        if form in (FORMAT, OLD_FORMAT):
            mean, std = ([float(value) for value in meta[name]] for name in ("mean", "std"))
            if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
                raise ValueError("mean and std must be three numbers each, std above 0")
            if not all(isinstance(name, str) for name in meta["classes"]) or not isinstance(meta["count"], int):
                raise ValueError("classes must be names and count a number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: its record {META.decode()} cannot be read ({error}): {WAY_OUT}") from None
    if form not in (FORMAT, OLD_FORMAT):
        raise UsageError(f"{path}: format {form!r} is not {FORMAT!r}: {WAY_OUT}")
    return meta


class Records:
    """The images of a finished LMDB, by number."""

    def __init__(self, path: Path, what: str = "data.path") -> None:
        if not (path / "data.mdb").is_file():
            state = "is a file" if path.is_file() else "holds no data.mdb" if path.exists() else "is not there"
            raise UsageError(f"{what} {path} {state}; an lmdb is a folder with data.mdb in it: {WAY_OUT}")
        try:
            check_file(path / "data.mdb")
        except (ValueError, OSError) as error:
            raise UsageError(f"{what} {path}: data.mdb cannot be read as LMDB ({error}): {WAY_OUT}") from None
        # Opening one file under two names would open it twice, which LMDB forbids.
        self.path = path.resolve()
        found = get(self.path, META)
        if found is None:
            started = get(self.path, PROGRESS) is not None
            what = "not finished: run the same encke data lmdb again" if started else f"not ours: {WAY_OUT}"
            raise UsageError(f"{path}: this LMDB is {what}")
        self.meta = read_meta(found, path)
        labels = self.value(LABELS)
        if len(labels) != 4 * self.meta["count"]:
            raise UsageError(f"{path}: {len(labels)} bytes of labels for {self.meta['count']} images: {WAY_OUT}")
        self.labels = np.frombuffer(labels, dtype="<u4").astype(np.int64)
        if self.labels.max(initial=0) >= max(len(self.meta["classes"]), 1):
            raise UsageError(f"{path}: label {self.labels.max()} of {len(self.meta['classes'])} classes: {WAY_OUT}")

    def value(self, name: bytes) -> bytes:
        """Return a value that must exist."""
        found = get(self.path, name)
        if found is None:
            raise UsageError(f"{self.path}: {name.decode()} is missing: {WAY_OUT}")
        return found

    def read(self, index: int) -> bytes:
        """Return the bytes of an image's file."""
        return self.value(key(index))

    def name(self, index: int) -> str:
        """Return the image's name for messages."""
        try:
            file = json.loads(self.value(NAMES))[index]
        except (ValueError, LookupError, TypeError, RecursionError):
            file = "its name cannot be read"
        return f"{self.path}: key {key(index).decode()} ({file})"
