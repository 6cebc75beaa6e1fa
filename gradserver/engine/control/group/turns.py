"""Rounds that are not over, and what members have said of each: `gradserver.engine.control.turns` acts on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradserver.protocol.errors import OutOfStepError
from gradserver.protocol.messages import Follow, Opens, Steps


@dataclass(slots=True)
class Turn:
    """A round that is open, or next. Members that said something first are named by id."""

    opens: Opens | None = None
    opener: int = -1
    steps: list[tuple[Steps, int]] = field(default_factory=list)
    """Updates before it, each with the member that said it first."""
    begun: dict[int, float] = field(default_factory=dict)
    """Time at which each member first said which section it is of, as its first gradient was ready."""

    def open(self, message: Opens, member_id: int, now: float) -> tuple[Opens, int]:
        """Note which section the round is of, if no member has said so of this attempt or a later one.

        Return what was said first of the latest attempt, and the member.
        """
        self.begun.setdefault(member_id, now)
        if self.opens is None or self.opens.attempt < message.attempt:
            self.opens, self.opener = message, member_id
        return self.opens, self.opener

    def step(self, message: Steps, member_id: int) -> tuple[Steps, int]:
        """Note an update before the round, if no member has said so. Return what was said first, and the member."""
        if message.index == len(self.steps):
            self.steps.append((message, member_id))
        return self.steps[message.index]


@dataclass(slots=True)
class Turns:
    """Rounds that are not over, and members that ask about them."""

    rounds: dict[int, Turn] = field(default_factory=dict)
    following: dict[int, Follow] = field(default_factory=dict)
    """Question of each member."""
    conflict: OutOfStepError | None = None
    """Error of two members that say different things of one round."""

    def at(self, number: int) -> Turn:
        """Return what was said of a round."""
        return self.rounds.setdefault(number, Turn())

    def follow(self, member_id: int, question: Follow) -> None:
        """Keep the question of a member that follows."""
        self.following[member_id] = question

    def unfollow(self, member_id: int) -> None:
        """Forget the question of a member: it was answered, or the member is gone."""
        self.following.pop(member_id, None)

    def contradict(self, error: OutOfStepError) -> None:
        """Note that two members say different things of one round."""
        self.conflict = error

    def forget_before(self, number: int) -> None:
        """Forget rounds that are over."""
        for one in [one for one in self.rounds if one < number]:
            del self.rounds[one]
