"""A group with rounds that do not wait for all, with all of the workers' real code.

Each node computes some contributions, each at the version that it has come to, and then follows the others. Which
contribution a node gives to a round is noted when it pushes. So the mean of each round is known from the ledger, and so
is the staleness of everything in it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np

from gradserver.engine.policy import Policy, in_mode, mode_of
from gradserver.engine.records import Begun
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.worker.member.learner import Stage
from gradserver.worker.turns import Turn
from tests.session_group import Act, Doubles, Group, Node, Results

ModeOf = tuple[str, int | None, int | str | None]
"""Name of a mode, the bound of staleness, and the quorum."""
MODES: tuple[ModeOf, ...] = (
    *(("async", None, None), ("async", 1, None), ("async", 3, 2)),
    *(("bounded", 0, None), ("bounded", 1, None), ("bounded", 2, "75%"), ("bounded", 4, 1)),
)
_UNKNOWN = 10**6


class ModeNode(Node):
    """A worker that requests a round for each contribution. Now and then it computes for long."""

    group: ModeGroup
    made = 0
    """Contributions that it has computed."""
    dropped = 0

    def _follow(self) -> None:
        while self.made < self.group.contributions:
            self.group.dawdle()
            self._contribute()
        self._ask(follows=True)
        while self._turn() is Turn.APPLY:
            self._take_part(None)
        self._take_part(None, counts=True)
        self.close()  # a learner may come in yet, and train alone

    def _contribute(self) -> None:
        assert self.worker is not None
        index, version = self.made, self.worker.round
        self.made += 1
        self._ask(follows=False)
        while (turn := self._turn()) is Turn.APPLY:
            self._take_part(None)
        if turn is Turn.DROP:
            self.dropped += 1
            return
        assert self.worker.staleness == self.worker.round - version
        self.group.gave[self.uid, self.worker.round] = index, version
        self._take_part(index, counts=True)

    def _ask(self, follows: bool) -> None:
        assert self.worker is not None
        self.worker.request_round(follows)
        if self.group.world.random.random() < 0.2:
            self.group.world.scheduler.pause()

    def _turn(self) -> Turn:
        assert self.worker is not None
        return self.worker.next_turn()

    def _take_part(self, index: int | None, counts: bool = False) -> None:
        """Push contribution ``index``, or nothing, to the present round, and apply the result."""
        group, worker = self.group, self.worker
        assert worker is not None
        number, agreement, session = worker.round, self.agreements[0], worker._session
        parts, chance = list(agreement.parts), group.world.random
        chance.shuffle(parts)
        data, handles = dict[int, Doubles](), {}
        for part in parts:
            given = np.full(group.buckets[part], np.nan) if index is None else group.given(self.uid, number, part)
            data[part] = given.copy()
            if index is not None:
                group.pushed[self.member_id, number].add(self.uid)
            weight = 0.0 if index is None else group.weight(self.uid, number)
            handles[part] = worker.push(part, data[part], weight=weight)
            assert session.plan is not None
            key, operation = ExchangeKey(Stream.BUCKET, number, part), session.plan.buckets[part].operation
            self.layouts[part], _ = session.member.exchanges.table.share(key, operation)
            if chance.random() < 0.2:
                group.world.scheduler.pause()
        agreement.finish(None)
        is_in = counts and session.stage is Stage.MEMBER and index is not None
        weights = {part: handle.weight for part, handle in handles.items()}
        self.rounds[number] = Results(is_in, weights, {part: data[part].copy() for part in parts}, worker.epoch)
        for part in parts:
            self.state[part] += data[part]


class ModeGroup(Group):
    """Nodes of a group in which rounds do not wait for all.

    Args:
        size: how many found the group.
        buckets: elements of each bucket.
        contributions: how many each node computes.
        mode: name, staleness and quorum.
        seed: decides on the order of everything.
        rates: of the data shards.
        fuses: after how many commands each process of the coordinator is lost, in turn.
        preemption: how probable it is that a fiber loses its turn where it takes a lock.
    """

    node_type = ModeNode

    def __init__(
        self,
        size: int,
        buckets: Sequence[int],
        contributions: int,
        mode: ModeOf,
        seed: int,
        rates: Sequence[float] = (1.0,),
        fuses: Sequence[int] = (),
        preemption: float = 0.0,
    ) -> None:
        name, self.bound, quorum = mode
        chosen, lateness = in_mode(mode_of(name, self.bound), quorum, grace=0.003 * (seed % 2))
        self.contributions = contributions
        self.gave: dict[tuple[int, int], tuple[int, int]] = {}
        """Contribution that a process pushed to a round, and its version; by process and round."""
        policy = Policy(1, 8, lateness=lateness, mode=chosen)
        super().__init__(size, [buckets], [Act()], seed, rates, fuses, policy, preemption)

    @property
    def rounds(self) -> int:
        """Number of rounds; while nodes train, more than there will be."""
        if any(node.finished for node in self.nodes):
            return 1 + max(self.world.ends, default=-1)
        return _UNKNOWN

    def place_of_round(self, number: int) -> int:
        """Return the place of any round in the program, which has one act."""
        del number
        return 0

    @property
    def most(self) -> int:
        return 8

    def weight(self, uid: int, number: int) -> float:
        if (uid, number) not in self.gave:
            return 0.0
        return Random(f"{uid} {self.gave[uid, number][0]}").choice([0.5, 1.0, 1.0, 3.25])

    def given(self, uid: int, number: int, part: int) -> Doubles:
        index, _ = self.gave[uid, number]
        if (uid, index, part) not in self._given:
            chance = np.random.default_rng([uid, index, part])
            self._given[uid, index, part] = chance.integers(1, 2**30, self.buckets[part]).astype(np.float64)
        return self._given[uid, index, part]

    def dawdle(self) -> None:
        """Compute, now and then for long."""
        chance: random.Random = self.world.random
        if chance.random() < 0.4:
            self.world.scheduler.pause(lambda: False, chance.choice((0.001, 0.01, 0.1, 0.5)))

    # ── laws ──────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Check all laws."""
        self._check_errors()
        self._check_rounds()
        self._check_states()
        self._check_contributions()
        self._check_cohorts()

    def check_entered(self) -> None:
        """Check nothing: members may have ended before a learner came in."""

    def _check_states(self) -> None:
        """Check that all members have the same bits after each round, and at the end."""
        first: dict[tuple[int, int], bytes] = {}
        for number in self._records():
            for node in self._witnesses(number):
                for part, values in node.rounds[number].values.items():
                    bits = values.tobytes()
                    assert first.setdefault((number, part), bits) == bits, f"members hold other bits of round {number}"
        ends: dict[int, set[bytes]] = defaultdict(set)
        for node in self.nodes:
            if node.finished:
                ends[max(node.rounds)].add(b"".join(one.tobytes() for one in node.state))
        assert all(len(states) == 1 for states in ends.values()), "replicas differ"

    def _check_contributions(self) -> None:
        """Check that each contribution of a node that has finished counts once, or was refused, and none is too old."""
        for node in self.nodes:
            if not isinstance(node, ModeNode) or not node.finished:
                continue
            counted = [self.gave[node.uid, number][0] for number, one in node.rounds.items() if one.counts]
            assert len(counted) == len(set(counted)), f"a contribution of {node.name} counts twice"
            assert len(counted) + node.dropped == self.contributions, f"a contribution of {node.name} is lost"
        for (uid, number), (_, version) in self.gave.items():
            assert self.bound is None or number - version <= self.bound, f"{uid} is too stale in round {number}"

    def _check_cohorts(self) -> None:
        """Check that the ledger says before each round which members contribute, and counts no other."""
        begun = {one.round: one for one in self.world.harness.records if isinstance(one, Begun)}
        for number, record in self._records().items():
            cohort = dict(begun[number].cohort)
            counted = {member_id for member_id, weight in enumerate(record.weights) if weight}
            assert counted <= cohort.keys(), f"round {number} counts {counted}, and was granted to {cohort.keys()}"
            assert not cohort.keys() & set(begun[number].others)
            assert self.bound is None or all(number - version <= self.bound for version in cohort.values())
            made = Counter(version for (_, to), (_, version) in self.gave.items() if to == number)
            assert made <= Counter(cohort.values()), f"round {number} has contributions of {made}, and says {cohort}"


class MeetingNode(ModeNode):
    """Such a worker that calls a collective behind each third round, as one that logs a mean now and then."""

    def _take_part(self, index: int | None, counts: bool = False) -> None:
        worker = self.worker
        assert worker is not None
        number = worker.round
        super()._take_part(index, counts)
        if number % 3 == 2 and not worker.observes:
            self.group.dawdle()
            worker.all_reduce(np.ones(3), "sum")


class MeetingGroup(ModeGroup):
    """Nodes of such a group that call collectives, too."""

    node_type = MeetingNode
