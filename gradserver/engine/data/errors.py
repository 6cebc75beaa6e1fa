"""Errors of exchanges: each names the culprit, the exchange, and what is known of the cause."""

from __future__ import annotations

from gradserver.engine.data.exchange import Exchange
from gradserver.engine.data.group import Group
from gradserver.engine.events import Broken, NonFinite, Undecodable
from gradserver.protocol.advice import OVERFLOW, on_not_finite
from gradserver.protocol.errors import (
    AbandonedError,
    CollectiveMismatchError,
    CoordinatorError,
    DeadlineError,
    GradServerError,
    NonFiniteError,
)
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Op, Operation


def abandoned(group: Group, exchange: Exchange, member_id: int, key: ExchangeKey) -> AbandonedError:
    """Return the error of an exchange that ``member_id`` left behind when it went on to ``key``."""
    return AbandonedError(
        f"{group.call(member_id)} went on to {group.describe(key)} without {group.describe(exchange.key)} "
        f"({group.named(exchange.operation)})"
    )


def mismatch(group: Group, exchange: Exchange, member_id: int, operation: Operation) -> CollectiveMismatchError:
    """Return the error of an exchange in which ``member_id`` called another operation than the members before it."""
    return CollectiveMismatchError(
        f"{group.describe(exchange.key)} is not the same everywhere: {group.call(exchange.first)} called "
        f"{group.named(exchange.operation)}, {group.call(member_id)} called {group.named(operation)}"
    )


def non_finite(group: Group, exchange: Exchange, element: int, found: NonFinite) -> NonFiniteError:
    """Return the error of an exchange to which a member contributed NaN or Inf."""
    key = exchange.key
    where, parameter, bucket = f"element {element}", "", None
    if key.stream == BUCKET and group.plan is not None:
        bucket = group.plan.buckets[key.part]
        parameter = bucket.component_at(element).name
        where = bucket.tensor_at(element) + ("" if found.exact else ", or one beside it,")
    if found.member_id < 0:
        culprit, name, advice = "the mean overflowed, though every contribution was finite:", "", OVERFLOW
    else:
        culprit, name = f"{group.call(found.member_id)} contributed", group.members.identities.names[found.member_id]
        advice = on_not_finite([(bucket, element)])
    return NonFiniteError(
        f"{culprit} {found.value} in {where} of {group.describe(key, exchange.operation)}; the group is halted "
        f"and nothing of this slice was handed out. {advice}",
        worker=name,
        rank=group.members.identities.rank(found.member_id),
        bucket=group.bucket_name(key),
        parameter=parameter,
        round=key.number,
    )


def undecodable(group: Group, exchange: Exchange, found: Undecodable) -> GradServerError:
    """Return the error of a member that contributed bytes which cannot be decoded."""
    what = group.describe(exchange.key, exchange.operation)
    due = "are not frames" if exchange.operation.op is Op.FRAMED else f"is not {exchange.layout.codec.name}"
    return type(found.error)(f"{group.call(found.member_id)} contributed to {what} what {due}: {found.error}")


def broken(group: Group, exchange: Exchange, found: Broken) -> CoordinatorError:
    """Return the error of an exchange that the coordinator could not reduce."""
    return CoordinatorError(
        f"{group.describe(exchange.key, exchange.operation)} failed, because the coordinator could not reduce it: "
        f"{found.cause}"
    )


def overdue(group: Group, exchange: Exchange) -> DeadlineError:
    """Return the error of an exchange that waited too long for a member."""
    timeout = group.order.round_timeout
    missing = exchange.missing()
    have = [member_id for member_id in exchange.participants if member_id not in missing]
    awaited = group.members.calls(missing) if missing else "the coordinator to reduce it"
    return DeadlineError(
        f"{group.describe(exchange.key, exchange.operation)} waited {timeout:g} s (--round-timeout) for {awaited}"
        + (f"; {group.members.calls(have)} had come" if have else ""),
        missing=tuple(group.call(member_id) for member_id in missing),
        bucket=group.bucket_name(exchange.key),
        round=exchange.key.number if exchange.key.stream == BUCKET else -1,
    )
