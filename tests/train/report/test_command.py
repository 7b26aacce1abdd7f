"""The report: its figures are those of the runs, in HTML (in a real browser), Markdown and JSON."""

from __future__ import annotations

import functools
import http.server
import json
import math
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import encke
from encke.tools.errors import UsageError
from encke.train.report import command
from encke.train.report.markdown import to_markdown
from encke.train.report.runs import read_all
from encke.train.report.summary import Section, Table
from encke.train.settings import Data, Model, Policy, Settings, to_yaml

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = "</script><script>throw 1</script><img src=x onerror='throw 2'>&amp;|`*"
UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1, "%": 0.01, "ms": 1e-3, "s": 1, "x": 1}
GAPS = ({"loss": math.nan}, {"loss": math.inf, "accuracy": None}, {"loss": 1e30, "accuracy": math.nan})


def in_a_browser(test):
    """A test that takes seconds, and is left out where there is no browser."""
    return pytest.mark.slow(pytest.mark.skipif(BROWSER is None, reason="no browser; make browser installs one")(test))


def train(folder: Path, policy: str, seed: int = 0, name: str = "small") -> Path:
    """A real training of a few steps, written as `encke train` writes it."""
    folder.mkdir(parents=True)
    settings = Settings(model=Model(name=name), data=Data(classes=4), policy=Policy(name=policy), epochs=3, seed=seed)
    (folder / "settings.yaml").write_text(to_yaml(settings))
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer) if policy != "none" else None
    if handle:
        handle.log(folder / "sites.jsonl", every=2)
    lines: list[dict] = []
    memory = {"peak_bytes": 50_000_000 if handle else 90_000_000, "memory_before_bytes": 40_000_000}
    for step in range(1, 13):
        images, labels = torch.randn(16, 3, 16, 16), torch.randint(4, (16,))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        at = {"step": step, "epoch": step / 4, "seconds": step * 0.5, "per_second": 32.0, **memory}
        lines.append({"event": "step", **at, "loss": loss.item(), "accuracy": 0.25 + step / 100, "step_seconds": 0.5})
        if step % 4 == 0:
            validation = {"validation_loss": loss.item() + 0.1, "validation_accuracy": 0.5 + step / 50 + seed / 100}
            lines.append({"event": "epoch", **at, "train_loss": loss.item(), "train_accuracy": 0.3, **validation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {"device": "A kind of CPU", "cuda": False, "kind": "images", "validation_samples": 400}
    (folder / "environment.json").write_text(json.dumps(environment))
    result = {"finished": True, "reason": "done", "steps": 12, "epochs": 3.0, **memory, **validation, "seconds": 6.0}
    result |= {"step_seconds": 0.7 if handle else 0.5, "per_second": 32.0, "held_bytes": None, "report": None}
    if handle:
        report = handle.report()
        result |= {"saved_bytes": report.saved_bytes, "packed_bytes": report.packed_bytes, "report": report.to_dict()}
        handle.detach()
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return train(folder / "plain", "none"), train(folder / "comet", "comet", seed=1)


def value(text: str) -> float:
    """The number of a cell, in its base unit."""
    found = re.match(r"([+-]?[\d.,]+) ?(GB|MB|kB|B|%|ms|s|x)?", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS.get(found[2] or "", 1)


class Tables(HTMLParser):
    """The tables of a page by caption, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[str]] = []
        self.place: list[str] | None = None
        self.caption: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))
        self.addresses += [
            text for name, text in attributes if name in ("src", "href", "xlink:href", "srcset", "action")
        ]
        if tag == "table":
            self.rows, self.caption = [], []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.place = {"caption": self.caption}.get(tag) if tag != "td" and tag != "th" else self.rows[-1]

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.found["".join(self.caption)] = self.rows
        if tag in ("td", "th", "caption"):
            self.place = None

    def handle_data(self, data: str) -> None:
        if self.place is self.caption:
            self.caption.append(data)
        elif self.place is not None:
            self.place[-1] += data

    def rows_by_name(self, caption: str) -> dict[str, dict[str, str]]:
        head, *rows = self.found[caption]
        return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def browse(address: str, profile: Path) -> tuple[str, list[str]]:
    """Return the page as a browser renders it, and the browser's console."""
    assert BROWSER is not None
    quiet = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    quiet += " disable-component-update disable-sync disable-dev-shm-usage"
    options = [f"--{name}" for name in quiet.split()]
    options += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "<html" in done.stdout, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(source: Path, script: str) -> Path:
    """Return the page with a script of the test's own, which the page's policy would not let run."""
    text = source.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy".*?>', text, re.DOTALL)
    assert policy is not None
    target = source.with_name("with_script.html")
    target.write_text(text.replace(policy[0], "").replace("</body>", f"<script>{script}</script></body>"))
    return target


def write(runs: tuple[Path, ...], folder: Path) -> Path:
    command.report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def seen(runs, tmp_path_factory) -> Tables:
    folder = tmp_path_factory.mktemp("seen")
    dom, console = browse(write(runs, folder).as_uri(), folder / "profile")
    assert console == []
    return Tables(dom)


@in_a_browser
def test_the_browser_shows_the_figures_of_the_runs(runs, seen):
    rows = seen.rows_by_name("Counted bytes and measured peak")
    for folder in runs:
        row, result = rows[folder.name], result_of(folder)
        assert value(row["peak memory"]) == pytest.approx(result["peak_bytes"], rel=0.01)
        assert value(row["validation accuracy"]) == pytest.approx(result["validation_accuracy"], abs=1e-4)
        assert value(row["step"]) == pytest.approx(result["step_seconds"], rel=0.01)
        assert value(row["images per second"]) == pytest.approx(32, rel=0.01)
    comet, result = rows["comet"], result_of(runs[1])
    assert rows["plain"]["saved"] == rows["plain"]["ratio"] == "–"
    assert value(comet["saved"]) == pytest.approx(result["saved_bytes"], rel=0.01)
    assert value(comet["packed"]) == pytest.approx(result["packed_bytes"], rel=0.01)
    assert value(comet["ratio"]) == pytest.approx(result["saved_bytes"] / result["packed_bytes"], rel=0.02)


@in_a_browser
def test_the_browser_shows_plain_against_compressed(runs, seen):
    rows = seen.rows_by_name("comet against plain")
    assert value(rows["peak above memory before step 1"]["compressed"]) == 10e6
    assert rows["peak above memory before step 1"]["difference"] == "5.0x less"
    assert rows["time of a step"]["difference"] == "1.40x"
    assert rows["validation accuracy"]["difference"] == "+1.00 points, within chance"


@in_a_browser
def test_the_browser_shows_every_site_and_what_differs(runs, seen):
    sites = result_of(runs[1])["report"]["sites"]
    _, *rows = seen.found["comet: what was saved in the last forward pass, in its order"]
    assert [row[0] for row in rows] == [site["layer"] or "–" for site in sites]
    assert [value(row[4]) for row in rows] == pytest.approx([site["saved_bytes"] for site in sites], rel=0.05)
    different = seen.rows_by_name("What differs between the runs")
    assert set(different) == {"policy.name", "seed"}
    assert different["policy.name"] == {"plain": "none", "comet": "comet"}


@in_a_browser
def test_the_browser_draws_bars_and_curves_of_the_runs(runs, seen):
    sites = result_of(runs[1])["report"]["sites"]
    layers = dict.fromkeys(site["layer"] for site in sites)
    heights = {
        kind: [float(a["height"]) for tag, a in seen.elements if tag == "rect" and a.get("class") == kind]
        for kind in ("saved", "packed")
    }
    saved = [sum(site["saved_bytes"] for site in sites if site["layer"] == layer) for layer in layers]
    packed = [sum(site["packed_bytes"] for site in sites if site["layer"] == layer) for layer in layers]
    scale = max(heights["saved"]) / max(saved)
    assert heights["saved"] == pytest.approx([scale * n for n in saved], abs=0.01)
    assert heights["packed"] == pytest.approx([scale * n for n in packed], abs=0.01)
    curves = [a["d"] for tag, a in seen.elements if tag == "path" and "curve" in a.get("class", "")]
    # Four charts of two runs, of 12 steps or 3 epochs; then ratio and setting of the chosen layer.
    assert [len(re.findall("[ML]", path)) for path in curves[:8]] == [12, 12, 3, 3, 12, 12, 3, 3]
    assert len(curves) > 8
    for tag, attributes in seen.elements:
        if tag == "svg" and "aria-hidden" not in attributes:
            assert attributes["role"] == "img" and attributes["aria-label"]


def with_memory(runs: tuple[Path, ...], folder: Path, *peaks: int) -> tuple[Path, ...]:
    """Copies of the runs, the first of which have the memory of a step with these peaks."""
    copies = tuple(Path(shutil.copytree(run, folder / run.name)) for run in runs)
    for run, peak in zip(copies, peaks, strict=False):
        memory = {"step": 15, "seconds": 2.0, "forward_seconds": 1.0, "resting_bytes": 10**6, "peak_bytes": peak}
        points = {"bytes": [10**6, peak // 2, peak, 10**6]}
        (run / "memory.json").write_text(json.dumps(memory | points))
    return copies


def test_memory_through_a_step_is_shown_where_both_runs_have_it(runs, tmp_path):
    both, one = with_memory(runs, tmp_path / "both", 8 * 10**6, 4 * 10**6), with_memory(runs, tmp_path / "one", 10**6)
    found, missing = (Tables(write(each, tmp_path).read_text()) for each in (both, one))
    (figure,) = [a for tag, a in found.elements if tag == "figure" and a["data-chart"] == "step"]
    assert [(each["name"], each["peak_bytes"]) for each in json.loads(figure["data-curves"])] == [
        ("plain", 8 * 10**6),
        ("comet", 4 * 10**6),
    ]
    assert found.rows_by_name("comet against plain")["peak of all tensors in a step"]["difference"] == "2.0x less"
    assert not [a for tag, a in missing.elements if tag == "figure" and a["data-chart"] == "step"]


def test_a_warning_that_several_runs_share_is_shown_once(runs, tmp_path):
    copies = with_memory(runs, tmp_path)
    for run in copies:
        (run / "environment.json").unlink()
    text = to_markdown(read_all(copies))
    assert text.count("plain, comet: There is no environment.json") == text.count("There is no environment.json") == 1


@in_a_browser
def test_a_long_name_of_a_run_is_shortened_in_the_chart(runs, tmp_path):
    plain, comet = with_memory(runs, tmp_path, 8 * 10**6, 4 * 10**6)
    page = write((plain, comet.rename(tmp_path / ("sweep-" * 30))), tmp_path)
    labels = re.findall('class="peak"[^>]*>([^<]*)<', browse(page.as_uri(), tmp_path / "profile")[0])
    assert labels[0] == "plain: peak 8.0 MB"
    assert re.fullmatch("(sweep-)+[sweep]*…: peak 4.0 MB", labels[1]) and len(labels[1]) < 150


@in_a_browser
def test_the_browser_draws_memory_through_a_step_and_marks_the_peaks(runs, tmp_path):
    page = write(with_memory(runs, tmp_path, 8 * 10**6, 4 * 10**6), tmp_path)
    dom, console = browse(page.as_uri(), tmp_path / "profile")
    assert console == [] and "plain: peak 8.0 MB" in dom and "comet: peak 4.0 MB" in dom
    paths = [a["d"] for tag, a in Tables(dom).elements if tag == "path" and a.get("class") == "curve"][:2]
    high, low = ([float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)] for path in paths)
    assert len(high) == len(low) == 4 and high[0] == high[3] == low[0] == low[3]
    assert high[0] - high[2] == pytest.approx((low[0] - low[2]) * 7 / 3, rel=0.01)


def test_a_cpu_run_has_a_measured_peak_without_any_setting(runs, tmp_path):
    copies = with_memory(runs, tmp_path, 8 * 10**6, 4 * 10**6)
    for run in copies:
        for name in ("metrics.jsonl", "result.json"):
            text = (run / name).read_text()
            (run / name).write_text(re.sub(r'"(peak|memory_before)_bytes": \d+', r'"\1_bytes": null', text))
    text = to_markdown(read_all(copies))
    assert "The measured peak of all tensors in one step is 4.0 MB instead of 8.0 MB (2.0x less)." in text
    assert "interpreter" not in text and "compiled kernels" not in text


def test_tables_of_two_runs_fit_a_narrow_terminal(runs, tmp_path):
    text = to_markdown(read_all(with_memory(runs, tmp_path, 8 * 10**6, 4 * 10**6)))
    shown = text.partition("<details>")[0]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(lines) > 30 and max(map(len, lines)) <= 80
    assert "| validation accuracy | 74.00 % | 75.00 % |" in shown and "| 3 | 74.00 % | 75.00 % |" in shown


@in_a_browser
def test_the_page_asks_for_nothing(runs, seen, tmp_path):
    assert [text for text in seen.addresses if not text.startswith(("#", "data:,"))] == []
    write(runs, tmp_path)
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, console = browse(f"http://127.0.0.1:{server.server_port}/report.html", tmp_path / "profile")
        server.shutdown()
    assert console == [] and asked == ["/report.html"]


EXPLORE = """
const tips = [];
const over = (svg, kind) => {
  const box = svg.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.7, clientY: box.top + 8, bubbles: true };
  svg.dispatchEvent(new PointerEvent(kind, at));
  const tip = document.getElementById("tip");
  if (!tip.hidden) tips.push(tip.innerText);
};
const all = () => document.querySelectorAll("figure svg");
const every = () => all().forEach((svg) => { over(svg, "pointermove"); over(svg, "pointerleave"); });
every();
for (const select of document.querySelectorAll("select")) {
  for (const option of [...select.options]) {
    select.value = option.value;
    select.dispatchEvent(new Event("change"));
    every();
  }
}
all().forEach((svg) => over(svg, "click"));
for (const box of document.querySelectorAll("input, button")) { box.click(); every(); }
document.documentElement.dataset.tips = JSON.stringify(tips);
"""


@in_a_browser
def test_every_chart_tells_its_values_and_every_control_works(runs, tmp_path):
    explored = with_script(write(runs, tmp_path), EXPLORE)
    dom, console = browse(explored.as_uri(), tmp_path / "profile")
    assert console == []
    tips = json.loads(next(a["data-tips"] for tag, a in Tables(dom).elements if tag == "html"))
    told = "\n".join(tips)
    assert "plain: " in told and "comet: " in told
    assert re.search(r"^epoch 2\ncomet|^epoch 2\nplain", told, re.MULTILINE)
    assert re.search(r"^step \d+$", told, re.MULTILINE) and re.search(r"^saved [\d.]+ kB$", told, re.MULTILINE)
    assert re.search(r"^GroupQuant, \d bits$", told, re.MULTILINE) and re.search(r"^ratio [\d.]+$", told, re.MULTILINE)
    # All runs were switched off in the end.
    assert "Nothing to draw" in dom


@in_a_browser
def test_a_broken_page_would_be_noticed(runs, tmp_path):
    source = write(runs, tmp_path)
    _, console = browse(with_script(source, "noSuchFunction();").as_uri(), tmp_path / "one")
    assert any("noSuchFunction" in line for line in console)
    text = source.read_text()
    assert text.count("</body>") == 1
    source.write_text(text.replace("</body>", "<script>alert(1)</script><img src='http://127.0.0.1:9/x.png'></body>"))
    _, console = browse(source.as_uri(), tmp_path / "two")
    assert sum("Content Security Policy" in line for line in console) >= 2


@in_a_browser
def test_names_cannot_break_out_and_odd_values_break_nothing(tmp_path):
    odd = train(tmp_path / NASTY.replace("/", "∕"), "comet", name=NASTY)
    text = (odd / "sites.jsonl").read_text()
    (odd / "sites.jsonl").write_text(text.replace('"layer": "0"', '"layer": ' + json.dumps(NASTY)) + '{"step": 99, "la')
    lines = [json.loads(line) for line in (odd / "metrics.jsonl").read_text().splitlines()]
    for line, gap in zip(lines, GAPS, strict=False):
        line.update(gap)
    (odd / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"event": "st')
    (odd / "result.json").unlink()
    dom, console = browse(
        write((odd, train(tmp_path / "plain", "none", name=NASTY)), tmp_path).as_uri(), tmp_path / "p"
    )
    assert console == []
    parsed = Tables(dom)
    assert not [tag for tag, _ in parsed.elements if tag == "img"]
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    rows = parsed.rows_by_name("Counted bytes and measured peak")
    assert rows[odd.name]["model"] == NASTY
    assert "still running, or killed" in dom and "not finite from step 1 on" in dom
    assert "last line of sites.jsonl" in dom


@in_a_browser
@pytest.mark.parametrize("layers", [1, 300])
def test_any_number_of_layers_can_be_drawn(tmp_path, layers):
    run = train(tmp_path / "run", "comet")
    rows = [
        {"layer": f"stage{i // 10}.{i}.conv", "operation": "ConvolutionBackward0", "slot": "input", "saved_bytes": 4096}
        | {"codec": "ErrorBounded", "bound": f"{0.001 * (i + 1):.3g} abs", "packed_bytes": 512 * (i % 3), "ratio": None}
        for i in range(layers)
    ]
    lines = [{"step": n, "ratio": 8, "saved_bytes": 1, "packed_bytes": 1, "layers": rows} for n in (1, 2)]
    (run / "sites.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = result_of(run)
    result["report"]["sites"] = rows
    (run / "result.json").write_text(json.dumps(result))
    dom, console = browse(write((run,), tmp_path).as_uri(), tmp_path / "profile")
    assert console == []
    drawn = [a for tag, a in Tables(dom).elements if tag == "rect" and a.get("class") == "saved"]
    assert len(drawn) == layers and min(float(a["width"]) for a in drawn) > 0.5


def test_the_page_is_written_into_the_first_run_by_default(runs, capsys):
    command.report(runs)
    target = runs[0] / "report.html"
    assert capsys.readouterr().out == f"wrote {target}\n" and target.read_text().startswith("<!doctype html>")
    target.unlink()


def test_markdown_has_the_same_figures_and_goes_to_the_terminal(runs, capsys):
    command.report(runs, format="md")
    text = capsys.readouterr().out
    assert "| run | plain | comet |" in text and "| policy | none | comet |" in text
    one, other = (f"{100 * result_of(run)['validation_accuracy']:.2f} %" for run in runs)
    assert f"| validation accuracy | {one} | {other} |" in text
    assert "with 400 validation samples" in text.lower() and "## Summary" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_markdown_takes_names_as_they_are(tmp_path, capsys):
    command.report((train(tmp_path / "a|b", "none", name=NASTY),), format="md")
    text = capsys.readouterr().out
    assert "<script" not in text and "<img" not in text and "a\\|b" in text


def test_json_is_strict_and_holds_every_line(runs, tmp_path, capsys):
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    folder = tmp_path / "nan"
    shutil.copytree(runs[1], folder)
    (folder / "metrics.jsonl").write_text("\n".join([lines[0].replace('"loss": ', '"loss": NaN, "old": '), *lines[1:]]))
    command.report((runs[0], folder), tmp_path / "report.json", format="json")
    assert "wrote" in capsys.readouterr().out

    def fail(word: str) -> None:
        raise AssertionError(word)

    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=fail)
    plain, compressed = data["runs"]
    assert len(compressed["step_lines"]) == 12 and compressed["step_lines"][0]["loss"] is None
    assert compressed["packed_bytes"] == result_of(folder)["packed_bytes"] and plain["packed_bytes"] is None
    assert data["pairs"][0]["plain"] == "plain" and data["pairs"][0]["differences"] == ["seed (0, 1)"]


def test_sections_of_ones_own_come_first(runs, tmp_path):
    table = Table("What <it> cost", ("", "plain"), (("time", "3 s"),))
    command.write(runs, tmp_path / "x.html", extra=[Section("The demo", ("Some & words.",), (table,))], title="Demo")
    text = (tmp_path / "x.html").read_text()
    assert "<title>Demo</title>" in text
    assert text.index("The demo</h2><p>Some &amp; words.</p>") < text.index("Summary</h2>")
    assert Tables(text).found["What <it> cost"] == [["", "plain"], ["time", "3 s"]]
    command.write((), tmp_path / "x.html", extra=[Section("Alone", ("Words.",))])
    assert "Alone</h2>" in (tmp_path / "x.html").read_text()


def test_what_was_measured_as_nothing_is_not_compared(runs, tmp_path, capsys):
    for run, figures in zip(runs, ({"held_bytes": 5000}, {"held_bytes": 0, "peak_above_bytes": -4096}), strict=True):
        shutil.copytree(run, tmp_path / run.name)
        (tmp_path / run.name / "result.json").write_text(json.dumps({**result_of(run), **figures}))
    command.report((tmp_path / "plain", tmp_path / "comet"), format="md")
    text = capsys.readouterr().out
    assert "| process memory held after forward | 5.0 kB | 0 B |  |" in text
    assert "()" not in text and "Held after" not in text and "measured peak" not in text.partition("## Runs")[0]


def test_different_machines_are_not_compared(runs, tmp_path, capsys):
    folder = tmp_path / "gpu"
    shutil.copytree(runs[1], folder)
    (folder / "environment.json").write_text(json.dumps({"device": "NVIDIA H200", "validation_samples": 400}))
    command.report((runs[0], folder), format="md")
    text = capsys.readouterr().out
    assert "different machines" in text and "x the time" not in text


def test_runs_of_tokens_are_compared_by_loss(runs, tmp_path, capsys):
    folders = []
    for run in runs:
        folders.append(tmp_path / run.name)
        shutil.copytree(run, folders[-1])
        for name in ("metrics.jsonl", "result.json"):
            text = (run / name).read_text()
            (folders[-1] / name).write_text(re.sub(r'("\w*accuracy"): [\d.]+', r"\1: null", text))
    command.report(tuple(folders), format="md")
    text = capsys.readouterr().out
    assert "Validation loss is" in text and "more seeds" in text and "accuracy" not in text


@pytest.mark.parametrize("policy", ["none", "comet"])
def test_a_single_run_says_what_is_missing_for_a_comparison(runs, policy, capsys):
    command.report((runs[policy == "comet"],), format="md")
    assert ("All runs are plain" if policy == "none" else "Without a plain run") in capsys.readouterr().out


def test_what_cannot_be_written_is_one_line(runs, tmp_path):
    for out in (tmp_path, tmp_path / "none" / "x.html"):
        with pytest.raises(UsageError, match="cannot write") as caught:
            command.report(runs, out)
        assert str(out) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="at least one run"):
        command.report(())
