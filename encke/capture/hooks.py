"""Between autograd and the codecs: who is this tensor, was it packed already, may it be lossy.

The only user of saved-tensor hooks. A site's operation and slot are not known when it saves for the first time, so the
tensor is held for a moment: as soon as something computed from it is saved in turn, the graph behind that is read and
tells. From the second forward pass on, sites are recognised by their place in their layer and a signature, and nothing
is held.
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _autograd

from encke.capture.saved import LATE, Cell, Record, Saved, Unknown, satisfies
from encke.capture.sites import (
    KNOWN,
    Site,
    limits_of,
    matches,
    need_of,
    needs_weight_gradient,
    operation_name,
    signature,
)
from encke.codecs import Between, Codec, Lossless, Mask, Sign, Window
from encke.codecs.base import Hint, mix
from encke.codecs.packed import Layout, Packed, check_version, flatten, layout_of, run_of
from encke.codecs.pending import settle_all
from encke.policies.comet.measure import Collection
from encke.policies.comet.schedule import Follower
from encke.report import StepLog

SMALL = 16384
"""Tensors of fewer bytes than this pass through as they are."""

ACCUMULATE = 0xFFFFFFFFFFFFFFFF

ORDER = (
    "encke: this model was attached and then compiled. Compile it first, then attach: "
    "handle = encke.attach(torch.compile(model), ...)"
)

storage_ref = weakref.ref
"""A storage's Python object lives as long as its memory does, whoever holds that."""

Kept = tuple[Tensor, int]
"""A tensor that is kept as it is, and its version when it was saved."""


def keep(t: Tensor) -> Kept:
    return t.detach(), t._version


class Policy(Protocol):
    """What capture asks of a policy. One that follows the training has a `follower` as well."""

    def choose(self, site: Site) -> Codec: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Layer:
    """A module of the attached model: its name, and for each call within one forward pass the sites it has."""

    __slots__ = ("calls", "compress", "module", "name", "parent")

    def __init__(self, name: str, module: nn.Module | None, parent: Layer | None, compress: bool) -> None:
        self.name = name
        self.module = weakref.ref(module) if module is not None else None
        self.parent = parent
        self.compress = compress
        self.calls: list[list[Site | None]] = []

    def owner(self) -> nn.Module | None:
        return self.module() if self.module is not None else None


class Frame:
    """A layer's call in progress."""

    __slots__ = ("index", "layer", "number", "sites", "sizes")

    def __init__(self, layer: Layer, forward: Forward) -> None:
        calls = layer.calls
        number = forward.calls[layer] = forward.calls.get(layer, -1) + 1
        if len(calls) <= number:
            calls.append([])
        self.layer = layer
        self.number = number
        self.sites = calls[number]
        self.sizes: dict[int, tuple[int, ...]] | None = None
        """Of what was saved by index, where a window may ask for it."""
        self.index = 0


class Work:
    """The saving that one of our own layers makes next, which need not be recognised: its tensor and its site.

    An operation may leave its work to be done while that tensor is encoded, in one pass over it.
    """

    __slots__ = ("codec", "site", "t")

    def __init__(self, site: Site, codec: Codec | None, t: Any) -> None:
        self.site = site
        self.codec = codec
        """What the policy has chosen for the site, if it was asked."""
        self.t = t

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, hint: Hint) -> Packed:
        """Does the work and encodes the tensor; the arguments are those of `Codec.encode_run`."""
        return codec.encode_run(self.t, layout, length, key, hint)

    def alone(self) -> None:
        """Does the work where nothing is encoded."""


class Forward:
    """One thread's forward pass in progress."""

    __slots__ = (
        "calls",
        "cells",
        "collection",
        "counted",
        "frames",
        "nodes",
        "outer",
        "pending",
        "records",
        "small",
        "step",
        "visited",
        "weights",
        "work",
    )

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.clear()

    def clear(self) -> None:
        self.frames.clear()
        self.calls: dict[Layer, int] = {}
        self.cells: dict[tuple[Any, ...], tuple[weakref.ref[Cell], weakref.ref[torch.UntypedStorage]]] = {}
        self.counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.pending: set[Saved] = set()
        self.visited: set[int] = {ACCUMULATE}
        self.records: list[Record] = []
        self.small = 0
        self.weights: set[int] | None = None
        self.collection: Collection | None = None
        self.nodes: list[Any] = []
        self.outer: Any = None
        self.work: Work | None = None
        self.step = 0

    def do_work(self) -> None:
        """What was to be done while encoding is done now, by itself."""
        work, self.work = self.work, None
        if work is not None:
            work.alone()

    def push(self, layer: Layer) -> Frame:
        """A call of a layer begins."""
        frame = Frame(layer, self)
        self.frames.append(frame)
        return frame

    def count(self, storage: torch.UntypedStorage) -> int:
        """Bytes of a storage if this forward pass has not counted it yet, else zero."""
        counted, name = self.counted, storage._cdata
        known = counted.get(name)
        if known is not None and known() is not None:
            return 0
        counted[name] = storage_ref(storage)
        return storage.nbytes()


class Threads(threading.local):
    """Each thread has a forward pass of its own."""

    def __init__(self) -> None:
        self.forward = Forward()


class Capture:
    """Packs what one model (or one `compress` context) saves."""

    def __init__(self, policy: Policy, root: nn.Module | None) -> None:
        self.policy = policy
        self.follower: Follower | None = getattr(policy, "follower", None)
        self.root = weakref.ref(root) if root is not None else None
        self.threads = Threads()
        self.step = 0
        self.rank = 0
        self.last: list[Record] = []
        self.log: StepLog | None = None
        self.hooks = (self.pack, unpack)
        self.detached = False

    @property
    def forward(self) -> Forward:
        """This thread's forward pass."""
        return self.threads.forward

    # -- entering and leaving ------------------------------------------------------------------------------------------

    def enter(self, layer: Layer) -> Frame | None:
        """A layer is called: name it in what follows; the outermost one switches the hooks on, where it may."""
        forward = self.threads.forward
        frames = forward.frames
        if frames:
            if layer.parent is frames[-1].layer or not self._stale():
                return forward.push(layer)
            self.abandon()
        module = layer.owner()
        if self.detached or (module is not None and not module.training):
            return None
        if not torch.is_grad_enabled() or not may_push():
            return None
        return self.begin(layer, sys._getframe(2))

    def begin(self, layer: Layer, outer: Any = None) -> Frame:
        """Switches the hooks on for this thread, until the call `outer` (a Python frame) ends."""
        forward = self.forward
        forward.clear()
        forward.outer = outer
        self.write_log()
        self.step += 1
        forward.step = self.step
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.follower is not None:
            forward.collection = self.follower.begin()
        frame = forward.push(layer)
        _autograd._push_saved_tensors_default_hooks(*self.hooks)
        return frame

    def leave(self, layer: Layer, output: Any) -> None:
        """A layer's call ends, by return or by exception (`output` is None then)."""
        frames = self.threads.forward.frames
        if not frames or frames[-1].layer is not layer:
            return
        if len(frames) > 1:
            frames.pop()
        else:
            self.finish(output)

    def finish(self, output: Any) -> None:
        """The forward pass is over: settle what is still held, switch the hooks off."""
        forward = self.forward
        self._unhook()
        for tensor in tensors_in(output) if forward.pending else ():
            self._read_graph(tensor.grad_fn)
        if forward.collection is not None:
            ends = [tensor.grad_fn for tensor in tensors_in(output)]
            forward.collection.walk(ends if any(ends) else forward.nodes, saved_by)
        if forward.small:
            record = Record(KEPT, forward.small)
            record.packed_bytes = forward.small
            forward.records.append(record)
        self.last = forward.records
        forward.clear()
        settle_all(wait=False)

    def write_log(self) -> None:
        """What the last forward pass saved, to the log if one is kept."""
        if self.log is not None and self.last:
            self.log.write(self.step, self.last)

    def abandon(self) -> None:
        """Forgets a forward pass that was interrupted, and takes its hooks off this thread."""
        if self.forward.frames:
            self._unhook()
            self.forward.clear()

    def _unhook(self) -> None:
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] == self.hooks[0]:
            _autograd._pop_saved_tensors_default_hooks()

    def _stale(self) -> bool:
        """Whether the call that switched the hooks on has ended without telling: Ctrl-C runs no forward hooks."""
        frame: Any = sys._getframe(1)
        outer = self.forward.outer
        while frame is not None and outer is not None:
            if frame is outer:
                return False
            frame = frame.f_back
        return outer is not None

    # -- packing -------------------------------------------------------------------------------------------------------

    def pack(self, t: Tensor) -> Saved | Kept:
        """Autograd saves `t`."""
        forward = self.threads.forward
        frames = forward.frames
        if not frames:
            # Somebody kept our hooks on beyond the forward pass: what is saved now is none of ours.
            return keep(t)
        frame = frames[-1]
        index = frame.index
        frame.index = index + 1
        if forward.collection is not None:
            forward.nodes.append(t.grad_fn)
        if type(t) is not Tensor and isinstance(t, nn.Parameter):
            # A leaf has no node that would keep it alive in a circle.
            return (t, t._version) if t.is_leaf else keep(t)
        size = t.numel() * t.element_size()
        if size < SMALL:
            if not of_parameter(t):
                forward.small += size
            return keep(t)
        work = forward.work
        if work is None or work.t is not t:
            if work is not None:
                forward.do_work()
                work = None
            if not frame.layer.compress or unusual(t):
                return self._pass(t)
        if forward.pending:
            self._read_graph(t.grad_fn)
        if work is not None:
            return self._save(t, work.site, frame, forward, work)
        known = frame.sites[index] if index < len(frame.sites) else None
        if known is not None and known.stable and matches(known, t):
            need = known.need
            if need == "weight":
                return self._pass(t)
            if need != "shape":
                return self._save(t, known, frame, forward)
            if not thawed(known, frame.layer):
                return self._shape(t, known, frame)
        return self._hold(t, frame, index)

    def _pass(self, t: Tensor) -> Kept:
        """Keeps `t` itself."""
        if not of_parameter(t):
            forward = self.threads.forward
            size = forward.count(t.untyped_storage())
            if size:
                record = Record(KEPT, size)
                record.packed_bytes = size
                forward.records.append(record)
        return keep(t)

    def _cell(self, site: Site, t: Tensor, layout: Layout, length: int, forward: Forward) -> Cell:
        """The cell of the memory that `t` covers, new or shared."""
        storage = t.untyped_storage()
        run = (layout.size, layout.stride) if layout.copied else length
        key = (storage._cdata, t.storage_offset(), run, t.dtype, t._version)
        found = forward.cells.get(key)
        # Allocators reuse addresses: an entry counts only while the storage it was made from is alive.
        if found is not None and found[1]() is not None:
            cell = found[0]()
            if cell is not None:
                return cell
        record = Record(site, forward.count(storage))
        forward.records.append(record)
        cell = Cell(mix(forward.step, site.number, self.rank), record)
        forward.cells[key] = (weakref.ref(cell), storage_ref(storage))
        return cell

    def _hold(self, t: Tensor, frame: Frame, index: int) -> Saved:
        """Keeps `t` as it is until the graph tells who reads it."""
        place = f"{frame.layer.name}/{frame.number}/{index}"
        site = Site(frame.layer.name, index, signature(t), place=place, number=zlib.crc32(place.encode()))
        note_size(frame, index, t)
        flat, layout = flatten(t.detach())
        cell = self._cell(site, t, layout, flat.numel(), self.forward)
        saved = Saved(self, site, t, layout, cell)
        saved.pending = Unknown(frame, index, t.grad_fn)
        cell.waiting += 1
        cell.hold(flat)
        self.forward.pending.add(saved)
        return saved

    def _save(self, t: Tensor, site: Site, frame: Frame, forward: Forward, work: Work | None = None) -> Saved | Kept:
        """Packs `t` for a reader whose need is known, and does the work that was left for then."""
        codec = None if work is None else work.codec
        if codec is None:
            codec = MASK if site.need == "mask" else self._want(site, t.dtype, frame)
            if codec is None:
                return self._pass(t)
        layout, length = layout_of(t.shape, t.stride())
        if site.need == "range":
            record = Record(site, forward.count(t.untyped_storage()))
            return self._alone(Saved(self, site, t, layout, None), record, codec, forward, t, length)
        cell = self._cell(site, t, layout, length, forward)
        saved = Saved(self, site, t, layout, cell)
        first = cell.record.site
        if first is not site:
            first.readers.add(site)
        elif site.readers:
            for reader in tuple(site.readers):
                more = self._want(reader, t.dtype, None)
                if more is not None:
                    cell.ask(more)
        cell.ask(codec, codec is not MASK)
        packed = cell.packed
        if packed is None or packed.codec is not cell.wanted or forward.collection is not None:
            if not cell.waiting:
                self._encode(cell, saved, forward, t, length, work)
        return saved

    def _alone(
        self, saved: Saved, record: Record, codec: Codec, forward: Forward, t: Tensor, length: int | None = None
    ) -> Saved:
        """Packs `t` for one reader, whoever else saves its memory: together they would need more."""
        forward.records.append(record)
        saved.cell = cell = Cell(mix(forward.step, record.site.number, self.rank), record)
        cell.ask(codec, True)
        self._encode(cell, saved, forward, t, length)
        return saved

    def _shape(self, t: Tensor, site: Site, frame: Frame) -> Saved:
        """A reader that needs only the shape costs nothing, but plain autograd would have held the memory."""
        saved = Saved(self, site, t, layout_of(t.shape, t.stride())[0], None)
        note_size(frame, site.index, t)
        record = Record(site, self.forward.count(t.untyped_storage()))
        record.codec = "shape"
        if record.saved_bytes:
            self.forward.records.append(record)
        return saved

    def _want(self, site: Site, dtype: torch.dtype, frame: Frame | None) -> Codec | None:
        """The codec that a site's need asks for; None where there is none for the dtype."""
        codec: Codec
        need = site.need
        if need == "mask":
            codec = MASK
        elif need == "sign":
            codec = SIGN
        elif need == "range":
            limits = limits_of(site.operation, None if frame is None else frame.layer.owner())
            codec = self.policy.choose(site) if limits is None else Between(*limits)
        elif need == "exact":
            if site.stays:
                return None
            codec = Lossless(high=site.high)
            plane = frame.sizes.get(site.pair) if frame is not None and frame.sizes is not None else None
            if site.window is not None and plane is not None:
                kernel, stride, padding, dilation = site.window
                window = Window(kernel, stride, padding, dilation, plane[-len(kernel) :])
                codec = window if window.takes(dtype) else codec
        else:
            codec = self.policy.choose(site)
        return codec if codec.takes(dtype) else None

    def _encode(
        self, cell: Cell, saved: Saved, forward: Forward, t: Tensor, length: int | None = None, work: Work | None = None
    ) -> None:
        """Makes the cell satisfy all who asked, encoding from the memory at hand where it does not yet.

        That is a tensor with the length of its run, or without a length the flat run itself.
        """
        codec, record, packed, layout = cell.wanted, cell.record, cell.packed, saved.layout
        assert codec is not None
        if packed is None or not satisfies(packed.codec, codec):
            if length is None:
                packed = codec.encode_flat(t, layout, cell.key, record.site.hint)
            elif work is None:
                packed = codec.encode_run(t, layout, length, cell.key, record.site.hint)
            else:
                forward.work = None
                packed = work.encode(codec, layout, length, cell.key, record.site.hint)
            cell.packed = packed
            cell.decoded = None
            record.codec = codec
            record.packed_bytes = LATE if packed.late else packed.nbytes
        cell.held = None
        if forward.collection is not None:
            with torch.no_grad():
                flat = t if length is None else run_of(t.detach(), layout, length)
                forward.collection.saved(saved, cell, flat)

    # -- learning who reads --------------------------------------------------------------------------------------------

    def _read_graph(self, grad_fn: Any) -> None:
        """Walks the graph behind `grad_fn` and settles what is pending in the nodes not visited before."""
        forward = self.forward
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
            self._read_node(node)
            stack.extend(next_node for next_node, _ in node.next_functions)

    def _read_node(self, node: Any) -> None:
        for saved, unknown in self.learn(node):
            self.forward.pending.discard(saved)
            self._settle(saved, unknown.frame)

    def learn(self, node: Any) -> list[tuple[Saved, Unknown]]:
        """Names the sites of what `node` saved and nobody knew yet, and gives what was waiting for that."""
        found = [(slot, saved) for slot, saved in saved_by(node) if saved.capture is self]
        learnt: list[tuple[Saved, Unknown]] = []
        for slot, saved in found:
            site, cell, unknown = saved.site, saved.cell, saved.pending
            if unknown is None:
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
                site.need = need_of(site, node, unknown.frame.layer.owner(), unknown.weight, unknown.computed)
            if "MaxPool" in site.operation and site.signature[0] == torch.int64:
                inputs = [other.site for name, other in found if name == "self"]
                if inputs:
                    site.window, site.pair = window_of(node), inputs[0].index
            if site.operation == "Embedding":
                site.high = int(node._saved_weight_sym_argsize_0)
            sites = unknown.frame.sites
            sites.extend([None] * (unknown.index + 1 - len(sites)))
            before = sites[unknown.index]
            site.stable = before is None or before.stable
            sites[unknown.index] = site
            learnt.append((saved, unknown))
        return learnt

    def _settle(self, saved: Saved, frame: Frame) -> None:
        """A saving's need has become known: count it, and encode when nobody is left to wait for."""
        site, cell = saved.site, saved.cell
        assert cell is not None and cell.held is not None
        held = cell.held
        cell.waiting -= 1
        changed = held._version != cell.version
        codec = self._want(site, site.signature[0], frame) if site.need not in ("weight", "shape") else None
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
            self._alone(saved, record, codec, self.forward, held)
        else:
            cell.ask(codec, site.need != "mask")
            if cell.record.site is not site:
                cell.record.site.readers.add(site)
        if cell.waiting == 0 and not changed:
            if cell.wanted:
                self._encode(cell, saved, self.forward, held)
            cell.held = None

    def _weights(self) -> set[int]:
        """Addresses of the model's parameters and buffers."""
        if self.forward.weights is None:
            root = self.root() if self.root is not None else None
            tensors = [] if root is None else [*root.parameters(), *root.buffers()]
            self.forward.weights = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
        return self.forward.weights

    def learn_late(self, node: Any) -> None:
        """Learns in backward what the forward pass could not tell: the readers of the last tensors saved."""
        self.learn(node)
        if not self.forward.frames:
            self.forward.weights = None

    def mismatch(self, saved: Saved, node: Any) -> None:
        """Another operation reads than the site was learnt for. Exact values serve anybody, nothing else may."""
        site, cell = saved.site, saved.cell
        site.stable = False
        if cell is not None and (cell.held is not None or (cell.packed is not None and cell.packed.codec.exact)):
            return
        raise RuntimeError(
            f"encke: what layer '{site.layer or '(root)'}' saved for {site.operation}.{site.slot} is read by "
            f"{node.name()}: the order of operations in this layer, or what is frozen, changed since the last step, "
            "and what was kept may not be enough for this gradient. Run this step again: from now on this place is "
            "examined anew each time. Or leave the layer out with attach(filter=...)."
        )


KEPT = Site("", -1, (), operation="(small or kept)", slot="")
MASK, SIGN = Mask(), Sign()


def unpack(saved: Saved | Kept) -> Tensor:
    """Autograd reads what it saved."""
    if type(saved) is tuple:
        t, version = saved
        if t._version != version:
            check_version(t, version)
        return t
    assert isinstance(saved, Saved)
    site = saved.site
    if saved.tensor is None:
        node = torch._C._current_autograd_node()
        if node is None:
            pass
        elif saved.pending is not None:
            saved.capture.learn_late(node)
        elif (KNOWN.get(type(node)) or operation_name(node)) != site.operation or (
            site.need == "shape" and needs_weight_gradient(node)
        ):
            saved.capture.mismatch(saved, node)
    return saved.restore()


def note_size(frame: Frame, index: int, t: Tensor) -> None:
    """What is saved next may be a window's indices into this."""
    if frame.sizes is None:
        frame.sizes = {}
    frame.sizes[index] = tuple(t.shape)


def thawed(site: Site, layer: Layer) -> bool:
    """Whether a convolution's weight needs a gradient now, though its input was kept as a shape while it was frozen."""
    if site.need != "shape" or site.operation != "Convolution":
        return False
    weight = getattr(layer.owner(), "weight", None)
    return weight is not None and weight.requires_grad


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward pass returned: containers and plain objects are searched, each once."""
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


def unusual(t: Tensor) -> bool:
    """Tensors that are left alone: subclasses, sparse or quantized ones, negated views, meta tensors."""
    return type(t) is not Tensor or t.layout != torch.strided or t.is_neg() or t.is_quantized or t.is_meta


def of_parameter(t: Tensor) -> bool:
    """Whether a tensor is a view of a parameter. To ask whether something is one is slow."""
    base = t._base
    return base is not None and isinstance(base, nn.Parameter)


def may_push() -> bool:
    """Whether hooks may be pushed now: never above somebody else's, never under torch.func, which refuses them."""
    if _autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def inside_compile() -> bool:
    """Whether torch.compile is tracing this call, or has given up tracing it and runs it piece by piece."""
    return torch.compiler.is_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


_slots: dict[type, list[str]] = {}


def saved_by(node: Any) -> list[tuple[str, Saved]]:
    """(slot, Saved) for everything that a node saved through us, without unpacking it."""
    names = _slots.get(type(node))
    if names is None:
        names = _slots[type(node)] = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
    found: list[tuple[str, Saved]] = []
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
                found.append((slots[i] if slots else slot if len(data) == 1 else f"{slot}{i}", item))
    return found


def window_of(node: Any) -> tuple[tuple[int, ...], ...] | None:
    """Kernel, stride, padding and dilation of a max-pool, or None where the window is not a fixed one."""
    try:
        kernel = tuple(node._saved_kernel_size)
        rest = (tuple(node._saved_stride) or kernel, tuple(node._saved_padding), tuple(node._saved_dilation))
    except AttributeError:
        return None
    dimensions = 3 if "3D" in node.name() else 2
    return tuple(v * dimensions if len(v) == 1 else v for v in (kernel, *rest))
