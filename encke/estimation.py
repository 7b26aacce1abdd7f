"""Memory of a training before it is run: `encke.estimate`, from a few steps at two small batches on the CPU."""

from __future__ import annotations

import copy
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, AdamW, Optimizer

from encke.api import attach, check_optimizer, unwrapped
from encke.capture.hooks import SMALL
from encke.capture.ledger import Tally
from encke.capture.negligible import SHARE, TOGETHER
from encke.policies.base import Policy
from encke.policies.presets import as_policy
from encke.report import Row
from encke.tools.allocations import Allocations, Part
from encke.tools.progress import progress
from encke.tools.units import size
from encke.torch_internals import pytree

BATCHES = (4, 8)
"""The two batches that are run."""
STEPS = 3
"""Steps with Encke: the first two learn the saved tensors and pack some of them twice; the third is an ordinary one."""
BEGIN = "begin"
"""Mark at the beginning of a step."""
Loss = Callable[[nn.Module, Any], Tensor]
Mark = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """Bytes as a function of the batch size: `fixed + per_sample * batch`."""

    fixed: float
    per_sample: float

    @classmethod
    def through(cls, batches: tuple[int, int], values: tuple[float, float]) -> Line:
        """Return the line through two points. Memory does not fall with the batch: then it is level."""
        slope = max(0.0, (values[1] - values[0]) / (batches[1] - batches[0]))
        return cls(values[1] - slope * batches[1], slope)

    def at(self, batch: int) -> int:
        """Return the bytes at a batch."""
        return max(0, round(self.fixed + self.per_sample * batch))


@dataclass(frozen=True)
class Forecast:
    """Memory of one way to train, at any batch size."""

    held: Line
    """Bytes kept for backward: saved by autograd, or packed by Encke."""
    peaks: tuple[Line, ...]
    """Bytes alive at most during those operations that decide the peak at some batch."""
    sites: tuple[tuple[Line, Line], ...] = ()
    """Bytes of each tensor before and after packing; `held` and `peaks` assume that all are packed."""

    def held_bytes(self, batch: int) -> int:
        """Return the bytes kept for backward at a batch."""
        return self.held.at(batch) + self._unpacked(batch)

    def peak_bytes(self, batch: int) -> int:
        """Return the expected peak of ordinary steps at a batch: weights, data, gradients, optimizer, other tensors."""
        return max(line.at(batch) for line in self.peaks) + self._unpacked(batch)

    def _unpacked(self, batch: int) -> int:
        """Return the bytes that packing does not save at this batch: small and negligible tensors are not packed."""
        sizes = sorted((saved.at(batch), packed.at(batch)) for saved, packed in self.sites)
        total, taken, more = sum(saved for saved, _ in sizes), 0, 0
        for saved, packed in sizes:
            if saved >= SMALL:
                taken += saved
                if saved > SHARE * total or taken > TOGETHER * total:
                    break
            more += saved - packed
        return more

    def largest_batch(self, memory: int) -> int:
        """Return the largest batch whose peak is at most `memory` bytes; 0 if one sample does not fit."""
        low, high = 0, 1
        while self.peak_bytes(high) <= memory and high < sys.maxsize // 2:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_bytes(middle) <= memory else (low, middle)
        return low


@dataclass(frozen=True)
class Estimate:
    """Expected memory of a training, plain and with Encke. `print(estimate)` shows it at `batch`."""

    batch: int
    memory: int | None
    """The cap on memory, in bytes."""
    weight_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    """Bytes of the parameters' gradients."""
    optimizer_bytes: int
    """Bytes of the optimizer's state."""
    plain: Forecast
    encke: Forecast

    def __str__(self) -> str:
        both = (self.plain, self.encke)
        rows: list[tuple[str, ...]] = [("", "plain", "Encke", "ratio")]

        def compare(name: str, values: list[int]) -> None:
            a, b = values
            rows.append((name, size(a), size(b), f"{a / b:.1f}x" if b else ""))

        compare("kept for backward", [each.held_bytes(self.batch) for each in both])
        compare(f"expected peak at batch {self.batch:,}", [each.peak_bytes(self.batch) for each in both])
        if self.memory is not None:
            a, b = (each.largest_batch(self.memory) for each in both)
            cells = [f"{n:,}" if n else "none fits" for n in (a, b)]
            rows.append((f"largest batch in {size(self.memory)}", *cells, f"{b / a:.1f}x" if a else ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        parts = {"weights": self.weight_bytes, "gradients": self.gradient_bytes, "optimizer": self.optimizer_bytes}
        lines.append("In both peaks: " + ", ".join(f"{name} {size(value)}" for name, value in parts.items()) + ".")
        if self.memory is not None and not self.encke.largest_batch(self.memory):
            lines.append(f"One sample needs {size(self.encke.peak_bytes(1))}: allow more memory, or a smaller model.")
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    example: Any,
    batch: int | None = None,
    memory: int | None = None,
    optimizer: Literal["adamw", "sgd"] | Optimizer = "adamw",
    loss: Loss | None = None,
    policy: Policy | str = "default",
) -> Estimate:
    """Estimate the memory of training `model`, plain and with Encke, and the largest batch that fits.

    A copy of the model runs on the CPU, four whole steps at a batch of 4 and four at 8: one plain, three with Encke.
    Their memory, operation by operation, is extrapolated linearly in the batch. Model and optimizer stay as they are.

    Args:
        model: The model to train, before `torch.compile`.
        example: A batch: a tensor, a tuple of arguments, or a dict of keyword arguments of the model. Samples lie along
            the first dimension; they are repeated as needed, so that one is enough. With 8 the bits are closer to
            those of a training.
        batch: The batch that `print` shows; that of the example unless given.
        memory: A cap in bytes, for which `print` shows the largest batch.
        optimizer: "adamw", "sgd" (with momentum), or the optimizer of the training.
        loss: A function of model and batch that returns the loss. By default the loss in the model's output, or the
            mean of the output.
        policy: A policy of `encke.policies`, or a preset's name; see `attach`.

    Returns:
        Figures to print, and functions of the batch: `plain.peak_bytes(256)`, `encke.largest_batch(16 * 2**30)`.

    Raises:
        RuntimeError: The model does not run on the example, or a profiler of torch is at work.
        TypeError: An argument has the wrong type, or the loss is none.
        ValueError: The model is compiled or without values, the example has no samples, there is no such preset, or
            `batch` or `memory` is below 1.

    Example:
        >>> import torch, encke
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), *(torch.nn.Tanh() for _ in range(8)))
        >>> estimate = encke.estimate(model, torch.randn(1, 3, 32, 32), batch=256, memory=10**9)
        >>> estimate.encke.held_bytes(256) < estimate.plain.held_bytes(256) / 4
        True
        >>> estimate.encke.largest_batch(10**9) > estimate.plain.largest_batch(10**9)
        True
    """
    optimizer = unwrapped(optimizer)
    check(model, optimizer, policy, loss)
    example = dict(example) if isinstance(example, Mapping) else example
    batch = samples_of(example) if batch is None else batch
    for name, value in (("batch", batch), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        training = Training(model, optimizer, example, loss or default_loss)
        small, large = BATCHES
        shown = progress("estimate", (1 + STEPS) * (small + large), unit="samples")
        # Elsewhere the lines would come into the output of the caller's program.
        with shown if sys.stderr.isatty() else nullcontext(lambda samples: None) as advance:
            plain = training.run(small, None, advance), training.run(large, None, advance)
            top = training.run(large, policy, advance)
            packed = training.run(small, policy, advance, top.decisions), top
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Estimate(
        batch,
        memory,
        sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers())),
        sum(parameter.nbytes for parameter in trained),
        plain[0].state,
        forecast(*plain),
        forecast(*packed),
    )


def check(model: Any, optimizer: Any, policy: Any, loss: Any) -> None:
    """Raise for a model that cannot be copied and run, and for an invalid optimizer, policy or loss."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"estimate takes a torch.nn.Module, got {type(model).__name__}")
    if (optimizer is None or isinstance(optimizer, str)) and optimizer not in ("adamw", "sgd"):
        raise ValueError(f'optimizer must be "adamw", "sgd" or a torch.optim.Optimizer, got {optimizer!r}')
    given = None if isinstance(optimizer, str) else optimizer
    check_optimizer(given, policy, "estimate(model, example, optimizer=optimizer)", model)
    as_policy(policy)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of model and batch, got {type(loss).__name__}")
    tensors = list(chain(model.parameters(), model.buffers()))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    if any(map(is_lazy, tensors)):
        raise ValueError("this model has lazy layers without a shape: run one forward pass first")
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("this model has no values (device meta): build it on the CPU, or call model.to_empty first")
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError("estimate takes the model before torch.compile: the steps run uncompiled")


def samples_of(example: Any) -> int:
    """Return the number of samples in a batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or not len(tensors[0]):
        raise ValueError("the example has no samples: pass a tensor, a tuple or a dict of tensors, samples first")
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("the example has no values (device meta): pass tensors of the CPU or a GPU")
    return len(tensors[0])


def resized(example: Any, batch: int) -> Any:
    """Return a batch on the CPU: the example's samples, repeated or left out as needed."""
    samples = samples_of(example)
    rows = torch.arange(batch) % samples

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return leaf[rows] if leaf.dim() and len(leaf) == samples else leaf

    return pytree.tree_map(resize, example)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Run the model and return the loss in its output, or the mean of the output."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    means = [
        leaf.float().mean() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not means:
        raise ValueError("the model's output has no tensor with a gradient; pass loss=")
    return torch.stack(means).sum()


def check_loss(value: Any) -> None:
    """Raise for a value from which `backward` cannot start."""
    if not isinstance(value, Tensor):
        raise TypeError(f"loss must return a tensor, the loss alone, got {type(value).__name__}")
    if value.numel() != 1 or not value.requires_grad:
        what = "no gradient" if value.numel() == 1 else f"the shape {tuple(value.shape)}"
        raise ValueError(f"loss must return one number with a gradient, got a tensor with {what}")


@dataclass
class Trial:
    """Figures of the steps at one batch."""

    batch: int
    held: int
    """Bytes kept for backward in the last step."""
    state: int
    """Bytes of the optimizer's state."""
    parts: list[Part]
    """Forward, backward up to each gradient, and optimizer of the last step."""
    sites: list[Row]
    """Tensors of the last step, packed and unpacked ones."""
    decisions: dict[str, Any] | None
    """State of the handle, which includes the bits."""


class Saved:
    """Counts the bytes that autograd saves in a `with` block, each storage once and none of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._tally = Tally()
        for tensor in chain(model.parameters(), model.buffers()):
            self._tally.count(tensor.untyped_storage())
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.bytes += self._tally.count(tensor.untyped_storage())
        return tensor

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


@dataclass(frozen=True)
class Training:
    """A training of which a few steps are run."""

    model: nn.Module
    optimizer: Any
    example: Any
    loss: Loss

    def run(
        self,
        batch: int,
        policy: Policy | str | None,
        advance: Callable[[int], None],
        decisions: dict[str, Any] | None = None,
    ) -> Trial:
        """Run whole steps of a copy of the model at a batch, plain if there is no policy.

        Every tensor is packed, as at a large batch. Decisions of another trial set the bits. `advance` is called with
        the number of samples that were run.
        """
        gc.collect()
        with Allocations() as allocations:
            twin, chosen = copied(self.model, self.optimizer)
            data = resized(self.example, batch)
            handle = None if policy is None else attach(twin, policy, chosen, min_bytes=1)
            if handle is not None and decisions is not None:
                handle.load_state_dict(decisions)
            saved = Saved(twin)
            for name, parameter in twin.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: allocations.mark(name))
            steps = 1 if handle is None else STEPS
            for _ in range(steps):
                allocations.mark(BEGIN)
                self.gradients(twin, data, saved if handle is None else nullcontext(), allocations.mark)
                try:
                    chosen.step()
                except Exception as error:
                    raise RuntimeError(
                        f"{type(chosen).__name__} does not step ({type(error).__name__}: {error}); "
                        'pass optimizer="adamw" or "sgd"'
                    ) from error
                chosen.zero_grad(set_to_none=True)
                allocations.mark("optimizer")
            report, state_dict = (None, None) if handle is None else (handle.report(), handle.state_dict())
        advance(steps * batch)
        tensors = [leaf for leaf in pytree.tree_leaves(list(chosen.state.values())) if isinstance(leaf, Tensor)]
        state = sum(tensor.nbytes for tensor in tensors)
        begins = [number for number, part in enumerate(allocations.parts) if part.name == BEGIN]
        last = allocations.parts[begins[-1] + 1 :]
        for part in last:
            # Plain steps are alike except for the state, which the optimizer creates at the end of the first.
            if handle is None and part.name != "optimizer":
                part.peaks = [peak + state for peak in part.peaks]
        held = saved.bytes if report is None else report.packed_bytes
        return Trial(batch, held, state, last, [] if report is None else list(report.sites), state_dict)

    def gradients(self, twin: nn.Module, data: Any, around: AbstractContextManager[None], mark: Mark) -> None:
        """Run forward, in a context, and backward.

        Raises:
            RuntimeError: Model or loss do not run on the example.
        """
        try:
            with around:
                value = self.loss(twin, data)
        except Exception as error:
            raise not_trained(samples_of(data), error) from error
        check_loss(value)
        mark("forward")
        try:
            value.backward()
        except Exception as error:
            raise not_trained(samples_of(data), error) from error
        del value
        mark("backward")


def not_trained(batch: int, error: Exception) -> RuntimeError:
    """Return an error that explains why model and loss do not run."""
    return RuntimeError(
        f"the model does not train on {batch} samples of the example ({type(error).__name__}: {error}); "
        "pass an example that the model takes in batches of any size, or loss=, a function of model and batch"
    )


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Optimizer]:
    """Return a copy of the model on the CPU, in training mode, and its optimizer without a state."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = parameter.detach().to("cpu", copy=True)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "take what it keeps of earlier steps off it, or build it anew"
        ) from error
    if not twin.training:  # else single layers may be in evaluation on purpose, such as frozen norms
        twin.train()
    if isinstance(optimizer, Optimizer):
        memo[id(optimizer.state)] = defaultdict(dict)
        return twin, copy.deepcopy(optimizer, memo)
    if optimizer == "sgd":
        return twin, SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    return twin, AdamW(twin.parameters(), lr=1e-4)


def forecast(small: Trial, large: Trial) -> Forecast:
    """Return the lines through two trials, operation by operation; coarser where their operations differ."""
    batches = (small.batch, large.batch)
    pairs: list[tuple[int, int]] = []
    if [part.name for part in small.parts] == [part.name for part in large.parts]:
        for a, b in zip(small.parts, large.parts, strict=True):
            same = a.operations == b.operations
            pairs += zip(a.peaks, b.peaks, strict=True) if same else [(max(a.peaks), max(b.peaks))]
    else:
        low, high = (max(peak for part in trial.parts for peak in part.peaks) for trial in (small, large))
        pairs.append((low, high))
    lines = sorted((Line.through(batches, pair) for pair in pairs), key=lambda line: (-line.per_sample, -line.fixed))
    highest: list[Line] = []
    for line in lines:
        if not highest or line.fixed > highest[-1].fixed:
            highest.append(line)
    names = [[(row.layer, row.operation, row.slot) for row in trial.sites] for trial in (small, large)]
    sites: list[tuple[Line, Line]] = []
    for low_row, high_row in zip(small.sites, large.sites, strict=True) if names[0] == names[1] else ():
        if low_row.saved_bytes:  # else it shares memory that is counted at another site
            packed = Line.through(batches, (low_row.packed_bytes, high_row.packed_bytes))
            sites.append((Line.through(batches, (low_row.saved_bytes, high_row.saved_bytes)), packed))
    return Forecast(Line.through(batches, (small.held, large.held)), tuple(highest), tuple(sites))
