"""Hint, shown once, that the reference serves large tensors because a compiler is not installed."""

from __future__ import annotations

import warnings

from torch import Tensor

LARGE = 1 << 20
"""Number of values from which on the reference is noticeably slow."""
hints: dict[str, str] = {}
"""Hints that have not been shown yet, by type of device."""


def warn_if_large(x: Tensor) -> None:
    """Show the hint for a tensor's device at the first large tensor."""
    if hints and x.numel() >= LARGE and x.device.type in hints:
        warnings.warn(hints.pop(x.device.type), stacklevel=2)
