"""`encke report`: runs of `encke train` on one page, plain beside compressed, as HTML, Markdown or JSON."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from encke import __version__
from encke.tools.errors import UsageError
from encke.tools.files import finite_json
from encke.train.report import summary
from encke.train.report.charts import chart_data, history
from encke.train.report.runs import Run, number, pairs, read_all
from encke.train.report.summary import Comparison, Section, Table, Tile

MOST_EPOCHS = 20
"""Rows of epochs in Markdown."""


def report(runs: tuple[Path, ...], out: Path | None = None, format: Literal["html", "md", "json"] = "html") -> None:
    """Show runs of `encke train`, plain beside compressed: memory, time, accuracy, and every layer over time.

    The page is one file that asks for nothing from the network. Runs that have not ended, or were killed, are shown as
    far as they came.

    Args:
        runs: Folders that `encke train` wrote. A run with policy none is what the others of its model and data are
            compared with.
        out: The file to write; report.html in the first run's folder unless given. Markdown and JSON go to the terminal
            unless it is given.
        format: A page to look at (html), tables to paste into a pull request (md), or all figures as data (json).
    """
    if not runs:
        raise UsageError("name at least one run folder: encke report runs/train")
    if format == "html":
        target = out or runs[0] / "report.html"
        write(runs, target)
        print(f"wrote {target}")
        return
    found = read_all(runs)
    text = markdown(found) if format == "md" else json.dumps(finite_json(merged(found)), indent=1) + "\n"
    if out is None:
        sys.stdout.write(text.encode("utf-8", "replace").decode())
        return
    save(out, text)
    print(f"wrote {out}")


def write(runs: Sequence[Path], out: Path, extra: Sequence[Section] = (), title: str = "Encke report") -> None:
    """Writes the page about the runs, with sections of one's own before them."""
    save(out, to_html(read_all(runs), extra, title))


def save(out: Path, text: str) -> None:
    if out.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder; name a file in it")
    try:
        # Names of files may hold bytes that are not text.
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None


def to_html(runs: Sequence[Run], extra: Sequence[Section], title: str) -> str:
    """The whole page. Its policy towards the browser allows this one script and no request."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    data = json.dumps(finite_json([chart_data(run) for run in runs]), separators=(",", ":"), allow_nan=False)
    # The JSON stands in a script element, which the first </script> would end.
    data = data.replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = [(section.title, prose(section)) for section in extra]
    if runs:
        parts += [("Summary", summary_html(runs)), ("Runs", table_html(summary.run_table(runs)))]
        parts += [("Curves", curves_html(runs))]
        parts += [("Layers", layers_html(runs)), ("Settings", settings_html(runs))]
    parts = [(name, content) for name, content in parts if content]
    links = "".join(f'<a href="#part-{i}">{escape(name)}</a>' for i, (name, _) in enumerate(parts))
    body = "".join(
        f'<section id="part-{i}"><h2>{escape(name)}</h2>{content}</section>' for i, (name, content) in enumerate(parts)
    )
    names = ", ".join(run.name for run in runs)
    lead = f"<p class=lead>{summary.plural(len(runs), 'run')}: {escape(names)}</p>" if runs else ""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>{lead}<nav aria-label="Sections">{links}</nav></header>
<main>{warnings_html(runs)}{body}</main>
<footer>Made by Encke {escape(__version__)}, {now}. Bytes are decimal (1 MB = 1,000,000 bytes).</footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def prose(section: Section) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in section.paragraphs) + "".join(map(table_html, section.tables))


def table_html(table: Table) -> str:
    """A table that scrolls by itself where the page is narrow."""
    right = [is_figure(row[i] for row in table.rows) for i in range(len(table.head))]

    def cell(i: int, text: str) -> str:
        kind = ' class="figure"' if right[i] else ""
        return f"<td{kind}>{escape(text)}</td>" if i else f'<th scope="row">{escape(text)}</th>'

    head = "".join(
        f'<th scope="col"{" class=figure" if right[i] and i else ""}>{escape(text)}</th>' if text else "<td></td>"
        for i, text in enumerate(table.head)
    )
    rows = "".join(
        f"<tr{' class=marked' if n in table.marked else ''}>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>"
        for n, row in enumerate(table.rows)
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(table.caption)}"><table>'
        f"<caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def is_figure(cells: Iterable[str]) -> bool:
    """Whether a column holds figures: they are aligned to the right."""
    return all(re.match(r"[+-]?[\d.]|–$|$", cell) for cell in cells)


def details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def warnings_html(runs: Sequence[Run]) -> str:
    found = summary.warnings(runs).paragraphs
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<aside class="warnings" aria-label="Warnings"><h2>Warnings</h2><ul>{items}</ul></aside>' if found else ""


def summary_html(runs: Sequence[Run]) -> str:
    found = pairs(runs)
    paired = {pair.compressed.name for pair in found}
    parts = []
    for comparison in map(Comparison, found):
        words = escape(" ".join(comparison.sentences()))
        tiles = "".join(map(tile_html, comparison.tiles()))
        parts.append(
            f'<article><h3>{escape(comparison.title)}</h3><div class="tiles">{tiles}</div>'
            f'<div class="pair"><p>{words}</p>{table_html(comparison.table())}</div></article>'
        )
    parts += [f"<p>{escape(summary.alone(run))}</p>" for run in runs if not run.plain and run.name not in paired]
    if all(run.plain for run in runs):
        parts.append(f"<p>{escape(summary.ONLY_PLAIN)}</p>")
    return "".join(parts)


def tile_html(tile: Tile) -> str:
    name, value, note = map(escape, (tile.name, tile.value, tile.note))
    return f'<div class="tile"><span>{name}</span><b>{value}</b><i>{note}</i></div>'


def chart(kind: str, caption: str, run: int | None = None) -> str:
    """A place that the script draws a chart into."""
    which = "" if run is None else f' data-run="{run}"'
    place = f'<figcaption>{escape(caption)}</figcaption><div class="place"></div>'
    return f'<figure data-chart="{kind}"{which}>{place}</figure>'


def curves_html(runs: Sequence[Run]) -> str:
    kinds = {"loss": "Loss, training", "validation_loss": "Loss, validation"}
    lines = [line for run in runs for line in (*run.steps, *run.epochs)]
    if any(number(line.get(key)) is not None for line in lines for key in ("accuracy", "validation_accuracy")):
        kinds |= {"accuracy": "Accuracy, training", "validation_accuracy": "Accuracy, validation"}
    table = summary.epoch_table(runs)
    return (
        '<div class="controls" id="controls"></div><noscript><p>The charts need JavaScript; the tables do not.</p>'
        f'</noscript><div class="grid">{"".join(chart(kind, caption) for kind, caption in kinds.items())}</div>'
        + (details("As a table", table_html(table)) if table else "")
    )


def layers_html(runs: Sequence[Run]) -> str:
    parts = []
    for i, run in enumerate(runs):
        over_time = history(run) is not None
        if not run.sites and not over_time:
            continue
        parts.append(f"<article><h3>{escape(run.name)}</h3>")
        if run.sites:
            parts.append(chart("memory", f"Memory by layer, {run.name}: bytes before and after", i))
            table = summary.site_table(run)
            parts.append(details(f"All {summary.plural(len(table.rows), 'site')} as a table", table_html(table)))
        if over_time:
            parts.append(chart("history", f"Ratio and bound by layer over time, {run.name}", i))
        parts.append("</article>")
    return "".join(parts)


def settings_html(runs: Sequence[Run]) -> str:
    return "".join(
        table_html(table) if table.marked else details(table.caption, table_html(table))
        for table in summary.setting_tables(runs)
    )


def markdown(runs: Sequence[Run]) -> str:
    """The same in Markdown, without the charts."""
    epochs = summary.epoch_table(runs, MOST_EPOCHS)
    sections = [
        summary.summary(runs),
        summary.warnings(runs),
        Section("Runs", (), (summary.run_table(runs),)),
        Section("Curves", (), (epochs,) if epochs else ()),
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
        lines += [f"<details><summary>{escape(table.caption)}</summary>", "", *rows_of(table), "</details>", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def rows_of(table: Table) -> list[str]:
    right = [is_figure(row[i] for row in table.rows) for i in range(len(table.head))]
    rule = ["---:" if figure and i else "---" for i, figure in enumerate(right)]
    rows = [[quoted(cell) for cell in row] for row in (table.head, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])] + [""]


def quoted(text: str) -> str:
    """Text that Markdown takes as it is."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def merged(runs: Sequence[Run]) -> dict[str, Any]:
    """All figures of the runs as data."""
    return {
        "encke": __version__,
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "settings": run.settings,
                "environment": run.environment,
                "ended": run.ended,
                "warnings": run.warnings,
                **run.figures,
                "step_lines": run.steps,
                "epoch_lines": run.epochs,
                "sites": run.sites,
                "forwards": run.forwards,
            }
            for run in runs
        ],
        "pairs": [
            {
                "plain": pair.plain.name,
                "compressed": pair.compressed.name,
                "differences": pair.differences,
                "summary": " ".join(Comparison(pair).sentences()),
            }
            for pair in pairs(runs)
        ],
    }
