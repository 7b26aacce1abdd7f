"""`encke train RECIPE [--name value ...]`."""

from __future__ import annotations

import atexit
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from encke.tools.errors import UsageError
from encke.train.settings import RECIPES, explained, fields, read, spoken

USAGE = """usage: encke train RECIPE [--resume | --overwrite] [--name value ...]

Trains from one settings file. RECIPE is a YAML file, a name from the list below, or the folder of a run. Every setting
can be changed here: --optimizer.lr 0.05 --policy.name none --epochs 5. Under torchrun the same command trains with many
processes: torchrun --nproc-per-node 2 -m encke train RECIPE.

  --resume     go on with the run in the folder `out`, from its last checkpoint
  --overwrite  throw the run in the folder `out` away and start again
"""


def train(arguments: Sequence[str]) -> None:
    """Train from a recipe: one settings file, every field can be changed on the command line."""
    words = list(arguments)
    if not words or "--help" in words or "-h" in words:
        print(manual())
        return
    resume, overwrite = "--resume" in words, "--overwrite" in words
    words = [word for word in words if word not in ("--resume", "--overwrite")]
    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite throws it away: choose one")
    if not words or words[0].startswith("--"):
        raise UsageError(f"train needs a recipe first: a YAML file, or one of {', '.join(recipes())}")
    settings = read(words[0], words[1:])
    from encke.train.loop import train as run  # brings torch in: after everything that can be wrong in a line

    code = 0 if run(settings, resume, overwrite)["finished"] else 130
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        end(code)
    if code:
        raise SystemExit(code)


def end(code: int) -> NoReturn:
    """Ends one of several processes, all of whose work is done, past the interpreter's own end.

    DistributedDataParallel holds the process group beyond its end, and with it threads of gloo. Should one of these let
    go of a tensor while the interpreter ends, Python takes the thread down, and C++ aborts the process for that.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def recipes() -> list[str]:
    """The recipes that come with Encke."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def manual() -> str:
    """What `--help` shows: all settings with their types and defaults, and the recipes."""
    lines = [USAGE, "settings (with their defaults):"]
    every = fields()
    for name, text in explained():
        kind, default = every[name]
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
        lines.append(f"  --{name} ({spoken(kind)}; {shown or 'empty'})")
        lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
    lines += ["", "recipes:"]
    for name in recipes():
        first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0].removeprefix("#").strip()
        lines.append(f"  {name:28} {first}")
    return "\n".join(lines)
