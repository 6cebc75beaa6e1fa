"""Messages about the members of a group, and about learners that become members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import number
from gradserver.protocol.declared import BESIDE, Field, nested, several
from gradserver.protocol.fields import Count, Flag, Rank, Ranks, Seconds, Text, Texts
from gradserver.protocol.limits import MAX_FRAME_BYTES, MAX_LIST, MAX_PACE
from gradserver.protocol.message_family import MessageKind, Payloads, message
from gradserver.protocol.offers import Offer, PlaneName, unpack_offers
from gradserver.protocol.planes import TCP


@message(21, Payloads.optional(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Membership(MessageKind):
    """Membership of a group, from ``epoch`` on.

    It takes effect for a member that is told this epoch or a later one. A RoundDone tells it, or the failure of a
    collective.

    Attributes:
        epoch: number of this membership.
        member_ids: ids of the members, by rank. A member keeps its id.
        names: names of the members, by rank.
        reason: the change, for people.
        lost: true if a worker was lost, rather than left.
        entering: ids of those of them that contribute to ``round`` as their first one. For another member
            they are not there until that round is over. It may still be in collectives that were called before they
            came.
        round: the round that they came with.
        plane: the way of the gradients in this epoch (`gradserver.protocol.offers`).
        plane_reason: why it is that one, as a part of a sentence.
        offers: what the members can do, by rank, if any of them has told. It travels in the payload.
    """

    epoch: Count
    member_ids: Ranks
    names: Texts
    reason: Text
    lost: Flag
    entering: Ranks = ()
    round: Count = 0
    plane: PlaneName = TCP
    plane_reason: Text = ""
    offers: Annotated[tuple[Offer, ...], BESIDE] = ()

    def with_offers(self, payloads: Sequence[Buffer]) -> Self:
        """Return the message with the offers that came in its payload."""
        return replace(self, offers=unpack_offers(payloads)) if payloads else self

    def behind(self, number: int) -> Membership:
        """Return the membership for a member that has ended round ``number``, and not the next one."""
        if not self.entering or number >= self.round:
            return self
        there = [rank for rank, member_id in enumerate(self.member_ids) if member_id not in self.entering]
        return replace(
            self,
            member_ids=tuple(self.member_ids[rank] for rank in there),
            names=tuple(self.names[rank] for rank in there),
            offers=tuple(self.offers[rank] for rank in there) if self.offers else (),
        )


class Transfer(NamedTuple):
    """The order that the member ``donor`` sends its state to the one ``learner``, by its number.

    With ``waits`` the next round waits for the learner. Otherwise the learner is sent the results unasked, until it has
    caught up.
    """

    number: Count
    donor: Rank
    learner: Rank
    waits: Flag = True


@message(22)
@dataclass(frozen=True, slots=True)
class RoundDone(MessageKind):
    """The end of a round at all shards; ``epoch`` is that of the next one.

    ``transfers`` are of the state that members have when they have applied this round.
    """

    round: Count
    epoch: Count
    transfers: Annotated[tuple[Transfer, ...], several(nested(Transfer), MAX_LIST)] = ()


@message(46)
@dataclass(frozen=True, slots=True)
class Split(MessageKind):
    """The request of a member for a sub-group, on a connection of its own that its first one carries.

    The answer is a Welcome, when all have asked that are named.

    Attributes:
        group: name of the parent.
        epoch: number of the parent's membership by which this member goes.
        member_ids: ids in the parent of those that the sub-group is of, in order. The sender is one of them.
        timeout: seconds that this member waits for the others.
        leaders: true if each contributes what its host has summed up. Results that are not finite are passed on then,
            whatever the parent does: each member of the parent looks for its own in such a result.
        again: true if the connection of an earlier request broke. If the sub-group has begun since, the answer is its
            Welcome, and the member says Resume on another branch.
        after: latest epoch of a Welcome to a sub-group that this member has got; 0 for none.
    """

    group: Text
    epoch: Count
    member_ids: Ranks
    timeout: Seconds
    leaders: Flag = False
    again: Flag = False
    after: Count = 0


@message(49)
@dataclass(frozen=True, slots=True)
class Paced(MessageKind):
    """The measured speed of this member, and its part of the work, for people.

    Attributes:
        rate: units of work in a second of computation; 0 if that is not known.
        unit: "samples" or "batches".
        share: its part of the group's work, 0 to 1.
        batches: batches that it computes in a round.
    """

    rate: Annotated[float, Field(number(0.0, MAX_PACE))]
    unit: Text
    share: Annotated[float, Field(number(0.0, 1.0))]
    batches: Count


@message(35)
@dataclass(frozen=True, slots=True)
class Serve(MessageKind):
    """The offer of this member to send its state to learners."""


@message(36)
@dataclass(frozen=True, slots=True)
class Enter(MessageKind):
    """The request of this learner for the state, by the group's plan; again, if ``transfer`` did not bring it.

    With ``waits`` the others are to wait for it, for example since more results come meanwhile than it can keep.
    """

    transfer: Count = 0
    waits: Flag = False


@message(37)
@dataclass(frozen=True, slots=True)
class Ready(MessageKind):
    """The message that this learner has the state of that transfer, and has applied all rounds since that are over."""

    transfer: Count


@message(38)
@dataclass(frozen=True, slots=True)
class Entered(MessageKind):
    """The answer that this learner contributes from ``round`` on."""

    round: Count


@message(39)
@dataclass(frozen=True, slots=True)
class StateFailed(MessageKind):
    """The message that the donor of that transfer cannot send its state."""

    transfer: Count
    reason: Text
