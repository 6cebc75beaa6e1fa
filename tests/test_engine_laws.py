"""The engine's laws, for every order of events: random exchanges, interleavings, failures and noise.

A `Cluster` is an engine with clients that push what they may, in an order drawn from a seed. Each client's results are
compared with those of others, with exact arithmetic, and with those of other runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings, strategies as st

from gradserver.engine.commands import Reduce
from gradserver.engine.events import Disconnected, Garbled, NonFinite
from gradserver.engine.policy import OnNonFinite
from gradserver.protocol.dtypes import FLOAT32, UINT8
from gradserver.protocol.errors import (
    DeadlineError,
    GradServerError,
    MalformedMessageError,
    NonFiniteError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.exchange import (
    PORTIONED,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    Pool,
    Stream,
    gets,
    gives,
    layout_of,
    pool_of,
)
from gradserver.protocol.messages import Failure, Inquire, Leave, Message, Propose, Push, Result, RoundDone
from tests.engine_harness import (
    SEATS,
    TIMEOUT,
    Array,
    Harness,
    Outcome,
    Task,
    all_reduce,
    bucket,
    collective,
    floats,
    part_of,
    plan_of,
    reference,
    small_slices,
    transfer,
)
from tests.examples import examples
from tests.memory import Measured, growth_of

SLICE = 16
"""Bytes of a slice in these tests: four elements of float32."""

BARRIER = Operation(Kind.BARRIER, Op.NONE, UINT8, 0)


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


# ── what is exchanged ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Scenario:
    """The contributions of every worker, to everything that is exchanged."""

    world: int
    buckets: tuple[int, ...]
    rounds: int
    collectives: tuple[Operation, ...]
    transfers: tuple[tuple[int, int], ...]
    salt: int

    @cached_property
    def operations(self) -> dict[ExchangeKey, Operation]:
        """All exchanges, and their operations."""
        found = {
            bucket(number, part): all_reduce(size)
            for number in range(self.rounds)
            for part, size in enumerate(self.buckets)
        }
        found |= {collective(number): operation for number, operation in enumerate(self.collectives)}
        counts: dict[tuple[int, int], int] = {}
        for ends in self.transfers:
            number = counts[ends] = counts.get(ends, -1) + 1
            found[transfer(number, *ends)] = Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 5)
        return found

    def participants(self, key: ExchangeKey) -> list[int]:
        return [key.source, key.target] if key.stream == Stream.TRANSFER else list(range(self.world))

    def weight(self, rank: int, key: ExchangeKey) -> float:
        return contribution(self.salt, rank, key, self.operations[key])[0]

    def values(self, rank: int, key: ExchangeKey) -> Array | None:
        return contribution(self.salt, rank, key, self.operations[key])[1]


@lru_cache(maxsize=10_000)
def contribution(salt: int, rank: int, key: ExchangeKey, operation: Operation) -> tuple[float, Array | None]:
    """Return weight and values that ``rank`` gives, of very different magnitudes, so that the order of a sum shows."""
    chance = random.Random(f"{salt} {rank} {tuple(key)}")
    weight = chance.choice([0.0, 0.5, 1.0, 1.0, 1.0, 3.25])
    weighed = operation.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    if not gives(operation, rank, key) or (weighed and chance.random() < 0.15):
        return weight, None
    if weighed and weight == 0:
        return weight, np.full(operation.numel, np.nan, np.float32)  # does not count, whatever it is
    return weight, floats(*[chance.gauss() * 10.0 ** chance.randint(-4, 4) for _ in range(operation.numel)])


@st.composite
def scenarios(draw: st.DrawFn, least_world: int = 1) -> Scenario:
    world = draw(st.integers(least_world, 5))
    sizes = st.integers(1, 14)
    operations = [
        st.builds(all_reduce, sizes, st.sampled_from([Op.MEAN, Op.SUM])),
        st.just(BARRIER),
        st.builds(
            lambda n, root: Operation(Kind.BROADCAST, Op.NONE, FLOAT32, n, root), sizes, st.integers(0, world - 1)
        ),
        st.builds(lambda n: Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, n), sizes),
        st.builds(lambda n: Operation(Kind.REDUCE_SCATTER, Op.MEAN, FLOAT32, n * world), sizes),
        st.builds(lambda n: Operation(Kind.ALL_TO_ALL, Op.NONE, FLOAT32, n * world), sizes),
        st.builds(
            lambda n, root: Operation(Kind.SCATTER, Op.NONE, FLOAT32, n * world, root), sizes, st.integers(0, world - 1)
        ),
        st.builds(lambda n, root: Operation(Kind.GATHER, Op.NONE, FLOAT32, n, root), sizes, st.integers(0, world - 1)),
    ]
    ends = st.tuples(st.integers(0, world - 1), st.integers(0, world - 1)).filter(lambda pair: pair[0] != pair[1])
    return Scenario(
        world=world,
        buckets=tuple(draw(st.lists(sizes, min_size=1, max_size=4))),
        rounds=draw(st.integers(1, 3)),
        collectives=tuple(draw(st.lists(st.one_of(operations), max_size=4))),
        transfers=tuple(draw(st.lists(ends, max_size=3))) if world > 1 else (),
        salt=draw(st.integers(0, 2**20)),
    )


seeds = st.integers(0, 2**20)

# ── its participants ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Client:
    """Pushes what it may. Credit is spent as a worker's session spends it."""

    rank: int
    tasks: dict[ExchangeKey, Task]
    credit: int
    order: int = 0
    """In which order its tasks are ready: that of their keys (1), the reverse (-1), or any (0)."""
    stalled: bool = False
    in_flight: dict[Pool, int] = field(default_factory=lambda: dict.fromkeys(Pool, 0))
    not_finite: dict[tuple[ExchangeKey, int], tuple[int, ...]] = field(default_factory=dict)
    """The ranks with contributions that were not finite, as results said, by exchange and slice."""

    def ready(self) -> list[Task]:
        """Return tasks of which the next slice may be pushed now."""
        if self.stalled:
            return []
        unsent = [task for task in self.tasks.values() if not task.done and task.sent < task.layout.count]
        due = [task for task in unsent if self._is_due(task)]
        affordable = [task for task in due if self._affords(task)]
        if self.order and affordable:
            return sorted(affordable, key=lambda task: task.key)[:: self.order][:1]
        return affordable + [task for task in due if task not in affordable and self._is_frontier(task)]

    def _is_due(self, task: Task) -> bool:
        """Return whether it is due: rounds, and collectives, and transfers slice by slice, come one after the other."""
        key = task.key
        if key.stream == Stream.BUCKET:
            return all(t.done for k, t in self.tasks.items() if k.stream == key.stream and k.number < key.number)
        before = [
            t
            for k, t in self.tasks.items()
            if (k.stream, k.source, k.target) == (key.stream, key.source, key.target) and k.number < key.number
        ]
        return all(t.done or t.sent == t.layout.count for t in before)

    def _affords(self, task: Task) -> bool:
        return self.in_flight[pool_of(task.key, self.rank)] + task.layout.cost(task.sent) <= self.credit

    def _is_frontier(self, task: Task) -> bool:
        """Return whether its next slice is the first one of the round, in the plan's order, that was not answered."""
        if task.key.stream != Stream.BUCKET:
            return False
        before = [t for k, t in self.tasks.items() if k.stream == Stream.BUCKET and k < task.key]
        return all(t.done for t in before) and task.sent == task.first_unanswered()

    def take(self, message: Message, payload: bytes | None) -> None:
        """Take a message from the coordinator."""
        if isinstance(message, Result):
            task = self.tasks[message.key]
            assert task.error is None, "a result after the failure"
            assert message.slice not in task.answers, "a second result for one slice"
            assert message.slice < task.sent, "a result before the contribution"
            assert message.present == (payload is not None)
            task.answers[message.slice] = (message.weight, payload)
            self.not_finite[message.key, message.slice] = message.nonfinite
            self.in_flight[pool_of(message.key, self.rank)] -= task.layout.cost(message.slice)
        else:
            if isinstance(message, RoundDone):
                return  # of a round that was complete when the group broke
            assert isinstance(message, Failure), message
            assert message.key is not None
            task = self.tasks[message.key]
            assert not task.done, "a failure of what has ended"
            task.error = message.exception()
            unanswered = [index for index in range(task.sent) if index not in task.answers]
            self.in_flight[pool_of(task.key, self.rank)] -= sum(map(task.layout.cost, unanswered))


class Cluster:
    """An engine and its clients. ``seed`` orders all that happens."""

    def __init__(
        self, scenario: Scenario, seed: int, credit: int = 1 << 20, nonfinite: OnNonFinite = OnNonFinite.HALT
    ) -> None:
        self.scenario = scenario
        self.harness = Harness(lazy=True, credit=credit, nonfinite=nonfinite)
        self.harness.assemble(scenario.world, plan_of(*scenario.buckets))
        self.random = random.Random(seed)
        self.steps = 0
        self.most_held = 0
        self.at: dict[int, Callable[[], object]] = {}
        """Further events, by step."""
        self.poison: tuple[int, ExchangeKey] | None = None
        self.poisoned = False
        self.complete_before: set[ExchangeKey] = set()
        """The tasks to which the worker removed last had contributed with every slice."""
        self.clients = {rank: Client(rank, self._tasks(rank), credit) for rank in range(scenario.world)}

    def _tasks(self, rank: int) -> dict[ExchangeKey, Task]:
        return {
            key: Task(
                key,
                operation,
                layout_of(operation, self.scenario.world),
                self.scenario.values(rank, key),
                self.scenario.weight(rank, key),
            )
            for key, operation in self.scenario.operations.items()
            if rank in self.scenario.participants(key)
        }

    def run(self) -> None:
        """Run until nothing can happen any more."""
        while True:
            self.at.pop(self.steps, lambda: None)()
            self.deliver()
            choices: list[tuple[Client, Task] | Reduce] = list(self.harness.reduces)
            choices += [(client, task) for client in self.clients.values() for task in client.ready()]
            if not choices:
                break
            choice = self.random.choice(choices)
            if isinstance(choice, Reduce):
                self.harness.reduces.remove(choice)
                self.poisoned |= isinstance(reference(choice), NonFinite)
                self.harness.answer(choice)
            else:
                self.push(*choice)
                self.most_held = max(self.most_held, held_bytes(self.harness))
            self.steps += 1
            self.deliver()
        for happening in self.at.values():
            happening()
        self.at.clear()
        self.deliver()

    def push(self, client: Client, task: Task) -> None:
        index, task.sent = task.sent, task.sent + 1
        client.in_flight[pool_of(task.key, client.rank)] += task.layout.cost(index)
        operation = None if task.key.stream == Stream.BUCKET or index else task.operation
        payload = None
        if task.values is not None:
            payload = part_of(task.operation, task.layout, task.values, index)
            if (client.rank, task.key) == self.poison and index == task.layout.count - 1:
                payload = np.full_like(payload, np.nan)
        self.harness.push(client.rank, task.key, payload, index=index, weight=task.weight, operation=operation)

    def deliver(self) -> None:
        for rank in list(self.clients):
            for message, payloads in self.harness.sent(rank):
                payload = bytes(payloads[0]) if payloads else None
                assert not (self.poisoned and isinstance(message, Result)), "a result after a non-finite contribution"
                self.clients[rank].take(message, payload)

    def remove(self, rank: int, how: Callable[[], object]) -> None:
        """Remove ``rank`` from the membership in the way ``how``."""
        if rank in self.clients:
            self.deliver()
            how()
            tasks = self.clients.pop(rank).tasks.values()
            self.complete_before = {task.key for task in tasks if task.sent == task.layout.count}
            self.harness.inbox.pop(SEATS + rank, None)

    def tasks(self) -> list[tuple[int, Task]]:
        return [(rank, task) for rank, client in self.clients.items() for task in client.tasks.values()]

    def unfinished(self) -> list[tuple[int, ExchangeKey]]:
        return [(rank, task.key) for rank, task in self.tasks() if not task.done]

    def errors(self) -> list[GradServerError]:
        return [task.error for _, task in self.tasks() if task.error is not None]

    def answers(self) -> dict[tuple[ExchangeKey, int, int], Outcome]:
        """Return all results, by exchange, slice and rank."""
        return {
            (task.key, index, rank): answer for rank, task in self.tasks() for index, answer in task.answers.items()
        }

    def leftovers(self) -> None:
        """Check that at the end the engine remembers no exchange, owes no credit and waits for nothing."""
        group = self.harness.engine.data.groups.get("default")
        if group is not None:
            assert group.exchanges == {}
            assert not group.rounds or self.errors()
            assert not any(owed for (rank, _), owed in group.traffic.outstanding.items() if rank in self.clients)
        assert self.harness.reduces == []
        self.harness.wait(TIMEOUT)
        assert self.harness.engine.next_deadline() is None


def check_answers(cluster: Cluster) -> None:
    """Check that all results of a slice are equal, and what exact arithmetic says."""
    answers = cluster.answers()
    for (key, index, rank), (weight, payload) in answers.items():
        exact, owner = expected(cluster.scenario, key, index, rank)
        ranks = cluster.scenario.participants(key)
        assert weight == sum(cluster.scenario.weight(r, key) for r in ranks)
        operation = cluster.scenario.operations[key]
        if exact is None or not gets(operation, rank, key, owner):
            assert payload is None
            continue
        assert payload is not None
        got = np.frombuffer(payload, np.float32)
        assert got.shape == exact[0].shape
        assert np.all(np.abs(got - exact[0]) <= 1e-6 * exact[1]), "the exact weighted mean"
        if operation.kind in PORTIONED:
            continue
        others = {answers[key, index, r][1] for r in ranks if (key, index, r) in answers}
        assert others - {None} == {payload}, "the same bytes for all"


Exact = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""A result in float64, and the magnitude of the values in it."""


def expected(scenario: Scenario, key: ExchangeKey, index: int, receiver: int) -> tuple[Exact | None, int]:
    """Return ``receiver``'s result of a slice in float64 (None if nothing was given), and the owner of its chunk."""
    operation = scenario.operations[key]
    layout = layout_of(operation, scenario.world)
    given = {rank: scenario.values(rank, key) for rank in scenario.participants(key)}
    weights = {rank: scenario.weight(rank, key) for rank in given}
    wide = {rank: part_of(operation, layout, v, index).astype(np.float64) for rank, v in given.items() if v is not None}
    if operation.kind in PORTIONED:
        wide = {rank: v.reshape(scenario.world, -1)[receiver] for rank, v in wide.items()}
    if operation.kind not in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        whole = np.concatenate([wide[rank] for rank in sorted(wide)]) if wide else None
        return (None if whole is None else (whole, np.zeros_like(whole))), layout.owner(index)
    wide = {rank: v for rank, v in wide.items() if weights[rank] > 0}
    if not wide:
        return None, layout.owner(index)
    total = sum(weights.values()) if operation.op is Op.MEAN else 1.0
    result = np.sum([weights[rank] * v for rank, v in wide.items()], axis=0) / total
    magnitude = np.sum([np.abs(weights[rank] * v) for rank, v in wide.items()], axis=0) / total
    return (result, magnitude), layout.owner(index)


# ── L1, L3: identical, and exact ──────────────────────────────────────────────────────────────────────


@given(scenarios(), seeds)
def test_all_get_the_same_bytes_and_they_are_the_exact_mean(scenario: Scenario, seed: int) -> None:
    cluster = Cluster(scenario, seed)
    cluster.run()

    assert cluster.unfinished() == []
    assert cluster.errors() == []
    check_answers(cluster)
    cluster.leftovers()
    ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
    assert sorted(record.round for record in ledger) == list(range(scenario.rounds))


# ── L2: reproducible ──────────────────────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, seeds, st.sampled_from([2 * SLICE, 1 << 20]))
def test_the_same_contributions_give_the_same_bits_in_whatever_order_they_come(
    scenario: Scenario, one: int, other: int, credit: int
) -> None:
    first, second = Cluster(scenario, one), Cluster(scenario, other, credit)
    first.run()
    second.run()

    assert first.answers() == second.answers()


# ── L3: exactly once ──────────────────────────────────────────────────────────────────────────────────

Violation = Callable[[Cluster, int], None]


def again(cluster: Cluster, rank: int) -> None:
    """Push a slice again that was pushed before."""
    pushed = [task for task in cluster.clients[rank].tasks.values() if task.sent]
    if not pushed:
        beyond_the_last(cluster, rank)
        return
    task = cluster.random.choice(pushed)
    index = cluster.random.randrange(task.sent)
    values = None if task.values is None else part_of(task.operation, task.layout, task.values, index)
    cluster.harness.push(rank, task.key, values, index=index, weight=1.0, operation=task.operation)


def beyond_the_last(cluster: Cluster, rank: int) -> None:
    cluster.harness.push(rank, bucket(cluster.scenario.rounds, 0), floats(1), index=9)


def too_far_ahead(cluster: Cluster, rank: int) -> None:
    cluster.harness.push(rank, collective(99), floats(1), operation=all_reduce(1))


def of_another_size(cluster: Cluster, rank: int) -> None:
    due = cluster.clients[rank].ready()
    task = due[0] if due else None
    if task is None or task.sent:
        too_far_ahead(cluster, rank)
    else:
        wrong = np.zeros(SLICE, np.float32)
        cluster.harness.push(rank, task.key, wrong, operation=task.operation)


def garbage(cluster: Cluster, rank: int) -> None:
    cluster.harness.feed(Garbled(SEATS + rank, MalformedMessageError("not a message")))


def a_plan_of_garbage(cluster: Cluster, rank: int) -> None:
    cluster.harness.receive(SEATS + rank, Propose("hash"), b"\xff\xff")


VIOLATIONS: list[Violation] = [again, beyond_the_last, too_far_ahead, of_another_size, garbage, a_plan_of_garbage]


@given(scenarios(least_world=2), seeds, st.integers(0, 60), st.data())
def test_a_contribution_that_comes_twice_counts_once_at_most(
    scenario: Scenario, seed: int, step: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed)
    cluster.at[step] = lambda: cluster.remove(rank, lambda: violate(cluster, rank, again))
    cluster.run()

    check_answers(cluster)
    assert cluster.unfinished() == []


def violate(cluster: Cluster, rank: int, violation: Violation) -> None:
    """Break the protocol, and check that it costs the connection (a tail of what has failed costs nothing)."""
    violation(cluster, rank)
    if SEATS + rank not in cluster.harness.closed:
        cluster.harness.lose(rank)


# ── L4, as far as it goes: what was complete counts, and the rest fails at once with a name ───────────


@given(scenarios(least_world=2), seeds, st.integers(0, 120), st.booleans(), st.data())
def test_after_a_departure_no_worker_waits_and_what_was_complete_counts(
    scenario: Scenario, seed: int, step: int, politely: bool, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed)
    goes = cluster.harness.leave if politely else cluster.harness.lose
    cluster.at[step] = lambda: cluster.remove(gone, lambda: goes(gone))
    cluster.run()

    assert cluster.unfinished() == [], "without a deadline"
    check_answers(cluster)
    for error in cluster.errors():
        assert type(error) is (WorkerLeftError if politely else WorkerLostError)
        assert error.fields == {"worker": f"w{gone}", "rank": gone}
    assert not any(task.error for _, task in cluster.tasks() if task.key in cluster.complete_before)
    cluster.leftovers()


@given(scenarios(least_world=3), seeds, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80)), max_size=5))
def test_when_several_go_all_remaining_workers_hear_of_one_of_them(
    scenario: Scenario, seed: int, goes: list[tuple[int, int]]
) -> None:
    cluster = Cluster(scenario, seed)
    for rank, step in goes:
        if rank < scenario.world:
            cluster.at[step] = partial(cluster.remove, rank, partial(cluster.harness.lose, rank))
    cluster.run()

    assert cluster.unfinished() == []
    check_answers(cluster)
    gone = set(range(scenario.world)) - set(cluster.clients)
    assert {error.fields["rank"] for error in cluster.errors()} <= gone


# ── L5: nothing waits forever ─────────────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, st.sets(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 80))
def test_every_wait_for_a_stopped_worker_ends_with_an_error_that_names_it(
    scenario: Scenario, seed: int, stopped: set[int], step: int
) -> None:
    stopped &= set(range(scenario.world))
    cluster = Cluster(scenario, seed)

    def stop() -> None:
        for rank in stopped:
            cluster.clients[rank].stalled = True

    cluster.at[step] = stop
    waits = run_with_deadlines(cluster)

    assert waits <= len(scenario.operations)
    check_answers(cluster)
    names = {f"'w{rank}' (rank {rank})" for rank in stopped}
    for rank, task in cluster.tasks():
        if rank not in stopped:
            assert task.done
        if task.error is not None:
            assert isinstance(task.error, DeadlineError)
            assert task.error.missing
            assert set(task.error.missing) <= names
            told = task.error.fields
            if task.key.stream == Stream.BUCKET:
                assert told["bucket"] in {f"b{part}" for part in range(len(scenario.buckets))}
                assert told["round"] == next(
                    t.key.number for _, t in cluster.tasks() if t.error and t.error.fields == told
                )


def run_with_deadlines(cluster: Cluster) -> int:
    """Run, and let time pass whenever nothing can happen. Return how often that was."""
    waits, ticks = 0, 0
    cluster.run()
    while (deadline := cluster.harness.engine.next_deadline()) is not None:
        ticks += 1
        assert ticks <= 2 * len(cluster.scenario.operations), "time passes, and nothing comes of it"
        assert deadline <= cluster.harness.now + TIMEOUT
        cluster.harness.wait(deadline - cluster.harness.now)
        waits += bool(cluster.harness.inbox)
        cluster.run()
    return waits


@given(scenarios(least_world=2), seeds, st.integers(0, 60), st.data())
def test_a_stopped_worker_hears_of_it_when_it_goes_on(
    scenario: Scenario, seed: int, step: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed)

    def set_stalled(stalled: bool) -> None:
        cluster.clients[rank].stalled = stalled

    cluster.at[step] = lambda: set_stalled(True)
    run_with_deadlines(cluster)
    set_stalled(False)
    run_with_deadlines(cluster)

    assert cluster.unfinished() == []
    check_answers(cluster)
    cluster.leftovers()


# ── L6: nothing is averaged blindly ───────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, st.data())
def test_after_a_non_finite_contribution_no_worker_gets_anything_any_more(
    scenario: Scenario, seed: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, scenario.rounds - 1))
    part = data.draw(st.integers(0, len(scenario.buckets) - 1))
    rank = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed)
    cluster.poison = (rank, bucket(number, part))
    cluster.run()  # where every result after the poison is an error

    assert cluster.unfinished() == []
    for _, payload in cluster.answers().values():
        assert payload is None or np.isfinite(np.frombuffer(payload, np.float32)).all()
    if cluster.poisoned:
        told = {"worker": f"w{rank}", "rank": rank, "bucket": f"b{part}", "parameter": f"b{part}", "round": number}
        assert cluster.errors()
        for error in cluster.errors():
            assert isinstance(error, NonFiniteError)
            assert error.fields == told
        assert cluster.harness.group()["state"] == "broken"
    cluster.leftovers()


# ── L7: memory is bounded, and credit never leads to a deadlock ───────────────────────────────────────


@given(scenarios(), seeds, st.integers(2, 4))
@settings(max_examples=examples(40))
def test_with_next_to_no_credit_all_is_exchanged_all_the_same(scenario: Scenario, seed: int, slices: int) -> None:
    cluster = Cluster(scenario, seed, credit=slices * SLICE)
    cluster.run()

    assert cluster.unfinished() == []
    assert cluster.errors() == []
    assert cluster.most_held <= scenario.world * len(Pool) * (slices + 1) * SLICE
    check_answers(cluster)


def held_bytes(harness: Harness) -> int:
    """Return the bytes of payloads that the engine keeps."""
    return sum(
        len(run.payload)
        for group in harness.engine.data.groups.values()
        for exchange in group.exchanges.values()
        for _, run in exchange.unanswered()
        if run.payload is not None
    )


@example(buckets=[1] * 12, seed=0)
@given(buckets=st.lists(st.integers(1, 20), min_size=1, max_size=12), seed=seeds)
def test_workers_whose_buckets_are_ready_in_opposite_orders_do_not_block_each_other(
    buckets: list[int], seed: int
) -> None:
    cluster = Cluster(Scenario(2, tuple(buckets), 2, (), (), 0), seed, credit=2 * SLICE)
    for rank, client in cluster.clients.items():
        client.order = (1, -1)[rank]
    cluster.run()

    assert cluster.unfinished() == []
    assert cluster.errors() == []


@given(buckets=st.lists(st.integers(1, 20), min_size=1, max_size=12), slices=st.integers(2, 5))
def test_a_member_that_ignores_its_credit_cannot_make_the_engine_keep_more(buckets: list[int], slices: int) -> None:
    cluster = Cluster(Scenario(2, tuple(buckets), 1, (), (), 0), 0, credit=slices * SLICE)
    greedy = cluster.clients[0]
    greedy.credit = 1 << 30
    while (tasks := greedy.ready()) and not cluster.harness.closed:
        cluster.push(greedy, tasks[0])
        assert held_bytes(cluster.harness) <= (slices + 1) * SLICE

    in_all = sum(task.layout.cost(index) for task in greedy.tasks.values() for index in range(task.layout.count))
    assert bool(cluster.harness.closed) == (in_all > (slices + 1) * SLICE)


def growth_of_a_run() -> int:
    harness = Harness(checked=False)
    harness.assemble(2, plan_of(3, 1))
    numbers = iter(range(1 << 30))

    def exchange(rounds: int) -> None:
        for _ in range(rounds):
            number = next(numbers)
            for part, size in enumerate((3, 1)):
                for rank in range(2):
                    harness.push(rank, bucket(number, part), bytes(4 * size))
            for rank in range(2):
                harness.push(rank, collective(number), operation=BARRIER)
            harness.inbox.clear()

    growth = growth_of(exchange, 500, 3000)
    assert harness.group()["round"] == 3500
    return growth


def test_memory_does_not_grow_with_the_length_of_a_run(measured: Measured) -> None:
    assert measured(growth_of_a_run) < 300, "less than one object in ten rounds"


# ── L8: bytes are data ────────────────────────────────────────────────────────────────────────────────


@given(scenarios(), seeds, seeds, st.integers(1, 30))
def test_whatever_strangers_send_members_get_what_they_would_have_got(
    scenario: Scenario, seed: int, noise: int, strangers: int
) -> None:
    quiet, noisy = Cluster(scenario, seed), Cluster(scenario, seed)
    chance = random.Random(noise)
    for _ in range(strangers):
        noisy.at[chance.randrange(40)] = lambda: make_noise(noisy, chance)
    quiet.run()
    noisy.run()

    assert noisy.answers() == quiet.answers()
    assert noisy.unfinished() == []
    assert noisy.errors() == []
    assert all(connection >= 1000 for connection in noisy.harness.closed), "no member is thrown out"


def make_noise(cluster: Cluster, chance: random.Random) -> None:
    """Send what a stranger, or a worker of another group, might send: nonsense, or what a member could say."""
    harness = cluster.harness
    connection = chance.randrange(1000, 1010)
    if chance.random() < 0.5:
        task = chance.choice(list(cluster.clients[0].tasks.values()))
        index = chance.randrange(task.layout.count)
        push = Push(task.key, index, 1.0, True, None if task.key.stream == Stream.BUCKET else task.operation)
        harness.receive(connection, push, bytes(task.layout.nbytes(index)))
        return
    key = ExchangeKey(chance.randrange(3), chance.randrange(3), chance.randrange(3), *chance.choices((-1, 0, 1), k=2))
    operation = chance.choice([None, all_reduce(4), BARRIER, Operation(Kind.TRANSFER, Op.NONE, FLOAT32, 5)])
    messages: list[tuple[Message, tuple[bytes, ...]]] = [
        (Push(key, chance.randrange(2), 1.0, True, operation), (bytes(chance.choice([0, 4, 16])),)),
        (Push(key, chance.randrange(2), 0.0, False, operation), ()),
        (Propose("hash"), (plan_of(4).encoded,)),
        (Propose("hash"), (b"garbage",)),
        (Inquire(key), ()),
        (Leave("whatever", chance.random() < 0.5), ()),
        (Result(key, 0, 1.0, False), ()),
    ]
    match chance.randrange(10):
        case 0:
            harness.join(connection, world=chance.choice([0, 1, 2, 99]), rank=chance.randrange(-1, 3))
        case 1:
            harness.join(connection, world=chance.choice([0, 1, 2, 99]), group=chance.choice(["other", "more"]))
        case 2:
            harness.feed(Disconnected(connection, "gone"))
        case 3:
            harness.feed(Garbled(connection, MalformedMessageError("not a message")))
        case _:
            message, payloads = chance.choice(messages)
            harness.receive(connection, message, *payloads)
    harness.reduces[:] = [r for r in harness.reduces if r.group == "default"]


@given(scenarios(least_world=2), seeds, st.integers(0, 80), st.sampled_from(VIOLATIONS), st.data())
def test_a_member_that_breaks_the_protocol_never_changes_what_the_others_get(
    scenario: Scenario, seed: int, step: int, violation: Violation, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, scenario.world - 1))
    clean, cluster = Cluster(scenario, seed), Cluster(scenario, seed)
    clean.run()
    cluster.at[step] = lambda: cluster.remove(rank, lambda: violate(cluster, rank, violation))
    cluster.run()

    results = clean.answers()
    assert all(results[place] == answer for place, answer in cluster.answers().items())
    assert cluster.unfinished() == []
    for error in cluster.errors():
        assert isinstance(error, WorkerLostError)
        assert error.rank == rank
    cluster.leftovers()
