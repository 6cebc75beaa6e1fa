"""Commits: members reduce the gradients of a round among themselves, and it counts for all of one membership, or not.

The commit is the only bucket of such a round. Each member gives it, with its weight, when it has all results. Every
member's gradients are in these, so the round needs every commit. If one does not come, no member applies anything. All
begin the same round again, with the gradients that they kept, in a section that the coordinator reduces.

    commit  event                                                next    what happens
    ──────  ───────────────────────────────────────────────────  ──────  ────────────────────────────────────────────
    (none)  push, in the present membership                      OPEN    as of any bucket
    (none)  push of the epoch 0: a member takes it for void      VOID    RoundVoidError to all members
    (none)  push of a membership that has ended                  VOID    the same
    (none)  push, in a round with results for a learner          VOID    the same: it has no other way to them
    (none)  push, in a round that has begun in another section   VOID    the same
    OPEN    any of these pushes                                  VOID    the same
    OPEN    push to another section's bucket of this round       VOID    the same: its sender takes the round for void
    OPEN    a member departs from an elastic group               VOID    the same
    any     a member departs, and the commit is not complete     any     members of memberships before are told that
                                                                         their commits are void from this round on
    any     a recovery ends                                      any     the same, from the first round without result
    any     a member is lost, and the group needs all            VOID    all are told that error, which halts them
    VOID    push                                                 VOID    its sender is told again
    OPEN    every member has pushed                              (none)  the round is over, as any other

Members are told at once, whether or not they have begun it. A member that waits for a reduction with a lost one hears
of it in no other way. Rounds can end at other data shards meanwhile. So a departure makes no certain round void. It
makes void all rounds that members have begun in a membership before it, from the first one without a result here.

A recovery forgets what is void. So a member that knows says so, with a push of the epoch 0, when it begins the round
again. It does so even if it was told. It says so again when it has heard `Standing`. And while members have yet to say
what they hold, no commit becomes void: one of them may have its result.
"""

from __future__ import annotations

from gradserver.engine.data.exchange import NO_LAYOUT, Exchange
from gradserver.engine.data.failures import say_failed
from gradserver.engine.data.group import Group
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import NEVER
from gradserver.protocol.errors import GradServerError, RoundVoidError
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Kind
from gradserver.protocol.messages import Push


def why_void(group: Group, member_id: int, key: ExchangeKey, epoch: int) -> str:
    """Say why the commit ``key`` of ``member_id`` makes it void; empty if it does not."""
    if epoch == 0:
        return f"{group.call(member_id)} could not reduce it with the others, or was told that it is void"
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
    for earlier in [one for one in group.exchanges.values() if one.failure is not None and _is_before(one.key, key)]:
        group.exchanges.end(earlier)  # that round is over: all members have heard
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


def is_said_again(group: Group, member_id: int, push: Push) -> bool:
    """Tell whether ``push`` says once more that a commit is void, or that of one that its sender has given."""
    return push.epoch == 0 and _is_commit(group, push.key) and group.sequences.is_past(member_id, push.key)


def departed(group: Group, effects: Effects) -> None:
    """Make commits of a membership void that has ended, as a member has departed. In a recovery its end does this."""
    if group.recovery is not None:
        return
    for key, exchange in list(group.exchanges.items()):
        if _is_commit(group, key) and exchange.failure is None and exchange.complete < exchange.stop:
            void(group, key, group.members.change, effects)
    _end_memberships(group, effects)


def recovered(group: Group, effects: Effects) -> None:
    """Make commits of memberships void that ended before a recovery did, or during it."""
    _end_memberships(group, effects)


def broken(group: Group, error: GradServerError, effects: Effects) -> None:
    """Tell all members ``error``, for which the group breaks: some may wait for a reduction with a lost member."""
    for key in _without_results(group):
        _tell(group, key, error, effects)


def _end_memberships(group: Group, effects: Effects) -> None:
    """Tell all that commits are void of memberships before the present one, from the first one without a result on."""
    for key in _without_results(group):
        why = group.members.change or "its membership has ended"
        epoch = group.members.epoch_of(key.number)  # as of a push
        error = RoundVoidError(f"round {key.number} goes over the coordinator: {why}", epoch=epoch)
        _tell(group, key, error, effects)


def _without_results(group: Group) -> list[ExchangeKey]:
    """List the first key of each commit that has no result here, and none that is being made."""
    number = max(group.stragglers.latest + 1, group.planned)
    keys = [ExchangeKey(BUCKET, number, part) for part in _commits(group)]
    return [key._replace(number=number + 1) if _is_complete(group, key) else key for key in keys]


def _is_complete(group: Group, key: ExchangeKey) -> bool:
    exchange = group.exchanges.get(key)
    return exchange is not None and exchange.failure is None and exchange.complete == exchange.stop


def _is_before(key: ExchangeKey, later: ExchangeKey) -> bool:
    return key.stream == BUCKET and key.part == later.part and key.number < later.number


def _is_commit(group: Group, key: ExchangeKey) -> bool:
    plan = group.plan
    if key.stream != BUCKET or plan is None or plan.is_vacant(key.part):
        return False
    return plan.buckets[key.part].kind is Kind.COMMIT


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
