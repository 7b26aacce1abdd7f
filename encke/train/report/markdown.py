"""The report in Markdown, without the charts."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from encke.train.report import summary
from encke.train.report.runs import Run
from encke.train.report.summary import Section, Table, is_figure

MOST_EPOCHS = 20
"""Most rows of epochs."""


def to_markdown(runs: Sequence[Run]) -> str:
    """Return the report in Markdown."""
    sections = [
        summary.summary(runs),
        summary.warnings(runs),
        Section("Runs", (), (turned(summary.run_table(runs)),)),
        Section("Curves", (), tuple(summary.epoch_tables(runs, MOST_EPOCHS))),
    ]
    lines = ["# Encke report", ""]
    for section in sections:
        if section.paragraphs or section.tables:
            lines += [f"## {quoted(section.title)}", ""]
            lines += [line for text in section.paragraphs for line in (f"- {quoted(text)}", "")]
            for table in section.tables:
                lines += [f"**{quoted(table.caption)}**", "", *rows_of(table)]
    folded = [summary.site_table(run) for run in runs if run.sites] + summary.setting_tables(runs)
    for table in folded:
        lines += [f"<details><summary>{html.escape(table.caption)}</summary>", "", *rows_of(table), "</details>", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def turned(table: Table) -> Table:
    """Return a table with its rows as columns: a few runs have many figures, and fit a narrow terminal like that."""
    head, *rows = zip(table.head, *table.rows, strict=True)
    return Table(table.caption, tuple(head), tuple(rows))


def rows_of(table: Table) -> list[str]:
    """Return the lines of a table."""
    right = [is_figure(row[i] for row in table.rows) for i in range(len(table.head))]
    rule = ["---:" if figure and i else "---" for i, figure in enumerate(right)]
    rows = [[quoted(cell) for cell in row] for row in (table.head, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])] + [""]


def quoted(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
