"""Errors of libraries in the command line's words."""

from __future__ import annotations

import pytest
import torch

from encke.tools.errors import first_line, out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            True,
        ),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(), False),
    ],
)
def test_out_of_memory_is_known_by_type_or_words(error, expected):
    assert out_of_memory(error) is expected


def test_the_first_line_of_an_error_without_a_message_is_its_type():
    assert [first_line(each) for each in (ValueError("\none\ntwo"), MemoryError())] == ["one", "MemoryError"]
