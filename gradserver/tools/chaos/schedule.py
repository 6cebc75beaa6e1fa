"""Schedule of the events of a chaos run, drawn from the seed before the run begins.

The storm lies between a calm beginning and a calm end, by which it is measured; by that end all workers have to be
back. No worker is hit again before it can have recovered, and at least the group's minimum is always left. The group
can survive all drawn events without losing the training, so every loss is a fault.

Some events make all workers wait until they are noticed or mended, and such times add up. A worker that freezes while
the coordinator starts again is noticed after both. Such events can be kept apart, so that a run measures each alone.
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
    """Path by which a worker reaches the coordinator."""

    DIRECT = "direct"  # with shared memory
    RELAY = "relay"  # through a process that can lose, repeat and reorder messages
    WIRE = "wire"  # through a process that can break, stop and slow a connection
    PLAIN = "plain"  # over TCP, with nothing between


class Spec(NamedTuple):
    """One kind of event.

    Attributes:
        brief: description of the kind, for people.
        text: description of one event, with its amount.
        low: lowest amount, mostly in seconds.
        high: highest amount.
        recovery: seconds after the event until its target is as before.
        out: whether its target loses its membership.
        way: path of the workers that it can hit; None for any.
        share: relative frequency.
        target: kind of target: "worker" or another one.
        halts: whether all workers wait for seconds, until it is noticed or mended.
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
        "kill a worker (SIGKILL), which comes back",
        "killed (SIGKILL); a new process takes its name after {:.1f} s",
        0.2,
        1.5,
        5.0,
        True,
        share=3.0,
    ),
    "midpush": Spec(
        "kill a worker in the middle of a push; it comes back",
        "killed in the middle of a push; a new process takes its name after {:.1f} s",
        0.2,
        1.5,
        8.0,
        True,
        share=2.0,
    ),
    "stop": Spec(
        "stop a worker (SIGSTOP) for at most half a second",
        "stopped (SIGSTOP) for {:.1f} s, which must go unnoticed",
        0.1,
        0.6,
        1.0,
        False,
        share=2.0,
    ),
    "freeze": Spec(
        "stop a worker for five seconds: it is left out, and comes back",
        "stopped (SIGSTOP) for {:.1f} s: it is left out, and comes back",
        4.5,
        6.0,
        6.0,
        True,
        halts=True,
    ),
    "leave": Spec(
        "let a worker leave; a new process takes its name",
        "leaves; a new process takes its name after {:.1f} s",
        0.2,
        1.5,
        5.0,
        True,
    ),
    "join": Spec(
        "let a new worker join for some seconds",
        "joins as a new worker, and leaves after {:.1f} s",
        3.0,
        6.0,
        3.0,
        False,
        target="newcomer",
    ),
    "slow": Spec(
        "let a worker take longer for each round",
        "takes {:.2f} s longer for each round, for 2 s",
        0.02,
        0.3,
        3.0,
        False,
    ),
    "reset": Spec("break a connection (RST)", "its connection breaks (RST)", 0.0, 0.0, 6.0, True, Way.WIRE, 2.0),
    "midcall": Spec(
        "break a connection in the middle of a collective",
        "its connection breaks (RST) in the middle of its next collective",
        0.0,
        0.0,
        7.0,
        True,
        Way.WIRE,
        2.0,
    ),
    "blackhole": Spec(
        "block a connection for less than a second",
        "its connection is blocked for {:.1f} s",
        0.1,
        0.8,
        2.0,
        False,
        Way.WIRE,
    ),
    "partition": Spec(
        "block a connection for five seconds",
        "its connection is blocked for {:.1f} s",
        4.0,
        6.0,
        6.0,
        True,
        Way.WIRE,
        halts=True,
    ),
    "throttle": Spec(
        "slow a connection down", "its connection has 2 MB/s for {:.1f} s", 0.5, 2.0, 2.0, False, Way.WIRE, halts=True
    ),
    "drop": Spec("lose a message", "a message to it or from it is lost", 0.0, 0.0, 6.0, True, Way.RELAY),
    "repeat": Spec("duplicate messages", "20 messages arrive twice", 0.0, 0.0, 2.0, False, Way.RELAY),
    "swap": Spec("reorder messages", "a message overtakes the one before, ten times", 0.0, 0.0, 2.0, False, Way.RELAY),
    "delay": Spec("delay messages", "its messages take {:.2f} s longer, for 1 s", 0.02, 0.2, 2.0, False, Way.RELAY),
    "disk": Spec(
        "fill the coordinator's disk",
        "the coordinator's disk is full for {:.1f} s",
        0.5,
        2.0,
        3.0,
        False,
        share=0.3,
        target="disk",
    ),
    "coordinator": Spec(
        "kill the coordinator, which is started again",
        "killed (SIGKILL), and started again at once",
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
        "kill a data shard, which is replaced",
        "killed (SIGKILL)",
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
"""Kinds that are drawn by default: all that a group survives."""
KILLS: Final = frozenset({"kill", "midpush"})
"""Kinds that kill a worker."""
_TRIES: Final = 24


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Event of a run, ``at`` seconds from its beginning."""

    at: float
    kind: str
    target: str
    amount: float

    def __str__(self) -> str:
        return SPECS[self.kind].text.format(self.amount)


class Schedule(NamedTuple):
    """Events of a run, and the times at which its storm begins and ends."""

    events: list[Event]
    storm: float
    calm: float
    seconds: float


@dataclass(slots=True)
class _Times:
    """Times until which targets recover, and at which all workers have to wait.

    Attributes:
        apart: minimum of seconds between two times at which all wait.
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
    """Return the lengths of the calm beginning and of the calm end of a run."""
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
        seed: seed of the generator.
        ways: paths of the workers, by name.
        spare: number of workers that may be out of the group at once.
        seconds: length of the run.
        every: mean seconds from one event to the next.
        kinds: kinds to draw from.
        coordinator: seconds from one additional kill of the coordinator to the next; None for none.
        apart: minimum of seconds between events for which all wait; with 0 their times may add up.
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
