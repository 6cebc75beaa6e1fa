"""Nothing grows with the length of a run, at the coordinator or at workers, however often one of them dies."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from gradserver.transport.traffic import STRANGERS_KNOWN
from tests.cluster import Daemon, Program, wait_until
from tests.long_run_program import LEADER
from tests.memory import names_in_shm

PROGRAM = Path(__file__).with_name("long_run_program.py")
MEGABYTE = 1_000_000
PATIENCE = 240.0
"""Seconds for the rounds of one part. They took 50 on a slow machine that was busy."""
CLOSED_WITHIN = 20.0
CHANNELS = {LEADER: "shm", "w1": "tcp"}
"""The channels of workers that stay."""
VICTIM = "w2"


class Use(NamedTuple):
    """The resources of a process: descriptors, those of shared memory among them, and mappings of that."""

    descriptors: int
    segments: int
    mapped: int

    @classmethod
    def of(cls, pid: int) -> Use:
        opened = []
        for one in Path(f"/proc/{pid}/fd").iterdir():
            try:
                opened.append(os.readlink(one))
            except FileNotFoundError:
                continue  # closed meanwhile
        mapped = Path(f"/proc/{pid}/maps").read_text().count("/memfd:")
        return cls(len(opened), sum("/memfd:" in path for path in opened), mapped)

    @classmethod
    def settled(cls, pid: int, wanted: Use | None = None) -> Use:
        """Return the least for a while, or until it is ``wanted``: connections of lost workers take a moment."""
        until = time.monotonic() + (0.5 if wanted is None else CLOSED_WITHIN)
        least = cls.of(pid)
        while time.monotonic() < until and not (wanted and least.within(wanted)):
            time.sleep(0.01)
            least = min(least, cls.of(pid))
        return least

    def within(self, other: Use) -> bool:
        """Return whether it exceeds the other in nothing."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


class Run:
    """A daemon, and workers of which one dies again and again, over one channel and then over the other."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        options = ("--workers", "2:3", "--gather", "60", "--state-dir", str(directory), "--credit", "2", "--quiet")
        self.daemon = stack.enter_context(Daemon(*options, loaded=""))
        self.staying = [self._start(name, channel) for name, channel in CHANNELS.items()]
        self._start_victim()
        self._open: dict[str, list[Use]] = {}
        """Resources at the first look."""
        self.memory: list[list[int]] = []
        """Memory of the daemon and of the workers that stay, after each part of the run."""

    def _start(self, name: str, channel: str) -> Program:
        environment = {"GRADSERVER_CHANNEL": channel}
        return self._stack.enter_context(
            Program(str(PROGRAM), self.daemon.url, name, environment=environment, loaded="")
        )

    def _start_victim(self, channel: str = "tcp") -> None:
        self.channel, self.victim = channel, self._start(VICTIM, channel)

    def fill_stores(self) -> None:
        """Fill the daemon's memory of strangers: this test asks for its status so often."""
        for _ in range(STRANGERS_KNOWN + 1):
            self.daemon.group()

    def train(self, rounds: int) -> None:
        """Train for so many rounds, and for more if it takes longer until three have come together."""
        leader, before = self.staying[0], len(self.daemon.group().get("members", ()))
        for worker in (*self.staying, self.victim):
            assert before or worker.expect("entered", PATIENCE) == " 0"
        leader.tell(str(rounds))
        leader.expect("round", PATIENCE)
        until = time.monotonic() + PATIENCE
        while len(self.daemon.group()["members"]) < 3:
            assert time.monotonic() < until, "the third has not joined"
            leader.tell("50")
            leader.expect("round", PATIENCE)

    def replace_victim(self) -> None:
        """Replace the victim while the leader, and so every worker, waits."""
        self.victim.send_signal(signal.SIGKILL)
        self.victim.__exit__()
        wait_until(lambda: len(self.daemon.group()["members"]) == 2, "they are two", PATIENCE)
        self.look(f"dead, and was there over {self.channel}")
        self._start_victim("shm" if self.channel == "tcp" else "tcp")

    def look(self, state: str) -> None:
        """Check that nothing is open that was not when it was like this for the first time.

        That is after a donor has sent a state, for which it has memory from then on. Memory that a dead worker had
        shared, and pushed to the open round, exists until that round is over.
        """
        if len(self.memory) == 1:
            return
        pids = [self.daemon.pid, *(worker.pid for worker in self.staying)]
        if state not in self._open:
            self._open[state] = [Use.settled(pid) for pid in pids]
        for who, pid, before in zip(("coordinator", *CHANNELS), pids, self._open[state], strict=True):
            now = Use.settled(pid, before)
            assert now.within(before), f"{who} has {now} with the third {state}; before it was {before}"

    def weigh(self) -> None:
        """Return the memory that is not of a file."""
        processes = [self.daemon, *self.staying]
        self.memory.append([one.memory("RssAnon") + one.memory("RssShmem") for one in processes])

    def end(self) -> int:
        """End. Return how many rounds there were."""
        leader = self.staying[0]
        leader.hang_up()
        ends = {int(worker.expect("ok", PATIENCE)) for worker in (*self.staying, self.victim)}
        (rounds,) = ends
        return rounds


def run(directory: Path, parts: int, rounds: int) -> list[list[int]]:
    """Run so many parts of so many rounds, with a death after each. Return the memory after each."""
    names = names_in_shm()
    with ExitStack() as stack:
        group = Run(stack, directory)
        group.fill_stores()
        for part in range(parts):
            group.train(rounds)
            group.weigh()
            group.look(f"there over {group.channel}")
            if part < parts - 1:
                group.replace_victim()
        assert group.end() > parts * rounds
    assert names_in_shm() == names
    return group.memory


@pytest.mark.long
def test_nothing_stays_open_behind_workers_that_died(tmp_path: Path) -> None:
    run(tmp_path, 5, 200)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_nothing_grows_in_a_hundred_thousand_rounds(tmp_path: Path) -> None:
    parts, rounds = 20, 5000
    memory = run(tmp_path, parts, rounds)
    print(f"\nMB of the coordinator and of workers {CHANNELS}:")
    for number, row in enumerate(memory, 1):
        print(f"  round {rounds * number:>7,}", *(f"{size / MEGABYTE:8.2f}" for size in row))
    for who, before, after in zip(("coordinator", *CHANNELS), memory[parts // 10 - 1], memory[-1], strict=True):
        assert after - before < 2 * MEGABYTE, f"{who} has {(after - before) / MEGABYTE:.1f} MB more"
