"""Open rounds at the data half: their records are made from these. Hashing says which rounds are hashed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median
from typing import Final

from gradserver.engine.commands import RESULT
from gradserver.engine.data.exchange import Exchange
from gradserver.engine.figures import Tally
from gradserver.engine.records import Compared, RoundRecord
from gradserver.protocol.digest import MODULUS
from gradserver.protocol.exchange import Kind, Op, Operation
from gradserver.protocol.plan import Plan

_HASH_RATE: Final = 8e9
"""Bytes a second that a core hashes while all others are busy."""
_HASH_CALL: Final = 8e-6
"""Seconds that hashing takes however little it is."""
_SHARE: Final = 0.02
"""Share of the time of training that hashing may take."""
_RAREST: Final = 1024
_FIRST, _COMMIT = Op.FIRST, Kind.COMMIT


@dataclass(slots=True)
class Hashing:
    """Choice of rounds that are hashed: all, if that takes little of the time, else one in ``every``.

    That is a power of two: several shards, each of which decides for itself, then still have rounds in common.

    Attributes:
        seconds: what hashing a round takes.
        every: each so manieth round is hashed.
    """

    seconds: float
    every: int = 1
    _done: float | None = None
    _mean: float = 0.0

    @classmethod
    def of(cls, nbytes: float, calls: float) -> Hashing:
        """Make one for rounds in which as many bytes are hashed in as many calls."""
        return cls(nbytes / _HASH_RATE + calls * _HASH_CALL)

    def is_due(self, number: int) -> bool:
        """Tell whether round ``number`` is hashed."""
        return number % self.every == 0

    def completed(self, now: float) -> None:
        """Note that a round is done."""
        if self._done is not None:
            took = now - self._done
            self._mean = took if not self._mean else 0.75 * self._mean + 0.25 * took
            self.every = 1
            while self.every < _RAREST and self.seconds > _SHARE * self.every * self._mean:
                self.every *= 2
        self._done = now


@dataclass(slots=True)
class Round:
    """A round that is open. Its tables are plain dicts: a counter takes ten times as long to make."""

    opened: float
    hashed: bool = False
    section: int = 0
    """The number of the section that is exchanged in it."""
    done: dict[int, Collection[int]] = field(default_factory=dict)
    """Buckets that were exchanged, each with the members that gave to it since the latest recovery."""
    weights: dict[int, float] = field(default_factory=dict)
    last: int = -1
    cut: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of slices of each departed member that counted, by member id and bucket."""
    counted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of settled slices in which each counted, by member id and bucket; of such buckets that are done, of all
    slices. A contribution that is not here either counted in full or is in no settled bucket."""
    arrivals: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Times when the first slice came, and the latest one that ended a bucket, by member id."""
    gave: dict[int, float] = field(default_factory=dict)
    """Times of the last slice that waits for no result of another member, by member id."""
    held: bool = False
    """True if a member may have waited for credit, and so for results."""
    finished: int = 0
    """Number of members that have given everything to all buckets."""
    given: dict[int, int] = field(default_factory=dict)
    """Number of buckets to which each has given everything, by member id."""
    quorum_at: float | None = None
    """Time since which a quorum waits for the others."""
    look_at: float | None = None
    """Time when it has waited long enough."""
    waited: float = 0.0
    """Seconds that it waited until the round was closed."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Digests of what was summed so far, by member id."""
    results: dict[int, int] = field(default_factory=dict)
    """Digests of what came out so far, by bucket."""
    nonfinite: dict[tuple[int, int], tuple[int, int]] | None = None
    """Contributions that were not finite, by member id and bucket: number of slices, and the first element, or -1."""
    compared: dict[tuple[int, int, int], tuple[float, float]] | None = None
    """Differences of contributions of the same samples, by two member ids and the bucket."""
    together: tuple[int, ...] | None = None
    """Members with contributions that are compared, as a round is audited; None before any claims to be a witness."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """Comparisons of contributions, by bucket."""

    def end_bucket(self, exchange: Exchange) -> None:
        """Note that a bucket was exchanged, and in how many of its slices each member counted."""
        part, counted = exchange.key.part, exchange.counted
        self.done[part] = exchange.weights
        self.last = exchange.last
        if exchange.counts_all():  # as in most rounds
            self.weights.update(exchange.weights)
            return
        self.weights.update((member_id, weight) for member_id, weight in exchange.weights.items() if counted(member_id))
        for member_id in exchange.cut:
            self.cut[member_id, part] = counted(member_id)
        if not exchange.settled:
            return
        for member_id in {*exchange.before, *exchange.weights}:  # settled slices, and those that were made anew
            self.counted[member_id, part] = counted(member_id)
            if member_id not in exchange.weights:  # it departed before it had given anything anew
                self.cut[member_id, part] = counted(member_id)

    def cut_off(self, member_id: int, part: int, slices: int) -> None:
        """Note that ``member_id`` gives no more. If it gave to a finished bucket, that counted: in all its ``slices``.

        Its id can have been another member's, which gave to other buckets of the round.
        """
        given = slices if member_id in self.done[part] else 0
        self.cut.setdefault((member_id, part), self.counted.get((member_id, part), given))

    def take_settled(self, part: int, columns: Mapping[tuple[float, ...], int], member_ids: Collection[int]) -> None:
        """Take over settled slices of bucket ``part``: ``columns`` of weights, each with a number of slices.

        The ``member_ids`` take part in the round. Others have departed: they count in these slices alone. A weight
        below 0 stands for a contribution that was not finite.
        """
        self.counted.update({(member_id, part): 0 for member_id in member_ids})
        for weights, count in columns.items():
            for member_id, weight in enumerate(weights):
                if weight:
                    self.counted[member_id, part] = self.counted.get((member_id, part), 0) + count
                    self.weights[member_id] = max(abs(weight), self.weights.get(member_id, 0.0))
                if weight < 0:
                    self.not_finite(member_id, part, -1, count)
        found = self.counted.items()
        self.cut.update((which, slices) for which, slices in found if which[1] == part and which[0] not in member_ids)

    def take_done(self, parts: Iterable[int], last: int) -> None:
        """Take over buckets that are settled as a whole; ``last`` stands for their last contributor."""
        self.done.update(dict.fromkeys(parts, ()))
        self.last = last

    def reach_quorum(self, now: float, look_at: float | None) -> None:
        """Note that a quorum waits for the others from ``now`` on. At ``look_at`` it has waited long enough."""
        self.quorum_at, self.look_at = now, look_at

    def lose_quorum(self) -> None:
        """Wait for a quorum again."""
        self.quorum_at = self.look_at = None

    def put_off(self, look_at: float | None) -> None:
        """Let the quorum wait until ``look_at``; None if it is not known how long."""
        self.look_at = look_at

    def close(self, now: float) -> None:
        """Wait for stragglers no more."""
        self.waited += now - (self.quorum_at or now)
        self.lose_quorum()

    def contributed(self, member_id: int, buckets: int) -> None:
        """Note that ``member_id`` has given everything to one bucket more, of so many ``buckets``."""
        count = self.given.get(member_id, 0) + 1
        self.given[member_id] = count
        if count == buckets:
            self.finished += 1

    def arrived(self, member_id: int, operation: Operation, now: float) -> None:
        """Note that a bucket's first or last slice came from ``member_id``.

        A member that sends its buffers was chosen by a result, and a commit tells of results.
        """
        first, _ = self.arrivals.get(member_id, (now, now))
        self.arrivals[member_id] = first, now
        if operation.op is not _FIRST and operation.kind is not _COMMIT:
            self.gave[member_id] = now

    def hold_back(self) -> None:
        """Note that a member may wait for credit."""
        self.held = True

    def measured(self, world: int, unknown: Collection[int] | None) -> tuple[tuple[float, float | None], ...]:
        """Return the arrivals for the record. It is ``unknown`` when these members were done; None stands for all.

        Members that waited for credit waited for the latest one: then first slices tell more than last ones.
        """
        gave: dict[int, float] = {} if unknown is None else self.gave
        firsts = {member_id: self.arrivals[member_id][0] for member_id in gave}
        if self.held and gave and _spread(firsts) > _spread(gave):
            gave = firsts
        lasts = {member_id: last for member_id, last in gave.items() if member_id not in (unknown or ())}
        absent = self.opened, self.opened
        return tuple(
            (self.arrivals[one][0], lasts.get(one)) if one in self.arrivals else absent for one in range(world)
        )

    def count(self, part: int, digests: Sequence[tuple[int, int]]) -> None:
        """Add the digests of some slices of bucket ``part``, which were combined."""
        for member_id, found in digests:
            if member_id == RESULT:
                self.results[part] = self.results.get(part, 0) + found
            else:
                self.inputs[member_id] = self.inputs.get(member_id, 0) + found

    def compare(self, part: int, numel: int) -> None:
        """Note that contributions to ``numel`` elements of bucket ``part`` are compared."""
        tally = self.tallies.get(part)
        if tally is None:
            tally = self.tallies[part] = Tally()
        tally.expect(numel)

    def not_finite(self, member_id: int, part: int, element: int, slices: int = 1) -> None:
        """Note that ``member_id`` gave bucket ``part`` a value that is not finite; ``element`` is the first, or -1."""
        found = self.nonfinite = self.nonfinite or {}
        before, first = found.get((member_id, part), (0, element))
        known = [one for one in (first, element) if one >= 0]
        found[member_id, part] = before + slices, min(known, default=-1)

    def compare_together(self, member_ids: Iterable[int]) -> None:
        """Compare the contributions of these members to all slices, as being of the same samples."""
        self.together = tuple(member_ids)

    def repeat(self, part: int, found: Iterable[tuple[int, int, float, float]]) -> None:
        """Add the differences of contributions to some slices of bucket ``part``."""
        self.compared = self.compared or {}
        for member_id, other, difference, size in found:
            before = self.compared.get((member_id, other, part), (0.0, 0.0))
            self.compared[member_id, other, part] = before[0] + difference, before[1] + size

    def record(
        self, number: int, world: int, plan: Plan | None, now: float, unknown: Collection[int] | None = ()
    ) -> RoundRecord:
        """Make its record. A member that counted may have had an id that only members know of.

        It is ``unknown`` when these members had given what they give by themselves; None stands for all.
        """
        section = plan.section(self.section) if plan is not None else None
        parts = range(0) if section is None else section.parts
        world = max(world, 1 + max(self.weights, default=-1))
        return RoundRecord(
            number,
            tuple(map(self.weights.get, range(world), repeat(0.0))),
            self.opened,
            now,
            self.last,
            self.measured(world, unknown),
            tuple([self.inputs.get(member_id, 0) % MODULUS for member_id in range(world)]) if self.hashed else (),
            tuple([self.results.get(part, 0) % MODULUS for part in parts]) if self.hashed else (),
            tuple((*which, slices) for which, slices in sorted(self.cut.items()) if slices),
            self.section,
            nonfinite=tuple((*which, *found) for which, found in sorted(self.nonfinite.items()))
            if self.nonfinite
            else (),
            compared=tuple(Compared(*which, *sums) for which, sums in sorted(self.compared.items()))
            if self.compared
            else (),
        )


def _spread(times: Mapping[int, float]) -> float:
    """Return how much later than the median the latest time is."""
    return max(times.values()) - median(times.values())


class Rounds(dict[int, Round]):
    """Open rounds by number. Other modules read it like any dict, and change it by the methods below."""

    __slots__ = ()

    def begin(self, number: int, current: Round) -> None:
        """Open a round."""
        self[number] = current

    def end(self, number: int) -> None:
        """Close a round: all its results are there."""
        del self[number]

    def void(self) -> None:
        """Give up all that is open: there is another plan, or members are about to say what they hold."""
        self.clear()
