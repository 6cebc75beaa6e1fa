"""Churn of `DataRanges` with an oracle of its own: a gradient is a row of ones at the samples behind it.

``python -m tests.churn_ranges SEED…`` trains two epochs without torch, by processes that are slow, are
frozen, die and come, and with a coordinator that dies. Every replica adds up the means times their weights. So it
knows how often each sample of each epoch counted, whatever ledger and table say.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan

SAMPLES: Final = 160
EPOCHS: Final = 2
SECONDS: Final = 90.0
STRIKES: Final = 6
"""Events of one course."""
MODES: Final = (
    (),
    ("--quorum", "2", "--grace", "0.05", "--late", "drop"),
    ("--quorum", "2", "--grace", "0.05", "--late", "keep"),
    ("--quorum", "50%", "--grace", "0.02", "--late", "keep", "--staleness", "1"),
    ("--backup", "1", "--late", "drop"),
    ("--backup", "1", "--late", "keep"),
)


_EXPECTED: Final = ("LeftOutError", "JoinRefusedError", "JoinTimeoutError")
"""Errors of workers that were frozen for too long, or come when the others have ended."""


class Case(NamedTuple):
    """One course of a training."""

    seed: int
    options: tuple[str, ...]
    kills_coordinator: bool
    loses: bool
    shards: int

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case."""
        chance = random.Random(seed)
        options = MODES[seed % len(MODES)]
        return cls(seed, options, chance.random() < 0.6, chance.random() < 0.7, chance.choice((0, 0, 2)))


def work(url: str, name: str, seed: int, out: Path) -> None:
    """Use both epochs, at a speed that changes, and write down how often each sample counted."""
    chance = random.Random(seed)
    with gradserver.connect(url, name=name, timeout=30.0) as worker:
        worker.agree(simple_plan([("g", EPOCHS * SAMPLES)], FLOAT32))
        used = np.zeros(EPOCHS * SAMPLES, np.float64)

        def install(state: Any) -> None:
            used[:] = state["used"]

        if worker.joins:
            worker.enter(install, waits=True)
        worker.serve_state(lambda: {"used": used})
        data = gradserver.DataRanges(
            SAMPLES, worker, batch_size=chance.randint(2, 5), seed=5, prefetch=chance.randint(0, 2)
        )
        for epoch in data.epochs(EPOCHS):
            while True:
                indices = data.take()
                time.sleep(chance.choice((0.0, 0.0, 0.001, 0.004)) if len(indices) else 0.0)
                if chance.random() < 0.03:
                    time.sleep(chance.uniform(0.05, 0.4))
                gradient = np.zeros(EPOCHS * SAMPLES, np.float32)
                gradient[epoch * SAMPLES + indices] = 1.0 / max(len(indices), 1)
                handle = worker.push(0, gradient, weight=float(len(indices)))
                worker.finish_round()
                total = handle.weight
                if total > 0:
                    used += np.round(gradient.astype(np.float64) * total)
                worker.boundary()
                if not total:
                    break
                (out.parent / "begun").touch()
        out.with_suffix(".new").write_text(json.dumps({"name": name, "round": worker.round, "used": used.tolist()}))
        out.with_suffix(".new").rename(out)


def _free_url() -> str:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{there.getsockname()[1]}"


class Course:
    """The processes of one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.chance = random.Random(case.seed)
        self.url = _free_url()
        self.workers: dict[int, str] = {}
        self.came = 0
        self.coordinator = self.serve()

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a coordinator."""
        command = [sys.executable, "-m", "gradserver", "serve", "--bind", self.url, "--workers", "2:6", "--gather", "1"]
        command += ["--state-dir", str(self.folder / "state"), "--frozen-after", "2", "--rejoin-for", "20"]
        command += ["--shards", str(self.case.shards)] if self.case.shards else []
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*command, *self.case.options], stdout=log, stderr=log)

    def start(self) -> None:
        """Start one more worker."""
        name = f"w{self.came}"
        self.came += 1
        pid = os.fork()
        if pid:
            self.workers[pid] = name
            return
        code = 1
        try:
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 2)
            work(self.url, name, self.case.seed * 100 + self.came, self.folder / f"{name}.json")
            code = 0
        except BaseException:
            text = f"── {name}\n{traceback.format_exc()}"
            (self.folder / f"{name}.error").write_text(text)
        finally:
            os._exit(code)

    def reap(self) -> None:
        """Forget workers that have ended."""
        for pid in list(self.workers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.workers[pid]

    def strike(self) -> None:
        """Let something happen."""
        event, pids = self.chance.random(), list(self.workers)
        if event < 0.2 and self.case.kills_coordinator:
            self.coordinator.kill()
            self.coordinator.wait()
            time.sleep(self.chance.uniform(0.0, 0.5))
            self.coordinator = self.serve()
        elif event < 0.4 and self.case.loses and len(pids) > 2:
            os.kill(self.chance.choice(pids), signal.SIGKILL)
        elif event < 0.7 and self.case.loses and len(pids) < 5:
            self.start()
        elif event < 0.9 and pids:
            pid = self.chance.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.05, 0.8))
            os.kill(pid, signal.SIGCONT)

    def run(self) -> str:
        """Go through it; return what is wrong, or nothing."""
        for _ in range(3):
            self.start()
        until, strikes = time.monotonic() + SECONDS, STRIKES
        while self.workers and time.monotonic() < until:
            time.sleep(self.chance.uniform(0.1, 0.5))
            self.reap()
            if strikes and (self.folder / "begun").exists():
                strikes -= 1
                self.strike()
        hangs = sorted(self.workers.values())
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.coordinator.terminate()
        self.coordinator.wait()
        return self.judge(hangs)

    def judge(self, hangs: list[str]) -> str:
        """Return what is wrong with the end."""
        wrong = [f"{', '.join(hangs)}: still there after {SECONDS:g} s"] if hangs else []
        for path in sorted(self.folder.glob("*.json")):
            told = json.loads(path.read_text())
            used = np.array(told["used"])
            if (used != 1).any():
                never, often = (used == 0).nonzero()[0].tolist(), (used > 1).nonzero()[0].tolist()
                wrong.append(f"{told['name']} (round {told['round']}): {never} never, {often} more than once")
        errors = [path.read_text() for path in sorted(self.folder.glob("*.error"))]
        wrong += [text for text in errors if not any(name in text for name in _EXPECTED)]
        if not any(self.folder.glob("*.json")):
            wrong.append("no worker has come to the end")
        return "\n".join(wrong)


def main(seeds: list[int]) -> int:
    """Go through the cases of these seeds; return the number of those that went wrong."""
    failed = 0
    for seed in seeds:
        case, folder = Case.of(seed), Path(tempfile.mkdtemp(prefix=f"churn-{seed}-"))
        began = time.monotonic()
        wrong = Course(case, folder).run()
        failed += bool(wrong)
        print(
            f"{'WRONG' if wrong else 'right'} after {time.monotonic() - began:.1f} s: {case} {folder}\n{wrong}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(list(map(int, sys.argv[1:]))))
