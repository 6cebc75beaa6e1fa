"""A member that sends its state to learners: a copy of it, in parts, while it goes on training.

The state of a transfer is that at one boundary between two rounds. `gradserver.worker.member.donor` says which are
asked for. `StateSender.give` is called there: by `gradserver.Job` when it has stepped, and at the latest before
anything of the next round begins.

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
from typing import Final

import numpy as np

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Transfer
from gradserver.worker.handle import Handle
from gradserver.worker.traffic import Traffic
from gradserver.worker.tree import Packed, Tree, pack

log = logging.getLogger("gradserver")

HEAD: Final = struct.Struct("<QQ")
TAIL: Final = struct.Struct("<Q")
PART_BYTES: Final = 1 * MIB
IN_FLIGHT: Final = 2
"""Parts that are under way at most: gradients wait behind no more."""


class StateSender:
    """Copies and sends the states that one member has to send."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._donor = traffic.member.donor
        self._snapshot: Callable[[], Tree] | None = None

    def serve(self, snapshot: Callable[[], Tree]) -> None:
        """Declare that this member can send what ``snapshot`` returns."""
        self._snapshot = snapshot
        with self._traffic.mutex:
            said = self._donor.serve()
        if said is not None:
            self._traffic.tell(said)

    def give(self) -> None:
        """Copy the state at the present boundary, if it is asked for, and begin to send it."""
        with self._traffic.mutex:
            transfers, refused = self._donor.take()
        for failed in refused:
            self._traffic.tell(failed)
        if transfers:
            self._give(transfers)

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
                with self._traffic.mutex:
                    failed = self._donor.cannot(transfer, reason)
                self._traffic.tell(failed)
                continue
            threading.Thread(target=self._send, args=(transfer, packed), name="gradserver-donor", daemon=True).start()

    def _send(self, transfer: Transfer, packed: Packed) -> None:
        began = time.monotonic()
        under_way: deque[Handle] = deque()
        try:
            for index, part in enumerate(parts(packed)):
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().wait()
                under_way.append(self._traffic.state_part(transfer, index, part))
            for handle in under_way:
                handle.wait()
        except (GradServerError, ConnectionError) as error:
            log.info("the state did not arrive at a learner: %s", error)
        else:
            with self._traffic.mutex:
                self._donor.sent(transfer)
            log.info("the state was sent to a learner: %d bytes in %.1f s", packed.nbytes, time.monotonic() - began)


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
