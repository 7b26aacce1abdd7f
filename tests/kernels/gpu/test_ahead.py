"""Kernels compiled ahead: which ones, and when nothing is asked for."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import GroupFormat, PackedUse, UsualUse
from tests.kernels.gpu.common import DEVICE

ahead = pytest.importorskip("encke.kernels.gpu.ahead", reason="needs triton")


DTYPES = (torch.bfloat16, torch.float32)
IMAGES = [UsualUse(dtype, True, last) for dtype in DTYPES for last in (False, True)]
OTHERS = [UsualUse(dtype, False, False) for dtype in DTYPES]


def test_kernels_of_every_rate_are_launched_on_tensors_without_memory():
    found = ahead.launches((2, 4), usual=IMAGES)
    names = {function.fn.__name__ if hasattr(function, "fn") else function.__name__ for function, *_ in found}
    assert {"gq_encode_channels_kernel", "gq_decode_kernel", "last_reduce_kernel", "statistics_kernel"} <= names
    assert {"plane_reduce_kernel", "plane_apply_kernel", "gather_kernel", "plane_normalise_kernel"} <= names
    assert len(found) > len(ahead.launches((2,), usual=IMAGES)) > 20
    assert {t.device.type for _, tensors, *_ in found for t in tensors} == {"meta"}


def test_compiled_models_have_kernels_of_their_own():
    """Seeds are on the device there."""
    eager, compiled = (
        {
            ahead.specialisation(*each[:4])
            for each in ahead.launches((4,), usual=[UsualUse(dtype, True, True, table) for dtype in DTYPES])
        }
        for table in (False, True)
    )
    assert compiled - eager and eager - compiled


def test_transformers_have_no_kernels_of_batch_norm_and_relu():
    images, others = (
        {function.fn.__name__ for function, *_ in ahead.launches((4,), usual=usual)} for usual in (IMAGES, OTHERS)
    )
    assert others < images and len(images) > 2 * len(others)
    assert not any(word in name for name in others for word in ("norm", "gate", "plane", "last", "channels"))


def test_without_a_relu_its_kernels_are_left_out():
    """A model of SiLUs, such as EfficientNet, takes neither gates nor encoders that compute a ReLU."""
    format = GroupFormat(4, 128, torch.bfloat16, 64)
    for norm in (False, True):
        uses = [PackedUse(format, (8, 64, 16, 16), True, norm, relu, (), (2, 4)) for relu in (True, False)]
        some, fewer = ({ahead.specialisation(*each[:4]) for each in ahead.launches((2, 4), [use])} for use in uses)
        assert fewer < some
    gates = [function for function, *_ in ahead.launches((2, 4), uses[1:]) if "gate" in str(function)]
    assert not gates


def test_smooth_activations_have_kernels_of_their_own():
    """A model takes those of the activations that it has."""
    format = GroupFormat(4, 128, torch.bfloat16, 64)
    names: list[tuple[str, ...]] = [(), ("Silu",), ("Hardswish",), ("Silu", "Hardswish")]
    uses = [PackedUse(format, (8, 64, 16, 16), True, True, False, each, (4,)) for each in names]
    found = [{ahead.specialisation(*each[:4]) for each in ahead.launches((), [use])} for use in uses]
    none, silu, hardswish, both = found
    assert silu & hardswish == none and silu | hardswish == both
    kernels = {str(function.fn) for function, *_ in hardswish - none}
    assert len(kernels) == len(hardswish - none) == 3


def test_signs_have_kernels_of_their_own():
    """What leaky ReLU reads has them, and nothing else."""
    uses = [
        PackedUse(GroupFormat(4, 128, torch.float32, 1, s), (1 << 16,), False, False, False, (), (4,)) for s in (0, 1)
    ]
    found = [[str(function.fn) for function, *_ in ahead.launches((), [use])] for use in uses]
    assert ["gate" in str(names) for names in found] == [False, True]


def test_launching_works_again_after_the_record():
    from encke.kernels.gpu import bits

    ahead.launches((2,), usual=IMAGES)
    assert bits.bits_encode(torch.ones(16, dtype=torch.uint8, device=DEVICE), 1).tolist() == [255, 255]
