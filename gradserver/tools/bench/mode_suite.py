"""The suite `modes`: the same training in every mode, on equal and unequal workers and over a slow link.

Each training has a coordinator of its own, and the same number of samples. The processes of workers stay for all
trainings of a scenario. Between two trainings each worker trains by itself for a moment, which is what the rates of
both are compared with.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from gradserver.tools.bench import machine
from gradserver.tools.bench.mode_report import Finished, Reference, load, save, tables
from gradserver.tools.bench.modes import MODES, Mode, Scenario, scenario_of
from gradserver.tools.bench.places import Here, Place
from gradserver.tools.bench.processes import Processes, ask
from gradserver.tools.bench.trainings import carry_out, print_heading
from gradserver.tools.common import netns
from gradserver.tools.common.processes import Child, RunError, listening_url
from gradserver.tools.demo.settings import Settings

_SECONDS_TO_LISTEN: Final = 60.0
_SECONDS_ALONE: Final = 3.0
"""Duration of a measurement of a worker by itself."""
_SECONDS_QUICK: Final = 0.2
"""Duration with a tiny model."""
_PORT: Final = 7411


class Crew:
    """The processes of workers, on the hosts of a scenario."""

    def __init__(
        self, processes: Processes, settings: Settings, scenario: Scenario, place: Place, seconds_alone: float
    ) -> None:
        self._processes, self._settings, self._scenario, self._place = processes, settings, scenario, place
        self._seconds_alone = seconds_alone
        words = ["--settings", settings.to_json(), "--scenario", scenario.to_json()]
        self._workers = [
            processes.start(
                f"worker {rank}",
                *("-m", "gradserver.tools.bench.mode_worker", *words, "--rank", str(rank)),
                prefix=place.worker_prefix(rank),
            )
            for rank in range(settings.workers)
        ]

    def reference(self) -> Reference:
        """Measure the workers without exchange: one after the other, and all at once."""
        each = [rate for worker in self._workers for rate in self._alone([worker])]
        return Reference(each, self._alone(self._workers))

    def _alone(self, workers: Sequence[Child]) -> list[float]:
        for worker in workers:
            ask(worker, {"do": "alone", "seconds": self._seconds_alone})
        return [float(one["rate"]) for one in self._processes.answers(workers, _SECONDS_TO_LISTEN)]

    def train(self, mode: Mode, folder: Path, seconds: float, before: Reference) -> Finished:
        """Train once, with a coordinator of its own.

        Raises:
            RunError: a process failed, or the training took longer than ``seconds``.
        """
        with Processes(folder) as coordinators:
            url = self._serve(coordinators, mode)
            for worker in self._workers:
                ask(worker, {"do": "train", "mode": mode.to_json(), "url": url})
            outcomes = self._processes.answers(self._workers, seconds)
        return Finished(self._scenario, mode, self._settings, outcomes, [before, self.reference()])

    def _serve(self, coordinators: Processes, mode: Mode) -> str:
        """Start a coordinator, and return its URL."""
        place = self._place
        bind = f"tcp://{place.coordinator_address()}:{_PORT if self._scenario.rate else 0}"
        serve = ["-m", "gradserver", "serve", "--bind", bind, "--workers", str(self._settings.workers), *mode.serve]
        child = coordinators.start("coordinator", *serve, prefix=place.coordinator_prefix())
        return listening_url(child, coordinators.lines([child], _SECONDS_TO_LISTEN)[0])


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the model and the samples that the arguments ask for."""
    if arguments.quick:
        return Settings.quick(workers=arguments.workers, batch=arguments.batch, steps=arguments.steps, seed=0)
    return Settings(
        workers=arguments.workers,
        batch=arguments.batch,
        steps=arguments.steps,
        context=128,
        width=96,
        heads=3,
        blocks=3,
        hidden=256,
        validation_rows=256,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the suite. Return 0 if all workers have the same weights in every mode, else 1."""
    settings = settings_of(arguments)
    if not arguments.json:
        print_heading(
            f"gradserver bench modes: {settings.parameters / 1e6:.2f} million parameters, {settings.crew}, "
            f"{settings.samples:,} samples"
        )
    try:
        known = load(arguments.add, settings) if arguments.add else []
    except RunError as error:
        print(f"gradserver bench: {error}", file=sys.stderr)
        return 1
    found = list(known)
    status = carry_out(_all(arguments, settings, found), arguments.json)
    if not arguments.json:
        print("\n".join(tables(found)), flush=True)
    if arguments.plot is not None:
        from gradserver.tools.bench.mode_plot import save_plot

        save_plot(arguments.plot, found)
    return status


def _all(arguments: argparse.Namespace, settings: Settings, found: list[Finished]) -> Iterator[Finished]:
    """Yield the trainings that are ``found`` already, and those that are missing, which are added to the file."""
    yield from tuple(found)
    for name in arguments.scenarios:
        scenario = scenario_of(name, arguments.workers, arguments.slow, arguments.rate)
        for one in _missing(arguments, settings, scenario, found):
            found.append(one)
            if arguments.add:
                document = {"machine": machine.describe(), "versions": machine.versions()}
                save(arguments.add, {**document, "runs": [each.to_json() for each in found]})
            if not arguments.json:
                text = f"{scenario.name}, {one.mode.name}: {one.seconds:.1f} s, loss {one.loss:.4f}, {one.share:.0%}"
                print(f"  {text}", file=sys.stderr, flush=True)
            yield one


def _missing(
    arguments: argparse.Namespace, settings: Settings, scenario: Scenario, found: Sequence[Finished]
) -> Iterator[Finished]:
    """Train in all modes in turns, as often as is missing."""
    there = [one.mode.name for one in found if one.scenario == scenario]
    todo = [
        mode
        for repetition in range(arguments.repetitions)
        for mode in MODES
        if mode.name in arguments.modes and there.count(mode.name) <= repetition
    ]
    if not todo:
        return
    with _place(scenario, arguments.workers) as place, _folder() as folder, Processes(folder) as processes:
        crew = Crew(processes, settings, scenario, place, _SECONDS_QUICK if arguments.quick else _SECONDS_ALONE)
        reference = crew.reference()
        for mode in todo:
            one = crew.train(mode, folder, arguments.seconds, reference)
            reference = one.references[-1]
            yield one


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gradserver-modes-") as folder:
        yield Path(folder)


def _place(scenario: Scenario, workers: int) -> AbstractContextManager[Place]:
    """Make the hosts of a scenario. The coordinator's link is as fast as those of all workers together."""
    return netns.links(workers, scenario.rate, workers * scenario.rate) if scenario.rate else nullcontext(Here())
