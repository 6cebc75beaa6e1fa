"""Output of a run: its announcement, its tables while it trains, and its verdict."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradserver.protocol.harmless import harmless
from gradserver.tools.common.screen import BOLD, CYAN, DIM, GREEN, RED, WIDTH, Fact, Screen, duration
from gradserver.tools.demo.outcome import Gap, GlobalStep, Result, Verdict, distances
from gradserver.tools.demo.settings import PROMPT, TOLERANCE, VOCABULARY, Settings

_ROWS = 10  # rows of a table; the steps between them appear in the live line only
_BAR = 22  # columns
_SAMPLE_LINES = 9


class View:
    """Printer of a run's output."""

    title = "gradserver demo"

    def __init__(self, screen: Screen, settings: Settings, cores: int, out: Path) -> None:
        self.screen = screen
        self.settings = settings
        self.cores = cores
        self.began = time.monotonic()
        self.out = out

    def introduce(self) -> None:
        """Announce the run, and its duration."""
        s, version = self.settings, sys.version_info
        self.screen.line(self.screen.style(self.title, BOLD))
        self.screen.line()
        self.screen.facts(
            ("model", f"byte-level GPT, {_count(s.parameters)} parameters, {s.blocks} blocks, context {s.context}"),
            ("text", f"the source of Python {version.major}.{version.minor}'s own standard library"),
            ("first", f"{s.crew} and a coordinator, each in its own process, train it"),
            *self.what(),
            ("then", f"one process trains it: {batch_of(s)}, the same seed and samples"),
            *self.promise(),
            ("time", f"about {duration(s.expected_seconds(self.cores))} on {_cores(self.cores)}{_others(self.cores)}"),
        )

    def what(self) -> tuple[Fact, ...]:
        """Describe the workers' training."""
        s = self.settings
        return (("", f"{s.steps:,} steps of {s.workers} x {s.batch} sequences; gradients are averaged in each step"),)

    def promise(self) -> tuple[Fact, ...]:
        """Describe the codec of gradients, if it is lossy, and the checks."""
        s = self.settings
        if not s.is_lossy:
            return (("checks", "all replicas are bit-identical, and both loss curves are the same"),)
        return (
            ("wire", f"gradients travel as {s.wire}, with error feedback"),
            ("checks", "replicas are bit-identical; the distance of curves is reported"),
        )

    def heading(self, number: int, text: str) -> None:
        """Begin one of the parts of the run."""
        self.screen.line()
        self.screen.line(self.screen.style(f"[{number}/3]", CYAN) + " " + self.screen.style(text, BOLD))

    def verdict(self, group: Result, reference: Result, verdict: Verdict) -> None:
        """Show the comparison."""
        last = max(1, self.settings.steps // 10)  # the samples of one step are too few to compare
        self.screen.line()
        self.verdict_on_weights(verdict.hashes)
        self._verdict_on_curve("loss curve", verdict.losses, verdict.losses_allowed)
        self._verdict_on_curve("gradients", verdict.gradient_norms, verdict.norms_allowed)
        self.screen.line()
        self.screen.facts(
            ("", f"{'':24}{'workers':>12}{'one process':>14}"),
            ("loss", pair("first step", group.losses[0], reference.losses[0], ".4f")),
            ("", pair(f"mean of last {last}", _mean(group, last), _mean(reference, last), ".4f")),
            ("", pair("held-out text", group.validation_loss, reference.validation_loss, ".4f")),
            ("speed", pair("tokens per second", self._rate(group), self._rate(reference), ",.0f")),
            ("", f"{'exchanging gradients':24}{group.exchange_share:>12.1%}{'-':>14}"),
        )

    def verdict_on_weights(self, hashes: Sequence[str]) -> None:
        """Show whether all replicas have the same hash."""
        if len(set(hashes)) == 1:
            self.mark(True, "weights", "identical", f"SHA-256 {hashes[0][:32]}...")
            return
        self.mark(False, "weights", "DIFFERENT", "SHA-256 of the replicas:")
        for rank, digest in enumerate(hashes):
            self.screen.line(f"  {'':27}worker {rank} {digest[:24]}")

    def _verdict_on_curve(self, what: str, gap: Gap, allowed: bool) -> None:
        if self.settings.is_lossy:
            where = f"difference {gap.distance:.1e} (step {gap.step + 1})"
            self.mark(allowed, what, "lossy" if allowed else "NOT FINITE", where)
            return
        where = f"difference {gap.distance:.1e} (step {gap.step + 1}, tolerance {TOLERANCE:.0e})"
        self.mark(allowed, what, "same" if allowed else "DIFFERENT", where)

    def sample(self, text: str) -> None:
        """Show a text of the trained model, beside a rule."""
        self.screen.line()
        self.screen.line(f"  The model continues {self.screen.style(repr(PROMPT), BOLD)}:")
        self.screen.line()
        lines = [line[: WIDTH - 6].rstrip() for line in harmless(PROMPT + text).splitlines()]
        for line in list(filter(None, lines))[:_SAMPLE_LINES]:
            self.screen.line(self.screen.style(f"    | {line}", DIM))

    def close(self, verdict: Verdict, files: Sequence[str]) -> None:
        """Show pass or fail in one line, and further commands."""
        s = self.settings
        what = f"{s.crew} trained like one process with {batch_of(s)}"
        if verdict.lossy:
            what = f"{s.crew} have identical replicas, trained with {s.wire}"
        apart = "are not finite" if verdict.lossy else "differ"
        wrong = [] if verdict.identical else ["the replicas' weights differ"]
        wrong += [] if verdict.losses_allowed else [f"the loss curves {apart}"]
        wrong += [] if verdict.norms_allowed else [f"the gradients' norms {apart}"]
        self.ending(what, wrong, s.workers + 2, files)

    def ending(self, what: str, wrong: Sequence[str], processes: int, files: Sequence[str]) -> None:
        """Show the sentence `what`, or what is `wrong`; and further commands."""
        self.screen.line()
        self.screen.verdict(not wrong, f"{', and '.join(wrong) or what}.")
        self.screen.line()
        took = f"{time.monotonic() - self.began:.0f} s, including the start of {processes} processes"
        self.screen.facts(("took", took), ("files", f"{self.out}: {', '.join(files)}"))
        if not wrong:
            self.screen.line()
            self.screen.line(self.screen.style("Next", BOLD))
            self.screen.facts(*self.following())

    def following(self) -> tuple[Fact, ...]:
        """Suggest further commands."""
        s = self.settings
        more = f"--workers {2 * s.workers}" if s.workers <= 4 else f"--steps {5 * s.steps}"
        connect = ['  worker = gradserver.connect("tcp://COORDINATOR:7411"']
        if s.is_lossy:
            connect = [f"{connect[0]},", f'{"":30}wire="{s.wire}"']
        connect[-1] += ")"
        return (
            ("more", f"gradserver demo {more}"),
            ("", "gradserver demo --churn 10     (workers are killed, others join)"),
            ("your own", "gradserver serve --bind tcp://COORDINATOR:7411 --workers 2"),
            ("", "where COORDINATOR is the private address of that machine, as there is no authentication;"),
            ("", "and in your training script, on every machine:"),
            *(("", line) for line in connect),
            ("", "  model = gradserver.DistributedDataParallel(model, worker)"),
        )

    def _rate(self, result: Result) -> float:
        return self.settings.tokens_per_step * len(result.steps) / (result.seconds or math.inf)

    def mark(self, good: bool, what: str, how: str, more: str) -> None:
        """Show one check and its result."""
        sign = self.screen.style("ok", GREEN) if good else self.screen.style("NO", RED)
        self.screen.line(f"  {sign}  {what:12}{how:10}  {more}")


class Table:
    """Table of one training run, with a row at an interval of steps."""

    def __init__(self, view: View, reference: Sequence[float] | None = None) -> None:
        """Begin a table. `reference`: losses to compare with; without them the table shows a bar and the exchange."""
        self._view = view
        self._reference = reference
        self._spent: list[float] = []  # seconds of each step
        self._window: list[GlobalStep] = []  # the steps since the last row
        if reference is None:
            columns = f"  {'loss':<{_BAR + 8}}  tokens/s  exchange"
        else:
            columns = " one process      workers  difference  tokens/s"
        view.screen.line()
        view.screen.line(view.screen.style(f"  {'step':>8}{columns}    time    left", DIM))

    def add(self, step: GlobalStep) -> None:
        """Show one more step."""
        steps = self._view.settings.steps
        self._spent.append(step.seconds)
        self._window.append(step)
        row = self._row(step)
        if step.step == 0 or (step.step + 1) * _ROWS // steps > step.step * _ROWS // steps:
            self._view.screen.line(row)
            self._window.clear()
        else:
            self._view.screen.live(row)

    def _row(self, step: GlobalStep) -> str:
        seconds = sum(one.seconds for one in self._window) or math.inf
        rate = self._view.settings.tokens_per_step * len(self._window) / seconds
        if self._reference is None:
            bar = self._view.screen.bar(step.loss / math.log(VOCABULARY), _BAR)
            share = sum(one.exchange_share * one.seconds for one in self._window) / seconds
            middle = f"  {step.loss:6.3f}  {bar}{rate:>10,.0f}{share:>10.1%}"
        else:
            other = self._reference[step.step]
            gap = distances([other], [step.loss])[0]
            middle = f"{step.loss:>12.6f}{other:>13.6f}{gap:>12.1e}{rate:>10,.0f}"
        return f"  {step.step + 1:>8,}{middle}{sum(self._spent):>7.1f}s{self._left()}"

    def _left(self) -> str:
        """Estimate the time that is left from the pace so far, without the first step, which warms up."""
        if len(self._spent) < 2:
            return ""
        pace = sum(self._spent[1:]) / (len(self._spent) - 1)
        return f"{pace * (self._view.settings.steps - len(self._spent)):>7.1f}s"


def _mean(result: Result, count: int) -> float:
    return math.fsum(result.losses[-count:]) / count


def pair(what: str, workers: float, one: float, form: str) -> str:
    """Format a figure of both runs as a row."""
    return f"{what:24}{workers:>12{form}}{one:>14{form}}"


def batch_of(settings: Settings) -> str:
    """Describe the batch of one process that makes the same steps."""
    return f"{settings.workers} times the batch" if settings.workers > 1 else "the same batch"


def _cores(cores: int) -> str:
    return f"{cores} cores" if cores > 1 else "one core"


def _others(cores: int) -> str:
    """Warn that the duration is longer, if other programs use the cores."""
    return ", longer as other programs use them" if os.getloadavg()[0] > cores / 2 else ""


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.0f} K"
