"""Pack and unpack hooks, which autograd calls when it saves a tensor and when it reads it.

They find out which layer saves a tensor, whether its memory is packed already, and whether it may be lossy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture import attention
from encke.capture.casts import CastWeight, cast_frozen, cast_weight
from encke.capture.deferred import DeferredForward
from encke.capture.encoding import (
    MASK,
    ask_for_others,
    codec_for,
    encode,
    encode_alone,
    save_again,
    shared_cell,
    steady_save,
)
from encke.capture.facts import SiteFacts, SiteState
from encke.capture.hidden import site_of_result, still_hidden
from encke.capture.ledger import CAST_AGAIN, CASTS, COMPUTED, LEFT_OUT, UNUSUAL, Ledger, Record
from encke.capture.modules import Layer
from encke.capture.needs import CHECKPOINT, COPY_SLICES
from encke.capture.negligible import Negligible
from encke.capture.nodes import (
    KNOWN,
    Origin,
    is_parameter_view,
    is_view_of_parameter,
    norm_of,
    operation_name,
    origin_of,
    reads_input,
    saved_by,
    signature,
    tensors_in,
)
from encke.capture.passes import ForwardPass, Frame, Passes
from encke.capture.readers import Readers, is_wrapper, matches
from encke.capture.recompute import Recomputations
from encke.capture.saved import Pending, Saved
from encke.capture.scores import Scores
from encke.capture.sites import Site
from encke.codecs.base import check_version
from encke.codecs.layout import flatten, layout_of
from encke.policies.base import AdaptivePolicy, Policy, Schedule
from encke.torch_internals import called_by_checkpoint, current_autograd_node, run_uncompiled

SMALL = 16384
"""Tensors smaller than this, in bytes, are kept as they are, unless `attach(..., min_bytes=...)` sets another limit."""

Kept = tuple[Tensor, int] | tuple[Tensor, int, bool]
"""A tensor that is kept as it is, and its version when it was saved. A third item marks a possible small result
of attention, which backward may have to replace by a recomputed one."""


class Capture:
    """Pack the saved tensors of one model (or one `compress` context)."""

    def __init__(self, policy: Policy, root: nn.Module | None, min_bytes: int | None = None) -> None:
        """Without `min_bytes`, tensors that are negligible beside the others are kept unpacked as well."""
        self.policy = policy
        self.min_bytes = SMALL if min_bytes is None else min_bytes
        self.negligible = Negligible(automatic=min_bytes is None)
        self.schedule: Schedule | None = policy.schedule if isinstance(policy, AdaptivePolicy) else None
        self.step = 0
        """Training forward passes so far."""
        self.rank = 0
        # Sharded weights have no memory between forward and backward.
        self.whole_weights = root is None or not any(is_wrapper(p) for p in root.parameters())
        """Whether weights are there between forward and backward."""
        self.casts_again = self.whole_weights
        """Whether the copies that autocast makes of weights are released, and cast again in backward."""
        self.ledger = Ledger()
        self.passes = Passes((self.pack, unpack), self._begin_pass, self._end_pass)
        self.threads = self.passes.threads
        self.scores = Scores(policy)
        self.recomputations = Recomputations()
        self.readers = Readers(self.scores, root, self.threads, self.negligible)

    def begin_step(self) -> None:
        """Count one more training forward pass; the one before goes to the log."""
        self.ledger.write(self.step)
        self.scores.settle()
        self.step += 1
        self.readers.step = self.step
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def decisions(self) -> dict[str, Any]:
        """Return the decisions that capture has made besides the policy's, as plain data."""
        return {
            "scores": dict(self.scores.bits),
            "recomputed": self.recomputations.state_dict(),
            "negligible": self.negligible.state_dict(),
        }

    def load_decisions(self, state: Mapping[str, Any]) -> None:
        """Take over the decisions of another run.

        Raises:
            ValueError: A part of the state is invalid.
        """
        self.scores.load(state.get("scores", {}))
        self.recomputations.load_state_dict(state.get("recomputed", {}))
        self.negligible.load_state_dict(state.get("negligible", {}))

    def _begin_pass(self, forward: ForwardPass) -> None:
        self.begin_step()
        forward.step, forward.rank = self.step, self.rank
        forward.recomputations = self.recomputations if self.whole_weights else None
        if self.schedule is not None:
            forward.collection = self.schedule.begin_pass()
        measures = self.scores.due(self.step) if self.schedule is None else forward.collection is not None
        forward.measuring = measures
        forward.steady = not measures

    def _end_pass(self, forward: ForwardPass, output: Any) -> None:
        """Settle pending tensors from the graph behind the output."""
        for tensor in tensors_in(output) if forward.pending else ():
            self.readers.read_graph(tensor.grad_fn)
        for saved in forward.pending:
            # Held until backward identifies the reader.
            if saved.cell is not None and saved.cell.packed is None:
                saved.cell.producer = None
                saved.cell.record.packed_bytes = saved.cell.record.saved_bytes
        if forward.collection is not None:
            ends = [tensor.grad_fn for tensor in tensors_in(output)]
            forward.collection.walk(ends if any(ends) else forward.nodes, saved_by)
        self.readers.examine()
        self.scores.end_pass()
        outermost = forward.frames[0].layer if forward.frames else None
        self.ledger.add("" if outermost is None or outermost.parent is None else outermost.name, forward.tally.close())
        self.negligible.end_pass(self.step, self.ledger.last)

    def pack(self, t: Tensor) -> Saved | Kept | CastWeight:
        """Return the object that autograd is to hold in place of `t`."""
        forward = self.threads.forward
        frames = forward.frames
        if not frames:
            # The hooks stayed active after the forward pass: tensors saved now do not belong to this model.
            return keep(t)
        frame = frames[-1]
        index = frame.index
        frame.index = index + 1
        deferred = forward.deferred
        announced = deferred is not None and deferred.t is t
        known = frame.sites[index] if index < len(frame.sites) else None
        if deferred is not None and announced:
            known = deferred.facts
        places = self.negligible.places
        negligible = bool(places) and known is not None and known.site.place in places and matches(known, t)
        if known is not None and forward.steady and (announced or deferred is None):
            # Pending tensors are settled first, from the graph behind this tensor.
            usual = known.state is SiteState.KNOWN and not forward.pending and type(t) is Tensor and not negligible
            steady = known.steady
            if usual and (steady is not None or known.cast is not None) and (announced or matches(known, t)):
                if steady is not None:
                    cell = save_again(t, known, steady, frame, forward, self.recomputations, deferred)
                    if cell is not None:
                        return Saved(self.readers, known, t, steady.layout, cell)
                elif known.site.need == "weight":
                    return self._cast_again(t, known, frame) or self._keep(t, COMPUTED)
        if forward.collection is not None:
            forward.nodes.append(t.grad_fn)
        if type(t) is not Tensor and isinstance(t, nn.Parameter):
            # A leaf has no node that would keep it alive in a circle.
            return (t, t._version) if t.is_leaf else keep(t)
        if negligible or t.numel() * t.element_size() < self.min_bytes:
            return self._keep_small(t)
        if not announced:
            if deferred is not None:
                forward.run_deferred()
                deferred = None
            if not frame.layer.compress or unusual(t):
                return self._keep(t, UNUSUAL if frame.layer.compress else LEFT_OUT)
        if forward.pending:
            self.readers.read_graph(t.grad_fn)
        if deferred is not None:
            return self._save(t, deferred.facts, frame, forward, deferred)
        if known is not None and known.state is SiteState.HIDDEN and matches(known, t):
            return self._keep(t, known)
        if known is not None and known.state is SiteState.KNOWN:
            if known.reader == COPY_SLICES and not still_hidden(known, t, frame):
                known.distrust()
            elif matches(known, t):
                need = known.site.need
                if need == "weight":
                    return self._cast_again(t, known, frame) or self._keep(t, COMPUTED)
                if need != "shape":
                    return self._save(t, known, frame, forward)
                if not unfrozen(known.site, frame.layer):
                    return self._save_shape(t, known, frame)
            elif signature(t)[1::2] != known.signature[1::2]:
                # Another operation made it, or it has other dimensions.
                known.distrust()
        if called_by_checkpoint(0):
            return self._save(t, self.readers.learn_checkpoint(t, frame, index), frame, forward)
        site = None if known is not None else site_of_result(t, frame, index)
        if site is None:
            return self._hold(t, frame, index)
        facts = self.readers.know(SiteFacts(site, index, signature(t)), COPY_SLICES, frame)
        return self._save(t, facts, frame, forward)

    def _keep_small(self, t: Tensor) -> Kept:
        """Keep `t` itself, and count it among the small tensors."""
        if not is_parameter_view(t):
            self.threads.forward.tally.small_bytes += t.numel() * t.element_size()
        return (*keep(t), True) if 3 <= t.dim() <= 4 else keep(t)

    def _keep(self, t: Tensor, facts: SiteFacts) -> Kept:
        """Keep `t` itself, and count it at a site; a sparse one has no single storage to count."""
        if t.layout == torch.strided and not is_wrapper(t) and not is_parameter_view(t):
            tally = self.threads.forward.tally
            size = tally.count(t.untyped_storage())
            if size:
                tally.records.append(Record(facts, size, size))
        return keep(t)

    def _cast_again(self, t: Tensor, facts: SiteFacts, frame: Frame) -> CastWeight | Kept | None:
        """Release autocast's copy of a weight, to be cast again in backward, unless it is small."""
        if not self.casts_again:
            return None
        if t.numel() * t.element_size() < self.negligible.weight_bytes:
            return self._keep_small(t)
        found = cast_weight(t, facts, self.keep_casts) or cast_frozen(t, frame.layer.owner(), facts, self.keep_casts)
        if found is not None:
            tally = self.threads.forward.tally
            record = Record(CASTS, tally.count(t.untyped_storage()))
            record.codec = CAST_AGAIN
            if record.saved_bytes:
                tally.records.append(record)
        return found

    def keep_casts(self) -> None:
        """Keep the copies that autocast makes of weights from now on."""
        self.casts_again = False

    def _hold(self, t: Tensor, frame: Frame, index: int) -> Saved:
        """Keep `t` as it is until the graph identifies its reader."""
        facts = SiteFacts(Site(frame.layer.name, "?", "?", frame.number), index, signature(t))
        note_size(frame, index, t)
        forward = self.threads.forward
        flat, layout = flatten(t.detach())
        before = frame.sites[index] if index < len(frame.sites) else None
        facts.changed = before is not None and before.changed
        cell = shared_cell(facts, t, layout, flat.numel(), forward)
        if before is None:
            # Reading a checksum makes the host wait for the GPU, so only a site's first tensor gets one.
            values = checksum(flat)
            if cell.checksum is not None and cell.checksum != values:
                facts.changed = True
                cell = shared_cell(facts, t, layout, flat.numel(), forward)
            cell.checksum = values
        saved = Saved(self.readers, facts, t, layout, cell)
        node = t.grad_fn
        origin = origin_of(node, forward.origins)
        parameter = origin is Origin.PARAMETERS or is_view_of_parameter(node)
        saved.pending = Pending(frame, parameter, origin is not Origin.DATA)
        if is_parameter_view(t) or self.readers.is_weight(t):
            # Sharded training frees a weight's memory after its layer: a view cannot be made of it later.
            saved.tensor, saved.version = keep(t)
        cell.waiting += 1
        cell.hold(flat)
        if cell.record.facts is facts:
            cell.producer = (t.grad_fn, t.output_nr, layout)
        forward.pending.add(saved)
        return saved

    def _save(
        self, t: Tensor, facts: SiteFacts, frame: Frame, forward: ForwardPass, deferred: DeferredForward | None = None
    ) -> Saved | Kept:
        """Pack `t` for a reader whose need is known, and run the forward that was deferred until then."""
        need = facts.site.need
        if facts.site.place in self.negligible.places:
            return self._keep_small(t)
        codec = None if deferred is None else deferred.codec
        if codec is None:
            if need == "recomputed" and not frame.lossy.isdisjoint(facts.sources or ()):
                return self._save_shape(t, facts, frame)
            codec = MASK if need == "mask" else codec_for(self.scores, facts, t.dtype, frame)
            if codec is None:
                return self._keep(t, facts)
            if facts.sources is not None:
                if not codec.exact:
                    frame.lossy.add(facts.index)
                if need == "attention" and forward.measuring:
                    self.scores.measure(facts.site, t)
        layout, length = layout_of(t.shape, t.stride())
        if need == "range":
            record = Record(facts, forward.tally.count(t.untyped_storage()))
            return encode_alone(Saved(self.readers, facts, t, layout, None), record, codec, forward, t, length)
        cell = shared_cell(facts, t, layout, length, forward)
        saved = Saved(self.readers, facts, t, layout, cell)
        first, rows = cell.record.facts, facts.rows_in(layout, length)
        if first is not facts:
            if need == "mask":
                # A ReLU saves its result before any other reader, so this reader is not the ReLU that was learnt.
                facts.distrust()
                return self._hold(t, frame, facts.index)
            first.sharers.add(facts)
        elif facts.sharers or self.recomputations.concern(facts):
            ask_for_others(cell, facts, length, t.dtype, self.scores, self.recomputations)
        cell.ask(codec, codec is not MASK, rows)
        if not cell.settled or forward.collection is not None:
            if not cell.waiting:
                encode(cell, saved, forward, t, length, deferred)
        facts.steady = None
        if forward.steady:
            facts.steady = steady_save(self.scores, self.recomputations, cell, saved, length, deferred is not None)
        return saved

    def _save_shape(self, t: Tensor, facts: SiteFacts, frame: Frame) -> Saved:
        """Save only the shape. The record still counts the memory, which plain autograd would have held."""
        need = facts.site.need
        saved = Saved(self.readers, facts, t, layout_of(t.shape, t.stride())[0], None)
        note_size(frame, facts.index, t)
        tally = self.threads.forward.tally
        record = Record(facts, tally.count(t.untyped_storage()))
        record.codec = need
        if record.saved_bytes:
            tally.records.append(record)
        return saved


def unpack(saved: Saved | Kept | CastWeight) -> Tensor:
    """Return the tensor that autograd saved."""
    if type(saved) is CastWeight:
        return saved.restore()
    if type(saved) is tuple:
        t, version = saved[:2]
        if t._version != version:
            check_version(t, version)
        if len(saved) == 3:
            node = current_autograd_node()
            if node is not None and (KNOWN.get(type(node)) or operation_name(node)) in attention.FORWARDS:
                found = attention.read(node, saved)
                return t if found is None else found
        return t
    assert isinstance(saved, Saved)
    facts = saved.facts
    if saved.tensor is None:
        node = current_autograd_node()
        if node is not None and torch.is_grad_enabled():
            saved.owner.recorded = True
        if node is None:
            pass
        elif saved.pending is not None:
            saved.owner.learn_in_backward(node, saved)
        elif facts.reader == CHECKPOINT[0]:
            if not called_by_checkpoint(0):
                saved.owner.mismatch(saved, node)
        elif (KNOWN.get(type(node)) or operation_name(node)) != facts.reader or (
            facts.site.need == "shape" and reads_input(node)
        ):
            saved.owner.mismatch(saved, node)
        elif facts.norm is not None and norm_of(node, facts.site.operation, facts.site.slot) != facts.norm:
            saved.owner.mismatch(saved, node)
        elif facts.raw_slot:
            # Functions that replace an operation lack this attribute. They are ours and have the operation's slots.
            slot = getattr(node, facts.raw_slot, None)
            if slot is not None and (slot[facts.position] if type(slot) is tuple else slot).data is not saved:
                saved.owner.mismatch(saved, node)
        if facts.sources is not None and node is not None:
            found = attention.read(node, saved)
            if found is not None:
                return found
    return saved.restore()


# When backward is called in a compiled function, dynamo would compile parts of this function and of numba's kernels.
run_uncompiled(unpack.__code__)


def keep(t: Tensor) -> tuple[Tensor, int]:
    """Keep a tensor as it is."""
    return t.detach(), t._version


def checksum(flat: Tensor) -> list[int]:
    """Return sums that reveal writes to the memory through `tensor.data`, which leave no other trace."""
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
    return torch.stack([words.sum(), words[: words.numel() // 3].sum()]).tolist()


def note_size(frame: Frame, index: int, t: Tensor) -> None:
    """Record the shape saved at `index`: the next saved tensor may be a max-pool's indices into it."""
    if frame.sizes is None:
        frame.sizes = {}
    frame.sizes[index] = tuple(t.shape)


def unfrozen(site: Site, layer: Layer) -> bool:
    """Return whether a layer that was frozen when the site was learnt reads its input's values now."""
    if site.need != "shape" or site.operation not in ("Convolution", "BatchNorm"):
        return False
    module = layer.owner()
    weight = getattr(module, "weight", None)
    trains = site.operation == "BatchNorm" and (module is None or module.training)
    return trains or (weight is not None and weight.requires_grad)


def unusual(t: Tensor) -> bool:
    """Return whether a tensor is not compressed: a subclass, sparse, complex, negated, quantized or meta."""
    if type(t) is not Tensor or t.layout != torch.strided:
        return True
    return t.is_complex() or t.is_neg() or t.is_quantized or t.is_meta
