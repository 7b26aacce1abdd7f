"""Write encoders into a forward graph and decoders into its backward graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from encke.capture.encoding import MASK
from encke.capture.facts import SiteFacts
from encke.capture.ledger import Record
from encke.capture.recompute import MIN_BITS
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant, Lossless
from encke.codecs.algebra import strictest
from encke.compiled import rewrites
from encke.compiled.calls import Call, Calls, ConstantCalls, RunTimeCalls
from encke.compiled.masks import read_mask_from_codes
from encke.compiled.names import bytes_of, size_hint, value
from encke.compiled.norm_relu import find_norm_relu
from encke.compiled.pair import Pair
from encke.kernels import GroupFormat, GroupPlan
from encke.kernels.formats import channel_stride

CAST = torch.ops.prims.convert_element_type.default


class Form(Enum):
    """In which form a saved tensor passes from the forward to the backward graph."""

    KEPT = auto()
    """Unchanged."""
    SHAPE = auto()
    """Not saved: its readers need only its shape."""
    MASK = auto()
    """One bit for each value."""
    CODES = auto()
    """Quantised."""
    RECOMPUTED = auto()
    """Not saved: the backward graph recomputes it from other saved tensors."""


def as_source(codec: Codec, curved: bool) -> Codec:
    """Return the codec for a source from which a tensor is recomputed that would otherwise be packed with `codec`.

    A source must be exact if `codec` guarantees a bound: a bound on the source implies none on the result.
    """
    if not (codec.exact or codec.reads_packed):
        return Lossless()
    return (codec.refined(min_bits=MIN_BITS) or Lossless()) if curved and not codec.exact else codec


class Packing:
    """Form of one saved tensor of a graph, and its line in the report."""

    def __init__(self, form: Form, sites: list[Site], constant: GroupQuant | None = None) -> None:
        self.form = form
        self.sites = sites
        """One for each reader."""
        self.constant = constant
        """Codec of `CODES` if it is a constant of the graph; None if it is read at run time."""
        self.codec: Codec | None = constant
        """Codec of `CODES` when the graph was made, None for the other forms."""
        self.record = Record(SiteFacts(sites[0]))
        self.state = self.record.facts.encoder_state
        self.plan: GroupPlan | None = None
        """Plan that packed it last, if a plan did."""
        self.rows: tuple[int, int] | None = None
        """Number and distance of the values of the rows that a norm reads in its memory; None if no norm does."""
        self.number = sites[0].number
        self.not_finite: set[Site] = set()
        """Sites of the model that are exact because a NaN or an infinity would corrupt the values around it."""
        self._compares_values = False
        self.choosing = [site for site in sites if site.need not in ("mask", "shape")]
        """Sites that choose the codec."""
        self.served: dict[Site, bool] = {}
        """Readers of tensors that backward recomputes from this one -> whether through a curved function."""
        self._asked: list[Codec] = []
        self._codec: Codec = Lossless()

    def codec_now(self, choose: Callable[[Site], Codec], dtype: torch.dtype) -> Codec:
        """Return a codec that serves all readers of the tensor, given what `choose` currently returns for each."""
        sites = [*self.choosing, *self.served]
        asked: list[Codec] = [Lossless()]
        if not self.not_finite or self.not_finite.isdisjoint(sites):
            asked = [choose(site) for site in sites]
        if asked != self._asked:
            masks = [MASK for site in self.sites if site.need == "mask"]
            own = len(self.choosing)
            behind = [as_source(*pair) for pair in zip(asked[own:], self.served.values(), strict=False)]
            codec = strictest([*asked[:own], *behind, *masks])
            if self._compares_values and not (codec.exact or codec.zeros_decode or codec.zeros_only):
                codec = codec.fixed_rate() or Lossless()
            self._asked, self._codec = asked, codec if codec.takes(dtype) else Lossless()
        return self._codec

    def compare_values(self) -> None:
        """Use only codecs that decode zeros to zeros from now on: a mask is read from decoded values."""
        self._compares_values, self._asked = True, []

    def can_serve(self, other: Packing, curved: bool) -> bool:
        """Return whether the tensor of `other` can be recomputed from this one, with the current codecs."""
        if self.codec is None or other.codec is None:
            return False
        return not strictest([self.codec, as_source(other.codec, curved)]).exact

    def serve(self, other: Packing, curved: bool) -> None:
        """Add the readers of `other`, whose tensor is recomputed from this one, to the readers served."""
        assert self.codec is not None and other.codec is not None
        self._asked = []
        self.codec = strictest([self.codec, as_source(other.codec, curved)])
        for site in other.choosing:
            self.served[site] = self.served.get(site, False) or curved

    @classmethod
    def recomputed(cls, site: Site, t: Tensor) -> Packing:
        """Return the packing of a recomputed result."""
        packing = cls(Form.RECOMPUTED, [site])
        packing.record.codec, packing.record.saved_bytes = "recomputed", bytes_of(t)
        return packing


class Writer:
    """Writes packing operators into one forward graph and restoring operators into its backward graph."""

    def __init__(self, pair: Pair, graph: int, packings: dict[Node, Packing]) -> None:
        self.pair = pair
        self.graph = graph
        self.rows: dict[torch.device, dict[Node, Packing]] = {}
        """Tensors that need a seed on their device, in the order of the seeds, by device."""
        self.places = {node: i for i, node in enumerate(packings)}
        """Index of each tensor that the graph saves."""
        for node, packing in packings.items():
            if packing.constant is not None:
                self.rows.setdefault(value(node).device, {})[node] = packing
        self.packed = 0
        """Number of tensors packed so far."""
        self.measures = False
        """Whether an encoder computes a batch norm's statistics as well."""
        self.tells = False
        """Whether an encoder notifies the model at run time that the graph runs."""
        self._seeds: dict[torch.device, tuple[Node, Node]] = {}

    def write(self, node: Node, packing: Packing) -> None:
        """Let the tensor that `node` makes pass in the form that was chosen for it."""
        t, record = value(node), packing.record
        record.saved_bytes = size_hint(t.numel()) * t.element_size()
        if packing.form is Form.KEPT:
            record.packed_bytes = record.saved_bytes
            return
        self.packed += 1
        if packing.form is Form.SHAPE:
            record.codec = "shape"
            self.pair.forget(node, lambda: self._empty(node))
        elif packing.form is Form.MASK:
            record.codec = MASK
            record.packed_bytes = size_hint(value(self._write_mask(node)).numel())
        else:
            packed = self._write_codes(node, packing)
            if packing.constant is not None:
                record.codec = packing.constant
                record.packed_bytes = size_hint(value(packed).numel())

    def mark(self) -> None:
        """Make a forward graph without an encoder request seeds, which notifies the model that it ran."""
        if not self.tells and not self._seeds:
            self.seeds(value(self.pair.saved[0]).device)

    def _write_codes(self, node: Node, packing: Packing) -> Node:
        """Quantise a tensor; return the node of its codes, or of their handle."""
        t, codec = value(node), packing.codec
        order = order_of(t)
        readers = self.pair.readers_behind(self.pair.inputs[node.name])
        fixed = codec.fixed_rate() if codec is not None and codec.reads_packed else None
        format = format_of(t, fixed, order, packing.rows) if fixed is not None else None
        calls: Calls
        if packing.constant is None:
            self.tells = True
            calls = RunTimeCalls(self.graph, self.places[node], self._layout(node), t.dtype)
        else:
            assert format is not None
            row = list(self.rows[t.device]).index(node)
            calls = ConstantCalls(self.seeds(t.device), row, format, self._layout(node), order)
        # Makes inductor store the tensor once, instead of once for the encoder and once for the other readers.
        node.meta["inductor_realize_to_strides"] = True
        packed = self._write_encoder(node, calls, format is not None and rewrites.fuses_encoder(t, format))
        mask_readers = [reader for reader, site in zip(readers, packing.sites, strict=True) if site.need == "mask"]
        data, restored = self.pair.swap(node, packed, lambda data: self._here(calls.decode(data)))
        if read_mask_from_codes(
            self.pair,
            mask_readers,
            t,
            lambda: self._here(calls.mask(data)),
            lambda grad, other: self._here(calls.gate(grad, data, other)),
        ):
            packing.compare_values()
        norm = rewrites.find_norm_backward(restored)
        if norm is not None and format is not None and rewrites.reads_codes(norm, t, format):
            self._write_norm_backward(norm, data, calls)
            return packed
        for reader in list(restored.users):
            if rewrites.should_split_conv_backward(reader, restored):
                self._split_conv_backward(reader, node)
        return packed

    def _write_encoder(self, node: Node, calls: Calls, fused: bool) -> Node:
        """Return the node of the codes of `node`; a `fused` encoder also computes part of a batch norm."""
        relu = find_norm_relu(node) if fused else None
        if relu is not None:
            made = self._after(node, calls.encode_norm_relu(relu))
            node.replace_all_uses_with(self._result(made, 1))
            return self._result(made, 0)
        norms = rewrites.statistics_of(node) if fused else []
        made = self._after(node, calls.encode(node, bool(norms)))
        if not norms:
            return made
        self.measures = True
        for norm in norms:
            # The nodes that separate variance and mean may be saved themselves: they stay, and read the encoder.
            for reader in list(norm.users):
                place = 1 + reader.args[1]  # type: ignore[operator]
                reader.args, reader.meta["val"] = (made, place), value(made)[place]
            self.pair.forward.erase_node(norm)
        return self._result(made, 0)

    def _result(self, made: Node, place: int) -> Node:
        """Return a node for one of an encoder's results, under a unique name."""
        graph = self.pair.forward
        with graph.inserting_after(made):
            result = graph.create_node("call_function", operator.getitem, (made, place), name="site_result")
        result.meta["val"] = value(made)[place]
        return result

    def _write_norm_backward(self, norm: rewrites.NormBackward, data: Node, calls: Calls) -> None:
        """Let a batch norm's backward read codes."""
        graph, read = self.pair.backward, (norm.mean, norm.invstd, norm.weight)
        # Makes inductor store the gradient once, unchanged, instead of once for each of the two readers.
        norm.grad.meta["inductor_realize_to_strides"] = True
        with graph.inserting_before(norm.result):
            sums = self._here(calls.norm_sums(norm.grad, data, read))
            for row, node in (*((3, node) for node in norm.grad_weights), (4, norm.grad_bias)):
                node.replace_all_uses_with(self._here((torch.ops.aten.select.int, (sums, 0, row))))
            result = self._here(calls.norm_apply(norm.grad, data, sums))
        norm.result.replace_all_uses_with(result)
        for node in (norm.result, *norm.grad_weights, norm.grad_bias):
            self.pair.drop(node)

    def _split_conv_backward(self, conv: Node, node: Node) -> None:
        """Compute a convolution's gradients in two calls; after the first, its restored input is released."""
        grad, x, weight, bias, *settings, mask = conv.args
        wanted = {user.args[1]: user for user in conv.users}
        conv.args = (grad, x, weight, bias, *settings, [False, *mask[1:]])  # type: ignore[index,misc]
        conv.meta["val"] = (None, *value(conv)[1:])
        if 0 in wanted:
            with self.pair.backward.inserting_after(conv):
                arguments = (grad, weight, *self._layout(node), *settings)
                made = self._here((torch.ops.encke.conv_input_grad.default, arguments))
            wanted[0].replace_all_uses_with(made)
            self.pair.backward.erase_node(wanted[0])

    def _write_mask(self, node: Node) -> Node:
        """Keep one bit per value, not (x <= 0), which is all that ReLU's backward reads; return the node of the bits.

        The compiler fuses comparison and cast with adjacent operations.
        """
        t, aten = value(node), torch.ops.aten
        order, flags = order_of(t), node
        if t.dtype != torch.bool:
            flags = self._after(node, (aten.le.Scalar, (node, 0)))
            flags = self._after(flags, (aten.logical_not.default, (flags,)))
        packed = self._after(flags, (torch.ops.encke.mask_encode.default, (flags, order)))

        def restore(data: Node) -> Node:
            made = self._here((torch.ops.encke.mask_decode.default, (data, *self._layout(node), order)))
            return made if t.dtype == torch.bool else self._here((CAST, (made, t.dtype)))

        self.pair.swap(node, packed, restore)
        return packed

    def _empty(self, node: Node) -> Node:
        """Return a node of the backward graph that has only the layout of the result of `node`."""
        t = value(node)
        made = self.pair.backward.call_function(
            torch.ops.aten.empty_strided.default, self._layout(node), {"dtype": t.dtype, "device": t.device}
        )
        made.meta["val"] = t
        return made

    def seeds(self, device: torch.device) -> tuple[Node, Node]:
        """Return the node of a pass's seeds on a device, in the forward and in the backward graph.

        The seeds are the first saved tensor.
        """
        if device not in self._seeds:
            pair, rows = self.pair, self.rows.get(device, {}).values()
            sites, salts = (
                [row.sites[0].number for row in rows],
                [row.constant.seed for row in rows if row.constant is not None],
            )
            last = pair.forward.find_nodes(op="placeholder")[-1]
            with pair.forward.inserting_after(last):
                arguments = (self.graph, sites, salts, device, not self._seeds)
                node = self._with_value(pair.forward.call_function(torch.ops.encke.forward_seeds.default, arguments))
            self._seeds[device] = (node, pair.save(node))
        return self._seeds[device]

    def _layout(self, node: Node) -> tuple[list[Any], list[Any]]:
        """Return size and strides of the result of `node`, as values of the backward graph."""
        t, pair = value(node), self.pair
        return pair.in_backward(node, t.shape, "sym_size"), pair.in_backward(node, t.stride(), "sym_stride")

    def _after(self, node: Node, call: Call) -> Node:
        """Add a node to the forward graph, after `node`."""
        with self.pair.forward.inserting_after(node):
            return self._with_value(self.pair.forward.call_function(*call))

    def _here(self, call: Call) -> Node:
        """Add a node to the backward graph, where it is being written."""
        return self._with_value(self.pair.backward.call_function(*call))

    def _with_value(self, made: Node) -> Node:
        """Give a new node the metadata that the compiler needs."""
        values = map_arg(made.args, value)
        # Inductor uses the layouts recorded here, which saves a copy.
        made.meta["eager_input_vals"] = (values, {})
        with value(self.pair.saved[0]).fake_mode:
            made.meta["val"] = made.target(*values)  # type: ignore[operator]
        return made


def order_of(t: Tensor) -> list[int]:
    """Return the dimensions of a tensor in memory order, the slowest first."""
    return sorted(range(t.dim()), key=lambda d: (-size_hint(t.stride(d)), -size_hint(t.shape[d])))


def format_of(t: Tensor, codec: GroupQuant, order: list[int], rows: tuple[int, int] | None = None) -> GroupFormat:
    """Return the format of a saved tensor in whose memory a norm reads these rows."""
    if rows is None:
        return GroupFormat(codec.bits, codec.group, t.dtype, stride_of(t, codec.group, order), codec.signs)
    # If the number of rows changes between calls, there may be several.
    numel = t.numel() if isinstance(t.numel(), int) else 0
    return GroupFormat.in_rows(codec.bits, codec.group, t.dtype, codec.signs, numel, *rows)


def stride_of(t: Tensor, group: int, order: list[int]) -> int:
    """Return the distance of the values of one channel in channels_last memory; 1 if groups do not follow channels."""
    if t.dim() < 4 or order[-1] != 1 or not isinstance(t.shape[1], int):
        return 1
    size, strides = tuple(map(size_hint, t.shape)), [0] * t.dim()
    numel = 1
    for d in reversed(order):
        strides[d] = numel
        numel *= size[d]
    return channel_stride(size, tuple(strides), numel, group)
