"""The laws that hold across channels, schedules and processes."""

from __future__ import annotations

import json
import random
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine import Engine
from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, numpy_dtype
from gradserver.protocol.errors import DeadlineError
from gradserver.protocol.limits import MIN_CREDIT_BYTES
from gradserver.protocol.messages import HERE, Join, Message, Place, Push
from gradserver.protocol.plan import Bucket, Component, Plan, simple_plan
from gradserver.protocol.wire import decode, encode
from gradserver.runtime import Runtime
from gradserver.status import fetch
from gradserver.worker.client import Worker
from gradserver.worker.collectives.arguments import ReductionName
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session
from tests.cluster import AMONG_MEMBERS, Program, joined, members, together
from tests.engine_harness import grain_of, small_slices
from tests.examples import examples

Array = np.ndarray[Any, Any]

# ── L1 identical, L2 reproducible, L3 exact: over both channels, in every order of arrival ────────────

WEIGHTS = [0.3, 7.0, 1.9, 2.0]


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


def contributions(name: str, numel: int, world_size: int, seed: int = 0) -> list[Array]:
    values = np.random.default_rng(seed).normal(size=(world_size, numel)) * [[10.0**rank] for rank in range(world_size)]
    return [row.astype(np.float32).astype(numpy_dtype(BY_NAME[name])) for row in values]


def mean_in_rank_order(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return ``sum(w·g) / sum(w)``, rounded to float32 after each step, in rank order."""
    total = np.zeros(arrays[0].size, np.float32)
    for array, weight in zip(arrays, weights, strict=True):
        total = total + np.float32(weight) * array.astype(np.float32)
    return (total / np.float32(sum(weights))).astype(arrays[0].dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_every_order_of_arrival_and_every_channel_gives_every_member_the_same_bits(name: str) -> None:
    given = contributions(name, 70_001, 3)
    right = mean_in_rank_order(given, WEIGHTS[:3]).tobytes()

    for channel in ("memory", "tcp"):
        with members(channel, 3) as workers:
            for order in permutations(range(3)):
                data = [array.copy() for array in given]
                handles = [workers[rank].all_reduce(data[rank], weight=WEIGHTS[rank], async_op=True) for rank in order]
                for handle in handles:
                    handle.wait()
                assert [array.tobytes() for array in data] == [right] * 3, (channel, order)


@pytest.mark.parametrize("channel", ["memory", "tcp"])
def test_rounds_that_race_give_the_same_bits(channel: str) -> None:
    sizes = [600_000, 5, 300_000]
    given = {index: contributions("float32", size, 4, seed=index) for index, size in enumerate(sizes)}
    right = {index: mean_in_rank_order(arrays, WEIGHTS) for index, arrays in given.items()}
    plan = simple_plan([(f"b{index}", size) for index, size in enumerate(sizes)], FLOAT32)

    def train(worker: Worker) -> None:
        worker.agree(plan)
        for number in range(3):
            data = {index: given[index][worker.rank].copy() for index in given}
            for index in random.Random(10 * number + worker.rank).sample(sorted(data), len(data)):
                worker.push(index, data[index], weight=WEIGHTS[worker.rank])
            worker.finish_round()
            for index, array in data.items():
                np.testing.assert_array_equal(array, right[index])

    with members(channel, 4, credit=MIN_CREDIT_BYTES) as workers:
        together(workers, train)


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_collectives_give_the_same_bits_over_both_channels(op: ReductionName) -> None:
    given = contributions("float32", 300_003, 3)
    results = set()

    for channel in ("memory", "tcp"):
        with members(channel, 3) as workers:

            def work(worker: Worker) -> bytes:
                whole = worker.all_reduce(given[worker.rank].copy(), op)
                part = worker.reduce_scatter(given[worker.rank][:300_000].copy(), op)
                gathered = worker.all_gather(part).reshape(-1)
                np.testing.assert_array_equal(gathered, whole[:300_000])
                return bytes(whole.tobytes())

            results.update(together(workers, work))

    assert len(results) == 1


# ── L2, L5: in every schedule everything comes to an end, and the same one ────────────────────────────


class Network:
    """Workers and their coordinator. Messages are delivered one at a time: each line in order, which line by chance."""

    def __init__(self, world_size: int, credit: int, chance: random.Random) -> None:
        self._chance = chance
        self._coordinator = Runtime(Engine({"group": world_size}, credit))
        self._lines: list[Line] = []
        sessions = [self._join(rank) for rank in range(world_size)]
        self.deliver_all()
        self.workers = [Worker(session) for session in sessions]

    def _join(self, rank: int) -> Session:
        up, down = Line(), Line()
        self._lines += [up, down]
        connection = self._coordinator.connect(End(down))
        up.deliver = lambda message, payloads: self._coordinator.receive(connection, message, payloads)
        session = Session(WorkersEnd(up, shares=self._chance.random() < 0.5), timeout=10.0)
        down.deliver = session.receive
        session.join(Join("group", f"w{rank}", rank, 0, 10.0))
        return session

    def agree(self, plan: Plan) -> None:
        for worker in self.workers:
            with suppress(DeadlineError):
                worker.agree(plan, timeout=0)
        self.deliver_all()
        for worker in self.workers:
            worker.agree(plan, timeout=0)

    def deliver(self) -> bool:
        """Deliver one message. Return False if there is none."""
        busy = [line for line in self._lines if line.queue]
        if busy:
            line = self._chance.choice(busy)
            line.deliver(*line.queue.popleft())
        return bool(busy)

    def deliver_all(self) -> None:
        while self.deliver():
            pass


class Line:
    """One direction between a worker and the coordinator."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Message, Sequence[Buffer]]] = deque()
        self.deliver: Callable[[Message, Sequence[Buffer]], None]


class End:
    """The end of a line: messages are copied, as by a socket. Shared memory stays where it is."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def attach(self, receiver: Receiver) -> None:
        pass

    def send(self, message: Message, payloads: Sequence[Buffer] = (), _shard: int = 0) -> None:
        if isinstance(message, Push) and message.place is not None:
            self._line.queue.append((message, payloads))
        else:
            self._line.queue.append(decode([encode(message), *(bytes(payload) for payload in payloads)]))

    def close(self) -> None:
        pass


class WorkersEnd(End):
    """``shares``: whether contributions and results stay where they are, or travel."""

    def __init__(self, line: Line, shares: bool) -> None:
        super().__init__(line)
        self._shares = shares

    def empty(self, _nbytes: int) -> Bytes | None:
        return None

    def place_of(self, _data: Bytes, _shard: int = 0) -> Place | None:
        return HERE if self._shares else None

    def wait(self, done: Lock, timeout: float) -> bool:
        assert timeout == 0, "nothing would be delivered meanwhile"
        return done.acquire(blocking=False)

    def watch(self, enough: Callable[[], bool]) -> None:
        pass

    def look(self) -> None:
        pass


def train(worker: Worker, given: list[list[Array]], chance: random.Random) -> Generator[None, None, list[bytes]]:
    """Yield what one worker does, step by step: rounds of buckets, with a collective and ring transfers among them."""
    before, after = (worker.rank - 1) % worker.world_size, (worker.rank + 1) % worker.world_size
    results: list[bytes] = []
    for arrays in given:
        data = [array.copy() for array in arrays]
        total, passed_on, received = data[0].copy(), np.full(7, worker.rank, np.float32), np.zeros(7, np.float32)
        calls: list[Callable[[], Handle]] = [
            partial(worker.all_reduce, total, "sum", async_op=True),
            partial(worker.send, passed_on, after, async_op=True),
            partial(worker.recv, received, before, async_op=True),
            *(partial(worker.push, index, array, weight=WEIGHTS[worker.rank]) for index, array in enumerate(data)),
        ]
        handles = []
        for call in chance.sample(calls, len(calls)):
            handles.append(call())
            yield
        while not all(handle.done() for handle in handles):
            yield
        worker.finish_round()
        assert (received == before).all()
        results += [array.tobytes() for array in [*data, total]]
    return results


def run(network: Network, given: list[list[list[Array]]], chance: random.Random) -> list[list[bytes]]:
    """Let all workers train, in a random order. Return the results, by rank."""
    running = {
        worker.rank: train(worker, [[arrays[worker.rank] for arrays in buckets] for buckets in given], chance)
        for worker in network.workers
    }
    results: dict[int, list[bytes]] = {}
    idle = 0
    while running:
        if chance.random() < 0.7 and network.deliver():
            idle = 0
            continue
        rank = chance.choice(list(running))
        try:
            next(running[rank])
        except StopIteration as end:
            results[rank] = end.value
            del running[rank]
        idle += 1
        assert idle < 1000, "all wait for all"
    return [results[rank] for rank in range(len(network.workers))]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    world_size=st.integers(2, 4),
    spare=st.integers(0, 40),
    slice_bytes=st.sampled_from([8, 32]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(20))
def test_every_schedule_comes_to_the_same_end(
    sizes: list[int], world_size: int, spare: int, slice_bytes: int, seed: int
) -> None:
    plan = simple_plan([(f"b{index}", size) for index, size in enumerate(sizes)], FLOAT32)
    given = [[contributions("float32", size, world_size, seed=n) for n, size in enumerate(sizes, r)] for r in (0, 10)]
    chance = random.Random(seed)

    with small_slices(slice_bytes), grain_of(seed):
        ends = []
        for _ in range(2):
            network = Network(world_size, 2 * slice_bytes + spare, chance)
            network.agree(plan)
            ends.append(run(network, given, chance))

    assert ends[0] == ends[1]
    right = [mean_in_rank_order(arrays, WEIGHTS[:world_size]).tobytes() for arrays in given[0]]
    for results in ends[0]:
        assert results == ends[0][0]
        assert results[: len(right)] == right


# ── L9 the daemon needs no torch ──────────────────────────────────────────────────────────────────────

DAEMON_THAT_TELLS = """
import json, sys
from gradserver.cli import main
status = main(["serve", "--bind", "tcp://127.0.0.1:0"])
print("modules", json.dumps(sorted(sys.modules)))
sys.exit(status)
"""


def test_daemon_that_served_workers_has_loaded_neither_torch_nor_the_worker() -> None:
    with Program("-c", DAEMON_THAT_TELLS) as daemon:
        url = daemon.expect("listening on ")
        with joined(url, 2) as workers:
            floating = {name: dtype for name, dtype in BY_NAME.items() if dtype.kind == "f"}
            plan = Plan(tuple(Bucket(name, dtype, (Component("weight", (9,)),)) for name, dtype in floating.items()))

            def train(worker: Worker) -> None:
                worker.agree(plan)
                for index, bucket in enumerate(plan.buckets):
                    worker.push(index, np.ones(9, numpy_dtype(bucket.dtype)))
                worker.finish_round()

            together(workers, train)
        fetch(url)
        libraries = Path(f"/proc/{daemon.pid}/maps").read_text()
        daemon.send_signal(signal.SIGTERM)
        modules = json.loads(daemon.expect("modules "))
        assert daemon.end() == 0

    assert "torch" not in libraries
    roots = {name.partition(".")[0] for name in modules}
    assert "gradserver" in roots
    assert roots.isdisjoint({"torch", "matplotlib"})
    assert "gradserver.engine" in modules
    assert "gradserver.worker" not in modules
