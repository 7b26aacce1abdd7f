"""Parameter collection: measure saved tensors and the gradients computed from them in one training step.

In a collection step capture passes every saved tensor that may be lossy, just packed, and the finished graph. A sample
of each tensor is measured: share of non-zeros, spread, and the codec's error. Nodes that compute a weight's gradient
get a hook that measures the output gradient during backward. For some of them the hook also computes the error of the
weight's gradient: the same product with the input's error in place of the input. These measurements never wait for the
GPU: every figure stays a 0-dim tensor on its device until the step is assessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encke.capture.needs import SECOND
from encke.capture.nodes import VIEWS, operation_name
from encke.capture.sites import Site
from encke.codecs import GroupQuant, Packed
from encke.codecs.layout import Layout
from encke.kernels import GroupFormat, GroupPlan, PackedUse, compile_ahead
from encke.kernels.formats import RECOMPUTED, SMOOTH
from encke.policies.base import PackedMemory, SavedTensor
from encke.policies.comet.branches import Branch, Graph, ScoresShare, single
from encke.policies.comet.momentum import gradient_norm
from encke.policies.comet.products import PRODUCTS, WeightGradient, WeightProduct
from encke.policies.comet.rates import decode_first
from encke.policies.comet.shards import Shards
from encke.policies.comet.stats import TensorStats, round_trip, upcast
from encke.torch_internals import queue_backward_callback, saved_setting

PROBE = 1 << 22
"""Largest number of input values whose error is kept until backward, if a part of the batch can represent all of it."""
ERRORS = GroupQuant(bits=4, seed=0x0E44)
"""Codec of these errors. Its own random numbers add 2 to 4 % to the mean square."""


class ErrorProbe:
    """The error of a packed input, kept until its weight's gradient is computed: of all rows, or of the first ones."""

    def __init__(self, flat: Tensor, layout: Layout, packed: Packed, key: int, whole: bool) -> None:
        size, stride = layout.size, layout.stride
        row = flat.numel() // max(size[0], 1)
        ordered = len(size) > 1 and not layout.copied and stride[0] == row and row * size[0] == flat.numel()
        self.rows = None if whole or not ordered or flat.numel() <= PROBE else max(1, PROBE // row)
        """Number of leading rows whose error is kept; None for all."""
        self.share = 1.0 if self.rows is None else self.rows / size[0]
        if self.rows is None:
            self.layout = layout
            error = upcast(packed.decode_flat()) - upcast(flat)
        else:
            self.layout = Layout((self.rows, *size[1:]), stride)
            first = flat[: self.rows * row]
            decoded = decode_first(packed, first.numel())
            decoded = round_trip(packed.codec, first, self.layout, key) if decoded is None else decoded
            error = upcast(decoded) - upcast(first)
        self.error = ERRORS.encode_flat(error, self.layout, key)

    def measure(self, g: Tensor, weight_gradient: WeightGradient) -> Tensor:
        """Return the mean square error of the weight's gradient; variances add up, so some rows represent all."""
        error = self.layout.restore(self.error.decode_flat().to(g.dtype))
        with cudnn_benchmark_off():
            wrong = weight_gradient(g if self.rows is None else g[: self.rows], error)
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        return torch.linalg.vector_norm(wrong, dtype=kind).square() / wrong.numel() / self.share


@contextmanager
def cudnn_benchmark_off() -> Iterator[None]:
    """Let cuDNN select an algorithm without trying them all, which is too slow for a shape that occurs only once."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(slots=True)
class WeightFigures:
    """An output gradient and the weight whose gradient is computed from it, as numbers."""

    power: float
    """Mean square of the output gradient."""
    absolute: float
    """Mean absolute value of the output gradient; NaN if it was not requested."""
    sums: float
    """Mean square, over output channels, of the output gradient's sum over positions; 0 if errors have no mean."""
    measured: float
    """Mean square error of the weight's gradient; NaN if it was not measured."""
    momentum: float
    """Mean absolute momentum."""


class WeightGradientSample:
    """One use of a weight: the output gradient that its gradient is computed from, and that gradient's error."""

    def __init__(
        self, site: Site, stats: TensorStats, product: WeightProduct, probe: ErrorProbe | None = None,
        absolute: bool = False,
    ) -> None:  # fmt: skip
        self.site = site
        self.stats = stats
        self.product = product.product
        self.weight = product.weight
        self.channel = product.channel
        self.weight_gradient: WeightGradient | None = product.weight_gradient
        self.probe = probe
        self.absolute = absolute
        """Whether the mean absolute value of the output gradient is requested."""
        self.uses = 1
        """Uses of this weight in the forward pass: the errors of its gradients add up."""
        self.positions = self.size = 0
        """Positions and values that the output gradient has."""
        self.tensors: list[Tensor | None] = []
        """Norm and sum of absolute values of the output gradient, norm of its sums over positions, and mean square
        error of the weight's gradient; None for figures that were not measured. Empty before backward."""

    def measure(self, g: Tensor) -> None:
        """Take the output gradient `g`, which backward has just computed."""
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        self.size = g.numel()
        self.positions = self.size // max(g.shape[self.channel], 1)
        norm, sums, measured = torch.linalg.vector_norm(g, dtype=kind), None, None
        absolute = torch.linalg.vector_norm(g, 1, dtype=kind) if self.absolute else None
        if not self.stats.bits:
            # The contribution of a mean error does not cancel.
            sums = torch.linalg.vector_norm(g.sum([d for d in range(g.dim()) if d != self.channel], dtype=kind))
        if self.probe is not None and self.weight_gradient is not None:
            measured = self.probe.measure(g, self.weight_gradient)
        self.tensors = [norm, absolute, sums, measured]
        self.probe = self.weight_gradient = None

    def figures(self, numbers: Sequence[float], momentum: float) -> WeightFigures:
        """Return the figures from `tensors`, given as numbers in the same order."""
        norm, absolute, sums, measured = numbers
        channels = max(self.size // max(self.positions, 1), 1)
        sums = 0.0 if self.tensors[2] is None else sums
        return WeightFigures(norm**2 / self.size, absolute / self.size, sums**2 / channels, measured, momentum)


@dataclass(slots=True)
class NormFigures:
    """Error that a batch norm propagates per error of its input, as numbers."""

    linear: float
    """Relative mean square error of the gradient per mean square error of the input."""
    quadratic: float
    """Relative mean square error of the gradient per square of the input's mean square error."""
    coherent: float = 0.0
    """The part of `linear` along the norm's input, which adds up in the gradient of the preceding layer."""


class NormGradientSample:
    """The gradient that a batch norm propagates, and its share that an error of the input would distort.

    With x normalised to h, and mean(h) = 0, mean(h^2) = 1 over the m values of a channel, the input's gradient is
    proportional to g - mean(g) - h * mean(g h). An error e of h of mean square k adds e * mean(g h) + h * mean(g e) to
    it, of mean square k * (mean(g h)^2 + mean(g^2) / m), and e * mean(g e), of mean square k^2 * mean(g^2) / m.
    """

    def __init__(self, site: Site, stats: TensorStats, mixed: float) -> None:
        self.site = site
        self.stats = stats
        self.mixed = mixed
        """Share of values whose groups also hold values of other channels."""
        self.count = 0
        """Number of values in a channel."""
        self.tensor: Tensor | None = None
        """For each channel: norms of the output's and the input's gradient, gradients of weight and bias, and
        1 / deviation. None if they were not measured."""

    def measure(self, invstd: Tensor, gradients: tuple[Tensor | None, ...], g: Tensor | None) -> None:
        """Measure the gradients of input, weight and bias, which backward has just computed from `g`."""
        # Python functions return no gradient for an argument that is None.
        grad_x, grad_weight, grad_bias = (*gradients, None, None)[:3]
        if g is None or grad_x is None or grad_weight is None or grad_bias is None or invstd.numel() != g.shape[1]:
            return
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        over = [d for d in range(g.dim()) if d != 1]
        self.count = g.numel() // g.shape[1]
        norms = [torch.linalg.vector_norm(t.detach(), dim=over, dtype=kind) for t in (g, grad_x)]
        # A copy: gradients are clipped in place.
        self.tensor = torch.cat([*norms, grad_weight.detach(), grad_bias.detach(), invstd])


def norm_figures(samples: Sequence[NormGradientSample], measured: Sequence[Tensor]) -> list[NormFigures]:
    """Return the error that batch norms propagate, from their `tensor` on the host."""
    counts = torch.tensor([float(each.count) for each in samples], dtype=torch.float64)
    channels = torch.tensor([each.numel() // 5 for each in measured])
    owner = torch.repeat_interleave(torch.arange(len(samples)), channels)
    mixed, count = torch.tensor([each.mixed for each in samples], dtype=torch.float64)[owner], counts[owner]
    table = torch.cat([each.view(5, -1).double() for each in measured], 1)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(len(samples), dtype=torch.float64).index_add_(0, owner, x)

    power, propagated = table[:2].square() / count
    along, mean = table[2:4] / count
    rest = power - along.square() - mean.square()
    # A gradient that is nearly all mean, or nearly all along h, leaves too little to measure.
    share = propagated / rest.clamp_min(1e-3 * power)
    # A group's values have one error: only where groups have one channel is it in proportion to its values.
    inverse = table[4].square()
    scale = mixed * inverse + (1 - mixed) * (channels / total(inverse.reciprocal()))[owner]
    second = scale * share * power / count
    terms = (scale * share * along.square() + second, scale * second, second)
    columns = [(total(torch.nan_to_num(term)) / total(propagated)).tolist() for term in terms]
    return [NormFigures(*figures) for figures in zip(*columns, strict=True)]


def mixed_share(packed: Packed, layout: Layout) -> float:
    """Return the share of a batch norm's input values whose groups also hold values of other channels."""
    plane, group = math.prod(layout.size[2:]), packed.codec.group or ERRORS.group
    if packed.plan is not None and (packed.plan.format.stride > 1 or packed.plan.format.row):
        return 0.0
    if layout.channels_last or plane < group:
        return 1.0
    # In each plane one group reaches beyond the plane, unless it ends exactly where the plane does.
    return (group - math.gcd(plane, group)) / plane


class CometCollector:
    """Measures one collection step: a forward pass (with accumulation several), its backward, the optimizer's step."""

    compiled_for = "cuda"
    """Device type whose kernels are compiled when they are first needed."""

    def __init__(self, trials: Sequence[GroupQuant], probed: Collection[str], whole: bool, absolute: bool) -> None:
        self.trials = trials
        self.probed = probed
        """Places whose weight gradient's error is measured."""
        self.whole = whole
        """Whether that measurement takes the whole batch: if errors are biased, some rows do not represent all."""
        self.absolute = absolute
        """Whether mean absolute output gradients are measured, for COMET's own formula."""
        self.batches = 1
        self.sites: dict[str, tuple[Site, TensorStats]] = {}
        self.weight_samples: list[WeightGradientSample] = []
        self.norm_samples: list[NormGradientSample] = []
        self.branches: dict[str, Branch] = {}
        """Branches in which functions, attention and norms over rows read saved tensors, by place."""
        self.scores: dict[str, ScoresShare] = {}
        """Shares of queries and keys, by the place of attention's values."""
        self.norm_after_backward: Tensor | None = None
        """Norm of the gradients after the last backward."""
        self.shards: Shards | None = None
        """The model's sharded parameters, if it has any."""
        self._uses: dict[PackedUse, None] = {}
        """Uses of packed data on a GPU, for which kernels are compiled ahead of time."""
        self._stats: dict[int, tuple[PackedMemory, TensorStats, Packed]] = {}
        self._probes: dict[int, ErrorProbe] = {}

    def saved(self, saved: SavedTensor, cell: PackedMemory, flat: Tensor) -> None:
        """Measure a tensor that was just packed, or that shares packed memory."""
        site, packed, layout = saved.site, cell.packed, saved.layout
        if self.batches > 1 or packed is None or site.need != "lossy":
            return
        known = self._stats.get(id(cell))
        if known is None or known[2] is not packed:
            stats = TensorStats(flat, layout, packed, self.trials, cell.key, site.operation)
            known = self._stats[id(cell)] = (cell, stats, packed)
            self._probes.pop(id(cell), None)
        self.sites[site.place] = (site, known[1])
        known[1].fixed |= cell.fixed
        known[1].signed |= cell.signed
        if flat.device.type == self.compiled_for and packed.plan is not None and self.trials:
            self._note_use(site, layout, packed.plan, cell.masked)
        if site.place in self.probed:
            # The second operand of a product has the batch in its last dimension.
            whole = self.whole or site.slot in SECOND
            self._probes[id(cell)] = ErrorProbe(flat, layout, packed, cell.key, whole)

    def _note_use(self, site: Site, layout: Layout, plan: GroupPlan, masked: bool) -> None:
        """Record the kernels that this memory uses at every rate, and those of its probe."""
        norm, last = site.operation.endswith("BatchNorm"), bool(layout.channels_last)
        rates, size = tuple(each.bits for each in self.trials), layout.size if layout.dense else (plan.numel,)
        reader = (site.operation,) if site.operation in RECOMPUTED else ()
        self._uses[PackedUse(plan.format, size, last, norm, masked, reader, rates)] = None
        if not norm:
            errors = GroupFormat(ERRORS.bits, ERRORS.group, torch.float32, plan.format.stride)
            self._uses[PackedUse(errors, (plan.numel,), False, False, False, (), (ERRORS.bits,))] = None

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], Iterable[tuple[str, SavedTensor]]]) -> None:
        """Register hooks on nodes behind `nodes` that compute a weight's gradient; called after the forward pass."""
        start = [node for node in nodes if node is not None]
        for node in start:
            node.register_prehook(self._at_backward)
        if self.batches > 1:
            return
        found: list[WeightGradientSample] = []
        stack, seen = list(start), dict[Any, None]()
        readers: dict[str, Any] = {}
        weights: dict[Any, list[WeightGradientSample]] = {}
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen[node] = None
            stack.extend(next_node for next_node, _ in node.next_functions)
            name = operation_name(node)
            if name in PRODUCTS:
                for slot, saved in saved_by(node):
                    weight_sample = self._sample_weight(node, slot, saved)
                    if weight_sample is not None:
                        found.append(weight_sample)
                        weights.setdefault(node, []).append(weight_sample)
            elif self.trials and name.endswith("BatchNorm"):
                for _, saved in saved_by(node):
                    if saved.site.slot == "input" and saved.cell is not None and id(saved.cell) in self._stats:
                        self._sample_norm(node, saved)
            elif self.trials and name not in VIEWS:
                for _, saved in saved_by(node):
                    if saved.site.place in self.sites and saved.cell is not None:
                        readers[saved.site.place] = node
        self._follow(readers, Graph(seen, weights))
        sharded = self.shards.by_whole() if self.shards is not None else {}
        for each in found:
            each.weight = sharded.get(id(each.weight), each.weight)
        # Regions that are recomputed in backward add samples of their own.
        self.weight_samples += found
        uses = Counter(id(each.weight) for each in self.weight_samples)
        for each in self.weight_samples:
            each.uses = uses[id(each.weight)]
        self._stats.clear()
        self._probes.clear()
        if self._uses:
            # Batch norms that an activation follows use kernels of their own; which norms those are is not known here.
            relu = any(use.relu for use in self._uses)
            operations = {site.operation for site, _ in self.sites.values()}
            smooth = tuple(each for each in SMOOTH if each in operations)
            compile_ahead(use.before(relu, smooth) if use.norm else use for use in self._uses)

    def _follow(self, readers: dict[str, Any], graph: Graph) -> None:
        """Measure the branches that contain the readers of some places."""
        for place, node in readers.items():
            self.branches[place] = graph.branch(node)
            site = self.sites[place][0]
            if site.operation == "ScaledDotProductAttention" and site.slot == "value":
                self.scores[place] = ScoresShare(node)

    def _sample_weight(self, node: Any, slot: str, saved: SavedTensor) -> WeightGradientSample | None:
        cell, site = saved.cell, saved.site
        if cell is None or id(cell) not in self._stats:
            return None
        product = PRODUCTS[operation_name(node)](node, slot, saved.layout.size)
        if product is None:
            return None
        probe = self._probes.get(id(cell)) if site.place in self.probed else None
        weight_sample = WeightGradientSample(site, self._stats[id(cell)][1], product, probe, self.absolute)

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if single(gradients[0]):
                weight_sample.measure(gradients[0].detach())

        node.register_prehook(hook)
        return weight_sample

    def _sample_norm(self, node: Any, saved: SavedTensor) -> None:
        _, stats, packed = self._stats[id(saved.cell)]
        invstd = saved_setting(node, "result2", None)  # 1 / deviation of each channel; empty in eval
        if invstd is None:
            return
        norm_sample = NormGradientSample(saved.site, stats, mixed_share(packed, saved.layout))

        # Hooks must not hold nodes: the cycle through the graph would not be collected before the graph behind it is
        # freed.
        def hook(computed: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
            if single(gradients[0]):
                norm_sample.measure(invstd, computed, gradients[0])

        node.register_hook(hook)
        self.norm_samples.append(norm_sample)

    def _at_backward(self, gradients: Any) -> None:
        """Read the gradients at the end of backward, after other callbacks that run at its end (DDP)."""
        queue_backward_callback(lambda: queue_backward_callback(self._after_backward))

    def _after_backward(self) -> None:
        self.norm_after_backward = gradient_norm(self.weights())

    def weights(self) -> list[Tensor]:
        """Return the weights whose gradients are computed from lossy inputs, each once."""
        return list({id(each.weight): each.weight for each in self.weight_samples}.values())
