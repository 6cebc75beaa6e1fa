"""Types of fields that many declarations share: what each is, and its check (`gradserver.protocol.declared`)."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Final

from gradserver.protocol.checks import brief, flag, integer, listed, number, numbers, optional, text
from gradserver.protocol.declared import Field
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.limits import (
    MAX_CLAIMED,
    MAX_COUNTER,
    MAX_LIST,
    MAX_NAME_BYTES,
    MAX_NUMEL,
    MAX_PROOF_BYTES,
    MAX_RATE,
    MAX_SEED,
    MAX_SHARDS,
    MAX_SLICES,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
)
from gradserver.protocol.means import Mean, known_mean
from gradserver.protocol.plan import Plan, decode_plan
from gradserver.protocol.slicing import MAX_GRAIN

LAST_STREAM: Final = int(max(Stream))
MAX_TOTAL: Final = 2 * MAX_WORLD_SIZE * MAX_WEIGHT
"""Largest sum of weights: sums round."""


def _plan(value: Any) -> Plan:
    if type(value) is not bytes:
        raise MalformedMessageError(f"expected a plan, got {brief(value)}")
    return decode_plan(value)


def _key(value: Any) -> ExchangeKey:
    if type(value) is not list or not 3 <= len(value) <= 5:
        raise MalformedMessageError(f"expected an exchange's key, got {brief(value)}")
    stream, number, part, *peers = value
    return ExchangeKey(_stream(stream), count(number), count(part), *map(any_rank, peers))


def _squares(value: Any) -> tuple[float, ...]:
    if type(value) is not list or len(value) > 2 * MAX_SLICES or not set(map(type, value)) <= {float}:
        raise MalformedMessageError(f"expected at most {2 * MAX_SLICES} floating numbers, got {brief(value)}")
    if len(value) % 2 or any(total < 0 for total in value[::2]):
        raise MalformedMessageError(
            f"expected sums of squares in pairs of which no first one is negative: {brief(value)}"
        )
    return tuple(value)


def proof(value: Any) -> bytes:
    """Check a proof."""
    if type(value) is not bytes or len(value) > MAX_PROOF_BYTES:
        raise MalformedMessageError(f"expected at most {MAX_PROOF_BYTES} bytes, got {brief(value)}")
    return value


_stream = integer(0, LAST_STREAM)
count = integer(0, MAX_COUNTER)
rank = integer(0, MAX_WORLD_SIZE - 1)
any_rank = integer(-1, MAX_WORLD_SIZE - 1)
_text = text(MAX_TEXT)
_token = text(MAX_TOKEN)
weights = numbers(-MAX_WEIGHT, MAX_WEIGHT, MAX_WORLD_SIZE)

Flag = Annotated[bool, Field(flag)]
Count = Annotated[int, Field(count)]
"""Rounds, epochs, versions, numbers of transfers, bytes."""
Counts = Annotated[tuple[int, ...], Field(listed(count, MAX_LIST))]
Stated = Annotated[int, Field(integer(0, MAX_CLAIMED))]
"""A round or an epoch that a worker says it is in."""
Rank = Annotated[int, Field(rank)]
"""A rank, or a member id: the identity of a member for the life of a group."""
Ranks = Annotated[tuple[int, ...], Field(listed(rank, MAX_WORLD_SIZE))]
AnyRank = Annotated[int, Field(any_rank)]
"""A rank, or -1 for none or any."""
Seconds = Annotated[float, Field(number(0.0, MAX_TIMEOUT))]
Name = Annotated[str, Field(text(MAX_NAME_BYTES))]
"""The name of a group, a worker or of data."""
Text = Annotated[str, Field(_text)]
Texts = Annotated[tuple[str, ...], Field(listed(_text, MAX_LIST))]
Token = Annotated[str, Field(_token)]
Tokens = Annotated[tuple[str, ...], Field(listed(_token, MAX_WORLD_SIZE))]
Rates = Annotated[tuple[float, ...], Field(listed(number(0.0, MAX_RATE), MAX_SHARDS))]
"""Rates of data shards, in Gbit/s or compared with one another."""
Weight = Annotated[float, Field(number(0.0, MAX_WEIGHT))]
Total = Annotated[float, Field(number(0.0, MAX_TOTAL))]
"""A sum of weights."""
Weights = Annotated[tuple[float, ...], Field(weights)]
"""Weights of the contributions that counted, by member id; negative ones are of contributions that are not finite."""
Squares = Annotated[tuple[float, ...], Field(_squares)]
"""Sums of squares, two numbers for each slice: the sum, and the rest that it lacks."""
Proof = Annotated[bytes, Field(proof)]
"""The proof of slices: in front the generation in which they were made, and then a code for each."""
Numel = Annotated[int, Field(integer(0, MAX_NUMEL))]
"""A number of elements or of samples."""
Seed = Annotated[int, Field(integer(0, MAX_SEED))]
Key = Annotated[ExchangeKey, Field(_key)]
OptionalKey = Annotated[ExchangeKey | None, Field(optional(_key))]
EncodedPlan = Annotated[Plan, Field(_plan, attrgetter("encoded"))]
Rate = Annotated[float, Field(number(0.0, MAX_RATE))]
"""The rate of a link in Gbit/s; 0 if it is not known."""
Grain = Annotated[int, Field(integer(0, MAX_GRAIN))]
"""The number that the size of slices follows from (`gradserver.protocol.slicing`)."""
MeanRule = Annotated[Mean, Field(known_mean, str)]
