"""Pack the saved tensors of a `torch.compile`d model inside its forward and backward graphs.

`CompiledModel` wraps the compiled call of an attached model. Its saved-tensor hooks bring every pair of graphs that
AOTAutograd makes to `CompiledModel.inline` (aot.py). There each saved tensor gets a form (`choose`), and `Writer`
writes the operators that pack and restore into the graphs. In every forward pass the policy chooses the codec
(payloads.py). Only CUDA graphs need constant sizes: there a codec of fixed rate is a constant of the graph (ops.py),
and a layer that later needs more bits has the model compiled again.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from encke.capture.hooks import Capture, keep, unpack
from encke.capture.modules import inside_compile
from encke.capture.needs import CHECKPOINT
from encke.capture.passes import may_push
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant
from encke.codecs.algebra import satisfies, strictest
from encke.compiled import aot, attention, lowerings, ops, rewrites
from encke.compiled.cut import drop_unread, save_instead_of_recompute
from encke.compiled.masks import pass_gates_to_norms
from encke.compiled.names import is_relu, value
from encke.compiled.pair import Pair
from encke.compiled.recompute import recompute_from_packed
from encke.compiled.rows import rows_read
from encke.compiled.writer import Form, Packing, Writer, as_source
from encke.kernels import FLOATS
from encke.torch_internals import inductor_records_cuda_graphs, pop_saved_tensors_hooks, push_saved_tensors_hooks

RENEWALS = 3
"""Collection steps after the first compilation whose findings may have CUDA graphs compiled again for more bits. In a
new training these are steps 10, 20 and 40."""

ERROR_NESTED_COMPILE = (
    "encke: this compiled model is called within another function that is compiled. Compile the whole as one module "
    "and attach that, or detach() this one."
)
ERROR_NOTHING_PACKED = (
    "encke: this compiled model ran its first training step and packed nothing. Either its backend does not go through "
    "AOTAutograd (backend='eager'), or dynamo compiles nothing (it warns of its recompile_limit), or all that it saves "
    "is smaller than 16 KiB (min_bytes of attach), held by somebody else, or to be kept exact. Attach the model "
    "without torch.compile, or detach() it."
)

_graph_ids = itertools.count()
NONE_SERVED: Mapping[Site, bool] = {}


class CompiledModel:
    """Wrapper of the compiled call of one attached model."""

    def __init__(
        self, capture: Capture, module: nn.Module, call: Callable[..., Any], eager: Callable[..., Any], skip: set[str]
    ) -> None:
        """Install the patch that brings the hooks to AOTAutograd, until `detach`.

        Args:
            capture: Capture of the attached model.
            module: The model itself.
            call: Runs the compiled model.
            eager: Runs it without the compiled graphs, under ordinary capture.
            skip: Names of layers whose saved tensors are kept as they are.
        """
        self.capture = capture
        self.call = call
        self.eager = eager
        self.module = weakref.ref(module)
        self.skip = skip
        self.ran: list[int] = []
        """Ids of the graphs that have run in this forward pass and pack tensors."""
        self.packings: dict[int, list[Packing]] = {}
        """Saved tensors of each graph that was compiled under the current hooks, by graph id."""
        self.considered = 0
        """Number of times that constant codecs were compared with the policy's current choices."""
        self.calling = False
        self.packs = False
        """Whether a forward pass has packed something; one with a smaller batch or fewer layers may have nothing to."""
        self.exact = False
        """Whether some tensor that could be packed is exact by the policy's choice, or as the input of a checkpoint."""
        self.measured = False
        """Whether queries and keys have been measured, under a policy without collection steps."""
        self.stale = False
        """Whether the policy may have changed its settings since graphs with constant codecs were made."""
        self.release_patch = aot.hold(self)
        self.renew()

    def detach(self) -> None:
        """Release the patch of AOTAutograd; the last model removes it."""
        self.release_patch()

    def renew(self) -> None:
        """Make new hooks: the next call compiles the model again."""
        self.packings.clear()
        # Tensors saved between the graphs, where the model breaks into several, are kept as they are.
        self.hooks = aot.HookPair(keep, unpack, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if inside_compile():
            if module is not None:
                self.watch(module)
            return self.call(*args, **kwargs)
        self.calling = True
        try:
            with aot.room_for_pairs():
                return self.forward(*args, **kwargs)
        finally:
            self.calling = False

    def watch(self, module: nn.Module) -> None:
        """Raise if the model is traced for training by another call than ours: nothing would be packed there."""
        if not self.calling and module.training and torch.is_grad_enabled():
            raise RuntimeError(ERROR_NESTED_COMPILE)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass: compiled and packed, or on a collection step in eager mode."""
        module, capture = self.module(), self.capture
        if module is None or not module.training or not torch.is_grad_enabled() or not may_push():
            return self.call(*args, **kwargs)
        # A shallow copy of the model may still call this after `detach`.
        if capture.passes.detached:
            return self.call(*args, **kwargs)
        if self.collects():
            self.stale = True
            return self.eager(*args, **kwargs)
        if self.stale:
            self.stale = False
            capture.scores.settle(wait=True)
            self.consider_constants()
        self.begin()
        push_saved_tensors_hooks(self.hooks.pack, self.hooks.unpack)
        try:
            output = self.call(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
        self.packs = self.packs or bool(self.ran)
        if not self.packs and not self.exact:
            raise RuntimeError(ERROR_NOTHING_PACKED)
        capture.ledger.add("", [packing.record for graph in self.ran for packing in self.packings[graph]])
        return output

    def collects(self) -> bool:
        """Return whether this forward pass is measured, which runs without the compiled graphs.

        Policies without collection steps measure only queries and keys of attention, from the second pass on.
        """
        schedule, scores = self.capture.schedule, self.capture.scores
        if schedule is not None:
            return schedule.collects_next()
        coded = (packing for packings in self.packings.values() for packing in packings if packing.form is Form.CODES)
        if not any(site.need == "attention" for packing in coded for site in packing.sites):
            return False
        first, self.measured = not self.measured, True
        return first or scores.due(self.capture.step + 1)

    def consider_constants(self) -> None:
        """Have the model compiled again where constant codecs do not serve: early for more bits, always for exactness.

        Later the graphs keep their bits, so that compilations come to an end for certain.
        """
        self.considered += bool(self.packings)
        short: list[str] = []
        for packing, present in self.constants():
            wanted = self.constant_for(packing.sites, packing.served)
            if wanted is None or (self.considered <= RENEWALS and not satisfies(present, wanted)):
                self.renew()
                return
            if not satisfies(present, wanted):
                short.append(packing.sites[0].layer)
        if short:
            warn_once(f"{short[0]!r} and other layers by now need more bits than their CUDA graphs have, which stay")

    def begin(self) -> None:
        """Begin a forward pass through the compiled graphs."""
        capture = self.capture
        capture.begin_step()
        self.ran.clear()
        if capture.schedule is not None:
            capture.schedule.begin_pass()

    def constants(self) -> Iterator[tuple[Packing, GroupQuant]]:
        """Yield each tensor whose codec is a constant of the current graphs, with that codec."""
        for packings in self.packings.values():
            for packing in packings:
                if packing.constant is not None:
                    yield packing, packing.constant

    def inline(
        self, forward: GraphModule, backward: GraphModule, outputs: int, static: list[int], differentiable: list[int],
        mutated: list[int],
    ) -> None:  # fmt: skip
        """Pack the tensors that pass between AOTAutograd's two graphs; the arguments are those of `Pair`."""
        pair = Pair(forward.graph, backward.graph, outputs, static, differentiable, self.capture.min_bytes, mutated)
        if not pair.saved:
            return
        lowerings.install()
        save_instead_of_recompute(pair)
        unread = attention.compute_again(pair, lambda node: self.choose(pair, node).form is Form.CODES)
        drop_unread(pair)
        packings = {node: self.choose(pair, node) for node in pair.saved if node in pair.data}
        recomputed = [Packing.recomputed(site, value(node)) for node, site in unread]
        # Sharded weights have no memory between forward and backward.
        if self.capture.whole_weights:
            recomputed += recompute_from_packed(pair, packings, self.may_recompute)
            for packing in packings.values():
                if packing.constant is not None and packing.served:
                    packing.constant = packing.codec = self.constant_for(packing.sites, packing.served, lasting=True)
        graph = next(_graph_ids)
        writer = Writer(pair, graph, packings)
        for node, packing in packings.items():
            writer.write(node, packing)
        if writer.packed:
            writer.mark()
        if writer.measures:
            rewrites.update_early(forward.graph)
        pass_gates_to_norms(backward.graph)
        pair.finish()
        forward.recompile()
        backward.recompile()
        if writer.packed:
            ops.graph_owners[graph] = weakref.ref(self)
            self.packings[graph] = [*packings.values(), *recomputed]

    def choose(self, pair: Pair, node: Node) -> Packing:
        """Choose the form of a saved tensor by what its readers need."""
        t = value(node)
        sites = pair.sites_of(node) or [Site("", "?", "?")]
        if not pair.may_pack(node) or any(site.layer in self.skip for site in sites):
            return Packing(Form.KEPT, sites)
        needs = {site.need for site in sites}
        if t.dtype == torch.bool:
            return Packing(Form.MASK, sites)
        if t.dtype not in FLOATS or needs & {"exact", "weight", "recomputed"}:
            self.exact = self.exact or any((site.operation, site.slot) == CHECKPOINT for site in sites)
            return Packing(Form.KEPT, sites)
        if needs == {"shape"}:
            return Packing(Form.SHAPE, sites)
        if needs <= {"mask", "sign", "shape"}:
            return Packing(Form.MASK, sites)
        if "sign" in needs or ("mask" in needs and not is_relu(node)):
            return Packing(Form.KEPT, sites)
        rows = rows_read(pair, pair.readers_behind(pair.inputs[node.name]), sites)
        constant = self.constant_for(sites, lasting=True) if needs_constant_sizes(t) else None
        # One set of groups cannot serve norms over different dimensions. Rows of one value are statistics.
        if len(rows) > 1 or (rows and rows[0][0] == 1) or (constant is None and needs_constant_sizes(t)):
            return Packing(Form.KEPT, sites)
        packing = Packing(Form.CODES, sites, constant)
        packing.rows = rows[0] if rows else None
        if constant is None:
            packing.not_finite = self.capture.readers.not_finite
            packing.codec = packing.codec_now(self.capture.scores.codec, t.dtype)
        if packing.codec is not None and packing.codec.exact:
            self.exact = True
            return Packing(Form.KEPT, sites)
        return packing

    def may_recompute(self, packing: Packing) -> bool:
        """Return whether a tensor may be computed from lossy ones: not where eager mode found that to be worse."""
        if packing.codec is None or not packing.codec.reads_packed:
            return False
        decisions = self.capture.recomputations.decisions
        return all(
            site.need == "lossy" and site.slot != "result" and decisions.get(site.place) != "" for site in packing.sites
        )

    def constant_for(
        self, sites: list[Site], served: Mapping[Site, bool] = NONE_SERVED, lasting: bool = False
    ) -> GroupQuant | None:
        """Return a codec of fixed rate for all readers of a tensor; None to keep the tensor.

        Args:
            sites: The tensor's own readers.
            served: Readers of tensors that are recomputed from it, as in `Packing`.
            lasting: Whether to leave room for settings that the policy may choose later.
        """
        if not self.capture.readers.not_finite.isdisjoint([*sites, *served]):
            return None
        codecs: list[Codec | None] = [
            self.of_fixed_rate(site, lasting) for site in sites if site.need not in ("mask", "sign", "shape")
        ]
        for site, curved in served.items():
            codec = self.of_fixed_rate(site, lasting)
            codecs.append(None if codec is None else as_source(codec, curved))
        return strictest(codec for codec in codecs if codec is not None).fixed_rate() if all(codecs) else None

    def of_fixed_rate(self, site: Site, lasting: bool) -> GroupQuant | None:
        """Return the policy's codec, or its replacement of fixed rate; None to keep the tensor."""
        codec = self.capture.scores.codec(site, lasting)
        stand_in = codec.fixed_rate()
        # A fixed rate has no bound, which the exponential in log-softmax's backward needs.
        if stand_in is codec or codec.exact or site.need == "logprob":
            return stand_in if stand_in is codec else None
        instead = "tensors are kept as they are" if stand_in is None else f"{stand_in!r} takes its place"
        warn_once(f"{type(codec).__name__} has no fixed size, which CUDA graphs need: {instead} there")
        return stand_in


def needs_constant_sizes(t: Tensor) -> bool:
    """Return whether the operator that packs a tensor of the current graph will be recorded in a CUDA graph."""
    return t.device.type == "cuda" and inductor_records_cuda_graphs()


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn only once of a condition that occurs at every site."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"encke: {message} (this warning is shown once)", RuntimeWarning, stacklevel=2)
