"""The folder of a run: settings, environment, metrics, checkpoint, result. Only rank 0 writes.

Files are written whole or not at all. Metrics grow line by line; lines that a killed run wrote after its last
checkpoint are removed when it is resumed.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import encke
from encke.tools import units
from encke.tools.errors import UsageError
from encke.tools.files import finite_json, write_json, write_whole
from encke.tools.provenance import cpu_name
from encke.train.settings import SETTINGS, Settings, fields, read, to_yaml

CHECKPOINT, RESULT, ENVIRONMENT = "checkpoint.pt", "result.json", "environment.json"
METRICS, SITES = "metrics.jsonl", "sites.jsonl"
OLD_SITES = "layers.jsonl"
"""Name of sites.jsonl in release 0.1."""
MAY_CHANGE = ("data.path", "data.validation", "data.workers", "device", "out", "save", "metrics", "sites", "table")
"""Settings that may differ when a run is resumed: its steps stay the same."""


class RunFolder:
    """The folder of a run, locked for this process."""

    def __init__(self, settings: Settings, resume: bool, overwrite: bool) -> None:
        self.path = Path(settings.out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "lock").open("a")
        except OSError as error:
            raise UsageError(f"cannot write to out, {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another process is training in {self.path}; name another folder with --out") from None
        self.checkpoint = self.path / CHECKPOINT
        if resume:
            self.check_same(settings)
            if (self.path / OLD_SITES).exists():
                (self.path / OLD_SITES).rename(self.path / SITES)
        elif (self.path / SETTINGS).exists() and not overwrite:
            raise UsageError(
                f"{self.path} holds a run already: --resume goes on with it, --overwrite deletes it, "
                "--out names another folder"
            )
        else:
            for name in (CHECKPOINT, METRICS, SITES, OLD_SITES, RESULT, ENVIRONMENT):
                (self.path / name).unlink(missing_ok=True)
        write_whole(self.path / SETTINGS, to_yaml(settings))

    def check_same(self, settings: Settings) -> None:
        """Raise an error if the run was trained with other settings: resuming it would be another training."""
        if not (self.path / SETTINGS).exists():
            raise UsageError(f"there is no run to resume in {self.path}")
        before = read(str(self.path))
        for name in fields():
            old, new = attrgetter(name)(before), attrgetter(name)(settings)
            if name not in MAY_CHANGE and old != new:
                raise UsageError(
                    f"{self.path} was trained with {name} {old}, not {new}: resume it as it was, or start another run "
                    "with --out"
                )

    def check_disk(self, checkpoint_bytes: int) -> None:
        """Raise an error if two checkpoints do not fit: the last one stays until the next is complete."""
        free, needed = shutil.disk_usage(self.path).free, 2 * checkpoint_bytes
        if free < needed:
            raise UsageError(
                f"{self.path} has {units.size(free)} of disk left, two checkpoints take {units.size(needed)}: "
                "free some, or name another folder with --out"
            )

    def note_start(self, facts: dict[str, Any], step: int) -> None:
        """Write where and when this process starts: environment.json, or a line of metrics if it resumes a run."""
        here = {
            "encke": encke.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if facts["cuda"] else cpu_name(),
            "threads": torch.get_num_threads(),
            "command": shlex.join(["encke", *sys.argv[1:]]),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if step:
            self.append(METRICS, {"event": "resume", "step": step, **here})
        else:
            write_json(self.path / ENVIRONMENT, {**here, **facts})

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line of JSON to a file."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps(finite_json(line)) + "\n")

    def sizes(self) -> dict[str, int]:
        """Return the lengths of the growing files, for a checkpoint."""
        return {n: (self.path / n).stat().st_size for n in (METRICS, SITES) if (self.path / n).exists()}

    def truncate(self, sizes: dict[str, int]) -> None:
        """Shorten the growing files to their lengths at a checkpoint."""
        lengths = {SITES: sizes.get(OLD_SITES, 0), **sizes}
        for name in (METRICS, SITES):
            path = self.path / name
            if path.exists():
                os.truncate(path, min(lengths.get(name, 0), path.stat().st_size))

    def save(self, state: dict[str, Any]) -> None:
        """Write the checkpoint; the one before stays until this one is on the disk."""
        draft = self.path / f"{CHECKPOINT}.part"
        try:
            with draft.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            kept = f"; the checkpoint before is kept: {self.checkpoint}" if self.checkpoint.exists() else ""
            raise UsageError(f"cannot write a checkpoint to {self.path}: {first_line(error)}{kept}") from None
        draft.replace(self.checkpoint)

    def load(self) -> dict[str, Any] | None:
        """Read the last checkpoint; None if the run ended before its first one."""
        if not self.checkpoint.exists():
            return None
        try:
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            words = f"{self.checkpoint} cannot be read ({first_line(error)}): start again with --overwrite"
            raise UsageError(words) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
