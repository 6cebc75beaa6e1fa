"""A group of members that reduce rounds among themselves, with all of the workers' real code above the sockets.

A `Fabric` stands for the communicators. A reduction is done for a member when all members of its epoch have given
theirs. If one of them dies or gives up, the others hear nothing of that from the fabric: as with NCCL, they wait until
the coordinator says that the round is void.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from gradserver.engine.policy import Policy
from gradserver.engine.records import Round, RoundRecord
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import RoundVoidError
from gradserver.protocol.exchange import ExchangeKey, Kind, Layout, Stream
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.worker.handle import Handle
from gradserver.worker.member.learner import Stage
from tests.session_group import PATIENCE, Act, Doubles, Group, Node, Results

Given = dict[int, int]
"""The process that gave something to a reduction, by member id."""


class DirectNode(Node):
    """A worker that reduces rounds with the others, and now and then cannot."""

    group: DirectGroup

    def _exchange(self, act: Act, chance: Random) -> None:
        if not act.direct:
            super()._exchange(act, chance)
            return
        worker = self.worker
        assert worker is not None
        number, boundaries = worker.round, worker._session.boundaries
        if self.stage is Stage.MEMBER:
            commit = self.agreements[self.group.modules + act.section]
            try:
                self._reduce(act, number, chance)
                return
            except RoundVoidError:
                self.group.voids[number].add(self.uid)
            except _RefusedError:
                self.group.voids[number].add(self.uid)
                boundaries.refuse(commit.first)
                self._dawdle(chance)
            boundaries.begin_again()
        super()._exchange(act, chance)

    def _reduce(self, act: Act, number: int, chance: Random) -> None:
        """Reduce a round with the others, and commit it."""
        group, worker = self.group, self.worker
        assert worker is not None
        session, parts = worker._session, self.agreements[act.section].parts
        commit = self.agreements[group.modules + act.section]
        watch: Handle[None] = Handle(PATIENCE, session.traffic.channel)
        why = session.boundaries.begin_direct(commit.first, watch)
        if why is not None:
            raise why.again()
        here = session.membership
        given = group.fabric[here.epoch, number, act.section]
        refuses, gives = group.refuses(self.uid, number), chance.random() < 0.5
        self._dawdle(chance)
        if gives or not refuses:
            given[self.member_id] = self.uid
            self._dawdle(chance)
        if refuses:
            raise _RefusedError("it could not reduce this with the others")
        group.world.scheduler.pause(lambda: not watch._open or given.keys() >= set(here.member_ids))
        if not watch._open:
            watch.raise_error()
        self._dawdle(chance)
        weight = group.weight(self.uid, number)
        group.pushed[self.member_id, number].add(self.uid)
        handle = worker.push(commit.first, np.zeros(1, np.float32), weight=weight, present=False)
        handle.wait()
        key = ExchangeKey(Stream.BUCKET, number, commit.first)
        assert session.plan is not None
        for part in parts:
            operation = session.plan.buckets[part].operation
            self.layouts[part], _ = session.member.exchanges.table.share(key._replace(part=part), operation)
        values = {part: self._sum(given, number, part, handle.weight) for part in parts}
        commit.finish(None)
        group.direct[number].add(self.uid)
        self.rounds[number] = Results(True, dict.fromkeys(parts, handle.weight), values, worker.epoch)
        for part in parts:
            self.state[part] += values[part]

    def _sum(self, given: Given, number: int, part: int, weight: float) -> Doubles:
        group = self.group
        sums = [group.weight(uid, number) * group.given(uid, number, part) for uid in given.values()]
        return np.sum(sums, axis=0) / weight if weight else np.zeros(group.buckets[part])

    def _dawdle(self, chance: Random) -> None:
        if chance.random() < 0.3:
            self.group.world.scheduler.pause()


class _RefusedError(Exception):
    """The error of a reduction that fails at one member."""


class DirectGroup(Group):
    """Nodes of a group that reduces among its members.

    Args:
        size: how many found the group.
        modules: the sizes of each module's buckets.
        program: what each node does.
        seed: decides on the order of everything.
        rates: of the data shards.
        fuses: after how many commands each process of the coordinator is lost, in turn.
        policy: of the group.
        preemption: how probable it is that a fiber loses its turn where it takes a lock.
        refusals: how probable it is that a member cannot reduce a round.

    Attributes:
        modules: how many modules there are. Each has a commit, in a section of its own.
        fabric: what members gave to a reduction, by epoch, round and module.
        direct: the processes for which a round counted that members reduced.
        voids: the processes for which a round was void.
    """

    node_type = DirectNode

    def __init__(
        self,
        size: int,
        modules: Sequence[Sequence[int]],
        program: Sequence[Act],
        seed: int,
        rates: Sequence[float] = (1.0,),
        fuses: Sequence[int] = (),
        policy: Policy | int | None = None,
        preemption: float = 0.0,
        refusals: float = 0.1,
    ) -> None:
        super().__init__(size, modules, program, seed, rates, fuses, policy, preemption)
        self.modules, self.refusals = len(modules), refusals
        self.plans += [_commit(f"c{number}") for number in range(self.modules)]
        self.fabric: dict[tuple[int, int, int], Given] = defaultdict(dict)
        self.direct: dict[int, set[int]] = defaultdict(set)
        self.voids: dict[int, set[int]] = defaultdict(set)

    def sections_of(self, act: Act) -> set[int]:
        """Return the module's section, and that of its commit if the round may have counted so."""
        own = super().sections_of(act)
        return own | {self.agreements[self.modules + act.section].number} if act.direct else own

    def refuses(self, uid: int, number: int) -> bool:
        """Tell whether a process cannot reduce a round."""
        del uid, number
        return self.world.random.random() < self.refusals

    def check(self) -> None:
        """Check all laws."""
        super().check()
        self._check_commits()

    def _check_bucket(self, record: RoundRecord, part: int, values: Doubles, layout: Layout) -> set[float]:
        """Check a bucket. A member that departed counts in all of one that members reduced, as it gave the commit."""
        if record.section in self.agreement_numbers():
            record = replace(record, cut=())
        return super()._check_bucket(record, part, values, layout)

    def _check_commits(self) -> None:
        """Check that a round counted as all members reduced it, or for none of them."""
        for number, record in self._records().items():
            act = self.program[self.place_of_round(number)]
            commits = self.agreement_numbers()
            is_direct = record.section in commits
            for node in self._witnesses(number):
                assert (node.uid in self.direct[number]) == is_direct, (
                    f"{node.name} has round {number} {'over the coordinator' if is_direct else 'of a void commit'}"
                )
            if is_direct:
                self._check_direct(number, record, act)

    def agreement_numbers(self) -> set[int]:
        """Return the sections of commits."""
        return {agreement.number for agreement in self.agreements[self.modules :]}

    def _check_direct(self, number: int, record: RoundRecord, act: Act) -> None:
        """Check that exactly the members of an epoch count that have given to its reduction."""
        assert all(slices == 1 for _, _, slices in record.cut), f"a commit has one slice: {record}"
        counted = {member_id: weight for member_id, weight in enumerate(record.weights) if weight}
        for (_, where, section), given in self.fabric.items():
            weights = {member_id: self.weight(uid, number) for member_id, uid in given.items()}
            if where == number and section == act.section and counted == {m: w for m, w in weights.items() if w}:
                return
        raise AssertionError(f"round {number} counts contributions that no reduction had: {record}")


def _commit(name: str) -> Plan:
    return Plan((Bucket(name, FLOAT32, (Component("x", (1,)),), kind=Kind.COMMIT),))


def counted_directly(group: DirectGroup) -> int:
    """Return how many rounds counted as members reduced them."""
    commits = group.agreement_numbers()
    return sum(isinstance(one, Round) and one.record.section in commits for one in group.world.harness.records)
