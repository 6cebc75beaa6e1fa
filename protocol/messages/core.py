"""Messages of every connection: joining, waiting for a group, liveness, failures and the status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Self

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import Fact, facts, integer
from gradserver.protocol.declared import BESIDE, Field
from gradserver.protocol.errors import ERRORS, GradServerError
from gradserver.protocol.exchange import ExchangeKey
from gradserver.protocol.fields import (
    AnyRank,
    Count,
    Flag,
    Grain,
    MeanRule,
    OptionalKey,
    Ranks,
    Rates,
    Seconds,
    Text,
    Texts,
    Token,
)
from gradserver.protocol.harmless import one_line
from gradserver.protocol.limits import MAX_FRAME_BYTES, MAX_STALENESS, MAX_TEXT, MAX_WORLD_SIZE, PROBE_BYTES
from gradserver.protocol.means import PLAIN
from gradserver.protocol.message_family import MessageKind, Payloads, message
from gradserver.protocol.offers import UNTOLD, Offer, OneOffer, PlaneName, unpack_offers
from gradserver.protocol.planes import TCP

# ── joining ───────────────────────────────────────────────────────────────────────────────────────────


@message(1)
@dataclass(frozen=True, slots=True)
class Join(MessageKind):
    """The request of a worker to join.

    Attributes:
        group: name of the group.
        name: name of this worker, for people.
        rank: the rank it must have, or -1 for any that is free.
        world_size: how many workers the group must have, or 0 for the coordinator's number.
        timeout: seconds that this worker waits for the group to be complete; and for an exchange, if the
            coordinator has no limit for that.
        offer: what this worker can do.
        key: text that the worker draws once, and that cannot be guessed. By it a founder of a durable group gets the
            Welcome again that was lost with its coordinator. Empty for none.
    """

    group: Text
    name: Text
    rank: AnyRank
    world_size: Annotated[int, Field(integer(0, MAX_WORLD_SIZE))]
    timeout: Seconds
    offer: OneOffer = UNTOLD
    key: Token = ""


@message(2, Payloads.optional(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Welcome(MessageKind):
    """The answer that the group is complete.

    Attributes:
        credit: bytes that the worker may have in flight, in each pool.
        names: names of the members, by rank.
        shards: URLs of the data shards beside the coordinator itself.
        rates: rates of all shards, to compare; the coordinator's own is the first.
        token: what the worker shows to the data shards, and in a Resume.
        member_ids: ids of the members, by rank.
        durable: true if the group survives broken connections and its coordinator
            (`gradserver.protocol.messages.recovery`).
        incarnation: how often the coordinator of a durable group has begun.
        founded: the epoch by which shards know the group, if that is another one.
        joins: true if the worker joins a running group. It is not a member yet: ids, names and rank are those that
            it would have as one.
        late: "keep" if a late contribution is kept for the next round, "drop" if it is forgotten. Empty if all members
            are waited for.
        timeout: seconds that an exchange waits for a member that is alive.
        nonfinite: the policy for gradients that are not finite: "halt", "leave-out", "skip" or "propagate".
        mean: the rule by which gradients are averaged (`gradserver.protocol.means`).
        needs_all: true if the group ends when any member is lost.
        plane: the way of the gradients (`gradserver.protocol.offers`).
        plane_reason: why it is that one, as a part of a sentence.
        demanded: true if a worker or the coordinator demands that plane.
        commits: true if modules have a commit beside their gradients, with which a round can be direct.
        digests: true if a commit has the digest of the results, for the ledger.
        mode: mode of the rounds: "sync", "bounded" or "async".
        staleness: most updates by which a contribution may be late; -1 for no limit. In mode "sync" it is the most
            rounds for which a late contribution is kept.
        damping: factor of stale contributions, or of those that are kept: "none" or "inverse".
        places: the largest number of members; their ids are below. 0 if that is not known.
        grain: size of slices; 0 for slices as large as they may be (`gradserver.protocol.slicing`).
        again: true for a member that was let in before, and says Resume on another connection.
        offers: what the members can do, by rank, if any of them has told. It travels in the payload.
    """

    group: Text
    rank: AnyRank
    epoch: Count
    credit: Count
    names: Texts
    shards: Texts = ()
    rates: Rates = ()
    token: Text = ""
    member_ids: Ranks = ()
    durable: Flag = False
    incarnation: Count = 0
    founded: Count = 0
    joins: Flag = False
    late: Text = ""
    timeout: Seconds = 0.0
    nonfinite: Text = "halt"
    mean: MeanRule = PLAIN
    needs_all: Flag = False
    plane: PlaneName = TCP
    plane_reason: Text = ""
    demanded: Flag = False
    commits: Flag = False
    digests: Flag = False
    mode: Text = "sync"
    staleness: Annotated[int, Field(integer(-1, MAX_STALENESS))] = -1
    damping: Text = "none"
    places: Annotated[int, Field(integer(0, MAX_WORLD_SIZE))] = 0
    grain: Grain = 0
    again: Flag = False
    offers: Annotated[tuple[Offer, ...], BESIDE] = ()

    def with_offers(self, payloads: Sequence[Buffer]) -> Self:
        """Return the message with the offers that came in its payload."""
        return replace(self, offers=unpack_offers(payloads)) if payloads else self


@message(51, Payloads.optional(PROBE_BYTES))
@dataclass(frozen=True, slots=True)
class Probe(MessageKind):
    """Bytes that mean nothing, of a worker that measures its link before it joins."""


@message(52)
@dataclass(frozen=True, slots=True)
class Probed(MessageKind):
    """The answer, when all of them have come."""


# ── connections, and liveness ─────────────────────────────────────────────────────────────────────────


@message(9)
@dataclass(frozen=True, slots=True)
class Leave(MessageKind):
    """A goodbye. ``failed`` says that an error is the reason, so that the others hear of a loss."""

    reason: Text
    failed: Flag = False


@message(10)
@dataclass(frozen=True, slots=True)
class Ping(MessageKind):
    """A message that shows whether the connection still stands. A peer's is answered, the coordinator's is not."""


@message(50)
@dataclass(frozen=True, slots=True)
class Notice(MessageKind):
    """A warning for the person that runs this worker."""

    text: Text


@message(40)
@dataclass(frozen=True, slots=True)
class BePresent(MessageKind):
    """The request to connect once more, as ``identity``, and to let libzmq show there that this process runs.

    It may be silent for ``silence`` seconds. No message ever passes there but the first, a Ping. A later BePresent with
    another identity replaces this one.
    """

    identity: Token
    silence: Seconds


@message(41)
@dataclass(frozen=True, slots=True)
class Present(MessageKind):
    """The answer that this is done, and that libzmq has shown there for the first time that this process runs.

    From now on a freeze would be noticed, even while a thread keeps Python's lock.
    """

    identity: Token


# ── status ────────────────────────────────────────────────────────────────────────────────────────────


@message(11)
@dataclass(frozen=True, slots=True)
class StatusRequest(MessageKind):
    """A question: what does the coordinator see? Any process may ask."""


@message(12, Payloads.one(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Status(MessageKind):
    """The coordinator's snapshot; the payload is JSON."""


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


class Scope(IntEnum):
    """The extent of a failure."""

    EXCHANGE = 0
    """One exchange; the group goes on."""
    PROPOSAL = 1
    """The proposed plan; the worker may propose another."""
    CONNECTION = 2
    """This worker's connection, which the coordinator forgets after this message."""
    DATA = 3
    """A question about data; the name of the data is in the fields."""
    REQUEST = 4
    """The request for a round: the group goes no further."""


_MAX_LISTED = 32
_known_scope = integer(0, max(Scope))


def _scope(value: Any) -> Scope:
    return Scope(_known_scope(value))


@message(0)
@dataclass(frozen=True, slots=True)
class Failure(MessageKind):
    """An error on its way to the worker that has to raise it.

    Attributes:
        scope: how much fails.
        error: name of the class in `gradserver.protocol.errors`.
        text: the message.
        fields: the error's typed facts: text, integer, or tuple of text.
        key: the exchange, for Scope.EXCHANGE.
    """

    scope: Annotated[Scope, Field(_scope)]
    error: Text
    text: Text
    fields: Annotated[dict[str, Fact], Field(facts)] = field(default_factory=dict)
    key: OptionalKey = None

    @classmethod
    def of(cls, error: GradServerError, scope: Scope, key: ExchangeKey | None = None) -> Failure:
        """Return the message that carries ``error``."""
        fields: dict[str, str | int | tuple[str, ...]] = {}
        for name, value in error.fields.items():
            if isinstance(value, str):
                fields[name] = value[:MAX_TEXT]
            elif isinstance(value, int):
                fields[name] = value
            elif isinstance(value, (tuple, list)):
                fields[name] = tuple(str(item)[:MAX_TEXT] for item in value[:_MAX_LISTED])
        return cls(scope, type(error).__name__, error.message[:MAX_TEXT], fields, key)

    def exception(self) -> GradServerError:
        """Return the error to raise. A class or field that this version does not know becomes the nearest it does."""
        kind = ERRORS.get(self.error, GradServerError)
        known = {name: _harmless(value) for name, value in self.fields.items() if name in kind._FIELDS}
        return kind(one_line(self.text), **known)


def _harmless(fact: Fact) -> Fact:
    if isinstance(fact, str):
        return one_line(fact)
    return tuple(map(one_line, fact)) if isinstance(fact, tuple) else fact
