"""Registry of groups, of the connections in them, and of data shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradserver.engine.control import journal
from gradserver.engine.control.access import OPEN, Access
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.links import credit_for, grain_for
from gradserver.engine.control.quota import Quotas
from gradserver.engine.control.roster import Roster
from gradserver.engine.control.rounds import is_steady
from gradserver.engine.effects import Effects
from gradserver.engine.journal_state import keep_latest, over
from gradserver.engine.order_fields import Member
from gradserver.engine.orders import CloseGroup, OpenGroup
from gradserver.engine.policy import Hashes, OnNonFinite, Policy
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, UnexpectedMessageError
from gradserver.protocol.limits import MAX_UNWRITTEN_EPOCHS, MIN_CREDIT_BYTES, OTHERS, PROBE_GROUP, PROBE_WORLD
from gradserver.protocol.planes import AUTO


@dataclass(slots=True)
class Totals:
    """Counts of all that has happened since this coordinator began, also in groups that have ended.

    Attributes:
        came: requests to join that were accepted.
        joined: workers with which groups have begun.
        lost: workers that were lost.
        rounds: complete rounds of groups that have ended.
    """

    came: int = 0
    joined: int = 0
    lost: int = 0
    rounds: int = 0


class Registry:
    """All that control keeps, and what it was started with.

    Args:
        worlds: sizes of groups that the coordinator was told; of an elastic one the policy. `OTHERS` stands
            for all that are not named.
        credit: bytes that one worker may have in flight, at most.
        entropy: gives text that cannot be guessed; without it no data shards are taken.
        rate: of this process's link in Gbit/s; None if unknown.
        digests: whether data halves hash what they sum.
        incarnation: how often a coordinator has begun where this one writes its records; 0 without records.
        runs: whether the process that has a beacon is known to run.
        access: which groups may be founded, and which data shards are taken.
        round_timeout: seconds that an exchange waits for a member that is alive; None for the members' own timeout.
        nonfinite: what becomes of gradients that are not finite, in groups that are founded here.
        quota: bytes of the journal that members of one group may fill in an hour; 0 for no limit.
        plane: the plane that all groups are to go by; "auto" for any.

    Attributes:
        groups: by name.
        forming: sub-groups that are not complete yet, by name.
        places: the group that each connection has joined, as applicant, learner or member.
        ended: what members of groups that have ended, the latest, are told when they come back, by the group's name.
        returning: workers that had left a group which has ended, and are to form the next one.
        roster: the data shards that have enlisted.
        quotas: what groups may have written down.
        totals: counts of what has happened.
    """

    def __init__(
        self,
        worlds: Mapping[str, int | Policy],
        credit: int,
        entropy: Callable[[], str] | None,
        rate: float | None,
        hashes: Hashes,
        incarnation: int,
        runs: Callable[[str], bool],
        access: Access = OPEN,
        round_timeout: float | None = None,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
        quota: int = 0,
        plane: str = AUTO,
    ) -> None:
        if credit < MIN_CREDIT_BYTES:
            raise InvalidArgumentError(f"a credit of {credit} bytes is too small: {MIN_CREDIT_BYTES} at least")
        self.worlds = {name: Policy.of(world, name) for name, world in worlds.items()}
        self.groups: dict[str, Group] = {}
        self.forming: dict[str, Group] = {}
        self.places: dict[int, str] = {}
        self.quotas = Quotas(quota, {*(worlds.keys() - {OTHERS}), *(access.groups or ())})
        self.roster = Roster(entropy, rate, access)
        self.access = access
        self.nonfinite = nonfinite
        self.hashes = hashes
        self.plane = plane
        self.credit = credit
        self.incarnation = incarnation
        self.runs = runs
        self.round_timeout = round_timeout
        self.ended: dict[str, GradServerError] = {}
        self.totals = Totals()
        self.returning: list[Applicant] = []
        self._epochs = self._subgroups = 0
        self._written = -MAX_UNWRITTEN_EPOCHS
        """The highest epoch on record when this coordinator began, if another one had been here before."""

    @property
    def now(self) -> float:
        """The time of what is being dealt with."""
        return self.quotas.now

    @now.setter
    def now(self, now: float) -> None:
        self.quotas.now = now

    # ── connections ───────────────────────────────────────────────────────────────────────────────────

    def group_of(self, connection: int) -> Group | None:
        """Return the group that a connection has joined; None if there is none."""
        return self.groups.get(self.places.get(connection, ""))

    def member(self, connection: int) -> tuple[Group, int]:
        """Return the group and the id of a member or a learner."""
        group = self.group_of(connection)
        if group is not None and (member_id := group.member_id_of(connection)) >= 0:
            return group, member_id
        raise UnexpectedMessageError("this message is for members of a group: join first")

    def check_free(self, connection: int) -> None:
        """Raise UnexpectedMessageError if a connection has joined a group already, or is a data shard's."""
        if connection in self.places:
            raise UnexpectedMessageError(f"this connection already joined group {self.places[connection]!r}")
        if connection in self.roster.shards:
            raise UnexpectedMessageError("this connection is a data shard's, which joins no group")

    def next_epoch(self) -> int:
        """Return the number of a new membership, or of a recovery."""
        self._epochs += 1
        return self._epochs

    def next_subgroup(self) -> int:
        """Return the number of one more sub-group."""
        self._subgroups += 1
        return self._subgroups

    def restored(self, epoch: int) -> None:
        """``epoch`` is the highest that is written down of those which another coordinator has given."""
        self._epochs = self._written = epoch

    def skip_to(self, epoch: int) -> None:
        """A member says that ``epoch`` was given before, by another coordinator: go on behind it.

        Raises:
            UnexpectedMessageError: that cannot be.
        """
        most = max(self._epochs, self._written + MAX_UNWRITTEN_EPOCHS)
        if epoch > most:
            raise UnexpectedMessageError(f"a Resume of epoch {epoch}, where {most} is the latest that can have begun")
        self._epochs = max(self._epochs, epoch)

    def told(self, name: str) -> Policy:
        """Give what the coordinator was told of a group, which may say no size."""
        if name == PROBE_GROUP:
            return Policy.of(PROBE_WORLD)
        return self.worlds.get(name) or self.worlds.get(OTHERS) or Policy()

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────

    def opening(self, group: Group, founders: tuple[Member, ...], tokens: tuple[str, ...], shard: int = 0) -> OpenGroup:
        """Return the first order about a group. ``shard`` is the data half's place there; members show ``tokens``."""
        policy = group.policy
        return OpenGroup(
            group.name,
            group.members.founded,
            founders,
            group.shards.credit,
            group.round_timeout,
            rates=group.shards.table.rates,
            shard=shard,
            tokens=tokens,
            needs_all=policy.needs_all,
            digests=self.hashes is not Hashes.OFF,
            backlog=0 if policy.needs_all and policy.lateness is None else policy.backlog,
            lateness=policy.lateness,
            grants=policy.mode.grants,
            durable=group.is_durable,
            nonfinite=group.nonfinite,
            steady=is_steady(group),
            mean=policy.mean,
            audits=policy.audit.share,
            grain=group.shards.table.grain,
            proves=group.proves,
        )

    def suit_links(self, group: Group) -> None:
        """Choose what the links of a group decide: the size of its slices, and its members' credit."""
        offers = group.planes.offers_of(group.members.by_id)
        group.shards.suit(grain_for(offers, self.roster.rates_of(group)), credit_for(offers, self.credit))

    def end(self, group: Group, error: GradServerError, reason: str, effects: Effects) -> None:
        """End a group: workers that are there are told ``error``, and the journal and data halves of the end.

        Of applicants those that had left it are to form the next one.
        """
        in_peace = group.broken is None or not journal.is_halt(group.broken)
        for applicant in [one for one in group.learners.queue if in_peace and group.members.has_left(one.join.name)]:
            group.learners.leave_queue(applicant.connection)
            del self.places[applicant.connection]
            self.returning.append(applicant)
        for connection in group.connections:
            del self.places[connection]
            effects.refuse(connection, error)
        self.forget(group)
        halt = group.broken if group.broken is not None and journal.is_halt(group.broken) else None
        keep_latest(self.ended, group.name, halt or over(group.name, reason))
        journal.closed(group, reason, effects)
        group.order(CloseGroup(group.name), effects)

    def parent_of(self, group: Group) -> Group | None:
        """Return the parent of a sub-group, if it is still there; None for any other group."""
        return None if group.origin is None else self.groups.get(group.origin.parent)

    def add(self, group: Group) -> None:
        """Keep a group from now on."""
        self.groups[group.name] = group
        if group.origin is not None and not group.begun:
            self.forming[group.name] = group

    def has_begun(self, group: Group) -> None:
        """Note that a group is complete."""
        self.ended.pop(group.name, None)
        self.forming.pop(group.name, None)
        self.totals.joined += 0 if group.origin is not None or group.name == PROBE_GROUP else len(group.members.by_id)

    def forget(self, group: Group) -> None:
        """Free the name of a group."""
        del self.groups[group.name]
        self.forming.pop(group.name, None)
        self.totals.rounds += 0 if group.origin is not None else group.rounds.number
        group.end()

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for name, group in self.groups.items():
            for connection in group.validate():
                assert self.places[connection] == name, f"{connection} is in two groups"
        forming = {name for name, group in self.groups.items() if group.origin is not None and not group.begun}
        assert forming == self.forming.keys(), "a forming sub-group that is not known as one, or the reverse"
        attached = sum(len(group.connections) for group in self.groups.values())
        assert attached == len(self.places), "a connection without a place"
