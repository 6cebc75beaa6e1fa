"""A member that sends its state to learners: a copy of it, in parts, while it goes on training.

The state of a transfer is that at one boundary between two rounds. `Donor.give` is called there: by `gradserver.Job`
when it has stepped, and at the latest before anything of the next round begins.

    what is sent    bytes
    ──────────────  ───────────────────────────────────────────────────────────────────────
    the head        lengths of manifest and buffers (`gradserver.worker.tree`), little-endian, 8 each
    parts           of manifest and buffers, one behind the other: `PART_BYTES` each
    the digest      of the parts (`gradserver.protocol.digest`), 8
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.errors import GradServerError, WorkerLostError
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Message, RoundDone, Serve, StateFailed, Transfer
from gradserver.worker.handle import Handle
from gradserver.worker.tree import Packed, Tree, pack

log = logging.getLogger("gradserver")

HEAD: Final = struct.Struct("<QQ")
TAIL: Final = struct.Struct("<Q")
PART_BYTES: Final = 1 * MIB
IN_FLIGHT: Final = 2
"""Parts that are under way at most: gradients wait behind no more."""
_MAX_REASON: Final = 500


class Sender(Protocol):
    """The sending side of a donor: a member's session."""

    @property
    def round(self) -> int:
        """The round that is open or next."""

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator."""

    def state_part(self, transfer: Transfer, index: int, memory: Bytes) -> Handle:
        """Send part ``index`` of a state."""


class Donor:
    """The states that one member has to send.

    Attributes:
        due: requests that it has not begun: the round after which, and the transfer.
    """

    def __init__(self, session: Sender) -> None:
        self.due: list[tuple[int, Transfer]] = []
        self._session = session
        self._snapshot: Callable[[], Tree] | None = None
        self._under_way: set[int] = set()
        """Numbers of transfers with parts that are being sent."""

    def serve(self, snapshot: Callable[[], Tree]) -> None:
        """Declare that this member can send what ``snapshot`` returns."""
        first, self._snapshot = self._snapshot is None, snapshot
        if first:
            self._session.tell(Serve())

    @property
    def serves(self) -> bool:
        """True if it has declared so."""
        return self._snapshot is not None

    def asked(self, done: RoundDone, seat: int) -> None:
        """Take the coordinator's request for a state at a boundary."""
        self.due += [(done.round, transfer) for transfer in done.transfers if transfer.donor == seat]

    def give(self) -> None:
        """Copy the state at the present boundary, if it is asked for, and begin to send it."""
        here = self._session.round - 1
        asked = [one for one in self.due if one[0] <= here]
        self.due = [one for one in self.due if one[0] > here]
        for number, transfer in asked:
            if number != here:
                self._fail(transfer, f"its state is that after round {here}, and that after round {number} is wanted")
        transfers = [transfer for number, transfer in asked if number == here]
        if transfers:
            self._give(transfers)

    def forget(self) -> None:
        """Drop all transfers: their receivers begin anew. With the session's lock held."""
        self.due.clear()
        self._under_way.clear()

    def check(self, transfer: Transfer) -> None:
        """Raise WorkerLostError if that state has no receiver any more. With the session's lock held."""
        if transfer.number not in self._under_way:
            raise nobody_takes_it()

    def _give(self, transfers: list[Transfer]) -> None:
        """Send one copy to all learners that wait."""
        reason, packed = "it has never said what its state is", None
        if self._snapshot is not None:
            try:
                packed = pack(self._snapshot(), copy=True)
            except Exception as error:
                log.warning("this worker's state cannot be sent to learners: %s", error)
                reason = f"{type(error).__name__}: {error}"
        for transfer in transfers:
            if packed is None:
                self._fail(transfer, reason)
                continue
            self._under_way.add(transfer.number)
            threading.Thread(target=self._send, args=(transfer, packed), name="gradserver-donor", daemon=True).start()

    def _fail(self, transfer: Transfer, reason: str) -> None:
        self._session.tell(StateFailed(transfer.number, reason[:_MAX_REASON]))

    def _send(self, transfer: Transfer, packed: Packed) -> None:
        began = time.monotonic()
        under_way: deque[Handle] = deque()
        try:
            for index, part in enumerate(parts(packed)):
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().wait()
                under_way.append(self._session.state_part(transfer, index, part))
            for handle in under_way:
                handle.wait()
        except (GradServerError, ConnectionError) as error:
            log.info("the state did not arrive at a learner: %s", error)
        else:
            self._under_way.discard(transfer.number)
            log.info("the state was sent to a learner: %d bytes in %.1f s", packed.nbytes, time.monotonic() - began)


def nobody_takes_it() -> WorkerLostError:
    """Return the error that ends the sending of a state in a recovery."""
    return WorkerLostError("the learner that this worker sent its state to has to join again")


def parts(packed: Packed) -> Iterator[Bytes]:
    """Yield all that is sent, in order."""
    head = HEAD.pack(len(packed.manifest), packed.nbytes - len(packed.manifest))
    yield np.frombuffer(head, np.uint8)
    total = at = 0
    for part in _windows([np.frombuffer(packed.manifest, np.uint8), *packed.buffers]):
        total += digest(part, at)
        at += part.size
        yield part
    yield np.frombuffer(TAIL.pack(total % MODULUS), np.uint8)


def _windows(buffers: list[Bytes]) -> Iterator[Bytes]:
    """Yield all bytes, in pieces of `PART_BYTES`: where they lie in one buffer, without a copy."""
    begun: list[Bytes] = []
    room = PART_BYTES
    for buffer in buffers:
        at = 0
        while at < buffer.size:
            piece = buffer[at : at + room]
            at += piece.size
            room -= piece.size
            begun.append(piece)
            if not room:
                yield _joined(begun)
                begun, room = [], PART_BYTES
    if begun:
        yield _joined(begun)


def _joined(pieces: list[Bytes]) -> Bytes:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
