"""Linear layer and cross-entropy in chunks: the logits of a language model are never all in memory.

Logits of a large vocabulary often are the largest tensors of a training step, and exist in it two or three times: in
their own dtype, as float32 and as their gradient. `chunk_loss` makes the output layer of a model return
`DeferredLogits`, a tensor that holds the recipe for its computation. If it reaches `cross_entropy`, loss and gradients
are computed for a few rows at a time. Any other use computes the logits as the layer would have done, so that nothing
else changes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from encke.torch_internals import functorch_interpreter, make_wrapper_subclass, pytree, without_torch_function

CHUNK = 1 << 25
"""Logits that exist at a time."""
SMALLEST = 1 << 22
"""Smallest number of logits that is worth chunking."""


def chunk_loss(model: nn.Module, head: nn.Module | None = None) -> ChunkedLoss:
    """Compute the cross-entropy of a model's logits in chunks, so that the logits are never all in memory.

    The result equals the plain computation up to the order of summation: nothing is compressed. It takes effect in
    training mode if the logits, possibly cast, scaled or viewed with other leading dimensions, reach
    `torch.nn.functional.cross_entropy` with class indices and reduction "mean" or "sum". Otherwise the logits are
    computed as usual, as they are in compiled models.

    Args:
        model: A language model of transformers, or any model whose `head` is given.
        head: The linear layer that computes the logits; by default `model.get_output_embeddings()`.

    Returns:
        A handle whose `remove()` restores the layer.

    Raises:
        TypeError: The output layer is not a `torch.nn.Linear`.
        ValueError: The model does not declare its output layer, or the loss is chunked already.

    Example:
        >>> import torch, encke.integrations
        >>> from torch.nn.functional import cross_entropy
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50_000, 32), torch.nn.Linear(32, 50_000))
        >>> handle = encke.integrations.chunk_loss(model, head=model[1])
        >>> tokens = torch.randint(50_000, (4, 65))
        >>> logits = model(tokens[:, :-1])
        >>> cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        >>> handle.remove()
    """
    if head is None:
        find = getattr(model, "get_output_embeddings", None)
        head = find() if find is not None else None
        if head is None:
            raise ValueError(
                f"{type(model).__name__} does not tell which layer computes its logits: name it, as in "
                "chunk_loss(model, head=model.lm_head)"
            )
    if isinstance(head, DeferringLinear):
        raise ValueError("the loss of this model is computed in chunks already: call remove() of its handle first")
    if type(head) is not nn.Linear:
        raise TypeError(f"only the logits of a torch.nn.Linear can be computed in chunks, got {type(head).__name__}")
    head.__class__ = DeferringLinear
    return ChunkedLoss(head)


class ChunkedLoss:
    """Handle of a model whose loss is computed in chunks; `chunk_loss` makes it."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def remove(self) -> None:
        """Make the output layer an ordinary linear layer again. Calling it twice does no harm."""
        if isinstance(self._head, DeferringLinear):
            self._head.__class__ = nn.Linear  # type: ignore[assignment]


class DeferringLinear(nn.Linear):
    """Linear layer that defers the computation of large outputs until they are read."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, deferred in training where it is large."""
        plain = type(input) is Tensor and type(self.weight) is nn.Parameter
        if (
            torch.compiler.is_compiling()
            or functorch_interpreter() is not None
            or not (plain and self.training and torch.is_grad_enabled() and input.dim() > 1)
            or not (input.requires_grad or self.weight.requires_grad)
            or input.numel() // self.in_features * self.out_features < SMALLEST
        ):
            return super().forward(input)
        recipe = Recipe(input, self.weight, self.bias)
        logits = Defer.apply(input, self.weight, self.bias)
        assert isinstance(logits, DeferredLogits)
        logits.recipe = recipe
        return logits


# -- logits that are not computed yet ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Inputs of a linear layer, and the rowwise operations applied to its output so far."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    pointwise: tuple[Callable[[Tensor], Tensor], ...] = ()
    transposed: bool = False
    """Whether the vocabulary is dimension 1 instead of the last dimension."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def check(self) -> None:
        """Raise if a tensor was written to since the layer was called."""
        if self._versions() != self.__dict__["versions"]:
            raise RuntimeError(
                "encke: the input or the weight of the layer that computes the logits was modified in place after the "
                "layer was called, but its output had not been computed yet. Read the logits before, or call remove() "
                "of the handle that encke.integrations.chunk_loss returned"
            )

    def linear(self) -> Tensor:
        """Return the output of the linear layer."""
        self.check()
        return F.linear(self.hidden, self.weight, self.bias)


def meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and type without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


DEFERRED_OPS = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.transpose.int,
    torch.ops.aten.clone.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.tanh.default,
}
"""Operations whose result is deferred, too, where the logits are their only tensor."""


class DeferredLogits(Tensor):
    """Output of a linear layer that is computed when an operation reads it.

    To autograd it is an ordinary result of the layer: every operation on it has the right gradient.
    """

    recipe: Recipe | None
    _compute: Callable[[], Tensor]
    _value: Tensor | None
    _family: list[weakref.ref[DeferredLogits]]
    """All that was derived from the same output."""

    @staticmethod
    def __new__(
        cls, like: Tensor, device: torch.device, compute: Callable[[], Tensor], parent: DeferredLogits | None = None
    ) -> DeferredLogits:
        logits = make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        logits.recipe, logits._compute, logits._value = None, compute, None
        logits._family = parent._family if parent is not None else []
        logits._family.append(weakref.ref(logits))
        return logits

    def value(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def settle(self) -> None:
        """Compute all that was derived from the same output, before something is written to it."""
        for logits in [each() for each in self._family]:
            if logits is not None:
                logits.value()
                logits.recipe = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits({self.value()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first, *rest = args
        others = any(isinstance(each, Tensor) for each in (*rest, *kwargs.values()))
        same_device = kwargs.get("device") in (None, getattr(first, "device", None))
        if func in DEFERRED_OPS and isinstance(first, DeferredLogits) and not others and same_device:
            like = func(meta(first), *rest, **{key: value for key, value in kwargs.items() if key != "device"})
            return DeferredLogits(like, first.device, lambda: func(first.value(), *rest, **kwargs), first)
        if func._schema.is_mutable:
            for logits in [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DeferredLogits)]:
                logits.settle()
        args, kwargs = pytree.tree_map_only(DeferredLogits, DeferredLogits.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = chunked_cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        if func in READS:
            # The value, with or without a gradient as the logits themselves.
            args = (args[0].value().detach().requires_grad_(args[0].requires_grad), *args[1:])
        with without_torch_function():
            result = func(*args, **kwargs)
        if isinstance(result, DeferredLogits) and result.recipe is None and isinstance(args[0], DeferredLogits):
            result.recipe = next_recipe(func, args, kwargs, result)
        return result


class Defer(torch.autograd.Function):
    """Linear layer whose output is not computed in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the deferred output."""
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        recipe = Recipe(hidden.detach(), weight.detach(), None if bias is None else bias.detach())

        def compute() -> Tensor:
            with torch.no_grad(), torch.autocast(device, dtype if autocast else None, enabled=autocast):
                return recipe.linear()

        ctx.save_for_backward(hidden, weight)
        like = torch.empty((*hidden.shape[:-1], weight.shape[0]), dtype=dtype, device="meta")
        return DeferredLogits(like, hidden.device, compute)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of a linear layer."""
        hidden, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        inputs = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype) if needs[0] else None
        weights = (rows.mT @ hidden.flatten(0, -2).to(rows.dtype)).to(weight.dtype) if needs[1] else None
        return inputs, weights, rows.sum(0).to(weight.dtype) if needs[2] else None


READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage}
"""Functions that read memory instead of calling an operation."""
VIEWS = {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous, torch.reshape, torch.flatten}
CASTS = {Tensor.float, Tensor.to, Tensor.type, Tensor.half, Tensor.bfloat16, Tensor.double}
SCALINGS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.tanh}
SCALINGS |= {torch.mul, torch.div, torch.tanh}


def next_recipe(func: Any, args: Any, kwargs: Any, result: DeferredLogits) -> Recipe | None:
    """Return the recipe of the result of `func` on deferred logits; None if its rows are not the layer's rows."""
    first, *rest = args
    recipe: Recipe | None = first.recipe
    if recipe is None or recipe.transposed:
        return None
    recipe.check()
    if func in CASTS or func in SCALINGS:
        step = lambda logits: func(logits, *rest, **kwargs)  # noqa: E731
        return replace(recipe, pointwise=(*recipe.pointwise, step))
    hidden = None
    if func in VIEWS and result.shape[-1] == first.shape[-1]:
        # Values lie in memory in the order of the rows: with the last dimension whole, rows stay together.
        hidden = recipe.hidden.reshape(*result.shape[:-1], recipe.hidden.shape[-1])
    elif func is Tensor.__getitem__ and selects_rows(rest[0], first.dim()):
        hidden = recipe.hidden[rest[0]]
    elif func in (Tensor.transpose, torch.transpose) and first.dim() == 3:
        dims = {each % 3 for each in (*rest, *kwargs.values())}
        return replace(recipe, transposed=True) if dims == {1, 2} else None
    return replace(recipe, hidden=hidden) if hidden is not None else None


def selects_rows(index: Any, dimensions: int) -> bool:
    """Return whether an index of slices and numbers leaves the last dimension whole."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(item, slice | int) and not isinstance(item, bool) or item is Ellipsis for item in items):
        return False
    last = items[-1] is not Ellipsis and (Ellipsis in items or len(items) == dimensions)
    return not last or items[-1] == slice(None)


# -- cross-entropy -----------------------------------------------------------------------------------------------------


def chunked_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the cross-entropy of deferred logits; None if it cannot be computed in chunks."""
    recipe = input.recipe if isinstance(input, DeferredLogits) and input._value is None else None
    if recipe is None or type(target) is not Tensor or target.dtype != torch.int64:
        return None
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
        return None
    if weight is not None and (type(weight) is not Tensor or weight.requires_grad):
        return None
    if not recipe.transposed and input.dim() != 2 or target.shape != recipe.hidden.shape[:-1]:
        return None
    if not torch.is_grad_enabled() or target.device != input.device:
        return None
    recipe.check()
    settings = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    hidden, target = recipe.hidden.flatten(0, -2), target.flatten()
    total = ChunkedCrossEntropy.apply(hidden, recipe.weight, recipe.bias, target, recipe.pointwise, settings)
    if reduction == "sum":
        return total
    counted = target != ignore_index
    terms = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()
    return total / terms


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of a linear layer's output; gradients are computed along with it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        pointwise: tuple[Callable[[Tensor], Tensor], ...],
        settings: dict[str, Any],
    ) -> Tensor:
        """Return the sum over all rows."""
        needs = ctx.needs_input_grad
        inputs = torch.empty_like(hidden) if needs[0] else None
        # 16-bit gradients are summed in 32 bits, as inside one matrix product.
        wide = torch.promote_types(weight.dtype, torch.float32)
        weights = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        biases = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        total: Tensor | None = None
        # Chunks of equal size: otherwise the last one would have a shape of its own.
        count = max(math.ceil(hidden.shape[0] * weight.shape[0] / CHUNK), 1)
        for rows, labels, out in zip(
            hidden.tensor_split(count),
            target.tensor_split(count),
            inputs.tensor_split(count) if inputs is not None else [None] * count,
            strict=True,
        ):
            leaf = F.linear(rows, weight, bias).requires_grad_()
            # The graph of a chunk is freed with the chunk, so its saved tensors need no compression.
            with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                logits = leaf
                for step in pointwise:
                    logits = step(logits)
                loss = F.cross_entropy(logits, labels, reduction="sum", **settings)
                (gradient,) = torch.autograd.grad(loss, leaf)
            total = loss.detach() if total is None else total + loss.detach()
            del logits, loss, leaf
            if out is not None:
                out.copy_(gradient @ weight)
            if weights is not None:
                weights += gradient.mT @ rows
            if biases is not None:
                biases += gradient.sum(0)
        ctx.save_for_backward(inputs, weights, biases)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the layer's input, weight and bias."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "encke: a cross-entropy that is computed in chunks has no second derivatives (create_graph=True): call "
                "remove() of the handle that encke.integrations.chunk_loss returned"
            )
        found = (
            None if each is None else (each * gradient).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *found, None, None, None
