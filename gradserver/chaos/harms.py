"""What is done to the processes of a chaos run, for each kind of event; and how it is undone."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradserver.chaos.fleet import Fleet
from gradserver.chaos.schedule import SPECS, Event

_THROTTLED: Final = 2_000_000
"""Bytes a second."""
_LATER: Final = frozenset({"freeze", "partition"})
"""Whose target can come back only when they are over."""


class Harms:
    """Does things to a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        say = fleet.say
        self._does: dict[str, Callable[[str, float], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "freeze": self._stop,
            "leave": self._leave,
            "join": self._join,
            "slow": lambda name, seconds: say(name, f"slow {seconds} 2.0"),
            "reset": lambda name, _: say("wires", f"reset {name}"),
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
        """Let it happen; False if its target is not there just now."""
        kind, name = event.kind, event.target
        spec = SPECS[kind]
        if spec.target == "worker" and self._fleet.running(name) is None:
            return False
        self._fleet.note("event", event=kind, target=name, amount=event.amount)
        if spec.out:
            self._fleet.expect_out(name, kind, event.amount if kind in _LATER else 0.0)
        self._does[kind](name, event.amount)
        return True

    def _kill(self, name: str, seconds: float) -> None:
        self._fleet.expect_end(name)
        if (child := self._fleet.running(name)) is not None:
            child.process.kill()
        self._fleet.after(seconds, lambda: self._come_back(name))

    def _leave(self, name: str, seconds: float) -> None:
        self._part(name)
        self._fleet.after(seconds, lambda: self._come_back(name))

    def _part(self, name: str) -> None:
        if self._fleet.running(name) is not None:
            self._fleet.expect_end(name)
            self._fleet.say(name, "leave")

    def _come_back(self, name: str) -> None:
        """When the last one of this name is gone, and not before: two of them would be a fault of ours."""
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
            self._fleet.after(seconds, lambda: process.send_signal(signal.SIGCONT))

    def _cut_off(self, name: str, seconds: float) -> None:
        lab = self._fleet.lab
        if lab is None:
            self._fleet.say("wires", f"hold {name} {seconds}")
            return
        host = self._fleet.hosts[name]
        lab.plug(host, False)
        self._fleet.after(seconds, lambda: lab.plug(host, True))

    def _fill_disk(self, _: str, seconds: float) -> None:
        child = self._fleet.running("coordinator")
        if child is None or not child.lines:  # it does not listen yet, and comes only where it can write
            self._fleet.after(0.2, lambda: self._fill_disk(_, seconds))
            return
        pid = child.process.pid
        self._fleet.note("full")
        _limit(pid, 0)
        self._fleet.expect_gap(seconds)
        self._fleet.after(seconds, lambda: _limit(pid, resource.RLIM_INFINITY))

    def _kill_coordinator(self, name: str, _: float) -> None:
        child = self._fleet.running(name)
        if child is not None:
            self._fleet.expect_end(name)
            child.process.kill()
            child.process.wait()
        self._fleet.restart_coordinator()

    def _kill_shard(self, _name: str, _: float) -> None:
        child = self._fleet.running("coordinator")
        if child is not None:
            pid = child.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                os.kill(int(children[0]), signal.SIGKILL)


def _limit(pid: int, size: int) -> None:
    """Let a process write files of this size at most: to it the disk is full. It may have ended meanwhile."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
