"""The one patch of AOTAutograd: its function that writes saved-tensor hooks into graphs calls us first.

`CompiledModel` calls a compiled model under saved-tensor hooks that are graph modules (`HookPair`). They make dynamo
compile the model again, and AOTAutograd calls `graph_compile.maybe_inline_graph_saved_tensors_hooks` to write them into
its forward and backward graphs. While at least one compiled model is attached, `InlinePatch` replaces that function.
Graphs under our hooks go to the model that owns the hooks, all others to the original function.

The patch is installed when the first model is attached (`hold`) and removed when the last one is detached or
garbage-collected. A later patch by other code stays on top of ours. Ours then stays installed as well, and passes every
graph on once there are no models.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import Graph, GraphModule

from encke.torch_internals import (
    AOT_INLINE,
    aot_graph_compile,
    recompile_limit,
    run_uncompiled,
    top_saved_tensors_hooks,
)

if TYPE_CHECKING:
    from encke.compiled.model import CompiledModel


class HookPair:
    """Saved-tensor hooks of one compiled model, as graphs.

    A plain function in such a graph is unknown to AOTAutograd's cache, so graphs with hooks are never read from that
    cache.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], owner: CompiledModel) -> None:
        self.pack = calling(pack)
        self.unpack = calling(unpack)
        self.owner = weakref.ref(owner)
        _pairs[id(self.pack)] = self


_pairs: dict[int, HookPair] = {}
"""All pairs ever made, by the address of `pack`. Deliberately never freed: dynamo identifies hooks by their address and
keeps its compiled code after `detach`. If a pair were freed, a later one could get its address, and dynamo would run
the graph of the earlier one. A pair holds two graphs of one node and no tensor."""


def room_for_pairs() -> AbstractContextManager[None]:
    """Let dynamo keep, for each pair of hooks, as many compiled variants of a function as its usual limit.

    Dynamo distinguishes pairs, including those of detached models, and would stop compiling at its limit.
    """
    return recompile_limit(len(_pairs)) if len(_pairs) > 1 else nullcontext()


def calling(function: Callable[[Any], Any]) -> GraphModule:
    """Return a function as a graph that calls it: torch.compile writes such hooks into the graphs it compiles."""
    graph = Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    module = GraphModule(nn.Module(), graph)
    # Between the graphs of a model, autograd calls both for each tensor: dynamo would compile them for each kind.
    for code in (module.forward.__code__, function.__code__):
        run_uncompiled(code)
    return module


class InlinePatch:
    """Replacement for AOTAutograd's function that writes hooks into graphs."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original

    def __call__(
        self, fw_module: GraphModule, bw_module: GraphModule, num_inner_fwd_outputs: int, inner_meta: Any,
        aot_config: Any, static_input_indices: list[int],
    ) -> None:  # fmt: skip
        top = top_saved_tensors_hooks()
        pair = _pairs.get(id(top[0])) if top is not None else None
        if pair is None:
            self.original(fw_module, bw_module, num_inner_fwd_outputs, inner_meta, aot_config, static_input_indices)
            return
        owner = pair.owner()
        if owner is not None:
            differentiable = [i for i, info in enumerate(inner_meta.input_info) if info.requires_grad]
            mutated = [i for i, info in enumerate(inner_meta.input_info) if info.mutates_data or info.mutates_metadata]
            owner.inline(fw_module, bw_module, num_inner_fwd_outputs, static_input_indices, differentiable, mutated)


_numbers = itertools.count()
_holders: set[int] = set()
"""One number for each model that holds the patch."""


def hold(model: CompiledModel) -> Callable[[], Any]:
    """Keep the patch in place until the returned function is called or `model` is garbage-collected.

    Raises:
        NotImplementedError: This release of torch writes hooks into graphs in another way.
    """
    module = aot_graph_compile()
    current = getattr(module, AOT_INLINE)
    if not isinstance(current, InlinePatch):
        setattr(module, AOT_INLINE, InlinePatch(current))
    number = next(_numbers)
    _holders.add(number)
    release = weakref.finalize(model, _release, number, module)
    release.atexit = False
    return release


def _release(number: int, module: types.ModuleType) -> None:
    _holders.discard(number)
    patch = getattr(module, AOT_INLINE)
    if not _holders and isinstance(patch, InlinePatch):
        setattr(module, AOT_INLINE, patch.original)
