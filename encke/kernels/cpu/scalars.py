"""Scalar operations of the numba kernels, and compilation of kernels.

fp16 is passed as int16 and bf16 as uint16, so that numba's type specialisation distinguishes the four dtypes. There is
no fastmath: values equal those of the reference bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import event
from numba.extending import overload

from encke.tools.progress import Waiting

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u32, u64 = np.uint8, np.uint32, np.uint64


@functools.cache
def source_digest() -> str:
    """Return a hash of all sources that compiled code may depend on."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "formats.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


class CompileListener(event.Listener):
    """Listener that reports when kernels of this package are being compiled."""

    def __init__(self) -> None:
        self.waiting = Waiting("CPU")

    def on_start(self, event: Any) -> None:
        if is_ours(event):
            self.waiting.__enter__()

    def on_end(self, event: Any) -> None:
        if is_ours(event):
            self.waiting.__exit__()


def is_ours(event: Any) -> bool:
    """Return whether an event concerns a function of this package."""
    return str(event.data["dispatcher"].py_func.__module__).startswith("encke.")


listener = CompileListener()
event.register("numba:compile", listener)


def jit(function: Callable, **options: Any) -> Callable:
    """Compile with numba.njit, and cache the result on disk if there is a directory for it.

    numba compares only the file of the function itself with the cache. Kernels call functions in other files, so the
    hash of all these files is added to the cache's stamp. If numba has no such stamp, nothing is cached.
    """
    options.update(nogil=True, error_model="numpy", no_cfunc_wrapper=True)
    try:
        kernel = numba.njit(function, cache=True, **options)
        index = kernel._cache._cache_file
        index._source_stamp = (index._source_stamp, source_digest())
    except (RuntimeError, AttributeError):
        return numba.njit(function, **options)
    return kernel


def inline(function: Callable) -> Callable:
    """Compile a function that is inlined in kernels: passing an array to a call costs as much as packing a block."""
    return jit(function, forceinline=True, no_cpython_wrapper=True)


def implement(function: Callable) -> Callable:
    """Return a decorator for the function that selects the implementation of `function` by argument types."""
    chooser: Callable = overload(function, jit_options={"no_cfunc_wrapper": True}, strict=False)
    return chooser


def choose(single: Callable, double: Callable) -> Callable:
    """Make a function for compiled code: `single` if its last argument has 32 bits, `double` if it has 64."""

    def chosen(*args: Any) -> Any:
        raise NotImplementedError("for compiled code only")

    implement(chosen)(lambda *args: single if args[-1].bitwidth == 32 else double)
    return chosen


# Bits of |v| as an integer: ordered like the magnitudes, then infinity, then NaN.
magnitude = choose(lambda v: i32(f32(v).view(i32) & 0x7FFFFFFF), lambda v: f64(v).view(i64) & i64(2**63 - 1))
from_magnitude = choose(lambda m: i32(m).view(f32), lambda m: i64(m).view(f64))
# Bits of v as a signed integer that is ordered like the values.
ordered = choose(
    lambda v: i32(f32(v).view(i32) ^ f32(v).view(i32) >> 31 & 0x7FFFFFFF),
    lambda v: f64(v).view(i64) ^ f64(v).view(i64) >> 63 & i64(2**63 - 1),
)
from_ordered = choose(
    lambda key: i32(key ^ key >> 31 & 0x7FFFFFFF).view(f32),
    lambda key: i64(key ^ key >> 63 & i64(2**63 - 1)).view(f64),
)
# -1 where the sign bit is set, else 0.
sign = choose(lambda v: i32(f32(v).view(i32) >> 31), lambda v: i32(f64(v).view(i64) >> 63))
# floor(log2 v) of a positive normal value.
exponent = choose(lambda v: i64(f32(v).view(i32) >> 23) - 127, lambda v: (f64(v).view(i64) >> 52) - 1023)
# Number converted to a float of the type of `like`.
as_float = choose(lambda number, like: f32(number), lambda number, like: f64(number))
# Positive step, rounded up to bf16 (fp64 stays), with a lower limit.
step_up = choose(
    lambda step: max(i32(f32(step).view(i32) + 0xFFFF & -0x10000).view(f32), f32(2.0**-100)),
    lambda step: max(step, 2.0**-990),
)


def _lo_down(negated, lo):
    size = i32(f32(lo).view(i32) & 0x7FFFFFFF)
    if lo < 0:
        return -i32(size + 0xFFFF & -0x10000 if size < 0x7F7F0000 else 0x7F7F0000).view(f32)
    return i32(0x10000 if negated and size < 0x10000 else size & -0x10000).view(f32)


# Lo of a group, rounded down to bf16 (fp64 stays), to a finite value, and not to zero if its sign has a meaning.
lo_down = choose(_lo_down, lambda negated, lo: lo)


def widen(element: Any) -> Any:
    """Convert an element of a tensor to fp32 (fp64 stays)."""


def narrow(v: Any, like: Any) -> Any:
    """Round a computed float, not NaN, to an element of the type of `like`: ties to even, as torch casts."""


@implement(widen)
def _widen(element):
    if element == types.uint16:
        return lambda element: u32(u32(element) << 16).view(f32)
    if element == types.int16:

        def from_half(element):
            h = i32(element)
            u = i32((h & 0x7FFF) << 13)
            u = i32(u + (224 << 23 if u >= 31 << 23 else 112 << 23))  # infinity and NaN get the largest exponent
            small = i32(u + (1 << 23)).view(f32) - f32(2.0**-14)  # denormals have no implicit leading one
            m = f32(small).view(i32) if u < 113 << 23 else u
            return i32(m | (h & 0x8000) << 16).view(f32)

        return from_half
    return lambda element: element


@implement(narrow)
def _narrow(v, like):
    if like == types.uint16:

        def to_bfloat(v, like):
            u = f32(v).view(u32)
            return np.uint16(u32(u + 0x7FFF + (u >> 16 & 1)) >> 16)

        return to_bfloat
    if like == types.int16:

        def to_half(v, like):
            u = f32(v).view(i32)
            m = i32(u & 0x7FFFFFFF)
            normal = i32((m + 0xFFF + (m >> 13 & 1) - (112 << 23)) >> 13)
            # For denormals, this sum rounds to a multiple of 2^-24.
            small = i32(f32(i32(m).view(f32) + f32(0.5)).view(i32) - 0x3F000000)
            h = 0x7C00 if m >= 0x477FF000 else (small if m < 113 << 23 else normal)
            return np.int16(h | (u >> 16 & 0x8000))

        return to_half
    return lambda v, like: v


@inline
def random32(i, a, b):
    """Return the hash of index i, from the halves of the seed (b with its lowest bit set)."""
    h = u32(u32(i ^ a) * b)
    h = u32(u32(h ^ h >> 15) * u32(0x846CA68B))
    return u32(h ^ h >> 16)


@inline
def rotate_right(h, turn):
    """Rotate a hash right by `turn` bits."""
    return u32(h >> turn | u32(h << (u32(32) - turn & u32(31))))


@inline
def rotate_right24(h, turn):
    """Return 24 bits of a hash, rotated right by `turn`, as int32."""
    return i32(rotate_right(h, turn) >> 8)


@inline
def random24(i, turn, a, b):
    """Return 24 random bits of index i, rotated right by `turn`, as int32."""
    return rotate_right24(random32(i, a, b), turn)


@inline
def bit_width(v):
    """Return the number of bits that a non-negative integer below 2^31 needs."""
    return max((f64(v).view(i64) >> 52) - 1022, 0)


@inline
def index(at):
    """Tell the compiler that an index is not negative: a loop with indices that may wrap around does not vectorise."""
    return at & 0x7FFFFFFFFFFF
