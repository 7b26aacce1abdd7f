"""The process that compiles kernels beside a training: real processes, which compile for a GPU that is not there."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from encke.kernels import GroupFormat, PackedUse, RowUse, UsualUse
from encke.kernels.gpu import ahead
from encke.kernels.gpu import compiler as compiler_module
from encke.kernels.gpu.compiler import Compiler, sole_compiler

FEW = [UsualUse(torch.bfloat16, False, False)]
"""Kernels of tensors whose groups lie one after the other."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = Compiler(niceness=0)  # other tests keep the cores busy
    yield found
    found.wait()


def request(marker: Path, rates: tuple[int, ...] = (2,), usual: Any = FEW) -> dict[str, Any]:
    wanted = {"uses": [], "rows": [], "usual": [each.numbers() for each in usual], "rates": rates}
    return {"backend": "cuda", "arch": 90, "warp_size": 32, "marker": str(marker), "wanted": wanted}


def compiled(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("cache/*/*.cubin"))


def test_one_process_serves_many_requests_and_leaves_a_marker_for_each(compiler, tmp_path):
    markers = [tmp_path / "markers" / str(number) for number in range(2)]
    compiler.ask(request(markers[0]))
    first = compiler.child
    compiler.ask(request(markers[1], (4,)))
    assert compiler.child is first
    compiler.wait()
    assert all(marker.exists() for marker in markers)
    names = compiled(tmp_path)
    assert names.count("gq_decode_kernel.cubin") >= 2 and "gq_encode_pairs_kernel.cubin" in names


@pytest.mark.slow
def test_large_requests_do_not_wait_for_the_process_to_start(compiler, tmp_path):
    def ring(*_: Any) -> None:
        raise TimeoutError("the training waits for the process")

    compiler.ask(request(tmp_path / "done"))
    large = request(tmp_path / "large")
    large["wanted"]["uses"] = [["x" * 150]] * 1000  # no use: it only takes place
    assert compiler.child is not None
    compiler.child.send_signal(signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    try:
        compiler.ask(large)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        compiler.child.send_signal(signal.SIGCONT)
    compiler.wait()
    assert (tmp_path / "done").exists() and not (tmp_path / "large").exists()


@pytest.mark.slow
def test_an_empty_request_starts_the_process_once_for_a_machine(compiler, tmp_path):
    marker = tmp_path / "done"
    with pytest.MonkeyPatch.context() as patch:
        gpu_machine(patch, tmp_path)
        patch.setattr(compiler_module, "_compiler", compiler)
        compiler_module.request()
        assert compiler.child is not None
        compiler.wait()
        assert marker.exists()
        compiler_module._asked.clear()  # as in another program
        compiler_module.request()
        assert compiler.child is None


def test_a_request_that_fails_leaves_no_marker_and_the_next_one_is_served(compiler, tmp_path):
    bad, good = tmp_path / "bad", tmp_path / "good"
    compiler.ask(request(bad, ("two",)))  # type: ignore[arg-type]
    compiler.ask(request(good))
    compiler.wait()
    assert good.exists() and not bad.exists()


@pytest.mark.slow
def test_processes_that_the_training_has_forked_do_not_keep_it_alive(compiler, tmp_path):
    """The workers of a data loader have a copy of the pipe."""
    compiler.ask(request(tmp_path / "done"))
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    compiler.wait()
    assert (tmp_path / "done").exists() and os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_after_its_end_it_is_started_again(compiler, tmp_path):
    compiler.ask(request(tmp_path / "one"))
    first = compiler.child
    assert first is not None
    first.send_signal(signal.SIGKILL)
    first.wait()
    compiler.ask(request(tmp_path / "two"))
    assert compiler.child is not first
    compiler.wait()
    assert (tmp_path / "two").exists()


@pytest.mark.slow
def test_what_another_program_compiles_is_left_to_it(compiler, tmp_path):
    marker = tmp_path / "done"
    lock = os.open(f"{marker}-lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    compiler.ask(request(marker))
    compiler.wait()
    os.close(lock)
    assert not marker.exists() and not compiled(tmp_path)
    compiler.ask(request(marker))
    compiler.wait()
    assert marker.exists() and compiled(tmp_path)


@pytest.mark.slow
def test_it_ends_with_the_training(monkeypatch, tmp_path):
    """Killed, too: then nobody closes its input in order."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        child = Compiler(niceness=0)
        child.ask(request(tmp_path / "done"))
        assert child.child is not None
        os.write(write, str(child.child.pid).encode())
        time.sleep(60)
    server = int(os.read(read, 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 40  # less than the process waits for another request
    while time.monotonic() < end and is_running(server):
        time.sleep(0.05)
    assert not is_running(server)
    os.close(read)
    os.close(write)


def is_running(pid: int) -> bool:
    """Return whether a process is there and has not ended; its parent may not have asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_that_cannot_be_started_and_caches_that_cannot_be_written_stop_nothing(monkeypatch, tmp_path):
    def fails(*arguments: Any, **settings: Any) -> None:
        raise BlockingIOError("no more processes")

    compiler = Compiler()
    assert compiler.niceness == 19
    monkeypatch.setattr(compiler, "start", fails)
    compiler.ask(request(tmp_path / "done"))
    assert compiler.child is None
    compiler.wait()
    (tmp_path / "file").touch()
    with pytest.raises(OSError), sole_compiler(tmp_path / "file" / "done"):
        pass


def test_a_request_travels_as_plain_data():
    """Worker processes get the same launches."""
    row = RowUse(96, True, 0.0, *[torch.float32] * 4, True, True, True, 128, torch.bfloat16)
    format = GroupFormat(4, 128, torch.bfloat16, 64)
    use = PackedUse(format, (8, 64, 16, 16), True, True, False, ("Silu",), (4, 2))
    sent: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        gpu_machine(patch, Path("/nowhere"))
        patch.setattr(compiler_module._compiler, "ask", sent.append)
        for _ in range(2):
            compiler_module.request([use], [row], FEW, (3, 8))
    assert len(sent) == 1  # what was asked for is not asked for again
    wanted = ahead.read_request(json.loads(json.dumps(sent[0]["wanted"])))
    keys = [{ahead.specialisation(*each[:4]) for each in ahead.launches(**some)} for some in (
        wanted, {"rates": (3, 8), "uses": [use], "rows": [row], "usual": FEW},
    )]  # fmt: skip
    assert keys[0] == keys[1] and len(keys[0]) > 20


@pytest.mark.parametrize("reason", ["no GPU", "another rank", "turned off", "compiled already"])
def test_nothing_is_asked_for_without_reason(reason, monkeypatch, tmp_path):
    gpu_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: reason != "no GPU")
    monkeypatch.setenv("LOCAL_RANK", "1" if reason == "another rank" else "0")
    monkeypatch.setenv(compiler_module.VARIABLE, "0" if reason == "turned off" else "1")
    asked: list[Any] = []
    monkeypatch.setattr(compiler_module._compiler, "ask", asked.append)
    if reason == "compiled already":
        (tmp_path / "done").touch()
    compiler_module.request(usual=FEW, rates=(4,))
    assert not asked
    monkeypatch.undo()


def gpu_machine(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Pretend that this machine has a GPU, and an empty cache of kernels."""
    target = types.SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = types.SimpleNamespace(get_current_target=lambda: target)
    patch.setattr(compiler_module.triton.runtime, "driver", types.SimpleNamespace(active=active))
    patch.setattr(compiler_module, "marker", lambda target, wanted: cache / "done")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(compiler_module, "_asked", set())
    for name in ("TRITON_INTERPRET", "LOCAL_RANK", compiler_module.VARIABLE):
        patch.delenv(name, raising=False)
