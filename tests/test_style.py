"""Rules of CONTRIBUTING.md that ruff cannot check: first words of docstrings, documented public names."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import encke

ROOT = Path(__file__).parents[1]
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "encke").rglob("*.py"))}
RIDDLES = ("What ", "The same", "Of ", "How ", "Whose ")
"""First words that say nothing about the thing that is documented."""
PUBLIC = [
    importlib.import_module(name)
    for name in ("encke", "encke.codecs", "encke.policies", "encke.integrations")
    if (ROOT / name.replace(".", "/")).is_dir()
]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [(file, line, text) for file, source in FILES.items() for line, text in docstrings(source)]
    assert len(found) > 1000
    assert not [f"{file}:{line}: {text.splitlines()[0]}" for file, line, text in found if text.startswith(RIDDLES)]


NAMES = {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC for name in module.__all__}


@pytest.mark.parametrize("name", NAMES)
def test_public_names_and_their_methods_are_documented(name: str) -> None:
    thing = NAMES[name]
    if isinstance(thing, ModuleType | type) or callable(thing):
        assert inspect.getdoc(thing), name
    if not isinstance(thing, type):
        return
    for member in [each for each in vars(thing) if not each.startswith("_")]:
        value = inspect.getattr_static(thing, member)
        if isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value):
            assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def examples() -> list[str]:
    return [file for file, text in FILES.items() if re.search(r"^\s*>>> ", text, re.MULTILINE)]


# The estimate trains a small ResNet.
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.slow] * file.endswith("estimation.py")) for file in examples()]
)
def test_examples_in_docstrings_hold(file: str) -> None:
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


SHOWN = [thing for thing in NAMES.values() if inspect.isfunction(thing)] + [
    encke.Handle,
    encke.Handle.report,
    encke.Handle.log,
    encke.Handle.state_dict,
    encke.policies.Comet,
    encke.policies.Division,
    encke.policies.Fixed,
]


@pytest.mark.parametrize("thing", SHOWN, ids=lambda thing: thing.__qualname__)
def test_public_functions_have_an_example(thing: object) -> None:
    assert "Example:" in (inspect.getdoc(thing) or "") and ">>> " in (inspect.getdoc(thing) or "")


def test_the_version_is_in_the_changelog() -> None:
    assert f"\n## {encke.__version__}" in (ROOT / "CHANGELOG.md").read_text()
