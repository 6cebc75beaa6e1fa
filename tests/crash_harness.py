"""A durable group that may lose its coordinator between any two commands, and its members at any time.

A `Durable` member does what `gradserver.protocol.messages.recovery` asks of one: it keeps what it gives, and results.
`Crashing` runs a program with such members. Each message to a member waits in its connection until it is read, so a
connection that breaks loses any suffix of its messages. A lost coordinator leaves its records, and the next one begins
with these.
The records of a round must name the members that made its results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from gradserver.engine import Engine
from gradserver.engine.commands import Close, Command, Record, Reduce, Send
from gradserver.engine.declared import Kind as RecordKind
from gradserver.engine.events import Disconnected, Event, Restored
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.policy import Hashes, OnNonFinite, Policy
from gradserver.engine.records import Boundary, Entered, Epoch, Round, RoundRecord, Start
from gradserver.protocol import messages
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError, MembershipChangedError
from gradserver.protocol.exchange import PERSONAL, PORTIONED, ExchangeKey, Kind, Operation, Stream, gets
from gradserver.protocol.messages import (
    Failure,
    Follow,
    Membership,
    Message,
    Opened,
    Push,
    Result,
    RoundDone,
    Scope,
    Welcome,
)
from gradserver.protocol.messages.data import made_in
from gradserver.protocol.messages.recovery import (
    Fetch,
    Held,
    Holding,
    Resume,
    Resumed,
    Span,
    Standing,
    State,
    pack_spans,
)
from tests import receivers
from tests.elastic_harness import Cluster, Giver, Member, Step, contribution
from tests.engine_harness import SEATS, Array, Harness, Outcome, Task, bucket

POLICY = Policy(1, 8)


class CrashError(Exception):
    """The error of a lost coordinator."""


class Trap(NamedTuple):
    """The loss of a process so many commands behind the next record of a kind."""

    kind: type[RecordKind]
    commands: int


@dataclass
class Fused(Harness):
    """A harness that loses its coordinator after so many more commands."""

    fuse: int = -1
    books: JournalState = field(default_factory=JournalState)
    is_full: bool = False
    """True if nothing can be written, until the coordinator is lost."""
    records: list[RecordKind] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    """Presences of processes that are known to run."""
    incarnation: int = 1
    check: Callable[[Reduce], None] = lambda _: None
    traps: list[Trap] = field(default_factory=list)
    """Traps, set one after the other."""
    plant: Callable[[list[Command]], list[Command]] = lambda commands: commands
    """A fault of the coordinator: what it does instead of these commands."""
    ends: dict[int, int] = field(default_factory=dict)
    """The epoch behind each round that is over, as it is written."""

    def __post_init__(self) -> None:
        self.books.apply(Dated(0.0, Start(1, "", 0, 0.0, 0.0)))
        self.begin()

    def begin(self) -> None:
        words = iter(f"secret {number}" for number in range(10**6))
        words_of, runs = lambda: next(words), self.running.__contains__
        told = self.worlds, self.credit, words_of, None, Hashes.OFF, self.incarnation, runs
        first = self.nonfinite if self.incarnation == 1 else OnNonFinite.HALT  # later ones read it from the record
        self.engine = Engine(*told, nonfinite=first)

    def feed(self, event: Event) -> list[Command]:
        commands = self.plant(self.engine.handle(event, self.now))
        self.engine.validate()
        receivers.check(commands)
        for command in commands:
            if self.fuse == 0:
                raise CrashError
            self.fuse -= 1
            match command:
                case Send(connection, message, payloads) if connection >= 0:
                    self.check_is_written(message)
                    self.inbox[connection].append((message, [bytes(payload) for payload in payloads]))
                case Reduce():
                    self.check(command)
                    self.reduces.append(command)
                case Close(connection):
                    self.closed.append(connection)
                case Record(record):
                    self.write(record)
        return commands

    def write(self, record: RecordKind) -> None:
        """Keep a record. Light a fuse if it is the one that the next trap waits for."""
        self.records.append(record)
        if self.is_full:
            return
        self.books.apply(Dated(self.now, record))
        if self.traps and self.fuse < 0 and isinstance(record, self.traps[0].kind):
            self.fuse = self.traps.pop(0).commands
        match record:
            case Round(_, epoch, done):
                self.ends[done.round] = epoch
            case Boundary(_, number, epoch):
                self.ends[number] = epoch

    def check_is_written(self, message: Message) -> None:
        """Check that members are told only what the next coordinator would know.

        It may know nothing of a round of which nothing could be written.
        """
        match message:
            case RoundDone(number, epoch):
                assert self.ends.get(number, epoch) == epoch, "told before it is written"
            case Membership(epoch):
                assert any(isinstance(one, Epoch) and one.epoch == epoch for one in self.records), "not written"
            case messages.Entered(number):
                entered = [one.round for one in self.records if isinstance(one, Entered)]
                assert entered[-1:] == [number], "told before it is written"

    def kept(self, _records: Sequence[RecordKind]) -> frozenset[str]:
        """Return the groups of which the next coordinator has what lossy codecs owe."""
        return frozenset()

    def restart(self) -> None:
        """Begin the next coordinator, with the records of the one before. It may be lost at once, too."""
        self.reduces.clear()
        self.inbox.clear()
        self.fuse = -1
        self.is_full = False
        restored = tuple(record for _, record in self.books.records())
        self.incarnation += 1
        self.books.apply(Dated(self.now, Start(self.incarnation, "", 0, 0.0, 0.0)))
        self.begin()
        try:
            self.feed(Restored(restored, self.kept(restored)))
        except CrashError:
            self.restart()
        self.fuse = -1


@dataclass
class Durable(Member):
    """A member that follows the program, and returns."""

    token: str = ""
    connection: int = -1
    resuming: bool = False
    """True if it has said Resume, and got no answer yet."""
    version: int = 0
    standing: bool = True
    holding: bool = False
    """True if it has yet to say what it holds."""
    kept: dict[tuple[int, int], tuple[int, Outcome, tuple[float, ...]]] = field(default_factory=dict)
    """Results of buckets, by part and slice: the round, the bytes, and the weights that counted."""
    proven: dict[tuple[ExchangeKey, int], Result] = field(default_factory=dict)
    """Results as they were told, by slice."""
    fresh: set[int] = field(default_factory=set)
    """Tasks that it has said nothing about since Standing."""
    among: dict[ExchangeKey, tuple[int, ...]] = field(default_factory=dict)
    """Members that were present when it began an exchange."""
    told: Opened | None = None
    """The answer about the latest round that it has followed in."""
    asked: int = -1
    """The latest round that it has asked about."""
    is_new: bool = False
    """True if it has said nothing of rounds on this connection."""
    failure: GradServerError | None = None

    def ready(self) -> list[Task]:
        if not self.standing or self.connection < 0:
            return []
        return [task for task in super().ready() if self.due(task) < task.layout.count]

    @property
    def follows(self) -> bool:
        """True if it has no data for the present round, and does what the others do."""
        return self.cluster.plan.is_shared and self.round >= self.crashing.data_ends.get(self.member_id, self.round + 1)

    @property
    def crashing(self) -> Crashing:
        assert isinstance(self.cluster, Crashing)
        return self.cluster

    @property
    def must_ask(self) -> bool:
        """True if it must learn the section of the present round first."""
        here = not self.tasks and not self.finished and self.cluster.program[self.at].kind is None
        return here and self.follows and (self.told is None or self.told.round != self.round)

    def parts(self) -> range:
        if not self.follows:
            return super().parts()
        assert self.told is not None
        return self.cluster.plan.parts_of(self.told.section)

    def task(self, key: ExchangeKey, operation: Operation) -> Task:
        task = super().task(key, operation)
        self.among[key] = self.member_ids
        if key.stream == Stream.BUCKET and self.follows:
            task.weight, task.values = 0.0, None
        return task

    def due(self, task: Task) -> int:
        """Return the next slice of it to be pushed."""
        while task.sent in task.answers:
            task.sent += 1
        return task.sent

    def take(self, message: Message, payload: bytes | None) -> None:
        match message:
            case Resumed(_, version):
                assert version > self.version or self.resuming
                self.version, self.standing, self.holding, self.resuming = version, False, True, False
                return
            case Standing(version, number):
                assert (version, number) == (self.version, self.round)
                assert not self.standing
                assert not self.holding
                self.standing = True
                for task in self.tasks:
                    task.sent = 0
                self.fresh = {id(task) for task in self.tasks if not task.done}
                return
            case Fetch(version, key, index):
                assert version == self.version
                assert not self.holding
                (_, kept), _ = self.result(key, index)
                assert isinstance(self.cluster, Crashing)
                self.cluster.say(self, self.held(version, key, index), kept)
                return
            case Result(key, index, weight):
                (task,) = [task for task in self.tasks if task.key == key]
                assert index not in task.answers, "a second result for one slice"
                assert index < task.sent or not self.standing, "a result before the contribution"
                assert not self.holding, "a result behind Resumed"
                assert task.error is None, "a result after the failure"
                self.proven[key, index] = message
                takes = self.gets(task, index) or task.operation.kind in PORTIONED
                task.answers[index] = weight, payload if takes else None
                if key.stream == Stream.BUCKET:
                    bad = {member_id for member_id, own in enumerate(message.weights) if own < 0}
                    assert bad == set(message.nonfinite) <= self.cluster.not_finite(task.key, index)
                    skips = bad and self.cluster.nonfinite is OnNonFinite.SKIP
                    assert weight == (0 if skips else sum(own for own in message.weights if own > 0))
                    self.kept[key.part, index] = key.number, (weight, payload), message.weights
            case Failure(scope=Scope.CONNECTION):
                self.failure = message.exception()
                return
            case Opened(number, section):
                assert number <= self.asked, "what it has not asked"
                if self.must_ask and number == self.round:  # it may be told twice, if it has asked twice
                    assert section in (self.crashing.section_of(number), self.cluster.plan.each[0].number)
                    self.told = message
                return
            case _:
                super().take(message, payload)
                return
        self.go_on()

    def gets(self, task: Task, index: int = 0) -> bool:
        """Return whether its result of a slice equals the others', if these get any."""
        kind = task.operation.kind
        if kind in PORTIONED:
            return False
        owner = self.among[task.key][task.layout.owner(index)] if kind is Kind.REDUCE_SCATTER else 0
        return kind is Kind.BARRIER or gets(task.operation, self.member_id, task.key, owner)

    def is_personal(self, task: Task, index: int) -> bool:
        """Return whether its result of a slice is its own, or only others get any: it keeps nothing of that."""
        return task.operation.kind in PERSONAL and not self.gets(task, index)

    def give_again(self) -> None:
        """Begin anew with all exchanges that have no result here."""
        for task in self.tasks:
            if not task.done:
                for index in [index for index in task.answers if self.is_personal(task, index)]:
                    del task.answers[index]

    def result(self, key: object, index: int) -> tuple[Outcome, tuple[float, ...]]:
        """Return the result that it keeps, and the weights that counted."""
        for task in self.history:
            if task.key == key and task.key.stream != Stream.BUCKET and index in task.answers:
                weight, payload = task.answers[index]
                if self.is_personal(task, index):
                    return (weight, None), ()  # a member that lacks it gets no bytes, either
                return (weight, payload if self.gets(task, index) else Cluster.part(task, index).tobytes()), ()
        for (part, slice_), (number, outcome, weights) in self.kept.items():
            if bucket(number, part) == key and slice_ == index:
                return outcome, weights
        raise AssertionError((self.member_id, key, index))

    def held(self, version: int, key: ExchangeKey, index: int) -> Held:
        """Return what it says with the result that it keeps: as it was told."""
        (weight, kept), weights = self.result(key, index)
        said = self.proven[key, index]
        return Held(version, key, index, weight, kept is not None, said.without, weights, said.squares, said.proof)

    def spans(self) -> Iterator[Span]:
        """Yield what it holds, slice by slice."""
        for (part, index), (number, _, weights) in self.kept.items():
            if number >= self.round - 1:
                made = made_in(self.proven[bucket(number, part), index].proof)
                yield Span(State.HELD, bucket(number, part), index, index + 1, weights, 0, made)
        for task in self.history:
            if task.key.stream == Stream.BUCKET:
                continue
            if task.error is not None:
                state = State.CHANGED if isinstance(task.error, MembershipChangedError) else State.FAILED
                yield Span(state, task.key, 0, task.layout.count)
                continue
            for index in range(task.layout.count):
                if self.is_personal(task, index) and task.done:
                    yield Span(State.OVER, task.key, index, index + 1)
                    continue
                state = State.HELD if index in task.answers else State.LACKING
                made = made_in(self.proven[task.key, index].proof) if index in task.answers else 0
                yield Span(state, task.key, index, index + 1, (), self.size(task, index), made)

    def size(self, task: Task, index: int) -> int:
        """Return the bytes of the result of a slice, which it keeps or lacks."""
        if index not in task.answers:
            return task.layout.nbytes(index) * task.layout.replies
        (_, kept), _ = self.result(task.key, index)
        return 0 if kept is None else len(kept)

    def weight(self) -> float:
        """Return its weight in the present round."""
        mine = (Stream.BUCKET, self.round)
        rounds = [task.weight for task in self.tasks if task.key[:2] == mine and (task.sent or task.answers)]
        return rounds[0] if rounds else 0.0


class Crashing(Cluster):
    """Members that follow ``program`` while the coordinator is lost after each of ``fuses`` commands."""

    members: dict[int, Durable]  # type: ignore[assignment]
    gone: dict[int, Durable]  # type: ignore[assignment]

    def __init__(
        self,
        world: int,
        buckets: Sequence[int],
        program: Sequence[Step],
        seed: int,
        fuses: Sequence[int],
        give: Giver | None = None,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
        sections: Sequence[int] = (),
    ) -> None:
        given = give or partial(steady, seed)
        super().__init__(world, buckets, program, seed, given, nonfinite=nonfinite, sections=sections)
        self.harness: Fused = Fused({"default": POLICY}, lazy=True, nonfinite=nonfinite)
        self.harness.check = self.check
        for rank in range(world):
            self.harness.join(SEATS + rank, f"w{rank}", rank=rank, world=world)
        welcomes = self.harness.only(range(world), Welcome)
        self.harness.agree_beside(self.modules, world)
        self.members = {
            member_id: Durable(
                member_id, self, 1, tuple(range(world)), token=welcome.token, connection=SEATS + member_id
            )
            for member_id, welcome in enumerate(welcomes)
        }
        self.fuses = list(fuses)
        self.connections = 1000
        self.crashes = 0
        self.data_ends: dict[int, int] = {}
        """The first round for which a member has no data: it follows the others."""
        self.dies_along: list[int] = []
        """The member that dies with each lost coordinator, in turn; -1 for none."""

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        steps = idle = 0
        self.light()
        while idle < 40:
            try:
                self.at.pop(steps, lambda: None)()
                steps += 1
                if not self.step():
                    if all(member.finished for member in self.members.values()) and not self.at:
                        break
                    idle += 1
                    due = self.harness.engine.next_deadline()
                    if due is not None:
                        self.harness.wait(max(due - self.harness.now, 0.0))
                else:
                    idle = 0
            except CrashError:
                self.crash()

    def light(self) -> None:
        self.harness.fuse = self.fuses.pop(0) if self.fuses else -1

    def step(self) -> bool:
        """Do one possible thing, chosen at random. Return False if there is none."""
        choices: list[Callable[[], object]] = [lambda r=r: self.reduce(r) for r in self.harness.reduces]  # type: ignore[misc]
        for member in self.members.values():
            if member.connection < 0:
                choices.append(lambda m=member: self.resume(m))  # type: ignore[misc]
                continue
            if self.harness.inbox.get(member.connection):
                choices.append(lambda m=member: self.read(m))  # type: ignore[misc]
            if member.holding:
                choices.append(lambda m=member: self.hold(m))  # type: ignore[misc]
            if member.must_ask and member.asked < member.round:
                choices.append(lambda m=member: self.ask(m))  # type: ignore[misc]
            choices += [lambda m=member, t=task: self.push(m, t) for task in member.ready()]  # type: ignore[misc]
        if not choices:
            return False
        self.random.choice(choices)()
        return True

    def reduce(self, reduce: Reduce) -> None:
        self.harness.reduces.remove(reduce)
        self.harness.answer(reduce)

    def resume(self, member: Durable) -> None:
        """Let it return on a new connection."""
        self.connections += 1
        member.connection, member.resuming, member.standing = self.connections, True, False
        member.is_new = True
        latest = max([member.epoch, *member.announced])
        message = Resume("default", member.member_id, member.token, latest, self.plan.hash)
        self.harness.receive(member.connection, message)

    def read(self, member: Durable) -> None:
        message, payloads = self.harness.inbox[member.connection].pop(0)
        member.take(message, bytes(payloads[0]) if payloads else None)
        if member.failure is not None:
            self.gone[member.member_id] = self.members.pop(member.member_id)

    def section_of(self, number: int) -> int:
        """Return the section of round ``number`` in the program."""
        return self.plan.section_of(self.parts_of(number).start).number

    def tell(self, member: Member, message: Message) -> None:
        assert isinstance(member, Durable)
        self.harness.receive(member.connection, message)

    def ask(self, member: Durable) -> None:
        """Ask what the others exchange."""
        member.asked = member.round
        self.tell(member, Follow(member.round))

    def say_again(self, member: Durable) -> None:
        """Repeat on a new connection what it had said and asked of the round."""
        if not member.is_new:
            return
        member.is_new = False
        if member.opened is not None and member.opened.round >= member.round:
            self.tell(member, member.opened)
        if member.must_ask and member.asked == member.round:
            self.tell(member, Follow(member.round))

    def hold(self, member: Durable) -> None:
        member.holding = False
        member.give_again()
        self.say_again(member)
        self.harness.receive(
            member.connection,
            Holding(member.version, member.round, member.weight()),
            pack_spans(member.spans()),
        )

    def say(self, member: Durable, message: Message, payload: Buffer | None) -> None:
        self.harness.receive(member.connection, message, *(() if payload is None else (payload,)))

    def push(self, member: Member, task: Task) -> None:
        assert isinstance(member, Durable)
        self.open(member, task.key)
        index = member.due(task)
        task.sent = index + 1
        payload = None if task.values is None else self.part(task, index).tobytes()
        begins = task.key.stream and (not index or id(task) in member.fresh)
        member.fresh.discard(id(task))
        operation, epoch = (task.operation, task.epoch) if begins else (None, 0)
        self.pushed.setdefault((task.key, index), {})[member.member_id] = task
        push = Push(task.key, index, task.weight, payload is not None, operation, epoch=epoch)
        self.harness.receive(member.connection, push, *([] if payload is None else [payload]))

    def break_line(self, member_id: int, noticed: bool = True) -> None:
        """Break a member's connection. Some of what was sent to it has arrived."""
        member = self.members.get(member_id)
        if member is not None and member.connection >= 0:
            self.cut_off(member)
            connection, member.connection, member.holding = member.connection, -1, False
            self.harness.inbox.pop(connection, None)
            if noticed:
                self.harness.feed(Disconnected(connection, "connection reset"))

    def cut_off(self, member: Durable) -> None:
        """Let it read some of what is on its way, and nothing of the rest."""
        waiting = self.harness.inbox.get(member.connection, [])
        for message, payloads in waiting[: self.random.randint(0, len(waiting))]:
            if isinstance(message, Fetch):
                break  # its answer would not arrive
            member.take(message, bytes(payloads[0]) if payloads else None)
            if member.failure is not None:
                self.gone[member.member_id] = self.members.pop(member.member_id)
                break

    def remove(self, member_id: int, politely: bool = False) -> None:
        """Let a member die or leave, unless it is the last."""
        if member_id in self.members and len(self.members) > 1:
            member = self.gone[member_id] = self.members.pop(member_id)
            connection, member.connection = member.connection, -1
            self.harness.inbox.pop(connection, None)
            if connection >= 0:
                if politely:
                    self.harness.leave(connection - SEATS)
                else:
                    self.harness.feed(Disconnected(connection, "it died"))

    def crash(self) -> None:
        """Lose the coordinator, and begin another one."""
        self.crashes += 1
        dies = self.dies_along.pop(0) if self.dies_along else -1
        for member in list(self.members.values()):
            if member.connection >= 0:
                self.cut_off(member)
            member.connection, member.holding = -1, False
        if dies in self.members and len(self.members) > 1:
            self.gone[dies] = self.members.pop(dies)
        self.harness.restart()
        self.light()

    # ── what must be ──────────────────────────────────────────────────────────────────────────────────

    def check(self, reduce: Reduce) -> None:
        """Check that each contribution is its giver's own, once, in the order of member ids, and that none lacks."""
        member_ids = [contribution.member_id for contribution in reduce.contributions]
        assert member_ids == sorted(set(member_ids))
        group = self.harness.engine.data.groups["default"]
        span = slice(reduce.first, reduce.first + reduce.numel)
        for given in reduce.contributions:
            task = self.pushed[reduce.key, reduce.slice][given.member_id]
            assert given.weight == task.weight
            if given.payload is not None:
                portioned = reduce.operation.kind in PORTIONED
                part = self.part(task, reduce.slice) if portioned else np.asarray(task.values)[span]
                assert bytes(given.payload) == part.tobytes()
        if reduce.key.stream == Stream.BUCKET:
            for member_id in group.members.present:
                assert member_id in member_ids or not self.pushed[reduce.key, reduce.slice][member_id].weight

    def portion(self, member_id: int, key: ExchangeKey, index: int) -> bytes | None:
        """Return the bytes that ``member_id`` must get of a slice that depends on the participants.

        It consists of the parts of all that were present when the slice began, as they saw it, and of nothing else.
        What a member gave to a coordinator that was lost, before it died, is in `pushed`, and no part of it.
        """
        there = self.members[member_id].among[key]
        given = {other: self.pushed[key, index][other] for other in there}
        (operation,) = {task.operation for task in given.values()}
        (_,) = {task.epoch for task in given.values()}
        return self.outcome(given, index, operation, member_id)[1]

    def exchanged_in(self, number: int) -> range:
        """Return the buckets of round ``number`` that members have results of: one section, the same at all.

        It is the program's section, or the first one if no member had any data; and the one that is written.
        """
        mine = (Stream.BUCKET, number)
        latest = {one.record.round: one.record.section for one in self.harness.records if isinstance(one, Round)}
        keys = {task.key for member in self.members.values() for task in member.history if task.key[:2] == mine}
        (section,) = {self.plan.section_of(key.part).number for key in keys}
        assert section == latest[number]
        some_have_data = any(number < self.data_ends.get(member_id, number + 1) for member_id in self.members)
        assert section == self.section_of(number) or (not some_have_data and section == self.plan.each[0].number)
        return self.plan.parts_of(section)

    def rounds(self) -> list[int]:
        """Return the rounds as they were written."""
        return [record.record.round for record in self.harness.records if isinstance(record, Round)]

    def check_records(self) -> None:
        """Check that results which members hold are the means of those that counted, by the ledger.

        Of a round that was made again, since no member had all results of it any more, the last record counts.
        """
        records = {one.record.round: one.record for one in self.harness.records if isinstance(one, Round)}
        for member in self.members.values():
            for task in member.history:
                if task.key.stream == Stream.BUCKET:
                    for index, outcome in task.answers.items():
                        counted = self.told(records[task.key.number], task, index)
                        assert outcome == self.outcome(counted, index, task.operation), (task.key, index)

    def told(self, record: RoundRecord, task: Task, index: int) -> dict[int, Task]:
        """Return the tasks that counted in a slice of a bucket, by the ledger; a member that was cut, in a prefix."""
        pushed = self.pushed[task.key, index]
        departed = {member_id for member_id, _, _ in record.cut}
        slices = {(member_id, part): count for member_id, part, count in record.cut}
        found = {}
        for member_id, weight in enumerate(record.weights):
            if weight and (member_id not in departed or index < slices.get((member_id, task.key.part), 0)):
                assert pushed[member_id].weight == weight
                found[member_id] = pushed[member_id]
        return found


def steady(
    salt: int, member_id: int, key: ExchangeKey, operation: Operation, attempt: int
) -> tuple[float, Array | None]:
    """Return a `contribution` with one weight for all buckets of a round, which is what is written."""
    weight, values = contribution(salt, member_id, key, operation, attempt)
    if key.stream == Stream.BUCKET:
        weight = random.Random(f"{salt} {member_id} {key.number}").choice([0.0, 0.5, 1.0, 1.0, 3.25])
    return weight, values
