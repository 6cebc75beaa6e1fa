"""Records that control has written of groups: each decision before a member is told, each round behind its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradserver.engine.control.group import Group
from gradserver.engine.control.outliers import Verdict
from gradserver.engine.control.quota import counted, used_ranges
from gradserver.engine.data_records import Claim, Committed, Used
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.lease_table import Use
from gradserver.engine.policy import OnNonFinite, OnOutlier
from gradserver.engine.records import (
    Begun,
    Boundary,
    Closed,
    Commits,
    Computed,
    Cut,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Handling,
    Moded,
    Outlier,
    Plan,
    Reset,
    Round,
    RoundRecord,
    Stragglers,
    Subgroup,
)
from gradserver.protocol.errors import GradServerError, WorkerLeftError
from gradserver.protocol.plan import Plan as PlanTable


def founded(group: Group, effects: Effects) -> None:
    """A group is complete."""
    _first(group, Founded(group.name, group.members.world, group.timeout), effects)
    if group.is_durable and group.origin is not None:
        _first(group, Subgroup(group.name, group.origin.parent, group.origin.member_ids), effects)
    if group.is_durable:
        table, sessions = group.shards.table, group.sessions
        shares = table.rates, table.grain, group.shards.credit
        _first(group, Durable(group.name, sessions.secret, *shares, sessions.keys), effects)
    _policies(group, effects)
    members(group, f"complete with {group.members.world} workers", effects)


def _policies(group: Group, effects: Effects) -> None:
    """Write the policies that a later coordinator needs, where they are not the usual ones."""
    mode, lateness = group.policy.mode, group.policy.lateness
    if group.is_durable and lateness is not None:
        _first(group, Stragglers(group.name, lateness.keeps), effects)
    if group.is_durable and group.planes.commits:
        _first(group, Commits(group.name), effects)
    if mode.grants:
        bound = -1 if mode.staleness is None else mode.staleness
        _first(group, Moded(group.name, str(mode.name), bound, str(mode.damping)), effects)
    mean, outliers = group.policy.mean, group.policy.outliers
    if group.nonfinite is not OnNonFinite.HALT or mean.is_robust or outliers is not OnOutlier.REPORT:
        _first(group, Handling(group.name, group.nonfinite, mean, outliers), effects)


def members(group: Group, reason: str, effects: Effects) -> None:
    """Write which members are there now, since one came or went."""
    there = tuple((member_id, member.name) for member_id, member in group.members.by_id.items())
    _first(group, Epoch(group.name, group.members.epoch, group.rounds.number, there, reason), effects)
    if group.entering:
        entered(group, effects)
    else:
        _offered(group, effects)


def entered(group: Group, effects: Effects) -> None:
    """Write which members and learners contribute to the open round as their first one."""
    there = tuple((member_id, group.members.identities.names[member_id]) for member_id in group.entering)
    _first(group, Entered(group.name, group.rounds.number, there), effects)
    _offered(group, effects)


def _offered(group: Group, effects: Effects) -> None:
    """Write the plane, and what members and learners that contribute can do, as far as that is new."""
    there = [*group.members.by_id, *group.entering]
    if (chosen := group.planes.news(group.name, group.members.epoch, there)) is not None:
        _first(group, chosen, effects)


def planned(group: Group, plan: PlanTable, effects: Effects) -> None:
    """All members have agreed on ``plan``."""
    _first(group, Plan(group.name, group.members.epoch, group.rounds.number, plan), effects)


def registered(group: Group, use: Use, effects: Effects) -> None:
    """Write the state of data, at their first use, or when samples came back that no other record tells of."""
    _write(group, use.state(group.name), effects)


def claimed(group: Group, claim: Claim, effects: Effects) -> None:
    """Write that a member holds positions."""
    _write(group, claim, effects)


def used(group: Group, said: Used, is_new: bool, effects: Effects) -> None:
    """A member says what it has used. That is written in the record of the round, and paid for here.

    It is written at once where the group survives its coordinator: if the member dies too, no other process knows it.
    """
    if is_new and group.is_durable:
        _write(group, said, effects)
    _pay(group, used_ranges(said.ranges), effects)


def completed(group: Group, record: RoundRecord, used_up: tuple[Committed, ...], effects: Effects) -> None:
    """A round is complete. Results are told before this, and in durable groups that it is over behind it."""
    effects.journal_behind(Round(group.name, group.members.epoch, record, used_up))
    if record.nonfinite:
        warning = group.found.count(record, group.nonfinite, group.plans.plan, group.call, group.name)
        if warning:
            effects.log(warning, warning=True)
    if record.compared and (warning := group.leases.audits.count(record, group.plans.plan, group.call, group.name)):
        effects.log(warning, warning=True)
    group.rounds.write(record, group.members.epoch)


def boundary(group: Group, number: int, effects: Effects) -> None:
    """Members are told next that a round is over, and that the present membership is in force.

    The round may be written down by the same event: this comes behind it, as it is the later word.
    """
    if group.rounds.write_end(number, group.members.epoch):
        _write(group, Boundary(group.name, number, group.members.epoch), effects)


def reset(group: Group, effects: Effects) -> None:
    """Write that what lossy codecs had kept back is lost."""
    _first(group, Reset(group.name, group.rounds.number), effects)


def outlier(
    group: Group, number: int, verdict: Verdict, effects: Effects, *, off: bool = True, evicted: str = ""
) -> None:
    """A member is far off as of a round, or in line again. It may be ``evicted``, with this name."""
    ratio = min(verdict.ratio, 1e30)
    where = group.name, group.members.epoch, number, verdict.member_id
    _first(group, Outlier(*where, ratio, verdict.cosine, off, evicted), effects)


def cut(group: Group, number: int, member_ids: Sequence[int], reason: str, effects: Effects) -> None:
    """A round is closed without some members."""
    _first(group, Cut(group.name, group.members.epoch, number, tuple(member_ids), reason), effects)


def begun(
    group: Group, number: int, cohort: Mapping[int, int], others: Sequence[int], section: int, effects: Effects
) -> None:
    """A round of ``section`` begins with contributions of some members, each computed at a version.

    The round before may be written down by the same event: this comes behind it, and members are told behind this.
    """
    versions = tuple(Computed(*one) for one in cohort.items())
    _write(group, Begun(group.name, group.members.epoch, number, versions, tuple(others), section), effects)


def is_halt(error: GradServerError) -> bool:
    """Tell whether ``error`` is written when it breaks a group. That a member has left in peace its membership says."""
    return not isinstance(error, WorkerLeftError)


def halted(group: Group, error: GradServerError, effects: Effects) -> None:
    """The group goes no further."""
    _first(
        group, Halt(group.name, group.members.epoch, group.rounds.number, type(error).__name__, error.message), effects
    )


def closed(group: Group, reason: str, effects: Effects) -> None:
    """The group has ended."""
    _first(group, Closed(group.name, group.members.epoch, group.rounds.number, reason), effects)


def stopped(groups: dict[str, Group], error: GradServerError, effects: Effects) -> None:
    """The coordinator stops, and what it serves ends with it; unless it is durable."""
    for group in groups.values():
        if group.begun and not group.is_durable:
            closed(group, error.message, effects)


def _first(group: Group, record: Kind, effects: Effects) -> None:
    """Write ``record`` before all else that this event leads to, and after what else is written because of it."""
    effects.journal(record)
    _charge(group, record, effects)


def _write(group: Group, record: Kind, effects: Effects) -> None:
    """Write ``record`` behind what this event has led to so far."""
    effects.journal_behind(record)
    _charge(group, record, effects)


def _charge(group: Group, record: Kind, effects: Effects) -> None:
    """Take ``record`` from the group's journal quota, if there is one: else it need not be measured."""
    if group.account.limit:
        _pay(group, counted(record), effects)


def _pay(group: Group, nbytes: int, effects: Effects) -> None:
    """Take ``nbytes`` from the group's journal quota."""
    if nbytes and group.account.limit:
        group.account.spend(nbytes)
        if (news := group.account.news()) is not None:
            effects.journal_behind(news)
