"""Examples in the docstrings of encke.codecs run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

from encke import codecs

MODULES = [f"encke.codecs.{module.name}" for module in pkgutil.iter_modules(codecs.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", codecs.__all__)
def test_public_classes_have_an_example(name: str) -> None:
    text = getattr(codecs, name).__doc__
    assert "Example:" in text and ">>>" in text
