"""Failures of exchanges: they are told to contributors, and forgotten when all have heard.

A collective or transfer fails alone. A bucket halts its group, and it is control that halts groups. So no member is
told before that is written, or if a recovery begins meanwhile: in that all of them push the bucket again.
"""

from __future__ import annotations

from gradserver.engine.data.exchange import Exchange
from gradserver.engine.data.group import Group
from gradserver.engine.effects import Effects
from gradserver.engine.reports import Halted
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.messages import Failure, Scope


def halt_all(group: Group, error: GradServerError, buckets_only: bool, effects: Effects) -> None:
    """Hand out nothing any more in this group, or no bucket: control has written that down."""
    error = group.halt_buckets(error) if buckets_only else group.halt(error)
    for exchange in list(group.exchanges.values()):
        if exchange.key.stream == BUCKET or not buckets_only:
            fail(group, exchange, error, effects)


def give_up(group: Group, exchange: Exchange, error: GradServerError, effects: Effects) -> None:
    """Fail ``exchange``, which cannot go on; have control halt the group if it is a bucket."""
    if exchange.key.stream == BUCKET:
        effects.report(Halted(group.order.group, error, True))
    else:
        fail(group, exchange, error, effects)


def fail(group: Group, exchange: Exchange, error: GradServerError, effects: Effects) -> None:
    """Fail ``exchange``, and tell its contributors. Others are told when they come."""
    if exchange.failure is not None:
        return
    group.traffic.refund(exchange, exchange.fail(error))
    if exchange.key.stream == BUCKET:
        group.halt_buckets(error)
    group.exchanges.keep_failed(exchange)
    tell_all(group, exchange, effects)


def tell_all(group: Group, exchange: Exchange, effects: Effects) -> None:
    """Tell the contributors; if a reduction writes to their memory, tell them when it has ended."""
    if not exchange.reducing:
        for member_id in (*exchange.pushed, *exchange.absent):  # absent members that have not departed are late
            tell(group, exchange, member_id, effects)
        forget_if_over(group, exchange)


def tell(group: Group, exchange: Exchange, member_id: int, effects: Effects) -> None:
    """Tell ``member_id`` why ``exchange`` failed."""
    if member_id not in group.members.departed and exchange.failure is not None:
        say_failed(group, member_id, exchange.key, exchange.failure, effects)


def say_failed(group: Group, member_id: int, key: ExchangeKey, error: GradServerError, effects: Effects) -> None:
    """Tell ``member_id`` that its part in ``key`` has failed because of ``error``."""
    effects.send(group.members.connections[member_id], Failure.of(error, Scope.EXCHANGE, key))


def forget_if_over(group: Group, exchange: Exchange) -> None:
    """Keep nothing of a failed exchange that all participants have heard of."""
    if (
        exchange.failure is not None
        and not exchange.reducing
        and all(_has_heard(group, exchange, member_id) for member_id in exchange.participants)
    ):
        group.exchanges.end(exchange)


def _has_heard(group: Group, exchange: Exchange, member_id: int) -> bool:
    """Tell whether ``member_id`` was told that ``exchange`` has failed, or has gone on without it."""
    return (
        member_id in exchange.pushed
        or member_id in group.members.departed
        or group.sequences.is_past(member_id, exchange.key)
    )
