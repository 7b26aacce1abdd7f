"""Environment of the tests, and two options: `--soak` and `--minutes`."""

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Iterator

# Imports make a million objects that stay: looking for garbage among them takes a third of the time of collection.
gc.disable()

# Without this, bf16 matrix products die with SIGILL in oneDNN on some CPUs.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

# Inductor compiles programs for ten seconds to learn which vector instructions there are; at length it may use them.
if "PYTEST_XDIST_WORKER" not in os.environ and "--soak" not in sys.argv:
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# The Triton kernels run on CPU tensors in Triton's interpreter where there is no GPU. Read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import triton

    if triton.__version__.startswith("3.6."):  # whose private names are replaced
        from tests.interpreter import quicken

        quicken()

START = pytest.StashKey[float]()
NOT_STARTED = "not started: the time box ended before it"
MORE_EXAMPLES = 10
"""`--soak` gives property tests this many times their examples, and another random seed in each run."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread: sums come in one order, and small tensors are ten times as fast beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("encke")
    group.addoption("--soak", action="store_true", help="run the tests marked soak, and property tests at length")
    group.addoption("--minutes", type=float, help="start no test after this many minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[START] = time.monotonic()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = config.getoption("--soak")
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marked, longer = item.get_closest_marker("soak") is not None, soak and lengthen(item)
        (chosen if marked == soak or longer else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what a file's tests brought along (modules, compiled kernels) to no further search for garbage."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def lengthen(item: pytest.Item) -> bool:
    """Give a property test more examples. Return whether it is one."""
    test = getattr(item, "obj", None)
    if not hypothesis.is_hypothesis_test(test):
        return False
    function = getattr(test, "__func__", test)
    usual = getattr(function, "_hypothesis_internal_use_settings", hypothesis.settings.default)
    more = MORE_EXAMPLES * usual.max_examples
    longer = hypothesis.settings(usual, max_examples=more, derandomize=False, deadline=None)
    function._hypothesis_internal_use_settings = longer
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[START] >= 60 * minutes:
        pytest.skip(NOT_STARTED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    late = [each for each in terminalreporter.stats.get("skipped", []) if NOT_STARTED in str(each.longrepr)]
    if late:
        terminalreporter.write_line(
            f"{len(late)} tests were not started within {config.getoption('--minutes'):g} minutes"
        )
