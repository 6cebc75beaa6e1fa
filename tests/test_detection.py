"""Tests of liveness: processes that end, freeze or are busy, and a coordinator that stands still."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from gradserver.protocol.errors import LeftOutError
from gradserver.protocol.messages import Join, Present
from gradserver.protocol.transport.numbers import Numbers
from gradserver.transport.binding import bind_router
from gradserver.transport.handshake import ROLES
from gradserver.transport.liveness import Liveness, Patience
from gradserver.transport.peers import Peer
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, Daemon, Program, Task, together, wait_until, worker_program
from tests.test_chaos_network import Between

WORLD = 3
VICTIM = 1
NEVER = "600"
"""A timeout that no test reaches."""

channels = pytest.mark.parametrize("channel", ["tcp", "shm"])


@contextmanager
def with_children(stack: ExitStack, url: str, channel: str) -> Iterator[list[Program]]:
    """Start workers that exchange until an error. The victim has forked two children, which outlive it."""
    orphans: list[int] = []
    try:
        workers = [
            worker_program(url, "exchange_with_children", rank, WORLD, channel, count=2)
            if rank == VICTIM
            else worker_program(url, "exchange_until_error", rank, WORLD, channel)
            for rank in range(WORLD)
        ]
        for worker in workers:
            stack.enter_context(worker)
        orphans += json.loads(workers[VICTIM].expect("children "))
        for worker in workers:
            worker.expect("exchanging")
        yield workers
    finally:
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


def exchanging(stack: ExitStack, daemon: Daemon, channel: str) -> list[Program]:
    """Start members of an elastic group that exchange until one of them is missing."""
    workers = [worker_program(daemon.url, "exchange_until_fewer", rank, WORLD, channel) for rank in range(WORLD)]
    for worker in workers:
        stack.enter_context(worker)
    for worker in workers:
        worker.expect("exchanging")
    return workers


def error_of(worker: Program) -> tuple[str, str]:
    """Return class and text of the error that a worker ends with."""
    _, kind, text = json.loads(worker.expect("error "))
    return kind, text


# ── dead ──────────────────────────────────────────────────────────────────────────────────────────────


@channels
def test_a_killed_worker_is_noticed_at_once_though_its_children_live(channel: str) -> None:
    with (
        Daemon("--frozen-after", NEVER) as daemon,
        ExitStack() as stack,
        with_children(stack, daemon.url, channel) as workers,
    ):
        victim = workers.pop(VICTIM)
        victim.send_signal(signal.SIGKILL)
        for survivor in workers:
            kind, text = error_of(survivor)
            assert kind == "WorkerLostError"
            assert "'w1' (rank 1) was lost after round" in text
            assert text.endswith("its process ended" if channel == "shm" else "it died, froze or lost its network")


@channels
def test_children_of_a_worker_do_not_disturb_it(channel: str) -> None:
    with Daemon() as daemon, ExitStack() as stack, with_children(stack, daemon.url, channel):
        before = daemon.group()["round"]
        wait_until(lambda: daemon.group()["round"] > before + 50, "they go on")


@channels
def test_a_death_in_an_elastic_group_is_told_with_its_reason(channel: str) -> None:
    with Daemon("--workers", "2:3", "--gather", "60", "--frozen-after", NEVER) as daemon, ExitStack() as stack:
        workers = exchanging(stack, daemon, channel)
        workers.pop(VICTIM).send_signal(signal.SIGKILL)
        for survivor in workers:
            survivor.expect("ok")
        reason = "its process ended" if channel == "shm" else "it died, froze or lost its network"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.end() == 0
        assert any("'w1' (rank 1) was lost in round" in line and reason in line for line in daemon.complaints())


# ── frozen, and not ───────────────────────────────────────────────────────────────────────────────────


@channels
def test_a_frozen_worker_is_left_out_and_told_so_when_it_is_back(channel: str) -> None:
    with Daemon("--workers", "2:3", "--gather", "60", "--frozen-after", "1") as daemon, ExitStack() as stack:
        workers = exchanging(stack, daemon, channel)
        victim = workers.pop(VICTIM)
        victim.send_signal(signal.SIGSTOP)
        for survivor in workers:
            survivor.expect("fewer")
            survivor.expect("ok")
        victim.send_signal(signal.SIGCONT)

        kind, text = error_of(victim)
        assert kind == "LeftOutError"
        assert "this worker, 'w1' (rank 1), was left out of group 'default' in round" in text
        assert text.endswith("nothing was heard of it for 1 s. It has to join again")


@channels
def test_a_member_that_loses_its_connection_hears_from_a_living_coordinator_that_the_group_goes_on(
    channel: str,
) -> None:
    with Daemon("--workers", "1:3", "--gather", "60") as daemon, ExitStack() as stack:
        wires = stack.enter_context(Between("wires", daemon.url.removeprefix("tcp://")))

        def join(rank: int) -> Worker:
            url = f"tcp://127.0.0.1:{wires.port}" if rank == VICTIM else daemon.url
            return stack.enter_context(connect(url, rank, WORLD, name=f"w{rank}", timeout=PATIENCE, channel=channel))

        workers = together(range(WORLD), join)
        together(workers, lambda worker: worker.barrier())
        waiting = Task(workers[VICTIM].barrier)
        wires.say("reset w")
        error = waiting.error(LeftOutError)
        assert "this worker, 'w1' (rank 1), was left out of group 'default' in round 0: its connection" in str(error)
        assert error.rank == VICTIM


@pytest.mark.parametrize(
    ("frozen_after", "point", "channel"),
    [
        ("1", "asked", "tcp"),
        ("1", "made", "shm"),
        ("1", "connected", "tcp"),
        ("1", "in", "shm"),
        ("1", "in", "tcp"),
        *(pytest.param("3", point, "tcp", marks=pytest.mark.long) for point in ("asked", "made", "connected", "in")),
    ],
)
def test_a_freeze_right_after_joining_is_noticed_as_soon_as_later(frozen_after: str, point: str, channel: str) -> None:
    """Test that it is not noticed by heartbeats of another kind, 35 s later."""
    with Daemon("--workers", "2:3", "--gather", "60", "--frozen-after", frozen_after) as daemon, ExitStack() as stack:
        others = [stack.enter_context(worker_program(daemon.url, "exchange_until_fewer", r, WORLD)) for r in (0, 2)]
        wait_until(lambda: len(daemon.group().get("waiting", ())) == len(others), "the others wait")
        victim = stack.enter_context(
            worker_program(daemon.url, "exchange_until_fewer", VICTIM, WORLD, channel, freezes_when=point)
        )
        frozen = float(victim.expect("freezing "))
        times = [float(other.expect("fewer ")) - frozen for other in others]
        assert max(times) < 10, times
        for other in others:
            other.expect("ok")
        if point == "in":
            victim.send_signal(signal.SIGCONT)
            assert error_of(victim)[0] == "LeftOutError"
    print(f"noticed after {min(times):.2f} to {max(times):.2f} s")


@channels
def test_a_worker_that_stands_still_for_a_moment_is_not_left_out(channel: str) -> None:
    with Daemon("--workers", "2:3", "--gather", "60") as daemon, ExitStack() as stack:
        workers = exchanging(stack, daemon, channel)
        for _ in range(3):
            workers[VICTIM].send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            workers[VICTIM].send_signal(signal.SIGCONT)
            before = daemon.group()["round"]
            wait_until(lambda before=before: daemon.group()["round"] > before + 5, "they go on")  # type: ignore[misc]
        assert len(daemon.group()["members"]) == WORLD


@pytest.mark.parametrize(
    ("frozen_after", "seconds"), [("1", 3.0), pytest.param("3", 10.0, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_worker_inside_one_long_call_is_not_dead(frozen_after: str, seconds: float) -> None:
    """Test four groups side by side: over each channel, as soon as it has joined, and later."""
    with Daemon("--frozen-after", frozen_after) as daemon, ExitStack() as stack:
        workers = [
            worker_program(
                *(daemon.url, "hold_the_lock", rank, WORLD, channel),
                group=f"{channel}, at once: {at_once}",
                seconds=seconds,
                at_once=at_once,
            )
            for channel, at_once in itertools.product(("tcp", "shm"), (True, False))
            for rank in range(WORLD)
        ]
        for worker in workers:
            stack.enter_context(worker)
        for worker in workers:
            worker.expect("ok", PATIENCE)


@pytest.mark.parametrize(
    ("frozen_after", "seconds"), [("1", 2.0), pytest.param("3", 4.0, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.parametrize("shards", ["1", pytest.param("2", marks=pytest.mark.long)])
@channels
def test_a_coordinator_that_stands_still_loses_no_worker(
    channel: str, shards: str, frozen_after: str, seconds: float
) -> None:
    """Test with workers that have sent more than libzmq reads ahead of its connections."""
    with Daemon("--frozen-after", frozen_after, "--shards", shards) as daemon, ExitStack() as stack:
        workers = [
            stack.enter_context(
                worker_program(
                    daemon.url, "rounds", rank, WORLD, channel, count=15, buckets=60, numel=40_000, ready=True
                )
            )
            for rank in range(WORLD)
        ]
        for worker in workers:
            worker.expect("ready")
        for worker in workers:
            worker.tell()
        wait_until(lambda: daemon.group()["round"] > 2, "they exchange")
        daemon.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        daemon.send_signal(signal.SIGCONT)
        for worker in workers:
            worker.expect("ok")
            assert worker.end() == 0


def test_a_server_sends_no_heartbeats_as_a_freeze_behind_an_answer_would_not_be_noticed() -> None:
    """Test around libzmq 4.3: anything that comes, other than a PING, stops the clock of silence until a PING."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        bind_router(router, "tcp://127.0.0.1:0")
        assert router.get(zmq.HEARTBEAT_IVL) == 0
        assert router.get(zmq.TCP_KEEPALIVE) == 1


def test_a_server_that_stands_still_in_the_midst_of_a_look_gives_peers_time_to_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test that what was seen before it stood still is not as old as it seems."""
    now = 1000.0
    monkeypatch.setattr("gradserver.transport.liveness.time.monotonic", lambda: now)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        looking = Liveness(router, None, Patience(frozen_after=1.0))
        reachable: Any = SimpleNamespace(route=lambda *_: True, encoded=lambda _: b"")
        peer = Peer(reachable, b"w0", Numbers())
        join = Join("group", "w0", 0, 1, 60.0)
        role = ROLES[Join]
        looking.beats(peer, Present(looking.invite(peer, join, role.first_beat, role.announces).identity))
        looks = 0  # its beacon is closed
        while not (verdicts := looking.look([peer])):
            looks += 1
            now += 2.0 if looks in (1, 3) else 0.05
        assert 6 <= looks <= 8, "it had 0.3 s of ours to open it again"
        assert [(verdict.peer, verdict.silent) for verdict in verdicts] == [(peer, True)]
        looking.close()
