"""A durable group with overlapping sub-groups, with all of the workers' real code above the sockets.

Coordinators, data shards and connections are lost, and no member dies. So each round and each collective of a sub-group
has all of its members in it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.plan import simple_plan
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from tests.session_group import Act, Doubles, Group, Node

SIZES = (20, 3)
"""Elements of the buckets of each sub-group's module."""


class Sub(NamedTuple):
    """A sub-group of one node: its ranks in the parent, this worker's membership, and the agreement there."""

    ranks: tuple[int, ...]
    worker: Worker
    agreement: Agreement


@dataclass(eq=False)
class SubgroupNode(Node):
    """A worker with sub-groups."""

    subs: list[Sub] = field(default_factory=list)
    has_joined: bool = False
    has_split: bool = False

    def _join(self) -> None:
        super()._join()
        self.has_joined = True
        assert self.worker is not None
        for size in range(1, self.group.size + 1):
            for ranks in combinations(range(self.group.size), size):
                sub = self.worker.subgroup(ranks)
                if sub is not None:
                    plan = simple_plan([(f"s{n}", numel) for n, numel in enumerate(SIZES)], dtype_of("float64"))
                    self.subs.append(Sub(ranks, sub, sub.agree_beside(plan)))
        self.has_split = True

    def _follow(self) -> None:
        for act in self.group.program:
            if act.kind == "round" and not act.numel:
                self._exchange(act, self.group.world.random)
                continue
            for sub in self.subs:
                if act.root <= max(sub.ranks) + len(sub.ranks):
                    (self._collect_in if act.kind == "sum" else self._exchange_in)(sub, act)

    def _exchange_in(self, sub: Sub, act: Act) -> None:
        """Exchange a round in a sub-group. Each gives its uid's power of two, and so shows in the mean."""
        number, chance, size = sub.worker.round, self.group.world.random, len(sub.ranks)
        data: list[Doubles] = [np.full(numel, 2.0 ** (number % 8 * 6 + self.uid)) for numel in SIZES]
        for part, one in enumerate(data):
            sub.worker.push(part, one)
            if chance.random() < 0.3:
                self.group.world.scheduler.pause()
        sub.agreement.finish(None)
        expected = sum(2.0 ** (number % 8 * 6 + rank) for rank in sub.ranks) / size
        for one in data:
            assert (one == expected).all(), f"{sub.ranks}, round {number}, {act}: {one}, not {expected}"

    def _collect_in(self, sub: Sub, act: Act) -> None:
        value = np.full(act.numel, 8**self.uid, np.int64)
        sub.worker.all_reduce(value, op="sum")
        assert (value == sum(8**rank for rank in sub.ranks)).all(), f"{sub.ranks}, {act}: {value}"


class SubgroupGroup(Group):
    """Nodes of a group in which each set of members has a sub-group.

    In the program, a round with ``numel`` 0 is of the parent. All else is of sub-groups, those from ``root`` on.

    Attributes:
        early: true if something is lost while sub-groups are made, too.
    """

    node_type = SubgroupNode
    early = False

    def __init__(
        self, size: int, program: Sequence[Act], seed: int, rates: Sequence[float], fuses: Sequence[int], chance: float
    ) -> None:
        super().__init__(size, [[8]], program, seed, rates, fuses, None, chance)
        setattr(self.world.harness, "check_is_written", lambda _: None)  # noqa: B010 (it knows one group)

    @property
    def rounds(self) -> int:
        """Number of the parent's rounds in the program."""
        return sum(act.kind == "round" and not act.numel for act in self.program)

    def is_founded(self) -> bool:
        """Return true if all that is needed for the program is there."""
        nodes = [node for node in self.nodes if isinstance(node, SubgroupNode)]
        return all(node.has_joined if self.early else node.has_split for node in nodes)

    def check(self) -> None:
        """Check that all have finished: they compare what they get themselves."""
        for node in self.nodes:
            assert node.error is None, f"{node.name} failed: {node.error}"
            assert node.finished
        assert len({tuple(one.tobytes() for one in node.state) for node in self.nodes}) == 1
