"""Compilation of kernels ahead of their first launch, in a background process with the lowest priority.

Triton compiles a kernel at its first launch, and its front end holds the GIL, so threads do not help. The process
launches kernels on meta tensors and only compiles them: it needs no GPU, and writes to Triton's cache on disk. The
training continues meanwhile and finds the compiled kernels in the cache.

The process imports torch and Triton once, which takes seconds, and reads requests from its standard input, one JSON
line each. For each request it forks processes that share the kernels among them, and leaves a marker in the cache when
all of these are compiled. It ends with the training, when it is told to, or after a while without a request.
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
"""Largest number of processes for one request. They use at most half of the cores."""
PIPE = 1 << 18
"""Bytes of requests that may be pending."""
END = b"\n"
"""Empty request, sent as the last one."""
IDLE = 60.0
"""Seconds without a request after which the process ends."""


VARIABLE = "ENCKE_COMPILE_AHEAD"
"""Environment variable; 0 turns compilation ahead off."""
MOST = 1000
"""Largest number of uses in one request."""
_asked: set[Path] = set()
"""Markers of the requests that were sent."""


def request(
    uses: Iterable[PackedUse] = (), rows: Iterable[RowUse] = (), usual: Iterable[UsualUse] = (),
    rates: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Request kernels that are not in the cache yet and return at once. See `backends.compile_ahead`."""
    # Uses that differ only in the current number of bits are equal.
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
    """Wait until all requested kernels are compiled."""
    _compiler.wait()


def marker(target: Any, wanted: dict[str, Any]) -> Path:
    """Return the file in Triton's cache that marks these kernels, in this version, as compiled for this GPU."""
    digest = hashlib.sha256(f"{sources_digest()} {triton.__version__} {target} {json.dumps(wanted)}".encode())
    return Path(triton.knobs.cache.dir) / f"encke-{digest.hexdigest()[:24]}"


@functools.cache
def sources_digest() -> str:
    """Return a digest of the kernels' source files."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


class Compiler:
    """Client of the background process, which is started at the first request."""

    def __init__(self, niceness: int = 19) -> None:
        self.niceness = niceness
        self.child: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request. If no process can be started, the training compiles its kernels itself."""
        line = json.dumps(request).encode() + b"\n"
        for _ in range(2):
            with contextlib.suppress(OSError):
                if self.child is None or self.child.poll() is not None:
                    self.child = self.start()
                assert self.child.stdin is not None
                self.child.stdin.write(line)
                self.child.stdin.flush()
                return
            self.child = None  # the process has ended meanwhile

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process."""
        variables = process.environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        command = [sys.executable, "-m", __name__, str(self.niceness)]
        # The pipe holds requests while the process is starting; otherwise the training would wait for the start.
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, pipesize=PIPE, **quiet)

    def wait(self) -> None:
        """Wait until all requested kernels are compiled."""
        if self.child is not None:
            assert self.child.stdin is not None
            with contextlib.suppress(OSError):
                # Forked processes of the training may hold the pipe open too, so closing it does not suffice.
                self.child.stdin.write(END)
                self.child.stdin.close()
            self.child.wait()
            self.child = None


_compiler = Compiler()


def serve(niceness: int) -> None:
    """Handle requests until an empty one arrives, the input is closed, or none has arrived for a while."""
    process.die_with_parent()
    os.nice(niceness)
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
    """Run a function in a forked process that ends with this one, and return its process id."""
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
    """Compile the kernels of a request in several processes, and leave the marker if all of them succeed."""
    done = Path(request["marker"])
    with contextlib.suppress(OSError), sole_compiler(done):
        count = max(min(WORKERS, core_count() // 2), 1)
        pids = [fork(compile_part, part, count, request) for part in range(count)]
        if all([os.waitpid(pid, 0)[1] == 0 for pid in pids]):
            done.touch()


@contextlib.contextmanager
def sole_compiler(done: Path) -> Iterator[None]:
    """Hold a machine-wide lock on the compilation of one request.

    Forked processes share the lock, so it lasts until the last of them has ended, however it ends. A second training of
    the same model would only slow down the processes of the first one.

    Raises:
        OSError: Another program's processes hold the lock, or the cache cannot be written to.
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
    serve(int(sys.argv[1]))
