"""Choosing the codec for a saved tensor, finding the cell of its memory, and packing it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.deferred import DeferredForward
from encke.capture.expressions import Recomputed
from encke.capture.facts import SiteFacts, SteadySave
from encke.capture.ledger import Record
from encke.capture.needs import COPY_SLICES
from encke.capture.nodes import expand_window
from encke.capture.passes import ForwardPass, Frame
from encke.capture.recompute import PASSED, Recomputations, all_dependents, cast_origin, needs_fixed_rate, recompute
from encke.capture.saved import Saved, SharedCell
from encke.capture.scores import Scores
from encke.codecs import Codec, Lossless, Packed
from encke.codecs.algebra import satisfies
from encke.codecs.exact import Between, Mask, Sign, Window
from encke.codecs.layout import Layout, run_of, with_rows
from encke.kernels import mix

MASK, SIGN = Mask(), Sign()

EXAMINED = ("cpu",)
"""Device types on which every packed tensor is examined for NaN and infinities."""
RECOMPUTED = "recomputed"
"""Entry of the report for tensors that backward recomputes."""
ONE_BIT = ("mask", "sign")
"""Needs that one bit of each value serves, whatever the policy."""
STEADY_NEEDS = ("lossy", "attention", *ONE_BIT)
"""Needs of sites that may reuse their decisions of the previous pass."""
storage_ref = weakref.ref
"""A storage's Python object lives as long as its memory does, even if only C++ code holds the memory."""


def codec_for(scores: Scores, facts: SiteFacts, dtype: torch.dtype, frame: Frame | None) -> Codec | None:
    """Return the codec that a site's need asks for; None if the tensor is kept as it is."""
    codec: Codec
    site = facts.site
    need = site.need
    if need == "mask":
        codec = MASK
    elif need == "sign":
        codec = SIGN
    elif need == "range":
        limits = limits_of(site.operation, None if frame is None else frame.layer.owner())
        codec = scores.codec(site) if limits is None else Between(*limits)
    elif need in ("exact", "recomputed"):
        if facts.stays:
            return None
        codec = Lossless() if frame is None else exact_codec(facts, dtype, frame)
    else:
        codec = scores.codec(site)
    return codec if codec.takes(dtype) else None


def exact_codec(facts: SiteFacts, dtype: torch.dtype, frame: Frame) -> Codec:
    """Return a lossless codec for a site, by the facts known in this pass."""
    high, window = facts.high, facts.window
    if facts.of_module:
        module: Any = frame.layer.owner()
        if window is None:
            high = len(module.weight)
        else:
            settings = (module.kernel_size, module.stride or module.kernel_size, module.padding, module.dilation)
            window = expand_window(*settings, dimensions=len(window[0]))
    plane = None if window is None or frame.sizes is None else frame.sizes.get(facts.input_index)
    if window is not None and plane is not None:
        kernel, stride, padding, dilation = window
        codec = Window(kernel, stride, padding, dilation, plane[-len(kernel) :])
        if codec.takes(dtype):
            return codec
    return Lossless(high=high)


def shared_cell(facts: SiteFacts, t: Tensor, layout: Layout, length: int, forward: ForwardPass) -> SharedCell:
    """Return the cell of the memory that `t` covers: the existing one of this forward pass, or a new one.

    Cast copies of one tensor share a cell.
    """
    storage = t.untyped_storage()
    run = (layout.size, layout.stride) if layout.copied else length
    key = (storage._cdata, t.storage_offset(), run, t.dtype, t._version)
    known = forward.cells.get(key)
    # Allocators reuse addresses: an entry counts only while the storage it was made from is alive.
    if known is not None and known[1]() is not None and not facts.changed:
        cell = known[0]()
        if cell is not None:
            return cell
    origin = cast_origin(t, forward.layer_input()) if facts.signature[3] in PASSED else None
    known = None if origin is None else forward.casts.get(origin)
    if known is not None and not facts.changed:
        cell = known[0]()
        if cell is not None:
            cell.record.saved_bytes += forward.tally.count(storage)
            return cell
    record = Record(facts, forward.tally.count(storage))
    forward.tally.records.append(record)
    cell = SharedCell(mix(forward.step, facts.site.number, forward.rank), record)
    forward.cells[key] = entry = (weakref.ref(cell), storage_ref(storage))
    if origin is not None:
        forward.casts[origin] = entry
    return cell


def steady_save(
    scores: Scores, known: Recomputations, cell: SharedCell, saved: Saved, length: int, deferred: bool
) -> SteadySave | None:
    """Return the decisions of a site that has just saved, for reuse; None if the next pass has to decide again.

    Args:
        scores: Chooses codecs.
        known: Decisions about recomputed tensors.
        cell: The memory's cell.
        saved: The saved tensor.
        length: Values in the tensor's run of memory.
        deferred: Whether a deferred forward ran while the tensor was packed.
    """
    facts, first, packed, layout = saved.facts, cell.record.facts, cell.packed, saved.layout
    need, codec = facts.site.need, cell.wanted
    if need not in STEADY_NEEDS or facts.changed or facts.waits or facts.reader == COPY_SLICES:
        return None
    if cell.waiting or packed is None or codec is None or not cell.settled or not layout.dense:
        return None
    recomputed = isinstance(packed, Recomputed)
    if packed.plan is None and not recomputed and packed.codec not in (MASK, SIGN):
        return None
    asked: list[SiteFacts] = [facts] if need not in ONE_BIT else []
    if first is facts:
        if saved.device.type in EXAMINED and not deferred and not recomputed:
            return None
        asked += facts.sharers
        asked += [each for each in all_dependents(facts) if each.site.need == "lossy"] if facts.dependents else []
    if any(each.site.need not in STEADY_NEEDS or each.site.need in ONE_BIT for each in asked):
        return None
    # Readers that need more bits than the policy chooses need the same in each pass, but for attention.
    choose = scores.policy.choose
    functions = [scores.codec if each.site.need == "attention" else choose for each in asked]
    chosen = tuple(
        [(function, each.site, function(each.site)) for function, each in zip(functions, asked, strict=True)]
    )
    lossy_input = facts.sources is not None and not scores.codec(facts.site).exact
    return SteadySave(
        chosen, codec, first, saved.device, layout, packed.layout, length, need != "mask", lossy_input,
        recomputed and first is facts, known.changes,
    )  # fmt: skip


def save_again(
    t: Tensor,
    facts: SiteFacts,
    steady: SteadySave,
    frame: Frame,
    forward: ForwardPass,
    known: Recomputations,
    deferred: DeferredForward | None,
) -> SharedCell | None:
    """Return the cell of a tensor that is saved with the decisions of the last pass; None if anything has changed.

    Args:
        t: The tensor.
        facts: The site.
        steady: Its decisions of the last pass.
        frame: The layer's call.
        forward: The forward pass in progress.
        known: Decisions about recomputed tensors.
        deferred: Forward to run while the tensor is encoded.
    """
    if t.shape != steady.size or t.stride() != steady.stride or t.device != steady.device or facts.changed:
        return None
    for choose, site, codec in steady.chosen:
        found = choose(site)
        # Policies create some codecs at every call.
        if found is not codec and found != codec:
            return None
    storage = t.untyped_storage()
    key = (storage._cdata, t.storage_offset(), steady.length, t.dtype, t._version)
    origin = cast_origin(t, forward.layer_input()) if facts.signature[3] in PASSED else None
    entry = forward.cells.get(key)
    cell = None if entry is None or entry[1]() is None else entry[0]()
    of_cast = cell is None and origin is not None
    if of_cast:
        entry = forward.casts.get(origin)  # type: ignore[arg-type]
        cell = None if entry is None else entry[0]()
    if steady.first is facts:
        if cell is not None or len(facts.sharers) != steady.sharers or steady.changes != known.changes:
            return None
        again = None
        if steady.recomputed:
            producer, layer_input = (t.grad_fn, t.output_nr), forward.layer_input()
            again = recompute(t, producer, facts, steady.packed_layout, steady.codec, known, layer_input)
            if again is None:
                return None
        cell = pack_again(t, steady, forward, deferred, again)
        forward.cells[key] = entry = (weakref.ref(cell), storage_ref(storage))
        if origin is not None:
            forward.casts[origin] = entry
        cell.record.saved_bytes = forward.tally.count(storage)
    elif cell is None or cell.record.facts is not steady.first or cell.wanted is not steady.codec:
        return None
    elif cell.waiting or not cell.settled or cell.rows != steady.packed_layout.rows:
        return None
    else:
        cell.share()
        if of_cast:
            cell.record.saved_bytes += forward.tally.count(storage)
    if steady.lossy_input:
        frame.lossy.add(facts.index)
    return cell


def pack_again(
    t: Tensor, steady: SteadySave, forward: ForwardPass, deferred: DeferredForward | None, again: Recomputed | None
) -> SharedCell:
    """Return a cell of memory packed with the codec of the last pass.

    Args:
        t: The tensor that is saved.
        steady: Decisions of the last pass.
        forward: The forward pass in progress.
        deferred: Forward to run while the tensor is encoded.
        again: Stand-in for a tensor that backward recomputes.
    """
    facts, codec, layout = steady.first, steady.codec, steady.packed_layout
    record = Record(facts)
    cell = SharedCell(mix(forward.step, facts.site.number, forward.rank), record)
    packed: Packed
    if again is not None:
        packed, forward.deferred, record.codec = again, None, RECOMPUTED
    else:
        if deferred is None:
            packed = codec.encode_run(t, layout, steady.length, cell.key, facts.encoder_state)
        else:
            forward.deferred = None
            packed = deferred.encode(codec, layout, steady.length, cell.key, facts.encoder_state)
        record.codec, record.packed_bytes = codec, packed.nbytes
    cell.packed, cell.wanted, cell.rows = packed, codec, layout.rows
    if steady.values:
        cell.readers = 1
    forward.tally.records.append(record)
    return cell


def ask_for_others(
    cell: SharedCell, facts: SiteFacts, length: int, dtype: torch.dtype, scores: Scores, known: Recomputations
) -> None:
    """Ask a cell, before it is packed, for the codecs that other sites will need in this pass, as far as known."""
    for sharer in tuple(facts.sharers):
        more = codec_for(scores, sharer, dtype, None)
        if more is not None:
            # If the memory differs from the last pass, the rows are known only when that reader saves.
            cell.ask(more, rows=sharer.rows[1] if sharer.rows[0] == length else None)
    asked: list[Codec] | None = None
    if facts.dependents:
        codecs = (codec_for(scores, each, dtype, None) for each in all_dependents(facts) if each.site.need == "lossy")
        asked = [codec for codec in codecs if codec is not None]
    needed = known.source(facts.site.place, asked)
    if needed is not None:
        cell.ask(needed)


def encode(
    cell: SharedCell,
    saved: Saved,
    forward: ForwardPass,
    t: Tensor,
    length: int | None = None,
    deferred: DeferredForward | None = None,
) -> None:
    """Encode the memory again if the packed data does not satisfy every reader of the cell.

    Args:
        cell: The memory's cell.
        saved: The saved tensor that provides the memory.
        forward: The forward pass in progress.
        t: The tensor; without a `length`, its flat run of memory.
        length: Values in the tensor's run of memory.
        deferred: Forward to run while the tensor is encoded.
    """
    codec, record, packed, layout = cell.wanted, cell.record, cell.packed, with_rows(saved.layout, cell.rows)
    assert codec is not None
    # Groups across the rows that a norm reads do not serve it.
    crosses = packed is not None and packed.plan is not None and packed.layout.rows != cell.rows
    if packed is None or crosses or not satisfies(packed.codec, codec):
        again, known = None, forward.recomputations
        if known is not None and (deferred is None or deferred.restores):
            if length is not None:
                producer, layer_input = (t.grad_fn, t.output_nr), forward.layer_input()
                again = recompute(t, producer, record.facts, layout, codec, known, layer_input)
            elif cell.producer is not None:
                node, index, first = cell.producer
                rows = with_rows(first, cell.rows)
                again = recompute(first.restore(t), (node, index), record.facts, rows, codec, known)
        if again is not None:
            packed, forward.deferred = again, None
        elif length is None:
            packed = codec.encode_flat(t, layout, cell.key, record.facts.encoder_state)
        elif deferred is None:
            packed = codec.encode_run(t, layout, length, cell.key, record.facts.encoder_state)
        else:
            forward.deferred = None
            packed = deferred.encode(codec, layout, length, cell.key, record.facts.encoder_state)
        if not saved.owner.intact(saved.facts, packed, t, forward.collection is not None) and deferred is None:
            # A forward that was deferred expects the codec it has announced: exact from the next pass on.
            codec = cell.wanted = Lossless()
            flat = t if length is None else run_of(t.detach(), layout, length)
            packed = codec.encode_flat(flat, layout, cell.key, record.facts.encoder_state)
        cell.packed = packed
        cell.decoded = None
        record.codec = codec if again is None else RECOMPUTED
        record.packed_bytes = packed.nbytes
    cell.held = None
    if forward.collection is not None:
        with torch.no_grad():
            flat = t if length is None else run_of(t.detach(), layout, length)
            cell.fixed = needs_fixed_rate(record.facts)
            forward.collection.saved(saved, cell, flat)


def encode_alone(
    saved: Saved, record: Record, codec: Codec, forward: ForwardPass, t: Tensor, length: int | None = None
) -> Saved:
    """Pack `t` for one reader in a cell of its own. A cell shared with other readers would need more bits."""
    forward.tally.records.append(record)
    saved.cell = cell = SharedCell(mix(forward.step, record.facts.site.number, forward.rank), record)
    cell.ask(codec, True)
    encode(cell, saved, forward, t, length)
    return saved


def limits_of(operation: str, module: nn.Module | None) -> tuple[float, float] | None:
    """Return the input limits inside which an operation propagates gradients unchanged; outside it propagates none.

    Only layers tell: the arguments of a function call may change in the next step.
    """
    if operation == "Hardsigmoid":
        return (-3.0, 3.0)
    if operation == "Hardtanh" and isinstance(module, nn.Hardtanh) and type(module).forward is nn.Hardtanh.forward:
        return (float(module.min_val), float(module.max_val))
    return None
