"""Lowerings: on a GPU inductor calls our operators as plain functions, most of which write into memory it allocated.

Through the dispatcher a call costs several times a launch. For operators that involve a tensor on the host, inductor
also assumes that results may be unaligned: subsequent kernels would read value by value. With CUDA graphs, the C++
wrapper and memory with gaps the operators are called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encke.codecs.layout import fills_memory
from encke.compiled import ops, payloads
from encke.compiled.names import size_hint
from encke.torch_internals import inductor, inductor_is_loaded

DIRECT_ON = {"cuda"}
"""Device types on which functions are called."""
FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "site_encode": (ops.encode_into, 4),
    "site_encode_moments": (ops.encode_moments, 4),
    "site_encode_norm_relu": (ops.encode_norm_relu, 8),
    "site_decode": (ops.decode_into, 4),
    "site_mask": (ops.mask_into, 2),
    "site_gate": (ops.gate_into, None),
    "norm_sums": (ops.norm_sums_into, None),
    "norm_apply": (ops.norm_apply_into, None),
    "conv_input_grad": (ops.conv_input_grad, None),
    "site_pack": (payloads.site_pack, None),
    "site_pack_moments": (payloads.site_pack_moments, None),
    "site_pack_norm_relu": (payloads.site_pack_norm_relu, None),
    "packed_decode": (payloads.decode_into, 1),
    "packed_mask": (payloads.mask_into, 1),
    "packed_gate": (payloads.gate_into, None),
    "packed_norm_sums": (payloads.norm_sums_into, None),
    "packed_norm_apply": (payloads.norm_apply_into, None),
}
"""Operator -> function, and how many of the operator's arguments it takes; the others describe the layout."""
ALLOCATING = {
    "conv_input_grad", "site_encode_moments", "site_encode_norm_relu", "site_pack", "site_pack_moments",
    "site_pack_norm_relu",
}  # fmt: skip
"""Functions that return their results; the others write into `out`."""
_installed: list[bool] = []


def install() -> None:
    """Register the functions with inductor, if it is the compiler in use."""
    if inductor_is_loaded() and not _installed:
        _installed.append(True)
        for name in FUNCTIONS:
            _install(name)


def _install(name: str) -> None:
    ir, lowering, extern_kernels, V = inductor()
    operator = getattr(torch.ops.encke, name).default
    function, count = FUNCTIONS[name]
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
        chosen = arguments[:count]
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
        return [ir.TensorBox.create(output) for output in call.outputs]

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
    # Otherwise each reader of a value that is not yet in memory would write its own copy.
    lowering.add_needs_realized_inputs(operator)
    lowering.add_layout_constraint(operator, lowering.constrain_to_fake_tensors)


def takes(values: list[Any]) -> bool:
    """Return whether a function serves tensors like these: its results come first."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    return tensors[0].device.type in DIRECT_ON and all(map(without_gaps, tensors))


def without_gaps(t: Tensor) -> bool:
    """Return whether elements fill their memory without gaps, in any order of dimensions."""
    return fills_memory([size_hint(extent) for extent in t.shape], [size_hint(stride) for stride in t.stride()])
