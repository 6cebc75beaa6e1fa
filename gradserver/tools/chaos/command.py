"""`gradserver chaos`: its options, and a run from the first process to the verdict."""

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

from gradserver.arguments import add_seconds, mean, number
from gradserver.json_text import json_text
from gradserver.protocol.limits import MAX_SHARDS
from gradserver.protocol.means import PLAIN
from gradserver.tools.chaos.schedule import DEFAULT, KILLS, SPECS, Event, Schedule, Way, draw

if TYPE_CHECKING:
    from gradserver.tools.chaos.fleet import Fleet
    from gradserver.tools.chaos.report import Uses
    from gradserver.tools.chaos.view import View
    from gradserver.tools.common.netns import Lab

_LINK_RATE = 1.25e9
"""Rate of the emulated hosts' links, in bytes a second: as fast as possible."""
_STALENESS = 4
"""Bound of the staleness in mode "bounded", by default."""
_NEEDS_WIRES = frozenset({"reset", "midcall", "throttle"})
_TICK = 0.25
_LATE_SECONDS = 0.2
"""Delay of an event above which all later events are delayed, too."""
_RETURN_SECONDS = 20.0
"""Time after the end of a run in which workers can still come back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options to `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Run a coordinator and workers as processes of this machine, and inject faults that are drawn from a seed.\n"
        "An oracle recomputes every round: each result must be, bit by bit, the mean of the contributions, and the\n"
        "same at all members."
    )
    kinds = "\n".join(f"  {name:12}{spec.brief}" for name, spec in SPECS.items())
    default = ", ".join(DEFAULT)
    parser.epilog = (
        f"events (by default {default}, and with --shards also shard):\n{kinds}\n\n"
        f"Exit status: 0 if no fault was found, 1 if one was found, 2 if the run could not begin."
    )
    parser.add_argument(
        "--workers", type=number(int, 2, 256), default=8, metavar="N", help="number of workers (default 8)"
    )
    add_seconds(parser, "--seconds", 10, 1e6, "length of the run (default 60)", 60.0)
    parser.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=7, metavar="X", help="seed of the events (default 7)"
    )
    parser.add_argument("--events", type=_kinds, metavar="KIND,…", help="kinds of events to draw from")
    add_seconds(parser, "--every", 0.05, 3600, "mean time between two events, in seconds (default 0.3)", 0.3)
    add_seconds(parser, "--coordinator-kill", 1, 1e6, "also kill the coordinator every S seconds")
    text = (
        "minimum time between two events that make all workers wait (freeze, partition, coordinator, shard), in "
        "seconds; otherwise their times add up (default 0)"
    )
    add_seconds(parser, "--apart", 0, 3600, text, 0.0)
    parser.add_argument(
        "--shards", type=number(int, 1, MAX_SHARDS), default=1, metavar="S", help="number of data shards (default 1)"
    )
    add_seconds(parser, "--pace", 0, 60, "time that a worker computes in each round, in seconds (default 0.05)", 0.05)
    add_seconds(
        parser, "--stall", 0.5, 3600, "a longer time without a finished round is a fault, in seconds (default 15)", 15.0
    )
    parser.add_argument(
        "--plane",
        choices=("auto", "direct", "hierarchical"),
        default="auto",
        help="direct: workers reduce gradients among themselves, with gloo. hierarchical: they do so on each of two "
        "emulated hosts, of which one worker exchanges with the coordinator (default: the coordinator reduces them)",
    )
    parser.add_argument(
        "--mode",
        choices=("sync", "bounded", "async"),
        default="sync",
        help="mode of the group's rounds, as of gradserver serve (default sync)",
    )
    parser.add_argument(
        "--staleness",
        type=number(int, 0, 1_000_000),
        metavar="S",
        help="with --mode bounded or async: most updates by which a contribution is late. More is a fault (bounded: 4)",
    )
    parser.add_argument(
        "--mean",
        type=mean,
        default=PLAIN,
        metavar="RULE",
        help="rule by which gradients are averaged, as of gradserver serve: median, trimmed:B, clipped:C, krum:F "
        "(default plain)",
    )
    parser.add_argument(
        "--netns",
        action="store_true",
        help="give each worker a network namespace of its own, which a partition disconnects; requires root",
    )
    parser.add_argument(
        "--least",
        type=_least,
        default={},
        metavar="N|KIND=N,…",
        help="minimum number of events that took effect, in all and by kind, such as 100,kill=5,shard=2; with fewer "
        "the run fails (default 0)",
    )
    parser.add_argument(
        "--kills",
        type=number(int, 1, 1_000_000),
        default=0,
        metavar="N",
        help="end the events when N workers have been killed (kill, midpush); with fewer in --seconds the run fails",
    )
    parser.add_argument("--stop-at-fault", action="store_true", help="end the run when a fault is found")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write ledger, logs and reports to DIR, and keep them")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run chaos. Return 0 if no fault was found, 1 if one was found, 2 if the run could not begin."""
    from gradserver.tools.common.processes import RunError, ended_by_signals

    if arguments.events is None:
        kinds = (*DEFAULT, "shard") if arguments.shards > 1 else DEFAULT
        arguments.events = [kind for kind in kinds if not (kind in _NEEDS_WIRES and arguments.netns)]
    if arguments.mode == "bounded" and arguments.staleness is None:
        arguments.staleness = _STALENESS
    if arguments.mean.is_robust and (text := _why_not_robust(arguments)):
        print(f"gradserver chaos: --mean {arguments.mean} {text}", file=sys.stderr)
        return 2
    if arguments.mode != "sync" and arguments.plane != "auto":
        print(f"gradserver chaos: --plane {arguments.plane} requires --mode sync", file=sys.stderr)
        return 2
    if arguments.mode == "sync" and arguments.staleness is not None:
        print("gradserver chaos: --staleness requires --mode bounded or async", file=sys.stderr)
        return 2
    if "shard" in arguments.events and arguments.shards == 1:
        print("gradserver chaos: the event shard requires a further data shard: --shards 2", file=sys.stderr)
        return 2
    if arguments.kills and not KILLS.intersection(arguments.events):
        print("gradserver chaos: --kills requires the event kill or midpush", file=sys.stderr)
        return 2
    if arguments.netns and (reason := _why_no_hosts(arguments.events)) is not None:
        print(f"gradserver chaos: {reason}", file=sys.stderr)
        return 2
    if unasked := [kind for kind in arguments.least if kind and kind not in _possible(arguments)]:
        text = f"--least names {', '.join(unasked)}, which is not among --events {','.join(arguments.events)}"
        print(f"gradserver chaos: {text}", file=sys.stderr)
        return 2
    folder = arguments.keep
    if folder is not None and folder.exists() and any(folder.iterdir()):
        print(f"gradserver chaos: {folder} is not empty: name a new folder", file=sys.stderr)
        return 2
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gradserver-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    passed = False
    try:
        with ended_by_signals():
            passed = _run(arguments, folder)
    except RunError as error:
        print(f"gradserver chaos: {error}", file=sys.stderr)
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
        settings = folder, arguments.seed, names, minimum, arguments.shards, arguments.pace, lab, arguments.plane
        fleet = stack.enter_context(Fleet(*settings, serve=_mode(arguments), mean=str(arguments.mean)))
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
    if arguments.plane != "auto" and not result["ways"].get("direct"):
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


def _why_not_robust(arguments: argparse.Namespace) -> str | None:
    if arguments.plane != "auto":
        return "requires --plane auto: libraries that reduce among workers only add up"
    if (needs := arguments.mean.needs) >= arguments.workers:
        return f"needs {needs} workers, and one more that can be lost: --workers {needs + 1}"
    return None


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


def _why_no_hosts(kinds: list[str]) -> str | None:
    from gradserver.tools.common import netns

    lacking = [kind for kind in kinds if kind in _NEEDS_WIRES]
    if lacking:
        return f"{', '.join(lacking)} cannot be injected with --netns: leave it out of --events"
    return netns.why_not()


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


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SPECS:
            raise argparse.ArgumentTypeError(f"{name!r} is not an event; the events are {', '.join(SPECS)}")
    return names


def _least(text: str) -> dict[str, int]:
    """Parse the minimum number of events of each kind, and of all kinds under the name ""."""
    found = {}
    for part in text.split(","):
        kind, _, count = part.rpartition("=")
        if kind and kind not in SPECS:
            raise argparse.ArgumentTypeError(f"{kind!r} is not an event; the events are {', '.join(SPECS)}")
        if not count.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor KIND=N, as in 100,kill=5")
        found[kind] = int(count)
    return found


def _possible(arguments: argparse.Namespace) -> set[str]:
    return {*arguments.events, *(("coordinator",) if arguments.coordinator_kill else ())}


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
        "kills",
    )
    given = {name: getattr(arguments, name) for name in own}
    return {**given, "mean": str(arguments.mean), "kinds": arguments.events, "cores": os.cpu_count()}
