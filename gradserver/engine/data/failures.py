"""Failures of exchanges: they are told to contributors, and forgotten when all have heard."""

from __future__ import annotations

from gradserver.engine.data.exchange import Exchange
from gradserver.engine.data.group import Group
from gradserver.engine.effects import Effects
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import BUCKET, ExchangeKey
from gradserver.protocol.messages import Failure, Scope


def halt_all(group: Group, error: GradServerError, buckets_only: bool, effects: Effects) -> None:
    """Hand out nothing any more in this group, because of ``error`` here or at another shard."""
    if buckets_only:
        group.halt_buckets(error)
        return
    error = group.halt(error)
    for exchange in list(group.exchanges.values()):
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
        for rank in (*exchange.pushed, *exchange.absent):  # absent members that have not departed are late
            tell(group, exchange, rank, effects)
        forget_if_over(group, exchange)


def tell(group: Group, exchange: Exchange, rank: int, effects: Effects) -> None:
    """Tell ``rank`` why ``exchange`` failed."""
    if rank not in group.members.departed and exchange.failure is not None:
        say_failed(group, rank, exchange.key, exchange.failure, effects)


def say_failed(group: Group, rank: int, key: ExchangeKey, error: GradServerError, effects: Effects) -> None:
    """Tell ``rank`` that its part in ``key`` has failed because of ``error``."""
    effects.send(group.members.connections[rank], Failure.of(error, Scope.EXCHANGE, key))


def forget_if_over(group: Group, exchange: Exchange) -> None:
    """Keep nothing of a failed exchange that all participants have heard of."""
    if (
        exchange.failure is not None
        and not exchange.reducing
        and all(_has_heard(group, exchange, rank) for rank in exchange.participants)
    ):
        group.exchanges.end(exchange)


def _has_heard(group: Group, exchange: Exchange, rank: int) -> bool:
    """Tell whether ``rank`` was told that ``exchange`` has failed, or has gone on without it."""
    return rank in exchange.pushed or rank in group.members.departed or group.sequences.is_past(rank, exchange.key)
