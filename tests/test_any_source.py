"""Tests of receives from whichever member sends first, in random programs, and over the death of coordinators."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver import DeadlineError, InvalidArgumentError, Worker, WorkerLeftError, WorkerLostError
from gradserver.local import LocalCluster
from gradserver.worker.collectives.any_source import AnySource
from tests.cluster import TIMEOUT, Daemon, Task, coordinator, joined, together


def receive(worker: Worker, tag: int = 0, seconds: float = TIMEOUT) -> tuple[int, float]:
    tensor = np.empty(3)
    return AnySource(worker._session, tensor, tag).wait(seconds), float(tensor[0])


def send_all(worker: Worker, values: Sequence[float], pauses: Sequence[float] = ()) -> None:
    handles = []
    for number, value in enumerate(values):
        time.sleep(pauses[number] if pauses else 0.0)
        handles.append(worker.send(np.full(3, value), 0, async_op=True))
    for handle in handles:
        handle.wait()


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    named=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 1000),
)
def test_each_message_comes_once_in_the_order_of_its_source(counts: list[int], named: list[int], seed: int) -> None:
    """Mix receives from any member with those from a certain one. A value is 10 times its source and its number."""
    named = [peer for peer in dict.fromkeys(named) if peer <= len(counts) and counts[peer - 1]]
    with LocalCluster(len(counts) + 1) as cluster:
        receiver, *senders = cluster.workers
        sending = [
            Task(send_all, sender, [10.0 * sender.rank + one for one in range(counts[sender.rank - 1])])
            for sender in senders
        ]
        found: list[tuple[int, float]] = []
        kinds = [0] * (sum(counts) - len(named)) + named
        random.Random(seed).shuffle(kinds)
        # A certain source's message may be the only one left of it when an earlier receive takes any.
        for peer in sorted(kinds, key=lambda kind: kind == 0):
            if peer:
                tensor = receiver.recv(np.empty(3), peer)
                found.append((peer, float(tensor[0])))
            else:
                found.append(receive(receiver))
        for task in sending:
            task.result()
    for peer, count in enumerate(counts, 1):
        assert [value for source, value in found if source == peer] == [10.0 * peer + one for one in range(count)]


def test_two_threads_receive_each_message_once() -> None:
    with LocalCluster(3) as cluster:
        receiver, *senders = cluster.workers
        tasks = [Task(lambda: [receive(receiver) for _ in range(10)]) for _ in range(2)]
        together(senders, lambda sender: send_all(sender, [10.0 * sender.rank + one / 10 for one in range(10)]))
        found = [one for task in tasks for one in task.result()]
    assert sorted(found) == sorted((peer, 10.0 * peer + one / 10) for peer in (1, 2) for one in range(10))


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_messages_come_over_the_death_of_the_coordinator(shards: int, tmp_path: Path) -> None:
    options = ("--state-dir", str(tmp_path), "--shards", str(shards))
    first = Daemon(*options)
    try:
        with joined(first.url, 3) as workers:
            receiver, *senders = workers
            chance = random.Random(3)
            sending = [
                Task(send_all, one, [10.0 * one.rank + n for n in range(9)], [chance.random() * 0.2 for _ in range(9)])
                for one in senders
            ]
            found = [receive(receiver) for _ in range(4)]
            receiving = Task(lambda: [receive(receiver, seconds=60.0) for _ in range(14)])
            first.send_signal(signal.SIGKILL)
            first.end()
            first.__exit__()
            first = Daemon(*options)
            found += receiving.result(60.0)
            for task in sending:
                task.result(60.0)
            for peer in (1, 2):
                assert [value for source, value in found if source == peer] == [10.0 * peer + n for n in range(9)]
    finally:
        first.__exit__()


@pytest.mark.parametrize("how", ["left", "lost"])
def test_source_that_has_departed_is_named_once_its_messages_have_come(how: str) -> None:
    with coordinator() as server, joined(server.url, 3) as (receiver, one, other):
        other.send(np.full(3, 5.0), 0, async_op=True)
        assert receive(receiver) == (2, 5.0)
        waiting = Task(receive, receiver)
        assert not waiting.ended(0.2)
        if how == "left":
            one.close()
            assert "rank 1" in str(waiting.error(WorkerLeftError))
        else:
            one._session.traffic.channel.close()
            assert "rank 1" in str(waiting.error(WorkerLostError))


def test_wait_runs_out_and_may_be_repeated() -> None:
    with LocalCluster(2) as cluster:
        receiver, sender = cluster.workers
        tensor = np.empty(3)
        source = AnySource(receiver._session, tensor, 4)
        with pytest.raises(DeadlineError, match=r"any rank \(tag 4\) is not done after 0.1 s"):
            source.wait(0.1)
        assert (source.done(), source.source) == (False, -1)
        handle = sender.send(np.arange(3.0), 0, 4, async_op=True)
        assert source.wait(TIMEOUT) == 1
        handle.wait()
        assert (source.done(), tensor.tolist()) == (True, [0.0, 1.0, 2.0])
        with pytest.raises(InvalidArgumentError, match="without elements"):
            AnySource(receiver._session, np.empty(0), 0)
