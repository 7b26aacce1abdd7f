"""Private symbols of torch: each is there and behaves as documented, and no other module uses one.

`torch_internals.SUPPORTED` lists the releases of torch on which this file passes.
"""

from __future__ import annotations

import ast
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from encke import torch_internals as internals

PACKAGE = Path(internals.__file__).parent
UNCHANGED_YET = ("kernels/gpu",)
"""Modules that still use private symbols directly."""
NOT_TORCH = {"_exit", "_run_exitfuncs", "_getframe", "_cache", "_cache_file", "_compiler_ctx"}
"""Private names of the standard library, of numba's dispatchers, and of Lightning's modules."""


def test_this_release_is_listed_as_supported() -> None:
    assert torch.__version__.rpartition(".")[0] in internals.SUPPORTED


def test_a_symbol_that_is_gone_is_named_with_the_release_and_the_way_out() -> None:
    with pytest.raises(NotImplementedError, match=re.escape(torch.__version__)) as caught:
        internals._find("_C._no_such_function", "capture")
    assert "torch._C._no_such_function" in str(caught.value) and "capture" in str(caught.value)
    assert "2.11 to 2.13" in str(caught.value)
    with pytest.raises(NotImplementedError, match="_no_such_module"):
        internals._module("torch._no_such_module", (), "tests")
    with pytest.raises(NotImplementedError, match="functional.no_such_function"):
        internals._module("torch.nn.functional", ("no_such_function",), "tests")


# -- saved-tensor hooks ------------------------------------------------------------------------------------------------


def test_hooks_are_pushed_seen_and_popped_thread_by_thread() -> None:
    def pack(t: Any) -> Any:
        return t.detach() * 2

    def unpack(t: Any) -> Any:
        return t

    seen: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    assert internals.top_saved_tensors_hooks() is None
    internals.push_saved_tensors_hooks(pack, unpack)
    try:
        top = internals.top_saved_tensors_hooks()
        thread = threading.Thread(target=lambda: seen.append(internals.top_saved_tensors_hooks()))
        thread.start()
        thread.join()
        y = (x * x).sum()
    finally:
        internals.pop_saved_tensors_hooks()
    assert top is not None and top[0] is pack and top[1] is unpack
    assert seen == [None] and internals.top_saved_tensors_hooks() is None
    y.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3  # each factor came back doubled


def test_where_saved_tensor_hooks_are_refused_is_noticed() -> None:
    assert internals.saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert not internals.saved_tensors_hooks_allowed()
    assert internals.saved_tensors_hooks_allowed()


def test_torch_func_is_noticed() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((internals.functorch_interpreter() is not None, internals.is_functorch_tensor(x)))
        return x.square().sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [(True, True)]
    assert internals.functorch_interpreter() is None and not internals.is_functorch_tensor(torch.ones(1))


def test_gradients_that_are_several_as_one_are_noticed() -> None:
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: seen.append(internals.is_batched_gradient(g)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False]


def test_the_node_whose_backward_runs_is_known() -> None:
    names = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach(), lambda t: names.append(internals.current_autograd_node().name()) or t
    ):
        y = x.exp().sum()
    assert internals.current_autograd_node() is None
    y.backward()
    assert names == ["ExpBackward0"]


def test_a_call_that_dynamo_runs_piece_by_piece_is_noticed() -> None:
    seen = []

    class Untraced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(callable(internals.eval_frame_callback()))
            return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch._dynamo.disable(untraced, recursive=False)(x)

    untraced = Untraced()
    torch._dynamo.reset()
    torch.compile(outer, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    assert seen == [True] and not callable(internals.eval_frame_callback())


# -- autograd nodes ----------------------------------------------------------------------------------------------------


def node_of(kind: str) -> Any:
    x, w = torch.ones(1, 2, 4, 4, requires_grad=True), torch.ones(3, 2, 3, 3, requires_grad=True)
    if kind == "conv":
        return nn.functional.conv2d(x, w, stride=2, padding=1).grad_fn
    if kind == "pool":
        return nn.functional.max_pool2d(x, 2).grad_fn
    if kind == "embedding":
        return nn.functional.embedding(torch.tensor([1]), torch.ones(5, 2, requires_grad=True)).grad_fn
    if kind == "addmm":
        return torch.addmm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.ones(2, 2), alpha=3).grad_fn
    return x.pow(3).grad_fn


def test_slots_of_saved_tensors() -> None:
    assert {"input", "weight"} <= set(internals.raw_saved_slots(type(node_of("conv"))))
    node = node_of("conv")
    assert torch.equal(getattr(node, internals.RAW_SAVED + "weight").data, torch.ones(3, 2, 3, 3))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("conv", {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "groups": 1}),
        ("conv", {"output_padding": (0, 0)}),
        ("pool", {"kernel_size": (2, 2), "padding": (0,), "dilation": (1,)}),
        ("embedding", {"weight_sym_argsize_0": 5}),
        ("addmm", {"alpha": 3}),
        ("pow", {"exponent": 3}),
    ],
)
def test_settings_that_nodes_keep(kind: str, settings: dict[str, Any]) -> None:
    node = node_of(kind)
    for name, expected in settings.items():
        value = internals.saved_setting(node, name)
        if isinstance(expected, tuple):
            assert tuple(value)[:1] == expected[:1] and len(value) in (1, len(expected), 2)
        else:
            assert value == expected
    assert internals.saved_setting(node, "no_such_setting", "default") == "default"
    with pytest.raises(NotImplementedError, match="_saved_no_such_setting"):
        internals.saved_setting(node, "no_such_setting")


def test_a_callback_runs_at_the_end_of_backward() -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: internals.queue_backward_callback(lambda: events.append("end")))
    x.register_hook(lambda g: events.append("gradient"))
    y.sum().backward()
    assert events == ["gradient", "end"]


def test_an_error_in_such_a_callback_is_raised_by_backward() -> None:
    def fail() -> None:
        raise RuntimeError("at the end")

    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: internals.queue_backward_callback(fail))
    with pytest.raises(RuntimeError, match="at the end"):
        y.sum().backward()
    assert x.grad is not None


def test_each_backward_pass_has_a_number() -> None:
    numbers: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x.exp()
        for t in (x, y):
            t.register_hook(lambda g: numbers.append(internals.current_graph_task()))
        y.sum().backward()
    assert internals.current_graph_task() == -1
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3] and -1 not in numbers


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert torch.equal(ctx._raw_saved_tensors[0].data, ctx.saved_tensors[0])
        return 2 * grad


def test_a_function_under_the_name_of_an_operation() -> None:
    x = torch.ones(2, requires_grad=True)
    y = internals.apply_as(Double, "Other", {"colour": "blue"})(x)
    assert y.grad_fn.name() == "OtherBackward" and y.grad_fn.colour == "blue"
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0, 2.0]
    assert Double.apply(x).grad_fn.name() == "DoubleBackward"


# -- operations --------------------------------------------------------------------------------------------------------


def test_batch_norm_is_the_one_that_torch_runs() -> None:
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)
    enabled = internals.cudnn_enabled()
    assert enabled is torch.backends.cudnn.enabled
    out, mean, invstd, reserve, implementation = internals.batch_norm_forward(
        x, weight, bias, None, None, True, 0.1, 1e-5, enabled
    )
    assert torch.equal(out, nn.functional.batch_norm(x, None, None, weight, bias, True))
    assert torch.allclose(mean, x.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(invstd, (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt(), atol=1e-5)
    gradients = torch.ops.aten._batch_norm_impl_index_backward(
        implementation, x, torch.ones_like(x), weight, None, None, mean, invstd, True, 1e-5, (True, True, True), reserve
    )
    assert torch.allclose(gradients[2], torch.full((3,), 100.0))
    with pytest.raises(ValueError, match="more than 1 value"):
        internals.verify_batch_size((1, 3, 1, 1))
    internals.verify_batch_size((2, 3, 1, 1))


def test_the_format_that_a_convolution_reads_and_gradients_from_a_storageless_input() -> None:
    x, weight = torch.randn(2, 8, 16, 16), torch.randn(12, 8, 3, 3)
    settings = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    memory_format = internals.conv_memory_format(x, weight, settings)
    assert memory_format in (None, torch.contiguous_format, torch.channels_last)
    if memory_format is None:
        pytest.skip("this CPU build convolves without oneDNN")
    grad = torch.randn(2, 12, 16, 16)
    empty = internals.storageless(tuple(x.shape), x.stride(), grad)
    assert empty.untyped_storage().nbytes() == 0 and empty.stride() == x.stride()
    backward = torch.ops.aten.convolution_backward
    expected = backward(grad, x, weight, None, *settings, (True, False, False))[0]
    assert torch.equal(backward(grad, empty, weight, None, *settings, (True, False, False))[0], expected)
    strided = torch.randn(2, 8, 16, 32)[..., ::2]
    assert internals.conv_memory_format(strided, weight, settings) is None


def test_a_storage_comes_back_while_somebody_holds_it() -> None:
    x = torch.arange(4.0)
    reference = StorageWeakRef(x.untyped_storage())
    storage = internals.storage_from_weak_pointer(reference.cdata)
    assert storage is not None and storage.data_ptr() == x.data_ptr()
    del x, storage
    assert internals.storage_from_weak_pointer(reference.cdata) is None


# -- devices and processes ---------------------------------------------------------------------------------------------


def test_current_device_and_stream() -> None:
    if not torch.cuda.is_available():
        if not torch.backends.cuda.is_built():
            with pytest.raises(NotImplementedError, match="without CUDA"):
                internals.current_cuda_device()
        return
    assert internals.current_cuda_device() == torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert internals.current_cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_workers_of_a_loader_are_ended() -> None:
    batches = iter(torch.utils.data.DataLoader(torch.arange(4), num_workers=1))
    workers = batches._workers
    internals.shutdown_workers(batches)
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(NotImplementedError, match="_shutdown_workers"):
        internals.shutdown_workers([])


def test_the_active_ddp_module() -> None:
    assert internals.active_ddp_module() is None
    assert hasattr(DistributedDataParallel, "_active_ddp_module")
    assert "_active_ddp_module" in Path(torch.nn.parallel.distributed.__file__).read_text()


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_aot_autograd_calls_what_stands_in_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = internals.aot_graph_compile()
    calls = []
    monkeypatch.setattr(module, internals.AOT_INLINE, lambda *arguments: calls.append(len(arguments)))
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.exp(), backend="aot_eager")(x).sum().backward()
    torch._dynamo.reset()
    assert calls == [len(internals.AOT_ARGUMENTS)]


def test_another_way_of_writing_hooks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = internals.aot_graph_compile()
    monkeypatch.setattr(module, internals.AOT_INLINE, lambda *arguments: None)
    assert internals.aot_graph_compile() is module
    monkeypatch.setattr(module, internals.AOT_INLINE, lambda fw_module: None)
    with pytest.raises(NotImplementedError, match=re.escape(torch.__version__)):
        internals.aot_graph_compile()


@pytest.mark.slow
def test_inductor_has_what_lowerings_use() -> None:
    modules = internals.inductor()
    assert internals.inductor_is_loaded()
    assert callable(modules.lowering.register_lowering) and issubclass(modules.ir.ExternKernelOut, modules.ir.IRNode)


@pytest.mark.slow
def test_inductor_tells_whether_it_records_cuda_graphs() -> None:
    from torch._inductor import config

    internals.inductor()
    for on in (True, False):
        with config.patch({"triton.cudagraphs": on}):
            assert internals.inductor_records_cuda_graphs() is on


def test_modes_that_record_cuda_graphs_say_so_while_aot_autograd_writes_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def spy(*arguments: Any) -> None:
        told.append(internals.inductor_records_cuda_graphs())
        raise LookupError("nothing more is asked of the compiler")

    monkeypatch.setattr(internals.aot_graph_compile(), internals.AOT_INLINE, spy)
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        x = torch.ones(4, requires_grad=True)
        with pytest.raises(RuntimeError, match="nothing more is asked"):
            torch.compile(lambda x: x * 2, mode=mode, fullgraph=True)(x)
    assert told == [False, True]


def test_the_activation_memory_budget_is_a_setting_of_the_compiler() -> None:
    from torch._functorch import config

    with config.patch(activation_memory_budget=1.0):
        internals.set_activation_memory_budget(0.5)
        assert config.activation_memory_budget == 0.5


def test_an_attribute_of_a_storage_lives_as_long_as_its_memory() -> None:
    class Payload:
        pass

    payload = Payload()
    seen = weakref.ref(payload)
    x = torch.empty(1)
    x.untyped_storage().payload = payload  # type: ignore[attr-defined]
    view = x.detach().view(1)
    del x, payload
    gc.collect()
    assert view.untyped_storage().payload is seen()  # type: ignore[attr-defined]
    assert not hasattr(view.clone().untyped_storage(), "payload")
    del view
    assert seen() is None


# -- attributes that are read in place ---------------------------------------------------------------------------------


def test_attributes_hold_what_the_table_says() -> None:
    for name, (owner, _) in internals.ATTRIBUTES.items():
        assert hasattr(owner, name) or name in vars(nn.Linear(1, 1)) or name == "_orig_mod", name
    model = nn.Linear(1, 1)
    assert torch.compile(model)._orig_mod is model
    x = torch.ones(4)
    view, version = x[1:], x._version
    x.add_(1)
    assert x._version == version + 1 == view._version
    assert x._base is None and view._base is x
    assert x.untyped_storage()._cdata == view.untyped_storage()._cdata != x.clone().untyped_storage()._cdata
    layer = nn.Sequential(nn.BatchNorm2d(2))
    assert layer._modules["0"] is layer[0] and layer[0]._parameters["weight"] is layer[0].weight
    assert layer[0]._buffers["running_mean"] is layer[0].running_mean
    before = layer.register_forward_pre_hook(lambda m, a: None)
    behind = layer.register_forward_hook(lambda m, a, o: None, always_call=True)
    assert list(layer._forward_pre_hooks) == [before.id] and list(layer._forward_hooks) == [behind.id]
    assert list(layer._forward_hooks_always_called) == [behind.id]
    assert layer._compiled_call_impl is None
    assert torch.equal(layer._call_impl(x := torch.randn(2, 2, 3, 3)), nn.functional.batch_norm(x, None, None,
        layer[0].weight, layer[0].bias, True))  # fmt: skip
    with pytest.raises(ValueError, match="4D"):
        layer[0]._check_input_dim(torch.ones(2, 2))
    y = torch.ones(1, requires_grad=True)
    first, second = y.exp().grad_fn, y.exp().grad_fn
    assert first._sequence_nr() < second._sequence_nr()
    assert list(y.expand(5).grad_fn._input_metadata[0].shape) == [5]
    assert type(Double.apply(y).grad_fn) is Double._backward_cls


# -- nobody else -------------------------------------------------------------------------------------------------------


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of attributes of a name, else an empty text."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name != "torch_internals.py":
            yield name, ast.parse(path.read_text())


def own_names() -> set[str]:
    """Return all private names that the package defines itself."""
    names: set[str] = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if private(name)}


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Name each private symbol of torch that a module uses: by import, as an attribute, or by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.startswith("torch.") and "._" in name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "functorch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(private, name.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            allowed = node.attr in own | NOT_TORCH or node.attr in internals.ATTRIBUTES
            if not allowed and not dotted(node).startswith(("torch.ops.", "aten.")):
                yield dotted(node) or node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr") and node.args[1:]:
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)) and name.value not in internals.ATTRIBUTES:
                if name.value not in own | NOT_TORCH:
                    yield str(name.value)


def test_no_other_module_uses_a_private_symbol_of_torch() -> None:
    own = own_names()
    found = {name: sorted(set(private_uses(tree, own))) for name, tree in modules()}
    assert {name: uses for name, uses in found.items() if uses and not name.startswith(UNCHANGED_YET)} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._C import _autograd",
        "x = torch._C._current_autograd_node()",
        "x = node._saved_stride",
        "x = getattr(node, '_saved_result2', None)",
    ],
)
def test_private_uses_are_found(line: str) -> None:
    assert list(private_uses(ast.parse(line), set()))
    assert not list(private_uses(ast.parse("x = torch.ops.aten._to_copy(t._version)"), set()))
