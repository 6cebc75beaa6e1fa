"""Contributions that are not finite, where that does not halt the group.

A reduction names the slices and the members that gave them (`gradserver.engine.events.Sifted`). The outcome is decided
for each slice by itself, from what was given to it alone. So it is the same in every order of arrival, over every
channel, and for every number of shards:

    policy      the slice's result
    ──────────  ──────────────────────────────────────────────────────────────────────────────────────────────
    leave-out   the mean over the other members with their weights; zeros with weight 0 if there are none
    skip        none, with weight 0. A member that sees one such slice of a round applies nothing of it

Each result names the members concerned. Every member gets one for each slice of a round, so all come to the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gradserver.engine.data.exchange import Exchange, Payload, Piece, Run
from gradserver.engine.data.group import Group
from gradserver.engine.events import Finding
from gradserver.engine.policy import OnNonFinite
from gradserver.protocol.buffer import Buffer


def sifted(
    group: Group, exchange: Exchange, piece: Piece, payload: Payload, findings: Sequence[Finding]
) -> Iterator[tuple[Piece, Buffer | None, tuple[int, ...]]]:
    """Cut ``piece`` into parts, each with its result and the members that gave it values which are not finite."""
    key, layout = exchange.key, exchange.layout
    member_ids: defaultdict[int, list[int]] = defaultdict(list)
    for index, member_id, element in findings:
        member_ids[index].append(member_id)
        group.rounds[key.number].not_finite(member_id, key.part, layout.span(piece.start)[0] + element)
    assert not isinstance(payload, tuple), "a mean is the same for all"
    start, view = piece.start, None if payload is None else memoryview(payload)
    while start < piece.stop:
        givers, stop = tuple(sorted(member_ids.get(start, ()))), start + 1
        while stop < piece.stop and tuple(sorted(member_ids.get(stop, ()))) == givers:
            stop += 1
        part = Piece(start, stop, piece.given)
        at = layout.run_bytes(piece.start, start)
        own = None if view is None else view[at : at + layout.run_bytes(start, stop)]
        yield part, own if not givers or _has_result(group, piece.given, givers) else None, givers
        start = stop


def counting(group: Group, given: Mapping[int, Run], nonfinite: tuple[int, ...]) -> float:
    """Return the weight of a result without the contributions of the members ``nonfinite``."""
    if group.order.nonfinite is OnNonFinite.SKIP:
        return 0.0
    return sum((run.weight for member_id, run in given.items() if member_id not in nonfinite), 0.0)


def _has_result(group: Group, given: Mapping[int, Run], nonfinite: tuple[int, ...]) -> bool:
    """Tell whether another member has given bytes that count."""
    if group.order.nonfinite is OnNonFinite.SKIP:
        return False
    return any(run.present and run.weight > 0 for member_id, run in given.items() if member_id not in nonfinite)
