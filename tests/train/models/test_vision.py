"""Importing torchvision beside a torch that it does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from encke.train.models import vision


@pytest.mark.slow
def test_torchvision_imports_in_a_fresh_process_and_twice():
    load = "from encke.train.models.vision import torchvision_models as t; "
    code = load + "assert t() is t(); t().resnet18; import torchvision"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_torchvision_is_named_with_the_way_to_install_it(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr(vision.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'encke\[train\]'"):
        vision.torchvision_models()


def test_another_error_of_torchvision_is_not_hidden(monkeypatch):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::other does not exist")

    monkeypatch.setattr(vision.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="other"):
        vision.torchvision_models()
