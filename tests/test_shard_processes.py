"""Tests of data shards as processes of their own: the same bits, and all are told when one ends or misbehaves."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from gradserver import daemon
from gradserver.cli import main
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    CoordinatorStoppedError,
    CoordinatorUnreachableError,
    GradServerError,
    JoinRefusedError,
    MalformedMessageError,
    NonFiniteError,
    UnexpectedMessageError,
    VersionMismatchError,
    WorkerLeftError,
)
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.messages import (
    Attend,
    Enlist,
    Enlisted,
    Failure,
    Join,
    Message,
    Ordered,
    Push,
    Reported,
    Scope,
    Welcome,
)
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.wire import encode
from gradserver.status import fetch, render, survey
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import (
    BUSY,
    STARTED_WITHIN,
    Daemon,
    Program,
    Task,
    errors,
    joined,
    together,
    wait_until,
    worker_program,
)
from tests.strangers import Stranger, impostor, plain_server
from tests.training import RECIPES

TOLD_WITHIN = 3.0 + BUSY

LARGE = 300_000
"""Elements of float32 that are shared among the shards."""


class Shard(Program):
    """``gradserver serve --join``; ready when it is constructed."""

    def __init__(self, primary: str, *options: str) -> None:
        super().__init__("-m", "gradserver", "serve", "--join", primary, *options)
        try:
            self.url, _, self.who = self.expect("listening on ").partition(" ")
        except BaseException:
            self.__exit__()
            raise


@contextmanager
def shards(*rates: str, primary: str = "") -> Iterator[tuple[Daemon, list[Shard]]]:
    """Start a coordinator, and a data shard for each of ``rates`` (Gbit/s; empty: it says none)."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(Daemon("--allow-shards", *(["--rate", primary] if primary else [])))
        started = [Shard(coordinator.url, *(["--rate", rate] if rate else [])) for rate in rates]
        for shard in started:
            stack.enter_context(shard)
        yield coordinator, started


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def everything(worker: Worker) -> str:
    """Run every collective, small and large, and two rounds of a plan. Return a digest of all results."""
    chance = np.random.default_rng(worker.rank)
    digest = hashlib.sha256()

    def values(numel: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        return (chance.standard_normal(numel) * 10.0 ** chance.integers(-3, 3)).astype(dtype)

    for numel in (1, 1000, 65_537, LARGE, 700_001):
        for op in ("mean", "sum", "max"):
            digest.update(worker.all_reduce(values(numel), op, weight=1.0 + worker.rank).tobytes())
        digest.update(worker.all_reduce(values(numel, np.float16)).tobytes())
        digest.update(worker.broadcast(values(numel), root=1).tobytes())
        digest.update(worker.all_gather(values(numel)).tobytes())
        digest.update(worker.reduce_scatter(values(worker.world_size * numel)).tobytes())
        worker.barrier()
    after, before = (worker.rank + 1) % worker.world_size, (worker.rank - 1) % worker.world_size
    handles = [worker.send(values(numel), after, tag=tag, async_op=True) for tag, numel in enumerate((10, LARGE))]
    digest.update(worker.recv(np.empty(LARGE, np.float32), before, tag=1).tobytes())
    digest.update(worker.recv(np.empty(10, np.float32), before, tag=0).tobytes())
    for handle in handles:
        handle.wait()
    sizes = [("a", 500_000), ("b", 3), ("c", 40_000), ("d", 30_000), ("e", 1_000_003)]
    worker.agree(simple_plan(sizes, FLOAT32))
    for _ in range(2):
        data = [values(size) for _, size in sizes]
        for index in chance.permutation(len(sizes)):
            worker.push(int(index), data[index], weight=2.0 - worker.rank / 4)
        worker.finish_round()
        for array in data:
            digest.update(array.data)
    worker.agree(simple_plan(sizes[1:], FLOAT32))  # a new plan goes on where the old one ended
    assert worker.round == 2
    data = [values(size) for _, size in sizes[1:]]
    for index, array in enumerate(data):
        worker.push(index, array)
    worker.finish_round()
    for array in data:
        digest.update(array.data)
    return digest.hexdigest()


def digests(url: str, world_size: int = 3) -> list[str]:
    with joined(url, world_size) as workers:
        return together(workers, everything)


# ── the same bits ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Return the results of workers at a coordinator without further shards."""
    with Daemon() as coordinator:
        return digests(coordinator.url)


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.long) for count in (1, 2)), 3])
def test_results_have_the_same_bits_with_shards_on_one_host(count: int, alone: list[str]) -> None:
    with Daemon("--shards", str(count)) as coordinator:
        assert len(children_of(coordinator.pid)) == count - 1
        assert digests(coordinator.url) == alone
        assert digests(coordinator.url) == alone, "and again in another group"


@pytest.mark.parametrize(
    ("primary", "others"),
    [
        ("0", ["10", "25"]),
        *(pytest.param(*rates, marks=pytest.mark.long) for rates in [("1", [""]), ("10", ["2.5", "1"])]),
    ],
)
def test_results_have_the_same_bits_with_shards_of_other_rates(
    primary: str, others: list[str], alone: list[str]
) -> None:
    with shards(*others, primary=primary) as (coordinator, _):
        assert digests(coordinator.url) == alone


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_workers_that_share_memory_get_the_same_bits(
    channel: str, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVER_CHANNEL", channel)
    with Daemon("--shards", "2") as coordinator:
        assert digests(coordinator.url) == alone


@pytest.mark.long
@pytest.mark.timeout(300)  # torch starts slowly
def test_training_ends_with_the_same_weights_with_any_number_of_shards() -> None:
    cases = [(2, "sgd"), (2, "by tokens, accumulated")]
    found = []
    for count in (1, 2, 3):
        with Daemon("--shards", str(count)) as coordinator, ExitStack() as stack:
            programs = [
                stack.enter_context(
                    Program("-m", "tests.training", coordinator.url, str(rank), json.dumps(cases), loaded="torch")
                )
                for rank in range(2)
            ]
            found.append([program.expect("trained ", STARTED_WITHIN) for _ in cases for program in programs])
    assert all(name in RECIPES for _, name in cases)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert len(set(found[0])) == len(cases)


def test_workers_that_were_there_first_use_all_shards_that_the_coordinator_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    waiting = [Task(connect, url, rank, 2, "default", f"w{rank}", 20.0) for rank in range(2)]
    with Program("-m", "gradserver", "serve", "--bind", url, "--shards", "3"):
        for task in waiting:
            with task.result() as worker:
                assert len(worker._session.membership.shards) == 2


def test_slices_go_where_the_rates_say() -> None:
    with shards("30", primary="10") as (coordinator, (shard,)), joined(coordinator.url, 2) as workers:
        together(workers, lambda worker: worker.all_reduce(np.ones(4_000_000, np.float32)))
        before = coordinator.group()["bytes_in"], fetch(shard.url)["groups"]["default"]["bytes_in"]

    assert before[1] == pytest.approx(3 * before[0], rel=0.001)
    assert sum(before) == 2 * 16_000_000


# ── a process ends ────────────────────────────────────────────────────────────────────────────────────


def exchanging(stack: ExitStack, url: str, world_size: int, numel: int = LARGE) -> list[Program]:
    """Start workers in processes of their own that exchange until an error."""
    programs = [
        stack.enter_context(worker_program(url, "exchange_until_error", rank, world_size, numel=numel))
        for rank in range(world_size)
    ]
    for program in programs:
        program.expect("exchanging")
    return programs


def ends(programs: Sequence[Program], since: float) -> list[tuple[str, str]]:
    """Return the errors that they end with: class and text, all in time."""
    found = []
    for program in programs:
        at, kind, text = json.loads(program.expect("error "))
        assert at - since < TOLD_WITHIN, (at - since, text)
        found.append((kind, text))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_all_are_told_of_a_shard_that_ends(number: signal.Signals) -> None:
    with shards("", "") as (coordinator, (one, other)), ExitStack() as stack:
        workers = exchanging(stack, coordinator.url, 3)
        since = time.monotonic()
        one.send_signal(number)

        patience = 3.0 if number == signal.SIGSTOP else 0.0  # after so long a silent one counts as frozen
        for kind, text in ends(workers, since + patience):
            assert kind in ("ConnectionLostError", "CoordinatorStoppedError")
            assert one.url in text
        wait_until(lambda: len(coordinator.snapshot()["shards"]) == 2, "the shard is not on the roster any more")
        for worker in workers:
            worker.end()
        one.send_signal(signal.SIGCONT)
        wait_until(lambda: not coordinator.snapshot()["groups"], "the broken group is gone")

        with joined(coordinator.url, 2) as (zero, _):
            assert zero._session.membership.shards == (other.url,)


def test_nothing_is_left_of_a_coordinator_that_is_killed() -> None:
    with Daemon("--shards", "3") as coordinator, ExitStack() as stack:
        children = children_of(coordinator.pid)
        assert len(children) == 2
        workers = exchanging(stack, coordinator.url, 3)
        since = time.monotonic()
        coordinator.send_signal(signal.SIGKILL)

        assert {kind for kind, _ in ends(workers, since)} <= {"ConnectionLostError", "CoordinatorStoppedError"}
        wait_until(lambda: not any(map(is_running, children)), "the children have ended", TOLD_WITHIN)


def test_a_shard_whose_coordinator_is_killed_says_so() -> None:
    with shards("") as (coordinator, (shard,)):
        coordinator.send_signal(signal.SIGKILL)

        assert shard.end() == 1
        assert shard.complaints()[-1] == (
            f"gradserver: lost the coordinator at {coordinator.url}: its process or the network to it failed"
        )


def test_a_coordinator_that_stops_takes_its_shards_with_it() -> None:
    with Daemon("--shards", "2", "--quiet") as coordinator, joined(coordinator.url, 2) as workers:
        (child,) = children_of(coordinator.pid)
        waiting = Task(workers[0].barrier)
        assert not waiting.ended(0.05)
        coordinator.send_signal(signal.SIGTERM)

        assert "the coordinator was stopped" in str(waiting.error(CoordinatorStoppedError))
        assert coordinator.end() == 0
        assert not is_running(child)
        assert coordinator.complaints() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_the_others_are_told_of_a_worker_that_dies_among_shards(number: signal.Signals) -> None:
    with Daemon("--shards", "3") as coordinator, ExitStack() as stack:
        workers = exchanging(stack, coordinator.url, 3)
        # Workers have results before all shards have told the coordinator of the round.
        wait_until(lambda: coordinator.group()["round"] > 0, "the coordinator has heard of a round from each shard")
        since = time.monotonic()
        workers[1].send_signal(number)

        for kind, text in ends([workers[0], workers[2]], since):
            assert kind == "WorkerLostError"
            assert "'w1' (rank 1) was lost after round" in text
            assert ("its process ended" if number == signal.SIGKILL else "nothing was heard of it") in text


def test_what_a_worker_said_before_it_left_counts_at_every_shard() -> None:
    with Daemon("--shards", "3") as coordinator:
        for number in range(5):
            with joined(coordinator.url, 2, group=f"group {number}") as (zero, one):
                zero.all_reduce(np.ones(1_000_000, np.float32), async_op=True)
                zero.close("its data is used up")

                assert (one.all_reduce(np.full(1_000_000, 3, np.float32)) == 2).all()
                with pytest.raises(WorkerLeftError, match="its data is used up"):
                    one.all_reduce(np.ones(LARGE, np.float32))


def test_what_is_not_finite_at_one_shard_halts_them_all() -> None:
    with Daemon("--shards", "3") as coordinator, joined(coordinator.url, 3) as workers:
        plan = simple_plan([("large", LARGE), ("small", 10)], FLOAT32)
        together(workers, lambda worker: worker.agree(plan))

        def work(worker: Worker) -> None:
            large = np.ones(LARGE, np.float32)
            if worker.rank == 1:
                large[-1] = np.nan  # in the last shard's part
            worker.push(0, large)
            worker.push(1, np.ones(10, np.float32))
            worker.finish_round()

        for error in errors(NonFiniteError, workers, work):
            assert (error.worker, error.bucket, error.round) == ("w1", "large", 0)
            assert "parameter 'large' of bucket 'large' of round 0" in str(error)
        wait_until(lambda: coordinator.group()["state"] == "broken", "the group is broken")

        def again(worker: Worker) -> None:
            worker.all_reduce(np.ones(LARGE, np.float32))

        errors(NonFiniteError, workers, again)


def test_a_collective_that_differs_fails_by_itself() -> None:
    with Daemon("--shards", "3") as coordinator, joined(coordinator.url, 2) as workers:

        def differ(worker: Worker) -> None:
            worker.all_reduce(np.ones(LARGE + worker.rank, np.float32))

        errors(GradServerError, workers, differ)
        for _ in range(3):
            results = together(
                workers, lambda worker: worker.all_reduce(np.full(LARGE, worker.rank, np.float32), "sum")
            )
            assert all((result == 1).all() for result in results)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Daemon, Shard]]:
    """Start a coordinator with one further shard, for peers that send nonsense."""
    with shards("") as (coordinator, (shard,)):
        yield coordinator, shard


def test_a_wrong_token_or_a_second_one_is_refused_and_costs_the_others_nothing(pair: tuple[Daemon, Shard]) -> None:
    coordinator, shard = pair
    with joined(coordinator.url, 2, group="good") as workers:
        epoch, token = workers[0].epoch, workers[0]._session.membership.token
        for attend, what in [
            (Attend("good", epoch, 0, "0" * 32), "this is not the token of member id 0 in group 'good'"),
            (Attend("good", epoch, 1, token), "this is not the token of member id 1"),
            (Attend("good", epoch, 77, token), "this is not the token of member id 77"),
            (Attend("good", epoch, -1, token), "this is not the token of member id -1"),
            (Attend("good", epoch, 0, token), "'w0' (rank 0) attends already, on another connection"),
            (Attend("good", epoch - 1, 0, token), "membership"),
            (Attend("other", epoch, 0, token), "membership"),
        ]:
            with Stranger(shard.url) as stranger:
                stranger.send(attend)
                error = stranger.error()
                assert isinstance(error, UnexpectedMessageError)
                assert what in str(error)
        together(workers, lambda worker: worker.all_reduce(np.ones(LARGE, np.float32)))


def test_strangers_at_a_shard_are_turned_away(pair: tuple[Daemon, Shard]) -> None:
    coordinator, shard = pair
    push = Push(ExchangeKey(Stream.COLLECTIVE, 0), 0)
    cases: list[tuple[Message, list[bytes], type[GradServerError], str]] = [
        (push, [bytes(16)], UnexpectedMessageError, "join first"),
        (Join("default", "me", -1, 2, 5.0), [], JoinRefusedError, f"a data shard of the one at {coordinator.url}"),
        (Enlist("tcp://10.0.0.9:1"), [], JoinRefusedError, f"a data shard of the one at {coordinator.url}"),
        (Ordered(), [b"\x91\xa5close"], UnexpectedMessageError, "join first"),
    ]
    for message, payloads, kind, what in cases:
        with Stranger(shard.url) as stranger:
            stranger.send(message, *payloads)
            error = stranger.error()
            assert type(error) is kind
            assert what in str(error)
    assert shard.running
    assert fetch(shard.url)["shard"] == {"number": 1, "primary": coordinator.url}


@pytest.mark.parametrize(
    ("url", "kind", "what"),
    [
        ("nonsense", GradServerError, "is not a coordinator's URL"),
        ("tcp://10.0.0.1:0", MalformedMessageError, "it has no port"),
        ("tcp://10.0.0.1:\x1b[2J", GradServerError, "must be printable text"),
        ("tcp://" + "x" * 200 + ":1", GradServerError, "is 208 bytes long, the limit is 128"),
    ],
)
def test_an_offer_of_nonsense_is_refused(
    pair: tuple[Daemon, Shard], url: str, kind: type[GradServerError], what: str
) -> None:
    with Stranger(pair[0].url) as stranger:
        stranger.send(Enlist(url))
        error = stranger.error()
    assert isinstance(error, kind)
    assert what in str(error)
    assert len(pair[0].snapshot()["shards"]) == 2


def test_a_shard_that_is_not_allowed_is_refused_and_those_that_the_coordinator_starts_are_taken() -> None:
    with Daemon("--shards", "2", "--quiet") as coordinator:
        with Stranger(coordinator.url) as stranger:
            stranger.send(Enlist("tcp://10.0.0.9:1", None, "guessed"))
            error = stranger.error()
            assert len(coordinator.snapshot()["shards"]) == 2
        said = complaint("--join", coordinator.url)
    assert type(error) is JoinRefusedError
    assert "tcp://10.0.0.9:1 is none of them: start the coordinator with `gradserver serve --allow-shards`" in str(
        error
    )
    assert "--allow-shards" in said


def test_a_shard_that_reports_nonsense_is_thrown_out_and_a_member_cannot_report(pair: tuple[Daemon, Shard]) -> None:
    coordinator, _ = pair
    with Stranger(coordinator.url) as stranger:
        stranger.send(Enlist("tcp://10.0.0.9:1"))
        assert isinstance(stranger.hear(), Enlisted)
        stranger.send(Reported(), b"garbage")
        assert isinstance(stranger.error(), MalformedMessageError)
    wait_until(lambda: len(coordinator.snapshot()["shards"]) == 2, "it is off the roster")
    with Stranger(coordinator.url) as stranger:
        stranger.send(Join("alone", "me", 0, 1, 5.0))
        assert isinstance(stranger.hear(), Welcome)
        stranger.send(Reported(), b"garbage")
        assert isinstance(stranger.error(), UnexpectedMessageError)


def test_a_worker_that_cannot_reach_a_shard_is_told_which(
    pair: tuple[Daemon, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = pair
    for module in ("connect", "traffic"):
        monkeypatch.setattr(f"gradserver.worker.{module}.VERDICT_SECONDS", 0.2)
    with Stranger(coordinator.url) as stranger, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        stranger.send(Enlist(url))
        assert isinstance(stranger.hear(), Enlisted)
        with pytest.raises(CoordinatorUnreachableError, match=f"the data shard at {url} has not accepted this worker"):
            connect(coordinator.url, 0, 1, "silent", "me", 0.5)
        silent.close()
        with pytest.raises(CoordinatorUnreachableError, match=f"no data shard of {coordinator.url} answered at {url}"):
            connect(coordinator.url, 0, 1, "gone", "me", 0.5)
    wait_until(lambda: len(coordinator.snapshot()["shards"]) == 2, "it is off the roster")


def test_a_url_that_is_taken_is_refused(pair: tuple[Daemon, Shard]) -> None:
    with Stranger(pair[0].url) as stranger:
        stranger.send(Enlist(pair[1].url))
        assert f"there is a data shard at {pair[1].url} already" in str(stranger.error())


# ── errors of the caller ──────────────────────────────────────────────────────────────────────────────


def complaint(*arguments: str, status: int = 1) -> str:
    """Return the output of a command that fails."""
    with Program("-m", "gradserver", "serve", *arguments) as program:
        assert program.end() == status
        return program.complaints()[-1]


def test_joining_a_shard_or_what_is_no_coordinator_is_told(pair: tuple[Daemon, Shard]) -> None:
    coordinator, shard = pair
    assert f"this is not a coordinator but a data shard of the one at {coordinator.url}" in complaint(
        "--join", shard.url
    )
    with plain_server(b"HTTP/1.0 400 Bad Request\r\n\r\n") as url:
        assert f"the process that listens at {url} is not a gradserver coordinator" in complaint("--join", url)
    with impostor(zmq.ROUTER, lambda _: [b"hello"]) as url:
        assert f"{url} answers, but not as a gradserver coordinator" in complaint("--join", url)
    other = encode(Failure.of(VersionMismatchError("this side speaks version 9"), Scope.CONNECTION))
    with impostor(zmq.ROUTER, lambda _: [other[:2] + b"\x09" + other[3:]]) as url:
        assert "this side speaks version 9" in complaint("--join", url)


def test_joining_without_a_coordinator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_JOINING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(CoordinatorUnreachableError, match=f"no coordinator answered at {url} within 0.2 s"):
        daemon.serve_shard(url, None)
    with (
        plain_server() as silent,
        pytest.raises(CoordinatorUnreachableError, match="did not answer|is no gradserver"),
    ):
        daemon.serve_shard(silent, None)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--workers", "2"], "--workers is an option of coordinators, not of data shards"),
        (["--credit", "8"], "--credit is an option of coordinators, not of data shards"),
        (["--groups", "mine"], "--groups is an option of coordinators, not of data shards"),
        (["--allow-shards"], "--allow-shards is an option of coordinators, not of data shards"),
        (
            ["--shards", "2"],
            "--shards is an option of coordinators, not of data shards (--join): run `gradserver serve --join` once "
            "for each data shard",
        ),
        (["--rate", "0"], "a data shard of rate 0 would hold no slices"),
    ],
)
def test_options_that_are_a_coordinators_are_refused(options: list[str], what: str) -> None:
    assert what in complaint("--join", "tcp://127.0.0.1:1", *options, status=2)


def test_a_shard_that_cannot_listen_is_told(pair: tuple[Daemon, Shard]) -> None:
    coordinator, shard = pair
    assert f"cannot listen on {shard.url}: the port is in use" in complaint(
        "--join", coordinator.url, "--bind", shard.url
    )


def test_a_shard_that_listens_everywhere_is_found_beside_its_coordinator() -> None:
    with Program("-m", "gradserver", "serve", "--bind", "tcp://0.0.0.0:0", "--shards", "2") as program:
        url = program.expect("listening on ").replace("0.0.0.0", "127.0.0.1")
        (_, shard) = fetch(url)["shards"]
        assert shard["url"].startswith("tcp://0.0.0.0:")
        with joined(url, 2) as workers:
            together(workers, lambda worker: worker.all_reduce(np.ones(LARGE, np.float32)))


def test_a_shard_says_what_it_is_when_it_is_ready(pair: tuple[Daemon, Shard]) -> None:
    coordinator, shard = pair
    assert shard.who == f"(data shard 1 of {coordinator.url})"
    assert shard.url.startswith("tcp://127.0.0.1:")


def test_status_shows_the_shards_and_counts_their_traffic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shards("30", primary="10") as (coordinator, (shard,)), joined(coordinator.url, 2) as workers:
        together(workers, lambda worker: worker.all_reduce(np.ones(4_000_000, np.float32)))
        one = survey(coordinator.url)
        assert one["groups"]["default"]["bytes_in"] == 2 * 16_000_000
        assert [entry["rate"] for entry in one["shards"]] == [10, 30]
        together(workers, lambda worker: worker.all_reduce(np.ones(4_000_000, np.float32)))
        text = "\n".join(render(one, survey(coordinator.url)))

        assert re.search(rf"0 +{coordinator.url} +10 Gbit/s +[0-9.]+ MB/s +25%", text), text
        assert re.search(rf"1 +{shard.url} +30 Gbit/s +[0-9.]+ MB/s +75%", text), text
        assert main(["status", shard.url]) == 0
        assert f"data shard 1 of the coordinator at {coordinator.url}: ask the coordinator" in capsys.readouterr().out
        shard.send_signal(signal.SIGSTOP)
        monkeypatch.setattr("gradserver.status._PATIENCE", 1.0)
        assert main(["status", coordinator.url, "--json"]) == 0
        assert "did not answer" in json.loads(capsys.readouterr().out)["shards"][1]["error"]
        shard.send_signal(signal.SIGCONT)
