"""The inventory of a member of a durable group: a coordinator that comes back can hand it on.

Of a collective with bytes of its own for each member (`PERSONAL`) no other member can hand on what one lacks. It begins
again whole, from what members gave. Each data shard has a part of it, and decides by itself, from what all members say.
So a member says the same to all shards: it opens parts again that are done, while another shard's part is open.

    at this member                        what it says to each shard, of the shard's slices
    ────────────────────────────────────  ──────────────────────────────────────────────────────────────────────────
    not begun                             nothing
    open at any shard                     HELD: what it gets and keeps, of GATHER (the root) and REDUCE_SCATTER (its
                                          chunk); LACKING: all else, also what was answered, or was kept before
    done at all shards                    HELD: the same; OVER: all else
    failed at any shard                   FAILED, or CHANGED if it is to be called again

    at the members that are present       what becomes of it at each that has it open
    ────────────────────────────────────  ──────────────────────────────────────────────────────────────────────────
    open, or not begun, at all            slices that one holds are handed on, the others are given again by all
    … and a member has departed           the first shard to which it is given again fails it: MembershipChangedError
    done at some, and all slices are held the members that lack some have them from the others
    done at some, and a slice is lost     ConnectionLostError, which all of these hear: each lacks what no member holds
    failed at some                        the same error from each shard
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import BUCKET, PERSONAL, PORTIONED, ROOTED, Kind, Op, gets, is_state
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.data import proof_of, squares_of
from gradserver.protocol.messages.recovery import Span, State
from gradserver.worker.member.exchange import Exchange
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.retained import Kept, Retained, runs
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.sendqueue import ShardTraffic


class Inventory:
    """Results that one member keeps. Not safe to share: the session's lock guards it.

    Attributes:
        retained: results, by slice.
        regions: where in shared memory results are written.
    """

    def __init__(self, identity: Identity, rounds: Rounds, regions: Regions) -> None:
        self.retained = Retained(identity.membership.credit)
        self.regions = regions
        self._identity, self._rounds = identity, rounds

    def forget(self) -> None:
        """Keep nothing any more: the membership has ended."""
        self.retained = Retained(0)
        self.regions.forget()

    def answered(self, exchange: Exchange, result: Result, payload: Buffer | None, is_held: bool) -> None:
        """Keep a result; ``is_held`` if nothing is pushed to its shard."""
        slices, shard = range(result.slice, result.slice + result.slices), exchange.shard
        if result.key.stream == BUCKET:
            for index in slices:
                kept = exchange.kept_payload(index, result, payload)
                if result.placed and kept is not None and self._identity.membership.late:
                    kept = bytes(kept)  # the next round's result may be written there while a late member lacks it
                self.retained.keep_slice(index, Kept(result, kept, shard), self._rounds.number)
            return
        if is_state(result.key):
            return  # which is void when a recovery begins
        for index in slices:
            place = index - result.slice
            proof = proof_of(result.proof, place, place + 1)
            own = result._replace(slice=index, slices=1, placed=False, proof=proof)
            cost = exchange.layout.cost(index)
            if self._gets(exchange, index):
                self.retained.keep_past(Kept(own, exchange.kept_payload(index, result, payload), shard), cost)
            elif (given := exchange.copy_of(index)) is not None:
                self.retained.keep_past(Kept(own._replace(present=True), given, shard), cost)
            elif exchange.operation.kind not in PORTIONED and is_held:
                self.retained.pass_on(Kept(own._replace(present=False), None, shard))
        if len(exchange.answered) + result.slices == exchange.stop - exchange.start:
            self._part_done(exchange)

    def _part_done(self, exchange: Exchange) -> None:
        """Note slices of which only others get bytes as over, when all shards have answered."""
        if exchange.operation.kind not in PERSONAL:
            return
        parts, siblings = [exchange], exchange.siblings
        if siblings is not None:
            siblings.done.append(exchange)
            parts = siblings.done if siblings.left == 1 else []
        for part in parts:
            self.retained.over(part.key, self._of_others(part), part.shard)

    def take_back(self, part: Exchange) -> bool:
        """Open slices of ``part`` again, but those with results that are kept. Return true if any is open then."""
        part.give_again(part.answered - self.retained.open_again(part.key, part.shard))
        return not part.done

    def early(self, result: Result, payload: Buffer | None, shard: int) -> None:
        """Keep the result of a bucket that is not begun, until it is."""
        if result.key.stream == BUCKET and result.slices == 1 and not result.placed:
            self.retained.keep_slice(result.slice, Kept(result, payload, shard), self._rounds.number)
        elif result.key.stream == BUCKET and payload is None:
            for index in range(result.slice, result.slice + result.slices):
                self.retained.keep_slice(index, Kept(result, None, shard), self._rounds.number)

    def begun(
        self,
        exchange: Exchange,
        came: Iterable[tuple[Result, Buffer | None]],
        heed: Callable[[Exchange, int, Result], None],
    ) -> bool:
        """Give a bucket, or a shard's part of it, what came before it had begun. Return true if that was all.

        ``heed`` is told of each result before it is written.
        """
        if exchange.key.stream != BUCKET:
            return False
        for result, payload in came:
            if exchange.start <= result.slice < exchange.stop:
                self.early(result, payload, exchange.shard)
        for index, (result, payload, _) in self.retained.of_bucket(exchange.key).items():
            if not exchange.start <= index < exchange.stop:
                continue
            place = index - result.slice
            told = squares_of(result.squares, place, place + 1), proof_of(result.proof, place, place + 1)
            result = result._replace(slice=index, slices=1, squares=told[0], proof=told[1])
            heed(exchange, index, result)
            exchange.write(result, payload)
            exchange.settle(index, index + 1)
            exchange.note(result)
            if result.nonfinite:
                self._identity.note_not_finite(exchange.handle, result)
        if exchange.answered:
            exchange.rewind()
        return exchange.done

    def spans(self, shard: ShardTraffic) -> list[Span]:
        """List what is held of a shard's slices, and what is lacking."""
        return [*self.retained.spans(shard.number), *self._lacking(shard)]

    def _lacking(self, shard: ShardTraffic) -> Iterator[Span]:
        """List collectives and transfers that were begun and have no result."""
        for key, exchange in shard.exchanges.items():
            if key.stream == BUCKET or exchange.dropped:
                continue
            open_ones = (index for index in range(exchange.start, exchange.stop) if index not in exchange.answered)
            layout = exchange.layout
            replies = 0 if exchange.operation.op is Op.FRAMED else layout.replies  # frames may be any shorter
            yield from runs(
                Span(State.LACKING, key, index, index + 1, (), layout.nbytes(index) * replies) for index in open_ones
            )

    def _gets(self, exchange: Exchange, index: int) -> bool:
        """Return true if this member's result of a slice is what others' is."""
        operation, key = exchange.operation, exchange.key
        me = self._identity.membership.rank
        if operation.kind in PORTIONED:
            return False
        if operation.kind in ROOTED or operation.kind is Kind.TRANSFER:
            me = self._identity.member_of(me)
        return operation.kind is Kind.BARRIER or gets(operation, me, key, exchange.layout.owner(index))

    def _of_others(self, exchange: Exchange) -> list[int]:
        """List slices of which only others get bytes."""
        return [index for index in range(exchange.start, exchange.stop) if not self._gets(exchange, index)]
