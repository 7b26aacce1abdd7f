"""Measuring processes, from their parent's view: started, queried, and always ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType, TracebackType
from typing import Any

from encke.bench.steps import Task
from encke.tools import process

SEGMENTS = "expandable_segments:True"
"""Allocator setting under a cap, so that fragmentation does not decide; the same for all methods."""


def environment(task: Task) -> dict[str, str]:
    """Return the environment of a measuring process."""
    variables = process.environment()
    if task.device == "cpu":
        variables |= process.ALLOCATOR
    elif task.cap is not None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            variables.setdefault(name, SEGMENTS)
    return variables


class Child:
    """One measuring process. Leaving it as a context manager ends it.

    Args:
        task: The task to measure.
        variables: Environment variables besides the usual ones.
    """

    def __init__(self, task: Task, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "encke.bench.steps", json.dumps(asdict(task))],
            env={**environment(task), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request; if the process has died, `{"failed": reason, "died": True}`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": self._end(), "died": True}

    def _end(self) -> str:
        """Describe how the process ended."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1].strip()}" if lines else "")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.errors.close()


def measure(task: Task) -> dict[str, Any]:
    """Measure one task in a new process."""
    with Child(task) as child:
        return child.ask(measure=True)
