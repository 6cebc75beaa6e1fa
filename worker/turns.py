"""What a member says and asks of rounds where several modules share its group: whose the next round is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from protocol.channel import Channel
from protocol.errors import ClosedError, DeadlineError
from protocol.exchange import ExchangeKey
from protocol.messages import Follow, Message, Opened, Opens
from protocol.plan import Plan
from worker.handle import Handle


class Speaker(Protocol):
    """Who says and asks it: a worker's session."""

    round: int

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        """Of something that the coordinator is asked."""

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""


class Turns:
    """Not safe to share: the session's lock guards it, but for what is said and asked by the thread that trains."""

    def __init__(self, session: Speaker) -> None:
        self._session = session
        self._said: Opens | None = None
        """What was said last."""
        self._asked: tuple[Follow, Handle] | None = None
        """What has no answer yet."""

    def begins(self, plan: Plan, part: int) -> None:
        """This worker is about to push bucket ``part``, the first one of a round."""
        section = plan.section_of(part)
        if plan.is_shared and any(plan.buckets[each].numel for each in section.parts):
            self._said = Opens(self._session.round, section.number)
            with suppress(ClosedError, ConnectionError):  # the push will say it
                self._session.tell(self._said)

    def ask(self) -> Handle:
        """Whose the round is that comes next: the handle's value is the number of a section."""
        message = Follow(self._session.round)
        self._asked = message, self._session.new_handle(self._overdue)
        self._session.tell(message)
        return self._asked[1]

    def opened(self, message: Opened) -> list[Handle]:
        """The coordinator has said it; gives who waits for that."""
        if self._asked is None or self._asked[0].round != message.round:
            return []
        (_, handle), self._asked = self._asked, None
        handle._value = message.section
        return [handle]

    def came(self, key: ExchangeKey, plan: Plan) -> list[Handle]:
        """A result has come unasked, which says it too."""
        return self.opened(Opened(key.number, plan.section_of(key.part).number))

    def say_again(self, channel: Channel) -> None:
        """The same, on a new connection."""
        if self._said is not None and self._said.round >= self._session.round:
            channel.send(self._said)
        if self._asked is not None:
            channel.send(self._asked[0])

    def give_up(self) -> list[Handle]:
        """Who waits for what will not come."""
        asked, self._asked = self._asked, None
        return [] if asked is None else [asked[1]]

    def _overdue(self, seconds: float) -> DeadlineError:
        number = self._session.round
        return DeadlineError(f"nobody has begun round {number} for {seconds:g} s, which this worker has no data for")
