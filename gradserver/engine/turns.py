"""What control does where several modules share a group: each round is one module's, the same at all members.

    event                                          what happens
    ─────────────────────────────────────────────  ──────────────────────────────────────────────────────────────
    Opens, the first of a round                    those who follow are told which section it is: Opened
    Opens of the same section                      nothing
    Opens of another section                       the group halts: OutOfStepError at everybody, which names both
    Follow, the round is open                      Opened
    Follow, it is not                              it waits for the first Opens
    Follow, and all others follow too              Opened at everybody: the first section, of which nobody has any data
    a member departs                               if all who are left follow, the same
    the group is broken                            Opened at those who follow: what they push tells them why

Who follows is a worker that has run out of batches: it takes part without data in whatever the others exchange. A
group with one section has no use for all this, and says nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradserver.engine.events import Command, Send
from protocol.errors import OutOfStepError, UnexpectedMessageError
from protocol.messages import Follow, Opened, Opens

if TYPE_CHECKING:
    from gradserver.engine.membership import Group


@dataclass(slots=True)
class Turns:
    """Which section is exchanged in rounds that are open, and who asks."""

    opened: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The section's number, and the seat that said it first, by round."""
    following: dict[int, int] = field(default_factory=dict)
    """The round of each seat that follows."""


def hear(group: Group, seat: int, message: Opens | Follow, commands: list[Command]) -> OutOfStepError | None:
    """Take what a member says of a round; what ends the group, if it is another than somebody else has said."""
    number = message.round
    group.check_round(number, type(message).__name__)
    if group.plan is None:
        raise UnexpectedMessageError(f"{group.call(seat)} speaks of round {number}, and the group has no plan")
    if number < group.rounds:
        return None  # it is late, and gets what the others have made of it
    turns = group.turns
    if isinstance(message, Follow):
        turns.following[seat] = number
        _answer(group, number, commands)
        return None
    if group.plan.section(message.section) is None:
        raise UnexpectedMessageError(f"section {message.section} from {group.call(seat)} is in no plan")
    section, first = turns.opened.setdefault(number, (message.section, seat))
    if section != message.section:
        names = {one.number: place for place, one in enumerate(group.plan.each, 1)}
        one, other = sorted([(seat, message.section), (first, section)])
        return OutOfStepError(
            f"round {number} exchanges module {names[one[1]]} at {group.call(one[0])} and module {names[other[1]]} at "
            f"{group.call(other[0])}: all workers must train their modules in the same order"
        )
    _answer(group, number, commands)
    return None


def over(group: Group) -> None:
    """Rounds are over."""
    opened = group.turns.opened
    for number in [number for number in opened if number < group.rounds]:
        del opened[number]


def departed(group: Group, seat: int, commands: list[Command]) -> None:
    """``seat`` is vacant, or has a new connection on which it asks again."""
    group.turns.following.pop(seat, None)
    for number in {*group.turns.following.values()}:
        _answer(group, number, commands)


def broken(group: Group, commands: list[Command]) -> None:
    """The group goes no further."""
    for number in {*group.turns.following.values()}:
        _answer(group, number, commands)


def _answer(group: Group, number: int, commands: list[Command]) -> None:
    """Tell those who follow in round ``number`` what is exchanged in it, if that is known."""
    turns = group.turns
    seats = [seat for seat, followed in turns.following.items() if followed == number]
    assert group.plan is not None
    if number in turns.opened:
        section = turns.opened[number][0]
    elif group.broken is not None or _all_of(group.contributors, seats):
        section = group.plan.each[0].number
    else:
        return
    for seat in seats:
        del turns.following[seat]
        commands.append(Send(group.connection_of(seat), Opened(number, section)))


def _all_of(there: Collection[int], seats: Collection[int]) -> bool:
    return bool(seats) and set(there) <= set(seats)
