"""Tests of links: what a worker measures before it joins, and what its group makes of that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.engine import Engine
from gradserver.engine.control.links import APART_SECONDS, credit_for, grain_for
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.events import Restored
from gradserver.engine.orders import OpenGroup, Order
from gradserver.engine.records import Durable
from gradserver.local import LocalCluster
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.limits import CREDIT_BYTES, KIB, MAX_RATE, MIN_CREDIT_BYTES, PROBE_BYTES
from gradserver.protocol.messages import Join, Message, Probe, Probed, Welcome
from gradserver.protocol.offers import THREAD, Offer
from gradserver.protocol.slicing import grain_of
from gradserver.tools.common import netns
from gradserver.transport.traffic import STRANGERS_BYTES, STRANGERS_PROBES
from gradserver.worker.transport.probing import Link, measure
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import Daemon, coordinator, joined, together
from tests.engine_harness import SEATS, Harness
from tests.strangers import Stranger
from tests.test_bench import needs_hosts
from tests.test_restoring import FOUNDED, SECRET, write
from tests.test_state_dir import opened

GBIT = 1e9 / 8


# ── what a worker measures ────────────────────────────────────────────────────────────────────────────


class Emulated:
    """A connection over a link of ``rate`` bytes a second, with a clock of its own."""

    def __init__(
        self, rate: float, trip: float, burst: int = 0, answers: int = 99, stalls: Sequence[float] = ()
    ) -> None:
        self.rate, self.trip, self.tokens, self.burst = rate, trip, float(burst), burst
        self.now, self.answers, self.stalls, self.sent = 0.0, answers, list(stalls), 0

    def probe(self, payload: Buffer, timeout: float) -> bool:
        """Take as long as the link does."""
        nbytes = len(payload)
        assert nbytes <= PROBE_BYTES
        self.sent += nbytes
        self.answers -= 1
        if self.answers < 0:
            self.now += timeout
            return False
        free = min(self.tokens, nbytes)
        took = self.trip + (nbytes - free) / self.rate + (self.stalls.pop(0) if self.stalls else 0.0)
        self.tokens = min(self.tokens - free + took * self.rate, self.burst)
        self.now += took
        return True


def measured(link: Emulated) -> Link:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.worker.transport.probing.time.perf_counter", lambda: link.now)
        return measure(link)


@given(st.floats(1e-3, 40), st.floats(1e-5, 4e-3), st.sampled_from([0, 64 * KIB, 256 * KIB]))
def test_a_rate_is_found_within_a_factor_of_three_and_takes_a_moment(gbit: float, trip: float, burst: int) -> None:
    link = Emulated(gbit * GBIT, trip, burst)
    found = measured(link)

    assert found.trip == pytest.approx(trip)
    assert 0.99 * min(gbit, 0.05 * 8 * 512 * KIB / trip / 1e9) < found.rate or trip > 1e-3
    assert found.rate < 3.1 * gbit or burst
    assert link.sent < STRANGERS_BYTES
    late = 2 * PROBE_BYTES / link.rate if burst else 0.0  # a burst hides from all but the longest that the link is slow
    assert link.now < 0.2 + late or gbit < 0.01


@pytest.mark.parametrize("stalled", [1, 2, 3, 4])
def test_a_worker_that_waits_for_its_processor_measures_again(stalled: int) -> None:
    found = measured(Emulated(GBIT, 1e-4, stalls=[0.05 * (number == stalled) for number in range(9)]))

    assert found.rate == pytest.approx(1.0, rel=0.01)
    assert found.trip == pytest.approx(1e-4)


def test_a_long_way_tells_no_rate() -> None:
    found = measured(Emulated(GBIT, 30e-3))
    assert found.rate == 0
    assert found.trip == pytest.approx(30e-3)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_coordinator_that_does_not_answer_is_waited_for_a_moment(answers: int) -> None:
    link = Emulated(GBIT, 1e-4, answers=answers)

    assert measured(link) == Link()
    assert link.now < 2.5


class Ignoring:
    """A receiver that forgets all that it hears."""

    def receive(self, message: Message, payloads: Sequence[Buffer]) -> None:
        """Forget a message."""

    def lost(self, error: GradServerError) -> None:
        """Forget that the connection broke."""


@contextmanager
def connected(url: str) -> Iterator[TcpChannel]:
    channel = TcpChannel(url, 10.0)
    channel.attach(Ignoring())
    try:
        yield channel
    finally:
        channel.close()


def test_a_link_is_measured_and_the_worker_can_join_then() -> None:
    with coordinator() as server, connected(server.url) as channel:
        found = measure(channel)

        assert 0 < found.trip < 1
        assert 0.01 < found.rate <= MAX_RATE or found.trip > 5e-3  # a machine under load: a long way tells no rate


def test_measuring_again_and_again_ends_that_connection_alone() -> None:
    with (
        coordinator({"default": 1}) as server,
        Stranger(server.url) as stranger,
        joined(server.url, 1, channel="tcp") as (worker,),
    ):
        stranger.send(Probe(), bytes(PROBE_BYTES))
        assert isinstance(stranger.hear(), Probed)  # before the others: a connection that is cut off may lose answers
        for _ in range(STRANGERS_PROBES + STRANGERS_BYTES // PROBE_BYTES):
            stranger.send(Probe(), bytes(PROBE_BYTES))
        assert stranger.is_cut_off()
        assert worker.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


# ── what a group makes of it ──────────────────────────────────────────────────────────────────────────


def offer(rate: float, trip: float = 0.0, channel: str = "tcp") -> Offer:
    return Offer(channel=channel, rate=rate, trip=trip)


@pytest.mark.parametrize(
    ("offers", "stated", "gbit"),
    [
        ([offer(1.0)] * 4, [None], 5.0),
        ([offer(1.0)] * 4, [2.0], 2.5),  # the coordinator's own link is less
        ([offer(1.0)] * 4, [40.0], 5.0),
        ([offer(0.0)] * 4, [4.0], 5.0),
        ([offer(1.0), offer(0.0), offer(1.1), offer(9.0)], [None], 5.5),  # the median stands for what is not known
        ([offer(1.0)] * 4, [0.0, None, None], 3.0),  # two data shards, each of which gets a half
        ([offer(0.0)] * 4, [1.0, 2.0], 2.25),
        ([offer(1.0), offer(0.0, channel="shm")], [None], 2.0),
        ([offer(0.0)] * 4, [None], 0.0),
        ([offer(0.0)] * 4, [1.0, None], 0.0),
        ([offer(0.0, channel="shm")] * 4, [1.0], 0.0),
        ([THREAD] * 4, [1.0], 0.0),
        ([], [1.0], 0.0),
    ],
)
def test_the_grain_is_what_reaches_a_shard_and_a_member_meanwhile(
    offers: list[Offer], stated: list[float | None], gbit: float
) -> None:
    assert grain_for(offers, stated) == grain_of(gbit * GBIT)


@pytest.mark.parametrize(
    ("offers", "credit"),
    [
        ([offer(1.0)] * 4, round(GBIT * APART_SECONDS)),
        ([offer(0.5, 0.1), offer(0.2)], round(0.5 * GBIT * (APART_SECONDS + 0.1))),
        ([offer(10.0)], CREDIT_BYTES),
        ([offer(0.05)], MIN_CREDIT_BYTES),
        ([offer(0.5), offer(0.0)], CREDIT_BYTES),
        ([offer(0.5), offer(0.0, channel="shm")], CREDIT_BYTES),
        ([THREAD], CREDIT_BYTES),
        ([], CREDIT_BYTES),
    ],
)
def test_credit_is_what_a_link_carries_within_two_slices_and_the_limit(offers: list[Offer], credit: int) -> None:
    assert credit_for(offers, CREDIT_BYTES) == credit
    assert credit_for(offers, MIN_CREDIT_BYTES) == MIN_CREDIT_BYTES


def test_members_learners_and_data_halves_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Harness({"default": 2})
    orders: list[OpenGroup] = []
    obey = made.engine.data.obey

    def overhear(_: object, order: Order, now: float, effects: Effects) -> None:
        if isinstance(order, OpenGroup):
            orders.append(order)
        obey(order, now, effects)

    monkeypatch.setattr(type(made.engine.data), "obey", overhear)
    for rank in range(2):
        made.receive(SEATS + rank, Join("default", f"w{rank}", -1, 0, 10.0, offer(0.4)))

    welcomes = [made.inbox[SEATS + rank][-1][0] for rank in range(2)]
    assert [(one.grain, one.credit) for one in welcomes if isinstance(one, Welcome)] == [
        (grain_of(1.2 * GBIT), round(0.4 * GBIT * APART_SECONDS))
    ] * 2
    assert (orders[0].grain, orders[0].credit) == (welcomes[0].grain, welcomes[0].credit)  # type: ignore[union-attr]


def test_a_group_goes_on_with_the_slices_and_the_credit_that_it_began_with(tmp_path: Path) -> None:
    records: list[Kind] = [
        Durable("g", SECRET, (), 12_345, 3 << 20) if isinstance(one, Durable) else one for one in FOUNDED
    ]
    write(tmp_path, *records)
    with opened(tmp_path) as state:
        engine = Engine({"g": 2}, incarnation=state.incarnation)
        engine.handle(Restored(state.restored), 0.0)

    group = engine.data.groups["g"]
    assert (group.table.grain, group.traffic.credit) == (12_345, 3 << 20)
    assert engine.control.groups["g"].shards.table.grain == 12_345


def test_threads_and_processes_of_one_host_have_the_largest_slices() -> None:
    with LocalCluster(2, timeout=20.0) as cluster:
        assert cluster.run(lambda worker: worker._session.membership.grain) == [0, 0]
    with Daemon("--workers", "2") as daemon, joined(daemon.url, 2) as workers:
        assert together(workers, lambda worker: worker._session.membership.grain) == [0, 0]


JOIN = """
import sys, time
import numpy as np
import gradserver
worker = gradserver.connect(sys.argv[1], int(sys.argv[2]), 2, timeout=60.0)
told, tensor = worker._session.membership, np.full(300_000, worker.rank + 1.0, np.float32)
worker.all_reduce(tensor)
assert (tensor == 1.5).all()
print("told", told.grain, told.credit, flush=True)
worker.close()
"""


@pytest.mark.long
def test_workers_on_other_hosts_measure_and_agree() -> None:
    needs_hosts()
    with netns.links(2, 0.2 * GBIT, 0.4 * GBIT) as lab, ExitStack() as stack:
        bind = f"tcp://{lab.coordinator_address()}:7411"

        def started(prefix: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
            command = [*prefix, sys.executable, *arguments]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        started(lab.coordinator_prefix(), "-m", "gradserver", "serve", "--bind", bind, "--workers", "2")
        workers = [started(lab.worker_prefix(rank), "-c", JOIN, bind, str(rank)) for rank in range(2)]
        told = [one.communicate(timeout=60.0)[0].split()[-2:] for one in workers]

    assert told[0] == told[1]
    grain, credit = map(int, told[0])
    assert grain_of(0.1 * GBIT) < grain < grain_of(2 * GBIT)
    assert MIN_CREDIT_BYTES <= credit <= CREDIT_BYTES
