"""The runtime: joins the engine with channels and a clock. It has no loop of its own: channel servers call it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from gradserver.engine.commands import Close, Command, Hire, Log, Record, Reduce, Send, make
from gradserver.engine.declared import Kind
from gradserver.engine.events import Branched, Disconnected, Event, Garbled, Received, Reduced, Restored, Stop, Tick
from gradserver.mean import Outcome, broken_by
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Outlet
from gradserver.protocol.compiled.loader import standing
from gradserver.protocol.errors import ClosedError, CoordinatorError, GradServerError, ProtocolError
from gradserver.protocol.log import log
from gradserver.protocol.messages import Failure, Message, Scope, Split
from gradserver.reducer import PENDING, Pending, Reducer

T = TypeVar("T")


class Engine(Protocol):
    """A coordinator's engine, or a data shard's: `gradserver.engine`."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle ``event``, and return the commands that follow."""

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due."""

    def snapshot(self, now: float) -> dict[str, object]:
        """Return the state, as plain JSON values."""

    def allowance(self) -> int:
        """Return the limit of the bytes that one member has in flight, or leaves unread."""


class Journal(Protocol):
    """The journal that stores records: `gradserver.ledger.state.StateDir`."""

    def append(self, record: Kind) -> None:
        """Write ``record``. Never fails: training does not depend on it."""

    def snapshot(self) -> dict[str, object]:
        """Return the file that it writes, and the trouble with it, as plain JSON values."""


class Residuals(Protocol):
    """The store in which residuals of lossy codecs outlive this process: `gradserver.residuals.Residuals`."""

    def restore(self, records: Iterable[Kind]) -> frozenset[str]:
        """Restore the residuals of an earlier coordinator. Return the groups that have some."""

    def take(self, record: Kind) -> None:
        """Note a record that was written."""

    def provide(self, command: Reduce) -> None:
        """Give a reduction its residuals, if they are kept here."""


class Runtime:
    """Runtime of a coordinator: feeds events to the engine and carries out its commands.

    Safe to call from several threads. The engine runs under a lock, and reductions and sends run outside of it. So
    threads of a local cluster reduce in parallel. In the daemon one thread does all of it, but for large reductions.

    Args:
        engine: the engine that decides.
        reducer: executor of reductions.
        on_deadline: called after an event with the time of the next deadline, when that has come nearer.
        journal: store of records, if they are kept. Only for a coordinator that one thread calls.
        residuals: store of the residuals of lossy codecs, kept with the journal.
        hire: starts another data shard.
    """

    def __init__(
        self,
        engine: Engine,
        on_deadline: Callable[[float], None] | None = None,
        reducer: Reducer | None = None,
        journal: Journal | None = None,
        residuals: Residuals | None = None,
        hire: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._hire = engine, hire
        self._journal, self._residuals = journal, residuals
        self._reducer = reducer or Reducer()
        self._call_soon: Callable[[Callable[[], None]], None] = lambda call: call()
        self._lock = threading.Lock()
        self._channels: dict[int, Outlet] = {}
        self._connections = 0
        self._on_deadline = on_deadline
        self._announced: float | None = None
        self.started = time.monotonic()

    def run_in(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """Hand calls of other threads to ``call_soon``, which runs them in the thread of a channel's server."""
        self._call_soon = call_soon

    def close(self) -> None:
        """End the threads of the reducer."""
        self._reducer.close()

    # ── what channel servers call ─────────────────────────────────────────────────────────────────────

    def connect(self, channel: Outlet) -> int:
        """Register a channel. Its messages are handed over with the number returned."""
        with self._lock:
            self._connections += 1
            self._channels[self._connections] = channel
            return self._connections

    def receive(self, connection: int, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Handle a message."""
        self._handle(make(Received, (connection, message, payloads)))

    def branch(self, connection: int, base: int, message: Split) -> None:
        """Handle the request for a sub-group on a connection that ``base`` carries."""
        self._handle(Branched(connection, base, message))

    def restore(self, records: tuple[Kind, ...]) -> None:
        """Restore the state that an earlier coordinator has written."""
        kept = frozenset[str]() if self._residuals is None else self._residuals.restore(records)
        self._handle(Restored(records, kept))

    def garbled(self, connection: int, error: GradServerError) -> None:
        """Handle bytes that are no message."""
        self._handle(Garbled(connection, error))

    def lost(self, connection: int, reason: str, ended: bool = False) -> None:
        """Handle a broken connection. ``ended``: its process is known to have ended."""
        if self._channels.pop(connection, None) is not None:
            self._handle(Disconnected(connection, reason, ended))

    def silent(self, connection: int, reason: str) -> None:
        """Handle a silent connection. A frozen worker is to read later why it was closed."""
        if connection in self._channels:
            self._handle(Disconnected(connection, reason, silent=True))

    def tick(self) -> None:
        """Let the engine handle the time."""
        self._announced = None
        self._handle(Tick())

    def stop(self, reason: str) -> None:
        """Tell every worker that the coordinator stops."""
        self._handle(Stop(reason))

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, on `time.monotonic`'s scale; None if nothing waits."""
        with self._lock:
            return self._engine.next_deadline()

    def undisturbed(self, look: Callable[[], T]) -> T:
        """Call ``look`` while the engine handles no event, and return its result."""
        with self._lock:
            return look()

    def allowance(self) -> int:
        """Return the limit of the bytes that one member has in flight, or leaves unread."""
        return self._engine.allowance()

    def snapshot(self) -> dict[str, object]:
        """Return the state of the coordinator, as plain JSON values. ``uptime`` is in seconds."""
        with self._lock:
            now = time.monotonic()
            ledger = {} if self._journal is None else {"ledger": self._journal.snapshot()}
            own = {"uptime": round(now - self.started, 3), "kernels": standing()._asdict()}
            return {**own, **ledger, **self._engine.snapshot(now)}

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        with self._lock:
            commands = self._engine.handle(event, time.monotonic())
            deadline = self._engine.next_deadline() if self._on_deadline else None
        for command in commands:
            self._carry_out(command)
        if deadline is not None and self._on_deadline and (self._announced is None or deadline < self._announced):
            self._announced = deadline
            self._on_deadline(deadline)

    def _carry_out(self, command: Command) -> None:
        if type(command) is Send:  # by far the most frequent
            self._send(command.connection, command.message, command.payloads)
            return
        match command:
            case Reduce():
                outcome = self._reduce(command)
                if outcome is not PENDING:
                    self._reduced(command, outcome)
            case Close(connection):
                channel = self._channels.pop(connection, None)
                if channel is not None:
                    channel.close()
            case Record(record):
                if self._journal is not None:
                    self._journal.append(record)
                if self._residuals is not None:
                    self._residuals.take(record)
            case Hire():
                self._hire()
            case Log(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)

    def _reduce(self, command: Reduce) -> Outcome | Pending:
        if self._residuals is not None and command.operation.is_lossy:
            try:
                self._residuals.provide(command)
            except Exception as error:
                return broken_by(error, command)
        return self._reducer.start(command, partial(self._reduced_later, command))

    def _reduced(self, command: Reduce, outcome: Outcome) -> None:
        digests = command.digests.found if command.digests is not None else ()
        squares = () if command.squares is None else command.squares
        measured = () if command.measures is None else command.measures.found
        hashes = () if command.hashes is None else command.hashes.found
        where = command.group, command.epoch, command.key, command.slice
        compared = () if command.repeated is None else command.repeated.found
        self._handle(Reduced(*where, outcome, digests, squares, measured, compared, hashes))

    def _reduced_later(self, command: Reduce, outcome: Outcome) -> None:
        self._call_soon(partial(self._reduced, command, outcome))

    def _send(self, connection: int, message: Message, payloads: Sequence[Buffer]) -> None:
        channel = self._channels.get(connection)
        if channel is None:
            return
        try:
            channel.send(message, payloads)
        except (ClosedError, ConnectionError) as error:
            self.lost(connection, str(error))
        except ProtocolError as error:
            self._unsayable(connection, channel, type(message).__name__, error)

    def _unsayable(self, connection: int, channel: Outlet, what: str, error: ProtocolError) -> None:
        """Close the connection of a message that its receiver would refuse, with the reason. Others continue."""
        text = f"the coordinator cannot send a {what}: {error.message}. This is a bug of gradserver"
        log.error("connection %d is closed: %s", connection, text)
        with contextlib.suppress(ClosedError, ConnectionError):
            channel.send(Failure.of(CoordinatorError(text), Scope.CONNECTION))
        channel.close()
        self.lost(connection, text)
