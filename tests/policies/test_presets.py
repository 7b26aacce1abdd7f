"""Presets: one name for one policy, everywhere a policy is taken."""

from __future__ import annotations

import pytest
from torch import nn

import encke
from encke.policies import PRESETS, Comet, Division, Policy, preset

EXPECTED: dict[str, Policy] = {
    "default": Comet(),
    "careful": Comet(sigma=0.05),
    "aggressive": Comet(sigma=0.2),
    "comet": Comet(sigma=0.01, rounding="nearest", formula="paper"),
    "division": Division(),
}


def test_presets_are_these() -> None:
    assert PRESETS == EXPECTED
    assert all(preset(name) == policy for name, policy in EXPECTED.items())


@pytest.mark.parametrize("name", EXPECTED)
def test_attach_and_compress_take_a_name(name: str) -> None:
    handle = encke.attach(nn.Linear(2, 2), name)
    assert handle.policy == EXPECTED[name] == encke.compress(name)._handle.policy


def test_two_attaches_of_one_preset_share_nothing() -> None:
    one, other = (encke.attach(nn.Linear(2, 2)) for _ in range(2))
    assert one.policy is not other.policy is not PRESETS["default"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("carefull", "unknown preset 'carefull', did you mean 'careful'?"), ("x", "unknown preset 'x'. Presets: default")],
)
def test_an_unknown_name_tells_the_nearest_and_all(name: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        preset(name)
    assert words in str(caught.value) and str(caught.value).endswith(", ".join(EXPECTED))
