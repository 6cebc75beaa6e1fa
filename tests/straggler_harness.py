"""Members of a group that does not wait for all: real sessions around real engines. A test decides which one moves.

What a member gives to a slice is its weight, at a place of its own for each round. So a result shows which gradients of
which rounds are in it, and with which weight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradserver.engine.commands import Reduce
from gradserver.engine.policy import Lateness, Policy
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.messages import Join, Message, Place, Result
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.reducer import reduce
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session, ShardReceiver
from tests.engine_harness import SEATS, Harness
from tests.sharded_harness import ShardedHarness

Doubles = npt.NDArray[np.float64]


class Wire:
    """A session's channel. What the session says arrives at once; what is sent to it arrives when the test says so."""

    def __init__(self, cluster: LateCluster, member_id: int) -> None:
        self._cluster, self._seat = cluster, member_id
        self.receivers: dict[int, Receiver] = {}
        self.broken = False

    def attach(self, receiver: Receiver) -> None:
        self.receivers[0] = receiver

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        if not self.broken:
            sent = [bytes(payload) for payload in payloads]
            harness = self._cluster.harness
            if isinstance(harness, ShardedHarness):
                harness.receive_at(shard, SEATS + self._seat, message, *sent)
            else:
                harness.receive(SEATS + self._seat, message, *sent)

    def close(self) -> None:
        self.broken = True

    def wait(self, done: Lock, timeout: float) -> bool:
        return done.acquire(timeout=timeout)

    def watch(self, enough: Callable[[], bool]) -> None:
        pass

    def look(self) -> None:
        pass

    def empty(self, _nbytes: int) -> Any:
        return None

    def place_of(self, _data: Any, _shard: int = 0) -> Place | None:
        return None


@dataclass
class LateMember:
    """One of the members."""

    member_id: int
    session: Session
    wire: Wire
    weights: list[float]
    """Weights by round."""
    handles: dict[int, Handle] = field(default_factory=dict)
    data: dict[int, Doubles] = field(default_factory=dict)
    results: dict[tuple[int, int], tuple[float, bytes]] = field(default_factory=dict)
    """Weight and bytes of each bucket, by round."""
    without: set[tuple[int, int, int]] = field(default_factory=set)
    """Slices in which its contribution did not count: round, bucket, index."""


class LateCluster:
    """A group of ``world`` members that exchange ``rounds`` rounds of buckets of so many slices each."""

    def __init__(
        self,
        world: int,
        buckets: Sequence[int],
        rounds: int,
        lateness: Lateness,
        seed: int,
        rates: tuple[float, ...] = (),
    ) -> None:
        self.world, self.buckets, self.rounds = world, tuple(buckets), rounds
        self.random = random.Random(seed)
        policy = Policy(1, 8, lateness=lateness)
        if rates:
            self.harness: Harness = ShardedHarness({"default": policy}, lazy=True, rates=rates)
        else:
            self.harness = Harness({"default": policy}, lazy=True)
        self.members: dict[int, LateMember] = {}
        self.gone: dict[int, LateMember] = {}
        self.reductions: list[Reduce] = []
        self.numel = world * rounds
        """Elements of a slice."""
        self.plan: Plan = simple_plan(
            [(f"b{part}", size * self.numel) for part, size in enumerate(buckets)], dtype_of("float64")
        )
        self._assemble(len(rates))

    def _assemble(self, shards: int) -> None:
        for member_id in range(self.world):
            wire = Wire(self, member_id)
            session = Session(wire, 10.0)
            session.join(Join("default", f"w{member_id}", member_id, self.world, 10.0))
            weights = [self.random.choice([0.5, 1.0, 2.0]) for _ in range(self.rounds)]
            self.members[member_id] = LateMember(member_id, session, wire, weights)
        self.deliver_all()
        for member_id, member in self.members.items():
            for shard in range(1, shards):
                member.wire.receivers[shard] = ShardReceiver(member.session, shard)
                if isinstance(self.harness, ShardedHarness):
                    self.harness.welcomes[member_id] = member.session.membership
                member.session.attend(shard, 10.0)
        self.deliver_all()
        for member in self.members.values():
            member.session._propose(self.plan)
        self.deliver_all()
        for member in self.members.values():
            member.session.agree(self.plan, 0.0)
        if isinstance(self.harness, ShardedHarness):
            self.harness.slow = True

    # ── what can happen ───────────────────────────────────────────────────────────────────────────────

    def deliver(self, member_id: int) -> bool:
        """Hand a member the first message that waits for it."""
        waiting = self.harness.inbox.get(SEATS + member_id)
        if not waiting:
            return False
        message, payloads = waiting.pop(0)
        member, shard = self.members[member_id], 0
        if isinstance(self.harness, ShardedHarness):
            shard = self.harness.origins.get((id(message), SEATS + member_id), 0)
        if isinstance(message, Result) and member_id in message.without:
            slices = range(message.slice, message.slice + message.slices)
            member.without.update((message.key.number, message.key.part, index) for index in slices)
        member.wire.receivers[shard].receive(message, payloads)
        return True

    def step(self, member_id: int) -> bool:
        """Let a member push its next bucket, or go to the next round."""
        member = self.members[member_id]
        session = member.session
        if session.round == self.rounds:
            return False
        left = [part for part in range(len(self.buckets)) if part not in member.handles]
        if left:
            part = self.random.choice(left)
            data = np.zeros(self.buckets[part] * self.numel)
            data[member_id * self.rounds + session.round :: self.numel] = 1.0
            member.data[part] = data
            weight = member.weights[session.round]
            member.handles[part] = session.push_bucket(part, data.view(np.uint8), weight, True)
            return True
        if not all(handle.done() for handle in member.handles.values()):
            return False
        if session.member.rounds.announced.rounds <= session.round:
            return False
        for part, handle in member.handles.items():
            handle.wait(0.0)
            member.results[session.round, part] = handle.weight, member.data[part].tobytes()
        session.finish_round(0.0)
        member.handles.clear()
        return True

    def reduce(self) -> bool:
        """Carry out one reduction that waits."""
        if not self.harness.reduces:
            return False
        command = self.harness.reduces.pop(self.random.randrange(len(self.harness.reduces)))
        self.reductions.append(command)
        outcome = reduce(command)
        assert outcome is None or isinstance(outcome, Buffer)
        self.harness.answer(command, outcome)
        return True

    def pass_on(self) -> bool:
        """Deliver one message between control and a data shard."""
        if not isinstance(self.harness, ShardedHarness) or not (busy := self.harness.busy_links()):
            return False
        self.harness.pass_on(self.random.choice(busy))
        return True

    def kill(self, member_id: int) -> None:
        """Let a member die, unless it is the last."""
        if member_id in self.members and len(self.members) > 1:
            member = self.gone[member_id] = self.members.pop(member_id)
            member.wire.broken = True
            self.harness.lose(member_id)

    def deliver_all(self) -> None:
        """Deliver until nothing is on its way."""
        while any([self.pass_on(), *[self.deliver(member_id) for member_id in list(self.members)]]):
            pass

    def finish(self) -> None:
        """Let all members come to the end."""
        while any([self.reduce(), self.pass_on(), *[self.deliver(s) or self.step(s) for s in list(self.members)]]):
            pass

    @property
    def finished(self) -> bool:
        """True if all remaining members have come to the end."""
        return all(member.session.round == self.rounds for member in self.members.values())
