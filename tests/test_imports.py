"""Imports go down only, whole folders do not import each other in a circle, and no module is named in a string."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    ("encke.tools", "encke.torch_internals"),
    ("encke.kernels",),
    ("encke.codecs",),
    ("encke.capture.sites", "encke.capture.needs"),
    ("encke.policies.base",),
    ("encke.capture",),
    ("encke.fused", "encke.compiled", "encke.policies"),
    ("encke.api", "encke.report", "encke"),
    ("encke.integrations", "encke.train", "encke.bench", "encke.study", "encke.check", "encke.demo"),
    ("encke.cli", "encke.__main__"),
)
"""From the lowest to the highest. A module may import from its own line and from those above it in this list."""
NOT_YET = (
    ("encke.kernels.gpu.norm_forward", "encke.codecs.groupquant"),
    ("encke.kernels.gpu.norm_forward", "encke.codecs.layout"),
    ("encke.kernels.gpu.rate", "encke.codecs.base"),
)
"""Imports against the order: the module, and what it imports. Lines may only go."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted((ROOT / "encke").rglob("*.py"))}


def layer(module: str) -> int:
    """Return the number of the layer with the longest name that fits."""
    fits = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or (name != "encke" and module.startswith(f"{name}."))
    ]
    return max(fits)[1]


def imports(module: str) -> Iterator[str]:
    """Yield every module of ours that this one imports, also inside functions; not those for type checkers alone."""
    tree, excused = MODULES[module], {name for importer, name in NOT_YET if importer == module}
    skipped = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inner]
        else:
            continue
        yield from (name for name in names if name in MODULES and name not in excused)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    assert not {name for name in imports(module) if layer(name) > layer(module)}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_of_ours_is_imported_by_a_string(module: str) -> None:
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            assert "encke" not in ast.unparse(node), ast.unparse(node)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: set(imports(module)) - {module} for module in MODULES}
    while True:
        imported = set().union(*graph.values())
        ends = [module for module, needs in graph.items() if not needs & graph.keys() or module not in imported]
        if not ends:
            break
        for module in ends:
            del graph[module]
    assert not graph, f"these import each other: {sorted(graph)}"
