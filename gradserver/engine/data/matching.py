"""Match pushes with exchanges: find or open the exchange of a push, and check that this slice is due.

An error that is raised is a violation of the sender: no correct worker says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradserver.engine.commands import make
from gradserver.engine.data import commits
from gradserver.engine.data.errors import abandoned, mismatch
from gradserver.engine.data.exchange import WEIGHED, Exchange, Run
from gradserver.engine.data.failures import fail, forget_if_over, say_failed, tell
from gradserver.engine.data.group import Group
from gradserver.engine.data.membership import changed, is_outdated, outdated
from gradserver.engine.data.rounds import Round
from gradserver.engine.data.sequences import NUMBERS, place_of, sequence_of
from gradserver.engine.effects import Effects
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import (
    InvalidArgumentError,
    InvalidRankError,
    LimitExceededError,
    OutOfStepError,
    SizeMismatchError,
    UnexpectedMessageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import (
    BUCKET,
    COLLECTIVE,
    FRAMING,
    IN_PLACE,
    ROOTED,
    TRANSFER,
    ExchangeKey,
    Kind,
    Op,
    Operation,
    check_reducible,
    gives,
    is_state,
)
from gradserver.protocol.limits import MAX_TRANSFERS
from gradserver.protocol.messages import Push

_TRANSFER: Final = Kind.TRANSFER
_COMMIT: Final = Kind.COMMIT
_UNREDUCED: Final = frozenset({Op.NONE, Op.FRAMED})


def admitted(group: Group, member_id: int, push: Push, now: float, effects: Effects) -> Exchange | None:
    """Return the exchange that ``push`` is for, opened if need be; None if there is nothing more to do."""
    key = push.key
    exchange = group.exchanges.get(key)
    if group.stragglers.is_closed(member_id, key):
        _refuse_late(group, member_id, key, effects)
        return None
    begins = group.begins(push) if group.table.rates or group.sequences.restarted else push.slice == 0
    if begins:
        if push.epoch == 0 and commits.is_said_again(group, member_id, push):
            return None
        if group.learners.since:  # what was sent to a learner comes also when that has gone
            if group.learners.is_stale(member_id, push):
                _turn_away(group, exchange, member_id, push, effects)
                return None
            if not group.learners.has_part(member_id, key):
                what = group.describe(key)
                raise OutOfStepError(f"{group.call(member_id)} has no part in {what}: it was not a member then")
        for earlier in _take_number(group, member_id, key):
            fail(group, earlier, abandoned(group, earlier, member_id, key), effects)
        operation = _operation(group, member_id, push)
        if operation.kind is _COMMIT and (exchange is None or exchange.failure is None):
            if why := commits.why_void(group, member_id, key, push.epoch):
                commits.void(group, key, why, effects)
                return None
        elif exchange is None and key.stream == BUCKET and _may_skip(group, key):
            commits.give_way(group, key, effects)
        if exchange is None and (error := group.exchanges.failed_before.get(key)) is not None:
            say_failed(group, member_id, key, error, effects)
            return None
        if exchange is None:
            exchange = open_exchange(group, member_id, key, operation, push.epoch, now)
        elif exchange.failure is None and key.stream == COLLECTIVE and is_outdated(group, key, operation, push.epoch):
            exchange.join(member_id, push.weight)
            fail(group, exchange, changed(group, key, operation), effects)
            return None
        elif exchange.operation is not operation and exchange.operation != operation and exchange.failure is None:
            error = mismatch(group, exchange, member_id, operation)
            exchange.join(member_id, push.weight)
            fail(group, exchange, error, effects)
            return None
        exchange.join(member_id, push.weight)
    elif exchange is None:
        to_learner = is_state(key) or (group.learners.since and key.stream == TRANSFER)
        if to_learner or group.sequences.is_past(member_id, key):
            return None  # the tail of an exchange that failed meanwhile, or of one that never began
        raise UnexpectedMessageError(f"slice {push.slice} of an exchange that did not begin with its first slice")
    elif member_id not in exchange.weights and is_state(key):
        return None  # its learner began it before it was lost: the first slice was turned away
    if exchange.failure is not None:
        if begins:
            tell(group, exchange, member_id, effects)
            forget_if_over(group, exchange)
        return None
    return exchange


def _take_number(group: Group, member_id: int, key: ExchangeKey) -> list[Exchange]:
    """Begin ``key``, and return open exchanges before it that ``member_id`` will never contribute to.

    Numbers of a sequence come without gaps; that is how members' exchanges are matched. Of several shards not every one
    has to do with every collective or transfer, so that at each of them there are gaps. After a recovery there are gaps
    where a member has the whole result of one, and not of the one before. But a member that has begun a later one
    contributes nothing more to an earlier one, because it failed elsewhere.
    """
    sequences, sequence, place = group.sequences, sequence_of(member_id, key), place_of(key)
    before = sequences.due.get(sequence)
    due = _first_due(group, member_id, key) if before is None else before
    if key.stream == BUCKET and member_id in group.stragglers.closed:
        due = max(due, group.stragglers.closed[member_id] + 1)
    may_lack_some = key.stream != BUCKET and (sequences.restarted or bool(group.table.rates))
    if place != due and not (place > due and (may_lack_some or _may_skip(group, key))):
        what = "round" if key.stream == BUCKET else "number"
        number = due % NUMBERS if key.stream == COLLECTIVE else due
        raise OutOfStepError(
            f"{group.describe(key)} from {group.call(member_id)}: {what} {number} is due, {key.number} came"
        )
    sequences.advance(sequence, place)
    if not may_lack_some:
        return []
    return _abandoned(group, member_id, key, due if before is not None or not sequences.restarted else 0)


def _may_skip(group: Group, key: ExchangeKey) -> bool:
    """Tell whether numbers before ``key`` may be of no exchange, at any shard."""
    if key.stream == BUCKET:
        return group.plan is not None and group.plan.is_shared
    return key.stream == COLLECTIVE and key.number == 0


def _first_due(group: Group, member_id: int, key: ExchangeKey) -> int:
    sequences = group.sequences
    if key.stream == TRANSFER and sequences.begin_transfers(member_id) > MAX_TRANSFERS:
        raise LimitExceededError(
            f"{group.call(member_id)} has used {MAX_TRANSFERS} different pairs of peer and tag: use old ones again"
        )
    if key.stream == BUCKET:
        return max(sequences.first_round, group.learners.first_rounds.get(member_id, 0))
    return place_of(key) if sequences.restarted else 0


def _abandoned(group: Group, member_id: int, key: ExchangeKey, due: int) -> list[Exchange]:
    """Return open exchanges to which ``member_id`` will never contribute in full, as it has begun ``key``.

    Others may have begun one before ``member_id`` came, which has no part in that.
    """
    last, place = due - 1, place_of(key)
    if key.stream == TRANSFER and place - last <= len(group.exchanges):
        keys = [key._replace(number=number) for number in range(last, place)]
    else:
        sequence = sequence_of(0, key)
        keys = [k for k in group.exchanges if last <= place_of(k) < place and sequence_of(0, k) == sequence]
    found = [group.exchanges.get(earlier) for earlier in keys]
    return [
        exchange
        for exchange in found
        if exchange is not None
        and exchange.failure is None
        and member_id in exchange.participants
        and exchange.pushed.get(member_id, -1) < exchange.stop
    ]


def _turn_away(group: Group, exchange: Exchange | None, member_id: int, push: Push, effects: Effects) -> None:
    """Tell ``member_id`` that its peer has gone, or that it sends or takes a state in vain."""
    what = "the worker that had that rank is gone, and another one has joined"
    if is_state(push.key):
        what = "this state is not waited for any more"
    error = WorkerLostError(f"{group.describe(push.key)}: {what}")
    if exchange is not None and is_state(push.key) and exchange.failure is None:
        exchange.join(member_id, push.weight)
        fail(group, exchange, error, effects)  # its learner has asked for all of it, and is gone
    else:
        say_failed(group, member_id, push.key, error, effects)


def _refuse_late(group: Group, member_id: int, key: ExchangeKey, effects: Effects) -> None:
    """Answer a push for a round that was closed without ``member_id``, which listens to its results, if any."""
    error = group.buckets_halted
    if error is not None:
        say_failed(group, member_id, key, error, effects)


def _operation(group: Group, member_id: int, push: Push) -> Operation:
    key, operation = push.key, push.operation
    if key.stream == BUCKET:
        if group.plan is None or group.plan.is_vacant(key.part):
            raise OutOfStepError(f"bucket {key.part} is in no plan that {group.call(member_id)} agreed on")
        return group.plan.buckets[key.part].operation
    if operation is None:
        raise UnexpectedMessageError("the first slice of a collective must say which one it is")
    if key.stream == TRANSFER and member_id not in (key.source, key.target):
        raise InvalidRankError(f"{group.call(member_id)} cannot take part in {group.describe(key)}")
    return operation


def open_exchange(
    group: Group, member_id: int, key: ExchangeKey, operation: Operation, epoch: int, now: float
) -> Exchange:
    """Open an exchange that ``member_id`` begins, or the one that failed in its place."""
    _check_operation(key, operation, group.world)
    is_bucket = key.stream == BUCKET
    if not is_bucket and (failed := outdated(group, member_id, key, operation, epoch, now)) is not None:
        return failed
    layout, start, stop = group.share(key, operation)
    if start == stop:
        empty = layout.count == 0
        raise UnexpectedMessageError(
            "empty tensors are not exchanged" if empty else f"{group.describe(key, operation)} has no slice here"
        )
    participants: tuple[int, ...] = group.participants(key)
    late: tuple[int, ...] = ()
    if group.stragglers.closed and key.stream == BUCKET:
        late = tuple(member_id for member_id in participants if group.stragglers.is_closed(member_id, key))
        participants = tuple(member_id for member_id in participants if member_id not in late)
    halted = group.buckets_halted if is_bucket else group.halted
    departed = group.members.departed
    failure = halted or next((departed[member_id] for member_id in departed if member_id in participants), None)
    exchange = Exchange(
        key, operation, layout, start, stop, participants, member_id, now, now, start, absent=late, failure=failure
    )
    if failure is not None:  # for the others too, when they come: there is nothing to remember
        return exchange
    if is_bucket and group.rounds and min(group.rounds) < key.number:
        raise OutOfStepError(f"{group.describe(key)} from {group.call(member_id)}: the round before it is not over")
    if (settled := group.exchanges.settled.get(key)) is not None:
        exchange.settle(settled, group.settled_of(key))
    group.exchanges.begin(exchange)
    if key.stream == BUCKET and key.number not in group.rounds:
        section = 0 if group.plan is None else group.plan.section_of(key.part).number
        group.rounds.begin(key.number, Round(now, group.is_hashed(key.number), section))
    if group.next_check is None:  # else an exchange that began earlier is due earlier
        group.check_by(now + group.order.round_timeout)
    return exchange


def checked(group: Group, exchange: Exchange, member_id: int, push: Push, payloads: Sequence[Buffer]) -> Run:
    """Check a contribution against what is due from ``member_id``."""
    layout, operation = exchange.layout, exchange.operation
    payload, target, size = None, None, 0
    if payloads:
        payload, size = payloads[0], len(payloads[0])
        if len(payloads) > 1:
            target, size = payloads[-1], min(size, len(payloads[-1]))
    start, stop = push.slice, push.slice + push.slices
    if (
        start != exchange.pushed.get(member_id, -1)
        or stop > exchange.stop
        or (exchange.settled and exchange.crosses(start, stop))
    ):
        raise OutOfStepError(
            f"{group.describe(exchange.key)} from {group.call(member_id)}: slice {start} came, "
            f"{exchange.pushed.get(member_id, exchange.start)} of {exchange.stop} is due"
        )
    if push.slices > 1 and (operation.kind not in IN_PLACE or (operation.is_lossy and payload is not None)):
        raise OutOfStepError(
            f"{group.named(operation)} from {group.call(member_id)} goes slice by slice, {push.slices} came together"
        )
    has_to_give = gives(operation, member_id, exchange.key)
    expected = layout.run_bytes(start, stop)
    shared = push.place is not None
    if shared:  # there must be room for what is given, and for the result
        is_right = size >= expected * layout.replies and (
            push.present == has_to_give or (has_to_give and operation.kind in WEIGHED)
        )
    elif payload is None:
        is_right = not has_to_give or operation.kind in WEIGHED
    else:
        is_right = has_to_give and (size == expected or (operation.op is Op.FRAMED and size <= expected))
    if not is_right:
        raise SizeMismatchError(
            f"{group.describe(exchange.key)} from {group.call(member_id)}: slice {start} has {size} "
            f"bytes, {expected if has_to_give else 0} were agreed"
        )
    if push.present:
        group.traffic.receive(min(size, expected))
    weight = exchange.weights[member_id]
    if group.order.lateness is not None:  # slices to which something was added weigh more
        weight = push.weight
        exchange.weigh(member_id, weight)
    return make(Run, (start, stop, payload, push.present, shared, target, weight))


def _check_operation(key: ExchangeKey, operation: Operation, world: int) -> None:
    """Refuse an operation that no correct client asks for."""
    transfer = key.stream == TRANSFER
    if not transfer and key != (key.stream, key.number, key.part, -1, -1):
        raise UnexpectedMessageError(f"no exchange has the key {tuple(key)}")
    if transfer != (operation.kind is _TRANSFER):
        raise UnexpectedMessageError(f"{operation} cannot be exchanged under the key {tuple(key)}")
    if operation.kind is _COMMIT and key.stream != BUCKET:
        raise UnexpectedMessageError(f"{operation} ends a round, and is not a collective: no worker calls it")
    if transfer and not (0 <= key.source < world and 0 <= key.target < world and key.source != key.target):
        raise InvalidRankError(f"a transfer from {key.source} to {key.target} in a group of {world}")
    if operation.kind in ROOTED and not 0 <= operation.root < world:
        raise InvalidRankError(f"root {operation.root} is not in a group of {world}")
    if operation.kind in WEIGHED:
        if operation.op in _UNREDUCED:
            raise InvalidArgumentError("a reduction that does not say how to reduce")
        check_reducible(operation.op, operation.dtype)
    elif operation.op is not Op.NONE and (operation.op is not Op.FRAMED or operation.kind not in FRAMING):
        raise InvalidArgumentError(f"{operation} is not an operation: {operation.kind.name.lower()} reduces nothing")
    elif operation.op is Op.FRAMED:
        check_reducible(operation.op, operation.dtype)
