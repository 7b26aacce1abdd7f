"""Parts that the callbacks share: figures for the trainer's logs, and the report at the end."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from encke.api import Handle, attach, check_min_bytes
from encke.policies.base import Policy
from encke.policies.overrides import Override
from encke.policies.presets import as_policy
from encke.tools.units import size

REPORT = "encke_report.json"
"""File for the report, in the folder that the trainer writes to."""


class EnckeTraining:
    """Attaches Encke for one training at a time; base of the callbacks.

    Args:
        policy: A policy of `encke.policies`, or a preset's name, as for `encke.attach`.
        overrides: Codecs or policies for some layers, by pattern, as for `encke.attach`.
        min_bytes: Tensors of fewer bytes are kept as they are; see `encke.attach`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no such preset, or `min_bytes` is below 1.
    """

    def __init__(
        self,
        policy: Policy | str = "default",
        overrides: Mapping[str, Override] | None = None,
        min_bytes: int | None = None,
    ) -> None:
        check_min_bytes(min_bytes)
        self.policy = as_policy(policy)
        self.overrides = overrides
        self.min_bytes = min_bytes
        self.handle: Handle | None = None
        """Handle of the training in progress, detached once it has ended."""
        self._checked = False

    def begin(self, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any] | None) -> None:
        """Detach any handle of an interrupted training, attach Encke to a model, and continue from a saved state."""
        if self.handle is not None:
            self.handle.detach()
        self._checked = False
        self.handle = attach(model, self.policy, optimizer, self.overrides, self.min_bytes)
        if state is not None:
            self.handle.load_state_dict(state)

    def check_first_step(self) -> None:
        """Warn after the first step if no forward pass was compressed in it."""
        if self.handle is None or self._checked:
            return
        self._checked = True
        if not self.handle.report().forwards:
            warnings.warn(
                "encke: the first step was not compressed. Other saved-tensor hooks were active, such as those of "
                "activation offloading, or the attached model was not called: turn offloading off, or leave out the "
                "callback",
                RuntimeWarning,
                stacklevel=2,
            )

    def figures(self) -> dict[str, float]:
        """Return ratio, bytes and peak of the last forward pass, and the mean setting of an adaptive policy."""
        if self.handle is None:
            return {}
        report = self.handle.report()
        figures: dict[str, float] = {
            "encke_ratio": report.ratio,
            "encke_saved_bytes": report.saved_bytes,
            "encke_packed_bytes": report.packed_bytes,
            "encke_peak_bytes": report.peak_bytes,
        }
        in_force = {row["place"]: row for row in self.handle.history}
        for name in ("bits", "bound"):
            values = [row[name] for row in in_force.values() if row.get(name) is not None]
            if values:
                figures[f"encke_{name}"] = statistics.fmean(values)
        return figures

    def finish(self, folder: str | Path | None) -> None:
        """Detach. With a folder, write the report there and print one line about it."""
        if self.handle is None or not self.handle.attached:
            return
        report = self.handle.report()
        self.handle.detach()
        if folder is None:
            return
        path = Path(folder) / REPORT
        path.parent.mkdir(parents=True, exist_ok=True)
        report.to_json(path)
        # A progress bar may occupy the end of the last line.
        print(
            f"\nencke: {size(report.packed_bytes)} kept for backward instead of {size(report.saved_bytes)} (ratio "
            f"{report.ratio:.1f}), peak of the process {size(report.peak_bytes)}, {report.policy}; all layers: {path}",
            flush=True,
        )
