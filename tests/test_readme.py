"""The pages of the project: every Python block runs as it stands, every link leads somewhere, README stays short."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tests.integrations.common import needs

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("benchmarks", "examples")]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SLOW = ("transformers", "lightning", "accelerate", "estimate", "howto", "train", "vision")
"""Pages whose code takes seconds: it imports a trainer, trains, or measures a ResNet."""
BLOCKS = [
    (name, block, shown)
    for name, page in zip(NAMES, PAGES, strict=True)
    for block, shown in re.findall(
        r"^```python\n(.*?)^```$(?:[^`]*^```text\n(.*?)^```$)?", page.read_text(), re.MULTILINE | re.DOTALL
    )
]
"""Page, code, and the output that the page shows right after it, if it does."""


def test_the_readme_has_code_and_at_most_120_lines() -> None:
    assert len([name for name, _, _ in BLOCKS if name == "README.md"]) >= 2
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    ("page", "block", "shown"),
    [
        pytest.param(
            page,
            block,
            shown,
            id=f"{page}-{block.splitlines()[-1][:40]}",
            marks=[pytest.mark.slow] if Path(page).stem in SLOW else [],
        )
        for page, block, shown in BLOCKS
    ],
)
def test_block_runs_and_prints_what_the_page_shows(
    page: str,
    block: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    needs(*re.findall(r"^from (transformers|peft|lightning|accelerate)\b", block, re.MULTILINE))
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
    if shown:
        assert doctest.OutputChecker().check_output(shown, capsys.readouterr().out, doctest.ELLIPSIS)


def anchor(heading: str) -> str:
    """Return the name under which a heading can be linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} links to {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in map(anchor, titles), f"{name} links to {link}"
