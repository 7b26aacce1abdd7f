"""The documentation: the site builds without a warning and loads nothing, and every message has an entry."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from encke.cli import COMMANDS
from encke.kernels.backends import INSTALL, BackendChoice
from tests.messages import Message, messages

ROOT = Path(__file__).parents[1]
ENTRIES = [
    line
    for block in re.findall(
        r"^```text\n(.*?)^```$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for line in block.splitlines()
]
SHORTEST = 60
"""Characters of a message that an entry quotes at least, if it is cut off."""


def quotes(entry: str, message: str) -> bool:
    """Return whether an entry shows a message, or the beginning of a long one."""
    beginning = entry.removesuffix(" ...")
    return entry == message or (len(beginning) >= SHORTEST and message.startswith(beginning))


@pytest.fixture(scope="module")
def found() -> list[Message]:
    return list(messages())


def test_every_message_has_an_entry_under_troubleshooting(found: list[Message]) -> None:
    assert len(found) > 300
    missing = [f"{m.place}: {m.text}" for m in found if not any(quotes(entry, m.text) for entry in ENTRIES)]
    assert not missing, "\n".join(missing)


def test_every_entry_under_troubleshooting_is_a_message(found: list[Message]) -> None:
    known = [m.text for m in found]
    known += [str(BackendChoice(device, "reference", reason)) for device, reason in INSTALL.items()]
    stale = [entry for entry in ENTRIES if not any(quotes(entry, text) for text in known)]
    assert not stale, "\n".join(stale)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\" >]+)", page.read_text())
        assert loaded and not [each for each in loaded if re.match(r"(https?:)?//", each)], page.name


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_every_command(site: Path) -> None:
    anchors = {each for page in site.glob("api*.html") for each in re.findall(r'id="?(encke[\w.]*)', page.read_text())}
    for module in ("encke", "encke.codecs", "encke.policies", "encke.integrations"):
        for name in set(importlib.import_module(module).__all__) - {"codecs", "policies"}:
            assert any(each.endswith(f".{name}") for each in anchors), name
    commands = unescape(re.sub(r"<[^>]+>", "", (site / "commands.html").read_text()))
    assert all(f"usage: encke {name} " in commands for name in COMMANDS)
