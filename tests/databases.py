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
from encke.capture.needs import JUMPS, LIPSCHITZ, TABLE
from encke.capture.saved import Saved
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed
from tests.integration.test_end_to_end import saved_in

STEPS = 3
"""The first step learns who reads what, the second packs at once, the third repeats it."""
PLAIN_REFUSES: set[str] = {
    "as_strided.partial_views",
}
"""Entries some samples of which have no gradient without Encke either."""
NOT_REPEATABLE = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
"""Entries whose results differ in their last bits from one plain run to the next."""
BOUND_0 = Fixed(ErrorBounded(0))
MOST_VALUES = 200
"""Samples that store more values with errors are left out where each value is changed in turn."""

Step = list[Tensor | None]
"""Outputs and gradients of one step."""


@dataclass(frozen=True)
class Sample:
    """One way of calling an operation or a module."""

    name: str
    repeatable: bool
    build: Callable[[], tuple[nn.Module | None, Callable[..., Any], Any]]
    """Return a module (None for an operation), what to call, and its arguments as a tree."""


def make_usable() -> None:
    """Undo what importing the databases does to this process, and what they do that takes most of their time."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    # The databases forbid other tests to set flags such as `torch.backends.cudnn.benchmark`.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    # Each list of samples looks for a `unittest.TestCase` in the whole stack. There is none.
    for module in (common_utils, core):
        vars(module)["extract_test_fn"] = lambda: None


@functools.cache
def operations() -> list[Any]:
    """Return the entries of the operator database that have a gradient in float32 on a CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    make_usable()
    return [
        entry for entry in op_db if entry.supports_autograd and torch.float32 in entry.supported_backward_dtypes("cpu")
    ]


@functools.cache
def modules() -> list[Any]:
    """Return the entries of the module database that have a gradient in float32."""
    from torch.testing._internal.common_modules import module_db

    make_usable()
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
            module = entry.module_cls(*made.args, **made.kwargs).float()  # some entries have buffers in double
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


@contextlib.contextmanager
def attached(sample: Sample, policy: Any = None) -> Iterator[tuple[Callable[[int], tuple[Any, list[Tensor]]], Any]]:
    """Give a function that runs one step's forward pass, plain or under a policy, and the handle, if there is one.

    The function takes the number of the step, which seeds random operations, and returns output and leaves.
    """
    module, call, arguments = sample.build()
    context: Any = contextlib.nullcontext()
    handle = None
    if policy is not None and module is not None and any(True for _ in module.parameters()):
        handle = encke.attach(module, policy, min_bytes=1)
    elif policy is not None:
        context = encke.compress(policy, min_bytes=1)
        handle = context._handle

    def forward(number: int) -> tuple[Any, list[Tensor]]:
        # As torch.manual_seed does for a CPU, which also notes where it was called from.
        torch.default_generator.manual_seed(number)
        with context:
            copy, leaves = fresh(arguments)
            output = call(*copy) if module is None else call(*copy[0], **copy[1])
        return output, leaves + ([] if module is None else list(module.parameters()))

    try:
        yield forward, handle
    finally:
        if handle is not None:
            handle.detach()


def run(sample: Sample, policy: Any = None) -> tuple[list[Step], bool]:
    """Run three steps of a sample, plain or under a policy; return them, and whether nothing lossy was stored."""
    steps, exact = [], True
    with attached(sample, policy) as (forward, handle):
        for number in range(STEPS):
            steps.append(gradients(*forward(number)))
            exact = exact and (handle is None or stored_exactly(handle))
    return steps, exact


def gradients(output: Any, leaves: list[Tensor], again: bool = False) -> Step:
    """Return the outputs, and the gradients of the leaves for random gradients of the outputs.

    Args:
        output: A tree of tensors.
        leaves: The leaves.
        again: Whether the gradients are asked for again later.
    """
    outputs = tensors_with_gradient(output)
    if not outputs or not leaves:
        return []
    found = torch.autograd.grad(outputs, leaves, given_for(outputs), again, allow_unused=True)
    dense = [t if t is None or t.layout == torch.strided else t.to_dense() for t in found]
    return [*(t.detach() for t in outputs), *dense]


def tensors_with_gradient(output: Any) -> list[Tensor]:
    """Return the tensors of a tree that need a gradient, as dense ones."""
    outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return [t if t.layout == torch.strided else t.to_dense() for t in outputs]


def given_for(outputs: list[Tensor]) -> list[Tensor]:
    """Return random gradients of the outputs, always the same."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]


def stored_exactly(handle: encke.Handle) -> bool:
    """Return whether the last pass stored everything exactly, as masks, or not at all."""
    return all(isinstance(each.codec, str) or each.codec.exact for each in handle._capture.ledger.last)


def differences(sample: Sample, policies: dict[str, Any]) -> list[str]:
    """Return how compressed steps differ from plain ones in a way that they must not, by policy; empty if in nothing.

    At bound 0, and where nothing lossy was stored, every bit must be equal. Otherwise what plain training computes
    as a finite number must be finite.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain, _ = run(sample)
        except Exception as error:
            refused = sample.name.partition("[")[0] in PLAIN_REFUSES
            return [] if refused else [f"{sample.name}: plain training fails: {type(error).__name__}: {error}"]
        found = {name: difference(sample, plain, policy) for name, policy in policies.items()}
    return [f"{sample.name} under {name}: {text}" for name, text in found.items() if text]


def difference(sample: Sample, plain: list[Step], policy: Any) -> str | None:
    """Return how the steps of a sample under a policy differ from plain ones in a way that they must not."""
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


def lossy_memory(output: Any) -> dict[Any, list[Saved]]:
    """Return what may be stored with errors behind an output: each piece of memory with those who saved it."""
    found: dict[Any, list[Saved]] = {}
    for tensor in tensors_with_gradient(output):
        for _, _, saved in saved_in(tensor):
            if saved.cell is not None and saved.site.need in ("lossy", "attention", "logprob"):
                found.setdefault(saved.cell, []).append(saved)
    return found


def kinds(memory: dict[Any, list[Saved]]) -> set[Any]:
    """Return in which ways the readers of lossy memory take errors."""
    return {TABLE.get((saved.site.operation, saved.site.slot)) for each in memory.values() for saved in each}


def flattened(step: Step) -> Tensor:
    """Return all results of a step in one dimension, in double precision."""
    return torch.cat([t.flatten().double() for t in step if t is not None])


@dataclass
class Errors:
    """Errors of a sample's gradients, and what they should be like."""

    drawn: Tensor
    """Errors in several steps, which differ by the seed alone: (steps, results)."""
    variance: Tensor
    """Variance predicted for each result."""
    values: int
    """Stored values that have errors."""


def linear_errors(sample: Sample, codec: GroupQuant, steps: int) -> Errors | None:
    """Return the errors of gradients that are linear in what is stored with errors; None if these are not.

    Each stored value is changed by one to find its weight in each gradient. Its own error is uniform within half a
    step of the quantiser.
    """
    with attached(sample, Fixed(codec)) as (forward, _):
        gradients(*forward(0))
        output, leaves = forward(0)
        stored = {cell: each for cell, each in lossy_memory(output).items() if not cell.packed.codec.exact}
        lossy = {saved.site for each in stored.values() for saved in each}
        if kinds(stored) != {"linear"} or sum(len(cell.flat(False)) for cell in stored) > MOST_VALUES:
            return None
        drawn = [flattened(gradients(output, leaves))]
        if not drawn[0].isfinite().all():
            return None
        drawn += [flattened(gradients(*forward(0))) for _ in range(steps - 1)]
    with attached(sample, BOUND_0) as (forward, _):
        gradients(*forward(0))
        output, leaves = forward(0)
        found = lossy_memory(output)
        memory = {cell: each for cell, each in found.items() if any(saved.site in lossy for saved in each)}
        flats = {cell: cell.flat(False).clone() for cell in memory}

        def changed_by(changes: dict[Any, Tensor]) -> Tensor:
            """Return the gradients with other values in memory."""
            for cell, savings in memory.items():
                for saved in savings:
                    saved.tensor = saved.layout.restore(flats[cell] + changes.get(cell, 0))
                    saved.version = saved.tensor._version
            return flattened(gradients(output, leaves, again=True))

        plain = changed_by({})
        once = {cell: torch.randn_like(flat) * largest_step(flat, codec).float() for cell, flat in flats.items()}
        first = changed_by(once) - plain
        second = changed_by({cell: 2 * change for cell, change in once.items()}) - plain
        if not torch.allclose(second, 2 * first, 1e-3, 1e-4 * float(plain.abs().max())):
            return None  # products of errors
        variance = torch.zeros_like(plain)
        for cell, flat in flats.items():
            for i in range(len(flat)):
                unit = torch.zeros_like(flat)
                unit[i] = 1
                variance += largest_step(flat, codec).square() / 12 * (changed_by({cell: unit}) - plain).square()
    return Errors(torch.stack(drawn) - plain, variance, sum(map(len, flats.values())))


def largest_step(flat: Tensor, codec: GroupQuant) -> Tensor:
    """Return the largest step that a tensor's groups can have.

    The last group is filled with zeros. The lowest value is rounded down, and the step up, to bf16.
    """
    low, high = flat.min().clamp(max=0).double(), flat.max().clamp(min=0).double()
    return (high - low + 2**-8 * flat.abs().max().double()) * (1 + 2**-7) / (2**codec.bits - 2)


def smooth_excess(sample: Sample, codec: GroupQuant) -> float | None:
    """Return by how much an activation's gradient is further off than its table entry states, at most.

    None if the sample is not one smooth operation on each value.
    """
    found = []
    for policy in (BOUND_0, Fixed(codec)):
        with attached(sample, policy) as (forward, _):
            gradients(*forward(0))
            output, leaves = forward(0)
            memory = lossy_memory(output)
            if kinds(memory) != {"smooth"} or len(memory) != 1 or not isinstance(output, Tensor):
                return None
            (((saved, *_),),) = (memory.values(),)
            values = saved.restore().double()
            constant = len(leaves) < 2 and saved.site.operation == "PreluKernel"
            if constant or not leaves[0].shape == output.shape == values.shape:
                return None
            (given,) = given_for([output])
            found.append((values, torch.autograd.grad(output, leaves[0], given)[0].double()))
    (exact, plain), (stored, packed) = found
    operation = saved.site.operation
    slope = 6 * float(torch.stack([exact, stored]).abs().max()) if operation == "Pow" else LIPSCHITZ[operation]
    error = (stored - exact).abs()
    if operation in ("Sigmoid", "Tanh"):
        slope = slope + error  # a result may come back outside of the function's range
    jump = JUMPS.get(operation, 0)
    if operation == "PreluKernel":
        jump = max(jump, float((1 - leaves[1].detach()).abs().max()))  # the table states it for slopes from 0 to 2
    allowed = given.abs() * (slope * error + jump)
    return float(((packed - plain).abs() - allowed).max() / (plain.abs().max() + 1e-12))
