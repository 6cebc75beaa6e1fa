"""Abandoned rounds: a round ends that no member can give to any more, as it is closed for all that are left.

The members that it waited for have gone. What counted until then counts. The results of the other slices are zeros of
weight 0, at all members alike. What late members gave to these slices they carry over, or it is dropped.

    round   event                                              next  what happens
    ──────  ─────────────────────────────────────────────────  ────  ───────────────────────────────────────────────
    CLOSED  the last member departs that it is not closed for  OVER  each slice without a result gets zeros
    CLOSED  CutRound for the last of these                     OVER  the same
    CLOSED  a recovery ends, and none of these is left         OVER  the same; but of several modules' rounds, if no
                                                                     member has said which one's it is, this one waits
    CLOSED  … and a late member pushes                         OVER  the same, for the module of that bucket
"""

from __future__ import annotations

from gradserver.engine.data.completion import complete
from gradserver.engine.data.group import Group
from gradserver.engine.data.matching import open_exchange
from gradserver.engine.effects import Effects
from gradserver.protocol.exchange import BUCKET, ExchangeKey


def end_abandoned(group: Group, now: float, effects: Effects, pushed: ExchangeKey | None = None) -> None:
    """End the round that is closed for all members that are left, if there is one; a late one has ``pushed`` this."""
    number = group.stragglers.closed_round
    if number is None or group.plan is None or group.recovery is not None or group.buckets_halted is not None:
        return
    any_bucket = ExchangeKey(BUCKET, number, 0)
    here = group.participants(any_bucket)
    if not here or not all(group.stragglers.is_closed(member_id, any_bucket) for member_id in here):
        return
    current, sections = group.rounds.get(number), group.plan.each
    said = group.stragglers.section_of(number) if current is None else current.section
    section = group.plan.section(said) if said >= 0 else sections[0]
    if said < 0 and len(sections) > 1:
        if pushed is None or pushed.number != number or group.plan.is_vacant(pushed.part):
            return  # no member has said which section it is of: the next push does
        section = group.plan.section_of(pushed.part)
    for part in section.parts if section is not None else ():
        key, operation = ExchangeKey(BUCKET, number, part), group.plan.buckets[part].operation
        _, start, stop = group.share(key, operation)
        if start == stop or (current is not None and part in current.done):
            continue
        exchange = group.exchanges.get(key) or open_exchange(group, here[0], key, operation, 0, now)
        if exchange.failure is None:
            for piece in exchange.rest(here[0]):
                complete(group, exchange, piece, now, effects)
