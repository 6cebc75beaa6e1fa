"""Members of an elastic group, driven by hand: all follow one program, while some of them die or leave.

A `Member` does what a worker does, step by step. It pushes slices of what it has begun, and takes results. It takes a
new membership when a round is over or when a collective has failed because of one. What it gives depends on its name,
the step and the attempt only. `Cluster.expected` computes what each must get, from what was pushed.

A `Newcomer` joins later. The state that it gets is the number of the round at which it begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gradserver.engine.commands import Reduce
from gradserver.engine.policy import OnNonFinite, OnOutlier, Policy
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import MembershipChangedError, OutlierError
from gradserver.protocol.exchange import (
    PORTIONED,
    STATE_TAG,
    WORLD_BOUND,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    Stream,
    gives,
    is_state,
    layout_of,
)
from gradserver.protocol.limits import BACKLOG_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Enter,
    Entered,
    Failure,
    Membership,
    Message,
    Notice,
    Opens,
    Push,
    Ready,
    Result,
    RoundDone,
    Scope,
    Serve,
    Transfer,
    Welcome,
)
from tests.engine_harness import (
    SEATS,
    Array,
    Harness,
    Outcome,
    Task,
    all_reduce,
    bucket,
    collective,
    floats,
    modules_of,
    part_of,
    proposal,
    together,
    transfer,
)

Giver = Callable[[int, ExchangeKey, Operation, int], tuple[float, Array | None]]
"""A function for what a member gives: weight and values."""


@dataclass(frozen=True)
class Step:
    """The next thing that all members do: a round, or a collective or a transfer of this kind.

    Ranks that are named (``root``, or source and target) are taken modulo the world size.
    """

    kind: Kind | None = None
    """The kind; None is a round."""
    numel: int = 4
    root: int = 0
    target: int = 1
    section: int = 0
    """The section of a round, where the plan has several."""


@dataclass
class Member:
    """A member that follows the program."""

    member_id: int
    cluster: Cluster
    epoch: int
    member_ids: tuple[int, ...]
    at: int = 0
    """The step of the program that it is in."""
    attempt: int = 0
    tasks: list[Task] = field(default_factory=list)
    round: int = 0
    over: int = -1
    """The last round that it was told is over."""
    announced: dict[int, Membership] = field(default_factory=dict)
    boundaries: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """The epoch and the members in force after each round."""
    collectives: int = 0
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    history: list[Task] = field(default_factory=list)
    changes: int = 0
    line: int = -1
    """Its connection; by default that of its member."""
    side: list[Task] = field(default_factory=list)
    """States that it sends."""
    opened: Opens | None = None
    """The section that it has named for the latest round."""

    def __post_init__(self) -> None:
        self.line = self.member_id if self.line < 0 else self.line

    @property
    def finished(self) -> bool:
        return self.at == len(self.cluster.program)

    def heed_end(self, message: Result) -> None:
        """Take the end of a round from its last result, with the membership as it was."""
        if message.over:
            assert message.key.number == self.round, "the end of another round"
            assert self.over < self.round, "a round that is over twice"
            self.over = self.round
            self.boundaries[self.round] = self.epoch, self.member_ids

    @property
    def must_ask(self) -> bool:
        """True if it must learn first what the others do."""
        return False

    def ready(self) -> list[Task]:
        """Return the tasks of which it can push a slice now."""
        while not self.tasks and not self.finished and not self.must_ask:
            self.begin(self.cluster.program[self.at])
        return [task for task in (*self.tasks, *self.side) if not task.done and task.sent < task.layout.count]

    def begin(self, step: Step) -> None:
        world = len(self.member_ids)
        if step.kind is None:
            sizes = {part: self.cluster.buckets[part] for part in self.parts()}
            self.tasks = [self.task(bucket(self.round, part), all_reduce(size)) for part, size in sizes.items()]
        elif step.kind is Kind.TRANSFER:
            source, target = self.member_ids[step.root % world], self.member_ids[step.target % world]
            if source != target and self.member_id in (source, target):
                number = self.pairs[source, target] = self.pairs.get((source, target), -1) + 1
                operation = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, step.numel)
                self.tasks = [self.task(transfer(number, source, target), operation)]
            else:
                self.next()
        else:
            self.tasks = [self.task(collective(self.collectives, self.round), self.operation(step))]
            self.collectives += 1

    def parts(self) -> range:
        """Return the buckets that it exchanges in the present round."""
        return self.cluster.parts_of(self.round)

    def operation(self, step: Step) -> Operation:
        world = len(self.member_ids)
        match step.kind:
            case Kind.BARRIER:
                return Operation(Kind.BARRIER, Op.NONE, UINT8, 0)
            case Kind.BROADCAST:
                return Operation(Kind.BROADCAST, Op.NONE, FLOAT32, step.numel, self.member_ids[step.root % world])
            case Kind.ALL_GATHER:
                return Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, step.numel)
            case Kind.REDUCE_SCATTER:
                return Operation(Kind.REDUCE_SCATTER, Op.MEAN, FLOAT32, step.numel * world)
            case Kind.GATHER:
                return Operation(Kind.GATHER, Op.NONE, FLOAT32, step.numel, self.member_ids[step.root % world])
            case Kind.SCATTER:
                return Operation(Kind.SCATTER, Op.NONE, FLOAT32, step.numel * world, self.member_ids[step.root % world])
            case Kind.ALL_TO_ALL:
                return Operation(Kind.ALL_TO_ALL, Op.NONE, FLOAT32, step.numel * world)
        return all_reduce(step.numel)

    def task(self, key: ExchangeKey, operation: Operation) -> Task:
        weight, values = self.cluster.give(self.member_id, key, operation, self.attempt)
        epoch = self.epoch if operation.kind in WORLD_BOUND or operation.kind is Kind.TRANSFER else 0
        task = Task(key, operation, layout_of(operation, len(self.member_ids)), values, weight, epoch)
        self.history.append(task)
        return task

    def take(self, message: Message, payload: bytes | None) -> None:
        """Take a message from the coordinator."""
        match message:
            case Result(key, index, weight):
                (task,) = [task for task in (*self.tasks, *self.side) if task.key == key]
                assert index not in task.answers, "a second result for one slice"
                assert index < task.sent, "a result before the contribution"
                assert task.error is None, "a result after the failure"
                assert message.nonfinite in ((), tuple(sorted(self.cluster.not_finite(key, index))))
                task.answers[index] = weight, payload
                self.heed_end(message)
            case Failure(key=key):
                assert key is not None, message
                if is_state(key) and all(task.key != key for task in (*self.tasks, *self.side)):
                    return  # it has given that transfer up
                (task,) = [task for task in (*self.tasks, *self.side) if task.key == key]
                assert not task.done, "a failure of what has ended"
                task.error = message.exception()
            case Membership():
                assert self.member_id in message.member_ids
                self.announced[message.epoch] = message
            case RoundDone(number, epoch, transfers):
                assert number == self.round, "the end of another round"
                assert all(task.done for task in self.tasks), "over before its results are here"
                self.over = number
                self.adopt(epoch, number)
                self.side = [task for task in self.side if not task.done]
                self.side += [
                    state(one, number + 1, self.member_id) for one in transfers if one.donor == self.member_id
                ]
                self.boundaries[number] = self.epoch, self.member_ids
            case _:
                raise AssertionError(message)
        self.go_on()

    def go_on(self) -> None:
        """Go to the next step, if this one is done."""
        if not self.tasks or not all(task.done for task in self.tasks):
            return
        errors = [task.error for task in self.tasks if task.error is not None]
        if self.cluster.program[self.at].kind is None:
            assert not errors, errors
            if self.over == self.round:
                self.round, self.collectives = self.round + 1, 0
                self.next()
        elif errors and isinstance(errors[0], MembershipChangedError):
            self.changes += 1
            self.attempt += 1
            self.adopt(errors[0].epoch, self.round - 1)
            self.tasks = []
        else:
            self.next()

    def next(self) -> None:
        self.at, self.attempt, self.tasks = self.at + 1, 0, []

    def adopt(self, epoch: int, ended: int) -> None:
        if epoch > self.epoch or (epoch in self.announced and self.announced[epoch].entering):
            there = self.announced[epoch].behind(ended).member_ids
            new = set(there).difference(self.member_ids)
            self.pairs = {pair: number for pair, number in self.pairs.items() if not new.intersection(pair)}
            self.epoch, self.member_ids = epoch, there


def state(transfer: Transfer, number: int, member_id: int) -> Task:
    """Return the transfer of a state, which is the number of the next round."""
    key = ExchangeKey(2, 0, STATE_TAG + transfer.number, transfer.donor, transfer.learner)
    operation = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 6)
    values = floats(*[number] * 6) if member_id == transfer.donor else None
    return Task(key, operation, layout_of(operation, 2), values, 1.0, 0)


@dataclass
class Newcomer(Member):
    """A worker that joins while the others follow the program, and then follows it, too."""

    name: str = ""
    inside: bool = False
    """True if it contributes."""
    refused: str = ""
    agreed: int = 0
    """The number of sections of the plan that it has agreed to."""
    entered: int = -1
    number: int = 0
    listens: bool = False
    begins: int = -1
    """The round that follows its state; -1 while it has none."""
    over: int = -1
    heard: dict[tuple[ExchangeKey, int], Outcome] = field(default_factory=dict)
    """Results that came unasked."""

    def ready(self) -> list[Task]:
        if self.inside:
            return super().ready()
        return [task for task in self.tasks if not task.done and task.sent < task.layout.count]

    def take(self, message: Message, payload: bytes | None) -> None:
        modules = self.cluster.modules
        match message:
            case Failure(scope=Scope.CONNECTION):
                self.refused = message.text
            case Welcome(member_ids=member_ids) if not self.inside:
                assert message.joins
                self.member_id, self.member_ids, self.epoch = member_ids[message.rank], member_ids, message.epoch
                self.cluster.harness.receive(SEATS + self.line, proposal(modules, 0), modules[0].encoded)
            case Agreed():
                self.agreed += 1
                if self.agreed == len(modules):
                    self.cluster.harness.receive(SEATS + self.line, Enter())
                    return
                module = modules[self.agreed]
                self.cluster.harness.receive(SEATS + self.line, proposal(modules, self.agreed), module.encoded)
            case RoundDone(number, _, transfers) if not self.inside:
                self.over = number
                for transfer in transfers:
                    if transfer.learner == self.member_id:
                        self.tasks = [state(transfer, number + 1, self.member_id)]
                        self.number, self.listens, self.begins = transfer.number, not transfer.waits, -1
                self.catch_up()
            case Entered(number):
                self.entered = number
                if not self.listens:
                    self.enter(number)
            case Result(key=key, slice=index, weight=weight) if not self.inside and key.stream == Stream.BUCKET:
                assert self.listens
                assert (key, index) not in self.heard, "a result came twice"
                self.heard[key, index] = weight, payload
            case Result(key=key) | Failure(key=key) if not self.inside and all(t.key != key for t in self.tasks):
                pass  # of a transfer that it has given up
            case _:
                super().take(message, payload)

    def catch_up(self) -> None:
        """Go through all rounds that are over, with the state and the results that members got."""
        if self.begins < 0 or not self.listens:
            return
        while self.begins <= self.over:
            for part in self.cluster.parts_of(self.begins):
                size = self.cluster.buckets[part]
                for index in range(layout_of(all_reduce(size), 2).count):
                    outcome = self.heard[bucket(self.begins, part), index]
                    assert outcome == self.cluster.expected(bucket(self.begins, part), index, all_reduce(size))
            self.begins += 1
        if self.entered == self.begins:
            self.enter(self.entered)
        elif self.entered < 0:
            self.say(Ready(self.number))

    def say(self, message: Ready | Enter) -> None:
        self.cluster.harness.receive(SEATS + self.line, message)

    def enter(self, number: int) -> None:
        rounds = [at for at, step in enumerate(self.cluster.program) if step.kind is None]
        self.tasks, self.inside, self.round, self.entered = [], True, number, number
        self.at = rounds[number] if number < len(rounds) else len(self.cluster.program)
        self.cluster.joined(self)

    def go_on(self) -> None:
        if self.inside:
            super().go_on()
        elif self.tasks and self.tasks[0].done:
            (task,), self.tasks = self.tasks, []
            if task.error is not None:
                self.say(Enter(self.number))
                return
            _, data = task.answers[0]
            assert data is not None
            self.begins = int(np.frombuffer(data, np.float32)[0])
            if self.listens:
                self.catch_up()
            else:
                self.say(Ready(self.number))


class Cluster:
    """An elastic group of ``world`` members that follow ``program``. ``seed`` decides what happens next."""

    def __init__(
        self,
        world: int,
        buckets: Sequence[int],
        program: Sequence[Step],
        seed: int,
        give: Giver | None = None,
        backlog: int = BACKLOG_BYTES,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
        sections: Sequence[int] = (),
        policy: Policy | None = None,
    ) -> None:
        self.nonfinite = nonfinite
        self.buckets, self.program = tuple(buckets), tuple(program)
        self.give = give or partial(contribution, seed)
        self.modules = modules_of(buckets, sections)
        self.plan = together(self.modules)
        policy = policy or Policy(1, 8, backlog=backlog)
        compares = policy.outliers is not OnOutlier.REPORT
        self.harness = Harness({"default": policy}, lazy=True, nonfinite=nonfinite, compares=compares)
        self.harness.assemble(world)
        self.harness.agree_beside(self.modules, world)
        self.random = random.Random(seed)
        self.members = {member_id: Member(member_id, self, 1, tuple(range(world))) for member_id in range(world)}
        self.gone: dict[int, Member] = {}
        self.newcomers: list[Newcomer] = []
        """Workers that do not contribute yet."""
        self.evicted: list[Member] = []
        self.past: list[Member] = []
        """All members that are gone."""
        self.at: dict[int, Callable[[], object]] = {}
        """Further events, by step."""
        self.pushed: dict[tuple[ExchangeKey, int], dict[int, Task]] = {}
        """Pushes of each member, by slice."""

    def parts_of(self, number: int) -> range:
        """Return the buckets that the program exchanges in round ``number``."""
        rounds = [step for step in self.program if step.kind is None]
        sections = self.plan.each
        return sections[rounds[number].section % len(sections)].parts

    def tell(self, member: Member, message: Message) -> None:
        self.harness.receive(SEATS + member.line, message)

    def open(self, member: Member, key: ExchangeKey) -> None:
        """Name the section of a round, before the first push of it. With one section no member does."""
        if key.stream == Stream.BUCKET and self.plan.is_shared:
            opens = Opens(key.number, self.plan.section_of(key.part).number)
            if member.opened != opens:
                member.opened = opens
                self.tell(member, opens)

    def run(self) -> None:
        """Run until nothing can happen any more."""
        steps = 0
        while True:
            self.at.pop(steps, lambda: None)()
            self.deliver()
            choices: list[tuple[Member, Task] | Reduce] = list(self.harness.reduces)
            everybody = [*self.members.values(), *self.newcomers]
            choices += [(member, task) for member in everybody for task in member.ready()]
            if not choices:
                break
            choice = self.random.choice(choices)
            if isinstance(choice, Reduce):
                self.harness.reduces.remove(choice)
                self.harness.answer(choice)
            else:
                self.push(*choice)
            steps += 1
        for happening in self.at.values():
            happening()
        self.at.clear()
        self.deliver()

    def push(self, member: Member, task: Task) -> None:
        self.open(member, task.key)
        index, task.sent = task.sent, task.sent + 1
        payload = None
        if task.values is not None:
            payload = self.part(task, index).tobytes()
        begins = task.key.stream and not index
        operation, epoch = (task.operation, task.epoch) if begins else (None, 0)
        by = self.pushed.get((task.key, index))
        if by is None or (task.key.stream == 2 and all(other.done for other in by.values())):
            by = self.pushed[task.key, index] = {}  # transfers count anew when another worker has the member
        by[member.member_id] = task
        task.mates[index] = by
        push = Push(task.key, index, task.weight, payload is not None, operation, epoch=epoch)
        self.harness.receive(SEATS + member.line, push, *([] if payload is None else [payload]))

    def deliver(self) -> None:
        busy = True
        while busy:
            busy = False
            for member in [*self.members.values(), *self.newcomers]:
                for message, payloads in self.harness.sent(member.line):
                    busy = True
                    if isinstance(message, Failure) and message.error == OutlierError.__name__:
                        self.evict(member)
                        break
                    if not isinstance(message, Notice):
                        member.take(message, bytes(payloads[0]) if payloads else None)

    def serve(self) -> None:
        """Let all members send their state."""
        for member in self.members.values():
            self.harness.receive(SEATS + member.line, Serve())

    def join(self, name: str = "") -> None:
        """Let another worker join, under a new name or under that of a former member."""
        line = 20 + len(self.newcomers) + len(self.past) + len(self.members)
        while any(other.line == line for other in (*self.newcomers, *self.past, *self.members.values())):
            line += 1
        newcomer = Newcomer(-1, self, 0, (), line=line, name=name or f"n{line}")
        self.newcomers.append(newcomer)
        self.harness.join(SEATS + line, newcomer.name)

    def joined(self, newcomer: Newcomer) -> None:
        self.newcomers.remove(newcomer)
        self.members[newcomer.member_id] = newcomer
        self.harness.receive(SEATS + newcomer.line, Serve())

    def give_up(self, index: int) -> None:
        """Let a learner die."""
        if self.newcomers:
            self.deliver()
        if self.newcomers:
            newcomer = self.newcomers.pop(index % len(self.newcomers))
            self.past.append(newcomer)
            self.harness.lose(newcomer.line)
            self.harness.inbox.pop(SEATS + newcomer.line, None)

    def remove(self, member_id: int, politely: bool = False) -> None:
        """Let a member die or leave, unless it is the last."""
        if member_id in self.members and len(self.members) > 1:
            self.deliver()
        if member_id in self.members and len(self.members) > 1:
            gone = self.gone[member_id] = self.members.pop(member_id)
            self.past.append(gone)
            if politely:
                self.harness.leave(gone.line)
            else:
                self.harness.lose(gone.line)
            self.harness.inbox.pop(SEATS + gone.line, None)

    def evict(self, member: Member) -> None:
        """Take a member away that the coordinator has evicted."""
        self.gone[member.member_id] = self.members.pop(member.member_id)
        self.past.append(member)
        self.evicted.append(member)

    def expected(
        self, key: ExchangeKey, index: int, operation: Operation, member_id: int = -1
    ) -> tuple[float, bytes | None]:
        """Return weight and bytes of a slice, from what members pushed, in their order; or ``member_id``'s portion."""
        return self.outcome(self.pushed[key, index], index, operation, member_id)

    def outcome(
        self, pushed: dict[int, Task], index: int, operation: Operation, member_id: int = -1
    ) -> tuple[float, bytes | None]:
        """Return the same, if these had pushed it."""
        bad = self.not_finite_of(pushed, index, operation)
        if bad and self.nonfinite is OnNonFinite.SKIP:
            return 0, None
        tasks = {member_id: task for member_id, task in sorted(pushed.items()) if member_id not in bad}
        total = sum(task.weight for task in tasks.values())
        gave = {member_id: task for member_id, task in tasks.items() if task.values is not None}
        if operation.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            if not any(task.weight > 0 for task in gave.values()):
                return total, None
            counted = [task.weight for task in tasks.values() if task.weight > 0]
            parts = [(np.float32(t.weight), self.part(t, index)) for t in gave.values() if t.weight > 0]
            out = np.zeros_like(parts[0][1])
            for weight, part in parts:
                out += weight * part
            return total, (out / np.float32(sum(counted))).tobytes()
        if not gave:
            return total, None
        if operation.kind in PORTIONED:
            place = list(tasks).index(member_id)
            rows = [self.part(task, index).reshape(len(tasks), -1)[place] for task in gave.values()]
            return total, b"".join(row.tobytes() for row in rows)
        return total, b"".join(self.part(task, index).tobytes() for task in gave.values())

    def not_finite(self, key: ExchangeKey, index: int) -> set[int]:
        """Return the members that have pushed a value to a slice that is not finite, and counts."""
        pushed = self.pushed.get((key, index), {})
        return self.not_finite_of(pushed, index, next(iter(pushed.values())).operation) if pushed else set()

    def not_finite_of(self, pushed: dict[int, Task], index: int, operation: Operation) -> set[int]:
        """Return the same, if these had pushed it."""
        if not self.nonfinite.sifts or operation.op is not Op.MEAN:
            return set()
        gave = {member_id: task for member_id, task in pushed.items() if task.values is not None and task.weight > 0}
        buckets = {member_id: task for member_id, task in gave.items() if task.key.stream == Stream.BUCKET}
        return {member_id for member_id, task in buckets.items() if not np.isfinite(self.part(task, index)).all()}

    @staticmethod
    def part(task: Task, index: int) -> Array:
        assert task.values is not None
        return part_of(task.operation, task.layout, task.values, index)


def contribution(
    salt: int, member_id: int, key: ExchangeKey, operation: Operation, attempt: int
) -> tuple[float, Array | None]:
    """Return weight and values of ``member_id``, of very different magnitudes, so that the order of a sum shows."""
    chance = random.Random(f"{salt} {member_id} {tuple(key)} {attempt}")
    weight = chance.choice([0.0, 0.5, 1.0, 1.0, 3.25])
    if not gives(operation, member_id, key):
        return weight, None
    if operation.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) and chance.random() < 0.15:
        return weight, None
    return weight, floats(*[chance.gauss() * 10.0 ** chance.randint(-4, 4) for _ in range(operation.numel)])
