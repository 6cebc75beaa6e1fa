"""Learners in control: workers that join a running group, from the time when they have a member id.

`gradserver.engine.control.group.stages` has the table of their stages. Here is what else their events come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradserver.engine.control import donations, journal
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.group import MAX_REASON
from gradserver.engine.control.group.learners import Delivery, Learner, Stage
from gradserver.engine.control.group.stages import Event, happens, row_of
from gradserver.engine.control.welcome import tell_agreed, welcome_to
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Departure, Member
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import StateComes
from gradserver.protocol.errors import (
    DeadlineError,
    GradServerError,
    LeftOutError,
    PlanMismatchError,
    UnexpectedMessageError,
    WorkerLostError,
)
from gradserver.protocol.messages import Enter, Entered, Failure, Ready, Scope, Serve, StateFailed, Transfer
from gradserver.protocol.offers import pack_offers
from gradserver.protocol.plan import Plan
from gradserver.protocol.plan_changes import first_difference

# ── what they say and are told ────────────────────────────────────────────────────────────────────────


def welcome(group: Group, member_id: int, incarnation: int, effects: Effects) -> None:
    """Welcome a learner that all shards know."""
    learner = group.learners.by_id.get(member_id)
    if learner is not None and happens(learner, Event.KNOWN).next is not None:
        message = welcome_to(group, member_id, learner.token, incarnation)
        effects.send(learner.connection, message, pack_offers(message.offers))


def propose(group: Group, member_id: int, plan: Plan, beside: bool, now: float, effects: Effects) -> None:
    """Take the plan of a learner, in place of what it has proposed before or ``beside`` that."""
    learner = group.learners.by_id[member_id]
    if row_of(learner, Event.PROPOSE) is None:
        raise UnexpectedMessageError(f"{group.call(member_id)} proposes a plan when it should not")
    happens(learner, Event.PROPOSE)
    learner.propose(plan, beside, now)
    compare_plans(group, effects)


def compare_plans(group: Group, effects: Effects) -> None:
    """Tell learners that have proposed a plan whether it is the group's, if it has one."""
    for member_id, learner in group.learners.by_id.items():
        if learner.plan is None or group.plans.plan is None:
            continue
        if len(learner.sections) == len(group.plans.plan.each):
            continue  # the others may be about to wrap one more, too
        plan = learner.take_plan()
        section = group.plans.plan.each[len(learner.sections)]
        difference = first_difference(group.plans.plan.alone(section), plan)
        if difference is None:
            learner.agree(group.plans.plan.hash, section.number)
            tell_agreed(learner.connection, group.plans.plan, section, group.rounds.number, effects)
            continue
        theirs, own = difference
        error = PlanMismatchError(
            f"the plan of group {group.name!r} is another one, first here: {group.calls(group.members.by_id)} have "
            f"{theirs}; {group.call(member_id)}, which wants to join, has {own}. Every worker must wrap the same "
            f"module in the same way, with the same wire"
        )
        effects.send(learner.connection, Failure.of(error, Scope.PROPOSAL))
        effects.log(error.message, warning=True)


def outdated(group: Group, plan: Plan | None) -> list[Learner]:
    """Return learners that agreed to another plan than the group's, which is ``plan`` or is about to be."""
    here, numbers = ("", []) if plan is None else (plan.hash, [section.number for section in plan.each])
    return [
        learner
        for learner in group.learners.by_id.values()
        if learner.agreed not in ("", here)
        and (learner.stage is not Stage.WELCOME or list(learner.sections) != numbers[: len(learner.sections)])
    ]


def evict_outdated(group: Group, plan: Plan | None, effects: Effects) -> None:
    """Have learners join again that agreed to another plan than the group's, which is ``plan`` or is about to be."""
    error = PlanMismatchError(f"group {group.name!r} has agreed on another plan meanwhile: start again with that one")
    _evict(outdated(group, plan), Event.OUTDATED, error, effects)


def hear(
    group: Group, member_id: int, message: Serve | Enter | Ready | StateFailed, now: float, effects: Effects
) -> None:
    """Take what a member or a learner says of states."""
    learner = group.learners.by_id.get(member_id)
    match message:
        case Serve() if learner is None:
            group.learners.add_donor(member_id)
        case Serve() if learner is not None:
            happens(learner, Event.SERVE)
        case StateFailed(number, reason) if learner is None:
            group.learners.remove_donor(member_id)
            effects.log(f"{group.call(member_id)} cannot send its state: {reason}", warning=True)
            for other in group.learners.by_id.values():
                if (other.number, other.donor) == (number, member_id):
                    _have_others_go_on(group, other, Event.FAILED, effects)
        case Enter(failed, waits) if learner is not None and row_of(learner, Event.ENTER):
            donations.check_can_serve(group, learner.join.name)
            _check_sections(group, learner)
            if learner.number == failed:
                group.learners.wait_in_vain(learner, now)
            donations.check_attempts(group, learner.join.name, now)
            happens(learner, Event.ENTER)
            learner.wait(waits, now)
            if learner.number == failed:
                _have_others_go_on(group, learner, Event.FAILED, effects)
        case Ready(number) if learner is not None:
            donor, row = learner.donor, happens(learner, Event.READY) if learner.number == number else None
            if row is not None and row.next is not None:
                group.learners.succeed(learner, donor)
                if row.next is Stage.ENTERED:
                    enter(group, learner.round, effects)
        case _:
            raise UnexpectedMessageError(
                f"a {type(message).__name__} from {group.call(member_id)}, which is not due now"
            )


def _check_sections(group: Group, learner: Learner) -> None:
    """Raise PlanMismatchError unless ``learner`` has all modules that the others train."""
    here, there = len(learner.sections), 0 if group.plans.plan is None else len(group.plans.plan.each)
    if here != there:
        raise PlanMismatchError(
            f"group {group.name!r} trains {there} modules, and {learner.join.name!r}, which wants to join, has wrapped "
            f"{here}: it must wrap the same ones in the same order before it enters"
        )


def _have_others_go_on(group: Group, learner: Learner, event: Event, effects: Effects) -> None:
    """Have the others go on without a learner that has to wait for the next donor, because of ``event``."""
    if happens(learner, event).next is not None:
        group.configure(effects)


# ── boundaries ────────────────────────────────────────────────────────────────────────────────────────


def caught_up(group: Group) -> list[int]:
    """Return the ids of learners that have caught up with the others."""
    return [member_id for member_id, learner in group.learners.by_id.items() if learner.stage is Stage.READY]


def expect(group: Group, record: RoundRecord, now: float, effects: Effects) -> None:
    """Have learners contribute to the next round that have caught up, and others get the state."""
    for member_id in caught_up(group):
        happens(group.learners.by_id[member_id], Event.BOUNDARY)
        group.learners.by_id[member_id].contribute(record.round + 1)
    given, few = donations.due(group, now), group.lacks_workers
    listens = {member_id: donations.listens(group, member_id) for member_id in given}
    for member_id, donor in given.items():
        learner = group.learners.by_id[member_id]
        delivery = None if listens[member_id] else Delivery(group.policy.state_seconds, group.policy.state_rate, few)
        happens(learner, Event.DONATED)
        learner.receive(donor, group.learners.next_transfer(), record.round + 1, delivery)
    group.configure(effects)


def transfers(group: Group, number: int) -> tuple[Transfer, ...]:
    """Return the transfers of the state at the boundary before round ``number``."""
    return tuple(
        Transfer(learner.number, learner.donor, member_id, not learner.listens)
        for member_id, learner in group.learners.by_id.items()
        if learner.stage is Stage.RECEIVING and learner.round == number
    )


def deliver(group: Group, told: Iterable[Transfer], now: float, effects: Effects) -> None:
    """Wait from now on for learners of which ``told`` says so: members are told to send their states."""
    for transfer in told:
        delivery = group.learners.by_id[transfer.learner].delivery
        called, donor = group.call(transfer.learner), group.call(transfer.donor)
        if delivery is None:
            what = f"{donor} sends its state to {called}, and no member waits for that"
        else:
            delivery.begin(now)
            most = "" if delivery.endless else f", {delivery.seconds:g} s at most"
            what = f"round {group.rounds.number} waits for {called}, to which {donor} sends its state{most}"
        effects.log(f"group {group.name!r}: {what}")


def state_comes(group: Group, report: StateComes, now: float) -> None:
    """Give a learner more time to which so much of its state has come."""
    learner = group.learners.by_id.get(report.member_id)
    if learner is None or learner.delivery is None:
        return
    if (learner.number, learner.donor) == (report.number, report.donor):
        learner.delivery.comes(report.nbytes, now)


def awaits_state(group: Group, member_ids: Iterable[int]) -> bool:
    """Tell whether one of ``member_ids`` is waited for while it gets the state: that is not being late."""
    here = group.learners.by_id
    return any(member_id in here and here[member_id].stage is Stage.RECEIVING for member_id in member_ids)


def contributors(group: Group, number: int) -> dict[int, Learner]:
    """Return learners that contribute to round ``number``, by member id."""
    here = group.learners.by_id.items()
    return {member_id: learner for member_id, learner in here if learner.entered and learner.round <= number}


def promote(group: Group, number: int, epoch: Callable[[], int], effects: Effects) -> None:
    """Make members of learners that contribute to round ``number``: it is over, or their contributions may count.

    Their first round can be the one before, if that is complete and not over.
    """
    entered = contributors(group, number)
    if not entered:
        return
    for member_id, learner in entered.items():
        happens(learner, Event.COUNTED)
        group.learners.promote(member_id)
    member_ids = {member_id: Member(learner.connection, learner.join.name) for member_id, learner in entered.items()}
    first = max(learner.round for learner in entered.values())
    what = group.members.promote(member_ids, first, epoch())
    news = group.news(what, False, effects)
    journal.members(group, what, effects)
    group.configure(effects, news)


def enter(group: Group, number: int, effects: Effects) -> None:
    """Tell learners that have caught up that they contribute to round ``number``; it is written down first."""
    here = [learner for learner in group.learners.by_id.values() if learner.stage is Stage.ENTERED]
    told = [learner for learner in here if learner.round == number and not learner.entered]
    for learner in told:
        learner.enter()
        effects.send(learner.connection, Entered(number))
    if told:
        journal.entered(group, effects)


def fell_behind(group: Group, member_id: int, effects: Effects) -> bool:
    """Have a learner get the state anew, as it has not read its results. False if it trains with the state already.

    Each data shard may report the same. At the next boundary all have done so, and no older report comes any more.
    """
    learner = group.learners.by_id[member_id]
    if row_of(learner, Event.BEHIND) is None:
        return False
    _have_others_go_on(group, learner, Event.BEHIND, effects)
    return True


def evict_hopeless(group: Group, effects: Effects) -> None:
    """Tell learners that no member can send them the state."""
    for learner in donations.hopeless(group):
        _evict([learner], Event.HOPELESS, donations.no_donor(group, learner.join.name), effects)


# ── going ─────────────────────────────────────────────────────────────────────────────────────────────


def lost_donor(group: Group, member_id: int, effects: Effects) -> None:
    """Have learners get the state of another member than a lost one, if they cannot have all of it by now."""
    told = group.rounds.number if group.rounds.held is None else group.rounds.held.round
    for learner in group.learners.lose_donor(member_id, group.members.epoch):
        event = Event.DONOR_LOST if learner.round <= told else Event.FAILED
        _have_others_go_on(group, learner, event, effects)


def gone(group: Group, member_id: int, reason: str, politely: bool, now: float, effects: Effects) -> None:
    """Take note that a learner is gone. Only its donor hears of it."""
    group.learners.wait_in_vain(group.learners.by_id[member_id], now)
    happens(group.learners.by_id[member_id], Event.GONE)
    error = group.members.identities.departed(member_id, politely, f"when it was about to join ({reason[:MAX_REASON]})")
    if group.learners.lose(member_id, group.members.epoch).entered:
        journal.entered(group, effects)
    effects.log(f"group {group.name!r}: {error.message}", warning=not politely)
    group.configure(effects, departed=(Departure(member_id, error),))


def bereft(group: Group) -> WorkerLostError:
    """Return what workers that wait to join are told when the last member is gone."""
    if not (rounds := group.rounds.number):
        return WorkerLostError(
            f"the last member of group {group.name!r} is gone before its first round: connect again, and the group "
            f"begins anew"
        )
    return WorkerLostError(
        f"the last member of group {group.name!r} is gone after {rounds} rounds, and with it the state: "
        f"start again from a checkpoint"
    )


def disturb(group: Group, effects: Effects, all_of_them: bool = False) -> None:
    """Have learners join again that cannot go on in a recovery: ``all_of_them``, if they have lost a data shard."""
    error = LeftOutError(
        f"group {group.name!r} recovers, as a member or a data shard was lost or has come back: "
        f"workers that were about to join have to join again"
    )
    _evict(group.learners.by_id.values(), Event.CUT_OFF if all_of_them else Event.VOID, error, effects)


def _evict(learners: Iterable[Learner], event: Event, error: GradServerError, effects: Effects) -> None:
    """Evict learners, if the table says that the event comes to that."""
    for learner in learners:
        if happens(learner, event).evicts:
            effects.evict(learner.connection, error)


def deadline(group: Group) -> float | None:
    """Return when the patience of the first learner ends, or that of the others with it."""
    found = [learner.deadline for learner in group.learners.by_id.values()]
    return min((at for at in found if at is not None), default=None)


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell learners that have run out of patience, or with which the others have."""
    for member_id, learner in group.learners.by_id.items():
        if learner.deadline is not None and learner.deadline <= now:
            _evict([learner], Event.OVERDUE, _too_late(group, member_id, learner, now), effects)


def _too_late(group: Group, member_id: int, learner: Learner, now: float) -> DeadlineError:
    """Return what a learner is told that has waited for the others for too long, or that they have waited for."""
    number, missing = group.rounds.number, [*group.members.by_id]
    if (delivery := learner.delivery) is not None:
        text = f"group {group.name!r} waited {now - delivery.began:.1f} s in round {number} for {group.call(member_id)}"
        text += f", and goes on without it: {delivery.why(now, group.call(learner.donor))}"
        missing = [member_id]
    else:
        what = "agree on a plan" if learner.plan is not None else f"end round {number}, so that it can join"
        text = f"{learner.join.name!r} waited {learner.join.timeout:g} s for the members of group {group.name!r} to "
        text += f"{what} ({group.calls(missing)})"
    return DeadlineError(text, missing=tuple(group.call(member_id) for member_id in missing), round=number)
