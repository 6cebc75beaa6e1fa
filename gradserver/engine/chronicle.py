"""What control has written down of groups, each before anybody is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.engine.data_records import Claim, Committed
from gradserver.engine.events import Command, Log, Record
from gradserver.engine.membership import Group
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.positions import Use
from gradserver.engine.quota import counted, used_ranges
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
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.plan import Plan as PlanTable
from gradserver.protocol.ranges import Ranges


def founded(group: Group, commands: list[Command]) -> None:
    """A group is complete."""
    _first(group, Founded(group.name, group.world, group.timeout), commands)
    if group.secret:
        _first(group, Durable(group.name, group.secret, group.table.rates), commands)
    if group.nonfinite is not OnNonFinite.HALT:
        _first(group, Handling(group.name, group.nonfinite), commands)
    members(group, f"complete with {group.world} workers", commands)


def members(group: Group, reason: str, commands: list[Command]) -> None:
    """Who is there now, since somebody came or went."""
    there = tuple((rank, seat.name) for rank, seat in group.members.items())
    _first(group, Epoch(group.name, group.epoch, group.rounds, there, reason), commands)
    if group.entering:
        entered(group, commands)


def entered(group: Group, commands: list[Command]) -> None:
    """Who contributes to the open round as his first one."""
    there = tuple((seat, group.seats.names[seat]) for seat in group.entering)
    _first(group, Entered(group.name, group.rounds, there), commands)


def planned(group: Group, plan: PlanTable, commands: list[Command]) -> None:
    """All members have agreed on ``plan``."""
    _first(group, Plan(group.name, group.epoch, group.rounds, plan), commands)


def registered(group: Group, use: Use, commands: list[Command]) -> None:
    """Somebody is the first to use certain data, or something of it was given back that no other record tells of."""
    _write(group, use.state(group.name), commands)


def claimed(group: Group, claim: Claim, commands: list[Command]) -> None:
    """Positions are somebody's own."""
    _write(group, claim, commands)


def used(group: Group, ranges: Ranges, commands: list[Command]) -> None:
    """A member says what it has used. That is written in the record of the round, and paid for here."""
    _pay(group, used_ranges(ranges), commands)


def completed(group: Group, record: RoundRecord, used_up: tuple[Committed, ...], commands: list[Command]) -> None:
    """A round is complete. Results are told before this, and in elastic groups that it is over behind it."""
    commands.append(Record(Round(group.name, group.epoch, record, used_up)))
    if record.nonfinite:
        warning = group.found.count(record, group.nonfinite, group.plan, group.call, group.name)
        if warning:
            commands.append(Log(warning, warning=True))
    group.told = record.round, group.epoch
    group.ledger.append(record.without_digests())  # here it is for its times


def boundary(group: Group, number: int, commands: list[Command]) -> None:
    """Members are told next that a round is over, and that the present membership is in force.

    The round may be written down by the same event: this comes behind it, as it is the later word.
    """
    if group.told != (number, group.epoch):
        group.told = number, group.epoch
        _write(group, Boundary(group.name, number, group.epoch), commands)


def reset(group: Group, commands: list[Command]) -> None:
    """What lossy codecs had kept back is lost."""
    _first(group, Reset(group.name, group.rounds), commands)


def cut(group: Group, number: int, seats: Sequence[int], reason: str, commands: list[Command]) -> None:
    """A round is closed without some members."""
    _first(group, Cut(group.name, group.epoch, number, tuple(seats), reason), commands)


def halted(group: Group, error: GradServerError, commands: list[Command]) -> None:
    """The group goes no further."""
    _first(group, Halt(group.name, group.epoch, group.rounds, type(error).__name__, error.message), commands)


def closed(group: Group, reason: str, commands: list[Command]) -> None:
    """The group has ended."""
    _first(group, Closed(group.name, group.epoch, group.rounds, reason), commands)


def stopped(groups: dict[str, Group], error: GradServerError, commands: list[Command]) -> None:
    """The coordinator stops, and what it serves ends with it; unless it is durable."""
    for group in groups.values():
        if group.begun and not group.secret:
            closed(group, error.message, commands)


def _first(group: Group, record: Kind, commands: list[Command]) -> None:
    """Write ``record`` before all else that this event leads to, and after what else is written because of it."""
    at = next((index for index, command in enumerate(commands) if type(command) is not Record), len(commands))
    commands.insert(at, Record(record))
    _charge(group, record, commands)


def _write(group: Group, record: Kind, commands: list[Command]) -> None:
    """Write ``record`` behind what this event has led to so far."""
    commands.append(Record(record))
    _charge(group, record, commands)


def _charge(group: Group, record: Kind, commands: list[Command]) -> None:
    """Take ``record`` from the group's journal quota, if there is one: else it need not be measured."""
    if group.account.limit:
        _pay(group, counted(record), commands)


def _pay(group: Group, nbytes: int, commands: list[Command]) -> None:
    """Take ``nbytes`` from the group's journal quota."""
    if nbytes and group.account.limit:
        group.account.spend(nbytes)
        if (news := group.account.news()) is not None:
            commands.append(Record(news))
