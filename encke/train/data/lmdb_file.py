"""Validation of an LMDB file before it is mapped into memory.

LMDB trusts its pages. A truncated file, or a corrupt page, ends the process with a bus error or a failed assertion,
which no program can catch. So this module walks the tree of pages first, with reads that can fail. Images lie outside
the tree, on pages of their own: only their locations are checked, not their contents.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

MAGIC = 0xBEEFC0DE
PAGE_HEAD, META_BYTES, NODE_HEAD = 16, 136, 8
BRANCH, LEAF, OWN_PAGES = 0x01, 0x02, 0x01
"""Flags of a page, and the flag of a node whose value has pages of its own."""
NO_PAGE = 2**64 - 1
INTEGER_KEYS = 0x08
"""Flag of the list of free pages, the first of the two trees; the second tree, ours, lacks it."""


def check_file(file: Path) -> None:
    """Raise ValueError with the reason if LMDB cannot read the file safely. An empty file is a new LMDB."""
    size = file.stat().st_size
    if size:
        with file.open("rb") as opened:
            Tree(opened.fileno(), size).check()


class Tree:
    """The pages of an open LMDB file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.page_bytes = self.meta(0)[0]
        if self.page_bytes not in (1 << bits for bits in range(9, 17)):
            raise ValueError(f"it claims pages of {self.page_bytes} bytes")

    def read(self, place: int, count: int) -> bytes:
        """Return bytes of the file; raise an error if it has fewer."""
        if place + count > self.size:
            raise ValueError(f"it is cut off: {self.size:,} bytes, and there should be more than {place + count:,}")
        return os.pread(self.descriptor, count, place)

    def meta(self, place: int) -> tuple[int, int, list[tuple[int, int]]]:
        """Return the page size, the transaction number, and flags and root of both trees."""
        page = self.read(place, PAGE_HEAD + META_BYTES)
        magic, version = struct.unpack_from("<II", page, PAGE_HEAD)
        if magic != MAGIC or version != 1:
            raise ValueError("it does not begin as an LMDB does")
        trees = [PAGE_HEAD + 24, PAGE_HEAD + 72]
        found = [
            (struct.unpack_from("<H", page, at + 4)[0], struct.unpack_from("<Q", page, at + 40)[0]) for at in trees
        ]
        return struct.unpack_from("<I", page, trees[0])[0], struct.unpack_from("<Q", page, PAGE_HEAD + 128)[0], found

    def check(self) -> None:
        """Walk both trees of the last transaction."""
        trees = max((self.meta(place) for place in (0, self.page_bytes)), key=lambda meta: meta[1])[2]
        if [flags for flags, _ in trees] != [INTEGER_KEYS, 0]:
            raise ValueError("it is of another kind")
        pages, seen = [root for _, root in trees if root != NO_PAGE], set[int]()
        while pages:
            number = pages.pop()
            if number in seen or number < 2:
                raise ValueError(f"page {number} is used twice")
            seen.add(number)
            pages += self.children(number)

    def children(self, number: int) -> list[int]:
        """Check one page; return the pages below it."""
        page = self.read(number * self.page_bytes, self.page_bytes)
        itself, _, kind, lower, upper = struct.unpack_from("<QHHHH", page)
        count = (lower - PAGE_HEAD) // 2
        is_branch = kind == BRANCH
        if itself != number or kind not in (BRANCH, LEAF) or not PAGE_HEAD <= lower <= upper <= self.page_bytes:
            raise ValueError(f"page {number} is damaged")
        if count < (2 if is_branch else 1):
            raise ValueError(f"page {number} has too few entries")
        at = np.frombuffer(page, "<u2", count, PAGE_HEAD).astype(np.int64)
        if at.min() < upper or at.max() > self.page_bytes - NODE_HEAD:
            raise ValueError(f"page {number} has an entry outside it")
        content = np.frombuffer(page, np.uint8)
        low, high, flags, key = (
            content[at + 2 * word].astype(np.int64) + 256 * content[at + 2 * word + 1].astype(np.int64)
            for word in range(4)
        )
        size = low + (high << 16)
        has_pages = (flags & OWN_PAGES != 0) & (not is_branch)
        inside = np.where(has_pages, 8, 0 if is_branch else size)
        if (at + NODE_HEAD + key + inside).max() > self.page_bytes:
            raise ValueError(f"page {number} has an entry outside it")
        if is_branch:
            return (size + (flags << 32)).tolist()
        starts = (at + NODE_HEAD + key)[has_pages]
        own = [struct.unpack_from("<Q", page, start)[0] for start in starts.tolist()]
        for first, length in zip(own, size[has_pages].tolist(), strict=True):
            if first < 2 or first * self.page_bytes + PAGE_HEAD + length > self.size:
                raise ValueError(f"it is cut off, or page {number} is damaged: an entry lies behind its end")
        return []
