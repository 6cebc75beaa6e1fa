"""Leases of samples: a worker asks the coordinator for them, and tells it what it used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ClosedError, DeadlineError, GradServerError, UsageError
from gradserver.protocol.messages import Message
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.ranges import Ranges, pack, unpack
from gradserver.worker.handle import Handle

Question = Register | Claim


class Source(Protocol):
    """Data that positions are claimed of."""

    @property
    def name(self) -> str:
        """Name of the source in the group."""

    @property
    def epoch(self) -> int:
        """The present one."""

    def use(self, round_number: int) -> Ranges:
        """Give what this worker used since the last round, and so in this one; the same again for the same round."""

    def carry(self) -> None:
        """The last round closed without this worker, and what it gave is kept: it is used in the next one instead."""


class Speaker(Protocol):
    """A worker's session, through which the coordinator is asked and told."""

    @property
    def round(self) -> int:
        """The round that is open or next."""

    def check_open(self) -> None:
        """Raise what ended this membership, if anything has."""

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Make the handle of something that the coordinator is asked."""

    def send(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Say something to the coordinator."""


class Asked(NamedTuple):
    """A question that has no answer yet."""

    message: Question
    payloads: Sequence[Buffer]
    handle: Handle


class Leases:
    """One worker's questions, one at a time for each kind of data; and what it says before the first push of a round.

    What has no answer is asked again on a new connection, and the same claim is given the same ranges.
    """

    def __init__(self, session: Speaker) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._asked: dict[str, Asked] = {}
        self._last: tuple[int, list[tuple[Used, bytes]]] = (-1, [])
        """Messages that were sent about the last round."""

    def add(self, source: Source) -> None:
        """Ask ``source`` in each round from now on what was used of it."""
        with self._lock:
            if source.name in self._sources:
                raise UsageError(
                    f"this worker has DataRanges of the name {source.name!r} already: go on with those, or give the "
                    f"others another name="
                )
            self._sources[source.name] = source

    def ask(self, message: Question, ranges: Ranges | None = None) -> Handle:
        """The handle's value is the answer and its ranges, or raises why there is none."""
        session = self._session
        session.check_open()
        late = _Overdue(message.name)
        asked = Asked(message, () if ranges is None else (pack(ranges),), session.new_handle(late))
        with self._lock:
            self._asked[message.name] = asked
        session.send(message, asked.payloads)
        return asked.handle

    def answered(self, message: Located | Claimed, payloads: Sequence[Buffer]) -> None:
        """The coordinator has answered."""
        ranges = unpack(payloads[0])
        with self._lock:
            asked = self._asked.get(message.name)
            if asked is None or not _answers(message, asked.message):
                return  # to what was asked on an earlier connection
            del self._asked[message.name]
        asked.handle._value = message, ranges
        asked.handle._complete()

    def failed(self, name: str, error: GradServerError) -> None:
        """The coordinator has refused to answer."""
        with self._lock:
            asked = self._asked.pop(name, None)
        if asked is not None:
            asked.handle._complete(error)

    def begin_round(self, number: int, sharded: bool) -> None:
        """Say what is used in round ``number``. With several shards also that it is nothing: control waits for it."""
        if not self._sources:
            return
        with self._lock:
            said = []
            for source in self._sources.values():
                ranges = source.use(number)
                if ranges or sharded:
                    said.append((Used(source.name, source.epoch, number), pack(ranges)))
            self._last = number, said
        for message, payload in said:
            with suppress(ClosedError, ConnectionError):  # the push will say it
                self._session.send(message, (payload,))

    def carry(self) -> None:
        """The last round closed without this worker, and what it gave counts in a later one."""
        with self._lock:
            for source in self._sources.values():
                source.carry()

    def say_again(self, channel: Channel) -> None:
        """Repeat, on a new connection, what is used in the open round and what has no answer."""
        with self._lock:
            number, said = self._last
            again = list(said) if number >= self._session.round else []
            asked = list(self._asked.values())
        for message, payload in again:
            channel.send(message, (payload,))
        for question in asked:
            channel.send(question.message, question.payloads)

    def disown(self) -> None:
        """Take a new lock, in a forked child: a thread that the child does not have may hold the old one."""
        self._lock = threading.Lock()

    def give_up(self) -> list[Handle]:
        """Give the handles that wait for something that will not come."""
        with self._lock:
            waiting, self._asked = self._asked, {}
        return [asked.handle for asked in waiting.values()]


class _Overdue:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, seconds: float) -> DeadlineError:
        return DeadlineError(f"the coordinator has not said within {seconds:g} s what there is of data {self._name!r}")


def _answers(message: Located | Claimed, question: Question) -> bool:
    if isinstance(message, Claimed):
        return isinstance(question, Claim) and question.number == message.number
    return isinstance(question, Register)
