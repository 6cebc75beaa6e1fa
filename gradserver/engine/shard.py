"""Engine of a data shard: a data half by itself, with its control elsewhere.

Orders come from the coordinator through one special connection, the link, and reports go back through it. Workers
come by themselves, and show the token that the coordinator gave them:

    event                                     what happens
    ────────────────────────────────────────  ──────────────────────────────────────────────────────────
    Attend, the group is open                 its member has this connection from now on; Attended
    Attend, the group is not open yet         it waits: the coordinator told both at the same time
    Attend, it waited too long                refused
    Attend, a wrong token, or a second time   refused
    Attend again, in a durable group          the same, if it is of a later Resumed than what it was detached by
    Holding, Held                             as the coordinator's own data half takes them
    Leave                                     answered: all that it said before was heard
    the connection breaks before that         reported as Absent: control lets the member depart
    a member breaks the protocol              it is told, and reported as Absent
    Recover                                   Resumed to each member that is here, and to one that attends later
    the link breaks                           all groups are forgotten, and their members told to make new connections
"""

from __future__ import annotations

import hmac
from collections.abc import Container, Sequence
from typing import Final

from gradserver.engine.commands import Command, Reduce
from gradserver.engine.data.half import Data
from gradserver.engine.effects import Effects
from gradserver.engine.events import Disconnected, Event, Garbled, Received, Reduced, Stop, Tick
from gradserver.engine.link import decode_order, encode_report
from gradserver.engine.orders import Break, CloseGroup, Configure, Detach, OpenGroup, Recover, RemoteOrder
from gradserver.engine.reports import Absent, Report, Violation
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorStoppedError,
    GradServerError,
    JoinRefusedError,
    LimitExceededError,
    UnexpectedMessageError,
)
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.messages import (
    Attend,
    Attended,
    Enlist,
    Enlisted,
    Failure,
    Inquire,
    Join,
    Leave,
    Message,
    Ordered,
    Push,
    Reported,
    Scope,
    Taken,
)
from gradserver.protocol.messages.recovery import Held, Holding, Resumed

ATTENDING_SECONDS: Final = 10.0
"""Time that a worker may be here before the coordinator's word of its group."""
MAX_ATTENDING: Final = 4096


class ShardEngine:
    """Engine of a process that has the data half only, with the interface of `gradserver.engine.Engine`.

    Args:
        primary: the coordinator's URL.

    Attributes:
        url: where workers reach this shard.
        link: the connection to the coordinator.
        number: what the coordinator calls this shard; 0 until it has enlisted it.
    """

    def __init__(self, primary: str, url: str = "", link: int = -1) -> None:
        self.data = Data()
        self.url = url
        self.link = link
        self.number = 0
        self._primary = primary
        self._attached: dict[int, tuple[str, int]] = {}
        """Group and id of workers that are here, by connection."""
        self._attending: dict[int, tuple[Attend, float]] = {}
        """Workers that wait for their group, each with its deadline, by connection."""
        self._latest = 0
        """The latest epoch that the coordinator has told of."""
        self._void: dict[tuple[str, int], int] = {}
        """Generation up to which earlier connections are void, by group and member id."""
        self._reducing = 0
        """Reductions that have not come back."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return what to do about ``event``, in this order. ``now`` in seconds, never decreasing."""
        effects = Effects()
        match event:
            case Received() if type(event.message) is Push:
                self.data.push(event.connection, event.message, event.payloads, now, effects)
            case Reduced():
                self._reducing -= 1
                self.data.reduced(event, now, effects)
            case Received(connection, message, payloads):
                try:
                    if connection == self.link:
                        self._obey(message, payloads, now, effects)
                    else:
                        self._receive(connection, message, payloads, now, effects)
                except GradServerError as error:
                    effects.report(Violation(connection, error))
            case Garbled(connection, what):
                effects.report(Violation(connection, what))
            case Disconnected(connection, reason) if connection == self.link:
                self._forget_all(reason, effects)
            case Disconnected(connection, reason, ended, silent):
                broke = ConnectionLostError(f"its connection to the data shard at {self.url} broke: {reason}")
                if silent:
                    effects.dismiss(connection, broke)
                self._absent(connection, broke, effects, ended)
            case Tick():
                self.data.tick(now, effects)
                self._tick(now, effects)
            case Stop(reason):
                self._stop(reason, effects)
        while effects.reports:
            for report in effects.take_reports():
                self._report(report, effects)
        self._reducing += sum(type(command) is Reduce for command in effects.commands)
        return effects.commands

    @property
    def is_idle(self) -> bool:
        """True if no reduction is under way."""
        return not self._reducing

    def _report(self, report: Report, effects: Effects) -> None:
        if isinstance(report, Violation):
            self._refuse(report.connection, report.error, effects)
            return
        epoch = self.data.groups[report.group].order.epoch
        effects.send(self.link, Reported(), (encode_report(epoch, report),))

    # ── the coordinator ───────────────────────────────────────────────────────────────────────────────

    def _obey(self, message: Message, payloads: Sequence[Buffer], now: float, effects: Effects) -> None:
        match message:
            case Enlisted(number):
                self.number = number
                return
            case Ordered():
                order = decode_order(payloads[0])
            case _:
                raise UnexpectedMessageError(
                    f"a {type(message).__name__} is not what a coordinator says to a data shard"
                )
        if not isinstance(order, OpenGroup) and order.group not in self.data.groups:
            raise UnexpectedMessageError(f"an order about group {order.group!r}, which was not opened")
        self._part_from(order, effects)
        if isinstance(order, Detach):
            self._detach(order, effects)
            return
        self.data.obey(order, now, effects)
        if isinstance(order, OpenGroup | Recover):
            self._admit_waiting(order, effects)

    def _part_from(self, order: RemoteOrder, effects: Effects) -> None:
        """Close the connections of members that depart because of ``order``."""
        match order:
            case CloseGroup(name):
                member_ids: Container[int] = range(MAX_WORLD_SIZE)
            case Break(name, member_id):
                member_ids = (member_id,)
            case Configure(name) if order.departed:
                member_ids = {departure.member_id for departure in order.departed}
            case _:
                return
        for connection, (group, member_id) in list(self._attached.items()):
            if group == name and member_id in member_ids:
                del self._attached[connection]
                effects.close(connection)

    def _detach(self, order: Detach, effects: Effects) -> None:
        """Void a member's connection, as it has lost one here or elsewhere: it makes a new one."""
        self._void[order.group, order.member_id] = self.data.groups[order.group].order.epoch
        connection = self.data.groups[order.group].members.connections[order.member_id]
        if connection < 0:
            return
        del self._attached[connection]
        self.data.detach(connection)
        effects.close(connection)

    def _admit_waiting(self, order: OpenGroup | Recover, effects: Effects) -> None:
        """Note that the coordinator has told of a group, or of a new recovery."""
        epoch = self.data.groups[order.group].order.epoch
        self._latest = max(self._latest, epoch)
        if isinstance(order, OpenGroup):
            self._void = {member: until for member, until in self._void.items() if member[0] != order.group}
        else:
            members = self.data.groups[order.group].members.present
            for connection, (name, member_id) in self._attached.items():
                if name == order.group and member_id in members:
                    effects.send(connection, Resumed(0, epoch))
        for connection, (attend, _) in list(self._attending.items()):
            if attend.group == order.group and attend.epoch <= epoch:
                del self._attending[connection]
                self._attach_or_refuse(connection, attend, effects)

    def _forget_all(self, reason: str, effects: Effects) -> None:
        """Forget all groups: there is no coordinator any more, and what it does not know of is worth nothing."""
        error = ConnectionLostError(f"the data shard at {self.url} has lost its coordinator: {reason}")
        for connection in (*self._attached, *self._attending):
            effects.dismiss(connection, error)
        self._attached.clear()
        self._attending.clear()
        self._void.clear()
        self.data, self._latest, self.number = Data(), 0, 0

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────

    def _receive(
        self, connection: int, message: Message, payloads: Sequence[Buffer], now: float, effects: Effects
    ) -> None:
        match message:
            case Holding() | Held():
                self.data.hold(connection, message, payloads, now, effects)
            case Inquire():
                self.data.inquire(connection, message, effects)
            case Taken():
                self.data.taken(connection, message, effects)
            case Attend():
                self._attend(connection, message, now, effects)
            case Leave():
                if connection in self._attached:
                    del self._attached[connection]
                    self.data.detach(connection)
                effects.send(connection, message)
            case Join() | Enlist():
                raise JoinRefusedError(
                    f"this is not a coordinator but a data shard of the one at {self._primary}: that is the URL to use"
                )
            case _:
                raise UnexpectedMessageError(f"a {type(message).__name__} is not for a data shard")

    def _attend(self, connection: int, attend: Attend, now: float, effects: Effects) -> None:
        if connection in self._attached or connection in self._attending:
            raise UnexpectedMessageError("this connection attends already")
        group = self.data.groups.get(attend.group)
        if (group is not None and group.order.epoch >= attend.epoch) or attend.epoch <= self._latest:
            self._attach(connection, attend, effects)
        elif len(self._attending) >= MAX_ATTENDING:
            raise LimitExceededError(f"{MAX_ATTENDING} workers wait here for their groups already")
        else:
            self._attending[connection] = attend, now + ATTENDING_SECONDS

    def _attach_or_refuse(self, connection: int, attend: Attend, effects: Effects) -> None:
        try:
            self._attach(connection, attend, effects)
        except GradServerError as error:
            effects.report(Violation(connection, error))

    def _attach(self, connection: int, attend: Attend, effects: Effects) -> None:
        group = self.data.groups.get(attend.group)
        void = self._void.get((attend.group, attend.member_id), 0)
        if group is None or not (
            attend.epoch == group.order.epoch or (group.sequences.restarted and attend.epoch > void)
        ):
            over = f"membership {attend.epoch} of group {attend.group[:128]!r} is over"
            if group is not None and group.sequences.restarted:  # the member has lost its connection meanwhile
                raise ConnectionLostError(f"{over}: connect anew")
            raise UnexpectedMessageError(over)
        tokens, member_id = group.members.tokens, attend.member_id
        token = tokens[member_id] if 0 <= member_id < len(tokens) else ""
        if not token or not hmac.compare_digest(token.encode(), attend.token.encode()):
            raise UnexpectedMessageError(f"this is not the token of member id {member_id} in group {attend.group!r}")
        if member_id in group.members.departed:
            raise group.members.departed[member_id].again()
        if group.members.connections[member_id] >= 0:
            raise UnexpectedMessageError(f"{group.call(member_id)} attends already, on another connection")
        self._attached[connection] = attend.group, member_id
        self.data.attach(attend.group, member_id, connection)
        effects.send(connection, Attended())
        if group.recovery is not None and member_id in group.members.present:  # a learner holds nothing yet
            effects.send(connection, Resumed(0, group.recovery.generation))

    def _absent(self, connection: int, error: GradServerError, effects: Effects, ended: bool = False) -> None:
        """Forget a connection that is gone, or about to go."""
        self._attending.pop(connection, None)
        member = self._attached.pop(connection, None)
        if member is not None:
            self.data.detach(connection)
            effects.report(Absent(*member, error, ended))

    def _refuse(self, connection: int, error: GradServerError, effects: Effects) -> None:
        """Close a connection because of ``error``, which is its own fault."""
        effects.refuse(connection, error)
        self._absent(connection, error, effects)

    def _stop(self, reason: str, effects: Effects) -> None:
        error = CoordinatorStoppedError(f"the data shard at {self.url} was stopped ({reason})")
        for connection in (*self._attached, *self._attending):
            effects.send(connection, Failure.of(error, Scope.CONNECTION))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """Return the time at which a `Tick` is due at the latest; None when nothing waits."""
        deadline = self.data.next_deadline()
        if not self._attending:
            return deadline
        return min(until for until in (deadline, *(u for _, u in self._attending.values())) if until is not None)

    def _tick(self, now: float, effects: Effects) -> None:
        for connection, (attend, until) in list(self._attending.items()):
            if until <= now:
                error = UnexpectedMessageError(
                    f"the coordinator at {self._primary} has not told the data shard at {self.url} of membership "
                    f"{attend.epoch} of group {attend.group[:128]!r}"
                )
                self._refuse(connection, error, effects)

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def allowance(self) -> int:
        """Bytes that one member may have under way, or leave unread, at most."""
        return self.data.allowance()

    def snapshot(self, now: float) -> dict[str, object]:
        """Return what the shard sees, as plain JSON values."""
        return {"shard": {"number": self.number, "primary": self._primary}, "groups": self.data.snapshot(now)}

    def validate(self) -> None:
        """Raise AssertionError if the engine's own invariants do not hold. For tests."""
        self.data.validate()
        assert not self._attached.keys() & self._attending.keys(), "a worker attends that is here"
        for connection, (name, member_id) in self._attached.items():
            assert self.data.groups[name].members.connections[member_id] == connection, (
                "a member that data does not know"
            )
            assert member_id not in self.data.groups[name].members.departed, "a member that has departed"
        attached = {c for group in self.data.groups.values() for c in group.members.connections if c >= 0}
        departed = {
            g.members.connections[member_id] for g in self.data.groups.values() for member_id in g.members.departed
        }
        assert attached - departed == set(self._attached), "a worker is here that was not let in"
