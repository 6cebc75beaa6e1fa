"""Commits: members reduce the gradients of a round among themselves, and it counts for all of one membership, or not.

The commit is the only bucket of such a round. Each member gives it, with its weight, when it has all results. Every
member's gradients are in these, so the round needs every commit. If one does not come, no member applies anything. All
begin the same round again, with the gradients that they kept, in a section that the coordinator reduces.

    commit  event                                                next    what happens
    ──────  ───────────────────────────────────────────────────  ──────  ────────────────────────────────────────────
    (none)  push, in the present membership                      OPEN    as of any bucket
    (none)  push of the epoch 0: a member could not reduce       VOID    RoundVoidError to all members
    (none)  push of a membership that has ended                  VOID    the same
    (none)  push, in a round with results for a learner          VOID    the same: it has no other way to them
    (none)  push, in a round that has begun in another section   VOID    the same
    OPEN    any of these pushes                                  VOID    the same
    OPEN    push to another section's bucket of this round       VOID    the same: its sender takes the round for void
    any     a member departs from an elastic group               VOID    the same, also of what no member has begun
    any     a member is lost, and the group needs all            VOID    all are told that error, which halts them
    VOID    push                                                 VOID    its sender is told again
    OPEN    every member has pushed                              (none)  the round is over, as any other

Members are told at once, whether or not they have begun it. A member that waits for a reduction with a lost one hears
of it in no other way.
"""

from __future__ import annotations

from gradserver.engine.data.exchange import NO_LAYOUT, Exchange
from gradserver.engine.data.failures import say_failed
from gradserver.engine.data.group import Group
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import NEVER
from gradserver.protocol.errors import GradServerError, RoundVoidError
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Kind


def why_void(group: Group, member_id: int, key: ExchangeKey, epoch: int) -> str:
    """Say why the commit ``key`` of ``member_id`` makes it void; empty if it does not."""
    if epoch == 0:
        return f"{group.call(member_id)} could not reduce it with the others"
    if epoch != group.members.epoch_of(key.number):
        return f"it began in a membership that has ended: {group.members.change}"
    for learner in group.learners.newcomers.values():
        if any(first != NEVER and first <= key.number for first in (learner.first, learner.listens)):
            return f"{learner.occupant.name!r} joins, and gets results from the coordinator alone"
    current = group.rounds.get(key.number)
    if current is not None and group.plan is not None and current.section != group.plan.section_of(key.part).number:
        return "it goes over the coordinator already"
    return ""


def void(group: Group, key: ExchangeKey, why: str, effects: Effects) -> None:
    """Make the commit ``key`` void, and tell all members: they begin the round again."""
    assert group.plan is not None
    section = group.plan.section_of(key.part)
    error = RoundVoidError(f"round {key.number} goes over the coordinator: {why}")
    exchange = group.exchanges.get(key)
    if exchange is None:
        operation, here = group.plan.buckets[key.part].operation, group.participants(key)
        exchange = Exchange(key, operation, NO_LAYOUT, 0, 1, here, -1, 0.0, 0.0, 0, failure=error)
    elif exchange.failure is None:
        group.traffic.refund(exchange, exchange.fail(error))
    group.exchanges.keep_failed(exchange)
    if key.number in group.rounds and group.rounds[key.number].section == section.number:
        group.rounds.end(key.number)
    _tell(group, key, error, effects)


def give_way(group: Group, key: ExchangeKey, effects: Effects) -> None:
    """Make an open commit void of the round of ``key``, a bucket in another section, which a member begins."""
    assert group.plan is not None
    current = group.rounds.get(key.number)
    if current is None or key.part in group.plan.parts_of(current.section):
        return
    for part in _commits(group):
        commit = key._replace(part=part)
        if part in group.plan.parts_of(current.section) and commit in group.exchanges:
            void(group, commit, "a member takes it for void", effects)


def departed(group: Group, effects: Effects) -> None:
    """Make the commit of the open round, and of the next one, void: a member has departed."""
    for key in _open_or_next(group):
        exchange = group.exchanges.get(key)
        if exchange is None or (exchange.failure is None and exchange.complete < exchange.stop):
            void(group, key, group.members.change, effects)


def broken(group: Group, error: GradServerError, effects: Effects) -> None:
    """Tell all members ``error``, for which the group breaks: some may wait for a reduction with a lost member."""
    for key in _open_or_next(group):
        _tell(group, key, error, effects)


def _open_or_next(group: Group) -> list[ExchangeKey]:
    number = max(group.stragglers.latest + 1, group.planned)
    return [ExchangeKey(BUCKET, number, part) for part in _commits(group)]


def _commits(group: Group) -> list[int]:
    """List the commits of the plan that this shard has to do with."""
    found = []
    for part, bucket in enumerate(group.plan.buckets if group.plan is not None else ()):
        if bucket.kind is Kind.COMMIT:
            _, start, stop = group.share(ExchangeKey(BUCKET, 0, part), bucket.operation)
            found += [part] * (start < stop)
    return found


def _tell(group: Group, key: ExchangeKey, error: GradServerError, effects: Effects) -> None:
    for member_id in group.members.present:
        if group.members.connections[member_id] >= 0 and member_id not in group.members.departed:
            say_failed(group, member_id, key, error, effects)
