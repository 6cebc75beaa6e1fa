"""One exchange that a worker has begun, and what of it was sent and answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import BUCKET, IN_PLACE, ExchangeKey, Kind, Layout, Op, Operation, Pool
from gradserver.protocol.frames import frames
from gradserver.protocol.limits import MAX_SLICES
from gradserver.protocol.messages import HERE, Place, Push, Result
from gradserver.worker.member.carryover import Contribution
from gradserver.worker.member.coder import Coder, Encoded
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.member.progress import Progress
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.siblings import Siblings
from gradserver.worker.member.slots import SLOT_BYTES, SMALLEST_BYTES, Memory, Slot, Slots
from gradserver.worker.member.waiter import Waiter

NO_SLICES: Final[Mapping[int, float]] = MappingProxyType({})


class Staged(NamedTuple):
    """Slices that pass through a slot of shared memory."""

    slot: Slot
    start: int
    stop: int


class Exchange:
    """One exchange that this worker takes part in and that is not done; or the part of it that one shard has.

    Attributes:
        shard: the data shard that has this part.
        start: the first slice of that shard.
        stop: the one behind its last.
        siblings: what it has in common with the parts of other shards; None if there are none.
        place: where in shared memory contribution and result lie; None if they travel.
        sent: slices that were pushed.
        epoch: the membership on which it depends; 0 if it depends on none.
        heavier: slices that weigh more than the others, because what did not count before was added to them.
        answered: slices with their result here.
        settled: slices that are not sent: they had their result before all was begun again.
        first: the first slice that is sent.

    Slices that follow one another travel together in messages of up to ``room`` bytes. All members divide an exchange
    at the same places, so that what is complete has the size of a message, too.
    """

    __slots__ = (
        "_channel",
        "_coder",
        "_destination",
        "_memory",
        "_progress",
        "_ready",
        "_region",
        "_regions",
        "_slots",
        "_source",
        "_staged",
        "_through",
        "_together",
        "answered",
        "dropped",
        "epoch",
        "first",
        "handle",
        "heavier",
        "held_back",
        "key",
        "layout",
        "operation",
        "place",
        "pool",
        "sent",
        "settled",
        "shard",
        "siblings",
        "start",
        "stop",
        "weight",
    )

    def __init__(
        self,
        key: ExchangeKey,
        pool: Pool,
        operation: Operation,
        layout: Layout,
        source: Source | None,
        destination: Destination | None,
        weight: float,
        handle: Waiter,
        channel: Memory,
        slots: Slots,
        coder: Coder | Encoded | None = None,
        epoch: int = 0,
        regions: Regions | None = None,
        heavier: Mapping[int, float] = NO_SLICES,
        progress: Progress | None = None,
        shard: int = 0,
        interval: tuple[int, int] | None = None,
        siblings: Siblings[Exchange] | None = None,
        room: int = 0,
    ) -> None:
        self.key = key
        self.pool = pool
        self.operation = operation
        self.layout = layout
        self._source = source
        self._destination = destination
        self.weight = weight
        self.heavier = heavier
        self.handle = handle
        self.shard = shard
        self.start, self.stop = (0, layout.count) if interval is None else interval
        self.siblings = siblings
        self.dropped = False
        """True after a failure at another shard: what still comes of this part is ignored."""
        self.held_back = False
        """Slices that were not sent would not count."""
        self.sent = self.first = self._ready = self.start
        self._progress = progress
        self.epoch = epoch
        self.answered: set[int] = set()
        self.settled: frozenset[int] = frozenset()
        memory = source if destination is None else destination
        in_place = operation.kind in IN_PLACE and coder is None
        self._memory = memory if in_place and isinstance(memory, np.ndarray) else None
        self._coder = coder
        self._channel = channel
        self._slots, self._regions = slots, regions
        self._staged: dict[int, Staged] = {}
        self._find_place()
        self._together = 1 if layout.count == 1 or regions is not None else self._fitting(room)

    def _find_place(self) -> None:
        """Find the place in shared memory in which contribution and result lie, or through which they pass."""
        self.place, self._region = None, None
        if self._memory is not None:
            self.place = self._channel.place_of(self._memory, self.shard)
        if self.place is not None and self._regions is not None:
            self._region = self._regions.take(self.key, self._memory.size) if self._memory is not None else None
            self.place = None if self._region is None else self.place
        long = self._coder is None and self.layout.run_bytes(self.start, self.start + 1) >= SMALLEST_BYTES
        self._through = self._slots if long and self.place is None else None

    def _fitting(self, room: int) -> int:
        """Return the number of slices that travel in one message of up to ``room`` bytes."""
        is_plain = self._source is None or isinstance(self._source, np.ndarray)
        travels = self.place is None and self._coder is None and is_plain
        if not (travels and self.operation.kind in IN_PLACE):
            return 1
        return min(max(room // self.layout.run_bytes(self.start, self.start + 1), 1), MAX_SLICES)

    def push(self, alone: bool = False) -> tuple[Push, Sequence[Buffer]] | None:
        """The next message: slices that travel together, or as many as lie in shared memory. None: not now.

        Of those that travel it has one, if that is to go ``alone``.
        """
        if self.is_filling:
            return None
        begins = self.sent == self.first
        message = self._next(alone)
        if self.settled:
            self._pass_settled()
        if message is None or not (self.epoch and begins):
            return message
        return message[0]._replace(epoch=self.epoch), message[1]

    def _next(self, alone: bool) -> tuple[Push, Sequence[Buffer]] | None:
        index, layout = self.sent, self.layout
        operation = self.operation if index == self.first and self.key.stream != BUCKET else None
        if self.place is not None:
            return self._push_place(index, self.place, operation)
        if self._through is not None:
            if (slot := self._through.take(self.shard)) is not None:
                return self._push_slot(index, slot, operation), ()
            if self._staged:  # one of its own slots will be free; others' may wait for this exchange
                return None
        self.sent = stop = index + 1 if alone else self._message_stop()
        if self._source is None:
            return Push(self.key, index, self._weight_of(index), False, operation, stop - index), ()
        if self._coder is not None:
            return Push(self.key, index, self._weight_of(index), True, operation), (self._coder.encode(index),)
        if layout.count == 1:  # then it lies in one piece
            whole = self._source.data  # type: ignore[union-attr]
            return Push(self.key, index, self._weight_of(index), True, operation), (whole,)
        given = self._part(self._source, index, stop).data
        return Push(self.key, index, self._weight_of(index), True, operation, stop - index), (given,)

    def _push_place(self, index: int, place: Place, operation: Operation | None) -> tuple[Push, Sequence[Buffer]]:
        count = min(self._run_stop(index) - index, MAX_SLICES)
        self.sent += count
        skipped = self.layout.run_bytes(0, index)
        present, weight = self._source is not None, self._weight_of(index)
        if place is HERE:
            assert self._memory is not None
            return Push(self.key, index, weight, present, operation, count, HERE), (self._memory[skipped:].data,)
        there, target = Place(place.segment, place.offset + skipped), None
        if self._region is not None:
            target = Place(self._region.place.segment, self._region.place.offset + skipped)
        return Push(self.key, index, weight, present, operation, count, there, 0, target), ()

    def _push_slot(self, index: int, slot: Slot, operation: Operation | None) -> Push:
        layout, count = self.layout, 1
        if self.operation.kind in IN_PLACE:
            count = min(max(SLOT_BYTES // layout.run_bytes(index, index + 1), 1), self._run_stop(index) - index)
        stop = index + count
        if self._source is not None:
            given = self._part(self._source, index, stop)
            slot.memory[: given.size] = given
        self.sent = stop
        self._staged.update(dict.fromkeys(range(index, stop), Staged(slot, index, stop)))
        weight, present = self._weight_of(index), self._source is not None
        return Push(self.key, index, weight, present, operation, count, slot.place)

    def _part(self, memory: Source, start: int, stop: int) -> Bytes:
        """Give what belongs to the slices from ``start`` up to ``stop`` in memory as long as the exchange."""
        if not isinstance(memory, np.ndarray):
            return memory.part(start)
        first = self.layout.span(start)[0] * self.layout.itemsize
        return memory[first : first + self.layout.run_bytes(start, stop)]

    def next_cost(self) -> int:
        """Credit that the next message takes, in bytes, if it travels; else at least as much."""
        if self.place is None:
            return self.layout.run_cost(self.sent, self._message_stop(), False)
        return self.cost(self.sent, min(self._run_stop(self.sent), self.sent + MAX_SLICES))

    def cost(self, start: int, stop: int) -> int:
        """Credit of the slices from ``start`` up to ``stop``, all in one message, in bytes."""
        return self.layout.run_cost(start, stop, self.place is not None or start in self._staged, self.start)

    def _message_stop(self) -> int:
        """Return the end of the slices that travel in the next message."""
        if self._together == 1:
            return self.sent + 1
        end = self.sent + self._together - (self.sent - self.start) % self._together
        return min(end, self._run_stop(self.sent))

    def _run_stop(self, start: int) -> int:
        """Return the end of the slices that follow ``start`` and must be sent."""
        stop = self.stop if self._progress is None else self._available(self._progress.nbytes)
        if self.settled:
            stop = min((index for index in self.settled if start <= index < stop), default=stop)
        if self.heavier:  # one message has one weight
            weight = self._weight_of(start)
            stop = next((index for index in range(start, stop) if self._weight_of(index) != weight), stop)
        return stop

    @property
    def is_filling(self) -> bool:
        """True if the next slice is not in memory yet."""
        return self._progress is not None and self._available(self._progress.nbytes) <= self.sent

    def _available(self, nbytes: int) -> int:
        """Return the slice behind the last one that is among the first ``nbytes`` bytes."""
        while self._ready < self.stop and self.layout.span(self._ready)[1] * self.layout.itemsize <= nbytes:
            self._ready += 1
        return self._ready

    def _weight_of(self, index: int) -> float:
        return self.heavier.get(index, self.weight) if self.heavier else self.weight

    def given(self, index: int) -> Contribution:
        """A copy of what is, or would have been, contributed to slice ``index``."""
        weight = self._weight_of(index)
        if self._source is None:
            return Contribution(weight, None)
        if self._coder is not None:
            return Contribution(weight, self._coder.given(index))
        return Contribution(weight, self._part(self._source, index, index + 1).copy())

    def _pass_settled(self) -> None:
        while self.sent < self.stop and self.sent in self.settled:
            self.sent += 1

    def rewind(self) -> int:
        """Begin again with what was sent and not answered: that is void. Return how many slices that are."""
        self.write_off()
        if self._regions is not None:
            self._find_place()
        void = sum(index not in self.answered for index in range(self.start, self.sent))
        self.settled = frozenset(self.answered)
        self.sent = self.start
        self._pass_settled()
        self.first = self.sent
        return void

    def give_again(self, slices: Iterable[int]) -> None:
        """Note that answered ``slices`` must be given once more."""
        self.answered.difference_update(slices)

    def takes(self, start: int, stop: int) -> bool:
        """Tell whether a result of the slices from ``start`` up to ``stop`` may come; it may before they are sent."""
        return start not in self.answered and self.start <= start < stop <= self.stop

    def settle(self, start: int, stop: int) -> None:
        """The slices from ``start`` up to ``stop`` have their result: a slot that they passed through may be free."""
        self.answered.update(range(start, stop))
        if (staged := self._staged.get(start)) is None:
            return
        if all(index in self.answered for index in range(staged.start, staged.stop)):
            self._free(staged)

    def write_off(self) -> None:
        """Free what is staged: nothing more will be answered."""
        for staged in {staged.start: staged for staged in self._staged.values()}.values():
            self._free(staged)

    def _free(self, staged: Staged) -> None:
        for index in range(staged.start, staged.stop):
            del self._staged[index]
        self._slots.give_back(staged.slot)

    def kept_payload(self, index: int, result: Result, payload: Buffer | None) -> Buffer | None:
        """Give the payload of slice ``index``, one of those in ``result``, in memory that does not change."""
        if not result.placed:
            return payload
        if self._region is not None:
            return self._part(self._region.memory, index, index + 1).data
        staged = self._staged[index]
        skipped = self.layout.run_bytes(staged.start, index)
        whole = staged.slot.memory[skipped : skipped + self.layout.reply_bytes(index, index + 1)]
        if self.operation.op is Op.FRAMED:  # it may end before the slice does
            return b"".join(frames(whole.data, self.layout.replies))
        return bytes(whole)

    def copy_of(self, index: int) -> bytes | None:
        """Give what this worker contributed to slice ``index``, if that is the result of the others."""
        if self._source is None or self.operation.kind not in (Kind.BROADCAST, Kind.TRANSFER):
            return None
        return self._part(self._source, index, index + 1).tobytes()

    def write(self, result: Result, payload: Buffer | None) -> None:
        """Put a result where it belongs."""
        if self._progress is None:
            self._write(result, payload)
            return
        begin, end = self.layout.span(result.slice)[0], self.layout.span(result.slice + result.slices - 1)[1]
        start, stop = begin * self.layout.itemsize, end * self.layout.itemsize
        if stop > self._progress.nbytes:
            raise MalformedMessageError(f"a result of slice {result.slice} came before that slice was sent")
        self._write(result, payload)
        self._progress.wrote(start, stop)

    def _write(self, result: Result, payload: Buffer | None) -> None:
        """Put a result where it belongs; where it lies already, nothing is to be done."""
        destination, layout = self._destination, self.layout
        if destination is None or self.dropped:
            return
        if self._coder is not None:
            for index in range(result.slice, result.slice + result.slices):
                self._coder.decode(index, payload)
            return
        if result.placed and self._region is not None:
            payload = self._part(self._region.memory, result.slice, result.slice + result.slices).data
        elif result.placed:
            staged = self._staged.get(result.slice)
            if staged is None:
                return
            skipped = layout.run_bytes(staged.start, result.slice)
            size = layout.reply_bytes(result.slice, result.slice + result.slices)
            payload = staged.slot.memory[skipped : skipped + size].data
        start = layout.span(result.slice)[0] * layout.itemsize
        stop = start + layout.run_bytes(result.slice, result.slice + result.slices)
        if not isinstance(destination, np.ndarray):
            destination(start, stop, payload)
        elif payload is None and self.operation.op is Op.FIRST:
            self.handle.left_alone = (*self.handle.left_alone, (start, stop))
        elif payload is None:
            destination[start:stop] = 0
        else:
            destination[start:stop] = np.frombuffer(payload, np.uint8)

    def note(self, result: Result) -> None:
        """Note for the caller what ``result`` is made of."""
        waiter = self.handle
        waiter.present |= result.present
        waiter.weight = max(waiter.weight, result.weight)  # slices differ if a member died in between
        if result.squares:
            waiter.squares[result.slice] = result.squares

    @property
    def done(self) -> bool:
        """True if every slice has its result."""
        return len(self.answered) == self.stop - self.start

    def first_unanswered(self) -> int:
        """The first slice without a result."""
        index = self.start
        while index in self.answered:
            index += 1
        return index
