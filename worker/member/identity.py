"""Place of this worker in its group, as the coordinator has told it."""

from __future__ import annotations

from dataclasses import replace

from gradserver.protocol.errors import MalformedMessageError, UsageError
from gradserver.protocol.messages import Membership, Result, Welcome
from gradserver.worker.member.learner import FOLLOWS, Stage
from gradserver.worker.member.waiter import NotFinite, Waiter


class Identity:
    """Membership and stage of one worker. Not safe to share: the session's lock guards what is written.

    Attributes:
        welcome: the last thing that the coordinator told of the group's members; None before it has let this worker in.
        stage: whether this worker is a member yet.
        sifts: whether gradients that are not finite are left out, or their rounds skipped.
    """

    def __init__(self) -> None:
        self.welcome: Welcome | None = None
        self.stage = Stage.MEMBER
        self.sifts = False

    @property
    def membership(self) -> Welcome:
        """Members of the group, and which of them this worker is."""
        if self.welcome is None:
            raise UsageError("this worker has not joined a group yet")
        return self.welcome

    @property
    def member_id(self) -> int:
        """Number by which exchanges know this worker."""
        return self.member_of(self.membership.rank)

    def member_of(self, rank: int) -> int:
        """Give the member id of ``rank``."""
        return self.membership.member_ids[rank]

    def rank_of(self, member_id: int) -> int:
        """Give the rank of ``member_id``; of what is no member id here, the number itself."""
        return self.membership.member_ids.index(member_id) if member_id in self.membership.member_ids else member_id

    def take(self, welcome: Welcome) -> None:
        """Take the coordinator's word that this worker is let in."""
        self.welcome = welcome
        self.sifts = welcome.nonfinite in ("leave-out", "skip")
        self.stage = Stage.JOINING if welcome.joins else Stage.MEMBER

    def go_on_as(self, stage: Stage) -> None:
        """Go to a stage that may follow the present one."""
        assert stage in FOLLOWS[self.stage], f"{stage} of a worker that is {self.stage}"
        self.stage = stage

    def adopt(self, news: Membership, epoch: int) -> set[int]:
        """Go by ``news`` from now on, as a member. Return ids of members that this worker did not know before."""
        before = self.membership
        new = set(news.member_ids).difference(() if self.stage is Stage.ENTERED else before.member_ids)
        rank = news.member_ids.index(before.member_ids[before.rank])
        there = replace(before, rank=rank, epoch=epoch, names=news.names, member_ids=news.member_ids)
        self.welcome = replace(there, plane=news.plane, plane_reason=news.plane_reason, offers=news.offers)
        self.go_on_as(Stage.MEMBER)
        return new

    def check(self, news: Membership) -> None:
        """Raise MalformedMessageError if ``news`` cannot be a membership of this worker."""
        member_ids, rank = self.membership.member_ids, self.membership.rank
        if member_ids[rank] not in news.member_ids or len(news.names) != len(news.member_ids):
            raise MalformedMessageError(f"a Membership of members {news.member_ids[:16]} for {len(news.names)} names")
        _check_offers(news)

    def note_not_finite(self, waiter: Waiter, result: Result) -> None:
        """Note for ``waiter`` that some members gave what is not finite to the slices of ``result``."""
        own, before = self.member_id in result.nonfinite, waiter.not_finite
        waiter.not_finite = NotFinite(own or (before is not None and before.own), self.membership.nonfinite == "skip")

    def not_yet(self, what: str) -> UsageError:
        """Make the error for a call that this worker's stage does not allow."""
        if self.stage is Stage.JOINING:
            return UsageError(
                f"this worker {self.stage.value}, and cannot {what} before it has the state of the others: wrap model "
                f"and optimizer in gradserver.Job, or call Worker.enter"
            )
        return UsageError(f"this worker {self.stage.value}: it can {what} when that round is over")


def _check_offers(message: Membership | Welcome) -> None:
    """Raise MalformedMessageError if there are offers, and not one for each name."""
    if message.offers and len(message.offers) != len(message.names):
        kind = type(message).__name__
        raise MalformedMessageError(f"a {kind} with {len(message.offers)} offers for {len(message.names)} names")


def check_welcome(message: Welcome) -> None:
    """Raise MalformedMessageError if ``message`` contradicts itself."""
    if not 0 <= message.rank < len(message.names):
        raise MalformedMessageError(f"a Welcome as rank {message.rank} of {len(message.names)}")
    if len(message.member_ids) != len(message.names):
        raise MalformedMessageError(f"a Welcome with {len(message.member_ids)} member ids for {len(message.names)}")
    _check_offers(message)
    if message.shards and (len(message.rates) != len(message.shards) + 1 or not any(message.rates)):
        raise MalformedMessageError(f"a Welcome with {len(message.shards) + 1} data shards, and rates {message.rates}")
