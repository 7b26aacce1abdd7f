"""The user's own code by its Python path: `package.module:function`, or `folder/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from encke.tools.errors import UsageError
from encke.tools.suggest import suggestion

FORM = "write package.module:function or folder/file.py:function"


def load(value: str, where: str) -> Callable[..., Any]:
    """Import a module, which runs its code, and return its function or class.

    Args:
        value: The Python path.
        where: The setting and its value, with which errors begin.

    Raises:
        UsageError: The module or function does not exist. Errors of the module's own code are raised unchanged.
    """
    place, _, name = value.rpartition(":")
    if not place or not name:
        raise UsageError(f"{where}: {'no function' if place else 'no module'} is named; {FORM}")
    module = from_file(Path(place), where) if place.endswith(".py") else from_name(place, where)
    if not hasattr(module, name):
        hint = suggestion(name, [each for each, found in vars(module).items() if callable(found)])
        raise UsageError(f"{where}: {place} has no {name!r}{f'; {hint}' if hint else ''}")
    found = getattr(module, name)
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(f"{where}: {name} is of type {type(found).__name__}; it must be a function or a class")
    return found


def from_name(name: str, where: str) -> ModuleType:
    """Import a module by its name. The working directory is searched after all installed packages."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{where}: {name!r} is not the name of a module; {FORM}")
    search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{where}: there is no module {error.name!r} in the working directory or among the installed packages; "
                "a file is named by its path, folder/file.py:function"
            ) from None
        raise  # the module is there, and one that it imports is not


def from_file(path: Path, where: str) -> ModuleType:
    """Import a file, once. It may import its neighbours, as a program may."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{where}: there is no file {path}")
    # An identifier, which torch.compile requires, and unique among files with the same name in different folders.
    name = f"own_{re.sub(r'[^a-zA-Z0-9]', '_', path.stem)}_{zlib.crc32(os.fsencode(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    search(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def search(folder: Path) -> None:
    """Let modules be imported from a folder, if no folder searched before has them."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def call(function: Callable[..., Any], where: str, **offered: Any) -> Any:
    """Call a function with those of the offered arguments for which it has parameters."""
    parameters = inspect.signature(function).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name, parameter in named.items():
        if name not in offered and parameter.default is parameter.empty:
            raise UsageError(
                f"{where}: it needs an argument {name!r}, and gets {' or '.join(offered)} at most: give it a default"
            )
    return function(**{name: value for name, value in offered.items() if name in named})
