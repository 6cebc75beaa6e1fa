"""The control half, from outside: events go in, and the tables of `machine` say what becomes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import cast

from gradserver.engine.control import forming, journal, requests, restore, sessions, slow, subgroups, watching
from gradserver.engine.control.group import HERE, Group, State
from gradserver.engine.control.machine import RULES, TRANSITIONS, Rule, Transition, deadlines
from gradserver.engine.control.reactions import Broke, Event, Lost, Notice, ShardEnlisted, ShardLost
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.welcome import welcome_again
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects, Eviction
from gradserver.engine.link import decode_report
from gradserver.engine.reports import RemoteReport, Report, Violation
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    CoordinatorStoppedError,
    GradServerError,
    LeftOutError,
    ProtocolError,
    UnexpectedMessageError,
)
from gradserver.protocol.limits import MAX_WORLD_SIZE, PROBE_GROUP
from gradserver.protocol.messages import Enlist, Failure, Join, Leave, Message, Reported, Scope, Split
from gradserver.protocol.messages.recovery import Resume


class Control:
    """The control half. Each call deals with one event whole."""

    def __init__(self, registry: Registry) -> None:
        self.groups, self.roster = registry.groups, registry.roster
        self._registry = registry
        self._deadline: float | None = None
        """Time at which the first timer fires, if no event has come since it was looked up."""
        self._is_deadline_known = False
        self._evicted: deque[int] = deque(maxlen=MAX_WORLD_SIZE)
        """Connections of the latest workers that were evicted."""
        self._surprises: list[str] = []
        """Changes of state that the table does not have."""

    # ── events ────────────────────────────────────────────────────────────────────────────────────────

    def receive(
        self, connection: int, message: Message, payloads: Sequence[Buffer], now: float, effects: Effects
    ) -> None:
        """Take a message that is not for a data half."""
        self._begin(now)
        try:
            self._receive(connection, message, payloads, effects)
        except GradServerError as error:
            self._evict(Eviction(connection, error), effects)

    def split(self, connection: int, base: int, message: Split, now: float, effects: Effects) -> None:
        """Take the request for a sub-group on ``connection``, from the member that is known by ``base``."""
        self._begin(now)
        try:
            self._registry.check_free(connection)
            if (begun := subgroups.begun_before(self._registry, base, message)) is not None:
                welcome_again(*begun, connection, self._registry.incarnation, effects)
                effects.close(connection)
                return
            group, join = subgroups.group_for(self._registry, base, message, effects)
            self._registry.add(group)
            self._happens(group, join, effects, connection)
        except GradServerError as error:
            self._evict(Eviction(connection, error), effects)
            for eviction in effects.take_evictions():
                self._evict(eviction, effects)

    def _begin(self, now: float) -> None:
        """Begin with an event, which may change any deadline."""
        self._registry.now, self._is_deadline_known = now, False

    def _receive(self, connection: int, message: Message, payloads: Sequence[Buffer], effects: Effects) -> None:
        registry = self._registry
        match message:
            case Join():
                registry.check_free(connection)
                if (founder := sessions.of_founder(registry.groups.get(message.group), message)) is not None:
                    welcome_again(*founder, connection, registry.incarnation, effects)
                    return
                group = forming.group_for(registry, message, effects)
                registry.add(group)
                self._happens(group, message, effects, connection)
                registry.totals.came += message.group != PROBE_GROUP
            case Resume():
                registry.check_free(connection)
                group = sessions.check(registry.groups.get(message.group), message, registry.ended)
                self._happens(group, message, effects, connection, message.member_id)
            case Leave(reason, failed):
                if connection in registry.places:
                    effects.send(connection, message)  # all that it said before has been heard
                self._lose(connection, Lost(reason, politely=not failed), effects)
            case Enlist() if connection not in registry.places:
                self.roster.enlist(connection, message, registry.incarnation > 0, effects)
                self._shard_enlisted(effects)
            case Reported() if connection in self.roster.shards:
                self._take_report(connection, payloads[0], effects)
            case _ if (State.ACTIVE, type(message)) in TRANSITIONS:
                group, member_id = registry.member(connection)
                self._happens(group, message, effects, connection, member_id, payloads)
            case _:
                raise UnexpectedMessageError(f"a {type(message).__name__} is not for a coordinator")

    def _take_report(self, source: int, payload: Buffer, effects: Effects) -> None:
        epoch, report = decode_report(payload, self._registry.now)
        group = self.groups.get(report.group)
        if group is None or group.members.founded != epoch or source not in group.shards.connections:
            return  # the group that it is about has ended meanwhile
        self._happens(group, report, effects, source)

    def heed(self, report: Report, now: float, effects: Effects) -> None:
        """Take a report from the coordinator's own data half."""
        self._begin(now)
        if isinstance(report, Violation):
            self._evict(Eviction(report.connection, report.error), effects)
        elif (group := self.groups.get(report.group)) is not None and group.state is not State.FORMING:
            self._happens(group, report, effects)  # else the group that it is about has ended meanwhile

    def disconnected(
        self, connection: int, reason: str, ended: bool, final: bool, now: float, effects: Effects
    ) -> None:
        """A connection broke; its worker comes back, if it can: not if its process ``ended``, or that is ``final``."""
        self._begin(now)
        group = self._registry.group_of(connection)
        member_id = -1 if group is None else group.member_id_of(connection)
        if group is None or ended or final or not sessions.may_return(self._registry, group, member_id):
            self._lose(connection, Lost(reason, ended=ended), effects)
        else:
            self._happens(group, Broke(reason), effects, connection, member_id)

    def left_out(self, connection: int, reason: str, effects: Effects) -> None:
        """Tell a worker that is silent that the others go on without it, for when it can hear again."""
        error: GradServerError = ConnectionLostError(f"the coordinator has closed this connection: {reason}")
        group = self._registry.group_of(connection)
        if group is not None and (member_id := group.member_id_of(connection)) >= 0:
            error = group.left_out(member_id, reason)
        effects.dismiss(connection, error)

    def restore(self, records: Sequence[Kind], kept: Collection[str], now: float, effects: Effects) -> None:
        """Go on where an earlier coordinator was lost. Of the groups in ``kept`` what lossy codecs owe is there."""
        self._begin(now)
        restore.restore(self._registry, records, kept, now, effects)

    def stop(self, reason: str, effects: Effects) -> None:
        """Tell all peers that the coordinator stops."""
        error = CoordinatorStoppedError(f"the coordinator was stopped ({reason})")
        journal.stopped(self.groups, error, effects)
        for connection in (*self._registry.places, *self.roster.shards):
            effects.send(connection, Failure.of(error, Scope.CONNECTION))

    def next_deadline(self) -> float | None:
        """Return when the first timer fires; None when nothing waits. The runtime asks after each message."""
        if not self._is_deadline_known:
            self._deadline, self._is_deadline_known = self._first_deadline(), True
        return self._deadline

    def _first_deadline(self) -> float | None:
        return min((at for group in self.groups.values() for at, _ in deadlines(group)), default=None)

    def tick(self, now: float, effects: Effects) -> None:
        """Fire the timers that are due."""
        self._begin(now)
        for group in list(self.groups.values()):
            for at, timer in deadlines(group):  # each is looked at when the one before it has been dealt with
                if at <= now and not group.is_ended:
                    timer.fire(self._registry, group, effects)
                    self._follow(group, effects)
        self._form_next(effects)

    # ── what follows ──────────────────────────────────────────────────────────────────────────────────

    def _happens(
        self,
        group: Group,
        what: Message | RemoteReport | Notice,
        effects: Effects,
        source: int = HERE,
        member_id: int = -1,
        payloads: Sequence[Buffer] = (),
    ) -> None:
        """Deal with an event of a group, and with all that follows from it."""
        row = TRANSITIONS[group.state, type(what)]
        follow = partial(self._follow, group, effects)
        row.react(Event(self._registry, group, what, effects, follow, source, member_id, payloads))
        self._follow(group, effects, row)

    def _follow(self, group: Group, effects: Effects, row: Transition | None = None) -> None:
        """Apply rules until none applies, and note the state that the group has come to because of ``row``."""
        self._carry_out_evictions(group, effects, row)
        while (rule := self._first_that_holds(group)) is not None:
            rule.act(self._registry, group, effects)
            self._carry_out_evictions(group, effects, row)
        self._note_state(group, row)
        for other in [*self._registry.forming.values()]:
            if other.origin is not None and other.origin.parent == group.name:
                self._follow(other, effects)  # a member that it waits for may have departed

    def _first_that_holds(self, group: Group) -> Rule | None:
        registry = self._registry
        if not group.is_ended:
            for rule in RULES:
                if rule.holds(registry, group):
                    return rule
        return None

    def _carry_out_evictions(self, group: Group, effects: Effects, row: Transition | None) -> None:
        while effects.evictions:
            self._note_state(group, row)
            for eviction in effects.take_evictions():
                self._evict(eviction, effects)

    def _note_state(self, group: Group, row: Transition | None) -> None:
        before, after = group.note_state()
        if row is not None and after not in (before, *row.next):
            self._surprises.append(f"{before} to {after}, which the row of {row.events} has not")

    def _evict(self, eviction: Eviction, effects: Effects) -> None:
        """Take a worker's connection, as the error is its own fault. What it had sent before it heard is no error."""
        error, has_place = eviction.error, eviction.connection in self._registry.places
        if not has_place and eviction.connection in self._evicted:
            return
        if has_place:
            self._evicted.append(eviction.connection)
        effects.refuse(eviction.connection, error)
        blame = "it broke the protocol: " if isinstance(error, ProtocolError) else ""
        late = "it did not come in time" if isinstance(error, LeftOutError) else f"{blame}{error.message}"
        self._lose(eviction.connection, Lost(eviction.why or late, ended=eviction.ended), effects)

    def _lose(self, connection: int, how: Lost, effects: Effects) -> None:
        """Deal with the loss of the worker or the data shard on ``connection``."""
        name = self._registry.places.pop(connection, None)
        if name is not None:
            self._happens(self.groups[name], how, effects, connection)
            self._form_next(effects)
            return
        shard = self.roster.shards.pop(connection, None)
        if shard is None:
            return
        effects.log(f"data shard {shard.number} at {shard.url} was lost ({how.reason})", warning=True)
        error = ConnectionLostError(f"the data shard at {shard.url} was lost, and its slices with it: {how.reason}")
        for group in list(self.groups.values()):
            if connection in group.shards.connections:
                self._happens(group, ShardLost(error), effects, connection)
        self._shard_enlisted(effects)  # there may be another one to take its place

    def _form_next(self, effects: Effects) -> None:
        """Have workers that had left a group before it ended form the next one."""
        registry = self._registry
        while registry.returning:
            applicant = registry.returning.pop(0)
            try:
                group = forming.group_for(registry, applicant.join, effects)
            except GradServerError as error:
                effects.refuse(applicant.connection, error)
                continue
            registry.add(group)
            forming.arrive(group, applicant, effects)
            registry.places[applicant.connection] = group.name
            self._follow(group, effects)

    def _shard_enlisted(self, effects: Effects) -> None:
        for group in list(self.groups.values()):
            self._happens(group, ShardEnlisted(), effects)

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def is_member(self, message: Message) -> bool:
        """Tell whether a Join is of a member that lacks its Welcome: others wait for it, and nothing else matters."""
        return isinstance(message, Join) and sessions.of_founder(self.groups.get(message.group), message) is not None

    def awaited(self, name: str) -> set[int]:
        """Connections of members that others wait for: for a plan, a sub-group, a request, or the end of a round."""
        group = self.groups.get(name)
        missing = set() if group is None else subgroups.awaited(self._registry, group) | requests.awaited(group)
        if group is None or not (group.plans.proposals or group.learners.by_id):
            return missing
        return missing | {
            member.connection
            for member_id, member in group.members.by_id.items()
            if member_id not in group.plans.proposals
        }

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """The groups, as plain JSON values. Ages in seconds."""
        return {name: self._describe(group, now) for name, group in self.groups.items()}

    def _describe(self, group: Group, now: float) -> dict[str, object]:
        described = group.describe(now)
        members = cast(list[dict[str, object]], described["members"])
        return described | watching.describe(group) | slow.describe(group, members)

    def totals(self) -> dict[str, int]:
        """Return the counts of what has happened since this coordinator began."""
        open_rounds = sum(group.rounds.number for group in self.groups.values() if group.origin is None)
        return asdict(self._registry.totals) | {"rounds": self._registry.totals.rounds + open_rounds}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert not self._surprises, self._surprises
        assert not self._is_deadline_known or self._deadline == self._first_deadline(), "a deadline came without event"
        self._registry.validate()
