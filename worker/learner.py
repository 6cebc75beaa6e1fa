"""The learner's side of a join: it gets a member's state (`gradserver.worker.donor`), and enters."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.errors import DeadlineError, MalformedMessageError, PeerError, UsageError
from gradserver.protocol.messages import Enter, Ready, Transfer
from gradserver.worker.donor import HEAD, IN_FLIGHT, PART_BYTES, TAIL
from gradserver.worker.handle import Handle
from gradserver.worker.member.learner import Arrival, Stage
from gradserver.worker.session import Session
from gradserver.worker.tree import MAX_MANIFEST_BYTES, Tree, unpack

log = logging.getLogger("gradserver")


class _Part(NamedTuple):
    """A part under way into ``memory``."""

    handle: Handle
    memory: Bytes


def enter(session: Session, install: Callable[[Tree], object], waits: bool) -> int:
    """Get the state from a member, and enter. Return the first round that this worker contributes to."""
    if session.stage is not Stage.JOINING:
        raise UsageError(f"this worker {session.stage.value}: only a worker that joins a running group can enter it")
    if session.plan is None:
        raise UsageError("before it enters a group a worker agrees on the plan: wrap the model, or call agree(plan)")
    session.tell(session.learner.ask(waits))
    seen: Transfer | None = None
    while True:
        transfer, number = session.next_instruction(seen)
        if number is not None:
            return number
        seen, began = transfer, time.monotonic()
        try:
            tree, nbytes = receive(session, transfer)
        except (PeerError, DeadlineError) as error:
            log.info("the state of member id %d did not come (%s): another one is asked for it", transfer.donor, error)
            session.tell(Enter(transfer.number))
            continue
        arrival = Arrival(_name_of(session, transfer.donor), nbytes, time.monotonic() - began)
        log.info("the state of %r came: %.1f MB in %.2f s", arrival.donor, nbytes / 1e6, arrival.seconds)
        session.learner.arrived(arrival)
        if not transfer.waits and session.observe(transfer, partial(install, tree)):
            return session.round
        if transfer.waits:
            install(tree)
            if session.learner.transfer is transfer:
                session.tell(Ready(transfer.number))


def _name_of(session: Session, member_id: int) -> str:
    here = session.membership
    return here.names[here.member_ids.index(member_id)] if member_id in here.member_ids else f"member {member_id}"


def receive(session: Session, transfer: Transfer) -> tuple[Tree, int]:
    """Return the state that comes in ``transfer``, in memory of its own, and its size.

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

    def __init__(self, session: Session, transfer: Transfer) -> None:
        self._session = session
        self._transfer = transfer
        self._index = 0
        self._unasked = 0
        """Bytes for which no part was requested yet."""
        self._under_way: deque[_Part] = deque()
        self._here: Bytes = np.empty(0, np.uint8)
        self._left = self._at = self._digest = 0

    def single(self, nbytes: int) -> bytes:
        """Return a part by itself."""
        self._ask(nbytes)
        part = self._under_way.popleft()
        part.handle.wait()
        return part.memory.tobytes()

    def expect(self, nbytes: int) -> None:
        """Expect ``nbytes`` more bytes, in parts."""
        self._left = self._unasked = nbytes

    def take(self, nbytes: int) -> Bytes:
        """Return the next ``nbytes``."""
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
        """Compare the whole with its digest."""
        if self._left:
            raise MalformedMessageError(f"a state of which {self._left} bytes are left when it is whole")
        (expected,) = TAIL.unpack(self.single(TAIL.size))
        if expected != self._digest % MODULUS:
            raise MalformedMessageError("a state with another digest than that with which it was sent")

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
