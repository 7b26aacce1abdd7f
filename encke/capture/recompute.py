"""Saved tensors that need not be kept: backward computes them again from what the operation that made them saved.

A linear layer behind an activation saves the activation's result, and the activation has saved its own input. One of
the two is enough. The same holds for the layers behind a normalisation, and for the product in a gated MLP:

    forward     gate -> Silu -> Mul(.., up) -> down_proj     Silu.self, Mul.self, Mul.other, Mm.self are saved
    held        gate (Silu.self) and up (Mul.other)
    backward    Mul.self = silu(gate),  Mm.self = silu(gate) * up

Whether a tensor is computed again is decided each time it is saved, by the autograd graph behind it: only through
operations in `RULES`, views that keep the order of elements, and casts; and only from sources that are packed at least
as finely as the tensor itself would be. A source that is too coarse is packed more finely from the next pass on
(`SiteFacts.dependents`). The first time, the result is compared with the tensor itself.

A result that was modified in place is packed. An activation of torch with `inplace=True` is an exception, since its
own modification is the only one that the version of its result may count (`made_in_place`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from encke.capture.casts import CastWeight
from encke.capture.expressions import LEAF, RULES, Expression, Recomputed
from encke.capture.facts import SiteFacts
from encke.capture.nodes import KNOWN, is_parameter_view, operation_name
from encke.capture.saved import Saved, SharedCell
from encke.codecs import Codec
from encke.codecs.algebra import satisfies, strictest
from encke.codecs.layout import Layout, run_of
from encke.torch_internals import RAW_SAVED

RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "Clone"}
"""Views and copies that keep the order of elements. An operation in place copies the input that it saves."""
CAST = "ToCopy"
MIN_BITS = 4
"""Fewest bits of a source that is read through a curved function: errors without bias have one behind it."""
WORSE = 2.0
"""Largest error of a recomputed tensor, in units of the error that packing the tensor itself would have."""
PARTIAL = ("mask", "sign", "range", "shape", "recomputed")
"""Needs whose readers do not keep values."""


OPTIONAL = ("weight", "bias")
"""Slots that may be empty."""
PASSED = RESHAPES | {CAST}
"""Operations that are looked through."""
STATE = ("decisions", "sources")
"""Keys of a state."""


def cast_origin(t: Tensor, layer_input: Tensor | None = None) -> tuple[Any, ...] | None:
    """Return a key that is the same for all casts of one tensor; None for what no cast has made.

    Autocast casts the input of each layer anew: query, key and value projections save three copies of one tensor. What
    was modified in place since, or is cast from a leaf, has no such key.
    """
    node, index, dtypes = behind(t.grad_fn, t.output_nr)
    if not dtypes or node is None or hasattr(node, "variable") or t._version or not t.is_contiguous():
        return None
    # Between two casts of it, the layers' input may have been modified.
    return node, index, dtypes, t.numel(), t.device, 0 if layer_input is None else layer_input._version


def behind(node: Any, index: int) -> tuple[Any, int, tuple[torch.dtype, ...]]:
    """Return the node and output that a tensor was made by, before casts and views, and the casts, first one first."""
    dtypes: tuple[torch.dtype, ...] = ()
    while node is not None:
        name = KNOWN.get(type(node)) or operation_name(node)
        if name == CAST:
            dtypes = (node._input_metadata[0].dtype, *dtypes)
        elif name not in RESHAPES:
            break
        node, index = node.next_functions[0]
    return node, index, dtypes


class Recomputations:
    """Decisions about the tensors of one model that backward computes again. A resumed run makes the same ones."""

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}
        """Operations by which the tensors of a place are computed, as text; empty if they are packed."""
        self.sources: dict[str, Codec] = {}
        """Codec that others need of what a place saves."""
        self.changes = 0
        """Number of changes to what is computed from what."""

    def concern(self, facts: SiteFacts) -> bool:
        """Return whether others may be computed from what a site saves."""
        return bool(facts.dependents) or (bool(self.sources) and facts.site.place in self.sources)

    def source(self, place: str, asked: list[Codec] | None) -> Codec | None:
        """Return the codec that others need of what a place saves.

        Args:
            place: The place.
            asked: Codecs of the others; None if they are not known in this process yet, but may be from a state.
        """
        if asked:
            self.sources[place] = strictest(asked)
        elif asked is not None:
            self.sources.pop(place, None)
        return self.sources.get(place)

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions as plain data."""
        sources = {place: codec.to_dict() for place, codec in self.sources.items()}
        return {"decisions": dict(self.decisions), "sources": sources}

    def load_state_dict(self, state: Any) -> None:
        """Take over the decisions of another run.

        Raises:
            ValueError: This is no such state.
        """
        decisions, sources = (state.get(name, {}) if isinstance(state, dict) else None for name in STATE)
        if not isinstance(decisions, dict) or not isinstance(sources, dict):
            raise ValueError(f"decisions about recomputed tensors must be two dictionaries, got {state!r}")
        if not all(isinstance(text, str) for pair in decisions.items() for text in pair):
            raise ValueError("decisions about recomputed tensors must be text by place")
        known = {str(place): Codec.from_dict(codec) for place, codec in sources.items()}
        self.decisions, self.sources = dict(decisions), known
        self.changes += 1


def all_dependents(facts: SiteFacts) -> set[SiteFacts]:
    """Return the sites whose tensors are computed from what a site saves, at once or through others."""
    found: set[SiteFacts] = set()
    stack = list(facts.dependents)
    while stack:
        each = stack.pop()
        if each not in found and each.recomputed is not False:
            found.add(each)
            stack += each.dependents
    # Those who share memory with one of them.
    return found.union(*(each.sharers for each in found))


def needs_fixed_rate(facts: SiteFacts) -> bool:
    """Return whether what a site saves needs codes of a fixed rate.

    Others are computed from it, or it may be computed again as far as its operation tells.
    """
    operation = facts.signature[3]
    return bool(facts.dependents) or (facts.recomputed is not False and (operation in RULES or operation in PASSED))


def recompute(
    t: Tensor, producer: tuple[Any, int], facts: SiteFacts, layout: Layout, codec: Codec, known: Recomputations,
    layer_input: Tensor | None = None,
) -> Recomputed | None:  # fmt: skip
    """Return what stands for a tensor that backward can compute again; None if it has to be packed.

    Args:
        t: The tensor that is saved.
        producer: The node that made it, and its number among the node's results.
        facts: The site that saves it first.
        layout: Its layout.
        codec: Codec that it would be packed with.
        known: Decisions so far.
        layer_input: First input of the layer that saves it, of which it may be a copy.
    """
    operation = facts.signature[3]
    if facts.recomputed is False or not (operation in RULES or operation in PASSED):
        return None
    if facts.site.need != "lossy" or facts.site.slot == "result":
        return None
    # Of codecs that promise a bound, a source within the bound tells nothing about the result.
    if not layout.dense or not (codec.exact or codec.reads_packed):
        return None
    if t._version and not (t._version == 1 and made_in_place(producer[0])):
        return None
    if operation in PASSED and layer_input is not None and layer_input._version:
        if is_modified(layer_input, producer):
            return None
    sources: dict[SiteFacts, bool] = {}
    expression = express(*producer, t.shape, t.device, codec, sources)
    if expression is None:
        return None
    fine = all(sources.values())
    facts.waits = not fine
    if not fine or facts.recomputed != expression.signature:
        for source in sources:
            known.changes += facts not in source.dependents
            source.dependents.add(facts)
    if not fine:
        return None
    found = Recomputed(codec, layout, t.dtype, t.numel(), expression)
    if facts.recomputed != expression.signature:
        place, text = facts.site.place, repr(expression.signature)
        decided = known.decisions.get(place)
        # A state tells what another process found out, of the same operations.
        good = bool(decided) if decided in ("", text) else as_good(found, t, layout)
        known.decisions[place] = text if good else ""
        facts.recomputed = expression.signature if good else False
        known.changes += 1
        if not good:
            return None
    return found


def is_modified(layer_input: Tensor, producer: tuple[Any, int]) -> bool:
    """Return whether a tensor is a copy of a layer's input that was modified after the operation that made it.

    Args:
        layer_input: The input, which has been modified.
        producer: Node and output that made the copy.
    """
    node, index, _ = behind(*producer)
    if behind(layer_input.grad_fn, layer_input.output_nr)[:2] != (node, index):
        return False
    return not (layer_input._version == 1 and made_in_place(node))


def made_in_place(node: Any) -> bool:
    """Return whether an activation in place made its result: it counts as one modification of its input's memory.

    The layer tells, and what it has saved is a copy. Its node does not: another one's input may be a copy, too.
    """
    raw = raw_operand(node, "self", getattr(node, "encke_slots", ()))
    activation = raw.facts.activation if isinstance(raw, Saved) and raw.facts.signature[3] == "Clone" else None
    module: Any = None if activation is None else activation()
    return module is not None and bool(module.inplace)


def express(
    node: Any, index: int, shape: Any, device: torch.device, codec: Codec, sources: dict[SiteFacts, bool]
) -> Expression | None:
    """Return a tensor as a function of saved ones; None if it is not.

    Args:
        node: The node that made the tensor.
        index: Number of the tensor among the node's results.
        shape: Its shape.
        device: Its device.
        codec: Codec that lossy sources have to be as fine as.
        sources: Gets the sites of sources that are, or may become so, and whether they are.
    """
    node, index, dtypes = behind(node, index)
    if node is None or index:
        return None
    name = KNOWN.get(type(node)) or operation_name(node)
    rule = RULES.get(name)
    if rule is None or (codec.exact and not rule.same_bits):
        return None
    # Functions of users may have the name of an operation.
    slots = getattr(node, "encke_slots", ())
    if not slots and not hasattr(type(node), RAW_SAVED + rule.operands[-1][0]):
        return None
    if rule.applies is not None and not rule.applies(node):
        return None
    needed = codec.refined(min_bits=MIN_BITS) if rule.curved and not codec.exact else codec
    if needed is None:
        return None
    kernel, dtypes = None if rule.kernel is None else rule.kernel(node), (node._input_metadata[0].dtype, *dtypes)
    found = Expression(name, rule.function(node), kernel, dtypes, shape)
    for slot, edge in rule.operands:
        raw = leaf_operand(node, edge) if slot == LEAF else raw_operand(node, slot, slots) if slot else None
        if raw is None and slot == LEAF:
            # A frozen one, or none at all: the graph does not tell.
            return None
        if raw is None and slot not in OPTIONAL:
            child, number = node.next_functions[edge] if edge is not None else (None, 0)
            if child is None:
                return None
            raw = express(child, number, tuple(child._input_metadata[number].shape), device, needed, sources)
            if raw is None:
                return None
            found.signature += raw.signature
        elif raw is not None and not usable(raw, device):
            return None
        elif isinstance(raw, Saved) and raw.tensor is None:
            assert raw.cell is not None and raw.cell.packed is not None
            packed, same = raw.cell.packed.codec, needed is codec or needed == codec
            fine = packed is needed or satisfies(packed, needed)
            if not fine and not same:
                # Twice the bits for the source would not be less than packing the tensor as well.
                return None
            if same:
                sources[raw.cell.record.facts] = fine
        found.operands.append(raw)
    return found


def raw_operand(node: Any, slot: str, slots: tuple[str, ...]) -> Any:
    """Return the object that our hooks gave to autograd for a slot; None for an empty one.

    `slots` are those that a function in an operation's place has saved through the hooks.
    """
    try:
        raw = node._raw_saved_tensors[slots.index(slot)] if slot in slots else getattr(node, RAW_SAVED + slot, None)
        return None if raw is None else raw.data
    except RuntimeError:
        return None


def leaf_operand(node: Any, edge: int | None) -> tuple[Tensor, int] | None:
    """Return the leaf behind an edge as it is now, with its version; None if there is none."""
    source = None if edge is None or len(node.next_functions) <= edge else node.next_functions[edge][0]
    leaf = getattr(source, "variable", None)
    # Detached: plain autograd does not read it again, so other memory that it gets through `.data` must not matter.
    return None if leaf is None else (leaf.detach(), leaf._version)


def usable(raw: Any, device: torch.device) -> bool:
    """Return whether the values behind a saved object can be had in backward."""
    if isinstance(raw, Saved):
        cell: SharedCell | None = raw.cell
        if raw.device != device or raw.facts.site.need in PARTIAL or raw.pending is not None:
            return False
        return raw.tensor is not None or (
            cell is not None and cell.held is None and cell.packed is not None and cell.packed.codec.restores_values
        )
    if isinstance(raw, CastWeight):
        return raw.parameter.device == device
    if isinstance(raw, Tensor):
        return raw.dim() == 0
    # Hooks of others may have been at work when the operation saved.
    if type(raw) is not tuple or len(raw) < 2 or not isinstance(raw[0], Tensor) or raw[0]._version != raw[1]:
        return False
    # Sharded training frees the memory of weights that are views of a larger one.
    return bool(raw[0].device == device or raw[0].dim() == 0) and not is_parameter_view(raw[0])


def as_good(found: Recomputed, t: Tensor, layout: Layout) -> bool:
    """Return whether a recomputed tensor has the error that packing it would have, or nearly so. The host waits."""
    exact, again = t.detach(), found.decode()
    if again.shape != exact.shape or again.dtype != exact.dtype:
        return False
    codec = found.codec
    if codec.exact:
        return torch.equal(again, exact)
    with torch.no_grad():
        packed = codec.encode_flat(run_of(exact, layout, exact.numel()), layout)
        own = packed.decode_in(layout).float() - exact.float()
        return bool((again.float() - exact.float()).norm() <= WORSE * own.norm())
