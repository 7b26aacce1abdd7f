"""The same for torch.compile: what a compiled model saves is packed inside its graphs.

Around the compiled call stand saved-tensor hooks that are graph modules. They make dynamo compile anew, and AOTAutograd
asks for them to be written into the two graphs it has made; there `inline` takes over (compiled/pair.py). Sizes are
constants of a graph, so the codec is one of fixed rate. What the graphs call is in compiled/ops.py.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._functorch._aot_autograd import graph_compile
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from encke.capture.hooks import Capture, keep, unpack
from encke.capture.ledger import Record
from encke.capture.modules import inside_compile
from encke.capture.passes import may_push
from encke.capture.sites import Site
from encke.codecs import GroupQuant
from encke.codecs.algebra import satisfies, strictest
from encke.codecs.exact import Mask
from encke.codecs.groupquant import channel_stride
from encke.codecs.layout import Layout
from encke.compiled import lowerings, ops, rewrites
from encke.compiled.pair import Pair, hint, is_relu, value
from encke.kernels import FLOATS

PATIENCE = 2
"""After so many compilations for more bits, what needs more gets the most."""

# -- hooks -------------------------------------------------------------------------------------------------------------

_numbers = itertools.count()
_owners: dict[int, weakref.ref[Compiled]] = {}
_hooks: list[tuple[GraphModule, GraphModule]] = []
"""Hooks live as long as the process: dynamo tells them apart by their address."""


def hook(function: Callable[[Any], Any]) -> GraphModule:
    """A saved-tensor hook as a graph, which makes torch.compile write it into the graphs it compiles.

    A plain function in it is unknown to AOTAutograd's cache, so graphs with hooks are never taken from there.
    """
    graph = Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return GraphModule(nn.Module(), graph)


INLINE = "maybe_inline_graph_saved_tensors_hooks"
ARGUMENTS = ["fw_module", "bw_module", "num_inner_fwd_outputs", "inner_meta", "aot_config", "static_input_indices"]


def install() -> None:
    """Takes the place of the function that writes hooks into graphs; hooks of others still go through it."""
    theirs = getattr(graph_compile, INLINE, None)
    if getattr(theirs, "encke", False):
        return
    if theirs is None or list(inspect.signature(theirs).parameters) != ARGUMENTS:
        raise NotImplementedError(
            f"compiled models cannot be attached with torch {torch.__version__}: its AOTAutograd writes saved-tensor "
            "hooks into graphs in another way than that of torch 2.11 to 2.13. Attach the model without torch.compile"
        )

    def inline(
        fw_module: GraphModule, bw_module: GraphModule, num_inner_fwd_outputs: int, inner_meta: Any, aot_config: Any,
        static_input_indices: list[int],
    ) -> None:  # fmt: skip
        top = _autograd._top_saved_tensors_default_hooks(True)
        owner = _owners.get(id(top[0])) if top is not None else None
        if owner is None:
            theirs(fw_module, bw_module, num_inner_fwd_outputs, inner_meta, aot_config, static_input_indices)
            return
        mine = owner()
        if mine is not None:
            needing = [i for i, info in enumerate(inner_meta.input_info) if info.requires_grad]
            mine.inline(fw_module, bw_module, num_inner_fwd_outputs, static_input_indices, needing)

    inline.encke = True  # type: ignore[attr-defined]
    setattr(graph_compile, INLINE, inline)


# -- the compiled model ------------------------------------------------------------------------------------------------


class Packing:
    """What becomes of one saved tensor of a graph: "kept", "mask", "shape"; codes have a class of their own."""

    def __init__(self, kind: str, sites: list[Site]) -> None:
        self.kind = kind
        self.sites = sites
        self.record = Record(sites[0])


class Coded(Packing):
    """A saved tensor that is quantised."""

    def __init__(self, sites: list[Site], codec: GroupQuant) -> None:
        super().__init__("codes", sites)
        self.codec = codec


class Eager(Protocol):
    """Calls the model without the compiled graphs, under the ordinary capture."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Compiled:
    """Stands around the compiled call of one attached model."""

    def __init__(
        self, capture: Capture, module: nn.Module, call: Callable[..., Any], eager: Eager, skip: set[str]
    ) -> None:
        install()
        self.capture = capture
        self.call = call
        self.eager = eager
        self.module = weakref.ref(module)
        self.skip = skip
        """Names of layers whose saved tensors are left as they are."""
        self.ran: list[int] = []
        """Graphs of the forward pass going on that pack something."""
        self.packings: dict[int, list[Packing]] = {}
        """By graph compiled with the hooks in force."""
        self.floors: dict[int, GroupQuant] = {}
        """What earlier graphs kept, by site: a later graph keeps at least that."""
        self.renewals = -1
        self.calling = False
        self.stale = False
        """Whether the policy may have changed its settings since the graphs were made."""
        self.renew()

    def renew(self) -> None:
        """New hooks: the next call compiles anew."""
        for packing in self.coded():
            self.floors[packing.sites[0].number] = packing.codec
        self.packings.clear()
        self.renewals += 1
        # What is saved outside of the graphs, where the model breaks into several, stays as it is.
        self.hooks = (hook(keep), hook(unpack))
        _hooks.append(self.hooks)
        _owners[id(self.hooks[0])] = weakref.ref(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if inside_compile():
            if module is not None:
                self.watch(module)
            return self.call(*args, **kwargs)
        self.calling = True
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.calling = False

    def watch(self, module: nn.Module) -> None:
        """The model is being traced; if not by the call that goes through here, what it saves would not be packed."""
        if not self.calling and module.training and torch.is_grad_enabled():
            raise RuntimeError(WITHIN)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, capture = self.module(), self.capture
        if module is None or not module.training or not torch.is_grad_enabled() or not may_push():
            return self.call(*args, **kwargs)
        if self.collects():
            self.stale = True
            return self.eager(*args, **kwargs)
        if self.stale:
            self.stale = False
            wanted = [(packing.codec, self.codec_for(packing.sites)) for packing in self.coded()]
            if any(codec is None or not satisfies(coded, codec) for coded, codec in wanted):
                self.renew()
        self.begin()
        _autograd._push_saved_tensors_default_hooks(*self.hooks)
        try:
            output = self.call(*args, **kwargs)
        finally:
            _autograd._pop_saved_tensors_default_hooks()
        if not self.ran:
            raise RuntimeError(NOTHING)
        capture.ledger.last = [packing.record for graph in self.ran for packing in self.packings[graph]]
        return output

    def collects(self) -> bool:
        """Whether this forward pass is measured, which is done without the compiled graphs."""
        schedule = self.capture.schedule
        return schedule is not None and schedule.collects_next()

    def begin(self) -> None:
        capture = self.capture
        capture.begin_step()
        self.ran.clear()
        if capture.schedule is not None:
            capture.schedule.begin_pass()

    def coded(self) -> Iterator[Coded]:
        """What the graphs in force quantise."""
        for packings in self.packings.values():
            yield from (packing for packing in packings if isinstance(packing, Coded))

    # -- writing into graphs -------------------------------------------------------------------------------------------

    def inline(
        self, forward: GraphModule, backward: GraphModule, outputs: int, static: list[int], differentiable: list[int]
    ) -> None:
        """AOTAutograd has made a forward and a backward graph: packs what passes between them."""
        pair = Pair(forward.graph, backward.graph, outputs, static, differentiable)
        if not pair.saved:
            return
        lowerings.install()
        pair.cut()
        packings = {node: self.choose(pair, node) for node in pair.saved if node in pair.data}
        graph = next(_numbers)
        writer = Writer(pair, graph, packings)
        for node, packing in packings.items():
            writer.write(node, packing)
        if writer.packed:
            writer.mark()
        if writer.measured:
            rewrites.update_early(forward.graph)
        pair.finish()
        forward.recompile()
        backward.recompile()
        if writer.packed:
            ops.graphs[graph] = weakref.ref(self)
            self.packings[graph] = list(packings.values())

    def choose(self, pair: Pair, node: Node) -> Packing:
        """What becomes of a saved tensor, by what its readers need."""
        t = value(node)
        sites = pair.sites_of(node) or [Site("", 0, ())]
        for site in sites:
            site.number = zlib.crc32(f"{site.layer}:{site.operation}.{site.slot}:{node.name}".encode())
        if not pair.may_pack(node) or any(site.layer in self.skip for site in sites):
            return Packing("kept", sites)
        needs = {site.need for site in sites}
        if t.dtype == torch.bool:
            return Packing("mask", sites)
        if t.dtype not in FLOATS or needs & {"exact", "weight"}:
            return Packing("kept", sites)
        if needs == {"shape"}:
            return Packing("shape", sites)
        if needs <= {"mask", "sign", "shape"}:
            return Packing("mask", sites)
        if "sign" in needs or ("mask" in needs and not is_relu(node)):
            return Packing("kept", sites)
        codec = self.codec_for(sites)
        return Packing("kept", sites) if codec is None else Coded(sites, codec)

    def codec_for(self, sites: list[Site]) -> GroupQuant | None:
        """A codec that serves all who read a tensor; where earlier graphs kept it, at least theirs. None: keep it."""
        codecs = [self.of_fixed_rate(site) for site in sites if site.need not in ("mask", "sign", "shape")]
        codec = strictest(found for found in codecs if found is not None).fixed_rate() if all(codecs) else None
        floor = self.floors.get(sites[0].number)
        if codec is None or floor is None:
            return codec
        if satisfies(floor, codec):
            return floor
        # Dynamo compiles a function a few times only: later changes leave room.
        return codec if self.renewals <= PATIENCE else replace(codec, bits=8)

    def of_fixed_rate(self, site: Site) -> GroupQuant | None:
        """The policy's codec, or the one of fixed rate that stands in for it; None to keep the tensor."""
        codec = self.capture.policy.choose(site)
        stand_in = codec.fixed_rate()
        # A fixed rate has no bound, which the exponential in log-softmax's backward needs.
        if stand_in is codec or codec.exact or site.need == "logprob":
            return stand_in if stand_in is codec else None
        instead = "tensors are kept as they are" if stand_in is None else f"{stand_in!r} takes its place"
        say_once(f"{type(codec).__name__} has no fixed size under torch.compile: {instead} there")
        return stand_in


_said: set[str] = set()


def say_once(words: str) -> None:
    if words not in _said:
        _said.add(words)
        warnings.warn(f"encke: {words} (said once)", RuntimeWarning, stacklevel=2)


WITHIN = (
    "encke: this compiled model is called within another function that is compiled. Compile the whole as one module "
    "and attach that, or detach() this one."
)
NOTHING = (
    "encke: this compiled model ran a training step and packed nothing. Either its backend does not go through "
    "AOTAutograd (backend='eager'), or all that it saves is smaller than 16 KiB, held by somebody else, or to be kept "
    "exact. Attach the model without torch.compile, or detach() it."
)


class Writer:
    """Writes encoders into a forward graph and decoders into its backward graph."""

    def __init__(self, pair: Pair, graph: int, packings: dict[Node, Packing]) -> None:
        self.pair = pair
        self.graph = graph
        self.rows: dict[torch.device, dict[Node, Coded]] = {}
        """What needs a seed, in the order of the seeds, by device."""
        for node, packing in packings.items():
            if isinstance(packing, Coded):
                self.rows.setdefault(value(node).device, {})[node] = packing
        self.packed = 0
        self.measured = False
        """Whether an encoder computes statistics."""
        self._seeds: dict[torch.device, tuple[Node, Node]] = {}

    def write(self, node: Node, packing: Packing) -> None:
        t, record = value(node), packing.record
        record.saved_bytes = hint(t.numel()) * t.element_size()
        if packing.kind == "kept":
            record.packed_bytes = record.saved_bytes
            return
        self.packed += 1
        if packing.kind == "shape":
            record.codec = "shape"
            self.pair.forget(node, lambda: self._empty(node))
            return
        record.codec = packing.codec if isinstance(packing, Coded) else Mask()
        made = self._coded(node, packing) if isinstance(packing, Coded) else self._masked(node)
        record.packed_bytes = hint(value(made).numel())

    def mark(self) -> None:
        """The forward graph tells that it ran by asking for seeds, whether or not something is rounded by chance."""
        if not self._seeds:
            self.seeds(value(self.pair.saved[0]).device)

    def _coded(self, node: Node, packing: Coded) -> Node:
        codec, t = packing.codec, value(node)
        forward, backward = self.seeds(t.device)
        row = list(self.rows[t.device]).index(node)
        order = order_of(t)
        stride = stride_of(t, codec.group, order)
        rate = (codec.bits, codec.group, stride, codec.signs)
        settings = (order, row, *rate)
        # Inductor is to store it once, and not once for the encoder and once for the others.
        node.meta["inductor_realize_to_strides"] = True
        packed = self._encoded(node, (node, forward, *settings), rewrites.measured_by_encoder(t, *rate))

        def restore(data: Node) -> Node:
            arguments = (data, backward, *self._layout(node), t.dtype, *settings)
            return self._here(torch.ops.encke.site_decode.default, arguments)

        readers = self.pair.readers_behind(self.pair.inputs[node.name])
        masked = [pair for pair, site in zip(readers, packing.sites, strict=True) if site.need == "mask"]
        data, restored = self.pair.swap(node, packed, restore)
        arguments = (data, *self._layout(node), t.dtype, order, *rate)
        self.pair.ask_for_zeros(
            masked,
            t,
            lambda: self._here(torch.ops.encke.site_mask.default, arguments),
            lambda grad: self._here(torch.ops.encke.site_gate.default, (grad, data, *rate)),
        )
        norm = rewrites.norm_behind(restored)
        if norm is not None and rewrites.reads_codes(norm, t, *rate):
            self._norm(norm, (data, backward), (row, codec.bits, stride))
            return packed
        for reader in list(restored.users):
            if rewrites.parts(reader, restored):
                self._part(reader, node)
        return packed

    def _encoded(self, node: Node, arguments: tuple[Any, ...], measures: bool) -> Node:
        """The codes of `node`; an encoder that `measures` gives batch norm its statistics too."""
        norms = rewrites.statistics_of(node) if measures else []
        if not norms:
            return self._after(node, torch.ops.encke.site_encode.default, arguments)
        self.measured = True
        made = self._after(node, torch.ops.encke.site_encode_moments.default, arguments)
        for norm in norms:
            # These nodes may be saved themselves, so they stay and read another one.
            for reader in list(norm.users):
                place = 1 + reader.args[1]  # type: ignore[operator]
                reader.args, reader.meta["val"] = (made, place), value(made)[place]
            wide = norm.all_input_nodes[0]
            self.pair.forward.erase_node(norm)
            if not wide.users and wide not in self.pair.saved:
                self.pair.forward.erase_node(wide)
        with self.pair.forward.inserting_after(made):
            packed = self.pair.forward.create_node("call_function", operator.getitem, (made, 0), name="site_codes")
        packed.meta["val"] = value(made)[0]
        return packed

    def _norm(self, norm: rewrites.Norm, data: tuple[Node, Node], settings: tuple[int, ...]) -> None:
        """Batch norm's backward from codes."""
        graph, read = self.pair.backward, (norm.mean, norm.invstd, norm.weight)
        # Inductor is to store it once, as it lies, and not once for each of the two readers.
        norm.grad.meta["inductor_realize_to_strides"] = True
        with graph.inserting_before(norm.result):
            sums = self._here(torch.ops.encke.norm_sums.default, (norm.grad, *data, *read, *settings))
            for row, node in (*((3, node) for node in norm.grad_weights), (4, norm.grad_bias)):
                node.replace_all_uses_with(self._here(torch.ops.aten.select.int, (sums, 0, row)))
            result = self._here(torch.ops.encke.norm_apply.default, (norm.grad, *data, sums, *settings))
        norm.result.replace_all_uses_with(result)
        for node in (norm.result, *norm.grad_weights, norm.grad_bias):
            self.pair.drop(node)

    def _part(self, conv: Node, node: Node) -> None:
        """A convolution's backward in two calls."""
        grad, x, weight, bias, *settings, mask = conv.args
        wanted = {user.args[1]: user for user in conv.users}
        conv.args = (grad, x, weight, bias, *settings, [False, *mask[1:]])  # type: ignore[index,misc]
        conv.meta["val"] = (None, *value(conv)[1:])
        if 0 in wanted:
            with self.pair.backward.inserting_after(conv):
                arguments = (grad, weight, *self._layout(node), *settings)
                made = self._here(torch.ops.encke.conv_input_grad.default, arguments)
            wanted[0].replace_all_uses_with(made)
            self.pair.backward.erase_node(wanted[0])

    def _masked(self, node: Node) -> Node:
        t = value(node)
        order = order_of(t)
        packed = self._after(node, torch.ops.encke.mask_encode.default, (node, order))

        def restore(data: Node) -> Node:
            arguments = (data, *self._layout(node), t.dtype, order)
            return self._here(torch.ops.encke.mask_decode.default, arguments)

        self.pair.swap(node, packed, restore)
        return packed

    def _empty(self, node: Node) -> Node:
        t = value(node)
        made = self.pair.backward.call_function(
            torch.ops.aten.empty_strided.default, self._layout(node), {"dtype": t.dtype, "device": t.device}
        )
        made.meta["val"] = t
        return made

    def seeds(self, device: torch.device) -> tuple[Node, Node]:
        """The seeds of the forward pass on a device, in both graphs; they are the first tensor saved."""
        if device not in self._seeds:
            pair, rows = self.pair, self.rows.get(device, {}).values()
            sites, salts = [row.sites[0].number for row in rows], [row.codec.seed for row in rows]
            last = pair.forward.find_nodes(op="placeholder")[-1]
            with pair.forward.inserting_after(last):
                arguments = (self.graph, sites, salts, device, not self._seeds)
                node = self._with_value(pair.forward.call_function(torch.ops.encke.forward_seeds.default, arguments))
            self._seeds[device] = (node, pair.save(node))
        return self._seeds[device]

    def _layout(self, node: Node) -> tuple[list[Any], list[Any]]:
        t, pair = value(node), self.pair
        return pair.in_backward(node, t.shape, "sym_size"), pair.in_backward(node, t.stride(), "sym_stride")

    def _after(self, node: Node, target: Any, arguments: tuple[Any, ...]) -> Node:
        """A node of the forward graph behind `node`."""
        with self.pair.forward.inserting_after(node):
            return self._with_value(self.pair.forward.call_function(target, arguments))

    def _here(self, target: Any, arguments: tuple[Any, ...]) -> Node:
        """A node of the backward graph where it is being written."""
        return self._with_value(self.pair.backward.call_function(target, arguments))

    def _with_value(self, made: Node) -> Node:
        values = map_arg(made.args, value)
        # Inductor lays the tensors out as they are here, which spares a copy.
        made.meta["eager_input_vals"] = (values, {})
        with value(self.pair.saved[0]).fake_mode:
            made.meta["val"] = made.target(*values)  # type: ignore[operator]
        return made


def order_of(t: Tensor) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the one that runs slowest first."""
    return sorted(range(t.dim()), key=lambda d: (-hint(t.stride(d)), -hint(t.shape[d])))


def stride_of(t: Tensor, group: int, order: list[int]) -> int:
    """How far apart the values of one channel lie in channels_last memory, if groups are made of them."""
    if t.dim() < 4 or order[-1] != 1 or not isinstance(t.shape[1], int):
        return 1
    size, strides = tuple(map(hint, t.shape)), [0] * t.dim()
    numel = 1
    for d in reversed(order):
        strides[d] = numel
        numel *= size[d]
    return channel_stride(Layout(size, tuple(strides)), numel, group)
