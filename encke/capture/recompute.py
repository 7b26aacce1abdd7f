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
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from encke.capture.attention import value_of
from encke.capture.casts import CastWeight
from encke.capture.facts import SiteFacts
from encke.capture.nodes import operation_name
from encke.capture.saved import Saved, SharedCell
from encke.codecs import Codec, Packed
from encke.codecs.algebra import satisfies, strictest
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout, run_of
from encke.kernels import backend_for
from encke.torch_internals import RAW_SAVED, saved_setting

RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias"}
"""Views that keep the order of elements."""
CAST = "ToCopy"
MIN_BITS = 4
"""Fewest bits of a source that is read through a curved function: errors without bias have one behind it."""
WORSE = 2.0
"""Largest error of a recomputed tensor, in units of the error that packing the tensor itself would have."""
PARTIAL = ("mask", "sign", "range", "shape", "recomputed")
"""Needs whose readers do not keep values."""


Kernel = Callable[[list[Any], torch.dtype], Tensor | None]
"""Computes an operation's result, in a dtype, from its operands as they were saved; None where it does not take them.
"""


@dataclass(frozen=True)
class Rule:
    """Way to compute the result of an operation from what its node has."""

    operands: tuple[tuple[str, int | None], ...]
    """Slot of each operand, and the edge of the graph behind it where the slot is empty; None if it may be missing."""
    function: Callable[[Any], Callable[..., Tensor]]
    """Returns the function of the operands, given the node."""
    curved: bool = False
    """Whether the function is not linear in each operand."""
    same_bits: bool = True
    """Whether it returns the bits that the operation did."""
    kernel: Callable[[Any], Kernel] | None = None
    """Returns a kernel that does the same on a GPU, given the node."""


def widened(x: Tensor) -> Tensor:
    """Return 16-bit values in 32 bits."""
    return x.float() if x.element_size() == 2 else x


def layer_norm(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalise with the mean and deviation of the exact input: linear in `x`."""
    y = (widened(x) - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """Normalise with the deviation of the exact input: linear in `x`. Some layers add an offset to the weight."""
    y = widened(x) * rstd
    return y if weight is None else y * (weight + offset if offset else weight)


def norm_kernel(operands: list[Any], out: torch.dtype, centred: bool, offset: float = 0.0) -> Tensor | None:
    """Do what `layer_norm` (`centred`) or `rms_norm` does in one kernel, which decodes a packed input in registers."""
    raw, *rest = operands
    mean, rstd, weight, *others = map(operand_value, rest if centred else (None, *rest))
    bias = others[0] if others else None
    if rstd is None or not rstd.numel() or not runs_kernels(rstd.device):
        return None
    for t in (mean, rstd):
        if t is not None and (t.dtype != torch.float32 or not t.is_contiguous() or t.numel() != rstd.numel()):
            return None
    size = raw.shape if isinstance(raw, Expression) else raw.layout.size if isinstance(raw, Saved) else raw[0].shape
    width = math.prod(size) // rstd.numel()
    for t in (weight, bias):
        if t is not None and (t.numel() != width or not t.is_contiguous()):
            return None
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        return None
    packed = packed_codes(raw, width)
    if packed is not None:
        data, seed, format, dtype = packed.buffers[0], packed.seed, packed.plan.format, packed.dtype
    else:
        x = operand_value(raw)
        assert x is not None
        data, seed, format, dtype = x.contiguous(), 0, None, x.dtype
    return row_kernels().normalise_again(data, seed, format, dtype, size, mean, rstd, weight, bias, offset, out)


def packed_codes(raw: Any, width: int) -> GroupQuantPacked | None:
    """Return the codes of a contiguous tensor, if the kernels read them as rows of `width` values."""
    if not isinstance(raw, Saved) or raw.tensor is not None or raw.cell is None or raw.cell.held is not None:
        return None
    packed: Any = raw.cell.packed
    # What is computed again has a codec, but no codes and no plan.
    if packed is None or packed.plan is None or not packed.codec.reads_packed or packed.dtype != raw.dtype:
        return None
    fits = raw.layout.channels_last is False and row_kernels().readable(packed.plan.format, width)
    return packed if fits else None


def runs_kernels(device: torch.device) -> bool:
    """Return whether the GPU kernels serve this device."""
    return backend_for(device.type).NAME == "triton"


@functools.cache
def row_kernels() -> Any:
    """Return the kernels of norms over rows. Imported when first needed: they need Triton."""
    from encke.kernels.gpu import row_norm

    return row_norm


def offset_of(node: Any) -> float:
    """Return what an RMS norm adds to its weight; functions in the operation's place tell."""
    return float(getattr(node, "encke_offset", 0.0))


def dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Zero and scale as `mask` tells."""
    return x * mask * (1 / (1 - p))


RULES = {
    "Mul": Rule((("self", 0), ("other", 1)), lambda node: torch.mul),
    "Silu": Rule((("self", None),), lambda node: functional.silu, curved=True),
    "Gelu": Rule(
        (("self", None),),
        lambda node: partial(functional.gelu, approximate=saved_setting(node, "approximate")),
        curved=True,
    ),
    "NativeLayerNorm": Rule(
        (("input", 0), ("result1", None), ("result2", None), ("weight", None), ("bias", None)),
        lambda node: layer_norm,
        same_bits=False,
        kernel=lambda node: partial(norm_kernel, centred=True),
    ),
    "FusedRmsNorm": Rule(
        (("input", 0), ("result1", None), ("weight", None)),
        lambda node: partial(rms_norm, offset=offset_of(node)),
        same_bits=False,
        kernel=lambda node: partial(norm_kernel, centred=False, offset=offset_of(node)),
    ),
    "NativeDropout": Rule(
        (("", 0), ("result1", None)), lambda node: partial(dropout, p=saved_setting(node, "p")), same_bits=False
    ),
    "Softmax": Rule((("result", None),), lambda node: torch.Tensor.detach),
    "SafeSoftmax": Rule((("result", None),), lambda node: torch.Tensor.detach),
}
"""Operations whose result can be computed again from what they save."""
OPTIONAL = ("weight", "bias")
"""Slots that may be empty."""
PASSED = RESHAPES | {CAST}
"""Operations that are looked through."""
STATE = ("decisions", "sources")
"""Keys of a state."""


class Expression:
    """A tensor as a function of saved ones."""

    __slots__ = ("dtypes", "function", "kernel", "operands", "shape", "signature")

    def __init__(self, node: Any, rule: Rule, dtypes: tuple[torch.dtype, ...], shape: Any) -> None:
        self.function = rule.function(node)
        self.kernel = None if rule.kernel is None else rule.kernel(node)
        self.operands: list[Any] = []
        """Expressions, objects that our hooks gave to autograd, and None."""
        self.dtypes = dtypes
        """Casts of the result, in order."""
        self.shape = shape
        self.signature: tuple[Any, ...] = (operation_name(node), dtypes)
        """Operations and casts, by which a decision is remembered."""

    def value(self) -> Tensor:
        """Compute the tensor."""
        dtypes, result = self.dtypes, None
        if self.kernel is not None:
            # A kernel computes in fp32: a result that is cast from there is rounded once.
            direct = int(len(dtypes) > 1 and dtypes[0] == torch.float32)
            result = self.kernel(self.operands, dtypes[direct])
            dtypes = dtypes[direct + 1 :]
        if result is None:
            dtypes, result = self.dtypes, self.function(*map(operand_value, self.operands))
        for dtype in dtypes:
            result = result.to(dtype)
        return result.reshape(self.shape)


def operand_value(raw: Any) -> Tensor | None:
    """Return the tensor that an operand of an expression stands for."""
    if raw is None:
        return None
    if isinstance(raw, Expression):
        return raw.value()
    if isinstance(raw, Tensor):
        return raw  # a number
    return raw.restore() if isinstance(raw, CastWeight) else value_of(raw)


class Recomputed(Packed):
    """Stand-in for a tensor that is computed again. Its codec is the one that its sources are at least as fine as."""

    __slots__ = ("expression",)

    def __init__(self, codec: Codec, layout: Layout, dtype: torch.dtype, numel: int, expression: Expression) -> None:
        super().__init__(codec, layout, dtype, numel)
        self.expression = expression

    def decode(self) -> Tensor:
        """Compute the tensor."""
        with torch.no_grad():
            return self.expression.value()

    def intact(self, source: Tensor) -> bool:
        """Return True: where a source holds a NaN or an infinity it is exact, so the result is what it was."""
        return True


def cast_origin(t: Tensor, producer: str | None) -> tuple[Any, ...] | None:
    """Return a key that is the same for all casts of one tensor; None for what no cast has made.

    `producer` is the operation that made the tensor, as its site knows it: most sites are asked no more than that.

    Autocast casts the input of each layer anew: query, key and value projections save three copies of one tensor. What
    was modified in place since, or is cast from a leaf, has no such key.
    """
    if producer not in PASSED:
        return None
    node, index, dtypes = behind(t.grad_fn, t.output_nr)
    if not dtypes or node is None or hasattr(node, "variable") or t._version or not t.is_contiguous():
        return None
    return node, index, dtypes, t.numel(), t.device


def behind(node: Any, index: int) -> tuple[Any, int, tuple[torch.dtype, ...]]:
    """Return the node and output that a tensor was made by, before casts and views, and the casts, first one first."""
    dtypes: tuple[torch.dtype, ...] = ()
    while node is not None:
        name = operation_name(node)
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


def recompute(
    t: Tensor, producer: tuple[Any, int], facts: SiteFacts, layout: Layout, codec: Codec, known: Recomputations
) -> Recomputed | None:
    """Return what stands for a tensor that backward can compute again; None if it has to be packed.

    Args:
        t: The tensor that is saved.
        producer: The node that made it, and its number among the node's results.
        facts: The site that saves it first.
        layout: Its layout.
        codec: Codec that it would be packed with.
        known: Decisions so far.
    """
    operation = facts.signature[3]
    if facts.recomputed is False or not (operation in RULES or operation in PASSED):
        return None
    if facts.site.need != "lossy" or facts.site.slot == "result":
        return None
    # Of codecs that promise a bound, a source within the bound tells nothing about the result.
    if t._version or not layout.dense or not (codec.exact or codec.reads_packed):
        return None
    sources: dict[SiteFacts, bool] = {}
    expression = express(*producer, t.shape, t.device, codec, sources)
    if expression is None:
        return None
    fine = all(sources.values())
    if not fine or facts.recomputed != expression.signature:
        for source in sources:
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
        if not good:
            return None
    return found


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
    rule = None if node is None or index else RULES.get(operation_name(node))
    if rule is None or (codec.exact and not rule.same_bits):
        return None
    # Functions of users may have the name of an operation.
    if not hasattr(node, "encke_slots") and not hasattr(type(node), RAW_SAVED + rule.operands[-1][0]):
        return None
    needed = codec.refined(min_bits=MIN_BITS) if rule.curved and not codec.exact else codec
    if needed is None:
        return None
    found = Expression(node, rule, (node._input_metadata[0].dtype, *dtypes), shape)
    for slot, edge in rule.operands:
        raw = raw_operand(node, slot) if slot else None
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
            fine = satisfies(raw.cell.packed.codec, needed)
            if not fine and needed != codec:
                # Twice the bits for the source would not be less than packing the tensor as well.
                return None
            if needed == codec:
                sources[raw.cell.record.facts] = fine
        found.operands.append(raw)
    return found


def raw_operand(node: Any, slot: str) -> Any:
    """Return the object that our hooks gave to autograd for a slot; None for an empty one."""
    try:
        slots = getattr(node, "encke_slots", ())
        raw = node._raw_saved_tensors[slots.index(slot)] if slot in slots else getattr(node, RAW_SAVED + slot, None)
        return None if raw is None else raw.data
    except RuntimeError:
        return None


def usable(raw: Any, device: torch.device) -> bool:
    """Return whether the values behind a saved object can be had in backward."""
    if isinstance(raw, CastWeight):
        return raw.parameter.device == device
    if isinstance(raw, Saved):
        cell: SharedCell | None = raw.cell
        if raw.device != device or raw.site.need in PARTIAL or raw.pending is not None:
            return False
        return raw.tensor is not None or (
            cell is not None and cell.held is None and cell.packed is not None and cell.packed.codec.restores_values
        )
    if isinstance(raw, Tensor):
        return raw.dim() == 0
    # Hooks of others may have been at work when the operation saved.
    if type(raw) is not tuple or len(raw) < 2 or not isinstance(raw[0], Tensor) or raw[0]._version != raw[1]:
        return False
    t = raw[0]
    # Sharded training frees the memory of weights that are views of a larger one.
    base = t._base
    return bool(t.device == device or t.dim() == 0) and not (base is not None and isinstance(base, nn.Parameter))


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
