"""Fields of orders and reports, with their checks."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple

from gradserver.engine.policy import Lateness
from gradserver.protocol.checks import brief, facts, flag, integer, listed, number, text
from gradserver.protocol.declared import Field, nested, several
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, MalformedMessageError
from gradserver.protocol.fields import Count, Flag, Rank, Token
from gradserver.protocol.limits import MAX_COUNTER, MAX_NAME_BYTES, MAX_TEXT, MAX_TIMEOUT, MAX_WORLD_SIZE
from gradserver.protocol.messages import Failure, Scope


@dataclass(frozen=True, slots=True)
class Member:
    """A member's place: its connection (-1 where it has yet to come) and its name."""

    connection: int
    name: str


def _member(value: Any) -> Member:
    return Member(-1, _name(value))


_OF_SHARDS: Final = 5
"""Fields of a policy about stragglers that data shards go by, the first ones. Members go by the rest."""


def _lateness(value: Any) -> Lateness | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 5:
        raise MalformedMessageError(f"expected a policy about stragglers, got {brief(value)}")
    quorum, percent, backup, grace, keeps = value
    seconds = number(0.0, MAX_TIMEOUT)(grace)
    try:
        return Lateness(_count(quorum), number(0.0, 100.0)(percent), _count(backup), seconds, flag(keeps))
    except InvalidArgumentError as error:
        raise MalformedMessageError(f"no policy about stragglers: {error.message}") from error


def _pack_error(error: GradServerError) -> list[Any]:
    failure = Failure.of(error, Scope.EXCHANGE)
    return [failure.error, failure.text, failure.fields]


def _error(value: Any) -> GradServerError:
    if type(value) is not list or len(value) != 3:
        raise MalformedMessageError(f"expected an error, got {brief(value)}")
    name, message, fields = value
    return Failure(Scope.EXCHANGE, _text(name), _text(message), facts(fields)).exception()


_name = text(MAX_NAME_BYTES)
_text = text(MAX_TEXT)
_count = integer(0, MAX_COUNTER)
Founders = Annotated[
    tuple[Member, ...], Field(listed(_member, MAX_WORLD_SIZE), lambda members: [member.name for member in members])
]
StragglerPolicy = Annotated[Lateness | None, Field(_lateness, lambda late: late and astuple(late)[:_OF_SHARDS])]
Error = Annotated[GradServerError, Field(_error, _pack_error)]
Occupant = Annotated[Member, Field(_member, attrgetter("name"))]
_OptionalCount = Annotated[int, Field(integer(-1, MAX_COUNTER))]
NEVER: Final = -1
"""Number of a round that does not come."""


class Newcomer(NamedTuple):
    """A learner, or a member in its first round.

    Attributes:
        token: text that it shows to a shard elsewhere.
        first: the first round that waits for it; `NEVER` if none does yet.
        listens: the first round of which it is sent the results unasked; `NEVER` if it is sent none.
        transfer: number of the transfer in which it gets the state; 0 if there is none.
    """

    member_id: Rank
    occupant: Occupant
    token: Token = ""
    first: _OptionalCount = NEVER
    listens: _OptionalCount = NEVER
    transfer: Count = 0


class Departure(NamedTuple):
    """A member or a learner that is gone. Exchanges that cannot go on without it fail with ``error``.

    If its process has ``ended``, no process writes to memory that it shared.
    """

    member_id: Rank
    error: Error
    ended: Flag = False


Newcomers = Annotated[tuple[Newcomer, ...], several(nested(Newcomer), MAX_WORLD_SIZE)]
Departures = Annotated[tuple[Departure, ...], several(nested(Departure), MAX_WORLD_SIZE)]
