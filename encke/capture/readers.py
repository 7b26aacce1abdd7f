"""Readers: which backward operation, and which of its slots, reads a saved tensor.

A site's operation and slot are not known when it saves for the first time, so the tensor is held unpacked. As soon as a
tensor computed from it is saved, the autograd graph behind that tensor identifies the reader. From the second forward
pass on a site is recognised by its index in its layer's call and a signature, and no tensor is held.

The life of a site (`SiteState`), with the function that makes each transition:

    first saving                                another signature, or a weight unfrozen: new facts
         |                                  +-----------------------------------------------------+
         | Capture._hold                    |                                                     |
         v                                  v                                                     |
     +---------+   Readers.learn        +---------+   Capture.pack: matches()                     |
     | PENDING |----------------------->|  KNOWN  |---- packed at once, every pass ---------------+
     |  held   |   in the forward pass: +---------+
     +---------+   then Readers.settle       |
         ^  |      packs it                  | unpack: another operation reads than the one learnt
         |  |                                | (Readers.mismatch: an error, unless what was kept is exact)
         |  | learn_in_backward:             v
         |  | read as held,            +----------+
         |  +------------------------->| UNSTABLE |  learnt anew in every pass: Capture._hold, new facts that are
         |    if it was unstable       +----------+  PENDING first and UNSTABLE again after Readers.learn
         |                                   |
         +-----------------------------------+

`Readers.learn` leads to KNOWN, or back to UNSTABLE if the previous facts were. A tensor that is still pending at the
end of the forward pass, because no tensor computed from it was saved, is learnt when backward reads it
(`learn_in_backward`).

In-place operations on a view have no node of their own (hidden.py). If the layer identifies its operation, the site is
KNOWN at once or from the first backward pass on. Otherwise it is HIDDEN, and its tensors are kept as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.attention import INPUTS
from encke.capture.encoding import ask_for_others, codec_for, encode, encode_alone, limits_of
from encke.capture.facts import SiteFacts, SiteState
from encke.capture.hidden import site_of_input, unknown_site
from encke.capture.ledger import Record
from encke.capture.needs import CANONICAL, CHECKPOINT, COPY_SLICES, SETTINGS, TABLE, need_of
from encke.capture.negligible import Negligible
from encke.capture.nodes import (
    KNOWN,
    norm_of,
    operation_name,
    reads_input,
    saved_by,
    scales,
    setting_of,
    signature,
    square_of,
    together,
    window_of,
)
from encke.capture.passes import Frame, Threads
from encke.capture.saved import Pending, Saved
from encke.capture.scores import Scores
from encke.capture.sites import Need, Site
from encke.codecs import Packed
from encke.codecs.exact import Between
from encke.kernels import mix
from encke.torch_internals import RAW_SAVED, saved_setting

LINEAR_MODULES = (nn.Linear, nn.LazyLinear)
POOLS = (nn.MaxPool2d.forward, nn.MaxPool3d.forward)
EMBEDDINGS = (nn.Embedding.forward,)
ACTIVATIONS = (nn.SiLU.forward, nn.Hardswish.forward, nn.Mish.forward, nn.ELU.forward, nn.SELU.forward)
"""Activations that may work in place."""
SETTING_SITES = {reader for reader in TABLE if reader[0] in SETTINGS}
"""Sites whose need depends on a setting of the operation."""


class Readers:
    """Learn from the autograd graph which operations read the saved tensors of one model."""

    def __init__(self, scores: Scores, root: nn.Module | None, threads: Threads, negligible: Negligible) -> None:
        self.scores = scores
        self.negligible = negligible
        self.root = weakref.ref(root) if root is not None else None
        self.threads = threads
        self.step = 0
        """Training forward passes so far."""
        self.recorded = False
        """Whether a backward pass was recorded, to be differentiated again."""
        self.not_finite: set[Site] = set()
        """Sites where a NaN or an infinity would have corrupted the values around it: exact from then on."""
        self.doubtful: list[tuple[SiteFacts, Tensor]] = []
        """Sites examined in this pass, each with a tensor that holds whether all its values are finite."""

    def read_graph(self, grad_fn: Any) -> None:
        """Walk the graph behind `grad_fn`, and settle the pending tensors of the nodes not visited before."""
        forward = self.threads.forward
        visited, pending = forward.visited, forward.pending
        readers: list[Any] = []
        squares: set[Any] = set()
        stack = [grad_fn]
        while stack and pending:
            node = stack.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number in visited:
                continue
            # The node that is being created has not saved all its tensors yet: visit it again later.
            if node is not grad_fn:
                visited.add(number)
            unknown = [saved for _, saved in saved_by(node) if saved.pending is not None]
            if unknown:
                pending.difference_update(unknown)
                readers.append(node)
            squares.add(square_of(node))
            stack.extend(next_node for next_node, _ in node.next_functions)
        # In the order of the forward pass, which numbers the occurrences.
        for node in sorted(readers, key=sequence_number):
            for saved, frame in self.learn(node, node in squares):
                self.settle(saved, frame)

    def learn(self, node: Any, in_norm: bool = False) -> list[tuple[Saved, Frame]]:
        """Name the unknown sites of the tensors that `node` saved; return the tensors, each with its layer's call.

        Args:
            node: The node.
            in_norm: The node is the square at the start of an RMS norm composed from basic operations.
        """
        mine = [(slot, saved) for slot, saved in saved_by(node) if saved.owner is self]
        learnt: list[tuple[Saved, Frame]] = []
        for slot, saved in mine:
            pending, facts = saved.pending, saved.facts
            if pending is None:
                continue
            frame = pending.frame
            saved.pending = None
            facts.reader = operation_name(node)
            facts.site = self._site(node, slot, saved, pending, in_norm)
            assert saved.cell is not None
            if facts.site in self.not_finite:
                facts.become_exact()
            unstable = self._read_settings(node, slot, facts, frame, mine)
            sites, index = frame.sites, facts.index
            sites.extend([None] * (index + 1 - len(sites)))
            before = sites[index]
            if before is not None and before.state is SiteState.UNSTABLE:
                unstable = True
                if before.same_as(facts):
                    # Keep the same objects from pass to pass: sharers of the memory and the encoder refer to them.
                    if saved.cell.record.facts is facts:
                        saved.cell.record.facts = before
                    saved.facts = facts = before
            facts.state = SiteState.UNSTABLE if unstable else SiteState.KNOWN
            facts.siblings = sites
            sites[index] = facts
            learnt.append((saved, frame))
        if any(saved.site.need == "attention" and saved.facts.sources is not None for saved, _ in learnt):
            self.scores.learn(node, dict(mine))
        # The inputs of attention decide whether its results are kept.
        return sorted(learnt, key=lambda pair: pair[0].site.need == "recomputed")

    def _read_settings(
        self, node: Any, slot: str, facts: SiteFacts, frame: Frame, savings: list[tuple[str, Saved]]
    ) -> bool:
        """Learn the facts that the node holds besides its reader; return whether only a node holds them."""
        site, owner = facts.site, frame.layer.owner()
        forward = getattr(type(owner), "forward", None)
        if "MaxPool" in site.operation and site.dtype == torch.int64:
            inputs = [other.facts for name, other in savings if name == "self"]
            if inputs:
                facts.window, facts.input_index = window_of(node), inputs[0].index
        elif site.operation == "Embedding":
            facts.high = int(saved_setting(node, "weight_sym_argsize_0"))
        elif site.operation == "ScaledDotProductAttention":
            facts.sources = frozenset(other.facts.index for name, other in savings if name in INPUTS)
        facts.of_module = forward in (POOLS if facts.window is not None else EMBEDDINGS)
        if owner is not None and forward in ACTIVATIONS and slot == "self":
            facts.activation = weakref.ref(owner)
        if site.need == "lossy":
            facts.norm = norm_of(node, site.operation, site.slot)
        told = facts.window is not None or facts.high is not None
        if site.need != "exact" or told:
            # Functions save a list of tensors.
            name = slot if hasattr(type(node), RAW_SAVED + slot) else slot.rstrip("0123456789")
            if hasattr(type(node), RAW_SAVED + name):
                facts.raw_slot, facts.position = RAW_SAVED + name, int(slot.removeprefix(name) or 0)
        return (told and not facts.of_module) or (facts.reader, slot) in SETTING_SITES

    def _site(self, node: Any, slot: str, saved: Saved, pending: Pending, in_norm: bool) -> Site:
        """Return the key of the site where `node` saved `saved` under the name `slot`."""
        facts, frame = saved.facts, pending.frame
        operation = CANONICAL.get(facts.reader, facts.reader)
        dtype, dimensions, _, _ = facts.signature
        if operation.startswith("CompiledFunction"):
            raise RuntimeError(
                "encke: this model was attached and then compiled with torch.compile. Its saved tensors cannot be "
                "told apart there; detach() it, or train it without torch.compile."
            )
        need = self._need(node, operation, slot, saved, pending)
        if need == "lossy" and (in_norm or scales(node, slot)):
            operation, slot = "RmsNorm", "input" if in_norm else slot
        return frame.new_site(facts.index, operation, slot, need, dtype, dimensions)

    def learn_checkpoint(self, t: Tensor, frame: Frame, index: int) -> SiteFacts:
        """Name the site of an input of `torch.utils.checkpoint`, whose reader is not a node of the graph."""
        need = need_of(*CHECKPOINT, t.dtype, requires_grad=t.requires_grad)
        site = frame.new_site(index, *CHECKPOINT, need, t.dtype, t.dim())
        return self.know(SiteFacts(site, index, signature(t)), CHECKPOINT[0], frame)

    def know(self, facts: SiteFacts, reader: str, frame: Frame) -> SiteFacts:
        """Store facts about a site whose reader is known although no node of the graph identifies it."""
        facts.reader, facts.state, facts.siblings = reader, SiteState.KNOWN, frame.sites
        if facts.site in self.not_finite:
            facts.become_exact()
        frame.sites.extend([None] * (facts.index + 1 - len(frame.sites)))
        frame.sites[facts.index] = facts
        return facts

    def _need(self, node: Any, operation: str, slot: str, saved: Saved, pending: Pending) -> Need:
        assert saved.cell is not None and saved.cell.held is not None
        if self.is_weight(saved.cell.held):
            return "weight"
        dtype, _, requires_grad, _ = saved.facts.signature
        module = pending.frame.layer.owner()
        limits = limits_of(operation, module)
        return need_of(
            operation,
            slot,
            dtype,
            requires_grad=requires_grad,
            parameter=pending.parameter,
            from_leaves=pending.from_leaves,
            in_linear=isinstance(module, LINEAR_MODULES),
            limits=limits is not None and Between(*limits).takes(dtype),
            setting=setting_of(node, operation),
            together=together(node, operation, saved.layout.size),
            reads_input=reads_input(node),
            dropout=bool(saved_setting(node, "dropout_p", 0.0)),
            node_class=type(node),
        )

    def intact(self, facts: SiteFacts, packed: Packed, source: Tensor, look: bool) -> bool:
        """Return whether no NaN or infinity corrupts the values packed beside it; if one does, the site becomes exact.

        For a site that was examined earlier, the host does not wait for a GPU: `examine` reads the answer when the pass
        ends.

        Args:
            facts: The site.
            packed: Its saved tensor, packed.
            source: Its saved tensor.
            look: Whether to wait for a GPU although the site was examined earlier.
        """
        codec, known = packed.codec, facts.examined and source.is_cuda
        if codec.exact or not codec.restores_values or (known and not look):
            return True
        facts.examined = True
        found = packed.intact(source.detach())
        if known and isinstance(found, Tensor):
            self.doubtful.append((facts, found))
            return True
        if not found:
            self._keep_exact(facts)
        return bool(found)

    def examine(self) -> None:
        """Make those sites exact that, as this pass has found, hold values that are not finite."""
        doubtful, self.doubtful = self.doubtful, []
        if doubtful:
            device = doubtful[0][1].device
            for (facts, _), found in zip(
                doubtful, torch.stack([f.to(device) for _, f in doubtful]).tolist(), strict=True
            ):
                if not found:
                    self._keep_exact(facts)

    def _keep_exact(self, facts: SiteFacts) -> None:
        self.not_finite.add(facts.site)
        facts.become_exact()

    def settle(self, saved: Saved, frame: Frame) -> None:
        """Ask the cell for the codec of a saved tensor whose need is now known; encode when no other one is pending."""
        facts, cell, forward = saved.facts, saved.cell, self.threads.forward
        need = facts.site.need
        assert cell is not None and cell.held is not None
        held = cell.held
        cell.waiting -= 1
        if cell.record.facts is facts:
            # The key was not known when the tensor was saved.
            cell.key = mix(forward.step, facts.site.number, forward.rank)
        changed = held._version != cell.version
        codec = None
        if need not in ("weight", "shape") and facts.site.place not in self.negligible.places:
            codec = codec_for(self.scores, facts, facts.signature[0], frame)
        recomputed = need == "recomputed" and not frame.lossy.isdisjoint(facts.sources or ())
        if need == "shape" or recomputed:
            saved.cell = None
            if not cell.wanted:
                cell.record.codec = need
        elif codec is None or changed:
            if saved.tensor is None:
                saved.tensor = saved.layout.restore(held)
                saved.version = saved.tensor._version if saved.layout.copied else cell.version
            saved.cell = None
            if self.is_weight(held):
                cell.record.saved_bytes = 0
            if not cell.wanted:
                cell.record.packed_bytes = cell.record.saved_bytes
        elif need == "range":
            record = Record(facts, cell.record.saved_bytes if cell.record.facts is facts else 0)
            cell.record.saved_bytes -= record.saved_bytes
            encode_alone(saved, record, codec, forward, held)
        else:
            cell.ask(codec, need != "mask", facts.rows_in(saved.layout, held.numel()))
            if facts.sources is not None and not codec.exact:
                frame.lossy.add(facts.index)
            if cell.record.facts is not facts:
                cell.record.facts.sharers.add(facts)
            elif forward.recomputations is not None and forward.recomputations.concern(facts):
                ask_for_others(cell, facts, held.numel(), held.dtype, self.scores, forward.recomputations)
        if cell.waiting == 0 and not changed:
            if cell.wanted:
                encode(cell, saved, forward, held)
            cell.held = cell.producer = None

    def is_weight(self, t: Tensor) -> bool:
        """Return whether a tensor lies in the memory of a parameter or buffer of the model.

        Storages are compared, not addresses: sharded training (FSDP2) frees and reallocates weights layer by layer, so
        an address may belong to a weight now and to another tensor later.
        """
        forward = self.threads.forward
        weights = forward.weights
        if weights is None:
            root = self.root() if self.root is not None else None
            tensors = [] if root is None else weights_of(root)
            plain = [t for t in tensors if t.layout == torch.strided and not is_wrapper(t)]
            weights = {t.untyped_storage()._cdata for t in plain}
            # Sharded parameters are replaced by whole ones while their layer runs: look again next time.
            if len(plain) == len(tensors):
                forward.weights = weights
        return t.untyped_storage()._cdata in weights

    def learn_in_backward(self, node: Any, saved: Saved) -> None:
        """Learn in backward the readers of the last tensors saved, which the forward pass could not identify."""
        self.learn(node)
        pending = saved.pending
        if pending is not None and operation_name(node) == COPY_SLICES:
            told, saved.pending = site_of_input(saved, pending), None
            saved.facts.site = told or unknown_site(saved.facts, pending.frame)
            self.know(saved.facts, COPY_SLICES, pending.frame)
            if told is None:
                saved.facts.state = SiteState.HIDDEN
        forward = self.threads.forward
        if not forward.frames:
            forward.weights = None

    def mismatch(self, saved: Saved, node: Any) -> None:
        """Handle a reader other than the one learnt: exact values serve any reader, anything else is an error."""
        facts, site, cell = saved.facts, saved.site, saved.cell
        facts.distrust()
        if cell is not None:
            packed = cell.packed
            exact = packed is not None and packed.codec.exact and packed.codec.restores_values and facts.high is None
            if cell.held is not None or exact:
                return
        raise RuntimeError(
            f"encke: step {self.step}: what layer '{site.layer or '(root)'}' saved for {site.operation}.{site.slot} is "
            f"read by {node.name()}, or in another place: the order of operations in this layer, or what is frozen, "
            "changed since the last step, and what was kept may not be enough for this gradient. Run this step again: "
            "from now on this layer's operations are examined anew each time. Or leave the layer out with "
            f"attach(..., overrides={{{site.layer!r}: None}})."
        )


def weights_of(root: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a model; `parameters()` and `buffers()` would take longer."""
    found: list[Any] = []
    stack: list[Any] = [root]
    while stack:
        module = stack.pop()
        if module is not None:
            found += module._parameters.values()
            found += module._buffers.values()
            stack += module._modules.values()
    return [t for t in found if t is not None]


def is_wrapper(t: Tensor) -> bool:
    """Return whether a tensor wraps other tensors, as DTensor does, and has no memory of its own."""
    return hasattr(t, "__tensor_flatten__")


def sequence_number(node: Any) -> int:
    """Return a node's index in the order of creation."""
    return int(node._sequence_nr())


def matches(facts: SiteFacts, t: Tensor) -> bool:
    """Return whether `signature(t)` is the site's."""
    dtype, dimensions, requires_grad, producer = facts.signature
    if t.dtype is not dtype or t.dim() != dimensions or t.requires_grad != requires_grad:
        return False
    node = t.grad_fn
    if node is None:
        return producer is None
    return (KNOWN.get(type(node)) or operation_name(node)) == producer
