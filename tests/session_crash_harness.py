"""Real sessions of a durable group around a real engine, which may be lost between any two commands.

A `Returning` member is a session with its recovery, driven by one thread. Its `Rope` stands for the channel that
outlives connections: what is said while there is no coordinator is lost. `Sessions` runs some rounds, and chooses at
random what happens next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradserver.engine.events import Disconnected
from gradserver.engine.policy import Policy
from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.errors import ConnectionLostError, CoordinatorStoppedError, DeadlineError
from gradserver.protocol.messages import Join, Message, Place, Push
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.reducer import reduce
from gradserver.worker.clock import Clock
from gradserver.worker.handle import Handle
from gradserver.worker.member.regions import Regions
from gradserver.worker.resumption import Resumption
from gradserver.worker.session import Session
from tests.crash_harness import POLICY, CrashError, Fused
from tests.engine_harness import SEATS

Doubles = npt.NDArray[np.float64]


class Rope:
    """A session's channel, which outlives connections."""

    def __init__(self, cluster: Sessions, connection: int) -> None:
        self._cluster = cluster
        self.connection = connection
        """The connection that stands; -1 for none."""
        self.resumption: Resumption
        self.is_durable = False

    def attach(self, _receiver: Receiver) -> None: ...

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        if self.connection < 0 or self._cluster.is_lost:
            return
        if self.is_durable and type(message) is Push and self.resumption.is_held(shard):
            return
        try:
            self._cluster.harness.receive(self.connection, message, *[bytes(payload) for payload in payloads])
        except CrashError:
            self._cluster.is_lost = True

    def close(self) -> None: ...

    def wait(self, done: Lock, timeout: float) -> bool:
        return done.acquire(timeout=timeout)

    def watch(self, enough: Callable[[], bool]) -> None: ...

    def look(self) -> None: ...

    def empty(self, _nbytes: int) -> Bytes | None:
        return None

    def region(self, _nbytes: int) -> Bytes | None:
        return None

    def place_of(self, _data: Bytes, _shard: int = 0) -> Place | None:
        return None

    def goes_on_with(self, _shards: tuple[str, ...], _answers: bool) -> bool:
        return True

    def stopped(self, error: CoordinatorStoppedError) -> None:
        raise AssertionError(error)

    def prepare_to_leave(self, _patience: float) -> None: ...

    def part(self) -> None: ...


@dataclass
class Returning:
    """One member."""

    rank: int
    """Its first rank."""
    session: Session
    rope: Rope
    resuming: Handle | None = None
    """Done when the coordinator knows it again."""
    handles: dict[int, Handle] = field(default_factory=dict)
    data: dict[int, Doubles] = field(default_factory=dict)
    results: dict[tuple[int, int], tuple[float, list[float]]] = field(default_factory=dict)
    """Weight and elements of each bucket, by round."""

    @property
    def resumption(self) -> Resumption:
        return self.rope.resumption


class Sessions:
    """Members that exchange ``rounds`` rounds of buckets, while the coordinator is lost after ``fuses`` commands each.

    Attributes:
        crashes: how often the coordinator was lost.
        is_lost: whether it is lost at the moment.
    """

    policy: Policy = POLICY
    """The policy of the group."""

    def __init__(self, world: int, buckets: Sequence[int], rounds: int, seed: int, fuses: Sequence[int]) -> None:
        self.world, self.buckets, self.rounds = world, tuple(buckets), rounds
        self.random = random.Random(seed)
        self.harness = Fused({"default": self.policy}, lazy=True)
        self.crashes, self.is_lost = 0, False
        self.breaks: dict[int, int] = {}
        """Members that lose their connection, by step."""
        self.deaths: dict[int, int] = {}
        """Members that die, by step."""
        self._fuses = list(fuses)
        self._connections = 1000
        self.plan: Plan = simple_plan([(f"b{part}", size) for part, size in enumerate(buckets)], dtype_of("float64"))
        self.members = [self._joining(rank) for rank in range(world)]
        self._deliver_all()
        for member in self.members:
            member.rope.resumption = Resumption(
                member.session.traffic,
                member.rope.goes_on_with,
                Clock(),
                Regions(member.rope.region, lambda _data: None),
            )
            member.rope.is_durable = True
            member.session.endure(member.rope)
            member.session._propose(self.plan)
        self._deliver_all()
        for member in self.members:
            member.session.agree(self.plan, 0.0)

    def _joining(self, rank: int) -> Returning:
        rope = Rope(self, SEATS + rank)
        session = Session(rope, 10.0)
        session.join(Join("default", f"w{rank}", rank, self.world, 10.0))
        return Returning(rank, session, rope)

    def _deliver_all(self) -> None:
        for member in self.members:
            while self.deliver(member):
                pass

    # ── what can happen ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Run until all members have finished, or nothing can happen any more."""
        steps = idle = 0
        self._light()
        while idle < 40 and not all(member.session.round == self.rounds for member in self.members):
            try:
                if steps in self.deaths:
                    self.remove(self.deaths.pop(steps))
                elif steps in self.breaks:
                    self.break_line(self.members[self.breaks.pop(steps) % len(self.members)])
                steps += 1
                if self.step():
                    idle = 0
                else:
                    idle += 1
                    due = self.harness.engine.next_deadline()
                    if due is not None:
                        self.harness.wait(max(due - self.harness.now, 0.0))
            except CrashError:
                self.is_lost = True
            if self.is_lost:
                self.crash()

    def step(self) -> bool:
        """Do one possible thing, chosen at random. Return false if there is none."""
        choices: list[Callable[[], bool]] = [self.reduce] if self.harness.reduces else []
        for member in self.members:
            for what in self.doings(member):
                choices.append(lambda what=what, member=member: what(member))  # type: ignore[misc]
        self.random.shuffle(choices)
        return any(choice() for choice in choices)

    def doings(self, _member: Returning) -> Sequence[Callable[[Returning], bool]]:
        """Return what a member may do."""
        return self.resume, self.restate, self.deliver, self.push, self.finish

    def reduce(self) -> bool:
        """Carry out a reduction that waits."""
        command = self.random.choice(self.harness.reduces)
        self.harness.reduces.remove(command)
        outcome = reduce(command)
        assert outcome is None or isinstance(outcome, Buffer)
        self.harness.answer(command, outcome)
        return True

    def deliver(self, member: Returning) -> bool:
        """Hand a member the first message that waits for it."""
        waiting = self.harness.inbox.get(member.rope.connection)
        if not waiting:
            return False
        message, payloads = waiting.pop(0)
        member.session.receive(message, payloads)
        return True

    def push(self, member: Returning) -> bool:
        """Push a member's next bucket."""
        left = [part for part in range(len(self.buckets)) if part not in member.handles]
        if not left or member.session.round == self.rounds:
            return False
        part = self.random.choice(left)
        data = member.data[part] = self.given(member.rank, member.session.round, part)
        member.handles[part] = member.session.push_bucket(part, data.view(np.uint8), self.weight_of(member), True)
        return True

    def weight_of(self, member: Returning) -> float:
        """Return the weight with which a member gives to its present round."""
        return 1.0 + member.rank

    def given(self, rank: int, number: int, part: int) -> Doubles:
        """Return what a member gives to a bucket."""
        return np.arange(self.buckets[part], dtype=np.float64) + 100 * rank + 1000 * number

    def finish(self, member: Returning) -> bool:
        """Finish a member's round, if it is over."""
        if len(member.handles) < len(self.buckets) or not all(handle.done() for handle in member.handles.values()):
            return False
        number = member.session.round
        try:
            member.session.finish_round(0.0)
        except DeadlineError:
            return False
        for part, handle in member.handles.items():
            member.results[number, part] = handle.weight, member.data[part].tolist()
        member.handles.clear()
        return True

    def resume(self, member: Returning) -> bool:
        """Say on a new connection which member this is."""
        if member.rope.connection >= 0:
            return False
        self._connections += 1
        member.rope.connection = self._connections
        member.resuming = member.resumption.resume(member.rope)
        return True

    def restate(self, member: Returning) -> bool:
        """Say what a member holds, when the coordinator knows it again."""
        if member.resuming is None or not member.resuming.done():
            return False
        member.resuming.wait()
        member.resuming = None
        member.resumption.restate(member.rope)
        return True

    # ── what is lost ──────────────────────────────────────────────────────────────────────────────────

    def _light(self) -> None:
        self.harness.fuse = self._fuses.pop(0) if self._fuses else -1

    def crash(self) -> None:
        """Lose the coordinator, and begin another one."""
        self.crashes += 1
        for member in self.members:
            self._cut_off(member)
        self.harness.restart()
        self.is_lost = False
        self._light()

    def break_line(self, member: Returning) -> None:
        """Break a member's connection, which the coordinator notices."""
        connection = member.rope.connection
        if connection >= 0:
            self._cut_off(member)
            self.harness.inbox.pop(connection, None)
            self.harness.feed(Disconnected(connection, "connection reset"))

    def remove(self, index: int) -> None:
        """Let a member die, unless it is the last. The coordinator notices the end of its connection."""
        if len(self.members) > 1:
            member = self.members[index % len(self.members)]
            self.break_line(member)
            self.members.remove(member)

    def _cut_off(self, member: Returning) -> None:
        """Let a member read some of what is on its way, and nothing of the rest."""
        was_lost, self.is_lost = self.is_lost, True  # what it says to that is lost
        for _ in range(self.random.randint(0, len(self.harness.inbox.get(member.rope.connection, [])))):
            self.deliver(member)
        self.is_lost = was_lost
        member.rope.connection, member.resuming = -1, None
        member.resumption.interrupt(ConnectionLostError("the connection is gone"))
        member.resumption.recovery.suspend()
