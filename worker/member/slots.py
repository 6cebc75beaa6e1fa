"""Slots of shared memory, through which tensors pass that do not lie there.

Slots are few, and as short as a few slices. So what passes through them is still in the processors' cache when it is
read. Then it costs little more than a tensor that lies in shared memory itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.messages import Place

SLOT_BYTES: Final = 2 * MIB
SLOTS: Final = 2
SMALLEST_BYTES: Final = 32 * KIB
"""Tensors that are shorter travel as fast as they are copied twice."""


class Memory(Protocol):
    """Memory that the coordinator sees too: a channel gives it."""

    def empty(self, nbytes: int, /) -> Bytes | None:
        """Give uninitialised memory; None if the coordinator sees none, or only all of it."""

    def place_of(self, data: Bytes, shard: int = 0, /) -> Place | None:
        """Tell where ``data`` lies in memory that ``shard`` sees too; None if it does not."""


class Slot(NamedTuple):
    """A piece of shared memory, and where the coordinator finds it.

    Attributes:
        generation: how often all slots had been given up before this one was made.
    """

    place: Place
    memory: Bytes
    generation: int = 0


class Slots:
    """A worker's slots. Not safe to share: the session's lock guards it.

    Args:
        channel: which says where memory lies.
        allocate: gives memory that the coordinator may write to, if that is not what ``channel`` gives.
    """

    def __init__(self, channel: Memory, allocate: Callable[[int], Bytes | None] | None = None) -> None:
        self._channel = channel
        self._allocate = allocate or channel.empty
        self._free: list[Slot] | None = None
        self._apart: set[int] = set()
        """Shards that memory is not shared with."""
        self._generation = 0
        """Number of times that all slots were given up."""

    def take(self, shard: int = 0) -> Slot | None:
        """A slot to be given back; None if all are taken, or nothing is shared with that shard."""
        if shard in self._apart:
            return None
        if self._free is None:
            slots = self._divide(shard)
            if not slots:
                self._apart.add(shard)
                return None
            self._free = slots
        if not self._free:
            return None
        if shard and self._channel.place_of(self._free[-1].memory, shard) is None:
            self._apart.add(shard)
            return None
        return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        """``slot`` may be taken again; the one given back last comes first, as it is in the cache.

        A slot that was in use when all were given up is not: the coordinator that is there now has never seen it.
        """
        if self._free is not None and slot.generation == self._generation:
            self._free.append(slot)

    def forget(self) -> None:
        """Give up all slots, and make others: a coordinator may still write there, and another one cannot.

        A slot that is in use stays valid for its exchange until that gives it back.
        """
        self._free = None
        self._generation += 1
        self._apart.clear()

    def _divide(self, shard: int) -> list[Slot]:
        memory = self._allocate(SLOTS * SLOT_BYTES)
        place = None if memory is None else self._channel.place_of(memory, shard)
        if memory is None or place is None:
            return []
        return [
            Slot(Place(place.segment, place.offset + at), memory[at : at + SLOT_BYTES], self._generation)
            for at in range(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
        ]
