"""Every entry of PyTorch's databases of operations and modules trains as it does without Encke.

At bound 0 bit for bit; under the default policy too where everything is stored exactly, and with finite numbers
wherever plain training has them.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import encke
from encke.codecs import GroupQuant
from encke.policies import Fixed
from tests.databases import BOUND_0, difference, modules, name_of, operations, samples_of

POLICIES: dict[str, Any] = {"bound 0": BOUND_0, "default": "default"}
SHARDS = 12
FIRST_SAMPLES = 8
"""`make test` takes one of so many samples of each entry; `make soak` takes all."""

LINEAR = ("nn.Linear", "nn.Conv1d", "nn.Conv2d", "nn.Conv3d", "nn.ConvTranspose1d", "nn.ConvTranspose2d")
LINEAR_CODEC = GroupQuant(bits=4)
LINEAR_SAMPLES = 3
SEEDS = 64

NAN_SPREADS = "a NaN makes its whole quantisation group NaN, also where plain training has numbers"

# Entries that fail in at least one sample, by policy. One that passes in all of them must be taken out of the list.
KNOWN: dict[str, dict[str, str]] = {
    "default": {"masked.softmax": NAN_SPREADS, "masked.softmin": NAN_SPREADS, "nn.KLDivLoss": NAN_SPREADS},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over threads may come in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(policy: str, entries: list[Any], every_sample: bool) -> None:
    """Name the entries that fail and are not known to, and those that are known to fail and pass."""
    failed: dict[str, str] = {}
    known = {name_of(entry) for entry in entries} & set(KNOWN.get(policy, ()))
    for entry in entries:
        name = name_of(entry)
        samples = samples_of(entry)
        if not every_sample and name not in known:
            samples = iter(random.Random(name).choices(list(itertools.islice(samples, FIRST_SAMPLES)) or [None]))
        for sample in samples:
            text = sample and difference(sample, POLICIES[policy])
            if text:
                failed[name] = f"{sample.name}: {text}"
                break
    new = {name: text for name, text in failed.items() if name not in known}
    assert not new, f"{len(new)} entries fail under {policy}:\n" + "\n".join(new.values())
    assert set(failed) == known, f"these are known to fail, and pass: {sorted(known - set(failed))}"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_of_every_entry(policy: str) -> None:
    check(policy, operations() + modules(), every_sample=False)


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_of_every_entry(policy: str, shard: int) -> None:
    check(policy, (operations() + modules())[shard::SHARDS], every_sample=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_errors_of_linear_entries_are_as_predicted_and_average_out(name: str) -> None:
    (entry,) = (entry for entry in modules() if name_of(entry) == name)
    for sample in itertools.islice(samples_of(entry), LINEAR_SAMPLES):
        module, call, (args, kwargs) = sample.build()
        (x,) = (t.detach() for t in (*args, *kwargs.values()))
        output = call(x)
        generator = torch.Generator().manual_seed(3)
        given = torch.randn(output.shape, generator=generator)
        (plain,) = torch.autograd.grad(output, module.weight, given)
        # The weight's gradient is a sum of products of inputs and output gradients: so are variances, of squares.
        step = (x.max() - x.min()) / (2**LINEAR_CODEC.bits - 1)
        variances = call(torch.full_like(x, float(step) ** 2 / 12))
        (predicted,) = torch.autograd.grad(variances, module.weight, given.square())
        errors = []
        with encke.attach(module, Fixed(LINEAR_CODEC), min_bytes=1) as handle:
            for _ in range(SEEDS + 1):
                # An activation: a leaf would count as a weight.
                output = call(x + torch.zeros((), requires_grad=True))
                errors.append(torch.autograd.grad(output, module.weight, given)[0] - plain)
        assert [row.codec for row in handle.report().sites].count("GroupQuant") == 1, sample.name
        drawn = torch.stack(errors[1:])
        assert (drawn.abs() <= 6 * predicted.sqrt() + 1e-5).all(), sample.name
        assert drawn.square().mean() > 0.01 * predicted.mean(), sample.name
        assert drawn.mean(0).norm() <= 0.25 * drawn[0].norm(), sample.name


def test_the_databases_are_there() -> None:
    assert len(operations()) > 500 and len(modules()) > 100
