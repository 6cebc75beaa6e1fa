"""`gradserver.connect`: from a URL, or the environment, to a rank in a group."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradserver
from gradserver import connect
from gradserver.engine.policy import Policy
from gradserver.protocol import limits
from gradserver.protocol.errors import (
    CoordinatorUnreachableError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
)
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from tests.cluster import TIMEOUT, Task, coordinator, joined, together, wait_until
from tests.memory import Measured

VARIABLES = ("GRADSERVER_URL", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
OTHERS = ("SLURM_STEP_NUM_TASKS", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
LAUNCHERS = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
]
"""Variables of torchrun, Open MPI's mpirun, those of MPICH and Intel, and srun, in the order in which they count."""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *OTHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[TcpServer]:
    with coordinator({"told": 2}) as server:
        yield server


def waiting(server: TcpServer, group: str = "default") -> list[str]:
    """Return the workers that wait for ``group`` to be complete."""
    groups: Any = server._runtime.snapshot()["groups"]
    return [applicant["name"] for applicant in groups.get(group, {"waiting": []})["waiting"]]


def total(worker: Worker) -> float:
    """Return the sum of all ranks of a group, as its members find it."""
    return float(worker.all_reduce(np.array([worker.rank], np.float32), "sum")[0])


def come(server: TcpServer, *calls: dict[str, Any]) -> list[Worker]:
    """Connect with each of ``calls``, one after the other in this order, and wait for the group."""
    tasks = []
    for number, call in enumerate(calls):
        tasks.append(Task(connect, server.url, timeout=10.0, **call))
        if number < len(calls) - 1:
            group, count = call.get("group", "default"), number + 1
            wait_until(partial(has_applicants, server, group, count), f"{count} have come")
    return [task.result() for task in tasks]


def has_applicants(server: TcpServer, group: str, count: int) -> bool:
    return len(waiting(server, group)) == count


def close(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────


def test_worker_knows_its_place(server: TcpServer) -> None:
    with joined(server.url, 3, group="mine") as workers:
        assert [(worker.rank, worker.world_size, worker.name, worker.group) for worker in workers] == [
            (rank, 3, f"w{rank}", "mine") for rank in range(3)
        ]
        assert {worker.names for worker in workers} == {("w0", "w1", "w2")}
        assert len({worker.epoch for worker in workers}) == 1
        assert repr(workers[1]) == "<Worker 'w1': rank 1 of 3 in group 'mine'>"


def test_ranks_are_assigned_in_the_order_of_coming(server: TcpServer) -> None:
    workers = come(server, {"world_size": 3}, {"world_size": 3}, {"world_size": 3})

    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert together(workers, total) == [3.0] * 3
    close(workers)


def test_assigned_ranks_fill_the_gaps_between_given_ones(server: TcpServer) -> None:
    calls: list[dict[str, Any]] = [{"world_size": 4}, {"world_size": 4, "rank": 0}, {}, {"rank": 2}]

    workers = come(server, *calls)

    assert [worker.rank for worker in workers] == [1, 0, 3, 2]
    assert together(workers, total) == [6.0] * 4
    close(workers)


def test_world_size_may_be_the_coordinators(server: TcpServer) -> None:
    workers = come(server, {"group": "told"}, {"group": "told", "world_size": 2})

    assert [worker.world_size for worker in workers] == [2, 2]
    close(workers)


def test_worker_without_a_name_is_called_by_host_and_process(server: TcpServer) -> None:
    with connect(server.url, world_size=1) as worker:
        assert worker.name == f"{socket.gethostname()}:{os.getpid()}"


# ── the environment ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("rank", "world_size"), LAUNCHERS)
def test_environment_says_what_was_not_given(
    server: TcpServer, monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    first = Task(connect, server.url, 0, 2)
    wait_until(lambda: waiting(server), "the first has come")
    monkeypatch.setenv("GRADSERVER_URL", server.url)
    monkeypatch.setenv(rank, "1")
    monkeypatch.setenv(world_size, "2")

    with connect() as worker, first.result():
        assert (worker.rank, worker.world_size) == (1, 2)


def test_arguments_come_before_the_environment(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("tcp://127.0.0.1:1", "7", "8", "9", "10"), strict=True):
        monkeypatch.setenv(name, value)

    with connect(server.url, rank=0, world_size=1) as worker:
        assert (worker.rank, worker.world_size) == (0, 1)


@pytest.mark.parametrize("first", range(len(LAUNCHERS)))
def test_a_launcher_within_another_ones_job_comes_first(
    server: TcpServer, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    for number, variables in enumerate(LAUNCHERS):
        for name, value in zip(variables, ("0", "1") if number == first else ("9", "10"), strict=True):
            if number >= first:
                monkeypatch.setenv(name, value)

    with connect(server.url) as worker:
        assert (worker.rank, worker.world_size) == (0, 1)


def test_a_step_of_a_slurm_job_may_have_fewer_tasks(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")):
        monkeypatch.setenv(name, value)

    with connect(server.url) as worker:
        assert (worker.rank, worker.world_size) == (0, 1)


def test_variable_that_is_no_number_is_named(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")

    with pytest.raises(InvalidArgumentError, match="WORLD_SIZE is 'two' in the environment, and must be a number"):
        connect(server.url)


@pytest.mark.parametrize(("rank", "size"), LAUNCHERS)
def test_a_missing_url_names_the_variable_that_speaks_of_several(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(size, "8")
    with pytest.raises(InvalidArgumentError) as caught:
        connect()
    assert f"no coordinator's URL, and there are 8 workers ({size}=8): " in str(caught.value)
    assert "give connect(world_size=1), or set WORLD_SIZE=1" in str(caught.value)
    monkeypatch.delenv(size)
    monkeypatch.setenv(rank, "3")
    with pytest.raises(InvalidArgumentError, match=rf"and this is rank 3 of several \({rank}=3\): "):
        connect()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": " "}, "RANK is ' ' in the environment, and must be a number: set it right, or unset it and give "),
        ({"SLURM_NTASKS": "2(x3)"}, "SLURM_NTASKS is '2(x3)' in the environment, and must be a number"),
        ({"PMI_RANK": "0x1"}, "PMI_RANK is '0x1' in the environment"),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "world_size is 0 (OMPI_COMM_WORLD_SIZE=0), and must be from 1 to 1024"),
        ({"WORLD_SIZE": "4096"}, "world_size is 4096 (WORLD_SIZE=4096), and must be"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank is 2 (RANK=2), and must be from 0 to 1 (WORLD_SIZE=2)"),
        ({"RANK": "-1"}, "rank is -1 (RANK=-1), and must be from 0 to 1023"),
        ({"GRADSERVER_URL": "localhost:7411"}, "GRADSERVER_URL in the environment: 'localhost:7411' is not a coord"),
        ({"GRADSERVER_CHANNEL": "udp"}, "GRADSERVER_CHANNEL in the environment: channel is 'udp', and must be one of"),
        ({"GRADSERVER_PLANE": "air"}, "GRADSERVER_PLANE in the environment: plane is 'air', and must be one of"),
        ({"GRADSERVER_NAME": "a\nb"}, r"GRADSERVER_NAME in the environment: name is 'a\nb', and must be printable"),
        ({"LOCAL_RANK": "0\n"}, "name, by LOCAL_RANK, is '"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVER_URL", "tcp://127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError) as caught:
        connect(timeout=0.1)
    assert message in str(caught.value)


def test_a_misspelt_argument_is_told_with_the_nearest() -> None:
    made: Any = gradserver
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: made.connect(tiemout=3),
            "connect() has no argument 'tiemout': did you mean 'timeout'? Its arguments ",
        ),
        (lambda: made.connect(backend="nccl"), "connect() has no argument 'backend': did you mean "),
        (lambda: made.LocalCluster(2, elastik=(1, 2)), "'elastik': did you mean 'elastic'?"),
        (lambda: made.DistributedDataParallel(None, bucket_cap=3), "did you mean 'bucket_cap_mb'?"),
        (lambda: made.DataParallel(None, device=3), "did you mean 'devices'?"),
        (lambda: made.LocalSGD(None, evry=3), "did you mean 'every'?"),
        (lambda: made.Job(None, None, chekpoint="d"), "did you mean 'checkpoint'?"),
        (lambda: made.ShardSampler(10, 0, 1, world=3), "did you mean 'world_size'?"),
    ]
    for call, message in cases:
        with pytest.raises(TypeError) as caught:
            call()
        assert message in str(caught.value)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


def test_groups_at_one_coordinator_exchange_side_by_side(server: TcpServer) -> None:
    with (
        joined(server.url, 2, group="small") as small,
        joined(server.url, 3, group="large") as large,
        joined(server.url, 1, group="single") as single,
    ):

        def work(worker: Worker) -> set[float]:
            return {total(worker) for _ in range(100)}

        assert together([*small, *large, *single], work) == [{1.0}] * 2 + [{3.0}] * 3 + [{0.0}]


def test_group_forms_anew_as_soon_as_the_last_has_left(server: TcpServer) -> None:
    epochs = []
    for world_size in [2, 3] * 5:
        with joined(server.url, world_size) as workers:
            assert together(workers, total) == [world_size * (world_size - 1) / 2] * world_size
            epochs.append(workers[0].epoch)

    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize(
    ("policy", "first", "then"),
    [
        (Policy(), 2, (0, 1)),
        (Policy(), 3, (2, 0, 1)),
        (Policy(), 2, (0,)),
        (Policy(2, 2), 2, (1, 0)),
        (Policy(1, 3, gather=0.5), 2, (0, 1)),
        (Policy(2, 2, rejoin=30.0), 2, (0, 1)),
    ],
    ids=["two", "three", "fewer", "told", "elastic", "rejoin"],
)
def test_workers_that_connect_again_wait_until_the_others_have_left(
    policy: Policy, first: int, then: tuple[int, ...]
) -> None:
    sizes = None if policy.minimum else len(then)
    with coordinator({limits.OTHERS: policy}) as server, ExitStack() as stack:
        with joined(server.url, first) as workers:
            epoch, (*early, last) = workers[0].epoch, workers
            together(workers, lambda worker: worker.barrier())
            tasks = []
            for place in then:
                if place < first - 1:
                    workers[place].close()
                    tasks += [Task(connect, server.url, None, sizes, name=f"w{place}", timeout=TIMEOUT)]
            assert not any(task.ended(0.3) for task in tasks), "the last one is still there"
            for worker in (*early, last):
                worker.close()
            if first - 1 in then:
                tasks += [Task(connect, server.url, None, sizes, name=last.name, timeout=TIMEOUT)]
            again = [stack.enter_context(task.result()) for task in tasks]
        assert {worker.world_size for worker in again} == {len(then)}
        assert all(worker.epoch > epoch and not worker.joins for worker in again)
        sums = together(again, lambda worker: float(worker.all_reduce(np.ones(1, np.float32), "sum")[0]))
        assert sums == [len(then)] * len(then)


def test_rounds_of_connect_and_close_never_meet_the_group_before(server: TcpServer) -> None:
    def work(rank: int) -> None:
        for _ in range(40):
            with connect(server.url, rank, 2, name=f"w{rank}", timeout=TIMEOUT) as worker:
                worker.all_reduce(np.ones(1000, np.float32))

    together(range(2), work)


def test_a_worker_that_connects_again_is_told_which_others_have_not_left(server: TcpServer) -> None:
    with joined(server.url, 2) as (first, _):
        first.close()
        with pytest.raises(JoinTimeoutError, match=r"it has left group .* these have left, too: 'w1' \(rank 1\)"):
            connect(server.url, 0, 2, name="w0", timeout=0.5)


def test_a_worker_that_connects_again_is_told_of_the_error_that_ended_the_group(server: TcpServer) -> None:
    with joined(server.url, 2) as (first, _):
        first.abort("its disk is full")
        with pytest.raises(JoinRefusedError, match="it broke .*its disk is full"):
            connect(server.url, 0, 2, name="w0", timeout=TIMEOUT)


def test_applicant_that_gives_up_leaves_its_place_to_another(server: TcpServer) -> None:
    with pytest.raises(JoinTimeoutError):
        connect(server.url, 0, 2, timeout=0.1)
    assert waiting(server) == []

    with joined(server.url, 2) as workers:
        assert together(workers, total) == [1.0] * 2


def test_worker_may_come_before_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}"
    caplog.set_level(logging.WARNING, "gradserver")
    early = Task(connect, url, 0, 1)
    assert not early.ended(0.2)

    with coordinator(bind=url), early.result() as worker:
        assert worker.all_reduce(np.ones(1)).tolist() == [1.0]


def test_worker_leaves_neither_thread_nor_descriptor_behind(measured: Measured) -> None:
    measured(come_and_go_leaving_nothing)


def come_and_go_leaving_nothing() -> None:
    """Let workers come and go, and wait after each time until the threads and descriptors of this process are few."""

    def used() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with coordinator() as server:

        def cycle() -> None:
            with joined(server.url, 2) as workers:
                together(workers, total)
            wait_until(lambda: not server._runtime.snapshot()["groups"], "the group is gone")

        cycle()
        wait_until(lambda: not server._peers, "the coordinator has hung up")
        threads, descriptors = used()  # libzmq may yet close some
        for _ in range(5):
            cycle()
            wait_until(
                lambda: used()[0] <= threads and used()[1] <= descriptors,
                f"threads and descriptors are {threads} and {descriptors} or fewer",
            )


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


def test_rank_that_is_taken_is_refused_and_the_group_still_forms(server: TcpServer) -> None:
    first = Task(connect, server.url, 0, 2, name="the first")
    wait_until(lambda: waiting(server), "the first has come")

    with pytest.raises(JoinRefusedError) as caught:
        connect(server.url, 0, 2, name="the second")

    assert "rank 0 of group 'default' is taken by 'the first', which has waited for " in str(caught.value)
    assert "give each worker another rank (RANK, or rank= of connect), or none" in str(caught.value)
    with connect(server.url, 1, 2), first.result() as worker:
        assert worker.name == "the first"


def test_rank_out_of_range_of_the_group_is_refused(server: TcpServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gradserver")
    with pytest.raises(InvalidRankError, match="'late' wants rank 2, but the ranks of group 'told' are 0 to 1"):
        connect(server.url, 2, group="told", name="late")

    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if "refused" in record.getMessage()]

    wait_until(lambda: len(levels()) == 2, "the Join is refused, and the Ping that follows it")
    assert levels() == [logging.WARNING, logging.DEBUG], "the log of a coordinator tells a refusal once"


def test_world_sizes_that_disagree_are_refused(server: TcpServer) -> None:
    first = Task(connect, server.url, 0, 2, name="the first")
    wait_until(lambda: waiting(server), "the first has come")

    with pytest.raises(InvalidWorldSizeError, match="'late' wants a world size of 3, but group 'default' has 2"):
        connect(server.url, 1, 3, name="late")
    with pytest.raises(InvalidWorldSizeError, match="wants a world size of 3, but the coordinator was started with 2"):
        connect(server.url, 1, 3, group="told", name="late")
    with connect(server.url, 1, 2), first.result():
        pass


def test_missing_world_size_is_asked_for(server: TcpServer) -> None:
    with pytest.raises(InvalidWorldSizeError) as caught:
        connect(server.url)

    assert "the world size of group 'default' is unknown: pass world_size= to connect" in str(caught.value)
    assert "`gradserver serve --workers N`" in str(caught.value)


def test_complete_group_takes_no_worker_in(server: TcpServer) -> None:
    with joined(server.url, 2) as workers:
        with pytest.raises(JoinRefusedError) as caught:
            connect(server.url, name="late", world_size=2)
        assert "group 'default' is complete and it is in round 0; 'late' cannot be added" in str(caught.value)
        assert "'w0' (rank 0), 'w1' (rank 1)" in str(caught.value)

        assert together(workers, total) == [1.0] * 2


def test_worker_that_never_comes_is_named_when_time_is_up(server: TcpServer) -> None:
    tasks = [Task(connect, server.url, rank, 4, timeout=0.3, name=f"w{rank}") for rank in (0, 3)]

    messages = {str(task.error(JoinTimeoutError)) for task in tasks}

    assert any(
        "group 'default' has 2 of 4 workers after 0.3 s: " in message and "missing: rank 1, rank 2" in message
        for message in messages
    ), messages


def test_number_of_missing_workers_is_told_when_ranks_are_assigned(server: TcpServer) -> None:
    with pytest.raises(JoinTimeoutError) as caught:
        connect(server.url, world_size=3, timeout=0.1, name="w")

    assert "group 'default' has 1 of 3 workers after 0.1 s: 'w' came; missing: 2 more, of any rank" in str(caught.value)


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────────

BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no url, several": (
        {"url": None, "world_size": 4},
        InvalidArgumentError,
        "no coordinator's URL, and there are 4 workers: give connect('tcp://HOST:PORT'), set GRADSERVER_URL, or start "
        "the workers with `gradserver run`",
    ),
    "no url, a rank": ({"url": None, "rank": 0}, InvalidArgumentError, "no coordinator's URL, and this is rank 0 of"),
    "no scheme": ({"url": "localhost:7411"}, InvalidArgumentError, "expected tcp://HOST:PORT"),
    "other scheme": ({"url": "http://localhost:7411"}, InvalidArgumentError, "expected tcp://HOST:PORT"),
    "no port": ({"url": "tcp://localhost"}, InvalidArgumentError, "is not a coordinator's URL"),
    "port": ({"url": "tcp://localhost:99999"}, InvalidArgumentError, "a port is a number from 0 to 65535"),
    "port 0": (
        {"url": "tcp://localhost:0"},
        InvalidArgumentError,
        "names no single coordinator: give its host and port",
    ),
    "every host": (
        {"url": "tcp://*:7411"},
        InvalidArgumentError,
        "names no single coordinator: give its host and port",
    ),
    "negative rank": ({"rank": -1}, InvalidRankError, "rank is -1, and must be from 0 to 1023"),
    "rank of the world": ({"rank": 2, "world_size": 2}, InvalidRankError, "rank is 2, and must be from 0 to 1"),
    "rank of no type": ({"rank": "0"}, InvalidArgumentError, "rank is '0', and must be a whole number"),
    "true rank": ({"rank": True}, InvalidArgumentError, "rank is True, and must be a whole number"),
    "empty world": ({"world_size": 0}, InvalidWorldSizeError, "world_size is 0, and must be from 1 to 1024"),
    "large world": ({"world_size": 1025}, InvalidWorldSizeError, "world_size is 1025"),
    "timeout": ({"timeout": 0}, InvalidArgumentError, "timeout is 0 seconds, and must be above 0"),
    "long timeout": ({"timeout": 1e9}, InvalidArgumentError, "at most 604800"),
    "timeout of no type": ({"timeout": "1"}, InvalidArgumentError, "timeout is '1' seconds"),
    "not a timeout": ({"timeout": float("nan")}, InvalidArgumentError, "timeout is nan seconds"),
    "empty group": ({"group": ""}, InvalidArgumentError, "group is '', and must be printable text"),
    "name of two lines": ({"name": "a\nb"}, InvalidArgumentError, r"name is 'a\nb', and must be printable text"),
    "long name": ({"name": "x" * 10_000}, InvalidArgumentError, "and must be printable text"),
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_argument_that_cannot_be_right_is_refused_at_once(what: str) -> None:
    arguments, kind, message = BAD_ARGUMENTS[what]

    with pytest.raises(kind) as caught:
        connect(**{"url": "tcp://127.0.0.1:1", **arguments})

    assert message in str(caught.value)


def test_a_url_without_a_listener_is_reported_after_the_timeout() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    with pytest.raises(CoordinatorUnreachableError) as caught:
        connect(url, timeout=0.3)

    assert f"no coordinator answered at {url} within 0.3 s (connection refused)" in str(caught.value)
    assert "Is `gradserver serve` running there, and is the port right?" in str(caught.value)


def test_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(CoordinatorUnreachableError, match="no coordinator answered at tcp://nowhere.invalid:7411"):
        connect("tcp://nowhere.invalid:7411", timeout=0.2)
