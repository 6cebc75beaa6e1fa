"""Types of fields that many declarations share: what each is, and its check (`gradserver.protocol.declared`)."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from gradserver.protocol.checks import brief, flag, integer, listed, number, text
from gradserver.protocol.declared import Field
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import (
    MAX_COUNTER,
    MAX_NAME_BYTES,
    MAX_RATE,
    MAX_SHARDS,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.plan import Plan, decode_plan


def _plan(value: Any) -> Plan:
    if type(value) is not bytes:
        raise MalformedMessageError(f"expected a plan, got {brief(value)}")
    return decode_plan(value)


_rank = integer(0, MAX_WORLD_SIZE - 1)
_token = text(MAX_TOKEN)

Flag = Annotated[bool, Field(flag)]
Count = Annotated[int, Field(integer(0, MAX_COUNTER))]
"""Rounds, epochs, versions, numbers of transfers, bytes."""
Rank = Annotated[int, Field(_rank)]
"""A rank, or a seat: the identity of a member for the life of an elastic group."""
Ranks = Annotated[tuple[int, ...], Field(listed(_rank, MAX_WORLD_SIZE))]
Seconds = Annotated[float, Field(number(0.0, MAX_TIMEOUT))]
Name = Annotated[str, Field(text(MAX_NAME_BYTES))]
"""The name of a group or a worker."""
Text = Annotated[str, Field(text(MAX_TEXT))]
Token = Annotated[str, Field(_token)]
Tokens = Annotated[tuple[str, ...], Field(listed(_token, MAX_WORLD_SIZE))]
Rates = Annotated[tuple[float, ...], Field(listed(number(0.0, MAX_RATE), MAX_SHARDS))]
"""What data shards can carry, in Gbit/s or compared with one another."""
EncodedPlan = Annotated[Plan, Field(_plan, attrgetter("encoded"))]
