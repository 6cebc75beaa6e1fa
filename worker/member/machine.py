"""A member: what it has begun, what it may send, and what becomes of it.

Each method takes one event, and leaves what follows from it in `Member.effects`. Its caller holds the session's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.errors import RoundVoidError, WorkerLostError
from gradserver.protocol.exchange import AMONG_MEMBERS, BUCKET, ExchangeKey, Operation
from gradserver.protocol.limits import MAX_COUNTER, MAX_TEXT, SLICE_BYTES
from gradserver.protocol.messages import Agreed, Attended, Failure, Granted, Leave, Message, Opened, Scope, Welcome
from gradserver.protocol.messages.core import Notice
from gradserver.protocol.messages.data import Missing, Push, Result
from gradserver.protocol.messages.leases import Claimed, Located
from gradserver.protocol.messages.membership import Entered, Membership, RoundDone, Transfer
from gradserver.worker.member.attachment import Attachment
from gradserver.worker.member.carryover import OWED_WEIGHT
from gradserver.worker.member.coder import Workspace
from gradserver.worker.member.donor import Donor
from gradserver.worker.member.effects import Effects, Log, Lose, Said, Tell
from gradserver.worker.member.entering import Entering
from gradserver.worker.member.exchange import NO_SLICES, Exchange
from gradserver.worker.member.exchanges import NOT_SENT, Exchanges
from gradserver.worker.member.identity import Identity, check_welcome
from gradserver.worker.member.inquiries import Inquiries
from gradserver.worker.member.learner import Learner, Stage
from gradserver.worker.member.leases import Leases
from gradserver.worker.member.plans import Plans
from gradserver.worker.member.progress import Progress
from gradserver.worker.member.requests import Requests
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.slots import Memory
from gradserver.worker.member.stragglers import Ended, Stragglers, overrun
from gradserver.worker.member.turns import Turns
from gradserver.worker.member.waiter import Waiter


class Member:
    """One member of one group. Not safe to share: the session's lock guards it.

    Args:
        channel: it says where memory lies that the coordinator sees too.
        workspace: memory for encoding lossy exchanges.

    Attributes:
        effects: what is to be carried out.
        identity: its place in the group.
        rounds: the round that it is in.
        plans: what it has proposed.
        attachment: where it is known.
        learner: what a worker that joins was told.
        donor: what it is to send to learners.
        stragglers: results that come before their bucket, and gradients that come after it.
        exchanges: what it has under way.
        inquiries: what it asks about those that take too long.
        turns: what it says and asks where several modules share rounds.
        leases: what it asks and tells of data.
        entering: its steps into a group that trains already.
        requests: rounds that it asks for, where they do not wait for all members.
    """

    def __init__(self, channel: Memory, workspace: Workspace) -> None:
        self.effects = Effects()
        self.identity = Identity()
        self.rounds = Rounds(self.identity)
        self.plans = Plans(self.rounds)
        self.attachment = Attachment(self.effects, self.identity)
        self.learner, self.donor = Learner(), Donor(self.rounds)
        self.stragglers = Stragglers(self.identity, self.rounds)
        what = self.effects, self.identity, self.rounds, self.stragglers
        self.exchanges = Exchanges(*what, channel, workspace)
        self.inquiries = Inquiries(self.effects, self.identity, self.rounds, self.exchanges)
        self.turns, self.leases = Turns(self.effects, self.rounds), Leases(self.effects, self.rounds)
        self.entering = Entering(self.identity, self.rounds, self.learner, self.stragglers)
        self.requests = Requests(*what, self.exchanges, self.leases, self.entering)

    # ── what it is told ───────────────────────────────────────────────────────────────────────────────

    def told(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Take what the coordinator says, but for results and recoveries."""
        match message:
            case Welcome():
                self.welcomed(message.with_offers(payloads))
            case Membership():
                self.membership_told(message.with_offers(payloads))
            case RoundDone():
                self.round_done(message)
            case Entered(number):
                self.effects.complete_all([*self.learner.entered(number), *self.requests.give_up()])
            case Notice(text):
                self.effects.add(Log("%s", (text,)))
            case Granted():
                self.requests.answered(message)
            case Agreed():
                self.agreed(message, payloads)
            case Opened():
                self.turns.opened(message)
            case Located() | Claimed():
                self.leases.answered(message, payloads)
            case _:
                self.told_by(0, message)

    def told_by(self, shard: int, message: Message) -> None:
        """Take what any data shard says, or the coordinator (shard 0)."""
        match message:
            case Failure():
                self._failed(message, shard)
            case Attended() if shard > 0:
                self.attachment.attended(shard)
            case Leave():
                self.attachment.heard_goodbye(shard)
            case Missing():
                self.inquiries.answered(message, shard)

    def _failed(self, failure: Failure, shard: int) -> None:
        """Take the word that something that this member has begun or asked fails."""
        error = failure.exception()
        match failure.scope:
            case Scope.EXCHANGE if failure.key == AMONG_MEMBERS:
                for waiter in self.rounds.announced.broken():
                    self.effects.complete(waiter, error)
            case Scope.EXCHANGE if failure.key is not None:
                if (waiting := self.rounds.commit_failed(failure.key, error)) is not None:
                    self.effects.complete(waiting, error)
                if not isinstance(error, RoundVoidError) or not error.epoch:  # else it is about memberships before
                    self.exchanges.fail(failure.key, error, shard)
                    self.inquiries.failed(failure.key, error, shard)
                    self.requests.wake()
            case Scope.PROPOSAL if (proposal := self.plans.open) is not None:
                self.effects.complete(proposal.waiter, error)
            case Scope.DATA:
                self.leases.failed(str(failure.fields.get("data")), error)
            case Scope.REQUEST:
                self.requests.failed(error)

    # ── memberships and plans ─────────────────────────────────────────────────────────────────────────

    def welcomed(self, welcome: Welcome) -> None:
        """Begin with what the coordinator says when it lets this worker in."""
        check_welcome(welcome)
        self.identity.take(welcome)
        self.rounds.announced.welcomed(welcome.epoch)
        self.exchanges.welcomed(welcome)
        self.attachment.attended(0)

    @property
    def may_join_anew(self) -> bool:
        """True if this worker joins a running group, and neither has its state nor was told that it contributes."""
        return self.identity.stage is Stage.JOINING and not self.is_inside

    def join_anew(self) -> None:
        """Forget what this worker was told of the group that it was about to join. What it asked for it asks for again.

        What comes of a state meanwhile has ended with the connection. So have slots and regions: memory that one
        coordinator could write to, another one never sees.
        """
        self.exchanges.forget_memory()
        self.exchanges.fail_states(WorkerLostError(NOT_SENT), MAX_COUNTER)
        self.learner.begin_anew()
        self.rounds.join_anew()

    def membership_told(self, news: Membership) -> None:
        """Take note of a membership that is in force later."""
        self.identity.check(news)
        self.effects.complete_all(self.rounds.announced.told(news))
        if news.member_ids[0] == self.identity.member_id:  # one of them is to say it
            what = "group %r: %s", (self.identity.membership.group, news.reason)
            self.effects.add(Log(*what, bool(news.lost)))
            before = self.identity.membership
            if (news.plane, news.plane_reason) != (before.plane, before.plane_reason):
                choice = before.group, news.epoch, news.plane, news.plane_reason
                text = "group %r: from membership epoch %d on the plane is %s, because %s"
                self.effects.add(Log(text, choice, False))

    def round_done(self, done: RoundDone) -> None:
        """Take note that a round is over for all."""
        learner, me = self.learner, self.identity.member_id
        before = learner.transfer
        waiting = [*self.rounds.announced.round_done(done), *learner.heard(done, me)]
        if before is not None and (latest := learner.transfer) is not None and latest is not before:
            # The member that was to send the state before cannot. No other message says so.
            self.exchanges.fail_states(WorkerLostError(NOT_SENT), latest.number)
        self.effects.complete_all(waiting)
        self.donor.asked(done, me)
        if done.transfers:
            self.requests.wake()  # it may be the donor

    def agreed(self, message: Agreed, payloads: Sequence[Buffer]) -> None:
        """Go by the plan that the coordinator says is agreed on, if this member waits for one."""
        settled = self.plans.agreed(message, payloads)
        if settled is None:
            return
        if message.round != self.rounds.number:
            self.exchanges.forget_collectives()
        self.rounds.go_by(settled.plan, message.round)
        self.exchanges.agreed(settled.plan, settled.kept)
        self.effects.complete(settled.waiter, value=settled.section)

    def adopt(self, epoch: int, ended: int) -> Membership | None:
        """Go by the membership ``epoch`` from now on, behind round ``ended``; give it if it is a new one."""
        news = self.rounds.announced.take(epoch, ended)
        if news is None or self.identity.member_id not in news.member_ids:
            return None  # a learner is in none before its first round is over
        self.exchanges.adopt(news, self.identity.adopt(news, epoch))
        return news

    # ── a learner ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_inside(self) -> bool:
        """True if this worker contributes, or was told that it is to."""
        return self.learner.round is not None or self.identity.stage in (Stage.ENTERED, Stage.MEMBER)

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────

    def begin_round(self, index: int, weight: float = 1.0) -> None:
        """Begin a round with bucket ``index``, and say what is to be said before the first push."""
        self.rounds.begin(index, self.stragglers.carry.has)
        plan = self.rounds.plan
        assert plan is not None
        if plan.is_shared and self.identity.stage is not Stage.OBSERVING and not self.requests.applies:
            self.turns.begins(plan, index)
        if not self.rounds.attempt and (not self.requests.applies or self.requests.enter(index, weight)):
            self.leases.begin_round(len(self.exchanges.shards) > 1)

    def enter_round(self, index: int, weight: float = 1.0) -> ExchangeKey:
        """Check that bucket ``index`` may be pushed, and give its exchange."""
        identity, rounds = self.identity, self.rounds
        if identity.stage is not Stage.MEMBER:
            self._enter_as_learner()
        if self.requests.applies and not self.requests.enter(index, weight):
            self.stragglers.note_late(rounds.number)  # so nothing of it is sent
        rounds.check_push(index)
        return ExchangeKey(BUCKET, rounds.number, index)

    def _enter_as_learner(self) -> None:
        identity, first = self.identity, self.learner.round
        if identity.stage is Stage.JOINING:
            raise identity.not_yet("exchange gradients")
        if identity.stage is Stage.OBSERVING:
            if first is not None and self.rounds.number >= first:
                identity.go_on_as(Stage.ENTERED)
            else:
                self.stragglers.note_late(self.rounds.number)  # so nothing of it is sent

    def push(
        self,
        key: ExchangeKey,
        operation: Operation,
        data: Bytes,
        weight: float,
        present: bool,
        waiter: Waiter,
        progress: Progress | None = None,
    ) -> list[tuple[Result, Buffer | None, int]]:
        """Begin a bucket. Give the results that have come before and must be settled, each with its shard."""
        rounds, stragglers, index = self.rounds, self.stragglers, key.part
        if stragglers.failures and (failure := stragglers.failures.get(key.number)) is not None:
            rounds.take(index, waiter, weight)
            self.effects.complete(waiter, failure)
            return []
        heavier = NO_SLICES
        if weight <= 0 and rounds.owes:  # it has no batch, and what it gave too late is to count
            weight, present = OWED_WEIGHT, False
        if weight > 0 and stragglers.carry.has(index):
            if not present:
                data[:], present = 0, True
            layout, _ = self.exchanges.table.share(key, operation)
            sifts, damps = self.identity.sifts, self.identity.membership.damping == "inverse"
            what = index, data, weight, layout, operation.dtype
            heavier = stragglers.carry.add_to(*what, sifts, key.number, damps)
        source = data if present and weight > 0 else None
        encodes = source is not None and operation.is_lossy and not (progress is not None and progress.encoded)
        feedback = self.exchanges.feedback_of(index, operation) if encodes else None
        self.exchanges.begin(key, operation, source, data, weight, waiter, feedback, heavier, progress)
        rounds.take(index, waiter, weight)
        if not (came := stragglers.came(key)):
            return []
        return [(result, payload, self.exchanges.shard_of(result)) for result, payload in came]

    def refuse(self, index: int) -> None:
        """Take the present round for void, with its commit ``index``, and say so."""
        self._say_refused(self.rounds.refuse(index))

    def begin_again(self) -> None:
        """Begin the present round again, in another section: it was void. Say so, also if this member was told it.

        A data half that told it may be lost with the one that refused, before any other member heard.
        """
        if (key := self.rounds.begin_again()) is not None:
            self._say_refused(key)

    def refuse_again(self, shard: int, number: int) -> None:
        """Say to ``shard``, which stands in round ``number``, if this member takes the present round for void.

        It has forgotten that, or has not heard: to a shard that is held nothing is pushed. The last results of round
        ``number`` may come before it stands. Then the present round is the next one.
        """
        key = self.rounds.refused
        if key is not None and key.number >= number and self._shard_of(key) == shard:
            self._say_refused(key)

    def _say_refused(self, key: ExchangeKey) -> None:
        self.effects.add(Tell(Push(key, 0, 0.0, False), self._shard_of(key)))

    def _shard_of(self, commit: ExchangeKey) -> int:
        assert self.rounds.plan is not None
        return self.exchanges.table.share(commit, self.rounds.plan.buckets[commit.part].operation).shard_of(0)

    def is_read_by_the_caller(self, operation: Operation) -> bool:
        """Return true if the caller has pushed the last bucket of a round, a small one: it waits for results next.

        It reads them itself then, a switch of threads sooner. If it does something else before, the socket keeps them.
        In a durable group they are read at once, as a member that has them says so after a restart of the coordinator.
        """
        if len(self.rounds.pushed) < len(self.rounds.open) or self.exchanges.inventory is not None:
            return False
        is_small = operation.numel * operation.dtype.itemsize <= SLICE_BYTES
        is_member = self.identity.stage is Stage.MEMBER
        return is_small and is_member and not any(shard.queue.waiting for shard in self.exchanges.shards)

    def finish_round(self) -> None:
        """Go on to the next round."""
        if self.identity.sifts and (warning := self.rounds.note_not_finite()) is not None:
            self.effects.add(warning)
        if self.requests.applies:
            self.requests.over()
        became, warning = self.stragglers.finish()
        if warning is not None:
            self.effects.add(warning)
        self.rounds.finish()
        self.stragglers.backlog.forget(self.rounds.number)
        self.exchanges.forget_collectives()
        if became is Ended.KEPT:
            self.leases.carry()
        elif became is Ended.DROPPED:
            self.leases.give_back()

    # ── results ───────────────────────────────────────────────────────────────────────────────────────

    def heard(self, result: Result, payload: Buffer | None, shard: int) -> Exchange | None:
        """Take a result that has come from ``shard``; give the exchange to write it to, if there is one."""
        if result.over:
            busy = self.exchanges.busy_shards(result.key.part)
            self.effects.complete_all(self.rounds.announced.ended(result.key.number, shard, busy))
        there = self.exchanges.shards[shard]
        exchange = there.exchanges.get(result.key)
        if exchange is None:
            self._heard_early(result, payload, there)
            return None
        if not there.held and (result.slice + result.slices > exchange.sent or self.exchanges.lacks_us(result)):
            self.exchanges.read_unasked(payload, shard)
        return self.exchanges.settling(exchange, result)

    def _heard_early(self, result: Result, payload: Buffer | None, there: ShardTraffic) -> None:
        """Take the result of what has not begun."""
        if self.exchanges.inventory is not None and there.held:
            self.exchanges.inventory.early(result, payload, there.number)
            return
        has_room = self.stragglers.keep(result, payload)
        if not there.held:
            self.exchanges.read_unasked(payload, there.number)
        if not has_room:
            self._overrun(result.key.number)
        self.requests.came(result.key.number)

    def _overrun(self, number: int) -> None:
        """Handle that there is no room for a result of round ``number``."""
        identity, rounds = self.identity, self.rounds
        if identity.stage is Stage.JOINING:
            self.learner.fall_behind()
            if rounds.plan is not None:
                self.exchanges.expect(rounds.plan, (), MAX_COUNTER)  # what has come is of no use, and takes room
            return
        error = overrun(self.stragglers.backlog, rounds.number, number, identity.membership.rank)
        self.effects.add(Tell(Leave(error.message[:MAX_TEXT], True)))
        self.effects.add(Lose(error))

    def idle(self) -> bool:
        """Return true if no results are due, and none come unasked. A worker that may be late reads all the time."""
        identity = self.identity
        if identity.stage is Stage.OBSERVING:
            return False
        if identity.stage is Stage.JOINING and self.learner.transfer is not None:
            return False
        awaits_word = self.rounds.is_direct or self.rounds.announced.is_watched
        return not identity.membership.late and not awaits_word and not self.exchanges.is_busy

    def again(self) -> list[Said]:
        """Give what is said again on a new connection: what the others have yet to agree with, and what is asked."""
        proposal = self.plans.open
        proposed: list[Said] = [] if proposal is None else [(proposal.message, (proposal.plan.encoded,))]
        return [*proposed, *self.turns.again(), *self.leases.again(), *self.requests.again()]

    # ── its end ───────────────────────────────────────────────────────────────────────────────────────

    def give_up(self) -> list[Waiter]:
        """Forget all that is under way, and give what waits for it."""
        proposal = self.plans.open
        waiting = [] if proposal is None else [proposal.waiter]
        self.exchanges.slots.forget()  # a sub-group ends long before its connection
        waiting += [*self.exchanges.give_up(), *self.rounds.announced.give_up(), *self.learner.give_up()]
        waiting += [*self.attachment.give_up(), *self.inquiries.give_up()]
        waiting += [*self.turns.give_up(), *self.requests.give_up()]
        return [*waiting, *self.leases.give_up(), *self.rounds.give_up()]

    def gives_state(self, transfer: Transfer) -> bool:
        """Return true if this member is to send the state of ``transfer``, false if it is to take it.

        Raise WorkerLostError if it is to do neither any more.
        """
        if self.identity.member_id == transfer.donor:
            self.donor.check(transfer)
            return True
        if self.learner.transfer is not None and self.learner.transfer.number > transfer.number:
            raise WorkerLostError(NOT_SENT)
        return False
