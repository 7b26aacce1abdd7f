"""Random programs train as they do without Encke: bit for bit at bound 0, and without NaN under the default."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from tests.programs import STEPS, Model, Program

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND_0 = Fixed(ErrorBounded(0))
POLICIES = {"bound 0": BOUND_0, "default": "default"}
RETRIES = 12
"""Steps that are run again after the documented error, at most: each time one more place is examined anew."""

# Seeds of programs that fail, with the reason. A program listed here that passes is a failure too.
KNOWN: dict[tuple[str, int], str] = {}

Step = list[Tensor | None]
"""Loss and gradients."""


def train(program: Program, policy=None) -> list[Step]:
    """Return loss and gradients of every step. A plain program ends before a step that PyTorch refuses."""
    torch.manual_seed(program.seed)
    model = Model()
    handle = None if policy is None else encke.attach(model, policy, min_bytes=1)
    steps: list[Step] = []
    for number in range(STEPS):
        model.body = program.body(number)
        for attempt in range(RETRIES):
            torch.manual_seed(number)
            model.zero_grad()
            try:
                loss = model(*program.inputs(number))
                loss.backward()
            except RuntimeError as error:
                if policy is not None and "Run this step again" in str(error) and attempt < RETRIES - 1:
                    continue
                if policy is None or "encke" not in str(error):
                    # Such as a saved tensor that was changed in place. Encke may have packed it before.
                    return steps
                raise
            steps.append([loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad.nan_to_num().clamp(-1, 1)
            break
    if handle is not None:
        handle.detach()
    return steps


def difference(program: Program, policy) -> str | None:
    """Return in what the attached program differs from the plain one as it must not; None if in nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = train(program)
        try:
            attached = train(program, policy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if len(attached) < len(plain):
        return f"step {len(attached) + 1}: refused, though plain training does it"
    exact = policy is BOUND_0
    for number, (expected, step) in enumerate(zip(plain, attached, strict=False), 1):
        for i, (a, b) in enumerate(zip(expected, step, strict=True)):
            if a is None or b is None:
                if a is not b:
                    return f"step {number}, result {i}: one has a gradient, the other none"
            elif exact and not torch.equal(a.nan_to_num(7), b.nan_to_num(7)):
                return f"step {number}, result {i}: differs by {(a - b).abs().max():g} of {a.abs().max():g}"
            elif not (b.isfinite() | ~a.isfinite()).all():
                return f"step {number}, result {i}: not finite"
    return None


def check(policy: str, seeds: range) -> None:
    """Run programs; name those that fail though they should not, and those that pass though they should not."""
    failed = {seed: text for seed in seeds if (text := difference(Program(seed), POLICIES[policy]))}
    known = {seed for name, seed in KNOWN if name == policy and seed in seeds}
    new = [f"{text}\n{Program(seed)}" for seed, text in failed.items() if seed not in known]
    assert not new, f"{len(new)} programs fail under {policy}: " + "\n\n".join(new[:5])
    assert set(failed) == known, f"these are known to fail, and pass: {sorted(known - set(failed))}"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_programs(policy: str) -> None:
    check(policy, range(80))


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, *range(1000, 6000, 250)])
@pytest.mark.parametrize("policy", POLICIES)
def test_many_programs(policy: str, first: int) -> None:
    check(policy, range(first, first + 250))


def test_a_seed_is_a_program() -> None:
    assert str(Program(3)) == str(Program(3)) != str(Program(4))
    assert any(len(set(Program(seed).sources)) > 1 for seed in range(10))
