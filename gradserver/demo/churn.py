"""The demo in which workers are killed and others join: starts them, ends them, and sees to it that all adds up."""

from __future__ import annotations

import csv
import itertools
import random
import time
from pathlib import Path

from gradserver.demo.churn_view import ChurnTable, ChurnView
from gradserver.demo.lives import Churned, Life, churned, judge_churn
from gradserver.demo.outcome import Result
from gradserver.demo.processes import ProcessError, Processes
from gradserver.demo.reports import Done, Joined, Ready, Round, TooLate, from_line
from gradserver.demo.runner import SILENCE_SECONDS, Demo
from gradserver.demo.settings import Settings
from gradserver.demo.view import View
from gradserver.processes import Child

_PAUSE = 0.5
"""Part of the time between two deaths after which another one joins."""
_CALM = 0.05
"""Part of the samples, at the end, in which nobody is killed: somebody has to see the end."""
_ORDER_SECONDS = 5.0
"""What one process says may be heard so much later than what another one says behind it."""


class Churn(Demo):
    """One run: workers that come and go, then one process that nothing happens to."""

    view_kind: type[View] = ChurnView
    view: ChurnView

    def run(self) -> int:
        """Both trainings, and what came of them. Returns the exit status."""
        view, settings = self.view, self.settings
        group, processes = self.train_churning()
        expected = [(step + 1) * settings.global_batch for step in range(settings.steps)]
        reference = self.train_reference(group.losses_at(expected))
        verdict = judge_churn(group, reference, lossy=settings.is_lossy)

        view.heading(3, "The two compared")
        view.verdict_on(group, reference, verdict)
        view.sample(group.sample)
        self.save_both(group, reference)
        view.close_on(verdict, processes + 1, ["loss.png", "losses.csv", "model.pt", "*.log"])
        return 1 if verdict.faults else 0

    def train_churning(self) -> tuple[Churned, int]:
        """The coordinator, and workers that come and go; with how many processes these were."""
        url = self.start_coordinator(f"1:{self.settings.workers}", "--gather", "60")
        self.view.heading(1, f"{self.settings.crew} at {url}, of which one is killed each {self.settings.churn:g} s")
        run = _Run(self.settings, self.view, self.processes, url, self.out)
        lives = run.follow()
        self.processes.stop()
        return churned(lives, self.settings.samples), 1 + run.started

    def save_both(self, group: Churned, reference: Result) -> None:
        """Writes numbers and picture."""
        from gradserver.demo.churn_plot import save_churn_plot  # here, as loading matplotlib may take seconds

        self.view.screen.live("  drawing")
        size = self.settings.global_batch
        with (self.out / "losses.csv").open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream)
            table.writerow(["run", "round", "samples", "workers", "loss"])
            table.writerows(["churn", one.number + 1, one.used, one.workers, one.loss] for one in group.rounds)
            table.writerows(["calm", one.step + 1, (one.step + 1) * size, 1, one.loss] for one in reference.steps)
        save_churn_plot(self.out / "loss.png", self.settings, group, reference)
        self.view.screen.clear()


class _Run:
    """The workers' part.

    one who    is        when
    ─────────  ────────  ──────────────────────────────────────────────────────────────────────────────
    founds     told      all who found the group, and one more, are ready
    joins      started   at the beginning, and whenever the one before has joined: so that it is ready
    any        killed    `churn` seconds behind the last death, if all who had died have been replaced
    joins      told      half of that behind a death, if it is ready
    """

    def __init__(self, settings: Settings, view: ChurnView, processes: Processes, url: str, out: Path) -> None:
        self._settings, self._view, self._processes, self._url, self._out = settings, view, processes, url, out
        self._numbers = itertools.count()
        self._lives: dict[Child, Life] = {}
        self._ready: dict[Child, Ready] = {}
        self._chance = random.Random(settings.seed)
        self._table: ChurnTable | None = None
        self._spare: Child | None = None
        self._kill_at: float | None = None
        """When the next one is to be killed; None while one is missing, and before the training has begun."""
        self._join_at: float | None = None
        self._last_death = 0.0
        self._began = False
        self._used = 0

    @property
    def started(self) -> int:
        """How many workers have been started."""
        return len(self._lives)

    def follow(self) -> list[Life]:
        """Shows what happens, and lets it happen, until the training is over."""
        founders = [self._start(founds=True) for _ in range(self._settings.workers)]
        self._spare = self._start(founds=False)
        self._view.screen.live("  starting: importing torch, reading the text")
        while len(self._ready) < len(self._lives):
            self._hear(SILENCE_SECONDS)
        self._table = ChurnTable(self._view)
        for child in founders:
            self._processes.go(child)
        heard = time.monotonic()
        while not self._over():
            now = time.monotonic()
            if now - heard > SILENCE_SECONDS:
                raise self._processes.silence(SILENCE_SECONDS)
            self._check_late()
            due = self._act(now)
            if self._hear(max(due - now, 0.0) if due is not None else 1.0):
                heard = time.monotonic()
        self._view.screen.clear()
        return list(self._lives.values())

    def _start(self, founds: bool) -> Child:
        name = f"w{next(self._numbers)}"
        threads = max(1, self._view.cores // self._settings.workers)
        arguments = ["--settings", self._settings.to_json(), "--threads", str(threads), "--url", self._url]
        arguments += ["--name", name, "--save", str(self._out / "model.pt"), *(["--founds"] if founds else [])]
        child = self._processes.start(f"worker {name}", "-m", "gradserver.demo.churn_worker", *arguments, waits=True)
        self._lives[child] = Life(name, founds)
        return child

    def _over(self) -> bool:
        """Whether all who were in the group to its end have said so."""
        members = [life for life in self._lives.values() if life.is_member]
        return bool(members) and all(life.done is not None for life in members)

    def _act(self, now: float) -> float | None:
        """Does what is due; when there is something to do again."""
        if self._kill_at is not None and self._kill_at <= now:
            self._kill(now)
        if self._join_at is not None and self._join_at <= now and self._spare in self._ready:
            assert self._spare is not None
            self._processes.go(self._spare)
            self._join_at = None
        return min((at for at in (self._kill_at, self._join_at) if at is not None and at > now), default=None)

    def _kill(self, now: float) -> None:
        assert self._table is not None
        self._kill_at = None
        members = [child for child, life in self._lives.items() if life.is_member]
        if self._used >= (1 - _CALM) * self._settings.samples or len(members) < 2:
            return
        victim = self._chance.choice(members)
        self._lives[victim].killed = self._last_death = now
        self._processes.kill(victim)
        self._table.killed(self._lives[victim], len(members) - 1)
        self._join_at = now + _PAUSE * self._settings.churn

    def _hear(self, timeout: float) -> bool:
        """Takes the next report, if one comes in time."""
        heard = self._processes.line_within(timeout)
        if heard is None:
            return False
        child, line = heard
        life = self._lives.get(child)
        if life is None:
            if line is None:
                raise ProcessError(f"the {child.name} ended in the midst of the training; its log is {child.log}")
        elif line is not None:
            self._take(child, life, line)
        elif life.killed is None and life.done is None and life.late is None:
            raise ProcessError(f"{child.name} ended without a result; its log is {child.log}")
        return True

    def _take(self, child: Child, life: Life, line: str) -> None:
        try:
            report = from_line(line)
        except ValueError as error:
            raise ProcessError(f"{child.name} sent what is {error}") from error
        match report:
            case Ready():
                self._ready[child] = report
                if len({one.corpus_sha256 for one in self._ready.values()}) > 1:
                    raise ProcessError(f"{child.name} read another text than the others: was Python being updated?")
            case Joined():
                life.joined = report
                self._has_joined(child, life)
            case Round():
                self._has_done(life, report)
            case TooLate():
                life.late = report
            case Done():
                life.done = report
            case _:
                raise ProcessError(f"{child.name} sent a {type(report).__name__}")

    def _has_joined(self, child: Child, life: Life) -> None:
        assert self._table is not None
        if life.killed is None and child is self._spare:
            self._table.joined(life)
            pause = (1 - _PAUSE) * self._settings.churn
            self._kill_at = max(time.monotonic() + pause, self._last_death + self._settings.churn)
            self._spare = self._start(founds=False)

    def _has_done(self, life: Life, one: Round) -> None:
        assert self._table is not None
        if not self._began:
            self._began = True
            self._kill_at = time.monotonic() + self._settings.churn
        life.rounds.append(one)
        self._used = max(self._used, one.used)
        self._table.add(one)

    def _check_late(self) -> None:
        """Who comes when all samples are used comes too late; and nobody may be turned away before."""
        for life in self._lives.values():
            late = life.late
            if late is not None and self._used < self._settings.samples and late.at < time.monotonic() - _ORDER_SECONDS:
                raise ProcessError(f"worker {life.name} could not join: {late.reason}")
