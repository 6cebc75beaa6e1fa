"""All that a member has under way, with each of the group's data shards.

Each method takes one event, and leaves what follows from it in the effects. Its caller holds the session's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import Feedback
from gradserver.protocol.errors import AbandonedError, GradServerError, MembershipChangedError, RoundVoidError
from gradserver.protocol.exchange import (
    BUCKET,
    COLLECTIVE,
    STATE_TAG,
    TRANSFER,
    WORLD_BOUND,
    ExchangeKey,
    Operation,
    is_state,
    pool_of,
)
from gradserver.protocol.messages import Membership, Push, Result, Taken, Welcome
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table
from gradserver.worker.member.backlog import Unasked, room_for
from gradserver.worker.member.coder import Workspace, coder_of
from gradserver.worker.member.effects import Effects, Tell
from gradserver.worker.member.ends import Destination, Source
from gradserver.worker.member.exchange import NO_SLICES, Exchange
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.learner import Stage
from gradserver.worker.member.progress import Progress
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.siblings import Siblings
from gradserver.worker.member.slots import Memory, Slots
from gradserver.worker.member.stragglers import Stragglers, lacks
from gradserver.worker.member.waiter import Waiter

NOT_SENT: Final = "the member that was to send its state does not"


class Exchanges:
    """One member's exchanges. Not safe to share: the session's lock guards it.

    Args:
        channel: it says where memory lies that the coordinator sees too.
        workspace: memory for encoding lossy exchanges.

    Attributes:
        shards: what is under way, by data shard.
        table: how slices are divided among shards.
        slots: shared memory through which tensors pass.
        feedback: what lossy codecs have kept back, by bucket.
        inventory: what the member keeps of results; None unless the group is durable.
    """

    def __init__(
        self,
        effects: Effects,
        identity: Identity,
        rounds: Rounds,
        stragglers: Stragglers,
        channel: Memory,
        workspace: Workspace,
    ) -> None:
        self.effects = effects
        self.shards = [ShardTraffic(0)]
        self.table = Table(1)
        self.slots = Slots(channel)
        self.feedback: dict[int, Feedback] = {}
        self.inventory: Inventory | None = None
        self._identity = identity
        self._rounds = rounds
        self._stragglers = stragglers
        self._channel = channel
        self._workspace = workspace
        self._turn = 0
        """The shard that is sent to next, if there is something for it."""
        self._numbers: dict[tuple[int, ...], int] = {}
        """The next number of each sequence of collectives or transfers."""

    def endure(self, channel: Memory, slots: Slots, inventory: Inventory) -> None:
        """Go by ``channel`` from now on, and keep results in ``inventory``."""
        self._channel, self.slots, self.inventory = channel, slots, inventory

    def forget_memory(self) -> None:
        """Give up slots and regions: a coordinator may still write there, and another one cannot."""
        self.slots.forget()
        if self.inventory is not None:
            self.inventory.regions.forget()

    def welcomed(self, welcome: Welcome) -> None:
        """Begin with as many data shards and members as the coordinator says."""
        self.table = Table(len(welcome.names), welcome.rates, welcome.mean.unit, welcome.grain)
        self.shards = [ShardTraffic(number) for number in range(len(welcome.shards) + 1)]

    def agreed(self, plan: Plan, kept: Collection[int]) -> None:
        """Go by ``plan``. Buckets ``kept`` were there before."""
        self.feedback = {part: feedback for part, feedback in self.feedback.items() if part in kept}
        if self.inventory is not None:
            self.inventory.retained.forget_buckets(room_for(plan.nbytes))
        self.table.set_plan(plan)
        self.expect(plan, kept, self._rounds.number)

    def busy_shards(self, part: int) -> int:
        """Give the number of shards that have a part in the rounds of bucket ``part``."""
        plan = self._rounds.plan
        return 1 if plan is None or len(self.shards) == 1 else self.table.busy_shards[plan.section_of(part).number]

    def expect(self, plan: Plan, kept: Collection[int], first: int) -> None:
        """Take what comes unasked as ``plan``'s from now on. Results from round ``first`` on are here already."""
        keys = (ExchangeKey(BUCKET, 0, part) for part in range(len(plan.buckets)))
        shares = (self.table.share(key, bucket.operation) for key, bucket in zip(keys, plan.buckets, strict=True))
        self._stragglers.expect(plan, [layout.count for layout, _ in shares], kept, first)

    def adopt(self, news: Membership, new: Collection[int]) -> None:
        """Go by ``news``, in which members ``new`` are there for the first time."""
        self.table.world_size = len(news.member_ids)
        self._numbers = {
            sequence: number
            for sequence, number in self._numbers.items()
            if sequence[0] != TRANSFER or not set(new).intersection(sequence[1:3])
        }

    def forget_collectives(self) -> None:
        """Number collectives from 0 again."""
        self._numbers.pop((COLLECTIVE,), None)

    def feedback_of(self, index: int, operation: Operation) -> Feedback:
        """Give what a lossy codec has kept back of bucket ``index``."""
        feedback = self.feedback.get(index)
        if feedback is None:
            feedback = self.feedback[index] = Feedback(operation.numel)
        return feedback

    # ── beginning exchanges ───────────────────────────────────────────────────────────────────────────

    def next_collective(self) -> ExchangeKey:
        """Number the group's next collective."""
        if self._identity.stage is not Stage.MEMBER:
            raise self._identity.not_yet("call collectives")
        return ExchangeKey(COLLECTIVE, self._next_number(COLLECTIVE), self._rounds.number)

    def next_transfer(self, ends: tuple[int, int, int], by_id: bool = False) -> ExchangeKey:
        """Number the next transfer: ``ends`` is (source rank, target rank, tag), or has ids of members."""
        if self._identity.stage is not Stage.MEMBER:
            raise self._identity.not_yet("send and receive")
        giver, taker, tag = ends if by_id else (*map(self._identity.member_of, ends[:2]), ends[2])
        number = self._next_number(TRANSFER, giver, taker, tag)
        return ExchangeKey(TRANSFER, number, tag, giver, taker)

    def upcoming_transfer(self, giver: int, taker: int, tag: int) -> ExchangeKey:
        """Name the next transfer between two members, by their ids, without beginning it."""
        return ExchangeKey(TRANSFER, self._numbers.get((TRANSFER, giver, taker, tag), 0), tag, giver, taker)

    def _next_number(self, *sequence: int) -> int:
        self._numbers[sequence] = (number := self._numbers.get(sequence, 0)) + 1
        return number

    def begin(
        self,
        key: ExchangeKey,
        operation: Operation,
        source: Source | None,
        destination: Destination | None,
        weight: float,
        waiter: Waiter,
        feedback: Feedback | None = None,
        heavier: Mapping[int, float] = NO_SLICES,
        progress: Progress | None = None,
    ) -> None:
        """Begin an exchange: what it gives is sent as credit allows, and as ``progress`` says that it is there."""
        layout, bounds = self.table.share(key, operation)
        if layout.count == 0:
            waiter.weight, waiter.present = weight, source is not None
            self.effects.complete(waiter)
            return
        identity, inventory, stragglers = self._identity, self.inventory, self._stragglers
        welcome = identity.membership
        pool = pool_of(key, welcome.member_ids[welcome.rank])
        coder = None
        if operation.is_lossy:
            assert isinstance(destination, np.ndarray)
            assert source is None or isinstance(source, np.ndarray)
            coder = coder_of(self._workspace, key, layout, source, destination, feedback, identity.sifts, progress)
        what = key, pool, operation, layout, source, destination, weight, waiter, self._channel, self.slots, coder
        epoch = welcome.epoch if operation.kind in WORLD_BOUND or key.stream == TRANSFER else 0
        regions = inventory.regions if inventory is not None else None
        if len(bounds) == 2:
            exchange = Exchange(*what, epoch, regions, heavier, progress, room=self.shards[0].message_bytes)
            if inventory is not None and inventory.begun(exchange, stragglers.came(key), self._heed_early):
                self.effects.complete(waiter)
            else:
                self.shards[0].add(exchange, stragglers.is_over(key))
            return
        parts = [(shard, run) for shard, run in enumerate(pairwise(bounds)) if run[0] < run[1]]
        siblings = Siblings[Exchange](len(parts))
        came: list[Unasked] = stragglers.came(key) if inventory is not None else []
        for shard, run in parts:
            exchange = Exchange(*what, epoch, regions, heavier, progress, shard, run, siblings)
            if inventory is None or not inventory.begun(exchange, came, self._heed_early):
                self.shards[shard].add(exchange, stragglers.is_over(key))
            elif self._part_over(exchange, siblings, None)[0]:
                self.effects.complete(waiter)

    def _heed_early(self, exchange: Exchange, index: int, result: Result) -> None:
        """Note, before it is written, whether a result of an exchange that begins lacks what this worker gives."""
        if self.lacks_us(result) and self.settling(exchange, result) and self._stragglers.keeps(exchange):
            self._stragglers.keep_own(exchange, [(index, exchange.given(index))])

    # ── sending, as credit allows ─────────────────────────────────────────────────────────────────────

    def next_push(self) -> tuple[Push, Sequence[Buffer], int] | None:
        """Give the next push that credit allows, and its shard; None if there is none."""
        turn, shards = self._turn, self.shards
        for shard in (*shards[turn:], *shards[:turn]) if turn else shards:
            if not shard.queue.waiting or shard.held:
                continue
            push = shard.queue.next(self._identity.membership.credit, self._frontier, shard)
            if push is not None:
                self._turn = (shard.number + 1) % len(shards)
                return *push, shard.number
        return None

    def _frontier(self, shard: ShardTraffic) -> Exchange | None:
        """Give the exchange with the first slice in the plan's order that was not answered, if it sends that next.

        That is, of the slices that ``shard`` has to do with: the reasons hold for each shard by itself.
        """
        rounds = self._rounds
        assert rounds.plan is not None
        for index in rounds.open:
            bucket, waiter = rounds.plan.buckets[index], rounds.pushed.get(index)
            if bucket.numel == 0 or (waiter is not None and not waiter._open):
                continue
            key = ExchangeKey(BUCKET, rounds.number, index)
            exchange = shard.exchanges.get(key)
            if exchange is None and (waiter is not None or not self._concerns(shard.number, key, bucket.operation)):
                continue
            if exchange is None or exchange.held_back or exchange.sent == exchange.stop:
                return None
            return exchange if exchange.sent == exchange.first_unanswered() else None
        return None

    def shard_with(self, key: ExchangeKey) -> int | None:
        """Give the first shard with which an exchange is under way."""
        return next((shard.number for shard in self.shards if key in shard.exchanges), None)

    def shard_of(self, result: Result) -> int:
        """Give the shard that the result of a bucket's slice is from."""
        assert self._rounds.plan is not None
        operation = self._rounds.plan.buckets[result.key.part].operation
        return self.table.share(result.key, operation).shard_of(result.slice)

    def _concerns(self, shard: int, key: ExchangeKey, operation: Operation) -> bool:
        start, stop = self.table.share(key, operation).interval(shard)
        return start < stop

    @property
    def is_busy(self) -> bool:
        """True if anything that this worker has begun is not done."""
        return any(shard.exchanges for shard in self.shards)

    # ── results ───────────────────────────────────────────────────────────────────────────────────────

    def read_unasked(self, payload: Buffer | None, shard: int) -> None:
        """Count a result that came unasked, and tell ``shard`` from time to time how much was read."""
        if told := self._stragglers.read(payload, shard):
            self.effects.add(Tell(Taken(told), shard))

    def lacks_us(self, result: Result) -> bool:
        """Return true if what this worker gave to the slices of ``result`` does not count."""
        return bool(result.without) and lacks(result, self._identity.member_id)

    def settling(self, exchange: Exchange, result: Result) -> Exchange | None:
        """Give ``exchange`` if a result is to be written to it, before `settled`; None if it is not its."""
        if not exchange.takes(result.slice, result.slice + result.slices):
            return None
        if result.without and self.lacks_us(result):
            self._stragglers.note_late(result.key.number)
            self._send_no_more()
        return exchange

    def _send_no_more(self) -> None:
        """Send nothing more of the round for which this worker is late: it would not count."""
        for shard in self.shards:
            for exchange in shard.exchanges.values():
                if self._stragglers.is_over(exchange.key):
                    shard.queue.hold_back(exchange)

    def settled(self, exchange: Exchange, result: Result, payload: Buffer | None, shard: int) -> bool:
        """Note that a result was written. Return true if more may be sent."""
        there, waiter = self.shards[shard], exchange.handle
        if there.exchanges.get(result.key) is not exchange:
            return False  # it failed meanwhile, in another thread
        if self.inventory is not None:
            self.inventory.answered(exchange, result, payload, there.held)
        there.queue.answered(exchange, result.slice, result.slice + result.slices)
        exchange.note(result)
        if result.nonfinite:
            self._identity.note_not_finite(waiter, result)
        if exchange.done:
            del there.exchanges[result.key]
            done, error = True, None
            if exchange.siblings is not None:
                done, error = self._part_over(exchange, exchange.siblings, None)
            if done:
                self.effects.complete(waiter, error)
        return there.queue.waiting > 0

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────

    def fail(self, key: ExchangeKey, error: GradServerError, shard: int) -> None:
        """Take the word of ``shard`` that an exchange has failed."""
        there, reason, done = self.shards[shard], error, True
        exchange = there.exchanges.pop(key, None)
        self._fail_held_back(key, error)
        if exchange is None:
            return
        there.queue.write_off(exchange)
        if exchange.siblings is not None:
            done, verdict = self._part_over(exchange, exchange.siblings, error)
            reason = verdict or error
        elif isinstance(error, AbandonedError):
            reason = error.when_nothing_failed()
        if self.inventory is not None and not is_state(key) and not isinstance(error, RoundVoidError):
            again = isinstance(reason, MembershipChangedError)
            self.inventory.retained.failed(key, again, any(one.held for one in self.shards))
        if done:
            self.effects.complete(exchange.handle, reason)

    def _fail_held_back(self, key: ExchangeKey, error: GradServerError) -> None:
        """Fail the rest of a round for which this worker is late, of which it may hear no more."""
        if key.stream != BUCKET or not self._identity.membership.late or key.number < self._rounds.number:
            return
        self._stragglers.note_failure(key.number, error)
        for shard in self.shards:
            lost = [e for e in shard.exchanges.values() if e.held_back and e.key.number == key.number]
            for exchange in lost:
                del shard.exchanges[exchange.key]
                shard.queue.write_off(exchange)
                self.effects.complete(exchange.handle, error)

    def fail_states(self, error: GradServerError, before: int) -> None:
        """Fail transfers of states with a lower number than ``before``."""
        here = [(key, shard.number) for shard in self.shards for key in shard.exchanges if is_state(key)]
        for key, number in [found for found in here if found[0].part < STATE_TAG + before]:
            self.fail(key, error, number)

    def _part_over(
        self, part: Exchange, siblings: Siblings[Exchange], error: GradServerError | None
    ) -> tuple[bool, GradServerError | None]:
        """End one shard's part of an exchange. Return whether all of it has ended, and with which error.

        After a failure at one shard nothing more is sent to the others. Credit there is free when they have answered,
        or have found that another member failed it too. The caller is told at once, unless something may still be
        written to its memory.
        """
        siblings.left -= 1
        if isinstance(error, AbandonedError):
            siblings.verdict = error.when_nothing_failed()
        elif error is not None and siblings.error is None:
            siblings.error = error
            for shard in self.shards:
                other = shard.exchanges.get(part.key)
                if other is not None and shard.queue.drop(other):
                    del shard.exchanges[part.key]
                    siblings.left -= 1
        waits = any(
            other.place is not None for shard in self.shards if (other := shard.exchanges.get(part.key)) is not None
        )
        failed = siblings.error is not None and not waits
        return siblings.left == 0 or failed, siblings.error or siblings.verdict

    def void(self, part: Exchange) -> None:
        """End a part that was given up, and that no shard will answer."""
        assert part.siblings is not None
        del self.shards[part.shard].exchanges[part.key]
        done, error = self._part_over(part, part.siblings, None)
        if done:
            self.effects.complete(part.handle, error)

    # ── its end ───────────────────────────────────────────────────────────────────────────────────────

    def send_nothing(self) -> None:
        """Send nothing of what is under way any more."""
        for shard in self.shards:
            shard.queue.clear()

    def waiting(self) -> list[Waiter]:
        """List what waits for anything that is under way."""
        return [exchange.handle for shard in self.shards for exchange in shard.exchanges.values()]

    def give_up(self) -> list[Waiter]:
        """Forget all that is under way, and give what waits for it."""
        waiting = self.waiting()
        for shard in self.shards:
            shard.exchanges.clear()
            shard.queue.clear()
        if self.inventory is not None:
            self.inventory.forget()
        return waiting
