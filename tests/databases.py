"""PyTorch's own databases of operations and modules as small programs: plain, and compressed."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed

STEPS = 3
"""The first step learns who reads what, the second packs at once, the third repeats it."""
PLAIN_REFUSES: set[str] = {
    "as_strided.partial_views",
    "nn.FractionalMaxPool2d",
    "nn.FractionalMaxPool3d",
}
"""Entries some samples of which have no gradient without Encke either, or none when called as they are here."""
NOT_REPEATABLE = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
"""Entries whose results differ in their last bits from one plain run to the next."""
BOUND_0 = Fixed(ErrorBounded(0))

Step = list[Tensor | None]
"""Outputs and gradients of one step."""


@dataclass(frozen=True)
class Sample:
    """One way of calling an operation or a module."""

    name: str
    repeatable: bool
    build: Callable[[], tuple[nn.Module | None, Callable[..., Any], Any]]
    """Return a module (None for an operation), what to call, and its arguments as a tree."""


def allow_global_flags() -> None:
    """Let other tests of this process set flags such as `torch.backends.cudnn.benchmark`: the databases forbid it."""
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True


@functools.cache
def operations() -> list[Any]:
    """Return the entries of the operator database that have a gradient in float32 on a CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    allow_global_flags()
    return [
        entry for entry in op_db if entry.supports_autograd and torch.float32 in entry.supported_backward_dtypes("cpu")
    ]


@functools.cache
def modules() -> list[Any]:
    """Return the entries of the module database that have a gradient in float32."""
    from torch.testing._internal.common_modules import module_db

    allow_global_flags()
    return list(module_db)


def name_of(entry: Any) -> str:
    """Return an entry's name, with its variant."""
    return getattr(entry, "full_name", None) or entry.name


def samples_of(entry: Any) -> Iterator[Sample]:
    """Yield the samples of an entry. The values are random and always the same."""
    torch.manual_seed(0)
    random.seed(0)
    if hasattr(entry, "module_inputs_func"):
        yield from _module_samples(entry)
        return
    for i, sample in enumerate(entry.sample_inputs("cpu", torch.float32, requires_grad=True)):

        def call(first: Any, args: Any, kwargs: Any, process: Any = sample.output_process_fn_grad) -> Any:
            return process(entry(first, *args, **kwargs))

        arguments = (sample.input, sample.args, sample.kwargs)
        repeatable = entry.full_name not in NOT_REPEATABLE
        yield Sample(
            f"{entry.full_name}[{i}]", repeatable, lambda call=call, arguments=arguments: (None, call, arguments)
        )


def _module_samples(entry: Any) -> Iterator[Sample]:
    inputs = entry.module_inputs_func(entry, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    for i, sample in enumerate(inputs):
        if sample.forward_input is None:
            continue

        def build(sample: Any = sample) -> tuple[nn.Module, Callable[..., Any], Any]:
            torch.manual_seed(1)
            made = sample.constructor_input
            module = entry.module_cls(*made.args, **made.kwargs)
            arguments = (sample.forward_input.args, sample.forward_input.kwargs)
            if any(is_lazy(parameter) for parameter in module.parameters()):
                with torch.no_grad():
                    module(*arguments[0], **arguments[1])
            return module, module, arguments

        yield Sample(f"{entry.name}[{i}]", True, build)


def fresh(arguments: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy of a tree of arguments, and its leaves that need a gradient.

    What needs a gradient is computed from a leaf and from data, as activations are: it counts as no weight.
    """
    leaves: list[Tensor] = []

    def copy(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if not item.requires_grad:
            return item.clone()
        leaf = item.detach().clone().requires_grad_()
        leaves.append(leaf)
        return leaf + torch.zeros((), dtype=leaf.dtype) if leaf.layout == torch.strided else leaf

    return pytree.tree_map(copy, arguments), leaves


def run(sample: Sample, policy: Any = None) -> tuple[list[Step], bool]:
    """Run three steps of a sample, plain or under a policy; return them, and whether nothing lossy was stored."""
    module, call, arguments = sample.build()
    attached = module is not None and any(True for _ in module.parameters())
    context: Any = contextlib.nullcontext()
    handle = None
    if policy is not None and attached:
        handle = encke.attach(module, policy, min_bytes=1)
    elif policy is not None:
        context = encke.compress(policy, min_bytes=1)
    steps, exact = [], True
    for number in range(STEPS):
        torch.manual_seed(number)
        with context as entered:
            copy, leaves = fresh(arguments)
            output = call(*copy) if module is None else call(*copy[0], **copy[1])
        handle = entered if entered is not None else handle
        leaves += [] if module is None else list(module.parameters())
        steps.append(gradients(output, leaves))
        if handle is not None:
            exact = exact and stored_exactly(handle)
    if handle is not None:
        handle.detach()
    return steps, exact


def gradients(output: Any, leaves: list[Tensor]) -> Step:
    """Return the outputs, and the gradients of the leaves for random gradients of the outputs."""
    outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t if t.layout == torch.strided else t.to_dense() for t in outputs]
    if not outputs or not leaves:
        return []
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    dense = [t if t is None or t.layout == torch.strided else t.to_dense() for t in found]
    return [*(t.detach() for t in outputs), *dense]


def stored_exactly(handle: encke.Handle) -> bool:
    """Return whether the last pass stored everything exactly, as masks, or not at all."""
    exact = {"kept", "shape", "Lossless", "Mask", "Sign", "Between", "Window"}
    return all(row.codec in exact for row in handle.report().sites)


def difference(sample: Sample, policy: Any) -> str | None:
    """Return how compressed steps differ from plain ones in a way that they must not; None if they do not.

    At bound 0, and where nothing lossy was stored, every bit must be equal. Otherwise what plain training computes
    as a finite number must be finite.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain, _ = run(sample)
        except Exception as error:
            refused = sample.name.partition("[")[0] in PLAIN_REFUSES
            return None if refused else f"plain training fails: {type(error).__name__}: {error}"
        try:
            compressed, exact = run(sample, policy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    exact = exact or policy is BOUND_0
    for number, (expected, step) in enumerate(zip(plain, compressed, strict=True), 1):
        for i, (a, b) in enumerate(zip(expected, step, strict=True)):
            if a is None or b is None:
                if a is not b:
                    return f"step {number}, result {i}: {a is None} {b is None}"
            elif not finite(a, b):
                return f"step {number}, result {i}: not finite"
            elif exact and not (same(a, b) if sample.repeatable else torch.allclose(a, b, 1e-3, 1e-3, True)):
                return f"step {number}, result {i}: differs by {(a - b).abs().max():g} of {a.abs().max():g}"
    return None


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether every value is the same; all NaN are one value."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def finite(a: Tensor, b: Tensor) -> bool:
    """Return whether `b` is finite wherever `a` is."""
    return a.shape == b.shape and bool((b.isfinite() | ~a.isfinite()).all())
