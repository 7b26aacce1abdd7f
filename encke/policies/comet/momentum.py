"""Mean absolute momentum of a weight, in one unit for all optimizers: that of SGD's buffer.

SGD's buffer is a sum of gradients in which older ones fade: 1 / (1 - momentum) times their average. Adam's `exp_avg` is
an average, so it is divided by 1 - beta1. Both start at zero; dividing by 1 - decay^steps undoes that. For an optimizer
without momentum, running averages of the gradients are kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from encke.policies.comet.shards import local_part
from encke.torch_internals import foreach_norm

DECAY = 0.9
"""Decay of the running gradient averages kept for optimizers without momentum."""
Momentum = tuple[Tensor, float]
"""A tensor that keeps the momentum of a weight, and its mean absolute value over that of the momentum."""


def norms_of(tensors: Sequence[Tensor], order: int = 2) -> list[Tensor]:
    """Return the norms of tensors as 0-dim tensors on their devices, of sharded tensors those of their local parts."""
    if not tensors:
        return []
    parts = [local_part(t.detach()) for t in tensors]
    parts = [part.abs() if part.is_complex() else part for part in parts]
    wide = any(part.dtype.itemsize == 8 for part in parts)
    return foreach_norm(parts, order, torch.float64 if wide else torch.float32)


def mean_abs(momenta: Sequence[Momentum]) -> list[Tensor]:
    """Return the mean absolute values of momenta, of sharded weights those of their local parts."""
    norms = norms_of([kept for kept, _ in momenta], 1)
    return [norm / (local_part(kept).numel() * scale) for norm, (kept, scale) in zip(norms, momenta, strict=True)]


class Averages:
    """Running averages of gradients, for weights whose optimizer has no momentum or is not known."""

    def __init__(self) -> None:
        self._kept: Any = WeakTensorKeyDictionary()

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add one step's gradient of a weight."""
        if gradient.layout != torch.strided:
            return
        # One bad gradient must not spoil the average for good.
        gradient = torch.nan_to_num(local_part(gradient.detach()), 0.0, 0.0, 0.0)
        average, count = self._kept.get(weight, (None, 0))
        average = gradient * (1 - DECAY) if average is None else average.lerp_(gradient.to(average.dtype), 1 - DECAY)
        self._kept[weight] = (average, count + 1)

    def momentum(self, weight: Tensor) -> Momentum | None:
        """Return the momentum of a weight, None if it has had no gradient."""
        if weight not in self._kept:
            return None
        average, count = self._kept[weight]
        return average, (1 - DECAY**count) * (1 - DECAY)

    def clear(self) -> None:
        """Forget all averages."""
        self._kept.clear()

    def state_dict(self, names: dict[str, Tensor]) -> dict[str, Any]:
        """Return the averages of the named weights."""
        kept = {name: self._kept[weight] for name, weight in names.items() if weight in self._kept}
        return {name: (average.clone(), count) for name, (average, count) in kept.items()}

    def load_state_dict(self, state: dict[str, Any], names: dict[str, Tensor]) -> None:
        """Take the averages of those weights that are in `names`; others are left out."""
        kept = [(name, names[name], average, int(count)) for name, (average, count) in state.items() if name in names]
        for name, weight, average, _ in kept:
            if average.shape != local_part(weight.detach()).shape:
                raise ValueError(
                    f"this state is of another model: the gradient average of {name!r} has the shape "
                    f"{tuple(average.shape)}, the weight {tuple(weight.shape)}"
                )
        averages = [(weight, average.clone().to(weight.device), count) for _, weight, average, count in kept]
        self.clear()
        for weight, average, count in averages:
            self._kept[weight] = (average, count)


class Momenta:
    """Reads the momentum that an optimizer keeps of each weight."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups: dict[int, dict[str, Any]] = {
            id(p): group for group in optimizer.param_groups for p in group["params"]
        }

    def kept(self, weight: Tensor) -> bool:
        """Return whether the optimizer keeps a momentum of this weight, now or after its first step."""
        group, state = self.groups.get(id(weight)), self.optimizer.state.get(weight, {})
        if group is None:
            return False
        if isinstance(self.optimizer, torch.optim.SGD):
            return bool(group["momentum"])
        return bool(group.get("betas", (0,))[0]) and ("exp_avg" in state or not state)

    def momentum(self, weight: Tensor, updates: int | None) -> Momentum | None:
        """Return the momentum of a weight; None if there is none.

        Args:
            weight: The weight.
            updates: Steps that SGD's buffer has seen; None if nobody counted, then it counts as warmed up.
        """
        group, state = self.groups.get(id(weight)), self.optimizer.state.get(weight, {})
        if group is None or not state:
            return None
        if isinstance(self.optimizer, torch.optim.SGD):
            buffer, decay = state.get("momentum_buffer"), group["momentum"]
            if buffer is None or not decay:
                return None
            # The first gradient enters whole, later ones less the dampening.
            first = decay ** (updates - 1) if updates else 0.0
            seen = first * (1 - decay) + (1 - group["dampening"]) * (1 - first)
            return buffer, seen
        if isinstance(state.get("exp_avg"), Tensor) and group.get("betas", (0,))[0]:
            decay, steps = group["betas"][0], state.get("step")
            seen = 1.0 if steps is None else 1 - decay ** float(steps)
            return state["exp_avg"], seen * (1 - decay)
        return None


def gradient_norm(weights: Iterable[Tensor]) -> Tensor | None:
    """Return the norm of the weights' gradients together, None without any; nothing waits for the GPU.

    Of sharded weights it is the norm of this process's part.
    """
    gradients = [w.grad for w in weights if w.grad is not None and w.grad.layout == torch.strided]
    if not gradients:
        return None
    norms = norms_of(gradients)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), dtype=torch.float64)
