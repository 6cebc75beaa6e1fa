"""The control half's tables: groups, those who wait to get in, and what to tell them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from gradserver.engine.events import RoundRecord, Seat
from protocol.errors import (
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
)
from protocol.limits import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_SHARDS, MAX_TOKEN, MAX_URL, MAX_WORLD_SIZE
from protocol.messages import Join
from protocol.plan import Plan
from protocol.shards import Table

_LEDGER_ROUNDS = 256
_BESIDE_NAMES = 2 * MAX_NAME_BYTES + MAX_TOKEN + MAX_SHARDS * (MAX_URL + 12)
"""Bytes of a Welcome that are not names, at most."""


@dataclass(slots=True)
class Applicant:
    """Someone who joined a group that is not complete yet."""

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


@dataclass(slots=True)
class Group:
    """What control knows of one group. ``members`` is empty while it forms."""

    name: str
    world: int
    applicants: list[Applicant] = field(default_factory=list)
    members: dict[int, Seat] = field(default_factory=dict)
    """Those who are still there, by rank."""
    names: tuple[str, ...] = ()
    epoch: int = 0
    timeout: float = 0.0
    plan: Plan | None = None
    proposals: dict[int, Proposal] = field(default_factory=dict)
    rounds: int = 0
    broken: GradServerError | None = None
    shards: tuple[int, ...] = ()
    """Connections of the data shards that it uses beside the coordinator's own."""
    urls: tuple[str, ...] = ()
    """Theirs."""
    tokens: tuple[str, ...] = ()
    """What members show there, by rank."""
    table: Table = field(init=False)
    unconfirmed: set[int] = field(default_factory=set)
    """Shards that have yet to say that they go by the plan which all have proposed."""
    busy_shards: int = 1
    """How many have a part in every round."""
    partial: dict[int, dict[int, RoundRecord]] = field(default_factory=dict)
    """Rounds that some shards are done with, by connection."""
    ledger: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=_LEDGER_ROUNDS))

    def __post_init__(self) -> None:
        self.table = Table(self.world)

    @property
    def state(self) -> str:
        """As the table of states calls it."""
        if not self.members:
            return "forming"
        return "broken" if self.broken else "active"

    def call(self, rank: int) -> str:
        """How to speak of a member."""
        return f"{self.names[rank]!r} (rank {rank})"

    def calls(self, ranks: Iterable[int]) -> str:
        """How to speak of several."""
        return ", ".join(self.call(rank) for rank in ranks)


def check_world(world: int, where: str) -> None:
    """InvalidWorldSizeError unless ``world`` is a number of workers that a group can have."""
    if not 1 <= world <= MAX_WORLD_SIZE:
        raise InvalidWorldSizeError(f"{where}: a world size is 1 to {MAX_WORLD_SIZE}, not {world}")


def check_name(what: str, name: str, limit: int) -> None:
    """InvalidArgumentError if ``name`` takes more than ``limit`` bytes, or could upset a terminal that shows it."""
    if not name or not name.isprintable():
        raise InvalidArgumentError(f"{what} is {name[:40]!r}, and must be printable text")
    length = len(name.encode(errors="replace"))
    if length > limit:
        raise InvalidArgumentError(f"{what} {name[:40]!r}… is {length} bytes long, the limit is {limit}")


def check_applicant(group: Group, join: Join, now: float) -> None:
    """Raise the error that keeps this applicant out, if there is one."""
    fair_share = (MAX_HEADER_BYTES - _BESIDE_NAMES) // group.world - 5  # of a Welcome, with msgpack's own bytes
    check_name(f"in a group of {group.world}, the worker's name", join.name, min(MAX_NAME_BYTES, fair_share))
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


def join_timeout(group: Group, applicant: Applicant) -> JoinTimeoutError:
    """What to tell an applicant whose patience has ended: who came, and who is missing."""
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


def deadlines(group: Group) -> Iterable[float]:
    """When somebody's patience in this group ends."""
    for applicant in group.applicants:
        yield applicant.deadline
    for proposal in group.proposals.values():
        yield proposal.since + group.timeout


def describe(group: Group, now: float) -> dict[str, object]:
    """The group, as plain JSON values. Ages in seconds."""
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
        "timeout": group.timeout,
    }
