"""What control tells somebody who comes into a group: a founder, or whoever joins it when it has begun."""

from __future__ import annotations

from gradserver.engine.membership import Group
from gradserver.engine.resuming import token_of
from protocol.messages import Welcome


def welcome_to(group: Group, seat: int, token: str, credit: int, incarnation: int) -> Welcome:
    """``token`` is for data shards. A durable group has none but the coordinator: its tokens follow from its secret.

    Of somebody who is not a member yet, seats, names and rank are what they are to be.
    """
    joins = seat not in group.members
    present = sorted({*group.seats.present, seat})
    return Welcome(
        group.name,
        present.index(seat),
        group.epoch,
        credit,
        names=tuple(group.seats.names[other] for other in present),
        shards=group.urls,
        rates=group.table.rates,
        token=token_of(group, seat) if group.secret else token,
        seats=() if group.policy is None else tuple(present),
        durable=bool(group.secret),
        incarnation=incarnation if group.secret else 0,
        founded=group.founded if joins else 0,
        joins=joins,
        late=group.late_are,
    )
