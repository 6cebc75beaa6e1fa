"""Drives a coordinator's engine and those of its data shards by hand, as `engine_harness` does for one alone.

Workers have the same connection number everywhere. What control and data elsewhere tell each other waits in
``links`` if ``slow``, so that a test decides when it arrives; each link keeps its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from gradserver.engine import Engine
from gradserver.engine.commands import Close, Command, Log, Reduce, Send
from gradserver.engine.events import Disconnected, Event, NonFinite, Received, Reduced, Sifted, Tick
from gradserver.engine.shard import ShardEngine
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import ExchangeKey, Operation
from gradserver.protocol.messages import Attend, Attended, Enlist, Failure, Leave, Message, Push, Welcome
from gradserver.protocol.plan import Plan
from tests import receivers
from tests.engine_harness import SEATS, Array, Harness, hashes_of, reference

PRIMARY = "tcp://10.0.0.1:7411"
LINK = 1
"""A shard's connection to the coordinator."""
LINKS = 50
"""The coordinator's connection to shard 0, if there were one; the others follow."""


@dataclass
class ShardedHarness(Harness):
    """A coordinator and ``rates`` - 1 further data shards."""

    rates: tuple[float, ...] = (1.0, 1.0)
    slow: bool = False
    incarnation: int = 0
    """Number of the coordinator; groups are durable if it has one."""
    links: dict[int, deque[tuple[Message, Sequence[Buffer]]]] = field(default_factory=dict)
    """Messages on their way to shard i, or (-i) from it."""
    places: dict[int, int] = field(default_factory=dict)
    """The shard that a `Reduce` comes from, by its identity."""
    origins: dict[tuple[int, int], int] = field(default_factory=dict)
    """The shard that a message to a worker came from."""

    def __post_init__(self) -> None:
        numbers = count()
        told = self.worlds, self.credit, lambda: f"token {next(numbers)}", self.rates[0]
        self.engine = Engine(*told, incarnation=self.incarnation, nonfinite=self.nonfinite)
        self.shards = [ShardEngine(PRIMARY, url_of(shard), LINK) if shard else None for shard in range(len(self.rates))]
        self.welcomes: dict[int, Welcome] = {}
        slow, self.slow = self.slow, False
        for shard, rate in list(enumerate(self.rates))[1:]:
            self.links[shard], self.links[-shard] = deque(), deque()
            self.receive(LINKS + shard, Enlist(url_of(shard), rate))
        assert all(shard.number for shard in self.shards if shard is not None)
        self.slow = slow

    # ── events ────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: Event) -> list[Command]:
        return self.feed_at(0, event)

    def feed_at(self, shard: int, event: Event) -> list[Command]:
        """Hand one event to one engine, and with it all that follows at once."""
        mind = self.shards[shard] or self.engine
        commands = mind.handle(event, self.now)
        if self.checked:
            mind.validate()
            receivers.check(commands)
        reduces = []
        for command in commands:
            match command:
                case Send(connection, message, payloads):
                    self._sent(shard, connection, message, payloads)
                case Reduce():
                    reduces.append(command)
                    self.places[id(command)] = shard
                case Close(connection):
                    self.closed.append(connection)
                case Log():
                    self.logs.append(command)
        if not self.slow:
            self.flush()
        if self.lazy:
            self.reduces += reduces
            return commands
        return commands + [answer for reduce in reduces for answer in self.answer(reduce)]

    def _sent(self, shard: int, connection: int, message: Message, payloads: Sequence[Buffer]) -> None:
        if shard == 0 and LINKS < connection < LINKS + len(self.rates):
            self.links[connection - LINKS].append((message, payloads))
        elif shard and connection == LINK:
            self.links[-shard].append((message, payloads))
        elif connection >= 0:
            if isinstance(message, Welcome):
                self.welcomes[connection - SEATS] = message
            self.origins[id(message), connection] = shard
            self.inbox[connection].append((message, payloads))

    def busy_links(self) -> list[int]:
        """Links on which something is on its way."""
        return [link for link, waiting in self.links.items() if waiting]

    def pass_on(self, link: int) -> None:
        """Deliver the first message of one link."""
        message, payloads = self.links[link].popleft()
        if isinstance(message, Failure):
            return  # the link itself takes it, and breaks
        if link > 0:
            self.feed_at(link, Received(LINK, message, payloads))
        else:
            self.feed_at(0, Received(LINKS - link, message, payloads))

    def flush(self) -> None:
        """Deliver all that is on its way."""
        while busy := self.busy_links():
            self.pass_on(busy[0])

    def answer(self, reduce: Reduce, outcome: Buffer | NonFinite | Sifted | None = None) -> list[Command]:
        shard = self.places.pop(id(reduce))
        done = reference(reduce) if outcome is None else outcome
        told = done if reduce.keep or isinstance(done, NonFinite | Sifted) else None
        return self.feed_at(
            shard, Reduced(reduce.group, reduce.epoch, reduce.key, reduce.slice, told, hashes=hashes_of(reduce, done))
        )

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return [command for shard in range(len(self.shards)) for command in self.feed_at(shard, Tick())]

    def next_deadline(self) -> float | None:
        """Return the earliest of all."""
        found = [self.engine.next_deadline(), *(shard.next_deadline() for shard in self.shards if shard is not None)]
        return min((deadline for deadline in found if deadline is not None), default=None)

    # ── members ───────────────────────────────────────────────────────────────────────────────────────

    def assemble(self, world: int, plan: Plan | None = None, group: str = "default") -> None:
        """Make a complete group, with every worker attending every shard."""
        for rank in range(world):
            self.join(SEATS + rank, f"w{rank}", rank=rank, world=world, group=group)
        for shard in range(1, len(self.rates)):
            for rank in range(world):
                self.attend(shard, rank)
        for rank in range(world):
            kinds = [type(message) for message, _ in self.sent(rank)]
            assert kinds == [Welcome] + [Attended] * (len(self.rates) - 1), kinds
        if plan is not None:
            self.agree(plan, world)

    def attend(self, shard: int, rank: int, token: str | None = None, connection: int | None = None) -> list[Command]:
        welcome = self.welcomes[rank]
        assert welcome.shards[shard - 1] == url_of(shard)
        message = Attend(welcome.group, welcome.epoch, rank, welcome.token if token is None else token)
        return self.receive_at(shard, SEATS + rank if connection is None else connection, message)

    def receive_at(self, shard: int, connection: int, message: Message, *payloads: Buffer) -> list[Command]:
        return self.feed_at(shard, Received(connection, message, payloads))

    def push_to(
        self,
        shard: int,
        rank: int,
        key: ExchangeKey,
        payload: Buffer | Array | None = None,
        *,
        index: int = 0,
        weight: float = 1.0,
        operation: Operation | None = None,
    ) -> list[Command]:
        """Push one contribution to one slice, at the shard that it belongs to."""
        data = payload if payload is None or isinstance(payload, bytes | bytearray | memoryview) else payload.tobytes()
        payloads = () if data is None else (data,)
        push = Push(key, index, weight, data is not None, operation, epoch=self.epoch_of(rank, key, operation))
        return self.receive_at(shard, SEATS + rank, push, *payloads)

    def leave(self, rank: int, reason: str = "done") -> list[Command]:
        """Leave as a worker does: tell the other shards first, and then, when these have answered, the coordinator."""
        for shard in range(1, len(self.shards)):
            self.receive_at(shard, SEATS + rank, Leave(reason))
        return super().leave(rank, reason)

    def lose(self, rank: int, reason: str = "connection reset", *, ended: bool = False) -> list[Command]:
        """Lose a worker. Every shard notices, the last ones first."""
        what = Disconnected(SEATS + rank, reason, ended)
        gone = [self.feed_at(shard, what) for shard in reversed(range(len(self.shards)))]
        return [command for commands in gone for command in commands]

    def lose_shard(self, shard: int, reason: str = "it died") -> list[Command]:
        """Lose the coordinator's link to a shard, and whatever was on its way."""
        self.links[shard].clear()
        self.links[-shard].clear()
        return self.feed(Disconnected(LINKS + shard, reason))

    def shard(self, number: int) -> ShardEngine:
        shard = self.shards[number]
        assert shard is not None
        return shard


def url_of(shard: int) -> str:
    return f"tcp://10.0.0.{shard + 1}:7411"
