"""The memory that a worker shares, as the server holds it: checked, mapped, and found by place.

A worker hands over memory as a file descriptor. `.local` takes it in, and `gradserver.protocol.transport.sharing` has
the messages. The memory has no name in any file system: it is gone with the last process that maps it, however that one
ended.

The worker may be hostile. All that could become dangerous later is made impossible before the first byte of a segment
is read:

- It cannot shrink or grow (the worker's seals), so no access is ever beyond its end: that would be a SIGBUS.
- Every page of it exists, and can be taken away no more (our seal). A missing page would be allocated when *we* touch
  it, and so a stranger could make the coordinator run out of memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import sys
from typing import Final

from gradserver.protocol.errors import LimitExceededError, MalformedMessageError, UnexpectedMessageError
from gradserver.protocol.messages import Place
from gradserver.protocol.transport.sharing import (
    COORDINATORS_PROOF,
    F_SEAL_FUTURE_WRITE,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    PAGE_BYTES,
    PROOF_BYTES,
    SEGMENT_HEADER_BYTES,
    WORKERS_PROOF,
    Lend,
    Lent,
    Offer,
    Release,
    Taken,
)

_NEEDED_SEALS: Final = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW


class Segments:
    """The memory that one worker shares."""

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        self._lent: _Lent | None = None

    def __len__(self) -> int:
        return len(self._mapped)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(map(len, self._mapped.values()))

    def view(self, place: Place) -> memoryview | None:
        """Return the memory from ``place`` to the end of its segment, read-only if that is; None if there is none."""
        segment = self._mapped.get(place.segment)
        if segment is None or not SEGMENT_HEADER_BYTES <= place.offset < len(segment):
            return None
        return segment[place.offset :]

    def lend(self, lend: Lend, descriptors: list[int]) -> Lent:
        """Map memory, and do not touch it: others have yet to map it before it is offered and sealed.

        Raises:
            MalformedMessageError, UnexpectedMessageError, LimitExceededError: it may not be lent.
            OSError: the system does not allow it.
        """
        self._check(lend, descriptors)
        self._lent = _Lent(lend.segment, _map(descriptors[0], lend.size), os.fstat(descriptors[0]))
        return Lent(lend.segment)

    def take(self, offer: Offer, descriptors: list[int]) -> Taken:
        """Map memory, make it safe, and prove that it is the same. Errors as of `lend`."""
        self._check(offer, descriptors)
        lent, self._lent = self._lent, None
        if not offer.writable:
            reading = _secure(descriptors[0], offer.size, _map(descriptors[0], offer.size, mmap.PROT_READ))
            self._mapped[offer.segment] = memoryview(reading)
            return Taken(offer.segment, bytes(reading[WORKERS_PROOF]), bytes(PROOF_BYTES))
        if lent is not None and lent.is_of(offer, descriptors[0]):
            mapping = _secure(descriptors[0], offer.size, lent.mapping)
        else:
            mapping = _secure(descriptors[0], offer.size, _map(descriptors[0], offer.size))
        seen = bytes(mapping[WORKERS_PROOF])
        written = secrets.token_bytes(PROOF_BYTES)
        mapping[COORDINATORS_PROOF] = written
        self._mapped[offer.segment] = memoryview(mapping)
        return Taken(offer.segment, seen, written)

    def _check(self, offer: Offer | Lend, descriptors: list[int]) -> None:
        """Raise if the memory may not be taken, as far as that shows before a look at it."""
        if len(descriptors) != 1:
            raise MalformedMessageError(f"memory goes with one descriptor, got {len(descriptors) or 'none'}")
        if offer.segment in self._mapped:
            raise UnexpectedMessageError(f"segment {offer.segment} a second time")
        if len(self._mapped) >= MAX_SEGMENTS:
            raise LimitExceededError(f"more than {MAX_SEGMENTS} segments of memory")

    def release(self, release: Release) -> None:
        """Unmap a segment. UnexpectedMessageError if there is none of that number."""
        if self._mapped.pop(release.segment, None) is None:
            raise UnexpectedMessageError(f"segment {release.segment} was released, and never given")

    def clear(self) -> None:
        """Unmap all segments. Memory that is being read or written stays until that is done."""
        self._mapped.clear()
        self._lent = None


class _Lent:
    """Memory that is mapped and not touched, because others have yet to map it before it is sealed."""

    def __init__(self, segment: int, mapping: mmap.mmap, facts: os.stat_result) -> None:
        self._which = segment, len(mapping), facts.st_dev, facts.st_ino
        self.mapping = mapping

    def is_of(self, offer: Offer, descriptor: int) -> bool:
        """Return True if ``offer`` is of this very memory."""
        facts = os.fstat(descriptor)
        return self._which == (offer.segment, offer.size, facts.st_dev, facts.st_ino)


def _map(descriptor: int, size: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map memory of ``size`` bytes, which can shrink or grow no more. It is not safe yet to touch it.

    Raises:
        MalformedMessageError: it is no such memory.
        OSError: the system does not allow it.
    """
    if not 2 * PAGE_BYTES <= size <= MAX_SEGMENT_BYTES or size % PAGE_BYTES:
        raise MalformedMessageError(f"a segment of {size} bytes: that is not a number of pages within limits")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise MalformedMessageError("a descriptor that is not of memory which can be sealed") from None
    if seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise MalformedMessageError("memory that is not sealed against shrinking and growing")
    _check_size(descriptor, size)
    return _mapping(descriptor, size, access)


def _secure(descriptor: int, size: int, mapping: mmap.mmap) -> mmap.mmap:
    """Return ``mapping`` of a descriptor's memory, sealed so that it can become dangerous no more.

    Raises:
        MalformedMessageError: it could.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE:  # another shard has done it
        _check_size(descriptor, size)
        return mapping
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:  # an old kernel, or the worker has forbidden it
        raise MalformedMessageError(
            f"memory cannot be sealed against holes ({error.strerror}); Linux 5.1 can"
        ) from None
    _check_size(descriptor, size)  # from now on what is there stays there
    return mapping


def _check_size(descriptor: int, size: int) -> None:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
        raise MalformedMessageError(f"memory of {facts.st_size} bytes was announced as {size}")
    if facts.st_blocks * 512 < size:
        raise MalformedMessageError("memory with holes: the process that shares it has to allocate it")


def _mapping(descriptor: int, size: int, access: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, prot=access, trackfd=False)  # else it keeps a descriptor of its own
    return mmap.mmap(descriptor, size, prot=access)
