"""Optional packages, and the extra of Encke that installs each."""

from __future__ import annotations

import importlib.util

PACKAGES = {
    "numba": "cpu",
    "matplotlib": "cli",
    "safetensors": "cli",
    "mlxtend": "cli",
    "torchvision": "train",
    "yaml": "train",
    "PIL": "train",
    "lmdb": "train",
    "pysz": "bench",
    "zfpy": "bench",
}
"""The extra that installs each optional module."""


def installed(module: str) -> bool:
    """Return whether `module` can be imported, its parents included."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def install_hint(module: str) -> str:
    """Return the command that installs a module."""
    return f"pip install 'encke[{PACKAGES[module]}]'" if module in PACKAGES else f"pip install {module}"
