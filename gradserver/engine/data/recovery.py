"""Recovery of a durable group at its data half: after a connection was lost, members say which results they hold.

All that was open is void: members hold what they give until they have its result, and results until no member can
lack them (`gradserver.protocol.messages.recovery`). When a member returns on a new connection, all members say what
they hold. It is the same whether the coordinator was lost with its tables or one connection broke.

    stage       event                                     next        what happens
    ──────────  ────────────────────────────────────────  ──────────  ──────────────────────────────────────────────
    (none)      Recover                                   COLLECTING  open exchanges are forgotten
    COLLECTING  Push                                      COLLECTING  dropped: its sender has yet to hear of it
    COLLECTING  Holding, not the last of those present    COLLECTING  kept
    COLLECTING  Holding of a round that cannot be         COLLECTING  its sender breaks the protocol
    COLLECTING  Holding, the last; a member departs       PREVIOUS    R: the latest round that members are in
    COLLECTING  … and reductions of before are under way  COLLECTING  when they have ended: they may write to memory
    PREVIOUS    a member is in an earlier one than R-1    COLLECTING  it is left out, unless members can be late
    PREVIOUS    a member lacks what none holds, of R-1    COLLECTING  it is left out: the others went on without it
                or earlier
    PREVIOUS    a member lacks what others hold of these  PREVIOUS    Fetch, and with the answer Result, round by round
    PREVIOUS    none of them lacks any more               TOLD        control is to tell them that R-1 is over
    TOLD        CutRound of R                             TOLD        R is closed for these, as it was
    TOLD        Proceed                                   PRESENT
    PRESENT     slices of R that some hold, others lack   PRESENT     Fetch, and with the answer Result
    PRESENT     the same, of collectives and transfers    PRESENT     the same
    PRESENT     … failed; one is done, and none holds it  PRESENT     Failure to members that lack it
    PRESENT     no member lacks what others hold          (none)      Standing to all: what none holds is open. Members
                                                                      with a later first round are sent the results
    any         a connection breaks                       COLLECTING  its Holding is forgotten, and waited for
    any         a learner departs                         (the same)  it holds nothing: what was found out stands
    any         no progress for the group's timeout       COLLECTING  members that it waits for are left out

Slices that are held are *settled*: members never push them, and nothing is reduced of them again.

With a quorum, or with backups, members can be rounds behind. When the recovery is over, all of them hold the results of
all rounds before R, and the same slices of R. So no member pushes to a round before R. That R was closed for some
members is written before any is told, and holds: control says it again before members go on. So the slices to which
such a member has contributed are a prefix, and the samples in its contribution are used once. What it had given to the
other slices it still holds, and carries over. Rounds behind R that were made before are void, at members too: no member
that had all of R is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from gradserver.engine.data import commits
from gradserver.engine.data.abandoned import end_abandoned
from gradserver.engine.data.failures import say_failed
from gradserver.engine.data.group import Group
from gradserver.engine.data.inventory import adopt, places, said, shares
from gradserver.engine.data.membership import changed, left_out
from gradserver.engine.data.quorum import note_what_counted
from gradserver.engine.data.recovery_state import FAILED, Holder, Place, Recovery, Stage, Wanted, latest
from gradserver.engine.data.rounds import Round
from gradserver.engine.effects import Effects
from gradserver.engine.orders import Recover
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.proofs import Said
from gradserver.engine.reports import CaughtUp, Recovered, RoundCompleted
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    ConnectionLostError,
    GradServerError,
    MalformedMessageError,
    SizeMismatchError,
    UnexpectedMessageError,
)
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Op
from gradserver.protocol.finite import is_finite
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.data import made_in
from gradserver.protocol.messages.recovery import Fetch, Held, Holding, Standing, State

_MOST_LATE: Final = 8192
"""Rounds that a member may be behind the others where members can be late."""
_MAX_ASKED: Final = 16
"""Results that are on their way from their holders: so many are in memory at most."""


# ── what happens ──────────────────────────────────────────────────────────────────────────────────────


def begin(group: Group, order: Recover, now: float) -> None:
    """Forget all that is open. Reductions from before come back with an earlier generation than the order's."""
    draining = set() if group.recovery is None else set(group.recovery.draining)
    draining |= {(group.order.epoch, key, start) for key, one in group.exchanges.items() for start in one.reducing}
    group.start_over(Recovery(order.generation, order.round, order.latest, now, order.own, draining))


def forget(group: Group, member_id: int, now: float, effects: Effects) -> None:
    """Forget what ``member_id`` has said, which has departed or lost its connection."""
    recovery = group.recovery
    if recovery is None:
        return
    recovery.forget(member_id)
    if recovery.stage is Stage.COLLECTING:
        advance(group, now, effects)


def hold(group: Group, member_id: int, holding: Holding, payload: Buffer, now: float, effects: Effects) -> None:
    """Take what a member says that it holds."""
    recovery = group.recovery
    if recovery is None or holding.generation != recovery.generation:
        if holding.generation > group.order.epoch:
            raise UnexpectedMessageError(f"a Holding of generation {holding.generation}, which was not asked for")
        return  # another recovery has begun meanwhile
    if member_id in recovery.holders:
        raise UnexpectedMessageError(
            f"a second Holding of generation {holding.generation} from {group.call(member_id)}"
        )
    if holding.round > recovery.latest:
        raise UnexpectedMessageError(
            f"{group.call(member_id)} says that it is in round {holding.round}, and {recovery.latest} is the latest "
            f"that can have begun"
        )
    recovery.hear(member_id, said(group, member_id, holding, payload), now)
    advance(group, now, effects)


def held(group: Group, member_id: int, message: Held, payload: Buffer | None, effects: Effects) -> bool:
    """Hand a fetched result on, behind what was asked for before; return False if it was not asked for."""
    recovery = group.recovery
    if recovery is None or message.generation != recovery.generation:
        return False
    place = message.key, message.slice
    source, wanted = recovery.asked.get(place, (-1, None))
    if wanted is None or source != member_id or place in recovery.came:
        return False  # asked for before another member was lost
    if payload is not None:
        _check_held(group, recovery.holders[member_id], member_id, place, payload)
    if payload is not None or place not in recovery.holders[member_id].handed:
        _check_proof(group, recovery.holders[member_id].made.get(place, 0), member_id, message, payload)
    nonfinite = tuple(member_id for member_id, weight in enumerate(message.weights) if weight < 0)
    told = message.without, message.weights, nonfinite, message.squares
    result = Result(*place, message.weight, message.present, 1, False, False, *told, proof=message.proof)
    recovery.receive(place, result, () if payload is None else (payload,))
    for lacking, ready, payloads in recovery.hand_on():
        effects.send(group.members.connections[lacking], ready, payloads)
    return True


def _check_held(group: Group, holder: Holder, member_id: int, place: Place, payload: Buffer) -> None:
    """Check a result that ``member_id`` says once more: an error is its fault, not that of the member that lacks it."""
    key, index = place
    what = f"{group.describe(key)} as {group.call(member_id)} holds it: slice {index}"
    if key.stream != BUCKET or group.plan is None:
        due = holder.sizes.get(place, 0)
        if len(payload) != due:
            raise SizeMismatchError(f"{what} has {len(payload)} bytes, and it had said {due}")
        return
    operation = group.plan.buckets[key.part].operation
    layout, _, _ = group.share(key, operation)
    if len(payload) != layout.nbytes(index):
        raise SizeMismatchError(f"{what} has {len(payload)} bytes, {layout.nbytes(index)} were agreed")
    guarded = operation.op is Op.MEAN and group.order.nonfinite is not OnNonFinite.PROPAGATE
    start, stop = layout.span(index)
    if guarded and not is_finite(payload, operation, stop - start):
        raise MalformedMessageError(f"{what} has a number that is not finite, and no result has any")


def _check_proof(group: Group, made: int, member_id: int, message: Held, payload: Buffer | None) -> None:
    """Check that what ``member_id`` shows was ``made`` in that generation: what it makes up reaches no other."""
    said = Said(message.key, message.weight, message.without, message.weights)
    assert group.proofs is not None, "members of durable groups hold results"
    proof = message.proof
    if made_in(proof) != made or not group.proofs.is_right(proof, said, message.slice, payload, message.squares):
        raise MalformedMessageError(
            f"{group.describe(message.key)} as {group.call(member_id)} holds it: slice {message.slice} is not what a "
            f"coordinator of this group has made of it. Its memory is faulty, or it makes results up"
        )


def drained(group: Group, epoch: int, key: ExchangeKey, start: int) -> bool:
    """Note that a reduction from before has come back, and tell whether it was the last."""
    return group.recovery is not None and group.recovery.drain((epoch, key, start))


def proceed(group: Group, now: float, effects: Effects) -> None:
    """Go on: the members that lacked the end of a round have heard of it."""
    recovery = group.recovery
    if recovery is None or recovery.stage is not Stage.TOLD:
        return
    recovery.enter_round()
    _present(group, recovery, now, effects)


def advance(group: Group, now: float, effects: Effects) -> None:
    """Go on, if nothing is waited for."""
    recovery = group.recovery
    if recovery is None:
        return
    if recovery.stage is Stage.COLLECTING:
        if not recovery.draining and all(member_id in recovery.holders for member_id in group.members.present):
            _previous(group, recovery, now, effects)
        return
    recovery.progress(now)
    for source, (key, index) in recovery.ask(_MAX_ASKED):
        effects.send(group.members.connections[source], Fetch(recovery.generation, key, index))
    if recovery.asked:
        return
    if recovery.stage is Stage.PREVIOUS:
        _tell(group, recovery, effects)
    elif recovery.stage is Stage.PRESENT:
        _stand(group, recovery, now, effects)


def overdue(group: Group, now: float, effects: Effects) -> None:
    """Evict members that say nothing."""
    recovery = group.recovery
    if recovery is None or recovery.touched + group.order.round_timeout > now:
        return
    recovery.progress(now)
    slow = [member_id for member_id in group.members.present if member_id not in recovery.holders]
    for member_id in slow or sorted(
        {source for place, (source, _) in recovery.asked.items() if place not in recovery.came}
    ):
        effects.report(
            left_out(group, member_id, f"it did not say within {group.order.round_timeout:g} s what it holds")
        )


# ── stages ────────────────────────────────────────────────────────────────────────────────────────────


def _previous(group: Group, recovery: Recovery, now: float, effects: Effects) -> None:
    holders = recovery.holders
    present = _present_round(group, recovery)
    recovery.find_round(present)
    group.stragglers.begin_again()  # control says what holds of that when this round is known to it
    ahead = [member_id for member_id, holder in holders.items() if holder.round > present]
    if ahead:
        _leave_out(
            group,
            {member_id: f"it is in round {holders[member_id].round}, not in {present}" for member_id in ahead},
            effects,
        )
        return
    most = _MOST_LATE if group.order.lateness is not None else 1
    late = [member_id for member_id, holder in holders.items() if holder.round < present - most]
    if late:
        _leave_out(
            group, {member_id: f"it is in round {holders[member_id].round} of {present}" for member_id in late}, effects
        )
        return
    wanted: list[Wanted] = []
    for number in range(max(group.planned, min(holder.round for holder in holders.values())), present):
        behind = [member_id for member_id, holder in holders.items() if holder.round <= number]
        for place in places(group, number, holders.values()):
            lacking = tuple(member_id for member_id in behind if not holders[member_id].has(State.HELD, place))
            holding = latest(holders, place)
            if lacking and not holding:
                _leave_out(group, dict.fromkeys(lacking, f"no member has round {number} for it any more"), effects)
                return
            if lacking:
                wanted.append(Wanted(place, lacking, holding))
    recovery.enter(Stage.PREVIOUS)
    recovery.want(wanted)
    advance(group, now, effects)


def _leave_out(group: Group, why: Mapping[int, str], effects: Effects) -> None:
    for member_id, what in why.items():
        effects.report(left_out(group, member_id, what))


def _present_round(group: Group, recovery: Recovery) -> int:
    """Return the round that the group is in: the latest, if members have yet to hear that the one before is over.

    Where the ledger may be behind them, it is the one that most are in; among equals the nearest to what is on record.
    Where members can be late, it is the latest that is on record, or that a quorum has come to.
    """
    rounds = Counter(holder.round for holder in recovery.holders.values())
    if recovery.latest == recovery.due:
        return max(rounds)
    if (lateness := group.order.lateness) is not None:
        needed = lateness.needed(len(recovery.holders))
        known = [n for n in rounds if n <= recovery.due or rounds[n] + rounds[n - 1] >= needed]
        return max(known or [min(rounds)])
    return max(rounds, key=lambda number: (rounds[number] + rounds[number - 1], -abs(number - recovery.due), number))


def _tell(group: Group, recovery: Recovery, effects: Effects) -> None:
    behind = tuple(member_id for member_id, holder in recovery.holders.items() if holder.round < recovery.round)
    recovery.enter(Stage.TOLD)
    effects.report(CaughtUp(group.order.group, recovery.round, behind))


def _present(group: Group, recovery: Recovery, now: float, effects: Effects) -> None:
    holders = recovery.holders
    recovery.enter(Stage.PRESENT)
    wanted: list[Wanted] = []
    for place in places(group, recovery.round, holders.values()):
        holding = latest(holders, place)
        lacking = tuple(member_id for member_id in holders if not holders[member_id].has(State.HELD, place))
        if holding and lacking:
            wanted.append(Wanted(place, lacking, holding))
    lost: set[ExchangeKey] = set()
    for place in sorted({p for holder in holders.values() for p in holder.loose()}):
        lacking = tuple(member_id for member_id, holder in holders.items() if holder.has(State.LACKING, place))
        holding = latest(holders, place)
        failed = any(holder.has_failed(place[0]) for holder in holders.values())
        sizes = {holders[member_id].sizes.get(place, 0) for member_id in (*lacking, *holding)} - {0}
        if len(sizes) > 1:  # not all of them speak the truth: no member is given what another one makes up
            lost.add(place[0])
        elif holding and not failed:
            wanted.append(Wanted(place, lacking, holding))
        elif failed or any(holder.has_ended(*place) for holder in holders.values()):
            lost.add(place[0])
    recovery.want(wanted)
    for key in sorted(lost):  # the members that could take part in it are not there any more
        error = _why_not(group, recovery, key)
        for member_id in recovery.give_up(key):
            say_failed(group, member_id, key, error, effects)
    advance(group, now, effects)


def _why_not(group: Group, recovery: Recovery, key: ExchangeKey) -> GradServerError:
    """Return why ``key`` fails: it is called again by all members, or by none."""
    holders = recovery.holders.values()
    ended = any(holder.has_ended(key) or key in holder.slices[State.FAILED] for holder in holders)
    if not ended and any(key in holder.slices[State.CHANGED] for holder in holders):
        return changed(group, key)
    return ConnectionLostError(
        f"{group.describe(key)} was under way when the connection to the coordinator broke, and not every worker "
        f"can take part in it once more"
    )


def _stand(group: Group, recovery: Recovery, now: float, effects: Effects) -> None:
    """Go on: each member has what any member has."""
    holders, number = recovery.holders, recovery.round
    group.resume(number)
    group.listeners.begin(group.learners.early(group.members.present, number), number)
    group.stragglers.completed(number - 1)
    done: list[int] = []
    found: dict[int, frozenset[int]] = {}
    for part, start, stop in shares(group):
        key = ExchangeKey(BUCKET, number, part)
        settled = frozenset(next(iter(holders.values())).slices[State.HELD].get(key, ())).intersection(
            range(start, stop)
        )
        if settled:
            found[part] = settled
        if len(settled) == stop - start:
            done.append(part)
            for member_id in holders:
                group.sequences.pass_over(member_id, key)
        elif settled:
            group.exchanges.settle(key, settled)
    for holder in holders.values():
        for key in holder.slices[State.LACKING]:
            if loose := frozenset[int]().union(*(one.answered(key) for one in holders.values())):
                group.exchanges.settle(key, loose)
    failed = {key for holder in holders.values() for state in FAILED for key in holder.slices[state]}
    group.exchanges.recall({key: _why_not(group, recovery, key) for key in failed})
    effects.report(Recovered(group.order.group, number, bool(found)))
    for member_id in holders:
        effects.send(group.members.connections[member_id], Standing(recovery.generation, number))
    if found:
        assert group.plan is not None
        section = group.plan.section_of(next(iter(found))).number
        current = adopt(number, section, found, holders, now)
        group.rounds.begin(number, current)
        current.take_done(done, min(holders))
        if group.order.lateness is not None:
            _close_again(group, number, current)
        if done and len(done) == group.full_buckets[section]:
            group.rounds.end(number)
            group.stragglers.completed(number)
            record = current.record(number, group.world, group.plan, now)
            effects.report(RoundCompleted(group.order.group, record, adopted=True))
    end_abandoned(group, now, effects)
    commits.recovered(group, effects)


def _close_again(group: Group, number: int, current: Round) -> None:
    """Note what members have given to round ``number``, some slices of which are settled, and which give no more."""
    key = ExchangeKey(BUCKET, number, 0)
    for member_id in group.participants(key):
        if group.stragglers.is_closed(member_id, key):
            note_what_counted(group, number, current, member_id)
        for _ in current.done:
            current.contributed(member_id, group.full_buckets[current.section])
