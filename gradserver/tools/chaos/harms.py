"""Injection of each kind of event into the processes of a chaos run, and its undoing."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradserver.tools.chaos.fleet import Fleet
from gradserver.tools.chaos.schedule import SPECS, Event
from gradserver.tools.common.processes import Child

_THROTTLED: Final = 2_000_000
"""Rate of a throttled connection, in bytes a second."""
_LATER: Final = frozenset({"freeze", "partition", "leave", "midpush"})
"""Kinds after which the target can come back only when the event is over."""
_PIECES: Final = 5
"""Number of pieces of a push, after one of which a worker dies in the middle of the push."""
_MOMENTS: Final = 12
"""The same for workers that reduce among themselves: the moments behind its last bucket count, too."""
_CALLS_SECONDS: Final = 5.0
"""Time in which a worker should call collectives."""
_LINGERS_SECONDS: Final = 0.6
"""Delay of the last worker at a collective in which a connection has broken."""
_DIES_SECONDS: Final = 4.0
"""Time after which a worker that should have killed itself is killed from outside."""


class Harms:
    """Injector of events into a fleet.

    Attributes:
        hit: events that took effect: on a process that ran, a connection that was open, a message that came.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.hit: list[Event] = []
        self._open: dict[tuple[str, str], Event] = {}
        """Events that had no effect yet."""
        self._calls: dict[str, float] = {}
        """Workers that lose their connection in their next collective, and the time until which this must begin."""
        fleet.on_hit, fleet.on_call = self._meets, self._breaks
        say = fleet.say
        self._does: dict[str, Callable[[str, float], None]] = {
            "kill": self._kill,
            "midpush": self._kill_in_push,
            "stop": self._stop,
            "freeze": self._stop,
            "leave": self._leave,
            "join": self._join,
            "slow": self._slow,
            "reset": lambda name, _: say("wires", f"reset {name}"),
            "midcall": self._break_in_call,
            "blackhole": self._cut_off,
            "partition": self._cut_off,
            "throttle": lambda name, seconds: say("wires", f"throttle {name} {seconds} {_THROTTLED}"),
            "drop": lambda name, _: say("relay", f"drop {name}"),
            "repeat": lambda name, _: say("relay", f"repeat {name} 20"),
            "swap": lambda name, _: say("relay", f"swap {name} 10"),
            "delay": lambda name, seconds: say("relay", f"delay {name} {seconds} 1.0"),
            "disk": self._fill_disk,
            "coordinator": self._kill_coordinator,
            "shard": self._kill_shard,
        }

    def do(self, event: Event) -> bool:
        """Inject an event, unless its target does not run or is needed. Return whether; an effect shows later."""
        kind, name = event.kind, event.target
        spec = SPECS[kind]
        if spec.target == "worker" and self._fleet.running(name) is None:
            return False
        if spec.out and not self._fleet.can_spare(name):
            return False
        self._fleet.note("event", event=kind, target=name, amount=event.amount)
        if spec.out and kind != "midcall":
            self._fleet.expect_out(name, kind, event.amount if kind in _LATER else 0.0)
        self._open[kind, name] = event
        self._does[kind](name, event.amount)
        return True

    def _meets(self, kind: str, name: str) -> None:
        event = self._open.pop((kind, name), None)
        if event is not None:
            self.hit.append(event)

    def _kill(self, name: str, seconds: float) -> None:
        self._fleet.expect_end(name)
        if (child := self._fleet.running(name)) is not None:
            child.process.kill()
            self._meets("kill", name)
        self._fleet.after(seconds, lambda: self._come_back(name))

    def _kill_in_push(self, name: str, seconds: float) -> None:
        child = self._fleet.running(name)
        self._fleet.expect_end(name)
        pieces = _PIECES if self._fleet.plane == "auto" else _MOMENTS
        self._fleet.say(name, f"die {1 + int(seconds * 1000) % pieces}")
        self._fleet.after(_DIES_SECONDS, lambda: self._kill_if_same(name, child))
        self._fleet.after(seconds, lambda: self._come_back(name))

    def _kill_if_same(self, name: str, child: Child | None) -> None:
        if child is not None and self._fleet.running(name) is child:
            child.process.kill()

    def _break_in_call(self, name: str, _: float) -> None:
        self._calls[name] = time.monotonic() + _CALLS_SECONDS

    def _breaks(self, name: str) -> None:
        """Break the connection of a worker that begins with collectives, if this is due."""
        if self._calls.pop(name, 0.0) > time.monotonic():
            self._fleet.expect_out(name, "midcall", 0.0)
            self._fleet.say_to_all(f"linger {_LINGERS_SECONDS}")  # it is then back before all have called
            self._fleet.say("wires", f"reset {name}")

    def _slow(self, name: str, seconds: float) -> None:
        self._fleet.say(name, f"slow {seconds} 2.0")
        self._meets("slow", name)

    def _leave(self, name: str, seconds: float) -> None:
        self._part(name)
        self._meets("leave", name)
        self._fleet.after(seconds, lambda: self._come_back(name))

    def _part(self, name: str) -> None:
        if self._fleet.running(name) is not None:
            self._fleet.expect_end(name)
            self._fleet.say(name, "leave")

    def _come_back(self, name: str) -> None:
        """Start a worker again when the last process of its name has ended: two of them would be a fault of the run."""
        if self._fleet.running(name) is not None:
            self._fleet.after(0.1, lambda: self._come_back(name))
        else:
            self._fleet.start_worker(name)

    def _join(self, name: str, seconds: float) -> None:
        self._fleet.start_worker(name)
        self._fleet.after(seconds, lambda: self._part(name))

    def _stop(self, name: str, seconds: float) -> None:
        child = self._fleet.running(name)
        if child is not None:
            process = child.process
            process.send_signal(signal.SIGSTOP)
            for kind in ("stop", "freeze"):
                self._meets(kind, name)
            self._fleet.after(seconds, lambda: process.send_signal(signal.SIGCONT))

    def _cut_off(self, name: str, seconds: float) -> None:
        lab = self._fleet.lab
        if lab is None:
            self._fleet.say("wires", f"hold {name} {seconds}")
            return
        host = self._fleet.hosts[name]
        lab.plug(host, False)
        for kind in ("blackhole", "partition"):
            self._meets(kind, name)
        self._fleet.after(seconds, lambda: lab.plug(host, True))

    def _fill_disk(self, _: str, seconds: float) -> None:
        child = self._fleet.running("coordinator")
        if child is None or not child.lines:  # it does not listen yet, and needs a disk to begin
            self._fleet.after(0.2, lambda: self._fill_disk(_, seconds))
            return
        pid = child.process.pid
        self._meets("disk", "disk")
        self._fleet.note("full")
        _limit(pid, 0)
        self._fleet.expect_gap(seconds)
        self._fleet.after(seconds, lambda: _limit(pid, resource.RLIM_INFINITY))

    def _kill_coordinator(self, name: str, _: float) -> None:
        child = self._fleet.running(name)
        if child is not None:
            self._fleet.expect_end(name)
            if child.lines:  # it listens: before that no process notices its end
                self._meets("coordinator", name)
            child.process.kill()
            child.process.wait()
        self._fleet.restart_coordinator()

    def _kill_shard(self, name: str, _: float) -> None:
        child = self._fleet.running("coordinator")
        if child is not None:
            pid = child.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                os.kill(int(children[0]), signal.SIGKILL)
                self._meets("shard", name)


def _limit(pid: int, size: int) -> None:
    """Limit the size of files that a process can write: to it the disk is full. It may have ended meanwhile."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
