"""Codec and Packed: the contract between codecs and everything that uses them.

A codec is a frozen dataclass. It has to implement two methods, `Codec.encode` and `Packed.decode`; everything else has
a default that is safe for any codec (docs/extending.md shows one). The codecs of this package work on the flat run of
memory that a tensor covers: they derive from `FlatCodec` and `FlatPacked`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import isabstract
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from encke import kernels
from encke.codecs.layout import Layout, flatten, layout_of, run_of
from encke.kernels import FLOATS, GroupPlan

if TYPE_CHECKING:
    from encke.codecs.groupquant import GroupQuant


def operations(flat: Tensor) -> kernels.Backend:
    """Return the kernels for this tensor.

    Plain tensors skip the dispatcher, which costs more than a launch; subclasses and traced code use `torch.ops.encke`.
    """
    if type(flat) is Tensor and not torch.compiler.is_dynamo_compiling():
        return kernels.backend_for(flat.device.type)
    return kernels.dispatched


def as_written(thing: Any) -> str:
    """Return a codec or policy as one would write it, with the fields that differ from their defaults."""
    return f"{type(thing).__name__}({_settings(thing)})"


def _settings(thing: Any) -> str:
    values = [(f, getattr(thing, f.name)) for f in fields(thing) if f.init] if is_dataclass(thing) else []
    return ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)


WAITS = 3
"""Number of a site's payloads, in one format, whose sizes the host waits for before it predicts any."""
MEMORY = 64
"""Number of payloads after which an outlier has almost no weight."""
SLACK = 4608
"""Bytes added to every capacity: the payloads of small tensors vary most."""


class EncoderState:
    """State of a site's encoder that persists from step to step: sizes of its payloads and the launch plan."""

    __slots__ = ("coarsened", "format", "known", "least", "name", "plan", "share")

    def __init__(self, name: Callable[[], str] = lambda: "a tensor") -> None:
        self.name = name
        """Returns the site's name, for errors."""
        self.format: Any = None
        """Format of the counted payloads."""
        self.known = 0
        """Number of counted payloads."""
        self.share = self.least = 0.0
        """The largest and the smallest recent payload, as a share of the source's bytes."""
        self.coarsened = 0
        """Payloads that did not fit, and were encoded with a coarser bound."""
        self.plan: Any = None

    def learn(self, format: Any, payload: int, source: int) -> None:
        """Record the size of a payload. Earlier payloads in another format are forgotten at once, others gradually."""
        share = payload / max(source, 1)
        if format != self.format:
            self.format, self.known, self.share, self.least = format, 0, share, share
        self.known += 1
        self.share = max(share, self.share - (self.share - share) / MEMORY)
        self.least = min(share, self.least + (share - self.least) / MEMORY)

    def capacity(self, format: Any, source: int) -> int | None:
        """Return how many bytes the next payload may take; None if too few payloads are known for a prediction.

        The capacity exceeds the largest payload by an eighth, or by the difference of the largest and the smallest if
        that is more. No payload takes more than its source.
        """
        if self.known < WAITS or format != self.format:
            return None
        room = self.share + max(self.share / 8, self.share - self.least)
        return min(int(source * room) + SLACK & -512, source + 3 & -4)


class Codec(ABC):
    """Turns a tensor into a `Packed`. Subclasses are frozen dataclasses; only `encode` is abstract.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from encke.codecs import Codec, Packed
        >>> class HalfPacked(Packed):
        ...     def decode(self):
        ...         return self.buffers[0].to(self.dtype)
        >>> @dataclass(frozen=True)
        ... class Half(Codec):
        ...     def encode(self, tensor):
        ...         return HalfPacked.like(self, tensor, tensor.half())
        >>> Half().encode(torch.ones(1000)).nbytes
        2000
    """

    restores_values = True
    """Whether decoded values approximate the encoded ones. False for codecs that serve a single kind of reader, such as
    those of masks and signs."""
    zeros_only = False
    """Whether the codec keeps nothing but which values are zero."""
    signs_only = False
    """Whether the codec keeps nothing but signs."""
    keeps_zeros = False
    """Whether a mask of the zeros of non-negative data can be read from the packed form."""
    zeros_decode = False
    """Whether such zeros, and only those, also decode to zeros."""
    signs = False
    """Whether zeros and signs of signed data are exact."""
    unbiased = False
    """Whether the expected decoded value is the encoded one."""
    reads_packed = False
    """Whether fused layers and compiled graphs can read the packed form; its format is that of `GroupQuant`."""
    seed = 0
    """Seed of random rounding."""
    group = 0
    """Number of values that share a scale; 0 for codecs without such groups."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> Packed:
        """Encode a tensor of any size and strides; `decode()` of the result returns it."""

    @property
    def exact(self) -> bool:
        """Whether decoding restores every bit."""
        return False

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether this codec can encode tensors of `dtype`."""
        return dtype in FLOATS

    def covers(self, other: Codec) -> bool:
        """Return whether the values that this codec restores serve a reader that asked for `other`."""
        return self.exact or self == other

    def join(self, other: Codec) -> Codec | None:
        """Return a codec that serves readers of both if neither covers the other; None if there is none."""
        return None

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        """Return this codec or a finer one of its kind; None if there is none and the tensor is to be kept exact.

        Args:
            min_bits: the result is at least as fine as this many bits per value.
            bound: the result has an absolute error of at most this bound.
        """
        return self if self.exact else None

    def bounds(self) -> tuple[float, float]:
        """Return the largest absolute error and the largest one relative to the range; infinite if not promised."""
        return (0.0, math.inf) if self.exact else (math.inf, math.inf)

    def fixed_rate(self) -> GroupQuant | None:
        """Return the codec of fixed size that replaces this one under CUDA graphs; None to keep tensors exact there."""
        return None

    def describe(self) -> str:
        """Return the settings as a short text for reports."""
        return _settings(self)

    def to_dict(self) -> dict[str, Any]:
        """Return name and settings as plain data, for `from_dict`."""
        return {"codec": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields(self)}}  # type: ignore[arg-type]

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Codec:
        """Return the codec that `to_dict` described. Its class must have been imported."""
        settings = dict(data)
        name = settings.pop("codec", None)
        known = _codecs()
        kind = known.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"there is no codec {name!r}; known codecs: {', '.join(sorted(known))}")
        try:
            return kind(**settings)
        except TypeError as error:
            raise ValueError(f"these are not settings of {name}: {settings!r} ({error})") from None

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        """Encode the flat run of memory of a tensor with this layout.

        Args:
            flat: the run.
            layout: layout of the tensor on the run.
            key: varies random rounding between sites and steps.
            state: state of this site's encoder.
        """
        if layout.copied:
            tensor = flat.view(layout.size)
        elif layout.dense:
            tensor = layout.restore(flat)
        else:
            # Elements that share memory are encoded once.
            tensor, layout = flat, layout_of(flat.shape, flat.stride())[0]
        with torch.no_grad():
            packed = self.encode(tensor)
        source = flat.untyped_storage().data_ptr()
        if any(buffer.untyped_storage().data_ptr() == source for buffer in getattr(packed, "buffers", ())):
            # The source's own memory could still be written to, and would not be released.
            packed.buffers = tuple(buffer.clone() for buffer in packed.buffers)
        return AdaptedPacked(self, layout, flat.dtype, flat.numel(), packed)

    def encode_run(self, x: Tensor, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        """Encode a tensor, given its layout and the length of its run as `layout_of` returns them."""
        return self.encode_flat(run_of(x.detach(), layout, length), layout, key, state)

    def planned(self, x: Tensor, layout: Layout, length: int, state: EncoderState) -> GroupPlan | None:
        """Return the plan that encodes the memory of `x` in its own order; None if there is none."""
        return None

    def __repr__(self) -> str:
        return as_written(self)


def _codecs() -> dict[str, type[Codec]]:
    """Return every codec class that has been defined, by name; the latest definition counts, as in a notebook."""
    found: dict[str, type[Codec]] = {}
    stack: list[Any] = [Codec]
    while stack:
        kind = stack.pop()
        stack.extend(reversed(kind.__subclasses__()))
        if not isabstract(kind):
            found[kind.__name__] = kind
    return found


class Packed(ABC):
    """A tensor in compressed form. Subclasses implement `decode`; `nbytes` counts the bytes of `buffers`.

    Example:
        >>> import torch
        >>> from encke.codecs import GroupQuant
        >>> packed = GroupQuant(bits=4).encode(torch.ones(16, 64))
        >>> packed
        Packed(GroupQuant(bits=4), size=[16, 64], dtype=torch.float32, nbytes=544)
        >>> torch.equal(packed.decode(), torch.ones(16, 64))
        True
    """

    __slots__ = ("__weakref__", "buffers", "codec", "dtype", "layout", "numel")
    plan: GroupPlan | None = None
    """The plan that encoded it, where kernels may read it packed."""

    def __init__(
        self, codec: Codec, layout: Layout, dtype: torch.dtype, numel: int, buffers: tuple[Tensor, ...] = ()
    ) -> None:
        self.codec = codec
        self.layout = layout
        self.dtype = dtype
        self.numel = numel
        self.buffers = buffers

    @classmethod
    def like(cls, codec: Codec, tensor: Tensor, *buffers: Tensor) -> Self:
        """Return the packed form of `tensor` that consists of `buffers`."""
        return cls(codec, layout_of(tensor.shape, tensor.stride())[0], tensor.dtype, tensor.numel(), buffers)

    @abstractmethod
    def decode(self) -> Tensor:
        """Return the tensor, with the size, dtype and device that it had."""

    @property
    def nbytes(self) -> int:
        """Bytes kept: payload and metadata."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def decode_flat(self, mask: bool = False) -> Tensor:
        """Return the decoded run of memory; with `mask`, only whether each value differs from zero, as booleans."""
        tensor, layout = self.decode(), self.layout
        if layout.copied:
            flat = tensor.contiguous().view(-1)
        else:
            if tensor.stride() != layout.stride:
                there = torch.empty_strided(layout.size, layout.stride, dtype=tensor.dtype, device=tensor.device)
                tensor = there.copy_(tensor)
            flat = tensor.as_strided((self.numel,), (1,))
        return flat != 0 if mask else flat

    def gate(self, grad: Tensor, slope: float | None = None) -> Tensor | None:
        """Return `grad` where the values are not zero, and zero elsewhere; None if no kernel reads the packed values.

        Args:
            grad: Tensor of the same dtype and memory layout as the run.
            slope: Return `grad` where the values are positive, and `slope * grad` elsewhere.
        """
        return None

    def intact(self, source: Tensor) -> bool | Tensor:
        """Return, as a bool or 0-dim tensor, whether no NaN or infinity in `source` corrupts other decoded values.

        Codecs that store such values separately, or need not read the encoded tensor to know, override this method.
        """
        return source.numel() == 0 or torch.stack(torch.aminmax(source)).isfinite().all()

    def decode_in(self, layout: Layout) -> Tensor:
        """Return the decoded run laid out as a tensor, which need not be the one that was encoded."""
        return layout.restore(self.decode_flat())

    def __repr__(self) -> str:
        return f"Packed({self.codec!r}, size={list(self.layout.size)}, dtype={self.dtype}, nbytes={self.nbytes})"


class AdaptedPacked(Packed):
    """Run of memory packed by a codec that implements only `encode`."""

    __slots__ = ("packed",)

    def __init__(self, codec: Codec, layout: Layout, dtype: torch.dtype, numel: int, packed: Packed) -> None:
        super().__init__(codec, layout, dtype, numel)
        self.packed = packed

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def intact(self, source: Tensor) -> bool | Tensor:
        return self.packed.intact(source)

    def decode(self) -> Tensor:
        tensor = self.packed.decode()
        if tensor.shape != self.layout.size or tensor.dtype != self.dtype:
            raise RuntimeError(
                f"{type(self.packed).__name__}.decode() returned {tensor.dtype} {list(tensor.shape)} for a tensor of "
                f"{self.dtype} {list(self.layout.size)} that {self.codec!r} encoded; it must restore size and dtype"
            )
        return tensor


class FlatCodec(Codec):
    """A codec that works on flat runs of memory. Subclasses implement `encode_flat`."""

    def encode(self, tensor: Tensor) -> Packed:
        """Encode a tensor of any size and strides; `decode()` of the result returns it.

        Raises:
            TypeError: for anything but a dense tensor of a type that this codec takes.
        """
        name = type(self).__name__
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}.encode takes a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}.encode takes dense tensors, got layout {tensor.layout}; use x.to_dense()")
        if not self.takes(tensor.dtype):
            raise TypeError(
                f"{name}.encode cannot take {tensor.dtype}; convert it, or use codecs.Lossless() for integers"
            )
        with torch.no_grad():
            flat, layout = flatten(tensor.detach().resolve_neg())
            return self.encode_flat(flat, layout)

    @abstractmethod
    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        """Encode a flat run of memory; see `Codec.encode_flat`."""


class FlatPacked(Packed):
    """Packed form of a flat run of memory. Subclasses implement `decode_flat`."""

    __slots__ = ()

    def decode(self) -> Tensor:
        """Return the tensor, with the size, strides, dtype and device that it had."""
        return self.decode_in(self.layout)

    @abstractmethod
    def decode_flat(self, mask: bool = False) -> Tensor:
        """Return the decoded run in newly allocated memory, which the caller may overwrite.

        With `mask`, only whether each value differs from zero, as booleans.
        """


def check_version(tensor: Tensor, version: int) -> None:
    """Raise as autograd would if a tensor that was kept as it is has since been modified in place."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}. "
            "Clone the tensor before changing it, or change it after backward."
        )
