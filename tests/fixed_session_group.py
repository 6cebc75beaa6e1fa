"""A group of real workers that needs all of them, and its law: a lost one ends it for all others alike."""

from __future__ import annotations

from gradserver.engine.records import Halt, Round
from gradserver.protocol.errors import WorkerLostError
from tests.halting_session_group import HaltingNode
from tests.session_group import Group


class FixedGroup(Group):
    """Nodes of a group of which the least and the most number of members are the same."""

    node_type = HaltingNode

    def check_entered(self) -> None:
        """Check nothing: no worker joins a group that has all it needs."""

    def check(self) -> None:
        """Check all laws; if a member was lost, that the others hear of that alike, and hold the same until then."""
        if not self.dead:
            super().check()
            return
        written = [record.reason for record in self.world.harness.records if isinstance(record, Halt)]
        for node in self.nodes:
            if node.error is not None:
                assert isinstance(node.error, WorkerLostError), f"{node.name} ends with {node.error!r}"
                assert [node.error.message] == written[:1], (
                    f"{node.name} is told {node.error}, and {written} is written"
                )
        self._check_bits()

    def _check_bits(self) -> None:
        """Check that all that have got a round hold the same, which is the mean of what the ledger says."""
        done = {one.record.round: one.record for one in self.world.harness.records if isinstance(one, Round)}
        for number in range(self.rounds):
            nodes = self._witnesses(number)
            for part in {part for node in nodes for part in node.rounds[number].values}:
                assert len({node.rounds[number].values[part].tobytes() for node in nodes}) == 1, "other bits"
                if number in done:
                    self._check_bucket(done[number], part, nodes[0].rounds[number].values[part], nodes[0].layouts[part])
