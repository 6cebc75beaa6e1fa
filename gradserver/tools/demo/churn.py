"""The demo in which workers are killed and others join."""

from __future__ import annotations

import csv
import itertools
import random
import time
from pathlib import Path

from gradserver.tools.common.processes import Child, RunError
from gradserver.tools.demo.churn_view import ChurnTable, ChurnView
from gradserver.tools.demo.lives import Churned, Life, churned, judge_churn
from gradserver.tools.demo.outcome import Result
from gradserver.tools.demo.processes import Processes
from gradserver.tools.demo.reports import Done, Joined, Ready, Round, TooLate, from_line
from gradserver.tools.demo.runner import SILENCE_SECONDS, Demo
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.view import View

_PAUSE = 0.5
"""Share of the time between two kills after which another worker joins."""
_CALM = 0.05
"""Share of the samples, at the end, without kills: some workers have to reach the end."""
_ORDER_SECONDS = 5.0
"""Limit of the delay by which a line of one process is read behind a later line of another."""


class Churn(Demo):
    """Run with workers that come and go, and then with one undisturbed process."""

    view_kind: type[View] = ChurnView
    view: ChurnView

    def run(self) -> int:
        """Train twice, and compare the results. Return the exit status."""
        view, settings = self.view, self.settings
        group, processes = self.train_churning()
        expected = [(step + 1) * settings.global_batch for step in range(settings.steps)]
        reference = self.train_reference(group.losses_at(expected))
        verdict = judge_churn(group, reference, lossy=settings.is_lossy)

        view.heading(3, "Comparison")
        view.verdict_on(group, reference, verdict)
        view.sample(group.sample)
        self.save_both(group, reference)
        view.close_on(verdict, processes + 1, ["loss.png", "losses.csv", "model.pt", "*.log"])
        return 1 if verdict.faults else 0

    def train_churning(self) -> tuple[Churned, int]:
        """Train with a coordinator and workers that come and go. Return also the number of processes."""
        url = self.start_coordinator(f"1:{self.settings.workers}", "--gather", "60")
        self.view.heading(1, f"{self.settings.crew} at {url}, one is killed every {self.settings.churn:g} s")
        run = _Run(self.settings, self.view, self.processes, url, self.out)
        lives = run.follow()
        self.processes.stop()
        return churned(lives, self.settings.samples), 1 + run.started

    def save_both(self, group: Churned, reference: Result) -> None:
        """Write the numbers and the picture."""
        from gradserver.tools.demo.churn_plot import (
            save_churn_plot,  # imported here: loading matplotlib may take seconds
        )

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
    """Training with workers that come and go.

    worker     event     time
    ─────────  ────────  ──────────────────────────────────────────────────────────────────────────────
    founder    begins    when all founders, and one more, are ready
    joining    starts    at the beginning, and when the one before has joined, so that it is ready
    any        is killed `churn` seconds after the last kill, if all killed ones have been replaced
    joining    begins    half of that after a kill, if it is ready
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
        """Time of the next kill; None while a worker is missing, and before the training has begun."""
        self._join_at: float | None = None
        self._last_death = 0.0
        self._began = False
        self._used = 0

    @property
    def started(self) -> int:
        """Number of workers that have been started."""
        return len(self._lives)

    def follow(self) -> list[Life]:
        """Run the training with its kills and arrivals, and show it, until it is over."""
        founders = [self._start(founds=True) for _ in range(self._settings.workers)]
        self._spare = self._start(founds=False)
        self._view.screen.live("  starting: importing torch, reading the text")
        while len(self._ready) < len(self._lives):
            self._hear(SILENCE_SECONDS)
        self._table = ChurnTable(self._view)
        for child in founders:
            child.say("go")
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
        program = "-m", "gradserver.tools.demo.churn_worker"
        child = self._processes.start_trainer(f"worker {name}", *program, *arguments, patience=SILENCE_SECONDS)
        self._lives[child] = Life(name, founds)
        return child

    def _over(self) -> bool:
        """Return whether all members have reported the end."""
        members = [life for life in self._lives.values() if life.is_member]
        return bool(members) and all(life.done is not None for life in members)

    def _act(self, now: float) -> float | None:
        """Do what is due. Return the time of the next action."""
        if self._kill_at is not None and self._kill_at <= now:
            self._kill(now)
        if self._join_at is not None and self._join_at <= now and self._spare in self._ready:
            assert self._spare is not None
            self._spare.say("go")
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
        """Take the next report, if one comes in time."""
        heard = self._processes.line_within(timeout)
        if heard is None:
            return False
        child, line = heard
        life = self._lives.get(child)
        if life is None:
            if line is None:
                raise RunError(f"the {child.name} ended during the training; its log is {child.log}")
        elif line is not None:
            self._take(child, life, line)
        elif life.killed is None and life.done is None and life.late is None:
            raise RunError(f"{child.name} ended without a result; its log is {child.log}")
        return True

    def _take(self, child: Child, life: Life, line: str) -> None:
        try:
            report = from_line(line)
        except ValueError as error:
            raise RunError(f"{child.name}: {error}") from error
        match report:
            case Ready():
                self._ready[child] = report
                if len({one.corpus_sha256 for one in self._ready.values()}) > 1:
                    raise RunError(f"{child.name} read a different text: was Python updated meanwhile?")
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
                raise RunError(f"{child.name} sent an unexpected {type(report).__name__}")

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
        """Raise an error if a worker was refused before all samples were used. Later it may be too late."""
        for life in self._lives.values():
            late = life.late
            if late is not None and self._used < self._settings.samples and late.at < time.monotonic() - _ORDER_SECONDS:
                raise RunError(f"worker {life.name} could not join: {late.reason}")
