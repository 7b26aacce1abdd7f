"""Pretrained weights: a state_dict in a file, loaded into a model."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from encke.tools.errors import UsageError, first_line
from encke.tools.extras import install_hint, installed

PARTS = ("model", "state_dict")
"""Names under which a checkpoint may hold its state_dict; Encke's own is `model`."""


def load_weights(model: nn.Module, file: str) -> str:
    """Load a file's weights into a model, in place.

    All names and shapes must match the model's, except the last layer's number of outputs: if that differs, the layer
    keeps its fresh weights. Return a line that says so; empty if all weights were loaded.
    """
    where = f"model.weights {file}"
    found, wanted = read(Path(file).expanduser(), where), model.state_dict()
    for names, words in ((wanted.keys() - found, "lacks"), (found.keys() - wanted, "has, and the model lacks,")):
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise UsageError(f"{where} {words} {min(names)}{others}: these are weights of another model")
    last = next(reversed(dict(model.named_parameters()))).rpartition(".")[0]
    fresh = [name for name in wanted if found[name].shape != wanted[name].shape]
    for name in fresh:
        ours, theirs = wanted[name].shape, found[name].shape
        if name.rpartition(".")[0] != last or not ours or not theirs or ours[1:] != theirs[1:]:
            raise UsageError(f"{where}: {name} has the shape {tuple(theirs)}, that of the model is {tuple(ours)}")
    kept = {name: value for name, value in found.items() if name not in fresh}
    for name, value in kept.items():
        if not value.isfinite().all():
            raise UsageError(f"{where}: {name} has values that are not finite")
    model.load_state_dict(wanted | kept)
    if not fresh:
        return ""
    outputs = len(found[fresh[0]]), len(wanted[fresh[0]])
    return f"{last} starts with fresh weights: {file} has {outputs[0]} outputs, this training {outputs[1]}"


def read(path: Path, where: str) -> dict[str, Tensor]:
    """Read a state_dict from a file of torch.save or of safetensors, without running code from it."""
    if not path.is_file():
        raise UsageError(f"{where}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            if not installed("safetensors"):
                raise UsageError(f"{where} needs safetensors: {install_hint('safetensors')}")
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except UnpicklingError:
        found = None
    except Exception as error:
        raise UsageError(
            f"{where} cannot be read ({first_line(error)}): a state_dict of torch.save or safetensors"
        ) from None
    for part in PARTS:
        if isinstance(found, dict) and isinstance(found.get(part), dict):
            found = found[part]
    right = isinstance(found, dict) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in found.items())
    if not right or not found:
        raise UsageError(f"{where} holds no state_dict: save model.state_dict() with torch.save")
    return found
