"""What a member says and asks of rounds where several modules share its group: whose they are, and what is updated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import ClosedError, DeadlineError
from gradserver.protocol.messages import Follow, Message, Opened, Opens, Steps
from gradserver.protocol.plan import Plan
from gradserver.worker.handle import Handle


class Speaker(Protocol):
    """Who says and asks it: a worker's session."""

    @property
    def round(self) -> int:
        """The round that is open or next."""

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Of something that the coordinator is asked."""

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""


class Turns:
    """Not safe to share: it is the thread's that trains. Answers are taken with the session's lock held."""

    def __init__(self, session: Speaker) -> None:
        self._session = session
        self._said: list[Opens | Steps] = []
        """Of the round that is open or next."""
        self._updates = 0
        """How many there were since the last round."""
        self._updates_of = 0
        """Before which round that was."""
        self._asked: tuple[Follow, Handle] | None = None
        """What has no answer yet."""

    def begins(self, plan: Plan, part: int) -> None:
        """This worker is about to push bucket ``part``, the first one of a round."""
        section = plan.section_of(part)
        if any(plan.buckets[each].numel for each in section.parts):
            self._say(Opens(self._session.round, section.number))

    def steps(self, updated: int, dropped: int) -> None:
        """This worker's job updates models; or none, and is at the top of its loop."""
        self._say(Steps(self._session.round, self._next_update(), updated, dropped))

    def _say(self, message: Opens | Steps) -> None:
        if self._said and self._said[0].round != message.round:
            self._said = []
        self._said.append(message)
        with suppress(ClosedError, ConnectionError):  # what is pushed will say it
            self._session.tell(message)

    def _next_update(self) -> int:
        if self._updates_of != self._session.round:
            self._updates, self._updates_of = 0, self._session.round
        self._updates += 1
        return self._updates - 1

    @property
    def done(self) -> int:
        """How much was done since the last round."""
        return self._updates if self._updates_of == self._session.round else 0

    def go_on_from(self, done: int) -> None:
        """This worker has the state of a member that had done so much since the last round."""
        self._updates, self._updates_of = done, self._session.round

    def follow(self) -> Opened:
        """What the others do next; waits for it."""
        number = self._session.round
        message = Follow(number, self.done)
        handle = self._session.new_handle(self._overdue)
        self._asked = message, handle
        self._session.tell(message)
        news: Opened = handle.wait()
        if news.updated or news.top:
            self._next_update()
        return news

    def opened(self, message: Opened) -> list[Handle]:
        """The coordinator has said it; gives who waits for that.

        What was said again on a new connection may have been heard twice: the second answer is passed over.
        """
        if self._asked is None or self._asked[0] != Follow(message.round, message.index):
            return []
        (_, handle), self._asked = self._asked, None
        handle._value = message
        return [handle]

    def say_again(self, channel: Channel) -> None:
        """The same, on a new connection."""
        for message in self._said:
            if message.round >= self._session.round:
                channel.send(message)
        if self._asked is not None:
            channel.send(self._asked[0])

    def give_up(self) -> list[Handle]:
        """Who waits for what will not come."""
        asked, self._asked = self._asked, None
        return [] if asked is None else [asked[1]]

    def _overdue(self, seconds: float) -> DeadlineError:
        number = self._session.round
        return DeadlineError(f"nobody has begun round {number} for {seconds:g} s, which this worker has no data for")
