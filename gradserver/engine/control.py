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

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

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
    RoundRecord,
    Seat,
    Send,
    SetPlan,
    Violation,
)
from protocol.errors import (
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    LimitExceededError,
    PlanMismatchError,
    ProtocolError,
    UnexpectedMessageError,
    WorkerLeftError,
    WorkerLostError,
)
from protocol.limits import MAX_GROUPS, MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_WORLD_SIZE, MIN_CREDIT_BYTES
from protocol.messages import Agreed, Failure, Join, Leave, Message, Propose, Scope, Welcome
from protocol.plan import Plan, decode_plan, first_difference
from protocol.wire import Buffer

_LEDGER_ROUNDS = 256


@dataclass(slots=True)
class _Applicant:
    """Someone who joined a group that is not complete yet."""

    connection: int
    join: Join
    since: float

    @property
    def deadline(self) -> float:
        return self.since + self.join.timeout


@dataclass(slots=True)
class _Proposal:
    plan: Plan
    since: float


@dataclass(slots=True)
class _Group:
    """What control knows of one group. ``members`` is empty while it forms."""

    name: str
    world: int
    applicants: list[_Applicant] = field(default_factory=list)
    members: dict[int, Seat] = field(default_factory=dict)
    """Those who are still there, by rank."""
    names: tuple[str, ...] = ()
    epoch: int = 0
    timeout: float = 0.0
    plan: Plan | None = None
    proposals: dict[int, _Proposal] = field(default_factory=dict)
    rounds: int = 0
    broken: GradServerError | None = None
    ledger: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=_LEDGER_ROUNDS))

    @property
    def state(self) -> str:
        if not self.members:
            return "forming"
        return "broken" if self.broken else "active"

    def call(self, rank: int) -> str:
        return f"{self.names[rank]!r} (rank {rank})"

    def calls(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.call(rank) for rank in ranks)


class Control:
    """Groups and their members. Methods append commands and return orders for the data half."""

    def __init__(self, worlds: dict[str, int], credit: int) -> None:
        if credit < MIN_CREDIT_BYTES:
            raise InvalidArgumentError(f"a credit of {credit} bytes is too small: {MIN_CREDIT_BYTES} at least")
        for name, world in worlds.items():
            _check_world(world, f"group {name!r}")
        self.groups: dict[str, _Group] = {}
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
                case Propose():
                    return self._propose(connection, payloads[0], now, commands)
                case Leave(reason, failed):
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
        _check_length("the group's name", join.group, MAX_NAME_BYTES)
        group = self.groups.get(join.group)
        if group is None:
            group = self._new_group(join)
        _check_applicant(group, join, now)
        self.groups[join.group] = group
        group.applicants.append(_Applicant(connection, join, now))
        self._places[connection] = group.name
        commands.append(Log(f"group {group.name!r}: {join.name!r} joined ({len(group.applicants)} of {group.world})"))
        if len(group.applicants) < group.world:
            return []
        return [self._activate(group, commands)]

    def _new_group(self, join: Join) -> _Group:
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
        _check_world(world, f"group {join.group!r}")
        if len(self.groups) >= MAX_GROUPS:
            raise LimitExceededError(f"this coordinator already serves {MAX_GROUPS} groups")
        return _Group(join.group, world)

    def _activate(self, group: _Group, commands: list[Command]) -> Order:
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

    def _propose(self, connection: int, data: Buffer, now: float, commands: list[Command]) -> list[Order]:
        group, rank = self._seat(connection)
        if group.broken is not None:
            self._fail_proposal(group, rank, group.broken, commands)
            return []
        if rank in group.proposals:
            raise UnexpectedMessageError(f"{group.call(rank)} proposed a second plan before the first was settled")
        group.proposals[rank] = _Proposal(decode_plan(memoryview(data)), now)
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

    def _reject_minority(self, group: _Group, reference: int, commands: list[Command]) -> None:
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

    def _fail_proposal(self, group: _Group, rank: int, error: GradServerError, commands: list[Command]) -> None:
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
        if not group.members:
            del self.groups[name]
            commands.append(Log(f"group {name!r}: the last worker is gone, after {group.rounds} rounds"))
            return [CloseGroup(name)]
        commands.append(Log(f"group {name!r}: {group.call(rank)} {'left' if politely else 'was lost'} ({reason})"))
        kind, verb = (WorkerLeftError, "left") if politely else (WorkerLostError, "was lost")
        when = f" after round {group.rounds - 1}" if group.rounds else ""
        error = kind(
            f"{group.call(rank)} {verb}{when} and is needed to go on: {reason}",
            worker=group.names[rank],
            rank=rank,
        )
        self._break(group, error, commands)
        return [Depart(name, rank, error)]

    def _break(self, group: _Group, error: GradServerError, commands: list[Command]) -> None:
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
        return min((at for group in waiting for at in _deadlines(group)), default=None) if waiting else None

    def tick(self, now: float, commands: list[Command]) -> list[Order]:
        """Tell those whose time is up."""
        orders: list[Order] = []
        for group in list(self.groups.values()):
            for applicant in [a for a in group.applicants if a.deadline <= now]:
                error = _join_timeout(group, applicant)
                commands.append(Send(applicant.connection, Failure.of(error, Scope.CONNECTION)))
                commands.append(Close(applicant.connection))
                orders += self._gone(applicant.connection, "waited too long", False, commands)
            overdue = [p for p in group.proposals.values() if p.since + group.timeout <= now]
            if overdue:
                self._proposals_overdue(group, commands)
        return orders

    def _proposals_overdue(self, group: _Group, commands: list[Command]) -> None:
        missing = [rank for rank in group.members if rank not in group.proposals]
        error = DeadlineError(
            f"the plan of group {group.name!r} waited {group.timeout:g} s for {group.calls(missing)} to propose one",
            missing=tuple(group.call(rank) for rank in missing),
        )
        for rank in group.proposals:
            self._fail_proposal(group, rank, error, commands)
        group.proposals.clear()

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def _seat(self, connection: int) -> tuple[_Group, int]:
        name = self._places.get(connection)
        if name is not None:
            for rank, seat in self.groups[name].members.items():
                if seat.connection == connection:
                    return self.groups[name], rank
        raise UnexpectedMessageError("this message is for members of a group: join first")

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """The groups, as plain JSON values. Ages in seconds."""
        return {name: _describe(group, now) for name, group in self.groups.items()}

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


def _check_world(world: int, where: str) -> None:
    if not 1 <= world <= MAX_WORLD_SIZE:
        raise InvalidWorldSizeError(f"{where}: a world size is 1 to {MAX_WORLD_SIZE}, not {world}")


def _check_length(what: str, name: str, limit: int) -> None:
    length = len(name.encode(errors="replace"))
    if length > limit:
        raise InvalidArgumentError(f"{what} {name[:40]!r}… is {length} bytes long, the limit is {limit}")


def _check_applicant(group: _Group, join: Join, now: float) -> None:
    """Raise the error that keeps this applicant out, if there is one."""
    fair_share = (MAX_HEADER_BYTES - 2 * MAX_NAME_BYTES) // group.world - 5  # of a Welcome, with msgpack's own bytes
    _check_length(f"in a group of {group.world}, the worker's name", join.name, min(MAX_NAME_BYTES, fair_share))
    if join.world_size not in (0, group.world):
        raise InvalidWorldSizeError(
            f"{join.name!r} wants a world size of {join.world_size}, group {group.name!r} has {group.world}"
        )
    if group.members:
        why = f"it broke ({group.broken.message})" if group.broken else f"it is in round {group.rounds}"
        raise JoinRefusedError(
            f"group {group.name!r} is complete and {why}; {join.name!r} cannot be added. "
            f"A new group can form under this name when these have left: {group.calls(group.members)}"
        )
    if join.rank >= group.world:
        raise InvalidRankError(
            f"{join.name!r} wants rank {join.rank}, ranks of group {group.name!r} are 0 to {group.world - 1}"
        )
    for applicant in group.applicants:
        if join.rank >= 0 and applicant.join.rank == join.rank:
            raise JoinRefusedError(
                f"rank {join.rank} of group {group.name!r} is taken by {applicant.join.name!r}, "
                f"who has waited for {now - applicant.since:.1f} s"
            )


def _join_timeout(group: _Group, applicant: _Applicant) -> JoinTimeoutError:
    here = ", ".join(
        f"{a.join.name!r}" + (f" (rank {a.join.rank})" if a.join.rank >= 0 else "") for a in group.applicants
    )
    ranks = {a.join.rank for a in group.applicants if a.join.rank >= 0}
    unassigned = sum(a.join.rank < 0 for a in group.applicants)
    absent = [f"rank {rank}" for rank in range(group.world) if rank not in ranks]
    missing = group.world - len(group.applicants)
    if unassigned:
        which = f"{missing} of {', '.join(absent)}" if ranks else f"{missing} more, of any rank"
    else:
        which = ", ".join(absent)
    return JoinTimeoutError(
        f"group {group.name!r} has {len(group.applicants)} of {group.world} workers after "
        f"{applicant.join.timeout:g} s: {here} came; missing: {which}",
        missing=tuple(absent) if not unassigned else (which,),
    )


def _deadlines(group: _Group) -> Iterable[float]:
    for applicant in group.applicants:
        yield applicant.deadline
    for proposal in group.proposals.values():
        yield proposal.since + group.timeout


def _describe(group: _Group, now: float) -> dict[str, object]:
    waiting = [{"name": a.join.name, "rank": a.join.rank, "waits": round(now - a.since, 3)} for a in group.applicants]
    return {
        "state": group.state,
        "world_size": group.world,
        "epoch": group.epoch,
        "round": group.rounds,
        "plan": None if group.plan is None else {"buckets": len(group.plan.buckets), "bytes": group.plan.nbytes},
        "members": [{"rank": rank, "name": seat.name} for rank, seat in group.members.items()],
        "waiting": waiting,
        "broken": group.broken.message if group.broken else None,
        "last_round": asdict(group.ledger[-1]) if group.ledger else None,
    }
