"""The suite `modes`: the same training in every mode, on equal and unequal workers and over a slow link.

A mode is a row of `MODES`. Its kind says how a worker wraps the model (`gradserver.tools.bench.mode_worker`), and its
options go to the wrapper and to ``gradserver serve``. Each training has a coordinator and workers of its own, and the
same number of samples.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gradserver.tables import table
from gradserver.tools.bench.places import Here, Place
from gradserver.tools.bench.processes import Processes
from gradserver.tools.bench.trainings import carry_out, print_heading
from gradserver.tools.common import netns
from gradserver.tools.common.as_json import AsJson
from gradserver.tools.common.processes import listening_url
from gradserver.tools.demo.settings import Settings

_SECONDS_TO_LISTEN: Final = 60.0
_PORT: Final = 7411
_ALONE: Final = "alone"
_HEADER: Final = ("mode", "loss", "", "seconds", "samples/s", "of alone", "MB", "staleness", "same bits")


@dataclass(frozen=True)
class Scenario(AsJson):
    """Conditions of a training.

    Attributes:
        name: name in tables.
        slowness: for each worker, how many times longer its steps take than they do on this machine.
        rate: rate of each worker's link, in bytes per second; 0 for the loopback.
    """

    name: str
    slowness: tuple[float, ...]
    rate: float = 0.0


@dataclass(frozen=True)
class Mode(AsJson):
    """One way to train: a row of the table.

    Attributes:
        name: name in tables, and on the command line.
        kind: name of the function that wraps the module, in `gradserver.tools.bench.mode_worker.KINDS`.
        options: options of the wrapper.
        wire: format in which contributions travel.
        serve: further options of the coordinator.
        by_speed: true if faster workers train on more of the samples, in proportion to their speed.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    wire: str = "fp32"
    serve: tuple[str, ...] = ()
    by_speed: bool = False

    def steps_of(self, rank: int, steps: int, slowness: tuple[float, ...]) -> int:
        """Return the number of batches of a worker, of ``steps`` for each worker on average."""
        return self._share(rank, steps, slowness)

    def options_of(self, rank: int, slowness: tuple[float, ...]) -> dict[str, Any]:
        """Return the options of a worker. Faster ones have a longer interval, in proportion to their speed."""
        if not self.by_speed or "every" not in self.options:
            return dict(self.options)
        every = self._share(rank, self.options["every"], slowness)
        most = every // self.options.get("fragments", 1)
        return {**self.options, "every": every, "delay": min(self.options.get("delay", 0), most)}

    def _share(self, rank: int, each: int, slowness: tuple[float, ...]) -> int:
        if not self.by_speed:
            return each
        speeds = [1 / slow for slow in slowness]
        return max(round(each * len(speeds) * speeds[rank] / sum(speeds)), 1)


_LOCAL: Final = {"every": 16, "mixing": 0.5}
_STREAMING: Final = {"every": 16, "fragments": 4, "delay": 4}
MODES: Final = (
    Mode(_ALONE, "alone"),
    Mode("sync", "synchronous"),
    Mode("sync-int8", "synchronous", wire="int8"),
    Mode("balanced", "balanced"),
    Mode("ranges", "ranges"),
    Mode("cadence", "cadence", {"anchor": 2, "max_total": 4}),
    Mode("bounded", "unawaited", serve=("--mode", "bounded", "--staleness", "4")),
    Mode("bounded-by-speed", "unawaited", serve=("--mode", "bounded", "--staleness", "4"), by_speed=True),
    Mode("async", "unawaited", serve=("--mode", "async")),
    Mode("async-by-speed", "unawaited", serve=("--mode", "async"), by_speed=True),
    Mode("local-average", "local", {"every": 16, "outer": "average"}),
    Mode("local-diloco", "local", {"every": 16}),
    Mode("local", "local", dict(_LOCAL)),
    Mode("local-by-speed", "local", dict(_LOCAL), by_speed=True),
    Mode("streaming", "local", dict(_STREAMING)),
    Mode("streaming-int8", "local", dict(_STREAMING), wire="int8"),
    Mode("streaming-by-speed", "local", dict(_STREAMING), by_speed=True),
)
"""All modes, in the order of the table. The first one is what the others' speed is compared with."""
SCENARIOS: Final = ("equal", "unequal", "link")


@dataclass(frozen=True)
class Finished:
    """A training, and what each of its workers measured."""

    scenario: Scenario
    mode: Mode
    settings: Settings
    workers: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Duration, at the slowest worker."""
        return max(float(worker["seconds"]) for worker in self.workers)

    @property
    def rate(self) -> float:
        """Samples per second, of all workers."""
        counts = [int(one["samples"]) for one in self.workers]
        if self.mode.kind == _ALONE:  # no worker waits for another
            seconds = [float(one["seconds"]) for one in self.workers]
            return sum(count / time for count, time in zip(counts, seconds, strict=True))
        return sum(counts) / self.seconds

    @property
    def is_same(self) -> bool:
        """True if all workers have the same weights, bit by bit, or each trains by itself."""
        return self.mode.kind == _ALONE or len({worker["weights"] for worker in self.workers}) == 1

    def cells(self, sync: Finished | None, alone: Finished | None) -> tuple[str, ...]:
        """Format as a row: beside the synchronous training, and the speed of workers by themselves."""
        first, is_alone = self.workers[0], self.mode.kind == _ALONE
        staleness = sum(float(worker["staleness"]) for worker in self.workers) / len(self.workers)
        most = max(int(worker["most_stale"]) for worker in self.workers)
        return (
            self.mode.name,
            f"{first['loss']:.4f}",
            "" if sync is None or is_alone else f"{first['loss'] / sync.workers[0]['loss'] - 1:+.1%}",
            f"{self.seconds:.1f}",
            f"{self.rate:.1f}",
            "" if alone is None else f"{self.rate / alone.rate:.0%}",
            f"{first['nbytes'] / 1e6:,.1f}",
            "" if is_alone else f"{staleness:.2f}, {most}",
            "" if is_alone else "yes" if self.is_same else "NO",
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "scenario": asdict(self.scenario),
            "mode": asdict(self.mode),
            "settings": asdict(self.settings),
            "seconds": self.seconds,
            "samples_per_second": self.rate,
            "same_bits": None if self.mode.kind == _ALONE else self.is_same,
            "workers": self.workers,
        }


def scenarios_of(arguments: argparse.Namespace) -> list[Scenario]:
    """Return the scenarios that the arguments ask for."""
    even = (1.0,) * arguments.workers
    known = {
        "equal": Scenario("equal workers", even),
        "unequal": Scenario(f"the first worker {arguments.slow:g} times slower", (arguments.slow, *even[1:])),
        "link": Scenario(f"links of {8 * arguments.rate / 1e6:g} Mbit/s", even, arguments.rate),
    }
    return [known[name] for name in arguments.scenarios]


def run(arguments: argparse.Namespace) -> int:
    """Run the suite. Return 0 if all workers have the same weights in every mode, else 1."""
    settings = Settings(workers=arguments.workers, steps=arguments.steps, batch=arguments.batch)
    if arguments.quick:
        settings = Settings.quick(workers=arguments.workers, batch=arguments.batch, steps=arguments.steps, seed=0)
    modes = [mode for mode in MODES if mode.name in arguments.modes]
    if not arguments.json:
        print_heading(
            f"gradserver bench modes: {settings.parameters / 1e6:.1f} million parameters, {settings.crew}, "
            f"{settings.samples:,} samples"
        )
    return carry_out(_trainings(arguments, settings, modes), arguments.json)


def _trainings(arguments: argparse.Namespace, settings: Settings, modes: list[Mode]) -> Iterator[Finished]:
    """Train in all modes under each scenario, and print a table of it."""
    for scenario in scenarios_of(arguments):
        found: dict[str, Finished] = {}
        with _place(scenario, arguments.workers) as place:
            for mode in modes:
                if mode.by_speed and len(set(scenario.slowness)) == 1:
                    continue  # it is what it is without that
                found[mode.name] = train(settings, mode, scenario, place, arguments.seconds)
                if not arguments.json:
                    print(
                        f"  {scenario.name}, {mode.name}: {found[mode.name].seconds:.1f} s", file=sys.stderr, flush=True
                    )
                yield found[mode.name]
        if not arguments.json:
            rows = [one.cells(found.get("sync"), found.get(_ALONE)) for one in found.values()]
            print("\n".join([f"\n{scenario.name}", *table(_HEADER, rows)]), flush=True)


def _place(scenario: Scenario, workers: int) -> AbstractContextManager[Place]:
    """Make the hosts of a scenario. The coordinator's link is as fast as those of all workers together."""
    return netns.links(workers, scenario.rate, workers * scenario.rate) if scenario.rate else nullcontext(Here())


def train(settings: Settings, mode: Mode, scenario: Scenario, place: Place, seconds: float) -> Finished:
    """Train once, with a coordinator and workers of its own.

    Raises:
        RunError: a process failed, or the training took longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="gradserver-modes-") as folder, Processes(Path(folder)) as processes:
        bind = f"tcp://{place.coordinator_address()}:{_PORT if scenario.rate else 0}"
        serve = ["-m", "gradserver", "serve", "--bind", bind, "--workers", str(settings.workers), *mode.serve]
        coordinator = processes.start("coordinator", *serve, prefix=place.coordinator_prefix())
        url = listening_url(coordinator, processes.lines([coordinator], _SECONDS_TO_LISTEN)[0])
        told = {"settings": settings.to_json(), "mode": mode.to_json(), "scenario": scenario.to_json(), "url": url}
        words = [word for name, value in told.items() for word in (f"--{name}", value)]
        workers = [
            processes.start(
                f"worker {rank}",
                *("-m", "gradserver.tools.bench.mode_worker", *words, "--rank", str(rank)),
                prefix=place.worker_prefix(rank),
            )
            for rank in range(settings.workers)
        ]
        return Finished(scenario, mode, settings, processes.answers(workers, seconds))
