"""What control does about members of a durable group that are away, and about groups that a coordinator has before it.

A member whose connection broke may come back on a new one, also to a coordinator that was started anew and knows its
groups from records. It shows the token that its Welcome brought.

    member    event                                     next      what happens
    ────────  ────────────────────────────────────────  ────────  ────────────────────────────────────────────────────
    ATTACHED  its connection broke                      AWAY      it is still needed: nobody goes on without it …
    AWAY      … for half of `dead_after`                gone      … and then it departs
    AWAY      … as nobody is left                       AWAY      all have `reconnect` seconds
    AWAY      … and somebody comes back                 AWAY      the others have `missing` seconds from then on
    AWAY      … and its process runs, but is busy       AWAY      it is waited for, for as long as the group's timeout
    AWAY      Resume                                    ATTACHED  Resumed
    ATTACHED  Resume, on another connection             ATTACHED  the same; the old connection is closed
    ATTACHED  Leave, or a violation                     gone      it departs
    gone      Resume                                    gone      refused with LeftOutError

    group       event                                   next        what happens
    ──────────  ──────────────────────────────────────  ──────────  ──────────────────────────────────────────────────
    (none)      Restored                                SUSPENDED   all its members are away
    SERVING     the last of those attached is away      SUSPENDED
    SUSPENDED   Resume                                  RECOVERING  data is to find out who holds what
    SERVING     Resume                                  RECOVERING  the same, and Resumed to everybody
    RECOVERING  Resume                                  RECOVERING  Resumed to it
    RECOVERING  data reports CaughtUp                   RECOVERING  RoundDone to whom it lacks; Proceed
    RECOVERING  data reports Recovered                  SERVING     members go on
    any         the last member departs                 (none)

SERVING stands for what the tables of `control` and `elastic` know. What data does is in `recovery`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gradserver.engine import chronicle
from gradserver.engine.data_records import Claim, Data
from gradserver.engine.events import (
    Admit,
    Attach,
    CaughtUp,
    Close,
    Command,
    Depart,
    Detach,
    Expect,
    Log,
    OpenGroup,
    Order,
    Proceed,
    Recover,
    Recovered,
    RemoteOrder,
    Reseat,
    Seat,
    Send,
    SetPlan,
)
from gradserver.engine.membership import Group, announce
from gradserver.engine.policy import Policy
from gradserver.engine.positions import Positions
from gradserver.engine.records import (
    Boundary,
    Closed,
    Durable,
    Entered,
    Epoch,
    Group as Founded,
    Halt,
    Kind,
    Plan,
    Round,
    RoundRecord,
    Start,
)
from gradserver.engine.seats import Seats
from protocol.errors import ERRORS, GradServerError, JoinRefusedError, LeftOutError, WorkerLostError
from protocol.limits import MAX_TOKEN
from protocol.messages import Membership, RoundDone
from protocol.presence import presence_of
from protocol.resuming import Resume, Resumed
from protocol.shards import Table

NOT_BACK = "its connection broke, and it did not come back"
_LOOK_SECONDS = 0.25
"""How often to look whether the process of somebody who is away still runs, when he should be back."""


def token_of(group: Group, seat: int) -> str:
    """What the member in ``seat`` shows when it comes back; whoever had that seat before shows something else."""
    whose = f"{seat} {group.seats.names[seat]}"
    return hmac.new(group.secret.encode(), whose.encode(), hashlib.sha256).hexdigest()[:MAX_TOKEN]


def detach(group: Group, seat: int, reason: str, now: float, commands: list[Command]) -> Detach:
    """The connection of a member broke."""
    policy = group.policy or Policy(1)
    group.members[seat] = Seat(-1, group.members[seat].name)
    all_break = group.shards and group.recovering  # a shard was lost: everybody makes new connections
    group.away[seat] = now + (policy.missing if all_break else policy.dead_after / 2)
    commands.append(Log(f"group {group.name!r}: {group.call(seat)} is away ({reason})"))
    if len(group.away) == len(group.members):
        group.away = dict.fromkeys(group.members, now + policy.reconnect)
        commands.append(
            Log(f"group {group.name!r}: nobody is left; it is kept for {policy.reconnect:g} s", warning=True)
        )
    return Detach(group.name, seat)


def overdue(group: Group, runs: Callable[[str], bool], now: float, commands: list[Command]) -> list[int]:
    """Members who should be back by now. Who is busy, as his process ``runs``, has the group's timeout for that.

    A worker inside of one long call that keeps Python's lock cannot connect again, but libzmq's thread can, and says
    so by its presence.
    """
    gone: list[int] = []
    for seat in [seat for seat, until in group.away.items() if until <= now]:
        since = group.busy.get(seat, now)
        if since + group.timeout <= now or not runs(presence_of(token_of(group, seat))):
            gone.append(seat)
            continue
        if seat not in group.busy:
            group.busy[seat] = since
            what = (
                f"{group.call(seat)} is not back, and its process runs: it is waited for, {group.timeout:g} s at most"
            )
            commands.append(Log(f"group {group.name!r}: {what}", warning=True))
        group.away[seat] = min(now + _LOOK_SECONDS, since + group.timeout)
    return gone


def check(group: Group | None, message: Resume) -> Group:
    """The group that somebody comes back to. Raises why he cannot."""
    if group is None or not group.secret:
        raise JoinRefusedError(f"there is no durable group {message.group[:128]!r} to come back to: join it")
    name = group.seats.names[message.seat] if message.seat < len(group.seats.names) else ""
    if name and not hmac.compare_digest(token_of(group, message.seat).encode(), message.token.encode()):
        raise JoinRefusedError(
            f"this is not the token of seat {message.seat} in group {group.name!r}: somebody else has it, or it is not "
            f"the group that was joined"
        )
    if group.broken is not None:
        raise group.broken.again()
    if not group.is_inside(message.seat):
        rank = group.seats.rank(message.seat) if name else -1
        who = f"{name!r} (was rank {rank})" if name else f"in seat {message.seat}"
        raise LeftOutError(
            f"this worker, {who}, came back to group {group.name!r} when the others had gone on without it, in round "
            f"{group.rounds}. It has to join again",
            worker=name,
            rank=rank,
        )
    return group


def catch_up(group: Group, epoch: int, commands: list[Command]) -> list[RemoteOrder]:
    """Members know of an epoch that was never written down, as when the disk was full; ``epoch`` is a later one."""
    group.epoch = epoch
    what = f"{len(group.members)} workers go on, as the coordinator that was lost had not written down who was there"
    announce(group, what, True, commands)
    chronicle.members(group, what, commands)
    return [Reseat(group.name, epoch, group.seats.present)]


def resume(
    group: Group, message: Resume, connection: int, incarnation: int, version: int, now: float, commands: list[Command]
) -> list[Order]:
    """A member is back. ``version`` is a new number, for the books if they have to be opened.

    In a group with shards elsewhere they always have: so they are of the same members and connections at all of them.
    """
    seat, orders = message.seat, list[Order]()
    before = group.members[seat].connection
    if before >= 0:
        commands.append(Close(before))
        orders.append(Detach(group.name, seat))
    group.members[seat] = Seat(connection, group.members[seat].name)
    group.away.pop(seat, None)
    group.busy.pop(seat, None)
    group.proposals.pop(seat, None)
    orders.append(Attach(group.name, seat, connection))
    if not group.lacking and (group.shards or not group.recovering):
        orders.append(open_books(group, incarnation, version, now, commands))
    elif not group.lacking:
        commands.append(Send(connection, Resumed(incarnation, group.version, group.urls)))
    known = [news for news in group.news if seat in news.seats]  # of those before it had entered it never heard
    commands += [Send(connection, news) for news in known if news.epoch > message.epoch]
    if message.serves:
        group.donors[seat] += 0
    group.unaware.discard(seat)
    if group.plan is not None and group.plan.hash != message.plan:
        group.unaware.add(seat)
    here = len(group.members) - len(group.away)
    commands.append(
        Log(f"group {group.name!r}: {group.call(seat)} is back, {here} of {len(group.members)} workers are here")
    )
    return orders


def open_books(group: Group, incarnation: int, version: int, now: float, commands: list[Command]) -> Recover:
    """Have everybody who is here say what he holds."""
    group.recovering, group.version = True, version
    group.founded = version  # what shards have reported so far, and what we have heard of it, is void
    group.paused = group.held = None  # if a round is complete, data says so once more
    group.made = -1
    for void in (group.partial, group.caught_up, group.standing, group.unconfirmed):
        void.clear()
    for order in group.unheeded:
        order.waiting.clear()  # members hear of it now, and push only when shards have come to this
    here = [seat for seat in group.members if seat not in group.away]
    if here:
        until = now + (group.policy.missing if group.policy is not None else 0.0)
        group.away = {other: min(at, until) for other, at in group.away.items()}
    resumed = Resumed(incarnation, version, group.urls)
    commands += [Send(group.members[seat].connection, resumed) for seat in here]
    return Recover(group.name, version)


def caught_up(group: Group, report: CaughtUp, source: int, commands: list[Command]) -> list[RemoteOrder]:
    """Some have all of a round, and have yet to hear that it is over: when all shards say so."""
    group.caught_up.add(source)
    if len(group.caught_up) <= len(group.shards):
        return []
    number = report.round - 1
    epoch = group.told[1] if group.told[0] == number else group.epoch
    group.rounds = report.round
    commands += [Send(group.members[seat].connection, RoundDone(number, epoch)) for seat in report.seats]
    return [Proceed(group.name)]


def recovered(group: Group, report: Recovered, source: int, commands: list[Command]) -> None:
    """Everybody goes on, as soon as all shards do."""
    if not group.standing:
        group.rounds = report.round
    group.standing.add(source)
    if len(group.standing) <= len(group.shards):
        return
    group.recovering = False
    if group.owed_nothing:
        group.owed_nothing = False
        chronicle.reset(group, commands)
        what = "what lossy codecs had kept back at the coordinator was lost: residuals reset"
        commands.append(Log(f"group {group.name!r}: {what}", warning=True))
    commands.append(Log(f"group {group.name!r}: {len(group.members)} workers go on with round {group.rounds}"))


# ── from records ──────────────────────────────────────────────────────────────────────────────────────


class Past:
    """What records say of one group."""

    def __init__(self, founded: Founded) -> None:
        self.founded = founded
        self.secret = ""
        self.rates: tuple[float, ...] = ()
        self.epochs: list[Epoch] = []
        self.plan: Plan | None = None
        self.told = -1, 0
        """The last round that is over, and the epoch that is in force behind it."""
        self.done: RoundRecord | None = None
        """What was written of it."""
        self.halt: Halt | None = None
        self.entered: Entered | None = None
        """Who contributed to the open round as his first one."""
        self.positions = Positions()

    def take(self, record: Kind) -> None:
        """What was written next."""
        match record:
            case Durable(_, secret, rates):
                self.secret, self.rates = secret, rates
            case Epoch():
                self.epochs.append(record)
                self.positions.keep_only(seat for seat, _ in record.members)
            case Entered():
                self.entered = record
            case Data() | Claim():
                self.positions.restore(record)
            case Plan():
                self.plan = record
            case Round(_, epoch, done, used_up):
                self.told, self.done = (done.round, epoch), replace(done, inputs=(), results=())
                for committed in used_up:
                    self.positions.restore(committed)
            case Boundary(_, number, epoch):
                self.told = number, epoch
            case Halt():
                self.halt = record

    def group(self, policy: Policy, now: float) -> Group:
        """The group as it was, with everybody away."""
        latest = self.epochs[-1]
        names = {seat: name for epoch in self.epochs for seat, name in epoch.members}
        world = max(names) + 1
        group = Group(self.founded.group, world, policy)
        group.seats = Seats(names.get(seat, "") for seat in range(world))  # some were nobody's yet
        group.table, group.founders = Table(len(latest.members), self.rates), world
        further = max(len(self.rates) - 1, 0)
        group.shards, group.urls, group.lacking = (-1,) * further, ("",) * further, set(range(further))
        group.recovering = bool(further)
        group.members = {seat: Seat(-1, name) for seat, name in latest.members}
        for seat in names:
            if seat not in group.members:
                group.seats.depart(seat)
        group.away = dict.fromkeys(group.members, now + policy.reconnect)
        group.epoch = group.founded = latest.epoch
        group.timeout, group.secret, group.told = self.founded.timeout, self.secret, self.told
        for epoch in self.epochs:
            seats, present = zip(*sorted(epoch.members), strict=True)
            group.news.append(Membership(epoch.epoch, seats, present, epoch.reason, True))
        group.positions = self.positions
        group.rounds = self.told[0] + 1
        if self.plan is not None:
            group.plan, group.planned = self.plan.plan, self.plan.round
            group.rounds = max(group.rounds, group.planned)
            group.table.set_plan(group.plan)
            group.busy_shards = group.table.busy(group.plan)
        if self.done is not None:
            group.ledger.append(self.done)
        if self.halt is not None:
            group.broken = ERRORS.get(self.halt.error, GradServerError)(self.halt.reason)
        return group


def restore(
    records: Iterable[Kind],
    worlds: Mapping[str, object],
    now: float,
    number: Callable[[], int],
    commands: list[Command],
) -> Iterable[Group]:
    """The durable groups that records speak of, and that have not ended. ``number`` gives those of new epochs."""
    past: dict[str, Past] = {}
    for record in records:
        match record:
            case Start():
                past = {name: found for name, found in past.items() if found.secret}
            case Founded(name):
                past[name] = Past(record)
            case Closed(name):
                past.pop(name, None)
            case _ if (name := getattr(record, "group", "")) in past:
                past[name].take(record)
    for name, found in past.items():
        policy = worlds.get(name)
        if not found.secret or not found.epochs:
            continue
        if not isinstance(policy, Policy):
            what = "it is served with another number of workers now, and ends"
            commands.append(Log(f"group {name!r} was durable: {what}", warning=True))
            continue
        group = found.group(policy, now)
        if found.entered is not None and found.entered.round >= group.rounds:
            _let_in(group, found.entered, now, number, commands)
        names = ", ".join(group.seats.present_names())
        what = f"waiting for {names} to come back, for {policy.reconnect:g} s"
        commands.append(Log(f"group {name!r}: {what}; it was in round {group.rounds}, epoch {group.epoch}"))
        yield group


def _let_in(group: Group, entered: Entered, now: float, number: Callable[[], int], commands: list[Command]) -> None:
    """Who contributed to the open round counts as a member: what it gave may be in results that others hold."""
    new = {seat: Seat(-1, name) for seat, name in entered.members if seat not in group.members}
    group.first_rounds = {
        seat: entered.round for seat, name in entered.members if seat in new or group.members[seat].name == name
    }
    if not new:
        return
    for seat, occupant in new.items():
        group.seats.admit(seat, occupant.name)
    group.world = len(group.seats.names)
    what = group.seat_in(new, entered.round, number())
    group.founded = group.epoch
    group.away = dict.fromkeys(group.members, max(group.away.values(), default=now))
    chronicle.members(group, what, commands)
    group.news.append(Membership(group.epoch, group.seats.present, group.seats.present_names(), what, False))


def reopen(group: Group, credit: int, digests: bool, shard: int = 0) -> Iterable[RemoteOrder]:
    """What a data half has to know of a group that was restored, or that it is new to."""
    new = tuple(seat for seat in group.entering if seat in group.members)
    seats = tuple(Seat(-1, "" if seat in new else name) for seat, name in enumerate(group.seats.names))
    opened = OpenGroup(group.name, group.founded, seats, credit, group.timeout, elastic=True, digests=digests)
    tokens = tuple(token_of(group, seat) for seat in range(len(seats))) if shard else ()
    backlog = opened.backlog if group.policy is None else group.policy.backlog
    yield replace(opened, rates=group.table.rates, shard=shard, tokens=tokens, backlog=backlog, durable=True)
    for seat, name in enumerate(group.seats.names):
        if name and seat not in group.members:
            yield Depart(group.name, seat, WorkerLostError(f"{name!r} had departed before"), group.epoch)
    if group.plan is not None:
        yield SetPlan(group.name, group.plan, group.planned)
    for seat in new:
        yield Admit(group.name, seat, Seat(-1, group.seats.names[seat]), token_of(group, seat) if shard else "")
    if new:  # collectives that the others have called before do not wait for them
        yield Expect(group.name, new, group.rounds, False)
        yield Reseat(group.name, group.epoch, group.seats.present)
