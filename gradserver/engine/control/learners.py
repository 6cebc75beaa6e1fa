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

So nothing that happens to a joiner, or to its donor, changes a membership or costs the others more than a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle

from gradserver.engine.control import journal
from gradserver.engine.control.group import Applicant, Group
from gradserver.engine.control.group.group import MAX_REASON
from gradserver.engine.control.group.learners import Delivery, Learner, Stage
from gradserver.engine.control.welcome import tell_agreed, token_of, welcome_to
from gradserver.engine.effects import Effects
from gradserver.engine.order_fields import Seat
from gradserver.engine.orders import Admit, Depart, Excuse, Expect, Reseat
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import StateComes
from gradserver.engine.seats import namesake, seat_for
from gradserver.protocol.errors import (
    DeadlineError,
    GradServerError,
    JoinRefusedError,
    JoinTimeoutError,
    LeftOutError,
    PlanMismatchError,
    UnexpectedMessageError,
    UsageError,
    WorkerLostError,
)
from gradserver.protocol.limits import MAX_STATE_ATTEMPTS, STATE_REST_SECONDS
from gradserver.protocol.messages import (
    Enter,
    Entered,
    Failure,
    Ready,
    Scope,
    Serve,
    StateFailed,
    Transfer,
)
from gradserver.protocol.plan import Plan, first_difference

# ── coming ────────────────────────────────────────────────────────────────────────────────────────────


def arrive(group: Group, applicant: Applicant, entropy: Callable[[], str], effects: Effects) -> None:
    """Give a seat to a worker that joins a group that has begun, or let it wait for one.

    Raises:
        UsageError: no member can send the state.
        JoinRefusedError: the others have waited for it in vain too often.
    """
    check_can_serve(group, applicant.join.name)
    _check_attempts(group, applicant.join.name, applicant.since)
    group.learners.wait(applicant)
    admit_queued(group, entropy, effects)
    if applicant in group.learners.queue:
        effects.log(f"group {group.name!r}: {applicant.join.name!r} waits: {_why_waits(group, applicant)}")


def _check_attempts(group: Group, name: str, now: float) -> None:
    """Raise JoinRefusedError if the others have waited for ``name`` in vain too often."""
    attempts, last = group.learners.in_vain.get(name, (0, -math.inf))
    rest = last + STATE_REST_SECONDS - now
    if attempts >= MAX_STATE_ATTEMPTS and rest > 0:
        raise JoinRefusedError(
            f"the members of group {group.name!r} waited {attempts} times for {name!r} to get the state, in vain: it "
            f"may join again in {rest:.0f} s"
        )


def check_can_serve(group: Group, name: str) -> None:
    """Raise UsageError if nobody could send its state to ``name``, or what broke the group."""
    if group.broken is not None:
        raise group.broken.again()
    if _lacks_donors(group):
        raise _no_donor(group, name)


def _lacks_donors(group: Group) -> bool:
    """Tell whether the group trains and none of its members can send its state."""
    return (
        bool(group.rounds.number)
        and not group.learners.donors
        and not group.sessions.away
        and not group.recovery.is_open
    )


def _no_donor(group: Group, name: str) -> UsageError:
    return UsageError(
        f"{name!r} joins group {group.name!r} in round {group.rounds.number}, and needs the model's and the "
        f"optimizer's state, which no member can send: wrap model and optimizer in gradserver.Job, at every worker, "
        f"or give Worker.serve_state what to send"
    )


def can_admit(group: Group) -> bool:
    """Tell whether there is a seat for one of the applicants that wait for one."""
    taken = {*group.members.by_seat, *group.learners.by_seat}
    names, is_full = {group.members.seats.names[seat] for seat in taken}, len(taken) >= group.policy.maximum
    wanted = [applicant.join.name for applicant in group.learners.queue]
    return any(
        namesake(name, group.members.seats.names, taken) >= 0 if name in names else not is_full for name in wanted
    )


def admit_queued(group: Group, entropy: Callable[[], str], effects: Effects) -> None:
    """Give free seats to the applicants that have waited longest."""
    for applicant in list(group.learners.queue):
        taken = {*group.members.by_seat, *group.learners.by_seat}
        names = {group.members.seats.names[seat] for seat in taken}
        places = group.policy.maximum
        name = applicant.join.name
        own = namesake(name, group.members.seats.names, taken) if name in names else -1
        if own >= 0:  # it was called so when the group began, and is back
            applicant.join = replace(applicant.join, name=group.members.seats.names[own])
        elif name in names or len(taken) >= places:
            continue
        seat = seat_for(applicant.join, group.members.seats.names, taken, group.learners.vacant, places)
        group.members.admit(seat, applicant.join.name)
        token = (token_of(group, seat) if group.is_durable else entropy()) if group.shards else ""
        learner = Learner(applicant.connection, applicant.join, token, applicant.since)
        group.learners.admit(seat, learner)
        occupant = Seat(applicant.connection, applicant.join.name)
        group.change(Admit(group.name, seat, occupant, token), effects, seat=seat)
        effects.log(f"group {group.name!r}: {group.call(seat)} joins in round {group.rounds.number}")


def _why_waits(group: Group, applicant: Applicant) -> str:
    taken = [*group.members.by_seat, *group.learners.by_seat]
    same = [seat for seat in taken if group.members.seats.names[seat] == applicant.join.name]
    if same:
        return f"{group.call(same[0])} is a member already, and a name is one worker's (GRADSERVER_NAME, or name=)"
    return f"group {group.name!r} has {len(taken)} workers, {group.calls(taken)}, and {group.policy} is the most"


def welcome(group: Group, seat: int, credit: int, incarnation: int, effects: Effects) -> None:
    """All shards know of it."""
    joiner = group.learners.by_seat.get(seat)
    if joiner is None or not joiner.welcome():
        return
    effects.send(joiner.connection, welcome_to(group, seat, joiner.token, credit, incarnation))


# ── what they say ─────────────────────────────────────────────────────────────────────────────────────


def propose(group: Group, seat: int, plan: Plan, beside: bool, now: float, effects: Effects) -> None:
    """A joiner has made its plan, in place of what it has proposed before or ``beside`` that."""
    joiner = group.learners.by_seat[seat]
    if joiner.plan is not None or joiner.stage is not Stage.WELCOME:
        raise UnexpectedMessageError(f"{group.call(seat)} proposes a plan when it should not")
    joiner.propose(plan, beside, now)
    compare_plans(group, effects)


def compare_plans(group: Group, effects: Effects) -> None:
    """Tell those who have proposed a plan whether it is the group's, if it has one."""
    for seat, joiner in group.learners.by_seat.items():
        if joiner.plan is None or group.plans.plan is None:
            continue
        if len(joiner.sections) == len(group.plans.plan.each):
            continue  # the others may be about to wrap one more, too
        plan = joiner.take_plan()
        section = group.plans.plan.each[len(joiner.sections)]
        difference = first_difference(group.plans.plan.alone(section), plan)
        if difference is None:
            joiner.agree(group.plans.plan.hash, section.number)
            tell_agreed(joiner.connection, group.plans.plan, section, group.rounds.number, effects)
            continue
        theirs, own = difference
        error = PlanMismatchError(
            f"the plan of group {group.name!r} is another one, first here: {group.calls(group.members.by_seat)} have "
            f"{theirs}; {group.call(seat)}, who wants to join, has {own}. Every worker must wrap the same module in "
            f"the same way"
        )
        effects.send(joiner.connection, Failure.of(error, Scope.PROPOSAL))
        effects.log(error.message, warning=True)


def outdated(group: Group) -> list[Learner]:
    """Return learners that agreed to a plan which is not the group's any more."""
    here = "" if group.plans.plan is None else group.plans.plan.hash
    numbers = [] if group.plans.plan is None else [section.number for section in group.plans.plan.each]
    return [
        joiner
        for joiner in group.learners.by_seat.values()
        if joiner.agreed not in ("", here)
        and (joiner.stage is not Stage.WELCOME or list(joiner.sections) != numbers[: len(joiner.sections)])
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
            _excuse_all(group, lambda joiner: joiner.number == number and joiner.donor == seat, effects)
        case Enter(failed, waits) if (joiner := group.learners.by_seat.get(seat)) is not None and joiner.agreed:
            check_can_serve(group, joiner.join.name)
            _check_sections(group, joiner)
            if joiner.number == failed:
                group.learners.wait_in_vain(joiner, now)
            _check_attempts(group, joiner.join.name, now)
            joiner.wait(waits, now)
            _excuse_all(group, lambda other: other is joiner and other.number == failed, effects)
        case Ready(number) if (joiner := group.learners.by_seat.get(seat)) is not None:
            if joiner.stage is Stage.RECEIVING and joiner.number == number:
                group.learners.succeed(joiner)
                if not joiner.listens:
                    enter(group, joiner.round, effects)
        case _:
            raise UnexpectedMessageError(f"a {type(message).__name__} from {group.call(seat)}, who may not say it now")


def _check_sections(group: Group, joiner: Learner) -> None:
    """Raise PlanMismatchError unless ``joiner`` has all modules that the others train."""
    here, there = len(joiner.sections), 0 if group.plans.plan is None else len(group.plans.plan.each)
    if here != there:
        raise PlanMismatchError(
            f"group {group.name!r} trains {there} modules, and {joiner.join.name!r}, who wants to join, has wrapped "
            f"{here}: it must wrap the same ones in the same order before it enters"
        )


def _excuse_all(group: Group, which: Callable[[Learner], bool], effects: Effects) -> None:
    """Have learners that do not get the state now wait for the next donor, and nobody for them."""
    for seat, joiner in group.learners.by_seat.items():
        if joiner.stage is Stage.RECEIVING and which(joiner):
            joiner.excuse()
            group.change(Excuse(group.name, seat), effects)


# ── boundaries ────────────────────────────────────────────────────────────────────────────────────────


def caught_up(group: Group) -> list[int]:
    """Return the seats of learners that have caught up with the others."""
    return [seat for seat, joiner in group.learners.by_seat.items() if joiner.stage is Stage.READY]


def donations(group: Group, now: float) -> dict[int, int]:
    """Return which donor sends its state to which learner from the next round on, by the learner's seat.

    A learner listens meanwhile. Or it is expected, so that the next round waits for it: if it could not read as fast as
    results came, if there is to be no backlog, or if there are too few others.
    """
    waiting = [seat for seat, joiner in group.learners.by_seat.items() if joiner.stage is Stage.WAITING]
    if not waiting:
        return {}
    free = sorted(group.learners.donors, key=lambda seat: (group.learners.donors[seat], seat))
    if group.lacks_workers:  # no round is open meanwhile, so that one donor may serve several
        donors: Iterator[int] = cycle(free)
    else:
        busy = {joiner.donor for joiner in group.learners.by_seat.values()}
        donors = iter([seat for seat in free if seat not in busy])
    may = [
        seat for seat in waiting if group.lacks_workers or _listens(group, seat) or now >= group.learners.waits_again
    ]
    return dict(zip(may, donors, strict=False))


def _listens(group: Group, seat: int) -> bool:
    """Tell whether a learner gets the state while the others go on."""
    return not (group.lacks_workers or group.learners.by_seat[seat].waits or not group.policy.backlog)


def expect(group: Group, record: RoundRecord, now: float, effects: Effects) -> None:
    """Have learners contribute to the next round that have caught up, and others get the state."""
    policy, listen, expected = group.policy, list[int](), caught_up(group)
    for seat in expected:
        group.learners.by_seat[seat].contribute(record.round + 1)
    given, few = donations(group, now), group.lacks_workers
    listens = {seat: _listens(group, seat) for seat in given}
    for seat, donor in given.items():
        joiner = group.learners.by_seat[seat]
        delivery = None if listens[seat] else Delivery(policy.state_seconds, policy.state_rate, few)
        joiner.receive(donor, group.learners.next_transfer(), record.round + 1, delivery)
        (listen if joiner.listens else expected).append(seat)
    for seats, listening in ((expected, False), (listen, True)):
        if seats:
            numbers = tuple(group.learners.by_seat[seat].number for seat in seats)
            group.change(Expect(group.name, tuple(seats), record.round + 1, listening, numbers), effects)


def transfers(group: Group, number: int) -> tuple[Transfer, ...]:
    """Return the transfers of the state at the boundary before round ``number``."""
    return tuple(
        joiner.transfer(seat)
        for seat, joiner in group.learners.by_seat.items()
        if joiner.stage is Stage.RECEIVING and joiner.round == number
    )


def deliver(group: Group, told: Iterable[Transfer], now: float, effects: Effects) -> None:
    """Members are told to send their states: from now on the others wait for whom ``told`` says so of."""
    for transfer in told:
        delivery = group.learners.by_seat[transfer.joiner].delivery
        who, donor = group.call(transfer.joiner), group.call(transfer.donor)
        if delivery is None:
            what = f"{donor} sends its state to {who}, and nobody waits for that"
        else:
            delivery.begin(now)
            most = "" if delivery.endless else f", {delivery.seconds:g} s at most"
            what = f"round {group.rounds.number} waits for {who}, to which {donor} sends its state{most}"
        effects.log(f"group {group.name!r}: {what}")


def state_comes(group: Group, report: StateComes, now: float) -> None:
    """So much of its state has come to a learner."""
    joiner = group.learners.by_seat.get(report.rank)
    if joiner is None or joiner.delivery is None:
        return
    if (joiner.number, joiner.donor) == (report.number, report.donor):
        joiner.delivery.comes(report.nbytes, now)


def awaits_state(group: Group, seats: Iterable[int]) -> bool:
    """Tell whether one of ``seats`` is waited for while it gets the state: that is not being late."""
    return any(
        seat in group.learners.by_seat and group.learners.by_seat[seat].stage is Stage.RECEIVING for seat in seats
    )


def contributors(group: Group, number: int) -> dict[int, Learner]:
    """Return learners that contribute to round ``number``, by seat."""
    return {
        seat: joiner for seat, joiner in group.learners.by_seat.items() if joiner.entered and joiner.round <= number
    }


def promote(group: Group, number: int, epoch: Callable[[], int], effects: Effects) -> None:
    """Make members of learners that contribute to round ``number``: it is over, or their contributions may count."""
    entered = contributors(group, number)
    if not entered:
        return
    for seat in entered:
        group.learners.promote(seat)
    seats = {seat: Seat(joiner.connection, joiner.join.name) for seat, joiner in entered.items()}
    what = group.members.promote(seats, number, epoch())
    news = group.news(what, False, effects)
    journal.members(group, what, effects)
    group.change(Reseat(group.name, group.members.epoch, group.members.seats.present), effects, news)


def waiting(group: Group) -> Iterable[Learner]:
    """Return learners that hear of each boundary, with which their patience begins anew."""
    return [learner for learner in group.learners.by_seat.values() if learner.hears_boundaries]


def enter(group: Group, number: int, effects: Effects) -> None:
    """Tell learners that have caught up that they contribute to round ``number``; it is written down first."""
    told = [
        j for j in group.learners.by_seat.values() if j.stage is Stage.ENTERED and j.round == number and not j.entered
    ]
    for joiner in told:
        joiner.enter()
        effects.send(joiner.connection, Entered(number))
    if told:
        journal.entered(group, effects)


def fell_behind(group: Group, seat: int, effects: Effects) -> bool:
    """Have a learner get the state anew, as it has not read its results. False if it trains with the state already."""
    joiner = group.learners.by_seat[seat]
    if joiner.stage is not Stage.RECEIVING:
        return False
    joiner.fall_behind()
    _excuse_all(group, lambda other: other is joiner, effects)
    return True


def hopeless(group: Group) -> list[Learner]:
    """Return learners that wait for the state, if no member can send its own, now or soon."""
    if not _lacks_donors(group):
        return []
    stuck = [joiner for joiner in group.learners.by_seat.values() if joiner.stage is Stage.WAITING]
    coming = (joiner for joiner in waiting(group) if joiner.stage is not Stage.WAITING)
    return [] if any(joiner.serves for joiner in coming) else stuck


def evict_hopeless(group: Group, effects: Effects) -> None:
    """Tell learners that no member can send them the state."""
    for joiner in hopeless(group):
        _evict_without_blame([joiner], _no_donor(group, joiner.join.name), effects)


# ── going ─────────────────────────────────────────────────────────────────────────────────────────────


def lost_donor(group: Group, seat: int, effects: Effects) -> None:
    """Have learners that were to get the state of a lost member get that of another one.

    A joiner that listens may have all of the state by now, and train with it. It says so, or that it lacks some: the
    others do not wait for it meanwhile. One that has yet to be told of its donor gets another one at once.
    """
    told = group.rounds.number if group.rounds.held is None else group.rounds.held.round
    group.learners.lose_donor(seat, group.members.epoch, told)
    _excuse_all(group, lambda joiner: joiner.donor == seat, effects)


def gone(group: Group, seat: int, reason: str, politely: bool, now: float, effects: Effects) -> None:
    """Take note that a learner is gone. Only its donor hears of it."""
    group.learners.wait_in_vain(group.learners.by_seat[seat], now)
    error = group.members.seats.departed(seat, politely, f"when it was about to join ({reason[:MAX_REASON]})")
    if group.learners.lose(seat, group.members.epoch).entered:
        journal.entered(group, effects)
    effects.log(f"group {group.name!r}: {error.message}", warning=not politely)
    group.change(Depart(group.name, seat, error, group.members.epoch), effects)


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
        f"group {group.name!r} finds out who has what, as a member or a data shard was lost or has come back to it: "
        f"whoever was about to join has to begin anew"
    )
    here = (
        group.learners.by_seat.values() if all_of_them else [j for j in waiting(group) if j.stage is not Stage.WAITING]
    )
    _evict_without_blame([joiner for joiner in here if not joiner.entered], error, effects)


def _evict_without_blame(joiners: Iterable[Learner], error: GradServerError, effects: Effects) -> None:
    """Evict learners, and not because the others have waited for them in vain."""
    for joiner in joiners:
        joiner.await_nobody()
        effects.evict(joiner.connection, error)


def queue_deadline(group: Group) -> float | None:
    """Return when the patience of the first applicant ends that waits for a seat."""
    if not group.learners.queue:
        return None
    return min(applicant.deadline for applicant in group.learners.queue)


def queue_overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell applicants that have run out of patience that there was no seat."""
    for applicant in group.learners.queue:
        if applicant.deadline <= now:
            what = f"{applicant.join.name!r} waited {applicant.join.timeout:g} s for a seat: "
            effects.evict(applicant.connection, JoinTimeoutError(what + _why_waits(group, applicant)))


def deadline(group: Group) -> float | None:
    """Return when the patience of the first learner ends, or that of the others with it."""
    if not group.learners.by_seat:
        return None
    found = [joiner.deadline for joiner in group.learners.by_seat.values()]
    return min((at for at in found if at is not None), default=None)


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Tell learners that have run out of patience, or with which the others have."""
    for seat, joiner in group.learners.by_seat.items():
        if joiner.deadline is None or joiner.deadline > now:
            continue
        if joiner.delivery is not None:
            effects.evict(joiner.connection, _too_slow(group, seat, joiner.delivery, now))
        else:
            what = (
                f"to agree on a plan ({group.calls(group.members.by_seat)})"
                if joiner.plan is not None
                else (f"to end round {group.rounds.number}, so that it can join ({group.calls(group.members.by_seat)})")
            )
            error = DeadlineError(
                f"{joiner.join.name!r} waited {joiner.join.timeout:g} s for the members of group {group.name!r} {what}",
                missing=tuple(group.call(seat) for seat in group.members.by_seat),
                round=group.rounds.number,
            )
            effects.evict(joiner.connection, error)


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
