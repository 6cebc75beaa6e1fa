"""Effects of one event: the only output of both halves of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gradserver.engine.commands import Close, Command, Hire, Log, Record, Reduce, Send, make
from gradserver.engine.declared import Kind
from gradserver.engine.orders import Order
from gradserver.engine.records import Round
from gradserver.engine.reports import Report
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import Failure, Message, Scope

_NO_PAYLOADS: Final[tuple[Buffer, ...]] = ()


class Eviction(NamedTuple):
    """A worker that is to lose its connection. It is told the error, and the others ``why``, if that is not empty."""

    connection: int
    error: GradServerError
    ended: bool = False
    why: str = ""


class Effects:
    """Effects of one event, in the order in which they are carried out.

    A decision is written before any member is told of it. So `journal` puts its record in front of all that this event
    has said so far. What data halves have done is written behind what they have said of it: `journal_behind`. Members
    hear of a membership before they get results of it: `announce` puts that in front of what the data half sends.

    Attributes:
        commands: for the runtime.
        orders: for the coordinator's own data half, which obeys them when control has dealt with the event.
        reports: for control, which heeds them when the data half has dealt with the event or obeyed.
        evictions: connections that control takes from their workers, each with the reason.
    """

    __slots__ = ("_obeyed_at", "commands", "evictions", "orders", "reports")

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.orders: list[Order] = []
        self.reports: list[Report] = []
        self.evictions: list[Eviction] = []
        self._obeyed_at = -1
        """Place in the commands where the data half began to obey orders; -1 if it has obeyed none."""

    def send(self, connection: int, message: Message, payloads: Sequence[Buffer] = _NO_PAYLOADS) -> None:
        """Send a message on a connection."""
        self.commands.append(make(Send, (connection, message, payloads)))

    def announce(self, connection: int, message: Message, payloads: Sequence[Buffer] = _NO_PAYLOADS) -> None:
        """Send a message in front of what the data half has sent when it obeyed the latest orders."""
        if self._obeyed_at < 0:
            self.send(connection, message, payloads)
            return
        self.commands.insert(self._obeyed_at, Send(connection, message, payloads))
        self._obeyed_at += 1

    def dismiss(self, connection: int, error: GradServerError) -> None:
        """Send ``error`` on a connection, and close it."""
        self.commands += (Send(connection, Failure.of(error, Scope.CONNECTION)), Close(connection))

    def refuse(self, connection: int, error: GradServerError) -> None:
        """Send ``error`` on a connection, close it, and log that."""
        self.dismiss(connection, error)
        self.log(f"connection {connection} refused: {error.message}", warning=True)

    def close(self, connection: int) -> None:
        """Close a connection, once what was sent on it has left."""
        self.commands.append(Close(connection))

    def journal(self, record: Kind) -> None:
        """Write a decision before all else that this event leads to, and behind what else is written because of it.

        A round that this event completes is written behind it. If nothing more is written, the round counts as open.
        """
        commands = self.commands
        at = next((index for index, one in enumerate(commands) if not _is_decision(one)), len(commands))
        commands.insert(at, Record(record))
        self._obeyed_at += at <= self._obeyed_at

    def journal_behind(self, record: Kind) -> None:
        """Write ``record`` behind what this event has led to so far."""
        self.commands.append(Record(record))

    def order(self, order: Order) -> None:
        """Have the coordinator's own data half obey ``order``."""
        self.orders.append(order)

    def reduce(self, reduction: Reduce) -> None:
        """Have contributions combined."""
        self.commands.append(reduction)

    def report(self, report: Report) -> None:
        """Tell control."""
        self.reports.append(report)

    def evict(self, connection: int, error: GradServerError, *, ended: bool = False, why: str = "") -> None:
        """Have ``error`` cost a worker its connection and place; others hear ``why``. ``ended``: its process has."""
        self.evictions.append(Eviction(connection, error, ended, why))

    def hire(self) -> None:
        """Start a data shard, if that is possible."""
        self.commands.append(Hire())

    def log(self, text: str, *, warning: bool = False) -> None:
        """Write one line for the person that runs the coordinator."""
        self.commands.append(Log(text, warning))

    def take_orders(self) -> list[Order]:
        """Give the orders, which are obeyed now."""
        self._obeyed_at = len(self.commands)
        orders, self.orders = self.orders, []
        return orders

    def take_reports(self) -> list[Report]:
        """Give the reports, which are heeded now."""
        reports, self.reports = self.reports, []
        return reports

    def take_evictions(self) -> list[Eviction]:
        """Give the evictions, which are carried out now."""
        evictions, self.evictions = self.evictions, []
        return evictions


def _is_decision(command: Command) -> bool:
    """Return whether ``command`` writes something else than a round that is complete."""
    return type(command) is Record and type(command.record) is not Round
