"""Kernels that are compiled ahead, by a process beside the training with the lowest priority.

Triton compiles a kernel when it is first launched, and its front end holds the interpreter's lock, so threads do not
help. The process launches kernels on tensors without memory and only compiles them: it needs no GPU, and shares
Triton's cache on disk. The training goes on meanwhile; what is compiled by then, it finds there.

The process imports torch and Triton once, which takes seconds, and reads requests from its standard input, a JSON line
each. For each it forks processes that share the kernels, and leaves a marker in the cache when all of them are
compiled. It ends with the training, when it is told to, and after a while without a request.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from encke.kernels.formats import PackedUse, RowUse, UsualUse
from encke.kernels.gpu import ahead
from encke.tools import process
from encke.tools.provenance import core_count

WORKERS = 8
"""Most processes for one request. They take half of the cores."""
PIPE = 1 << 18
"""Bytes of requests that may wait."""
END = b"\n"
"""An empty request, the last one."""
IDLE = 60.0
"""Seconds without a request after which the process ends."""


VARIABLE = "ENCKE_COMPILE_AHEAD"
"""Environment variable: 0 turns it off."""
MOST = 1000
"""Uses that can be asked for at once."""
_asked: set[Path] = set()
"""Markers of what was asked for."""


def request(
    uses: Iterable[PackedUse] = (), rows: Iterable[RowUse] = (), usual: Iterable[UsualUse] = (),
    rates: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Have kernels compiled if the cache does not have them yet; return at once. See `backends.compile_ahead`."""
    # The number of bits in force does not matter.
    some = dict.fromkeys((replace(use.format, bits=use.rates[0]), *use[1:]) for use in uses)
    wanted = {
        "uses": [(format.numbers(), *rest) for format, *rest in list(some)[:MOST]],
        "rows": [use.numbers() for use in rows][:MOST],
        "usual": [use.numbers() for use in usual],
        "rates": rates,
    }
    first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first_rank or os.environ.get(VARIABLE) == "0" or sys.platform != "linux":
        return
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return
    target = triton.runtime.driver.active.get_current_target()
    done = marker(target, wanted)
    if done not in _asked and not done.exists():
        _asked.add(done)
        settings = {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}
        _compiler.ask(settings | {"marker": str(done), "wanted": wanted})


def wait() -> None:
    """Wait until everything that was asked for is compiled."""
    _compiler.wait()


def marker(target: Any, wanted: dict[str, Any]) -> Path:
    """Return the file in Triton's cache that says that these kernels of this version were compiled for this GPU."""
    digest = hashlib.sha256(f"{sources_digest()} {triton.__version__} {target} {json.dumps(wanted)}".encode())
    return Path(triton.knobs.cache.dir) / f"encke-{digest.hexdigest()[:24]}"


@functools.cache
def sources_digest() -> str:
    """Return a digest of the kernels' source files."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


class Compiler:
    """The process, as the training sees it. It is started when it is first asked for something."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request. Where no process can be started, the training compiles what it needs itself."""
        line = json.dumps(request).encode() + b"\n"
        for _ in range(2):
            with contextlib.suppress(OSError):
                if self.child is None or self.child.poll() is not None:
                    self.child = self.start()
                assert self.child.stdin is not None
                self.child.stdin.write(line)
                self.child.stdin.flush()
                return
            self.child = None  # it has ended meanwhile

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process."""
        variables = process.environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        command = [sys.executable, "-m", __name__]
        # A request fits into the pipe while the process is still starting, or the training would wait for that.
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, pipesize=PIPE, **quiet)

    def wait(self) -> None:
        """Wait until everything that was asked for is compiled."""
        if self.child is not None:
            assert self.child.stdin is not None
            with contextlib.suppress(OSError):
                # Processes that the training has forked may hold the other end as well: it has to be told.
                self.child.stdin.write(END)
                self.child.stdin.close()
            self.child.wait()
            self.child = None


_compiler = Compiler()


def serve() -> None:
    """Take requests until there is an empty one, the input is closed, or nothing has been asked for a while."""
    process.die_with_parent()
    os.nice(19)
    leaders: set[int] = set()
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], IDLE)
        leaders = {pid for pid in leaders if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if not ready and leaders:
            continue
        data = os.read(0, 1 << 20) if ready else b""
        if not data:
            break
        *lines, text = (text + data).split(b"\n")
        leaders |= {fork(lead, json.loads(line)) for line in lines if line}
        if b"" in lines:
            break
    for pid in leaders:
        os.waitpid(pid, 0)


def fork(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a forked process, which ends with this one. Return its number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            process.die_with_parent()
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return pid


def lead(request: dict[str, Any]) -> None:
    """Compile the kernels of a request in several processes, and leave the marker if none of them has failed."""
    done = Path(request["marker"])
    with contextlib.suppress(OSError), sole_compiler(done):
        count = max(min(WORKERS, core_count() // 2), 1)
        pids = [fork(compile_part, part, count, request) for part in range(count)]
        if all([os.waitpid(pid, 0)[1] == 0 for pid in pids]):
            done.touch()


@contextlib.contextmanager
def sole_compiler(done: Path) -> Iterator[None]:
    """Hold a lock on what one program on this machine compiles.

    Forked processes share it, so it lasts until the last of them has ended, however it ends. A second training of the
    same model would only slow the first one's processes down.

    Raises:
        OSError: Another program's processes are at it, or the cache cannot be written to.
    """
    done.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(done.with_name(f"{done.name}-lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def compile_part(part: int, count: int, request: dict[str, Any]) -> None:
    """Compile every `count`-th kernel of a request, for a GPU that this process does not use."""
    target = GPUTarget(request["backend"], request["arch"], request["warp_size"])
    triton.runtime.driver.set_active(ahead.OtherTarget(target))
    for _ in ahead.compile_part(part, count, **ahead.read_request(request["wanted"])):
        pass


if __name__ == "__main__":
    serve()
