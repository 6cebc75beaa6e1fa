"""Records of the journal: their kinds, and each as bytes.

A record states one decision or one happening. A decision is written before any member is told of it: the command that
asks for it stands before those that tell. A `Round` is written behind its results. Bodies are msgpack arrays of fields,
numbers by member id are packed columns. What is written stays readable: a kind with other fields gets another number,
and no number is used twice.

A kind of record is declared once, as a class: `kind` gives it its number, and the type of each field has its check
(`gradserver.engine.declared`). `gradserver.engine.journal_state` is the state that many records give.

Times are those of the coordinator's own clock, in seconds. `Start` gives the time of day then.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple, Self

import msgpack

from gradserver.engine.data_records import COMMITTED, Committed
from gradserver.engine.declared import CODES, KINDS, Field, Kind, kind
from gradserver.engine.policy import OnNonFinite, OnOutlier
from gradserver.protocol.audits import TOGETHER, relative
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief, integer, listed, number, text, unpack
from gradserver.protocol.declared import nested, several
from gradserver.protocol.errors import LimitExceededError, MalformedMessageError
from gradserver.protocol.fields import Count, EncodedPlan, Flag, Grain, MeanRule, Ranks
from gradserver.protocol.limits import (
    MAX_BUCKETS,
    MAX_COUNTER,
    MAX_DATA,
    MAX_NAME_BYTES,
    MAX_ORDER_BYTES,
    MAX_RATE,
    MAX_SHARDS,
    MAX_STALENESS,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.means import PLAIN, known_mean
from gradserver.protocol.offers import OneOffer, PlaneName

MAX_BODY_BYTES: Final = MAX_ORDER_BYTES
"""One record without its frame: a plan, at most."""
_MAX_CUT: Final = 1024
_MAX_COMPARED: Final = TOGETHER * MAX_BUCKETS
"""Places of a record that say that a member was cut off, or not finite; it leaves out the others."""
_MAX_SECONDS: Final = 1e12
"""Limit of any clock."""


# ── fields ────────────────────────────────────────────────────────────────────────────────────────────

_count = integer(0, MAX_COUNTER)
_name = text(MAX_NAME_BYTES)
_text = text(MAX_TEXT)
_clock = number(-_MAX_SECONDS, _MAX_SECONDS)
_weight = number(0.0, MAX_WEIGHT)
_rank = integer(0, MAX_WORLD_SIZE - 1)


def _cut(value: str) -> str:
    return value[:MAX_TEXT]


def _members(value: Any) -> tuple[tuple[int, str], ...]:
    if type(value) is not list or len(value) > MAX_WORLD_SIZE or any(type(m) is not list or len(m) != 2 for m in value):
        raise MalformedMessageError(f"expected the members of a group, got {brief(value)}")
    return tuple((_rank(member_id), _name(name)) for member_id, name in value)


def known_policy(value: Any) -> OnNonFinite:
    """The check of what becomes of gradients that are not finite."""
    if value not in tuple(OnNonFinite):
        raise MalformedMessageError(f"expected what becomes of gradients that are not finite, got {brief(value)}")
    return OnNonFinite(value)


def _known_outlier(value: Any) -> OnOutlier:
    """The check of what becomes of members that are far off."""
    if value not in tuple(OnOutlier):
        raise MalformedMessageError(f"expected what becomes of members that are far off, got {brief(value)}")
    return OnOutlier(value)


Name = Annotated[str, Field(_name, _cut)]
Text = Annotated[str, Field(_text, _cut)]
Clock = Annotated[float, Field(_clock)]
Members = Annotated[tuple[tuple[int, str], ...], Field(_members)]


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────────


class Compared(NamedTuple):
    """Difference of two members' contributions to a bucket, which are of the same samples (`protocol.audits`).

    Attributes:
        member_id: the holder, or a witness.
        other: another witness.
        part: the bucket.
        difference: squared norm of the difference.
        size: mean of the two squared norms.
        limit: relative difference up to which they agree; 0 in reports of data halves.
    """

    member_id: int
    other: int
    part: int
    difference: float
    size: float
    limit: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference, relative to the root of ``size``."""
        return relative(self.difference, self.size)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round. Times are the clock of the coordinator's loop, in seconds. Tuples are by member id.

    Attributes:
        round: its number.
        weights: weight of each contribution; 0 for a member that was left out.
        opened: time of the first contribution.
        completed: time of the last result.
        last: member id of the last contribution, which the round waited for.
        arrivals: times of each member's first slice, and of the last one that waited for no result of another member.
            The latter is None if it is not known.
        inputs: the digest of what was summed of each member's contribution, over all buckets; empty if none was made.
        results: the digest of each bucket's result, by its place in the section; empty if none was made.
        cut: for members that departed in this round, (member id, bucket, number of slices that counted).
        section: the number of the section of the plan that was exchanged.
        nonfinite: for contributions that were not finite, and did not count, (member id, bucket, number of slices, the
            first element that is not finite). The element is -1 if it is not known any more.
        compared: for an audited round, the differences of contributions to the same samples.

    A member that was not there has weight 0, and arrived when the round was opened.
    """

    round: int
    weights: tuple[float, ...]
    opened: float
    completed: float
    last: int
    arrivals: tuple[tuple[float, float | None], ...] = ()
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    cut: tuple[tuple[int, int, int], ...] = ()
    section: int = 0
    nonfinite: tuple[tuple[int, int, int, int], ...] = ()
    compared: tuple[Compared, ...] = ()

    def without_digests(self) -> RoundRecord:
        """Return the same, to be kept in memory. `dataclasses.replace` takes four times as long, in every round."""
        before = self.round, self.weights, self.opened, self.completed, self.last, self.arrivals
        return RoundRecord(*before, (), (), self.cut, self.section, self.nonfinite, self.compared)

    def moved(self, seconds: float) -> RoundRecord:
        """Return the same round, so much later."""
        arrivals = tuple((one + seconds, None if last is None else last + seconds) for one, last in self.arrivals)
        opened, completed = self.opened + seconds, self.completed + seconds
        return replace(self, opened=opened, completed=completed, arrivals=arrivals)


def column(code: str, values: Sequence[Any]) -> bytes:
    """Numbers of one type, little-endian; ``code`` is that of `struct`."""
    return struct.pack(f"<{len(values)}{code}", *values)


def uncolumn(code: str, value: Any, most: int) -> tuple[Any, ...]:
    """The at most so many numbers of a `column`."""
    size = struct.calcsize(f"<{code}")
    if type(value) is not bytes or len(value) % size or len(value) > most * size:
        raise MalformedMessageError(f"expected at most {most} numbers, got {brief(value)}")
    return struct.unpack(f"<{len(value) // size}{code}", value)


def pack_round(record: RoundRecord) -> list[Any]:
    """A round's fields. Times are relative to when it was opened, and take four bytes each."""
    moments = (moment for arrival in record.arrivals for moment in arrival)
    lags = [math.nan if moment is None else moment - record.opened for moment in moments]
    return [
        record.round,
        column("d", record.weights),
        record.completed - record.opened,
        record.last,
        column("f", lags),
        column("Q", record.inputs),
        column("Q", record.results),
        column("Q", [value for place in record.cut[:_MAX_CUT] for value in place]),
        *([record.section] if record.section else ()),
        *([column("q", [value for one in record.nonfinite[:_MAX_CUT] for value in one])] if record.nonfinite else ()),
        *([_pack_compared(record.compared[:_MAX_COMPARED])] if record.compared else ()),
    ]


def unpack_round(value: Any, opened: float | None = None, completed: float | None = None) -> RoundRecord:
    """The record of these fields, if it was ``opened`` or ``completed`` then; MalformedMessageError if it is none."""
    if type(value) is not list or not 8 <= len(value) <= 11:
        raise MalformedMessageError(f"expected a round, got {brief(value)}")
    round_number, packed, took, last, lags, inputs, results, cut, *more = value
    section, nonfinite, compared = ([one for one in more if type(one) is kind] for kind in (int, bytes, list))
    if len(section) + len(nonfinite) + len(compared) < len(more):
        raise MalformedMessageError(f"expected a round, got {brief(value)}")
    weights = tuple(_weight(weight) for weight in uncolumn("d", packed, MAX_WORLD_SIZE))
    seconds = _took(took)
    begun = opened if opened is not None else (completed or 0.0) - seconds
    found = uncolumn("f", lags, 2 * MAX_WORLD_SIZE)
    firsts = [begun + _lag(lag) for lag in found[::2]]
    lasts = [None if math.isnan(lag) else begun + _lag(lag) for lag in found[1::2]]
    record = RoundRecord(
        _count(round_number),
        weights,
        begun,
        begun + seconds if completed is None else completed,
        _rank(last),
        tuple(zip(firsts, lasts, strict=False)),
        uncolumn("Q", inputs, MAX_WORLD_SIZE),
        uncolumn("Q", results, MAX_BUCKETS),
        _cuts(uncolumn("Q", cut, 3 * _MAX_CUT)),
        section=_count(section[0]) if section else 0,
        nonfinite=_not_finite(uncolumn("q", nonfinite[0], 4 * _MAX_CUT)) if nonfinite else (),
        compared=_compared(compared[0]) if compared else (),
    )
    world = len(weights)
    spoken_of = {record.last, *(member_id for member_id, _, _ in record.cut), *(one[0] for one in record.nonfinite)}
    spoken_of.update(member_id for one in record.compared for member_id in (one.member_id, one.other))
    if len(found) not in (0, 2 * world) or len(record.inputs) not in (0, world) or max(spoken_of) >= world:
        raise MalformedMessageError("a round of which the numbers by rank do not fit together")
    return record


def _cuts(values: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    if len(values) % 3:
        raise MalformedMessageError("a round of which the departed do not fit together")
    return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


def _pack_compared(compared: Sequence[Compared]) -> list[bytes]:
    ids = [number for one in compared for number in one[:3]]
    return [column("q", ids), column("d", [number for one in compared for number in one[3:]])]


def _compared(value: Any) -> tuple[Compared, ...]:
    if len(value) != 2:
        raise MalformedMessageError("a round of which what was compared is not complete")
    ids, sizes = (uncolumn(code, one, 3 * _MAX_COMPARED) for code, one in zip("qd", value, strict=True))
    if len(ids) != len(sizes) or len(ids) % 3 or not all(one >= 0 for one in (*ids, *sizes)):
        raise MalformedMessageError("a round of which what was compared does not fit together")
    columns = zip(ids[::3], ids[1::3], ids[2::3], sizes[::3], sizes[1::3], sizes[2::3], strict=True)
    return tuple(Compared(*one) for one in columns)


def _not_finite(values: Sequence[int]) -> tuple[tuple[int, int, int, int], ...]:
    found = tuple(zip(values[::4], values[1::4], values[2::4], values[3::4], strict=False))
    if len(values) % 4 or any(
        min(member_id, part, slices - 1, first + 1) < 0 for member_id, part, slices, first in found
    ):
        raise MalformedMessageError("a round of which what was not finite does not fit together")
    return found


_took = number(0.0, MAX_TIMEOUT)
_lag = number(-MAX_TIMEOUT, MAX_TIMEOUT)


# ── kinds ─────────────────────────────────────────────────────────────────────────────────────────────


@kind(1)
@dataclass(frozen=True, slots=True)
class Start(Kind):
    """A coordinator began to write. ``incarnation`` counts them; ``clock`` showed this at ``wall``, since 1970."""

    incarnation: Count
    version: Text
    pid: Count
    wall: Clock
    clock: Clock


@kind(2)
@dataclass(frozen=True, slots=True)
class Snapshot(Kind):
    """The next ``restated`` records are what still matters of all that was written before."""

    restated: Count


@kind(3)
@dataclass(frozen=True, slots=True)
class Gap(Kind):
    """The disk has not taken ``lost`` records since the clock showed ``since``; ``reason`` says why."""

    lost: Count
    since: Clock
    reason: Text


@kind(4)
@dataclass(frozen=True, slots=True)
class Group(Kind):
    """A group is complete. ``timeout`` in seconds."""

    group: Name
    world: Annotated[int, Field(integer(1, MAX_WORLD_SIZE))]
    timeout: Annotated[float, Field(number(0.0, MAX_TIMEOUT))]


@kind(5)
@dataclass(frozen=True, slots=True)
class Epoch(Kind):
    """The members of the group from ``round`` on: names by member id. ``reason`` says what has changed."""

    group: Name
    epoch: Count
    round: Count
    members: Members
    reason: Text


@kind(6)
@dataclass(frozen=True, slots=True)
class Plan(Kind):
    """From ``round`` on buckets are those of this plan."""

    group: Name
    epoch: Count
    round: Count
    plan: EncodedPlan


@kind(7)
@dataclass(frozen=True, slots=True)
class Round(Kind):
    """A round is complete, and data ``used_up`` by it."""

    group: str
    epoch: int
    record: RoundRecord
    used_up: tuple[Committed, ...] = ()

    def pack(self) -> list[Any]:
        """Return its fields, as they are written."""
        packed = [self.group, self.epoch, self.record.opened, *pack_round(self.record)]
        if self.used_up:
            packed.append(COMMITTED.write(self.used_up))
        return packed

    @classmethod
    def unpack(cls, values: list[Any]) -> Self:
        """Make a record of what was read; MalformedMessageError says why there is none."""
        if len(values) < 3:
            raise MalformedMessageError(f"a Round of {len(values)} fields")
        group, epoch, opened, *rest = values
        used_up = COMMITTED.check(rest.pop()) if len(rest) > 8 and type(rest[-1]) is list else ()
        return cls(_name(group), _count(epoch), unpack_round(rest, _clock(opened)), used_up)


@kind(15)
@dataclass(frozen=True, slots=True)
class Cut(Kind):
    """A round goes on without the slices that late members have not given to it yet. ``reason`` says how many."""

    group: Name
    epoch: Count
    round: Count
    member_ids: Ranks
    reason: Text


@kind(8)
@dataclass(frozen=True, slots=True)
class Halt(Kind):
    """In ``round`` the group broke, and exchanges no bucket any more. ``error`` is a class's name."""

    group: Name
    epoch: Count
    round: Count
    error: Text
    reason: Text


@kind(9)
@dataclass(frozen=True, slots=True)
class Closed(Kind):
    """The group has ended after as many ``rounds``."""

    group: Name
    epoch: Count
    rounds: Count
    reason: Text


@kind(12)
@dataclass(frozen=True, slots=True)
class Durable(Kind):
    """The group survives its coordinator: from ``secret`` follow the tokens by which its members are known.

    ``rates`` are those of its data shards, by which slices are shared; none if there is one only. The size of slices
    follows from the ``grain``, and ``credit`` is what each member may have in flight. ``keys`` are those of the
    founders' Joins, by member id; empty where one has none.
    """

    group: Name
    secret: Annotated[str, Field(text(MAX_TOKEN))]
    rates: Annotated[tuple[float, ...], Field(listed(number(0.0, MAX_RATE), MAX_SHARDS))] = ()
    grain: Grain = 0
    credit: Count = 0
    keys: Annotated[tuple[str, ...], Field(listed(text(MAX_TOKEN), MAX_WORLD_SIZE))] = ()


@kind(13)
@dataclass(frozen=True, slots=True)
class Boundary(Kind):
    """Behind ``round`` the membership ``epoch`` is in force, another than when the round was complete.

    At the beginning of a later file: another than behind the round before.
    """

    group: Name
    round: Count
    epoch: Count


@kind(16)
@dataclass(frozen=True, slots=True)
class Entered(Kind):
    """New members, by member id, contribute to ``round`` as their first one; written when that changes."""

    group: Name
    round: Count
    members: Members


@kind(14)
@dataclass(frozen=True, slots=True)
class Reset(Kind):
    """From ``round`` on, lossy codecs owe nothing: what they had kept back at the coordinator was lost with it."""

    group: Name
    round: Count


@kind(17)
@dataclass(frozen=True, slots=True)
class Handling(Kind):
    """Policies of a group about gradients: those that are not finite, the mean, and members that are far off.

    Without it: halt, plain, and report.
    """

    group: Name
    nonfinite: Annotated[OnNonFinite, Field(known_policy)]
    mean: MeanRule = PLAIN
    outliers: Annotated[OnOutlier, Field(_known_outlier)] = OnOutlier.REPORT

    @classmethod
    def unpack(cls, values: list[Any]) -> Self:
        """Make a record of what was read. Earlier versions wrote no mean, or no policy about outliers."""
        if not 2 <= len(values) <= 4:
            raise MalformedMessageError(f"a Handling of {len(values)} fields")
        given = [*values, *("plain", "report")[len(values) - 2 :]]
        return cls(_name(given[0]), known_policy(given[1]), known_mean(given[2]), _known_outlier(given[3]))


@kind(18)
@dataclass(frozen=True, slots=True)
class Spent(Kind):
    """The group has used up ``nbytes`` of its journal quota; it may have ended.

    Written when that has changed by much, for a later coordinator.
    """

    group: Name
    nbytes: Count


@kind(19)
@dataclass(frozen=True, slots=True)
class Stragglers(Kind):
    """Rounds of a durable group are closed without late members. Without this record it waits for all of them.

    ``keeps`` says whether a late member adds what did not count to what it gives next.
    """

    group: Name
    keeps: Flag


@kind(22)
@dataclass(frozen=True, slots=True)
class Moded(Kind):
    """Mode of the group's rounds: "bounded" or "async". Without this record it is "sync".

    ``staleness`` is the largest one that a contribution may have, and -1 for no limit.
    """

    group: Name
    mode: Text
    staleness: Annotated[int, Field(integer(-1, MAX_STALENESS))]
    damping: Text


class Computed(NamedTuple):
    """A member's contribution: the number of updates that its weights had when it computed it."""

    member_id: Annotated[int, Field(_rank)]
    version: Count


@kind(23)
@dataclass(frozen=True, slots=True)
class Begun(Kind):
    """A round of ``section`` begins with contributions of the ``cohort``, and goes on without the ``others``.

    The section is -1 if it is not known: an earlier coordinator has begun the round, and could not write that.
    """

    group: Name
    epoch: Count
    round: Count
    cohort: Annotated[tuple[Computed, ...], several(nested(Computed), MAX_WORLD_SIZE)]
    others: Ranks
    section: Annotated[int, Field(integer(-1, MAX_COUNTER))] = 0


@kind(25)
@dataclass(frozen=True, slots=True)
class Outlier(Kind):
    """As of ``round`` the contributions of a member are far off; or they are in line again, and not ``off``.

    ``ratio`` is that of its norm to the median, and ``cosine`` the one to the mean of the others, averaged over some
    rounds. If it was ``evicted``, that is its name.
    """

    group: Name
    epoch: Count
    round: Count
    member_id: Annotated[int, Field(_rank)]
    ratio: Annotated[float, Field(number(0.0, 1e30))]
    cosine: Annotated[float, Field(number(-1.0, 1.0))]
    off: Flag
    evicted: Text

    def told(self, name: str) -> str:
        """Tell people what it says of the member with this ``name``."""
        if not self.off:
            return f"as of round {self.round}: the gradients of {name} are in line again"
        becomes = ", and the others go on without it" if self.evicted else ""
        norm = f"norm {self.ratio:.3g} times the median, " if self.ratio > 3 else ""
        figures = f"{norm}cosine {self.cosine:.2f} to the mean of the others"
        return f"as of round {self.round}: the gradients of {name} are far off{becomes}: {figures}"


@kind(24)
@dataclass(frozen=True, slots=True)
class Commits(Kind):
    """Modules of a durable group are wrapped with a commit, as its founders were told to."""

    group: Name


@kind(21)
@dataclass(frozen=True, slots=True)
class Subgroup(Kind):
    """The group is a sub-group of these members of ``parent``. The place of an id there is the id in the sub-group."""

    group: Name
    parent: Name
    member_ids: Ranks


class Told(NamedTuple):
    """The offer of the member with this id, as it said when it joined."""

    member_id: Annotated[int, Field(_rank)]
    offer: OneOffer


@kind(20)
@dataclass(frozen=True, slots=True)
class Chosen(Kind):
    """From ``epoch`` on gradients travel on ``plane``, for this ``reason``, which may be that it is ``demanded``.

    ``offers`` are those of members of which no record tells yet.
    """

    group: Name
    epoch: Count
    plane: PlaneName
    reason: Text
    demanded: Flag
    offers: Annotated[tuple[Told, ...], several(nested(Told), MAX_WORLD_SIZE)] = ()


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────

_packb = msgpack.Packer(autoreset=True, unicode_errors="replace").pack


def encode(record: Kind) -> tuple[int, bytes]:
    """Return the number of its kind, and its body.

    Raises:
        MalformedMessageError: `decode` would not take it, and what stands behind it in a file could not be read.
        LimitExceededError: it is longer than a record may be.
    """
    try:
        code, body = _encode(record)
    except (OverflowError, TypeError, ValueError, struct.error) as error:
        raise MalformedMessageError(f"a {type(record).__name__} that cannot be encoded: {error}") from error
    if type(record) is not Round or record.used_up or not _is_plain(record.epoch, record.record, body):
        decode(code, body)
    return code, body


def size_of(record: Kind) -> int:
    """Return the size of its body; 0 if it cannot be encoded, and so is not written."""
    try:
        return len(_encode(record)[1])
    except (OverflowError, TypeError, ValueError, struct.error):
        return 0


def _is_plain(epoch: int, record: RoundRecord, body: bytes) -> bool:
    """Tell whether a round's record is certain to be readable: there is one in each round; few need a closer look."""
    weights = record.weights
    return (
        max(epoch, record.round) <= MAX_COUNTER
        and 0 <= record.last < len(weights) <= MAX_WORLD_SIZE
        and min(weights) >= 0.0
        and max(weights) <= MAX_WEIGHT
        and 0.0 <= record.completed - record.opened <= _SOON
        and not record.cut
        and not record.nonfinite
        and len(body) <= MAX_BODY_BYTES
    )


_SOON: Final = 3600.0
"""Seconds within which a member that arrives does so."""


def _encode(record: Kind) -> tuple[int, bytes]:
    body: bytes = _packb(record.pack())
    return CODES[type(record)], body


def decode(code: int, body: Buffer) -> Kind:
    """The record of this kind; MalformedMessageError or LimitExceededError says why there is none."""
    values = _unpack(body)
    if code not in KINDS:
        raise MalformedMessageError(f"there is no kind of record {code}: a later version may have written it")
    return KINDS[code].unpack(values)


def _unpack(body: Buffer) -> list[Any]:
    if len(body) > MAX_BODY_BYTES:
        raise LimitExceededError(f"a record of {len(body)} bytes, the limit is {MAX_BODY_BYTES}")
    return unpack(body, "no record", MAX_DATA * MAX_WORLD_SIZE, maps=False)
