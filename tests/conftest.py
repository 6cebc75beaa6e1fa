"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import tests.without_compiler.sitecustomize  # noqa: F401 (the first optimizer of each process would import it all)
from gradserver.protocol.compiled import loader
from tests.examples import examples
from tests.memory import Measured, one_thread

if TYPE_CHECKING:
    from tests.cluster import Gather

# Many small workers share few cores here: threads of their own would only delay each other. The libraries read these
# when they are first imported, and the processes that a test starts inherit them.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# A shell that runs the tests in the background has Ctrl-C ignored. The programs that tests start and interrupt would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ENDING_SECONDS = 10.0
"""Time limit for the end of a thread when its channel is closed."""

settings.register_profile("default", deadline=None, max_examples=examples(25))
# Every run has the same examples, so that a result shows the effect of a change alone.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither meanwhile nor ever in what there is then. With all tests, that takes 0.2 s each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_there() -> None:
    """Load kernels, if numba is installed, before the first test. GRADSERVER_KERNELS=numpy has all tests on numpy."""
    loader.settle(300)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU. Begin with the tests that may take longest, so that processes end together."""
    items.sort(key=_most_seconds, reverse=True)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _cuda_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _most_seconds(item: pytest.Item) -> float:
    """Return how long it may take, by its own mark."""
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0


def _cuda_available() -> bool:
    import torch  # here, as most test runs select no such test and torch takes seconds to load

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _soon_present() -> Iterator[None]:
    """Send heartbeats every 16 ms in this process, not every 150: joining waits for the first one.

    The limit of silence is as usual, and so are the heartbeats of other processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.protocol.beacon._BEATS", 0.01)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Fail behind a module of tests that leave a thread of gradserver's: what is closed ends all that it has begun."""
    before = set(threading.enumerate())
    yield
    left = [one for one in threading.enumerate() if one.name.startswith("gradserver-") and one not in before]
    until = time.monotonic() + _ENDING_SECONDS
    for thread in left:  # a connection that breaks ends its threads soon
        thread.join(max(until - time.monotonic(), 0.0))
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    """Yield a caller of functions in a process that has one thread, so that memory they measure is theirs alone.

    A process of pytest-xdist has a second thread. It allocates memory for tests that it is sent, at any moment.
    """
    with one_thread() as call:
        yield call


@pytest.fixture(scope="module")
def session_code() -> Iterator[None]:
    """Have groups of `tests.session_group` run the workers' real code in one thread."""
    from tests.session_world import real_code

    with real_code():
        yield


@pytest.fixture(params=["memory", "shm", "tcp"])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator."""
    return str(request.param)


@pytest.fixture
def gather(channel: str) -> Iterator[Gather]:
    """Yield a maker of groups that last as long as the test: `tests.cluster.members` over each channel."""
    from tests.cluster import members  # here, as numpy must not be loaded before the variables above are set

    with ExitStack() as stack:
        yield lambda world_size, **options: stack.enter_context(members(channel, world_size, **options))
