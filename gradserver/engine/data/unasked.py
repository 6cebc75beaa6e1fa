"""Results for those who have not asked: a member that is late, and whoever is about to become one.

A seat that *listens* is sent the results of all buckets from a round on, whatever it has pushed. What it has not read
is bounded: it says how much it has, with `Taken`. Who lets too much pile up is *behind*, and listens no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradserver.engine.data.exchange import Exchange, Piece
from gradserver.engine.data.group import Group
from gradserver.engine.effects import Effects
from gradserver.engine.events import Behind
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import Stream, unasked_cost
from gradserver.protocol.messages import Result


def listeners(group: Group, exchange: Exchange, piece: Piece) -> list[int]:
    """Who is to be sent ``piece`` besides those who have pushed it."""
    key = exchange.key
    if not group.listening or key.stream != Stream.BUCKET:
        return []
    return [seat for seat, first in group.listening.items() if first <= key.number and seat not in piece.given]


def without(exchange: Exchange, piece: Piece) -> tuple[int, ...]:
    """Those who should have contributed to ``piece``, and did not."""
    return tuple(seat for seat in exchange.absent if seat not in piece.given) if exchange.absent else ()


def send_unasked(
    group: Group, seats: Iterable[int], results: Sequence[tuple[Result, Sequence[Buffer]]], effects: Effects
) -> None:
    """Send ``results`` to ``seats``, as far as each has read what it was sent before."""
    for seat in seats:
        for result, payloads in results:
            cost = unasked_cost(payloads[0] if payloads else None)
            if group.connections[seat] < 0 or group.unread[seat] + cost > group.order.backlog:
                del group.listening[seat]
                effects.report(Behind(group.order.group, seat, result.key.number))
                break
            group.unread[seat] += cost
            group.bytes_out += len(payloads[0]) if payloads else 0
            effects.send(group.connections[seat], result, payloads)


def taken(group: Group, seat: int, nbytes: int) -> None:
    """``seat`` has read so much."""
    group.unread[seat] = max(0, group.unread[seat] - nbytes)
