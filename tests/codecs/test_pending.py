"""Encodings whose sizes have not arrived: which of them the host waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from encke.codecs import pending

MIB = 1 << 20


class Encoding:
    """One in flight; what it is asked for is noted."""

    def __init__(self, size: int, arrived: bool = False) -> None:
        self.source_bytes, self.arrived, self.finished = size * MIB, arrived, False
        self.packed: object | None = object()
        self.event = SimpleNamespace(query=lambda: self.arrived)

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(
    ("sizes", "waited"),
    [
        ([800], 0),
        ([800, 1], 1),
        ([100, 800], 0),
        ([100, 28, 800], 0),
        ([100, 29, 800], 1),
        ([800, 700, 600], 2),
        ([10] * 13, 0),
        ([10] * 14, 1),
    ],
)
def test_the_oldest_beyond_the_limit_are_waited_for_and_the_newest_is_not(sizes: list[int], waited: int) -> None:
    queue = pending._InFlight()
    encodings = [Encoding(size) for size in sizes]
    for encoding in encodings:
        queue.add(encoding)  # type: ignore[arg-type]
    assert [e.finished for e in encodings] == [i < waited for i in range(len(sizes))]
    assert queue.bytes == sum(e.source_bytes for e in encodings if not e.finished)
    queue.drain(wait=True)
    assert all(e.finished for e in encodings) and queue.bytes == 0


def test_what_has_arrived_is_finished_in_order() -> None:
    queue = pending._InFlight()
    encodings = [Encoding(1, True), Encoding(1, True), Encoding(1), Encoding(1, True)]
    for encoding in encodings:
        queue.add(encoding)  # type: ignore[arg-type]
    assert [e.finished for e in encodings] == [True, True, False, False]
    # The third was read meanwhile, by backward.
    encodings[2].packed = None
    queue.drain(wait=False)
    assert all(e.finished for e in encodings)
