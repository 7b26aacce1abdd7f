"""A process that compiles kernels beside a training, with the lowest priority.

It imports torch and Triton once, which takes seconds, and reads requests from its standard input, a JSON line each. For
each it forks processes that share the kernels, and leaves a marker in Triton's cache when all of them are compiled. It
ends with the training, when it is told to, and after a while without a request.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from encke.tools import process
from encke.tools.provenance import core_count

WORKERS = 8
"""Most processes for one request. They take half of the cores."""
END = b"\n"
"""An empty request, the last one."""
IDLE = 60.0
"""Seconds without a request after which the process ends."""


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
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, **quiet)

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
    import triton
    from triton.backends.compiler import GPUTarget

    from encke.kernels.gpu import ahead

    target = GPUTarget(request["backend"], request["arch"], request["warp_size"])
    triton.runtime.driver.set_active(ahead.OtherTarget(target))
    for _ in ahead.compile_part(part, count, **ahead.read_request(request["wanted"])):
        pass


if __name__ == "__main__":
    # Imported before the first fork: the processes share it.
    import encke.kernels.gpu.ahead  # noqa: F401

    serve()
