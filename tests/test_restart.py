"""Tests of coordinators that are killed and started, again and again: no bit of a training depends on it."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

import gradserver
from gradserver.engine.records import Round
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import Entry, scan
from gradserver.local import LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from tests.cluster import Daemon, Program, wait_until, worker_program
from tests.restart_training import SIZES, train

PROGRAM = Path(__file__).with_name("restart_training.py")
WORLD = 3
VICTIM = 1


@cache
def undisturbed(rounds: int, wire: str) -> int:
    """Return the weights of an undisturbed run."""
    with LocalCluster(WORLD, wire=wire) as cluster:
        return cluster.run(lambda worker: train(worker, rounds))[0]


class Group:
    """A daemon with a directory, and its workers."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        channel: str,
        wire: str,
        rounds: int,
        *more: str,
        least: int = WORLD,
        options: Sequence[str] = (),
        beside: Callable[[str], object] = lambda _: None,
        program: Path = PROGRAM,
        undisturbed: Callable[[int, str], int] = undisturbed,
        loaded: str = "numpy",
    ) -> None:
        """Start. ``options`` are the daemon's own; ``beside`` is called with its URL before there are workers.

        The workers run ``program``, with ``loaded`` imported, and have the weights of ``undisturbed`` if nothing
        happens.
        """
        self._undisturbed = undisturbed
        self._stack, self._options = stack, ("--workers", f"{least}:{WORLD}", "--state-dir", str(directory), *options)
        self.directory, self.rounds, self.wire = directory, rounds, wire
        self.daemon = stack.enter_context(Daemon(*self._options))
        beside(self.daemon.url)
        self.workers = [
            stack.enter_context(
                Program(
                    *(str(program), self.daemon.url, str(rank), str(WORLD), str(rounds), wire, *more),
                    environment={"GRADSERVER_CHANNEL": channel},
                    loaded=loaded,
                )
            )
            for rank in range(WORLD)
        ]

    def kill(self) -> None:
        """Kill the daemon."""
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.end()

    def start(self) -> None:
        """Start another one."""
        url = self.daemon.url
        self.daemon = self._stack.enter_context(Daemon(*self._options))
        assert self.daemon.url == url

    def next_round(self, after: float) -> float:
        """Return when the first round was done after that time."""
        while (done := float(self.workers[0].expect("round ").split()[-1])) < after:
            pass
        return done

    def weights(self, *ranks: int) -> set[int]:
        """Return the weights of these workers, or of all of them."""
        workers = [self.workers[rank] for rank in ranks or range(WORLD)]
        found = {int(worker.expect("weights ")) for worker in workers}
        assert [worker.end() for worker in workers] == [0] * len(workers)
        return found

    def check(self) -> None:
        """Check that all bits are as if nothing had happened, and every round is in the ledger."""
        assert self.weights() == {self._undisturbed(self.rounds, self.wire)}
        assert self.recorded() == set(range(self.rounds))

    def recorded(self) -> set[int]:
        """Return the rounds that the ledger has."""
        entries = [entry for _, path in files_of(self.directory) for entry in scan(path.read_bytes())]
        records = [entry.read().record for entry in entries if isinstance(entry, Entry)]
        return {record.record.round for record in records if isinstance(record, Round)}


@pytest.mark.parametrize(
    ("channel", "wire"),
    [
        ("shm", "int8"),
        pytest.param("tcp", "fp32", marks=pytest.mark.long),
        pytest.param("tcp", "int8", marks=pytest.mark.long),
        pytest.param("shm", "fp32", marks=pytest.mark.long),
    ],
)
def test_no_bit_depends_on_a_coordinator_that_is_killed(channel: str, wire: str, tmp_path: Path) -> None:
    chance, times = random.Random(f"{channel} {wire}"), []
    with ExitStack() as stack:
        group = Group(stack, tmp_path / "state", channel, wire, 50)
        for number in accumulate(chance.choices(range(4, 15), k=3)):
            group.workers[1].expect(f"round {number} ")
            time.sleep(chance.random() * 0.05)  # anywhere in a round
            killed = time.monotonic()
            group.kill()
            group.start()
            times.append(group.next_round(time.monotonic()) - killed)
        group.check()
    print("seconds from a kill to the end of a round:", times)


@pytest.mark.parametrize(
    ("channel", "wire", "program"),
    [
        ("tcp", "int8", "restart_in_pieces.py"),
        pytest.param("shm", "fp32", "restart_in_pieces.py", marks=pytest.mark.long),
        pytest.param("tcp", "int8", "restart_on_device.py", marks=pytest.mark.long),
        pytest.param("shm", "fp32", "restart_on_device.py", marks=pytest.mark.long),
    ],
)
def test_buckets_that_fill_meanwhile_survive_it_too(channel: str, wire: str, program: str, tmp_path: Path) -> None:
    chance = random.Random(f"{channel} {wire} {program}")
    with ExitStack() as stack:
        group = Group(stack, tmp_path / "state", channel, wire, 30, program=PROGRAM.with_name(program))
        for number in accumulate(chance.choices(range(4, 12), k=2)):
            group.workers[1].expect(f"round {number} ")
            time.sleep(chance.random() * 0.05)  # anywhere in a round
            group.kill()
            group.start()
        group.check()


@pytest.mark.long
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_it_may_be_killed_every_few_rounds_and_while_it_comes_back(channel: str, wire: str, tmp_path: Path) -> None:
    chance, number = random.Random(f"{channel} {wire} again"), 0
    with ExitStack() as stack:
        group = Group(stack, tmp_path / "state", channel, wire, 400)
        while number < 330:
            number += chance.randrange(3, 20)
            group.workers[0].expect(f"round {number} ")
            for _ in range(chance.choice((1, 1, 2, 3))):
                time.sleep(chance.random() * 0.1)
                group.kill()
                group.start()
            number += 2
            group.workers[0].expect(f"round {number} ")
        group.check()


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_results_that_some_have_and_others_not_are_handed_on(channel: str, tmp_path: Path) -> None:
    held = 3
    with ExitStack() as stack:
        group = Group(stack, tmp_path / "state", channel, "fp32", 8, str(held))
        late, others = group.workers[-1], group.workers[:-1]
        for worker in group.workers:
            worker.expect("held")
        wait_until(lambda: only_waits_for_others(group, len(SIZES)), "the last one has given everything")
        late.send_signal(signal.SIGSTOP)
        for worker in others:
            worker.tell()
        for worker in others:
            worker.expect(f"round {held} ")
        group.kill()
        group.start()
        late.send_signal(signal.SIGCONT)
        late.tell()
        group.check()


def only_waits_for_others(group: Group, buckets: int) -> bool:
    """Return whether the daemon waits for nothing but the others, in a round of so many buckets."""
    found = group.daemon.group()["open"]
    return len(found) == buckets and not any("'w2'" in name for exchange in found for name in exchange["missing"])


def test_a_worker_that_is_killed_too_costs_its_contribution_only(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = Group(stack, tmp_path / "state", "tcp", "fp32", 30, least=2)
        group.workers[0].expect("round 9 ")
        group.workers[1].send_signal(signal.SIGKILL)
        group.kill()
        group.start()
        assert len(group.weights(0, 2)) == 1
        assert group.recorded() == set(range(30))
        assert any("goes on" in line or "go on" in line for line in group.workers[0].complaints())


@pytest.mark.parametrize("seconds", [5.0, pytest.param(8.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("channel", ["tcp", pytest.param("shm", marks=pytest.mark.long)])
def test_a_worker_inside_one_long_call_stays_a_member_when_the_coordinator_is_killed(
    channel: str, seconds: float, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        daemon, workers = holding(stack, tmp_path, channel, seconds)
        daemon = restarted(stack, daemon, tmp_path)
        for worker in workers:
            worker.expect("ok")
            assert worker.end() == 0
        daemon.send_signal(signal.SIGTERM)
        assert daemon.end() == 0
    assert any("'w1' (rank 1) is not back, and its process runs" in line for line in daemon.complaints())


def test_a_frozen_worker_is_left_out_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        daemon, workers = holding(stack, tmp_path, "tcp", 5.0)
        workers[VICTIM].send_signal(signal.SIGSTOP)
        daemon = restarted(stack, daemon, tmp_path)
        wait_until(lambda: len(daemon.group()["members"]) == WORLD - 1, "the others go on")


def holding(stack: ExitStack, directory: Path, channel: str, seconds: float) -> tuple[Daemon, list[Program]]:
    """Start a daemon and its workers; one of these has just begun a call in which it keeps Python's lock."""
    daemon = stack.enter_context(Daemon("--workers", f"2:{WORLD}", "--state-dir", str(directory)))
    workers = [
        stack.enter_context(
            worker_program(
                daemon.url, "hold_the_lock_in_round", rank, WORLD, channel, seconds=seconds * (rank == VICTIM)
            )
        )
        for rank in range(WORLD)
    ]
    workers[VICTIM].expect("holding")
    return daemon, workers


def restarted(stack: ExitStack, daemon: Daemon, directory: Path) -> Daemon:
    """Return the successor of a killed one."""
    daemon.send_signal(signal.SIGKILL)
    daemon.end()
    return stack.enter_context(Daemon("--workers", f"2:{WORLD}", "--state-dir", str(directory)))


def test_a_second_coordinator_is_told_of_the_directorys_owner(tmp_path: Path) -> None:
    with Daemon("--workers", "1:2", "--state-dir", str(tmp_path)) as first:
        second = Program("-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path))
        with second:
            assert second.end() == 1
            assert f"in use by the coordinator with process id {first.pid}" in second.complaints()[-1]


def test_a_membership_that_has_ended_lets_go_of_shared_memory_at_once(tmp_path: Path) -> None:
    """Test that it does not wait for the garbage collector: it is as much as the gradients."""

    def mapped() -> int:
        return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    gc.disable()
    try:
        with Daemon("--workers", "1:2", "--gather", "0.1", "--state-dir", str(tmp_path)) as daemon:
            worker = gradserver.connect(daemon.url, name="w0", channel="shm")
            worker.agree(simple_plan([("weights", 100_000)], FLOAT32))
            bucket = worker.empty(100_000, "float32")
            bucket[:] = 1
            worker.push(0, bucket)
            worker.finish_round()
            assert mapped() > before
            del bucket
            worker.close()
            assert mapped() == before
    finally:
        gc.enable()
