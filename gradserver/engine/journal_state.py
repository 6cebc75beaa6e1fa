"""State of the journal: the one fold of its records, by which it is compacted, restored and continued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from gradserver.engine.data_records import OfData
from gradserver.engine.declared import Kind
from gradserver.engine.ends import MAX_CUTS, Ends
from gradserver.engine.lease_table import Positions
from gradserver.engine.records import (
    Begun,
    Boundary,
    Chosen,
    Closed,
    Commits,
    Cut,
    Durable,
    Entered,
    Epoch,
    Group,
    Halt,
    Handling,
    Moded,
    Outlier,
    Plan,
    Round,
    Spent,
    Start,
    Stragglers,
    Subgroup,
    Told,
)
from gradserver.protocol.errors import ERRORS, GradServerError, JoinRefusedError
from gradserver.protocol.limits import MAX_ENDED_GROUPS, MAX_WORLD_SIZE
from gradserver.protocol.offers import Offer

K = TypeVar("K", bound=Kind)
E = TypeVar("E")

_MAX_SPENT: Final = 2 * MAX_ENDED_GROUPS
"""Groups of which the used quota is restated: more than there can be in all."""
MAX_ENDED: Final = 64
"""Durable groups that have ended, the latest, of which a member that comes back hears how."""
MAX_EPOCHS: Final = 256
"""Memberships that a member may have to hear of when it comes back."""
_POLICIES: Final[tuple[type[Kind], ...]] = (Handling, Stragglers, Moded, Commits)
_BEFORE: Final[tuple[type[Kind], ...]] = (Group, Subgroup, Durable, *_POLICIES)
"""Kinds of which a group's latest record is restated before its memberships, in this order."""
_BEHIND: Final[tuple[type[Kind], ...]] = (Entered, Plan, Round, Boundary, Halt)
"""The same behind them."""
_SEVERAL: Final[frozenset[type[Kind]]] = frozenset({Cut, Begun})
"""Kinds of which several records matter."""
_OF_MEMBERS: Final = Outlier
"""The kind of which the latest record of each member matters."""
_LATEST: Final = frozenset(_BEFORE + _BEHIND)


class Dated(NamedTuple):
    """A record, and the time when it was written."""

    clock: float
    record: Kind


class Ended(NamedTuple):
    """A durable group that has ended: the records that say so, which are restated, and the error for its members."""

    records: tuple[Dated, ...]
    error: GradServerError


def error_of(halt: Halt) -> GradServerError:
    """Return the error that halted a group."""
    return ERRORS.get(halt.error, GradServerError)(halt.reason)


def over(group: str, reason: str) -> JoinRefusedError:
    """Return what members of a group are told that come back when it has ended, for another ``reason`` than a halt."""
    what = f"there is no durable group {group!r} to resume in, as {reason}"
    return JoinRefusedError(f"{what}: call connect again to join a new one")


class GroupState:
    """State of one group, which has not ended, after its records.

    Attributes:
        epochs: the memberships from that on which is in force, by epoch; of more than some the latest. Where members
            can be late, also those in force behind earlier rounds that the group may have to go back to.
        names: names of members by id, also of those that are gone. A record of the epoch 0 restates them.
        cuts: decisions that a round goes on without late members, the latest, of durable groups.
        ends: which rounds are over, and the epoch in force behind each.
        positions: which samples are used, and by which members.
        offers: what members can do, by member id.
        outliers: members that are far off, by member id.
    """

    def __init__(self, founded: Dated) -> None:
        self._latest: dict[type[Kind], Dated] = {Group: founded}
        self.epochs: dict[int, Dated] = {}
        self.names: dict[int, str] = {}
        self.cuts: deque[Dated] = deque(maxlen=MAX_CUTS)
        self.outliers: dict[int, Outlier] = {}
        self._found: dict[int, Dated] = {}
        self._put_out: dict[str, Dated] = {}
        """The same of workers that were evicted, and are not back, by name."""
        self.ends = Ends()
        self.positions = Positions()
        self._leased: Dated | None = None
        self.offers: dict[int, Offer] = {}
        self._chosen: dict[int, Dated] = {}
        """Choices of the plane, by epoch: of the one in force and of later ones."""

    def close(self, closed: Dated) -> Ended:
        """Return how the group has ended, by the record of that."""
        assert isinstance(closed.record, Closed)
        halt, name = self.latest(Halt), closed.record.group
        error = over(name, closed.record.reason) if halt is None else error_of(halt)
        return Ended((*(self._latest[kind] for kind in (Group, Durable, Halt) if kind in self._latest), closed), error)

    def latest(self, kind: type[K]) -> K | None:
        """Return the latest record of a kind."""
        dated = self._latest.get(kind)
        return None if dated is None or not isinstance(dated.record, kind) else dated.record

    @property
    def is_durable(self) -> bool:
        """True if it survives its coordinator."""
        return Durable in self._latest

    def apply(self, dated: Dated) -> None:
        """Take the group's next record."""
        record = dated.record
        match record:
            case Epoch(_, epoch):
                self.names |= dict(record.members)
                if not epoch:
                    return
                self.positions.keep_only({*dict(record.members), *self._entering})
                self.epochs[epoch] = dated
                self._keep_found({member_id for member_id, _ in record.members})
                self._readmit({name for _, name in record.members})
                if len(self.epochs) > MAX_EPOCHS:
                    del self.epochs[min(self.epochs)]
            case _ if isinstance(record, OfData):
                self.positions.restore(record)
                self._leased = dated
            case Round(_, epoch, done):
                self._latest.pop(Boundary, None)
                self._forget_cuts_behind(done.round)
                self.positions.restore_end(done.round, record.used_up)
                self._end(done.round, epoch)
            case Boundary(_, number, epoch):
                self._end(number, epoch)
        if type(record) in _LATEST:
            self._latest[type(record)] = dated
        elif type(record) in _SEVERAL and self.is_durable:
            self.cuts.append(dated)
        elif isinstance(record, _OF_MEMBERS):
            self._take_outlier(dated, record)

    @property
    def _entering(self) -> Iterable[int]:
        """Ids of learners that contribute to the open round as their first one: no membership has them yet."""
        entered = self.latest(Entered)
        return dict(entered.members) if entered is not None and entered.round > self.ends.told[0] else ()

    def _end(self, number: int, epoch: int) -> None:
        """Take what is written of the end of a round."""
        self.ends.write(number, epoch)
        first = self.ends.earliest if Stragglers in self._latest else epoch
        self.epochs = {known: news for known, news in self.epochs.items() if known >= first}

    def _take_outlier(self, dated: Dated, found: Outlier) -> None:
        """Take that a member is far off, perhaps evicted, or in line again."""
        if found.evicted:
            self._put_out.pop(found.evicted, None)
            self._put_out[found.evicted] = dated
            if len(self._put_out) > MAX_WORLD_SIZE:
                del self._put_out[next(iter(self._put_out))]
            return
        self._found[found.member_id], self.outliers[found.member_id] = dated, found
        self._keep_found({one for one, known in self.outliers.items() if known.off})

    def _keep_found(self, member_ids: set[int]) -> None:
        """Forget that members are far off, but for some."""
        self.outliers = {one: found for one, found in self.outliers.items() if one in member_ids}
        self._found = {one: self._found[one] for one in self.outliers}

    def _readmit(self, names: set[str]) -> None:
        """Forget that workers with these names were evicted."""
        self._put_out = {name: dated for name, dated in self._put_out.items() if name not in names}

    @property
    def evicted(self) -> dict[str, Outlier]:
        """Workers that were evicted, as they were far off, and are not back, by name."""
        found = {name: dated.record for name, dated in self._put_out.items()}
        return {name: record for name, record in found.items() if isinstance(record, Outlier)}

    def take_choice(self, dated: Dated, chosen: Chosen) -> None:
        """Take the next choice of the plane, and what members have told."""
        self._chosen[chosen.epoch] = dated
        self.offers |= dict(chosen.offers)
        known = self.chosen(min(self.epochs, default=0))
        self._chosen = {epoch: one for epoch, one in self._chosen.items() if known is None or epoch >= known.epoch}

    def chosen(self, epoch: int) -> Chosen | None:
        """Return the choice of the plane that is in force in an epoch; None if none was written."""
        known = max((one for one in self._chosen if one <= epoch), default=-1)
        found = self._chosen[known].record if known >= 0 else None
        return found if isinstance(found, Chosen) else None

    def _gone(self, name: str) -> Iterable[Dated]:
        """Yield the record with all names, if members are gone of which no membership tells any more."""
        known = {
            one for dated in self.epochs.values() if isinstance(dated.record, Epoch) for one in dated.record.members
        }
        if not known.issuperset(self.names.items()):
            names = tuple(sorted(self.names.items()))
            yield Dated(self._latest[Group].clock, Epoch(name, 0, 0, names, "members by id, also those that are gone"))

    def _choices(self) -> Iterable[Dated]:
        """Yield the choices that matter to the memberships, the first with what members of these can do."""
        entered = self._latest.get(Entered)
        known = [*self.epochs.values(), *([entered] if entered is not None else [])]
        there = {member_id for dated in known for member_id in _members(dated.record)}
        told = tuple(Told(member_id, self.offers[member_id]) for member_id in sorted(there & self.offers.keys()))
        for epoch in sorted({one.epoch for one in map(self.chosen, self.epochs) if one is not None}):
            clock, chosen = self._chosen[epoch]
            assert isinstance(chosen, Chosen)
            yield Dated(clock, replace(chosen, offers=told))
            told = ()

    def _ends(self, name: str) -> Iterable[Dated]:
        """Yield ends of rounds that the group may have to go back to, where members can be late."""
        if Stragglers in self._latest and Round in self._latest:
            clock = self._latest[Round].clock
            yield from (Dated(clock, Boundary(name, *change)) for change in self.ends.changes())

    def _forget_cuts_behind(self, number: int) -> None:
        """Forget decisions about rounds behind ``number``, which are made anew when that has been made anew."""
        while self.cuts and isinstance(last := self.cuts[-1].record, Cut | Begun) and last.round > number:
            self.cuts.pop()

    def records(self, name: str) -> Iterable[Dated]:
        """Yield the records that are to be restated of it, in an order in which they can be read."""
        yield from (self._latest[kind] for kind in _BEFORE if kind in self._latest)
        yield from self._gone(name)
        yield from self.epochs.values()
        yield from self._put_out.values()
        yield from self._found.values()
        yield from self._choices()
        yield from self._ends(name)
        yield from (self._latest[kind] for kind in _BEHIND if kind in self._latest)
        yield from self.cuts
        for state in self.positions.states(name):
            yield Dated(0.0 if self._leased is None else self._leased.clock, state)


def _members(record: Kind) -> Iterable[int]:
    return dict(record.members) if isinstance(record, (Epoch, Entered)) else ()


class JournalState:
    """State of the journal after all records, which are taken one after the other.

    `records` gives back those with which a new file begins.

    Attributes:
        groups: groups that have not ended, by name.
        ended: durable groups that have ended, the latest, by name.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupState] = {}
        self.ended: dict[str, Ended] = {}
        self._start: list[Dated] = []
        self._spent: dict[str, Dated] = {}
        """Quota that groups have used, also if they have ended."""

    def apply(self, dated: Dated) -> None:
        """Take what was written next."""
        record = dated.record
        match record:
            case Start():
                self._start = [dated]  # a group that is not durable ended with the coordinator that had it
                self.groups = {name: group for name, group in self.groups.items() if group.is_durable}
            case Spent(group, nbytes):
                self._spent.pop(group, None)
                if nbytes:
                    self._spent[group] = dated
                if len(self._spent) > _MAX_SPENT:
                    del self._spent[next(iter(self._spent))]
            case Group(group):
                self.ended.pop(group, None)
                self.groups[group] = GroupState(dated)
            case Closed(group):
                known = self.groups.pop(group, None)
                if known is not None and known.is_durable:
                    keep_latest(self.ended, group, known.close(dated))
            case Chosen(group) if group in self.groups:
                self.groups[group].take_choice(dated, record)
            case _ if (group := record.of_group) in self.groups:
                self.groups[group].apply(dated)

    def records(self) -> list[Dated]:
        """Return the records that are to be restated, in an order in which they can be read."""
        groups = (dated for name, group in self.groups.items() for dated in group.records(name))
        ended = (dated for one in self.ended.values() for dated in one.records)
        return [*self._start, *self._spent.values(), *ended, *groups]


def keep_latest(ended: dict[str, E], name: str, how: E) -> None:
    """Note how a group has ended, and forget that of others, so that it is known of the latest ones."""
    ended.pop(name, None)
    ended[name] = how
    if len(ended) > MAX_ENDED:
        del ended[next(iter(ended))]
