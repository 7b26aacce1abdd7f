"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1][:40])
def test_block_runs(block: str):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
