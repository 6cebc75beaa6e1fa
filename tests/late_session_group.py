"""A group with a quorum or backups in which some workers are slow, with all of the workers' real code.

The ledger says which members count in how many slices. What follows from that is compared with every result: what did
not count is in the member's next contribution, or in none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from gradserver.engine.policy import Lateness, Policy
from gradserver.engine.records import RoundRecord
from gradserver.protocol.exchange import Layout
from tests.session_group import Act, Doubles, Group, Node, _subsets


class LateNode(Node):
    """A worker that is slow now and then."""

    def _exchange(self, act: Act, chance: Random) -> None:
        if chance.random() < 0.3:
            self.group.world.scheduler.pause(lambda: False, chance.choice([0.01, 0.1, 0.5]))
        super()._exchange(act, chance)


class LateGroup(Group):
    """Nodes of a group that closes rounds without late members.

    Args:
        size: how many found the group.
        buckets: elements of each bucket.
        rounds: how many there are.
        lateness: of the group.
        seed: decides on the order of everything.
        rates: of the data shards.
        fuses: after how many commands each process of the coordinator is lost, in turn.
    """

    node_type = LateNode

    def __init__(
        self,
        size: int,
        buckets: Sequence[int],
        rounds: int,
        lateness: Lateness,
        seed: int,
        rates: Sequence[float],
        fuses: Sequence[int],
    ) -> None:
        policy = Policy(1, 8, lateness=lateness)
        super().__init__(size, [buckets], [Act()] * rounds, seed, rates, fuses, policy)
        self.keeps = lateness.keeps

    def weight(self, uid: int, number: int) -> float:
        return Random(f"{uid} {number}").choice([0.5, 1.0, 1.0, 2.0])

    def _check_rounds(self) -> None:
        records = self._records()
        if self.uids > self.size:
            return  # a member id is one worker's after the other's, and so is what is carried over
        carried: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        for number, record in sorted(records.items()):
            nodes = [node for node in self.nodes if number in node.rounds]
            assert nodes, "no node has finished the round"
            for part, values in nodes[0].rounds[number].values.items():
                sums = self._check_late(record, part, values, nodes[0].layouts[part], carried)
                for node in nodes:
                    weight = node.rounds[number].weights[part]
                    assert any(weight == pytest.approx(one) for one in sums), "another weight than that of what counts"
        for node in self.nodes:
            if node.finished:
                self._check_kept(node, carried)

    def _check_kept(self, node: Node, carried: dict[tuple[int, int, int], dict[int, float]]) -> None:
        """Check that a node has yet to give what never counted, and nothing else."""
        assert node.worker is not None
        kept = node.worker._session.member.stragglers.carry._slices
        for part, layout in node.layouts.items():
            for index in range(layout.count):
                shares = carried.get((node.member_id, part, index), {})
                weight, data = kept.get(part, {}).get(index, (0.0, None))
                assert weight == pytest.approx(sum(shares.values())), f"{node.name} keeps another weight than is late"
                if data is not None:
                    start, stop = layout.span(index)
                    expected = self._mean_of({node.member_id: shares}, part)[start:stop]
                    assert np.allclose(data.view(np.float64), expected, rtol=1e-9, atol=0), f"{node.name} keeps others"

    def _check_late(
        self,
        record: RoundRecord,
        part: int,
        values: Doubles,
        layout: Layout,
        carried: dict[tuple[int, int, int], dict[int, float]],
    ) -> set[float]:
        """Check a bucket, slice by slice, and note what late members carry over. Return the weights of the slices.

        Of a member that counts in part the ledger has the number of slices: they are a prefix at each data shard.
        """
        said = {member_id: slices for member_id, bucket, slices in record.cut if bucket == part}
        departed = {member_id for member_id, _, _ in record.cut}
        always = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id not in departed]
        partly = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id in departed]
        counted, sums = dict.fromkeys(partly, 0), set[float]()
        for index in range(layout.count):
            start, stop = layout.span(index)
            own = {
                member_id: carried.pop((member_id, part, index), {})
                | {record.round: self.weight(member_id, record.round)}
                for member_id in range(self.size)
            }
            for some in _subsets(partly):
                expected = self._mean_of({member_id: own[member_id] for member_id in (*always, *some)}, part)[
                    start:stop
                ]
                if np.allclose(values[start:stop], expected, rtol=1e-9, atol=0):
                    break
            else:
                raise AssertionError(f"slice {index} of bucket {part} is no mean of what counts: {record}")
            for member_id in some:
                assert len(self.world.harness.rates) > 1 or counted[member_id] == index, "what counts is no prefix"
                counted[member_id] += 1
            sums.add(sum(sum(own[member_id].values()) for member_id in (*always, *some)))
            if self.keeps:
                late = own.keys() - {*always, *some}
                carried.update({(member_id, part, index): own[member_id] for member_id in late})
        assert counted == {member_id: said.get(member_id, 0) for member_id in partly}, (
            f"the ledger counts other slices: {record}"
        )
        return sums

    def _mean_of(self, given: dict[int, dict[int, float]], part: int) -> Doubles:
        """Return the mean of what some members give: the weights of their own gradients, by round."""
        sums, total = np.zeros(self.buckets[part]), 0.0
        for member_id, shares in given.items():
            for number, share in shares.items():
                sums += share * self.given(member_id, number, part)
                total += share
        return sums / total if total else sums
