"""Requests of members for a round, and which of them were granted the open one, where rounds do not wait for all.

`gradserver.engine.control.requests` decides what happens to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradserver.engine.ends import MAX_CUTS
from gradserver.engine.staleness import updates_between
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
        sections: sections that the latest rounds are of, by round.
        versions: version at which each member computes, or a lower one.
        reached: round that each member has come to, or an earlier one.
        applied: number of rounds that each member had applied when it made its latest request.
        asked: place of each member's latest request among all requests.
        awaited: members that some request waits for, each with the time since which it does.
        graces: sections with as many requests as a round needs, each with the end of the grace of members that have
            made none; None if it has passed, or there is none.
        staleness: that of each member's contributions.
    """

    waiting: dict[int, RequestRound] = field(default_factory=dict)
    begun: int = -1
    unrecorded: int = -1
    cohorts: dict[int, dict[int, int]] = field(default_factory=dict)
    sections: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, float] = field(default_factory=dict)
    graces: dict[int, float | None] = field(default_factory=dict)
    staleness: dict[int, Staleness] = field(default_factory=dict)
    _count: int = 0
    """Number of requests so far."""

    def ask(self, member_id: int, message: RequestRound) -> None:
        """Take a request. One that is said again keeps its place."""
        before = self.waiting.get(member_id)
        if before is None or before.follows != message.follows:
            self._count += 1
            self.asked[member_id] = self._count
        self.waiting[member_id] = message
        self.applied[member_id] = message.version
        self.versions[member_id] = max(message.version, self.versions.get(member_id, 0))
        self.reached[member_id] = max(message.first, self.reached.get(member_id, 0))

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

    def ready_in(self, number: int, section: int) -> dict[int, RequestRound]:
        """Return those of `ready` with a contribution to ``section``."""
        return {member_id: one for member_id, one in self.ready(number).items() if one.section == section}

    def lines(self, number: int) -> dict[int, int]:
        """Return the sections that members with data wait for, each with the place of its first request, in order."""
        first: dict[int, int] = {}
        for member_id, one in self.ready(number).items():
            place = self.asked.get(member_id, 0)
            first[one.section] = min(place, first.get(one.section, place))
        return dict(sorted(first.items(), key=lambda item: item[1]))

    def staleness_in(self, number: int, section: int, version: int) -> int:
        """Return how many updates of ``section`` there were between ``version`` and round ``number``."""
        return updates_between(version, number, section, self.sections)

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
        for known in (*self.cohorts.values(), self.versions, self.reached, self.applied, self.asked):
            known.pop(member_id, None)
        self.awaited.pop(member_id, None)
        self.staleness.pop(member_id, None)

    def wait_for(self, member_ids: Iterable[int], now: float) -> None:
        """Note which members requests wait for. It is known since when, of those that they waited for before."""
        self.awaited = {member_id: self.awaited.get(member_id, now) for member_id in member_ids}

    def wait_again(self, member_ids: Iterable[int], now: float) -> None:
        """Wait for these as if that had begun now."""
        self.awaited.update(dict.fromkeys(member_ids, now))

    def grant_grace(self, sections: Iterable[int], ends: float | None) -> None:
        """Note which ``sections`` have as many requests as a round needs. Members have a grace in those that are new.

        It ``ends`` then; None if there is none.
        """
        self.graces = {section: self.graces.get(section, ends) for section in sections}

    @property
    def grace_ends(self) -> float | None:
        """The time at which the first grace ends."""
        return min((ends for ends in self.graces.values() if ends is not None), default=None)

    def end_graces(self, now: float) -> None:
        """Let rounds begin without members that have made no request, where their grace is over."""
        over = (section for section, ends in self.graces.items() if ends is not None and ends <= now)
        self.graces.update(dict.fromkeys(list(over)))

    def begin(self, number: int, member_ids: Iterable[int], section: int) -> None:
        """Let a round of ``section`` begin with the contributions of some members."""
        self.begun = number
        granted = {member_id: self.waiting.pop(member_id) for member_id in member_ids}
        cohort = {one: number if request.follows else request.version for one, request in granted.items()}
        self.cohorts[number], self.sections[number] = cohort, section
        for known in (self.cohorts, self.sections):
            known.pop(number - MAX_CUTS, None)  # a recovery goes back no further
        for member_id, request in granted.items():
            if not request.follows:
                staleness = self.staleness_in(number, section, request.version)
                self.staleness.setdefault(member_id, Staleness()).add(staleness)
            self.versions[member_id] = request.version if request.later else number + 1
            self.reached[member_id] = number + 1
        self._look_again(section)

    def refuse(self, number: int, member_id: int) -> int:
        """Refuse a contribution in round ``number``: its member computes the next one behind the round before.

        Return how many of its contributions were refused so far.
        """
        request = self.waiting.pop(member_id)
        self.versions[member_id] = request.version if request.later else number
        self.reached[member_id] = number
        self.asked.pop(member_id, None)  # so its next one is waited for
        return self.staleness.setdefault(member_id, Staleness()).refuse()

    def restart(self, number: int) -> None:
        """Go by a new plan from round ``number`` on: all members compute at that version first."""
        for known in (self.waiting, self.cohorts, self.sections, self.versions, self.reached, self.applied, self.asked):
            known.clear()
        self.begun, self.unrecorded = number - 1, -1
        self._look_again()

    def recall(self, number: int) -> None:
        """Note that rounds behind ``number`` have not begun after all: what was granted then waits again."""
        for later in sorted(one for one in self.cohorts if one > number):
            section = self.sections.pop(later)
            for member_id, version in self.cohorts.pop(later).items():
                self.waiting.setdefault(member_id, RequestRound(version, later, section=max(section, 0)))
        self.unrecorded = -1
        if self.begun > number:
            self.begun = number
            self._look_again()

    def restore(self, begun: Mapping[int, Mapping[int, int]], sections: Mapping[int, int]) -> None:
        """Go on where an earlier coordinator was lost.

        ``begun`` has the latest rounds, with the cohort of each, and ``sections`` the section of each.

        With several sections a member of a cohort may hold more contributions of the same version.
        """
        self.sections.update(sections)
        are_several = len(set(sections.values())) > 1
        for number in sorted(begun):
            self.begun, self.cohorts[number] = number, dict(begun[number])
            self.versions.update(begun[number] if are_several else dict.fromkeys(begun[number], number + 1))
            self.reached.update(dict.fromkeys(begun[number], number + 1))

    def describe(self, member_id: int) -> dict[str, object]:
        """Return the staleness of a member as plain JSON values; nothing before its first contribution."""
        found = self.staleness.get(member_id)
        return {} if found is None else {"staleness": found.describe()}

    def _look_again(self, section: int | None = None) -> None:
        """Wait for as many requests again, in ``section`` or all."""
        if section is None:
            self.graces.clear()
            self.awaited.clear()
        else:
            self.graces.pop(section, None)
