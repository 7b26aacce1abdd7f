"""Overrides: another policy, another codec, or none, for the layers that a pattern names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import encke
from encke.codecs import DualPrecision, ErrorBounded, GroupQuant
from encke.policies import Comet, Fixed
from encke.policies.overrides import matches, resolve

LAYERS = ["", "stem", "layer1", "layer1.0", "layer1.0.conv", "layer10", "head", "head.fc"]


def net() -> nn.Sequential:
    """Return convolutions only: each saves its own input, and no two layers share a saved tensor."""
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), block, nn.Conv2d(16, 8, 3))


def step(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    model(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def settings(handle: encke.Handle) -> dict[str, str]:
    """Return codec and bound of every site, by layer."""
    return {row.layer: f"{row.codec} {row.bound}".strip() for row in handle.report().sites}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", LAYERS),
        ("*", LAYERS),
        ("stem", ["stem"]),
        ("layer1", ["layer1", "layer1.0", "layer1.0.conv"]),
        ("layer1.*", ["layer1.0", "layer1.0.conv"]),
        ("layer?", ["layer1", "layer1.0", "layer1.0.conv"]),
        ("*.conv", ["layer1.0.conv"]),
        ("[hs]*", ["stem", "head", "head.fc"]),
        ("HEAD", []),
    ],
)
def test_a_pattern_stands_for_the_layers_it_matches_and_all_below(pattern: str, expected: list[str]) -> None:
    assert [layer for layer in LAYERS if matches(layer, pattern)] == expected


def test_the_last_match_wins() -> None:
    two, four = GroupQuant(bits=2), GroupQuant(bits=4)
    found = resolve({"*": None, "head": two, "head.fc": four, "layer1": "careful", "layer1.0": None}, LAYERS)
    assert found == {
        **dict.fromkeys(LAYERS, None),
        "head": Fixed(two),
        "head.fc": Fixed(four),
        "layer1": Comet(sigma=0.05),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", [Fixed(GroupQuant(bits=2)), "default"], ids=["fixed", "adaptive"])
def test_none_a_codec_a_policy_and_a_name(policy: Any, compiled: bool) -> None:
    model = net()
    called = torch.compile(model, backend="aot_eager") if compiled else model
    overrides = {"2": GroupQuant(bits=8), "2.1": None, "3": Fixed(GroupQuant(bits=4))}
    handle = encke.attach(called, policy, overrides=overrides)
    for seed in range(3):
        step(called, seed)
    found = settings(handle)
    assert found["2.0"] == found["2.2"] == "GroupQuant 8 bits" and found["3"] == "GroupQuant 4 bits"
    assert found["1"] == "GroupQuant 2 bits" and found.get("2.1", "kept") == "kept"
    handle.detach()


def test_a_preset_for_some_layers_is_that_policy_there() -> None:
    model = net()
    handle = encke.attach(model, Fixed(GroupQuant(bits=8)), overrides={"2": "division"})
    step(model)
    found = settings(handle)
    assert found["2.0"].startswith(DualPrecision.__name__) and found["0"] == "GroupQuant 8 bits"


def test_all_layers_but_one_gives_plain_gradients_behind_it() -> None:
    model, plain = net(), net()
    handle = encke.attach(model, Fixed(ErrorBounded(0.1)), overrides={"*": None, "2.2": Fixed(ErrorBounded(0.1))})
    for _ in range(2):
        step(model)
        step(plain)
    assert {layer for layer, codec in settings(handle).items() if codec.startswith("ErrorBounded")} == {"2.2"}
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad) == (name != "2.2.weight"), name


def test_two_adaptive_policies_measure_their_own_layers_by_their_own_schedules() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    handle = encke.attach(model, Comet(1e3, every=4), optimizer, overrides={"2": Comet(1e-5, every=5)})
    for seed in range(12):
        step(model, seed)
        optimizer.step()
    by_step: dict[int, set[tuple[str, int]]] = {}
    for row in handle.history:
        if "predicted" in row:
            by_step.setdefault(row["step"], set()).add((row["layer"], row["bits"]))
    coarse, fine = {("0", 2), ("1", 2), ("3", 2)}, {("2.0", 8), ("2.1", 8), ("2.2", 8)}
    assert by_step == {1: coarse | fine, 4: coarse, 8: coarse, 12: coarse, 5: fine, 10: fine}
    assert [row["step"] for row in handle.history] == sorted(row["step"] for row in handle.history)
    handle.detach()
    assert not optimizer._optimizer_step_post_hooks


def test_collect_now_collects_for_all() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    handle = encke.attach(model, Comet(), optimizer, overrides={"2": "careful"})
    for seed in range(3):
        if seed == 2:
            assert handle.collect_now()
        step(model, seed)
        optimizer.step()
    assert {row["layer"] for row in handle.history if row["step"] == 3} >= {"0", "2.0", "2.2", "3"}


def test_a_state_holds_all_policies_and_fits_only_the_same_overrides() -> None:
    def attached(overrides: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, encke.Handle]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        return model, optimizer, encke.attach(model, Comet(every=2), optimizer, overrides=overrides)

    model, optimizer, handle = attached({"2": Comet(0.1, every=2)})
    for seed in range(4):
        step(model, seed)
        optimizer.step()
    state = handle.state_dict()
    _, _, other = attached({"2": Comet(0.1, every=2)})
    other.load_state_dict(state)
    assert other.history == handle.history and other.state_dict() == state
    _, _, plain = attached({})
    _, _, nearest = attached({"2": Comet(rounding="nearest")})
    for wrong in (plain, nearest):
        before = wrong.state_dict()
        with pytest.raises(ValueError):
            wrong.load_state_dict(state)
        assert wrong.state_dict() == before
    with pytest.raises(ValueError, match="other overrides"):
        other.load_state_dict(plain.state_dict())


def test_the_policy_prints_with_its_overrides() -> None:
    handle = encke.attach(net(), overrides={"2": GroupQuant(bits=8), "3": "careful"})
    words = "Comet() with Fixed(codec=GroupQuant(bits=8)) for 2 and 3 more, Comet(sigma=0.05) for 3"
    assert repr(handle.policy) == words == handle.report().policy


def test_wrappers_do_not_count() -> None:
    model = nn.DataParallel(net())
    handle = encke.attach(model, overrides={"2.0": None})
    step(model)
    assert settings(handle).get("2.0", "kept") == "kept"


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        ({"layer9": None}, ValueError, "no layer matches 'layer9'; layers near to it: "),
        ({"2.9": None}, ValueError, "no layer matches '2.9'; layers near to it: 2.*"),
        ({0: None}, TypeError, "patterns of layer names.*got 0"),
        ({"0": 3}, TypeError, r"overrides\['0'\] must be None, a codec, a policy or a preset's name, got 3"),
        ({"0": Comet}, TypeError, r"overrides\['0'\] must be"),
        ({"0": "carefull"}, ValueError, "did you mean 'careful'"),
        (["0"], TypeError, "overrides must be a dictionary"),
        (lambda name: None, TypeError, "overrides must be a dictionary"),
    ],
)
def test_wrong_overrides_are_named(overrides: Any, kind: type[Exception], words: str) -> None:
    model = net()
    with pytest.raises(kind, match=words):
        encke.attach(model, overrides=overrides)
    encke.attach(model)
