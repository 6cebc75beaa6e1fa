"""`gradserver chaos`: a run from the first process to the verdict."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradserver.json_text import json_text
from gradserver.printing import complain
from gradserver.protocol.planes import AUTO
from gradserver.tools.chaos.options import add_arguments, complete, why_not
from gradserver.tools.chaos.schedule import KILLS, SPECS, Event, Schedule, Way, draw
from gradserver.tools.chaos.workload import Workload

__all__ = ["add_arguments", "run"]

if TYPE_CHECKING:
    from gradserver.tools.chaos.fleet import Fleet
    from gradserver.tools.chaos.report import Uses
    from gradserver.tools.chaos.view import View
    from gradserver.tools.common.netns import Lab

_LINK_RATE = 1.25e9
"""Rate of the emulated hosts' links, in bytes a second: as fast as possible."""
_TICK = 0.25
_LATE_SECONDS = 0.2
"""Delay of an event above which all later events are delayed, too."""
_RETURN_SECONDS = 20.0
"""Time after the end of a run in which workers can still come back."""


def run(arguments: argparse.Namespace) -> int:
    """Run chaos. Return 0 if no fault was found, 1 if one was found, 2 if the run could not begin."""
    from gradserver.tools.common.processes import RunError, ended_by_signals

    complete(arguments)
    if text := why_not(arguments):
        complain("gradserver chaos", text)
        return 2
    folder = arguments.keep
    if folder is not None and folder.exists() and any(folder.iterdir()):
        complain("gradserver chaos", f"{folder} is not empty: name a new folder")
        return 2
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gradserver-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    passed = False
    try:
        with ended_by_signals():
            passed = _run(arguments, folder)
    except RunError as error:
        complain("gradserver chaos", error)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. All processes of the run have been ended.", file=sys.stderr)
        passed = True
        return 130
    finally:
        if passed and arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if passed else 1


def _run(arguments: argparse.Namespace, folder: Path) -> bool:
    from gradserver.tools.chaos import report
    from gradserver.tools.chaos.fleet import Fleet
    from gradserver.tools.chaos.view import View
    from gradserver.tools.common.screen import Screen

    names = ways_of(arguments.workers, arguments.events)
    minimum = max(1, arguments.workers // 2, arguments.mean.needs)
    schedule = draw(
        arguments.seed,
        names,
        arguments.workers - minimum,
        arguments.seconds,
        arguments.every,
        arguments.events,
        arguments.coordinator_kill,
        arguments.apart,
    )
    view = View(None if arguments.json else Screen(sys.stdout), sys.stdout.isatty())
    view.introduce(schedule, names, arguments.shards, arguments.seed, folder)
    _write_plan(folder / "plan.txt", schedule)
    with ExitStack() as stack:
        lab = stack.enter_context(_hosts(names)) if arguments.netns else None
        settings = folder, _workload(arguments), names, minimum, arguments.pace, lab, arguments.plane
        fleet = stack.enter_context(Fleet(*settings, serve=_mode(arguments)))
        fleet.begin()
        fleet.start_judge()
        fleet.note("begun")
        view.begun()
        course = _Course(fleet, schedule, view, arguments.stop_at_fault, arguments.kills)
        use = course.run()
        fleet.leave()
        verdict = fleet.verdict(view.judging)
        faults = course.faults + fleet.faults
        result = report.summary(course.done, course.missed, verdict, fleet.outs, fleet.back, faults, use)
    wrongs = report.wrongs(result, arguments.stall) + ([f"{len(faults)} surprises"] if faults else [])
    wrongs += report.too_few(result, arguments.least)
    if arguments.plane != AUTO and not result["ways"].get("direct"):
        wrongs.append("the workers reduced no round among themselves")
    stale = [int(late) for late in result["staleness"]]
    if arguments.staleness is not None and stale and max(stale) > arguments.staleness:
        wrongs.append(f"a contribution was {max(stale)} updates late, more than {arguments.staleness}")
    if arguments.mode != "sync" and not any(stale):
        wrongs.append("no contribution was late: the mode was not tried")
    if result["kills"] < arguments.kills:
        wrongs.append(f"only {result['kills']} workers were killed, fewer than {arguments.kills}")
    view.conclude(result, wrongs, folder)
    if arguments.json:
        print(json_text({**_settings(arguments), **result, "passed": not wrongs, "failed_because": wrongs}))
    return not wrongs


class _Course:
    """Course of a run: calm, storm, calm, and the time until all workers are back.

    Attributes:
        done: events that took effect.
        missed: events without effect, or with a target that did not run.
        faults: workers that are not back in the end.
    """

    def __init__(self, fleet: Fleet, schedule: Schedule, view: View, stops: bool = False, kills: int = 0) -> None:
        self.done: list[Event] = []
        self.missed: list[Event] = []
        self.faults: list[str] = []
        self._fleet, self._schedule, self._view, self._stops, self._kills = fleet, schedule, view, stops, kills
        self._begun: list[Event] = []
        """Events that are due, or were."""
        from gradserver.tools.chaos.harms import Harms

        self._harms = Harms(fleet)
        self._began = time.monotonic()

    def run(self) -> tuple[Uses, Uses]:
        """Run the course. Return the resources of processes before the storm, and after it."""
        before: Uses = {}
        with suppress(_FaultFoundError):
            self._until(self._schedule.storm)
            before = self._fleet.use()
            self._storm_and_calm()
        after = self._fleet.use()
        self._fleet.note("end")
        self.done = sorted(self._harms.hit)
        happened = set(self.done)
        self.missed = [event for event in self._begun if event not in happened]
        return before, after

    def _storm_and_calm(self) -> None:
        fleet, schedule = self._fleet, self._schedule
        fleet.note("storm")
        self._storm()
        self._until(schedule.calm)
        fleet.note("calm")
        self._until(schedule.seconds)
        deadline = schedule.seconds
        while fleet.absent() and deadline < schedule.seconds + _RETURN_SECONDS:
            deadline += _TICK
            self._until(deadline)
        self.faults = [f"{name} did not come back" for name in fleet.absent()]

    def _storm(self) -> None:
        for event in self._schedule.events:
            self._until(event.at)
            if 0 < self._kills <= sum(one.kind in KILLS for one in self._harms.hit):
                # The calm begins now.
                self._began = min(self._began, time.monotonic() - self._schedule.calm)
                return
            self._begun.append(event)
            # If this process was held up, events must not come closer together than they were drawn.
            self._began = max(self._began, time.monotonic() - event.at - _LATE_SECONDS)
            self._view.event(event, self._fleet, self._harms.do(event))

    def _until(self, moment: float) -> None:
        while (now := time.monotonic()) < self._began + moment:
            self._fleet.run_until(min(now + _TICK, self._began + moment))
            self._view.status(self._fleet, self._schedule, len(self._harms.hit))
            if self._stops and (self._fleet.judged["found"] or self._fleet.faults):
                raise _FaultFoundError


class _FaultFoundError(Exception):
    """A fault was found, so that the run can end."""


def _hosts(ways: dict[str, Way]) -> AbstractContextManager[Lab]:
    from gradserver.tools.common.netns import links

    return links(sum(way is Way.WIRE for way in ways.values()), _LINK_RATE, _LINK_RATE)


def ways_of(workers: int, kinds: list[str]) -> dict[str, Way]:
    """Choose the path by which each worker reaches the coordinator: in turn, by what the events need."""
    used = [Way.DIRECT, *(way for way in (Way.RELAY, Way.WIRE) if any(SPECS[kind].way is way for kind in kinds))]
    if len(used) == 1:
        used.append(Way.PLAIN)
    return {f"w{index}": used[index % len(used)] for index in range(workers)}


def _write_plan(path: Path, schedule: Schedule) -> None:
    lines = [f"{event.at:9.3f} s  {event.kind:12}{event.target:12}{event}\n" for event in schedule.events]
    path.write_text("".join(lines))


def _workload(arguments: argparse.Namespace) -> Workload:
    """Return what workers exchange."""
    from gradserver.tools.chaos.generator import BITS

    seed = arguments.seed | BITS[arguments.plane]
    local = arguments.local or "", arguments.fragments, arguments.wire
    return Workload(seed, arguments.shards, str(arguments.mean), *local)


def _mode(arguments: argparse.Namespace) -> list[str]:
    """Return the options of the coordinator about its rounds."""
    staleness = [] if arguments.staleness is None else ["--staleness", str(arguments.staleness)]
    robust = arguments.mean.is_robust and arguments.mode != "sync"
    quorum = ["--quorum", str(arguments.mean.needs)] if robust else []  # a round has as many as the rule needs
    return ["--mode", arguments.mode, *staleness, *quorum]


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    own = (
        "workers",
        "seconds",
        "seed",
        "every",
        "coordinator_kill",
        "apart",
        "shards",
        "pace",
        "plane",
        "mode",
        "staleness",
        "local",
        "fragments",
        "wire",
        "kills",
    )
    given = {name: getattr(arguments, name) for name in own}
    return {**given, "mean": str(arguments.mean), "kinds": arguments.events, "cores": os.cpu_count()}
