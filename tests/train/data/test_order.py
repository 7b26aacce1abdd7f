"""Order, shares and resuming: the same seed gives the same batches, however they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encke.tools.errors import UsageError
from encke.train.data.order import batch_order, batches_per_epoch
from encke.train.data.sources import Datasets, batches, load
from encke.train.settings import Data
from tests.train.data.common import AUGMENTS, folder_sets, image_folder, same, taken


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images") / "all", count=16)


def make(kind: str, places: Path, mode: str = "crop") -> Datasets:
    if kind == "folder":
        return folder_sets(places, size=16, augment=mode)
    if kind == "tokens":
        return load(Data(classes=0, samples=40), 0, context=7)
    if kind == "text":
        file = places.parent / "text.txt"
        file.write_text("to be or not to be, that is the question. " * 20)
        return load(Data(kind="text", path=str(file)), 0, context=7)
    return load(Data(samples=40, size=16, augment=mode, classes=3), 0)


@pytest.mark.parametrize("mode", AUGMENTS)
@pytest.mark.parametrize("kind", ["synthetic", "folder"])
def test_processes_share_each_batch_and_a_resumed_epoch_is_its_rest(kind, mode, places):
    sets = make(kind, places, mode)
    whole = taken(sets.train, 8, epoch=2)
    assert len(whole) == batches_per_epoch(len(sets.train), 8) >= 3
    shares = [taken(sets.train, 8, epoch=2, rank=rank, world=4) for rank in range(4)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in zip(*shares, strict=True)]
    assert same(joined, whole)
    assert same(taken(sets.train, 8, epoch=2, start=2), whole[2:])
    assert taken(sets.train, 8, epoch=2, start=len(whole)) == []
    assert not torch.equal(taken(sets.train, 8, epoch=3)[0][0], whole[0][0])
    assert not torch.equal(taken(sets.train, 8, epoch=2, seed=6)[0][0], whole[0][0])


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_tokens_are_shared_and_resumed_the_same_way(kind, places):
    sets = make(kind, places)
    whole = taken(sets.train, 8, epoch=1)
    shares = [taken(sets.train, 8, epoch=1, rank=rank, world=2, start=1) for rank in range(2)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in zip(*shares, strict=True)]
    assert same(joined, whole[1:])
    assert not torch.equal(taken(sets.train, 8, epoch=0)[0][0], whole[0][0])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_takes_every_sample_once_in_order(world):
    parts = [batch_order(23, 8, seed=0, epoch=0, train=False, rank=rank, world=world) for rank in range(world)]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(23))
    if world == 1:
        assert parts[0].index.tolist() == list(range(23)) and parts[0].sizes == (8, 8, 7)
    assert max(sum(part.sizes) for part in parts) - min(sum(part.sizes) for part in parts) <= 3


def test_validation_is_not_augmented_and_the_same_in_every_epoch():
    sets = load(Data(samples=64, augment="crop"), 0)
    assert same(taken(sets.validation, 5, train=False), taken(sets.validation, 5, train=False, epoch=3, seed=9))
    plain = load(Data(samples=64), 0)
    assert same(taken(sets.validation, 5, train=False), taken(plain.validation, 5, train=False))


def test_an_epoch_has_each_sample_once_and_drops_what_does_not_fill_a_batch():
    mine = batch_order(21, 4, seed=1, epoch=0, train=True)
    assert len(mine.index.unique()) == len(mine.index) == 20
    assert not torch.equal(mine.index, batch_order(21, 4, seed=1, epoch=1, train=True).index)


def test_batches_that_cannot_be_are_refused_at_once():
    source = load(Data(samples=10), 0).train
    with pytest.raises(UsageError, match="batch of 11 needs as many training samples, there are 10"):
        batches(source, 11, seed=0)
    with pytest.raises(UsageError, match=r"batch \(9\) must be a multiple of the number of processes \(2\)"):
        batches(source, 9, seed=0, world=2)
