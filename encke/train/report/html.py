"""The report as one HTML page, which makes no network requests."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from encke import __version__
from encke.tools.files import finite_json
from encke.train.report import summary
from encke.train.report.charts import chart_data, history
from encke.train.report.runs import Run, number, pairs
from encke.train.report.summary import Comparison, Section, StepChart, Table, Tile, is_figure

STEP_WORDS = (
    "Autograd saves tensors in the forward pass and releases them in backward, while gradients appear. Dotted lines: "
    "the end of the forward pass."
)


def to_html(runs: Sequence[Run], extra: Sequence[Section], title: str, last: Sequence[Section] = ()) -> str:
    """Return the whole page. Its content security policy allows this one script and no request."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    data = json.dumps(finite_json([chart_data(run) for run in runs]), separators=(",", ":"), allow_nan=False)
    # The JSON is inside a script element, which the first </script> would end.
    data = data.replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [(section.title, prose(section)) for section in extra]
    if runs:
        sections += [("Summary", summary_html(runs)), ("Runs", table_html(summary.run_table(runs)))]
        sections += [("Curves", curves_html(runs))]
        sections += [("Sites", sites_html(runs)), ("Settings", settings_html(runs))]
    sections += [(section.title, prose(section)) for section in last]
    sections = [(name, content) for name, content in sections if content]
    links = "".join(f'<a href="#part-{i}">{escape(name)}</a>' for i, (name, _) in enumerate(sections))
    body = "".join(
        f'<section id="part-{i}"><h2>{escape(name)}</h2>{content}</section>'
        for i, (name, content) in enumerate(sections)
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
    """Return text with HTML's special characters escaped."""
    return html.escape(str(text))


def prose(section: Section) -> str:
    """Return chart, paragraphs and tables of a section."""
    words = "".join(f"<p>{escape(text)}</p>" for text in section.paragraphs)
    return step_chart(section.chart) + words + "".join(map(table_html, section.tables))


def step_chart(chart: StepChart | None) -> str:
    """Return a placeholder in which the script draws the memory during a step, and the peaks as text."""
    if chart is None:
        return ""
    curves = json.dumps(finite_json([{**memory, "name": name} for name, memory in chart.curves]))
    peaks = [(name, memory["peak_bytes"]) for name, memory in chart.curves]
    words = f"Peak: {', '.join(f'{name} {summary.size(peak)}' for name, peak in peaks)}."
    if less := summary.smaller(peaks[0][1], peaks[-1][1]):
        words = f"{words[:-1]}, {less}."
    return (
        f'<figure data-chart="step" data-curves="{escape(curves)}"><figcaption>{escape(chart.caption)}</figcaption>'
        f'<div class="place"></div><p>{escape(words)} {escape(STEP_WORDS)}</p></figure>'
    )


def table_html(table: Table) -> str:
    """Return a table that scrolls by itself where the page is narrow."""
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


def details(title: str, content: str) -> str:
    """Return content that is folded away."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def warnings_html(runs: Sequence[Run]) -> str:
    """Return the warnings of all runs."""
    found = summary.warnings(runs).paragraphs
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<aside class="warnings" aria-label="Warnings"><h2>Warnings</h2><ul>{items}</ul></aside>' if found else ""


def summary_html(runs: Sequence[Run]) -> str:
    """Return a comparison for every compressed run."""
    found = pairs(runs)
    paired = {pair.compressed.name for pair in found}
    parts = []
    for comparison in map(Comparison, found):
        words = escape(" ".join(comparison.sentences()))
        tiles = "".join(map(tile_html, comparison.tiles()))
        parts.append(
            f'<article><h3>{escape(comparison.title)}</h3><div class="tiles">{tiles}</div>'
            f"{step_chart(comparison.chart())}"
            f'<div class="pair"><p>{words}</p>{table_html(comparison.table())}</div></article>'
        )
    parts += [f"<p>{escape(summary.alone(run))}</p>" for run in runs if not run.plain and run.name not in paired]
    if all(run.plain for run in runs):
        parts.append(f"<p>{escape(summary.ONLY_PLAIN)}</p>")
    return "".join(parts)


def tile_html(tile: Tile) -> str:
    """Return one figure in a box."""
    name, value, note = map(escape, (tile.name, tile.value, tile.note))
    return f'<div class="tile"><span>{name}</span><b>{value}</b><i>{note}</i></div>'


def chart(kind: str, caption: str, run: int | None = None) -> str:
    """Return a place into which the script draws a chart."""
    which = "" if run is None else f' data-run="{run}"'
    place = f'<figcaption>{escape(caption)}</figcaption><div class="place"></div>'
    return f'<figure data-chart="{kind}"{which}>{place}</figure>'


def curves_html(runs: Sequence[Run]) -> str:
    """Return curves of loss and accuracy."""
    kinds = {"loss": "Loss, training", "validation_loss": "Loss, validation"}
    lines = [line for run in runs for line in (*run.steps, *run.epochs)]
    if any(number(line.get(key)) is not None for line in lines for key in ("accuracy", "validation_accuracy")):
        kinds |= {"accuracy": "Accuracy, training", "validation_accuracy": "Accuracy, validation"}
    tables = "".join(map(table_html, summary.epoch_tables(runs)))
    return (
        '<div class="controls" id="controls"></div><noscript><p>The charts need JavaScript; the tables do not.</p>'
        f'</noscript><div class="grid">{"".join(chart(kind, caption) for kind, caption in kinds.items())}</div>'
        + (details("As tables", tables) if tables else "")
    )


def sites_html(runs: Sequence[Run]) -> str:
    """Return memory by layer and the history of every site."""
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
            parts.append(chart("history", f"Ratio and bound by site over time, {run.name}", i))
        parts.append("</article>")
    return "".join(parts)


def settings_html(runs: Sequence[Run]) -> str:
    """Return settings and environment of the runs."""
    return "".join(
        table_html(table) if table.marked else details(table.caption, table_html(table))
        for table in summary.setting_tables(runs)
    )
