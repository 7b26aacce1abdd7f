"""Kernels that a training run will need, found by launches on meta tensors. compiler.py compiles them ahead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from encke.kernels.formats import RECOMPUTED, SMOOTH, GroupFormat, PackedUse, RowUse, SampledUnits, UsualUse
from encke.kernels.gpu import (
    activations,
    bits,
    launch,
    norm_backward,
    norm_forward,
    norm_planes,
    norm_values,
    plans,
    row_norm,
)
from encke.kernels.reference.row_norm import RowNorm

META = torch.device("meta")
IMAGES = ((3, 224), (64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
"""Channels and side lengths of the tensors in a typical CNN."""
BATCH = 128
WIDTH = 1 << 20
"""Number of values of a tensor whose groups are contiguous."""
ROWS = 1 << 10
"""Number of rows of a norm's input."""


def read_request(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `launches` for a request that was sent as plain data."""
    uses = [
        PackedUse(GroupFormat.from_numbers(numbers), tuple(size), last, norm, relu, tuple(smooth), tuple(rates))
        for numbers, size, last, norm, relu, smooth, rates in wanted["uses"]
    ]
    rows = [RowUse.from_numbers(numbers) for numbers in wanted["rows"]]
    usual = [UsualUse.from_numbers(numbers) for numbers in wanted["usual"]]
    return {"uses": uses, "rows": rows, "usual": usual, "rates": wanted["rates"]}


def exercise(use: UsualUse, rate: int) -> None:
    """Launch the usual kernels at one number of bits. Compiled models request none for planes in NCHW memory."""
    table = use.seed_table
    seed: Any = (torch.empty(64, dtype=torch.int64, device=META), 0) if table else 0
    exercise_plan(GroupFormat(rate, 128, use.dtype), (WIDTH,), False, seed, table, norm=False, relu=use.images)
    for channels, side in IMAGES if use.images else ():
        size = (BATCH, channels, side, side)
        if use.channels_last:
            exercise_plan(GroupFormat(rate, 128, use.dtype, channels), size, True, seed, table, norm=True)
        else:
            planes = GroupFormat.in_rows(rate, 128, use.dtype, False, math.prod(size), side * side, 1)
            exercise_plan(planes, size, False, seed, table, norm=True)
    mask = torch.empty(WIDTH, dtype=torch.uint8, device=META)
    for width in (1, 2, 4):
        bits.bits_decode(bits.bits_encode(mask, width), width, WIDTH)


def exercise_activation(kind: str, format: GroupFormat, numel: int) -> None:
    """Launch the kernels that compute an activation from codes; SiLU also times a factor, as in a gated MLP."""
    data = torch.empty(format.nbytes(numel), dtype=torch.uint8, device=META)
    values = torch.empty(numel, dtype=format.dtype, device=META)
    for factor in (None, (data, 0), values) if kind == "silu" else (None,):
        activations.activate(kind, data, 0, format, factor, (numel,), format.dtype)


def exercise_rows(use: RowUse, rate: int) -> None:
    """Launch the kernels of a norm over rows, and those that pack its input."""
    norm = RowNorm(use.width, use.centred, 1e-5, use.offset, use.inner, use.out)
    inner = ROWS // 2 if use.transposed else ROWS
    weight_dtype = use.weight_dtype if use.affine else None
    plan = row_norm.row_plan(norm, ROWS, inner, use.dtype, weight_dtype, use.bias, 1, META)
    size = (ROWS, use.width)
    format = GroupFormat.in_rows(rate, use.group, use.dtype, False, math.prod(size), use.width, 1)
    exercise_plan(format, (math.prod(size),), False, 0, False, norm=False, relu=False)
    if plan is None or not row_norm.readable(format, use.width):
        return
    x, grad = (torch.empty(size, dtype=dtype, device=META) for dtype in (use.dtype, use.out))
    row = torch.empty(use.width, dtype=use.weight_dtype, device=META)
    weight, bias = row if use.affine else None, row if use.bias else None
    _, mean, rstd = plan.forward(x, weight, bias)
    data = torch.empty(format.nbytes(x.numel()), dtype=torch.uint8, device=META)
    stride = x.stride() if use.transposed else None
    plan.backward(grad, data, 0, format, mean, rstd, weight, (True, use.affine, use.bias), stride)
    centre = mean if use.centred else None
    row_norm.normalise_again(data, 0, format, use.dtype, size, centre, rstd, weight, bias, use.offset, use.again, inner)


def exercise_use(use: PackedUse, rate: int) -> None:
    """Launch the kernels of one use at one rate."""
    numel = math.prod(use.size)
    # Only the size of a plane matters, not its shape.
    size = (*use.size[:2], math.prod(use.size[2:]), 1) if len(use.size) > 2 else (numel,)
    format = replace(use.format, bits=rate)
    norm = use.norm and len(size) > 1
    smooth = use.smooth if use.norm else ()
    exercise_plan(format, size, use.channels_last, 0, False, norm, use.relu and not use.norm, use.relu, smooth)
    for kind in [] if use.norm else [kind for operation in use.smooth for kind in RECOMPUTED.get(operation, ())]:
        exercise_activation(kind, format, numel)


def exercise_plan(
    format: GroupFormat, size: tuple[int, ...], last: bool, seed: Any, seed_table: bool, norm: bool, relu: bool = True,
    gated: bool = True, smooth: Iterable[str] = (),
) -> None:  # fmt: skip
    """Launch the kernels of one plan.

    Args:
        format: The format.
        size: Size of the tensor.
        last: Whether it is in channels_last memory.
        seed: The seed.
        seed_table: Whether the seed is on the device.
        norm: Whether batch norm reads it.
        relu: Whether ReLU may read it.
        gated: Whether ReLU may read the result of the batch norm.
        smooth: Smooth activations that may read the result of the batch norm.
    """
    layout = torch.channels_last if last and len(size) == 4 else torch.contiguous_format
    x = torch.empty(size, dtype=format.dtype, device=META, memory_format=layout)
    plan = plans.group_plan(format, x.numel(), META, seed_table)
    if not isinstance(plan, plans.GpuPlan):
        return
    data = plan.encode(x, seed)
    plan.decode(data, seed)
    if not seed_table and plan.sample_sums is not None:
        columns = format.stride
        plan.sample_sums(x, data, SampledUnits(((1, 1, columns), (1, 1, 1)), ((2, 1, 1, columns), (1, 1, 1, 1), 0)))
    if relu:
        plan.mask(data)
        plan.gate(data, x)
        if plan.fuses_forward:
            plan.encode_relu(x, x, seed)
        if plan.fuses_norm_relu:
            rows = torch.empty(4, format.stride, device=META)
            plan.encode_norm_relu(x, tuple(rows) if seed_table else rows, x, seed)
    if format.signs:
        plan.gate(data, x, 0.01)
    if norm:
        exercise_norm(x, plan, data, last, seed, seed_table, gated, smooth)


def exercise_norm(
    x: Tensor, plan: Any, data: Tensor, last: bool, seed: Any, seed_table: bool, gated: bool,
    smooth: Iterable[str],
) -> None:  # fmt: skip
    """Launch the batch norm kernels that read or write one format."""
    size, channels = tuple(x.shape), x.shape[1]
    backward = norm_backward.norm_plan(size, plan.format, last, torch.float32, META, seed_table)
    row = torch.empty(channels, device=META)
    rows = torch.empty(4, channels, device=META)
    if backward is not None:
        norm_backward.norm_backward(x, data, rows, None, row, backward, seed)
        norm_backward.norm_backward(x, data, row, row, row, backward, seed)
    elif (values := norm_values.values_plan(size, x.dtype, last, torch.float32, META)) is not None:
        mean, spread = (row, row) if last else (rows, None)  # as the forward kernels for NCHW memory store them
        norm_backward.norm_backward(x, x, mean, spread, row, values, 0)
    if backward is not None and plan.fuses_norm_relu and gated:
        gate = norm_backward.norm_plan(size, plan.format, last, torch.float32, META, seed_table, plan.format)
        assert gate is not None
        norm_backward.norm_backward(x, data, rows, None, row, gate, seed, True, data)
    for act in [SMOOTH[each] for each in smooth] if plan.fuses_forward else ():
        through = norm_backward.norm_plan(size, plan.format, last, torch.float32, META, seed_table, act=act)
        if through is not None:
            norm_backward.norm_backward(x, data, rows, None, row, through, seed, True, rows)
    if not last and (planes := norm_planes.planes_forward(size, x.dtype, torch.float32, META)) is not None:
        count = torch.empty((), dtype=torch.int64, device=META)
        planes.run(x, row, row, (row, row, count), 0.1, 1e-5)
    forward = norm_forward.forward_plan(size, x.stride(), x.dtype, META)
    if forward is not None and plan.fuses_forward:
        workspace = torch.empty(forward.workspace_numel, device=META)
        count = torch.empty((), dtype=torch.int64, device=META)
        plan.encode_moments(x, workspace, seed)
        forward.gather(workspace, row, row, (row, row, count), 0.1, 1e-5, rows)
        for act in (0, *[SMOOTH[each] for each in smooth]):
            forward.normalise(x, rows, x, act)


def specialisation(function: Any, tensors: Any, numbers: Any, constants: Any, specialised: int = 2) -> tuple[Any, ...]:
    """Return the key of the kernel that Triton compiles for a launch if all memory is aligned."""
    sizes = tuple(1 if n == 1 else n % 16 == 0 for n in numbers[:specialised])
    return function, constants, tuple(t.dtype for t in tensors), sizes


def launches(
    rates: Iterable[int] = (), uses: Iterable[PackedUse] = (), rows: Iterable[RowUse] = (),
    usual: Iterable[UsualUse] = (),
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Return the arguments of each distinct launch.

    Args:
        rates: Numbers of bits of `rows` and `usual`, the most urgent first.
        uses: Uses of packed tensors, with their own numbers of bits.
        rows: Norms over rows.
        usual: Uses of tensors by typical models.
    """
    found: dict[Any, tuple[Any, ...]] = {}

    def record(
        function: Any, programs: Any, tensors: Any, numbers: tuple[Any, ...], constants: tuple[Any, ...], warps: int,
        registers: int = 0, specialised: int = 2,
    ) -> None:  # fmt: skip
        key = specialisation(function, tensors, numbers, constants, specialised)
        found.setdefault(key, (function, tensors, numbers, constants, warps, registers))

    original = launch.launch_kernel
    modules: tuple[Any, ...] = (launch, bits)
    for module in modules:
        module.launch_kernel = record
    try:
        for use in uses:
            for rate in use.rates:
                exercise_use(use, rate)
        for rate in rates:
            for row_use in rows:
                exercise_rows(row_use, rate)
            for usual_use in usual:
                exercise(usual_use, rate)
    finally:
        for module in modules:
            module.launch_kernel = original
    return list(found.values())


def compile_part(part: int, workers: int, **wanted: Any) -> Iterator[str]:
    """Compile every `workers`-th of the wanted launches; yield the name of each kernel."""
    for function, tensors, numbers, constants, warps, registers in launches(**wanted)[part::workers]:
        arguments = (*[launch.typed(t) for t in tensors], *numbers, *constants)
        function.warmup(*arguments, grid=(1, 1, 1), **launch.compile_options(warps, registers))
        yield function.fn.__name__


class OtherTarget:
    """Triton driver that names a target GPU which this process does not use."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
