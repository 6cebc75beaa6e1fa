"""Exchanges that have begun: what was given, up to which slice all have given, and which contributions count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import ExchangeKey, Kind, Layout, Operation
from gradserver.protocol.limits import MAX_COUNTER, MAX_SLICES
from gradserver.protocol.messages.data import squares_of

if TYPE_CHECKING:
    from gradserver.engine.events import Finding

WEIGHED = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.COMMIT})
"""Contributions of weight 0 are left out, and absent ones are zeros."""
_SCATTERS: Final = Kind.REDUCE_SCATTER

NO_LAYOUT: Final = Layout(count=1, step=1, bounds=(0, 0), firsts=(0, 1), numel=0, itemsize=0, replies=1)
"""Layout of an exchange that failed before it began."""
_NOBODY: Final[Mapping[int, int]] = MappingProxyType({})
_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})
"""One for all exchanges: of most there is nothing to say, and there may be many."""


Payload = Buffer | tuple[Buffer, ...] | None
"""A result: None for zeros, and one part for each participant where each gets something else."""


class Run(NamedTuple):
    """Slices ``start`` to ``stop`` of one participant, which came with one message.

    ``payload`` is a contribution if ``present``. It is memory to write the result to if ``shared``, and
    then begins with slice ``start`` and may be longer than the run. If there is a ``target``, that is the memory to
    write to, and the contribution stays as it is.
    """

    start: int
    stop: int
    payload: Buffer | None
    present: bool
    shared: bool
    target: Buffer | None = None
    weight: float = 1.0


class Piece(NamedTuple):
    """Slices ``start`` to ``stop``, to which all have contributed: a part of one run of each, by member id.

    Members that have departed meanwhile are in it, too.
    """

    start: int
    stop: int
    given: dict[int, Run]


class Facts(NamedTuple):
    """The facts about a result beside its bytes: squares (two numbers for each slice) and keyed hashes, if any."""

    squares: Sequence[float] = ()
    hashes: Sequence[bytes] = ()

    def of(self, start: int, stop: int) -> Facts:
        """Return those of the slices from ``start`` up to ``stop``, counted from the first one."""
        return Facts(squares_of(self.squares, start, stop), self.hashes[start:stop])


NO_FACTS: Final = Facts()


class Made(NamedTuple):
    """A result that waits for those in front of it, with what is told with it."""

    piece: Piece
    payload: Payload
    findings: Sequence[Finding]
    facts: Facts


@dataclass(slots=True)
class Exchange:
    """One exchange that has begun."""

    key: ExchangeKey
    operation: Operation
    layout: Layout
    start: int
    """The first slice that this shard has to do with."""
    stop: int
    """The one behind its last."""
    participants: tuple[int, ...]
    """Members that have to contribute, in rank order."""
    first: int
    opened: float
    touched: float
    complete: int
    """The slice up to which all participants have contributed, from ``start`` on."""
    weights: dict[int, float] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    """The slice that is due from each participant; they come in order."""
    runs: dict[int, deque[Run]] = field(default_factory=dict)
    """Contributions that wait for others, by member id."""
    cut: Mapping[int, int] = field(default_factory=lambda: _NOBODY)
    """Slice up to which contributions count of each member that has departed or is late."""
    spoiled: Mapping[int, int] = field(default_factory=lambda: _NOBODY)
    """Slices of each that did not count, because they could not be decoded."""
    absent: tuple[int, ...] = ()
    """Members that were to contribute when it began, and are waited for no more, with member id order."""
    late: frozenset[int] = frozenset()
    """Absent members that are late and present: what they gave in time counts, and they get its results."""
    settled: frozenset[int] = frozenset()
    """Slices that all members have the result of, since before the latest recovery."""
    before: Mapping[int, int] = field(default_factory=lambda: _NOBODY)
    """Number of settled slices in which each counted."""
    reducing: dict[int, Piece] = field(default_factory=dict)
    made: Mapping[int, Made] = field(default_factory=lambda: _NOTHING)
    """Results that came before those of slices in front of them, which go first in a durable group."""
    withheld: int = MAX_COUNTER
    """The first slice that gets no result, as it cannot be reduced."""
    answered: int = 0
    last: int = -1
    failure: GradServerError | None = None

    def join(self, member_id: int, weight: float) -> None:
        """Expect contributions of ``member_id`` from now on."""
        self.weights[member_id] = weight
        self.pushed[member_id] = self.open_from(self.start) if self.settled else self.start
        self.runs[member_id] = deque()

    def open_from(self, index: int) -> int:
        """Return the first slice from ``index`` on that is not settled."""
        while index in self.settled:
            index += 1
        return index

    def crosses(self, start: int, stop: int) -> bool:
        """Tell whether slices ``start`` to ``stop`` contain a settled one."""
        return bool(self.settled) and not self.settled.isdisjoint(range(start, stop))

    def settle(self, slices: frozenset[int], counted: Mapping[int, int]) -> None:
        """Begin behind ``slices``, which have a result: each member ``counted`` in so many of them."""
        self.settled, self.before = slices, counted
        self.complete = self.open_from(self.start)
        self.answered = len(slices)

    def weigh(self, member_id: int, weight: float) -> None:
        """Note the ``weight`` of one contribution of ``member_id``: the largest is its weight in the exchange."""
        self.weights[member_id] = max(self.weights[member_id], weight)

    def put_off(self, now: float) -> None:
        """Let the deadline run from ``now`` on."""
        self.touched = now

    def take(self, member_id: int, run: Run, now: float) -> Iterable[Piece]:
        """Keep one contribution, and give what has become complete by it."""
        self.touched = now
        was_behind = self.pushed[member_id] == self.complete
        self.pushed[member_id] = self.open_from(run.stop) if self.settled else run.stop
        self.runs[member_id].append(run)
        return self.ready(member_id) if was_behind and len(self.pushed) >= len(self.participants) else ()

    def ready(self, last: int) -> Iterator[Piece]:
        """Yield what a push or a cut of ``last`` has completed, in pieces as long as possible."""
        if len(self.pushed) < len(self.participants) or not self.pushed:
            return
        all_have = min(self.pushed.values())
        while self.complete < all_have:
            start, stop = self.complete, min(runs[0].stop for runs in self.runs.values())
            givers = sorted(self.runs) if self.cut else self.participants
            given = {member_id: self._part(self.runs[member_id], start, stop) for member_id in givers}
            for member_id in self.cut:
                if member_id in given and not self.runs[member_id]:
                    del self.runs[member_id]
            self.complete = self.open_from(stop) if self.settled else stop
            self.last = last
            yield Piece(start, stop, given)

    def rest(self, last: int) -> Iterator[Piece]:
        """Yield what is left, when no participant is waited for: what was given in time counts, and then there is none.

        The pieces are as long as possible, and as one message can be. Lossy slices are reduced one by one.
        """
        while self.complete < self.stop and not self.participants:
            start = stop = self.complete
            ends = [runs[0].stop for runs in self.runs.values()]
            most = min(start + (1 if self.operation.is_lossy else MAX_SLICES), self.stop, *ends)
            while stop < most and stop not in self.settled:
                stop += 1
            given = {member_id: self._part(self.runs[member_id], start, stop) for member_id in sorted(self.runs)}
            self.runs = {member_id: runs for member_id, runs in self.runs.items() if runs}
            self.complete = self.open_from(stop)
            self.last = last
            yield Piece(start, stop, given)

    def kept_of(self, member_id: int, ended: bool) -> int:
        """Return the slice up to which contributions of ``member_id`` count if it departs now.

        Slices in its memory that have not been reduced do not count: the memory is its own again, and it may be
        alive. They do if its process is known to have ``ended``.
        """
        kept = self.complete
        for run in self.runs.get(member_id, ()):
            if run.shared and not ended:
                break
            kept = self.open_from(run.stop)
        return kept if member_id in self.pushed else self.start

    def leave_out(self, member_id: int, ended: bool) -> None:
        """Go on without ``member_id``, which departs: its contributions count as far as `kept_of` says."""
        self._stop_waiting(member_id, self.kept_of(member_id, ended))
        if member_id in self.runs:
            self.runs[member_id] = deque(self._inherited(run) for run in self.runs[member_id])

    def pass_over(self, member_id: int) -> None:
        """Go on without ``member_id``, which is late: all that it has contributed counts."""
        self.late |= {member_id}
        self._stop_waiting(member_id, self.pushed.get(member_id, self.start))

    def excuse(self, member_id: int) -> None:
        """Tell ``member_id`` nothing of the failure: it has departed."""
        self.participants = tuple(other for other in self.participants if other != member_id)

    def _stop_waiting(self, member_id: int, kept: int) -> None:
        self.excuse(member_id)
        self.absent = tuple(sorted({*self.absent, member_id}))
        if member_id in self.pushed:
            del self.pushed[member_id]
            self._keep(member_id, kept)

    def withdraw(self, member_id: int) -> None:
        """Go on without ``member_id``, which was passed over and departs."""
        self.late -= {member_id}
        if member_id in self.runs:
            shared = (run.start for run in self.runs[member_id] if run.shared)
            self._keep(member_id, max(self.complete, next(shared, self.cut[member_id])))

    def _keep(self, member_id: int, kept: int) -> None:
        """Count contributions of ``member_id``, which is waited for no more, up to slice ``kept``."""
        self.cut = {**self.cut, member_id: kept}
        self.runs[member_id] = deque(run for run in self.runs[member_id] if run.stop <= kept)
        if not self.runs[member_id]:
            del self.runs[member_id]

    def _inherited(self, run: Run) -> Run:
        """Return ``run`` of a departed member as a payload like any other: no result is written over it."""
        if not run.shared:
            return run
        if run.payload is None or not run.present:
            return run._replace(payload=None, shared=False, target=None)
        nbytes = self.layout.run_bytes(run.start, run.stop)
        return run._replace(payload=memoryview(run.payload)[:nbytes], shared=False, target=None)

    def begin_reduction(self, piece: Piece) -> None:
        """Wait for the reduction of ``piece``."""
        self.reducing[piece.start] = piece

    def end_reduction(self, start: int) -> Piece | None:
        """Take the piece that begins with slice ``start`` back from its reduction; None if none was waited for."""
        return self.reducing.pop(start, None)

    def keeps_back(self, piece: Piece) -> bool:
        """Tell whether a slice in front of ``piece`` is being reduced, or gets no result."""
        return piece.start > self.withheld or (bool(self.reducing) and min(self.reducing) < piece.start)

    def withhold(self, piece: Piece) -> None:
        """Hand out nothing of ``piece``, which cannot be reduced: the exchange is about to fail."""
        self.withheld = min(self.withheld, piece.start)
        self.keep_back(piece, None, (), NO_FACTS)

    def keep_back(self, piece: Piece, payload: Payload, findings: Sequence[Finding], facts: Facts) -> None:
        """Keep a result until the results in front of it are there."""
        self.made = {**self.made, piece.start: Made(piece, payload, findings, facts)}

    def release(self) -> list[Made]:
        """Take the results that were kept back and have none in front of them any more."""
        before = min(self.withheld, *self.reducing, self.stop)
        ready = [self.made[start] for start in sorted(self.made) if start < before]
        self.made = {start: made for start, made in self.made.items() if start >= before}
        return ready

    def answer(self, slices: int) -> bool:
        """Count ``slices`` that have their results, and tell whether all have."""
        self.answered += slices
        return self.answered >= self.stop - self.start

    def fail(self, error: GradServerError) -> list[tuple[int, Run]]:
        """Give up, and return the contributions that are never answered, with their member ids."""
        self.failure = error
        given = list(self.unanswered())
        self.runs.clear()
        self.made = {}
        if not self.writes():
            self.reducing.clear()
        return given

    def spoil(self, member_id: int, slices: int) -> None:
        """Discount so many slices of ``member_id``."""
        self.spoiled = {**self.spoiled, member_id: self.spoiled.get(member_id, 0) + slices}

    def counts_all(self) -> bool:
        """Tell whether all slices of all contributions count."""
        return not (self.cut or self.spoiled or self.settled)

    def counted(self, member_id: int) -> int:
        """Return the number of slices that contributions of ``member_id`` count for, once the exchange is done."""
        stop = self.cut.get(member_id, self.stop if member_id in self.weights else self.start)
        given = stop - self.start - sum(index < stop for index in self.settled)
        return given + self.before.get(member_id, 0) - self.spoiled.get(member_id, 0)

    def _part(self, runs: deque[Run], start: int, stop: int) -> Run:
        run = runs[0]
        if run.stop == stop:
            runs.popleft()
        if run.start == start and run.stop == stop:
            return run
        if run.payload is None:
            return run._replace(start=start, stop=stop)
        skipped = self.layout.run_bytes(run.start, start)
        end = None if run.shared else self.layout.run_bytes(run.start, stop)
        target = None if run.target is None else memoryview(run.target)[skipped:]
        return run._replace(start=start, stop=stop, payload=memoryview(run.payload)[skipped:end], target=target)

    def cost(self, run: Run) -> int:
        """Return the credit that a contribution takes until its result, in bytes."""
        return self.layout.run_cost(run.start, run.stop, run.shared, self.start)

    def unanswered(self) -> Iterator[tuple[int, Run]]:
        """Yield every contribution that is here and not answered, with its member id."""
        for member_id, runs in self.runs.items():
            yield from ((member_id, run._replace(start=max(run.start, self.complete))) for run in runs)
        for piece in (*self.reducing.values(), *(made.piece for made in self.made.values())):
            yield from piece.given.items()

    def writes(self) -> bool:
        """Tell whether a reduction writes to members' memory."""
        return any(run.shared for piece in self.reducing.values() for run in piece.given.values())

    def owner(self, piece: Piece) -> int:
        """Return the member that gets ``piece`` of a REDUCE_SCATTER, among all that gave to it, departed or not."""
        if self.operation.kind is not _SCATTERS:
            return -1
        return list(piece.given)[self.layout.owner(piece.start)]

    def lacking(self, piece: Piece) -> tuple[int, ...]:
        """Return the members that should have contributed to ``piece``, and did not."""
        return tuple(member_id for member_id in self.absent if member_id not in piece.given) if self.absent else ()

    def missing(self) -> list[int]:
        """Return the members that have yet to contribute to the earliest slice that is not complete."""
        return [
            member_id
            for member_id in self.participants
            if self.pushed.get(member_id, self.start) <= self.complete < self.stop
        ]

    def validate(self) -> None:
        """Raise AssertionError if an invariant of an exchange that goes on does not hold."""
        assert set(self.weights) == self.pushed.keys() | self.cut.keys(), self
        assert set(self.pushed) <= self.runs.keys() <= set(self.weights), self
        assert not self.cut.keys() & set(self.participants), "waits for a member that was cut"
        for member_id, runs in self.runs.items():
            position = self.complete
            for run in runs:
                assert run.start <= position < run.stop, "contributions with a gap"
                gone = member_id in self.cut and member_id not in self.late
                assert not (run.shared and gone), "memory of a member that has departed"
                assert not self.crosses(run.start, run.stop), "a settled slice, given again"
                position = self.open_from(run.stop)
            due = self.pushed[member_id] if member_id in self.pushed else self.cut[member_id]
            assert position == due, "a contribution was kept that was not counted"
        if self.pushed and len(self.pushed) == len(self.participants):
            assert self.complete == min(self.pushed.values()), "a complete slice was kept"
