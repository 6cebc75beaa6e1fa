"""The demo's own process: starts the others, follows them, compares the results, and ends them whatever happens."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from gradserver.printing import complain
from gradserver.tools.common.processes import Child, RunError, available_cores, ended_by_signals, listening_url
from gradserver.tools.common.screen import Screen, discard_output
from gradserver.tools.demo.outcome import GlobalStep, Result, judge
from gradserver.tools.demo.processes import Processes
from gradserver.tools.demo.reports import Done, Ready, Step, from_line
from gradserver.tools.demo.settings import Settings
from gradserver.tools.demo.view import Table, View

SILENCE_SECONDS = 120.0  # longer than any one step takes, and than importing torch from a slow disk


def run_demo(settings: Settings, out: Path, kind: type[Demo]) -> int:
    """Run a demo and print it to standard output. Return the exit status of `gradserver.tools.demo.run`."""
    screen = Screen(sys.stdout)
    try:
        out.mkdir(parents=True, exist_ok=True)
        view = kind.view_kind(screen, settings, available_cores(), out)
        view.introduce()
        with ended_by_signals(), Processes(out) as processes:
            return kind(settings, out, view, processes).run()
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # standard output was closed, as behind `| head`
            discard_output()
            return 1
        complain("gradserver demo", error)
        return 2
    except RunError as error:
        screen.line()
        screen.verdict(False, str(error))
        return 1
    except KeyboardInterrupt:
        screen.line()
        screen.line("Interrupted. All processes of the demo have been ended.")
        return 130


class Demo:
    """Run from the first process to the verdict."""

    view_kind: type[View] = View

    def __init__(self, settings: Settings, out: Path, view: View, processes: Processes) -> None:
        self.settings = settings
        self.out = out
        self.view = view
        self.processes = processes

    def run(self) -> int:
        """Train twice, and compare the results. Return the exit status."""
        view = self.view
        group = self.train_group()
        reference = self.train_reference(group.losses)
        verdict = judge(group, reference, lossy=self.settings.is_lossy)

        view.heading(3, "Comparison")
        view.verdict(group, reference, verdict)
        view.sample(group.done[0].sample or "")
        self.save(group, reference)
        view.close(verdict, ["loss.png", "losses.csv", "model.pt", "*.log"])
        return 0 if verdict.passed else 1

    def train_group(self) -> Result:
        """Train with a coordinator and its workers."""
        settings, view = self.settings, self.view
        url = self.start_coordinator(str(settings.workers))
        view.heading(1, f"{settings.crew}, averaged by the coordinator at {url}")
        threads = max(1, view.cores // settings.workers)
        workers = []
        for rank in range(settings.workers):
            arguments = ["--url", url, "--rank", str(rank)]
            if rank == 0:
                arguments += ["--save", str(self.out / "model.pt")]
            workers.append(self.start_trainer(f"worker {rank}", threads, *arguments))
        result = self.follow(workers)
        self.processes.stop()
        return result

    def train_reference(self, losses: list[float]) -> Result:
        """Train the same in one process, beside the losses of the group."""
        self.view.heading(2, f"One process, {self.settings.global_batch} sequences per step")
        trainer = self.start_trainer("one process", self.view.cores)
        return self.follow([trainer], losses)

    def start_coordinator(self, workers: str, *options: str) -> str:
        """Start the daemon for a group of ``workers``, and return its URL."""
        arguments = ["serve", "--bind", "tcp://127.0.0.1:0", "--workers", workers, *options]
        coordinator = self.processes.start("coordinator", "-m", "gradserver", *arguments)
        _, line = self.processes.next_line(SILENCE_SECONDS)
        if line is None:
            raise RunError(f"the coordinator ended before it was ready; its log is {coordinator.log}")
        return listening_url(coordinator, line)

    def start_trainer(self, name: str, threads: int, *arguments: str) -> Child:
        """Start one training process."""
        common = ["--settings", self.settings.to_json(), "--threads", str(threads)]
        program = "-m", "gradserver.tools.demo.worker"
        return self.processes.start_trainer(name, *program, *common, *arguments, patience=SILENCE_SECONDS)

    def follow(self, children: list[Child], reference: list[float] | None = None) -> Result:
        """Show the steps of `children` until all have reported the end."""
        table = Table(self.view, reference)
        self.view.screen.live("  starting: importing torch, reading the text")
        progress = _Progress(children)
        while not progress.complete:
            child, line = self.processes.next_line(SILENCE_SECONDS)
            step = progress.take(child, line)
            if step is not None:
                table.add(step)
        self.view.screen.clear()
        return progress.result()

    def save(self, group: Result, reference: Result) -> None:
        """Write the numbers and the picture."""
        from gradserver.tools.demo.plot import save_plot  # imported here: loading matplotlib may take seconds

        self.view.screen.live("  drawing")
        with (self.out / "losses.csv").open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream)
            table.writerow(["step", "loss_workers", "loss_one_process", "norm_workers", "norm_one_process"])
            for one, other in zip(group.steps, reference.steps, strict=True):
                table.writerow([one.step + 1, one.loss, other.loss, one.gradient_norm, other.gradient_norm])
        save_plot(self.out / "loss.png", self.settings, group, reference)
        self.view.screen.clear()


class _Progress:
    """Collector of the reports of several replicas."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._ready: dict[Child, Ready] = {}
        self._parts: dict[int, dict[Child, Step]] = {}  # steps that not all have reported yet
        self._steps: list[GlobalStep] = []
        self._done: dict[Child, Done] = {}

    @property
    def complete(self) -> bool:
        """True if all replicas have reported their end."""
        return len(self._done) == len(self._children)

    def take(self, child: Child, line: str | None) -> GlobalStep | None:
        """Take a line that `child` printed. Return a step if this line completes it."""
        if child not in self._children:
            if line is None:
                raise RunError(f"the {child.name} ended during the training; its log is {child.log}")
            return None
        if line is None:
            if child not in self._done:
                raise RunError(f"{child.name} ended without a result; its log is {child.log}")
            return None
        try:
            report = from_line(line)
        except ValueError as error:
            raise RunError(f"{child.name}: {error}") from error
        if isinstance(report, Step):
            return self._join(child, report)
        if isinstance(report, Done):
            self._done[child] = report
        elif isinstance(report, Ready):
            self._ready[child] = report
            if len({one.corpus_sha256 for one in self._ready.values()}) > 1:
                raise RunError(f"{child.name} read a different text: was Python updated meanwhile?")
        return None

    def _join(self, child: Child, part: Step) -> GlobalStep | None:
        parts = self._parts.setdefault(part.step, {})
        parts[child] = part
        if len(parts) < len(self._children):
            return None
        del self._parts[part.step]
        step = GlobalStep.of([parts[one] for one in self._children])
        self._steps.append(step)
        return step

    def result(self) -> Result:
        """Return the complete run."""
        return Result(self._steps, [self._done[child] for child in self._children])
