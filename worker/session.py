"""A worker's side of the protocol: joining, agreeing and leaving, and the channel's messages, one by one.

`gradserver.worker.traffic` has what it exchanges, `gradserver.worker.boundaries` its rounds, and
`gradserver.worker.member` what both go by.

No sockets and no threads of its own: a channel calls `receive` and `lost`, the client calls the rest,
each from any thread.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import (
    ClosedError,
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
    LeftOutError,
    UnexpectedMessageError,
    UsageError,
)
from gradserver.protocol.exchange import Operation
from gradserver.protocol.messages import Failure, Join, Leave, Message, Result, Scope, Split, Welcome
from gradserver.protocol.messages.recovery import Fetch, Resumed, Standing
from gradserver.protocol.messages.waiting import Cause, Recheck
from gradserver.protocol.plan import Plan, Section
from gradserver.worker.agreement import Agreement
from gradserver.worker.boundaries import Boundaries
from gradserver.worker.donor import StateSender
from gradserver.worker.handle import Handle
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.machine import Member
from gradserver.worker.member.slots import Slots
from gradserver.worker.resumption import Resumption
from gradserver.worker.stalls import Stalls
from gradserver.worker.subgroups import Subgroups
from gradserver.worker.traffic import Asking, Traffic
from gradserver.worker.transport import forking
from gradserver.worker.workspace import WORKSPACE

_PATIENCE_SECONDS = 5.0
"""Seconds that a worker that leaves waits for a lost coordinator, as other members may need what it holds."""
_FAREWELL_SECONDS = 1.0
"""Seconds that a worker that leaves waits for the coordinator to have heard it."""
_MAX_EARLY = 1024
"""Messages of recoveries that can come before a session is ready for them. Those of an earlier recovery are void."""
MAX_REASON = 500
"""Characters of a reason for leaving that others are shown."""


class Lasting(Channel, Protocol):
    """The channel of a durable group, which outlives connections (`gradserver.worker.transport.reconnect`)."""

    @property
    def resumption(self) -> Resumption:
        """The resuming of the session on another connection."""

    def region(self, nbytes: int) -> Bytes | None:
        """Memory that the coordinator may write to; None if there is none."""

    def stopped(self, error: CoordinatorStoppedError) -> None:
        """The coordinator has said that it stops."""

    def make_anew(self, error: GradServerError) -> None:
        """Make all connections anew, for ``error``."""

    def prepare_to_leave(self, patience: float) -> None:
        """End waits from now on. If there is no coordinator, give it ``patience`` seconds to be back first."""

    def put_out_beacon(self) -> None:
        """Show no more that this process runs: the membership is over."""


class Session:
    """A worker's membership of one group, over one channel: each event goes to the part that it is for.

    Attributes:
        member: what the worker has begun, may send and holds. Its events are taken with the traffic's mutex held.
        traffic: what it exchanges.
        boundaries: its rounds.
        learner: what it was told when it joined a group that trains already.
        donor: what it sends to learners.
        subgroups: memberships of sub-groups, which end with this one.
        resumption: how it outlives connections; None unless the group is durable.
        disowned: error for a forked child, if this process is one: all this belongs to its parent.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self.member = Member(channel, WORKSPACE)
        self.traffic = Traffic(self.member, channel, timeout, self)
        self.learner = self.member.learner
        self.donor = StateSender(self.traffic)
        self.boundaries = Boundaries(self.traffic, self.donor)
        self.resumption: Resumption | None = None
        self._early = deque[tuple[Resumed | Fetch | Standing, int]](maxlen=_MAX_EARLY)
        """Messages of recoveries that came before `endure`, each with its data shard."""
        self._lasting: Lasting | None = None
        self.application: Join | None = None
        """The request by which this worker was let in; None in a sub-group."""
        self.disowned: UsageError | None = None
        self.subgroups: Subgroups[Session] = Subgroups(self)
        self.traffic.stalls = Stalls(self._tell_of_waits, self._all_traffic)
        self._endings: list[Callable[[], object]] = []
        self.push_bucket, self.finish_round = self.boundaries.push_bucket, self.boundaries.finish_round
        self.transfer = self.traffic.transfer
        self.state_part, self.ask = self.traffic.state_part, self.traffic.ask
        self.check_open, self.idle = self.traffic.check_open, self.member.idle
        self.tell, self.new_handle = self.traffic.tell, self.traffic.new_handle
        self.heed, self.on_membership = self.boundaries.heed, self.boundaries.on_membership
        self.steps, self.follow = self.boundaries.steps, self.boundaries.follow
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
    def is_lasting(self) -> bool:
        """True if this membership outlives connections."""
        return self._lasting is not None

    @property
    def is_busy(self) -> bool:
        """True if an exchange is under way, here or in a sub-group."""
        return self.member.exchanges.is_busy or self.subgroups.is_busy

    # ── joining, agreeing, leaving ────────────────────────────────────────────────────────────────────

    def join(self, join: Join | Split) -> Handle:
        """Ask to be let in, or for a sub-group. The handle is done when the group is complete."""
        if isinstance(join, Join):
            self.application = join
        wait_for = Asking(self.traffic, Cause.SUBGROUP, _not_complete, "the others to make the same sub-group")
        joining = Handle(join.timeout, self.traffic.channel, None, wait_for)
        with self.traffic.mutex:
            self.member.attachment.join(joining)
        self.traffic.channel.send(join)
        return joining

    @property
    def may_join_anew(self) -> bool:
        """True if this worker is about to join a group that outlives connections, and can ask for that once more."""
        return self._lasting is not None and self.application is not None and self.member.may_join_anew

    def collective(
        self,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        weight: float = 1.0,
        value: Any = None,
        background: bool = False,
    ) -> Handle:
        """Take part in the group's next collective. See `Traffic.collective`."""
        self.boundaries.settle()
        return self.traffic.collective(operation, source, destination, weight, value, background)

    def agree(self, plan: Plan, timeout: float | None, beside: bool = False) -> Agreement:
        """Agree with all members to exchange by ``plan``. After a wait that ran out, calling again waits on.

        In place of all others; or ``beside`` those that there are.
        """
        self.boundaries.settle()
        handle = self._propose(plan, beside)
        try:
            section: Section = handle.wait(timeout)
        finally:
            if not handle._open:
                self.member.plans.withdraw()
        agreement = Agreement(self.finish_round, self.member.plans, plan, section.number, section.first)
        self.member.plans.keep(section.number, weakref.ref(agreement) if beside else lambda: agreement)
        return agreement

    def endure(self, channel: Lasting) -> None:
        """Take ``channel`` from now on: with it this membership outlives connections."""
        self._lasting, resumption = channel, channel.resumption
        self.traffic.channel = channel
        self.member.exchanges.endure(channel, Slots(channel, channel.region), resumption.inventory)
        while True:
            with self.traffic.mutex:
                if not self._early:
                    self.resumption = resumption
                    return
                message, shard = self._early.popleft()
            resumption.heed(message, shard)

    def _propose(self, plan: Plan, beside: bool = False) -> Handle:
        plans = self.member.plans
        with self.traffic.mutex:
            self.check_open()
            if (waiting := plans.check(plan)) is not None:
                assert isinstance(waiting, Handle)
                return waiting
            payload = plan.encoded  # refuses a plan that is too large to go
            handle = self.new_handle(_not_agreed, Cause.PLAN, "the plan that it has proposed")
            message = plans.propose(plan, beside, handle).message
        try:
            self.traffic.channel.send(message, (payload,))
        except GradServerError:
            plans.withdraw()
            raise
        return handle

    def close(self, reason: str, failed: bool = False, waits: bool = True) -> None:
        """Leave the group and its sub-groups; whatever is open fails with ClosedError. ``failed``: because of an error.

        Without ``waits`` it is not known on return that the coordinator has heard this.
        """
        if self.disowned is not None:
            raise self.disowned.again()
        self.subgroups.close(reason, failed)
        error = ClosedError(f"the worker was closed ({reason})")
        if self._lasting is not None and not self.closed:
            self._lasting.prepare_to_leave(0.0 if failed else _PATIENCE_SECONDS)
        with self.traffic.mutex:
            still_open = self.traffic.close(error)
            self.member.exchanges.send_nothing()
        if still_open:
            self._say_goodbye(Leave(reason[:MAX_REASON], failed), waits)
        self.traffic.channel.close()
        self._fail_everything(error)

    def _say_goodbye(self, leave: Leave, waits: bool) -> None:
        """Leave, and wait until the coordinator has heard it, and so all that was said before.

        A connection that is closed too early can take with it what the other side has not read yet. Other data
        shards hear it first: what was said to them counts too, and the coordinator then tells them to forget us.
        """
        attachment, channel = self.member.attachment, self.traffic.channel
        with suppress(GradServerError):
            welcome = self.member.identity.welcome
            if not waits and (welcome is None or not welcome.shards):
                channel.send(leave)
                return
            for numbers in (attachment.reached(self.member.exchanges.shards), [0]):
                leaving = [Handle(_FAREWELL_SECONDS, channel) for _ in numbers]
                for number, handle in zip(numbers, leaving, strict=True):
                    with self.traffic.mutex:
                        attachment.leave(number, handle)
                    channel.send(leave, (), number)
                for handle in leaving:
                    with suppress(DeadlineError):
                        handle.wait(_FAREWELL_SECONDS)

    def disown(self, owner: int) -> None:
        """Refuse any use of this in a forked child: it belongs to the process ``owner``.

        Locks may be held by threads that the child does not have, and what the parent waits for will not come here.
        """
        if self.disowned is not None or self.closed:
            return
        error = UsageError(
            f"this worker belongs to process {owner}, which connected, and not to its forked child {os.getpid()}: use "
            f"it there, or call connect() in the child"
        )
        self.disowned = error
        self.traffic.disown(error)
        self.member.rounds.forget_pushes()
        waiting = self.member.exchanges.waiting()  # a thread may wait at an earlier channel
        channels = [one._channel for one in waiting if isinstance(one, Handle) and one._channel is not None]
        for channel in {id(channel): channel for channel in (self.traffic.channel, *channels)}.values():
            for method in ("send", "wait", "watch", "close"):
                setattr(channel, method, self._refuse)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        assert self.disowned is not None
        raise self.disowned.again()

    # ── what the channel calls ────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message from the coordinator."""
        if type(message) is Result:
            self.traffic.take_result(message, payloads)
        elif not self._has_taken(message, 0):
            if type(message) is Welcome:
                self.traffic.timeout = message.timeout or self.traffic.timeout
            self.traffic.hand(self.member.told, message, payloads)

    def receive_from(self, shard: int, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take one message from a data shard that is not the coordinator itself."""
        if type(message) is Result:
            self.traffic.take_result(message, payloads, shard)
        elif not self._has_taken(message, shard):
            self.traffic.hand(self.member.told_by, shard, message)

    def _has_taken(self, message: Message, shard: int) -> bool:
        """Take a message that is about the connection, or has something sent again. Return false for any other."""
        match message:
            case Failure(scope=Scope.CONNECTION):
                error = message.exception()
                if self._lasting is not None and isinstance(error, CoordinatorStoppedError):
                    self._lasting.stopped(error)  # another one may take its place
                elif self._lasting is not None and isinstance(error, LeftOutError) and self.may_join_anew:
                    self._lasting.make_anew(error)
                elif self._lasting is not None and self._is_unknown(error, shard):
                    self._lasting.make_anew(error)  # the coordinator knows whether this worker is out
                else:
                    self.lost(error)
            case Recheck(check) if (stalls := self.traffic.stalls) is not None:
                stalls.look(check)
            case Failure():
                self.traffic.hand(self.member.told_by, shard, message)
                self.traffic.pump()  # the credit of what has failed is free
            case Resumed() | Fetch() | Standing() if self._is_durable:
                with self.traffic.mutex:
                    if (resumption := self.resumption) is None:
                        self._early.append((message, shard))
                if resumption is not None:
                    resumption.heed(message, shard)
            case _:
                return False
        return True

    def _is_unknown(self, error: GradServerError, shard: int) -> bool:
        """Return true if ``error`` says that a data shard does not know this worker, which is about to attend it."""
        return isinstance(error, UnexpectedMessageError) and self.member.attachment.attends(shard)

    @property
    def _is_durable(self) -> bool:
        welcome = self.member.identity.welcome
        return welcome is not None and welcome.durable

    def _tell_of_waits(self, message: Message) -> None:
        self.traffic.channel.send(message)

    def _all_traffic(self) -> list[Traffic]:
        return [session.traffic for session in (self, *self.subgroups.sessions)]

    def lost(self, error: GradServerError) -> None:
        """The channel broke: everything open, and everything later, fails with ``error``."""
        with self.traffic.mutex:
            self.traffic.close(error)
        if self._lasting is not None:
            self._lasting.put_out_beacon()
        self._fail_everything(error)
        self.subgroups.lose(error)

    def end(self, error: GradServerError) -> None:
        """Fail everything with ``error``, and close the channel: what carries it has ended."""
        self.lost(error)
        self.traffic.channel.close()

    def attend(self, shard: int, timeout: float, channel: Channel | None = None, generation: int = 0) -> Handle:
        """Tell a data shard which worker this is; the handle is done when it has let the worker in.

        In a recovery, with the ``generation`` that a Resumed brought, on the ``channel`` on which that came.
        """
        channel = channel or self.traffic.channel
        handle = Handle(timeout, channel)
        with self.traffic.mutex:
            message = self.member.attachment.attend(shard, generation, handle)
        channel.send(message, (), shard)
        return handle

    def _fail_everything(self, error: GradServerError) -> None:
        with self.traffic.mutex:
            waiting = self.member.give_up()
        for waiter in waiting:
            waiter._complete(error)
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def on_end(self, end: Callable[[], object]) -> None:
        """Call ``end`` when nothing can be sent any more."""
        self._endings.append(end)


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


def _not_complete(seconds: float) -> DeadlineError:
    return DeadlineError(f"the group is not complete after {seconds:g} s")


def _not_agreed(seconds: float) -> DeadlineError:
    return DeadlineError(f"the plan is not agreed on after {seconds:g} s: not every member has proposed it")
