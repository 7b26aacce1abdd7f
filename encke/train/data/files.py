"""Images that are read when they are needed, from a folder or an LMDB, by worker processes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from encke.train.data import records
from encke.train.data.augment import DRAWS, View
from encke.train.data.order import Batch, BatchOrder
from encke.train.data.pictures import complaint, shown
from encke.train.data.readers import Reader
from encke.train.data.workers import Failure, Request, WorkerSource


class ImageReader:
    """Reads and decodes a batch in a worker process."""

    def __init__(self, reader: Reader, view: View, scale: bool) -> None:
        self.reader, self.view, self.scale = reader, view, scale

    def __getitem__(self, request: Request) -> Batch | Failure:
        index, draws = request
        pixels = np.empty((len(index), *self.view.size, 3), dtype=np.uint8)
        for place, number in enumerate(index.tolist()):
            try:
                with Image.open(io.BytesIO(self.reader.read(number))) as image:
                    row = None if draws is None else draws[place].tolist()
                    pixels[place] = shown(image, self.view.augment, self.view.size, self.scale, row)
            except Exception as error:
                return Failure(complaint(self.reader.name(number), error))
        return torch.from_numpy(pixels), torch.from_numpy(self.reader.labels[index])


class FileSource(WorkerSource):
    """A source of images in files."""

    def __init__(self, reader: Reader, subset: np.ndarray | None, view: View, scale: bool, workers: int | None) -> None:
        super().__init__(ImageReader(reader, view, scale), workers)
        self.reader, self.subset, self.view = reader, subset, view

    def __len__(self) -> int:
        return len(self.reader.labels) if self.subset is None else len(self.subset)

    def start(self, device: torch.device) -> DataLoader[Any]:
        records.close()
        return super().start(device)

    def requested(self, order: BatchOrder) -> list[Request]:
        samples = order.index.numpy() if self.subset is None else self.subset[order.index.numpy()]
        index = order.split(torch.from_numpy(samples))
        if not order.train or self.view.augment == "none":
            return [(each.numpy(), None) for each in index]
        draws = order.split(order.draws(DRAWS, torch.device("cpu")))
        return [(each.numpy(), some.numpy()) for each, some in zip(index, draws, strict=True)]

    def finish(self, inputs: Tensor) -> Tensor:
        return self.view.normalise(inputs.permute(0, 3, 1, 2).contiguous())
