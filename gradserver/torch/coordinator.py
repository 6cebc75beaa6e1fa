"""The coordinator that rank 0 starts, or an agent of torchrun, in a process of its own, if there is none.

Run as a program, this module is that coordinator: ``python -m gradserver.torch.coordinator tcp://HOST:PORT``. It ends
with the process that has started it, whatever ends that: it sees so by a descriptor of that process, or by the end of
its standard input. Then the others are told which of them was lost. So it ends when no member is left, or soon.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gradserver.protocol.errors import CoordinatorError, CoordinatorUnreachableError
from gradserver.protocol.limits import MAX_TIMEOUT
from gradserver.protocol.url import numeric_url, parse_target
from gradserver.worker.meeting import address_towards

if TYPE_CHECKING:
    from gradserver.transport.server import TcpServer

URL: Final = "GRADSERVER_URL"
_LEAVING_SECONDS: Final = 10.0
"""Time that other members have to hear of the end of the process that has started it, and to leave."""
_LOOKING_SECONDS: Final = 0.05
REACHING_SECONDS: Final = 60.0
"""Seconds in which a coordinator that is named has to listen: it may be started together with those that use it."""
_AGAIN_SECONDS: Final = 0.2
_HINT: Final = f"and is {URL} right? Without {URL}, rank 0 starts a coordinator"


class Started(NamedTuple):
    """A coordinator, with the address that it was to listen at, and the process that has started it."""

    process: subprocess.Popen[str]
    bind: str
    parent: int
    url: str


_started: list[Started] = []


# ── the process that starts it ────────────────────────────────────────────────────────────────────────────


def coordinator_url(host: str | None) -> str:
    """Return the URL of this process's coordinator, as the other ranks reach it; one is started if there is none.

    Args:
        host: the host of torch's store, as all ranks have it; None if the store is not on a network.
    """
    bind, shown = addresses(host)
    for one in _started:
        if (one.bind, one.parent) == (bind, os.getpid()) and one.process.poll() is None:
            return one.url
    try:
        process, port = start(numeric_url(bind, 0))
    except CoordinatorError as error:
        raise CoordinatorError(f"rank 0 {error}: start `gradserver serve`, and set {URL} for all ranks") from None
    url = numeric_url(shown, port)
    _started.append(Started(process, bind, os.getpid(), url))
    return url


def tell(store: Any, key: str, find: Callable[[], str], **more: object) -> dict[str, Any]:
    """Tell the other ranks, by a ``key`` of torch's store, the URL that is found, or why there is none.

    Return what they are told: ``url`` or ``error``, this ``host``, and ``more``. Errors of ``find`` are raised, too.
    """
    told = {"host": socket.gethostname(), **more}
    try:
        told["url"] = find()
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        store.set(key, json.dumps(told))
    return told


def hear(store: Any, key: str) -> dict[str, Any]:
    """Wait for what rank 0 tells, and return it. CoordinatorUnreachableError with its reason if it has none."""
    told: dict[str, Any] = json.loads(store.get(key))
    if "error" in told:
        raise CoordinatorUnreachableError(f"rank 0, on {told['host']}, has no coordinator. {told['error']}")
    return told


def start(bind: str, *elastic: str) -> tuple[subprocess.Popen[str], int]:
    """Start a coordinator that listens at ``bind``. Return its process, which ends with this one, and its port.

    Args:
        bind: ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        elastic: name, minimum and maximum of a group that is elastic, and its seconds to gather; nothing if none is.

    Raises:
        CoordinatorError: it could not start; the error says why.
    """
    command = [sys.executable, "-P", "-m", "gradserver.torch.coordinator", bind, *elastic]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the ranks alone, and it has to tell them of each other's ends
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    found = re.search(r"listening on tcp://\S+:(\d+)", said)
    if found is None:
        process.kill()
        status = process.wait()
        process.stdin.close()
        process.stdout.close()
        reason = said or f"status {status}; its words are above"
        raise CoordinatorError(f"could not start a coordinator at {bind} ({reason})")
    return process, int(found[1])


def end(process: subprocess.Popen[str], patience: float) -> None:
    """Have a coordinator end when its groups have, and wait for that for a while."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    burying = threading.Thread(target=process.wait, name="gradserver-ending", daemon=True)
    burying.start()
    burying.join(patience)


def reach(url: str, patience: float, hint: str = _HINT) -> None:
    """Wait until something listens at ``url``, but not for as long as for other ranks: there may be a mistake in it."""
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(parse_target(url), timeout=max(until - time.monotonic(), 1.0)).close()
        except OSError as error:
            if time.monotonic() + _AGAIN_SECONDS >= until:
                raise CoordinatorUnreachableError(
                    f"no coordinator listens at {url}, for {patience:g} s ({error.strerror or error}). Is `gradserver "
                    f"serve` running there, {hint}"
                ) from None
        else:
            return
        time.sleep(_AGAIN_SECONDS)


def addresses(host: str | None) -> tuple[str, str]:
    """Return the address to listen at, and the one that other ranks are told.

    It is that of this machine by which it reaches the store, or the others do. Without a store on a network all ranks
    are on this machine.
    """
    if host is None:
        return "127.0.0.1", "127.0.0.1"
    own = "127.0.0.1"
    with suppress(OSError):
        own = address_towards(host)
    if not own.startswith(("127.", "::1")):
        return own, own
    if host == "localhost" or host.startswith(("127.", "::1")):
        return own, own
    return "0.0.0.0", host  # a name that means this machine by itself, as in some hosts files, and others know better


# ── the coordinator itself ────────────────────────────────────────────────────────────────────────────────


def main(bind: str, *elastic: str) -> int:
    """Serve until the parent has ended, and the other members are gone."""
    from gradserver.daemon import serve
    from gradserver.engine.policy import Policy

    parent = os.getppid()
    policies: dict[str, int | Policy] = {}
    if elastic:
        group, least, most, gather = elastic
        policies[group] = Policy(int(least), int(most), gather=float(gather))

    def attend(server: TcpServer, is_idle: Callable[[], bool]) -> None:
        threading.Thread(
            target=_end_with, args=(parent, server, is_idle), name="gradserver-parent", daemon=True
        ).start()

    try:
        return serve(bind, policies, quiet=True, round_timeout=MAX_TIMEOUT, attend=attend)
    except CoordinatorError as error:
        print(error, flush=True)  # for the parent, which says it, or has found another coordinator there meanwhile
        return 1


def _end_with(parent: int, server: TcpServer, is_idle: Callable[[], bool]) -> None:
    """Wait for the end of the parent, and then stop the server when it is idle."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLHUP)
    with suppress(OSError):  # an old kernel, or one that forbids it: children of the parent may keep our input open
        poller.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:
        poller.poll()
    until = time.monotonic() + _LEAVING_SECONDS

    def look() -> None:
        server.hold()  # workers that would join wait, and find the next coordinator
        if is_idle():
            server.request_stop("the process that had started it has ended")

    while not server.is_stopping and time.monotonic() < until:
        server.look(look)
        time.sleep(_LOOKING_SECONDS)
    server.request_stop("the process that had started it has ended")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
