"""Kernels compiled ahead in worker processes: which ones, for which GPU, and when nothing is started."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from encke.kernels import GroupFormat, PackedUse
from tests.kernels.gpu.common import DEVICE, compile_for_hopper

ahead = pytest.importorskip("encke.kernels.gpu.ahead", reason="needs triton")


def test_kernels_of_every_rate_are_launched_on_tensors_without_memory():
    found = ahead.launches((2, 4), usual=True)
    names = {function.fn.__name__ if hasattr(function, "fn") else function.__name__ for function, *_ in found}
    assert {"gq_encode_channels_kernel", "gq_decode_kernel", "last_reduce_kernel", "statistics_kernel"} <= names
    assert {"plane_reduce_kernel", "plane_apply_kernel", "gather_kernel", "plane_normalise_kernel"} <= names
    assert len(found) > len(ahead.launches((2,), usual=True)) > 20
    assert {t.device.type for _, tensors, *_ in found for t in tensors} == {"meta"}


def test_compiled_models_have_kernels_of_their_own():
    """Seeds are on the device there; apart from that they are fewer."""
    eager, compiled = (
        {ahead.specialisation(*each[:4]) for each in ahead.launches((4,), usual=True, seed_table=table)}
        for table in (False, True)
    )
    assert compiled - eager and len(compiled) < len(eager)


def test_transformers_have_no_kernels_of_batch_norm_and_relu():
    images, others = (
        {function.fn.__name__ for function, *_ in ahead.launches((4,), usual=usual)} for usual in (True, False)
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

    ahead.launches((2,), usual=True)
    assert bits.bits_encode(torch.ones(16, dtype=torch.uint8, device=DEVICE), 1).tolist() == [255, 255]


@pytest.mark.parametrize("reason", ["no GPU", "another rank", "turned off"])
def test_nothing_is_started_without_reason(reason, monkeypatch):
    def started(*arguments, **settings):
        raise AssertionError("a process was started")

    monkeypatch.setattr(ahead.subprocess, "Popen", started)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: reason != "no GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1" if reason == "another rank" else "0")
    monkeypatch.setenv(ahead.VARIABLE, "0" if reason == "turned off" else "1")
    ahead.start(images=True)
    ahead.wait()


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """A machine with a GPU and an empty cache of kernels."""
    target = types.SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = types.SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(ahead.triton.runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(ahead, "marker", lambda target, wanted: tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ahead, "core_count", lambda: 8)
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "_started", [])
    for name in ("TRITON_INTERPRET", "LOCAL_RANK", ahead.VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_processes_that_cannot_be_started_stop_nothing(monkeypatch, gpu_machine):
    def fails(*arguments, **settings):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(ahead.subprocess, "Popen", fails)
    ahead.start(images=True)
    assert not ahead._started


def test_a_second_program_starts_no_workers_until_those_of_the_first_have_ended(monkeypatch, gpu_machine):
    start = subprocess.Popen

    def started(command, pass_fds, **settings):
        return start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=pass_fds)

    monkeypatch.setattr(ahead.subprocess, "Popen", started)
    ahead.start(images=True)
    first = list(ahead._started)
    assert len(first) == 6
    ahead._begun.clear()  # as in another program
    ahead.start(images=True)
    assert ahead._started == first
    for worker in first:
        worker.communicate(b"\n")
    ahead._begun.clear()
    ahead.start(images=True)
    assert len(ahead._started) == 12
    for worker in ahead._started[6:]:
        worker.communicate(b"\n")


def test_a_cache_that_cannot_be_written_to_stops_nothing(monkeypatch, gpu_machine, tmp_path):
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setattr(ahead, "marker", lambda target, wanted: file / "none")
    ahead.start(images=True)
    assert not ahead._started


WORK = """
import os, tempfile
os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp()
from encke.kernels.gpu import ahead
ahead.RATES, ahead.IMAGES, every = (2,), (), ahead.launches
ahead.launches = lambda **wanted: every(**wanted)[:2]
marker = os.path.join(folder, "done")
for part in (0, 1):
    assert not os.path.exists(marker)
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    ahead.work({**target, "workers": 2, "part": part, "marker": marker, "wanted": {"usual": True}})
assert os.path.exists(marker) and len(os.listdir(folder)) > 3
"""


@pytest.mark.slow
def test_workers_compile_without_a_gpu_and_the_last_leaves_the_marker():
    compile_for_hopper(WORK)
