"""A member's questions about leases of samples, and what it says that it used of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gradserver.protocol.audits import WITNESS_WEIGHT, witness_weight
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError, UsageError
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.ranges import Ranges, pack, unpack
from gradserver.worker.member.effects import Effects, Said, Tell
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.waiter import Waiter

Question = Register | Claim


class Source(Protocol):
    """Data that positions are claimed of."""

    name: str
    """Name of the source in the group."""
    epoch: int
    """The present one."""

    def use(self, round_number: int) -> Ranges:
        """Give what this worker used since the last round, and so in this one; the same again for the same round."""

    def repeats(self, round_number: int) -> int:
        """Give the id of the member with samples that this worker computes, too, in this round; -1 for none."""

    def drop(self) -> None:
        """Take what was used since the last round for unused: the contribution with it is dropped."""

    def carry(self) -> None:
        """The last round closed without this worker, and what it gave is kept: it is used in the next one instead."""

    def give_back(self) -> None:
        """The last round closed without this worker, and what it gave is dropped: others may use it."""


class Asked(NamedTuple):
    """A question that has no answer yet."""

    message: Question
    payloads: Sequence[Buffer]
    waiter: Waiter


class Leases:
    """One member's questions, one at a time for each kind of data; and what it says before the first push of a round.

    What has no answer is asked again on a new connection, and the same claim is given the same ranges.

    Not safe to share: the session's lock guards it.
    """

    def __init__(self, effects: Effects, rounds: Rounds) -> None:
        self._effects = effects
        self._rounds = rounds
        self._sources: dict[str, Source] = {}
        self._asked: dict[str, Asked] = {}
        self._last: tuple[int, list[Said]] = (-1, [])
        """Messages that were sent about the last round."""

    def add(self, source: Source) -> None:
        """Ask ``source`` in each round from now on what was used of it."""
        if source.name in self._sources:
            raise UsageError(
                f"this worker has DataRanges of the name {source.name!r} already: go on with those, or give the "
                f"others another name="
            )
        self._sources[source.name] = source

    def ask(self, message: Question, ranges: Ranges | None, waiter: Waiter) -> Asked:
        """Note a question. The waiter's value becomes the answer and its ranges."""
        asked = self._asked[message.name] = Asked(message, () if ranges is None else (pack(ranges),), waiter)
        return asked

    def answered(self, message: Located | Claimed, payloads: Sequence[Buffer]) -> None:
        """Take the coordinator's answer. One to a question of an earlier connection is passed over."""
        ranges, asked = unpack(payloads[0]), self._asked.get(message.name)
        if asked is not None and _answers(message, asked.message):
            del self._asked[message.name]
            self._effects.complete(asked.waiter, value=(message, ranges))

    def failed(self, name: str, error: GradServerError) -> None:
        """Take the coordinator's refusal to answer."""
        if (asked := self._asked.pop(name, None)) is not None:
            self._effects.complete(asked.waiter, error)

    def begin_round(self, sharded: bool) -> None:
        """Say what is used in the present round. With several shards also that it is nothing: control waits for it."""
        if not self._sources:
            return
        number, said = self._rounds.number, list[Said]()
        for source in self._sources.values():
            ranges = source.use(number)
            if ranges or sharded:
                said.append((Used(source.name, source.epoch, number), (pack(ranges),)))
        self._last = number, said
        for message, payloads in said:
            self._effects.add(Tell(message, payloads=payloads))  # without a connection it is said before the push

    def weight(self, given: float) -> float:
        """Return the weight of what is contributed to the present round: a witness's, if it repeats another's."""
        if not self._sources or given < WITNESS_WEIGHT:
            return given
        holders = (source.repeats(self._rounds.number) for source in self._sources.values())
        holder = next((one for one in holders if one >= 0), -1)
        return given if holder < 0 else witness_weight(holder)

    def carry(self) -> None:
        """Count what was used in a later round: the last one closed without this worker."""
        for source in self._sources.values():
            source.carry()

    def give_back(self) -> None:
        """Let others use what was used in the last round: it closed without this worker, which drops what it gave."""
        for source in self._sources.values():
            source.give_back()

    def drop(self) -> None:
        """Use what was used since the last round another time: the contribution with it is dropped."""
        for source in self._sources.values():
            source.drop()

    def again(self) -> list[Said]:
        """Give what is repeated on a new connection: what is used in the open round, and what has no answer."""
        return [*self.used_again(), *((one.message, one.payloads) for one in self._asked.values())]

    def used_again(self) -> list[Said]:
        """Give what is used in the open round, if it has begun."""
        number, said = self._last
        return said if number >= self._rounds.number else []

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait for something that will not come."""
        waiting, self._asked = self._asked, {}
        return [asked.waiter for asked in waiting.values()]


def _answers(message: Located | Claimed, question: Question) -> bool:
    if isinstance(message, Claimed):
        return isinstance(question, Claim) and question.number == message.number
    return isinstance(question, Register)
