"""The operators: schema, fake and implementation agree (torch.library.opcheck), and are the backends' functions."""

from __future__ import annotations

import math

import pytest
import torch

from encke.kernels import BoundedFormat, DualFormat, GroupFormat, LogFormat, backend_for, dispatched
from encke.kernels.formats import NEAREST
from encke.kernels.operators import OPERATORS

X = torch.randn(3000)
GROUP = GroupFormat(2, 256, X.dtype)
BOUNDED = BoundedFormat(0.1, math.inf, NEAREST, X.dtype)
DUAL = DualFormat(20, 25, 8, 2, True, X.dtype)
LOG = LogFormat(0.1, 0.1, 0.001, X.dtype)
FLAGS = (X > 0).to(torch.uint8)

SAMPLES = {
    "group_encode": lambda: (X, GROUP.numbers(), 7),
    "group_decode": lambda: (torch.ops.encke.group_encode(X, GROUP.numbers(), 7), GROUP.numbers(), 3000, 7),
    "group_mask": lambda: (torch.ops.encke.group_encode(X, GROUP.numbers(), 7), GROUP.numbers(), 3000),
    "bounded_encode": lambda: (X, BOUNDED.numbers(), 0),
    "bounded_decode": lambda: (
        *torch.ops.encke.bounded_encode(X, BOUNDED.numbers(), 0),
        BOUNDED.numbers(),
        3000,
        False,
    ),
    "dual_encode": lambda: (X, DUAL.numbers(), 7),
    "dual_decode": lambda: (torch.ops.encke.dual_encode(X, DUAL.numbers(), 7), DUAL.numbers(), 3000, False),
    "log_encode": lambda: (-X.abs(), LOG.numbers(), 7),
    "log_decode": lambda: (torch.ops.encke.log_encode(-X.abs(), LOG.numbers(), 7), LOG.numbers(), 7),
    "bits_encode": lambda: (FLAGS, 1),
    "bits_decode": lambda: (torch.ops.encke.bits_encode(FLAGS, 1), 1, 3000),
}


def test_every_operator_has_a_sample() -> None:
    assert set(OPERATORS) <= set(SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_operator(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.encke, name).default, SAMPLES[name]())


def test_operators_do_what_the_backend_does() -> None:
    backend, x = backend_for("cpu"), X.clone()
    plans = [each.group_plan(GROUP, 3000, x.device) for each in (backend, dispatched)]
    data, traced = (plan.encode(x, 7) for plan in plans)
    assert torch.equal(data, traced)
    assert torch.equal(*(plan.decode(data, 7) for plan in plans))
    assert torch.equal(*(plan.mask(data) for plan in plans))
    assert torch.equal(*(plan.gate(data, x) for plan in plans))
    assert torch.equal(*(plan.decode_strided(data, 7, (30, 100), (1, 30)) for plan in plans))
    for ours, theirs in zip(*(each.bounded_encode(x, BOUNDED, 3) for each in (backend, dispatched)), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(*(each.dual_encode(x, DUAL, 3) for each in (backend, dispatched)))
    assert torch.equal(*(each.log_encode(-x.abs(), LOG, 3) for each in (backend, dispatched)))
