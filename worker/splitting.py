"""Calls that make sub-groups: each gets a session of its own, over a branch of this worker's connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from gradserver.protocol.errors import ClosedError, ConnectionLostError, InvalidArgumentError, UsageError
from gradserver.protocol.messages import Split
from gradserver.worker.collectives.objects import ObjectCollectives
from gradserver.worker.handle import VERDICT_SECONDS, Timeout, seconds
from gradserver.worker.member.learner import Stage
from gradserver.worker.session import Session, ShardReceiver
from gradserver.worker.transport.branches import Branch


class SubgroupCalls(ObjectCollectives):
    """The calls of a worker that make sub-groups."""

    channel: str
    timeout: float
    wire: str

    if TYPE_CHECKING:

        def __init__(self, session: Session, channel: str, wire: str) -> None: ...

    def subgroup(self, ranks: Iterable[int], timeout: Timeout = None) -> Self | None:
        """Make a group of some members of this one. Return this worker's membership of it; None if it is not in it.

        The members named call this with the same ranks. Others may call it, and it does nothing there. Members that
        have several sub-groups in common make them in the same order. Order and repetition of ``ranks`` do not matter:
        members keep their order, and ranks in the sub-group count from 0.

        The sub-group has its own ranks, rounds, plans and epochs. Collectives, `DistributedDataParallel` and
        `GradientExchange` take it as they take any worker, and what it does never waits for other groups. Its messages
        pass through this worker's connection. It ends when it or this worker is closed. If this group goes on without
        members that are lost, so does the sub-group. Otherwise the loss of one of its members ends it.

        Args:
            ranks: ranks in this group.
            timeout: seconds to wait for the others, without those in which there is no coordinator. None for this
                worker's own.

        Raises:
            InvalidRankError: a rank is out of range.
            DeadlineError: a member did not call in time. The error names it.
            CollectiveMismatchError: two members wait for each other in different sub-groups. The error names both.
            WorkerLostError: a member was lost that this group cannot do without.
        """
        check_member(self._session)
        chosen = sorted({self._check_rank(rank, "a rank of a sub-group") for rank in ranks})
        if not chosen:
            raise InvalidArgumentError("a sub-group has one member at least, and no rank was given")
        if self.rank not in chosen:
            return None
        member_ids, limit = [self._session.member_of(rank) for rank in chosen], seconds(timeout)
        made = split(self._session, member_ids, self.timeout if limit is None else limit)
        return type(self)(made, self.channel, self.wire)

    def hosts(self, timeout: Timeout = None) -> Self:
        """Make a sub-group of the members on this worker's host. All of these call it.

        When all members of the group call it, there is one sub-group for each host. A host is a running system:
        containers on one machine are of one host. `subgroup` raises its errors here, too.
        """
        check_member(self._session)
        membership = self._session.membership
        ids = [offer.host_id for offer in membership.offers] or [""] * self.world_size  # threads have no id of a host
        made = self.subgroup([rank for rank, host in enumerate(ids) if host == ids[membership.rank]], timeout)
        assert made is not None, "this worker is on its own host"
        return made


def split(
    session: Session,
    member_ids: Sequence[int],
    timeout: float,
    leaders: bool = False,
    begun: Callable[[Session], object] = lambda _: None,
) -> Session:
    """Make a sub-group of these members of ``session``. Wait for the others, and return this worker's session there.

    GradServerError says why there is none.

    Args:
        session: this worker's session.
        member_ids: ids of the members.
        timeout: seconds to wait for the others.
        leaders: the members are the leaders of their hosts: see `gradserver.protocol.messages.Split`.
        begun: is called with the new session before the wait. To close it ends the wait.
    """
    root = session.subgroups.root
    ids = session.subgroups.in_root(member_ids)
    with root.subgroups.making:
        made = _ask(root, ids, timeout, leaders, begun)
    made.subgroups.be_of(root, ids)
    if session is not root:
        session.subgroups.adopt(made)
    if (error := session.traffic.closed) is not None:  # it ended meanwhile, and did not know of this one
        made.end(error)
        raise error.again()
    return made


def check_member(session: Session) -> None:
    """Raise UsageError if this worker is no member yet, or no more."""
    session.check_open()
    for one in (session, session.subgroups.root):
        if one.stage is not Stage.MEMBER:
            raise UsageError(f"this worker {one.stage.value}: it is in no sub-group before it is a member")


def _ask(
    root: Session, member_ids: tuple[int, ...], timeout: float, leaders: bool, begun: Callable[[Session], object]
) -> Session:
    """Ask the coordinator for the sub-group, and once more if the connection of a durable group breaks meanwhile.

    Leaders do not: they have no sub-group until the next epoch. Time without a connection does not count.
    """
    left, again = timeout, False
    while True:
        channel, since = root.subgroups.grow(), time.monotonic()
        session, membership = Session(channel, left), root.membership
        asked = membership.group, membership.epoch, member_ids, left, leaders
        try:
            begun(session)
            _come_in(root, session, Split(*asked, again, root.subgroups.latest))
        except BaseException as error:
            again = isinstance(error, ConnectionLostError | ClosedError) and root.is_lasting and not leaders
            session.close("the sub-group could not be made", waits=not again)
            left -= time.monotonic() - since
            if not again or left <= 0.0:
                raise
            root.check_open()
            root.traffic.channel.look()
        else:
            return session


def _come_in(root: Session, session: Session, split: Split) -> None:
    """Ask for the sub-group, wait for the others, and attend its data shards."""
    channel = session.traffic.channel
    session.traffic.stalls = root.traffic.stalls
    asked = session.join(split)
    root.subgroups.adopt(session)  # what ends the root ends this wait
    root.check_open()
    root.subgroups.check_carried(channel)  # so does the end of the connection, from now on
    asked.wait()
    if (welcome := session.membership).durable:
        root.subgroups.keep(channel, session, split.again)
        root.subgroups.note_welcome(welcome.epoch)
        return
    for number, url in enumerate(welcome.shards, 1):
        assert isinstance(channel, Branch), "only a coordinator on a network has data shards"
        channel.reach(url, ShardReceiver(session, number))
        session.attend(number, split.timeout).wait(split.timeout + VERDICT_SECONDS)
