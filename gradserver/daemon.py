"""The daemon: a coordinator behind a TCP server, in the foreground, until a signal stops it."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
from types import FrameType

from gradserver.coordinator import Coordinator
from gradserver.engine import Engine
from gradserver.tcp import TcpServer
from protocol.limits import CREDIT_BYTES

log = logging.getLogger("gradserver")


def serve(bind: str, worlds: dict[str, int], credit: int | None = None, share_memory: bool = True) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Args:
        bind: ``tcp://HOST:PORT``; port 0 picks a free one.
        worlds: world size by group, for groups whose size is fixed here.
        credit: bytes that one worker may have in flight; None for the default.
        share_memory: whether workers of this host may share memory instead of sending gradients.
    """
    _raise_limits()
    coordinator = Coordinator(Engine(worlds, CREDIT_BYTES if credit is None else credit))
    server = TcpServer(coordinator, bind, share_memory)

    def stop(number: int, _frame: FrameType | None) -> None:
        server.request_stop(f"it received {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        gc.collect()
        gc.freeze()  # what start-up made stays: collections need not look at it again,
        gc.set_threshold(50_000, 20, 20)  # nor run every few rounds, for an engine that makes no cycles
        print(f"listening on {server.url}", flush=True)
        server.run()
        log.info("stopped")
    finally:
        server.close()
        coordinator.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _raise_limits() -> None:
    """Have as many descriptors as we are allowed to.

    The soft limit is 1024 on most systems, for the sake of programs that use select(). We do not, and each worker
    takes a connection, or two and up to a descriptor for each bucket of its plan if it shares memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems set a hard limit that they do not keep
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
