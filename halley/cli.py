"""The command line: `halley demo`, `halley bench codec`, `halley study gradients`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from halley import __version__
from halley.bench import UsageError

DESCRIPTION = """Halley keeps what PyTorch's autograd saves compressed, under an error bound that holds for every value.
Start with `halley demo`. Each command explains its options: `halley bench codec --help`."""
NEEDS = ("tyro", "rich", "matplotlib", "safetensors", "mlxtend")


def main(args: Sequence[str] | None = None) -> None:
    """Runs `halley` with the given arguments, by default those of the process. Exits with 2 on a user's error."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments in (["--version"], ["-V"]):
        print(f"halley {__version__}")
        return
    for package in NEEDS:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            fail(f"halley's command line needs {error.name}: pip install 'halley[cli]'")
    try:
        dispatch(arguments)
    except (UsageError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr."""
    print(f"halley: {message}", file=sys.stderr)
    raise SystemExit(code)


def dispatch(arguments: Sequence[str]) -> None:
    """Parses the arguments and runs the command."""
    from tyro.extras import SubcommandApp

    from halley.bench.codec import codec
    from halley.demo import demo
    from halley.study.gradients import gradients

    bench = SubcommandApp()
    bench.command(codec)
    study = SubcommandApp()
    study.command(gradients)
    app = SubcommandApp()
    app.command(demo)
    app.command(bench, name="bench", help="Measurements, beside the alternatives in the same run.")
    app.command(study, name="study", help="What compression does to gradients and to training.")
    app.cli(prog="halley", description=DESCRIPTION, args=arguments or ["--help"])
