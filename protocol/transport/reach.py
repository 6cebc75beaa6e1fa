"""The search for a server by plain TCP connections: libzmq would keep its own attempts to itself."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Final

from gradserver.protocol.errors import ClosedError, CoordinatorUnreachableError, reason_of
from gradserver.protocol.log import log
from gradserver.protocol.url import IS_IT_RUNNING, numeric_url, parse_target

RETRY_SECONDS: Final = 0.1
"""Pause between two attempts."""
_WARN_SECONDS: Final = 2.0
"""Seconds without a server after which the log says that this process is still trying."""
_LOOPBACK: Final = ("127.0.0.1", "::1")


_NO_WAY: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def remedy(error: OSError) -> str:
    """Return what to do about a coordinator that cannot be reached."""
    if isinstance(error, socket.gaierror):
        return "Is the name of the host right? This machine finds no address for it: an address works without a name"
    if error.errno in _NO_WAY:
        return "Is the address right, and is there a way to it from this machine (network, VPN, firewall)?"
    return IS_IT_RUNNING


Reached = tuple[str, str, bool]
"""The URL with the address that was reached, as a name may mean several. Then the address that it was reached from, and
True if both belong to this host."""


def reach(url: str, timeout: float) -> Reached:
    """Try once to connect to ``url``. OSError if nothing accepts connections there."""
    with socket.create_connection(parse_target(url), timeout=timeout) as connection:
        there, here = connection.getpeername(), connection.getsockname()[0]
        return numeric_url(*there[:2]), here, there[0] == here or here in _LOOPBACK


def wait_for_listener(
    url: str, timeout: float, what: str = "coordinator", wanted: Callable[[], bool] = lambda: True
) -> Reached:
    """Try to connect to the ``what`` at ``url`` until it accepts. CoordinatorUnreachableError after ``timeout``.

    Raises ClosedError when it is not ``wanted`` any more.
    """
    started = time.monotonic()
    warned = False
    while True:
        if not wanted():
            raise ClosedError(f"the connection to the {what} at {url} is not wanted any more")
        left = started + timeout - time.monotonic()
        try:
            return reach(url, max(left, 0.01))
        except OSError as error:
            why, ask = reason_of(error), remedy(error)
        if time.monotonic() + RETRY_SECONDS >= started + timeout:
            text = f"no {what} answered at {url} within {timeout:g} s ({why})"
            raise CoordinatorUnreachableError(f"{text}. {ask}")
        if not warned and time.monotonic() - started > _WARN_SECONDS:
            warned = True
            log.warning("no %s at %s yet (%s); trying for %g s in all", what, url, why, timeout)
        time.sleep(RETRY_SECONDS)
