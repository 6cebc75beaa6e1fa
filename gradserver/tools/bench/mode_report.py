"""The trainings of the suite `modes`: what each has measured, tables of them, and files that several runs add to."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gradserver.tables import table
from gradserver.tools.bench.modes import MODES, Mode, Scenario
from gradserver.tools.common.processes import RunError
from gradserver.tools.demo.settings import Settings

SETTLED: Final = 0.1
"""Share of the samples, at the beginning, that does not count for a rate: workers are not measured yet then."""
_HEADER: Final = ("mode", "loss", "", "seconds", "samples/s", "of alone", "MB", "staleness", "same bits")


@dataclass(frozen=True)
class Reference:
    """Samples per second of each worker without exchange.

    Attributes:
        each: while the others waited: one after the other.
        together: while the others computed, too.
    """

    each: list[float]
    together: list[float]


@dataclass(frozen=True)
class Finished:
    """A training, and what each of its workers measured.

    Attributes:
        workers: what each has measured (`gradserver.tools.bench.mode_worker.Outcome`).
        references: the workers by themselves, before and after the training.
    """

    scenario: Scenario
    mode: Mode
    settings: Settings
    workers: list[dict[str, Any]]
    references: list[Reference]

    @property
    def seconds(self) -> float:
        """Duration, until the last worker is ready."""
        return self._ended - min(float(worker["began"]) for worker in self.workers)

    @property
    def _ended(self) -> float:
        return max(float(worker["ended"]) for worker in self.workers)

    @property
    def samples(self) -> int:
        """Samples in the batches of all workers."""
        return sum(int(count) for worker in self.workers for _, count in worker["batches"])

    @property
    def rate(self) -> float:
        """Samples per second of all workers, behind the first of them (`SETTLED`)."""
        batches = sorted((float(at), int(count)) for worker in self.workers for at, count in worker["batches"])
        total, done = self.samples, 0
        for at, count in batches:
            done += count
            if done >= SETTLED * total and at < self._ended:
                return (total - done) / (self._ended - at)
        return 0.0

    @property
    def alone(self) -> float:
        """Samples per second of all workers by themselves, beside this training."""
        return statistics.fmean(sum(one.each) for one in self.references)

    @property
    def together(self) -> float:
        """Samples per second of all workers at once, without exchange, beside this training."""
        return statistics.fmean(sum(one.together) for one in self.references)

    @property
    def share(self) -> float:
        """Samples per second beside those of all workers by themselves."""
        return self.rate / self.alone

    @property
    def loss(self) -> float:
        """Loss on held-out text."""
        return float(self.workers[0]["loss"])

    @property
    def nbytes(self) -> int:
        """Bytes between the coordinator and all workers, both ways."""
        return int(self.workers[0]["nbytes"])

    @property
    def staleness(self) -> float:
        """Mean staleness of contributions, in rounds."""
        return statistics.fmean(float(worker["staleness"]) for worker in self.workers)

    @property
    def most_stale(self) -> int:
        """The largest staleness of a contribution, in rounds."""
        return max(int(worker["most_stale"]) for worker in self.workers)

    @property
    def is_same(self) -> bool:
        """True if all workers have the same weights, bit by bit."""
        return len({worker["weights"] for worker in self.workers}) == 1

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "scenario": asdict(self.scenario),
            "mode": asdict(self.mode),
            "settings": asdict(self.settings),
            "seconds": self.seconds,
            "samples_per_second": self.rate,
            "share_of_alone": self.share,
            "same_bits": self.is_same,
            "workers": self.workers,
            "references": [asdict(one) for one in self.references],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Finished:
        """Read what `to_json` returned. KeyError, TypeError or ValueError if it is none of that."""
        scenario, mode = Scenario.from_json(json.dumps(found["scenario"])), Mode.from_json(json.dumps(found["mode"]))
        settings = Settings.from_json(json.dumps(found["settings"]))
        references = [Reference(**one) for one in found["references"]]
        return cls(scenario, mode, settings, found["workers"], references)


def load(path: Path, settings: Settings) -> list[Finished]:
    """Read the trainings of a file; none if it does not exist.

    Raises:
        RunError: it has something else, or trainings with other settings.
    """
    try:
        found = [Finished.from_json(one) for one in json.loads(path.read_text("utf-8"))["runs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} has no trainings of `gradserver bench modes --json`: {error}") from None
    for one in found:
        if one.settings != settings:
            raise RunError(
                f"{path} has trainings with other settings: {one.settings}. This run has {settings}. Give the same "
                f"options, or another file"
            )
    return found


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a document of trainings, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, indent=2), "utf-8")
    os.replace(part, path)


def tables(found: Sequence[Finished]) -> list[str]:
    """Format a table for each scenario, with a row for each mode."""
    lines: list[str] = []
    for scenario in dict.fromkeys(one.scenario.name for one in found):
        mine = [one for one in found if one.scenario.name == scenario]
        lines += ["", scenario, *table(_HEADER, [row(group, mine) for group in by_mode(mine)]), *_notes(mine)]
    return lines


def by_mode(found: Sequence[Finished]) -> list[list[Finished]]:
    """Return the trainings of each mode, in the order of `MODES`."""
    order = [mode.name for mode in MODES]
    names = sorted({one.mode.name for one in found}, key=order.index)
    return [[one for one in found if one.mode.name == name] for name in names]


def row(group: Sequence[Finished], scenario: Sequence[Finished]) -> tuple[str, ...]:
    """Format the trainings of a mode as a row, with the medians and ranges of several."""
    return (
        group[0].mode.name,
        _median(group, lambda one: one.loss, "{:.4f}"),
        _spread([one.loss / sync - 1 for one in group], "{:+.1%}") if (sync := loss_of_sync(scenario)) else "",
        _median(group, lambda one: one.seconds, "{:.1f}"),
        _median(group, lambda one: one.rate, "{:.1f}"),
        _spread([one.share for one in group], "{:.0%}"),
        _median(group, lambda one: one.nbytes / 1e6, "{:,.1f}"),
        f"{_median(group, lambda one: one.staleness, '{:.2f}')}, {max(one.most_stale for one in group)}",
        "yes" if all(one.is_same for one in group) else "NO",
    )


def loss_of_sync(scenario: Sequence[Finished]) -> float | None:
    """Return the median loss of the synchronous trainings of a scenario; None if there are none."""
    losses = [one.loss for one in scenario if one.mode.name == MODES[0].name]
    return statistics.median(losses) if losses else None


def _median(group: Sequence[Finished], value: Callable[[Finished], float], form: str) -> str:
    return form.format(statistics.median(value(one) for one in group))


def _spread(values: Sequence[float], form: str) -> str:
    """Format a median, and the range of several values."""
    text = form.format(statistics.median(values))
    return text if len(values) < 2 else f"{text} ({form.format(min(values))} … {form.format(max(values))})"


def _notes(found: Sequence[Finished]) -> list[str]:
    """Describe what the rates are compared with."""
    alone = [one.alone for one in found]
    together = statistics.median(one.together / one.alone for one in found)
    return [
        f"  alone: {min(alone):.1f} to {max(alone):.1f} samples/s, the sum of workers by themselves in turns",
        f"  all at once, without exchange: {together:.0%} of that",
    ]
