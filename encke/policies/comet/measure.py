"""Parameter collection: what one training step tells about its saved tensors and the gradients computed from them.

On a collection step capture shows every saved tensor that may be lossy, just packed, and the finished graph. Of a
tensor a sample is measured: share of non-zeros, spread, and the codec's error in it. Nodes that compute a weight's
gradient get a hook that measures the output gradient when backward passes by; for some of them the error of the
weight's gradient itself is computed: it is the same product with the input's error in place of the input. Nothing waits
for the GPU here: everything stays a 0-dim tensor on its device until `fetch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Collection as Some
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from encke.capture.needs import SECOND, VIEWS, operation_name
from encke.capture.saved import Saved, SharedCell
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant
from encke.codecs.packed import Layout, Packed
from encke.policies.comet.momentum import gradient_norm
from encke.policies.comet.theory import Product

SAMPLE = 1 << 20
"""Values of a tensor that are measured, in evenly spaced runs."""
RUNS = 16
PROBE = 1 << 22
"""Values of an input whose error is kept until backward, where samples of the batch can stand for all."""
ERRORS = GroupQuant(bits=4, seed=0x0E44)
"""How such errors are kept. Its own random numbers add 2 to 4 % to the mean square."""

Gradient = Callable[[Tensor, Tensor], Tensor]


def sample(flat: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """At most SAMPLE values of a flat tensor, in evenly spaced runs of whole groups (channels_last: whole pixels)."""
    channels = layout.size[1] if len(layout.size) > 3 and layout.stride[1] == 1 and not layout.copied else 1
    if flat.numel() <= SAMPLE:
        values = flat
    else:
        unit = 1024 * channels
        length = max(SAMPLE // RUNS // unit, 1) * unit
        runs = max(min(RUNS, SAMPLE // length), 1)
        step = (flat.numel() - length) // max(runs - 1, 1) // unit * unit
        values = torch.cat([flat[i * step : i * step + length] for i in range(runs)])
    pixels = values.numel() // channels
    if channels == 1 or pixels * channels != values.numel():
        return values, Layout((values.numel(),), (1,))
    return values, Layout((pixels, channels, 1, 1), (channels, 1, channels, channels))


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Stats:
    """One piece of saved memory as it was when it was packed. The numbers are 0-dim tensors until they are fetched.

    What was packed is not held: it goes when backward has read it.
    """

    def __init__(self, flat: Tensor, layout: Layout, packed: Packed, trials: Iterable[Codec], key: int) -> None:
        values, shape = sample(flat, layout)
        exact = wide(values)
        self.values = flat.numel()
        self.trials = tuple(trials)
        self.share = torch.count_nonzero(values) / values.numel()
        self.std = exact.std(correction=0)
        self.codec = packed.codec
        self.errors: dict[Codec, tuple[Tensor, Tensor]] = {}
        """For each codec tried, and the one in force: mean square and mean of its error, zeros included."""
        for codec in dict.fromkeys([*self.trials, packed.codec]):
            if codec.takes(values.dtype):
                error = round_trip(codec, values, shape, key) - exact
                self.errors[codec] = (error.square().mean(), error.mean())


def round_trip(codec: Codec, flat: Tensor, layout: Layout, key: int) -> Tensor:
    """What a flat tensor comes back as, in a precision fit for differences."""
    return wide(codec.encode_flat(flat, layout, key).decode_flat())


class Probe:
    """The error of a packed input, kept until its weight's gradient is computed: that of all rows, or of the first."""

    def __init__(self, flat: Tensor, layout: Layout, packed: Packed, key: int, whole: bool) -> None:
        size, stride = layout.size, layout.stride
        row = flat.numel() // max(size[0], 1)
        ordered = len(size) > 1 and not layout.copied and stride[0] == row and row * size[0] == flat.numel()
        self.rows = None if whole or not ordered or flat.numel() <= PROBE else max(1, PROBE // row)
        """How many of the first rows; None for all."""
        self.share = 1.0 if self.rows is None else self.rows / size[0]
        mine = layout if self.rows is None else Layout((self.rows, *size[1:]), stride)
        if self.rows is None:
            error = wide(packed.decode_flat()) - wide(flat)
        else:
            # Codecs of a fixed rate give the first rows the same codes without the others.
            part = flat[: self.rows * row]
            error = round_trip(packed.codec, part, mine, key) - wide(part)
        self.layout = mine
        self.error = ERRORS.encode_flat(error, mine, key)

    def measure(self, g: Tensor, weight_gradient: Gradient) -> Tensor:
        """The mean square error of the weight's gradient; variances add up, so that a part tells the whole."""
        error = self.layout.restore(self.error.decode_flat().to(g.dtype))
        with untried():
            wrong = weight_gradient(g if self.rows is None else g[: self.rows], error)
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        return torch.linalg.vector_norm(wrong, dtype=kind).square() / wrong.numel() / self.share


@contextmanager
def untried() -> Iterator[None]:
    """cuDNN takes the algorithm that it thinks best: trying all of them takes time and memory, for what comes once."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Reading:
    """A weight's gradient, computed from one saved tensor."""

    def __init__(self, site: Site, stats: Stats, product: Product, weight: Tensor) -> None:
        self.site = site
        self.stats = stats
        self.product = product
        self.weight = weight
        self.uses = 1
        """How often this weight is used in the forward pass: the errors of its gradients add up."""
        self.power: Tensor | None = None
        """Mean square of the output gradient."""
        self.absolute: Tensor | None = None
        """Mean absolute value of the output gradient."""
        self.sums: Tensor | None = None
        """Mean square, over output channels, of the output gradient's sum over positions."""
        self.places = 0
        """Positions that the output gradient has."""
        self.probe: Probe | None = None
        self.measured: Tensor | None = None
        """Mean square error of the weight's gradient, if it was measured."""

    def gradient(self, g: Tensor, channel: int, weight_gradient: Gradient) -> None:
        """Backward has come to this node with the output gradient `g`."""
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        self.power = torch.linalg.vector_norm(g, dtype=kind).square() / g.numel()
        self.absolute = torch.linalg.vector_norm(g, 1, dtype=kind) / g.numel()
        self.places = g.numel() // max(g.shape[channel], 1)
        self.sums = g.sum([d for d in range(g.dim()) if d != channel], dtype=kind).square().mean()
        if self.probe is not None:
            self.measured = self.probe.measure(g, weight_gradient)
            self.probe = None


class Passing:
    """What a batch norm gives on as its input's gradient, and how much an error of its input would spoil of it.

    With x normalised to h, and mean(h) = 0, mean(h^2) = 1 over the m values of a channel, the input's gradient is
    proportional to g - mean(g) - h * mean(g h). An error e of h of mean square k adds e * mean(g h) + h * mean(g e) to
    it, of mean square k * (mean(g h)^2 + mean(g^2) / m), and e * mean(g e), of mean square k^2 * mean(g^2) / m.
    """

    def __init__(self, site: Site, stats: Stats, mixed: float) -> None:
        self.site = site
        self.stats = stats
        self.mixed = mixed
        """The share of values that are in groups with those of other channels."""
        self.ratio: Tensor | None = None
        """Mean square of the error over that of the gradient, for an error of the input of mean square 1: its part in
        proportion to that,"""
        self.square: Tensor | None = None
        """and the part in proportion to its square."""

    def gradient(self, invstd: Tensor, given: tuple[Tensor | None, ...], g: Tensor | None) -> None:
        """Backward has computed the gradients of input, weight and bias from `g`."""
        grad_x, grad_weight, grad_bias = given[:3]
        if g is None or grad_x is None or grad_weight is None or grad_bias is None or invstd.numel() != g.shape[1]:
            return
        kind = torch.float64 if g.dtype == torch.float64 else torch.float32
        over = [d for d in range(g.dim()) if d != 1]
        count = g.numel() // g.shape[1]
        power, passed = (torch.linalg.vector_norm(t, dim=over, dtype=kind).square() / count for t in (g, grad_x))
        along, middle = grad_weight.to(kind) / count, grad_bias.to(kind) / count
        own = power - along.square() - middle.square()
        # What is left of a gradient that is nearly all mean or along h is too small to tell.
        share = passed / own.clamp_min(1e-3 * power)
        # A group's values have one error: only where groups have one channel is it in proportion to its values.
        inverse = invstd.to(kind).square()
        scale = self.mixed * inverse + (1 - self.mixed) / inverse.reciprocal().mean()
        second = scale * share * power / count
        self.ratio = torch.nan_to_num(scale * share * along.square() + second).sum() / passed.sum()
        self.square = torch.nan_to_num(scale * second).sum() / passed.sum()


def mixed(packed: Packed, layout: Layout) -> float:
    """The share of the values of a batch norm's input that are in groups with those of other channels."""
    plane, group = math.prod(layout.size[2:]), getattr(packed.codec, "group", ERRORS.group)
    if getattr(packed, "stride", 1) > 1:
        return 0.0
    if layout.last or plane < group:
        return 1.0
    # One group for each plane reaches beyond it, but for those that end where the plane does.
    return (group - math.gcd(plane, group)) / plane


def invstd_of(node: Any) -> Tensor | None:
    """1 / standard deviation of the channels of a batch norm's input, as its node has kept it; empty in evaluation."""
    kept = getattr(node, "kept", None)
    if kept is None:
        return getattr(node, "_saved_result2", None)
    mean, invstd = kept[:2]
    return mean[1] if invstd is None else invstd  # computed while packing, both are rows of one tensor


class Collection:
    """One collection step: a forward pass (with accumulation several), its backward, and the optimizer's step."""

    def __init__(self, trials: Sequence[Codec], probes: Some[str], whole: bool) -> None:
        self.trials = trials
        self.probes = probes
        """Places whose weight gradient's error is measured."""
        self.whole = whole
        """Measured with all of the batch: where errors are not zero on average, a part does not tell."""
        self.batches = 1
        self.sites: dict[str, tuple[Site, Stats]] = {}
        self.readings: list[Reading] = []
        self.passings: list[Passing] = []
        self.after: Tensor | None = None
        """Norm of the gradients after the last backward."""
        self._stats: dict[int, tuple[SharedCell, Stats, Packed]] = {}
        self._probes: dict[int, Probe] = {}

    def saved(self, saved: Saved, cell: SharedCell, flat: Tensor) -> None:
        """A tensor has been packed, or shares what was packed before; `flat` is still at hand."""
        site, packed = saved.site, cell.packed
        layout = saved.layout
        if self.batches > 1 or packed is None or site.need != "lossy":
            return
        known = self._stats.get(id(cell))
        if known is None or known[2] is not packed:
            known = self._stats[id(cell)] = (cell, Stats(flat, layout, packed, self.trials, cell.key), packed)
            self._probes.pop(id(cell), None)
        self.sites[site.place] = (site, known[1])
        if site.place in self.probes:
            # The second operand of a product has the batch in its last dimension.
            whole = self.whole or site.slot in SECOND
            self._probes[id(cell)] = Probe(flat, layout, packed, cell.key, whole)

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], list[tuple[str, Saved]]]) -> None:
        """The forward pass is over: hooks on the nodes behind `nodes` that compute a weight's gradient."""
        start = [node for node in nodes if node is not None]
        for node in start:
            node.register_prehook(self._at_backward)
        if self.batches > 1:
            return
        uses: dict[Tensor, list[Reading]] = {}
        stack, seen = list(start), set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(next_node for next_node, _ in node.next_functions)
            if operation_name(node) in PRODUCTS:
                for slot, saved in saved_by(node):
                    reading = self._reading(node, slot, saved)
                    if reading is not None:
                        uses.setdefault(reading.weight, []).append(reading)
            elif self.trials and operation_name(node).endswith("BatchNorm"):
                for _, saved in saved_by(node):
                    if saved.site.slot == "input" and saved.cell is not None and id(saved.cell) in self._stats:
                        self._pass(node, saved)
        for readings in uses.values():
            for reading in readings:
                reading.uses = len(readings)
        self.readings = [reading for readings in uses.values() for reading in readings]
        self._stats.clear()
        self._probes.clear()

    def _reading(self, node: Any, slot: str, saved: Saved) -> Reading | None:
        cell, site, layout = saved.cell, saved.site, saved.layout
        if cell is None or id(cell) not in self._stats:
            return None
        found = PRODUCTS[operation_name(node)](node, slot, layout.size)
        if found is None:
            return None
        product, weight, channel, weight_gradient = found
        reading = Reading(site, self._stats[id(cell)][1], product, weight)
        if site.place in self.probes:
            reading.probe = self._probes.get(id(cell))

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                with torch.no_grad():
                    reading.gradient(gradients[0].detach(), channel, weight_gradient)

        node.register_prehook(hook)
        return reading

    def _pass(self, node: Any, saved: Saved) -> None:
        _, stats, packed = self._stats[id(saved.cell)]
        invstd = invstd_of(node)
        if invstd is None:
            return
        passing = Passing(saved.site, stats, mixed(packed, saved.layout))

        # Hooks must not hold nodes: a circle through the graph is not found before the graph behind it is gone.
        def hook(given: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
            with torch.no_grad():
                passing.gradient(invstd, given, gradients[0])

        node.register_hook(hook)
        self.passings.append(passing)

    def _at_backward(self, gradients: Any) -> None:
        """Backward begins. At its end, behind those who wait for its end too (DDP), the gradients are looked at."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._backward_over))

    def _backward_over(self) -> None:
        self.after = gradient_norm(self.weights())

    def weights(self) -> list[Tensor]:
        """The weights whose gradients are computed from lossy inputs, each once."""
        return list({id(reading.weight): reading.weight for reading in self.readings}.values())


def leaf_behind(node: Any) -> Tensor | None:
    """The parameter behind nothing but views and casts; None for a computed or frozen weight."""
    while node is not None:
        if hasattr(node, "variable"):
            return node.variable
        if operation_name(node) not in VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


Found = tuple[Product, Tensor, int, Gradient]
"""The product, its weight, which dimension of the output gradient is channels, and how the weight's gradient comes."""


def convolution(node: Any, slot: str, size: tuple[int, ...]) -> Found | None:
    """A convolution's weight gradient, read from its node."""
    weight = leaf_behind(node.next_functions[1][0])
    if slot != "input" or weight is None or len(size) != weight.dim():
        return None
    stride, padding, dilation = tuple(node._saved_stride), tuple(node._saved_padding), tuple(node._saved_dilation)
    transposed, groups, extra = node._saved_transposed, node._saved_groups, tuple(node._saved_output_padding)
    kernel, plane = tuple(weight.shape[2:]), tuple(size[2:])
    shape = weight.shape

    def reach(d: int) -> int:
        return dilation[d] * (kernel[d] - 1) + 1

    if transposed:
        other = tuple((n - 1) * stride[d] - 2 * padding[d] + reach(d) + extra[d] for d, n in enumerate(plane))
        product = Product(size[0], other, plane, kernel, stride, padding, dilation)
    else:
        other = tuple((n + 2 * padding[d] - reach(d)) // stride[d] + 1 for d, n in enumerate(plane))
        product = Product(size[0], plane, other, kernel, stride, padding, dilation)

    def weight_gradient(g: Tensor, x: Tensor) -> Tensor:
        like = g.new_empty(shape)
        arguments = (None, stride, padding, dilation, transposed, extra, groups, (False, True, False))
        return torch.ops.aten.convolution_backward(g, x, like, *arguments)[1]

    return product, weight, 1, weight_gradient


def matrix(node: Any, slot: str, size: tuple[int, ...]) -> Found | None:
    """A matrix product's weight gradient: mm and addmm, the weight on either side."""
    offset = 1 if operation_name(node) == "Addmm" else 0
    if offset and getattr(node, "_saved_alpha", 1) != 1:
        return None
    first = slot in ("self", "mat1")
    weight = leaf_behind(node.next_functions[offset + (1 if first else 0)][0])
    if weight is None or len(size) != 2:
        return None
    if first:
        return Product(size[0]), weight, 1, lambda g, x: x.t() @ g
    return Product(size[1]), weight, 0, lambda g, x: g @ x.t()


def linear(node: Any, slot: str, size: tuple[int, ...]) -> Found | None:
    """A linear layer as one operation: rows are all dimensions but the last."""
    weight = leaf_behind(node.next_functions[1][0])
    if slot != "input" or weight is None or not size:
        return None
    rows = 1
    for extent in size[:-1]:
        rows *= extent
    return Product(rows), weight, len(size) - 1, lambda g, x: g.flatten(0, -2).t() @ x.flatten(0, -2)


PRODUCTS: dict[str, Callable[[Any, str, tuple[int, ...]], Found | None]] = {
    "Convolution": convolution,
    "Mm": matrix,
    "Addmm": matrix,
    "Linear": linear,
}


def fetch(rows: Sequence[Sequence[Tensor | float | None]]) -> list[list[float]]:
    """The same rows as floats, NaN for None, with one transfer from each device."""
    result = [[math.nan if n is None or isinstance(n, Tensor) else float(n) for n in row] for row in rows]
    devices: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
    for i, row in enumerate(rows):
        for j, n in enumerate(row):
            if isinstance(n, Tensor):
                devices.setdefault(n.device, []).append((i, j, n))
    for places in devices.values():
        column = torch.stack([n.to(torch.float64).reshape(()) for _, _, n in places])
        for (i, j, _), value in zip(places, column.tolist(), strict=True):
            result[i][j] = value
    return result
