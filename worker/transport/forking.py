"""Forked children drop their parent's connections to a coordinator.

Processes of a `DataLoader` are forked, and so hold every connection of the worker's open. If the worker is killed while
they live, the system closes nothing, and the coordinator would notice only when heartbeats stop. Therefore a child
closes them as soon as it exists. The parent's own descriptors stay open.

Nor does a child inherit the membership: each call on its parent's worker raises UsageError at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections import Counter
from typing import Protocol

from gradserver.protocol.transport.sharing import ADDRESS_PREFIX
from gradserver.protocol.url import parse_target


class Owned(Protocol):
    """An object that belongs to one process: a worker's session."""

    def disown(self, owner: int) -> None:
        """Note that this process is a forked child, and the object its parent's, ``owner``."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()
"""Memberships of this process."""
_guarded: Counter[tuple[str, int]] = Counter()
"""Number of connections of this process by address."""
_LOCAL = b"\0" + ADDRESS_PREFIX.encode()
_LISTS = ("/proc/self/fd", "/dev/fd")


def own(membership: Owned) -> None:
    """Keep children that this process forks from now on from using ``membership``."""
    _register()
    _owned.add(membership)


def guard(address: str) -> None:
    """Have children that this process forks from now on drop connections to ``address``, and to local sockets."""
    _register()
    _guarded[_target(address)] += 1


def unguard(address: str) -> None:
    """Note that a connection to ``address`` is closed."""
    target = _target(address)
    _guarded[target] -= 1
    if _guarded[target] <= 0:
        del _guarded[target]


_registered = False


def _register() -> None:
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_become_a_stranger)
    _registered = True


def _become_a_stranger() -> None:
    for membership in list(_owned):
        membership.disown(os.getppid())
    _let_go()


def _target(address: str) -> tuple[str, int]:
    host, port = parse_target(address)
    return host, port


def _let_go() -> None:
    """Replace, in a child, each connection to a coordinator by nothing.

    The descriptors stay taken, since libraries that know their numbers may close them once more.
    """
    if not _guarded:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in _descriptors():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_guarded(number):
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _descriptors() -> list[int]:
    for path in _LISTS:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(path)]
    return []


def _is_guarded(number: int) -> bool:
    connection = socket.socket(fileno=number)
    try:
        peer = connection.getpeername()
    finally:
        connection.detach()
    if connection.family == socket.AF_UNIX:
        return isinstance(peer, bytes) and peer.startswith(_LOCAL)
    return tuple(peer[:2]) in _guarded
