"""Results of buckets that came unasked, for rounds that this worker has not reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import unasked_cost
from gradserver.protocol.limits import KEPT_BYTES, KEPT_ROUNDS
from gradserver.protocol.messages import Result

Unasked = tuple[Result, Buffer | None]
"""A result, and its payload as it came: encoded, if the bucket travels with a loss."""


def room_for(plan_bytes: int) -> int:
    """Give the bytes that a worker with such a plan keeps at most: of some rounds at least, with results of float32."""
    return max(KEPT_BYTES, KEPT_ROUNDS * plan_bytes)


class Backlog:
    """Results that have come, by round and bucket. Not safe to share: the session's lock guards it.

    Args:
        limit: bytes that it holds at most, each result counted as `unasked_cost` says.
        slices: how many each bucket of the plan has.
        sections: which buckets are exchanged in one round; none for all.

    Attributes:
        nbytes: what it holds.
    """

    def __init__(self, limit: int = KEPT_BYTES, slices: Sequence[int] = (), sections: Sequence[range] = ()) -> None:
        self.limit = limit
        self.nbytes = 0
        self._slices = slices
        self._sections = sections or (range(len(slices)),)
        self._rounds: dict[int, dict[int, dict[int, Unasked]]] = {}
        self._came: Counter[int] = Counter()
        """Number of slices with a result, by round."""

    def put(self, result: Result, payload: Buffer | None) -> bool:
        """Keep a result, and return true if there was room. One that is there already is not kept twice."""
        parts = self._rounds.setdefault(result.key.number, {}).setdefault(result.key.part, {})
        if result.slice in parts:
            return True
        cost = unasked_cost(payload)
        if self.nbytes + cost > self.limit:
            return False
        self.nbytes += cost
        parts[result.slice] = result, payload
        self._came[result.key.number] += result.slices
        return True

    def has(self, number: int) -> bool:
        """Return true if all results of all buckets of round ``number`` are here."""
        parts = self.section_of(number) or self._sections[0]
        return self._came[number] == sum(self._slices[part] for part in parts)

    def slices(self, number: int, part: int) -> set[int]:
        """Return the slices of a bucket with a result."""
        found = (result for result, _ in self._rounds.get(number, {}).get(part, {}).values())
        return {index for result in found for index in range(result.slice, result.slice + result.slices)}

    def section_of(self, number: int) -> range | None:
        """The buckets that are exchanged in round ``number``, as its results say; None if there are none."""
        some = next(iter(self._rounds.get(number, {})), None)
        return None if some is None else next((parts for parts in self._sections if some in parts), None)

    def take(self, number: int, part: int) -> list[Unasked]:
        """Hand over the results of a bucket, in the order of slices."""
        parts = self._rounds.get(number, {})
        taken = [unasked for _, unasked in sorted(parts.pop(part, {}).items(), key=lambda item: item[0])]
        self.nbytes -= sum(unasked_cost(payload) for _, payload in taken)
        self._came[number] -= sum(result.slices for result, _ in taken)
        if not parts:
            self._rounds.pop(number, None)
        if not self._came[number]:
            del self._came[number]
        return taken

    def all(self) -> list[Unasked]:
        """List all results, those of earlier rounds first."""
        rounds = (self._rounds[number] for number in sorted(self._rounds))
        return [unasked for parts in rounds for slices in parts.values() for unasked in slices.values()]

    def forget_if(self, is_void: Callable[[Result], bool]) -> None:
        """Drop the results that are void."""
        for result, payload in [unasked for unasked in self.all() if is_void(unasked[0])]:
            there = self._rounds[result.key.number][result.key.part]
            del there[result.slice]
            self.nbytes -= unasked_cost(payload)
            self._came[result.key.number] -= result.slices
            if not there:
                self.take(result.key.number, result.key.part)

    def forget(self, before: int) -> None:
        """Drop what is there of rounds ``before`` this one."""
        for number in [number for number in self._rounds if number < before]:
            for part in list(self._rounds[number]):
                self.take(number, part)
