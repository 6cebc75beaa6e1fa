"""A worker's side of the memory that it shares with a coordinator, or several data shards, of the same host.

Memory is handed over in *segments*, by the messages of `gradserver.protocol.transport.sharing`. An array of
`OWN_SEGMENT_BYTES` or more gets one of its own, and the others divide *arenas* among themselves. Only an array from
`SharedMemory.empty` is special: when it, and everything that views it, is garbage, its memory is shared no more.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.errors import BackendUnavailableError, GradServerError
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.messages import Place
from gradserver.protocol.transport.sharing import (
    COORDINATORS_PROOF,
    MAX_SEGMENTS,
    PAGE_BYTES,
    PROOF_BYTES,
    SEGMENT_HEADER_BYTES,
    WORKERS_PROOF,
    Lend,
    Lent,
    Offer,
    Taken,
)
from gradserver.worker.transport.local import connect_all, reason_of
from gradserver.worker.transport.segments import Block, Owner, Segment, address_of, allocate, view_of

log = logging.getLogger("gradserver")

OWN_SEGMENT_BYTES: Final = 256 * KIB
ARENA_BYTES: Final = 1 * MIB


class SharedMemory:
    """Memory that both this worker and its coordinator see, or all of several data shards.

    Args:
        address: address of the coordinator's local socket.
        token: shown there.
        timeout: seconds that the coordinator has for any answer.
        level: level of the log line if later no more memory can be shared.
        others: address and token of further data shards, which are to see the same memory if they can be reached.
        durable: True if it can be shared again with another coordinator. Then the coordinator may write only to memory
            that is asked for as ``writable``. That is not shared again: what one coordinator has sealed, another one
            can map for reading only.

    Attributes:
        reached: True for each that sees the memory, the first one included.

    Raises:
        BackendUnavailableError: nothing can be shared.
    """

    def __init__(
        self,
        address: str,
        token: str,
        timeout: float,
        level: int = logging.INFO,
        others: Sequence[tuple[str, str]] = (),
        durable: bool = False,
    ) -> None:
        self._timeout = timeout
        self._durable = durable
        self._level = level
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._freed: deque[Block] = deque()
        """Blocks with arrays that are garbage, until a thread that holds the lock frees them."""
        self._segments: dict[int, Segment] = {}
        self._index: tuple[list[int], list[Segment]] = ([], [])
        """Segments by their first addresses. Never changed but replaced, so that it is read without the lock."""
        self._arenas: list[Segment] = []
        self._blocks: set[Block] = set()
        self._offered = 0
        self._trouble: str | None = None
        """Reason why no more segments can be shared, once one could not."""
        self._peers, self.reached = connect_all([(address, token), *others], timeout)
        try:
            self._arenas.append(self._share(ARENA_BYTES, writable=not durable))
        except (GradServerError, OSError) as error:
            self._hang_up()
            raise BackendUnavailableError(reason_of(error)) from error

    def share_again(self, places: Sequence[tuple[str, str]]) -> None:
        """Share the memory that cannot be written to with others, by address and token as at first.

        Raises:
            BackendUnavailableError: nothing can be shared.
        """
        with self._lock:
            self._tidy()
            self._hang_up()
            self._trouble = "no coordinator can be reached"
            for segment in [segment for segment in self._segments.values() if segment.writable]:
                self._forget(segment)
            self._peers, self.reached = connect_all(places, self._timeout)
            try:
                for segment in self._segments.values():
                    self._offer(segment)
            except (GradServerError, OSError) as error:
                self._hang_up()
                raise BackendUnavailableError(reason_of(error)) from error
            self._trouble = None

    def _forget(self, segment: Segment) -> None:
        """Share a segment no more, without a word: the process that had it is gone. Arrays stay memory."""
        del self._segments[segment.number]
        self._index_again()
        self._blocks = {block for block in self._blocks if block.segment is not segment}
        if segment in self._arenas:
            self._arenas.remove(segment)

    def _hang_up(self) -> None:
        for peer in self._peers:
            peer.socket.close()

    # ── what the channel calls ────────────────────────────────────────────────────────────────────────

    def empty(self, nbytes: int, writable: bool = False) -> npt.NDArray[np.uint8] | None:
        """Return uninitialised shared memory; None if there is none, or none is needed.

        ``writable``: the coordinator may write to it. It may write to all, unless this is durable.
        """
        writable |= not self._durable
        if nbytes <= 0 or self._process != os.getpid():  # a forked child must not speak on its parent's socket
            return None
        with self._lock:
            self._tidy()
            try:
                block = (self._own if nbytes >= OWN_SEGMENT_BYTES else self._carve)(nbytes, writable)
            except (GradServerError, OSError) as error:
                self._complain(nbytes, error)
                block = None
            array = None if block is None else self._array(block, nbytes)
        self._tidy_soon()
        return array

    def place_of(self, data: npt.NDArray[np.uint8]) -> Place | None:
        """Return the place of ``data``, which is contiguous, in shared memory; None unless all of it is there."""
        starts, segments = self._index
        length = data.nbytes
        if not starts or not length:
            return None
        try:
            address = address_of(view_of(data))
        except (TypeError, ValueError):  # read-only; this way takes longer
            if not data.flags.c_contiguous:
                return None
            address = data.__array_interface__["data"][0]
        found = bisect_right(starts, address) - 1
        if found < 0:
            return None
        segment = segments[found]
        offset = address - segment.address
        if offset < SEGMENT_HEADER_BYTES or offset + length > segment.size or self._process != os.getpid():
            return None
        return Place(segment.number, offset)

    def close(self) -> None:
        """Share nothing any more. Arrays that exist stay memory."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._trouble = self._trouble or "it was closed"
            self._index = ([], [])
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._arenas.clear()
            self._blocks.clear()
            self._freed.clear()
            self._hang_up()

    @property
    def segments(self) -> int:
        """Number of segments that are shared now."""
        return len(self._segments)

    # ── blocks: what arrays lie in ────────────────────────────────────────────────────────────────────

    def _own(self, nbytes: int, writable: bool) -> Block | None:
        if self._is_full():
            return None
        segment = self._share(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, writable)
        return segment.carve(nbytes)

    def _carve(self, nbytes: int, writable: bool) -> Block | None:
        for arena in self._arenas:
            if arena.writable == writable and (block := arena.carve(nbytes)) is not None:
                return block
        if self._is_full():
            return None
        self._arenas.append(self._share(ARENA_BYTES, writable))
        return self._arenas[-1].carve(nbytes)

    def _is_full(self) -> bool:
        if self._trouble is not None:
            return True
        if len(self._segments) < MAX_SEGMENTS:
            return False
        raise BackendUnavailableError(f"{MAX_SEGMENTS} segments are shared already, which is the limit")

    def _array(self, block: Block, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the array over ``block``, which is free again when the array and all views of it are garbage.

        What views view is the owner: numpy does not look through it for the mapping, because its type is another.
        """
        owner = Owner.__new__(Owner, (nbytes,), np.uint8, block.segment.mapping, block.start)
        block.alive = weakref.ref(owner, lambda _: self._free(block))
        self._blocks.add(block)
        return owner.view(np.ndarray)

    def _free(self, block: Block) -> None:
        """Free a block. The garbage collector calls this in any thread, at any line, even where the lock is held."""
        if self._process == os.getpid():
            self._freed.append(block)
            self._tidy_soon()

    def _tidy_soon(self) -> None:
        """Tidy what was freed: now, or when the thread that holds the lock releases it."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            if block not in self._blocks:
                continue  # of before `close`
            self._blocks.discard(block)
            segment = block.segment
            segment.put_back(block)
            if segment.is_unused() and self._arenas != [segment]:  # the last arena stays: small arrays come and go
                if segment in self._arenas:
                    self._arenas.remove(segment)
                self._withdraw(segment)

    # ── segments: what the coordinator knows ──────────────────────────────────────────────────────────

    def _share(self, nbytes: int, writable: bool) -> Segment:
        """Return a new segment for ``nbytes`` bytes of data, which the coordinator has mapped, too."""
        number, self._offered = self._offered, self._offered + 1
        size = SEGMENT_HEADER_BYTES + nbytes
        segment = Segment(number, *allocate(size), size, writable)
        try:
            self._offer(segment)
        except BaseException:
            segment.close()
            raise
        if not self._durable or writable:  # it will not be offered again
            segment.close()
        self._segments[number] = segment
        self._index_again()
        return segment

    def _offer(self, segment: Segment) -> None:
        """Have the coordinator map ``segment``, and check that this is the same memory."""
        number, size, mapping, writable = segment.number, segment.size, segment.mapping, segment.writable
        descriptors = [segment.descriptor]
        try:
            mapping[WORKERS_PROOF] = proof = secrets.token_bytes(PROOF_BYTES)
            if len(self._peers) > 1 and writable:  # the first one that has it offered seals it for all others
                for peer in self._peers:
                    peer.ask(Lend(peer.token, number, size), Lent, descriptors, self._timeout)
            for peer in self._peers:
                answer = peer.ask(Offer(peer.token, number, size, writable), Taken, descriptors, self._timeout)
                same = answer.segment == number and answer.seen == proof
                if not same or (writable and mapping[COORDINATORS_PROOF] != answer.written):
                    raise BackendUnavailableError("the coordinator sees other memory there")
        except BaseException as error:
            self._trouble = self._trouble or reason_of(error)  # the messages are out of step
            raise

    def _withdraw(self, segment: Segment) -> None:
        """Share ``segment`` no more. Its address is forgotten before it is unmapped, and may be another's then."""
        del self._segments[segment.number]
        self._index_again()
        segment.close()
        for peer in self._peers:
            peer.release(segment.number)

    def _index_again(self) -> None:
        segments = sorted(self._segments.values(), key=lambda segment: segment.address)
        self._index = ([segment.address for segment in segments], segments)

    def _complain(self, nbytes: int, error: BaseException) -> None:
        if self._level:
            log.log(
                self._level,
                "from now on some memory (now %.1f MB) is not shared with the coordinator, but sent: %s",
                nbytes / 1e6,
                reason_of(error),
            )
        self._level = 0  # once
