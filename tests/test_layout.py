"""Layout: imports go one way, files and classes stay small."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1] / "encke"
MAX_LINES = 500
MAX_METHODS = 15

# Lowest first: a module may import from its own level and from those before. The longest matching prefix counts.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("encke.tools", "encke.torch_internals"),
    ("encke.kernels",),
    ("encke.codecs",),
    ("encke.capture.sites", "encke.capture.needs", "encke.capture.thresholds"),
    ("encke.policies.base",),
    ("encke.capture",),
    ("encke.fused", "encke.compiled", "encke.policies"),
    ("encke.api", "encke.report", "encke.estimation", "encke"),
    ("encke.integrations", "encke.train", "encke.bench", "encke.study", "encke.check", "encke.demo"),
    ("encke.cli", "encke.__main__"),
)
LEVEL = {prefix: level for level, prefixes in enumerate(LEVELS) for prefix in prefixes}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def level_of(module: str) -> int:
    while module not in LEVEL:
        module = module.rpartition(".")[0]
    return LEVEL[module]


@functools.cache
def imports_of(name: str, typing: bool = True) -> set[str]:
    """Return the modules of ours that a module imports anywhere, also lazily and, with `typing`, for type checkers."""
    modules: set[str] = set()
    checks = [n for n in ast.walk(tree_of(name)) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = set() if typing else {inner for check in checks for inner in ast.walk(check)}
    for node in ast.walk(tree_of(name)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import in line {node.lineno}: write the module's full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                modules.add(inner if inner in FILES else str(node.module))
    return {module for module in modules if module in FILES and module != name}


def folder_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_imports_follow_the_order() -> None:
    wrong = {f"{a} -> {b}" for a in FILES for b in imports_of(a) if level_of(b) > level_of(a)}
    assert not wrong


def test_folders_have_no_cycles() -> None:
    # capture.sites, capture.needs and policies.base are levels of their own: policies and capture share two folders.
    leaves = {prefix for level in (3, 4) for prefix in LEVELS[level]}
    edges: dict[str, set[str]] = {}
    for a in FILES:
        for b in imports_of(a):
            ends = [end if end in leaves else folder_of(end) for end in (a, b)]
            if ends[0] != ends[1] and "encke" not in ends:
                edges.setdefault(ends[0], set()).add(ends[1])
    state: dict[str, int] = {}

    def visit(folder: str, path: tuple[str, ...]) -> None:
        assert folder not in path, f"a cycle between folders: {' -> '.join((*path, folder))}"
        if state.setdefault(folder, 0):
            return
        for next_folder in sorted(edges.get(folder, ())):
            visit(next_folder, (*path, folder))
        state[folder] = 1

    for folder in edges:
        visit(folder, ())


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: imports_of(name, typing=False) for name in FILES}
    while ends := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in ends:
            del graph[name]
    assert not graph, f"these import each other, or import modules that do: {sorted(graph)}"


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    wrong = []
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            if called in ("import_module", "__import__") and any(text.startswith("encke") for text in texts):
                wrong.append(f"{name}:{node.lineno}")
    assert not wrong


def test_files_and_classes_are_small() -> None:
    large = {name for name, path in FILES.items() if len(path.read_text().splitlines()) > MAX_LINES}
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                if methods > MAX_METHODS:
                    large.add(f"{name}.{node.name}")
    assert not large
