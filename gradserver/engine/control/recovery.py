"""Recovery of a durable group: control's part, while members and shards find out which of them hold which results.

A recovery begins when a member comes back, or when another process has taken a lost shard's place. Each has a number of
its own. When all shards have what members hold of the latest round, members that lack its end are told (`CaughtUp`,
`Proceed`). Shards are told that the round stays closed for late members (`CutRound`). When all shards have told
members what stands, the group goes on (`Recovered`). Data has the other half, in `gradserver.engine.data.recovery`.
"""

from __future__ import annotations

from gradserver.engine.control import journal, learners, rounds
from gradserver.engine.control.group import Group
from gradserver.engine.control.registry import Registry
from gradserver.engine.effects import Effects
from gradserver.engine.orders import Proceed, Recover
from gradserver.engine.reports import CaughtUp, Recovered
from gradserver.protocol.errors import UnexpectedMessageError
from gradserver.protocol.messages import RoundDone
from gradserver.protocol.messages.recovery import Resumed


def promote_contributors(registry: Registry, group: Group, effects: Effects) -> None:
    """Make members of learners that contribute: results that others hold may have their contributions."""
    learners.promote(group, group.rounds.number, registry.next_epoch, effects)


def begin(registry: Registry, group: Group, generation: int, now: float, effects: Effects) -> None:
    """Have all members that are here say what they hold. ``generation`` is the new number of the recovery."""
    group.recovery.begin(generation)
    group.members.void_before(generation)  # what shards have reported so far, and what we have heard of it, is void
    group.configuration.wait_no_more()
    group.rounds.void()
    group.shards.void()
    group.plans.void_confirmations()
    here = [member_id for member_id in group.members.by_id if member_id not in group.sessions.away]
    if here:
        group.sessions.hurry(now + group.policy.missing)
    resumed = Resumed(registry.incarnation, generation, group.shards.urls)
    for member_id in here:
        effects.send(group.members.by_id[member_id].connection, resumed)
    own = group.latest + 1 if group.recovery.is_uncertain else group.recovery.own
    group.order(Recover(group.name, generation, group.rounds.due, group.latest, own), effects)


def begin_if_due(registry: Registry, group: Group, now: float, effects: Effects) -> None:
    """Begin a recovery anew in a group with shards elsewhere: all find out about one membership, and are there."""
    if group.shards.lacking or not group.recovery.is_open or not group.shards or group.broken is not None:
        return
    begin(registry, group, registry.next_epoch(), now, effects)


def caught_up(group: Group, report: CaughtUp, source: int, effects: Effects) -> None:
    """Tell members that have all of a round and have yet to hear that it is over, when all shards say so."""
    if group.shards.lacking:
        return  # a shard was lost meanwhile, and with it this recovery: the next one begins when there is another
    _check(group, report)
    if group.recovery.note_caught_up(source) <= len(group.shards.connections):
        return
    number = report.round - 1
    written = group.rounds.ends.behind(number)
    epoch = group.members.epoch if written is None else written
    _begin_round(group, report.round)
    here = [member_id for member_id in report.member_ids if member_id in group.members.by_id]
    for member_id in here:
        effects.send(group.members.by_id[member_id].connection, RoundDone(number, epoch))
    group.requests.recall(report.round)
    if late := group.rounds.recall_late(report.round).intersection(group.members.by_id):
        rounds.cut(group, report.round, sorted(late), effects)
    group.order(Proceed(group.name), effects)


def recovered(group: Group, report: Recovered, source: int, effects: Effects) -> None:
    """Let all members go on, as soon as all shards do.

    The first shard to say so tells the round. Where one has no slices, later rounds may be over before it says so.
    """
    if group.shards.lacking:
        return  # as above
    if report.begun:
        group.requests.note_begun(report.round)
    if not group.recovery.standing:
        _check(group, report)
        _begin_round(group, report.round)
        again = group.policy.lateness is not None and report.round <= group.rounds.told[0] and group.plans.is_lossy
        if group.recovery.note_loss() or again:  # not later: the round may be over before all shards have said so
            journal.reset(group, effects)
            effects.log(f"group {group.name!r}: what lossy codecs had kept back is lost: residuals reset", warning=True)
    if group.recovery.note_standing(source) <= len(group.shards.connections):
        return
    group.recovery.end(group.rounds.number)
    effects.log(f"group {group.name!r}: {len(group.members.by_id)} workers go on with round {group.rounds.number}")


def _begin_round(group: Group, number: int) -> None:
    """Open round ``number``. If that is an earlier one, it is made again, with the samples that it had used up."""
    if number < group.rounds.number:
        group.leases.positions.go_back(number)
    group.rounds.begin(number)


def _check(group: Group, report: CaughtUp | Recovered) -> None:
    """A data shard elsewhere cannot have found a round that no member may speak of."""
    what = type(report).__name__
    group.check_round(report.round, what)
    if report.round < group.rounds.number - 1 and group.policy.lateness is None:  # late members can be left alone
        raise UnexpectedMessageError(
            f"a {what} of round {report.round} in group {group.name!r}, in {group.rounds.number}"
        )
