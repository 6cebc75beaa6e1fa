"""Processes join a group that trains, and are killed while they do, or while they send their state."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserver import Worker, connect
from gradserver.protocol.channel import Receiver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import CoordinatorUnreachableError
from gradserver.protocol.plan import simple_plan
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import PATIENCE, STARTED_WITHIN, Daemon, Program, Task, wait_until

PROGRAM = Path(__file__).with_name("join_training.py")
MIB_OF_FLOATS = 1 << 18


class Fleet:
    """A daemon, and workers that come and go."""

    def __init__(self, stack: ExitStack, folder: Path, channel: str, shards: int, backlog: int = 0) -> None:
        self._stack, self._folder = stack, folder
        options = ["--workers", "1:4", "--gather", "60", "--shards", str(shards), "--backlog", str(backlog)]
        self.daemon = stack.enter_context(Daemon(*options))
        self._environment = {"GRADSERVER_CHANNEL": channel}

    def start(self, name: str, **options: Any) -> Program:
        arguments = [str(PROGRAM), self.daemon.url, name, str(self._folder / name), json.dumps(options)]
        return self._stack.enter_context(Program(*arguments, environment=self._environment, loaded="torch"))

    def stages(self) -> dict[str, str]:
        return {learner["name"]: learner["stage"] for learner in self.daemon.group()["joining"]}


def over(first: str) -> pytest.MarkDecorator:
    """Return cases over one channel; over the others, and with two data shards, among the long tests."""
    ways = [("tcp", 1), ("shm", 1), ("tcp", 2)]
    params = [way if way == (first, 1) else pytest.param(way, marks=pytest.mark.long) for way in ways]
    return pytest.mark.parametrize("fleet", params, indirect=True, ids=str)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    channel, shards = request.param
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path, channel, shards)


Said = dict[int, list[Any]]
"""By round: rank, world size, epoch, digest, time."""


def said(program: Program) -> Said:
    lines = [line.split(maxsplit=2) for line in program.lines() if line.startswith("round ")]
    return {int(number): json.loads(what) for _, number, what in lines}


def check(*everybody: Said) -> list[int]:
    """Check that all that did a round had equal bits and epochs after it. Return the world size in each."""
    worlds = []
    for number in sorted(set().union(*everybody)):
        there = [one[number] for one in everybody if number in one]
        assert len({(world, epoch, bits) for _, world, epoch, bits, _ in there}) == 1, number
        worlds.append(there[0][1])
    return worlds


@over("tcp")
def test_processes_join_and_leave_and_all_have_the_same_bits(fleet: Fleet) -> None:
    programs = [fleet.start("box-0", hold=[2], rounds=12, world=1)]
    programs[0].expect("round 2 ", STARTED_WITHIN)
    programs += [fleet.start("spot-1", rounds=12), fleet.start("spot-2", rounds=12, hold=[6])]
    wait_until(lambda: fleet.stages() == {"spot-1": "waiting", "spot-2": "waiting"}, "both wait", STARTED_WITHIN)
    programs[0].tell()
    programs[2].expect("round 6 ")
    programs[2].send_signal(signal.SIGKILL)
    for program in programs[:2]:
        program.expect("ok")
        assert program.end() == 0

    founder, learner, killed = map(said, (programs[0], programs[1], programs[2]))
    assert {min(learner), min(killed)} == {4, 5}, "one came in after the other, as there was one donor at first"
    assert list(founder) == list(range(1, 13))
    assert check(founder, learner, killed) == [1, 1, 1, 2, 3, 3, *[2] * 6]


@over("shm")
def test_a_learner_killed_in_the_middle_of_its_state_costs_no_round(fleet: Fleet) -> None:
    shape = {"rounds": 10, "ballast": 3 * MIB_OF_FLOATS}
    founder = fleet.start("box-0", hold=[2], world=1, **shape)
    founder.expect("round 2 ", STARTED_WITHIN)
    victim = fleet.start("spot-1", stop_at_part=4, **shape)
    wait_until(lambda: fleet.stages() == {"spot-1": "waiting"}, "it waits", STARTED_WITHIN)
    founder.tell()
    victim.expect("halfway")
    victim.send_signal(signal.SIGKILL)
    founder.expect("ok")
    assert founder.end() == 0

    rounds = said(founder)
    assert list(rounds) == list(range(1, 11))
    assert {(rank, world, epoch) for rank, world, epoch, _, _ in rounds.values()} == {(0, 1, 1)}


@over("tcp")
def test_a_donor_killed_in_the_midst_of_its_state_is_followed_by_another_one(fleet: Fleet) -> None:
    shape = {"rounds": 12, "ballast": 3 * MIB_OF_FLOATS, "world": 2}
    donor = fleet.start("box-0", rank=0, stop_at_part=4, hold=[2], **shape)
    other = fleet.start("box-1", rank=1, **shape)
    donor.expect("round 2 ", STARTED_WITHIN)
    learner = fleet.start("spot-1", rounds=12, ballast=3 * MIB_OF_FLOATS)
    wait_until(lambda: fleet.stages() == {"spot-1": "waiting"}, "it waits", STARTED_WITHIN)
    donor.tell()
    donor.expect("halfway")
    donor.send_signal(signal.SIGKILL)
    for program in (other, learner):
        program.expect("ok")
        assert program.end() == 0

    left, came = said(other), said(learner)
    assert list(left) == list(range(1, 13))
    assert len(came) >= 5
    check(left, came)
    assert left[12][:3] == [0, 2, 3]
    assert came[12][:3] == [1, 2, 3]


@over("shm")
def test_a_worker_that_comes_back_by_its_name_has_its_rank_again(fleet: Fleet) -> None:
    founders = [fleet.start(f"box-{rank}", rank=rank, rounds=14, hold=[3, 6], world=3) for rank in range(3)]
    for founder in founders:
        founder.expect("round 3 ", STARTED_WITHIN)
    founders[1].send_signal(signal.SIGKILL)
    others = [founders[0], founders[2]]
    for founder in others:
        founder.tell()
    for founder in others:
        founder.expect("round 6 ")
    again = fleet.start("box-1", rounds=14)
    wait_until(lambda: fleet.stages() == {"box-1": "waiting"}, "it waits", STARTED_WITHIN)
    for founder in others:
        founder.tell()
    for program in (*others, again):
        program.expect("ok")
        assert program.end() == 0

    check(*map(said, (*others, again)))
    assert [said(program)[14][0] for program in others] == [0, 2]
    assert said(again)[14][:2] == [1, 3]


@pytest.mark.long
@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_the_others_do_not_wait_for_a_process_that_joins(channel: str, tmp_path: Path) -> None:
    shape = {"rounds": 150, "ballast": 3 * MIB_OF_FLOATS, "pause": 0.01}
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path, channel, 1, backlog=64)
        founder = fleet.start("box-0", hold=[2, 150], world=1, **shape)
        founder.expect("round 2 ", STARTED_WITHIN)
        learner = fleet.start("spot-1", stop_at_part=3, hold=[150], **shape)
        wait_until(lambda: fleet.stages() == {"spot-1": "waiting"}, "it waits", STARTED_WITHIN)
        founder.tell()
        learner.expect("halfway")
        founder.expect("round 12 ")  # while nothing of the state comes in
        learner.tell()
        for program in (founder, learner):
            program.expect("round 150 ")
        for program in (founder, learner):
            program.tell()
            program.expect("ok")
            assert program.end() == 0

    rounds, joined = said(founder), said(learner)
    assert list(rounds) == list(range(1, 151))
    assert rounds[150][1] == 2
    members = [number for number, one in joined.items() if one[1:3] == rounds[number][1:3]]
    assert members
    for number in joined:
        assert joined[number][3] == rounds[number][3], "it had the same bits from the first round on"


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_learner_whose_coordinator_was_killed_asks_for_a_state_only_through_memory_that_the_next_one_sees(
    shards: int, tmp_path: Path
) -> None:
    options = "--workers", "1:2", "--gather", "0", "--shards", str(shards), "--state-dir", str(tmp_path)
    state, came, stop = np.arange(MIB_OF_FLOATS, dtype=np.float32), list[bool](), threading.Event()

    def train(worker: Worker) -> None:
        while not stop.is_set():
            worker.push(0, np.ones(500, np.float32))
            worker.finish_round()
            worker.boundary()

    def found(url: str) -> None:
        with connect(url, name="founder", timeout=PATIENCE, channel="shm") as worker:
            worker.agree(simple_plan([("b", 500)], FLOAT32))
            worker.serve_state(lambda: {"state": state})
            train(worker)

    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(*options))
        founder = Task(found, daemon.url)
        wait_until(lambda: daemon.snapshot()["groups"] and daemon.group()["round"] > 1, "it trains")

        def install(tree: Any) -> None:
            came.append(np.array_equal(tree["state"], state))
            if len(came) == 1:
                daemon.send_signal(signal.SIGKILL)
                daemon.end()
                again = stack.enter_context(Program("-m", "gradserver", "serve", "--bind", daemon.url, *options))
                again.expect("listening on ")

        with connect(daemon.url, name="learner", timeout=PATIENCE, channel="shm") as worker:
            worker.agree(simple_plan([("b", 500)], FLOAT32))
            try:
                worker.enter(install, waits=True)
            finally:
                stop.set()
        founder.result()
    assert came == [True, True]


def test_a_learner_that_is_sent_to_a_data_shard_that_is_gone_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--workers", "1:2", "--gather", "0", "--shards", "2", "--state-dir", str(tmp_path)
    stop, patience = threading.Event(), list[float]()
    add = TcpChannel.add

    def none_first(channel: TcpChannel, url: str, receiver: Receiver, timeout: float) -> None:
        patience.append(timeout)
        if len(patience) == 1:
            raise CoordinatorUnreachableError(f"no data shard at {url}")
        add(channel, url, receiver, timeout)

    def found(url: str) -> None:
        with connect(url, name="founder", timeout=PATIENCE) as worker:
            worker.agree(simple_plan([("b", 500)], FLOAT32))
            worker.serve_state(dict)
            while not stop.is_set():
                worker.push(0, np.ones(500, np.float32))
                worker.finish_round()
                worker.boundary()

    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(*options))
        founder = Task(found, daemon.url)
        wait_until(lambda: daemon.snapshot()["groups"] and daemon.group()["round"] > 1, "it trains")
        monkeypatch.setattr(TcpChannel, "add", none_first)
        try:
            with connect(daemon.url, name="learner", timeout=PATIENCE) as worker:
                assert worker.joins
        finally:
            stop.set()
        founder.result()
    assert len(patience) == 2
    assert max(patience) < 5.0, "it does not wait for its whole timeout: another one may take the shard's place"
