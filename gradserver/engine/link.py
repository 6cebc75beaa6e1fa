"""Orders and reports as bytes, on the link between control and a data half elsewhere.

One msgpack array each: [name, field, field, …]; behind a report's name is the epoch that it is about. Names and fields
are those of their declarations. Reports come from any process that has enlisted as a data
shard. So every value is checked before anything is built from it, and reading takes memory in proportion to the bytes
that came. Times are durations: each side has a clock of its own.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgpack

from gradserver.engine.orders import RemoteOrder, order as orders
from gradserver.engine.reports import RemoteReport, report as reports
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief, integer, unpack
from gradserver.protocol.declared import Family
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import MAX_COUNTER, MAX_LIST, MAX_ORDER_BYTES, MAX_REPORT_BYTES

K = TypeVar("K")

_packb: Final = msgpack.Packer(autoreset=True, unicode_errors="replace").pack
_epoch = integer(0, MAX_COUNTER)


def encode_order(order: RemoteOrder) -> bytes:
    """Return ``order`` as it goes to a data shard elsewhere, where no member has attended yet."""
    packed: bytes = _packb([orders.codes[type(order)], *order.pack()])
    return packed


def decode_order(data: Buffer) -> RemoteOrder:
    """Return the order in ``data``; a ProtocolError says why there is none."""
    kind, values = _kind(orders, _unpack(data, MAX_ORDER_BYTES))
    return kind.unpack(values)


def encode_report(epoch: int, report: RemoteReport) -> bytes:
    """Return ``report`` as it goes to the coordinator, about the group's membership ``epoch``."""
    packed: bytes = _packb([reports.codes[type(report)], epoch, *report.pack()])
    return packed


def decode_report(data: Buffer, now: float) -> tuple[int, RemoteReport]:
    """Return the epoch that a report is about, and the report; a ProtocolError says why there is none.

    A round in a report is taken to have ended ``now``.
    """
    kind, values = _kind(reports, _unpack(data, MAX_REPORT_BYTES))
    if not values:
        raise MalformedMessageError(f"{kind.__name__} without an epoch")
    return _epoch(values[0]), kind.unpack(values[1:]).at(now)


def _kind(family: Family[str, K], values: list[Any]) -> tuple[type[K], list[Any]]:
    """Return the kind of an array, by its name, and its fields."""
    if not values or type(values[0]) is not str:
        raise MalformedMessageError(f"expected the name of one {family.what}, got {brief(values)}")
    name, *fields = values
    if name not in family.kinds:
        raise MalformedMessageError(f"there is no {family.what} {name[:32]!r}")
    return family.kinds[name], fields


def _unpack(data: Buffer, limit: int) -> list[Any]:
    if len(data) > limit:
        raise MalformedMessageError(f"{len(data)} bytes between control and data, the limit is {limit}")
    return unpack(data, "neither an order nor a report", MAX_LIST, maps=True)
