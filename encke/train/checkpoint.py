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
import zipfile
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import encke
from encke.tools import units
from encke.tools.errors import UsageError, first_line
from encke.tools.files import finite_json, write_json, write_whole
from encke.tools.provenance import cpu_name
from encke.train.settings import SETTINGS, Settings, check, code_options, fields, read_file, to_yaml

CHECKPOINT, RESULT, ENVIRONMENT = "checkpoint.pt", "result.json", "environment.json"
METRICS, SITES, MEMORY = "metrics.jsonl", "sites.jsonl", "memory.json"
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files."""
OLD_SITES = "layers.jsonl"
"""Name of sites.jsonl in release 0.1."""
MAY_CHANGE = (
    *("model.weights", "data.path", "data.validation", "data.workers"),
    *("device", "out", "save", "metrics", "sites", "table", "ratios", "log"),
)
"""Settings that may differ when a run is resumed: its steps stay the same."""
LENGTH = ("epochs", "steps")
"""Settings by which a run is made longer when it is resumed."""


class RunFolder:
    """The folder of a run, locked by this process. Until `begin` its content does not change."""

    def __init__(self, settings: Settings, resume: bool, overwrite: bool) -> None:
        self.path, self.code_options = Path(settings.out), code_options(settings)
        if resume and not (self.path / SETTINGS).exists():
            raise UsageError(f"there is no run to resume in {self.path}")
        self.is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "lock").open("a")
        except OSError as error:
            raise UsageError(f"cannot write to out, {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / "lock").stat()  # gone if another process has just abandoned its start here
        except OSError:
            raise UsageError(f"another process is training in {self.path}; name another folder with --out") from None
        self.checkpoint = self.path / CHECKPOINT
        self.is_lengthened = resume and self.check_same(settings)
        """Whether the run is to have more steps than it was started for."""
        if resume:
            return
        if not overwrite and any((self.path / name).exists() for name in (CHECKPOINT, METRICS, RESULT)):
            raise UsageError(
                f"{self.path} holds a run already: --resume goes on with it, --overwrite deletes it, "
                "--out names another folder"
            )

    def begin(self, settings: Settings, facts: dict[str, Any], state: dict[str, Any] | None) -> None:
        """Prepare the files for the first step, when no other error can occur before it.

        Args:
            settings: The settings of the run.
            facts: Content of environment.json besides place and time of the process's start.
            state: The checkpoint to continue from; None starts at step 0 and deletes earlier results.
        """
        if state is None:
            for name in (CHECKPOINT, f"{CHECKPOINT}.part", METRICS, SITES, OLD_SITES, MEMORY, ENVIRONMENT):
                (self.path / name).unlink(missing_ok=True)
            for events in (self.path / TENSORBOARD).glob("events.out.tfevents.*"):
                events.unlink()
        else:
            if (self.path / OLD_SITES).exists():
                (self.path / OLD_SITES).rename(self.path / SITES)
            self.truncate(state["sizes"])
        (self.path / RESULT).unlink(missing_ok=True)
        self.write(SETTINGS, to_yaml(settings))
        self.note_start(facts, state["progress"]["step"] if state is not None else 0)

    def abandon(self) -> None:
        """Undo a failed start: remove the folder if it is new and otherwise empty."""
        if self.is_new and [each.name for each in self.path.iterdir()] == ["lock"]:
            (self.path / "lock").unlink()
            self.path.rmdir()

    def finished(self) -> dict[str, Any] | None:
        """Return the result of a finished run; None if there are steps left."""
        if self.is_lengthened:
            return None
        try:
            result = json.loads((self.path / RESULT).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return result if isinstance(result, dict) and result.get("finished") is True else None

    def check_same(self, settings: Settings) -> bool:
        """Raise an error if the run was trained with other settings: resuming it would be a different training.

        Returns:
            Whether its number of epochs or steps differs.
        """
        before = check(read_file(Settings, str(self.path)))
        for name in fields():
            old, new = attrgetter(name)(before), attrgetter(name)(settings)
            if name not in (*MAY_CHANGE, *LENGTH) and old != new:
                raise UsageError(
                    f"{self.path} was trained with {name} {old}, not {new}: resume it as it was, or start another run "
                    "with --out"
                )
        if before.steps == settings.steps is not None and before.epochs != settings.epochs:
            raise UsageError(
                f"{self.path} was trained for steps {before.steps}, which epochs do not change: give --steps, or "
                f"--steps none --epochs {settings.epochs:g}"
            )
        return any(getattr(before, name) != getattr(settings, name) for name in LENGTH)

    def check_disk(self, checkpoint_bytes: int) -> None:
        """Raise an error if two checkpoints do not fit: the last one stays until the next is complete."""
        free, needed = shutil.disk_usage(self.path).free, 2 * checkpoint_bytes
        if free < needed:
            raise UsageError(
                f"{self.path} has {units.size(free)} of disk left, two checkpoints take {units.size(needed)}: "
                "free some, or name another folder with --out"
            )

    def note_start(self, facts: dict[str, Any], step: int) -> None:
        """Record place and time of this start: in environment.json, or as a line of metrics for a resumed run."""
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
            self.write(ENVIRONMENT, {**here, **facts})

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line of JSON to a file."""
        try:
            with (self.path / name).open("a") as file:
                file.write(json.dumps(finite_json(line)) + "\n")
        except OSError as error:
            raise self.write_error(name, error) from None

    def write(self, name: str, content: str | dict[str, Any]) -> None:
        """Write a file of text or JSON, whole or not at all."""
        try:
            if isinstance(content, str):
                write_whole(self.path / name, content)
            else:
                write_json(self.path / name, content)
        except OSError as error:
            raise self.write_error(name, error) from None

    def write_error(self, name: str, error: Exception) -> UsageError:
        """Return an error that names the file and the way on."""
        words = getattr(error, "strerror", None) or first_line(error)
        free = units.size(shutil.disk_usage(self.path).free)
        way_on = "the checkpoint before is kept: " if self.checkpoint.exists() else ""
        command = f"encke train {shlex.quote(str(self.path))} --resume {self.code_options}".rstrip()
        way_on += f"when that is mended, {command} goes on"
        return UsageError(f"cannot write {self.path / name} ({words}; {free} are free); {way_on}")

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
            raise self.write_error(CHECKPOINT, error) from None
        draft.replace(self.checkpoint)

    def load(self) -> dict[str, Any] | None:
        """Read the last checkpoint, each byte checked; None if the run ended before its first one."""
        if not self.checkpoint.exists():
            return None
        try:
            with zipfile.ZipFile(self.checkpoint) as archive:  # torch.load does not look at the checksums
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"its part {damaged} has a wrong checksum")
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            raise self.unusable(f"cannot be read ({first_line(error)})") from None

    def unusable(self, why: str) -> UsageError:
        """Return an error about a checkpoint that no run can go on from."""
        return UsageError(f"{self.checkpoint} {why}: put back a copy of it, or start again with --overwrite")
