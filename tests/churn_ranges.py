"""Churn of `DataRanges` with an oracle of its own, which reads neither ledger nor digests.

``python -m tests.churn_ranges SEED…`` goes through the courses of these seeds, and ``--seconds 300`` through as many as
there is time for. In each course processes use two epochs. They are slow, are frozen, die, leave and come. The
coordinator and data shards are killed. All workers end at once, and another number of them goes on from the checkpoint.

A gradient is a row of ones at the samples behind it (`tests.churn_training`). So each replica knows how often each
sample counted, whatever ledger and table say. The laws for the end of a course:

    law                 what it says
    ──────────────────  ─────────────────────────────────────────────────────────────────────────────────────────────
    once                each sample counted in one update, and once in it. If gradients are damped, it counted in part
    in every slice      so it is in each element. A sample of a worker that died may lack in some slices. Where its
                        gradient was late for some slices, and then was lost or dropped, it counts again in the others
    equal               replicas of one training end after the same round, with the same bits, by the same updates
    no other errors     a worker ends well, or with an error that is documented for what happened to it
    an end              no process is left after a time that is longer than all timeouts
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradserver.protocol.transport.reach import reach
from tests.churn_training import CELLS, Case, Place, work

SECONDS: Final = 100.0
"""Time of a course, or of a part between two halts: longer than all timeouts in it."""
STRIKES: Final = 6
"""Events of one part of a course."""
MOST: Final = 6
"""Most workers at a time."""
_BACK_SECONDS: Final = 8.0
"""Time after which all workers are back at a coordinator. A group waits a minute for its members if all are away."""
SYNC: Final = (
    (),
    ("--quorum", "2", "--grace", "0.05", "--late", "drop"),
    ("--quorum", "2", "--grace", "0.05", "--late", "keep"),
    ("--quorum", "50%", "--grace", "0.02", "--late", "keep", "--staleness", "1"),
    ("--backup", "1", "--late", "drop"),
    ("--backup", "1", "--late", "keep"),
    ("--quorum", "2", "--grace", "0.02", "--late", "keep", "--staleness", "4", "--damping", "inverse"),
)
OTHERS: Final = (
    ("--mode", "bounded", "--staleness", "2"),
    ("--mode", "bounded", "--staleness", "3", "--damping", "inverse"),
    ("--mode", "bounded", "--staleness", "4", "--quorum", "75%", "--grace", "0.02"),
    ("--mode", "async"),
    ("--mode", "async", "--staleness", "1"),
    ("--mode", "async", "--damping", "inverse"),
)
KINDS: Final = (
    *((kind, options) for options in (*SYNC, *OTHERS) for kind in ("plain", "job")),
    *(("local", options) for options in SYNC if "--damping" not in options),  # it takes part in no other mode
)
_EXPECTED: Final = ("LeftOutError", "JoinRefusedError", "JoinTimeoutError")
"""Errors of workers that were frozen for too long, or come when the others have ended."""
_TOO_LATE: Final = "is gone after"
"""A part of the WorkerLostError of a worker that is let in when the last member ends."""
_AT_A_HALT: Final = ("WorkerLeftError", "WorkerLostError", "DeadlineError")
"""Errors of workers in a group that cannot go on without those that end, also when they have waited for others."""
_TOO_FEW: Final = "are needed to go on"
_TO_JOIN: Final = "so that it can join"
"""Words of the error of a worker that came as the last member ended, while the coordinator was away and missed that."""
_IS_DROPPED: Final = "and is dropped"
"""Words of the warning of a worker that is late by more than the staleness, which has a default."""
_START_AGAIN: Final = "start again from a checkpoint"
"""Words of the error of workers that join a group, if its last member is gone: it was killed with all others."""


def draw(seed: int) -> Case:
    """Draw a case."""
    chance = random.Random(seed)
    kind, options = KINDS[seed % len(KINDS)]
    lossless = kind == "local" or "--damping" in options
    return Case(
        seed,
        kind,
        options,
        kills_coordinator=chance.random() < 0.6,
        loses=chance.random() < 0.7,
        shards=chance.choice((1, 2, 3)),
        large="--damping" not in options and chance.random() < 0.6,
        wire="fp32" if lossless else chance.choice(("fp32", "fp32", "bf16", "int8")),
        halts=() if kind == "plain" else chance.choice(((), ("told",), ("killed",), ("all",), ("killed", "told"))),
    )


class Course:
    """The processes of one case.

    Args:
        case: the case.
        folder: an empty folder.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.chance = random.Random(case.seed)
        self.workers: dict[int, str] = {}
        self.lost: set[int] = set()
        """Processes that were killed, or told to stop."""
        self.shards: set[int] = set()
        self.phase = 0
        self.disturbed = 0.0
        """Time of the last death of a data shard, or at which a coordinator was there again."""
        self.is_back = True
        """False from the death of a coordinator until another one is there, which takes long on a busy machine."""
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        with socket.socket() as there:
            there.bind(("127.0.0.1", 0))
            self.url = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        self.coordinator = self.serve()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a coordinator."""
        command = [sys.executable, "-m", "gradserver", "serve", "--bind", self.url, "--workers", f"2:{MOST}"]
        command += ["--gather", "1", "--state-dir", str(self.folder / "state"), "--rejoin-for", "20"]
        command += ["--frozen-after", "2", "--shards", str(self.case.shards)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*command, *self.case.options], stdout=log, stderr=log)

    def restart(self) -> None:
        """Kill the coordinator, and start another one."""
        self.coordinator.kill()
        self.coordinator.wait()
        time.sleep(self.chance.uniform(0.0, 0.5))
        self.coordinator = self.serve()
        self.is_back = False
        self.done["coordinators"] += 1

    def look(self) -> None:
        """Note when the coordinator is there again."""
        if not self.is_back:
            with contextlib.suppress(OSError):
                reach(self.url, 1.0)
                self.is_back, self.disturbed = True, time.monotonic()

    def others(self) -> list[int]:
        """Return the data shards of the present coordinator."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.coordinator.pid}/task/{self.coordinator.pid}/children").read_text()
            return [int(word) for word in text.split()]
        return []

    def start(self, name: str = "") -> None:
        """Start one more worker."""
        self.done["came"] += 1
        number = self.done["came"]
        name = name or f"w{number}"
        pid = os.fork()
        if pid:
            self.workers[pid] = name
            return
        place = Place(self.url, name, self.phase, self.case.seed * 100 + number, self.folder)
        self._be_worker(place)

    def _be_worker(self, place: Place) -> None:
        code = 1
        try:
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            work(self.case, place)
            code = 0
        except SystemExit:
            code = 0
        except BaseException as error:
            text = f"{type(error).__name__} at {place.name} in part {place.phase}\n{traceback.format_exc()}"
            (self.folder / f"{place.phase}-{place.name}.error").write_text(text)
        finally:
            os._exit(code)

    def reap(self) -> None:
        """Forget workers that have ended."""
        for pid in list(self.workers):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            name = self.workers.pop(pid)
            if os.WIFSIGNALED(status) and pid not in self.lost:
                self.wrong.append(f"{name} was ended by signal {os.WTERMSIG(status)}")
            error = self.folder / f"{self.phase}-{name}.error"
            if self.case.halts and error.exists() and _START_AGAIN in error.read_text():
                error.unlink()
                self.start(name)  # as `gradserver run --restart` does

    def end(self, pid: int, how: signal.Signals) -> None:
        """Kill a worker, or tell it to stop."""
        self.lost.add(pid)
        os.kill(pid, how)
        self.done["killed" if how == signal.SIGKILL else "told"] += 1

    # ── what happens to them ──────────────────────────────────────────────────────────────────────────

    def strike(self) -> None:
        """Let something happen."""
        event, shards = self.chance.random(), self.others()
        pids = [pid for pid in self.workers if pid not in self.lost]
        if event < 0.18 and self.case.kills_coordinator:
            self.restart()
        elif event < 0.32 and shards:
            os.kill(self.chance.choice(shards), signal.SIGKILL)
            self.disturbed = time.monotonic()
            self.done["shards"] += 1
        elif event < 0.5 and self.case.loses and len(pids) > 2:
            self.end(self.chance.choice(pids), self.chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        elif event < 0.75 and self.case.loses and len(pids) < MOST - 1:
            self.start()
        elif event < 0.93 and pids:
            pid = self.chance.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.05, 0.8))
            os.kill(pid, signal.SIGCONT)
            self.done["frozen"] += 1

    def train(self, strikes: int, halts: bool) -> None:
        """Let workers train among so many strikes: to their end, or until they are halted."""
        until = time.monotonic() + SECONDS
        while self.workers and time.monotonic() < until:
            time.sleep(self.chance.uniform(0.1, 0.5))
            self.reap()
            self.look()
            if not (self.folder / "begun").exists():
                continue
            if strikes:
                strikes -= 1
                self.strike()
            elif halts:
                return

    def halt(self, how: str) -> None:
        """End all workers, and start another number of them."""
        told = how == "told"
        until = time.monotonic() + SECONDS
        while not self.is_back and time.monotonic() < until:
            time.sleep(0.1)
            self.look()
        time.sleep(max(self.disturbed + _BACK_SECONDS - time.monotonic(), 0.0))
        for pid in list(self.workers):
            self.end(pid, signal.SIGTERM if told else signal.SIGKILL)
        if told:
            self.train(0, False)
        self.clear("halted")
        names: list[str] = []
        if how == "all":  # the next coordinator waits a minute for lost workers, unless all come back
            names = [*self.last, "new"][: MOST - 1]
            self.restart()
        (self.folder / "begun").unlink(missing_ok=True)
        self.phase += 1
        self.done["resumes"] += 1
        for name in names or [""] * self.chance.randint(2, 4):
            self.start(name)

    def clear(self, what: str) -> None:
        """Kill those that are left, which is wrong unless they were killed before."""
        self.last = list(self.workers.values())
        for pid, name in self.workers.items():
            if pid not in self.lost or what != "halted":
                self.wrong.append(f"{name} is still there after {SECONDS:g} s ({what})")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.workers.clear()

    def run(self) -> list[str]:
        """Go through it; return what is wrong."""
        for _ in range(3):
            self.start()
        for how in self.case.halts:
            self.train(self.chance.randint(1, 3), True)
            self.halt(how)
        self.train(STRIKES, False)
        self.clear("at the end")
        self.coordinator.terminate()
        self.coordinator.wait()
        return self.wrong + list(judge(self.case, self.folder, bool(self.lost)))


# ── the oracle ────────────────────────────────────────────────────────────────────────────────────────


def judge(case: Case, folder: Path, lost: bool) -> Iterator[str]:
    """Yield what is wrong with the end of a course."""
    for path in sorted(folder.glob("*.error")):
        name, _, text = path.read_text().partition("\n")
        if not _is_expected(case, name.split()[0], text):
            yield f"{name}\n{text}"
        lost = lost or "LeftOutError" in name
    ends = {path.stem: np.load(path) for path in sorted(folder.glob("*.npz"))}
    if not ends:
        yield "no worker has come to the end"
    dropped = _IS_DROPPED in (folder / "log").read_text(errors="replace")
    for name, end in ends.items():
        yield from (f"{name} (round {end['round']}): {one}" for one in counts(case, end, lost, dropped))
    trainings: dict[str, tuple[str, Any]] = {}
    for name, end in ends.items():
        first, other = trainings.setdefault(str(end["born"]), (name, end))
        for key in ("used", "hits", "chain", *["round"] * (not _closes_without_some(case))):
            if end[key].tobytes() != other[key].tobytes():
                yield f"{name} and {first} differ in {key}, in rounds {end['round']} and {other['round']}"


def _closes_without_some(case: Case) -> bool:
    """Return whether rounds are closed without stragglers. Then members may leave behind different empty rounds."""
    return bool({"--quorum", "--backup"}.intersection(case.options))


def _is_expected(case: Case, error: str, text: str) -> bool:
    """Return whether an error is documented for what happens in a case."""
    if error == "WorkerLostError" and _TOO_LATE in text:
        return True
    if error == "DeadlineError":
        return _TO_JOIN in text or (bool(case.halts) and _TOO_FEW in text)
    return error in (*_EXPECTED, *(_AT_A_HALT if case.halts else ()))


def counts(case: Case, end: Any, lacking: bool, dropped: bool) -> Iterator[str]:
    """Yield what is wrong with the numbers of times that samples counted at one replica."""
    used, hits = (end[key].reshape(-1, CELLS) for key in ("used", "hits"))
    drops = lacking or dropped or "drop" in case.options or "--staleness" in case.options
    again = drops and _closes_without_some(case)
    too_often = (hits > 1) | (used > 1 + case.least / 4)
    laws: list[tuple[str, Callable[[], Any]]] = [
        ("never", lambda: (used < case.least / 2).all(axis=0)),
        ("more than once", lambda: too_often.all(axis=0) if again else too_often.any(axis=0)),
    ]
    if not lacking:
        laws.append(("in some elements only", lambda: (used < case.least / 2).any(axis=0)))
    if "--damping" not in case.options:
        in_part = ~_is_whole(case, used) & (used >= case.least / 2) & ~too_often
        laws.append(("in part", lambda: in_part.any(axis=0)))
    for what, law in laws:
        found = law().nonzero()[0].tolist()
        if found:
            yield f"{len(found)} samples counted {what}: {found[:20]}"


def _is_whole(case: Case, used: Any) -> Any:
    """Tell which parts are whole samples.

    In local SGD changes that are averaged at the end of an epoch count as a part of what all have changed.
    """
    shares = np.rint(1 / np.maximum(used, 1e-3)) if case.kind == "local" else 1.0
    return np.abs(used * shares - 1) < max(case.least / 4, 0.01)


# ── courses ───────────────────────────────────────────────────────────────────────────────────────────


def go_through(seed: int) -> tuple[Counter[str], bool]:
    """Go through the course of a seed, and print a line about it. Return what was done, and true if all is right."""
    case, folder = draw(seed), Path(tempfile.mkdtemp(prefix=f"churn-{seed}-"))
    began = time.monotonic()
    course = Course(case, folder)
    wrong = course.run()
    what = [f"--shards {case.shards}", f"wire {case.wire}", "large" * case.large]
    happened = ", ".join(f"{number} {key}" for key, number in sorted(course.done.items()))
    print(
        f"{'WRONG' if wrong else 'right'} seed {seed:<4} {time.monotonic() - began:5.1f} s  {case.kind:5} "
        f"{' '.join((*case.options, *filter(None, what)))}: {happened}{f'  {folder}' if wrong else ''}",
        *(f"    {one}" for one in wrong),
        sep="\n",
        flush=True,
    )
    if not wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return course.done + Counter({"courses": 1, case.kind: 1}), not wrong


def main(arguments: list[str]) -> int:
    """Go through courses; return 1 if one went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.churn_ranges", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED", help="seeds of courses")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with further seeds for so long, such as 1200")
    parser.add_argument("--first", type=int, help="first of these seeds (default: by the time of day)")
    given = parser.parse_args(arguments)
    importlib.import_module("tests.without_compiler.sitecustomize")  # workers are copies of this process
    began = time.monotonic()
    totals, failed = Counter[str](), []
    further = count(int(time.time()) % 100_000 if given.first is None else given.first)
    seeds = iter(given.seeds)
    while (seed := next(seeds, None)) is not None or time.monotonic() - began < given.seconds:
        seed = next(further) if seed is None else seed
        done, right = go_through(seed)
        totals += done
        failed += [] if right else [seed]
    happened = ", ".join(f"{number} {key}" for key, number in sorted(totals.items()))
    print(f"{time.monotonic() - began:.0f} s: {happened}; wrong: {' '.join(map(str, failed)) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
