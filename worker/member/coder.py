"""The encoding of what a lossy exchange contributes, slice by slice, and the decoding of what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import numpy as np

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.codecs import Feedback, Scratch, is_finite, seed_of
from gradserver.protocol.exchange import ExchangeKey, Layout
from gradserver.worker.member.progress import Progress


class Workspace:
    """Memory that the coders of a process reuse, in all threads. ``scratch`` gives what no other thread uses."""

    def __init__(self, scratch: Callable[[], Scratch]) -> None:
        self.scratch = scratch
        self._free: deque[Bytes] = deque(maxlen=64)
        """Payloads that were answered: no more than were in flight at once, and so bounded by credit as well."""
        self.give_back = self._free.append

    def room(self, nbytes: int) -> Bytes:
        """Give memory for a payload, if possible an earlier one's: of new memory every 4 KiB cost a page fault."""
        try:
            room = self._free.pop()
        except IndexError:
            return np.empty(nbytes, np.uint8)
        return room if room.size == nbytes else np.empty(nbytes, np.uint8)  # others are of slices at an end


@lru_cache(maxsize=256)
def offsets_of(layout: Layout) -> tuple[int, ...]:
    """Return where the payload of each slice begins if they stand one behind the other; and where the last one ends."""
    return tuple(accumulate((layout.nbytes(index) for index in range(layout.count)), initial=0))


class Encoded:
    """The stand-in for a coder where a device has encoded, and will decode: it passes payloads on.

    Args:
        layout: how the exchange is cut, with its codec.
        memory: payloads that are given, slice behind slice, and room for as many results.
        key: the exchange.
    """

    __slots__ = ("_key", "_layout", "_memory", "_offsets")

    def __init__(self, layout: Layout, memory: Bytes, key: ExchangeKey) -> None:
        self._layout, self._memory, self._key = layout, memory, key
        self._offsets = offsets_of(layout)

    def encode(self, index: int) -> Buffer:
        """Return the contribution to slice ``index``. It stays the same until the next round."""
        return self._memory[self._offsets[index] : self._offsets[index + 1]].data

    def given(self, index: int) -> Bytes:
        """Return the contribution to slice ``index`` as its receiver decodes it."""
        start, stop = self._layout.span(index)
        values, seed = np.empty(stop - start, np.float32), seed_of(self._key.number, self._key.part, start)
        self._layout.codec.decode(self.encode(index), stop - start, values, seed)
        return values.view(np.uint8)

    def decode(self, index: int, payload: Buffer | None) -> None:
        """Keep the result of slice ``index``. None stands for zeros: so do zeros, in the codecs of devices."""
        whole = self._offsets[-1]
        room = self._memory[whole + self._offsets[index] : whole + self._offsets[index + 1]]
        if payload is None:
            room[:] = 0
        else:
            room[:] = self._layout.codec.data_of(payload, self._layout.span(index)[1] - self._layout.span(index)[0])


class Coder:
    """The coder of one exchange.

    Args:
        workspace: gives memory.
        key: the exchange.
        layout: how it is cut, with its codec.
        source: float32, as bytes: what is contributed; None for zeros.
        destination: float32, as bytes: where results go. May be ``source``.
        feedback: what earlier encodings of this bucket lost, to be made up for; None without feedback.
        sifts: whether a slice that is not finite does not count; then its residual stays.
    """

    __slots__ = ("_destination", "_feedback", "_key", "_layout", "_rooms", "_sifts", "_source", "_workspace")

    def __init__(
        self,
        workspace: Workspace,
        key: ExchangeKey,
        layout: Layout,
        source: Bytes | None,
        destination: Bytes,
        feedback: Feedback | None,
        sifts: bool = False,
    ) -> None:
        self._workspace = workspace
        self._key = key
        self._layout = layout
        self._source = None if source is None else source.view(np.float32)
        self._destination = destination.view(np.float32)
        self._feedback = feedback
        self._sifts = sifts
        self._rooms: dict[int, Bytes] = {}
        """Contributions without a result."""

    def encode(self, index: int) -> Buffer:
        """Return the contribution to slice ``index``, encoded once even if sent again: what is lost is owed once."""
        if (sent := self._rooms.get(index)) is not None:
            return sent.data
        assert self._source is not None
        start, stop = self._layout.span(index)
        values = self._source[start:stop]
        codec, seed = self._layout.codec, seed_of(self._key.number, self._key.part, start)
        room = self._rooms[index] = self._workspace.room(codec.nbytes(stop - start))
        if self._feedback is None or (self._sifts and not is_finite(values)):
            return codec.encode(values, room, seed, self._workspace.scratch())
        return self._feedback.encode(codec, start, stop, values, room, seed, self._workspace.scratch())

    def given(self, index: int) -> Bytes:
        """Return the contribution to slice ``index`` as its receiver decodes it; before encoding, as it is."""
        assert self._source is not None
        start, stop = self._layout.span(index)
        if (room := self._rooms.get(index)) is None:
            return self._source[start:stop].copy().view(np.uint8)
        values, seed = np.empty(stop - start, np.float32), seed_of(self._key.number, self._key.part, start)
        self._layout.codec.decode(room.data, stop - start, values, seed, self._workspace.scratch())
        return values.view(np.uint8)

    def decode(self, index: int, payload: Buffer | None) -> None:
        """Put the result of slice ``index`` where it belongs; None stands for zeros."""
        start, stop = self._layout.span(index)
        values = self._destination[start:stop]
        if (room := self._rooms.pop(index, None)) is not None:  # a contribution with an answer has been read
            self._workspace.give_back(room)
        if payload is None:
            values[:] = 0
        else:
            seed = seed_of(self._key.number, self._key.part, start)
            self._layout.codec.decode(payload, stop - start, values, seed, self._workspace.scratch())


def coder_of(
    workspace: Workspace,
    key: ExchangeKey,
    layout: Layout,
    source: Bytes | None,
    destination: Bytes,
    feedback: Feedback | None,
    sifts: bool,
    progress: Progress | None,
) -> Coder | Encoded:
    """Return the coder of one exchange, or its stand-in."""
    if progress is not None and progress.encoded:
        return Encoded(layout, destination, key)
    return Coder(workspace, key, layout, source, destination, feedback, sifts)
