"""Laws of sub-groups, for any overlapping sub-groups and any order.

A model of what members wait for says which sub-groups become complete, which never can, and what is summed in them.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from gradserver import LocalCluster
from gradserver.engine import Engine
from gradserver.engine.commands import Close, Send
from gradserver.engine.events import Branched, Disconnected, Event, Received, Tick
from gradserver.engine.policy import Policy
from gradserver.protocol.messages import Failure, Join, Leave, Split, Welcome
from gradserver.worker.client import Worker

TIMEOUT = 50.0
SEEDS = st.integers(0, 2**32 - 1)

Members = tuple[int, ...]


def some_groups(chance: random.Random, world: int, most: int) -> list[Members]:
    """Return sub-groups, which may overlap and be equal."""
    ranks = range(world)
    return [tuple(sorted(chance.sample(ranks, chance.randint(1, world)))) for _ in range(chance.randint(1, most))]


# ── orders, and deaths, at the engine ─────────────────────────────────────────────────────────────────


@dataclass
class Asking:
    """Members around an engine, each of which asks for sub-groups one after the other, and waits for each."""

    world: int
    elastic: bool
    orders: dict[int, deque[Members]]
    """Ids that each member is yet to ask for."""
    engine: Engine = field(init=False)
    now: float = 0.0
    alive: set[int] = field(default_factory=set)
    waits: dict[int, tuple[int, Members]] = field(default_factory=dict)
    """Connection and ids of what each member waits for."""
    made: dict[str, dict[int, Welcome]] = field(default_factory=dict)
    """Welcomes by sub-group and member."""
    errors: dict[int, Failure] = field(default_factory=dict)
    branches: dict[int, int] = field(default_factory=dict)
    """Members by connection of a sub-group."""
    connections: int = 100

    def __post_init__(self) -> None:
        self.engine = Engine({"default": Policy(1, self.world) if self.elastic else self.world})
        for member in range(self.world):
            self.feed(Received(member + 1, Join("default", f"w{member}", member, self.world, TIMEOUT)))
        self.alive = set(range(self.world))

    def feed(self, event: Event) -> None:
        """Give the engine an event, and the members what it says of sub-groups."""
        self.now += 0.001
        for command in self.engine.handle(event, self.now):
            if isinstance(command, Send) and (member := self.branches.get(command.connection)) is not None:
                self.hear(member, command.connection, command.message)
            elif isinstance(command, Close):
                self.branches.pop(command.connection, None)
        self.engine.validate()

    def hear(self, member: int, connection: int, message: object) -> None:
        waiting = self.waits.get(member)
        if waiting is None or waiting[0] != connection:
            return
        if isinstance(message, Welcome):
            self.made.setdefault(message.group, {})[member] = message
            del self.waits[member]
        elif isinstance(message, Failure):
            self.errors[member] = message
            del self.waits[member]

    def ask(self, member: int) -> None:
        self.connections += 1
        ids = self.orders[member].popleft()
        self.waits[member] = self.connections, ids
        self.branches[self.connections] = member
        epoch = self.engine.control.groups["default"].members.epoch
        self.feed(Branched(self.connections, member + 1, Split("default", epoch, ids, TIMEOUT)))

    def die(self, member: int) -> None:
        """Lose a member: all of its connections, in the order of the server, or the other one."""
        self.alive.discard(member)
        self.waits.pop(member, None)
        lost = [one for one, owner in self.branches.items() if owner == member]
        for one in [*lost, member + 1] if self.connections % 2 else [member + 1, *lost]:
            self.branches.pop(one, None)
            self.feed(Disconnected(one, "it died"))

    def held_up(self) -> set[int]:
        """Return members that have got an error, and ask no more, and those that wait for such a one."""
        found = set(self.errors)
        while more := {one for one, (_, ids) in self.waits.items() if found & set(ids)} - found:
            found |= more
        return found

    def ready(self) -> list[int]:
        """Return members that can ask for one more."""
        idle = self.alive - self.waits.keys() - self.errors.keys()
        return [member for member in sorted(idle) if self.orders[member]]


@settings(max_examples=150)
@given(SEEDS, st.booleans(), st.booleans())
def test_sub_groups_in_any_order_are_complete_or_members_that_wait_for_each_other_are_told(
    seed: int, elastic: bool, shuffled: bool
) -> None:
    chance = random.Random(seed)
    world = chance.randint(2, 5)
    groups = some_groups(chance, world, 6)
    orders = {member: deque(ids for ids in groups if member in ids) for member in range(world)}
    if shuffled:
        for order in orders.values():
            chance.shuffle(order)
    asking = Asking(world, elastic, {member: order.copy() for member, order in orders.items()})
    while ready := asking.ready():
        asking.ask(chance.choice(ready))
    complete = model(orders)
    if sum(complete.values()) == len(groups):
        assert not asking.errors
        assert not asking.waits
        made = sorted(welcomes[min(welcomes)].names for welcomes in asking.made.values())
        assert made == sorted(tuple(f"w{member}" for member in ids) for ids in groups)
    else:
        assert asking.errors
        assert {failure.error for failure in asking.errors.values()} == {"CollectiveMismatchError"}
    for welcomes in asking.made.values():
        assert [welcomes[member].rank for member in sorted(welcomes)] == list(range(len(welcomes)))
        assert len({welcome.epoch for welcome in welcomes.values()}) == 1
    assert asking.waits.keys() <= asking.held_up()
    for member in asking.alive:
        for connection in [one for one, owner in asking.branches.items() if owner == member]:
            asking.feed(Received(connection, Leave("done")))
    assert set(asking.engine.control.groups) == {"default"}


def model(orders: dict[int, deque[Members]]) -> dict[Members, int]:
    """Return how often each sub-group becomes complete, if each member waits in one at a time."""
    left = {member: order.copy() for member, order in orders.items()}
    complete: dict[Members, int] = {}
    while True:
        heads = {member: order[0] for member, order in left.items() if order}
        done = next((ids for ids in heads.values() if all(heads.get(one) == ids for one in ids)), None)
        if done is None:
            return complete
        complete[done] = complete.get(done, 0) + 1
        for member in done:
            left[member].popleft()


@settings(max_examples=150)
@given(SEEDS, st.booleans())
def test_members_that_die_at_any_time_are_waited_for_by_none(seed: int, elastic: bool) -> None:
    chance = random.Random(seed)
    world = chance.randint(2, 5)
    groups = some_groups(chance, world, 6)
    orders = {member: deque(ids for ids in groups if member in ids) for member in range(world)}
    asking = Asking(world, elastic, orders)
    dead: set[int] = set()
    while True:
        ready = asking.ready()
        if len(asking.alive) > 1 and chance.random() < 0.15:
            dead.add(victim := chance.choice(sorted(asking.alive)))
            asking.die(victim)
        elif ready:
            asking.ask(chance.choice(ready))
        else:
            break
    assert not (elastic and asking.waits)
    assert asking.waits.keys() <= asking.held_up()
    if elastic:
        assert not asking.errors
    for failure in asking.errors.values():
        assert failure.error in ("WorkerLostError", "CollectiveMismatchError")
        assert any(f"'w{member}'" in failure.text for member in dead)
    asking.now += 2 * TIMEOUT
    asking.feed(Tick())
    assert not asking.waits
    assert not asking.engine.control._registry.forming


# ── collectives ───────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_what_overlapping_sub_groups_exchange_in_any_order_is_what_the_model_says(seed: int) -> None:
    chance = random.Random(seed)
    world = chance.randint(2, 4)
    groups = some_groups(chance, world, 5)
    program: list[tuple[int, str]] = []
    for index in range(len(groups)):
        program.append((index, "make"))
        program += [
            (chance.randint(-1, index), chance.choice(["sum", "gather", "close", "async"]))
            for _ in range(chance.randint(0, 5))
        ]

    with LocalCluster(world, timeout=20.0) as cluster:
        results = cluster.run(lambda worker: run(worker, groups, program))
    for member, seen in enumerate(results):
        assert seen == expected(member, world, groups, program)


def run(worker: Worker, groups: list[Members], program: list[tuple[int, str]]) -> list[Any]:
    """Do what the program says, as far as this worker has part in it."""
    made: dict[int, Worker] = {-1: worker}
    seen, late = list[Any](), []
    for step, (index, what) in enumerate(program):
        if what == "make":
            if (group := worker.subgroup(groups[index])) is not None:
                made[index] = group
        elif (group := made.get(index)) is not None:
            data = np.full(4, worker.rank + step, np.int64)
            if what == "sum":
                group.all_reduce(data, "sum")
                seen.append(int(data[0]))
            elif what == "gather":
                seen.append(group.all_gather(data)[:, 0].tolist())
            elif what == "async":
                late.append((group.all_reduce(data, "max", async_op=True), data))
            elif index >= 0:
                for handle, _ in late:
                    handle.wait()
                made.pop(index).close()
    for handle, data in late:
        handle.wait()
        seen.append(int(data[0]))
    return seen


def expected(member: int, world: int, groups: list[Members], program: list[tuple[int, str]]) -> list[Any]:
    """Return what `run` returns."""
    there, seen, late = {-1: tuple(range(world))}, list[Any](), list[int]()
    for step, (index, what) in enumerate(program):
        if what == "make":
            there[index] = groups[index]
        elif index in there and member in there[index]:
            given = [one + step for one in there[index]]
            if what == "async":
                late.append(max(given))
            elif what == "close" and index >= 0:
                del there[index]
            elif what != "close":
                seen.append(sum(given) if what == "sum" else given)
        elif what == "close" and index >= 0:
            there.pop(index, None)
    return [*seen, *late]
