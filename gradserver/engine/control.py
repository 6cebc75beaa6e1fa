"""The control half: who is in which group, and what they agreed on.

A group's life:

    state     event                                 next      what happens
    ────────  ────────────────────────────────────  ────────  ──────────────────────────────────────────
    (none)    Join                                  FORMING   the applicant waits
    FORMING   Join, not the last                    FORMING   the applicant waits
    FORMING   Join, the last                        ACTIVE    a new epoch; Welcome to everybody
    FORMING   Join that cannot be                   FORMING   the newcomer is refused, and told why
    FORMING   an applicant's deadline               FORMING   it is told who is missing
    FORMING   an applicant leaves or is lost        FORMING   it is forgotten; the last one: (none)
    ACTIVE    Propose, not the last                 ACTIVE    kept
    ACTIVE    Propose, the last, all alike          ACTIVE    the plan is set; other shards have to confirm it
    ACTIVE    all of them have                      ACTIVE    Agreed to everybody
    ACTIVE    Propose, the last, not all alike      ACTIVE    the minority is told what differs
    ACTIVE    proposals' deadline                   ACTIVE    those who proposed are told who did not
    ACTIVE    a member leaves or is lost            BROKEN    data fails what needs it; proposers are told
    ACTIVE    data reports Halted                   BROKEN    the other shards halt it too
    ACTIVE    data reports Absent                   BROKEN    the member is told why, and is lost
    ACTIVE    a data shard that it uses is lost     BROKEN    everything open fails
    ACTIVE    Join                                  ACTIVE    refused: membership is fixed
    BROKEN    Join                                  BROKEN    refused, with the reason
    BROKEN    the last member leaves or is lost     (none)

Elastic groups are in `gradserver.engine.elastic`, with a table of what differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from gradserver.engine import chronicle, claims, joining, rehoming, resuming
from gradserver.engine.elastic import behind, close_round, depart, give_up, go_on, heeded, may_begin
from gradserver.engine.events import (
    Absent,
    Attach,
    Behind,
    CaughtUp,
    CloseGroup,
    Command,
    Depart,
    Halt,
    Halted,
    Heeded,
    Late,
    Log,
    OpenGroup,
    Order,
    Planned,
    Recovered,
    RemoteOrder,
    Report,
    RoundCompleted,
    Seat,
    Send,
    SetPlan,
    Violation,
    dismiss,
)
from gradserver.engine.membership import (
    Applicant,
    Group,
    Proposal,
    check_applicant,
    check_name,
    check_world,
    deadlines,
    describe,
    join_timeout,
    left_out,
    new_group,
)
from gradserver.engine.orders import decode_report, encode_order
from gradserver.engine.policy import Policy
from gradserver.engine.proposals import agree, confirm, fail_all, fail_overdue, fail_proposal, reject_minority
from gradserver.engine.records import Epoch, Kind
from gradserver.engine.roster import DataShard, Roster, count_round
from gradserver.engine.seats import Seats, in_order
from gradserver.engine.welcome import welcome_to
from protocol.buffer import Buffer
from protocol.errors import (
    ConnectionLostError,
    CoordinatorStoppedError,
    GradServerError,
    InvalidArgumentError,
    LeftOutError,
    MalformedMessageError,
    ProtocolError,
    UnexpectedMessageError,
    WorkerLeftError,
)
from protocol.limits import BACKLOG_BYTES, MAX_NAME_BYTES, MIN_CREDIT_BYTES
from protocol.messages import (
    Agreed,
    Enlist,
    Enter,
    Failure,
    Join,
    Leave,
    Message,
    Ordered,
    Propose,
    Ready,
    Reported,
    Scope,
    Serve,
    StateFailed,
)
from protocol.plan import Plan, decode_plan
from protocol.positions import Claim, Register, Used
from protocol.resuming import Resume
from protocol.shards import Table

_NOBODY = Seat(-1, "")
_HERE = 0
"""Where the coordinator's own data half reports from; connections have larger numbers."""


class Control:
    """Groups and their members. Methods append commands and return orders for the coordinator's own data half."""

    def __init__(
        self,
        worlds: Mapping[str, int | Policy],
        credit: int,
        entropy: Callable[[], str] | None = None,
        rate: float | None = None,
        digests: bool = False,
        incarnation: int = 0,
        runs: Callable[[str], bool] = lambda _: False,
    ) -> None:
        if credit < MIN_CREDIT_BYTES:
            raise InvalidArgumentError(f"a credit of {credit} bytes is too small: {MIN_CREDIT_BYTES} at least")
        for name, world in worlds.items():
            if not isinstance(world, Policy):
                check_world(world, f"group {name!r}")
        self.groups: dict[str, Group] = {}
        self.roster = Roster(entropy, rate)
        self._worlds = dict(worlds)
        self._credit = credit
        self._digests = digests
        self._entropy = entropy
        self._incarnation = incarnation
        self._runs = runs
        self._epochs = 0
        self._now = 0.0
        self._places: dict[int, str] = {}
        """The group that each connection has joined, as applicant or member."""

    def receive(
        self,
        connection: int,
        message: Message,
        payloads: Sequence[Buffer],
        now: float,
        commands: list[Command],
    ) -> list[Order]:
        """Take any message that is not data's business."""
        self._now = now
        try:
            match message:
                case Join():
                    return self._join(connection, message, now, commands)
                case Propose():
                    return self._propose(connection, message, payloads[0], now, commands)
                case Register() | Claim() | Used():
                    group, seat = self._seat(connection)
                    claims.receive(group, seat, message, payloads, commands)
                    return self._order_all(group, [], commands)
                case Serve() | Enter() | Ready() | StateFailed():
                    group, seat = self._seat(connection)
                    return self._order_all(group, joining.hear(group, seat, message, now, commands), commands)
                case Reported() if connection in self.roster.shards:
                    return self._heed_elsewhere(connection, payloads[0], now, commands)
                case Resume():
                    return self._resume(connection, message, now, commands)
                case Enlist() if connection not in self._places:
                    self.roster.enlist(connection, message, self._incarnation > 0, commands)
                    return self._rehome(commands)
                case Leave(reason, failed):
                    if connection in self._places:
                        commands.append(Send(connection, message))  # all that it said before has been heard
                    return self._gone(connection, reason, not failed, commands)
            raise UnexpectedMessageError(f"a {type(message).__name__} is not for a coordinator")
        except GradServerError as error:
            return self._refuse(connection, error, commands)

    def disconnected(
        self, connection: int, reason: str, ended: bool, final: bool, now: float, commands: list[Command]
    ) -> list[Order]:
        """A connection broke; its worker comes back, if it can: not if its process ``ended``, or that is ``final``."""
        self._now = now
        group = self.groups.get(self._places.get(connection, ""))
        durable = group is not None and group.members and group.secret and group.broken is None
        seat = group.seat_of(connection) if group is not None else -1
        if group is None or not durable or ended or final or not group.is_inside(seat):
            return self._gone(connection, reason, False, commands, ended)
        orders = self._let_in(group, commands)
        return orders + self._detach(group, seat, reason, commands)

    def _detach(self, group: Group, seat: int, reason: str, commands: list[Command]) -> list[Order]:
        del self._places[group.members[seat].connection]
        return self._order(group, resuming.detach(group, seat, reason, self._now, commands), commands)

    def left_out(self, connection: int, reason: str, commands: list[Command]) -> None:
        """Tell somebody who is silent that he is too late, for when he can hear again."""
        error: GradServerError = ConnectionLostError(f"the coordinator has given this connection up: {reason}")
        group = self.groups.get(self._places.get(connection, ""))
        if group is not None and group.members:
            _, seat = self._seat(connection)
            error = left_out(group, seat, reason)
        commands += dismiss(connection, error)

    def restore(
        self, records: Sequence[Kind], kept: Collection[str], now: float, commands: list[Command]
    ) -> list[Order]:
        """Go on where an earlier coordinator was lost. Of the groups in ``kept`` what lossy codecs owe is there."""
        self._now = now
        orders: list[Order] = []
        self._epochs = max((record.epoch for record in records if isinstance(record, Epoch)), default=0)
        for group in resuming.restore(records, self._worlds, now, self._next_epoch, commands):
            self.groups[group.name] = group
            group.owed_nothing = group.name not in kept and group.is_lossy
            orders += resuming.reopen(group, self._credit, self._digests)
        return orders

    def _resume(self, connection: int, message: Resume, now: float, commands: list[Command]) -> list[Order]:
        if connection in self._places:
            raise UnexpectedMessageError(f"this connection already joined group {self._places[connection]!r}")
        group = resuming.check(self.groups.get(message.group), message)
        orders = self._let_in(group, commands)
        if message.epoch > group.epoch:
            self._epochs = max(self._epochs, message.epoch)
            orders += self._order_all(group, resuming.catch_up(group, self._next_epoch(), commands), commands)
        self._places.pop(group.members[message.seat].connection, None)
        self._places[connection] = group.name
        rehoming.missed(group, now)
        if not group.recovering:
            orders += self._refuse_all(joining.disturbed(group), commands)
        version = self._next_epoch()
        for order in resuming.resume(group, message, connection, self._incarnation, version, now, commands):
            orders += [order] if isinstance(order, Attach) else self._order(group, order, commands)
        return orders + (self._order_all(group, [], commands) if group.shards else [])

    def _open_books(self, group: Group, commands: list[Command]) -> list[Order]:
        """In a group with shards elsewhere: what they find out is of one membership, and of shards that are there."""
        if group.lacking or not group.recovering or not group.shards or group.broken is not None:
            return []
        order = resuming.open_books(group, self._incarnation, self._next_epoch(), self._now, commands)
        return self._order_all(group, [order], commands)

    def _let_in(self, group: Group, commands: list[Command]) -> list[Order]:
        """When books are opened, who contributes counts as a member: what it gave may be in results that some hold."""
        return self._order_all(group, joining.let_in(group, group.rounds, self._next_epoch, commands), commands)

    def heed(self, report: Report, commands: list[Command], source: int = _HERE) -> list[Order]:
        """Take a report from a data half: the coordinator's own, or the one with connection ``source``."""
        match report:
            case CaughtUp(name):
                group = self.groups[name]
                proceed = resuming.caught_up(group, report, source, commands)
                return [order for one in proceed for order in self._order(group, one, commands)]
            case Recovered(name):
                resuming.recovered(self.groups[name], report, source, commands)
                return self._settle(self.groups[name], commands)
            case RoundCompleted(name, record, adopted):
                group = self.groups[name]
                group.made = group.made if adopted else max(group.made, record.round)
                done = count_round(group, source, record) if group.shards else record
                if done is not None:
                    claims.completed(group, done, group.made < done.round, commands)
                    orders = self._order_all(group, [], commands)
                    return orders + self._refuse_all(joining.hopeless(group), commands)
            case Halted(name, error, buckets_only):
                group = self.groups[name]
                self._break(group, error, commands)
                orders = self._order(group, Halt(name, error, buckets_only), commands, source)
                return [] if source == _HERE else orders
            case Violation(connection, error):
                return self._refuse(connection, error, commands)
            case Heeded(name):
                heeded(self.groups[name], source)
                return self._order_all(self.groups[name], [], commands)
            case Planned(name, digest):
                confirm(self.groups[name], source, digest, commands)
                joining.compare_plans(self.groups[name], commands)
                return self._refuse_all(joining.outdated(self.groups[name]), commands)
            case Absent(name, rank, error, ended):
                group = self.groups[name]
                seat = group.members.get(rank) or group.joiners.get(rank)
                if seat is None or seat.connection < 0:
                    return []
                broke = isinstance(error, ConnectionLostError) and not ended and rank in group.members
                if group.secret and source != _HERE and broke:  # it makes all its connections anew
                    if group.lacking:
                        return []  # as everybody does
                    commands += dismiss(seat.connection, error)
                    return self._detach(group, rank, error.message, commands)
                return self._refuse(seat.connection, error, commands, ended)
            case Late(name):
                group = self.groups[name]
                order = close_round(group, report, commands)
                if order is None:
                    return []
                for late in order.seats:
                    claims.not_counted(group, late, order.round, group.late_are == "keep", commands)
                return self._order(group, order, commands)
            case Behind(name, rank, number):
                group = self.groups[name]
                if rank in group.joiners and (excused := joining.fell_behind(group, rank)) is not None:
                    return self._order_all(group, excused, commands)
                seat = group.members.get(rank) or group.joiners.get(rank)
                return [] if seat is None else self._refuse(seat.connection, behind(group, rank, number), commands)
        return []

    def _order_all(self, group: Group, orders: Sequence[RemoteOrder], commands: list[Command]) -> list[Order]:
        """Have ``orders`` concerning the membership carried out, and whatever may follow when shards go by them."""
        orders = [*orders, *go_on(group, self._next_epoch, self._credit, self._incarnation, commands)]
        return [order for one in orders for order in self._order(group, one, commands)]

    def _next_epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    # ── data shards elsewhere ─────────────────────────────────────────────────────────────────────────

    def _order(self, group: Group, order: RemoteOrder, commands: list[Command], but: int = -1) -> list[Order]:
        """Send ``order`` to all shards of ``group`` elsewhere, ``but`` to one; and give it, for the one here."""
        for connection in group.shards:
            if connection != but and connection in self.roster.shards:
                commands.append(Send(connection, Ordered(), (encode_order(order),)))
        return [order]

    def _heed_elsewhere(self, source: int, payload: Buffer, now: float, commands: list[Command]) -> list[Order]:
        epoch, report = decode_report(payload, now)
        group = self.groups.get(report.group)
        if group is None or group.founded != epoch or source not in group.shards:
            return []  # of a group that has ended meanwhile
        return self.heed(report, commands, source)

    def _shard_gone(self, connection: int, shard: DataShard, reason: str, commands: list[Command]) -> list[Order]:
        """Groups that use this shard go no further; later ones do without it."""
        commands.append(Log(f"data shard {shard.number} at {shard.url} was lost ({reason})", warning=True))
        error = ConnectionLostError(f"the data shard at {shard.url} was lost, and its slices with it: {reason}")
        orders: list[Order] = []
        for group in list(self.groups.values()):
            if connection in group.shards and group.secret and group.broken is None:
                orders += self._let_in(group, commands)
                orders += self._refuse_all(joining.disturbed(group, all_of_them=True), commands)
                rehoming.lost(group, connection, self._now, commands)
            elif connection in group.shards:
                self._break(group, error, commands)
                orders += self._order(group, Halt(group.name, error, False), commands)
                # Members wait for what that shard does not say, and would not hear for long that it is frozen.
                failure = Failure.of(error, Scope.CONNECTION)
                commands += [Send(seat.connection, failure) for seat in group.members.values()]
        return orders + self._rehome(commands)

    def _rehome(self, commands: list[Command]) -> list[Order]:
        """Have groups that lack data shards use those that are there."""
        orders: list[Order] = []
        for group in self.groups.values():
            if group.lacking and not rehoming.fill(group, self.roster.shards, self._credit, self._digests, commands):
                orders += self._open_books(group, commands)
        return orders

    # ── joining ───────────────────────────────────────────────────────────────────────────────────────

    def _join(self, connection: int, join: Join, now: float, commands: list[Command]) -> list[Order]:
        if connection in self._places:
            raise UnexpectedMessageError(f"this connection already joined group {self._places[connection]!r}")
        check_name("the group's name", join.group, MAX_NAME_BYTES)
        group = self.groups.get(join.group)
        if group is None:
            group = new_group(join, self._worlds.get(join.group, 0), len(self.groups))
        check_applicant(group, join, now)
        self.groups[join.group] = group
        applicant = Applicant(connection, join, now)
        if group.begun:
            orders = joining.arrive(group, applicant, self.roster.token, commands)
            self._places[connection] = group.name
            return self._order_all(group, orders, commands)
        group.applicants.append(applicant)
        self._places[connection] = group.name
        commands.append(Log(f"group {group.name!r}: {join.name!r} joined ({len(group.applicants)} of {group.size})"))
        return self._activate(group, commands) if may_begin(group, now) else []

    def _activate(self, group: Group, commands: list[Command]) -> list[Order]:
        """All are here: give those without a rank one, in the order in which they came, and welcome everybody."""
        places = in_order([a.join for a in group.applicants], group.world)
        chosen = {place: group.applicants[index] for place, index in places.items()}
        group.epoch = group.founded = self._next_epoch()
        group.world = group.founders = max(chosen) + 1
        group.opens = None
        group.members = {place: Seat(one.connection, one.join.name) for place, one in chosen.items()}
        seats = tuple(group.members.get(place, _NOBODY) for place in range(group.world))
        group.seats, group.table = Seats(seat.name for seat in seats), Table(len(chosen))
        group.timeout = max(applicant.join.timeout for applicant in group.applicants)
        group.applicants.clear()
        elastic = group.policy is not None
        waits_for_all = group.policy is not None and group.policy.lateness is None
        if waits_for_all and self._incarnation and self._entropy is not None:
            group.secret = self._entropy()
        self.roster.staff(group)
        rates, tokens = group.table.rates, group.tokens
        opened = group.name, group.epoch, seats, self._credit, group.timeout
        backlog = BACKLOG_BYTES if group.policy is None else group.policy.backlog
        lateness = None if group.policy is None else group.policy.lateness
        order = OpenGroup(*opened, rates, 0, tokens, elastic, self._digests, backlog, lateness, bool(group.secret))
        chronicle.founded(group, commands)
        for shard, connection in enumerate(group.shards, 1):
            commands.append(Send(connection, Ordered(), (encode_order(replace(order, shard=shard)),)))
        for place, seat in group.members.items():
            token = tokens[place] if tokens else ""
            welcome = welcome_to(group, place, token, self._credit, self._incarnation)
            commands.append(Send(seat.connection, welcome))
        shards = f", {len(rates)} data shards" if rates else ""
        commands.append(Log(f"group {group.name!r}: complete with {len(chosen)} workers, epoch {group.epoch}{shards}"))
        return [order]

    # ── the plan ──────────────────────────────────────────────────────────────────────────────────────

    def _propose(
        self, connection: int, propose: Propose, data: Buffer, now: float, commands: list[Command]
    ) -> list[Order]:
        group, rank = self._seat(connection)
        if rank in group.joiners:
            joining.propose(group, rank, _plan_of(propose, data), now, commands)
            return []
        if group.broken is not None:
            fail_proposal(group, rank, group.broken, commands)
            return []
        if rank in group.proposals:
            raise UnexpectedMessageError(f"{group.call(rank)} proposed a second plan before the first was settled")
        plan = _plan_of(propose, data)
        if rank in group.unaware and group.plan is not None and plan.hash == group.plan.hash:
            group.unaware.discard(rank)
            commands.append(Send(connection, Agreed(plan.hash, group.planned)))
            return []
        group.proposals[rank] = Proposal(plan, now, propose.round)
        return self._settle(group, commands)

    def _settle(self, group: Group, commands: list[Command]) -> list[Order]:
        """Agree on a plan, if all who are there have proposed one, and the same."""
        if not 0 < len(group.proposals) == len(group.members) or group.unconfirmed or group.recovering:
            return []
        votes = Counter(proposal.plan.hash for proposal in group.proposals.values())
        leading = max(votes.values())
        reference = min(rank for rank, p in group.proposals.items() if votes[p.plan.hash] == leading)
        plan = group.proposals[reference].plan
        if len(votes) > 1:
            reject_minority(group, reference, commands)
            return []
        if not group.shards:
            agree(group, plan, commands)
            joining.compare_plans(group, commands)
            orders: list[Order] = [SetPlan(group.name, plan, group.rounds)]
            return orders + self._refuse_all(joining.outdated(group), commands)
        # A round may be over for its members, and not for us yet: what other shards report takes its time.
        group.rounds = max(group.rounds, *(proposal.round for proposal in group.proposals.values()))
        group.unconfirmed = set(group.shards)
        return self._order(group, SetPlan(group.name, plan, group.rounds), commands)

    # ── leaving, and being lost ───────────────────────────────────────────────────────────────────────

    def _gone(
        self, connection: int, reason: str, politely: bool, commands: list[Command], ended: bool = False
    ) -> list[Order]:
        name = self._places.pop(connection, None)
        if name is None:
            shard = self.roster.shards.pop(connection, None)
            return [] if shard is None else self._shard_gone(connection, shard, reason, commands)
        group = self.groups[name]
        if not group.begun:
            group.applicants = [a for a in group.applicants if a.connection != connection]
            if group.policy is not None and len(group.applicants) < group.policy.minimum:
                group.opens = None
            commands.append(Log(f"group {name!r}: an applicant left ({reason})"))
            if not group.applicants:
                del self.groups[name]
            return []
        if any(applicant.connection == connection for applicant in group.queue):
            group.queue = [a for a in group.queue if a.connection != connection]
            return []
        return self._vacate(group, group.seat_of(connection), reason, politely, ended, commands)

    def _vacate(
        self, group: Group, rank: int, reason: str, politely: bool, ended: bool, commands: list[Command]
    ) -> list[Order]:
        """A member is gone, or somebody who joins."""
        name = group.name
        if rank in group.joiners:
            claims.departed(group, rank, commands)
            departures = joining.gone(group, rank, reason, politely, commands)
            if group.begun:
                departures += joining.seat_the_next(group, self.roster.token, commands)
                return self._order_all(group, departures, commands)
        group.members.pop(rank, None)
        group.proposals.pop(rank, None)
        group.away.pop(rank, None)
        group.busy.pop(rank, None)
        group.unaware.discard(rank)
        claims.departed(group, rank, commands)
        if group.policy is not None and group.begun:
            departure, others = depart(group, rank, reason, politely, ended, self._next_epoch, commands)
            chronicle.members(group, departure.error.message, commands)
            changes = [departure, *others, *joining.seat_the_next(group, self.roster.token, commands)]
            orders = self._order_all(group, changes, commands)
            return orders + self._open_books(group, commands) + self._settle(group, commands)
        bereft: joining.Refusals = [] if group.begun else joining.bereft(group)
        gone = group.seats.departed(rank, politely, f"({reason})").message
        commands.append(Log(f"group {name!r}: {gone}"))
        if not group.begun:
            del self.groups[name]
            chronicle.closed(group, f"{gone}, the last worker", commands)
            commands.append(Log(f"group {name!r}: that was the last worker, after {group.rounds} rounds"))
            orders = self._order(group, CloseGroup(name), commands)
            for other, error in bereft:
                self._places.pop(other)
                self._refuse(other, error, commands)
            return orders
        chronicle.members(group, gone, commands)
        when = f"after round {group.rounds - 1} " if group.rounds else ""
        error = group.seats.departed(rank, politely, f"{when}and is needed to go on: {reason}")
        self._break(group, error, commands)
        return self._order(group, Depart(name, rank, error), commands)

    def _break(self, group: Group, error: GradServerError, commands: list[Command]) -> None:
        """The group goes no further; the first reason stands."""
        if group.broken is None:
            group.broken = error
            if not isinstance(error, WorkerLeftError):
                chronicle.halted(group, error, commands)
                commands.append(Log(f"group {group.name!r} is broken: {error.message}", warning=True))
        fail_all(group, error, commands)

    def _refuse(
        self, connection: int, error: GradServerError, commands: list[Command], ended: bool = False
    ) -> list[Order]:
        """``error`` is this connection's own fault, and costs it the connection."""
        commands += dismiss(connection, error)
        commands.append(Log(f"connection {connection} refused: {error.message}", warning=True))
        blame = "it broke the protocol: " if isinstance(error, ProtocolError) else ""
        why = "it did not come in time" if isinstance(error, LeftOutError) else f"{blame}{error.message}"
        return self._gone(connection, why, False, commands, ended)

    def _refuse_all(self, refusals: joining.Refusals, commands: list[Command]) -> list[Order]:
        return [order for connection, error in refusals for order in self._refuse(connection, error, commands)]

    def stop(self, reason: str, commands: list[Command]) -> None:
        """Tell everybody that the coordinator stops."""
        error = CoordinatorStoppedError(f"the coordinator was stopped ({reason})")
        chronicle.stopped(self.groups, error, commands)
        for connection in (*self._places, *self.roster.shards):
            commands.append(Send(connection, Failure.of(error, Scope.CONNECTION)))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """When the next applicant or proposal runs out of time."""
        groups = self.groups.values()
        waiting = [
            g for g in groups if g.applicants or g.proposals or g.away or g.joiners or g.queue or g.paused or g.lacking
        ]
        return min((at for group in waiting for at in deadlines(group)), default=None) if waiting else None

    def tick(self, now: float, commands: list[Command]) -> list[Order]:
        """Tell those whose time is up."""
        self._now = now
        orders: list[Order] = []
        for group in list(self.groups.values()):
            if group.broken is None and (error := rehoming.overdue(group, now, commands)) is not None:
                self._break(group, error, commands)
                orders += self._order(group, Halt(group.name, error, False), commands)
                failure = Failure.of(error, Scope.CONNECTION)
                commands += [Send(seat.connection, failure) for seat in group.members.values()]
            if group.opens is not None and may_begin(group, now):
                orders += self._activate(group, commands)
            if group.paused is not None and group.paused + group.timeout <= now:
                give_up(group, commands)
                chronicle.closed(group, "too few workers were left", commands)
                for connection in group.connections:
                    self._places.pop(connection, None)
                del self.groups[group.name]
                orders += self._order(group, CloseGroup(group.name), commands)
            for applicant in [a for a in group.applicants if a.deadline <= now]:
                commands += dismiss(applicant.connection, join_timeout(group, applicant))
                orders += self._gone(applicant.connection, "waited too long", False, commands)
            orders += self._refuse_all(joining.overdue(group, now), commands)
            for seat in resuming.overdue(group, self._runs, now, commands):
                orders += self._vacate(group, seat, resuming.NOT_BACK, False, False, commands)
            overdue = [p for p in group.proposals.values() if p.since + group.timeout <= now]
            if overdue:
                fail_overdue(group, commands)
        return orders

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def _seat(self, connection: int) -> tuple[Group, int]:
        """Where a member sits, or who joins a running group."""
        name = self._places.get(connection)
        if name is not None:
            group = self.groups[name]
            if (rank := group.seat_of(connection)) >= 0:
                return group, rank
        raise UnexpectedMessageError("this message is for members of a group: join first")

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """The groups, as plain JSON values. Ages in seconds."""
        return {name: describe(group, now) for name, group in self.groups.items()}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for name, group in self.groups.items():
            for connection in group.validate():
                assert self._places[connection] == name, f"{connection} is in two groups"
        seated = sum(len(group.connections) for group in self.groups.values())
        assert seated == len(self._places), "a connection without a place"


def _plan_of(propose: Propose, data: Buffer) -> Plan:
    plan = decode_plan(memoryview(data))
    if plan.hash != propose.hash:
        raise MalformedMessageError(f"a plan whose hash is {plan.hash}, announced as {propose.hash[:64]}")
    return plan
