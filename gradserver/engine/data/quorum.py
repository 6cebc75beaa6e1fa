"""Quorums and stragglers: the data half finds late members, and closes a round without them.

A quorum is as many members as the group's policy says. Without a policy a round waits for all, and half of them count
as a quorum for the warning. A member has given what it can when it has given everything, or has used up its credit
while the others wait for a member.

    round   event                                          next    what happens
    ──────  ─────────────────────────────────────────────  ──────  ─────────────────────────────────────────────────
    OPEN    a quorum has given what it can, with backups   OPEN    Late is reported, at once
    OPEN    a quorum has given what it can                 OPEN    a time is set: grace, and the adaptive deadline;
                                                                   without a quorum option half a second or more
    OPEN    that time has come, no member is missing       OPEN    nothing
    OPEN    … one is, and there is no quorum option        OPEN    Late is reported, as a warning
    OPEN    … one is, and there is a quorum option         OPEN    Late is reported: control decides
    OPEN    CutRound                                       CLOSED  what late ones have given counts, the rest does not
    CLOSED  a push of a late one                           CLOSED  dropped: results come to it unasked
    CLOSED  … and the group is halted                      CLOSED  it is told why
    CLOSED  a late one departs                             CLOSED  what lies in its memory does not count
    CLOSED  a recovery, in a durable group                 OPEN    … and CutRound once more, before pushes: CLOSED

Control decides, because of several data shards each sees its own slices: all cut off the same members. Those that a
round is closed without are in it again from the next one on.
"""

from __future__ import annotations

from typing import Final

from gradserver.engine.data.completion import complete
from gradserver.engine.data.exchange import Exchange
from gradserver.engine.data.failures import tell
from gradserver.engine.data.group import Group
from gradserver.engine.data.rounds import Round
from gradserver.engine.effects import Effects
from gradserver.engine.orders import CutRound
from gradserver.engine.reports import Late
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.limits import SLICE_BYTES

_AGAIN_SECONDS: Final = 1.0
"""Time until the same is reported again, if control did not decide so."""
_UNREMARKABLE_SECONDS: Final = 0.5
"""Time that a quorum waits for others before people are told of it, however quick rounds are."""


def contributed(group: Group, number: int, member_id: int, ended: bool, now: float, effects: Effects) -> float | None:
    """Note a push of ``member_id`` to a bucket of a round, perhaps the last of it; return when to `look`, if new."""
    current = group.rounds.get(number)
    if current is None:
        return None
    if ended:
        current.contributed(member_id, group.full_buckets[current.section])
    if group.order.grants:
        return None
    if current.quorum_at is not None or not (ended or group.traffic.has_no_credit(member_id)):
        return None
    lateness = group.order.lateness
    may_be_stuck = group.plan is None or group.plan.nbytes > group.order.credit - SLICE_BYTES
    if may_be_stuck or group.stragglers.closed or group.learners.first_rounds or group.members.departed:
        present = _present(group, number)
        given = sum([_has_given(group, current, other) for other in present])
    else:  # as in most rounds: all that are present are waited for, and none can have used up its credit
        given = current.finished
    if given < _needed(group, number):
        return None
    if lateness is None:  # what is usual is looked up then: most rounds are over by that
        current.reach_quorum(now, now + _UNREMARKABLE_SECONDS)
    elif lateness.backup:
        current.reach_quorum(now, None)
        _report(group, number, current, now, effects)
    else:
        deadline = group.stragglers.pace.deadline(lateness.grace, group.order.round_timeout, now - current.opened)
        look_at = None if deadline is None else max(current.opened + deadline, now + lateness.grace)
        current.reach_quorum(now, look_at)
    return current.look_at


def look(group: Group, now: float, effects: Effects) -> None:
    """Report members that are late, as time has passed."""
    for number, current in list(group.rounds.items()):
        if current.look_at is None or current.look_at > now:
            continue
        if group.order.lateness is None:
            deadline = group.stragglers.pace.deadline(0.0, group.order.round_timeout)
            current.put_off(None if deadline is None else current.opened + deadline)
            if current.look_at is None or current.look_at > now:
                continue
        _report(group, number, current, now, effects)


def next_look(group: Group) -> float | None:
    """Return the time at which `look` is due."""
    return min((current.look_at for current in group.rounds.values() if current.look_at is not None), default=None)


def _report(group: Group, number: int, current: Round, now: float, effects: Effects) -> None:
    late = _late(group, number, current)
    if not late:
        current.lose_quorum()
        return
    closes = group.order.lateness is not None
    tell = not group.stragglers.is_quiet(now)
    current.put_off(now + _AGAIN_SECONDS if closes else None)
    if not closes and not tell:
        return
    if tell:
        group.stragglers.tell(now)
    present = group.participants(_any_bucket(number))
    why = group.stragglers.pace.explain(len(present) - len(late), len(present))
    effects.report(Late(group.order.group, number, tuple(late), f"after {now - current.opened:.2g} s: {why}", tell))


def _late(group: Group, number: int, current: Round) -> list[int]:
    """Return the members that keep a quorum waiting."""
    present = _present(group, number)
    full = group.full_buckets[current.section]
    if sum(current.given.get(member_id, 0) >= full for member_id in present) >= _needed(group, number):
        return [member_id for member_id in present if current.given.get(member_id, 0) < full]
    section = group.plan.section(current.section) if group.plan is not None else None
    for part in section.parts if section is not None else ():  # the first that all wait for
        exchange = group.exchanges.get(ExchangeKey(BUCKET, number, part))
        if exchange is not None and exchange.failure is None and exchange.complete < exchange.stop:
            missing = exchange.missing()
            return missing if len(present) - len(missing) >= _needed(group, number) else []
    return []


def _present(group: Group, number: int) -> list[int]:
    """Return the members that round ``number`` waits for, with learners that contribute to it."""
    return [
        member_id
        for member_id in group.participants(_any_bucket(number))
        if group.stragglers.closed.get(member_id, -1) < number
    ]


def _any_bucket(number: int) -> ExchangeKey:
    return ExchangeKey(BUCKET, number, 0)


def _needed(group: Group, number: int) -> int:
    count = len(group.participants(_any_bucket(number)) if group.learners.first_rounds else group.members.present)
    return -(-count // 2) if group.order.lateness is None else group.order.lateness.needed(count)


def _has_given(group: Group, current: Round, member_id: int) -> bool:
    return current.given.get(member_id, 0) >= group.full_buckets[current.section] or group.traffic.has_no_credit(
        member_id
    )


# ── closing a round ───────────────────────────────────────────────────────────────────────────────────


def close(group: Group, order: CutRound, now: float, effects: Effects) -> None:
    """Go on with a round without its stragglers."""
    current = group.rounds.get(order.round)
    if current is not None:
        current.close(now)
    group.stragglers.close_round(order.round, order.section)
    if group.order.grants:
        group.stragglers.begin(order.round, now)
        group.check_by(now + group.order.round_timeout)
    for member_id in order.member_ids:
        if member_id in group.members.departed:
            continue
        group.stragglers.close(member_id, order.round)
        if current is not None:
            note_what_counted(group, order.round, current, member_id)
        for exchange in list(group.exchanges.values()):
            key = exchange.key
            if (key.stream, key.number) == (BUCKET, order.round) and member_id in exchange.participants:
                _without(group, exchange, member_id, now, effects)


def _without(group: Group, exchange: Exchange, member_id: int, now: float, effects: Effects) -> None:
    if exchange.failure is not None:
        tell(group, exchange, member_id, effects)
        return
    exchange.pass_over(member_id)
    for piece in exchange.ready(member_id):
        complete(group, exchange, piece, now, effects)


def note_what_counted(group: Group, number: int, current: Round, member_id: int) -> None:
    """Note that all that ``member_id`` gave to the finished buckets of a round counted."""
    if group.plan is None or member_id not in current.weights:
        return
    for part in current.done:
        _, start, stop = group.share(ExchangeKey(BUCKET, number, part), group.plan.buckets[part].operation)
        current.cut_off(member_id, part, stop - start)
