"""Members that are far off and are evicted, at the engine: when, in which cases not, what becomes of them, and laws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.control import outliers
from gradserver.engine.control.outliers import EVERY, FEWEST
from gradserver.engine.control.watching import check_policy
from gradserver.engine.events import Branched
from gradserver.engine.policy import Lateness, OnOutlier, Policy
from gradserver.engine.records import Outlier
from gradserver.protocol.errors import (
    InvalidArgumentError,
    JoinRefusedError,
    LeftOutError,
    OutlierError,
)
from gradserver.protocol.exchange import WORLD_BOUND, ExchangeKey, Operation, Stream, gets, gives
from gradserver.protocol.limits import EVICTED_SECONDS
from gradserver.protocol.messages import Failure, Membership, Notice, Serve, Split, Welcome
from gradserver.protocol.messages.recovery import Resume
from gradserver.status import render
from tests.crash_harness import CrashError, Fused
from tests.elastic_harness import Cluster, Step
from tests.engine_harness import SEATS, TIMEOUT, Array, Harness, bucket, floats, plan_of, small_slices
from tests.examples import examples
from tests.test_engine_elastic_laws import SLICE, Departures, departures, programs, seeds, sizes

NUMEL = 256
SOON = FEWEST + EVERY
"""Rounds within which a member that is far off is evicted."""


def policy(least: int = 2, most: int = 8, lateness: Lateness | None = None) -> Policy:
    return Policy(least, most, outliers=OnOutlier.LEAVE_OUT, lateness=lateness)


class Scene:
    """A group of members ``w0``, ``w1``, … with gradients near each other, times the factor of a member."""

    def __init__(self, world: int, rule: Policy, harness: Harness | None = None, name: str = "") -> None:
        self.harness = harness or Harness({"default": rule}, compares=True)
        self.there = list(range(world))
        self.number = 0
        self.random = np.random.default_rng(world)
        for rank in self.there:
            self.harness.join(SEATS + rank, name or f"w{rank}", rank=rank, world=world)
        self.welcomes = self.harness.only(self.there, Welcome)
        self.harness.agree(plan_of(NUMEL), world)
        for rank in self.there:
            self.harness.receive(SEATS + rank, Serve())

    def rounds(self, count: int, factors: Mapping[int, float] | None = None) -> None:
        """Go through some rounds, with those that are still there."""
        for _ in range(count):
            for rank in self.there:
                factor = (factors or {}).get(rank, 1.0)
                self.push(rank, factor)
            self.number += 1
            self.there = [rank for rank in self.there if SEATS + rank not in self.harness.closed]

    def push(self, rank: int, factor: float) -> None:
        """Push the gradient of one member."""
        values = factor * (1 + 0.5 * self.random.standard_normal(NUMEL))
        self.harness.push(rank, bucket(self.number), values.astype(np.float32))
        while self.harness.reduces:
            self.harness.answer(self.harness.reduces.pop())

    def error(self, rank: int) -> OutlierError:
        """Return what an evicted member was told at last."""
        *_, (message, _) = self.harness.inbox.pop(SEATS + rank)
        assert isinstance(message, Failure)
        error = message.exception()
        assert isinstance(error, OutlierError)
        return error

    @property
    def logged(self) -> list[str]:
        return [log.text for log in self.harness.logs if "far off" in log.text and log.warning]

    @property
    def shown(self) -> list[str]:
        """Lines of `gradserver status`."""
        now = {"url": "here", "uptime": 1.0, **self.harness.engine.snapshot(self.harness.now)}
        return render(now, now)

    @property
    def keeps_all(self) -> str:
        return str(self.harness.group()["outliers"]["keeps_all"])


# ── evictions ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_member_that_is_far_off_is_evicted_and_the_others_go_on() -> None:
    scene = Scene(4, policy())
    scene.rounds(SOON, {2: -10.0})
    assert scene.there == [0, 1, 3]
    error = scene.error(2)
    assert (error.worker, error.rank) == ("w2", 2)
    assert 0 < error.round < SOON
    assert "gradients of 'w2' (rank 2) are far off: the norm of its gradients is" in error.message
    assert "the others go on without it (--outliers leave-out). Look at that worker's GPU" in error.message
    (news,) = scene.harness.told(0, Membership)
    assert news.member_ids == (0, 1, 3)
    assert "'w2' (rank 2) was lost" in news.reason
    assert "its gradients were far off" in news.reason
    assert not scene.harness.told(0, Notice)

    scene.rounds(20)
    group = scene.harness.group()
    assert group["round"] == scene.number
    assert group["last_round"]["weights"] == (1.0, 1.0, 0.0, 1.0)
    assert group["outliers"] == {"policy": "leave-out", "keeps_all": "", "evicted": {"w2": error.message}}
    assert f"  'w2' was evicted: {error.message}" in scene.shown


def test_of_several_that_are_far_off_one_is_evicted_in_a_round() -> None:
    scene = Scene(7, policy())
    scene.rounds(FEWEST, {2: 10.0, 5: 300.0})
    assert scene.there == [0, 1, 2, 3, 4, 6]
    assert [text for text in scene.logged if "they count, as another worker is further off" in text]
    scene.rounds(1, {2: 10.0})
    assert scene.there == [0, 1, 3, 4, 6]


@pytest.mark.parametrize(
    ("rule", "world", "why"),
    [
        (policy(3), 3, "it has 3 workers, and needs 3"),
        (policy(2, lateness=Lateness(quorum=2)), 2, "it has 2 workers, and needs 2"),
    ],
)
def test_a_group_keeps_as_many_members_as_it_needs_and_says_so(rule: Policy, world: int, why: str) -> None:
    scene = Scene(world, rule)
    scene.rounds(FEWEST)
    scene.rounds(SOON, {1: -10.0})
    assert scene.there == list(range(world))
    assert scene.keeps_all == why
    (text,) = scene.logged
    assert f"they count, as {why} (--outliers leave-out)" in text
    assert f"  outliers are reported only: {why}" in scene.shown
    assert any(line.startswith("  'w1' is far off (leave-out): the norm of its gradients is") for line in scene.shown)
    (notice,) = scene.harness.told(1, Notice)
    assert f"they count, as {why}" in notice.text


def test_a_group_keeps_its_members_when_as_many_were_evicted_as_would_be_left() -> None:
    scene = Scene(4, policy(1))
    scene.rounds(SOON, {0: 100.0})
    scene.rounds(SOON, {1: 100.0})
    assert scene.there == [2, 3]
    scene.rounds(FEWEST)
    scene.rounds(SOON, {2: 100.0})
    assert scene.there == [2, 3]
    assert scene.keeps_all == "2 were evicted before, and 2 are left: look at what they have in common"
    assert f"they count, as {scene.keeps_all}" in scene.logged[-1]


@pytest.mark.parametrize("before", [0, SOON])
def test_of_two_members_the_one_is_evicted_that_is_not_as_before(before: int) -> None:
    scene = Scene(2, policy(1))
    scene.rounds(before)
    scene.rounds(2 * SOON, {1: -10.0})
    assert scene.there == ([0] if before else [0, 1])
    assert before or not scene.logged


def test_members_of_a_sub_group_stay() -> None:
    scene = Scene(3, policy(1))
    for rank in range(3):
        scene.harness.feed(Branched(200 + rank, SEATS + rank, Split("default", 1, (0, 1, 2), TIMEOUT)))
    (name,) = (name for name in scene.harness.engine.control.groups if name != "default")
    assert "it is a sub-group" in scene.harness.group(name)["outliers"]["keeps_all"]


def test_a_policy_that_can_never_act_is_refused() -> None:
    for rule in (Policy(3, 3, outliers=OnOutlier.LEAVE_OUT), Policy(outliers=OnOutlier.LEAVE_OUT)):
        with pytest.raises(InvalidArgumentError, match=r"evicts a worker, and .* needs all its .*make it elastic"):
            check_policy(rule)
        harness = Harness({"default": rule})
        harness.join(SEATS, world=3)
        assert isinstance(harness.refusal(SEATS), InvalidArgumentError)
    for rule in (policy(), Policy(3, 3, outliers=OnOutlier.HALT), Policy()):
        check_policy(rule)


# ── coming back ───────────────────────────────────────────────────────────────────────────────────────


def test_an_evicted_worker_may_not_come_back_soon_under_its_name() -> None:
    scene = Scene(4, policy())
    scene.rounds(SOON, {2: -10.0})
    scene.harness.join(300, "w2")
    error = scene.harness.refusal(300)
    assert isinstance(error, JoinRefusedError)
    assert "are far off: the norm of its gradients is" in error.message
    assert f"A worker called 'w2' may join again in {EVICTED_SECONDS:.0f} s, and one with another name now" in str(
        error
    )
    scene.harness.join(301, "mended")
    assert isinstance(scene.harness.inbox[301][0][0], Welcome)
    scene.harness.wait(EVICTED_SECONDS)
    scene.harness.join(302, "w2")
    assert isinstance(scene.harness.inbox[302][0][0], Welcome)
    assert scene.harness.group()["outliers"]["evicted"] == {}


def test_a_namesake_that_was_evicted_does_not_come_back_by_the_shared_name() -> None:
    scene = Scene(3, policy(2), name="worker")
    scene.rounds(SOON, {1: 50.0})
    assert scene.error(1).worker == "worker-2"
    scene.harness.join(300, "worker")
    assert isinstance(scene.harness.refusal(300), JoinRefusedError)


def test_an_evicted_worker_with_a_broken_connection_hears_why_when_it_asks() -> None:
    scene = Scene(4, policy())
    scene.rounds(SOON, {2: -10.0})
    for connection, member_id, kind in ((300, 2, OutlierError), (301, 1, LeftOutError)):
        scene.harness.receive(connection, Resume("default", member_id, "", 1, ""))
        assert type(scene.harness.refusal(connection)) is kind


# ── durable groups ────────────────────────────────────────────────────────────────────────────────────


def durable(world: int) -> tuple[Scene, Fused]:
    """Return a durable group."""
    harness = Fused({"default": policy(1)}, compares=True)
    return Scene(world, policy(), harness), harness


def resume(scene: Scene, connection: int, member_id: int = 2) -> None:
    """Let a member come back on another connection."""
    token = scene.welcomes[member_id].token
    scene.harness.receive(connection, Resume("default", member_id, token, 1, plan_of(NUMEL).hash))


def test_a_member_that_is_away_when_it_is_evicted_hears_of_it_when_it_comes_back() -> None:
    scene, harness = durable(4)
    scene.rounds(FEWEST - 1, {2: -10.0})
    for rank in (2, 0, 1):
        scene.push(rank, -10.0 if rank == 2 else 1.0)
    harness.lose(2)
    assert harness.group()["state"] == "active"
    scene.push(3, 1.0)
    assert [member["name"] for member in harness.group()["members"]] == ["w0", "w1", "w3"]
    resume(scene, 300)
    assert isinstance(harness.refusal(300), OutlierError)


def test_an_eviction_holds_behind_a_coordinator_that_is_lost_at_any_point_of_it() -> None:
    """Test each number of commands that the coordinator carries out in the event that evicts."""
    evicted = kept = 0
    for fuse in range(40):
        scene, harness = durable(4)
        scene.rounds(FEWEST - 1, {2: -10.0})
        for rank in range(3):
            scene.push(rank, -10.0 if rank == 2 else 1.0)
        harness.push(3, bucket(FEWEST - 1), np.ones(NUMEL, np.float32))
        harness.fuse = fuse
        try:
            harness.answer(harness.reduces.pop())
        except CrashError:
            pass
        else:
            break
        harness.restart()
        there = [member["name"] for member in harness.group()["members"]]
        resume(scene, 300)
        if "w2" in there:
            kept += 1
            assert 300 not in harness.closed
            continue
        evicted += 1
        error = harness.refusal(300)
        assert isinstance(error, OutlierError)
        assert "the gradients of 'w2' are far off, and the others go on without it: norm 9." in error.message
    else:
        pytest.fail("the event has no end")
    assert evicted >= 4, "each message to a member is behind the records"
    assert kept >= 1


def test_an_evicted_worker_is_kept_out_behind_further_coordinators_until_it_is_back() -> None:
    scene, harness = durable(4)
    scene.rounds(SOON, {2: -10.0})
    for _ in range(2):
        kinds = [dated.record for dated in harness.books.records() if isinstance(dated.record, Outlier)]
        assert [(one.member_id, one.evicted) for one in kinds] == [(2, "w2")]
        harness.restart()
        assert list(harness.group()["outliers"]["evicted"]) == ["w2"]
        for place in (0, 1, 3):
            resume(scene, 310 + place, place)
        harness.join(301, "w2")
        error = harness.refusal(301)
        assert isinstance(error, JoinRefusedError)
        assert "the gradients of 'w2' are far off, and the others go on without it: norm 9." in error.message


# ── laws ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut gradients into small slices, and judge members by four rounds, as programs are short."""
    for name, count in (("FEWEST", 4), ("_OFTEN", 4), ("EVERY", 1)):
        monkeypatch.setattr(outliers, name, count)
    with small_slices(SLICE):
        yield


def giver(bad: int, begins: int) -> object:
    """Return what members give: numbers near each other, but for one member from a round on."""

    def give(member_id: int, key: ExchangeKey, operation: Operation, _attempt: int) -> tuple[float, Array | None]:
        if not gives(operation, member_id, key):
            return 1.0, None
        chance = np.random.default_rng((member_id, *(max(number, 0) for number in key)))
        factor = -1e3 if member_id == bad and key.stream == Stream.BUCKET and key.number >= begins else 1.0
        return 1.0, floats(*(factor * (1 + 0.2 * chance.standard_normal(operation.numel))))

    return give


@pytest.mark.usefixtures("_small")
@given(
    st.integers(2, 5),
    sizes,
    programs,
    departures,
    st.lists(st.integers(0, 150), max_size=2),
    st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 4)),
    seeds,
)
@settings(max_examples=examples(50))
def test_with_evictions_all_that_remain_get_equal_bytes_the_exact_mean_of_those_that_counted(
    world: int,
    buckets: list[int],
    program: list[Step],
    goes: Departures,
    joins: list[int],
    fault: tuple[int, int, int],
    seed: int,
) -> None:
    bad, begins, least = fault
    give = giver(bad % world, begins)
    assert callable(give)
    rule = policy(min(least, world))
    cluster = Cluster(world, buckets, [*program, *[Step()] * 8], seed, give, policy=rule)
    cluster.serve()
    for step, (member_id, politely) in goes.items():
        cluster.at[step] = partial(cluster.remove, member_id, politely)
    for step in joins:
        cluster.at.setdefault(step, cluster.join)
    cluster.run()
    cluster.run()

    control = cluster.harness.engine.control.groups["default"]
    assert {member.member_id for member in cluster.evicted} <= {bad % world}
    assert len(control.members.by_id) >= rule.minimum or goes, "an eviction leaves MIN members"
    if control.rounds.paused is None:
        assert all(member.finished for member in cluster.members.values()), "a member waits"
    for member in (*cluster.members.values(), *cluster.past):
        for task in member.history:
            for index, (total, payload) in task.answers.items():
                weight, expected = cluster.outcome(task.mates[index], index, task.operation, member.member_id)
                assert total == weight
                owner = 0
                if task.operation.kind in WORLD_BOUND:
                    owner = sorted(task.mates[index])[task.layout.owner(index)]
                assert payload == (expected if gets(task.operation, member.member_id, task.key, owner) else None)
    quiet = not goes and not joins and world > max(2, rule.minimum)
    rounds = rounds_with(program, begins)  # means of four rounds tell: those of three may be clear enough
    assert not quiet or rounds == 3 or bool(cluster.evicted) == (rounds > 3)


def rounds_with(program: list[Step], begins: int) -> int:
    """Return the number of rounds from ``begins`` on."""
    return sum(step.kind is None for step in program) + 8 - begins
