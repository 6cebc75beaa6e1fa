"""A member's messages about rounds where several modules share its group: their sections, and what is updated."""

from __future__ import annotations

from gradserver.protocol.exchange import Kind
from gradserver.protocol.messages import Follow, Opened, Opens, Steps
from gradserver.protocol.plan import Plan
from gradserver.worker.member.effects import Effects, Said, Tell
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.waiter import Waiter


class Turns:
    """The turns of one member. Not safe to share: the session's lock guards it."""

    def __init__(self, effects: Effects, rounds: Rounds) -> None:
        self._effects = effects
        self._rounds = rounds
        self._said: list[Opens | Steps] = []
        """The section named for the round that is open or next, and the updates before it."""
        self._updates = 0
        """Number of updates since the last round."""
        self._updates_of = 0
        """The round that these updates were before."""
        self._asked: tuple[Follow, Waiter] | None = None
        """A question without an answer yet."""

    def begins(self, plan: Plan, part: int) -> None:
        """Say, before the push of bucket ``part``, that a round begins with it."""
        section = plan.section_of(part)
        if any(plan.buckets[each].numel for each in section.parts):
            is_commit = plan.buckets[part].kind is Kind.COMMIT
            self._say(Opens(self._rounds.number, section.number, 0 if is_commit else 1))

    def steps(self, updated: int, dropped: int) -> None:
        """Say that this worker's job updates models; or none, at the top of its loop."""
        self._say(Steps(self._rounds.number, self._next_update(), updated, dropped))

    def _say(self, message: Opens | Steps) -> None:
        if self._said and self._said[0].round != message.round:
            self._said = []
        self._said.append(message)
        self._effects.add(Tell(message))  # without a connection it is repeated on the next one

    def _next_update(self) -> int:
        if self._updates_of != self._rounds.number:
            self._updates, self._updates_of = 0, self._rounds.number
        self._updates += 1
        return self._updates - 1

    @property
    def done(self) -> int:
        """Number of updates since the last round."""
        return self._updates if self._updates_of == self._rounds.number else 0

    def go_on_from(self, done: int) -> None:
        """Take over the number of updates since the last round from the member that sent its state."""
        self._updates, self._updates_of = done, self._rounds.number

    def follow(self, waiter: Waiter) -> Follow:
        """Give the question what the others do next. The waiter's value becomes the answer."""
        message = Follow(self._rounds.number, self.done)
        self._asked = message, waiter
        return message

    def opened(self, message: Opened) -> None:
        """Take the coordinator's answer.

        A question that was repeated on a new connection may have been heard twice: the second answer is passed over.
        """
        if self._asked is not None and self._asked[0] == Follow(message.round, message.index):
            (_, waiter), self._asked = self._asked, None
            self._effects.complete(waiter, value=message)

    def followed(self, news: Opened) -> None:
        """Count the update, or the top of a loop, that this worker does after the others."""
        if news.updated or news.top:
            self._next_update()

    def again(self) -> list[Said]:
        """Give what is repeated on a new connection: what was said of the open round, and what has no answer."""
        said: list[Said] = [(message, ()) for message in self._said if message.round >= self._rounds.number]
        return said if self._asked is None else [*said, (self._asked[0], ())]

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait for what will not come."""
        asked, self._asked = self._asked, None
        return [] if asked is None else [asked[1]]
