"""Memberships and ends of rounds that the coordinator told of, and when a member goes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradserver.protocol.messages import Membership, RoundDone
from gradserver.worker.member.waiter import Waiter


class Announced:
    """Memberships that the coordinator has told of and this worker does not go by yet; and the last round it ended.

    Several threads may tell of these, so they may come in another order. The end of a round may come before the
    membership that is in force behind it, or before the end of an earlier round.

    Not safe to share: the session's lock guards it.
    """

    def __init__(self) -> None:
        self._memberships: dict[int, Membership] = {}
        self._latest = self._in_force = 0
        self._done = RoundDone(-1, 0)
        self._ends: dict[int, set[int]] = {}
        """Shards that said with their last results that a round is over, by its number."""
        self._steady: set[int] = set()
        """Rounds of which the last results said that they are over, with the membership as it was before."""
        self._epochs: dict[int, int] = {}
        """Epochs in force after rounds that are over for the others, and not for this worker."""
        self._waiting: list[tuple[Callable[[], bool], Waiter]] = []
        self._watches: list[tuple[frozenset[int], Waiter]] = []
        """Members that exchange something among themselves, and what waits for word that one has departed."""

    def welcomed(self, epoch: int) -> None:
        """Begin with the membership that this worker came into."""
        self._latest = self._in_force = epoch

    def told(self, membership: Membership) -> list[Waiter]:
        """Note that the coordinator has told of ``membership``; give the handles that wait for that."""
        if membership.epoch > self._in_force:
            self._memberships[membership.epoch] = membership
        self._latest = max(self._latest, membership.epoch)
        return [*self._satisfied(), *self._broken_up()]

    # ── what members exchange among themselves ────────────────────────────────────────────────────────

    @property
    def is_watched(self) -> bool:
        """True if something waits for word that a member has departed."""
        return bool(self._watches)

    def watch(self, member_ids: Iterable[int], handle: Waiter) -> list[Waiter]:
        """Have ``handle`` done when one of the members has departed; give it if one has already."""
        self._watches.append((frozenset(member_ids), handle))
        return self._broken_up()

    def unwatch(self, handle: Waiter) -> None:
        """Forget a handle that `watch` has got."""
        self._watches = [(members, waiter) for members, waiter in self._watches if waiter is not handle]

    def broken(self) -> list[Waiter]:
        """Give the handles of all that members exchange among themselves: the group goes no further."""
        watches, self._watches = self._watches, []
        return [handle for _, handle in watches]

    def _broken_up(self) -> list[Waiter]:
        """Give the handles of members that are not all there any more, by what was told."""
        later = [frozenset(news.member_ids) for news in self._memberships.values()] if self._watches else []
        done = [handle for members, handle in self._watches if not all(members <= there for there in later)]
        self._watches = [(members, handle) for members, handle in self._watches if handle not in done]
        return done

    # ── changes and ends ──────────────────────────────────────────────────────────────────────────────

    def take(self, epoch: int, ended: int) -> Membership | None:
        """Take the membership that is in force from now on, behind round ``ended``; None if it is already.

        Earlier ones never come into force. A membership with a member in its first round comes again.
        """
        self._in_force = max(self._in_force, epoch)
        found = self._memberships.get(epoch)
        self._memberships = {later: news for later, news in self._memberships.items() if later > epoch}
        if found is None:
            return None
        there = found.behind(ended)
        if there is not found:
            self._memberships[epoch] = found
        return there

    def awaits(self, number: int) -> bool:
        """Return true if round ``number`` waits for a learner."""
        return self._done.round == number - 1 and any(transfer.waits for transfer in self._done.transfers)

    def round_done(self, done: RoundDone) -> list[Waiter]:
        """Note that a round is over; give the handles that wait for that."""
        if done.round >= self._done.round:
            self._done = done
        self._epochs[done.round] = done.epoch
        return self._satisfied()

    def ended(self, number: int, shard: int, busy: int) -> list[Waiter]:
        """Note that ``shard``'s results of round ``number`` say that it is over; give the handles that wait for that.

        The round is over when the results of all ``busy`` shards say so.
        """
        if busy > 1:
            said = self._ends.setdefault(number, set())
            said.add(shard)
            if len(said) < busy:
                return []
            del self._ends[number]
        self._steady.add(number)
        return self._satisfied() if self._waiting else []

    def begin_again(self, number: int) -> None:
        """Forget that rounds from ``number`` on are over: they are done again, and it is told again."""
        if self._done.round >= number:
            self._done = RoundDone(number - 1, self._epochs.get(number - 1, self._done.epoch))
            self._epochs = {earlier: epoch for earlier, epoch in self._epochs.items() if earlier < number}

    def pass_over(self, number: int) -> bool:
        """Return true if the results of round ``number`` said that it is over. Forgets it: it is asked for once."""
        if number not in self._steady:
            return False
        self._steady.discard(number)
        return True

    def wait_for_round(self, number: int, handle: Waiter, is_told: bool = True) -> Waiter | None:
        """Give ``handle`` if it is to wait until round ``number`` is over; None if that is over.

        And when the membership that is then in force was told of, if this worker ``is_told`` of memberships.
        """
        return self._wait_until(lambda: self._is_over(number, is_told), handle)

    def wait_for_epoch(self, epoch: int, handle: Waiter) -> Waiter | None:
        """Give ``handle`` if it is to wait until the membership ``epoch`` was told of; None if it was.

        A data shard may speak of it before that. A shard cuts a member off when it is told to, and members hear of it
        when all shards have done so.
        """
        return self._wait_until(lambda: self._latest >= epoch, handle)

    def _is_over(self, number: int, is_told: bool) -> bool:
        if number in self._steady:
            return True
        if self._done.round < number:
            return False
        return not is_told or self._epochs.get(number, self._done.epoch) <= self._latest

    def _wait_until(self, there: Callable[[], bool], handle: Waiter) -> Waiter | None:
        if there():
            return None
        self._waiting.append((there, handle))
        return handle

    def _satisfied(self) -> list[Waiter]:
        done = [handle for there, handle in self._waiting if there()]
        self._waiting = [(there, handle) for there, handle in self._waiting if handle not in done]
        return done

    def epoch_after(self, number: int) -> int:
        """Give the epoch in force after round ``number``, which is over. It is not asked for again."""
        epoch = self._epochs.pop(number, self._in_force if self.pass_over(number) else self._done.epoch)
        self._epochs = {later: known for later, known in self._epochs.items() if later > number}
        self._ends = {later: shards for later, shards in self._ends.items() if later > number}
        return epoch

    @property
    def latest(self) -> int:
        """The last epoch that was told of."""
        return self._latest

    @property
    def rounds(self) -> int:
        """Number of rounds that are over."""
        return max(self._done.round, max(self._steady, default=-1)) + 1

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait for something that will not come."""
        waiting, self._waiting = self._waiting, []
        return [*(handle for _, handle in waiting), *self.broken()]
