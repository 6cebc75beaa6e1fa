"""A member's messages about rounds where several modules share its group: their sections, and what is updated."""

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
    """The sender of these messages: a worker's session."""

    @property
    def round(self) -> int:
        """The round that is open or next."""

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Return the handle of a question to the coordinator."""

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator."""


class Turns:
    """The turns of one worker, for the training thread only. Answers are taken with the session's lock held."""

    def __init__(self, session: Speaker) -> None:
        self._session = session
        self._said: list[Opens | Steps] = []
        """The section named for the round that is open or next."""
        self._updates = 0
        """Number of updates since the last round."""
        self._updates_of = 0
        """The round that these updates were before."""
        self._asked: tuple[Follow, Handle] | None = None
        """Questions without an answer yet."""

    def begins(self, plan: Plan, part: int) -> None:
        """Say, before the push of bucket ``part``, that a round begins with it."""
        section = plan.section_of(part)
        if any(plan.buckets[each].numel for each in section.parts):
            self._say(Opens(self._session.round, section.number))

    def steps(self, updated: int, dropped: int) -> None:
        """Say that this worker's job updates models; or none, at the top of its loop."""
        self._say(Steps(self._session.round, self._next_update(), updated, dropped))

    def _say(self, message: Opens | Steps) -> None:
        if self._said and self._said[0].round != message.round:
            self._said = []
        self._said.append(message)
        with suppress(ClosedError, ConnectionError):  # the next push will report it
            self._session.tell(message)

    def _next_update(self) -> int:
        if self._updates_of != self._session.round:
            self._updates, self._updates_of = 0, self._session.round
        self._updates += 1
        return self._updates - 1

    @property
    def done(self) -> int:
        """Number of updates since the last round."""
        return self._updates if self._updates_of == self._session.round else 0

    def go_on_from(self, done: int) -> None:
        """Take over the number of updates since the last round from the member that sent its state."""
        self._updates, self._updates_of = done, self._session.round

    def follow(self) -> Opened:
        """Wait for what the others do next, and return it."""
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
        """Take the coordinator's answer. Return the handles that wait for it.

        A question that was repeated on a new connection may have been heard twice: the second answer is passed over.
        """
        if self._asked is None or self._asked[0] != Follow(message.round, message.index):
            return []
        (_, handle), self._asked = self._asked, None
        handle._value = message
        return [handle]

    def say_again(self, channel: Channel) -> None:
        """Repeat the messages on a new connection."""
        for message in self._said:
            if message.round >= self._session.round:
                channel.send(message)
        if self._asked is not None:
            channel.send(self._asked[0])

    def give_up(self) -> list[Handle]:
        """Return the handles that wait for what will not come."""
        asked, self._asked = self._asked, None
        return [] if asked is None else [asked[1]]

    def _overdue(self, seconds: float) -> DeadlineError:
        number = self._session.round
        return DeadlineError(
            f"no member has begun round {number} for {seconds:g} s, and this worker has no data for it"
        )
