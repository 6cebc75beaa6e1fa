"""Output of a run in which workers are killed and others join."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradserver.tools.common.screen import DIM, GREEN, RED, Fact
from gradserver.tools.demo.lives import Churned, ChurnVerdict, Life
from gradserver.tools.demo.outcome import Result
from gradserver.tools.demo.reports import Round
from gradserver.tools.demo.settings import CHURN_TOLERANCE, FINAL, VOCABULARY
from gradserver.tools.demo.view import View, pair

_ROWS = 10  # of the table, beside the lines of events
_BAR = 16  # columns


class ChurnView(View):
    """Printer of such a run's output."""

    title = "gradserver demo --churn"

    def what(self) -> tuple[Fact, ...]:
        """Describe the workers' training, and the kills."""
        s = self.settings
        return (
            ("", f"{s.samples:,} sequences, which the coordinator leases, {s.global_batch} in a round"),
            ("", f"every {s.churn:g} s a worker is killed, and another one takes its place"),
        )

    def promise(self) -> tuple[Fact, ...]:
        """Describe the checks."""
        s = self.settings
        near = f"the final loss is within {CHURN_TOLERANCE:.0%}"
        if s.is_lossy:
            near = f"gradients travel as {s.wire}; the distance of the loss is reported"
        return (("checks", "all replicas are bit-identical, each sample is used once,"), ("", f"and {near}"))

    def verdict_on(self, group: Churned, reference: Result, verdict: ChurnVerdict) -> None:
        """Show the comparison."""
        account, final = group.account, f"mean of last {FINAL:.0%}"
        self.screen.line()
        self.verdict_on_weights(verdict.hashes)
        used = f"{account.told + account.by_the_dead:,} of {account.total:,}"
        if account.twice:
            used += f", {account.twice:,} of them more than once"
        elif account.by_the_dead:
            used += f", {account.by_the_dead} of them by killed workers"
        self.mark(account.each_once, "samples", "each once" if account.each_once else "NOT ONCE", used)
        allowed = "" if verdict.lossy else f", tolerance {CHURN_TOLERANCE:.0%}"
        how = ("lossy" if verdict.lossy else "same") if verdict.loss_allowed else "DIFFERENT"
        self.mark(verdict.loss_allowed, "final loss", how, f"difference {verdict.distance:.2%}{allowed}")
        self.screen.line()
        speed = self.settings.tokens_per_step * len(reference.steps) / (reference.seconds or math.inf)
        own = self.settings.context * account.used / (group.seconds or math.inf)
        self.screen.facts(
            ("", f"{'':24}{'with kills':>12}{'undisturbed':>14}"),
            ("loss", pair(final, *verdict.losses, ".4f")),
            ("", pair("held-out text", group.validation_loss, reference.validation_loss, ".4f")),
            ("rounds", pair("", len(group.rounds), len(reference.steps), ",d")),
            ("speed", pair("tokens per second", own, speed, ",.0f")),
        )
        self.screen.line()
        self.screen.facts(
            ("killed", f"{verdict.killed:<4}{_waited(group.waits(joined=False))}"),
            ("joined", f"{verdict.joined:<4}{_waited(group.waits(joined=True))}"),
        )

    def close_on(self, verdict: ChurnVerdict, processes: int, files: Sequence[str]) -> None:
        """Show the verdict in one sentence, and further commands."""
        lossy = f"the replicas are identical, trained with {self.settings.wire}"
        held = lossy if verdict.lossy else "the training has the same result"
        killed = "1 worker was" if verdict.killed == 1 else f"{verdict.killed} workers were"
        what = f"{killed} killed and {verdict.joined} joined, and {held}"
        self.ending(what, verdict.faults, processes, files)

    def following(self) -> tuple[Fact, ...]:
        """Suggest further commands."""
        s = self.settings
        return (
            ("more", f"gradserver demo --churn {s.churn / 2:g} --steps {2 * s.steps}"),
            ("your own", f"gradserver serve --bind tcp://COORDINATOR:7411 --workers 2:{s.workers}"),
            ("", "where COORDINATOR is the private address of that machine, as there is no authentication;"),
            ("", "and in your training script, on every machine:"),
            ("", '  worker = gradserver.connect("tcp://COORDINATOR:7411")'),
            ("", "  model = gradserver.DistributedDataParallel(model, worker)"),
            ("", "  data = gradserver.DataRanges(len(dataset), worker, batch_size=4)"),
            ("", "  job = gradserver.Job(model, optimizer, data=data)"),
            ("", "  for batch in job.batches(dataset):"),
            ("", "      loss(model, batch).backward()"),
            ("", "      job.step()"),
        )


class ChurnTable:
    """Table of a run, with a row at an interval of rounds, and a line for each worker that is killed or joins."""

    def __init__(self, view: ChurnView) -> None:
        self._view = view
        self._window: list[Round] = []
        """Rounds since the last row."""
        self._used = 0
        self._began: float | None = None
        self._at = 0.0
        """Time at which the last round was over."""
        view.screen.line()
        header = f"  {'samples':>8}  {'loss':<{_BAR + 8}} workers  tokens/s  waiting    time    left"
        view.screen.line(view.screen.style(header, DIM))

    def add(self, one: Round) -> None:
        """Show a worker's part of a round."""
        if self._began is None:
            self._began = one.at - one.seconds
        self._window.append(one)
        first, tenths = not self._used, _ROWS * self._used // self._view.settings.samples
        self._used, self._at = max(self._used, one.used), max(self._at, one.at)
        if first or _ROWS * self._used // self._view.settings.samples > tenths:
            self._view.screen.line(self._row(one))
            self._window.clear()
        else:
            self._view.screen.live(self._row(one))

    def killed(self, life: Life, left: int) -> None:
        """Show that a worker was killed."""
        others = f"{left} continue" if left > 1 else "1 continues"
        self._happened(f"worker {life.name!r} was killed; {others}", RED)

    def joined(self, life: Life) -> None:
        """Show that a worker has joined."""
        arrival = life.joined
        assert arrival is not None
        how = f"with the state of {arrival.donor!r} ({arrival.nbytes / 1e6:.1f} MB in {arrival.seconds:.2f} s)"
        self._happened(f"worker {life.name!r} joined {how}", GREEN)

    def _happened(self, text: str, colour: str) -> None:
        self._view.screen.line(f"  {self._used:>8,}  {self._view.screen.style(text, colour)}")

    def _row(self, one: Round) -> str:
        s = self._view.settings
        losses = [part.loss for part in self._window if part.loss is not None]
        loss = math.fsum(losses) / len(losses) if losses else math.nan
        spent = sum(part.seconds for part in self._window) or math.inf
        waiting = sum(part.exchange_seconds for part in self._window) / spent
        passed = self._at - (self._began or 0.0)
        rate = self._used * s.context / passed if passed > 0 else 0.0
        left = passed * (s.samples / self._used - 1) if self._used else 0.0
        bar = self._view.screen.bar(loss / math.log(VOCABULARY), _BAR)
        middle = f"  {loss:6.3f}  {bar}{one.workers:>8}{rate:>10,.0f}{waiting:>9.1%}"
        return f"  {self._used:>8,}{middle}{passed:>7.1f}s{left:>7.1f}s"


def _waited(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    return f"others waited {sum(seconds):.2f} s in total, {max(seconds):.2f} s maximum"
