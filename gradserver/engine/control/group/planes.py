"""The plane of a group, and what its members and learners offer.

`gradserver.engine.control.planes` chooses the plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradserver.engine.control.planes import Candidate, Case, Choice, can_have_commits, check, choose
from gradserver.engine.records import Chosen, Told
from gradserver.protocol.offers import UNTOLD, Offer, summary
from gradserver.protocol.planes import AUTO


@dataclass(slots=True)
class Planes:
    """Plane of one group.

    Attributes:
        demanded: the plane that the coordinator demands; "auto" if it demands none.
        digests: whether members hash the results that they reduce among themselves.
        offers: what members and learners can do, by member id.
        choice: the plane in force.
        written: the choice that the journal has.
        unwritten: members and learners with offers that the journal has not.
        commits: true if modules are wrapped with a commit. That is decided when the group begins: all hear the same.
    """

    demanded: str = AUTO
    digests: bool = False
    offers: dict[int, Offer] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    written: Choice = field(default_factory=Choice)
    unwritten: set[int] = field(default_factory=set)
    commits: bool = False

    def take(self, member_id: int, offer: Offer) -> None:
        """Take what a worker offers that has got ``member_id``."""
        if self.offer_of(member_id) != offer:
            self.unwritten.add(member_id)
        self.offers[member_id] = offer

    def restore(self, offers: Mapping[int, Offer], choice: Choice, commits: bool) -> None:
        """Go on with what an earlier coordinator has written."""
        self.offers = dict(offers)
        self.choice = self.written = choice
        self.commits = commits

    def offers_of(self, member_ids: Iterable[int]) -> tuple[Offer, ...]:
        """Return what these members offer, in this order; nothing if none of them has told."""
        offers = tuple(self.offer_of(member_id) for member_id in member_ids)
        return offers if any(offer != UNTOLD for offer in offers) else ()

    def offer_of(self, member_id: int) -> Offer:
        """Return what a member or a learner offers."""
        return self.offers.get(member_id, UNTOLD)

    def candidates(self, names: Mapping[int, str]) -> list[Candidate]:
        """Return the workers with these ids and names, with what they offer."""
        return [Candidate(name, self.offer_of(member_id)) for member_id, name in names.items()]

    def best_for(self, case: Case) -> Choice:
        """Return the plane for some workers."""
        return choose(case, self.demanded)

    def choose(self, case: Case) -> bool:
        """Choose the plane of a membership. Return True if it is another than before."""
        before, self.choice = self.choice, self.best_for(case)
        return self.choice != before

    def begin(self, founders: Case) -> None:
        """Decide whether modules have commits: if members can reduce among themselves, now or with more workers."""
        self.commits = can_have_commits(founders, self.demanded)

    def check(self, group: str, others: Case, new: Candidate) -> None:
        """Raise the error that keeps a worker out of the group, as to its plane, if there is one."""
        check(group, others, new, self.demanded)

    def describe(self, present: Iterable[int], case: Case) -> dict[str, object]:
        """Return the plane as plain JSON values, and what it follows from beside the offers."""
        plane, reason, demanded = self.choice
        offers = self.offers_of(present)
        shown = {"name": plane, "reason": reason, "demanded": demanded, "devices": summary(offers) if offers else ""}
        facts = {
            "leaves_late": case.leaves_late,
            "has_commits": case.has_commits,
            "mode": case.mode,
            "mean": str(case.mean),
        }
        return {**shown, "coordinator_demands": self.demanded, **facts}

    def describe_offer(self, member_id: int) -> dict[str, object]:
        """Return what a member offers as plain JSON values, with its own device alone; nothing if it has not told."""
        offer = self.offer_of(member_id)
        if offer == UNTOLD:
            return {}
        return {"offer": {**offer._asdict(), "devices": [device._asdict() for device in offer.devices[:1]]}}

    def news(self, group: str, epoch: int, present: Iterable[int]) -> Chosen | None:
        """Return the record of what is to be written of members that are ``present``; None if there is nothing."""
        new = sorted(self.unwritten.intersection(present))
        if not new and self.choice == self.written:
            return None
        self.unwritten.difference_update(new)
        self.written = self.choice
        return Chosen(group, epoch, *self.choice, tuple(Told(member_id, self.offers[member_id]) for member_id in new))
