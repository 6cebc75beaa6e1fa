"""The engine's laws with several data halves: what holds for one holds for all of them together.

A `Cluster` is a coordinator with its data shards, and workers that push what they may, in an order drawn from a seed.
Messages between control and data elsewhere arrive when the seed says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.commands import Reduce
from gradserver.engine.events import NonFinite
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    AbandonedError,
    CollectiveMismatchError,
    ConnectionLostError,
    DeadlineError,
    GradServerError,
    NonFiniteError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.exchange import PORTIONED, ExchangeKey, Kind, Layout, Op, Operation, Stream, pool_of
from gradserver.protocol.messages import Failure, Result, RoundDone, Scope
from gradserver.protocol.shards import Table, share_of
from tests.engine_harness import (
    SEATS,
    TIMEOUT,
    Array,
    all_reduce,
    bucket,
    collective,
    grain_of,
    part_of,
    plan_of,
    reference,
    small_slices,
)
from tests.examples import examples
from tests.memory import Measured, growth_of
from tests.sharded_harness import ShardedHarness, url_of
from tests.test_engine_laws import SLICE, Scenario, scenarios, seeds

RATES = [(1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0), (0.0, 1.0, 2.0, 0.3)]

many_rates = st.sampled_from(RATES)


@contextmanager
def small_shares() -> Iterator[None]:
    """Make slices of four elements; cut tensors from three on, and buckets from six on (or four, or three)."""
    with small_slices(SLICE), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.protocol.shards.SPLIT_BYTES", 12)
        patch.setattr("gradserver.protocol.shards.SPLIT_BUCKET_BYTES", (24, 16, 12))
        patch.setattr("gradserver.protocol.shards.ALIGNMENT", 1)
        yield
        share_of.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


@dataclass
class Part:
    """The part of one worker with one shard in one exchange."""

    key: ExchangeKey
    operation: Operation
    layout: Layout
    shard: int
    start: int
    stop: int
    values: Array | None
    weight: float
    sent: int = 0
    answers: dict[int, tuple[float, bytes | None]] = field(default_factory=dict)
    not_finite: dict[int, tuple[int, ...]] = field(default_factory=dict)
    error: GradServerError | None = None
    given_up: bool = False
    """True if the exchange failed at another shard: nothing more is sent."""

    def __post_init__(self) -> None:
        self.sent = self.start

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.answers) == self.stop - self.start

    @property
    def in_flight(self) -> int:
        """Credit that it takes now."""
        if self.error is not None:
            return 0
        return sum(self.layout.cost(index) for index in range(self.start, self.sent) if index not in self.answers)


@dataclass
class Client:
    """Pushes what it may, as a worker's session does."""

    rank: int
    parts: list[Part]
    credit: int
    order: int = 0
    stalled: bool = False
    lost: bool = False
    """True if it was told that the group ends, and hears nothing more."""
    over: int = -1
    """The last round that it was told is over."""
    steady: tuple[int, ...] = ()
    """Rounds that ended with their last results, without a RoundDone."""
    ends: dict[int, set[int]] = field(default_factory=dict)
    """Shards with last results that said that a round is over, by its number."""

    def ready(self) -> list[Part]:
        if self.stalled:
            return []
        due = [p for p in self.parts if not (p.done or p.given_up or p.sent == p.stop) and self._is_due(p)]
        affordable = [part for part in due if self._affords(part)]
        if self.order and affordable:
            return sorted(affordable, key=lambda part: part.key)[:: self.order][:1]
        return affordable + [part for part in due if part not in affordable and self._is_frontier(part)]

    def _is_due(self, part: Part) -> bool:
        key = part.key
        if key.stream == Stream.BUCKET:
            earlier = [p for p in self.parts if p.key.stream == key.stream and p.key.number < key.number]
            return all(p.done for p in earlier) and self.over == key.number - 1
        before = [
            p
            for p in self.parts
            if p.key._replace(number=key.number) == key and p.key.number < key.number and p.shard == part.shard
        ]
        return all(p.done or p.given_up or p.sent == p.stop for p in before)

    def _affords(self, part: Part) -> bool:
        pool = pool_of(part.key, self.rank)
        used = sum(p.in_flight for p in self.parts if p.shard == part.shard and pool_of(p.key, self.rank) == pool)
        return used + part.layout.cost(part.sent) <= self.credit

    def _is_frontier(self, part: Part) -> bool:
        if part.key.stream != Stream.BUCKET:
            return False
        before = [p for p in self.parts if p.key.stream == Stream.BUCKET and p.key < part.key and p.shard == part.shard]
        return all(p.done for p in before) and all(index in part.answers for index in range(part.start, part.sent))

    def take(self, message: Result | Failure, payload: bytes | None) -> None:
        if isinstance(message, Result):
            (part,) = [p for p in self.parts if p.key == message.key and p.start <= message.slice < p.stop]
            assert part.error is None, "a result after the failure"
            assert message.slice not in part.answers, "a second result for one slice"
            assert message.slice < part.sent, "a result before the contribution"
            part.answers[message.slice] = (message.weight, payload)
            part.not_finite[message.slice] = message.nonfinite
            if message.over:
                number = message.key.number
                said = self.ends.setdefault(number, set())
                assert part.shard not in said, "a shard that ends a round twice"
                said.add(part.shard)
                rounds = [p for p in self.parts if p.key.stream == Stream.BUCKET and p.key.number == number]
                if said == {p.shard for p in rounds}:
                    self.over = number
                    self.steady += (number,)
            return
        raise AssertionError(message)

    def fail(self, shard: int, failure: Failure) -> None:
        (part,) = [p for p in self.parts if p.key == failure.key and p.shard == shard]
        assert not part.done, "a failure of what has ended"
        part.error = failure.exception()
        if isinstance(part.error, AbandonedError):
            return  # the shard that it failed at says why to any that come there
        for other in self.parts:
            later = part.key.stream == other.key.stream == Stream.BUCKET and other.key.number > part.key.number
            other.given_up |= other.key == failure.key or later  # a round that failed is the last one


class Cluster:
    """Engines and clients. ``seed`` orders all that happens, and the messages between control and data."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        rates: tuple[float, ...],
        credit: int = 1 << 20,
        policy: Policy | None = None,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
    ) -> None:
        self.scenario = scenario
        self.plan = plan_of(*scenario.buckets)
        worlds: dict[str, int | Policy] = {"default": policy or scenario.world}
        self.harness = ShardedHarness(worlds, credit, lazy=True, rates=rates, nonfinite=nonfinite)
        with grain_of(seed) as grain:
            self.harness.assemble(scenario.world, self.plan)
        self.harness.slow = True
        self.random = random.Random(seed)
        self.table = Table(scenario.world, rates, grain=grain)
        self.table.set_plan(self.plan)
        self.steps = 0
        self.at: dict[int, Callable[[], object]] = {}
        self.poison: tuple[int, ExchangeKey] | None = None
        self.poisoned: set[ExchangeKey] = set()
        self.clients = {rank: Client(rank, self._parts(rank), credit) for rank in range(scenario.world)}

    def _parts(self, rank: int) -> list[Part]:
        parts = []
        for key, operation in self.scenario.operations.items():
            if rank in self.scenario.participants(key):
                share = self.table.share(key, operation)
                given = self.scenario.values(rank, key), self.scenario.weight(rank, key)
                for shard in range(self.table.shards):
                    start, stop = share.interval(shard)
                    if start < stop:
                        parts.append(Part(key, operation, share.layout, shard, start, stop, *given))
        return parts

    def run(self) -> None:
        """Run until nothing can happen any more."""
        while True:
            self.at.pop(self.steps, lambda: None)()
            self.deliver()
            choices: list[int | Reduce | tuple[Client, Part]] = [*self.harness.busy_links(), *self.harness.reduces]
            choices += [(client, part) for client in self.clients.values() for part in client.ready()]
            if not choices:
                break
            choice = self.random.choice(choices)
            if isinstance(choice, int):
                self.harness.pass_on(choice)
            elif isinstance(choice, Reduce):
                self.harness.reduces.remove(choice)
                if isinstance(reference(choice), NonFinite):
                    self.poisoned.add(choice.key)
                self.harness.answer(choice)
            else:
                self.push(*choice)
            self.steps += 1
            self.deliver()
        for happening in self.at.values():
            happening()
        self.at.clear()
        self.harness.flush()
        self.deliver()

    def run_to_deadlines(self) -> None:
        """Run until nothing waits for anything either."""
        self.run()
        while (deadline := self.harness.next_deadline()) is not None:
            self.harness.wait(deadline - self.harness.now)
            self.run()

    def call_another(self, rank: int, key: ExchangeKey, other: Operation) -> None:
        """Let ``rank`` call ``other`` as ``key``, and give nothing to it."""
        client, share = self.clients[rank], self.table.share(key, other)
        client.parts = [part for part in client.parts if part.key != key]
        for shard in range(self.table.shards):
            start, stop = share.interval(shard)
            if start < stop:
                client.parts.append(Part(key, other, share.layout, shard, start, stop, None, 0.0))

    def push(self, client: Client, part: Part) -> None:
        index, part.sent = part.sent, part.sent + 1
        operation = None if part.key.stream == Stream.BUCKET or index != part.start else part.operation
        payload = None
        if part.values is not None:
            payload = part_of(part.operation, part.layout, part.values, index)
            if (client.rank, part.key) == self.poison and index == part.layout.count - 1:
                payload = np.full_like(payload, np.nan)
        where = {"index": index, "weight": part.weight, "operation": operation}
        self.harness.push_to(part.shard, client.rank, part.key, payload, **where)  # type: ignore[arg-type]

    def deliver(self) -> None:
        for rank, client in self.clients.items():
            for message, payloads in self.harness.sent(rank):
                if client.lost:
                    continue
                if isinstance(message, Failure) and message.scope is Scope.CONNECTION:
                    client.lost = True
                    for part in client.parts:
                        if not part.done:
                            part.error = message.exception()
                elif isinstance(message, Failure):
                    assert message.key is not None, message
                    client.fail(self.harness.origins[id(message), SEATS + rank], message)
                elif isinstance(message, RoundDone):
                    client.over = message.round
                else:
                    assert isinstance(message, Result), message
                    client.take(message, bytes(payloads[0]) if payloads else None)

    def remove(self, rank: int, how: Callable[[int], object]) -> None:
        self.deliver()
        how(rank)
        self.clients.pop(rank)
        self.harness.inbox.pop(SEATS + rank, None)

    def outcomes(self, key: ExchangeKey) -> dict[int, bool | None]:
        """Return, by rank, whether the exchange was done, or failed (False), or neither (None)."""
        found: dict[int, bool | None] = {}
        for rank, client in self.clients.items():
            parts = [part for part in client.parts if part.key == key]
            if parts:
                failed = any(part.error or part.given_up for part in parts)
                found[rank] = False if failed else True if all(part.done for part in parts) else None
        return found

    def unfinished(self) -> list[tuple[int, ExchangeKey]]:
        return [(rank, key) for key in self.scenario.operations for rank, x in self.outcomes(key).items() if x is None]

    def errors(self) -> list[GradServerError]:
        """Return what all are told. As at a worker, AbandonedError means more if no shard says why."""
        found: dict[tuple[int, ExchangeKey], list[GradServerError]] = {}
        for rank, client in self.clients.items():
            for part in client.parts:
                if part.error is not None:
                    found.setdefault((rank, part.key), []).append(part.error)
        told = [e for errors in found.values() for e in errors if not isinstance(e, AbandonedError)]
        unexplained = [errors for errors in found.values() if all(isinstance(e, AbandonedError) for e in errors)]
        return told + [
            e.when_nothing_failed() for errors in unexplained for e in errors if isinstance(e, AbandonedError)
        ]

    def results(self) -> dict[tuple[ExchangeKey, int], tuple[float, bytes]]:
        """Return the results of every exchange that is done: its weight, and all bytes in order."""
        found = {}
        for key in self.scenario.operations:
            for rank, outcome in self.outcomes(key).items():
                if outcome:
                    parts = sorted(
                        (part for part in self.clients[rank].parts if part.key == key), key=lambda part: part.start
                    )
                    layout = parts[0].layout
                    answers = {i: part.answers[i] for part in parts for i in range(part.start, part.stop)}
                    (weight,) = {weight for weight, _ in answers.values()}
                    rows = [
                        b if b is not None else b"-" * layout.reply_bytes(i, i + 1) for i, (_, b) in answers.items()
                    ]
                    if layout.replies > 1:  # an all_gather has each slice of each rank: put them in order
                        whole = [np.frombuffer(row, np.uint8).reshape(layout.replies, -1) for row in rows]
                        rows = [np.concatenate(whole, axis=1).tobytes()]
                    found[key, rank] = weight, b"".join(rows)
        return found

    def leftovers(self) -> None:
        """Check that at the end no engine remembers an exchange or waits for anything."""
        self.harness.wait(TIMEOUT)
        self.harness.flush()  # control has all shards halt what one of them gives up
        assert self.harness.next_deadline() is None
        for mind in (self.harness.engine, *self.harness.shards[1:]):
            assert mind is not None
            for group in mind.data.groups.values():
                open_ones = [exchange for exchange in group.exchanges.values() if exchange.failure is None]
                assert open_ones == []
                assert not any(owed for (rank, _), owed in group.traffic.outstanding.items() if rank in self.clients)


def check_outcomes(cluster: Cluster) -> None:
    """Check that an exchange is done for all or for none, and that all results are equal."""
    for key, operation in cluster.scenario.operations.items():
        outcomes = set(cluster.outcomes(key).values())
        assert len(outcomes) <= 1, (key, cluster.outcomes(key))
        for index in range(cluster.table.share(key, operation).layout.count):
            payloads = {
                part.answers[index][1]
                for client in cluster.clients.values()
                for part in client.parts
                if part.key == key and index in part.answers
            }
            own = operation.kind in PORTIONED
            assert own or len(payloads - {None}) <= 1, "the same bytes for all"


# ── L1, L2: the same, with however many shards ────────────────────────────────────────────────────────


@given(scenarios(), seeds, st.permutations(RATES))
def test_results_do_not_depend_on_the_number_of_shards_or_their_rates(
    scenario: Scenario, seed: int, rates: list[tuple[float, ...]]
) -> None:
    alone = Cluster(scenario, seed, (1.0,))
    alone.run()
    assert alone.unfinished() == []
    for some in rates[:2]:
        cluster = Cluster(scenario, seed + 1, some)
        cluster.run()
        assert cluster.unfinished() == []
        assert cluster.errors() == []
        check_outcomes(cluster)
        assert cluster.results() == alone.results()
        cluster.leftovers()
        ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
        assert sorted(record.round for record in ledger) == list(range(scenario.rounds))
        assert cluster.harness.engine.control.groups["default"].shards.partial == {}


@given(scenarios(), seeds, many_rates, st.integers(2, 4))
@settings(max_examples=examples(40))
def test_with_next_to_no_credit_all_is_exchanged_all_the_same(
    scenario: Scenario, seed: int, rates: tuple[float, ...], slices: int
) -> None:
    cluster = Cluster(scenario, seed, rates, credit=slices * SLICE)
    for rank, client in cluster.clients.items():
        client.order = (1, -1, 0)[rank % 3]
    cluster.run()

    assert cluster.unfinished() == []
    assert cluster.errors() == []


# ── a member goes ─────────────────────────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, many_rates, st.integers(0, 120), st.booleans(), st.data())
def test_when_a_worker_goes_none_waits_and_outcomes_are_alike(
    scenario: Scenario, seed: int, rates: tuple[float, ...], step: int, politely: bool, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed, rates)
    cluster.at[step] = lambda: cluster.remove(gone, cluster.harness.leave if politely else cluster.harness.lose)
    cluster.run()

    assert cluster.unfinished() == [], "without a deadline"
    check_outcomes(cluster)
    for error in cluster.errors():
        assert type(error) is (WorkerLeftError if politely else WorkerLostError)
        assert error.fields == {"worker": f"w{gone}", "rank": gone}
    cluster.leftovers()


@given(scenarios(least_world=2), seeds, many_rates, st.integers(0, 60), st.data())
def test_a_worker_that_breaks_the_protocol_at_one_shard_is_lost_to_all(
    scenario: Scenario, seed: int, rates: tuple[float, ...], step: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, scenario.world - 1))
    shard = data.draw(st.integers(1, len(rates) - 1))
    cluster = Cluster(scenario, seed, rates)

    def violate(rank: int) -> None:
        cluster.harness.push_to(shard, rank, bucket(99, 0), b"1234", index=7)
        cluster.harness.flush()

    cluster.at[step] = lambda: cluster.remove(rank, violate)
    cluster.run()

    assert SEATS + rank in cluster.harness.closed
    assert cluster.unfinished() == []
    check_outcomes(cluster)
    for error in cluster.errors():
        assert isinstance(error, WorkerLostError)
        assert error.rank == rank


@given(scenarios(least_world=2), seeds, many_rates, st.integers(0, 80), st.data())
def test_when_a_shard_goes_everything_that_is_open_elsewhere_fails_with_its_url(
    scenario: Scenario, seed: int, rates: tuple[float, ...], step: int, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(1, len(rates) - 1))
    cluster = Cluster(scenario, seed, rates)

    def lose() -> None:
        cluster.harness.lose_shard(gone)
        for client in cluster.clients.values():  # their connections to it break too
            for part in client.parts:
                if part.shard == gone and not part.done:
                    part.error = ConnectionLostError(url_of(gone))
        cluster.harness.reduces[:] = [r for r in cluster.harness.reduces if cluster.harness.places[id(r)] != gone]

    cluster.at[step] = lose
    cluster.run()

    assert cluster.unfinished() == []
    for error in cluster.errors():
        assert isinstance(error, ConnectionLostError)
        assert url_of(gone) in str(error)
    assert cluster.harness.group()["state"] == "broken"
    assert url_of(gone) in cluster.harness.group()["broken"]


# ── deadlines, mismatches, NaN ────────────────────────────────────────────────────────────────────────


@given(scenarios(least_world=2), seeds, many_rates, st.integers(0, 60), st.data())
def test_every_wait_for_a_stopped_worker_ends_with_an_error_that_names_it(
    scenario: Scenario, seed: int, rates: tuple[float, ...], step: int, data: st.DataObject
) -> None:
    stopped = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed, rates)

    def stop() -> None:
        cluster.clients[stopped].stalled = True

    cluster.at[step] = stop
    cluster.run_to_deadlines()

    assert {rank for rank, _ in cluster.unfinished()} <= {stopped}
    for error in cluster.errors():
        assert isinstance(error, DeadlineError)
        assert error.missing == (f"'w{stopped}' (rank {stopped})",)


@given(scenarios(least_world=2), seeds, many_rates, st.data())
def test_a_contribution_that_is_not_finite_halts_every_shard(
    scenario: Scenario, seed: int, rates: tuple[float, ...], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, scenario.rounds - 1))
    part = data.draw(st.integers(0, len(scenario.buckets) - 1))
    rank = data.draw(st.integers(0, scenario.world - 1))
    cluster = Cluster(scenario, seed, rates)
    cluster.poison = (rank, bucket(number, part))
    cluster.run()

    assert cluster.unfinished() == []
    check_outcomes(cluster)
    if cluster.poisoned:
        assert set(cluster.outcomes(bucket(number, part)).values()) == {False}
        for error in cluster.errors():
            assert isinstance(error, NonFiniteError)
            assert (error.rank, error.bucket, error.round) == (rank, f"b{part}", number)
        for mind in (cluster.harness.engine, *cluster.harness.shards[1:]):
            assert mind is not None
            assert mind.data.groups["default"].halted is not None
        assert cluster.harness.group()["state"] == "broken"


@given(scenarios(least_world=2), seeds, many_rates, st.data())
def test_a_collective_that_is_not_the_same_everywhere_fails_and_the_group_goes_on(
    scenario: Scenario, seed: int, rates: tuple[float, ...], data: st.DataObject
) -> None:
    if not scenario.collectives:
        return
    number = data.draw(st.integers(0, len(scenario.collectives) - 1))
    rank = data.draw(st.integers(0, scenario.world - 1))
    other = data.draw(scenarios().filter(lambda s: bool(s.collectives))).collectives[0]
    cluster = Cluster(scenario, seed, rates)
    key = ExchangeKey(Stream.COLLECTIVE, number)
    if other.numel % scenario.world or other.root >= scenario.world or other == scenario.operations[key]:
        return
    if other.kind not in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):  # it gives nothing: only what is weighed may do that
        return
    cluster.call_another(rank, key, other)
    cluster.run_to_deadlines()

    assert cluster.unfinished() == []
    assert set(cluster.outcomes(key).values()) == {False}
    for error in cluster.errors():
        assert isinstance(error, CollectiveMismatchError | DeadlineError)
    for other_key in scenario.operations:
        if other_key != key:
            assert set(cluster.outcomes(other_key).values()) == {True}


@pytest.mark.parametrize("rank", [0, 1])
def test_different_collectives_at_different_shards_are_a_mismatch_though_no_shard_sees_both(rank: int) -> None:
    """Test that no member waits for a deadline where both have gone on, and each shard knows of one call alone."""
    gathered = Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, 2)
    scattered = Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 2)
    scenario = Scenario(2, (1,), 1, (gathered, all_reduce(3)), (), 0)
    found = set()
    for seed in range(20):
        cluster = Cluster(scenario, seed, (1.0, 1.0, 1.0))
        cluster.call_another(rank, collective(0), scattered)
        cluster.run_to_deadlines()
        assert set(cluster.outcomes(collective(0)).values()) == {False}
        assert set(cluster.outcomes(collective(1)).values()) == {True}
        found |= {type(error) for error in cluster.errors()}

    assert found == {CollectiveMismatchError, DeadlineError}


# ── L7: memory is bounded ─────────────────────────────────────────────────────────────────────────────


def growth_of_a_run() -> int:
    harness = ShardedHarness(checked=False, rates=(1.0, 1.0))
    plan = plan_of(8, 1)
    harness.assemble(2, plan)
    table = Table(2, (1.0, 1.0))
    table.set_plan(plan)
    numbers = iter(range(1 << 30))

    def exchange(rounds: int) -> None:
        for _ in range(rounds):
            number = next(numbers)
            for key, operation in [
                *((bucket(number, part), b.operation) for part, b in enumerate(plan.buckets)),
                (collective(number), all_reduce(8 if number % 7 == 0 else 1)),  # not every one concerns both shards
            ]:
                share = table.share(key, operation)
                for rank in range(2):
                    for index in range(share.layout.count):
                        shard = share.shard_of(index)
                        named = operation if key.stream == Stream.COLLECTIVE and index == share.bounds[shard] else None
                        payload = bytes(share.layout.nbytes(index))
                        harness.push_to(shard, rank, key, payload, index=index, operation=named)
            harness.inbox.clear()
            harness.origins.clear()

    growth = growth_of(exchange, 1500, 1000)  # what it keeps of late rounds is complete by then
    assert harness.group()["round"] == 2500
    assert harness.closed == []
    return growth


def test_memory_does_not_grow_with_the_length_of_a_run(measured: Measured) -> None:
    assert measured(growth_of_a_run) < 100, "less than one object in ten rounds"
