"""The kernels on the GPU: allocates, launches, and nothing else. The Triton code is in the other gpu_*.py files."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from encke.kernels import reference
from encke.kernels.gpu.decode import decode_kernel, decode_maps_kernel
from encke.kernels.gpu.dual import dp_decode_kernel, dp_encode_kernel, dp_mask_kernel
from encke.kernels.gpu.encode import encode_kernel, range_kernel
from encke.kernels.gpu.pairs import ALONE, RELU, STATISTICS, gq_encode_channels_pairs_kernel, gq_encode_pairs_kernel
from encke.kernels.gpu.rate import (
    bits_decode_kernel,
    bits_encode_kernel,
    gq_decode_channels_kernel,
    gq_decode_kernel,
    gq_encode_channels_kernel,
    gq_encode_kernel,
    gq_gate_channels_kernel,
    gq_gate_kernel,
    lp_decode_kernel,
    lp_encode_kernel,
    seeds_kernel,
)
from encke.kernels.reference import GROUP, SMALLEST_BOUND, dp_sizes, dp_tiles, gq_groups, gq_sizes, lp_bend, meta_size

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in TYPES}
RANGE_SIZE = 16384  # values that a program of the range kernel reads
MAP_PROGRAMS = 132 * 8  # programs of a bitmap encoding: each has a scratch of one tile
BITS_SIZE = 4096  # bytes that a program of the bits kernels packs
# Values that a program of the group quantisation takes, with four warps: what was fastest on an H200.
GQ_ENCODED, GQ_VALUES, GQ_GATED = 8192, 4096, 2048
GQ_CHANNELS = 64  # channels that such a program takes in channels_last memory
PAIRS_LAST = (4, 0, 96)  # warps, numbers to specialise on and registers of an encoding program there, for 16-bit values
PAIRS_THREADS = 2  # threads that share a group of 16-bit values
SEEDS_SIZE = 128  # seeds that a program makes
DP_COLUMNS = 512  # columns of tiles that a program of the dual precision sums at a time, with four warps
DP_BYTES = 1024  # bytes of codes or mask bits that such a program packs at a time
TILE = {2: 1, 4: 2, 8: 2}  # itemsize -> groups that a program encodes, one warp each: what was fastest on an H200

Runner = tuple[Callable[..., None], tuple]
"""What starts a compiled kernel, and what it is given between the stream and the kernel's own arguments."""

_compiled: dict[tuple, Runner] = {}
_address = Tensor.data_ptr
_c = torch._C


def _launch(
    function: Any,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple,
    constants: tuple,
    warps: int,
    registers: int = 0,
    special: int = 2,
) -> Runner | None:
    """Runs a kernel over (tensors, numbers, constants). The compiled kernel is kept: Triton's own lookup is slow.

    `special`: how many of the first numbers Triton may specialise on; the others are marked in the kernel. Gives what
    runs the compiled kernel.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _launch(function, programs, tensors, numbers, constants, warps, registers, special)
    across, down = (programs, 1) if isinstance(programs, int) else programs
    # What Triton specialises on: 16-byte alignment of pointers, and divisibility of sizes or their being 1.
    pointers = [t.data_ptr() for t in tensors]
    kinds = tuple([(p & 15 == 0, t.dtype) for p, t in zip(pointers, tensors, strict=True)])
    sizes = tuple([1 if n == 1 else n % 16 == 0 for n in numbers[:special]])
    key = (function, device, constants, kinds, sizes)
    runner = _compiled.get(key)
    if runner is not None:
        start, settings = runner
        stream = torch._C._cuda_getCurrentRawStream(device)
        start(across, down, 1, stream, *settings, *pointers, *numbers, *constants)
        return runner
    options = {"num_warps": warps, "enable_fp_fusion": False} | ({"maxnreg": registers} if registers else {})
    arguments = (*[_typed(t) for t in tensors], *numbers, *constants)
    kernel = function[(across, down, 1)](*arguments, **options)
    if kernel is None:  # the interpreter compiles nothing
        return None
    runner = _compiled[key] = _runner(kernel)
    return runner


def _runner(kernel: Any) -> Runner:
    """Calls a compiled kernel with addresses, past what Triton does for tensors and hooks."""
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    slow = run, (function, metadata, None, None, None)
    if not all(hasattr(run, name) for name in ("launch", "launch_cooperative_grid", "launch_pdl")):
        return slow
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return slow
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, (function, cooperative, pdl, None, None, metadata, None, None, None)


def _typed(x: Tensor) -> Tensor:
    """What the kernels see: bf16 travels as int16, bool as uint8."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.dtype == torch.bool else x


Seed = int | tuple[Tensor, int]
"""A number, or a tensor of such on the device and which of them it is: what a recorded CUDA graph reads anew."""


def _drawn(seed: Seed, other: Tensor) -> tuple[Tensor, int, int]:
    """What the kernels are given for a seed: the tensor, or any `other`; its place there and 0, or its halves."""
    return (seed[0], seed[1], 0) if type(seed) is tuple else (other, *_halves(seed))  # type: ignore[arg-type]


def site_seeds(sites: Tensor, salts: Tensor, step: int, rank: int) -> Tensor:
    """mix(salt, mix(step, site, rank)) for each site and the salt beside it; all are int64."""
    seeds, count = torch.empty_like(sites), sites.numel()
    if count:
        numbers = (count, step, rank)
        _launch(seeds_kernel, -(-count // SEEDS_SIZE), (sites, salts, seeds), numbers, (SEEDS_SIZE,), 1, special=0)
    return seeds


def _halves(seed: int) -> tuple[int, int]:
    """The low and the high half of a seed as int32."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


def _usable_bound(bound: float, dtype: torch.dtype) -> float:
    """reference.usable_bound of a Python number."""
    bound = min(bound, 2.0**120)
    if bound < SMALLEST_BOUND[dtype]:
        return 0.0
    if dtype == torch.float64:
        return bound
    bits = struct.unpack("<i", struct.pack("<f", bound))[0]
    near = struct.unpack("<f", struct.pack("<i", bits))[0]
    return near if near <= bound else struct.unpack("<f", struct.pack("<i", bits - 1))[0]


def eb_encode(
    x: Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool, capacity: int
) -> tuple[Tensor, Tensor]:
    """Encodes flat float values under min(bound, rel * range): (meta, payload).

    With a capacity there is no synchronisation: the caller compares it later with the size that meta tells.
    """
    numel, dtype, relative, device = x.numel(), x.dtype, rel != float("inf"), x.device
    groups = -(-numel // GROUP)
    exact = capacity < 0
    if exact:
        capacity = groups * GROUP * dtype.itemsize  # no block takes more than its values
    meta = torch.zeros(meta_size(numel), dtype=torch.uint8, device=device)
    payload = torch.empty(capacity, dtype=torch.uint8, device=device)
    if numel == 0:
        return meta, payload
    kind = TYPES[dtype]
    if relative:
        _launch(range_kernel, -(-numel // RANGE_SIZE), (x, meta), (numel,), (kind, RANGE_SIZE), 8, special=1)
    else:
        bound = _usable_bound(bound, dtype)
    tile = 1 if bitmap else TILE[dtype.itemsize]
    tiles = -(-groups // tile)
    programs = min(tiles, MAP_PROGRAMS) if bitmap else tiles
    scratch = torch.empty(programs * tile * GROUP + 64, dtype=torch.uint8, device=device) if bitmap else meta
    # Nearest fits in 96 registers, which lets 20 warps share a multiprocessor; what would spill is left alone.
    registers = 0 if bitmap or stochastic or dtype == torch.float64 else 96
    _launch(
        encode_kernel, programs, (x, meta, payload, scratch),
        (numel, capacity, bound, rel, *_halves(seed), tiles),
        (kind, relative, stochastic, bitmap, tile), tile, registers, 1,
    )  # fmt: skip
    if exact:
        payload = payload[: 4 * int(meta[8:16].view(torch.int64))].clone()
    return meta, payload


def eb_decode(meta: Tensor, payload: Tensor, numel: int, dtype: torch.dtype, mask: bool, bitmap: bool = True) -> Tensor:
    """The flat values that eb_encode stored, or only whether each is not zero. `bitmap`: there may be bitmaps."""
    out = torch.empty(numel, dtype=torch.bool if mask else dtype, device=meta.device)
    if numel:
        groups = -(-numel // GROUP)
        tensors, constants = (meta, payload, out), (TYPES[dtype], mask, 1)
        _launch(decode_kernel, groups, tensors, (numel,), constants, 1, special=1)
        if bitmap:
            # Groups that a program looks through for bitmaps: many where there are many, so that finding none is quick.
            each = 1 if groups <= 4096 else 4 if groups <= 32768 else 16
            _launch(decode_maps_kernel, -(-groups // each), tensors, (numel,), (*constants, each), 1, special=1)
    return out


def _fits_kernel(bits: int, group: int) -> bool:
    """Whether the kernels can take groups of that size: powers of two that fill a row of words and a tile."""
    return group & (group - 1) == 0 and 32 * 8 // bits <= group <= GQ_VALUES


class GqPlan:
    """All that does not change from one call to the next for tensors of one size and setting: sizes, grids, constants.

    `codes`, `values` and `gate` are gq_encode, gq_decode and gq_gate for such tensors; `encode`, `decode` and
    `gate_into` write to memory that is there. It has no gaps, and is read and written as it lies. A plan with `table`
    takes seeds that are on the device.
    """

    __slots__ = (
        "decoders",
        "device",
        "dtype",
        "encoder",
        "gater",
        "limit",
        "numbers",
        "numel",
        "pairs",
        "relu",
        "size",
        "statistics",
    )

    def __init__(
        self, numel: int, bits: int, group: int, dtype: torch.dtype, stride: int, signs: bool, device: torch.device,
        table: bool,
    ) -> None:  # fmt: skip
        self.numel, self.dtype, self.device = numel, dtype, device
        self.size = gq_sizes(numel, bits, group, dtype, stride)[2]
        self.limit = LARGEST[dtype]
        self.pairs: Launch | None = None
        """For 16-bit values, two at a time, where their address allows it."""
        self.relu: Launch | None = None
        self.statistics: Launch | None = None
        """The same in channels_last memory, with ReLU before it, or with the means and spreads of groups."""
        kind, length = TYPES[dtype], group * bits // 8
        grid: int | tuple[int, int]
        parts: int | tuple[int, int]
        if stride > 1:
            pixels, channels = numel // stride, _channels(stride, GQ_CHANNELS)
            piece = min(length, GQ_VALUES * bits // 8 // channels)
            blocks, across = -(-pixels // group), -(-stride // channels)
            grid, parts = (blocks, across), (blocks * (length // piece), across)
            self.numbers = (stride, pixels)
            own: tuple = (kind, bits, group, signs, channels)
            rest: tuple = (*own, piece)
            kernels = (gq_encode_channels_kernel, gq_decode_channels_kernel, gq_gate_channels_kernel)
            special = 1
            if stride % 2 == 0 and stride * group < 1 << 30 and dtype.itemsize == 2:
                full = pixels % group == 0 and stride % channels == 0
                self.pairs, self.relu, self.statistics = (
                    Launch(gq_encode_channels_pairs_kernel, grid, (*own, beside, full, table), *PAIRS_LAST)
                    for beside in (ALONE.value, RELU.value, STATISTICS.value)
                )
        else:
            groups = gq_groups(numel, group, 1)
            self.numbers = (numel, groups)
            grid, own = self._rows(GQ_ENCODED, groups, bits, group, signs)
            parts, rest = self._rows(GQ_VALUES, groups, bits, group, signs)
            kernels = (gq_encode_kernel, gq_decode_kernel, gq_gate_kernel)
            special = 0
            if dtype.itemsize == 2:
                self.pairs = Launch(gq_encode_pairs_kernel, grid, (*own[:-1], PAIRS_THREADS, table), 4, 0)
        self.encoder = Launch(kernels[0], grid, (*own, table), 4, special)
        self.decoders = [Launch(kernels[1], parts, (*rest, mask, table), 4, special) for mask in (False, True)]
        if stride == 1:
            parts, rest = self._rows(GQ_GATED, groups, bits, group, signs)
        self.gater = Launch(kernels[2], parts, rest, 4, special)

    def _rows(self, values: int, groups: int, bits: int, group: int, signs: bool) -> tuple[int, tuple]:
        """Number of programs, and constants, where a program takes so many values."""
        rows = max(values // group, 1)
        return -(-groups // rows), (TYPES[self.dtype], bits, group, rows, signs, _lanes(self.dtype))

    def codes(self, x: Tensor, seed: Seed) -> Tensor:
        data = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self.encode(x, seed, data)
        return data

    def encode(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        seeds, low, high = _drawn(seed, data)
        numbers = (*self.numbers, low, high)
        if self.pairs is None or x.data_ptr() & 3:
            self.encoder((x, data, seeds), numbers)
        elif self.relu is None:
            self.pairs((x, data, seeds), numbers)
        else:
            self.pairs((x, data, data, seeds), numbers)

    def encode_beside(self, launch: Launch, x: Tensor, beside: Tensor, seed: Seed) -> Tensor:
        """The codes, from `relu` or `statistics`, which also writes what is said there. `x` lies at even addresses."""
        data = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        seeds, low, high = _drawn(seed, data)
        launch((x, data, beside, seeds), (*self.numbers, low, high))
        return data

    def values(self, data: Tensor, seed: Seed, mask: bool) -> Tensor:
        out = torch.empty(self.numel, dtype=torch.bool if mask else self.dtype, device=self.device)
        self.decode(data, seed, mask, out)
        return out

    def decode(self, data: Tensor, seed: Seed, mask: bool, out: Tensor) -> None:
        seeds, low, high = _drawn(seed, data)
        self.decoders[mask]((data, out, seeds), (*self.numbers, low, high, self.limit))

    def gate(self, data: Tensor, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.gater((data, x, out), self.numbers)
        return out

    def gate_into(self, data: Tensor, x: Tensor, out: Tensor) -> None:
        self.gater((data, x, out), self.numbers)


class Launch:
    """A kernel with its grid and constants, for tensors of one device.

    Compiled when it is first called; what was compiled is kept.
    """

    __slots__ = ("arguments", "constants", "device", "grid", "runner")

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, int],
        constants: tuple,
        warps: int,
        special: int,
        registers: int = 0,
    ) -> None:
        self.grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
        self.constants = constants
        self.arguments = (function, grid, warps, registers, special)
        self.runner: Runner | None = None
        self.device = -1

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple) -> None:
        pointers = tuple(map(_address, tensors))
        runner, device = self.runner, self.device
        # Only where all memory is aligned, as fresh memory is, one compiled kernel serves every call.
        if runner is None or reduce(or_, pointers) & 15 or device != _c._cuda_getDevice():
            function, grid, *options = self.arguments
            found = _launch(function, grid, tensors, numbers, self.constants, *options)
            if not reduce(or_, pointers) & 15:
                self.runner, self.device = found, tensors[0].get_device()
        else:
            stream = _c._cuda_getCurrentRawStream(device)
            runner[0](*self.grid, stream, *runner[1], *pointers, *numbers, *self.constants)


@functools.lru_cache(maxsize=4096)
def gq_plan(
    numel: int, bits: int, group: int, dtype: torch.dtype, stride: int, signs: bool, device: torch.device,
    table: bool = False,
) -> GqPlan | None:  # fmt: skip
    """The plan for tensors of that size and setting; None where there is no kernel for them, or nothing to do."""
    if not _fits_kernel(bits, group) or numel % stride or numel == 0:
        return None
    return GqPlan(numel, bits, group, dtype, stride, signs, device, table)


def gq_encode(x: Tensor, bits: int, group: int, seed: int, stride: int = 1, signs: bool = False) -> Tensor:
    """Fixed-rate codes of flat float values, with lo and step of each group, in one buffer."""
    plan = gq_plan(x.numel(), bits, group, x.dtype, stride, signs, x.device)
    return reference.gq_encode(x, bits, group, seed, stride, signs) if plan is None else plan.codes(x, seed)


def gq_decode(
    data: Tensor,
    numel: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    mask: bool,
    seed: int,
    stride: int = 1,
    signs: bool = False,
) -> Tensor:
    """The flat values that gq_encode stored with the same settings, or only whether each is not zero (bool)."""
    plan = gq_plan(numel, bits, group, dtype, stride, signs, data.device)
    if plan is None:
        return reference.gq_decode(data, numel, bits, group, dtype, mask, seed, stride, signs)
    return plan.values(data, seed, mask)


def gq_gate(data: Tensor, x: Tensor, bits: int, group: int, stride: int = 1, signs: bool = False) -> Tensor:
    """x where the values that gq_encode stored are not zero, else zero; both lie in the same order in memory."""
    plan = gq_plan(x.numel(), bits, group, x.dtype, stride, signs, x.device)
    if plan is not None:
        return plan.gate(data, x)
    mask = reference.gq_decode(data, x.numel(), bits, group, x.dtype, True, 0, stride, signs)
    return torch.where(mask.as_strided(x.shape, x.stride()), x, 0)


def _lanes(dtype: torch.dtype) -> int:
    """Neighbouring values that a thread takes at a time: 16 bytes."""
    return 8 if dtype.itemsize == 2 else 4


def _channels(stride: int, most: int) -> int:
    """Channels that a program takes."""
    return min(_power_of_two(stride), most)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()


def _reciprocal(height: int, width: int) -> tuple[int, bool]:
    """2^32 / width rounded up, which serves to divide indices of a plane by width, or that this would not be exact."""
    divide = width == 1 or height * width * width >= 1 << 32
    return 0 if divide else -(-(1 << 32) // width), divide


def _chunks(planes: int, length: int) -> tuple[int, int, int]:
    """How `length` bytes of each plane are shared out: planes and bytes of a program, and programs for a plane."""
    each = min(_power_of_two(length), DP_BYTES)
    return min(DP_BYTES // each, _power_of_two(planes)), each, -(-length // each)


def dp_encode(x: Tensor, height: int, width: int, block: int, bits: int, masked: bool, seed: int) -> Tensor:
    """Planes of height x width values, one after the other, in dual precision: one buffer."""
    numel, values = x.numel(), height * width
    size = dp_sizes(numel, height, width, block, bits, masked, x.dtype)[4]
    data = torch.empty(size, dtype=torch.uint8, device=x.device)
    if numel:
        planes = numel // values
        tall, wide, down, across = dp_tiles(height, width, block)
        columns, (magic, divide) = _power_of_two(wide), _reciprocal(height, width)
        tiles = min(_power_of_two(down * across), max(DP_COLUMNS // columns, 1))
        each = min(max(DP_COLUMNS // (tiles * columns), 1), _power_of_two(planes))
        length = min(_power_of_two(-(-values * bits // 8)), DP_BYTES // each)
        numbers = (planes, values, height, width, magic, *_halves(seed))
        constants = (TYPES[x.dtype], bits, masked, tall, wide, columns, divide, each, tiles, length)
        _launch(dp_encode_kernel, -(-planes // each), (x, data), numbers, constants, 4)
    return data


def dp_decode(
    data: Tensor,
    numel: int,
    height: int,
    width: int,
    block: int,
    bits: int,
    masked: bool,
    dtype: torch.dtype,
    mask: bool,
) -> Tensor:
    """The values that dp_encode stored, or only whether each was not zero: exactly, where the buffer is `masked`."""
    out = torch.empty(numel, dtype=torch.bool if mask else dtype, device=data.device)
    values = height * width
    planes = numel // values
    if numel and mask and masked:
        masks = data[dp_sizes(numel, height, width, block, bits, masked, dtype)[3] :]
        each, length, chunks = _chunks(planes, -(-values // 8))
        programs = -(-planes // each) * chunks
        _launch(dp_mask_kernel, programs, (masks, out), (planes, values, chunks), (each, length), 4)
    elif numel:
        each, length, chunks = _chunks(planes, -(-values * bits // 8))
        magic, divide = _reciprocal(height, width)
        numbers = (planes, values, height, width, magic, chunks, torch.finfo(dtype).max)
        constants = (TYPES[dtype], bits, *dp_tiles(height, width, block)[:2], divide, mask, each, length)
        _launch(dp_decode_kernel, -(-planes // each) * chunks, (data, out), numbers, constants, 4)
    return out


def lp_encode(x: Tensor, step: float, far: float, seed: int) -> Tensor:
    """A byte for each flat value: how many steps it lies below zero, at most 254; NaN is 255."""
    numel = x.numel()
    data = torch.empty(numel, dtype=torch.uint8, device=x.device)
    if numel:
        numbers = (numel, *_halves(seed), -1 / step, -1 / far, lp_bend(step, far))
        constants = (TYPES[x.dtype], BITS_SIZE)
        _launch(lp_encode_kernel, -(-numel // BITS_SIZE), (x, data), numbers, constants, 8, special=0)
    return data


def lp_decode(data: Tensor, step: float, far: float, shift: float, seed: int, dtype: torch.dtype) -> Tensor:
    """The values that lp_encode stored, the random numbers taken off again, and `shift` lower."""
    numel = data.numel()
    out = torch.empty(numel, dtype=dtype, device=data.device)
    if numel:
        numbers = (numel, *_halves(seed), -step, -far, lp_bend(step, far), shift)
        constants = (TYPES[dtype], BITS_SIZE)
        _launch(lp_decode_kernel, -(-numel // BITS_SIZE), (data, out), numbers, constants, 8, special=0)
    return out


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Packs flat uint8 (or bool) values below 2^bits, bits 1, 2 or 4: one field over the whole tensor."""
    numel = x.numel()
    length = (numel * bits + 7) // 8
    data = torch.empty(length, dtype=torch.uint8, device=x.device)
    if numel:
        _launch(
            bits_encode_kernel, -(-length // BITS_SIZE), (x, data), (numel, length), (bits, BITS_SIZE), 8, special=2
        )
    return data


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """The flat uint8 values that bits_encode stored."""
    out = torch.empty(numel, dtype=torch.uint8, device=data.device)
    if numel:
        length = data.numel()
        _launch(
            bits_decode_kernel, -(-length // BITS_SIZE), (data, out), (numel, length), (bits, BITS_SIZE), 8, special=2
        )
    return out
