"""Tests with lost, repeated and swapped first messages of connections: a peer that missed something connects again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from gradserver.protocol.errors import ConnectionLostError, CoordinatorError, JoinRefusedError, LeftOutError
from gradserver.protocol.messages import (
    Attend,
    Attended,
    BePresent,
    Enlist,
    Enlisted,
    Failure,
    Join,
    Message,
    Ordered,
    Ping,
    Push,
    Welcome,
)
from gradserver.protocol.messages.recovery import Holding, Resume, Resumed, Standing
from gradserver.tools.chaos.relay import Fate
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, Daemon, Task, joined, together, wait_until
from tests.relay import Judge, Loser, relay, swapped, twice
from tests.restart_training import train
from tests.test_restart import undisturbed
from tests.test_shard_processes import LARGE, Shard

WORLD = 3


# ── joining ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Join, BePresent, Welcome, Ping])
def test_a_worker_joins_whatever_is_lost_of_its_first_messages(kind: type[Message]) -> None:
    upwards = kind in (Join, Ping)
    loser = Loser(upwards, kind)
    with Daemon("--workers", "1") as daemon, relay(daemon.url, loser) as through:
        with connect(through, timeout=PATIENCE, channel="tcp") as worker:
            assert worker.all_reduce(np.ones(3, np.float32)).tolist() == [1.0] * 3
        assert loser.lost == 1


@pytest.mark.parametrize("kind", [Join, BePresent])
def test_others_wait_for_a_worker_that_has_to_join_again(kind: type[Message]) -> None:
    """Test a first connection that still has its rank."""
    loser = Loser(kind is Join, kind)
    with Daemon("--workers", "2") as daemon, relay(daemon.url, loser) as through:
        first = Task(connect, through, 0, 2, name="w0", timeout=PATIENCE, channel="tcp")
        wait_until(lambda: loser.seen == 2, "it has joined again")
        with connect(daemon.url, 1, 2, name="w1", timeout=PATIENCE) as one, first.result() as zero:
            arrays = together([zero, one], lambda worker: worker.all_reduce(np.full(3, 1.0 + worker.rank, np.float32)))
            assert all((array == 1.5).all() for array in arrays)


def test_a_refusal_that_was_lost_is_heard_the_next_time() -> None:
    loser = Loser(False, Failure)
    with Daemon("--workers", "1") as daemon, relay(daemon.url, loser) as through, joined(daemon.url, 1):
        with pytest.raises(JoinRefusedError, match="is complete and it is in round 0"):
            connect(through, name="w9", timeout=PATIENCE, channel="tcp")
        assert loser.lost == 1


@pytest.mark.parametrize("judge", [twice, swapped], ids=["twice", "swapped"])
def test_no_worker_joins_twice(judge: Judge) -> None:
    with Daemon("--workers", "2") as daemon, relay(daemon.url, judge) as through, ExitStack() as stack:

        def join(rank: int) -> Worker:
            return connect(through, rank, 2, name=f"w{rank}", timeout=PATIENCE, channel="tcp")

        workers = [stack.enter_context(worker) for worker in together(range(2), join)]
        assert len(daemon.group()["members"]) == 2
        together(workers, lambda worker: worker.barrier())


# ── data shards ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Enlist, BePresent, Enlisted])
def test_a_data_shard_is_enlisted_whatever_is_lost_of_its_first_messages(kind: type[Message]) -> None:
    loser = Loser(kind is Enlist, kind)
    with Daemon("--allow-shards") as daemon, relay(daemon.url, loser) as through, Shard(through):
        assert loser.lost == 1
        wait_until(lambda: len(daemon.snapshot()["shards"]) == 2, "the coordinator knows of that one, and no other")
        with joined(daemon.url, 2) as workers:
            arrays = together(workers, lambda worker: worker.all_reduce(np.full(LARGE, worker.rank, np.float32)))
            assert all((array == 0.5).all() for array in arrays)


def test_a_data_shard_notices_soon_that_an_order_was_lost() -> None:
    loser = Loser(False, Ordered)
    with Daemon("--allow-shards") as daemon, relay(daemon.url, loser) as through, Shard(through) as shard:
        joining = Task(connect, daemon.url, 0, 1, timeout=PATIENCE)
        assert shard.end() == 1
        assert "was lost on the way" in shard.complaints()[-1]
        joining.error(CoordinatorError)


@pytest.mark.parametrize("kind", [Attend, BePresent, Attended])
def test_a_worker_that_cannot_reach_a_data_shard_hears_soon_why(
    kind: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that it is a member already then, so another connection would not help."""
    loser = Loser(kind is Attend, kind)
    with Daemon("--allow-shards") as daemon, Shard(daemon.url) as shard, relay(shard.url, loser) as through:
        monkeypatch.setattr("gradserver.worker.transport.tcp.beside", lambda *_: through)
        joining = Task(connect, daemon.url, 0, 1, timeout=PATIENCE, channel="tcp")
        assert "was lost on the way" in str(joining.error(ConnectionLostError, PATIENCE / 2))
        assert loser.lost == 1


# ── coming back ───────────────────────────────────────────────────────────────────────────────────────


class Breaker:
    """Loses a Push, which costs the connection, and then what `judge` says while another one is made."""

    def __init__(self, judge: Judge) -> None:
        self._push, self._judge = Loser(True, Push, 20), judge

    def __call__(self, upwards: bool, number: int, message: Message) -> Fate:
        fate = self._push(upwards, number, message)
        return self._judge(upwards, number, message) if self._push.lost and fate is Fate.PASSES else fate


def trained(daemon: Daemon, judge: Judge, rounds: int = 12) -> set[int]:
    """Return the weights of a durable group with one member behind a relay."""
    with relay(daemon.url, judge) as through, ExitStack() as stack:

        def join(rank: int) -> Worker:
            url = through if rank == 1 else daemon.url
            return stack.enter_context(connect(url, rank, WORLD, name=f"w{rank}", timeout=PATIENCE, channel="tcp"))

        return set(together(together(range(WORLD), join), train, rounds))


@pytest.mark.parametrize(
    ("upwards", "kind"),
    [
        (True, Resume),
        (False, BePresent),
        (False, Resumed),
        (True, Holding),
        (False, Standing),
    ],
)
def test_a_member_comes_back_whatever_is_lost_of_its_first_messages(
    upwards: bool, kind: type[Message], tmp_path: Path
) -> None:
    loser = Loser(upwards, kind)
    with Daemon("--workers", f"{WORLD}:{WORLD}", "--dead-after", "30", "--state-dir", str(tmp_path)) as daemon:
        assert trained(daemon, Breaker(loser)) == {undisturbed(12, "fp32")}
    assert loser.lost == 1


@pytest.mark.parametrize("judge", [twice, swapped], ids=["twice", "swapped"])
def test_what_comes_twice_or_in_another_order_harms_no_member_that_comes_back(judge: Judge, tmp_path: Path) -> None:
    with Daemon("--workers", f"{WORLD}:{WORLD}", "--dead-after", "30", "--state-dir", str(tmp_path)) as daemon:
        assert trained(daemon, Breaker(judge)) == {undisturbed(12, "fp32")}


def test_a_member_that_was_left_out_hears_so_though_that_was_lost_once(tmp_path: Path) -> None:
    """Test that its late message is lost again and again, for longer than the round timeout."""
    push, told = Loser(True, Push, armed=False), []
    others_wait = Event()
    others_wait.set()

    def judge(upwards: bool, number: int, message: Message) -> Fate:
        if isinstance(message, Failure) and message.error == LeftOutError.__name__:
            told.append(message)
            return Fate.LOST if len(told) == 1 else Fate.PASSES
        if isinstance(message, Resume) and others_wait.is_set():
            return Fate.LOST
        return push(upwards, number, message)

    options = (
        "--workers",
        "1:2",
        "--gather",
        "60",
        "--dead-after",
        "0.5",
        "--round-timeout",
        "2",
        "--state-dir",
        str(tmp_path),
    )
    with Daemon(*options) as daemon, relay(daemon.url, judge) as through, ExitStack() as stack:
        urls = daemon.url, through

        def join(rank: int) -> Worker:
            return stack.enter_context(connect(urls[rank], rank, 2, name=f"w{rank}", timeout=2.0, channel="tcp"))

        workers = together(range(2), join)
        together(workers, lambda worker: worker.barrier())
        push.armed = True
        waiting = Task(workers[1].all_reduce, np.ones(3, np.float32))
        wait_until(lambda: len(daemon.group()["members"]) == 1, "the other goes on")
        others_wait.clear()
        assert "came back to group 'default' when the others had gone on" in str(waiting.error(LeftOutError))
        assert len(told) == 2
