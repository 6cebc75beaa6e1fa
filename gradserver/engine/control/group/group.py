"""A group: its parts, and what follows from several of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from gradserver.engine.control.findings import Findings
from gradserver.engine.control.group.applicants import Applicants
from gradserver.engine.control.group.blocked import BlockedMembers
from gradserver.engine.control.group.configuration import Configuration
from gradserver.engine.control.group.learners import Learners, Stage
from gradserver.engine.control.group.leases import Leases
from gradserver.engine.control.group.members import Members
from gradserver.engine.control.group.origin import Origin
from gradserver.engine.control.group.planes import Planes
from gradserver.engine.control.group.plans import Plans
from gradserver.engine.control.group.recovery import Recovery
from gradserver.engine.control.group.requests import Requests
from gradserver.engine.control.group.rounds import Rounds
from gradserver.engine.control.group.sessions import Sessions
from gradserver.engine.control.group.shards import DataShards
from gradserver.engine.control.group.slow import Slow
from gradserver.engine.control.group.turns import Turns
from gradserver.engine.control.group.watch import Watch
from gradserver.engine.control.planes import Candidate, Case
from gradserver.engine.control.quota import Account
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Departure, Member, Newcomer
from gradserver.engine.orders import Configure, RemoteOrder
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.protocol.errors import GradServerError, LeftOutError, UnexpectedMessageError
from gradserver.protocol.limits import MAX_ROUNDS_AHEAD, MAX_TOKEN, MAX_UNWRITTEN_ROUNDS
from gradserver.protocol.messages import Membership
from gradserver.protocol.offers import summary
from gradserver.protocol.shards import Table

MAX_REASON: Final = 300
"""Characters of the reason of a departure, of those that all names leave in a header."""


class State(Enum):
    """State of a group; `gradserver.engine.control.machine` has the table of transitions."""

    FORMING = "forming"
    ACTIVE = "active"
    PAUSED = "paused"
    RECOVERING = "recovering"
    SUSPENDED = "suspended"
    BROKEN = "broken"
    ENDED = "ended"


@dataclass(slots=True)
class Group:
    """State of one group in the control half.

    Attributes:
        account: its journal quota.
        nonfinite: what becomes of gradients that are not finite.
        found: counts of these.
        timeout: longest of the timeouts that founders named, in seconds. They wait for others that long.
        round_timeout: seconds that an exchange or a plan waits for a member that is alive.
        broken: why the group goes no further.
        state: state as of the last event or rule that was dealt with.
        is_ended: True when the registry has forgotten the group.
        origin: the parent and the named members of a sub-group; None for any other group.
        expires: time at which a group that only measures ends; None for all others.
    """

    name: str
    policy: Policy
    account: Account = field(default_factory=Account)
    nonfinite: OnNonFinite = OnNonFinite.HALT
    found: Findings = field(default_factory=Findings)
    timeout: float = 0.0
    round_timeout: float = 0.0
    broken: GradServerError | None = None
    state: State = State.FORMING
    is_ended: bool = False
    expires: float | None = None
    applicants: Applicants = field(default_factory=Applicants)
    members: Members = field(init=False)
    configuration: Configuration = field(default_factory=Configuration)
    learners: Learners = field(default_factory=Learners)
    rounds: Rounds = field(default_factory=Rounds)
    plans: Plans = field(default_factory=Plans)
    planes: Planes = field(default_factory=Planes)
    sessions: Sessions = field(default_factory=Sessions)
    recovery: Recovery = field(default_factory=Recovery)
    shards: DataShards = field(init=False)
    leases: Leases = field(default_factory=Leases)
    turns: Turns = field(default_factory=Turns)
    requests: Requests = field(default_factory=Requests)
    watch: Watch = field(default_factory=Watch)
    blocked: BlockedMembers = field(default_factory=BlockedMembers)
    slow: Slow = field(default_factory=Slow)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        self.members = Members(self.policy.maximum)
        self.shards = DataShards(Table(self.policy.maximum, unit=self.policy.mean.unit))

    # ── its life ──────────────────────────────────────────────────────────────────────────────────────

    def set_timeouts(self, timeout: float, round_timeout: float | None) -> None:
        """Set how long its members wait. By default a round waits for as long as the founders do."""
        self.timeout = timeout
        self.round_timeout = round_timeout or timeout

    def be_broken(self, error: GradServerError) -> bool:
        """Let the group go no further. False if it was broken before: the first reason stands."""
        if self.broken is not None:
            return False
        self.broken = error
        return True

    def end(self) -> None:
        """Note that the registry has forgotten the group."""
        self.is_ended = True

    def note_state(self) -> tuple[State, State]:
        """Store the state that follows from what is known now. Return the one before, and this one."""
        before, self.state = self.state, self.present_state()
        return before, self.state

    def present_state(self) -> State:
        """Tell the state from what is known of the group."""
        if self.is_ended:
            return State.ENDED
        if not self.begun:
            return State.FORMING
        if self.broken:
            return State.BROKEN
        if self.is_deserted:
            return State.SUSPENDED
        if self.recovery.is_open:
            return State.RECOVERING
        return State.ACTIVE if self.rounds.paused is None else State.PAUSED

    # ── telling others ────────────────────────────────────────────────────────────────────────────────

    def order(self, order: RemoteOrder, effects: Effects) -> None:
        """Have all data shards obey ``order``."""
        self.shards.order(order, effects)

    def configure(
        self,
        effects: Effects,
        news: Membership | None = None,
        member_id: int = -1,
        departed: tuple[Departure, ...] = (),
        steady: bool = False,
    ) -> None:
        """Have all data shards go by the membership as it is now.

        When all do, members hear ``news`` of it, or the learner with ``member_id`` gets its Welcome.
        """
        self.configuration.change(self.shards.all, news, member_id)
        if news is not None:
            self.members.recall(news)
        self.order(self.configured(departed, steady), effects)

    def configured(self, departed: tuple[Departure, ...] = (), steady: bool = False) -> Configure:
        """Return the membership as data shards are told of it. These have ``departed`` since the version before."""
        names, first_rounds = self.members.identities.names, self.members.first_rounds
        tokens = {member_id: self.token(member_id) if self.shards else "" for member_id in self.early}
        early = [
            Newcomer(member_id, Member(-1, names[member_id]), tokens[member_id], first_rounds[member_id])
            for member_id in self.early
        ]
        learners = [learner.configured(member_id) for member_id, learner in self.learners.by_id.items()]
        version, epoch = self.configuration.version, self.members.epoch
        present = self.members.identities.present
        return Configure(self.name, version, epoch, present, (*early, *learners), departed, steady)

    def token(self, member_id: int) -> str:
        """Return the token that the member with ``member_id`` of a durable group shows when it comes back.

        A member that had the id before shows something else.
        """
        return self._follows(f"{member_id} {self.members.identities.names[member_id]}")

    @property
    def proves(self) -> str:
        """The text from which the proofs of results follow; empty if the group is not durable."""
        return self._follows("results") if self.is_durable else ""

    def _follows(self, said: str) -> str:
        return hmac.new(self.sessions.secret.encode(), said.encode(), hashlib.sha256).hexdigest()[:MAX_TOKEN]

    def news(self, what: str, lost: bool, effects: Effects) -> Membership:
        """Return the news of the present membership, which is a new one, and log it."""
        effects.log(f"group {self.name!r}: {what}, membership epoch {self.members.epoch}", warning=lost)
        if self.choose_plane():
            self.log_plane(effects)
        return self.membership(what, lost)

    def membership(self, what: str, lost: bool) -> Membership:
        """Return the news of the present membership."""
        choice, offers = self.planes.choice, self.planes.offers_of(self.members.identities.present)
        news = self.members.membership(what, lost, self.early)
        return replace(news, plane=choice.plane, plane_reason=choice.reason, offers=offers)

    def choose_plane(self) -> bool:
        """Choose the plane of the present membership. Return True if it is another one than before."""
        return self.planes.choose(self.case(self.members.identities.present))

    def case(self, member_ids: Iterable[int]) -> Case:
        """Return the facts by which the plane of these members is chosen."""
        names = self.members.identities.names
        workers = self.planes.candidates({member_id: names[member_id] for member_id in member_ids})
        return Case(workers, self.leaves_late, self.plans.plan is None or self.planes.commits, *self.policy.case)

    def begin_planes(self, founders: Iterable[int]) -> None:
        """Decide by what the ``founders`` offer whether modules have commits."""
        self.planes.begin(self.case(founders))

    def log_plane(self, effects: Effects) -> None:
        """Log the plane, the reason, and what it goes by."""
        offers = self.planes.offers_of(self.members.identities.present)
        effects.log(f"group {self.name!r}: plane {self.planes.choice}; devices: {summary(offers)}")

    def candidates_beside(self, name: str) -> list[Candidate]:
        """Return the workers by which the plane is chosen, but for an earlier one with ``name``, which is back."""
        names, inside = self.members.identities.names, {**self.members.by_id, **self.learners.by_id}
        beside = [member_id for member_id in inside if names[member_id] != name]
        here = [Candidate(names[member_id], self.planes.offer_of(member_id)) for member_id in beside]
        joins = [one.join for one in (*self.applicants.waiting, *self.learners.queue)]
        return here + [Candidate(join.name, join.offer) for join in joins]

    @property
    def leaves_late(self) -> bool:
        """True if rounds are closed without late members."""
        return self.policy.lateness is not None

    # ── members and learners ──────────────────────────────────────────────────────────────────────────

    @property
    def begun(self) -> bool:
        """True if there is a member, or a learner that contributes already."""
        return bool(self.members.by_id) or bool(self.contributors)

    @property
    def is_deserted(self) -> bool:
        """True if all members are without a connection."""
        return bool(self.sessions.away) and len(self.sessions.away) == len(self.members.by_id)

    @property
    def is_durable(self) -> bool:
        """True if the group survives its coordinator."""
        return bool(self.sessions.secret)

    @property
    def contributors(self) -> list[int]:
        """Ids of members, and of learners that contribute already."""
        learners = self.learners.by_id
        return [*self.members.by_id, *(member_id for member_id, one in learners.items() if one.stage is Stage.ENTERED)]

    @property
    def early(self) -> tuple[int, ...]:
        """Members before their first round is over, as a recovery began in it."""
        return self.members.early(self.rounds.number)

    @property
    def entering(self) -> list[int]:
        """Ids of members and learners that contribute to the open round as their first one."""
        return sorted([*self.early, *(member_id for member_id, one in self.learners.by_id.items() if one.entered)])

    @property
    def next_count(self) -> int:
        """Number of members, and of learners that contribute to the next round."""
        return len(self.members.by_id) + sum(one.is_coming for one in self.learners.by_id.values())

    @property
    def lacks_workers(self) -> bool:
        """True if fewer than the minimum contribute to the next round."""
        return self.next_count < self.policy.minimum

    @property
    def connections(self) -> list[int]:
        """Connections of all workers that are here."""
        here = [member.connection for member in self.members.by_id.values() if member.connection >= 0]
        inside = here + [one.connection for one in self.learners.by_id.values()]
        return inside + [one.connection for one in (*self.applicants.waiting, *self.learners.queue)]

    def is_inside(self, member_id: int) -> bool:
        """Tell whether results may hold what ``member_id`` gave: it is a member, or was told that it contributes."""
        learner = self.learners.by_id.get(member_id)
        return member_id in self.members.by_id or (learner is not None and learner.entered)

    def connection_of(self, member_id: int) -> int:
        """Return the connection of a member or a learner; -1 if there is none."""
        occupant = self.members.by_id.get(member_id) or self.learners.by_id.get(member_id)
        return -1 if occupant is None else occupant.connection

    def member_id_of(self, connection: int) -> int:
        """Return the id of a member or a learner; -1 if it has none."""
        for member_ids in (self.members.by_id, self.learners.by_id):
            for member_id, occupant in member_ids.items():
                if occupant.connection == connection:
                    return member_id
        return -1

    def call(self, member_id: int) -> str:
        """Name a member in a text."""
        return self.members.identities.call(member_id)

    def calls(self, member_ids: Iterable[int]) -> str:
        """Name several members in a text."""
        return self.members.calls(member_ids)

    def left_out(self, member_id: int, reason: str) -> LeftOutError:
        """Return what a member is told that the others go on without."""
        where = f"group {self.name!r} in round {self.rounds.number}: {reason}"
        return self.members.identities.left_out(member_id, where)

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pause_ends(self) -> float | None:
        """Time at which members have waited long enough for others; None if they wait for none."""
        paused = self.rounds.paused
        return None if paused is None or self.is_deserted else paused + self.policy.patience(self.timeout)

    @property
    def latest(self) -> int:
        """The latest round that a member can be in."""
        due = self.rounds.due
        if self.recovery.is_uncertain:
            return due + MAX_UNWRITTEN_ROUNDS
        # members begin the next round when the last results of all shards say so, and these say so here later
        return due + (MAX_ROUNDS_AHEAD if self.shards and not self.is_durable else 0)

    def check_round(self, number: int, what: str) -> None:
        """Raise UnexpectedMessageError if no member can be in round ``number`` when it says ``what``."""
        if number > self.latest:
            raise UnexpectedMessageError(
                f"a {what} of round {number} in group {self.name!r}, of which {self.latest} is the latest round that "
                f"can have begun"
            )

    @property
    def late_are(self) -> str:
        """Rule for contributions that come too late, in a Welcome's words; empty if all are waited for."""
        lateness = self.policy.lateness
        return "" if lateness is None else "keep" if lateness.keeps else "drop"

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def describe(self, now: float) -> dict[str, object]:
        """Return the group as plain JSON values. Ages are in seconds."""
        policy, plan, identities = self.policy, self.plans.plan, self.members.identities
        applicants = [*self.applicants.waiting, *self.learners.queue]
        waiting = [{"name": a.join.name, "rank": a.join.rank, "waits": round(now - a.since, 3)} for a in applicants]
        return {
            "state": self.state.value,
            **({} if self.origin is None else {"parent": self.origin.parent}),
            "world_size": len(self.members.by_id) if self.begun and policy.is_elastic else policy.maximum,
            "elastic": [policy.minimum, policy.maximum] if policy.is_elastic else None,
            "epoch": self.members.epoch,
            "round": self.rounds.number,
            "mode": str(policy.mode),
            "plane": self.planes.describe(identities.present, self.case(identities.present)),
            "plan": None if plan is None else {"buckets": len(plan.buckets), "bytes": plan.nbytes},
            "members": [
                # "seat" is the member id: a name in JSON stays as it is
                {"rank": identities.rank(member_id), "name": identities.names[member_id], "seat": member_id}
                | self.requests.describe(member_id)
                | self.planes.describe_offer(member_id)
                | self.members.describe_pace(member_id)
                | self.watch.describe_member(member_id)
                for member_id in self.members.by_id
            ],
            "waiting": waiting,
            "gone": self.slow.describe(now),
            "joining": [one.describe(identities.rank(member_id)) for member_id, one in self.learners.by_id.items()],
            "broken": self.broken.message if self.broken else None,
            "data": self.leases.positions.snapshot(),
            "last_round": self.rounds.describe_last(),
            "without_update": self.rounds.empty.describe(),
            "timeout": self.timeout,
            "round_timeout": self.round_timeout,
            "mean": str(self.policy.mean),
            "noise_scale": self.watch.describe(plan),
            "audit": self.leases.audits.describe(self.policy.audit, identities.names),
            "nonfinite": {"policy": str(self.nonfinite), **self.found.describe(identities.names)},
        }

    def validate(self) -> list[int]:
        """Raise AssertionError if an invariant does not hold. Return the connections of all workers that are here."""
        members, applicants, connections = self.members.by_id, self.applicants.waiting, self.connections
        away, learners, proposals = self.sessions.away, self.learners.by_id, self.plans.proposals
        assert self.state is self.present_state(), f"{self.name} is stored as {self.state}"
        assert self.begun != bool(applicants), f"{self.name} is neither forming nor active"
        assert len(applicants) < self.members.world, f"{self.name} is complete and not active"
        assert set(proposals) <= set(members), f"{self.name} holds proposals of strangers"
        assert not (self.broken and proposals), f"{self.name} is broken and still collects proposals"
        assert away.keys() <= members.keys(), f"{self.name} waits for strangers"
        assert all(members[one].connection < 0 for one in away), f"{self.name} waits for a member that is here"
        assert not learners.keys() & members.keys(), f"{self.name} has a member that joins"
        assert set(self.learners.donors) <= set(members), f"{self.name} has donors that are no members"
        for learner in learners.values():
            assert learner.donor in {-1, *members}, f"{self.name} waits for a donor that is gone"
            learner.validate(self.rounds.number)
        assert len(set(connections)) == len(connections), f"{self.name} has a connection twice"
        self.leases.positions.validate()
        return connections
