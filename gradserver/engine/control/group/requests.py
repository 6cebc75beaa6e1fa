"""Requests of members for a round, and which of them were granted the open one, where rounds do not wait for all.

`gradserver.engine.control.requests` decides what happens to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradserver.engine.ends import MAX_CUTS
from gradserver.protocol.messages import RequestRound


@dataclass(slots=True)
class Staleness:
    """Staleness of one member's contributions: how many there were, the sum, the largest, and how many were refused."""

    count: int = 0
    total: int = 0
    most: int = 0
    refused: int = 0

    def add(self, staleness: int) -> None:
        """Count a contribution."""
        self.count += 1
        self.total += staleness
        self.most = max(self.most, staleness)

    def refuse(self) -> int:
        """Count a contribution that is refused. Return how many were."""
        self.refused += 1
        return self.refused

    def describe(self) -> dict[str, object]:
        """Return it as plain JSON values."""
        mean = self.total / self.count if self.count else 0.0
        return {"mean": round(mean, 3), "max": self.most, "contributions": self.count, "refused": self.refused}


@dataclass(slots=True)
class Requests:
    """Requests of one group's members.

    Attributes:
        waiting: those that have no answer, by member id.
        begun: the latest round that has begun; -1 before the first.
        unrecorded: round that has begun before a recovery, perhaps without a record of that; -1 if there is none.
        cohorts: members that contribute to the latest rounds, and the version of each contribution, by round.
        versions: version at which each member computes, or a lower one.
        applied: number of rounds that each member had applied when it made its latest request.
        since: time since which the next round could begin, but for members that have made no request.
        grace_ends: end of the grace of these; None if it has passed, or is not reached.
        has_quorum: True if as many requests wait as a round needs.
        staleness: that of each member's contributions.
    """

    waiting: dict[int, RequestRound] = field(default_factory=dict)
    begun: int = -1
    unrecorded: int = -1
    cohorts: dict[int, dict[int, int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    since: float | None = None
    grace_ends: float | None = None
    has_quorum: bool = False
    staleness: dict[int, Staleness] = field(default_factory=dict)

    def ask(self, member_id: int, message: RequestRound) -> None:
        """Take a request."""
        self.waiting[member_id] = message
        self.applied[member_id] = message.version
        self.versions[member_id] = max(message.version, self.versions.get(member_id, 0))

    @property
    def cohort(self) -> dict[int, int]:
        """Members that contribute to the latest round, and the version of each contribution."""
        return self.cohorts.get(self.begun, {})

    @property
    def following(self) -> set[int]:
        """Members without data."""
        return {member_id for member_id, one in self.waiting.items() if one.follows}

    def ready(self, number: int) -> dict[int, RequestRound]:
        """Return the requests of members with data that can contribute to round ``number``."""
        here = self.waiting.items()
        return {
            member_id: one
            for member_id, one in here
            if not one.follows and (one.first == number or (one.first < number and not one.pushes))
        }

    def pushing(self, number: int) -> set[int]:
        """Return the members that have begun to push to round ``number``."""
        return {member_id for member_id, one in self.waiting.items() if one.pushes and one.first == number}

    def note_begun(self, number: int) -> None:
        """Note that members hold results of round ``number``, so that it has begun."""
        self.unrecorded = number

    def withdraw(self, member_id: int) -> None:
        """Forget the request of a member."""
        self.waiting.pop(member_id, None)

    def depart(self, member_id: int) -> None:
        """Forget a member that is gone."""
        self.withdraw(member_id)
        for known in (*self.cohorts.values(), self.versions, self.applied):
            known.pop(member_id, None)
        self.staleness.pop(member_id, None)

    def wait(self, since: float | None) -> None:
        """Note that the next round waits for members that have made no request; None if it does not any more."""
        self.since = since

    def reach_quorum(self, grace_ends: float | None) -> None:
        """Note that as many requests wait as a round needs. The others have a grace, if there is one."""
        self.has_quorum, self.grace_ends = True, grace_ends

    def lose_quorum(self) -> None:
        """Wait for as many requests again."""
        self.has_quorum, self.grace_ends = False, None

    def end_grace(self) -> None:
        """Let the round begin without the others."""
        self.grace_ends = None

    def begin(self, number: int, member_ids: Iterable[int]) -> None:
        """Let a round begin with the contributions of some members."""
        self.begun = number
        granted = {member_id: self.waiting.pop(member_id) for member_id in member_ids}
        cohort = {one: number if request.follows else request.version for one, request in granted.items()}
        self.cohorts[number] = cohort
        self.cohorts.pop(number - MAX_CUTS, None)  # a recovery goes back no further
        for member_id, request in granted.items():
            if not request.follows:
                self.staleness.setdefault(member_id, Staleness()).add(number - request.version)
        self.versions.update(dict.fromkeys(cohort, number + 1))
        self._look_again()

    def refuse(self, number: int, member_id: int) -> int:
        """Refuse a contribution in round ``number``: its member computes the next one behind the round before.

        Return how many of its contributions were refused so far.
        """
        del self.waiting[member_id]
        self.versions[member_id] = number
        return self.staleness.setdefault(member_id, Staleness()).refuse()

    def restart(self, number: int) -> None:
        """Go by a new plan from round ``number`` on: all members compute at that version first."""
        self.waiting.clear()
        self.cohorts.clear()
        self.versions.clear()
        self.applied.clear()
        self.begun, self.unrecorded = number - 1, -1
        self._look_again()

    def recall(self, number: int) -> None:
        """Note that rounds behind ``number`` have not begun after all: what was granted then waits again."""
        for later in sorted(one for one in self.cohorts if one > number):
            for member_id, version in self.cohorts.pop(later).items():
                self.waiting.setdefault(member_id, RequestRound(version, later))
        self.unrecorded = -1
        if self.begun > number:
            self.begun = number
            self._look_again()

    def restore(self, begun: Mapping[int, Mapping[int, int]]) -> None:
        """Go on where an earlier coordinator was lost; ``begun`` has the latest rounds, with the cohort of each."""
        for number in sorted(begun):
            self.begun, self.cohorts[number] = number, dict(begun[number])
            self.versions.update(dict.fromkeys(begun[number], number + 1))

    def describe(self, member_id: int) -> dict[str, object]:
        """Return the staleness of a member as plain JSON values; nothing before its first contribution."""
        found = self.staleness.get(member_id)
        return {} if found is None else {"staleness": found.describe()}

    def _look_again(self) -> None:
        self.wait(None)
        self.lose_quorum()
