"""Every figure in README and docs comes from a file in benchmarks/results, and says its setting.

Figures stand between a marker and `<!-- end -->`:

    <!-- table: NAME; SETTING -->           the table is exactly what benchmarks/tables.py renders under this name
    <!-- figures: FILE, FILE; SETTING -->   figures of sentences and other tables, which are found in these files
    <!-- lab: FILE; SETTING -->             the same for old measurements, in docs/lab.md alone; also `no file`

SETTING is today's default (`TODAY`), or words that the reader sees inside the marker, such as another policy, version
or date. A table of numbers that were not measured follows `<!-- no figures: WHY -->`.
"""

from __future__ import annotations

import bisect
import csv
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import tables  # type: ignore[import-not-found]  # noqa: E402
from tables import TODAY  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MARKER = re.compile(r"<!-- (table|figures|lab): (.*?); (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLE = re.compile(r"(?:<!-- no figures: .+ -->\n\n?)?(?:^\|.*\n)+", re.MULTILINE)
UNIT = r" ?(?:ms|s|GB|MB|%)(?!\w)"
IN_TABLE = re.compile(rf"(?<![\w.^=])\d[\d,]*(?:\.\d+(?!\.?\d)|(?={UNIT}))")
"""Versions such as 5.22.2 are no figures."""
IN_TEXT = re.compile(r"(?<![\w.^=])\d[\d,]*\.\d+(?= ?(?:ms|s|GB|MB|TB/s)(?!\w))")
SCALES = (1, 100, 1e3, 1e-3, 1e-6, 1e-9)
KEYS = "model method precision compile graphs chunked batch policy code library rounding".split()
"""Columns that tell measurements apart: rows that agree in them are rounds or seeds."""
DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class Region:
    """One marker with what it holds."""

    kind: str
    source: str
    setting: str
    text: str

    @property
    def files(self) -> tuple[str, ...]:
        if self.kind == "table":
            return tables.TABLES[self.source].files if self.source in tables.TABLES else (f"no table {self.source}",)
        return () if self.source == "no file" else tuple(self.source.split(", "))


def without_code(text: str) -> str:
    """Return Markdown without code, links' targets and comments."""
    text = re.sub(r"^```.*?^```$|^ {4}.*?$|<!--(?! no figures).*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def outside(text: str) -> list[str]:
    """Return the tables and sentences with figures that are in no marker."""
    text = without_code(MARKER.sub("", text))
    found = [
        table.strip().splitlines()[-1]
        for table in TABLE.findall(text)
        if not table.startswith("<!-- no figures") and any(map(IN_TABLE.search, table.splitlines()[2:]))
    ]
    return found + [line for line in TABLE.sub("", text).splitlines() if IN_TEXT.search(line)]


@cache
def published(files: tuple[str, ...]) -> list[float]:
    """Return every number of these files, with medians and means of rows that differ in round or seed, sorted."""
    numbers: list[float] = []
    for file in files:
        text = (ROOT / "benchmarks" / "results" / file).read_text()
        if not file.endswith(".csv"):
            numbers += map(float, re.findall(r"\d+(?:\.\d+)?", text))
            continue
        groups = defaultdict(list)
        for row in csv.DictReader(text.splitlines()):
            for column, cell in row.items():
                if re.fullmatch(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", cell or ""):
                    groups[(column, *(row.get(key) for key in KEYS))].append(float(cell))
        for group in groups.values():
            numbers += [*group, statistics.median(group), statistics.fmean(group)]
    return sorted(number * scale for number in numbers for scale in SCALES)


def in_files(figure: str, files: tuple[str, ...]) -> bool:
    """Return whether a figure, rounded as printed, is one of the files' numbers."""
    value, half = float(figure.replace(",", "")), 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
    numbers = published(files)
    place = bisect.bisect_left(numbers, value - half)
    return place < len(numbers) and numbers[place] <= value + half


def problems(region: Region, page: str) -> list[str]:
    """Return what is wrong with a marker and its figures."""
    missing = [file for file in region.files if not (ROOT / "benchmarks" / "results" / file).exists()]
    if missing:
        return [f"{missing[0]} is not in benchmarks/results"]
    found, seen = [], " ".join(region.text.split())
    if region.setting != TODAY and region.setting not in seen:
        found.append(f"{region.setting!r} is neither today's default ({TODAY}) nor named beside the figures")
    if region.kind == "lab" and (page != "docs/lab.md" or not DATE.search(region.setting)):
        found.append("a lab note is in docs/lab.md, and its setting has a date")
    if not region.files:
        return found if region.kind == "lab" else [*found, "figures need a file"]
    rest = region.text
    if region.kind == "table":
        table = TABLE.search(rest)
        if table is None or table[0] != tables.TABLES[region.source].render():
            found.append(f"the table {region.source} is not that of its file: python3 benchmarks/tables.py")
        rest = TABLE.sub("", rest, count=1)
    rest = without_code(rest)
    rows = [row for table in TABLE.findall(rest) for row in table.splitlines()[2:]]
    figures = [m[0] for row in rows for m in IN_TABLE.finditer(row)]
    figures += [m[0] for m in IN_TEXT.finditer(TABLE.sub("", rest))]
    return found + [f"{figure} is not in {region.files}" for figure in figures if not in_files(figure, region.files)]


@pytest.mark.parametrize("name", NAMES)
def test_figures_come_from_a_file_and_say_their_setting(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.count("<!-- end -->") == len(MARKER.findall(text)), "a marker without an end, or an end without one"
    assert not outside(text), "figures outside of a marker"
    found = [
        (each.setting, each.source, problems(each, name)) for each in (Region(*parts) for parts in MARKER.findall(text))
    ]
    assert not [each for each in found if each[2]]


FIRST = f"{tables.median(tables.STEPS, 'first_ms', precision='fp32', method='default') / 1e3:.1f} s"
STEP = f"{tables.median(tables.STEPS, 'pipelined_ms', precision='fp32', method='default'):.1f} ms"
GOOD = f"One H200, version 0.2.0 of 2026-11-16. The first step took {FIRST}.\n\n" + tables.TABLES["readme"].render()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("table", "readme", "version 0.2.0 of 2026-11-16", GOOD), ""),
        (("table", "readme", TODAY, GOOD), ""),
        (("table", "readme", "sigma 0.3", GOOD), "neither today's default"),
        (("table", "readme", TODAY, GOOD.replace(STEP, "110.1 ms")), "not that of its file"),
        (("table", "readme", TODAY, GOOD.replace(FIRST, "98.7 s")), "98.7 is not in"),
        (("table", "other", TODAY, GOOD), "no table other is not in benchmarks/results"),
        (("figures", "gone.csv", TODAY, GOOD), "gone.csv is not in benchmarks/results"),
        (("figures", "no file", TODAY, GOOD), "figures need a file"),
        (("figures", "readme_h200.csv", TODAY, f"It took {STEP}."), ""),
        (("figures", "readme_h200.csv", TODAY, "It took 109.3 ms."), "109.3 is not in"),
        (("lab", "no file", "2026-11-16", "2026-11-16: 5.0 ms"), "a lab note is in docs/lab.md"),
    ],
)
def test_a_wrong_marker_is_found(parts: tuple[str, str, str, str], expected: str) -> None:
    found = problems(Region(*parts), "README.md")
    assert expected in "; ".join(found) and bool(expected) == bool(found)


def test_figures_without_a_marker_are_found() -> None:
    table = "| a | b |\n| --- | --- |\n| ResNet | 5.1 |\n"
    assert outside(table) == ["| ResNet | 5.1 |"]
    assert outside("| a | b |\n| --- | --- |\n| ResNet | 50 ms |\n") and outside("It took 51.9 ms.")
    assert not outside(f"<!-- no figures: versions -->\n{table}")
    assert not outside(f"<!-- figures: a.csv; {TODAY} -->\n{table}<!-- end -->\n")
    assert not outside("torch 2.11 with `sigma=0.2`, and 16 GB\n\n| a |\n| --- |\n| ResNet-50, 12 layers |\n")
