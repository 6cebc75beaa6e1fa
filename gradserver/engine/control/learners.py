"""Learners in control: workers that join a running group.

    stage      event                                     next       what happens
    ─────────  ────────────────────────────────────────  ─────────  ──────────────────────────────────────────────────
    (none)     Join, the group trains and has no donor   (none)     UsageError: its members cannot send their state
    (none)     Join, all seats are taken, or its name    (queue)    it waits until one is free
    (none)     Join                                      ADMITTED   a seat by its name; all shards hear of it
    (queue)    a member departs                          ADMITTED   the same; else its patience ends: JoinTimeoutError
    ADMITTED   all shards know                           WELCOME    Welcome
    WELCOME    Propose, the group's plan                 WELCOME    Agreed; other plans: PlanMismatchError
    WELCOME    Enter                                     WAITING
    WAITING    a round is complete, a donor is free      RECEIVING  it listens from the next round on; RoundDone says
                                                                    who sends it the state, to all
    WAITING    … and it could not keep up, or says so    RECEIVING  the same, but shards expect it in the next round
    WAITING    … and no member can be a donor any more   (none)     UsageError
    WAITING    no round is over for too long             (none)     DeadlineError; READY: the same
    RECEIVING  Ready, it is expected                     ENTERED    Entered: it contributes from that round on
    RECEIVING  Ready, it listens                         READY      it has caught up with the others
    RECEIVING  it has not read what it was sent          WAITING    it gets the state anew
    READY      the same                                  (none)     LeftOutError
    READY      a round is complete                       ENTERED    shards expect it in the next round; Entered
    RECEIVING  its donor departs, or says StateFailed    WAITING    the round goes on without it; the next donor
    RECEIVING  its donor departs, and it listens         RECEIVING  it may have all of the state: Ready or Enter follows
    RECEIVING  Enter                                     WAITING    the same: it did not get the state
    RECEIVING  it is expected, and the state comes late  (none)     DeadlineError: `Delivery` has the times
    ENTERED    the round is complete                     (member)   a new epoch
    any        it leaves, is lost or left out            (none)     the round goes on without it
    any        the last member goes                      (none)     WorkerLostError: nobody has the state any more

So nothing that happens to a learner, or to its donor, changes a membership or costs the others more than a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradserver.engine.control import donations, journal
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.delivery import Delivery
from gradserver.engine.control.group.group import MAX_REASON
from gradserver.engine.control.group.learners import Learner, Stage
from gradserver.engine.control.welcome import tell_agreed, welcome_to
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Departure, Seat
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
from gradserver.protocol.plan import Plan, first_difference

# ── coming ────────────────────────────────────────────────────────────────────────────────────────────


def welcome(group: Group, seat: int, credit: int, incarnation: int, effects: Effects) -> None:
    """All shards know of it."""
    learner = group.learners.by_seat.get(seat)
    if learner is None or not learner.welcome():
        return
    effects.send(learner.connection, welcome_to(group, seat, learner.token, credit, incarnation))


# ── what they say ─────────────────────────────────────────────────────────────────────────────────────


def propose(group: Group, seat: int, plan: Plan, beside: bool, now: float, effects: Effects) -> None:
    """A learner has made its plan, in place of what it has proposed before or ``beside`` that."""
    learner = group.learners.by_seat[seat]
    if learner.plan is not None or learner.stage is not Stage.WELCOME:
        raise UnexpectedMessageError(f"{group.call(seat)} proposes a plan when it should not")
    learner.propose(plan, beside, now)
    compare_plans(group, effects)


def compare_plans(group: Group, effects: Effects) -> None:
    """Tell those who have proposed a plan whether it is the group's, if it has one."""
    for seat, learner in group.learners.by_seat.items():
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
            f"the plan of group {group.name!r} is another one, first here: {group.calls(group.members.by_seat)} have "
            f"{theirs}; {group.call(seat)}, which wants to join, has {own}. Every worker must wrap the same module in "
            f"the same way, with the same wire"
        )
        effects.send(learner.connection, Failure.of(error, Scope.PROPOSAL))
        effects.log(error.message, warning=True)


def outdated(group: Group) -> list[Learner]:
    """Return learners that agreed to a plan which is not the group's any more."""
    here = "" if group.plans.plan is None else group.plans.plan.hash
    numbers = [] if group.plans.plan is None else [section.number for section in group.plans.plan.each]
    return [
        learner
        for learner in group.learners.by_seat.values()
        if learner.agreed not in ("", here)
        and (learner.stage is not Stage.WELCOME or list(learner.sections) != numbers[: len(learner.sections)])
    ]


def evict_outdated(group: Group, effects: Effects) -> None:
    """Have learners join again that agreed to a plan which is not the group's any more."""
    error = PlanMismatchError(f"group {group.name!r} has agreed on another plan meanwhile: start again with that one")
    _evict_without_blame(outdated(group), error, effects)


def hear(group: Group, seat: int, message: Serve | Enter | Ready | StateFailed, now: float, effects: Effects) -> None:
    """Take what a member or a learner says of states."""
    match message:
        case Serve() if seat in group.members.by_seat:
            group.learners.add_donor(seat)
        case Serve():
            group.learners.by_seat[seat].serve()
        case StateFailed(number, reason) if seat in group.members.by_seat:
            group.learners.remove_donor(seat)
            effects.log(f"{group.call(seat)} cannot send its state: {reason}", warning=True)
            _excuse_all(group, lambda learner: learner.number == number and learner.donor == seat, effects)
        case Enter(failed, waits) if (learner := group.learners.by_seat.get(seat)) is not None and learner.agreed:
            donations.check_can_serve(group, learner.join.name)
            _check_sections(group, learner)
            if learner.number == failed:
                group.learners.wait_in_vain(learner, now)
            donations.check_attempts(group, learner.join.name, now)
            learner.wait(waits, now)
            _excuse_all(group, lambda other: other is learner and other.number == failed, effects)
        case Ready(number) if (learner := group.learners.by_seat.get(seat)) is not None:
            if learner.stage is Stage.RECEIVING and learner.number == number:
                group.learners.succeed(learner)
                if not learner.listens:
                    enter(group, learner.round, effects)
        case _:
            raise UnexpectedMessageError(f"a {type(message).__name__} from {group.call(seat)}, which is not due now")


def _check_sections(group: Group, learner: Learner) -> None:
    """Raise PlanMismatchError unless ``learner`` has all modules that the others train."""
    here, there = len(learner.sections), 0 if group.plans.plan is None else len(group.plans.plan.each)
    if here != there:
        raise PlanMismatchError(
            f"group {group.name!r} trains {there} modules, and {learner.join.name!r}, which wants to join, has wrapped "
            f"{here}: it must wrap the same ones in the same order before it enters"
        )


def _excuse_all(group: Group, which: Callable[[Learner], bool], effects: Effects) -> None:
    """Have learners that do not get the state now wait for the next donor, and nobody for them."""
    for learner in group.learners.by_seat.values():
        if learner.stage is Stage.RECEIVING and which(learner):
            learner.excuse()
            group.configure(effects)


# ── boundaries ────────────────────────────────────────────────────────────────────────────────────────


def caught_up(group: Group) -> list[int]:
    """Return the seats of learners that have caught up with the others."""
    return [seat for seat, learner in group.learners.by_seat.items() if learner.stage is Stage.READY]


def expect(group: Group, record: RoundRecord, now: float, effects: Effects) -> None:
    """Have learners contribute to the next round that have caught up, and others get the state."""
    policy = group.policy
    for seat in caught_up(group):
        group.learners.by_seat[seat].contribute(record.round + 1)
    given, few = donations.due(group, now), group.lacks_workers
    listens = {seat: donations.listens(group, seat) for seat in given}
    for seat, donor in given.items():
        learner = group.learners.by_seat[seat]
        delivery = None if listens[seat] else Delivery(policy.state_seconds, policy.state_rate, few)
        learner.receive(donor, group.learners.next_transfer(), record.round + 1, delivery)
    group.configure(effects)


def transfers(group: Group, number: int) -> tuple[Transfer, ...]:
    """Return the transfers of the state at the boundary before round ``number``."""
    return tuple(
        learner.transfer(seat)
        for seat, learner in group.learners.by_seat.items()
        if learner.stage is Stage.RECEIVING and learner.round == number
    )


def deliver(group: Group, told: Iterable[Transfer], now: float, effects: Effects) -> None:
    """Members are told to send their states: from now on the others wait for whom ``told`` says so of."""
    for transfer in told:
        delivery = group.learners.by_seat[transfer.learner].delivery
        who, donor = group.call(transfer.learner), group.call(transfer.donor)
        if delivery is None:
            what = f"{donor} sends its state to {who}, and no member waits for that"
        else:
            delivery.begin(now)
            most = "" if delivery.endless else f", {delivery.seconds:g} s at most"
            what = f"round {group.rounds.number} waits for {who}, to which {donor} sends its state{most}"
        effects.log(f"group {group.name!r}: {what}")


def state_comes(group: Group, report: StateComes, now: float) -> None:
    """So much of its state has come to a learner."""
    learner = group.learners.by_seat.get(report.rank)
    if learner is None or learner.delivery is None:
        return
    if (learner.number, learner.donor) == (report.number, report.donor):
        learner.delivery.comes(report.nbytes, now)


def awaits_state(group: Group, seats: Iterable[int]) -> bool:
    """Tell whether one of ``seats`` is waited for while it gets the state: that is not being late."""
    return any(
        seat in group.learners.by_seat and group.learners.by_seat[seat].stage is Stage.RECEIVING for seat in seats
    )


def contributors(group: Group, number: int) -> dict[int, Learner]:
    """Return learners that contribute to round ``number``, by seat."""
    return {
        seat: learner for seat, learner in group.learners.by_seat.items() if learner.entered and learner.round <= number
    }


def promote(group: Group, number: int, epoch: Callable[[], int], effects: Effects) -> None:
    """Make members of learners that contribute to round ``number``: it is over, or their contributions may count."""
    entered = contributors(group, number)
    if not entered:
        return
    for seat in entered:
        group.learners.promote(seat)
    seats = {seat: Seat(learner.connection, learner.join.name) for seat, learner in entered.items()}
    what = group.members.promote(seats, number, epoch())
    news = group.news(what, False, effects)
    journal.members(group, what, effects)
    group.configure(effects, news)


def enter(group: Group, number: int, effects: Effects) -> None:
    """Tell learners that have caught up that they contribute to round ``number``; it is written down first."""
    told = [
        j for j in group.learners.by_seat.values() if j.stage is Stage.ENTERED and j.round == number and not j.entered
    ]
    for learner in told:
        learner.enter()
        effects.send(learner.connection, Entered(number))
    if told:
        journal.entered(group, effects)


def fell_behind(group: Group, seat: int, effects: Effects) -> bool:
    """Have a learner get the state anew, as it has not read its results. False if it trains with the state already."""
    learner = group.learners.by_seat[seat]
    if learner.stage is not Stage.RECEIVING:
        return False
    learner.fall_behind()
    _excuse_all(group, lambda other: other is learner, effects)
    return True


def evict_hopeless(group: Group, effects: Effects) -> None:
    """Tell learners that no member can send them the state."""
    for learner in donations.hopeless(group):
        _evict_without_blame([learner], donations.no_donor(group, learner.join.name), effects)


# ── going ─────────────────────────────────────────────────────────────────────────────────────────────


def lost_donor(group: Group, seat: int, effects: Effects) -> None:
    """Have learners that were to get the state of a lost member get that of another one.

    A learner that listens may have all of the state by now, and train with it. It says so, or that it lacks some: the
    others do not wait for it meanwhile. One that has yet to be told of its donor gets another one at once.
    """
    told = group.rounds.number if group.rounds.held is None else group.rounds.held.round
    group.learners.lose_donor(seat, group.members.epoch, told)
    _excuse_all(group, lambda learner: learner.donor == seat, effects)


def gone(group: Group, seat: int, reason: str, politely: bool, now: float, effects: Effects) -> None:
    """Take note that a learner is gone. Only its donor hears of it."""
    group.learners.wait_in_vain(group.learners.by_seat[seat], now)
    error = group.members.seats.departed(seat, politely, f"when it was about to join ({reason[:MAX_REASON]})")
    if group.learners.lose(seat, group.members.epoch).entered:
        journal.entered(group, effects)
    effects.log(f"group {group.name!r}: {error.message}", warning=not politely)
    group.configure(effects, departed=(Departure(seat, error),))


def bereft(group: Group) -> WorkerLostError:
    """Return what workers that wait to join are told when the last member is gone."""
    return WorkerLostError(
        f"the last member of group {group.name!r} is gone after {group.rounds.number} rounds, and with it the state: "
        f"start again from a checkpoint"
    )


def disturb(group: Group, effects: Effects, all_of_them: bool = False) -> None:
    """Have learners join again that cannot go on, as all that is open is void: a member has come back.

    That is ``all_of_them`` if a data shard is lost, to which they were connected.
    """
    error = LeftOutError(
        f"group {group.name!r} recovers, as a member or a data shard was lost or has come back: "
        f"workers that were about to join have to join again"
    )
    everybody = group.learners.by_seat.values()
    here = everybody if all_of_them else [j for j in group.learners.hearing if j.stage is not Stage.WAITING]
    _evict_without_blame([learner for learner in here if not learner.entered], error, effects)


def _evict_without_blame(learners: Iterable[Learner], error: GradServerError, effects: Effects) -> None:
    """Evict learners, and not because the others have waited for them in vain."""
    for learner in learners:
        learner.await_nobody()
        effects.evict(learner.connection, error)


def deadline(group: Group) -> float | None:
    """Return when the patience of the first learner ends, or that of the others with it."""
    if not group.learners.by_seat:
        return None
    found = [learner.deadline for learner in group.learners.by_seat.values()]
    return min((at for at in found if at is not None), default=None)


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell learners that have run out of patience, or with which the others have."""
    for seat, learner in group.learners.by_seat.items():
        if learner.deadline is None or learner.deadline > now:
            continue
        if learner.delivery is not None:
            effects.evict(learner.connection, _too_slow(group, seat, learner.delivery, now))
        else:
            what = (
                f"to agree on a plan ({group.calls(group.members.by_seat)})"
                if learner.plan is not None
                else (f"to end round {group.rounds.number}, so that it can join ({group.calls(group.members.by_seat)})")
            )
            error = DeadlineError(
                f"{learner.join.name!r} waited {learner.join.timeout:g} s for the members of group {group.name!r} "
                f"{what}",
                missing=tuple(group.call(seat) for seat in group.members.by_seat),
                round=group.rounds.number,
            )
            effects.evict(learner.connection, error)


def _too_slow(group: Group, seat: int, delivery: Delivery, now: float) -> DeadlineError:
    """Return what a learner is told when its state has not come in time."""
    waited = now - delivery.began
    why = delivery.why(now, group.call(group.learners.by_seat[seat].donor))
    return DeadlineError(
        f"group {group.name!r} waited {waited:.1f} s in round {group.rounds.number} for {group.call(seat)}, and goes "
        f"on without it: {why}",
        missing=(group.call(seat),),
        round=group.rounds.number,
    )
