"""Data shards are killed, and coordinators that have some: no bit of a training depends on it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from tests.cluster import BUSY, Daemon, Program, wait_until
from tests.long_run_program import LEADER
from tests.test_restart import Group
from tests.test_shard_processes import Shard, children_of

MEMBER = Path(__file__).with_name("long_run_program.py")
CHILDREN = ("--shards", "3")
ALLOWED = ("--allow-shards",)
NOTICED = 3.0 + 1.0 + BUSY
"""Seconds until a frozen shard is lost, and another process is started."""


@contextmanager
def children(tmp_path: Path, channel: str, wire: str, rounds: int) -> Iterator[Group]:
    """Start a group with a daemon that has started two further shards."""
    with ExitStack() as stack:
        yield Group(stack, tmp_path / "state", channel, wire, rounds, options=CHILDREN)


def rounds_to_strike(group: Group, chance: random.Random, count: int) -> Iterator[int]:
    """Draw numbers of rounds, up to so many, within a training."""
    for number in accumulate(chance.choices(range(4, 15), k=count)):
        group.workers[1].expect(f"round {number} ")
        time.sleep(chance.random() * 0.05)  # anywhere in a round
        yield number


@pytest.mark.parametrize("channel", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_no_bit_depends_on_a_coordinator_with_shards_that_is_killed(channel: str, tmp_path: Path) -> None:
    with children(tmp_path, channel, "fp32", 40) as group:
        times = []
        for _ in rounds_to_strike(group, random.Random(channel), 2):
            killed = time.monotonic()
            group.kill()
            group.start()
            times.append(group.next_round(time.monotonic()) - killed)
        group.check()
    print("seconds from a kill to the end of a round:", times)


@pytest.mark.parametrize("channel", ["tcp", pytest.param("shm", marks=pytest.mark.long)])
def test_no_bit_depends_on_a_shard_that_is_killed(channel: str, tmp_path: Path) -> None:
    chance, times = random.Random(f"{channel} shard"), []
    with children(tmp_path, channel, "fp32", 50) as group:
        for _ in rounds_to_strike(group, chance, 3):
            killed = time.monotonic()
            os.kill(chance.choice(children_of(group.daemon.pid)), signal.SIGKILL)
            times.append(group.next_round(time.monotonic()) - killed)
        group.check()
    print("seconds from a kill to the end of a round:", times)


def test_a_shard_of_another_host_comes_back_to_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = Group(
            *(stack, tmp_path / "state", "tcp", "fp32", 40),
            options=ALLOWED,
            beside=lambda url: stack.enter_context(Shard(url)),
        )
        group.workers[0].expect("round 5 ")
        group.kill()
        group.start()
        group.workers[0].expect("round 20 ")
        assert children_of(group.daemon.pid) == [], "no process had to take its place"
        group.check()


@contextmanager
def held(tmp_path: Path, channel: str) -> Iterator[tuple[Group, Shard]]:
    """Make a group with one further shard, in the middle of a round of which one worker has given everything."""
    joined: list[Shard] = []
    with ExitStack() as stack:
        group = Group(
            *(stack, tmp_path / "state", channel, "fp32", 12, "5"),
            options=ALLOWED,
            beside=lambda url: joined.append(stack.enter_context(Shard(url))),
        )
        for worker in group.workers:
            worker.expect("held")
        yield group, joined[0]


def go_on(group: Group) -> None:
    for worker in group.workers:
        worker.tell()
    group.check()


def test_the_coordinator_starts_a_shard_in_the_place_of_one_whose_host_is_gone(tmp_path: Path) -> None:
    with held(tmp_path, "shm") as (group, shard):
        shard.send_signal(signal.SIGKILL)
        wait_until(lambda: children_of(group.daemon.pid), "another one was started")
        go_on(group)


def test_an_unused_shard_takes_the_place_of_one_that_is_killed(tmp_path: Path) -> None:
    with held(tmp_path, "tcp") as (group, shard), Shard(group.daemon.url) as spare:
        assert group.daemon.group()["state"] == "active"
        shard.send_signal(signal.SIGKILL)
        wait_until(lambda: [one["url"] for one in group.daemon.snapshot()["shards"]] == ["", spare.url], "it is gone")
        go_on(group)
        assert children_of(group.daemon.pid) == []


@pytest.mark.long
@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_shards_and_coordinators_may_be_killed_together_and_while_they_come_back(channel: str, tmp_path: Path) -> None:
    """Test that each order of up to three deaths is met twice."""
    chance, number = random.Random(f"{channel} all"), 0
    orders = chance.sample(("s", "c", "ss", "sc", "cs", "css", "sss") * 2, 14)
    with children(tmp_path, channel, "fp32", 240) as group:
        for order in orders:
            number += chance.randrange(3, 13)
            group.workers[0].expect(f"round {number} ", timeout=60.0)
            for what in order:
                time.sleep(chance.random() * 0.3)
                alive = children_of(group.daemon.pid)
                if what == "s" and alive:
                    os.kill(chance.choice(alive), signal.SIGKILL)
                elif what == "c":
                    group.kill()
                    group.start()
            number += 2
            group.workers[0].expect(f"round {number} ", timeout=60.0)
        group.check()


@pytest.mark.long
def test_a_worker_that_joins_while_the_books_are_open_comes_in(tmp_path: Path) -> None:
    options = ("--workers", "3:4", "--shards", "2", "--state-dir", str(tmp_path / "state"))
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(*options))
        names = [LEADER, "w1", "w2"]
        first, other, victim = (stack.enter_context(Program(str(MEMBER), daemon.url, name)) for name in names)
        first.tell("3")
        first.expect("round 3")
        victim.send_signal(signal.SIGKILL)
        daemon.send_signal(signal.SIGKILL)
        daemon.end()
        daemon = stack.enter_context(Daemon(*options))

        learner = stack.enter_context(Program(str(MEMBER), daemon.url, "newcomer"))
        wait_until(lambda: daemon.group()["joining"], "a worker joins")
        assert daemon.group()["state"] == "recovering", "one of the members is not back"
        first.tell("100")
        learner.expect("entered ")
        first.expect("round 103")
        first.hang_up()
        for program in (first, other, learner):
            program.expect("ok ")
            assert program.end() == 0


@pytest.mark.parametrize(
    "alone", [pytest.param(True, marks=pytest.mark.long), False], ids=["alone", "with its coordinator"]
)
def test_a_silent_shard_is_replaced_when_its_silence_is_noticed(alone: bool, tmp_path: Path) -> None:
    """Test that no recovery waits for a frozen shard: not the one that it begins, nor the next coordinator's."""
    with held(tmp_path, "tcp") as (group, shard):
        shard.send_signal(signal.SIGSTOP)
        if not alone:
            group.kill()
            group.start()
        wait_until(lambda: children_of(group.daemon.pid), "another one was started", NOTICED)
        go_on(group)
        shard.send_signal(signal.SIGCONT)
