"""The callbacks' modules where their library is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_missing_library_is_named_with_the_way_to_install_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (library, f"{library}.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"encke.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        importlib.import_module(f"encke.integrations.{library}")


@pytest.mark.slow
def test_importing_encke_imports_no_trainer() -> None:
    code = "import sys, encke.integrations; assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
