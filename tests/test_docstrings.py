"""Examples in the docstrings of the public interface run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import encke.api
import encke.policies
from encke.policies import presets
from encke.policies.comet import policy as comet

MODULES = [
    "encke.api",
    *(f"encke.policies.{module.name}" for module in pkgutil.iter_modules(encke.policies.__path__)),
    "encke.policies.comet.policy",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "documented",
    [
        encke.attach,
        encke.compress,
        encke.Handle,
        encke.Handle.report,
        encke.Handle.log,
        encke.Handle.state_dict,
        comet.Comet,
        encke.policies.Division,
        encke.policies.Fixed,
        presets.preset,
    ],
    ids=lambda documented: documented.__qualname__,
)
def test_public_docstrings_have_an_example(documented: object) -> None:
    assert "Example:" in (documented.__doc__ or "") and ">>>" in (documented.__doc__ or "")
