"""What will happen in a chaos run, and to whom: drawn from the seed before anything begins.

The storm lies between a calm beginning and a calm end, by which it is measured; by that end everybody has to be back.
Nobody is hit again before it can have recovered, and never so many at once that fewer than the group's minimum are
left: what is drawn can be survived without losing the training, so whatever is lost is a fault.

Some events make everybody wait until they are noticed or mended, and such times add up: who freezes while the
coordinator starts again is noticed after both. So that a run can say how long one takes, they can be kept apart.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple


class Way(Enum):
    """How a worker reaches the coordinator."""

    DIRECT = "direct"  # with shared memory
    RELAY = "relay"  # through a process that can lose, repeat and reorder messages
    WIRE = "wire"  # through a process that can break, stop and slow a connection
    PLAIN = "plain"  # over TCP, and nothing between


class Spec(NamedTuple):
    """One kind of event.

    Attributes:
        brief: what it is, for people.
        text: what it does this time.
        low: the least of what it takes, mostly seconds.
        high: the most.
        recovery: seconds after which its target is as before, beyond that.
        out: whether its target loses its membership.
        way: the workers whom it can hit; None for any.
        share: how often it is drawn, beside the others.
        target: "worker", or what else there is.
        halts: whether everybody waits for seconds, until it is noticed or mended.
    """

    brief: str
    text: str
    low: float
    high: float
    recovery: float
    out: bool
    way: Way | None = None
    share: float = 1.0
    target: str = "worker"
    halts: bool = False


SPECS: Final = {
    "kill": Spec(
        "SIGKILL to a worker, which comes back",
        "SIGKILL, and a new process under its name after {:.1f} s",
        0.2,
        1.5,
        5.0,
        True,
        share=3.0,
    ),
    "midpush": Spec(
        "SIGKILL in the midst of a push; it comes back",
        "SIGKILL in the midst of a push, and a new process under its name after {:.1f} s",
        0.2,
        1.5,
        8.0,
        True,
        share=2.0,
    ),
    "stop": Spec(
        "SIGSTOP for half a second at most",
        "SIGSTOP for {:.1f} s, which nobody may notice",
        0.1,
        0.6,
        1.0,
        False,
        share=2.0,
    ),
    "freeze": Spec(
        "SIGSTOP for five seconds: left out, it comes back",
        "SIGSTOP for {:.1f} s: it is left out, and comes back",
        4.5,
        6.0,
        6.0,
        True,
        halts=True,
    ),
    "leave": Spec(
        "a polite leave; a new process under the name comes",
        "leaves, and a new process under its name comes after {:.1f} s",
        0.2,
        1.5,
        5.0,
        True,
    ),
    "join": Spec(
        "somebody new comes for some seconds",
        "somebody new joins, and leaves after {:.1f} s",
        3.0,
        6.0,
        3.0,
        False,
        target="newcomer",
    ),
    "slow": Spec(
        "a worker takes longer for each round", "takes {:.2f} s longer for each round, for 2 s", 0.02, 0.3, 3.0, False
    ),
    "reset": Spec("a connection breaks (RST)", "its connection breaks (RST)", 0.0, 0.0, 6.0, True, Way.WIRE, 2.0),
    "midcall": Spec(
        "the same in the midst of a collective",
        "its connection breaks (RST) in the midst of its next collective",
        0.0,
        0.0,
        7.0,
        True,
        Way.WIRE,
        2.0,
    ),
    "blackhole": Spec(
        "a connection passes nothing for less than a second",
        "nothing gets through its connection for {:.1f} s",
        0.1,
        0.8,
        2.0,
        False,
        Way.WIRE,
    ),
    "partition": Spec(
        "a connection passes nothing for five seconds",
        "nothing gets through to it or from it for {:.1f} s",
        4.0,
        6.0,
        6.0,
        True,
        Way.WIRE,
        halts=True,
    ),
    "throttle": Spec(
        "a connection is slow", "its connection has 2 MB/s for {:.1f} s", 0.5, 2.0, 2.0, False, Way.WIRE, halts=True
    ),
    "drop": Spec("a message is lost", "a message is lost, to it or from it", 0.0, 0.0, 6.0, True, Way.RELAY),
    "repeat": Spec("messages come twice", "20 messages come twice", 0.0, 0.0, 2.0, False, Way.RELAY),
    "swap": Spec(
        "messages overtake each other", "a message overtakes the one before, ten times", 0.0, 0.0, 2.0, False, Way.RELAY
    ),
    "delay": Spec(
        "messages take longer", "its messages take {:.2f} s longer, for 1 s", 0.02, 0.2, 2.0, False, Way.RELAY
    ),
    "disk": Spec(
        "the coordinator's disk is full",
        "the coordinator's disk is full for {:.1f} s",
        0.5,
        2.0,
        3.0,
        False,
        share=0.3,
        target="disk",
    ),
    "coordinator": Spec(
        "SIGKILL to the coordinator, which is started anew",
        "SIGKILL to the coordinator, which is started anew at once",
        0,
        0,
        5,
        False,
        None,
        0.3,
        "it",
        halts=True,
    ),
    "shard": Spec(
        "SIGKILL to a data shard",
        "SIGKILL to a data shard",
        0.0,
        0.0,
        5.0,
        False,
        share=0.3,
        target="shard",
        halts=True,
    ),
}
DEFAULT: Final = tuple(kind for kind in SPECS if kind != "shard")
"""What is drawn if nobody says otherwise: all that the product survives."""
_TRIES: Final = 24


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Something that is done ``at`` so many seconds from the beginning."""

    at: float
    kind: str
    target: str
    amount: float

    def __str__(self) -> str:
        return SPECS[self.kind].text.format(self.amount)


class Schedule(NamedTuple):
    """The events of a run, and where its storm begins and ends."""

    events: list[Event]
    storm: float
    calm: float
    seconds: float


@dataclass(slots=True)
class _Times:
    """Until when somebody recovers from what was done to it, and when everybody has to wait.

    Attributes:
        apart: seconds between two of those times.
    """

    apart: float
    halts: list[float]
    busy: dict[str, float] = field(default_factory=dict)
    out: dict[str, float] = field(default_factory=dict)

    def is_free(self, name: str, at: float) -> bool:
        return self.busy.get(name, 0.0) <= at

    def may_halt(self, at: float) -> bool:
        return all(abs(at - other) >= self.apart for other in self.halts)

    def outside(self, at: float) -> int:
        return sum(until > at for until in self.out.values())


def calm_seconds(seconds: float) -> tuple[float, float]:
    """How long a run of so many seconds is calm in the beginning, and in the end."""
    return min(10.0, max(2.0, seconds * 0.1)), min(20.0, max(6.0, seconds * 0.15))


def draw(
    seed: int,
    ways: dict[str, Way],
    spare: int,
    seconds: float,
    every: float,
    kinds: Sequence[str],
    coordinator: float | None = None,
    apart: float = 0.0,
) -> Schedule:
    """Draw the events of a run.

    Args:
        seed: another one draws others.
        ways: the workers by name.
        spare: how many of them may be out of the group at once.
        seconds: how long the run is.
        every: seconds from one event to the next, in the mean.
        kinds: what may be drawn.
        coordinator: seconds from one kill of the coordinator to the next; None for only what is drawn.
        apart: seconds between events for which everybody waits; 0: their times may add up.
    """
    chance = random.Random(seed)
    begin, end = calm_seconds(seconds)
    kills: list[float] = []
    if coordinator:
        kills = [begin + coordinator * n for n in range(1, math.ceil((seconds - end - begin) / coordinator))]
    times, events = _Times(apart, list(kills)), []
    fresh = itertools.count()
    at = begin
    while True:
        at = round(at + every * chance.uniform(0.5, 1.5), 3)
        if at > seconds - end:
            break
        event = _draw(chance, at, seconds - 1.0, kinds, ways, spare, times, fresh)
        if event is not None:
            events.append(event)
    events += [Event(moment, "coordinator", "coordinator", 0.0) for moment in kills]
    return Schedule(sorted(events), begin, seconds - end, seconds)


def _draw(
    chance: random.Random,
    at: float,
    until: float,
    kinds: Sequence[str],
    ways: dict[str, Way],
    spare: int,
    times: _Times,
    fresh: itertools.count[int],
) -> Event | None:
    for _ in range(_TRIES):
        kind = chance.choices(kinds, [SPECS[kind].share for kind in kinds])[0]
        spec = SPECS[kind]
        amount = round(chance.uniform(spec.low, spec.high), 3)
        if spec.halts and not times.may_halt(at):
            continue
        if spec.target == "worker":
            names = [name for name, way in ways.items() if spec.way in (None, way) and times.is_free(name, at)]
        else:
            one = {"it": "coordinator", "disk": "disk", "shard": "shard", "newcomer": "newcomer"}[spec.target]
            names = [one] if times.is_free(one, at) else []
        if not names or at + amount + spec.recovery > until or (spec.out and times.outside(at) >= spare):
            continue
        target = chance.choice(names)
        times.busy[target] = at + amount + spec.recovery
        if spec.out:
            times.out[target] = times.busy[target]
        if spec.halts:
            times.halts.append(at)
        return Event(at, kind, f"x{next(fresh)}" if target == "newcomer" else target, amount)
    return None
