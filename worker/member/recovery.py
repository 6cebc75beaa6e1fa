"""A member's part in a recovery: it says what it holds, and begins anew with what has no result.

`gradserver.protocol.messages.recovery` has the conversation. In it this member is, for each data half:

    state     event                       next      what happens
    ────────  ──────────────────────────  ────────  ───────────────────────────────────────────────────────────────
    FLOWING   the connection breaks       HELD      nothing is pushed
    any       Resumed, of all halves      HELD      Holding to each: its slices that it keeps the result of
    HELD      Fetch                       HELD      Held: such a result
    HELD      Result                      HELD      as any other; also if nothing was pushed, or not even begun
    HELD      a push, or a refusal        HELD      nothing is sent
    HELD      Standing of that Resumed    FLOWING   what is begun and unanswered is pushed from the beginning; before
                                                    that it says, perhaps again, that the present round is void, which
                                                    may be the one behind the round that stands
    HELD      Standing of an earlier one  HELD      nothing
"""

from __future__ import annotations

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import BUCKET, PERSONAL, ExchangeKey
from gradserver.protocol.limits import MAX_COUNTER
from gradserver.protocol.messages.data import proof_of, squares_of
from gradserver.protocol.messages.recovery import Fetch, Held, Holding, Resume, Resumed, pack_spans
from gradserver.worker.member.donor import nobody_takes_it
from gradserver.worker.member.effects import Tell
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.machine import Member
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.member.waiter import Waiter


class Recovery:
    """One member's recoveries, one after the other. Not safe to share: the session's lock guards it.

    Attributes:
        generation: the latest that the primary has told of.
        again: slices that are pushed another time.
    """

    def __init__(self, member: Member, inventory: Inventory) -> None:
        self.generation = -1
        self.again = 0
        self._member = member
        self._inventory = inventory
        self._heard: dict[int, int] = {}
        """The latest generation that each shard has told of."""
        self._said = -1
        """The generation for which the shards were told what this member holds."""
        self._expected: Waiter | None = None
        """Handle of the Resumed that answers this member's Resume."""
        self._silent = False
        """True from that Resumed until Holding, when nothing else is said."""
        self._standing: Waiter | None = None
        """Handle of the last Standing."""

    def suspend(self) -> None:
        """Push nothing, until it is known what counts."""
        for shard in self._member.exchanges.shards:
            shard.hold()

    def resume(self, waiter: Waiter) -> Resume:
        """Begin on a new connection; give what is said first there. The waiter's value becomes the Resumed."""
        self._expected, self._silent = waiter, True
        self.suspend()  # the connection before may have broken when some shards had said Standing
        self._heard.clear()
        self._said = -1
        rounds, welcome = self._member.rounds, self._member.identity.membership
        plan = rounds.plan.hash if rounds.plan is not None else ""
        epoch = rounds.announced.latest
        return Resume(
            welcome.group, welcome.member_ids[welcome.rank], welcome.token, epoch, plan, self._member.donor.serves
        )

    def hold(self, shard: ShardTraffic) -> None:
        """Push nothing to ``shard``, or to none if it is the primary: what was pushed and is unanswered is void."""
        if shard.number > 0:
            shard.hold()
        else:
            self.suspend()

    @property
    def is_resuming(self) -> bool:
        """True if this member has said Resume, and has no answer."""
        return self._expected is not None

    def void_states(self) -> None:
        """Fail transfers of states: the worker that was to have one begins anew."""
        self._member.donor.forget()
        self._member.exchanges.fail_states(nobody_takes_it(), MAX_COUNTER)

    def resumed(self, message: Resumed, shard: int) -> bool:
        """Take note that a recovery has begun at ``shard``. Return true if what this member holds may be said."""
        self._heard[shard] = message.generation
        if shard == 0:
            self.generation = message.generation
            if self._expected is not None:
                self._member.effects.complete(self._expected, value=message)
                self._expected = None
                return False
        return not self._silent

    def restate(self, waiter: Waiter) -> None:
        """Say what this member holds. The waiter's value becomes the number of slices that are pushed again."""
        self.again, self._silent, self._standing = 0, False, waiter

    def interrupt(self) -> list[Waiter]:
        """Give what waits for the connection on which this member resumes: it broke."""
        waiting = [waiter for waiter in (self._expected, self._standing) if waiter is not None]
        self._expected = self._standing = None
        return [*waiting, *self._member.attachment.stop_attending()]

    def holdings(self) -> list[tuple[int, Holding, bytes]]:
        """Give what this member holds of each shard's slices; nothing if that was said, or is not to be said yet.

        It is said when nothing is on its way any more that any shard sent before. So all shards hear of one moment:
        none of them takes for open what is done for another.
        """
        member, inventory, shards = self._member, self._inventory, self._member.exchanges.shards
        rounds, heard = member.rounds, {self._heard.get(shard.number, -1) for shard in shards}
        if self._said == self.generation or heard != {self.generation}:
            return []
        self._said = self.generation
        inventory.retained.said()
        for result, payload in member.stragglers.backlog.all():
            inventory.early(result, payload, member.exchanges.shard_of(result))
        self._take_back()
        number = self._round()
        if not member.identity.membership.late:  # it is told again, and perhaps with a later epoch
            rounds.announced.begin_again(number)
        weight = rounds.weight if rounds.pushed and number == rounds.number else 0.0
        holding = Holding(self.generation, number, weight)
        return [(shard.number, holding, pack_spans(inventory.spans(shard))) for shard in shards]

    def _take_back(self) -> None:
        """Open collectives again whole that no member can hand on, while any shard has not answered its part."""
        shards = self._member.exchanges.shards
        for shard in shards:
            for exchange in shard.exchanges.values():
                if exchange.dropped or exchange.operation.kind not in PERSONAL:
                    continue
                self._inventory.take_back(exchange)
                done = () if exchange.siblings is None else exchange.siblings.done
                for part in [part for part in done if self._inventory.take_back(part)]:
                    shards[part.shard].take_back(part)

    def fetch(self, message: Fetch) -> tuple[Held, Buffer | None]:
        """Give a result that this member keeps and another lacks."""
        kept = self._inventory.retained.find(message.key, message.slice)
        if kept is None:
            raise MalformedMessageError(f"a Fetch of slice {message.slice} of {tuple(message.key)}, which is not held")
        result, payload, _ = kept
        what = message.generation, message.key, message.slice
        place = message.slice - result.slice
        own = squares_of(result.squares, place, place + 1)
        proof = proof_of(result.proof, place, place + 1)
        return Held(*what, result.weight, result.present, result.without, result.weights, own, proof), payload

    def stands(self, shard: ShardTraffic, number: int) -> bool:
        """Begin anew at ``shard``, in round ``number``, with what has no result. Return true if all shards stand now.

        What came of later rounds is void. It came before others, which were lost with the members that had them.
        """
        exchanges, inventory = self._member.exchanges, self._inventory
        if self._member.identity.membership.late:
            self._begin_again(shard, number)
        if all(other.held for other in exchanges.shards):  # the first of them to say so
            exchanges.forget_memory()
        for exchange in [exchange for exchange in shard.exchanges.values() if exchange.dropped]:
            exchanges.void(exchange)
        self.again += sum(exchange.rewind() for exchange in shard.exchanges.values())
        shard.release()
        self._member.refuse_again(shard.number, number)
        if shard.number == 0:  # the round may have begun when there was no connection, or had not stood
            for message, payloads in self._member.leases.used_again():
                self._member.effects.add(Tell(message, payloads=payloads))
        if any(other.held for other in exchanges.shards):
            return False
        inventory.retained.said()
        self._member.requests.wake()  # results that are held may be all of a round
        if self._standing is not None:
            self._member.effects.complete(self._standing, value=self.again)
            self._standing = None
        return True

    def _begin_again(self, shard: ShardTraffic, number: int) -> None:
        """Void what ``shard`` has said of rounds behind ``number``, and what this member did because it was late."""
        member = self._member
        self._inventory.retained.forget_behind(number, shard.number)
        member.stragglers.begin_again(number, lambda result: member.exchanges.shard_of(result) == shard.number)
        if shard.number == 0:
            member.rounds.announced.begin_again(number)
        takes_results = member.requests.applies and not member.requests.is_pushing
        for exchange in shard.exchanges.values():
            exchange.held_back = takes_results and exchange.key.stream == BUCKET

    def _round(self) -> int:
        """Give the first round of which this member lacks something: a result, or to hear that it is over.

        That can overtake results of data shards elsewhere.
        """
        rounds, exchanges = self._member.rounds, self._member.exchanges
        over, plan = rounds.announced.rounds, rounds.plan
        if self._member.identity.membership.late and plan is not None:
            return next((n for n in range(rounds.number, over) if not self._holds_all(n)), max(rounds.number, over))
        if over <= rounds.number or plan is None or len(exchanges.shards) == 1:
            return max(rounds.number, over)
        for part in plan.parts_of(self._section_of(over - 1)) or plan.each[0].parts:
            key = ExchangeKey(BUCKET, over - 1, part)
            slices = exchanges.table.share(key, plan.buckets[part].operation).layout.count
            if len(self._inventory.retained.of_bucket(key)) < slices:
                return over - 1
        return over

    def _holds_all(self, number: int) -> bool:
        """Return true if this member holds all results of round ``number``."""
        plan, table = self._member.rounds.plan, self._member.exchanges.table
        assert plan is not None
        keys = (ExchangeKey(BUCKET, number, part) for part in plan.parts_of(self._section_of(number)))
        shares = ((key, table.share(key, plan.buckets[key.part].operation)) for key in keys)
        held = [len(self._inventory.retained.of_bucket(key)) == share.layout.count for key, share in shares]
        return bool(held) and all(held)

    def _section_of(self, number: int) -> int:
        """Give the section of round ``number``, if this member holds something of that; else -1."""
        plan, retained = self._member.rounds.plan, self._inventory.retained
        for section in plan.each if plan is not None and number >= 0 else ():
            if any(retained.of_bucket(ExchangeKey(BUCKET, number, part)) for part in section.parts):
                return section.number
        return -1
