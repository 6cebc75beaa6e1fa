"""A durable group with data shards. Any process may be lost between any two commands, the coordinator among them.

Each process has a number here, the coordinator 0. A message waits in its connection until it is read, in an order that
the seed decides. A process that is lost takes what was not read along. Connections end at one side before the other
notices. `Spread` is a `Durable` member with a connection to each shard.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from gradserver.engine import Engine
from gradserver.engine.commands import Close, Hire, Record, Reduce, Send
from gradserver.engine.events import Disconnected, Event, NonFinite, Received, Reduced, Sifted, Tick
from gradserver.engine.policy import Hashes, OnNonFinite, Policy
from gradserver.engine.shard import ShardEngine
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError
from gradserver.protocol.exchange import ExchangeKey, Stream, is_state
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    Enlist,
    Failure,
    Join,
    Message,
    Push,
    Result,
    RoundDone,
    Scope,
    Serve,
    Transfer,
    Welcome,
)
from gradserver.protocol.messages.recovery import (
    Fetch,
    Holding,
    Resume,
    Resumed,
    Span,
    Standing,
    State,
    pack_spans,
)
from gradserver.protocol.offers import Offer
from gradserver.protocol.shards import Share, Table
from tests import receivers
from tests.crash_harness import CrashError, Crashing, Durable, Fused, steady
from tests.elastic_harness import Giver, Member, Step, state
from tests.engine_harness import TIMEOUT, Task, hashes_of, proposal, reference

LINKS = (0.0, 1e-4, 3e-4, 1e-3)
"""Rates of members' links in Gbit/s: slices are as large as they may be, or of one to a few elements."""
LINK = 1
"""A shard's connection to the coordinator."""
Waiting = deque[tuple[Message, Sequence[Buffer]]]


class ShardLostError(CrashError):
    """The error of a lost shard."""


@dataclass
class Processes(Fused):
    """The coordinator, and data shards that come and go."""

    rates: tuple[float, ...] = (1.0, 1.0)
    minds: dict[int, ShardEngine] = field(default_factory=dict)
    """Shards, by their processes."""
    links: dict[int, int] = field(default_factory=dict)
    """The coordinator's connection to each."""
    up: dict[int, Waiting] = field(default_factory=dict)
    """Messages from shards to the coordinator."""
    down: dict[int, Waiting] = field(default_factory=dict)
    """Messages from the coordinator to shards."""
    places: dict[int, int] = field(default_factory=dict)
    """The process that a `Reduce` comes from, by its identity."""
    deadlines: dict[int, float | None] = field(default_factory=dict)
    """Time at which each process has something to do by itself, as of the last event that it heard of."""
    numbers: int = 1000
    """Numbers of connections and processes."""
    coming: int = 0
    """Shards that are being started."""
    waiting: dict[int, Waiting] = field(default_factory=lambda: defaultdict(deque))
    """Messages on their way to members, by connection."""

    def begin(self) -> None:
        words = iter(f"secret {self.incarnation} {number}" for number in range(10**6))
        self.deadlines.pop(0, None)
        self.engine = Engine(
            self.worlds,
            self.credit,
            lambda: next(words),
            self.rates[0],
            Hashes.OFF,
            self.incarnation,
            nonfinite=self.nonfinite
            if self.incarnation == 1
            else OnNonFinite.HALT,  # later ones read it from the record
        )

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def feed(self, event: Event) -> list[object]:  # type: ignore[override]
        return self.feed_at(0, event)

    def feed_at(self, process: int, event: Event) -> list[object]:
        mind = self.minds[process] if process else self.engine
        commands = mind.handle(event, self.now) if process else self.plant(self.engine.handle(event, self.now))
        self.deadlines[process] = mind.next_deadline()
        mind.validate()
        receivers.check(commands)
        for command in commands:
            if self.fuse == 0:
                raise ShardLostError(process) if process else CrashError
            self.fuse -= 1
            match command:
                case Send(connection, message, payloads):
                    self.check_is_written(message)
                    self.sent_from(process, connection, message, [bytes(payload) for payload in payloads])
                case Reduce():
                    self.check(command)
                    self.reduces.append(command)
                    self.places[id(command)] = process
                case Close(connection):
                    self.closed.append(connection)
                case Hire():
                    self.coming += not self.coming
                case Record(record):
                    self.write(record)
        return list(commands)

    def sent_from(self, process: int, connection: int, message: Message, payloads: list[bytes]) -> None:
        if process and connection == LINK:
            self.up[process].append((message, payloads))
        elif not process and connection in self.links.values():
            assert not isinstance(message, Failure), f"a shard that did nothing wrong is refused: {message}"
            (shard,) = [shard for shard, link in self.links.items() if link == connection]
            self.down[shard].append((message, payloads))
        elif connection >= 0:
            self.waiting[connection].append((message, payloads))

    def answer(self, reduce: Reduce, outcome: Buffer | NonFinite | Sifted | None = None) -> list[object]:  # type: ignore[override]
        process, done = self.places.pop(id(reduce)), reference(reduce) if outcome is None else outcome
        if process and process not in self.minds:
            return []
        told = done if reduce.keep or isinstance(done, Sifted) else None
        return self.feed_at(
            process, Reduced(reduce.group, reduce.epoch, reduce.key, reduce.slice, told, hashes=hashes_of(reduce, done))
        )

    def wait(self, seconds: float) -> list[object]:  # type: ignore[override]
        self.now += seconds
        return [command for process in (0, *self.minds) for command in self.feed_at(process, Tick())]

    def next_deadline(self) -> float | None:
        found = [self.deadlines.get(process) for process in (0, *self.minds)]
        return min([deadline for deadline in found if deadline is not None], default=None)

    # ── shards ────────────────────────────────────────────────────────────────────────────────────────

    def start_shard(self) -> None:
        process = self.number()
        self.coming -= self.coming > 0
        self.minds[process] = ShardEngine("tcp://10.0.0.1:7411", url_of(process), LINK)
        self.enlist(process)

    def enlist(self, process: int) -> None:
        self.links[process], self.up[process], self.down[process] = self.number(), deque(), deque()
        place = min(len(self.links), len(self.rates) - 1)
        self.feed(Received(self.links[process], Enlist(url_of(process), self.rates[place])))

    def pass_up(self, process: int) -> None:
        message, payloads = self.up[process].popleft()
        self.feed(Received(self.links[process], message, payloads))

    def pass_down(self, process: int) -> None:
        message, payloads = self.down[process].popleft()
        self.feed_at(process, Received(LINK, message, payloads))

    def lose_shard(self, process: int) -> int:
        """Let a shard die. Return the coordinator's connection to it, of which that has yet to hear."""
        del self.minds[process]
        self.reduces = [reduce for reduce in self.reduces if self.places[id(reduce)] != process]
        self.down.pop(process, None)
        self.up.pop(process, None)
        return self.links.pop(process, -1)


def url_of(process: int) -> str:
    return f"tcp://10.0.0.2:{process}"


@dataclass
class Spread(Durable):
    """A member with a connection to each shard."""

    lines: dict[int, int] = field(default_factory=dict)
    """Connections by place; that to the coordinator has place 0."""
    urls: tuple[str, ...] = ()
    attending: set[int] = field(default_factory=set)
    """Places that it has yet to say Attend to."""
    awaited: set[int] = field(default_factory=set)
    """Places that have yet to accept it."""
    heard: dict[int, int] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)
    said_round: int = -1
    """The round that it has said it is in."""
    stands: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    """The epoch behind a round that is over, though its results may not all be here."""
    states: list[Task] = field(default_factory=list)
    """All that it has sent to workers that join."""

    @property
    def spread(self) -> Sharded:
        assert isinstance(self.cluster, Sharded)
        return self.cluster

    def task(self, key: ExchangeKey, operation: object) -> Task:
        task = super().task(key, operation)  # type: ignore[arg-type]
        task.layout = self.spread.share(task).layout
        return task

    def pushable(self) -> list[tuple[Task, int, int]]:
        """Return what it can push now, and to which place."""
        if 0 not in self.lines:
            return []
        found = []
        for task in self.under_way():
            share = self.spread.share(task)
            for place in self.stands:
                start, stop = share.interval(place)
                sent = self.spread.pointers.get((id(task), place), start)
                due = next((index for index in range(sent, stop) if index not in task.answers), stop)
                if due < stop and not task.done:
                    found.append((task, place, due))
        return found

    def under_way(self) -> list[Task]:
        """Return the tasks that it has begun, after it has begun what is next."""
        while not self.tasks and not self.finished and not self.must_ask:
            self.begin(self.cluster.program[self.at])
        return [*self.tasks, *self.side]

    def send_state(self, transfer: Transfer, number: int) -> None:
        """Send the state of the boundary before round ``number`` to a worker that joins."""
        task = state(transfer, number, self.member_id)
        task.layout = self.spread.share(task).layout
        self.states.append(task)
        self.side = [*(other for other in self.side if not other.done), task]

    def hear(self, place: int, message: Message, payload: bytes | None) -> None:
        """Take a message on one of its connections."""
        match message:
            case Attended():
                self.awaited.discard(place)
            case Resumed(_, version, shards):
                self.heard[place] = version
                self.stands.discard(place)
                self.side = []  # learners that were to have a state begin anew
                if place:
                    return
                self.stands.clear()
                self.version = version
                if self.resuming:
                    self.resuming, self.urls = False, shards
                    self.attending = set(range(1, len(shards) + 1))
                elif shards != self.urls:
                    self.spread.cut_lines(self, False)
            case Standing(version, number):
                if version != self.version:
                    return
                # Results of others may be on their way. This member's own round may be any later one meanwhile: a shard
                # that has no part of the buckets delays none.
                assert abs(number - self.said_round) <= 1
                assert place not in self.stands
                assert self.said[place] == version
                self.stands.add(place)
                for task in self.tasks:
                    self.spread.pointers.pop((id(task), place), None)
            case Result(key) | Failure(key=ExchangeKey() as key) if is_state(key):
                for task in self.side:
                    if task.key == key and isinstance(message, Result):
                        task.answers[message.slice] = message.weight, None
                    elif task.key == key and isinstance(message, Failure):
                        task.error = message.exception()
            case Fetch(version, key, index):
                (_, kept), _ = self.result(key, index)
                self.spread.say_to(self, place, self.held(version, key, index), kept)
            case Result(key, index, weight):
                (task,) = [task for task in self.tasks if task.key == key]
                assert self.spread.share(task).shard_of(index) == place
                assert index not in task.answers, "a second result for one slice"
                assert self.said.get(place) == self.heard.get(place), "a result behind Resumed"
                self.proven[key, index] = message
                task.answers[index] = weight, payload if self.gets(task) else None
                if key.stream == Stream.BUCKET:
                    bad = {member_id for member_id, own in enumerate(message.weights) if own < 0}
                    assert bad == set(message.nonfinite) <= self.cluster.not_finite(task.key, index)
                    skips = bad and self.cluster.nonfinite is OnNonFinite.SKIP
                    assert weight == (0 if skips else sum(own for own in message.weights if own > 0))
                    self.kept[key.part, index] = key.number, (weight, payload), message.weights
                self.go_on()
            case RoundDone(number, epoch, transfers):
                for transfer in transfers:
                    if transfer.donor == self.member_id:
                        self.send_state(transfer, number + 1)
                if number == self.round - 1:
                    return  # once more, as shards have made it once more
                assert number == self.round
                self.over, self.ended[number] = number, epoch
                self.go_on()
            case Failure(scope=Scope.CONNECTION) if message.error == ConnectionLostError.__name__:
                self.spread.cut_lines(self, False)
            case _:
                super().take(message, payload)

    def go_on(self) -> None:
        if self.tasks and all(task.done for task in self.tasks) and self.over == self.round in self.ended:
            self.adopt(self.ended.pop(self.round), self.round)
            self.boundaries[self.round] = self.epoch, self.member_ids
        super().go_on()

    def weight(self) -> float:
        mine = [task for task in self.tasks if task.key[:2] == (Stream.BUCKET, self.round)]
        begun = [task for task in mine if task.answers or any(key == id(task) for key, _ in self.spread.pointers)]
        return begun[0].weight if begun else 0.0

    def spans_of(self, place: int) -> Iterator[Span]:
        """Yield what it holds of a shard's slices, and in which rounds it holds other shards' only."""
        here, elsewhere = set[int](), dict[int, Span]()
        for span in self.spans():
            is_here = span.state in (State.FAILED, State.CHANGED) or self.spread.place_of(self, span) == place
            if is_here:
                yield span
            if span.key.stream == Stream.BUCKET and is_here:
                here.add(span.key.number)
            elif span.key.stream == Stream.BUCKET:
                elsewhere[span.key.number] = Span(State.ELSEWHERE, span.key, 0, 1)
        yield from (span for number, span in elsewhere.items() if number not in here)


class Sharded(Crashing):
    """Members of a group with ``rates`` data shards."""

    members: dict[int, Spread]  # type: ignore[assignment]

    def __init__(
        self,
        world: int,
        buckets: Sequence[int],
        program: Sequence[Step],
        seed: int,
        rates: tuple[float, ...],
        give: Giver | None = None,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
        sections: Sequence[int] = (),
    ) -> None:
        given = give or partial(steady, seed)
        super(Crashing, self).__init__(0, buckets, program, seed, given, nonfinite=nonfinite, sections=sections)
        self.harness: Processes = Processes({"default": Policy(1, 8)}, lazy=True, rates=rates, nonfinite=nonfinite)
        self.harness.check = self.check
        self.rates, self.data_ends = rates, {}
        self.tables: dict[int, Table] = {}
        """The shards of slices, by the number of members."""
        self.pointers: dict[tuple[int, int], int] = {}
        """The slices pushed of each task to each place."""
        self.notices: list[Callable[[], object]] = []
        """Ends of connections that have yet to be noticed."""
        self.fuses, self.crashes, self.dies_along = [], 0, []
        self.losses = 0
        for _ in rates[1:]:
            self.harness.start_shard()
        self.settle()
        lines = {member_id: self.harness.number() for member_id in range(world)}
        offer = Offer(rate=LINKS[seed % len(LINKS)])
        for member_id, line in lines.items():
            self.harness.feed(Received(line, Join("default", f"w{member_id}", member_id, world, TIMEOUT, offer)))
        member_ids = tuple(range(world))
        for member_id, line in lines.items():
            ((welcome, _),) = self.harness.waiting.pop(line)
            assert isinstance(welcome, Welcome)
            self.grain = welcome.grain
            places = set(range(len(rates)))
            one = self.members[member_id] = Spread(member_id, self, 1, member_ids, token=welcome.token, connection=line)
            one.lines, one.urls, one.version, one.stands = {0: line}, welcome.shards, welcome.epoch, places
            one.attending = places - {0}
        self.settle()
        for line in lines.values():
            self.harness.feed(Received(line, Serve()))
        for count, module in enumerate(self.modules):
            for line in lines.values():
                self.harness.feed(Received(line, proposal(self.modules, count), (module.encoded,)))
            self.settle()

    def settle(self) -> None:
        """Deliver all that is on its way."""
        busy = True
        while busy:
            busy = False
            for process in list(self.harness.minds):
                for waiting, deliver in (
                    (self.harness.up, self.harness.pass_up),
                    (self.harness.down, self.harness.pass_down),
                ):
                    while waiting[process]:
                        deliver(process)
                        busy = True
            for member in self.members.values():
                for place in sorted(member.attending):
                    self.attend(member, place)
                for place, line in member.lines.items():
                    while self.harness.waiting[line]:
                        message, payloads = self.harness.waiting[line].popleft()
                        if not isinstance(message, Agreed):
                            member.hear(place, message, payloads[0] if payloads else None)  # type: ignore[arg-type]
                        busy = True

    # ── tables ────────────────────────────────────────────────────────────────────────────────────────

    def share(self, task: Task) -> Share:
        """Return the shares of its slices."""
        world = max(len(self.members), 1)
        if world not in self.tables:
            self.tables[world] = Table(world, self.rates, grain=self.grain)
            self.tables[world].set_plan(self.plan)
        return self.tables[world].share(task.key, task.operation)

    def place_of(self, member: Spread, span: Span) -> int:
        for task in member.history:
            if task.key == span.key:
                return self.share(task).shard_of(span.first)
        raise AssertionError(span)

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        steps = idle = 0
        self.light()
        while idle < 60:
            try:
                self.at.pop(steps, lambda: None)()
                steps += 1
                if self.step():
                    idle = 0
                    continue
                if all(member.finished for member in self.members.values()) and not self.at:
                    break
                idle += 1
                due = self.harness.next_deadline()
                if due is not None:
                    self.harness.wait(max(due - self.harness.now, 0.0))
            except ShardLostError as lost:
                self.light()
                self.kill(lost.args[0])
            except CrashError:
                self.crash()

    def step(self) -> bool:
        harness = self.harness
        choices: list[Callable[[], object]] = [partial(self.reduce, reduce) for reduce in harness.reduces]
        choices += [partial(self.notice, notice) for notice in self.notices]
        if harness.coming:
            choices.append(harness.start_shard)
        for process, mind in harness.minds.items():
            if process not in harness.links:
                choices += [partial(harness.enlist, process)] if mind.is_idle else []
                continue
            choices += [partial(harness.pass_up, process)] if harness.up[process] else []
            choices += [partial(harness.pass_down, process)] if harness.down[process] else []
        for member in self.everybody():
            choices += self.choices_of(member)
        if not choices:
            return False
        self.random.choice(choices)()
        return True

    def everybody(self) -> list[Spread]:
        """Return members, and all others with connections."""
        return list(self.members.values())

    def choices_of(self, member: Spread) -> list[Callable[[], object]]:
        if 0 not in member.lines:
            return [partial(self.resume, member)]
        choices: list[Callable[[], object]] = []
        for place, line in member.lines.items():
            if self.harness.waiting.get(line):
                choices.append(partial(self.read_line, member, place))
        choices += [partial(self.attend, member, place) for place in member.attending]
        if not (member.attending or member.awaited or member.resuming):
            for place, version in member.heard.items():
                if version == member.version != member.said.get(place):
                    choices.append(partial(self.hold_at, member, place))
        if member.must_ask and member.asked < member.round:
            choices.append(partial(self.ask, member))
        choices += [partial(self.push_at, member, *what) for what in member.pushable()]
        return choices

    def notice(self, notice: Callable[[], object]) -> None:
        self.notices.remove(notice)
        notice()

    def read_line(self, member: Spread, place: int) -> None:
        message, payloads = self.harness.waiting[member.lines[place]].popleft()
        member.hear(place, message, bytes(payloads[0]) if payloads else None)
        if member.failure is not None:
            self.gone[member.member_id] = self.members.pop(member.member_id)

    def attend(self, member: Spread, place: int) -> None:
        member.attending.discard(place)
        process = int(member.urls[place - 1].rpartition(":")[2])
        if process not in self.harness.minds:
            self.cut_lines(member, False)
            return
        member.lines[place] = line = self.harness.number()
        member.awaited.add(place)
        attend = Attend("default", member.version, member.member_id, member.token)
        self.harness.feed_at(process, Received(line, attend))

    def process_at(self, member: Spread, place: int) -> int:
        return int(member.urls[place - 1].rpartition(":")[2]) if place else 0

    def say_to(self, member: Spread, place: int, message: Message, payload: Buffer | None = None) -> None:
        process = self.process_at(member, place)
        if process == 0 or process in self.harness.minds:
            payloads = () if payload is None else (payload,)
            self.harness.feed_at(process, Received(member.lines[place], message, payloads))

    def resume(self, member: Durable) -> None:
        assert isinstance(member, Spread)
        member.lines = {0: self.harness.number()}
        member.heard, member.said, member.stands, member.resuming = {}, {}, set(), True
        member.attending, member.awaited, member.is_new = set(), set(), True
        latest = max([member.epoch, *member.announced])
        self.say_to(member, 0, Resume("default", member.member_id, member.token, latest, self.plan.hash, True))

    def hold_at(self, member: Spread, place: int) -> None:
        if member.version not in member.said.values():
            member.said_round = member.round
            if member.ended.pop(member.round, None):  # it is told again, and perhaps with a later epoch
                member.over = member.round - 1
        member.said[place] = member.version
        if place == 0:
            self.say_again(member)
        holding = Holding(member.version, member.said_round, member.weight())
        self.say_to(member, place, holding, pack_spans(member.spans_of(place)))

    def tell(self, member: Member, message: Message) -> None:
        assert isinstance(member, Spread)
        self.say_to(member, 0, message)

    def push_at(self, member: Spread, task: Task, place: int, index: int) -> None:
        self.open(member, task.key)
        begins = (id(task), place) not in self.pointers
        self.pointers[id(task), place] = index + 1
        payload = None
        if task.values is not None:
            start, stop = task.layout.span(index)
            payload = task.values[start:stop].tobytes()
        operation = task.operation if begins and task.key.stream else None
        self.pushed.setdefault((task.key, index), {})[member.member_id] = task
        epoch = task.epoch if operation is not None else 0
        self.say_to(
            member, place, Push(task.key, index, task.weight, payload is not None, operation, epoch=epoch), payload
        )

    def break_line(self, member_id: int, noticed: bool = True) -> None:
        """Let a member lose its connections."""
        if member_id in self.members:
            self.cut_lines(self.members[member_id], noticed)

    def cut_lines(self, member: Spread, noticed: bool) -> None:
        """Let a worker lose its connections. The other ends hear of it sooner or later."""
        if 0 not in member.lines:
            return
        for place, line in list(member.lines.items()):
            if 0 not in member.lines:
                return  # a message that it has read made it do so already
            waiting = self.harness.waiting.get(line, deque())
            for _ in range(self.read_before(len(waiting)) if noticed else 0):
                if waiting and not isinstance(waiting[0][0], Fetch | Resumed | Failure):
                    message, payloads = waiting.popleft()
                    member.hear(place, message, bytes(payloads[0]) if payloads else None)
        for place, line in member.lines.items():
            process = self.process_at(member, place)
            self.harness.waiting.pop(line, None)
            self.notices.append(partial(self.tell_of_end, process, line, "connection reset"))
        member.lines, member.stands, member.attending = {}, set(), set()

    def read_before(self, count: int) -> int:
        """Return how many of ``count`` messages a member reads before it notices the end of its connection."""
        return self.random.randint(0, count)

    def tell_of_end(self, process: int, line: int, reason: str, incarnation: int = 0) -> None:
        if process in self.harness.minds or (not process and incarnation in (0, self.harness.incarnation)):
            self.harness.feed_at(process, Disconnected(line, reason))

    def kill(self, process: int) -> None:
        """Let a shard die. The others notice in any order."""
        if process not in self.harness.minds:
            return
        self.losses += 1
        link = self.harness.lose_shard(process)
        if link >= 0:
            self.notices.append(partial(self.tell_of_end, 0, link, "it died", self.harness.incarnation))
        for member in self.everybody():
            if url_of(process) in member.urls:
                self.notices.append(partial(self.break_if_at, member, dict(member.lines)))

    def break_if_at(self, member: Spread, lines: dict[int, int]) -> None:
        if member in self.everybody() and member.lines.get(0) == lines.get(0):
            self.cut_lines(member, True)

    def kill_any(self, which: int) -> None:
        alive = list(self.harness.minds)
        if alive:
            self.kill(alive[which % len(alive)])

    def crash(self) -> None:
        """Lose the coordinator. Its children end, and others look for the next one."""
        self.crashes += 1
        for member in self.everybody():
            self.cut_lines(member, True)
        self.notices.clear()
        harness = self.harness
        for process in list(harness.minds):
            if self.random.random() < 0.5:
                harness.lose_shard(process)
                harness.coming += 1
                continue
            harness.links.pop(process, None)
            harness.up.pop(process, None)
            harness.down.pop(process, None)
        harness.reduces = [reduce for reduce in harness.reduces if harness.places[id(reduce)]]
        kept = list(harness.reduces)
        harness.restart()
        harness.reduces = kept
        for process in list(harness.minds):
            if process not in harness.links:
                harness.feed_at(process, Disconnected(LINK, "it died"))
        self.light()

    def check(self, reduce: Reduce) -> None:
        """Check that each contribution is its giver's own, once, in the order of members."""
        member_ids = [contribution.member_id for contribution in reduce.contributions]
        assert member_ids == sorted(set(member_ids))
        for given in reduce.contributions:
            task = self.pushed[reduce.key, reduce.slice][given.member_id]
            assert given.weight == task.weight
            assert given.payload is None or bytes(given.payload) == self.part(task, reduce.slice).tobytes()
