"""Hooks of mkdocs: pages made from files outside of docs/, the reference, and a check of what was rendered."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site that are files of the repository outside of docs/."""
MODULES = {
    "encke.codecs": "api_codecs.md",
    "encke.policies": "api_policies.md",
    "encke.integrations": "api_integrations.md",
    "encke": "api.md",
}
"""Page of each public module. A name that several export is explained on the first of these."""
CALLBACKS = ("encke.integrations.transformers.EnckeCallback", "encke.integrations.lightning.EnckeCallback")
"""Public names of modules that are imported only together with their library."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
log = logging.getLogger("mkdocs.hooks.encke")


class Examples(griffe.Extension):
    """Shows what stands under `Example:` in a docstring as code; griffe knows the plural alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and every file outside of docs/ that a page links to."""
    linked: set[str] = set()
    for page in files.documentation_pages():
        linked |= outside(page.content_string, "docs")
    for source, uri in PAGES.items():
        text = (ROOT / source).read_text()
        folder = str(Path(source).parent)
        linked |= outside(text, folder)
        files.append(File.generated(config, uri, content=relinked(text, folder)))
    for uri, text in {**api_pages(), "commands.md": command_page()}.items():
        files.append(File.generated(config, uri, content=text))
    for name in sorted(name for name in linked if (ROOT / name).is_file()):  # mkdocs warns of the others
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to the pages and files of the site."""
    return relinked(markdown, "docs") if page.file.generated_by is None else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of lists and tables that were not recognised, for want of an empty line before them."""
    for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        if re.search(r"^(- |\d+\. |\| |```)", paragraph, re.MULTILINE):
            log.warning("%s: a list or table is shown as text: %s", page.file.src_uri, paragraph[:80])
    return html


def target(link: str, folder: str) -> str:
    """Return the file of the repository that a link leads to, or an empty string if it leads elsewhere."""
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return ""
    return os.path.normpath(Path(folder, link.partition("#")[0]))


def outside(text: str, folder: str) -> set[str]:
    """Return the files outside of docs/ that a text links to and that are no pages."""
    found = {target(link, folder) for link in LINK.findall(text)} - {""}
    return {name for name in found if not name.startswith("docs/") and name not in PAGES}


def relinked(text: str, folder: str) -> str:
    """Return a text with its links as they are on the site, where all pages lie in one folder."""

    def there(match: re.Match[str]) -> str:
        link, name = match[1], target(match[1], folder)
        if not name:
            return match[0]
        place = name.removeprefix("docs/") if name.startswith("docs/") else PAGES.get(name, f"files/{name}")
        return f"]({place}{''.join(link.partition('#')[1:])})"

    return LINK.sub(there, text)


def api_pages() -> dict[str, str]:
    """Return a page for each public module, with every name that it exports."""
    seen: list[Any] = []
    pages = {}
    for module_name, uri in MODULES.items():
        module = importlib.import_module(module_name)
        names = []
        for name in sorted(module.__all__, key=str.lower):
            thing = getattr(module, name)
            if not any(thing is each for each in seen) and type(thing) is not type(module):
                names.append(f"{module_name}.{name}")
                seen.append(thing)
        names += [name for name in CALLBACKS if name.startswith(f"{module_name}.") and module_name != "encke"]
        blocks = "\n\n".join(f"::: {name}" for name in names)
        pages[uri] = f"# {module_name}\n\n{first_paragraph(module.__doc__)}\n\n{blocks}\n"
    return pages


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((text or "").split("\n\n")[0].split())


def command_page() -> str:
    """Return the page of the commands: the help of each, as a terminal of 80 columns shows it."""
    from encke.cli import COMMANDS

    parts = ["# Commands", "Each command explains itself with `--help`; this page shows the same.", block([])]
    for name in COMMANDS:
        parts += [f"## encke {name}", block(name.split())]
    return "\n\n".join(parts) + "\n"


def block(words: list[str]) -> str:
    """Return the help of a command as a block of text."""
    from encke.cli import main

    shown, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return f"```text\n{shown.getvalue().rstrip()}\n```"
