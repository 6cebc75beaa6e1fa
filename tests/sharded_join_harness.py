"""Workers that join a durable group with data shards. Any process may be lost between any two commands.

A `Latecomer` does what a learner does. It attends each shard, gets the state, takes results unasked until it has caught
up, and then is a `Spread` member. If its connections break before it contributes, it tries again under its name, as a
worker that a supervisor starts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gradserver.engine.events import Received
from gradserver.protocol.exchange import ExchangeKey, Stream, is_state, layout_of
from gradserver.protocol.messages import (
    Agreed,
    Attended,
    Enter,
    Entered,
    Failure,
    Join,
    Membership,
    Message,
    Ready,
    Result,
    RoundDone,
    Scope,
    Serve,
    Welcome,
)
from gradserver.protocol.messages.recovery import Resumed, Span
from gradserver.protocol.shards import Share
from tests.elastic_harness import Step, state
from tests.engine_harness import TIMEOUT, Outcome, Task, all_reduce, bucket, proposal
from tests.sharded_crash_harness import Sharded, Spread

ATTEMPTS = 5
"""Attempts of one name, at most."""


@dataclass
class Latecomer(Spread):
    """A worker that joins while the others follow the program, and then follows it, too."""

    name: str = ""
    inside: bool = False
    """True if it does what a member does."""
    first: int = -1
    """The first round that it contributes to, when it was told."""
    agreed: int = 0
    """The number of sections of the plan that it has agreed to."""
    number: int = 0
    """The number of the transfer of its state."""
    listens: bool = False
    begins: int = -1
    """The first round of which it lacks results, counted from its state; -1 while it has none."""
    ready_said: bool = False
    unasked: dict[tuple[ExchangeKey, int], tuple[Outcome, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def joinable(self) -> Joinable:
        assert isinstance(self.cluster, Joinable)
        return self.cluster

    def under_way(self) -> list[Task]:
        return super().under_way() if self.inside else list(self.tasks)

    def weight(self) -> float:
        return super().weight() if self.round >= self.first else 0.0

    def adopt(self, epoch: int, ended: int) -> None:
        if ended >= self.first:
            super().adopt(epoch, ended)

    def hear(self, place: int, message: Message, payload: bytes | None) -> None:
        if self.inside:
            if not (isinstance(message, Result) and self.is_past(message.key)):
                super().hear(place, message, payload)
            return
        match message:
            case Failure(scope=Scope.CONNECTION):
                self.joinable.turned_away(self, place)
            case Welcome(member_ids=member_ids):
                assert message.joins
                self.member_id, self.member_ids, self.epoch = member_ids[message.rank], member_ids, message.epoch
                self.token, self.urls, self.version = message.token, message.shards, message.founded
                self.stands = set(range(len(message.shards) + 1))
                self.attending = self.stands - {0}
                self.begin_to_join()
            case Attended():
                self.awaited.discard(place)
                self.begin_to_join()
            case Agreed() if self.agreed + 1 < len(self.spread.modules):
                self.agreed += 1
                self.propose()
            case Agreed():
                self.spread.say_to(self, 0, Enter(0, self.joinable.random.random() < 0.5))
            case Membership():
                self.announced[message.epoch] = message
            case Entered(number):
                self.first = number
                self.catch_up()
            case RoundDone(number, epoch, transfers):
                self.over, self.ended[number] = number, epoch
                for transfer in transfers:
                    if transfer.learner == self.member_id:
                        task = state(transfer, number + 1, self.member_id)
                        task.layout = self.spread.share(task).layout
                        self.states.append(task)
                        self.tasks, self.unasked, self.begins, self.ready_said = [task], {}, -1, False
                        self.number, self.listens = transfer.number, not transfer.waits
                self.catch_up()
            case Result(key=key) | Failure(key=ExchangeKey() as key) if is_state(key):
                self.take_state(key, message, payload)
            case Result(key=key, slice=index):
                assert key.stream == Stream.BUCKET
                self.unasked[key, index] = (message.weight, payload), message.weights
                self.proven[key, index] = message
                self.catch_up()
            case Resumed() if place == 0:
                assert self.first >= 0, "a worker that holds nothing is asked what it holds"
                self.come_in(self.begins)
                super().hear(place, message, payload)
            case _:
                super().hear(place, message, payload)

    def begin_to_join(self) -> None:
        """Propose a plan, once all shards have accepted it."""
        if not self.awaited and not self.attending:
            self.spread.say_to(self, 0, Serve())
            self.propose()

    def propose(self) -> None:
        """Propose what it wants to exchange, one module after the other."""
        modules = self.spread.modules
        self.spread.say_to(self, 0, proposal(modules, self.agreed), modules[self.agreed].encoded)

    def is_past(self, key: ExchangeKey) -> bool:
        """Return whether it has got this another way: with its state."""
        return is_state(key) or (key.stream == Stream.BUCKET and key.number < min(self.round, self.first))

    def take_state(self, key: ExchangeKey, message: Message, payload: bytes | None) -> None:
        """Take a part of its state, or the reason for its absence."""
        for task in self.tasks:
            if task.key != key or task.done:
                continue
            if isinstance(message, Failure):
                self.tasks = []
                self.spread.say_to(self, 0, Enter(self.number))
                return
            assert isinstance(message, Result)
            task.answers[message.slice] = message.weight, payload
            if task.done:
                data = task.answers[0][1]
                assert data is not None
                self.tasks, self.begins = [], int(np.frombuffer(data, np.float32)[0])
                self.catch_up()

    def catch_up(self) -> None:
        """Go through rounds with all results here, say so once, and become a member when that was heard."""
        if self.begins < 0 or self.inside:
            return
        while self.listens and self.begins <= self.over and self.has(self.begins):
            self.keep(self.begins)
            self.begins += 1
        if self.first >= 0:
            if self.first == self.begins:
                self.come_in(self.first)
        elif not self.ready_said and (not self.listens or self.begins > self.over):
            self.ready_said = True
            self.spread.say_to(self, 0, Ready(self.number))

    def keep(self, number: int) -> None:
        """Hold the results of a round that it has gone through, as a member does."""
        for part, index in self.joinable.slices(number):
            outcome, weights = self.unasked[bucket(number, part), index]
            self.kept[part, index] = number, outcome, weights

    def has(self, number: int) -> bool:
        """Return whether all results of a round are here."""
        return all((bucket(number, part), index) in self.unasked for part, index in self.joinable.slices(number))

    def come_in(self, number: int) -> None:
        """Do what a member does from round ``number`` on: the first that it contributes to, or the one before."""
        self.tasks, self.inside, self.round, self.at = [], True, number, self.step_of(number)
        self.joinable.came_in(self)
        for ended in [ended for ended in self.ended if ended < number]:
            del self.ended[ended]
        if number < self.first:  # others hold what it lacks of it
            self.begin(self.cluster.program[self.at])
            for task in self.tasks:
                for index in range(task.layout.count):
                    if (task.key, index) in self.unasked:
                        outcome, weights = self.unasked[task.key, index]
                        task.answers[index] = outcome
                        self.kept[task.key.part, index] = number, outcome, weights
            self.go_on()

    def step_of(self, number: int) -> int:
        """Return the place of a round in the program."""
        rounds = [at for at, step in enumerate(self.cluster.program) if step.kind is None]
        return rounds[number] if number < len(rounds) else len(self.cluster.program)

    def next(self) -> None:
        super().next()
        if self.round == self.first:  # it has no part in collectives before that round
            self.at = self.step_of(self.first)


class Joinable(Sharded):
    """A group that others join."""

    def __init__(
        self,
        world: int,
        buckets: Sequence[int],
        program: Sequence[Step],
        seed: int,
        rates: tuple[float, ...],
        sections: Sequence[int] = (),
    ) -> None:
        self.waiting: list[Latecomer] = []
        """Workers that are not inside."""
        self.cut_off_early: list[Latecomer] = []
        """Workers that were cut off before they were inside."""
        self.attempts: Counter[str] = Counter()
        self.again: list[str] = []
        """Names of workers that try again."""
        super().__init__(world, buckets, program, seed, rates, sections=sections)

    def everybody(self) -> list[Spread]:
        return [*self.members.values(), *self.waiting]

    def slices(self, number: int) -> list[tuple[int, int]]:
        """Return part and index of each slice of round ``number``."""
        return [(part, index) for part in self.parts_of(number) for index in range(self.share_of(part).layout.count)]

    def share_of(self, part: int) -> Share:
        """Return the shares of a bucket's slices."""
        operation = all_reduce(self.buckets[part])
        return self.share(Task(bucket(0, part), operation, layout_of(operation, 2), None, 0.0))

    def place_of(self, member: Spread, span: Span) -> int:
        if span.key.stream == Stream.BUCKET:  # a learner may hold it without having begun it
            return self.share_of(span.key.part).shard_of(span.first)
        return super().place_of(member, span)

    def join(self, name: str = "") -> None:
        """Let another worker join."""
        line = self.harness.number()
        newcomer = Latecomer(-1, self, 0, (), name=name or f"n{line}", standing=False)
        newcomer.lines = {0: line}
        self.attempts[newcomer.name] += 1
        self.waiting.append(newcomer)
        self.harness.feed(Received(line, Join("default", newcomer.name, -1, 0, TIMEOUT)))

    def came_in(self, newcomer: Latecomer) -> None:
        self.waiting.remove(newcomer)
        assert newcomer.member_id not in self.members
        self.members[newcomer.member_id] = newcomer

    def turned_away(self, newcomer: Latecomer, place: int) -> None:
        """End a connection on which it was told why it cannot join."""
        newcomer.lines.pop(place)
        self.cut_lines(newcomer, False)

    def cut_lines(self, member: Spread, noticed: bool) -> None:
        if not isinstance(member, Latecomer) or member.inside:
            super().cut_lines(member, noticed)
            return
        if member not in self.waiting:
            return
        self.waiting.remove(member)
        self.cut_off_early.append(member)
        for place, line in member.lines.items():
            self.harness.waiting.pop(line, None)
            self.notices.append(partial(self.tell_of_end, self.process_at(member, place), line, "connection reset"))
        if self.attempts[member.name] < ATTEMPTS:
            self.again.append(member.name)

    def choices_of(self, member: Spread) -> list[Callable[[], object]]:
        choices = super().choices_of(member)
        if self.again and member is next(iter(self.everybody())):
            choices.append(lambda: self.join(self.again.pop()))
        return choices
