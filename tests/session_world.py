"""Workers of a durable group, with all of their real code above the sockets, around real engines that may be lost.

Each worker is a process of fibers (`tests.fibers`): its user's program, what reads its connections, and what looks for
a coordinator that is lost. A `Wire` stands for the sockets of one connection. A message waits in its line until it is
read; a line that breaks loses any suffix of what is on its way, on both ways. `World` runs all that in an order that a
seed decides, and loses any process between any two commands.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from gradserver import reducer
from gradserver.engine.commands import Reduce
from gradserver.engine.declared import Kind as RecordKind
from gradserver.engine.events import Branched, Disconnected, NonFinite, Received, Reduced, Sifted
from gradserver.engine.policy import Policy
from gradserver.engine.records import Round
from gradserver.protocol import wire
from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Receiver
from gradserver.protocol.errors import ClosedError, ConnectionLostError, CoordinatorUnreachableError
from gradserver.protocol.messages import BePresent, Failure, Message, Place, Scope, Split
from gradserver.residuals import Residuals
from gradserver.worker.transport.branches import Branch
from tests import fibers
from tests.crash_harness import CrashError, Trap
from tests.engine_harness import small_slices
from tests.fibers import Scheduler
from tests.sharded_crash_harness import LINK, Processes, ShardLostError
from tests.slow_ways import SlowWays

URL = "tcp://10.0.0.1:7411"
SLICE = 64
"""Bytes of a slice: eight elements of float64, or eight frames of objects."""
GRAINS = (0, 2, 16, 60)
"""Grains: slices are as large as they may be, or smaller."""
PART = 256
"""Bytes of a part of a state that a learner gets."""
LIMIT = 600.0
"""Seconds in which all must be over."""
STEPS = 20_000
TICK = 1e-5
"""Seconds that each step takes."""
MODULES = tuple(
    f"gradserver.worker.{module}"
    for module in (
        *("clock", "connect", "donor", "handle", "learner", "resumption", "splitting", "subgroups", "traffic"),
        *("transport.lasting", "transport.reconnect"),
    )
)
"""Modules with locks, threads or a clock."""


def _process_at(url: str) -> int:
    return 0 if url == URL else int(url.rpartition(":")[2])


@dataclass(eq=False)
class Line:
    """One connection of a worker to the coordinator (shard 0), or to another shard."""

    number: int
    process: int
    """0 for the coordinator."""
    incarnation: int
    """The coordinator's."""
    shard: int
    up: deque[tuple[Message, list[bytes]]] = field(default_factory=deque)
    receiver: Receiver | None = None
    base: int = -1
    """The connection that carries it, if it is a branch."""
    is_open: bool = True
    """False once the process at the other end has no part in it any more."""
    is_gone: bool = False
    """True if nothing more will come of it: the worker notices when it has read what is there."""


class Wire:
    """The sockets of one connection, as `gradserver.worker.transport.tcp.TcpChannel` has them."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.on_this_host, self.heard, self.kind = url, False, False, "tcp"
        self._world = world = World.running[-1]
        self._closing = False
        world.wait_for_listener(url, timeout)
        self.lines = [world.connect(url, 0)]
        self.owner = world.scheduler.owner
        world.wires.append(self)
        self._reads = False
        self._branches: dict[int, Branch] = {}
        self.carried: dict[tuple[int, int], Line] = {}
        """Connections of branches, by the branch and the shard."""

    def attach(self, receiver: Receiver) -> None:
        """Hand messages to ``receiver`` from now on."""
        self.lines[0].receiver = receiver
        if not self._reads:
            self._reads = True
            self._world.scheduler.spawn(self._read)

    def add(self, url: str, receiver: Receiver, timeout: float) -> None:
        """Connect to one more data shard."""
        self._world.wait_for_listener(url, timeout)
        if self._closing:
            raise ClosedError("this worker is closed")
        line = self._world.connect(url, len(self.lines))
        line.receiver = receiver
        self.lines.append(line)

    def probe(self, _payload: Buffer, _timeout: float) -> bool:
        """Send bytes that mean nothing. Links of this world have no rate: nothing is answered."""
        return False

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0, branch: int = 0) -> None:
        """Send a message. If the other end is gone, that is noticed or not."""
        if self._closing:
            raise ClosedError("this worker is closed")
        assert shard < len(self.lines), "a message to a data shard without a connection"
        line = self._line_of(branch, shard) if branch else self.lines[shard]
        if line.is_gone and self._world.random.random() < 0.5:
            raise ConnectionLostError("the connection is gone")
        if line.is_open and not line.is_gone:
            sent, _ = wire.decode([wire.encode(message), *payloads])
            copies = [bytes(payload) for payload in payloads]
            line.up.append((sent, copies))
            self._world.overhear(self.owner, sent, copies)

    def _read(self) -> None:
        """Hand over what comes, until the connection ends."""
        world = self._world
        while not self._closing:
            world.scheduler.pause(self._has_news)
            full = [line for line in self.lines if world.harness.waiting.get(line.number)]
            on_branches = [place for place, line in self.carried.items() if world.harness.waiting.get(line.number)]
            if self._closing:
                return
            if on_branches and world.random.random() < 0.5 + 0.5 * (not full):
                number, shard = world.random.choice(on_branches)
                message, payloads = world.harness.waiting[self.carried[number, shard].number].popleft()
                self._branches[number].hear(shard, message, payloads)
                continue
            error = ConnectionLostError("the connection broke")
            if full:
                line = world.random.choice(full)
                message, payloads = world.harness.waiting[line.number].popleft()
                ends = isinstance(message, Failure) and message.scope is Scope.CONNECTION
                if not (ends and message.error == ConnectionLostError.__name__):  # type: ignore[union-attr]
                    self.heard = True
                    if not isinstance(message, BePresent):
                        assert line.receiver is not None
                        line.receiver.receive(message, payloads)
                    continue
                error = ConnectionLostError(message.text)  # type: ignore[union-attr]
            self._closing = True
            world.let_go(self)
            receiver = self.lines[0].receiver
            assert receiver is not None
            receiver.lost(error)

    def _has_news(self) -> bool:
        waiting = self._world.harness.waiting
        if self._closing:
            return True
        for line in self.lines:
            if line.is_gone or waiting.get(line.number):
                return True
        return bool(self.carried) and any(waiting.get(line.number) for line in self.carried.values())

    def wait(self, done: Any, timeout: float) -> bool:
        """Wait until ``done`` can be taken."""
        return bool(done.acquire(timeout=max(timeout, 0.0)))

    def close(self) -> None:
        """Close all connections. What was sent arrives."""
        self._closing = True
        self._world.let_go(self)

    give_up = close

    def watch(self, _enough: Callable[[], bool], branch: int = 0) -> None: ...

    def look(self) -> None: ...

    # ── branches ──────────────────────────────────────────────────────────────────────────────────────

    def branch(self) -> Branch:
        """Return a new branch, for a sub-group."""
        number = len(self._branches) + 1
        self._branches[number] = Branch(self, number)
        return self._branches[number]

    def reaches(self, shard: int) -> bool:
        """Return whether there is a connection to this shard."""
        return shard < len(self.lines)

    def line_to(self, url: str) -> int:
        """Return the number of the connection to the data shard at ``url``."""
        found = (number for number, line in enumerate(self.lines) if number and line.process == _process_at(url))
        number = next(found, None)
        if number is None:
            raise ConnectionLostError(f"no connection to {url}")
        return number

    def drop(self, branch: int) -> None:
        """Take nothing from this branch any more."""
        for place in [place for place in self.carried if place[0] == branch]:
            del self.carried[place]

    def _line_of(self, branch: int, shard: int) -> Line:
        if (branch, shard) not in self.carried:
            trunk = self.lines[shard]
            line = self.carried[branch, shard] = self._world.carry(trunk)
            line.is_gone, line.is_open = trunk.is_gone, trunk.is_open
        return self.carried[branch, shard]

    @property
    def all_lines(self) -> list[Line]:
        """All connections, those of branches last."""
        return [*self.lines, *self.carried.values()]

    def ask(self, shard: int = 0) -> None: ...

    def settle(self, _timeout: float) -> None: ...

    def attach_beacon(self, _beacon: object) -> None: ...

    def detach_beacon(self) -> None: ...

    def put_out_beacon(self) -> None: ...

    def detach_memory(self) -> None: ...

    def empty(self, _nbytes: int) -> Bytes | None:
        return None

    def region(self, _nbytes: int) -> Bytes | None:
        return None

    def place_of(self, _data: Bytes, _shard: int = 0) -> Place | None:
        return None


@dataclass
class Hosts(Processes):
    """The coordinator and data shards, with the real reducer."""

    gone: set[int] = field(default_factory=set)
    """Connections through which nothing goes any more."""
    residuals: Residuals | None = None
    """Files of what lossy codecs owe at the coordinator; None for memory, which is lost with it."""

    def keep_residuals(self, directory: Path) -> None:
        """Keep what lossy codecs owe in files."""
        self.residuals = Residuals(directory)
        self.residuals.restore(())

    def kept(self, records: Sequence[RecordKind]) -> frozenset[str]:
        if self.residuals is None:
            return frozenset()
        self.residuals = Residuals(self.residuals._directory)
        return self.residuals.restore(records)

    def write(self, record: RecordKind) -> None:
        super().write(record)
        if self.residuals is not None:
            self.residuals.take(record)

    def sent_from(self, process: int, connection: int, message: Message, payloads: list[bytes]) -> None:
        is_cut = process and connection == LINK and process not in self.up
        if connection not in self.gone and not is_cut:
            super().sent_from(process, connection, message, payloads)

    def answer(self, reduce: Reduce, outcome: Buffer | NonFinite | Sifted | None = None) -> list[object]:  # type: ignore[override]
        del outcome
        process = self.places.pop(id(reduce))
        if process and process not in self.minds:
            return []
        if self.residuals is not None and not process:
            self.residuals.provide(reduce)
        done = reducer.reduce(reduce)
        hashes = () if reduce.hashes is None else reduce.hashes.found
        return self.feed_at(process, Reduced(reduce.group, reduce.epoch, reduce.key, reduce.slice, done, hashes=hashes))


class World:
    """Processes, and what happens to them.

    Args:
        policy: of the group "default".
        rates: of the data shards; the first is the coordinator's own.
        seed: decides on the order of everything.
        fuses: after how many commands each process is lost, in turn.
        preemption: how probable it is that a fiber loses its turn where it takes a lock.

    Attributes:
        now: the time.
        random: all chance.
        grain: what the size of slices follows from.
        crashes: the times at which the coordinator was lost.
        losses: the times at which anything was lost or broke.
        ends: the time at which each round was first written.
    """

    running: ClassVar[list[World]] = []

    def __init__(
        self,
        policy: Policy | int,
        rates: Sequence[float],
        seed: int,
        fuses: Sequence[int] = (),
        preemption: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.grain = GRAINS[seed % len(GRAINS)]
        self.scheduler = Scheduler(self.random, preemption)
        self.harness = Hosts({"default": policy}, lazy=True, rates=tuple(rates))
        self.wires: list[Wire] = []
        self.lines: dict[int, Line] = {}
        self.at: dict[int, list[Callable[[], object]]] = defaultdict(list)
        """Happenings, by step."""
        self.crashes: list[float] = []
        self.losses: list[float] = []
        self.ends: dict[int, float] = {}
        self.overhear: Callable[[object, Message, list[bytes]], object] = lambda *_: None
        """Called with each message that a worker sends."""
        self.steps = 0
        self.is_down_until = -1.0
        self.along: list[Callable[[], object]] = []
        """Losses in the same moment as the coordinator's, one for each time that it is lost."""
        self.traps: list[Trap] = []
        """Losses of a process behind records, once the group is founded."""
        self.ways: SlowWays | None = None
        """Ways of messages that are slow for a while; None if each step is equally probable."""
        self._fuses = list(fuses)
        self._notices: list[Callable[[], object]] = []
        self._cut_links: list[int] = []
        """Shards that have yet to notice that the coordinator was lost."""
        self._closed = self._written = 0
        for _ in rates[1:]:
            self.harness.start_shard()
        while self._pass_one():
            pass

    @property
    def now(self) -> float:
        return self.scheduler.now

    # ── connections ───────────────────────────────────────────────────────────────────────────────────

    def _listens(self, url: str) -> bool:
        if url == URL:
            return self.is_down_until < 0
        return int(url.rpartition(":")[2]) in self.harness.minds

    def reach(self, url: str, _timeout: float) -> None:
        """Raise OSError if nothing listens at ``url``."""
        if not self._listens(url):
            raise ConnectionRefusedError("connection refused")

    def wait_for_listener(self, url: str, timeout: float) -> None:
        """Wait until something listens at ``url``."""
        if not self._listens(url) and not self.scheduler.pause(lambda: self._listens(url), timeout):
            raise CoordinatorUnreachableError(f"nothing listens at {url}")

    def connect(self, url: str, shard: int) -> Line:
        """Make a connection."""
        line = Line(self.harness.number(), _process_at(url), self.harness.incarnation, shard)
        self.lines[line.number] = line
        return line

    def carry(self, trunk: Line) -> Line:
        """Make a connection that another one carries."""
        line = Line(self.harness.number(), trunk.process, self.harness.incarnation, trunk.shard, base=trunk.number)
        if trunk.is_open:
            self.lines[line.number] = line
        return line

    def let_go(self, wire: Wire) -> None:
        """Have the other ends notice that a worker has closed its connections, when they have read what was sent."""
        if wire in self.wires:
            self.wires.remove(wire)
        for line in wire.all_lines:
            self.harness.waiting.pop(line.number, None)
            self.harness.gone.add(line.number)
            line.is_gone = True

    def break_off(self, wire: Wire) -> None:
        """Break connections: any suffix of what is on its way is lost."""
        for line in wire.all_lines:
            self.cut_off(line)
            for _ in range(self.random.randint(0, len(line.up))):
                line.up.pop()

    def cut_off(self, line: Line) -> None:
        """Have a worker notice the end of a line, when it has read a prefix of what is on its way."""
        waiting = self.harness.waiting.get(line.number, deque())
        for _ in range(self.random.randint(0, len(waiting))):
            waiting.pop()
        self.harness.gone.add(line.number)
        line.is_gone = True

    # ── losses ────────────────────────────────────────────────────────────────────────────────────────

    def break_line(self, owner: object) -> None:
        """Break the connections of a worker."""
        self.losses.append(self.now)
        for one in [one for one in self.wires if one.owner is owner]:
            self.break_off(one)

    def kill(self, owner: object) -> None:
        """Let a worker die. Any prefix of what it has sent arrives."""
        self.losses.append(self.now)
        self.scheduler.kill(owner)
        for one in [one for one in self.wires if one.owner is owner]:
            self.break_off(one)
            self.let_go(one)

    def kill_shard(self, process: int) -> None:
        """Let a data shard die. The others notice in any order."""
        harness = self.harness
        if process not in harness.minds:
            return
        self.losses.append(self.now)
        link = harness.lose_shard(process)
        if link >= 0:
            self._notices.append(partial(self._tell_of_end, link, harness.incarnation))
        for line in [line for line in self.lines.values() if line.process == process]:
            self._end(line)

    def kill_any_shard(self, which: int) -> None:
        """Let a data shard die, if there is one."""
        if alive := sorted(self.harness.minds):
            self.kill_shard(alive[which % len(alive)])

    def fill_disk(self) -> None:
        """Have nothing written any more, until the coordinator is lost."""
        self.harness.is_full = self.is_down_until < 0

    def lose_soon(self, commands: int) -> None:
        """Lose the coordinator after so many more commands, if there is one."""
        if self.is_down_until < 0:
            self.harness.fuse = commands

    def crash(self) -> None:
        """Lose the coordinator, and each of its shards with a chance of a half."""
        harness = self.harness
        self.crashes.append(self.now)
        self.losses.append(self.now)
        self.is_down_until = self.now + self.random.choice((0.0, 0.2, 0.5))
        harness.fuse = -1
        for line in [line for line in self.lines.values() if line.process == 0]:
            self._end(line)
        for process in list(harness.minds):
            if self.random.random() < 0.5:
                harness.lose_shard(process)
                harness.coming += 1
                for line in [line for line in self.lines.values() if line.process == process]:
                    self._end(line)
            else:
                for table in (harness.links, harness.up, harness.down):
                    table.pop(process, None)
                self._cut_links.append(process)
        harness.reduces = [reduce for reduce in harness.reduces if harness.places[id(reduce)]]
        if self.along:
            self.along.pop(0)()

    def _end(self, line: Line) -> None:
        """The process at the other end of a line has died."""
        self.cut_off(line)
        line.up.clear()
        line.is_open = False
        del self.lines[line.number]

    def _restart(self) -> None:
        """Begin the next coordinator."""
        harness = self.harness
        self.is_down_until = -1.0
        kept, waiting = list(harness.reduces), dict(harness.waiting)
        harness.restart()
        harness.reduces = kept
        harness.waiting.update(waiting)
        while self._cut_links:
            self._tell_shard()
        self._light()

    def _tell_shard(self) -> None:
        """Have a shard notice that the coordinator was lost."""
        process = self._cut_links.pop()
        if process in self.harness.minds:
            self.harness.feed_at(process, Disconnected(LINK, "it died"))

    def _tell_of_end(self, link: int, incarnation: int) -> None:
        if incarnation == self.harness.incarnation and self.is_down_until < 0:
            self.harness.feed(Disconnected(link, "it died"))

    def _light(self) -> None:
        self.harness.fuse = self._fuses.pop(0) if self._fuses else -1

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────

    def found(self, is_over: Callable[[], bool]) -> None:
        """Run until a group is founded. Nothing is lost, and no step counts."""
        while not is_over():
            self._step()
        self._light()
        self.harness.traps = list(self.traps)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run until it is over. Fail if that takes too long."""
        while not is_over():
            happenings = self.at.pop(self.steps, ())
            for what in happenings:
                what()
            if happenings and is_over():
                return  # the last process that was not done is lost
            self.steps += 1
            assert self.steps < STEPS, "it goes on and on"
            assert self.now < LIMIT, "a member waits"
            self.scheduler.now += TICK
            try:
                self._step()
            except ShardLostError as lost:
                self._light()
                self.kill_shard(lost.args[0])
            except CrashError:
                self.crash()

    def _step(self) -> None:
        """Do one possible thing, chosen at random; or else let time pass until something is due."""
        harness = self.harness
        harness.now = max(harness.now, self.now)
        if 0 <= self.is_down_until <= self.now:
            self._restart()
        due = harness.next_deadline() if self.is_down_until < 0 else None
        if due is not None and due <= self.now:
            harness.wait(0.0)
        self._note()  # from a connection that these have closed nothing is read any more
        choices = self._choices()
        if choices:
            self.random.choice(choices if self.ways is None else self.ways.of(choices, self.steps))()
            self._note()
            return
        times = [self.scheduler.next_deadline(), math.inf if due is None else due]
        times += [self.is_down_until] if self.is_down_until >= 0 else []
        times += [math.inf] if not self.at else [self.now + 0.05]
        assert min(times) < math.inf, "nothing will ever happen again"
        self.scheduler.now = max(self.now, min(times))

    def _choices(self) -> list[Callable[[], object]]:
        harness, is_up = self.harness, self.is_down_until < 0
        choices: list[Callable[[], object]] = [
            partial(self.scheduler.resume, fiber) for fiber in self.scheduler.runnable()
        ]
        choices += [partial(self._reduce, reduce) for reduce in harness.reduces]
        choices += self._hops()
        choices += [self._tell_shard] if self._cut_links else []
        trunks = {line.base for line in self.lines.values()}
        for line in self.lines.values():
            ends = line.is_gone and line.number not in trunks  # what it carries has ended before
            if (is_up or line.process) and (line.up or ends):
                choices.append(partial(self._hear, line))
        if is_up:
            choices += [partial(self._notice, notice) for notice in self._notices]
            choices += [harness.start_shard] if harness.coming else []
            for process, mind in harness.minds.items():
                if process not in harness.links and mind.is_idle:
                    choices.append(partial(harness.enlist, process))
        return choices

    def _hops(self) -> list[Callable[[], object]]:
        harness = self.harness
        if self.is_down_until >= 0:
            return []
        hops: list[Callable[[], object]] = []
        for process in harness.links:
            if process in harness.minds:
                hops += [partial(harness.pass_up, process)] if harness.up[process] else []
                hops += [partial(harness.pass_down, process)] if harness.down[process] else []
        return hops

    def _pass_one(self) -> bool:
        hops = self._hops()
        if hops:
            hops[0]()
        return bool(hops)

    def _reduce(self, command: Reduce) -> None:
        self.harness.reduces.remove(command)
        self.harness.answer(command)

    def _notice(self, notice: Callable[[], object]) -> None:
        self._notices.remove(notice)
        notice()

    def _hear(self, line: Line) -> None:
        """Hand the other end of a line the next message, or the end."""
        if line.up:
            message, payloads = line.up.popleft()
            event = Received(line.number, message, payloads)
            self.harness.feed_at(
                line.process, Branched(line.number, line.base, message) if type(message) is Split else event
            )
            return
        self._lose(line, "connection reset")

    def _lose(self, line: Line, reason: str) -> None:
        """Tell the other end of a line that it has ended."""
        del self.lines[line.number]
        line.is_open = False
        self.harness.feed_at(line.process, Disconnected(line.number, reason))

    def _note(self) -> None:
        """Note what was closed and written."""
        harness = self.harness
        while self._closed < len(harness.closed):
            number = harness.closed[self._closed]
            self._closed += 1
            if (line := self.lines.pop(number, None)) is not None:
                line.is_open, line.is_gone = False, True
                line.up.clear()
                for carried in [one for one in self.lines.values() if one.base == number]:
                    self._lose(carried, "what carries it was closed")
        for record in harness.records[self._written :]:
            if isinstance(record, Round):
                self.ends.setdefault(record.record.round, self.now)
        self._written = len(harness.records)


@contextmanager
def real_code() -> Iterator[None]:
    """Give the workers' modules fibers and wires, in place of threads and sockets; and small slices."""
    with small_slices(SLICE), fibers.patched(MODULES) as patch:
        patch.setattr("gradserver.engine.control.registry.grain_for", lambda *_: World.running[-1].grain)
        patch.setattr("gradserver.worker.collectives.uneven.SLICE_BYTES", SLICE)
        patch.setattr("gradserver.protocol.shards.SPLIT_BYTES", SLICE)
        patch.setattr("gradserver.protocol.shards.SPLIT_BUCKET_BYTES", (2 * SLICE, SLICE, SLICE))
        patch.setattr("gradserver.protocol.shards.ALIGNMENT", 1)
        for module in ("donor", "learner"):
            patch.setattr(f"gradserver.worker.{module}.PART_BYTES", PART)
        for module in ("connect", "transport.reconnect", "transport.farewell"):
            patch.setattr(f"gradserver.worker.{module}.TcpChannel", Wire)
        reach = lambda url, timeout: World.running[-1].reach(url, timeout)  # noqa: E731
        for module in ("transport.reconnect", "transport.farewell"):
            patch.setattr(f"gradserver.worker.{module}.reach", reach)
        patch.setattr("gradserver.worker.connect.takes_no_workers", lambda *_: False)
        patch.setattr("gradserver.worker.connect.atexit", SimpleNamespace(register=lambda *_: None))
        patch.setattr("gradserver.worker.session.forking.own", lambda _: None)
        patch.setattr("gradserver.worker.transport.reconnect._LOOK_SECONDS", 3600.0)
        level = logging.getLogger("gradserver").level
        logging.getLogger("gradserver").setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logging.getLogger("gradserver").setLevel(level)


@contextmanager
def running(world: World) -> Iterator[World]:
    """Make ``world`` the one to which connections go, until its fibers are ended."""
    World.running.append(world)
    try:
        with fibers.driving(world.scheduler):
            yield world
    finally:
        World.running.pop()
