"""Orders and reports as bytes: what control and a data half elsewhere tell each other.

One msgpack array each: [name, field, field, …]. Reports come from whoever has enlisted as a data shard, so every
value is checked before anything is built from it, and reading takes memory in proportion to what came. Times are
durations: each side has a clock of its own.
"""

from __future__ import annotations

from typing import Any

import msgpack

from gradserver.engine.events import (
    Absent,
    Admit,
    Behind,
    CaughtUp,
    CloseGroup,
    CutRound,
    Depart,
    Detach,
    Excuse,
    Expect,
    Halt,
    Halted,
    Heeded,
    Late,
    OpenGroup,
    Planned,
    Proceed,
    Recover,
    Recovered,
    RemoteOrder,
    Reseat,
    RoundCompleted,
    Seat,
    SetPlan,
    StateComes,
)
from gradserver.engine.policy import Lateness
from gradserver.engine.records import known_policy, pack_round, unpack_round
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief, facts, integer, listed, number, text, unpack
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, MalformedMessageError
from gradserver.protocol.limits import (
    MAX_COUNTER,
    MAX_LIST,
    MAX_NAME_BYTES,
    MAX_ORDER_BYTES,
    MAX_RATE,
    MAX_REPORT_BYTES,
    MAX_SHARDS,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.messages import Failure, Scope
from gradserver.protocol.plan import decode_plan

RemoteReport = RoundCompleted | Halted | Planned | Absent | Heeded | Behind | Late | StateComes | CaughtUp | Recovered

_name = text(MAX_NAME_BYTES)
_names = listed(_name, MAX_WORLD_SIZE)
_text = text(MAX_TEXT)
_token = text(MAX_TOKEN)
_tokens = listed(_token, MAX_WORLD_SIZE)
_count = integer(0, MAX_COUNTER)
_rank = integer(0, MAX_WORLD_SIZE - 1)
_ranks = listed(_rank, MAX_WORLD_SIZE)
_further_shard = integer(1, MAX_SHARDS - 1)
_seconds = number(0.0, MAX_TIMEOUT)
_rates = listed(number(0.0, MAX_RATE), MAX_SHARDS)


def encode_order(order: RemoteOrder) -> bytes:
    """``order`` as it goes to a data shard elsewhere, whose seats nobody has taken yet."""
    match order:
        case OpenGroup(group, epoch, seats, credit, timeout, rates, shard, tokens, elastic, digests, backlog):
            late = None if order.lateness is None else _pack_lateness(order.lateness)
            known = group, epoch, [seat.name for seat in seats], credit, timeout, rates, shard, tokens
            return _pack("open", *known, elastic, digests, backlog, late, order.durable, str(order.nonfinite))
        case SetPlan(group, plan, first_round):
            return _pack("plan", group, plan.encoded, first_round)
        case Depart(group, rank, error, epoch, ended):
            return _pack("depart", group, rank, _pack_error(error), epoch, ended)
        case CloseGroup(group):
            return _pack("close", group)
        case Halt(group, error, buckets_only):
            return _pack("halt", group, _pack_error(error), buckets_only)
        case Admit(group, seat, occupant, token):
            return _pack("admit", group, seat, occupant.name, token)
        case Expect(group, joiners, first_round, listen, transfers):
            return _pack("expect", group, joiners, first_round, listen, transfers)
        case Excuse(group, seat):
            return _pack("excuse", group, seat)
        case Reseat(group, epoch, present):
            return _pack("reseat", group, epoch, present)
        case CutRound(group, number, late):
            return _pack("cut", group, number, late)
        case Detach(group, seat):
            return _pack("detach", group, seat)
        case Recover(group, version, number, latest, own):
            return _pack("recover", group, version, number, latest, own)
        case Proceed(group):
            return _pack("proceed", group)


def decode_order(data: Buffer) -> RemoteOrder:
    """The order in ``data``; a ProtocolError says why there is none."""
    match _unpack(data, MAX_ORDER_BYTES):
        case [
            "open",
            group,
            epoch,
            names,
            credit,
            timeout,
            rates,
            shard,
            tokens,
            bool(elastic),
            bool(digests),
            unread,
            late,
            bool(durable),
            nonfinite,
        ]:
            seats = tuple(Seat(-1, name) for name in _names(names))
            compared = _rates(rates)
            shown = _tokens(tokens)
            place = _further_shard(shard)
            if not seats or len(shown) != len(seats) or place >= len(compared) or not any(compared):
                raise MalformedMessageError("an order to open a group that does not fit together")
            known = _name(group), _count(epoch), seats, _count(credit), _seconds(timeout)
            group_is = elastic, digests, _count(unread), _lateness(late), durable
            return OpenGroup(*known, compared, place, shown, *group_is, nonfinite=known_policy(nonfinite))
        case ["plan", group, bytes(plan), first_round]:
            return SetPlan(_name(group), decode_plan(plan), _count(first_round))
        case ["depart", group, rank, error, epoch, bool(ended)]:
            return Depart(_name(group), _rank(rank), _error(error), _count(epoch), ended)
        case ["close", group]:
            return CloseGroup(_name(group))
        case ["halt", group, error, bool(buckets_only)]:
            return Halt(_name(group), _error(error), buckets_only)
        case ["admit", group, seat, name, token]:
            return Admit(_name(group), _rank(seat), Seat(-1, _name(name)), _token(token))
        case ["expect", group, joiners, first_round, bool(listen), list(transfers)]:
            if len(transfers) not in (0, len(joiners)):
                raise MalformedMessageError("an order to expect joiners that does not fit together")
            numbers = tuple(_count(number) for number in transfers)
            return Expect(_name(group), _ranks(joiners), _count(first_round), listen, numbers)
        case ["excuse", group, seat]:
            return Excuse(_name(group), _rank(seat))
        case ["reseat", group, epoch, present]:
            return Reseat(_name(group), _count(epoch), _ranks(present))
        case ["cut", group, number, late]:
            return CutRound(_name(group), _count(number), _ranks(late))
        case ["detach", group, seat]:
            return Detach(_name(group), _rank(seat))
        case ["recover", group, version, number, latest, own]:
            return Recover(_name(group), _count(version), _count(number), _count(latest), _count(own))
        case ["proceed", group]:
            return Proceed(_name(group))
    raise MalformedMessageError("an order that is unknown, or has not the fields that it should have")


def encode_report(epoch: int, report: RemoteReport) -> bytes:
    """``report`` as it goes to the coordinator, about the group's membership ``epoch``."""
    match report:
        case RoundCompleted(group, record, adopted):
            return _pack("round", epoch, group, pack_round(record), adopted)
        case Halted(group, error, buckets_only):
            return _pack("halted", epoch, group, _pack_error(error), buckets_only)
        case Planned(group, digest):
            return _pack("planned", epoch, group, digest)
        case Absent(group, rank, error, ended):
            return _pack("absent", epoch, group, rank, _pack_error(error), ended)
        case Heeded(group):
            return _pack("heeded", epoch, group)
        case Behind(group, rank, number):
            return _pack("behind", epoch, group, rank, number)
        case Late(group, number, late, why, tell):
            return _pack("late", epoch, group, number, late, why, tell)
        case StateComes(group, rank, donor, number, nbytes):
            return _pack("state", epoch, group, rank, donor, number, nbytes)
        case CaughtUp(group, number, seats):
            return _pack("caught up", epoch, group, number, seats)
        case Recovered(group, number):
            return _pack("recovered", epoch, group, number)


def decode_report(data: Buffer, now: float) -> tuple[int, RemoteReport]:
    """The epoch that a report is about, and the report; a ProtocolError says why there is none.

    A round that a report speaks of is taken to have ended ``now``.
    """
    match _unpack(data, MAX_REPORT_BYTES):
        case ["round", epoch, group, record, bool(adopted)]:
            return _count(epoch), RoundCompleted(_name(group), unpack_round(record, completed=now), adopted)
        case ["halted", epoch, group, error, bool(buckets_only)]:
            return _count(epoch), Halted(_name(group), _error(error), buckets_only)
        case ["planned", epoch, group, digest]:
            return _count(epoch), Planned(_name(group), _token(digest))
        case ["absent", epoch, group, rank, error, bool(ended)]:
            return _count(epoch), Absent(_name(group), _rank(rank), _error(error), ended)
        case ["heeded", epoch, group]:
            return _count(epoch), Heeded(_name(group))
        case ["behind", epoch, group, rank, number]:
            return _count(epoch), Behind(_name(group), _rank(rank), _count(number))
        case ["late", epoch, group, number, late, why, bool(tell)]:
            return _count(epoch), Late(_name(group), _count(number), _ranks(late), _text(why), tell)
        case ["state", epoch, group, rank, donor, number, nbytes]:
            seats = _rank(rank), _rank(donor)
            return _count(epoch), StateComes(_name(group), *seats, _count(number), _count(nbytes))
        case ["caught up", epoch, group, number, seats]:
            return _count(epoch), CaughtUp(_name(group), _count(number), _ranks(seats))
        case ["recovered", epoch, group, number]:
            return _count(epoch), Recovered(_name(group), _count(number))
    raise MalformedMessageError("a report that is unknown, or has not the fields that it should have")


def _pack(*fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields, unicode_errors="replace")
    return packed


def _unpack(data: Buffer, limit: int) -> list[Any]:
    if len(data) > limit:
        raise MalformedMessageError(f"{len(data)} bytes between control and data, the limit is {limit}")
    return unpack(data, "neither an order nor a report", MAX_LIST, maps=True)


def _pack_lateness(late: Lateness) -> list[Any]:
    return [late.quorum, late.percent, late.backup, late.grace, late.keeps]


def _lateness(value: Any) -> Lateness | None:
    match value:
        case None:
            return None
        case [quorum, percent, backup, grace, bool(keeps)]:
            try:
                return Lateness(_count(quorum), number(0.0, 100.0)(percent), _count(backup), _seconds(grace), keeps)
            except InvalidArgumentError as error:
                raise MalformedMessageError(f"no word of who is late: {error.message}") from error
    raise MalformedMessageError(f"expected when somebody is late, got {brief(value)}")


def _pack_error(error: GradServerError) -> list[Any]:
    failure = Failure.of(error, Scope.EXCHANGE)
    return [failure.error, failure.text, failure.fields]


def _error(value: Any) -> GradServerError:
    if type(value) is not list or len(value) != 3:
        raise MalformedMessageError(f"expected an error, got {brief(value)}")
    name, message, fields = value
    return Failure(Scope.EXCHANGE, _text(name), _text(message), facts(fields)).exception()
