"""Versions of the membership at a data half, and what an exchange does when a member departs.

`Configure` says what the membership is. What differs from the version before is done in this order:

    difference                     what changes
    ─────────────────────────────  ──────────────────────────────────────────────────────────────────────────────
    a member in ``departed``       what its member or learner gave before counts; the rest goes on without it
    a newcomer with a new id       a learner, which takes part in nothing but the transfers of its state
    it has no ``first`` any more,  what was open goes on without it, and its state is sent no further
    … and does not listen
    another ``first``              from that round on, which no member has begun, buckets wait for it, too
    it ``listens``                 it is sent the results of rounds from then on without having pushed
    a newcomer in ``members``      collectives and transfers, too, from the round after its first one on

An exchange has the participants that it had when it began, and a member that comes later has no part in it. The round
in which it was called says which members these are.

A departure is a *cut*: from here on exchanges go on without that member. What it gave as a prefix of an exchange's
slices counts, the rest does not. So each element is the mean of the members that counted for it, and all get the same
one.

    exchange  event                                             next    what happens
    ────────  ────────────────────────────────────────────────  ──────  ──────────────────────────────────────────────
    OPEN      a participant departs                             OPEN    what waited for it alone is complete
    OPEN      … and its memory holds what was not reduced       OPEN    that does not count: the memory is its own
    OPEN      … but its process is known to have ended          OPEN    it counts: it cannot change any more
    OPEN      … and a reduction holds its bytes                 OPEN    they count; no result is sent to it
    OPEN      … from an operation of `WORLD_BOUND`              FAILED  MembershipChangedError to all
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

from gradserver.engine.data import commits
from gradserver.engine.data.completion import complete
from gradserver.engine.data.exchange import NO_LAYOUT, Exchange, Piece
from gradserver.engine.data.failures import fail, forget_if_over
from gradserver.engine.data.group import Group
from gradserver.engine.data.quorum import note_what_counted
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import NEVER, Departure, Newcomer
from gradserver.engine.orders import Configure
from gradserver.engine.reports import Absent
from gradserver.protocol.errors import GradServerError, MembershipChangedError
from gradserver.protocol.exchange import BUCKET, ROOTED, WORLD_BOUND, ExchangeKey, Kind, Operation


def configure(group: Group, order: Configure, now: float, effects: Effects) -> None:
    """Go by a version of the membership."""
    group.disturb()
    for departure in order.departed:
        _depart(group, departure, order.epoch, now, effects)
    before = group.learners.take(order.newcomers)
    for newcomer in order.newcomers:
        member_id = newcomer.member_id
        if member_id not in before and member_id not in group.members.present:
            _admit(group, newcomer)
        unexpected = newcomer._replace(first=NEVER, listens=NEVER, transfer=0)
        _follow(group, before.get(member_id, unexpected), newcomer, now, effects)
    new = group.learners.promote(order.members, order.epoch)
    if new or order.epoch != group.members.epoch:
        _begin_membership(group, order, new)
    if order.steady:
        group.settle()


def _admit(group: Group, newcomer: Newcomer) -> None:
    """Take a learner in. Its id may have been another member's."""
    member_id = newcomer.member_id
    group.members.admit(member_id, newcomer.occupant.name, newcomer.occupant.connection, newcomer.token)
    group.learners.admit(member_id)
    group.stragglers.hand_over(member_id)
    group.sequences.hand_over(member_id)
    group.traffic.hand_over(member_id, group.exchanges.values())


def _follow(group: Group, before: Newcomer, newcomer: Newcomer, now: float, effects: Effects) -> None:
    """Wait for a newcomer as of a round, send it results unasked, or go on without it, as it is said now."""
    member_id, first = newcomer.member_id, newcomer.first
    if newcomer == before or member_id in group.members.present:
        return
    if first == newcomer.listens == NEVER:
        _excuse(group, member_id, now, effects)
        return
    group.listeners.end(member_id)
    if first != NEVER:
        group.learners.expect(member_id, first)
    if newcomer.listens != NEVER:
        group.listeners.begin((member_id,), newcomer.listens)
    elif group.order.lateness is not None:  # a member that contributes can be late from then on
        group.listeners.begin((member_id,), first)
    if newcomer.transfer:
        group.learners.expect_state(member_id, newcomer.transfer, group.members.epoch)


def _excuse(group: Group, member_id: int, now: float, effects: Effects) -> None:
    """Go on without a learner in all rounds that are open, and in later ones."""
    group.learners.excuse(member_id)
    group.listeners.forget(member_id)
    for exchange in list(group.exchanges.values()):
        if exchange.key.stream == BUCKET and member_id in exchange.participants and exchange.failure is None:
            cut(group, exchange, member_id, False, now, effects)


def _begin_membership(group: Group, order: Configure, new: list[int]) -> None:
    """Begin a membership, perhaps with learners that have become members."""
    joined_in = max((group.learners.first_rounds[member_id] for member_id in new), default=None)
    group.members.set_present(order.members, new, joined_in, order.epoch)
    group.follow_members()


def _depart(group: Group, departure: Departure, epoch: int, now: float, effects: Effects) -> None:
    """Go on without a member, in all that is open."""
    member_id = departure.member_id
    group.members.depart(member_id, departure.error, epoch)
    group.learners.depart(member_id)
    group.listeners.forget(member_id)
    for number, current in group.rounds.items():
        note_what_counted(group, number, current, member_id)
    group.follow_members()
    group.stragglers.pace.forget(member_id)
    commits.departed(group, effects)
    for exchange in list(group.exchanges.values()):
        if exchange.failure is not None:  # perhaps since an earlier member had this id
            exchange.excuse(member_id)
            forget_if_over(group, exchange)
        elif member_id not in exchange.participants:
            exchange.withdraw(member_id)
        elif (error := _why_not(group, exchange, departure)) is not None:
            fail(group, exchange, error, effects)
            exchange.excuse(member_id)
            forget_if_over(group, exchange)
        else:
            cut(group, exchange, member_id, departure.ended, now, effects)


def cut(group: Group, exchange: Exchange, member_id: int, ended: bool, now: float, effects: Effects) -> None:
    """Go on with ``exchange`` without ``member_id``. Its process is known to have ``ended``, or may be alive."""
    exchange.leave_out(member_id, ended)
    for piece in exchange.ready(member_id):
        complete(group, exchange, piece, now, effects)


def _why_not(group: Group, exchange: Exchange, departure: Departure) -> GradServerError | None:
    """Return why ``exchange`` cannot go on without the member that departs; None if it can."""
    if exchange.complete == exchange.stop:
        return None
    kind, member_id = exchange.operation.kind, departure.member_id
    lacks_some = exchange.kept_of(member_id, departure.ended) < exchange.stop
    if kind in WORLD_BOUND or (kind is Kind.BROADCAST and exchange.operation.root == member_id and lacks_some):
        return changed(group, exchange.key, exchange.operation)
    return departure.error if kind is Kind.TRANSFER and lacks_some else None


def changed(group: Group, key: ExchangeKey, operation: Operation | None = None) -> MembershipChangedError:
    """Return the error of ``operation`` for all: some have called it in a membership that has ended.

    Behind a recovery the operation is unknown, and so is what changed the membership in which it was called.
    """
    change = "" if operation is None else f": {group.members.change}"
    return MembershipChangedError(
        f"{group.describe(key, operation)} was called in a membership that has ended{change}. "
        f"Rank and world size are new: call it again",
        epoch=group.members.epoch_of(key.part),  # a later one has learners that have no part in it
    )


def outdated(
    group: Group, member_id: int, key: ExchangeKey, operation: Operation, epoch: int, now: float
) -> Exchange | None:
    """Return the failed exchange, if ``member_id`` begins one in the membership ``epoch``, which has ended."""
    participants = group.participants(key)
    gone = operation.kind in ROOTED and operation.root not in participants
    if not gone and not is_outdated(group, key, operation, epoch):
        return None
    error = changed(group, key, operation)
    exchange = Exchange(key, operation, NO_LAYOUT, 0, 1, participants, member_id, now, now, 0, failure=error)
    group.exchanges.keep_failed(exchange)
    return exchange


def is_outdated(group: Group, key: ExchangeKey, operation: Operation, epoch: int) -> bool:
    """Tell whether ``operation`` is of one membership, and is called in ``epoch``, which has ended."""
    return operation.kind in WORLD_BOUND and epoch != group.members.epoch_of(key.part)


def do_without(group: Group, exchange: Exchange, piece: Piece, member_id: int, now: float, effects: Effects) -> None:
    """Reduce ``piece`` again without the part of ``member_id``, and go on without it: it is about to depart."""
    exchange.spoil(member_id, piece.stop - piece.start)
    cut(group, exchange, member_id, False, now, effects)
    given = {other: run for other, run in piece.given.items() if other != member_id}
    complete(group, exchange, piece._replace(given=given), now, effects)


def do_without_overdue(group: Group, exchange: Exchange, now: float, effects: Effects) -> bool:
    """Have members evicted for which ``exchange`` waited too long; False if it is to fail instead."""
    if not exchange.pushed:
        exchange.put_off(now)
        return True
    missing = exchange.missing()
    if exchange.key.stream != BUCKET or not missing:
        return False
    receiving = group.learners.last_heard(missing)
    if receiving > exchange.touched:
        exchange.put_off(receiving)
        return True
    exchange.put_off(now)
    what = f"{group.describe(exchange.key)} waited {group.order.round_timeout:g} s (--round-timeout) for it"
    for member_id in missing:
        effects.report(left_out(group, member_id, what))
    return True


def left_out(group: Group, member_id: int, why: str) -> Absent:
    """Return the report by which control goes on without ``member_id``."""
    name = group.order.group
    return Absent(name, member_id, group.members.identities.left_out(member_id, f"group {name!r}: {why}"))
