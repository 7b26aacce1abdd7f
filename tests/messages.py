"""Errors and warnings of Encke, collected from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ("train", "bench", "study", "demo.py", "cli.py")
"""Parts that show errors on the command line, as `UsageError`; what else they raise is caught and made one."""
SHOWN = ("UsageError", "ImportError", "argparse.ArgumentTypeError")
RAISED = (*SHOWN, "TypeError", "ValueError", "RuntimeError", "NotImplementedError", "FileNotFoundError")
WARNED = ("warnings.warn", "warn_once")
GAP = "..."


@dataclass(frozen=True)
class Message:
    """One message in the source, with `...` for its variable parts."""

    place: str
    text: str

    @property
    def letters(self) -> int:
        """The length of the longest part that does not vary."""
        return max(len(part.strip(" :;,.()")) for part in self.text.split(GAP))


def texts(node: ast.expr | None, known: dict[str, list[ast.expr]]) -> list[str]:
    """Return the texts that an expression may be, by constants and functions that are known; empty if none is seen."""
    match node:
        case ast.Constant(value=str(value)):
            return [" ".join(value.split())]
        case ast.JoinedStr(values=values):
            parts = [str(each.value) if isinstance(each, ast.Constant) else GAP for each in values]
            return [re.sub(r"\.{4,}", GAP, " ".join("".join(parts).split()))]
        case ast.BinOp(left=left, right=right):
            return [a + b for a in texts(left, known) or [GAP] for b in texts(right, known) or [GAP]]
        case ast.IfExp(body=body, orelse=other):
            return texts(body, known) + texts(other, known)
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) if name in known:
            return [text for each in known[name] for text in texts(each, known)]
    return []


def messages() -> Iterator[Message]:
    """Yield every message that a user may see.

    Left out by rule: what kernels raise without the prefix `encke:`, and what says of itself that it is a bug; errors
    of programs that are no `UsageError`; and texts that are made elsewhere, with no more than a few letters added.
    """
    files = sorted((ROOT / "encke").rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    known: dict[str, list[ast.expr]] = {}
    for node in [node for tree in trees.values() for node in tree.body]:
        if isinstance(node, ast.Assign):
            known[ast.unparse(node.targets[0])] = [node.value]
        elif isinstance(node, ast.FunctionDef):
            known[node.name] = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
    for file, tree in trees.items():
        part = file.relative_to(ROOT / "encke").parts[0]
        names = WARNED + (SHOWN if part in PROGRAMS else RAISED)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names and node.args:
                for text in texts(node.args[0], known):
                    internal = "this is a bug" in text or (part == "kernels" and not text.startswith("encke:"))
                    message = Message(f"{file.relative_to(ROOT)}:{node.lineno}", text)
                    if not internal and message.letters >= 5:
                        yield message
