"""`encke train RECIPE [--name value ...]`."""

from __future__ import annotations

import atexit
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from encke.tools.errors import UsageError, first_line, out_of_memory
from encke.tools.options import help_width
from encke.train.settings import RECIPES, SETTINGS, Settings, find, parse, read_as, read_file

EXIT_CODES = {"done": 0, "diverged": 2, "interrupted": 130}
"""Exit code of the command by the reason in result.json."""
ABOUT = """Train from one settings file. RECIPE is a YAML file, a name from the list below, or the folder of a run.
Every setting can be changed here: --optimizer.lr 0.05 --policy none --epochs 5. A run goes on beyond its end with more
epochs: encke train runs/digits --epochs 20. Under torchrun the same command trains with many processes:
torchrun --nproc-per-node 2 -m encke train RECIPE.

Recipes:

"""


@dataclass(frozen=True)
class Options(Settings):
    """All settings of a training, and what to do with a folder that holds a run."""

    resume: bool = False
    """Go on with the run in the folder `out`, from its last checkpoint."""
    overwrite: bool = False
    """Delete the run in the folder `out` and start again."""


def train(arguments: Sequence[str]) -> None:
    """Train from a recipe: one settings file, every field can be changed on the command line."""
    if not arguments or arguments[0] in ("--help", "-h"):
        parse(Options, ["--help"], Options(), "", ABOUT + recipe_list())
    if arguments[0].startswith("--"):
        raise UsageError(f"train needs a recipe first: a YAML file, or one of {', '.join(recipes())}")
    options = read_as(Options, arguments[0], arguments[1:])
    if options.resume and options.overwrite:
        raise UsageError("--resume goes on with a run and --overwrite deletes it: choose one")
    resume = options.resume or (not options.overwrite and asks_for_more(arguments[0], options))
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    from encke.train.loop import train as run  # slow to import: after everything that can be wrong in a line

    try:
        code = EXIT_CODES[run(settings, resume, options.overwrite).get("reason", "done")]
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        more = (n for n in range(settings.accumulate + 1, settings.batch + 1) if settings.batch % n == 0)
        parts = next(more, settings.batch)
        raise UsageError(
            f"out of memory ({first_line(error)}): make batch smaller, or keep it and add up the gradients of smaller "
            f"parts of it with --accumulate {parts}"
        ) from None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        end(code)
    if code:
        raise SystemExit(code)


def asks_for_more(recipe: str, options: Options) -> bool:
    """Return whether the recipe is a run's folder whose epochs or steps the command line changes."""
    before = read_file(Settings, recipe)
    own = Path(before.out) / SETTINGS
    is_run = own.exists() and own.samefile(find(recipe)) and options.out == before.out
    return is_run and (before.epochs, before.steps) != (options.epochs, options.steps)


def end(code: int) -> NoReturn:
    """End one of several processes that has finished its work, without the interpreter's own shutdown.

    DistributedDataParallel keeps the process group alive after its end, and with it threads of gloo. If one of these
    threads released a tensor during interpreter shutdown, Python would end the thread, and C++ would then abort the
    process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def recipes() -> list[str]:
    """Return the names of the recipes that come with Encke."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_list() -> str:
    """Return every recipe with the first line of its file."""
    lines = ((name, (RECIPES / f"{name}.yaml").read_text().splitlines()[0].lstrip("# ")) for name in recipes())
    return "\n".join(
        textwrap.fill(text, help_width(), initial_indent=f"  {name:26}", subsequent_indent=" " * 28)
        for name, text in lines
    )
