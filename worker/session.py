"""A worker's side of the protocol: joining, agreeing and leaving, and the channel's messages, one by one.

`gradserver.worker.traffic` has what it exchanges, `gradserver.worker.boundaries` its rounds, and
`gradserver.worker.member` what both go by.

No sockets and no threads of its own: a channel calls `receive` and `lost`, the client calls the rest,
each from any thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ClosedError, CoordinatorStoppedError, DeadlineError, GradServerError, UsageError
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    Entered,
    Failure,
    Join,
    Leave,
    Membership,
    Message,
    Missing,
    Opened,
    Result,
    RoundDone,
    Scope,
    Transfer,
    Welcome,
)
from gradserver.protocol.messages.leases import Claimed, Located
from gradserver.protocol.messages.recovery import Fetch, Resumed, Standing
from gradserver.protocol.plan import Plan, Section
from gradserver.worker.agreement import Agreement
from gradserver.worker.boundaries import Boundaries
from gradserver.worker.coder import Coder
from gradserver.worker.donor import Donor
from gradserver.worker.handle import Handle
from gradserver.worker.leases import Leases
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.machine import Member
from gradserver.worker.member.slots import Slots
from gradserver.worker.member.waiter import Waiter
from gradserver.worker.resumption import Resumption
from gradserver.worker.traffic import Traffic
from gradserver.worker.transport import forking
from gradserver.worker.turns import Turns

log = logging.getLogger("gradserver")

_PATIENCE_SECONDS = 5.0
"""Seconds that a worker that leaves waits for a lost coordinator, as other members may need what it holds."""
_FAREWELL_SECONDS = 1.0
"""Seconds that a worker that leaves waits for the coordinator to have heard it."""
MAX_REASON = 500
"""Characters of a reason for leaving that others are shown."""


class Lasting(Channel, Protocol):
    """The channel of a durable group, which outlives connections: `gradserver.worker.transport.reconnect.Lifeline`."""

    @property
    def resumption(self) -> Resumption:
        """The resuming of the session on another connection."""

    def region(self, nbytes: int) -> Bytes | None:
        """Memory that the coordinator may write to; None if there is none."""

    def goes_on_with(self, shards: tuple[str, ...], answers: bool) -> bool:
        """Return true if data shards are known to be at ``shards``, from now on if that ``answers`` a Resume."""

    def stopped(self, error: CoordinatorStoppedError) -> None:
        """The coordinator has said that it stops."""

    def prepare_to_leave(self, patience: float) -> None:
        """End waits from now on. If there is no coordinator, give it ``patience`` seconds to be back first."""

    def part(self) -> None:
        """The membership is over."""


class Session:
    """A worker's membership of one group, over one channel: each event goes to the part that it is for.

    Attributes:
        member: what the worker has begun, may send and holds. Its events are taken with the traffic's mutex held.
        traffic: what it exchanges.
        boundaries: its rounds.
        learner: what it was told when it joined a group that trains already.
        donor: what it sends to learners.
        turns: what it says and asks where several modules share rounds.
        leases: what it asks and tells of data.
        resumption: how it outlives connections; None unless the group is durable.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self.member = Member(channel, Coder)
        self.traffic = Traffic(self.member, channel, timeout, self)
        self.learner = self.member.learner
        self.donor, self.turns, self.leases = Donor(self), Turns(self), Leases(self)
        self.boundaries = Boundaries(self.traffic, self.leases, self.turns, self.donor)
        self.resumption: Resumption | None = None
        self._joining: Handle | None = None
        self._attending: dict[int, Handle] = {}
        self._visited: list[int] = []
        """Shards that know of us, or will."""
        self._leaving: dict[int, Handle] = {}
        self._lifeline: Lasting | None = None
        self._disowned: UsageError | None = None
        """Error for a forked child: all this belongs to its parent."""
        self.push_bucket, self.finish_round = self.boundaries.push_bucket, self.boundaries.finish_round
        self.collective, self.transfer = self.traffic.collective, self.traffic.transfer
        self.check_open, self.idle = self.traffic.check_open, self.member.idle
        self.tell, self.send, self.new_handle = self.traffic.tell, self.traffic.send, self.traffic.new_handle
        self.heed, self.on_membership = self.boundaries.heed, self.boundaries.on_membership
        self.observe, self.next_instruction = self.boundaries.observe, self.boundaries.next_instruction
        self.member_of = self.member.identity.member_of
        channel.attach(self)
        forking.own(self)

    # ── what it is ────────────────────────────────────────────────────────────────────────────────────

    @property
    def membership(self) -> Welcome:
        """Members of the group, and which of them this worker is."""
        return self.member.identity.membership

    @property
    def stage(self) -> Stage:
        """This worker's part in the group."""
        return self.member.identity.stage

    @property
    def plan(self) -> Plan | None:
        """Plan of the rounds, once members have agreed."""
        return self.member.rounds.plan

    @property
    def round(self) -> int:
        """The round that is open or next."""
        return self.member.rounds.number

    @property
    def timeout(self) -> float:
        """Seconds for which calls wait."""
        return self.traffic.timeout

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""
        return self.traffic.closed is not None

    @property
    def is_durable(self) -> bool:
        """True if this membership outlives connections."""
        return self.resumption is not None

    def empty(self, nbytes: int) -> Bytes | None:
        """Memory that the coordinator sees too; None if there is none, or any memory is as good."""
        return self.traffic.channel.empty(nbytes)

    def state_part(self, transfer: Transfer, index: int, memory: Bytes) -> Handle:
        """Send, or receive into ``memory``, part ``index`` of a state."""
        return self.traffic.state_part(transfer, index, memory, self.donor.check)

    # ── joining, agreeing, leaving ────────────────────────────────────────────────────────────────────

    def join(self, join: Join) -> Handle:
        """Ask to be let in. The handle is done when the group is complete."""
        joining = self._joining = Handle(join.timeout, self.traffic.channel)
        self.traffic.channel.send(join)
        return joining

    def agree(self, plan: Plan, timeout: float | None, beside: bool = False) -> Agreement:
        """Agree with all members to exchange by ``plan``. After a wait that ran out, calling again waits on.

        In place of all others; or ``beside`` those that there are.
        """
        handle = self._propose(plan, beside)
        try:
            section: Section = handle.wait(timeout)
        finally:
            if not handle._open:
                self.member.plans.withdraw()
        agreement = Agreement(self.finish_round, self.member.plans, plan, section.number, section.first)
        self.member.plans.keep(section.number, weakref.ref(agreement) if beside else lambda: agreement)
        return agreement

    def endure(self, lifeline: Lasting) -> None:
        """Take ``lifeline`` for the channel from now on: with it this membership outlives connections."""
        self._lifeline, self.resumption = lifeline, lifeline.resumption
        self.traffic.endure(lifeline)
        self.member.exchanges.endure(lifeline, Slots(lifeline, lifeline.region), self.resumption.inventory)

    def propose_again(self, channel: Channel) -> None:
        """Say on a new connection what the others have yet to agree with, and what is asked and told of data."""
        with self.traffic.mutex:
            proposal = self.member.plans.open
        if proposal is not None:
            channel.send(proposal.message, (proposal.plan.encoded,))
        self.turns.say_again(channel)
        self.leases.say_again(channel)

    def _propose(self, plan: Plan, beside: bool = False) -> Handle:
        plans = self.member.plans
        with self.traffic.mutex:
            self.check_open()
            if (waiting := plans.check(plan)) is not None:
                assert isinstance(waiting, Handle)
                return waiting
            payload = plan.encoded  # refuses a plan that is too large to go
            handle = self.new_handle(_not_agreed)
            message = plans.propose(plan, beside, handle).message
        try:
            self.traffic.channel.send(message, (payload,))
        except GradServerError:
            plans.withdraw()
            raise
        return handle

    def close(self, reason: str, failed: bool = False) -> None:
        """Leave the group; whatever is open fails with ClosedError. ``failed``: because of an error."""
        if self._disowned is not None:
            raise self._disowned.again()
        error = ClosedError(f"the worker was closed ({reason})")
        if self._lifeline is not None and not self.closed:
            self._lifeline.prepare_to_leave(0.0 if failed else _PATIENCE_SECONDS)
        with self.traffic.mutex:
            still_open = self.traffic.close(error)
            self.member.exchanges.send_nothing()
        if still_open:
            self._say_goodbye(Leave(reason[:MAX_REASON], failed))
        self.traffic.channel.close()
        self._fail_everything(error)

    def _say_goodbye(self, leave: Leave) -> None:
        """Leave, and wait until the coordinator has heard it, and so all that was said before.

        A connection that is closed too early can take with it what the other side has not read yet. Other data
        shards hear it first: what was said to them counts too, and the coordinator then tells them to forget us. In a
        recovery a shard may have no connection to this worker yet, and nothing has been said to it.
        """
        reached = [number for number in self._visited if not self.member.exchanges.shards[number].held]
        with suppress(GradServerError):
            for numbers in (reached, [0]):
                for number in numbers:
                    self._leaving[number] = Handle(_FAREWELL_SECONDS, self.traffic.channel)
                    self.traffic.channel.send(leave, (), number)
                for number in numbers:
                    with suppress(DeadlineError):
                        self._leaving[number].wait(_FAREWELL_SECONDS)

    @property
    def disowned(self) -> bool:
        """True if this process is a forked child, and the membership its parent's."""
        return self._disowned is not None

    def disown(self, owner: int) -> None:
        """Refuse any use of this in a forked child: it belongs to the process ``owner``.

        Locks may be held by threads that the child does not have, and what the parent waits for will not come here.
        """
        if self._disowned is not None or self.closed:
            return
        error = UsageError(
            f"this worker belongs to process {owner}, which connected, and not to its forked child {os.getpid()}: use "
            f"it there, or call connect() in the child"
        )
        self._disowned = error
        self.traffic.disown(error)
        self.leases.disown()
        self.member.rounds.pushed.clear()
        for channel in {id(channel): channel for channel in (self.traffic.channel, *self._channels())}.values():
            for method in ("send", "wait", "watch", "close"):
                setattr(channel, method, self._refuse)

    def _channels(self) -> set[Channel]:
        """Channels at which a thread may wait."""
        waiting = self.member.exchanges.waiting()
        return {one._channel for one in waiting if isinstance(one, Handle) and one._channel is not None}

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        assert self._disowned is not None
        raise self._disowned.again()

    # ── what the channel calls ────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message from the coordinator."""
        if type(message) is Result:
            self.traffic.take_result(message, payloads)
            return
        match message:
            case Failure():
                self._take_failure(message)
            case Welcome():
                with self.traffic.mutex:
                    self.traffic.welcomed(message)
                    joining, self._joining = self._joining, None
                if joining is not None:
                    joining._complete()
            case Leave():
                self._heard_goodbye(0)
            case Membership():
                self._take_membership(message)
            case RoundDone():
                self.traffic.hand(self._round_done, message)
            case Entered(number):
                self.traffic.hand(self.member.entered, number)
            case Agreed():
                self.traffic.hand(self.member.agreed, message, payloads)
            case Opened():
                with self.traffic.mutex:
                    followers = self.turns.opened(message)
                for follower in followers:
                    follower._complete()
            case Located() | Claimed():
                self.leases.answered(message, payloads)
            case Resumed() | Fetch() | Standing() if self.resumption is not None:
                self.resumption.heed(message, 0)
            case Missing():
                self.traffic.take_missing(message)

    def lost(self, error: GradServerError) -> None:
        """The channel broke: everything open, and everything later, fails with ``error``."""
        with self.traffic.mutex:
            self.traffic.close(error)
        if self._lifeline is not None:
            self._lifeline.part()
        self._fail_everything(error)

    def receive_from(self, shard: int, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message from a data shard that is not the coordinator itself."""
        match message:
            case Result():
                self.traffic.take_result(message, payloads, shard)
            case Failure():
                self._take_failure(message, shard)
            case Attended():
                with self.traffic.mutex:
                    attending = self._attending.pop(shard, None)
                if attending is not None:
                    attending._complete()
            case Leave():
                self._heard_goodbye(shard)
            case Missing():
                self.traffic.take_missing(message)
            case Resumed() | Fetch() | Standing() if self.resumption is not None:
                self.resumption.heed(message, shard)

    def attend(self, shard: int, timeout: float, channel: Channel | None = None, version: int = 0) -> Handle:
        """Tell a data shard which worker this is; the handle is done when it has let the worker in.

        In a recovery with the generation ``version`` that a Resumed brought, on the ``channel`` on which that came.
        """
        welcome, channel = self.membership, channel or self.traffic.channel
        with self.traffic.mutex:
            handle = self._attending[shard] = Handle(timeout, channel)
        if shard not in self._visited:
            self._visited.append(shard)
        epoch, seat = version or welcome.founded or welcome.epoch, self.member_of(welcome.rank)
        channel.send(Attend(welcome.group, epoch, seat, welcome.token), (), shard)
        return handle

    def stop_attending(self) -> list[Handle]:
        """Attend no more: those connections have ended. Give the handles that wait for that."""
        with self.traffic.mutex:
            waiting, self._attending = list(self._attending.values()), {}
        return waiting

    def goes_on_with(self, shards: Sequence[str], answers: bool) -> bool:
        """Return true if connections go to ``shards``, or will if that ``answers`` a Resume. Else all are made anew."""
        return self._lifeline is None or self._lifeline.goes_on_with(tuple(shards), answers)

    def _round_done(self, done: RoundDone) -> None:
        self.member.round_done(done)
        self.donor.asked(done, self.member.identity.member_id)

    def _take_membership(self, news: Membership) -> None:
        self.traffic.hand(self.member.membership_told, news)
        if news.seats[0] == self.member.identity.member_id:  # one of them is to say it
            level = logging.WARNING if news.lost else logging.INFO
            log.log(level, "group %r: %s", self.membership.group, news.reason)

    def _heard_goodbye(self, shard: int) -> None:
        if shard in self._leaving:
            self._leaving[shard]._complete()

    def _take_failure(self, failure: Failure, shard: int = 0) -> None:
        error = failure.exception()
        match failure.scope:
            case Scope.EXCHANGE:
                if failure.key is not None:
                    self.traffic.take_failure(failure.key, error, shard)
            case Scope.PROPOSAL:
                self.traffic.hand(self.member.proposal_failed, error)
            case Scope.DATA:
                self.leases.failed(str(failure.fields.get("data")), error)
            case Scope.CONNECTION if self._lifeline is not None and isinstance(error, CoordinatorStoppedError):
                self._lifeline.stopped(error)  # another one may take its place
            case Scope.CONNECTION:
                self.lost(error)

    def _fail_everything(self, error: GradServerError) -> None:
        with self.traffic.mutex:
            handles: list[Waiter] = [*self.traffic.give_up(), *self._attending.values()]
            handles += [self._joining] if self._joining is not None else []
            handles += self.turns.give_up()
            handles += self._leaving.values()
            handles += self.leases.give_up()
            self._joining = None
        for handle in handles:
            handle._complete(error)


class ShardReceiver:
    """Receiver of one data shard's messages, for the session."""

    def __init__(self, session: Session, shard: int) -> None:
        self._session = session
        self._shard = shard

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message."""
        self._session.receive_from(self._shard, message, payloads)

    def lost(self, error: GradServerError) -> None:
        """The connection to this shard broke, and nothing goes without it."""
        self._session.lost(error)


def _not_agreed(seconds: float) -> DeadlineError:
    return DeadlineError(f"the plan is not agreed on after {seconds:g} s: not every member has proposed it")
