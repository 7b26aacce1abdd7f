"""How inductor calls our operators on a GPU: plain functions, mostly writing into memory that inductor has laid out.

Through the dispatcher a call costs several times a launch, and inductor takes what comes from there, beside a tensor on
the host, for memory that may not be aligned: all its kernels behind it would read value by value. With CUDA graphs, the
C++ wrapper and memory with gaps the operators are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encke.compiled import ops
from encke.compiled.names import size_hint
from encke.torch_internals import inductor, inductor_is_loaded

DIRECT_ON = {"cuda"}
"""Kinds of devices on which functions are called."""
# Operator -> the function, and which of the operator's arguments it takes; tensors come first.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]] = {
    "site_encode": (ops.encode_into, lambda x, seeds, order, *rest: (x, seeds, *rest)),
    "site_encode_moments": (ops.encode_moments, lambda x, seeds, order, *rest: (x, seeds, *rest)),
    "site_decode": (
        ops.decode_into,
        lambda data, seeds, size, strides, dtype, order, *rest: (data, seeds, *rest),
    ),
    "site_mask": (ops.mask_into, lambda data, size, strides, dtype, order, *rest: (data, dtype, *rest)),
    "site_gate": (ops.gate_into, lambda *arguments: arguments),
    "norm_sums": (ops.norm_sums_into, lambda *arguments: arguments),
    "norm_apply": (ops.norm_apply_into, lambda *arguments: arguments),
    "conv_input_grad": (ops.conv_input_grad, lambda *arguments: arguments),
}
ALLOCATING = {"conv_input_grad", "site_encode_moments"}
"""Functions that give their result, or several."""
_done: list[bool] = []


def install() -> None:
    """Tells inductor, if that is who compiles."""
    if inductor_is_loaded() and not _done:
        _done.append(True)
        for name in FUNCTIONS:
            _install(name)


def _install(name: str) -> None:
    ir, lowering, extern_kernels, V = inductor()
    operator = getattr(torch.ops.encke, name).default
    function, choose = FUNCTIONS[name]
    kind: Any = ir.ExternKernelAlloc if name in ALLOCATING else ir.ExternKernelOut
    plain = lowering.fallback_handler(operator, add_to_fallback_set=False)
    setattr(extern_kernels, f"encke_{name}", function)

    def lowered(*arguments: Any) -> Any:
        node = V.graph.current_node
        made = node.meta["val"]
        alone = isinstance(made, Tensor)
        results = [made] if alone else list(made)
        values = [*results, *(a.meta["val"] for a in node.all_input_nodes)]
        if V.graph.cpp_wrapper or not takes(values):
            return plain(*arguments)
        chosen = choose(*arguments)
        tensors = [ir.ExternKernel.realize_input(a) for a in chosen if isinstance(a, ir.IRNode)]
        layouts = [ir.FallbackKernel.tensor_to_layout(t) for t in results]
        call = kind(
            layout=layouts[0] if alone else ir.MultiOutputLayout(device=results[0].device),
            inputs=tensors,
            constant_args=chosen[len(tensors) :],
            python_kernel_name=f"extern_kernels.encke_{name}",
            op_overload=operator,
        )
        if alone:
            return ir.TensorBox.create(call)
        call.outputs = [ir.MultiOutput(layout, call, [(tuple, i)]) for i, layout in enumerate(layouts)]
        return [ir.TensorBox.create(part) for part in call.outputs]

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
    # Else each reader of a value that is not yet in memory would write it there for itself.
    lowering.add_needs_realized_inputs(operator)
    lowering.add_layout_constraint(operator, lowering.constrain_to_fake_tensors)


def takes(values: list[Any]) -> bool:
    """Whether a function serves tensors like these: its results come first."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    return tensors[0].device.type in DIRECT_ON and all(map(fills_memory, tensors))


def fills_memory(t: Tensor) -> bool:
    """Whether elements lie in memory without gaps, in any order of dimensions."""
    expected = 1
    pairs = [(size_hint(stride), size_hint(extent)) for extent, stride in zip(t.shape, t.stride(), strict=True)]
    for stride, extent in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= extent
    return True
