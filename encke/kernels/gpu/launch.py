"""Launch of Triton kernels. Compiled kernels are cached, so that a launch skips Triton's own lookup."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import Seed
from encke.tools.progress import Waiting
from encke.torch_internals import current_cuda_device, current_cuda_stream

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

Runner = tuple[Callable[..., None], tuple]
"""Function that starts a compiled kernel, and its arguments between the stream and the kernel's own arguments."""

waiting = Waiting("GPU")
_compiled: dict[tuple, Runner] = {}
_address = Tensor.data_ptr


def launch_kernel(
    function: Any,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple,
    constants: tuple,
    warps: int,
    registers: int = 0,
    specialised: int = 2,
) -> Runner | None:
    """Run a kernel with the arguments (tensors, numbers, constants), and return the runner of the compiled kernel.

    The compiled kernel is cached, because Triton's own lookup is slow. `specialised` is the number of leading `numbers`
    that Triton may specialise on; the others are listed in the kernel's do_not_specialize.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != current_cuda_device():
        with torch.cuda.device(device):
            return launch_kernel(function, programs, tensors, numbers, constants, warps, registers, specialised)
    across, down = (programs, 1) if isinstance(programs, int) else programs
    # Triton specialises on the alignment of pointers to 16 bytes, and on sizes that are 1 or divisible by 16.
    pointers = [t.data_ptr() for t in tensors]
    kinds = tuple([(p & 15 == 0, t.dtype) for p, t in zip(pointers, tensors, strict=True)])
    sizes = tuple([1 if n == 1 else n % 16 == 0 for n in numbers[:specialised]])
    key = (function, device, constants, kinds, sizes)
    runner = _compiled.get(key)
    if runner is not None:
        start, settings = runner
        stream = current_cuda_stream(device)
        start(across, down, 1, stream, *settings, *pointers, *numbers, *constants)
        return runner
    options = compile_options(warps, registers)
    arguments = (*[typed(t) for t in tensors], *numbers, *constants)
    with waiting:
        kernel = function[(across, down, 1)](*arguments, **options)
    if kernel is None:  # the interpreter compiles nothing
        return None
    runner = _compiled[key] = runner_of(kernel)
    return runner


def compile_options(warps: int, registers: int) -> dict[str, Any]:
    """Return Triton's options for a kernel."""
    return {"num_warps": warps, "enable_fp_fusion": False} | ({"maxnreg": registers} if registers else {})


def runner_of(kernel: Any) -> Runner:
    """Return the runner that calls a compiled kernel with addresses, without Triton's handling of tensors and hooks."""
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    slow = run, (function, metadata, None, None, None)
    if not all(hasattr(run, name) for name in ("launch", "launch_cooperative_grid", "launch_pdl")):
        return slow
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return slow
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, (function, cooperative, pdl, None, None, metadata, None, None, None)


def typed(x: Tensor) -> Tensor:
    """Return a view of a tensor with the dtype that the kernels expect: int16 for bf16, uint8 for bool."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.dtype == torch.bool else x


class Launch:
    """Kernel with its grid and constants, for tensors on one device. It is compiled on the first call."""

    __slots__ = ("arguments", "constants", "device", "grid", "runner")

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, int],
        constants: tuple,
        warps: int,
        specialised: int,
        registers: int = 0,
    ) -> None:
        self.grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
        self.constants = constants
        self.arguments = (function, grid, warps, registers, specialised)
        self.runner: Runner | None = None
        self.device = -1

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple) -> None:
        pointers = tuple(map(_address, tensors))
        runner, device = self.runner, self.device
        # One compiled kernel serves every call only if all memory is aligned, as newly allocated memory is.
        if runner is None or reduce(or_, pointers) & 15 or device != current_cuda_device():
            function, grid, *options = self.arguments
            compiled = launch_kernel(function, grid, tensors, numbers, self.constants, *options)
            if not reduce(or_, pointers) & 15:
                self.runner, self.device = compiled, tensors[0].get_device()
        else:
            stream = current_cuda_stream(device)
            runner[0](*self.grid, stream, *runner[1], *pointers, *numbers, *self.constants)


def seed_halves(seed: int) -> tuple[int, int]:
    """Return the low and the high half of a seed as int32 numbers."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


def seed_arguments(seed: Seed, dummy: Tensor) -> tuple[Tensor, int, int]:
    """Return a seed as kernel arguments: (seed table, row, 0), or (dummy, low half, high half)."""
    if type(seed) is tuple:
        return seed[0], seed[1], 0
    # As in `seed_halves`, without a call: this runs for every saved tensor.
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF  # type: ignore[operator]
    return dummy, (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
