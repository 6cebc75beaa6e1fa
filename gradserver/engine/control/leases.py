"""Leases in control: what members ask of `gradserver.engine.lease_table`, and what a round uses up.

event                                          what happens
─────────────────────────────────────────────  ──────────────────────────────────────────────────────────────
Register, Claim: rounds before it are over     Located, Claimed; what was handed out is written down first
… they are not                                 it waits until they are
… of other data than the others'               Failure, of scope DATA
Claim that returns samples                     they are for the others, which is written down
Used                                           noted, and written down, if the group may survive its coordinator
a round is complete at all shards              it is over: what was used in it is committed, and written down
… and Used of a member that counted is on its  it is over when that has come, or its sender is gone
  way, as it came by shards elsewhere
a member departs                               what it held is for the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradserver.engine.control import journal
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.leases import Question
from gradserver.engine.control.names import check_name
from gradserver.engine.control.quota import counted_ranges, used_ranges
from gradserver.engine.data_records import Claim as HandedOut, Order, Used as InContribution
from gradserver.engine.effects import Effects
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    DisagreementError,
    LimitExceededError,
    MalformedMessageError,
    OutOfStepError,
    QuotaExceededError,
    UnexpectedMessageError,
)
from gradserver.protocol.limits import MAX_DATA, MAX_NAME_BYTES
from gradserver.protocol.messages import Failure, Scope
from gradserver.protocol.messages.leases import Claim, Claimed, Located, Register, Used
from gradserver.protocol.ranges import Ranges, count, pack, unpack


def receive(
    group: Group, member_id: int, message: Question | Used, payloads: Sequence[Buffer], effects: Effects
) -> None:
    """Take a message about data."""
    ranges = unpack(payloads[0]) if payloads else ()
    # what is asked of data may be of the next round, if the present one was pushed
    group.check_round(message.round - (not isinstance(message, Used)), type(message).__name__)
    if isinstance(message, Used):
        _check_quota(group, member_id, message, used_ranges(ranges))
        said = InContribution(group.name, message.name, member_id, message.round, message.epoch, ranges)
        is_new = group.leases.positions.used(
            message.name, message.epoch, member_id, message.round, ranges, group.rounds.number
        )
        journal.used(group, said, is_new, effects)
        return
    if group.leases.asked.get((message.name, member_id)) == (message, ranges):
        return  # the same again, on a new connection
    _check(group, member_id, message, ranges)
    if message.round > group.rounds.number:
        group.leases.ask_later(member_id, message, ranges)
    else:
        _answer(group, member_id, message, ranges, effects)


def _check(group: Group, member_id: int, message: Question, ranges: Ranges) -> None:
    """Refuse what no correct client asks."""
    check_name("the data's name", message.name, MAX_NAME_BYTES)
    if (message.name, member_id) in group.leases.asked:
        raise UnexpectedMessageError(
            f"{group.call(member_id)} asks of data {message.name!r} before it has its last answer"
        )
    if sum(asker == member_id for _, asker in group.leases.asked) >= MAX_DATA:
        raise LimitExceededError(f"{group.call(member_id)} asks of more than {MAX_DATA} kinds of data at once")
    if isinstance(message, Claim):
        group.leases.positions.use(message.name)
        if group.plans.plan is None:
            raise UnexpectedMessageError(
                f"{group.call(member_id)} claims data {message.name!r} in a group without a plan"
            )
    elif ranges and ranges[-1][1] > message.length:
        raise MalformedMessageError(f"used ranges of data {message.name!r} that has {message.length} samples")


def _answer(group: Group, member_id: int, message: Question, ranges: Ranges, effects: Effects) -> None:
    connection = group.connection_of(member_id)
    try:
        if isinstance(message, Register):
            located, used = _register(group, member_id, message, ranges, effects)
            effects.send(connection, located, (pack(used),))
        else:
            claimed, got = _claim(group, member_id, message, ranges, effects)
            effects.send(connection, claimed, (pack(got),))
    except (DisagreementError, OutOfStepError, LimitExceededError, QuotaExceededError) as error:
        failure = Failure.of(error, Scope.DATA)
        effects.send(connection, replace(failure, fields={**failure.fields, "data": message.name}))


def _register(
    group: Group, member_id: int, message: Register, done: Ranges, effects: Effects
) -> tuple[Located, Ranges]:
    new = message.name not in group.leases.positions.uses
    order = Order(message.length, message.seed, message.shuffle)
    if new:
        _check_quota(group, member_id, message, counted_ranges(len(done) + 1))
    use = group.leases.positions.register(message.name, order, message.epoch, done, group.call(member_id))
    if new:
        journal.registered(group, use, effects)
    return Located(use.name, use.epoch, group.policy.audit.share), use.done


def _claim(group: Group, member_id: int, message: Claim, returned: Ranges, effects: Effects) -> tuple[Claimed, Ranges]:
    use = group.leases.positions.use(message.name)
    epoch = use.epoch
    if (repeat := group.leases.audits.repeat(member_id, message)) is not None:
        group.leases.positions.begin_use(use.name, member_id, message.round)
        return Claimed(use.name, message.number, message.epoch, False, repeat.holder), repeat.ranges
    again = use.is_answered(member_id, message.number)
    _check_quota(
        group,
        member_id,
        message,
        counted_ranges(use.claimable(member_id, message.number, message.count)) + used_ranges(returned),
        bool(returned) and not again,
    )
    number, found, ranges = use.claim(member_id, message.number, message.epoch, message.count, returned)
    if message.count:
        group.leases.positions.begin_use(use.name, member_id, message.round)
    if returned and not again:
        journal.registered(group, use, effects)
    elif ranges or use.epoch != epoch:
        journal.claimed(group, HandedOut(group.name, use.name, member_id, number, found, ranges), effects)
    if message.audit and ranges:
        present, policy = group.members.by_id, group.policy
        group.leases.audits.hold(member_id, message, ranges, policy.audit, use.order.seed, present, policy.mean)
    is_before = found < use.epoch
    behind = use.finished and not is_before and message.round < group.rounds.number
    return Claimed(use.name, number, found, is_before or use.finished, behind=behind), ranges


def _check_quota(group: Group, member_id: int, message: Question | Used, nbytes: int, returns: bool = False) -> None:
    """QuotaExceededError if the group's journal quota is used up, and ``message`` would have more written than is free.

    If it ``returns`` samples, all that is known of the data is written.
    """
    if not group.account.is_used_up:
        return
    use = group.leases.positions.uses.get(message.name)
    if returns and use is not None:
        nbytes += counted_ranges(use.pieces, 1 + len(use.answers))
    if nbytes:
        group.account.check(
            f"a {type(message).__name__} of many ranges of data {message.name!r} by {group.call(member_id)}"
        )


def departed(group: Group, member_id: int) -> None:
    """``member_id`` is vacant."""
    group.leases.depart(member_id)


def held(group: Group) -> str:
    """Say of all data that members hold how many samples of it are left, and how many each member holds."""
    found = [use for use in group.leases.positions.uses.values() if use.held or use.used]
    return "; ".join(
        f"of data {use.name!r}, epoch {use.epoch}, {count(use.left)} samples are left, and there are "
        + ", ".join(f"{count(ranges)} at {group.call(one)}" for one, ranges in sorted(use.held.items()))
        for use in found
    )


def the_last(group: Group, member_ids: Sequence[int]) -> str:
    """Name the data of which these members have the last samples, if no other member has any; else nothing."""
    found = group.leases.positions.have_all(member_ids)
    return " and ".join(f"epoch {use.epoch} of data {use.name!r}" for use in found)


def answer_what_waited(group: Group, effects: Effects) -> None:
    """Answer what was asked of rounds that had yet to be over, and are."""
    for member_id, question, ranges in group.leases.due(group.rounds.number):
        _answer(group, member_id, question, ranges, effects)
