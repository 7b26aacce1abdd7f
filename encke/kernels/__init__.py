"""Kernels of the codecs, in three backends with the same functions and identical decoded values.

`backend_for` returns `cpu` (numba) for CPU tensors and `gpu` (Triton) for CUDA tensors if these are installed, and
`reference` (plain torch) otherwise. `torch.ops.encke.*` are the same functions for traced code (operators.py). The
formats are in formats.py; docs/design.md explains them.
"""

from encke.kernels.backends import (
    Backend,
    BackendChoice,
    backend_for,
    choose_backend,
    compile_ahead,
    describe_backends,
    wait_for_kernels,
)
from encke.kernels.formats import (
    FLOATS,
    BoundedFormat,
    DualFormat,
    GroupFormat,
    LogFormat,
    PackedUse,
    RowUse,
    SampledUnits,
    Seed,
    UsualUse,
    mix,
)
from encke.kernels.operators import dispatched
from encke.kernels.plans import GroupPlan

__all__ = [
    "FLOATS", "Backend", "BackendChoice", "BoundedFormat", "DualFormat", "GroupFormat",
    "GroupPlan", "LogFormat", "PackedUse", "RowUse", "SampledUnits", "Seed", "UsualUse", "backend_for",
    "choose_backend", "compile_ahead", "describe_backends", "dispatched", "mix", "wait_for_kernels",
]  # fmt: skip
