"""Tests of elastic groups with several data shards: each cuts a departed member when it hears of it, and all agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.engine.events import Disconnected
from gradserver.engine.policy import Policy
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import MembershipChangedError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation
from gradserver.protocol.messages import (
    Agreed,
    Enter,
    Failure,
    Membership,
    Propose,
    Push,
    Ready,
    Result,
    RoundDone,
    Serve,
)
from gradserver.protocol.shards import share_of
from tests.engine_harness import SEATS, Harness, all_reduce, bucket, collective, floats, plan_of
from tests.sharded_harness import ShardedHarness
from tests.test_engine_laws import Scenario, seeds
from tests.test_shard_laws import Client, Cluster, Part, many_rates, small_shares

Departures = dict[int, tuple[int, bool]]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shares():
        yield


class ElasticCluster(Cluster):
    """A cluster that records what was pushed, and when members were told of what."""

    def __init__(self, scenario: Scenario, seed: int, rates: tuple[float, ...]) -> None:
        super().__init__(scenario, seed, rates, policy=Policy(1, 8))
        self.pushed: dict[tuple[ExchangeKey, int], dict[int, Part]] = {}
        self.over: dict[int, list[RoundDone]] = {rank: [] for rank in self.clients}
        self.told: dict[int, list[int]] = {rank: [] for rank in self.clients}
        self.gone: list[int] = []

    def push(self, client: Client, part: Part) -> None:
        self.pushed.setdefault((part.key, part.sent), {})[client.rank] = part
        super().push(client, part)

    def deliver(self) -> None:
        for rank, client in self.clients.items():
            for news in self.harness.told(rank, Membership):
                self.told[rank].append(news.epoch)
                for shard in self.harness.shards[1:]:
                    assert shard is not None
                    assert shard.data.groups["default"].members.epoch >= news.epoch, "told before all shards know"
            for done in self.harness.told(rank, RoundDone):
                assert done.epoch in (1, *self.told[rank]), "an epoch that no member was told of"
                self.over[rank].append(done)
                client.over = done.round
        super().deliver()

    def depart(self, rank: int, politely: bool) -> None:
        if rank in self.clients and len(self.clients) > 1:
            self.gone.append(rank)
            self.remove(rank, self.harness.leave if politely else self.harness.lose)

    def expected(self, key: ExchangeKey, index: int) -> tuple[float, bytes | None]:
        """Return weight and bytes of a slice, from what was pushed."""
        parts = dict(sorted(self.pushed[key, index].items())).values()
        counted = [part for part in parts if part.weight > 0]
        total = sum(part.weight for part in parts)
        gave = [part for part in counted if part.values is not None]
        if not gave:
            return total, None
        start, stop = gave[0].layout.span(index)
        out = np.zeros(stop - start, np.float32)
        for part in gave:
            assert part.values is not None
            out += np.float32(part.weight) * part.values[start:stop]
        return total, (out / np.float32(sum(part.weight for part in counted))).tobytes()


scenarios = st.builds(
    Scenario,
    world=st.integers(1, 5),
    buckets=st.lists(st.integers(1, 14), min_size=1, max_size=4).map(tuple),
    rounds=st.integers(1, 4),
    collectives=st.just(()),
    transfers=st.just(()),
    salt=seeds,
)
departures = st.dictionaries(st.integers(0, 90), st.tuples(st.integers(0, 4), st.booleans()), max_size=4)


@given(scenarios, seeds, many_rates, departures)
def test_after_departures_all_end_rounds_with_equal_bytes_and_the_ledger_knows_what_counted(
    scenario: Scenario, seed: int, rates: tuple[float, ...], goes: Departures
) -> None:
    cluster = ElasticCluster(scenario, seed, rates)
    for step, (rank, politely) in goes.items():
        cluster.at[step] = partial(cluster.depart, rank, politely)
    cluster.run()
    cluster.run()  # what was on its way when the last one went

    assert cluster.unfinished() == []
    assert cluster.errors() == []
    for client in cluster.clients.values():
        for part in client.parts:
            for index, answer in part.answers.items():
                assert answer == cluster.expected(part.key, index)
    (over,) = {tuple(cluster.over[rank]) for rank in cluster.clients}
    (steady,) = {client.steady for client in cluster.clients.values()}
    assert sorted([*steady, *(done.round for done in over)]) == list(range(scenario.rounds)), "each round ends once"
    ledger = cluster.harness.engine.control.groups["default"].rounds.ledger
    assert [record.round for record in ledger] == list(range(scenario.rounds))
    for record in ledger:
        of_round = [by for (key, _), by in cluster.pushed.items() if key.number == record.round]
        for member_id in range(scenario.world):
            weights = [by[member_id].weight for by in of_round if member_id in by]
            assert record.weights[member_id] in (weights or [0.0])
            assert record.weights[member_id] or 0.0 in (weights or [0.0])
        cut = {(member_id, part): slices for member_id, part, slices in record.cut}
        for member_id in {member_id for member_id, _ in cut}:
            if any(
                scenario.weight(member_id, bucket(record.round, part)) == 0 for part in range(len(scenario.buckets))
            ):
                continue  # a worker has one weight in a round, and here 0 is one among others
            gave = [
                key.part for (key, _), by in cluster.pushed.items() if key.number == record.round and member_id in by
            ]
            assert member_id in cluster.gone
            assert {part: slices for (s, part), slices in cut.items() if s == member_id} == {
                part: gave.count(part) for part in set(gave)
            }
    cluster.harness.flush()
    (told,) = {tuple(cluster.told[rank]) for rank in cluster.clients}
    assert told == tuple(range(2, 2 + len(cluster.gone)))


def sharded(world: int, *sizes: int) -> ShardedHarness:
    harness = ShardedHarness({"default": Policy(1, 8)}, rates=(1.0, 1.0))
    harness.assemble(world, plan_of(*sizes))
    harness.slow = True
    return harness


def test_members_hear_of_a_departure_and_of_the_end_of_a_round_when_all_shards_know() -> None:
    harness = sharded(3, 8)
    for rank in (0, 2):
        for shard in range(2):
            harness.push_to(shard, rank, bucket(0), floats(1, 1, 1, 1), index=shard)
    Harness.lose(harness, 1)
    assert [type(message) for message, _ in harness.sent(0)] == [Result], "from the coordinator's own half"

    harness.flush()

    kinds = [type(message) for message, _ in harness.sent(0)]
    assert sorted(kind.__name__ for kind in kinds) == ["Membership", "Result", "RoundDone"]
    assert kinds[-1] is RoundDone


def test_a_plan_that_shards_have_yet_to_confirm_is_settled_once_despite_departures() -> None:
    harness = ShardedHarness({"default": Policy(1, 8)}, rates=(1.0, 1.0))
    harness.assemble(3)
    harness.slow = True
    for rank in range(3):
        harness.propose(rank, plan_of(4))
    Harness.lose(harness, 1)
    orders = len(harness.links[1])
    harness.flush()

    assert orders == 2, "the plan and the departure"
    for rank in (0, 2):
        assert [type(message) for message, _ in harness.sent(rank)].count(Agreed) == 1


def test_an_all_gather_that_is_shared_among_shards_fails_at_all_members_and_can_be_repeated() -> None:
    harness = sharded(3, 8)
    gather = Operation(Kind.ALL_GATHER, Op.NONE, FLOAT32, 4)
    share = harness.engine.data.groups["default"].table.share(collective(0), gather)
    assert [share.interval(shard) for shard in range(2)] == [(0, 2), (2, 4)]

    def begin(rank: int, number: int, epoch: int, world: int) -> None:
        share = share_of(gather, world, (1.0, 1.0))
        for shard in range(2):
            for index in range(*share.interval(shard)):
                first = index == share.interval(shard)[0]
                start, stop = share.layout.span(index)
                push = Push(
                    collective(number), index, 1.0, True, gather if first else None, epoch=epoch if first else 0
                )
                harness.receive_at(shard, SEATS + rank, push, floats(*range(start, stop)).tobytes())

    begin(0, 0, 1, 3)
    Harness.lose(harness, 1)
    harness.flush()
    begin(2, 0, 1, 3)
    for rank in (0, 2):
        failures = [message for message, _ in harness.sent(rank) if isinstance(message, Failure)]
        assert {str(failure.exception())[:24] for failure in failures} == {"collective 0 of round 0,"}
        assert {failure.exception().fields["epoch"] for failure in failures} == {2}
        assert all(isinstance(failure.exception(), MembershipChangedError) for failure in failures)

    for rank in (0, 2):
        begin(rank, 1, 2, 2)
    for rank in (0, 2):
        assert {type(message) for message, _ in harness.sent(rank)} == {Result}


def test_the_ledger_knows_a_member_that_counted_at_one_shard_only() -> None:
    harness = sharded(3, 8, 1)
    share = harness.engine.data.groups["default"].table.share(bucket(0), all_reduce(8))
    harness.push_to(0, 1, bucket(0), floats(1, 1, 1, 1), index=0)
    for rank in (0, 2):
        for shard in range(2):
            harness.push_to(shard, rank, bucket(0), floats(1, 1, 1, 1), index=shard)
        for shard in range(2):
            interval = harness.engine.data.groups["default"].table.share(bucket(0, 1), all_reduce(1)).interval(shard)
            if interval[0] < interval[1]:
                harness.push_to(shard, rank, bucket(0, 1), floats(1))
    harness.lose(1)
    harness.flush()

    assert share.interval(0) == (0, 1)
    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record.weights == (1.0, 1.0, 1.0)
    assert record.cut == ((1, 0, 1),), "one slice of the first bucket"


def test_a_worker_may_get_a_seat_while_shards_report_a_round() -> None:
    harness = sharded(2, 8)
    for rank in range(2):
        harness.push_to(1, rank, bucket(0), floats(1, 1, 1, 1), index=1)
    harness.flush()
    harness.receive(SEATS, Serve())
    harness.join(SEATS + 7, "late")
    for rank in range(2):
        harness.push_to(0, rank, bucket(0), floats(1, 1, 1, 1), index=0)
    harness.flush()

    (record,) = harness.engine.control.groups["default"].rounds.ledger
    assert record.weights == (1.0, 1.0, 0.0)


def test_each_shard_may_report_that_a_learner_reads_too_little() -> None:
    """Test the second report, which comes when the learner waits for a state already."""
    harness = ShardedHarness({"default": Policy(1, 8, backlog=8)}, rates=(1.0, 1.0))
    harness.assemble(2, plan := plan_of(8))
    harness.receive(SEATS, Serve())
    harness.join(SEATS + 2, "late")
    harness.attend(1, 2)
    harness.receive(SEATS + 2, Propose(plan.hash), plan.encoded)
    harness.receive(SEATS + 2, Enter(0))
    told: list[RoundDone] = []
    for number in range(3):
        harness.slow = bool(number)
        for rank, shard in product(range(2), range(2)):
            harness.push_to(shard, rank, bucket(number), floats(1, 1, 1, 1), index=shard)
        harness.flush()
        told += harness.told(2, RoundDone)

    assert SEATS + 2 not in harness.closed
    assert [[transfer.waits for transfer in done.transfers] for done in told] == [[False], [True]]


def test_a_member_of_a_round_that_is_complete_and_not_over_takes_part_in_the_next_one() -> None:
    """Test a connection that breaks before a shard has heard that another worker is not to join after all."""
    harness = ShardedHarness({"default": Policy(1, 8)}, rates=(0.0, 1.0), incarnation=1)
    plan = plan_of(2)
    harness.assemble(1, plan)
    harness.receive(SEATS, Serve())
    for rank, name in ((1, "late"), (2, "later")):
        harness.join(SEATS + rank, name)
        harness.attend(1, rank)
        harness.receive(SEATS + rank, Propose(plan.hash), plan.encoded)
    harness.receive(SEATS + 1, Enter(0, True))
    harness.push_to(1, 0, bucket(0), floats(1, 1))
    harness.receive(SEATS + 1, Ready(1))
    harness.inbox.clear()
    harness.slow = True
    harness.lose(2)
    for rank in (0, 1):
        harness.push_to(1, rank, bucket(1), floats(1, 1))
    while harness.links[-1]:
        harness.pass_on(-1)

    harness.feed(Disconnected(SEATS, "connection reset"))
    harness.flush()

    (news,), (done,) = harness.told(1, Membership), harness.told(1, RoundDone)
    assert (done.round, done.epoch) == (1, news.epoch)
    assert news.behind(1).member_ids == (0, 1)
