"""What control has written down of groups, each before anybody is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradserver.engine.data_records import Claim, Committed
from gradserver.engine.events import Command, Log, Record
from gradserver.engine.membership import Group
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.positions import Use
from gradserver.engine.records import (
    Boundary,
    Closed,
    Cut,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Handling,
    Kind,
    Plan,
    Reset,
    Round,
    RoundRecord,
)
from protocol.errors import GradServerError
from protocol.plan import Plan as PlanTable


def founded(group: Group, commands: list[Command]) -> None:
    """A group is complete."""
    _first(commands, Founded(group.name, group.world, group.timeout))
    if group.secret:
        _first(commands, Durable(group.name, group.secret, group.table.rates))
    if group.nonfinite is not OnNonFinite.HALT:
        _first(commands, Handling(group.name, group.nonfinite))
    members(group, f"complete with {group.world} workers", commands)


def members(group: Group, reason: str, commands: list[Command]) -> None:
    """Who is there now, since somebody came or went."""
    there = tuple((rank, seat.name) for rank, seat in group.members.items())
    _first(commands, Epoch(group.name, group.epoch, group.rounds, there, reason))
    if group.entering:
        entered(group, commands)


def entered(group: Group, commands: list[Command]) -> None:
    """Who contributes to the open round as his first one."""
    there = tuple((seat, group.seats.names[seat]) for seat in group.entering)
    _first(commands, Entered(group.name, group.rounds, there))


def planned(group: Group, plan: PlanTable, commands: list[Command]) -> None:
    """All members have agreed on ``plan``."""
    _first(commands, Plan(group.name, group.epoch, group.rounds, plan))


def registered(group: Group, use: Use, commands: list[Command]) -> None:
    """Somebody is the first to use certain data, or something of it was given back that no other record tells of."""
    commands.append(Record(use.state(group.name)))


def claimed(claim: Claim, commands: list[Command]) -> None:
    """Positions are somebody's own."""
    commands.append(Record(claim))


def completed(group: Group, record: RoundRecord, used_up: tuple[Committed, ...], commands: list[Command]) -> None:
    """A round is complete. Results are told before this, and in elastic groups that it is over behind it."""
    commands.append(Record(Round(group.name, group.epoch, record, used_up)))
    if record.nonfinite:
        warning = group.found.count(record, group.nonfinite, group.plan, group.call, group.name)
        if warning:
            commands.append(Log(warning, warning=True))
    group.told = record.round, group.epoch
    group.ledger.append(replace(record, inputs=(), results=()))  # here it is for its times


def boundary(group: Group, number: int, commands: list[Command]) -> None:
    """Members are told that a round is over, and that the present membership is in force."""
    if group.told != (number, group.epoch):
        group.told = number, group.epoch
        _first(commands, Boundary(group.name, number, group.epoch))


def reset(group: Group, commands: list[Command]) -> None:
    """What lossy codecs had kept back is lost."""
    _first(commands, Reset(group.name, group.rounds))


def cut(group: Group, number: int, seats: Sequence[int], reason: str, commands: list[Command]) -> None:
    """A round is closed without some members."""
    _first(commands, Cut(group.name, group.epoch, number, tuple(seats), reason))


def halted(group: Group, error: GradServerError, commands: list[Command]) -> None:
    """The group goes no further."""
    _first(commands, Halt(group.name, group.epoch, group.rounds, type(error).__name__, error.message))


def closed(group: Group, reason: str, commands: list[Command]) -> None:
    """The group has ended."""
    _first(commands, Closed(group.name, group.epoch, group.rounds, reason))


def stopped(groups: dict[str, Group], error: GradServerError, commands: list[Command]) -> None:
    """The coordinator stops, and what it serves ends with it; unless it is durable."""
    for group in groups.values():
        if group.begun and not group.secret:
            closed(group, error.message, commands)


def _first(commands: list[Command], record: Kind) -> None:
    """Write ``record`` before all else that this event leads to, and after what else is written because of it."""
    at = next((index for index, command in enumerate(commands) if type(command) is not Record), len(commands))
    commands.insert(at, Record(record))
