"""Schedule: when Comet collects, with and without an optimizer, and after gradients that are not finite."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.policies import Comet
from encke.policies.comet.schedule import CollectionSchedule
from tests.policies.comet.trainings import (
    BATCHES,
    ROUNDINGS,
    WEIGHTS,
    hooks_left,
    last,
    net,
    sgd,
    steps_of,
    train,
    weight_rows,
)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1000, [1, 10, 20, 40, 80, 160, 320, 640, 1000, 2000, 3000]),
        (100, [1, 10, 20, 40, 80, *range(100, 3001, 100)]),
        (80, [1, 10, 20, 40, *range(80, 3001, 80)]),
        (7, [1, *range(7, 3001, 7)]),
        (10, [1, *range(10, 3001, 10)]),
        (1, [*range(1, 3001)]),
    ],
)
def test_collection_steps_double_until_every_takes_over(every: int, expected: list[int]) -> None:
    schedule = CollectionSchedule(Comet(), every, None, None)
    assert [step for step in range(1, 3001) if schedule.due(step)] == expected


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_a_training_collects_at_those_steps(given: bool) -> None:
    model = net()
    optimizer = sgd(model) if given else None
    handle = encke.attach(model, Comet(every=12), optimizer)
    train(model, optimizer, 25)
    assert steps_of(handle) == [1, 10, 12, 24]


def test_a_training_without_weights_to_follow_collects_on_schedule_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3))
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=6), optimizer)
    for _ in range(16):
        model(BATCHES[0][0]).square().mean().backward()
        optimizer.step()
    assert sorted({row["step"] for row in handle.history}) == [1, 6, 12]


def test_frozen_layers_cost_nothing_and_are_not_followed() -> None:
    model = net()
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.02, momentum=0.9)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 12)
    assert set(last(handle)) == {"0", "5", "8"} and all(row["layer"] != "3" for row in handle.history)
    assert all(row.packed_bytes == 0 for row in handle.report().sites if row.layer == "3")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_an_optimizer_averages_are_kept(rounding: str) -> None:
    model, other = net(), net()
    handle = encke.attach(model, Comet(every=5, rounding=rounding))
    train(model, None, 16, lr=0.0)
    optimizer = sgd(other, 0.0)
    expected = encke.attach(other, Comet(every=5, rounding=rounding), optimizer)
    train(other, optimizer, 16)
    assert steps_of(handle) == steps_of(expected) == [1, 5, 10, 15]
    for layer, row in last(expected).items():
        mine = last(handle)[layer]
        assert mine["tolerated"] == pytest.approx(row["tolerated"], rel=0.02)
        assert mine["bits"] == row["bits"]
        if rounding == "nearest":  # the measured gain is random
            assert mine["bound"] * mine["gain"] == pytest.approx(row["bound"] * row["gain"], rel=0.05)


def test_a_handful_of_steps_are_averaged_and_then_forgotten() -> None:
    model = net()
    handle = encke.attach(model, Comet(every=100))
    schedule = handle.policy.schedule  # type: ignore[attr-defined]
    train(model, None, 45, lr=0.0)
    assert not schedule.averages.state_dict(dict(model.named_parameters()))
    train(model, None, 20, lr=0.0)
    kept = schedule.averages.state_dict(dict(model.named_parameters()))
    assert set(kept) == {f"{layer}.weight" for layer in WEIGHTS}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_compress_follows_a_training_too(given: bool, rounding: str) -> None:
    model = net()
    optimizer = sgd(model)
    context = encke.compress(Comet(every=5, rounding=rounding), optimizer if given else None)
    for step in range(16):
        x, y = BATCHES[step % 4]
        model.zero_grad()
        with context as handle:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    rows = weight_rows(handle, 15)
    assert len(rows) == len(WEIGHTS)
    measured = [row for row in rows if row["in_force_measured"] is not None]
    assert measured
    for row in measured:
        assert row["in_force_predicted"] == pytest.approx(row["in_force_measured"], rel=0.2)
    handle.detach()
    assert hooks_left(model, optimizer) == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["everywhere", "in one layer"])
def test_bad_gradients_leave_settings_and_the_next_step_collects_again(rounding: str, bad: float, where: str) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5, rounding=rounding), optimizer)
    settings = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 24):
            x, y = BATCHES[step % 4]
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            hook = None
            if step in (10, 15, 16) and where == "in one layer":
                hook = model[0].weight.register_hook(lambda g: g * bad)
            (loss * bad if step in (10, 15, 16) and hook is None else loss).backward()
            if step in (10, 15, 16):
                # As a careful training does: the step is made without these gradients.
                for p in model.parameters():
                    p.grad.zero_()
            if hook is not None:
                hook.remove()
            optimizer.step()
            kept = handle.policy.state_dict()["settings"]
            settings.append({place: kept[place] for place in sorted(kept) if kept[place]["values"]})
    assert settings[9] == settings[8] and settings[14] == settings[15] == settings[13] != settings[16]
    assert steps_of(handle) == [1, 5, 11, 17, 20]
    words = [str(w.message) for w in caught if "not finite" in str(w.message)]
    assert len(words) == 1 and "step 10" in words[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_overflow_that_the_scaler_skips_delays_the_collection() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for forward in range(1, 9):
        x, y = BATCHES[forward % 4]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (math.inf if forward == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # The fifth forward pass had no step, so the sixth is the fifth step's.
    assert steps_of(handle) == [1, 5] and handle.policy.schedule.updates == 7  # type: ignore[attr-defined]
    assert {row["layer"] for row in weight_rows(handle)} == set(WEIGHTS)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_do_not_come_from_backward_count_as_if_they_did(to_none: bool) -> None:
    """torch.autograd.grad leaves no gradients at the end of its backward: the weights get them later."""
    histories = []
    for by_hand in (False, True):
        model = net()
        optimizer = sgd(model)
        handle = encke.attach(model, Comet(every=5), optimizer)
        for step in range(1, 11):
            x, y = BATCHES[step % 4]
            optimizer.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(model(x), y)
            if by_hand:
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.grad = gradient
            else:
                loss.backward()
            optimizer.step()
        assert steps_of(handle) == [1, 5, 10]
        histories.append(handle.history)
    assert histories[0] == histories[1]


def test_optimizers_that_step_in_backward_leave_the_momentum_to_go_by() -> None:
    """A handle that was attached first averages gradients before they are gone."""
    chosen = []
    for in_backward in (False, True):
        model = net()
        handle = encke.attach(model, Comet(every=5))
        for p in model.parameters() if in_backward else ():

            def step_now(p: nn.Parameter) -> None:
                with torch.no_grad():
                    p -= 0.02 * p.grad
                p.grad = None

            p.register_post_accumulate_grad_hook(step_now)
        for step in range(1, 12):
            x, y = BATCHES[step % 4]
            model.zero_grad()
            (1e-3 * F.cross_entropy(model(x), y)).backward()  # settings do not depend on the scale of the loss
            for p in model.parameters() if not in_backward else ():
                with torch.no_grad():
                    p -= 0.02 * p.grad
        assert steps_of(handle) == [1, 5, 10]
        chosen.append([row["bits"] for row in handle.history if row["step"] == 10])
    assert len(chosen[0]) == len(chosen[1])
    assert max(abs(a - b) for a, b in zip(*chosen, strict=True)) <= 1
    assert abs(sum(chosen[0]) - sum(chosen[1])) <= 2


class Recomputed(torch.autograd.Function):
    """Keeps only a layer's input and runs the layer again in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, layer, *weights):
        ctx.save_for_backward(x)
        ctx.layer, ctx.weights = layer, weights
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        gradients = torch.autograd.grad(y, (x, *ctx.weights), g)
        return gradients[0], None, *gradients[1:]


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_layers_that_run_again_in_backward_belong_to_the_step(given: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(norm=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, again = self.net[:3](x), self.net[3:7]
            return self.net[7:](Recomputed.apply(x, again, *again.parameters()))

    model = Model()
    optimizer = sgd(model) if given else None
    handle = encke.attach(model, Comet(every=5), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 11)
    for step in (1, 5, 10):
        assert {row["layer"] for row in weight_rows(handle, step)} == {f"net.{layer}" for layer in WEIGHTS}
    assert steps_of(handle) == [1, 5, 10]


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_several_gradients_in_one_backward_are_not_measured(how: str) -> None:
    model, x, rows = net(), BATCHES[0][0].clone().requires_grad_(), torch.eye(10)
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=1), optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x)
        F.cross_entropy(y, BATCHES[0][1]).backward(retain_graph=True)
        total = y.sum(0)
        if how == "vmap":
            torch.func.vmap(lambda row, y=total: torch.autograd.grad(y, x, row, retain_graph=True)[0])(rows)
        else:
            torch.autograd.grad(total, x, rows, is_grads_batched=True)
        optimizer.step()
    assert steps_of(handle) == [1, 2, 3]
    assert {row["layer"] for row in weight_rows(handle, 3)} == set(WEIGHTS)


def test_an_optimizer_that_never_steps_is_told_once() -> None:
    model = net()
    handle = encke.attach(model, Comet(), sgd(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, None, 45)
    assert len([w for w in caught if "did not step" in str(w.message)]) == 1
    assert handle.history == []


@pytest.mark.parametrize("given", [True, False], ids=["optimizer without momentum", "no optimizer"])
def test_averages_recover_from_one_bad_gradient(given: bool) -> None:
    model = net()
    optimizer = sgd(model, 0.0, 0.0)
    handle = encke.attach(model, Comet(every=5), optimizer if given else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 22):
            x, y = BATCHES[step % 4]
            model.zero_grad()
            (F.cross_entropy(model(x), y) * (math.inf if step == 8 else 1.0)).backward()
            optimizer.step()
            if step == 8:
                with torch.no_grad():
                    for p, good in zip(model.parameters(), net().parameters(), strict=True):
                        p.copy_(good)
    steps = steps_of(handle)
    assert steps[:2] == [1, 5] and steps[-2:] == [15, 20] and len(steps) <= 5, steps


def test_bad_activations_leave_the_norms_setting() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3))
    optimizer = sgd(model, 0.0)
    handle = encke.attach(model, Comet(every=5, rounding="nearest"), optimizer)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 12):
            model.zero_grad()
            x = BATCHES[step % 4][0].clone()
            if step == 10:
                x[0, 0, 0, 0] = math.nan
            model(x).square().mean().backward()
            if step == 10:
                for p in model.parameters():
                    p.grad.zero_()
            optimizer.step()
            found.append(handle.policy.state_dict()["settings"])
    assert found[9] == found[8] and len(found[9]) == 3
    assert steps_of(handle) == [1, 5, 11]  # the measurements of step 10 are not finite, so the next step collects


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_detach_takes_every_hook_off(given: bool) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer if given else None)
    train(model, optimizer, 6)
    # Also in the middle of a collection step.
    train(model, None, 4, first=7, lr=0.0)
    x, y = BATCHES[0]
    loss = F.cross_entropy(model(x), y)
    assert hooks_left(model, optimizer) > 0
    history = handle.history
    handle.detach()
    assert hooks_left(model, optimizer) == 0
    loss.backward()
    train(model, optimizer, 6)
    assert handle.history == history and history
