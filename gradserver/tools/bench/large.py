"""The suite `large`: training steps of a GPT with 432 million parameters, over each channel or between devices.

With a width of 1024, 24 blocks and 32,768 tokens, the head alone has 134 MB of float32. A step exchanges 1.73 GB
each way.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradserver.tools.bench.processes import Processes
from gradserver.tools.bench.trainings import carry_out, print_heading
from gradserver.tools.common.processes import available_cores, listening_url
from gradserver.tools.demo.settings import Settings

_SECONDS_TO_LISTEN = 60.0
_HEADING = f"{'channel':8}{'type':6}{'devices':20}{'a step':>10}{'each way':>12}{'loss':>18}  same bits"


@dataclass(frozen=True)
class Run:
    """One training: a channel, an element type, and a device for each worker.

    Attributes:
        seconds: time limit of the whole run.
        wire: format in which gradients of float32 travel.
    """

    settings: Settings
    channel: str
    dtype: str
    devices: tuple[str, ...]
    seconds: float = 1800.0
    wire: str = "fp32"


@dataclass(frozen=True)
class Finished:
    """A run, and what each of its workers measured."""

    run: Run
    workers: list[dict[str, Any]]

    @property
    def step_seconds(self) -> float:
        """Median duration of a step, of all but the first, at the slowest worker."""
        samples: list[list[float]] = [worker["seconds"][1:] or worker["seconds"] for worker in self.workers]
        return max(statistics.median(one) for one in samples)

    @property
    def is_same(self) -> bool:
        """True if all workers have the same gradients, bit by bit."""
        return len({worker["gradients"] for worker in self.workers}) == 1

    def line(self) -> str:
        """Format as one line of the table."""
        run, first = self.run, self.workers[0]
        losses = f"{first['losses'][0]:.3f} → {first['losses'][-1]:.3f}"
        where = ", ".join(run.devices)
        size = f"{first['nbytes'] / 1e6:,.1f} MB"
        return (
            f"{first['channel']:8}{run.dtype:6}{where:20}{self.step_seconds:>8.2f} s{size:>12}{losses:>18}"
            f"  {'yes' if self.is_same else 'NO'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        run = self.run
        return {
            "parameters": run.settings.parameters,
            "dtype": run.dtype,
            "wire": run.wire,
            "devices": run.devices,
            "step_seconds": self.step_seconds,
            "same_bits": self.is_same,
            "workers": self.workers,
        }


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the model and the steps that the arguments ask for."""
    devices = arguments.devices.split(",")
    return Settings(
        workers=len(devices),
        batch=arguments.batch,
        steps=arguments.steps,
        context=arguments.context,
        width=arguments.width,
        heads=max(arguments.width // 64, 1),
        blocks=arguments.blocks,
        hidden=arguments.width * 7 // 2,
        history=0,
        vocabulary=arguments.vocabulary,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the suite. Return 0 if all workers have the same gradients in every run, else 1."""
    settings, devices = settings_of(arguments), tuple(arguments.devices.split(","))
    if not arguments.json:
        print_heading(f"gradserver bench large: {settings.parameters / 1e6:.0f} million parameters, {settings.crew}")
        print(_HEADING)
    return carry_out(_runs(arguments, settings, devices), arguments.json)


def _runs(arguments: argparse.Namespace, settings: Settings, devices: tuple[str, ...]) -> Iterator[Finished]:
    for channel in arguments.channel:
        finished = train(Run(settings, channel, arguments.dtype, devices, arguments.seconds, arguments.wire))
        if not arguments.json:
            print(finished.line(), flush=True)
        yield finished


def train(run: Run) -> Finished:
    """Train once, with a coordinator and workers of its own.

    Raises:
        RunError: a process failed, or the run took longer than it may.
    """
    with tempfile.TemporaryDirectory(prefix="gradserver-large-") as folder, Processes(Path(folder)) as processes:
        serve = "-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", "--workers", str(len(run.devices))
        coordinator = processes.start("coordinator", *serve)
        url = listening_url(coordinator, processes.lines([coordinator], _SECONDS_TO_LISTEN)[0])
        workers = [
            processes.start(f"worker {rank}", "-m", "gradserver.tools.bench.large_worker", *_arguments(run, url, rank))
            for rank in range(len(run.devices))
        ]
        return Finished(run, processes.answers(workers, run.seconds))


def _arguments(run: Run, url: str, rank: int) -> Sequence[str]:
    threads = max(available_cores() // len(run.devices), 1)
    options = {
        "settings": run.settings.to_json(),
        "url": url,
        "rank": rank,
        "channel": run.channel,
        "device": run.devices[rank],
        "dtype": run.dtype,
        "wire": run.wire,
        "threads": threads,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
