"""A group of real workers of which one contributes NaN, and the law that they keep: all of them halt, or none does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gradserver.engine.link import decode_report
from gradserver.engine.records import Halt
from gradserver.engine.reports import Halted
from gradserver.protocol.errors import NonFiniteError
from gradserver.protocol.messages import Reported
from tests.session_group import Doubles, Group, Node


class HaltingNode(Node):
    """A process that leaves when it fails."""

    def run(self) -> None:
        """Follow the program."""
        super().run()
        if self.error is not None and self.worker is not None:
            self.worker.close("failed")


class HaltingGroup(Group):
    """Nodes of a group that halts. The process ``bad`` names contributes NaN to that bucket of that round."""

    node_type = HaltingNode
    bad: tuple[int, int, int] = (-1, -1, -1)

    def given(self, uid: int, number: int, part: int) -> Doubles:
        """Return what a process gives to a bucket."""
        values = super().given(uid, number, part)
        if (uid, number, part) == self.bad:
            values[-1] = np.nan
        return values

    def kill_bad(self, _which: int = 0) -> None:
        """Let the process die that contributes NaN."""
        for index in [index for index, node in enumerate(self.nodes) if node.uid == self.bad[0]]:
            self.kill(index)

    def lose_behind_halt(self, *losses: Callable[[], object], delay: int = 0) -> None:
        """Have these losses happen when a data shard has said that the group is to halt, and control has not heard."""
        is_said, world = any(map(self._is_halt, self._on_their_way())), self.world
        if is_said and not delay:
            for lose in losses:
                lose()
        else:
            world.at[world.steps + 1].append(partial(self.lose_behind_halt, *losses, delay=delay - is_said))

    def _on_their_way(self) -> list[bytes]:
        up = self.world.harness.up.values()
        return [bytes(payloads[0]) for way in up for message, payloads in way if isinstance(message, Reported)]

    @staticmethod
    def _is_halt(payload: bytes) -> bool:
        return isinstance(decode_report(payload, 0.0)[1], Halted)

    @property
    def written(self) -> list[str]:
        """Reasons for which the group was halted, by the ledger."""
        return [record.reason for record in self.world.harness.records if isinstance(record, Halt)]

    def check_entered(self) -> None:
        """Check that a learner came in, unless the group was halted."""
        if not self.written:
            super().check_entered()

    def check(self) -> None:
        """Check that no member is told before that is written, that all end with one error, and none goes on."""
        everybody = [*self.nodes, *self.dead]
        told = {node.error.message for node in everybody if isinstance(node.error, NonFiniteError)}
        if not self.written:
            assert not told, "a member is told what is not written"
            super().check()
            return
        assert told <= set(self.written[:1]), f"members are told {told}, and {self.written} is written"
        for node in self.nodes:
            assert max(node.rounds, default=-1) < self.bad[1], f"{node.name} goes on behind round {self.bad[1]}"
            if node.counts:  # also if the group has ended while it was away
                assert isinstance(node.error, NonFiniteError), f"{node.name} ends with {node.error}"
