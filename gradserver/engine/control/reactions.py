"""Reactions to events of one group: the functions that the table of `gradserver.engine.control.machine` names.

Each hands an event to the modules that know. A function that does this in two steps has the rules applied in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradserver.engine.control import (
    admissions,
    deadlocks,
    forming,
    learners,
    leases,
    members,
    plans,
    recovery,
    requests,
    rounds,
    sessions,
    shard_replacement,
    turns,
    watching,
)
from gradserver.engine.control.group import HERE, Applicant, Group, State
from gradserver.engine.control.group.rounds import Complete
from gradserver.engine.control.registry import Registry
from gradserver.engine.control.round_reports import count_round
from gradserver.engine.effects import Effects
from gradserver.engine.reports import (
    Absent,
    Applied,
    Behind,
    CaughtUp,
    Halted,
    Late,
    Planned,
    Recovered,
    RemoteReport,
    RoundCompleted,
    StateComes,
)
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import ConnectionLostError, GradServerError
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import (
    Enter,
    Follow,
    Join,
    Message,
    Opens,
    Paced,
    Propose,
    Ready,
    RequestRound,
    Serve,
    StateFailed,
    Steps,
)
from gradserver.protocol.messages.leases import Claim, Register, Used
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.messages.waiting import Blocked

# ── events ────────────────────────────────────────────────────────────────────────────────────────────


class Lost(NamedTuple):
    """The worker on a connection is gone: ``politely`` if it said so, and for certain if its process ``ended``."""

    reason: str
    politely: bool = False
    ended: bool = False


class Broke(NamedTuple):
    """The connection of a worker broke. The worker may come back."""

    reason: str


class ShardLost(NamedTuple):
    """The connection of a data shard that the group uses broke."""

    error: GradServerError


class ShardEnlisted(NamedTuple):
    """A data shard is there that no group uses yet."""


Notice = Lost | Broke | ShardLost | ShardEnlisted


@dataclass(slots=True)
class Event:
    """An event of one group.

    Attributes:
        what: a message, a report, or a notice.
        source: the connection that it came on; `HERE` for reports of the coordinator's own data half.
        member_id: that of the member or learner that it is of; -1 if it is of none.
        payloads: frames behind a message.
        follow: applies the rules, between two steps of one event.
    """

    registry: Registry
    group: Group
    what: Message | RemoteReport | Notice
    effects: Effects
    follow: Callable[[], None]
    source: int = HERE
    member_id: int = -1
    payloads: Sequence[Buffer] = ()

    @property
    def now(self) -> float:
        """The time of the event, in seconds."""
        return self.registry.now


# ── reactions ─────────────────────────────────────────────────────────────────────────────────────────


def come(event: Event) -> None:
    """Have an applicant wait for the others, or a learner for a place."""
    assert isinstance(event.what, Join)
    registry, group = event.registry, event.group
    applicant = Applicant(event.source, event.what, event.now)
    if group.state is State.FORMING:
        forming.arrive(group, applicant, event.effects)
    else:
        admissions.arrive(group, applicant, registry.roster.token, event.effects)
    registry.places[event.source] = group.name


def propose(event: Event) -> None:
    """Keep the plan until all members have proposed one; tell a learner whether it is the group's."""
    assert isinstance(event.what, Propose)
    plans.propose(event.group, event.member_id, event.what, event.payloads[0], event.now, event.effects)


def ask_of_data(event: Event) -> None:
    """Answer when the rounds before it are over."""
    assert isinstance(event.what, Register | Claim | Used)
    leases.receive(event.group, event.member_id, event.what, event.payloads, event.effects)


def say_of_states(event: Event) -> None:
    """Change the stage of a learner, or the members that can send their state."""
    assert isinstance(event.what, Serve | Enter | Ready | StateFailed)
    learners.hear(event.group, event.member_id, event.what, event.now, event.effects)


def say_of_modules(event: Event) -> None:
    """Tell members that follow which module is next."""
    assert isinstance(event.what, Opens | Steps | Follow)
    turns.hear(event.group, event.member_id, event.what, event.now, event.effects)


def request_round(event: Event) -> None:
    """Grant a round when one can begin with it."""
    assert isinstance(event.what, RequestRound)
    requests.hear(event.group, event.member_id, event.what, event.effects)


def note_pace(event: Event) -> None:
    """Note how fast the member is."""
    assert isinstance(event.what, Paced)
    event.group.members.note_pace(event.member_id, event.what)


def wait(event: Event) -> None:
    """Halt the group if each member waits for something that only another waiting member could give."""
    assert isinstance(event.what, Blocked)
    deadlocks.hear(event.registry, event.group, event.member_id, event.what, event.effects)


def resume(event: Event) -> None:
    """Attach the member, and begin a recovery or go on with it."""
    message, registry, group, effects = event.what, event.registry, event.group, event.effects
    assert isinstance(message, Resume)
    is_later = message.epoch > group.members.epoch
    if is_later:
        group.account.check_join(group.members.identities.names[message.member_id])
        registry.skip_to(message.epoch)
    recovery.promote_contributors(registry, group, effects)
    if is_later:
        sessions.catch_up(registry, group, effects)
    event.follow()
    sessions.resume(registry, group, message, event.source, event.now, effects)


def leave_before(event: Event) -> None:
    """Forget the applicant, and with the last one the group."""
    assert isinstance(event.what, Lost)
    forming.leave(event.registry, event.group, event.source, event.what.reason, event.effects)


def leave(event: Event) -> None:
    """Have all shards cut the member off, in a new epoch. Break the group if too few are left and it waits for none."""
    what, group = event.what, event.group
    assert isinstance(what, Lost)
    if any(applicant.connection == event.source for applicant in group.learners.queue):
        group.learners.leave_queue(event.source)
        return
    member_id = event.member_id if event.member_id >= 0 else group.member_id_of(event.source)
    args = event.registry, group, member_id, what.reason, event.now, event.effects
    members.remove(*args, politely=what.politely, ended=what.ended)


def detach(event: Event) -> None:
    """Keep the member's place for a while."""
    assert isinstance(event.what, Broke)
    recovery.promote_contributors(event.registry, event.group, event.effects)  # a suspended group has a member then
    event.follow()
    sessions.detach(event.registry, event.group, event.member_id, event.what.reason, event.now, event.effects)


def lose_shard(event: Event) -> None:
    """Have a durable group wait for another process in the shard's place; break any other one."""
    what, group, effects = event.what, event.group, event.effects
    assert isinstance(what, ShardLost)
    place = group.shards.vacate(event.source)
    if not group.is_durable or group.state is State.BROKEN:
        members.halt(group, what.error, effects, frozen=True)
        return
    recovery.promote_contributors(event.registry, group, effects)
    event.follow()
    learners.disturb(group, effects, all_of_them=True)
    event.follow()
    shard_replacement.lost(group, place, event.now, effects)


def replace_shard(event: Event) -> None:
    """Give it the place of a lost shard."""
    if event.group.shards.lacking:
        shard_replacement.fill(event.registry, event.group, event.effects)


def complete(event: Event) -> None:
    """Note that a shard is done with the round. With the last shard the round is complete."""
    report, group = event.what, event.group
    assert isinstance(report, RoundCompleted)
    if not report.adopted:
        group.recovery.note_made(report.record.round)
    done = count_round(group, event.source, report)
    if done is not None:
        adopted = group.recovery.made < done.record.round
        group.rounds.complete(Complete(done.record, done.told, adopted))
        watching.compare(event.registry, group, done.record, done.figures, event.effects)


def apply(event: Event) -> None:
    """Note that a shard goes by a version of the membership."""
    assert isinstance(event.what, Applied)
    event.group.configuration.apply(event.source, event.what.version)


def confirm(event: Event) -> None:
    """Note that a shard goes by the plan. When all do, members may push."""
    assert isinstance(event.what, Planned)
    plans.confirm(event.group, event.source, event.what.hash, event.effects)


def be_late(event: Event) -> None:
    """Close the round without members that are late, as many as the policy lets go."""
    assert isinstance(event.what, Late)
    rounds.close_round(event.group, event.what, event.effects)


def fall_behind(event: Event) -> None:
    """Have a learner get the state anew; evict a member."""
    report, group = event.what, event.group
    assert isinstance(report, Behind)
    if report.member_id in group.learners.by_id and learners.fell_behind(group, report.member_id, event.effects):
        return
    occupant = group.members.by_id.get(report.member_id) or group.learners.by_id.get(report.member_id)
    if occupant is None:
        return
    error = rounds.behind(group, report.member_id, report.round)
    why = f"it left more than {group.policy.backlog / MIB:g} MiB of results unread (--backlog)"
    if occupant.connection < 0:  # its connection broke meanwhile: it hears of this when it comes back
        members.remove(event.registry, group, report.member_id, why, event.now, event.effects)
    else:
        event.effects.evict(occupant.connection, error, why=why)


def be_absent(event: Event) -> None:
    """Evict a worker that broke the protocol at a shard; keep the place of one if its connection there broke."""
    report, group, effects = event.what, event.group, event.effects
    assert isinstance(report, Absent)
    occupant = group.members.by_id.get(report.member_id) or group.learners.by_id.get(report.member_id)
    if occupant is None or occupant.connection < 0:
        return
    broke = isinstance(report.error, ConnectionLostError) and not report.ended and group.is_inside(report.member_id)
    if not (group.is_durable and event.source != HERE and broke):
        effects.evict(occupant.connection, report.error, ended=report.ended)
        return
    if group.shards.lacking:
        return  # it makes all its connections anew, as all do
    recovery.promote_contributors(event.registry, group, effects)  # as when its connection to the coordinator breaks
    event.follow()
    effects.dismiss(occupant.connection, report.error)
    sessions.detach(event.registry, group, report.member_id, report.error.message, event.now, effects)


def halt(event: Event) -> None:
    """Break the group, and have all shards halt it: what they hand out no result of fails."""
    assert isinstance(event.what, Halted)
    members.halt(event.group, event.what.error, event.effects, buckets_only=event.what.buckets_only)


def state_comes(event: Event) -> None:
    """Give the state more time on its way to a learner."""
    assert isinstance(event.what, StateComes)
    learners.state_comes(event.group, event.what, event.now)


def catch_up(event: Event) -> None:
    """With the last shard, tell RoundDone to members that lack it."""
    assert isinstance(event.what, CaughtUp)
    recovery.caught_up(event.group, event.what, event.source, event.effects)


def recover(event: Event) -> None:
    """With the last shard, let the members go on."""
    assert isinstance(event.what, Recovered)
    recovery.recovered(event.group, event.what, event.source, event.effects)


def nothing(event: Event) -> None:
    """Do nothing."""
