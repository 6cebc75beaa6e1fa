"""Inventories: what members of a durable group say that they hold, and the record of the open round that follows.

Each result of a bucket names the weights of the members that counted, and members keep that with it
(`gradserver.protocol.messages.recovery`). Some of these members may have departed, or be unknown to a coordinator that
was started anew; the round's record has them, too. Results come in the order of slices, so what is settled of a bucket
is a prefix of it. So is what a departed member counted for: the number of slices says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from gradserver.engine.data.group import Group
from gradserver.engine.data.recovery_state import Holder, Place
from gradserver.engine.data.rounds import Round
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import LimitExceededError, UnexpectedMessageError
from gradserver.protocol.exchange import BUCKET, TRANSFER, ExchangeKey
from gradserver.protocol.limits import MAX_SLICES, MAX_WORLD_SIZE
from gradserver.protocol.messages.recovery import Holding, State, unpack_spans

_MAX_LOOSE: Final = 256 * MAX_SLICES
"""Slices of collectives and transfers that one member can speak of."""
_OF_BUCKETS: Final = (State.HELD, State.ELSEWHERE)
_MAX_BEFORE: Final = 256 * MAX_SLICES
"""Slices of buckets, of rounds before its own, that one member can speak of."""


def said(group: Group, member_id: int, holding: Holding, payload: Buffer) -> Holder:
    """Check a Holding against the plan, and return what it says."""
    number, loose, before = holding.round, 0, 0
    holder = Holder(number, holding.weight)
    own = 0 if group.recovery is None else group.recovery.own
    bounds = {part: (start, stop) for part, start, stop in shares(group)}
    earliest, latest = number - 1, number
    if group.order.lateness is not None and group.recovery is not None:  # others may be rounds behind, or ahead
        earliest, latest = 0, group.recovery.latest
    for state, key, first, stop, weights, nbytes, made in unpack_spans(payload):
        if key.stream == BUCKET:
            if key.number < group.planned or not earliest <= key.number <= latest:
                continue  # of another plan, or a round that no member lacks
            start, end = bounds.get(key.part, (0, 0))
            if state is State.ELSEWHERE:
                start, end = 0, int(group.plan is not None and not group.plan.is_vacant(key.part))
            right = state in _OF_BUCKETS and start <= first and stop <= end and key[3:] == (-1, -1)
            before += stop - first if key.number < number - 1 else 0
        else:
            loose += stop - first
            right = member_id in key[3:] if key.stream == TRANSFER else key[3:] == (-1, -1)
            right = right and state is not State.ELSEWHERE
        if before > _MAX_BEFORE:
            raise LimitExceededError(
                f"{group.call(member_id)} speaks of more than {_MAX_BEFORE} slices of earlier rounds"
            )
        if loose > _MAX_LOOSE:
            raise LimitExceededError(f"{group.call(member_id)} speaks of more than {_MAX_LOOSE} slices of collectives")
        if not right:
            raise UnexpectedMessageError(
                f"{group.call(member_id)}, in round {number}, cannot have slices {first} to {stop} of {tuple(key)}"
            )
        most = group.world if key.number >= own else MAX_WORLD_SIZE  # before, some may be known to members only
        if len(weights) > most:
            raise UnexpectedMessageError(
                f"{group.call(member_id)} has weights of {len(weights)} member ids, and {most} there are"
            )
        said = weights if key.number >= number else ()
        holder.say(state, key, range(first, stop), said, nbytes, made)
    return holder


def shares(group: Group) -> Iterator[tuple[int, int, int]]:
    """Yield each bucket that this shard has to do with, and which slices of it."""
    for part, bucket in enumerate(group.plan.buckets if group.plan is not None else ()):
        _, start, stop = group.share(ExchangeKey(BUCKET, 0, part), bucket.operation)
        if start < stop:
            yield part, start, stop


def places(group: Group, number: int, holders: Collection[Holder]) -> Iterable[Place]:
    """Yield all slices of a round: of the section of which a member holds something at any shard, or else of all."""
    some = next((part for one in holders if (part := one.bucket_of(number)) is not None), None)
    parts = None if some is None or group.plan is None else group.plan.section_of(some).parts
    for part, start, stop in shares(group):
        if parts is None or part in parts:
            key = ExchangeKey(BUCKET, number, part)
            yield from ((key, index) for index in range(start, stop))


def adopt(
    number: int, section: int, settled: Mapping[int, frozenset[int]], holders: Mapping[int, Holder], now: float
) -> Round:
    """Make round ``number``, of which each of ``holders`` has the ``settled`` slices, by bucket.

    In slices of which no member has told the weights, the members that are here counted.
    """
    current = Round(now, section=section)
    here = tuple(holders[member_id].weight if member_id in holders else 0.0 for member_id in range(max(holders) + 1))
    for part, slices in settled.items():
        key = ExchangeKey(BUCKET, number, part)
        told = [holder.weights[key] for holder in holders.values() if key in holder.weights]
        columns = Counter(next((said[index] for said in told if index in said), here) for index in slices)
        current.take_settled(part, columns, holders.keys())
    return current
