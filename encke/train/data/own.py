"""The user's own data sets: map-style, with samples of (input, label)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train import own_code
from encke.train.data import seeded
from encke.train.data.order import Batch, BatchOrder
from encke.train.data.seeded import Purpose
from encke.train.data.workers import Failure, Request, WorkerSource
from encke.train.settings import Data


class SampleReader:
    """Reads samples of a data set and checks them, in this process or in a worker."""

    def __init__(self, data: Any, classes: int, where: str, part: str) -> None:
        self.data, self.classes, self.where, self.part = data, classes, where, part
        self.like: tuple[Tensor, Tensor] | None = None
        """The first training sample, whose shapes and types all others must have."""

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a sample as tensors."""
        where = f"{self.where}: sample {number} of the {self.part} data"
        sample = self.data[number]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise UsageError(f"{where} must be a pair of input and label, got {kind_of(sample)}")
        values = tensor_of(sample[0])
        if values is None or not values.dim():
            raise UsageError(
                f"{where}: the input must be a tensor or an array of numbers with at least one dimension, or an image "
                f"of Pillow, got {kind_of(sample[0])}"
            )
        label = torch.tensor(sample[1]) if isinstance(sample[1], int) else tensor_of(sample[1])
        of_tokens = label is not None and not values.is_floating_point() and label.shape == values.shape
        if label is None or label.is_floating_point() or (label.dim() and not of_tokens):
            raise UsageError(
                f"{where}: the label must be a whole number, or, for a sequence of tokens, a tensor with as many, "
                f"got {kind_of(sample[1])}"
            )
        if label.min() < 0 or label.max() >= self.classes:
            raise UsageError(
                f"{where} has a label {int(label.max() if label.min() >= 0 else label.min())}, outside 0 to "
                f"{self.classes - 1}: set data.classes, or `classes` of the data set"
            )
        if values.is_floating_point() and not values.isfinite().all():
            raise UsageError(f"{where} has values that are not finite")
        if self.like is not None and (described(values), label.shape) != (described(self.like[0]), self.like[1].shape):
            raise UsageError(
                f"{where} is {described(values)} with a label of shape {tuple(label.shape)}, sample 0 of the training "
                f"data is {described(self.like[0])} with {tuple(self.like[1].shape)}: all must be alike"
            )
        return values, label.long()

    def __getitem__(self, request: Request) -> Batch | Failure:
        """Read a batch. Random numbers that the data set draws depend on seed, epoch and sample only."""
        index, seeds = request
        assert seeds is not None
        samples = []
        with generators_kept():
            for number, seed in zip(index.tolist(), seeds.tolist(), strict=True):
                seed_generators(seed)
                try:
                    samples.append(self.read(number))
                except UsageError as error:
                    return Failure(str(error))
        return torch.stack([values for values, _ in samples]), torch.stack([label for _, label in samples])


class OwnSource(WorkerSource):
    """A source of the user's own samples."""

    def __init__(self, reader: SampleReader, workers: int | None) -> None:
        super().__init__(reader, workers)
        self.samples = len(reader.data)

    def __len__(self) -> int:
        return self.samples

    def requested(self, order: BatchOrder) -> list[Request]:
        seeds = seeded.bits(order.index, order.seed, order.epoch, Purpose.AUGMENT)
        return [(i.numpy(), s.numpy()) for i, s in zip(order.split(order.index), order.split(seeds), strict=True)]


def load(data: Data, seed: int) -> tuple[OwnSource, OwnSource, int, tuple[str, ...], tuple[Tensor, Tensor]]:
    """Call the user's function; return its data sets, number and names of classes, and the first sample."""
    where = f"data.kind {data.kind}"
    if data.augment != "none" or data.size is not None:
        name = "data.augment" if data.augment != "none" else "data.size"
        raise UsageError(f"{where}: {name} does not change samples of your own; do that in the data set")
    with generators_kept():
        function = own_code.load(data.kind, where)
        seed_generators(seeded.key_of(seed, Purpose.HELD_OUT))  # data that the function splits stay split the same way
        pair = own_code.call(function, where, path=data.path, seed=seed)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"{where} must return two data sets, for training and validation, got {kind_of(pair)}")
        for part, each in zip(("training", "validation"), pair, strict=True):
            for name in ("__len__", "__getitem__"):
                if not hasattr(type(each), name):
                    raise UsageError(
                        f"{where}: the {part} data ({type(each).__name__}) have no {name}: a map-style data set is "
                        "needed, which has a length and gives samples by number"
                    )
        if not len(pair[0]):
            raise UsageError(f"{where}: the training data are empty")
        names = class_names(pair[0])
        classes = names if isinstance(names, int) else len(names) or data.classes
        if classes < 1:
            raise UsageError(f"{where}: data.classes must be at least 1, or the data set must have `classes`")
        train, validation = (
            SampleReader(each, classes, where, part)
            for part, each in zip(("training", "validation"), pair, strict=True)
        )
        first = train.read(0)
    train.like = validation.like = first
    sources = (OwnSource(reader, data.workers) for reader in (train, validation))
    return *sources, classes, () if isinstance(names, int) else names, first  # type: ignore[return-value]


def class_names(data: Any) -> tuple[str, ...] | int:
    """Return the class names, or their number, from the data set's `classes`; () if it has none."""
    while not hasattr(data, "classes") and hasattr(data, "dataset"):  # torch.utils.data.Subset
        data = data.dataset
    found = getattr(data, "classes", ())
    return found if isinstance(found, int) else tuple(map(str, found))


def tensor_of(value: Any) -> Tensor | None:
    """Return float32 or int64 numbers; None if the value holds none. Bytes of an image become 0 to 1."""
    if type(value).__module__.partition(".")[0] == "PIL":
        pixels = np.array(value if value.mode in ("L", "RGB") else value.convert("RGB"))
        value = torch.from_numpy(pixels[:, :, None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)
    if isinstance(value, np.ndarray | np.number):
        if np.asarray(value).dtype.kind not in "iuf":
            return None
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        return None
    if value.dtype == torch.uint8 and value.dim() > 1:
        return value.float() / 255
    return (value.float() if value.is_floating_point() else value.long()).detach().cpu()


def described(values: Tensor) -> str:
    """Describe type and shape."""
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"


def kind_of(value: Any) -> str:
    """Describe a value, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor, {described(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def seed_generators(seed: int) -> None:
    """Seed the CPU generators that a data set may use."""
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds those of GPUs
    np.random.seed(seed & seeded.MASK)
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the state of the CPU generators on exit."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
