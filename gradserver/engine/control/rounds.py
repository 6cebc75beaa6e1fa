"""The end of a round: when it is over, when the group pauses instead, and which membership is in force behind it.

    the membership                                          a round is over for members
    ──────────────────────────────────────────────────────  ───────────────────────────────────────────────────────────
    is steady, and the group is not durable                 with the last results of all data halves; control is told
    else, with MIN members or more                          at RoundDone, when all halves have reported it
    else, with fewer                                        at RoundDone, when enough have come: the group is paused
    … and `--rejoin-for` seconds have passed                not at all: DeadlineError, and the group ends

`gradserver.engine.control.machine` has the rules and the timer that say so. A member's rank, world size and epoch
change at RoundDone, or when a collective fails because of a departure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gradserver.engine.control import audits, donations, journal, learners, leases, slow, turns
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.rounds import Complete
from gradserver.engine.effects import Effects
from gradserver.engine.ends import MAX_CUTS
from gradserver.engine.orders import CutRound
from gradserver.engine.records import RoundRecord
from gradserver.engine.reports import Late
from gradserver.protocol.errors import LeftOutError
from gradserver.protocol.exchange import ExchangeKey, Op, Stream
from gradserver.protocol.limits import KEPT_BYTES, KEPT_ROUNDS, MIB, MIN_SLICE_COST, SLICE_BYTES, TOLD_BYTES
from gradserver.protocol.messages import RoundDone
from gradserver.protocol.offers import pack_offers


def is_settled(group: Group) -> bool:
    """Tell whether, of the first round that is complete, each member that counted has said what it used."""
    record = group.rounds.unsettled[0].record
    counted = [member_id for member_id in group.contributors if record.weights[member_id] > 0] if group.shards else ()
    return not group.leases.positions.awaits(record.round, counted)


def settle(group: Group, effects: Effects) -> None:
    """Commit what was used in the first round that `is_settled`, and write it down."""
    _over(group, group.rounds.next_settled(), effects)


def settle_all(group: Group, effects: Effects) -> None:
    """Settle all rounds that can be, in their order."""
    while group.rounds.unsettled and is_settled(group):
        settle(group, effects)


def _over(group: Group, complete: Complete, effects: Effects) -> None:
    record = complete.record
    idle = _without_means(group, record)
    weights = {member_id: weight for member_id, weight in enumerate(record.weights) if member_id not in idle}
    late = group.rounds.late.get(record.round, ())
    used_up = group.leases.positions.commit(record.round, group.contributors, weights, _partly(group, record), late)
    if complete.adopted and _is_written(group, record):
        _hold(group, record, True, effects)
        return
    compared = group.leases.audits.settle(record, used_up, group.policy.audit, group.plans.plan)
    record = turns.timed(group, audits.settled(record, compared))
    again = group.rounds.told[0] >= record.round
    journal.completed(group, record, used_up, effects)
    slow.look(group, record.completed, effects)
    if group.rounds.empty.note(record):
        effects.log(_why_empty(group), warning=True)
    if complete.told:
        group.rounds.end(record.round)
        _begin_next(group, record, effects)
    else:
        _hold(group, record, again, effects)


def _hold(group: Group, record: RoundRecord, again: bool, effects: Effects) -> None:
    """The round is complete, and is over for members when all shards know which of them take part in the next one."""
    group.rounds.hold(record, again)
    _begin_next(group, record, effects)


def _begin_next(group: Group, record: RoundRecord, effects: Effects) -> None:
    group.rounds.begin(record.round + 1)
    turns.over(group)
    leases.answer_what_waited(group, effects)


def _is_written(group: Group, record: RoundRecord) -> bool:
    """Tell whether the members counted that are written down. Not if results were made again without one of them."""
    last = group.rounds.ledger[-1] if group.rounds.ledger else None
    if last is None or last.round != record.round:
        return False
    weights = {member_id: weight for member_id, weight in enumerate(record.weights) if weight}
    before = {member_id: weight for member_id, weight in enumerate(last.weights) if weight}
    return weights == before and _partly(group, record) == _partly(group, last)


def _partly(group: Group, record: RoundRecord) -> dict[int, set[tuple[int, int]]]:
    """Return members that gave some slices of the round only: of which buckets how many."""
    if not record.cut or group.plans.plan is None:
        return {}
    given: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for member_id, part, slices in record.cut:
        given[member_id].add((part, slices))
    section = group.plans.plan.section(record.section)
    keys = (ExchangeKey(Stream.BUCKET, record.round, part) for part in (section.parts if section is not None else ()))
    shares = (group.shards.table.share(key, group.plans.plan.buckets[key.part].operation) for key in keys)
    whole = sum(share.layout.count for share in shares)
    return {member_id: found for member_id, found in given.items() if sum(slices for _, slices in found) < whole}


def _without_means(group: Group, record: RoundRecord) -> set[int]:
    """Return departed members of which something else than means counted only. Samples are in means.

    Local SGD exchanges a word before the means. These can be lost with a shard, and that kept by a member.
    """
    plan = group.plans.plan
    section = plan.section(record.section) if plan is not None and record.cut else None
    if plan is None or section is None:
        return set()
    means = {part for part in section.parts if plan.buckets[part].operation.op is Op.MEAN}
    gave = {member_id for member_id, part, slices in record.cut if slices and part in means}
    return {member_id for member_id, _, _ in record.cut if means} - gave


def tell_applied(group: Group, incarnation: int, effects: Effects) -> None:
    """Tell members and learners of the first change that all shards go by.

    A member that goes by an epoch may thus say so to any shard.
    """
    change = group.configuration.next_change()
    if (news := change.news) is not None:  # a member that has joined since then was not in that membership
        payloads = pack_offers(news.offers)
        for member_id, member in group.members.by_id.items():
            if member_id in news.member_ids:
                effects.announce(member.connection, news, payloads)
    learners.welcome(group, change.member_id, incarnation, effects)


def is_at_boundary(group: Group) -> bool:
    """Tell whether a round is complete, and all shards know which members are there."""
    return group.rounds.held is not None and not group.configuration.changes


def has_enough(group: Group) -> bool:
    """Tell whether the round at a boundary can end: enough workers take part in the next one, or the group is broken.

    Members of a broken group hear of it in what they exchange next.
    """
    return group.broken is not None or not group.lacks_workers


def is_steady(group: Group) -> bool:
    """Tell whether a round can end with its last results: nothing is to be decided, or written down before it is told.

    With several data shards it ends with the last results of each. All members get the same results, so they agree.
    """
    return not (group.is_durable or group.learners.by_id)


def can_expect(group: Group, now: float) -> bool:
    """Tell whether learners are to take part in the next round, or to get the state in it.

    Not if a member may have begun that round without them. It heard that the round before is over; then results were
    lost, and that round was done again.
    """
    if group.rounds.held_again and not group.lacks_workers:
        return False
    return bool(learners.caught_up(group) or donations.due(group, now))


def expect(group: Group, now: float, effects: Effects) -> None:
    """Have learners take part in the next round, or get the state in it."""
    assert group.rounds.held is not None
    learners.expect(group, group.rounds.held, now, effects)


def pause(group: Group, effects: Effects) -> None:
    """Hold the end of a round back, as too few workers are left for the next one."""
    assert group.rounds.held is not None
    group.rounds.pause(group.rounds.held.completed)
    effects.log(
        f"waiting for workers: group {group.name!r} has {group.next_count}, at least {group.policy.minimum} "
        f"are needed to go on; it waits {group.policy.patience(group.timeout):g} s",
        warning=True,
    )


def end_round(group: Group, now: float, effects: Effects) -> None:
    """Tell all members that a round is over, with the membership of the next one."""
    record = group.rounds.held
    assert record is not None
    group.rounds.end(record.round)
    journal.boundary(group, record.round, effects)
    group.members.forget_news(group.members.epoch if group.policy.lateness is None else group.rounds.ends.earliest)
    learners.enter(group, record.round + 1, effects)
    done = RoundDone(record.round, group.members.epoch, learners.transfers(group, record.round + 1))
    learners.deliver(group, done.transfers, now, effects)
    for member in group.members.by_id.values():
        effects.send(member.connection, done)
    for learner in group.learners.hearing:
        learner.hear_boundary(record.completed)
        effects.send(learner.connection, done)
    if is_steady(group):
        group.configure(effects, steady=True)


def cut(group: Group, number: int, member_ids: Sequence[int], effects: Effects) -> None:
    """Tell all halves that a round is closed without these members."""
    turn = group.turns.rounds.get(number)
    known = -1 if turn is None or turn.opens is None else turn.opens.section
    section = group.requests.sections.get(number, known)
    group.order(CutRound(group.name, number, tuple(member_ids), section), effects)


def close_round(group: Group, late: Late, effects: Effects) -> None:
    """Close a round without members that are late, as many as the policy lets go."""
    there = {*group.contributors}
    slow = [member_id for member_id in late.member_ids if member_id in there]
    if late.round != group.rounds.number or not slow or learners.awaits_state(group, late.member_ids):
        return
    lateness = group.policy.lateness
    if lateness is None:
        text = f"round {late.round} of group {group.name!r} waits for {group.calls(slow)} {late.why}"
        effects.log(text, warning=True)
        return
    gone = group.rounds.late.get(late.round, set())
    count = group.next_count
    spared = count - lateness.needed(count) - len(gone & there)
    slow = [member_id for member_id in slow if member_id not in gone]
    full = [member_id for member_id in slow if _has_no_room(group, member_id, late.round)]
    if full and late.tell:
        effects.log(_why_it_waits(group, full, late), warning=True)
    slow = [member_id for member_id in slow if member_id not in full][: max(spared, 0)]
    if not slow or _has_the_last_samples(group, slow, late, effects):
        return
    group.rounds.close_without(late.round, slow)
    text = f"round {late.round} of group {group.name!r} closed without {group.calls(slow)} {late.why}"
    text += _what_is_dropped(group, slow, late.round)
    journal.cut(group, late.round, slow, text, effects)
    if late.tell:
        effects.log(text, warning=True)
    cut(group, late.round, slow, effects)


def _what_is_dropped(group: Group, slow: Sequence[int], number: int) -> str:
    """Say of which late members all is dropped that they keep, as it is too old."""
    lateness = group.policy.lateness
    assert lateness is not None
    if not lateness.keeps or lateness.staleness is None:
        return ""
    rounds = lateness.staleness + 1
    dropped = [one for one in slow if (group.rounds.late_in_a_row(one, number) + 1) % rounds == 0]
    if not dropped:
        return ""
    return f"; {group.calls(dropped)} drops what came too late in the last {rounds} rounds (--staleness)"


def _has_the_last_samples(group: Group, slow: Sequence[int], late: Late, effects: Effects) -> bool:
    """Tell whether a round waits for late members, as no other member has any sample left to give.

    Closed without them, this round and the next ones would be of nothing.
    """
    which = leases.the_last(group, [*slow, *group.rounds.late.get(late.round, ())])
    if which and late.tell:
        text = f"round {late.round} of group {group.name!r} waits for {group.calls(slow)} {late.why}"
        effects.log(f"{text}. No other worker has samples of {which}", warning=True)
    return bool(which)


def _why_empty(group: Group) -> str:
    """Say that rounds have no update, and what they wait for."""
    empty, held = group.rounds.empty, leases.held(group)
    what = f"group {group.name!r} has made {empty.rounds} rounds in {empty.seconds:.1f} s without an update, as no "
    if not held:
        return f"{what}worker has given a gradient (each gave weight 0)"
    return f"{what}worker has given a gradient, and an epoch is not used up: {held}"


def _has_no_room(group: Group, member_id: int, number: int) -> bool:
    """Tell whether a late member might leave too much unread, if round ``number`` were closed without it as well.

    The member would be evicted, and a group that needs all its members would end. An elastic group goes on without it.
    """
    if group.plans.plan is None or not group.policy.needs_all:
        return False
    rounds = group.rounds.late_in_a_row(member_id, number) + 1
    return rounds > MAX_CUTS or overruns(group, rounds)


def overruns(group: Group, rounds: int, nbytes: int | None = None) -> bool:
    """Tell whether the results of so many rounds might be more than a member may leave unread, or has room for.

    They are of ``nbytes``, or None if each is of the whole plan.
    """
    plan = group.plans.plan
    if plan is None:
        return False
    nbytes = rounds * plan.nbytes if nbytes is None else nbytes
    slices = rounds * len(plan.buckets) * len(group.shards.all) + nbytes // SLICE_BYTES
    backlog, kept = group.policy.backlog, KEPT_BYTES
    if group.policy.mode.grants:
        backlog, kept = (max(one, KEPT_ROUNDS * plan.nbytes) for one in (backlog, kept))
    return nbytes + slices * MIN_SLICE_COST > min(backlog, kept) - TOLD_BYTES


def _why_it_waits(group: Group, member_ids: list[int], late: Late) -> str:
    """Say that a round waits for late members, and why."""
    size = group.policy.backlog / MIB
    return (
        f"round {late.round} of group {group.name!r} waits for {group.calls(member_ids)} {late.why}. The group needs "
        f"all its workers (--workers {group.policy}), and a late one could leave more than {size:g} MiB of results "
        f"unread (--backlog), if more rounds were closed without it"
    )


def behind(group: Group, member_id: int, number: int) -> LeftOutError:
    """Return what a member is told that has left too much unread."""
    size = group.policy.backlog / MIB
    what = f"more than {size:g} MiB of results, of rounds that closed without it, wait to be read (--backlog)"
    return group.members.identities.left_out(member_id, f"group {group.name!r} in round {number}: {what}")
