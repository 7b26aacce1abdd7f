"""Every Python block of the README and of the pages in docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]


def test_the_readme_has_code():
    assert len([name for name, _ in BLOCKS if name == "README.md"]) >= 2


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page}-{block.splitlines()[-1][:40]}" for page, block in BLOCKS]
)
def test_block_runs(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
