"""A group with rounds that do not wait for all, with all of the workers' real code.

Each node computes some contributions, each at the version that it has come to, and then follows the others. Which
contribution a node gives to a round is noted when it pushes. So the mean of each round is known from the ledger, and so
is the staleness of everything in it.

With several modules, each backward of a node reaches some of them, and leads to a contribution to each.
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
from gradserver.worker.client import Worker
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
        self.of: dict[int, int] = {}
        """The section that each round was of."""
        while self.made < self.group.contributions:
            self.group.dawdle()
            version, reached = self.worker_.round, self.group.reached(self.uid, self.made)
            for place in range(len(reached)):
                self._contribute(reached[place:], version)
        self._ask(follows=True)
        while self._turn() is Turn.APPLY:
            self._take_part(None)
        self._take_part(None, counts=True)
        self.close()  # a learner may come in yet, and train alone

    @property
    def worker_(self) -> Worker:
        """The worker, which has joined."""
        assert self.worker is not None
        return self.worker

    def _contribute(self, reached: Sequence[int], version: int) -> None:
        """Contribute to the first of the modules that a backward has reached; the others come later."""
        worker, (agreement, *later) = self.worker_, [self.agreements[one] for one in reached]
        index = self.made
        self.made += 1
        if len(self.agreements) == 1:
            self._ask(follows=False)
        else:
            worker.request_round(of=agreement, version=version, later=later)
            self._pause()
        while (turn := self._turn()) is Turn.APPLY:
            self._take_part(None)
        if turn is Turn.DROP:
            self.dropped += 1
            return
        assert worker.turn_of == agreement.number
        assert worker.staleness == sum(self.of[one] == agreement.number for one in range(version, worker.round))
        self.group.gave[self.uid, worker.round] = index, version
        self._take_part(index, counts=True)

    def _ask(self, follows: bool) -> None:
        self.worker_.request_round(follows)
        self._pause()

    def _pause(self) -> None:
        if self.group.world.random.random() < 0.2:
            self.group.world.scheduler.pause()

    def _turn(self) -> Turn:
        assert self.worker is not None
        return self.worker.next_turn()

    def _take_part(self, index: int | None, counts: bool = False) -> None:
        """Push contribution ``index``, or nothing, to the present round, and apply the result."""
        group, worker = self.group, self.worker
        assert worker is not None
        number, session = worker.round, worker._session
        (agreement,) = (one for one in self.agreements if one.number == worker.turn_of)
        self.of[number] = agreement.number
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
        buckets: elements of each bucket; of each module, if there are several.
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
        buckets: Sequence[int] | Sequence[Sequence[int]],
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
        modules = [[one] if isinstance(one, int) else list(one) for one in buckets]
        if isinstance(buckets[0], int):
            modules = [[one for module in modules for one in module]]
        super().__init__(size, modules, [Act()], seed, rates, fuses, policy, preemption)

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

    def reached(self, uid: int, index: int) -> list[int]:
        """Return the modules that a backward of a process reaches, which has made so many contributions before."""
        count = len(self.plans)
        return sorted(Random(f"{uid} {index} modules").sample(range(count), Random(f"{uid} {index}").randint(1, count)))

    def sections_of(self, act: Act) -> set[int]:
        """Return the sections in which any round may have been exchanged."""
        del act
        return {one.number for one in self.nodes[0].agreements}

    def staleness(self, number: int, version: int) -> int:
        """Return how many updates of the module of round ``number`` there were from ``version`` on."""
        records = self._records()
        return sum(records[one].section == records[number].section for one in range(version, number))

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
            assert len(counted) + node.dropped == node.made, f"a contribution of {node.name} is lost"
            assert node.made >= self.contributions
        done, bound = self._records().keys(), self.bound
        for (uid, number), (_, version) in self.gave.items():
            late = self.staleness(number, version) if number in done else 0
            assert bound is None or late <= bound, f"{uid} is too stale in round {number}"

    def _check_cohorts(self) -> None:
        """Check that the ledger says before each round which members contribute, and counts no other."""
        begun = {one.round: one for one in self.world.harness.records if isinstance(one, Begun)}
        for number, record in self._records().items():
            cohort, section = dict(begun[number].cohort), begun[number].section
            assert section in (record.section, -1), f"round {number} is not of the section that has begun"
            counted = {member_id for member_id, weight in enumerate(record.weights) if weight}
            assert counted <= cohort.keys(), f"round {number} counts {counted}, and was granted to {cohort.keys()}"
            assert not cohort.keys() & set(begun[number].others)
            assert self.bound is None or all(self.staleness(number, one) <= self.bound for one in cohort.values())
            made, granted = self._made(number), self._granted(number)
            assert made <= granted, f"round {number} has contributions of {made}, and was granted to {granted}"

    def _made(self, number: int) -> Counter[tuple[int, int]]:
        """Return the member and the version of each contribution to a round."""
        ids = {node.uid: node.member_id for node in [*self.nodes, *self.dead] if node.worker is not None}
        return Counter((ids[uid], version) for (uid, to), (_, version) in self.gave.items() if to == number)

    def _granted(self, number: int) -> Counter[tuple[int, int]]:
        """Return the members and versions that a round was granted to.

        It begins anew if all members are lost that had the results of the one before.
        """
        begun = (one for one in self.world.harness.records if isinstance(one, Begun) and one.round == number)
        return Counter(granted for cohort in {one.cohort for one in begun} for granted in cohort)


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
