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
    ACTIVE    Propose, the last, all alike          ACTIVE    the plan is set; Agreed to everybody
    ACTIVE    Propose, the last, not all alike      ACTIVE    the minority is told what differs
    ACTIVE    proposals' deadline                   ACTIVE    those who proposed are told who did not
    ACTIVE    a member leaves or is lost            BROKEN    data fails what needs it; proposers are told
    ACTIVE    data reports Halted                   BROKEN
    ACTIVE    Join                                  ACTIVE    refused: membership is fixed
    BROKEN    Join                                  BROKEN    refused, with the reason
    BROKEN    the last member leaves or is lost     (none)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradserver.engine.events import (
    Close,
    CloseGroup,
    Command,
    Depart,
    Halted,
    Log,
    OpenGroup,
    Order,
    Report,
    RoundCompleted,
    Seat,
    Send,
    SetPlan,
    Violation,
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
)
from protocol.errors import (
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    InvalidWorldSizeError,
    LimitExceededError,
    MalformedMessageError,
    PlanMismatchError,
    ProtocolError,
    UnexpectedMessageError,
    WorkerLeftError,
    WorkerLostError,
)
from protocol.limits import MAX_GROUPS, MAX_NAME_BYTES, MIN_CREDIT_BYTES
from protocol.messages import Agreed, Failure, Join, Leave, Message, Propose, Scope, Welcome
from protocol.plan import decode_plan, first_difference
from protocol.wire import Buffer


class Control:
    """Groups and their members. Methods append commands and return orders for the data half."""

    def __init__(self, worlds: dict[str, int], credit: int) -> None:
        if credit < MIN_CREDIT_BYTES:
            raise InvalidArgumentError(f"a credit of {credit} bytes is too small: {MIN_CREDIT_BYTES} at least")
        for name, world in worlds.items():
            check_world(world, f"group {name!r}")
        self.groups: dict[str, Group] = {}
        self._worlds = dict(worlds)
        self._credit = credit
        self._epochs = 0
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
        try:
            match message:
                case Join():
                    return self._join(connection, message, now, commands)
                case Propose(digest):
                    return self._propose(connection, digest, payloads[0], now, commands)
                case Leave(reason, failed):
                    if connection in self._places:
                        commands.append(Send(connection, message))  # all that it said before has been heard
                    return self._gone(connection, reason, not failed, commands)
            raise UnexpectedMessageError(f"a {type(message).__name__} is not for a coordinator")
        except GradServerError as error:
            return self._refuse(connection, error, commands)

    def disconnected(self, connection: int, reason: str, commands: list[Command]) -> list[Order]:
        """A connection broke."""
        return self._gone(connection, reason, False, commands)

    def heed(self, report: Report, commands: list[Command]) -> list[Order]:
        """Take a report from the data half."""
        match report:
            case RoundCompleted(name, record):
                group = self.groups[name]
                group.rounds = record.round + 1
                group.ledger.append(record)
            case Halted(name, error):
                self._break(self.groups[name], error, commands)
            case Violation(connection, error):
                return self._refuse(connection, error, commands)
        return []

    # ── joining ───────────────────────────────────────────────────────────────────────────────────────

    def _join(self, connection: int, join: Join, now: float, commands: list[Command]) -> list[Order]:
        if connection in self._places:
            raise UnexpectedMessageError(f"this connection already joined group {self._places[connection]!r}")
        check_name("the group's name", join.group, MAX_NAME_BYTES)
        group = self.groups.get(join.group)
        if group is None:
            group = self._new_group(join)
        check_applicant(group, join, now)
        self.groups[join.group] = group
        group.applicants.append(Applicant(connection, join, now))
        self._places[connection] = group.name
        commands.append(Log(f"group {group.name!r}: {join.name!r} joined ({len(group.applicants)} of {group.world})"))
        if len(group.applicants) < group.world:
            return []
        return [self._activate(group, commands)]

    def _new_group(self, join: Join) -> Group:
        told = self._worlds.get(join.group, 0)
        if told and join.world_size not in (0, told):
            raise InvalidWorldSizeError(
                f"{join.name!r} wants a world size of {join.world_size}, the coordinator was started with {told} "
                f"for group {join.group!r}"
            )
        world = told or join.world_size
        if not world:
            raise InvalidWorldSizeError(
                f"nobody said how many workers group {join.group!r} has: give world_size= to connect (or WORLD_SIZE "
                f"in the environment), or --workers N to `gradserver serve`"
            )
        check_world(world, f"group {join.group!r}")
        if len(self.groups) >= MAX_GROUPS:
            raise LimitExceededError(f"this coordinator already serves {MAX_GROUPS} groups")
        return Group(join.group, world)

    def _activate(self, group: Group, commands: list[Command]) -> Order:
        """All are here: give those without a rank one, in the order in which they came, and welcome everybody."""
        taken = {applicant.join.rank: applicant for applicant in group.applicants if applicant.join.rank >= 0}
        free = iter(sorted(set(range(group.world)) - taken.keys()))
        for applicant in group.applicants:
            if applicant.join.rank < 0:
                taken[next(free)] = applicant
        self._epochs += 1
        group.epoch = self._epochs
        group.members = {rank: Seat(taken[rank].connection, taken[rank].join.name) for rank in range(group.world)}
        group.names = tuple(seat.name for seat in group.members.values())
        group.timeout = max(applicant.join.timeout for applicant in group.applicants)
        group.applicants.clear()
        for rank, seat in group.members.items():
            welcome = Welcome(group.name, rank, group.epoch, self._credit, group.names)
            commands.append(Send(seat.connection, welcome))
        commands.append(Log(f"group {group.name!r}: complete with {group.world} workers, epoch {group.epoch}"))
        seats = tuple(group.members.values())
        return OpenGroup(group.name, group.epoch, seats, self._credit, group.timeout)

    # ── the plan ──────────────────────────────────────────────────────────────────────────────────────

    def _propose(self, connection: int, digest: str, data: Buffer, now: float, commands: list[Command]) -> list[Order]:
        group, rank = self._seat(connection)
        if group.broken is not None:
            self._fail_proposal(group, rank, group.broken, commands)
            return []
        if rank in group.proposals:
            raise UnexpectedMessageError(f"{group.call(rank)} proposed a second plan before the first was settled")
        plan = decode_plan(memoryview(data))
        if plan.hash != digest:
            raise MalformedMessageError(f"a plan whose hash is {plan.hash}, announced as {digest[:64]}")
        group.proposals[rank] = Proposal(plan, now)
        if len(group.proposals) < group.world:
            return []
        votes = Counter(proposal.plan.hash for proposal in group.proposals.values())
        leading = max(votes.values())
        reference = min(rank for rank, p in group.proposals.items() if votes[p.plan.hash] == leading)
        plan = group.proposals[reference].plan
        if len(votes) > 1:
            self._reject_minority(group, reference, commands)
            return []
        group.plan = plan
        group.proposals.clear()
        for seat in group.members.values():
            commands.append(Send(seat.connection, Agreed(plan.hash, group.rounds)))
        commands.append(
            Log(f"group {group.name!r}: plan of {len(plan.buckets)} buckets, {plan.nbytes / 1e6:.1f} MB a round")
        )
        return [SetPlan(group.name, plan, group.rounds)]

    def _reject_minority(self, group: Group, reference: int, commands: list[Command]) -> None:
        """Tell those who differ from most (a tie goes to the lowest rank); the others' proposals stand."""
        plan = group.proposals[reference].plan
        for rank, proposal in sorted(group.proposals.items()):
            difference = first_difference(plan, proposal.plan)
            if difference is None:
                continue
            theirs, own = difference
            error = PlanMismatchError(
                f"the plans of group {group.name!r} differ, first here: {group.call(reference)} has {theirs}; "
                f"{group.call(rank)} has {own}. Every worker must wrap the same module in the same way"
            )
            self._fail_proposal(group, rank, error, commands)
            del group.proposals[rank]
            commands.append(Log(error.message, warning=True))

    def _fail_proposal(self, group: Group, rank: int, error: GradServerError, commands: list[Command]) -> None:
        commands.append(Send(group.members[rank].connection, Failure.of(error, Scope.PROPOSAL)))

    # ── leaving, and being lost ───────────────────────────────────────────────────────────────────────

    def _gone(self, connection: int, reason: str, politely: bool, commands: list[Command]) -> list[Order]:
        name = self._places.pop(connection, None)
        if name is None:
            return []
        group = self.groups[name]
        if not group.members:
            group.applicants = [a for a in group.applicants if a.connection != connection]
            commands.append(Log(f"group {name!r}: an applicant left ({reason})"))
            if not group.applicants:
                del self.groups[name]
            return []
        rank = next(rank for rank, seat in group.members.items() if seat.connection == connection)
        del group.members[rank]
        group.proposals.pop(rank, None)
        kind, verb = (WorkerLeftError, "left") if politely else (WorkerLostError, "was lost")
        commands.append(Log(f"group {name!r}: {group.call(rank)} {verb} ({reason})"))
        if not group.members:
            del self.groups[name]
            commands.append(Log(f"group {name!r}: that was the last worker, after {group.rounds} rounds"))
            return [CloseGroup(name)]
        when = f" after round {group.rounds - 1}" if group.rounds else ""
        error = kind(
            f"{group.call(rank)} {verb}{when} and is needed to go on: {reason}",
            worker=group.names[rank],
            rank=rank,
        )
        self._break(group, error, commands)
        return [Depart(name, rank, error)]

    def _break(self, group: Group, error: GradServerError, commands: list[Command]) -> None:
        """The group goes no further; the first reason stands."""
        if group.broken is None:
            group.broken = error
            if not isinstance(error, WorkerLeftError):
                commands.append(Log(f"group {group.name!r} is broken: {error.message}", warning=True))
        for rank in list(group.proposals):
            self._fail_proposal(group, rank, error, commands)
        group.proposals.clear()

    def _refuse(self, connection: int, error: GradServerError, commands: list[Command]) -> list[Order]:
        """``error`` is this connection's own fault, and costs it the connection."""
        commands.append(Send(connection, Failure.of(error, Scope.CONNECTION)))
        commands.append(Close(connection))
        commands.append(Log(f"connection {connection} refused: {error.message}", warning=True))
        blame = "it broke the protocol: " if isinstance(error, ProtocolError) else ""
        return self._gone(connection, f"{blame}{error.message}", False, commands)

    def stop(self, reason: str, commands: list[Command]) -> None:
        """Tell everybody that the coordinator stops."""
        error = CoordinatorStoppedError(f"the coordinator was stopped ({reason})")
        for connection in self._places:
            commands.append(Send(connection, Failure.of(error, Scope.CONNECTION)))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """When the next applicant or proposal runs out of time."""
        waiting = [group for group in self.groups.values() if group.applicants or group.proposals]
        return min((at for group in waiting for at in deadlines(group)), default=None) if waiting else None

    def tick(self, now: float, commands: list[Command]) -> list[Order]:
        """Tell those whose time is up."""
        orders: list[Order] = []
        for group in list(self.groups.values()):
            for applicant in [a for a in group.applicants if a.deadline <= now]:
                error = join_timeout(group, applicant)
                commands.append(Send(applicant.connection, Failure.of(error, Scope.CONNECTION)))
                commands.append(Close(applicant.connection))
                orders += self._gone(applicant.connection, "waited too long", False, commands)
            overdue = [p for p in group.proposals.values() if p.since + group.timeout <= now]
            if overdue:
                self._proposals_overdue(group, commands)
        return orders

    def _proposals_overdue(self, group: Group, commands: list[Command]) -> None:
        missing = [rank for rank in group.members if rank not in group.proposals]
        error = DeadlineError(
            f"the plan of group {group.name!r} waited {group.timeout:g} s for {group.calls(missing)} to propose one",
            missing=tuple(group.call(rank) for rank in missing),
        )
        for rank in group.proposals:
            self._fail_proposal(group, rank, error, commands)
        group.proposals.clear()

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def _seat(self, connection: int) -> tuple[Group, int]:
        name = self._places.get(connection)
        if name is not None:
            for rank, seat in self.groups[name].members.items():
                if seat.connection == connection:
                    return self.groups[name], rank
        raise UnexpectedMessageError("this message is for members of a group: join first")

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """The groups, as plain JSON values. Ages in seconds."""
        return {name: describe(group, now) for name, group in self.groups.items()}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for name, group in self.groups.items():
            assert bool(group.members) != bool(group.applicants), f"{name} is neither forming nor active"
            assert len(group.applicants) < group.world, f"{name} is complete and not active"
            assert set(group.proposals) <= set(group.members), f"{name} holds proposals of strangers"
            assert not (group.broken and group.proposals), f"{name} is broken and still collects proposals"
            connections = [s.connection for s in group.members.values()] + [a.connection for a in group.applicants]
            assert len(set(connections)) == len(connections), f"{name} seats a connection twice"
            for connection in connections:
                assert self._places[connection] == name, f"{connection} is in two groups"
        seated = sum(len(group.members) + len(group.applicants) for group in self.groups.values())
        assert seated == len(self._places), "a connection without a place"
