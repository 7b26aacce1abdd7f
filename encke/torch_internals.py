"""Private symbols of torch, each behind a name of our own with a check.

No other module of Encke imports from a private module of torch or calls a private function of it
(tests/test_torch_internals.py reads the source and fails on it). If a release lacks a symbol, the error names the
release, the symbol and the way out. Functions that run for every saved tensor are plain aliases: a wrapper would cost a
Python call each.

Attributes of tensors, modules and autograd nodes (`ATTRIBUTES`) are read in place, for the same reason. They are listed
and tested here as well. Operators under `torch.ops` are found by their schema and are not private.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SUPPORTED = ("2.11", "2.12", "2.13")
"""Supported releases of torch: tests/test_torch_internals.py passes on each."""

ATTRIBUTES: dict[str, tuple[type, str]] = {
    "_version": (Tensor, "counts changes in place; what was saved is checked against it"),
    "_base": (Tensor, "the tensor that a view was made of, None for others"),
    "_cdata": (torch.UntypedStorage, "address of the storage object: the same for all tensors that share memory"),
    "_parameters": (nn.Module, "own parameters by name, past the slow `Module.__getattr__`"),
    "_buffers": (nn.Module, "own buffers by name"),
    "_modules": (nn.Module, "own children by name"),
    "_orig_mod": (nn.Module, "on what `torch.compile(model)` returns: the model"),
    "_forward_hooks": (nn.Module, "hooks behind forward, by handle id"),
    "_forward_pre_hooks": (nn.Module, "hooks before forward, by handle id"),
    "_backward_hooks": (nn.Module, "hooks around backward, by handle id"),
    "_backward_pre_hooks": (nn.Module, "hooks before backward, by handle id"),
    "_forward_hooks_always_called": (nn.Module, "ids of hooks that run after an exception too"),
    "_call_impl": (nn.Module, "the module's call without what `compile()` put in its place"),
    "_compiled_call_impl": (nn.Module, "what `Module.compile()` put in its place, or None"),
    "_check_input_dim": (nn.BatchNorm2d, "raises unless the input has the right number of dimensions"),
    "_raw_saved_tensors": (torch.autograd.Function, "on a node: its saved tensors as packed; `.data` is what we gave"),
    "_backward_cls": (torch.autograd.Function, "class of the nodes that a function makes"),
    "_input_metadata": (torch.autograd.graph.Node, "on a node: shape of each result of its operation"),
    "_sequence_nr": (torch.autograd.graph.Node, "on a node: its number within the process, by order of creation"),
}
"""Private attributes that are read in place -> their type, and their content. Checked with 2.11 to 2.13."""


def unsupported(symbol: str, use: str) -> NotImplementedError:
    """Return the error for a private symbol that this release of torch lacks or has changed."""
    return NotImplementedError(
        f"torch {torch.__version__} has no {symbol} of the kind that Encke needs for {use}. Encke works with torch "
        f"{SUPPORTED[0]} to {SUPPORTED[-1]}: install one of these, or report this release as an issue"
    )


def _find(path: str, use: str) -> Any:
    """Return the symbol `torch.<path>`, or raise `unsupported`."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise unsupported(f"torch.{path}", use)
    return found


def _module(name: str, symbols: tuple[str, ...], use: str) -> Any:
    """Import a private module of torch and check that it has these symbols."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise unsupported(name, use) from None
    for symbol in symbols:
        found: Any = module
        for part in symbol.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise unsupported(f"{name}.{symbol}", use)
    return module


# -- saved-tensor hooks ------------------------------------------------------------------------------------------------

push_saved_tensors_hooks: Callable[[Any, Any], None] = _find(
    "_C._autograd._push_saved_tensors_default_hooks", "capture"
)
"""Put a pack and an unpack function on this thread's stack of hooks.

`torch.autograd.graph.saved_tensors_hooks` does the same as a context manager. Encke pushes in one function and pops in
another. Checked with 2.11 to 2.13.
"""

pop_saved_tensors_hooks: Callable[[], None] = _find("_C._autograd._pop_saved_tensors_default_hooks", "capture")
"""Pop the topmost pair of hooks from this thread's stack. Checked with 2.11 to 2.13."""

top_saved_tensors_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    _find("_C._autograd._top_saved_tensors_default_hooks", "capture"), True
)
"""Return the topmost pair of hooks of this thread, None if there is none, whether or not torch is tracing.

A partial object instead of a function: calling it creates no Python frame. Checked with 2.11 to 2.13.
"""

saved_tensors_hooks_allowed: Callable[[], bool] = _find("_C._autograd._saved_tensors_hooks_is_enabled", "capture")
"""Return whether hooks may be pushed: not inside `torch.autograd.graph.disable_saved_tensors_hooks`.

Checked with 2.11 to 2.13.
"""

functorch_interpreter: Callable[[], Any] = _find("_C._functorch.peek_interpreter_stack", "capture")
"""Return the active torch.func transform, None outside of one; such transforms refuse saved-tensor hooks.

Checked with 2.11 to 2.13.
"""

is_functorch_tensor: Callable[[Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor", "fused layers")
"""Return whether a tensor belongs to a torch.func transform. Checked with 2.11 to 2.13."""

is_view: Callable[[Tensor], bool] = _find("Tensor._is_view", "fused layers")
"""Return whether autograd knows a tensor as a view of another one. Checked with 2.11 to 2.13."""

is_batched_gradient: Callable[[Tensor], bool] = _find("_C._functorch.is_legacy_batchedtensor", "collection steps")
"""Return whether a tensor is a batch of gradients, from `torch.autograd.grad(..., is_grads_batched=True)`.

Checked with 2.11 to 2.13.
"""

current_autograd_node: Callable[[], Any] = _find("_C._current_autograd_node", "capture")
"""Return the node whose backward is running on this thread, None outside of one. Checked with 2.11 to 2.13."""

current_graph_task: Callable[[], int] = _find("_C._current_graph_task_id", "payloads of variable size")
"""Return the number of the backward pass that runs on this thread, -1 outside of one. Checked with 2.11 to 2.13."""

keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", "fused blocks")
"""Return whether the backward pass that runs on this thread keeps its graph (`retain_graph=True`).

Checked with 2.11 to 2.13.
"""

eval_frame_callback: Callable[[], Any] = _find("_C._dynamo.eval_frame.get_eval_frame_callback", "capture")
"""Return the callback through which dynamo runs new Python frames; None or False if it runs none.

It tells whether torch.compile has failed to trace a call and runs it piece by piece. Checked with 2.11 to 2.13.
"""

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def called_by_checkpoint(above: int) -> bool:
    """Return whether `torch.utils.checkpoint` is among the Python frames just above the caller of this function.

    With `use_reentrant=False` the inputs of a region are saved by a node outside of the graph. Only the call stack
    tells that a tensor is saved or read for a recomputation. Checked with 2.11 to 2.13.

    Args:
        above: Frames between the caller and the function that autograd calls.
    """
    frame: Any = sys._getframe(above + 2)
    for _ in range(2):
        if frame is None:
            return False
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


profiler_enabled: Callable[[], bool] = _find("autograd._profiler_enabled", "records of memory")
"""Return whether a torch profiler is active. Checked with 2.11 to 2.13."""

has_global_module_hooks: Callable[[], bool] = _find("nn.modules.module._has_any_global_hook", "fused blocks")
"""Return whether hooks for the calls of all modules exist. Checked with 2.11 to 2.13."""

# -- tensor subclasses -------------------------------------------------------------------------------------------------

without_torch_function: Callable[[], Any] = _find("_C.DisableTorchFunctionSubclass", "losses in chunks")
"""Context that calls functions without `__torch_function__` of their arguments. Checked with 2.11 to 2.13."""

make_wrapper_subclass: Callable[..., Any] = _find("Tensor._make_wrapper_subclass", "losses in chunks")
"""Create a tensor of a subclass with a shape and without memory. Checked with 2.11 to 2.13."""

pytree = _module("torch.utils._pytree", ("tree_leaves", "tree_map", "tree_map_only"), "losses in chunks and estimates")
"""Functions for nested containers of tensors. Checked with 2.11 to 2.13."""

# -- autograd nodes ----------------------------------------------------------------------------------------------------

RAW_SAVED = "_raw_saved_"
"""Prefix of the node attributes that return saved tensors without unpacking them."""


def raw_saved_slots(kind: type) -> list[str]:
    """Return the slots in which nodes of this type save tensors: `["input", "weight"]` for a convolution.

    Checked with 2.11 to 2.13.
    """
    return [name.removeprefix(RAW_SAVED) for name in dir(kind) if name.startswith(RAW_SAVED)]


_REQUIRED = object()


def saved_setting(node: Any, name: str, default: Any = _REQUIRED) -> Any:
    """Return a setting that a node keeps for its backward, such as a convolution's `stride`.

    Without the setting return `default`, or raise if there is none. Do not use this function for tensors that pass
    through the hooks: reading one would unpack it. Checked with 2.11 to 2.13.
    """
    value = getattr(node, f"_saved_{name}", default)
    if value is _REQUIRED:
        raise unsupported(f"{node.name()}._saved_{name}", "reading the settings of an operation")
    return value


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that is running ends. Checked with 2.11 to 2.13."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        raise unsupported("torch.autograd.Variable._execution_engine.queue_callback", "the end of backward")
    engine.queue_callback(function)  # type: ignore[union-attr]


def apply_as(function: type[torch.autograd.Function], name: str, node: dict[str, Any] | None = None) -> Any:
    """Return the `apply` of an autograd function whose nodes are called `<name>Backward` and have further attributes.

    Capture compares node names with those it has learnt, so a function that replaces an operation must have the
    operation's name. Two parts of `torch.autograd.Function`, each several Python calls, are left out: the search for
    torch.func transforms in forward (the caller must ensure that none is active), and the search for the function's own
    `vjp` in backward. Checked with 2.11 to 2.13.
    """
    named: Any = types.new_class(name, (function,))
    backward = getattr(named, "_backward_cls", None)
    if backward is None or not hasattr(super(torch.autograd.Function, named), "apply"):
        raise unsupported("torch.autograd.Function._backward_cls", "fused layers")
    backward.apply = function.backward
    for attribute, value in (node or {}).items():
        setattr(backward, attribute, value)
    return super(torch.autograd.Function, named).apply


# -- operations --------------------------------------------------------------------------------------------------------

batch_norm_forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, int]] = _find(
    "_batch_norm_impl_index", "fused batch norm"
)
"""Run the batch norm that `torch.nn.functional.batch_norm` runs: output, mean, invstd, reserve, implementation.

Checked with 2.11 to 2.13.
"""

cudnn_enabled: Callable[[], bool] = _find("_C._get_cudnn_enabled", "fused batch norm")
"""Return `torch.backends.cudnn.enabled`, without that module's Python calls. Checked with 2.11 to 2.13."""

verify_batch_size: Callable[[Any], None] = _find("nn.functional._verify_batch_size", "fused batch norm")
"""Raise unless there is more than one value for each channel. Checked with 2.11 to 2.13."""

copy_together: Callable[[list[Tensor], list[Tensor]], None] = _find("_foreach_copy_", "fused blocks")
"""Copy tensors to others of the same sizes, with a cast if dtypes differ. Checked with 2.11 to 2.13."""

foreach_norm: Callable[[list[Tensor], int, torch.dtype], list[Tensor]] = _find("_foreach_norm", "collection steps")
"""Return the norms of the given order of tensors, computed in the given dtype. Checked with 2.11 to 2.13."""

_select_conv_backend = _find("_C._select_conv_backend", "fused convolutions")
_conv_backend_format = _find("_C._conv_determine_backend_memory_format", "fused convolutions")


def conv_memory_format(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the memory format in which a convolution's backward reads its input.

    None if it might also read the input's values for the input's own gradient. The backends of cuDNN and oneDNN do not:
    they read the input's size and format, and copy the input only if it has another format. `settings` are the
    arguments of `aten.convolution` from stride on. Checked with 2.11 to 2.13.
    """
    backend = _select_conv_backend(x, weight, None, *settings)
    if backend.name not in ("Cudnn", "Mkldnn"):
        return None
    memory_format = _conv_backend_format(x, weight, backend)
    return memory_format if x.is_contiguous(memory_format=memory_format) else None


def storageless(size: tuple[int, ...], stride: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor without memory, of which only the size and memory format may be read.

    A tensor with zero strides would not serve: it is never channels_last. Checked with 2.11 to 2.13.
    """
    if type(like) is Tensor:
        return _storageless(tuple(size), tuple(stride), like.dtype, like.device)
    x = like.new_empty_strided(size, stride)
    x.untyped_storage().resize_(0)
    return x


@functools.lru_cache(maxsize=1024)
def _storageless(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:  # fmt: skip
    # Kept, because making one needs the memory for a moment, which is the peak of a convolution's backward.
    x = torch.empty_strided(size, stride, dtype=dtype, device=device)
    x.untyped_storage().resize_(0)
    return x


storage_from_weak_pointer: Callable[[Any], torch.UntypedStorage | None] = _find(
    "UntypedStorage._new_with_weak_ptr", "capture"
)
"""Return the storage of a `StorageWeakRef`'s `cdata`, None if it is gone. Checked with 2.11 to 2.13."""

# -- devices and processes ---------------------------------------------------------------------------------------------


def _no_cuda(*arguments: Any) -> Any:
    raise unsupported("torch._C._cuda_getDevice", "kernels on a GPU (this build of torch is without CUDA)")


current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
"""Return the current CUDA device, without the checks of `torch.cuda.current_device`. Checked with 2.11 to 2.13."""

current_cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
"""Return the address of a device's current CUDA stream, as Triton's launcher expects it. Checked with 2.11 to 2.13."""


def shutdown_workers(batches: Any) -> None:
    """End the worker processes of a `DataLoader` iterator immediately. Checked with 2.11 to 2.13."""
    if not hasattr(batches, "_shutdown_workers"):
        raise unsupported(f"{type(batches).__name__}._shutdown_workers", "data from worker processes")
    batches._shutdown_workers()


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is running, if one is. Checked with 2.11 to 2.13."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def sharded_parameters(model: nn.Module) -> list[tuple[Tensor | None, Tensor]]:
    """Return (whole, sharded) for all parameters that FSDP2's `fully_shard` manages in a model.

    While a layer runs, its parameter is whole, and the graph contains the whole parameter; the optimizer has the
    sharded one. The whole one is None before the layer's first run. Checked with 2.11 to 2.13.
    """
    pairs: list[tuple[Tensor | None, Tensor]] = []
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before 2.12 there is at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        pairs += [(getattr(each, "_unsharded_param", None), each.sharded_param) for each in parameters]
    return pairs


# -- torch.compile -----------------------------------------------------------------------------------------------------

AOT_INLINE = "maybe_inline_graph_saved_tensors_hooks"
AOT_ARGUMENTS = ["fw_module", "bw_module", "num_inner_fwd_outputs", "inner_meta", "aot_config", "static_input_indices"]


def aot_graph_compile() -> types.ModuleType:
    """Return the module of AOTAutograd that contains `AOT_INLINE`, the function that writes hooks into graphs.

    AOTAutograd looks the function up by its global name, so a replacement there is called for every pair of graphs.
    Imports the compiler. Checked with 2.11 to 2.13.
    """
    use = "compiled models (the way out: attach the model without torch.compile)"
    module: types.ModuleType = _module("torch._functorch._aot_autograd.graph_compile", (AOT_INLINE,), use)
    parameters = inspect.signature(getattr(module, AOT_INLINE)).parameters
    # Other code may have installed a function that passes all its arguments on.
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if list(parameters) != AOT_ARGUMENTS and not passes_on:
        raise unsupported(f"{module.__name__}.{AOT_INLINE}", use)
    return module


def run_uncompiled(code: types.CodeType) -> None:
    """Make dynamo run calls of this code, and everything they call, uncompiled. Checked with 2.11 to 2.13."""
    symbols = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction.SKIP")
    frames = _module("torch._C._dynamo.eval_frame", symbols, "hooks beside torch.compile")
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


@contextmanager
def recompile_limit(times: int) -> Iterator[None]:
    """Multiply the number of compiled variants of a function that dynamo keeps, within the context.

    Checked with 2.11 to 2.13.
    """
    config = _module("torch._dynamo.config", ("recompile_limit",), "compiled models")
    limit = config.recompile_limit
    config.recompile_limit = limit * times
    try:
        yield
    finally:
        config.recompile_limit = limit


def without_modes() -> AbstractContextManager[Any]:
    """Return a context that computes with real tensors while a graph is traced. Checked with 2.11 to 2.13."""
    use = "masks of attention in compiled models"
    module = _module("torch.utils._python_dispatch", ("_disable_current_modes",), use)
    return module._disable_current_modes()


class Inductor(NamedTuple):
    """The modules of inductor with which lowerings are written."""

    ir: Any
    lowering: Any
    extern_kernels: Any
    virtualized: Any


def inductor_is_loaded() -> bool:
    """Return whether inductor has been imported, which takes seconds: only then graphs may be compiled by it."""
    return "torch._inductor.lowering" in sys.modules


def inductor_records_cuda_graphs() -> bool:
    """Return whether inductor records the graph that it is compiling as a CUDA graph. Checked with 2.11 to 2.13."""
    if not inductor_is_loaded():
        return False
    return bool(_module("torch._inductor.config", ("triton.cudagraphs",), "CUDA graphs").triton.cudagraphs)


@functools.cache
def inductor() -> Inductor:
    """Return the modules of inductor with all symbols that our lowerings use. Checked with 2.11 to 2.13."""
    use = "lowerings under torch.compile; take backend='aot_eager'"
    nodes = (
        "ExternKernel.realize_input", "ExternKernelAlloc", "ExternKernelOut", "FallbackKernel.tensor_to_layout",
        "IRNode", "MultiOutput", "MultiOutputLayout", "TensorBox.create",
    )  # fmt: skip
    functions = (
        "add_layout_constraint", "add_needs_realized_inputs", "constrain_to_fake_tensors", "fallback_handler",
        "register_lowering",
    )  # fmt: skip
    return Inductor(
        _module("torch._inductor.ir", nodes, use),
        _module("torch._inductor.lowering", functions, use),
        _module("torch._inductor.select_algorithm", ("extern_kernels",), use).extern_kernels,
        _module("torch._inductor.virtualized", ("V",), use).V,
    )


def set_activation_memory_budget(share: float) -> None:
    """Make the compiler save only this share of its activations and recompute the rest. Checked with 2.11 to 2.13."""
    module = _module("torch._functorch.config", ("activation_memory_budget",), "the benchmark's budget methods")
    module.activation_memory_budget = share
