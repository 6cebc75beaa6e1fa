"""Messages of data shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gradserver.protocol.checks import integer, number, optional
from gradserver.protocol.declared import Field
from gradserver.protocol.fields import AnyRank, Count, Flag, Text, Token
from gradserver.protocol.limits import MAX_COUNTER, MAX_ORDER_BYTES, MAX_RATE, MAX_REPORT_BYTES
from gradserver.protocol.message_family import MessageKind, Payloads, message


@message(19)
@dataclass(frozen=True, slots=True)
class Attend(MessageKind):
    """The message to a data shard that this connection is that of ``member_id``.

    ``token`` is from the Welcome. ``epoch`` is the first one, or the generation of the latest Resumed.
    """

    group: Text
    epoch: Count
    member_id: AnyRank
    token: Text


@message(20)
@dataclass(frozen=True, slots=True)
class Attended(MessageKind):
    """The answer that the shard knows the worker, which may push."""


@message(15)
@dataclass(frozen=True, slots=True)
class Enlist(MessageKind):
    """The offer of a data shard: workers reach it at ``url``; ``rate`` is its link's in Gbit/s, if it was told.

    ``token`` shows that the coordinator has started it; empty at any other.
    """

    url: Text
    rate: Annotated[float | None, Field(optional(number(0.0, MAX_RATE)))] = None
    token: Token = ""


@message(16)
@dataclass(frozen=True, slots=True)
class Enlisted(MessageKind):
    """The answer that the coordinator takes the shard as ``number``. ``returns``: wait for it if it is lost."""

    number: Annotated[int, Field(integer(1, MAX_COUNTER))]
    returns: Flag = False


@message(17, Payloads.one(MAX_ORDER_BYTES))
@dataclass(frozen=True, slots=True)
class Ordered(MessageKind):
    """An order to a data shard; the order is the payload."""


@message(18, Payloads.one(MAX_REPORT_BYTES))
@dataclass(frozen=True, slots=True)
class Reported(MessageKind):
    """A report of a data shard; the report is the payload."""
