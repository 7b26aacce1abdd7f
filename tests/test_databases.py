"""Every entry of PyTorch's databases of operations and modules trains as it does without Encke.

At bound 0 bit for bit; under the default policy too where everything is stored exactly, and with finite numbers
wherever plain training has them. Where gradients are linear in what is stored with errors, their errors are as large
as predicted and average out; where an operation is smooth, they stay within the constant that the table states.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from encke.capture import needs
from encke.capture.scores import SCORE_ERROR
from encke.codecs import GroupQuant
from tests.databases import (
    BOUND_0,
    PLAIN_REFUSES,
    Sample,
    differences,
    linear_errors,
    modules,
    name_of,
    operations,
    run,
    samples_of,
    smooth_excess,
)

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES: dict[str, Any] = {"bound 0": BOUND_0, "default": "default"}
PARTS = 4
"""Parts of `make test`, each a test of its own."""
SHARDS = 12
"""Parts of `make soak`."""
FIRST_SAMPLES = 8
"""`make test` takes one of so many samples of each entry; `make soak` takes all, and so many to look at errors."""

LINEAR = (
    "mul", "mm", "addmm", "addcmul", "div.no_rounding_mode", "exp", "var", "std", "linalg.vector_norm",
    "nn.functional.grid_sample",
    "nn.functional.linear", "nn.functional.conv2d", "nn.Conv1d", "nn.Linear",
)  # fmt: skip
SMOOTH = (
    "nn.functional.gelu",
    "nn.functional.silu",
    "sigmoid",
    "tanh",
    "nn.functional.hardswish",
    "nn.PReLU",
    "nn.Mish",
)
CODEC = GroupQuant(bits=4)
SEEDS = 64
ENOUGH = 16
"""Independent errors from which on their mean says something."""


def one_of(entry: Any) -> Iterator[Sample]:
    """Yield one of the first samples of an entry, always the same one."""
    chosen = list(itertools.islice(samples_of(entry), random.Random(name_of(entry)).randrange(FIRST_SAMPLES) + 1))
    yield from chosen[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_of_every_entry(part: int) -> None:
    samples = itertools.chain.from_iterable(map(one_of, (operations() + modules())[part::PARTS]))
    failed = [text for sample in samples for text in differences(sample, POLICIES)]
    assert not failed, f"{len(failed)} fail:\n" + "\n".join(failed)


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_sample_of_every_entry(shard: int) -> None:
    samples = itertools.chain.from_iterable(map(samples_of, (operations() + modules())[shard::SHARDS]))
    failed = [text for sample in samples for text in differences(sample, POLICIES)]
    assert not failed, f"{len(failed)} fail:\n" + "\n".join(failed)


def check_linear(entry: Any, most: int) -> int:
    """Check the errors of the first samples of an entry that are linear, so many at most; return how many are."""
    means, squares, count, independent = 0.0, 0.0, 0, 0
    found = (linear_errors(sample, CODEC, SEEDS) for sample in itertools.islice(samples_of(entry), FIRST_SAMPLES))
    for errors in itertools.islice((each for each in found if each is not None), most):
        # Rounding errors of the two runs themselves are no more than this.
        sure = errors.variance > 1e-8
        drawn = errors.drawn[:, sure] / errors.variance[sure].sqrt()
        assert (drawn.abs() <= 6).all() and (errors.drawn[:, ~sure].abs() <= 1e-3).all(), name_of(entry)
        means += float(drawn.mean(0).square().sum())
        squares += float(drawn.square().mean(0).sum())
        independent += min(errors.values, int(sure.sum()))
        count += 1
    # The error of a mean of 64 is an eighth of a single one.
    assert independent < ENOUGH or means <= 0.25**2 * squares, name_of(entry)
    assert independent < ENOUGH or squares > 0.01 * independent, name_of(entry)
    return count


def entry_of(name: str) -> Any:
    """Return the entry of a name."""
    (entry,) = (entry for entry in operations() + modules() if name_of(entry) == name)
    return entry


@pytest.mark.parametrize("name", LINEAR)
def test_errors_of_linear_entries_are_as_predicted_and_average_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "FEWEST", 1)  # samples are small
    assert check_linear(entry_of(name), most=1) == 1


@pytest.mark.parametrize("name", SMOOTH)
def test_errors_of_smooth_entries_stay_within_their_constant(name: str) -> None:
    excess = [each for sample in samples_of(entry_of(name)) if (each := smooth_excess(sample, CODEC)) is not None]
    assert excess and max(excess) <= 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(SHARDS))
def test_errors_of_all_linear_and_smooth_entries(shard: int) -> None:
    seen = 0
    for entry in (operations() + modules())[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name_of(entry) in PLAIN_REFUSES:
                continue
            seen += check_linear(entry, most=3)
            excess = [smooth_excess(each, CODEC) for each in itertools.islice(samples_of(entry), FIRST_SAMPLES)]
        seen += sum(each is not None for each in excess)
        assert max((each for each in excess if each is not None), default=0) <= 1e-5, name_of(entry)
    assert seen


@pytest.mark.slow
def test_errors_of_fused_attention_are_those_of_its_scores() -> None:
    tried = 0
    for sample in samples_of(entry_of("nn.functional.scaled_dot_product_attention")):
        _, _, (query, _, options) = sample.build()
        if query.dim() == 4 and not options.get("dropout_p"):
            tried += 1
            for expected, found in zip(run(sample)[0], run(sample, "default")[0], strict=True):
                for a, b in zip(expected, found, strict=True):
                    assert (a - b).norm() <= 2 * SCORE_ERROR * a.norm(), sample.name
    assert tried > 4


def test_the_databases_are_there() -> None:
    assert len(operations()) > 500 and len(modules()) > 100
