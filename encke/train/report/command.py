"""`encke report`: runs of `encke train` side by side, as HTML, Markdown or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from encke import __version__
from encke.tools.errors import UsageError
from encke.tools.files import finite_json
from encke.train.report.html import to_html
from encke.train.report.markdown import to_markdown
from encke.train.report.runs import Run, pairs, read_all
from encke.train.report.summary import Comparison, Section


def report(runs: tuple[Path, ...], out: Path | None = None, format: Literal["html", "md", "json"] = "html") -> None:
    """Show runs of `encke train`, plain beside compressed: memory, time, accuracy, and every site over time.

    The page is one file that asks for nothing from the network. Runs that have not ended, or were killed, are shown as
    far as they came.

    Args:
        runs: Folders that `encke train` wrote. A run with policy none is the baseline of the others of its model
            and data.
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
    text = to_markdown(found) if format == "md" else json.dumps(finite_json(merged(found)), indent=1) + "\n"
    if out is None:
        sys.stdout.write(text.encode("utf-8", "replace").decode())
        return
    save(out, text)
    print(f"wrote {out}")


def write(
    runs: Sequence[Path],
    out: Path,
    extra: Sequence[Section] = (),
    title: str = "Encke report",
    last: Sequence[Section] = (),
) -> None:
    """Write the page about the runs, with sections of your own before them and after them."""
    save(out, to_html(read_all(runs), extra, title, last))


def save(out: Path, text: str) -> None:
    """Write the report to a file."""
    if out.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder; name a file in it")
    try:
        # Names of files may hold bytes that are not text.
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None


def merged(runs: Sequence[Run]) -> dict[str, Any]:
    """Return all figures of the runs as data."""
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
                "memory": run.memory,
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
