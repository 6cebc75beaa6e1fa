"""The address on which a server listens, and its socket's options."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Final

import zmq

from gradserver.protocol.errors import CoordinatorError, InvalidArgumentError
from gradserver.protocol.limits import MAX_FRAME_BYTES
from gradserver.protocol.url import parse_url

_KEEPALIVE: Final = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
"""Options by which the system closes connections to a lost host, after 30 s.

The system asks, and not libzmq by its heartbeats. After whatever comes, libzmq waits for the next beat of a beacon
(`.liveness`) before it looks for silence again. An answer to a heartbeat counts too. So a peer that froze right behind
it went unnoticed.
"""

_RECEIVE_QUEUE: Final = 0
"""No limit: libzmq reads whatever comes. Credit bounds what a member has under way.

libzmq 4.3 stops to read when a queue is full. If the connection breaks then, a PING among what it had read
already ends the whole process: "Assertion failed: !_io_error".
"""
_SEND_QUEUE: Final = 50_000
"""Replies that may wait for a connection that does not read. Credits keep members far below it."""


def bind_router(router: zmq.Socket[bytes], bind: str) -> str:
    """Bind to the first address that ``bind`` (``tcp://HOST:PORT``) means, and return it with its port filled in.

    Raises:
        InvalidArgumentError: this machine has no such address.
        CoordinatorError: it cannot be listened on; says why, and what to do.
    """
    _configure(router)
    host, port = parse_url(bind)
    for address, family in _addresses(host):
        if family == socket.AF_INET6:
            router.setsockopt(zmq.IPV6, 1)
        try:
            router.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise CoordinatorError(_why_not(bind, error)) from error
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    raise InvalidArgumentError(f"no address of this machine is called {host!r}")


def _configure(router: zmq.Socket[bytes]) -> None:
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    router.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
    router.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    router.setsockopt(zmq.HEARTBEAT_IVL, 0)
    for option, value in _KEEPALIVE.items():
        router.setsockopt(option, value)
    router.setsockopt(zmq.LINGER, 1000)
    router.setsockopt(zmq.BACKLOG, 1024)


def _addresses(host: str) -> Iterator[tuple[str, int]]:
    if host in ("*", "0.0.0.0"):
        yield "*", socket.AF_INET
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    for family, *_, address in found:
        yield (f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])), family


def _why_not(bind: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {bind}: the port is in use, perhaps by another `gradserver serve`. "
            f"Stop that one, name another port, or use port 0 for any free one"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"cannot listen on {bind}: this machine has no such address"
    if error.errno == errno.EACCES:
        return f"cannot listen on {bind}: ports below 1024 need privileges; choose a higher one"
    return f"cannot listen on {bind}: {error.strerror}"
