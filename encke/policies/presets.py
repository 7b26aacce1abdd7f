"""Presets: policies by name, the one vocabulary for attach, train, bench, study, benchmarks and reports."""

from __future__ import annotations

import difflib
from typing import Any

from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies.base import Policy
from encke.policies.comet.policy import Comet
from encke.policies.division import Division
from encke.policies.fixed import Fixed

PRESETS: dict[str, Policy] = {
    "default": Comet(),
    "careful": Comet(sigma=0.05),
    "aggressive": Comet(sigma=0.2),
    "comet": Comet(sigma=0.01, rounding="nearest", formula="paper"),
    "division": Division(),
}
"""Policies by preset name. `comet` is COMET as published, `division` is DIVISION."""
FIXED: dict[str, Policy] = {
    "group2": Fixed(GroupQuant(2)),
    "group4": Fixed(GroupQuant(4)),
    "group8": Fixed(GroupQuant(8)),
    "bounded": Fixed(ErrorBounded(0.01, "rel")),
}
"""One codec for everything, under the names that train, bench and reports use. For comparisons, not for `attach`."""


def preset(name: str) -> Policy:
    """Return the policy with this name.

    Args:
        name: "default", "careful", "aggressive", "comet" or "division".

    Returns:
        The policy, not yet bound to a training; `attach` takes the name itself as well.

    Raises:
        ValueError: There is no preset of this name.

    Example:
        >>> preset("careful")
        Comet(sigma=0.05)
        >>> sorted(PRESETS)
        ['aggressive', 'careful', 'comet', 'default', 'division']
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, 1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown preset {name!r}{hint} Presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def as_policy(policy: Any) -> Policy:
    """Return the policy itself, or the preset with this name.

    Raises:
        TypeError: It is neither a policy nor a name.
        ValueError: There is no preset of this name.
    """
    if isinstance(policy, str):
        return preset(policy)
    if not isinstance(policy, Policy):
        hint = ""
        if isinstance(policy, type) and issubclass(policy, Policy):
            hint = f": a class, not an object of it; write policy={policy.__name__}(...)"
        elif isinstance(policy, Codec):
            hint = f": a codec; to use it everywhere write policy=encke.policies.Fixed({policy!r})"
        raise TypeError(
            "policy must be a name such as 'default', or one of encke.policies such as encke.policies.Comet(), "
            f"got {policy!r}{hint}"
        )
    return policy
