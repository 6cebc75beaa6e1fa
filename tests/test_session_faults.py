"""Tests that the laws of real workers find faults: each is planted in the product, and some script fails with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradserver import reducer
from gradserver.engine import Engine
from gradserver.engine.commands import Command, Record, Reduce, Send
from gradserver.engine.control import learners as control_learners, restore
from gradserver.engine.control.group.sessions import Sessions
from gradserver.engine.events import Event
from gradserver.engine.orders import Configure, RemoteOrder
from gradserver.engine.policy import Lateness, Policy
from gradserver.engine.records import Boundary, Entered, Epoch, Reset, Round
from gradserver.engine.shard import ShardEngine
from gradserver.lossy import Owed
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import Op, Stream
from gradserver.protocol.messages import Membership, Result, RoundDone
from gradserver.protocol.messages.recovery import Resumed, Standing
from gradserver.worker.boundaries import Boundaries
from gradserver.worker.learner import _Incoming
from gradserver.worker.member import inventory, sendqueue
from gradserver.worker.member.announced import Announced
from gradserver.worker.member.carryover import CarryOver
from gradserver.worker.member.coder import Coder
from gradserver.worker.member.exchange import Exchange
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.recovery import Recovery
from gradserver.worker.member.retained import Retained
from gradserver.worker.member.sendqueue import ShardTraffic
from tests import fibers
from tests.lossy_session_group import LossyGroup
from tests.session_group import Act, Group, LateGroup
from tests.session_scripts import check, script, script_of_parts, script_of_promotions

SCRIPTS = 150
"""Scripts in which a fault must show."""
Plant = Callable[[pytest.MonkeyPatch], None]


pytestmark = pytest.mark.usefixtures("session_code")


# ── what is summed ────────────────────────────────────────────────────────────────────────────────────


def sums(change: Callable[[Reduce], Reduce], spoil: Callable[[bytes], bytes] = bytes) -> Plant:
    """Plant a fault in what is summed of means: ``change`` what goes in, and ``spoil`` what comes out."""
    right = reducer.reduce

    def wrong(command: Reduce) -> Any:
        is_mean = command.operation.op is Op.MEAN and command.contributions
        done = right(change(command) if is_mean else command)
        return spoil(bytes(done)) if is_mean and isinstance(done, bytes | bytearray | memoryview | np.ndarray) else done

    return lambda patch: patch.setattr(reducer, "reduce", wrong)


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:] if data else data


def _twice(command: Reduce) -> Reduce:
    return command._replace(contributions=[command.contributions[0], *command.contributions])


def _one_less(command: Reduce) -> Reduce:
    return command._replace(contributions=command.contributions[1:] or command.contributions)


def _heavier(command: Reduce) -> Reduce:
    first, *others = command.contributions
    return command._replace(contributions=[first._replace(weight=first.weight * 3), *others])


def _collectives_twice(patch: pytest.MonkeyPatch) -> None:
    right = reducer.reduce

    def wrong(command: Reduce) -> Any:
        is_sum = command.operation.op is Op.SUM and command.key.stream == Stream.COLLECTIVE
        return right(_twice(command) if is_sum else command)

    patch.setattr(reducer, "reduce", wrong)


def _earlier(patch: pytest.MonkeyPatch) -> None:
    """Sum what a member gave to the round before."""
    right, before = reducer.reduce, dict[object, Any]()

    def wrong(command: Reduce) -> Any:
        first, *others = command.contributions
        where = command.operation, command.key.part, command.slice, first.member_id, command.nbytes
        old, before[where] = before.get(where), first
        if command.operation.op is Op.MEAN and old is not None and old.payload is not None:
            command = command._replace(contributions=[first._replace(payload=old.payload), *others])
        return right(command)

    patch.setattr(reducer, "reduce", wrong)


# ── what a coordinator says and writes ────────────────────────────────────────────────────────────────


def says(change: Callable[[list[Command]], Sequence[Command]], who: type[Engine | ShardEngine] = Engine) -> Plant:
    """Plant a fault in the commands that follow from an event."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = who.handle

        def wrong(self: Any, event: Event, now: float) -> list[Command]:
            return list(change(right(self, event, now)))

        patch.setattr(who, "handle", wrong)

    return plant


def records(change: Callable[[Any], Any], *kinds: type) -> Plant:
    """Plant a fault in records of these kinds: ``change`` gives another one, or None for none."""

    def changed(commands: list[Command]) -> Iterator[Command]:
        for command in commands:
            if not (isinstance(command, Record) and isinstance(command.record, kinds)):
                yield command
            elif (record := change(command.record)) is not None:
                yield Record(record)

    return says(lambda commands: list(changed(commands)))


def silent(kind: type, which: Callable[[Any], bool] = lambda _: True) -> Plant:
    """Plant a coordinator that does not send these messages."""

    def is_lost(command: Command) -> bool:
        return isinstance(command, Send) and isinstance(command.message, kind) and which(command.message)

    return says(lambda commands: [command for command in commands if not is_lost(command)])


def _boundary_first(commands: list[Command]) -> list[Command]:
    """Write a promotion before the round that ends with it."""
    if not any(isinstance(one, Record) and isinstance(one.record, Round) for one in commands):
        return commands
    return sorted(commands, key=lambda one: not (isinstance(one, Record) and isinstance(one.record, Boundary)))


def _told_first(commands: list[Command]) -> list[Command]:
    return sorted(commands, key=lambda one: isinstance(one, Record))


def _one_gets_another_bit(commands: list[Command]) -> list[Command]:
    bad = {place for place, one in enumerate(commands) if isinstance(one, Send) and isinstance(one.message, Result)}
    spoilt = []
    for place, one in enumerate(commands):
        if place in sorted(bad)[:1] and isinstance(one, Send) and one.payloads:
            one = one._replace(payloads=[_flip(bytes(payload)) for payload in one.payloads])
        spoilt.append(one)
    return spoilt


def _short(record: Round) -> Round:
    done = record.record
    cut = tuple((member_id, part, max(slices - 1, 0)) for member_id, part, slices in done.cut)
    return replace(record, record=replace(done, cut=cut))


def _left_out(record: Round) -> Round:
    done = record.record
    return replace(record, record=replace(done, weights=(0.0, *done.weights[1:])))


# ── what workers do ───────────────────────────────────────────────────────────────────────────────────


def method(owner: object, name: str, wrong: object) -> Plant:
    """Plant another function in place of the right one."""
    return lambda patch: patch.setattr(owner, name, wrong)


def _spoilt_state(patch: pytest.MonkeyPatch) -> None:
    right = _Incoming.take

    def wrong(self: _Incoming, nbytes: int) -> Any:
        memory = right(self, nbytes)
        memory[-1:] ^= nbytes % 8 == 0
        return memory

    patch.setattr(_Incoming, "take", wrong)


def _written_apart(patch: pytest.MonkeyPatch) -> None:
    """Write every ninth result with another bit at a worker."""
    right, count = Exchange.write, iter(range(10**9))

    def wrong(self: Exchange, result: Result, payload: Any) -> None:
        spoils = payload is not None and self.key.stream == Stream.BUCKET and next(count) % 9 == 8
        right(self, result, _flip(bytes(payload)) if spoils else payload)

    patch.setattr(Exchange, "write", wrong)


def _a_shard_knows_no_epoch(patch: pytest.MonkeyPatch) -> None:
    right = restore.reopen

    def wrong(registry: Any, group: Any, order: Callable[[RemoteOrder], None], shard: int = 0) -> None:
        right(registry, group, lambda one: None if isinstance(one, Configure) else order(one), shard)

    patch.setattr("gradserver.engine.control.shard_replacement.reopen", wrong)


def _forgets_learners(patch: pytest.MonkeyPatch) -> None:
    """Forget at a restart which learners contribute to the open round."""
    right = restore._entered

    def wrong(group: Any, found: Any) -> Entered | None:
        entered = right(group, found)
        return None if entered is None or entered.round == group.rounds.number else entered

    patch.setattr(restore, "_entered", wrong)


def _given_twice(patch: pytest.MonkeyPatch) -> None:
    """Keep what a worker gave too late, though it is added to what it gives next."""
    right = CarryOver.add_to

    def wrong(self: CarryOver, part: int, *arguments: Any) -> Any:
        kept = dict(self._slices.get(part, {}))
        heavier = right(self, part, *arguments)
        self._slices[part] = kept
        return heavier

    patch.setattr(CarryOver, "add_to", wrong)


def _encoded_again(patch: pytest.MonkeyPatch) -> None:
    """Encode what is sent once more, so that it takes along what it had left itself."""
    right = Coder.encode

    def wrong(self: Coder, index: int) -> Any:
        self._rooms.pop(index, None)
        return right(self, index)

    patch.setattr(Coder, "encode", wrong)


def _owed_twice(patch: pytest.MonkeyPatch) -> None:
    """Take twice what the round before has left."""
    right, around = Owed.carry, Owed.around

    def wrong(self: Owed, elements: slice) -> tuple[Any, Any]:
        before, after = around(self, elements)
        return before * np.float32(2), after

    patch.setattr(Owed, "carry", lambda self, elements: np.multiply(left := right(self, elements), 2, out=left))
    patch.setattr(Owed, "around", wrong)


FAULTS: dict[str, Plant] = {
    "what a worker gives too late counts again and again": _given_twice,
    "a coordinator forgets at a restart which learners contribute": _forgets_learners,
    "a learner waits for a donor that was lost": method(control_learners, "_have_others_go_on", lambda *_: None),
    "one bit of a mean is another": sums(lambda command: command, _flip),
    "one member gets another bit than the others": says(_one_gets_another_bit),
    "a worker writes another bit than it got": _written_apart,
    "a contribution is in the sum twice": sums(_twice),
    "a contribution of the round before is in the sum": _earlier,
    "a contribution is not in the sum, and the ledger says that it is": sums(_one_less),
    "a contribution counts with another weight": sums(_heavier),
    "a contribution to a collective counts twice": _collectives_twice,
    "a member does not count in the ledger, though it does in the sum": records(_left_out, Round),
    "the ledger lacks a round": records(lambda one: one if one.record.round % 3 != 1 else None, Round),
    "the ledger counts a slice less of a member that was lost": records(_short, Round),
    "the boundary is written before its round": says(_boundary_first),
    "all is told before it is written": says(_told_first),
    "no boundary is written": records(lambda _: None, Boundary),
    "no learner is written down as entered": records(lambda _: None, Entered),
    "no membership is written": records(lambda one: one if one.epoch == 1 else None, Epoch),
    "a learner gets a state with another bit": _spoilt_state,
    "members do not hear of a membership": silent(Membership),
    "members do not hear that a round is over": silent(RoundDone, lambda done: done.round % 2 == 1),
    "a member that resumes gets no answer": silent(Resumed),
    "nobody hears that a recovery is over": silent(Standing),
    "what has no result after a recovery is not pushed again": method(Exchange, "rewind", lambda _: 0),
    "a member says that it holds nothing": method(Inventory, "spans", lambda *_: []),
    "a member keeps no results": method(Retained, "keep_slice", lambda *_: None),
    "a member pushes on in a recovery": method(ShardTraffic, "hold", lambda _: None),
    "a member stays in the membership that it began with": method(Boundaries, "adopt", lambda *_: None),
    "a member does not hear that a round is over": method(Announced, "round_done", lambda *_: []),
    "those that are away are waited for too long": method(Sessions, "hurry", lambda *_: None),
    "a data shard does not know the membership": _a_shard_knows_no_epoch,
    "a member that says what it holds waits for itself": method(fibers.VirtualThreading, "RLock", fibers.Lock),
    "a member says how long frames are that it lacks": method(inventory, "Op", SimpleNamespace(FRAMED=None)),
    "a part of a collective is over though others are open": method(Recovery, "_take_back", lambda _: None),
    "what is given again goes behind later collectives": method(sendqueue, "_order", lambda _: 0),
    "what a lossy codec keeps back is in what is sent again": _encoded_again,
    "what a lossy codec keeps back counts twice": _owed_twice,
    "nobody hears that what was kept back is lost": records(lambda _: None, Reset),
    "what a void result has kept back counts": method(Owed, "keep", lambda *_: None),
}


def _gathers(seed: int) -> Group:
    """Make a group that gathers objects, and loses its coordinator again and again."""
    chance = random.Random(seed)
    return Group(3, [[8]], [Act("gather_object", 6)] * 6, seed, (1.0,), [chance.randint(0, 30) for _ in range(6)])


def _late(seed: int) -> Group:
    """Make a group that goes on without the slowest member."""
    policy = Policy(1, 8, lateness=Lateness(backup=1, grace=0.0))
    return LateGroup(3, [[8]], [Act()] * 5, seed, (1.0,), (), policy)


def _replaced_twice(seed: int) -> Group:
    """Make a group that gathers, and loses its data shard twice before."""
    group = Group(2, [[40]], [Act(), Act(), Act(), Act("all_gather", 20), Act()], seed, (1.0, 1.0))
    for step in (5, 100):
        group.world.at[step].append(partial(group.world.kill_any_shard, 0))
    return group


def _at_once(seed: int) -> Group:
    """Make a group that has several collectives under way when its coordinator is lost."""
    fuses = [random.Random(seed).randint(5, 40) for _ in range(2)]
    return Group(3, [[9]], [Act("several", 9), Act("several", 20), Act()], seed, (1.0, 1.0), fuses)


def _lossy(seed: int) -> Group:
    """Make a group with lossy wires, and lose its coordinator, connections and a member."""
    chance = random.Random(seed)
    rates, fuses = chance.choice(((1.0,), (1.0, 1.0))), [chance.randint(20, 60)] * chance.randint(0, 1)
    group = LossyGroup(2, [20, 12], ["int8", "bf16"], 5, seed, rates, fuses)
    for what in (group.break_line, group.break_line, group.kill)[: chance.randint(0, 3)]:
        group.world.at[chance.randint(10, 100)].append(partial(what, chance.randint(0, 1)))
    return group


SCRIPTS_OF: dict[str, Callable[[int], Group]] = {
    "what a worker gives too late counts again and again": _late,
    "a coordinator forgets at a restart which learners contribute": script_of_promotions,
    "a learner waits for a donor that was lost": script_of_promotions,
    "a data shard does not know the membership": _replaced_twice,
    "a member says how long frames are that it lacks": _gathers,
    "a part of a collective is over though others are open": script_of_parts,
    "a member that says what it holds waits for itself": script_of_parts,
    "what is given again goes behind later collectives": _at_once,
    "what a lossy codec keeps back is in what is sent again": _lossy,
    "what a lossy codec keeps back counts twice": _lossy,
    "nobody hears that what was kept back is lost": _lossy,
    "what a void result has kept back counts": _lossy,
}
"""Scripts of faults that show too seldom in those of `tests.session_scripts`."""


SHOWN_BY = {
    "a worker writes another bit than it got": 0,
    "a member says that it holds nothing": 0,
    "a member says how long frames are that it lacks": 0,
    "what is given again goes behind later collectives": 1,
    "what a lossy codec keeps back is in what is sent again": 1,
    "what a worker gives too late counts again and again": 5,
    "a coordinator forgets at a restart which learners contribute": 14,
    "no learner is written down as entered": 12,
    "no boundary is written": 12,
    "a learner gets a state with another bit": 12,
    "members do not hear of a membership": 7,
    "a member keeps no results": 4,
    "a member pushes on in a recovery": 0,
    "a member stays in the membership that it began with": 7,
    "the ledger counts a slice less of a member that was lost": 42,
    "the boundary is written before its round": 12,
    "those that are away are waited for too long": 20,
    "a member that says what it holds waits for itself": 9,
    "a part of a collective is over though others are open": 6,
    "what a lossy codec keeps back counts twice": 62,
    "nobody hears that what was kept back is lost": 6,
    "what a void result has kept back counts": 110,
}
"""Scripts to begin with, for faults that few scripts show. If such a script shows its fault no more, all are tried."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = SCRIPTS_OF.get(fault, script)
    with monkeypatch.context() as planted:
        FAULTS[fault](planted)
        shown_by = next((seed for seed in (SHOWN_BY.get(fault, 2), *range(SCRIPTS)) if fails(make(seed))), None)

    assert shown_by is not None, "no law fails"
    assert not fails(make(shown_by)), f"a law fails in script {shown_by} without the fault"


def fails(group: Group) -> bool:
    """Return true if a group breaks a law, or the product refuses to go on with it."""
    try:
        check(group)
    except (AssertionError, GradServerError):
        return True
    return False
