"""Orders that change the membership of an elastic group, at its data half.

    order    what changes
    ───────  ────────────────────────────────────────────────────────────────────────────────────────────────────
    Admit    the seat is a learner's; it takes part in nothing but the transfers of its state
    Expect   from a round on, which no member has begun, its buckets wait for the learner, too; or the learner listens:
             it is sent their results without having pushed
    Excuse   they do not wait for it: what was open goes on without it, and its state is sent no further
    Reseat   it is a member: collectives and transfers, too, from the round after its first one on
    Depart   what it gave before counts; a learner may depart as well

An exchange has the participants that it had when it began, and a member that comes later has no part in it. The round
in which it was called says which members these are.

A departure is a *cut*: from here on exchanges go on without that seat. What it gave as a prefix of an exchange's slices
counts, the rest does not. So each element is the mean of the members that counted for it, and all get the same one.

    exchange  event                                             next    what happens
    ────────  ────────────────────────────────────────────────  ──────  ──────────────────────────────────────────────
    OPEN      a participant departs                             OPEN    what waited for it alone is complete
    OPEN      … and its memory holds what was not reduced       OPEN    that does not count: the memory is its own
    OPEN      … but its process is known to have ended          OPEN    it counts: it cannot change any more
    OPEN      … and a reduction holds its bytes                 OPEN    they count; no result is sent to it
    OPEN      … from an all_gather or a reduce_scatter          FAILED  MembershipChangedError to all
    OPEN      … the root of a broadcast that lacks some of it   FAILED  MembershipChangedError to all
    OPEN      … one end of a transfer that lacks some of it     FAILED  the other end is told its name
    (none)    first push, of a membership that has ended        FAILED  MembershipChangedError to all
    OPEN      the same, of a member that comes later            FAILED  MembershipChangedError to all
    OPEN      bytes that say nothing in their codec             OPEN    control is to refuse their sender; done without
    OPEN      a bucket's deadline                               OPEN    control is to evict missing members
    OPEN      a deadline that no present member waits for       OPEN    it is put off

Anything else is as in `gradserver.engine.data.half`, with the table that this one extends.
"""

from __future__ import annotations

from gradserver.engine.data.completion import complete
from gradserver.engine.data.exchange import Exchange, Piece
from gradserver.engine.data.failures import fail, forget_if_over
from gradserver.engine.data.group import Group
from gradserver.engine.data.quorum import note_what_counted
from gradserver.engine.effects import Effects
from gradserver.engine.orders import Admit, Depart, Excuse, Expect, Reseat
from gradserver.engine.reports import Absent
from gradserver.protocol.errors import GradServerError, MembershipChangedError
from gradserver.protocol.exchange import ROOTED, WORLD_BOUND, ExchangeKey, Kind, Layout, Operation, Stream

_NOTHING = Layout(count=1, step=1, bounds=(0, 0), firsts=(0, 1), numel=0, itemsize=0, replies=1)


def admit(group: Group, order: Admit) -> None:
    """Take a learner in. Its seat may have been another member's."""
    seat = order.seat
    group.disturb()
    group.members.admit(seat, order.occupant.name, order.occupant.connection, order.token)
    group.learners.admit(seat)
    group.stragglers.hand_over(seat)
    group.sequences.hand_over(seat)
    group.traffic.hand_over(seat, group.exchanges.values())


def expect(group: Group, order: Expect) -> None:
    """Wait for learners from a round on, or send them its results without being asked."""
    listens = order.listen or group.order.lateness is not None  # a member that contributes can be late from then on
    for seat in order.seats:
        group.listeners.end(seat)
        if listens:
            group.listeners.begin((seat,), order.round)
        if not order.listen:
            group.learners.expect(seat, order.round)
    for seat, number in zip(order.seats, order.transfers, strict=True) if order.transfers else ():
        group.learners.expect_state(seat, number, group.members.epoch)


def excuse(group: Group, order: Excuse, now: float, effects: Effects) -> None:
    """Go on without a learner in all rounds that are open, and in later ones."""
    group.learners.excuse(order.seat)
    group.listeners.forget(order.seat)
    for exchange in list(group.exchanges.values()):
        if exchange.key.stream == Stream.BUCKET and order.seat in exchange.participants and exchange.failure is None:
            cut(group, exchange, order.seat, False, now, effects)


def reseat(group: Group, order: Reseat) -> None:
    """Begin a membership with learners that have become members."""
    new = group.learners.promote(order.seats, order.epoch)
    joined_in = max((group.learners.first_rounds[seat] for seat in new), default=None)
    group.members.reseat(order.seats, new, joined_in, order.epoch)
    group.follow_members()


def depart(group: Group, order: Depart, now: float, effects: Effects) -> None:
    """Go on without a member, in all that is open."""
    seat = order.rank
    group.members.depart(seat, order.error, order.epoch)
    group.learners.depart(seat)
    group.listeners.forget(seat)
    for number, current in group.rounds.items():
        note_what_counted(group, number, current, seat)
    group.follow_members()
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
    """Go on with ``exchange`` without ``seat``. Its process is known to have ``ended``, or may be alive."""
    exchange.leave_out(seat, ended)
    for piece in exchange.ready(seat):
        complete(group, exchange, piece, now, effects)


def _why_not(group: Group, exchange: Exchange, order: Depart) -> GradServerError | None:
    """Return why ``exchange`` cannot go on without the seat that departs; None if it can."""
    if exchange.complete == exchange.stop:
        return None
    kind = exchange.operation.kind
    lacks_some = exchange.kept_of(order.rank, order.ended) < exchange.stop
    if kind in WORLD_BOUND or (kind is Kind.BROADCAST and exchange.operation.root == order.rank and lacks_some):
        return changed(group, exchange.key, exchange.operation)
    return order.error if kind is Kind.TRANSFER and lacks_some else None


def changed(group: Group, key: ExchangeKey, operation: Operation) -> MembershipChangedError:
    """Return the error of ``operation`` for all: some have called it in a membership that has ended."""
    return MembershipChangedError(
        f"{group.describe(key, operation)} was called in a membership that has ended: {group.members.change}. "
        f"Rank and world size are new: call it again",
        epoch=group.members.epoch,
    )


def outdated(
    group: Group, rank: int, key: ExchangeKey, operation: Operation, epoch: int, now: float
) -> Exchange | None:
    """Return the failed exchange, if ``rank`` begins one in the membership ``epoch``, which has ended."""
    participants = group.participants(key)
    gone = operation.kind in ROOTED and operation.root not in participants
    if not gone and not is_outdated(group, key, operation, epoch):
        return None
    error = changed(group, key, operation)
    exchange = Exchange(key, operation, _NOTHING, 0, 1, participants, rank, now, now, 0, failure=error)
    group.exchanges.keep_failed(exchange)
    return exchange


def is_outdated(group: Group, key: ExchangeKey, operation: Operation, epoch: int) -> bool:
    """Tell whether ``operation`` is of one membership, and is called in ``epoch``, which has ended."""
    return operation.kind in WORLD_BOUND and epoch != group.members.epoch_of(key.part)


def do_without(group: Group, exchange: Exchange, piece: Piece, rank: int, now: float, effects: Effects) -> None:
    """Reduce ``piece`` again, without what ``rank`` has given to it, and go on without it: it is about to depart."""
    exchange.spoil(rank, piece.stop - piece.start)
    cut(group, exchange, rank, False, now, effects)
    given = {other: run for other, run in piece.given.items() if other != rank}
    complete(group, exchange, piece._replace(given=given), now, effects)


def do_without_overdue(group: Group, exchange: Exchange, now: float, effects: Effects) -> bool:
    """Have members evicted for which ``exchange`` waited too long; False if it is to fail instead."""
    if not exchange.pushed:
        exchange.put_off(now)
        return True
    missing = exchange.missing()
    if exchange.key.stream != Stream.BUCKET or not missing:
        return False
    receiving = group.learners.last_heard(missing)
    if receiving > exchange.touched:
        exchange.put_off(receiving)
        return True
    exchange.put_off(now)
    what = f"{group.describe(exchange.key)} waited {group.order.timeout:g} s (--round-timeout) for it"
    for seat in missing:
        effects.report(left_out(group, seat, what))
    return True


def left_out(group: Group, seat: int, why: str) -> Absent:
    """Return the report by which control goes on without ``seat``."""
    name = group.order.group
    return Absent(name, seat, group.members.seats.left_out(seat, f"group {name!r}: {why}"))
