"""The control half's tables: groups, those who wait to get in, and what to tell them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gradserver.engine.control.findings import Findings
from gradserver.engine.control.learner import Learner, Stage
from gradserver.engine.control.quota import Account
from gradserver.engine.control.turn import Turns
from gradserver.engine.effects import Effects
from gradserver.engine.journal_state import MAX_EPOCHS
from gradserver.engine.lease_table import Positions
from gradserver.engine.link import encode_order
from gradserver.engine.order_fields import Seat
from gradserver.engine.orders import RemoteOrder
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import RoundCompleted
from gradserver.engine.seats import Seats
from gradserver.protocol.errors import (
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    LeftOutError,
    LimitExceededError,
    UnexpectedMessageError,
)
from gradserver.protocol.limits import (
    MAX_GROUPS,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_ROUNDS_AHEAD,
    MAX_SHARDS,
    MAX_TOKEN,
    MAX_UNWRITTEN_ROUNDS,
    MAX_URL,
)
from gradserver.protocol.messages import Join, Membership, Ordered
from gradserver.protocol.messages.leases import Claim, Register
from gradserver.protocol.plan import Plan
from gradserver.protocol.ranges import Ranges
from gradserver.protocol.shards import Table

HERE: Final = 0
"""Source of reports of the coordinator's own data half, in the place of a connection: these have larger numbers."""
VACANT: Final = -1
"""Place of a data shard that is lost, in the place of its connection."""
_LEDGER_ROUNDS = 256
_SHOWN = ("round", "weights", "opened", "completed", "last", "cut")
"""What the status has of the last round."""
_BESIDE_NAMES = 2 * MAX_NAME_BYTES + MAX_TOKEN + MAX_SHARDS * (MAX_URL + 12)
"""Bytes of a Welcome that are not names, at most."""


MAX_REASON = 300
"""Characters of why somebody departed, of those that all names leave in a header."""
_MAX_TOLD = 4000
"""Bytes of what has changed in a membership, in which others' names may be."""
_MOST_CALLED = 16
"""Workers that are spoken of by name at once."""


class State(Enum):
    """State of a group; `gradserver.engine.control.machine` has the table of transitions."""

    FORMING = "forming"
    ACTIVE = "active"
    PAUSED = "paused"
    RECOVERING = "recovering"
    SUSPENDED = "suspended"
    BROKEN = "broken"
    ENDED = "ended"


@dataclass(slots=True)
class Applicant:
    """A worker that joined a group which is not complete yet."""

    connection: int
    join: Join
    since: float

    @property
    def deadline(self) -> float:
        """When its patience ends."""
        return self.since + self.join.timeout


@dataclass(slots=True)
class Proposal:
    """A plan that one member wants to exchange by."""

    plan: Plan
    since: float
    round: int = 0
    """The one that comes next, as the member knows."""
    beside: bool = False
    """Whether it is one more section of the plan that is in force."""
    dropped: frozenset[int] = frozenset()
    """Sections of that plan which are of no use any more at this member."""


@dataclass(slots=True)
class Unheeded:
    """An order that ``waiting`` shards do not go by yet. Then members hear ``news``, and ``seat``'s is let in."""

    waiting: set[int]
    news: Membership | None = None
    seat: int = -1


@dataclass(slots=True)
class Group:
    """What control knows of one group. ``members`` is empty while it forms. In elastic groups ranks here are seats."""

    name: str
    world: int
    """How many are, or may come to be, in it."""
    policy: Policy
    nonfinite: OnNonFinite = OnNonFinite.HALT
    """What becomes of gradients that are not finite."""
    found: Findings = field(default_factory=Findings)
    """How many of these there were."""
    applicants: list[Applicant] = field(default_factory=list)
    members: dict[int, Seat] = field(default_factory=dict)
    """Those who are still there, by rank."""
    seats: Seats = field(default_factory=lambda: Seats(()))
    epoch: int = 0
    founded: int = 0
    """The first epoch, by which data halves know the group."""
    founders: int = 0
    """How many seats there were then."""
    turns: Turns = field(default_factory=Turns)
    """Which module the open round is of, and which members ask that."""
    unheeded: deque[Unheeded] = field(default_factory=deque)
    """What shards elsewhere were told of who is there, and do not all go by yet."""
    held: RoundRecord | None = None
    """A round that is complete, and not over for members: while there is such, or too few are left."""
    held_again: bool = False
    """Whether some member may have heard before that this round is over. It may be in the next one."""
    learners: dict[int, Learner] = field(default_factory=dict)
    """Workers that join the running group, by seat."""
    first_rounds: dict[int, int] = field(default_factory=dict)
    """First round of each member that joined the running group, by seat."""
    queue: list[Applicant] = field(default_factory=list)
    """Applicants that wait for a free seat."""
    transfers: int = 0
    """States that were asked for so far."""
    in_vain: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Names of learners that the others waited for in vain: how often, and when that was the last time."""
    waits_again: float = -math.inf
    """When the others may wait for a learner once more, as they have waited for one in vain."""
    vacant: dict[int, int] = field(default_factory=dict)
    """Since which epoch seats are vacant."""
    donors: Counter[int] = field(default_factory=Counter)
    """Members that can send their state, and how often they have."""
    opens: float | None = None
    """When an elastic group begins, if no more come."""
    late: dict[int, set[int]] = field(default_factory=dict)
    """Those whom the open round was closed without, by its number."""
    paused: float | None = None
    """Since when too few are left."""
    restored: bool = False
    """It was begun by an earlier coordinator."""
    uncertain: bool = False
    """Its members may be in a later round than is written down: it was restored, and they have not said where it is."""
    own: int = 0
    """The first round of which nothing can be an earlier coordinator's."""
    owed_nothing: bool = False
    """It was restored, and what lossy codecs had kept back at the coordinator was not."""
    secret: str = ""
    """Of a durable group: from it follow its members' tokens."""
    away: dict[int, float] = field(default_factory=dict)
    """Members of a durable group without a connection, and until when they are waited for."""
    busy: dict[int, float] = field(default_factory=dict)
    """Those of them who should be back, and whose processes run, since when that is so."""
    news: deque[Membership] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))
    """Memberships that somebody may not have heard of: from that on which is in force."""
    told: tuple[int, int] = (-1, 0)
    """The last round that is over, and the epoch in force behind it, as they were written down."""
    recovering: bool = False
    """Whether data is finding out who holds which results."""
    version: int = 0
    """The number of that."""
    unaware: set[int] = field(default_factory=set)
    """Members that came back without knowing the plan that all have agreed on."""
    planned: int = 0
    """The first round of the plan."""
    timeout: float = 0.0
    """Seconds that the longest-waiting founder waits for others to come."""
    round_timeout: float = 0.0
    """Seconds that an exchange or a plan waits for a member that is alive."""
    plan: Plan | None = None
    proposed: Plan | None = None
    """What all have proposed, while shards have yet to confirm it."""
    proposals: dict[int, Proposal] = field(default_factory=dict)
    rounds: int = 0
    broken: GradServerError | None = None
    state: State = State.FORMING
    """As of the last event or rule that was dealt with."""
    ended: bool = False
    """True when the registry has forgotten the group."""
    shards: tuple[int, ...] = ()
    """Connections of the data shards that it uses beside the coordinator's own."""
    urls: tuple[str, ...] = ()
    """Theirs."""
    tokens: tuple[str, ...] = ()
    """What members show there, by rank."""
    lacking: set[int] = field(default_factory=set)
    """Which of them, counted from 0, are lost and need a replacement: `gradserver.engine.control.shard_replacement`."""
    lacking_since: float | None = None
    hire_at: float | None = None
    """When somebody is to be looked for."""
    caught_up: set[int] = field(default_factory=set)
    """Shards that know that all members have the round before."""
    standing: set[int] = field(default_factory=set)
    """Those that have told members what stands."""
    made: int = -1
    """The latest round of which some shard has not adopted all since the books were opened."""
    table: Table = field(init=False)
    unconfirmed: set[int] = field(default_factory=set)
    """Shards that have yet to say that they go by the plan which all have proposed."""
    busy_shards: Mapping[int, int] = field(default_factory=dict)
    """How many have a part in rounds of each section, by its number."""
    partial: dict[int, dict[int, RoundCompleted]] = field(default_factory=dict)
    """Rounds that some shards are done with, by connection."""
    positions: Positions = field(default_factory=Positions)
    asked: dict[tuple[str, int], tuple[Register | Claim, Ranges]] = field(default_factory=dict)
    """What members asked of data, by name and seat, that waits for a round to be over."""
    unsettled: deque[tuple[RoundRecord, bool]] = field(default_factory=deque)
    """Rounds that all shards are done with and that are not over, each with True if members were told that it is."""
    ledger: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=_LEDGER_ROUNDS))
    account: Account = field(default_factory=Account)
    """Its journal quota."""

    def __post_init__(self) -> None:
        self.table = Table(self.world)

    def present_state(self) -> State:
        """Tell the state from what is known of the group."""
        if self.ended:
            return State.ENDED
        if not self.begun:
            return State.FORMING
        if self.broken:
            return State.BROKEN
        if self.is_deserted:
            return State.SUSPENDED
        if self.recovering:
            return State.RECOVERING
        return State.ACTIVE if self.paused is None else State.PAUSED

    @property
    def is_deserted(self) -> bool:
        """True if all members are without a connection."""
        return bool(self.away) and len(self.away) == len(self.members)

    def order(self, order: RemoteOrder, effects: Effects, but: int | None = None) -> None:
        """Have all data shards obey ``order``, those elsewhere and the one `HERE`, ``but`` one of them."""
        for connection in self.shards:
            if connection not in (but, VACANT):
                effects.send(connection, Ordered(), (encode_order(order),))
        if but != HERE:
            effects.order(order)

    @property
    def pause_ends(self) -> float | None:
        """When members have waited long enough for others; None if they wait for nobody, or nobody is there."""
        return None if self.paused is None or self.is_deserted else self.paused + self.policy.patience(self.timeout)

    @property
    def due(self) -> int:
        """The latest round that members were told of: the present one, or the next, if the present is done again.

        Books can be opened when members have heard that a round is over, and some lack results of it. Then the group is
        in that round once more. A member goes on by itself as soon as it has them, before its shards have said so here.
        """
        return max(self.rounds, self.told[0] + 1)

    @property
    def latest(self) -> int:
        """The latest round that a member can be in."""
        if self.uncertain:
            return self.due + MAX_UNWRITTEN_ROUNDS
        # members begin the next round when the last results of all shards say so, and these say so here later
        return self.due + (MAX_ROUNDS_AHEAD if self.shards and not self.secret else 0)

    def check_round(self, number: int, what: str) -> None:
        """UnexpectedMessageError if no member can be in round ``number`` when it says ``what``."""
        if number > self.latest:
            raise UnexpectedMessageError(
                f"a {what} of round {number} in group {self.name!r}, of which {self.latest} is the latest round that "
                f"can have begun"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether anything of its plan travels with a loss."""
        return self.plan is not None and any(bucket.operation.is_lossy for bucket in self.plan.buckets)

    @property
    def late_are(self) -> str:
        """What becomes of what members give too late, in a Welcome's words; empty if all are waited for."""
        lateness = self.policy.lateness
        return "" if lateness is None else "keep" if lateness.keeps else "drop"

    @property
    def next_count(self) -> int:
        """Number of members, and of learners that contribute to the next round."""
        return len(self.members) + sum(one.is_coming for one in self.learners.values())

    @property
    def lacks_workers(self) -> bool:
        """True if fewer than the minimum contribute to the next round."""
        return self.next_count < self.policy.minimum

    @property
    def begun(self) -> bool:
        """Whether somebody has what it came to: a member, or who has just joined and contributes already."""
        return bool(self.contributors)

    @property
    def connections(self) -> list[int]:
        """Of all who are here."""
        here = [seat.connection for seat in self.members.values() if seat.connection >= 0]
        inside = here + [j.connection for j in self.learners.values()]
        return inside + [applicant.connection for applicant in (*self.applicants, *self.queue)]

    @property
    def contributors(self) -> list[int]:
        """Seats of members, and of those who have just joined and contribute already."""
        return [*self.members, *(seat for seat, one in self.learners.items() if one.stage is Stage.ENTERED)]

    @property
    def entering(self) -> list[int]:
        """Seats of those who contribute to the open round as their first one; members or not."""
        return sorted([*self.early, *(seat for seat, joiner in self.learners.items() if joiner.entered)])

    @property
    def early(self) -> tuple[int, ...]:
        """Those of them who are members: before their first round is over, as books were opened in it."""
        return tuple(sorted(seat for seat in self.members if self.first_rounds.get(seat, -1) >= self.rounds))

    def seat_in(self, entered: Mapping[int, Seat], number: int, epoch: int) -> str:
        """Those who contribute to round ``number`` as their first one are members from now on. Says so, for people."""
        self.members = dict(sorted({**self.members, **entered}.items()))
        self.first_rounds |= dict.fromkeys(entered, number)
        self.seats.reseat(tuple(self.members))
        self.epoch = epoch
        return f"{self.calls(entered)} joined in round {number}; {len(self.members)} workers go on"

    def membership(self, reason: str, lost: bool) -> Membership:
        """What members are told of who is there now."""
        first = max((self.first_rounds[seat] for seat in self.early), default=0)
        names, told = self.seats.present_names(), reason.encode(errors="replace")[:_MAX_TOLD].decode(errors="ignore")
        return Membership(self.epoch, self.seats.present, names, told, lost, self.early, first)

    def is_inside(self, seat: int) -> bool:
        """Whether what is there of ``seat`` may count: it is a member's, or of who was told that it contributes."""
        return seat in self.members or (seat in self.learners and self.learners[seat].entered)

    def connection_of(self, seat: int) -> int:
        """That of a member, or of who joins the running group."""
        occupant = self.members.get(seat) or self.learners[seat]
        return occupant.connection

    def seat_of(self, connection: int) -> int:
        """The seat of a member, or of who joins the running group; -1 if it has none."""
        for seats in (self.members, self.learners):
            for seat, occupant in seats.items():
                if occupant.connection == connection:
                    return seat
        return -1

    def validate(self) -> list[int]:
        """Raise AssertionError if an invariant does not hold. Return the connections of all workers that are here."""
        assert self.state is self.present_state(), f"{self.name} is stored as {self.state}"
        assert self.begun != bool(self.applicants), f"{self.name} is neither forming nor active"
        assert len(self.applicants) < self.world, f"{self.name} is complete and not active"
        assert set(self.proposals) <= set(self.members), f"{self.name} holds proposals of strangers"
        assert not (self.broken and self.proposals), f"{self.name} is broken and still collects proposals"
        assert self.away.keys() <= self.members.keys(), f"{self.name} waits for strangers"
        assert all(self.members[rank].connection < 0 for rank in self.away), f"{self.name} waits for who is here"
        connections = self.connections
        assert not self.learners.keys() & self.members.keys(), f"{self.name} has a member that joins"
        assert set(self.donors) <= set(self.members), f"{self.name} has donors that are no members"
        for joiner in self.learners.values():
            assert joiner.donor in {-1, *self.members}, f"{self.name} waits for a donor that is gone"
        assert len(set(connections)) == len(connections), f"{self.name} seats a connection twice"
        self.positions.validate()
        return connections

    def call(self, rank: int) -> str:
        """How to speak of a member."""
        return self.seats.call(rank)

    def calls(self, ranks: Iterable[int]) -> str:
        """How to speak of several."""
        called = [self.call(rank) for rank in ranks]
        more = f" and {len(called) - _MOST_CALLED} more" if len(called) > _MOST_CALLED else ""
        return ", ".join(called[:_MOST_CALLED]) + more


def new_group(join: Join, told: Policy | None, others: int, nonfinite: OnNonFinite) -> Group:
    """Make the group that ``join`` is the first to ask for, beside ``others``. ``told`` is what the coordinator was."""
    if told is not None and not _suits(join, told):
        raise InvalidWorldSizeError(
            f"{join.name!r} wants a world size of {join.world_size}, the coordinator was started with {told} "
            f"for group {join.group!r}"
        )
    if told is None and not join.world_size:
        raise InvalidWorldSizeError(
            f"nobody said how many workers group {join.group!r} has: give world_size= to connect (or WORLD_SIZE "
            f"in the environment), or --workers N to `gradserver serve`"
        )
    policy = told or Policy.of(join.world_size, join.group)
    if others >= MAX_GROUPS:
        raise LimitExceededError(f"this coordinator already serves {MAX_GROUPS} groups")
    return Group(join.group, policy.maximum, policy, nonfinite)


def _suits(join: Join, policy: Policy) -> bool:
    """Tell whether a group with this policy can have the world size that ``join`` asks for, if it asks for one."""
    return not join.world_size or policy.minimum <= join.world_size <= policy.maximum


def check_name(what: str, name: str, limit: int) -> None:
    """InvalidArgumentError if ``name`` takes more than ``limit`` bytes, or could upset a terminal that shows it."""
    if not name or not name.isprintable():
        raise InvalidArgumentError(f"{what} is {name[:40]!r}, and must be printable text")
    length = len(name.encode(errors="replace"))
    if length > limit:
        raise InvalidArgumentError(f"{what} {name[:40]!r}… is {length} bytes long, the limit is {limit}")


def check_applicant(group: Group, join: Join, now: float) -> None:
    """Raise the error that keeps this applicant out, if there is one."""
    policy = group.policy
    most = policy.maximum
    each = 8  # msgpack's own bytes, and those of a seat, twice
    fair_share = (MAX_HEADER_BYTES - _BESIDE_NAMES) // most - each  # of a Welcome, and of a Membership
    check_name(f"in a group of {most}, the worker's name", join.name, min(MAX_NAME_BYTES, fair_share))
    if not _suits(join, policy):
        raise InvalidWorldSizeError(
            f"{join.name!r} wants a world size of {join.world_size}, group {group.name!r} has {policy}"
        )
    if group.begun and (policy.needs_all or group.broken is not None):
        why = f"it broke ({group.broken.message})" if group.broken else f"it is in round {group.rounds}"
        if group.is_deserted:
            why += " and waits for its workers to come back"
        state = "elastic, has begun," if policy.is_elastic else "complete"
        raise JoinRefusedError(
            f"group {group.name!r} is {state} and {why}; {join.name!r} cannot be added. "
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


def join_timeout(group: Group, applicant: Applicant) -> JoinTimeoutError:
    """What to tell an applicant whose patience has ended: who came, and who is missing."""
    here = ", ".join(
        f"{a.join.name!r}" + (f" (rank {a.join.rank})" if a.join.rank >= 0 else "") for a in group.applicants
    )
    if group.policy.is_elastic:
        return _too_few_joined(group, applicant, here)
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


def _too_few_joined(group: Group, applicant: Applicant, here: str) -> JoinTimeoutError:
    least = group.policy.minimum
    missing = f"{least - len(group.applicants)} more, of any rank"
    return JoinTimeoutError(
        f"group {group.name!r} has {len(group.applicants)} of {group.policy} workers after "
        f"{applicant.join.timeout:g} s: {here} came; missing: {missing}",
        missing=(missing,),
    )


def left_out(group: Group, seat: int, reason: str) -> LeftOutError:
    """What to tell a member that the others go on without, or cannot."""
    return group.seats.left_out(seat, f"group {group.name!r} in round {group.rounds}: {reason}")


def announce(group: Group, what: str, lost: bool, effects: Effects) -> None:
    """The present membership is a new one: members hear of it when all shards go by it, or when they come back."""
    effects.log(f"group {group.name!r}: {what}, epoch {group.epoch}", warning=lost)
    news = group.membership(what, lost)
    group.unheeded.append(Unheeded(set(group.shards), news))
    group.news.append(news)


def describe(group: Group, now: float) -> dict[str, object]:
    """The group, as plain JSON values. Ages in seconds."""
    applicants = [*group.applicants, *group.queue]
    waiting = [{"name": a.join.name, "rank": a.join.rank, "waits": round(now - a.since, 3)} for a in applicants]
    return {
        "state": group.state.value,
        "world_size": len(group.members) if group.begun and group.policy.is_elastic else group.policy.maximum,
        "elastic": [group.policy.minimum, group.policy.maximum] if group.policy.is_elastic else None,
        "epoch": group.epoch,
        "round": group.rounds,
        "plan": None if group.plan is None else {"buckets": len(group.plan.buckets), "bytes": group.plan.nbytes},
        "members": [_member(group, seat) for seat in group.members],
        "waiting": waiting,
        "joining": [joiner.describe(group.seats.rank(seat)) for seat, joiner in group.learners.items()],
        "broken": group.broken.message if group.broken else None,
        "data": group.positions.snapshot(),
        "last_round": _record(group.ledger[-1]) if group.ledger else None,
        "timeout": group.timeout,
        "round_timeout": group.round_timeout,
        "nonfinite": {"policy": str(group.nonfinite), **group.found.describe(group.seats.names)},
    }


def _record(record: RoundRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _SHOWN}


def _member(group: Group, seat: int) -> dict[str, object]:
    return {"rank": group.seats.rank(seat), "name": group.seats.names[seat], "seat": seat}
