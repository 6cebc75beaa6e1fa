"""How a worker that joins gets the state of a member: `worker.donor` says what comes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protocol.digest import MODULUS, digest
from protocol.errors import MalformedMessageError
from protocol.messages import Transfer
from worker.donor import HEAD, IN_FLIGHT, PART_BYTES, TAIL
from worker.handle import Handle
from worker.tensors import Bytes
from worker.tree import MAX_MANIFEST_BYTES, Tree, unpack

if TYPE_CHECKING:
    from worker.traffic import Traffic


class _Part(NamedTuple):
    """One that is under way into ``memory``."""

    handle: Handle
    memory: Bytes


class Arrival(NamedTuple):
    """How a worker that joined got the state.

    Attributes:
        donor: the name of the member that sent it.
        nbytes: how large it was.
        seconds: how long that took.
    """

    donor: str
    nbytes: int
    seconds: float


def receive(session: Traffic, transfer: Transfer) -> tuple[Tree, int]:
    """The state that comes in ``transfer``, in memory of its own, and its size.

    Raises:
        MalformedMessageError: what came is no state.
        GradServerError: it did not come.
    """
    incoming = _Incoming(session, transfer)
    manifest_bytes, buffer_bytes = HEAD.unpack(incoming.single(HEAD.size))
    if manifest_bytes > MAX_MANIFEST_BYTES:
        raise MalformedMessageError(f"a state with a manifest of {manifest_bytes:,} bytes")
    incoming.expect(manifest_bytes + buffer_bytes)
    tree = unpack(incoming.take(manifest_bytes).data, lambda nbytes: incoming.take(nbytes).data)
    incoming.end()
    return tree, manifest_bytes + buffer_bytes


class _Incoming:
    """The bytes of a state, one after the other."""

    def __init__(self, session: Traffic, transfer: Transfer) -> None:
        self._session = session
        self._transfer = transfer
        self._index = 0
        self._unasked = 0
        """Bytes that no part was asked for yet."""
        self._under_way: deque[_Part] = deque()
        self._here: Bytes = np.empty(0, np.uint8)
        self._left = self._at = self._digest = 0

    def single(self, nbytes: int) -> bytes:
        """A part by itself."""
        self._ask(nbytes)
        part = self._under_way.popleft()
        part.handle.wait()
        return part.memory.tobytes()

    def expect(self, nbytes: int) -> None:
        """So many bytes follow, in parts."""
        self._left = self._unasked = nbytes

    def take(self, nbytes: int) -> Bytes:
        """The next ``nbytes``."""
        if nbytes > self._left:
            raise MalformedMessageError(f"a state of which {self._left} bytes are left, and {nbytes} should be")
        self._left -= nbytes
        memory = np.empty(nbytes, np.uint8)
        got = 0
        while got < nbytes:
            if not self._here.size:
                self._next()
            piece = self._here[: nbytes - got]
            memory[got : got + piece.size] = piece
            self._here = self._here[piece.size :]
            got += piece.size
        return memory

    def end(self) -> None:
        """All of it has come: compare it with its digest."""
        if self._left:
            raise MalformedMessageError(f"a state of which {self._left} bytes are left when it is whole")
        (expected,) = TAIL.unpack(self.single(TAIL.size))
        if expected != self._digest % MODULUS:
            raise MalformedMessageError("a state that has not the digest with which it was sent")

    def _next(self) -> None:
        while self._unasked and len(self._under_way) < IN_FLIGHT:
            size = min(self._unasked, PART_BYTES)
            self._unasked -= size
            self._ask(size)
        part = self._under_way.popleft()
        part.handle.wait()
        self._here = part.memory
        self._digest += digest(part.memory, self._at)
        self._at += part.memory.size

    def _ask(self, nbytes: int) -> None:
        memory = np.empty(nbytes, np.uint8)
        self._under_way.append(_Part(self._session.state_part(self._transfer, self._index, memory), memory))
        self._index += 1
