"""The server's ends of branches: connections of sub-groups, which a peer's own connection carries.

`gradserver.protocol.transport.branches` has the table of what happens to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import LimitExceededError
from gradserver.protocol.limits import MAX_SUBGROUPS
from gradserver.protocol.messages import Attend, Failure, Leave, Message, Scope, Split
from gradserver.protocol.messages.recovery import Resume
from gradserver.runtime import Runtime
from gradserver.transport.peers import Branch, Peer

PARTED: Final = "it was put out of the group that the sub-group is of"
"""Reason for the end of branches, if there is no other."""


class Branches:
    """Branches of all peers. To ``runtime`` each is a connection of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def hear(self, peer: Peer, number: int, message: Message, payloads: Sequence[Buffer]) -> None:
        """Pass on a message of a branch, or open one for a message that begins a membership."""
        branch = peer.branches.get(number)
        if branch is not None:
            self._runtime.receive(branch.connection, message, payloads)
            if type(message) is Leave:
                self._end(branch, "it left")
        elif isinstance(message, Split | Attend | Resume):
            self._open(peer, number, message)

    def _open(self, peer: Peer, number: int, message: Split | Attend | Resume) -> None:
        branch = peer.grow(number)
        if branch is None:
            error = LimitExceededError(f"more than {MAX_SUBGROUPS} sub-groups on one connection: close some")
            peer.send(Failure.of(error, Scope.CONNECTION), (), number)
            return
        branch.begin(self._runtime.connect(branch))
        if isinstance(message, Split):
            self._runtime.branch(branch.connection, peer.connection, message)
        else:
            self._runtime.receive(branch.connection, message)

    def end(self, peer: Peer, reason: str, ended: bool = False) -> None:
        """Lose all branches of a peer, for ``reason``. ``ended``: its process surely has."""
        for branch in list(peer.branches.values()):
            self._end(branch, reason, ended)

    def _end(self, branch: Branch, reason: str, ended: bool = False) -> None:
        branch.close()
        self._runtime.lost(branch.connection, reason, ended)
