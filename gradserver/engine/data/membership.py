"""How the data half of an elastic group goes on without a member.

A departure is a *cut*: from here on exchanges go on without that seat. What it gave as a prefix of an exchange's slices
counts, the rest does not; so each element is the mean of those who counted for it, and everybody gets the same one.

    exchange  event                                             next    what happens
    ────────  ────────────────────────────────────────────────  ──────  ──────────────────────────────────────────────
    OPEN      a participant departs                             OPEN    what waited for it alone is complete
    OPEN      … and its memory holds what was not reduced       OPEN    that does not count: the memory is its own
    OPEN      … but its process is known to have ended          OPEN    it counts: nobody can change it any more
    OPEN      … and a reduction holds its bytes                 OPEN    they count; no result is sent to it
    OPEN      … from an all_gather or a reduce_scatter          FAILED  MembershipChangedError to everybody
    OPEN      … the root of a broadcast that lacks some of it   FAILED  MembershipChangedError to everybody
    OPEN      … one end of a transfer that lacks some of it     FAILED  the other end is told who
    (none)    first push, of a membership that has ended        FAILED  MembershipChangedError to everybody
    OPEN      the same, of who comes later                      FAILED  MembershipChangedError to everybody
    OPEN      bytes that say nothing in their codec             OPEN    control is to refuse their sender; done without
    OPEN      a bucket's deadline                               OPEN    control is to leave out who is missing
    OPEN      a deadline that none of those present waits for   OPEN    it is put off

Anything else is as in `gradserver.engine.data.half`, whose table this one extends.
"""

from __future__ import annotations

from gradserver.engine.data.completion import complete
from gradserver.engine.data.exchange import Exchange, Piece
from gradserver.engine.data.failures import fail, forget_if_over, remember
from gradserver.engine.data.group import Group
from gradserver.engine.data.quorum import note_what_counted
from gradserver.engine.effects import Effects
from gradserver.engine.events import Absent, Depart
from gradserver.protocol.errors import GradServerError, MembershipChangedError
from gradserver.protocol.exchange import ROOTED, WORLD_BOUND, ExchangeKey, Kind, Layout, Operation, Stream

_NOTHING = Layout(count=1, step=1, bounds=(0, 0), firsts=(0, 1), numel=0, itemsize=0, replies=1)


def depart(group: Group, order: Depart, now: float, effects: Effects) -> None:
    """Go on without a member, in all that is open."""
    seat = order.rank
    group.departed[seat] = order.error
    group.entered.pop(seat, None)
    group.change = order.error.message
    group.seats.depart(seat)
    group.listeners.forget(seat)
    group.states.pop(seat, None)
    if order.epoch != group.epoch:
        group.epoch = order.epoch
        group.before = (group.before[0], order.epoch)
    group.table.world_size = len(group.seats.present)
    for number, current in group.rounds.items():
        note_what_counted(group, number, current, seat)
    group.stragglers.pace.changed()
    group.stragglers.pace.forget(seat)
    for exchange in list(group.exchanges.values()):
        if seat not in exchange.participants:
            exchange.withdraw(seat)
            continue
        if exchange.failure is not None:
            exchange.excuse(seat)
            forget_if_over(group, exchange)
        elif (error := _why_not(group, exchange, order)) is not None:
            fail(group, exchange, error, effects)
            exchange.excuse(seat)
            forget_if_over(group, exchange)
        else:
            cut(group, exchange, seat, order.ended, now, effects)


def cut(group: Group, exchange: Exchange, seat: int, ended: bool, now: float, effects: Effects) -> None:
    """Go on with ``exchange`` without ``seat``, whose process ``ended``, or who knows."""
    exchange.leave_out(seat, ended)
    for piece in exchange.ready(seat):
        complete(group, exchange, piece, now, effects)


def _why_not(group: Group, exchange: Exchange, order: Depart) -> GradServerError | None:
    """Why ``exchange`` cannot go on without the seat that departs; None if it can."""
    if exchange.complete == exchange.stop:
        return None
    kind = exchange.operation.kind
    lacks_some = exchange.kept_of(order.rank, order.ended) < exchange.stop
    if kind in WORLD_BOUND or (kind is Kind.BROADCAST and exchange.operation.root == order.rank and lacks_some):
        return changed(group, exchange.key, exchange.operation)
    return order.error if kind is Kind.TRANSFER and lacks_some else None


def changed(group: Group, key: ExchangeKey, operation: Operation) -> MembershipChangedError:
    """What to tell everybody of ``operation``: some have called it in a membership that has ended."""
    return MembershipChangedError(
        f"{group.describe(key, operation)} was called in a membership that has ended: {group.change}. "
        f"Rank and world size are new: call it again",
        epoch=group.epoch,
    )


def outdated(
    group: Group, rank: int, key: ExchangeKey, operation: Operation, epoch: int, now: float
) -> Exchange | None:
    """The failed exchange, if ``rank`` begins one that it sees in the membership ``epoch``, which has ended."""
    participants = group.participants(key)
    gone = operation.kind in ROOTED and operation.root not in participants
    if not gone and not is_outdated(group, key, operation, epoch):
        return None
    error = changed(group, key, operation)
    exchange = Exchange(key, operation, _NOTHING, 0, 1, participants, rank, now, now, 0, failure=error)
    remember(group, exchange)
    return exchange


def is_outdated(group: Group, key: ExchangeKey, operation: Operation, epoch: int) -> bool:
    """Whether somebody sees ``operation`` in the membership ``epoch``, which has ended, and it is of one membership."""
    due = group.before[1] if key.part <= group.before[0] else group.epoch
    return operation.kind in WORLD_BOUND and epoch != due


def do_without(group: Group, exchange: Exchange, piece: Piece, rank: int, now: float, effects: Effects) -> None:
    """Reduce ``piece`` again, without what ``rank`` has given to it, and go on without it: it is about to depart."""
    exchange.spoil(rank, piece.stop - piece.start)
    cut(group, exchange, rank, False, now, effects)
    given = {other: run for other, run in piece.given.items() if other != rank}
    complete(group, exchange, piece._replace(given=given), now, effects)


def do_without_overdue(group: Group, exchange: Exchange, now: float, effects: Effects) -> bool:
    """Have those left out for whom ``exchange`` waited too long; False if it is to fail instead."""
    if not exchange.pushed:
        exchange.put_off(now)
        return True
    missing = exchange.missing()
    if exchange.key.stream != Stream.BUCKET or not missing:
        return False
    receiving = max((group.heard.get(seat, 0.0) for seat in missing if group.since.get(seat) == -1), default=0.0)
    if receiving > exchange.touched:
        exchange.put_off(receiving)
        return True
    exchange.put_off(now)
    what = f"{group.describe(exchange.key)} waited {group.order.timeout:g} s (--round-timeout) for it"
    for seat in missing:
        effects.report(left_out(group, seat, what))
    return True


def left_out(group: Group, seat: int, why: str) -> Absent:
    """Control is to go on without ``seat``."""
    name = group.order.group
    return Absent(name, seat, group.seats.left_out(seat, f"group {name!r}: {why}"))
