"""Files written whole or not at all, and JSON without values that JSON cannot represent."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: no reader, and no killed process, leaves half of it."""
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text, encoding="utf-8", errors="surrogateescape")
    os.replace(draft, path)


def write_json(path: Path, data: Any) -> None:
    """Write data as one JSON file, whole or not at all; NaN and infinities become null."""
    write_whole(path, json.dumps(finite_json(data), indent=1, allow_nan=False) + "\n")


def finite_json(data: Any) -> Any:
    """Return a copy of the data for JSON: NaN and infinities as null, tuples as lists, paths and the like as text."""
    if isinstance(data, dict):
        return {str(name): finite_json(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite_json(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if isinstance(data, str | int | float | bool | None) else str(data)
