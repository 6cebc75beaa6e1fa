"""The control half: the members of each group, and what they agreed on.

A group's life, from MIN to MAX members; with `--workers N` both are N:

    state     event                                   next      what happens
    ────────  ──────────────────────────────────────  ────────  ──────────────────────────────────────────────────
    (none)    Join                                    FORMING   the applicant waits
    FORMING   Join, fewer than MIN are there          FORMING   the applicant waits
    FORMING   Join, MIN are there                     FORMING   more are waited for, until the gathering is over
    FORMING   … and MAX, or all that they ask for     ACTIVE    a new epoch; Welcome to every member
    FORMING   the gathering is over                   ACTIVE    the same
    FORMING   Join that cannot be                     FORMING   the newcomer is refused, and told why
    FORMING   an applicant's deadline                 FORMING   it is told which workers are missing
    FORMING   an applicant leaves or is lost          FORMING   it is forgotten; the last one: (none)
    ACTIVE    Propose, not the last                   ACTIVE    kept
    ACTIVE    Propose, the last, all alike            ACTIVE    the plan is set; other shards have to confirm it
    ACTIVE    all of them have                        ACTIVE    Agreed to every member
    ACTIVE    Propose, the last, not all alike        ACTIVE    the minority is told what differs
    ACTIVE    proposals' deadline                     ACTIVE    proposers are told which members did not propose
    ACTIVE    Join                                    ACTIVE    a learner, or it waits for a seat; refused if the group
                                                                needs all its members
    ACTIVE    a member leaves, is lost or evicted     ACTIVE    a new epoch: data cuts it off
    ACTIVE    … fewer than MIN are left, and the      BROKEN    data fails what needs it; proposers are told
              policy has no time for another one
    ACTIVE    all shards have cut it off              ACTIVE    Membership to every member
    ACTIVE    a round is complete at all shards       ACTIVE    its last results said that it is over; otherwise
                                                                RoundDone says so, with the epoch in force
    ACTIVE    … and a shard has yet to cut a member   ACTIVE    RoundDone when it has
    ACTIVE    … and fewer than MIN are left           PAUSED    RoundDone is held back
    ACTIVE    a shard says which members are late     ACTIVE    if the policy lets them go: CutRound to all shards
    ACTIVE    data reports Halted                     BROKEN    the other shards halt it too
    ACTIVE    data reports Absent                     ACTIVE    the member is told why, and is lost: as above
    ACTIVE    a data shard that it uses is lost       BROKEN    everything open fails; a durable group replaces it
    PAUSED    MIN can contribute, with learners       ACTIVE    RoundDone
    PAUSED    the policy's patience is over           (none)    DeadlineError to every member
    PAUSED    the last member leaves or is lost       (none)
    BROKEN    Join                                    BROKEN    refused, with the reason
    BROKEN    the last member leaves or is lost       (none)

`Control` names the module that deals with each event: `forming` with applicants, `learners` with workers that join a
running group, `members` with those that leave or are lost, `rounds` with the end of a round, `sessions` with members
that come back. Functions are handed the time of the event.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gradserver.engine.control import (
    forming,
    journal,
    learners,
    leases,
    plans,
    recovery,
    restore,
    sessions,
    shard_replacement,
    turns,
)
from gradserver.engine.control.group import Group, deadlines, describe, left_out
from gradserver.engine.control.members import (
    conflict,
    connection_lost,
    disband,
    evict,
    evict_all,
    fell_behind,
    halt,
    halted,
)
from gradserver.engine.control.registry import HERE, Registry
from gradserver.engine.control.rounds import close_round, completed, end_rounds, heeded
from gradserver.engine.control.shards import count_round
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.events import (
    Absent,
    Behind,
    CaughtUp,
    Halted,
    Heeded,
    Late,
    Planned,
    Recovered,
    RemoteReport,
    Report,
    RoundCompleted,
    StateComes,
    Violation,
)
from gradserver.engine.orders import decode_report
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorStoppedError,
    GradServerError,
    UnexpectedMessageError,
)
from gradserver.protocol.messages import (
    Enlist,
    Enter,
    Failure,
    Follow,
    Join,
    Leave,
    Message,
    Opens,
    Propose,
    Ready,
    Reported,
    Scope,
    Serve,
    StateFailed,
    Steps,
)
from gradserver.protocol.messages.leases import Claim, Register, Used
from gradserver.protocol.messages.recovery import Resume


class Control:
    """The way in to all that."""

    def __init__(self, registry: Registry) -> None:
        self.groups, self.roster = registry.groups, registry.roster
        self._registry = registry

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────

    def receive(
        self,
        connection: int,
        message: Message,
        payloads: Sequence[Buffer],
        now: float,
        effects: Effects,
    ) -> None:
        """Take any message that is not data's business."""
        self._registry.now = now
        try:
            self._receive(connection, message, payloads, now, effects)
        except GradServerError as error:
            evict(self._registry, connection, error, now, effects)

    def _receive(
        self,
        connection: int,
        message: Message,
        payloads: Sequence[Buffer],
        now: float,
        effects: Effects,
    ) -> None:
        registry = self._registry
        match message:
            case Join():
                forming.join(registry, connection, message, now, effects)
            case Propose():
                group, seat = registry.seat(connection)
                plans.propose(registry, group, seat, message, payloads[0], now, effects)
                evict_all(registry, learners.outdated(group), now, effects)
            case Register() | Claim() | Used():
                group, seat = registry.seat(connection)
                leases.receive(group, seat, message, payloads, effects)
                end_rounds(group, effects)
                registry.order_all(group, [], effects)
            case Serve() | Enter() | Ready() | StateFailed():
                group, seat = registry.seat(connection)
                registry.order_all(group, learners.hear(group, seat, message, now, effects), effects)
            case Opens() | Steps() | Follow():
                group, seat = registry.seat(connection)
                error = turns.hear(group, seat, message, effects)
                if error is not None:
                    conflict(registry, group, error, effects)
            case Resume():
                sessions.resume(registry, connection, message, now, effects)
            case Leave(reason, failed):
                if connection in registry.places:
                    effects.send(connection, message)  # all that it said before has been heard
                connection_lost(registry, connection, reason, now, effects, politely=not failed)
            case Enlist() if connection not in registry.places:
                self.roster.enlist(connection, message, registry.incarnation > 0, effects)
                shard_replacement.fill_places(registry, now, effects)
            case Reported() if connection in self.roster.shards:
                self._heed_elsewhere(connection, payloads[0], now, effects)
            case _:
                raise UnexpectedMessageError(f"a {type(message).__name__} is not for a coordinator")

    def _heed_elsewhere(self, source: int, payload: Buffer, now: float, effects: Effects) -> None:
        epoch, report = decode_report(payload, now)
        group = self.groups.get(report.group)
        if group is not None and group.founded == epoch and source in group.shards:  # else it has ended meanwhile
            self.heed(report, now, effects, source)

    def heed(self, report: Report, now: float, effects: Effects, source: int = HERE) -> None:
        """Take a report from a data half: the coordinator's own, or the one with connection ``source``."""
        registry = self._registry
        registry.now = now
        if isinstance(report, Violation):
            evict(registry, report.connection, report.error, now, effects)
        elif (group := self.groups.get(report.group)) is not None:  # else it has ended meanwhile
            self._heed(group, report, now, effects, source)

    def _heed(self, group: Group, report: RemoteReport, now: float, effects: Effects, source: int) -> None:
        registry = self._registry
        match report:
            case RoundCompleted(_, record, adopted):
                group.made = group.made if adopted else max(group.made, record.round)
                done = count_round(group, source, report) if group.shards else report
                if done is not None:
                    completed(group, done.record, group.made < done.record.round, done.told, effects)
                    registry.order_all(group, [], effects)
                    evict_all(registry, learners.hopeless(group), now, effects)
            case Heeded():
                heeded(group, source)
                registry.order_all(group, [], effects)
            case Planned(_, digest):
                plans.confirm(group, source, digest, effects)
                evict_all(registry, learners.outdated(group), now, effects)
            case Late():
                if (order := close_round(group, report, effects)) is not None:
                    registry.order(group, order, effects)
            case Behind():
                fell_behind(registry, group, report, now, effects)
            case Absent():
                sessions.absent(registry, group, report, source, now, effects)
            case Halted():
                halted(registry, group, report, source, effects)
            case StateComes():
                learners.state_comes(group, report, now)
            case CaughtUp():
                recovery.caught_up(registry, group, report, source, effects)
            case Recovered():
                recovery.recovered(group, report, source, effects)
                plans.agree(registry, group, effects)
                evict_all(registry, learners.outdated(group), now, effects)

    def disconnected(
        self, connection: int, reason: str, ended: bool, final: bool, now: float, effects: Effects
    ) -> None:
        """A connection broke; its worker comes back, if it can: not if its process ``ended``, or that is ``final``."""
        self._registry.now = now
        sessions.disconnected(self._registry, connection, reason, ended, final, now, effects)

    def left_out(self, connection: int, reason: str, effects: Effects) -> None:
        """Tell somebody who is silent that he is too late, for when he can hear again."""
        error: GradServerError = ConnectionLostError(f"the coordinator has given this connection up: {reason}")
        group = self._registry.group_of(connection)
        if group is not None and (seat := group.seat_of(connection)) >= 0:
            error = left_out(group, seat, reason)
        effects.dismiss(connection, error)

    def restore(self, records: Sequence[Kind], kept: Collection[str], now: float, effects: Effects) -> None:
        """Go on where an earlier coordinator was lost. Of the groups in ``kept`` what lossy codecs owe is there."""
        self._registry.now = now
        restore.restore(self._registry, records, kept, now, effects)

    def stop(self, reason: str, effects: Effects) -> None:
        """Tell everybody that the coordinator stops."""
        error = CoordinatorStoppedError(f"the coordinator was stopped ({reason})")
        journal.stopped(self.groups, error, effects)
        for connection in (*self._registry.places, *self.roster.shards):
            effects.send(connection, Failure.of(error, Scope.CONNECTION))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """When somebody who waits runs out of time."""
        groups = self.groups.values()
        waiting = [
            g for g in groups if g.applicants or g.proposals or g.away or g.learners or g.queue or g.paused or g.lacking
        ]
        return min((at for group in waiting for at in deadlines(group)), default=None) if waiting else None

    def tick(self, now: float, effects: Effects) -> None:
        """Tell those whose time is up."""
        self._registry.now = now
        for group in list(self.groups.values()):
            self._tick(group, now, effects)

    def _tick(self, group: Group, now: float, effects: Effects) -> None:
        registry = self._registry
        forming.overdue(registry, group, now, effects)
        if (error := shard_replacement.overdue(group, now, effects)) is not None:
            halt(registry, group, error, effects)
        if group.pause_ends is not None and group.pause_ends <= now:
            disband(registry, group, effects)
            return
        evict_all(registry, learners.overdue(group, now), now, effects)
        sessions.overdue(registry, group, now, effects)
        plans.overdue(group, now, effects)

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def awaited(self, name: str) -> set[int]:
        """Connections of those in a group whose plan others wait for, or for whose next round somebody who joins."""
        group = self.groups.get(name)
        if group is None or not (group.proposals or group.learners):
            return set()
        return {member.connection for seat, member in group.members.items() if seat not in group.proposals}

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """The groups, as plain JSON values. Ages in seconds."""
        return {name: describe(group, now) for name, group in self.groups.items()}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._registry.validate()
