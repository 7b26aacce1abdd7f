"""Readers: which backward operation, and which of its slots, reads a saved tensor.

A site's operation and slot are not known when it saves for the first time, so the tensor is held for a moment: as soon
as something computed from it is saved in turn, the autograd graph behind that is read and tells. From the second
forward pass on, sites are recognised by their place in their layer and a signature, and nothing is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.encoding import codec_for, encode, encode_alone
from encke.capture.ledger import Record
from encke.capture.needs import KNOWN, need_of, operation_name
from encke.capture.passes import Frame, Threads
from encke.capture.saved import Pending, Saved
from encke.capture.sites import Site
from encke.policies.base import Policy


class Readers:
    """Learn from the autograd graph who reads what one model saves."""

    def __init__(self, policy: Policy, root: nn.Module | None, threads: Threads) -> None:
        self.policy = policy
        self.root = weakref.ref(root) if root is not None else None
        self.threads = threads

    def read_graph(self, grad_fn: Any) -> None:
        """Walk the graph behind `grad_fn` and settle what is pending in the nodes not visited before."""
        forward = self.threads.forward
        visited = forward.visited
        stack = [grad_fn]
        while stack and forward.pending:
            node = stack.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number in visited:
                continue
            # The node that is just being made has not saved everything yet: come back to it.
            if node is not grad_fn:
                visited.add(number)
            for saved, pending in self.learn(node):
                forward.pending.discard(saved)
                self.settle(saved, pending.frame)
            stack.extend(next_node for next_node, _ in node.next_functions)

    def learn(self, node: Any) -> list[tuple[Saved, Pending]]:
        """Name the sites of what `node` saved and nobody knew yet; return what was pending."""
        mine = [(slot, saved) for slot, saved in saved_by(node) if saved.owner is self]
        learnt: list[tuple[Saved, Pending]] = []
        for slot, saved in mine:
            site, cell, pending = saved.site, saved.cell, saved.pending
            if pending is None:
                continue
            assert cell is not None and cell.held is not None
            saved.pending = None
            site.operation, site.slot = operation_name(node), slot
            if site.operation.startswith("CompiledFunction"):
                raise RuntimeError(
                    "encke: this model was attached and then compiled with torch.compile. Its saved tensors cannot be "
                    "told apart there; detach() it, or train it without torch.compile."
                )
            if cell.held.untyped_storage().data_ptr() in self._weights():
                site.need = "weight"
            else:
                site.need = need_of(site, node, pending.frame.layer.owner(), pending.weight, pending.computed)
            if "MaxPool" in site.operation and site.signature[0] == torch.int64:
                inputs = [other.site for name, other in mine if name == "self"]
                if inputs:
                    site.window, site.pair = window_of(node), inputs[0].index
            if site.operation == "Embedding":
                site.high = int(node._saved_weight_sym_argsize_0)
            sites = pending.frame.sites
            sites.extend([None] * (pending.index + 1 - len(sites)))
            before = sites[pending.index]
            site.stable = before is None or before.stable
            sites[pending.index] = site
            learnt.append((saved, pending))
        return learnt

    def settle(self, saved: Saved, frame: Frame) -> None:
        """Ask the cell for what a saving needs, now that it is known; encode when no other saving is pending."""
        site, cell, forward = saved.site, saved.cell, self.threads.forward
        assert cell is not None and cell.held is not None
        held = cell.held
        cell.waiting -= 1
        changed = held._version != cell.version
        codec = None
        if site.need not in ("weight", "shape"):
            codec = codec_for(self.policy, site, site.signature[0], frame)
        if site.need == "shape":
            saved.cell = None
            if not cell.wanted:
                cell.record.codec = "shape"
        elif codec is None or changed:
            saved.tensor = saved.layout.restore(held)
            saved.version = saved.tensor._version if saved.layout.copied else cell.version
            saved.cell = None
            if held.untyped_storage().data_ptr() in self._weights():
                cell.record.saved_bytes = 0
            if not cell.wanted:
                cell.record.packed_bytes = cell.record.saved_bytes
        elif site.need == "range":
            record = Record(site, cell.record.saved_bytes if cell.record.site is site else 0)
            cell.record.saved_bytes -= record.saved_bytes
            encode_alone(saved, record, codec, forward, held)
        else:
            cell.ask(codec, site.need != "mask")
            if cell.record.site is not site:
                cell.record.site.readers.add(site)
        if cell.waiting == 0 and not changed:
            if cell.wanted:
                encode(cell, saved, forward, held)
            cell.held = None

    def _weights(self) -> set[int]:
        """Return the addresses of the model's parameters and buffers."""
        forward = self.threads.forward
        if forward.weights is None:
            root = self.root() if self.root is not None else None
            tensors = [] if root is None else [*root.parameters(), *root.buffers()]
            forward.weights = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
        return forward.weights

    def learn_in_backward(self, node: Any) -> None:
        """Learn in backward what the forward pass could not tell: the readers of the last tensors saved."""
        self.learn(node)
        forward = self.threads.forward
        if not forward.frames:
            forward.weights = None

    def mismatch(self, saved: Saved, node: Any) -> None:
        """Handle a reader other than the one learnt: exact values serve any reader, anything else is an error."""
        site, cell = saved.site, saved.cell
        site.stable = False
        if cell is not None and (cell.held is not None or (cell.packed is not None and cell.packed.codec.exact)):
            return
        raise RuntimeError(
            f"encke: what layer '{site.layer or '(root)'}' saved for {site.operation}.{site.slot} is read by "
            f"{node.name()}: the order of operations in this layer, or what is frozen, changed since the last step, "
            "and what was kept may not be enough for this gradient. Run this step again: from now on this place is "
            f"examined anew each time. Or leave the layer out with attach(..., overrides={{{site.layer!r}: None}})."
        )


def signature(t: Tensor) -> tuple[Any, ...]:
    """Return what stays the same when a site saves again, whatever the batch size."""
    node = t.grad_fn
    return (t.dtype, t.dim(), t.requires_grad, None if node is None else operation_name(node))


def matches(site: Site, t: Tensor) -> bool:
    """Return whether `signature(t)` is the site's."""
    dtype, dimensions, requires_grad, producer = site.signature
    if t.dtype is not dtype or t.dim() != dimensions or t.requires_grad != requires_grad:
        return False
    node = t.grad_fn
    if node is None:
        return producer is None
    return (KNOWN.get(type(node)) or operation_name(node)) == producer


_slots: dict[type, list[str]] = {}


def saved_by(node: Any) -> list[tuple[str, Saved]]:
    """Return (slot, Saved) for everything that a node saved through us, without unpacking it."""
    names = _slots.get(type(node))
    if names is None:
        names = _slots[type(node)] = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
    savings: list[tuple[str, Saved]] = []
    for name in names:
        slot = name.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, name)
            pieces = raw if isinstance(raw, list | tuple) else (raw,)
            data = [piece.data if piece is not None else None for piece in pieces]
        except RuntimeError:
            continue
        # A function in an operation's place tells its slots.
        slots = getattr(node, "encke_slots", None) if slot == "tensors" else None
        for i, item in enumerate(data):
            if isinstance(item, Saved):
                savings.append((slots[i] if slots else slot if len(data) == 1 else f"{slot}{i}", item))
    return savings


def window_of(node: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return kernel, stride, padding and dilation of a max-pool, or None where the window is not a fixed one."""
    try:
        kernel = tuple(node._saved_kernel_size)
        rest = (tuple(node._saved_stride) or kernel, tuple(node._saved_padding), tuple(node._saved_dilation))
    except AttributeError:
        return None
    dimensions = 3 if "3D" in node.name() else 2
    return tuple(v * dimensions if len(v) == 1 else v for v in (kernel, *rest))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a forward pass returned: containers and plain objects are searched, each once."""
    stack, seen = [output], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, nn.Module | type):
            stack.extend(vars(item).values())
