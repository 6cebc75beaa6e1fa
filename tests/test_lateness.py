"""Lateness of workers: the worker that holds its group up is named with its seconds, and no other worker is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradserver
from gradserver.engine.data.rounds import Round
from gradserver.engine.lateness import BEGAN_LATE, SENT_SLOWLY, UNKNOWN, Lag, lags, pace, shares, slowest
from gradserver.engine.records import RoundRecord, pack_round, unpack_round
from gradserver.local import LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import Kind, Op, Operation
from gradserver.protocol.plan import simple_plan
from gradserver.status import fetch
from gradserver.worker.client import Worker
from tests.cluster import coordinator, joined, together

SLOW, PAUSE, ROUNDS = 2, 0.3, 5
NAME = f"worker-{SLOW}"


def record_of(*arrivals: tuple[float, float | None], took: float = 1.0, number: int = 0) -> RoundRecord:
    return RoundRecord(number, (1.0,) * len(arrivals), 0.0, took, 0, arrivals)


def causes(*arrivals: tuple[float, float | None], took: float = 1.0) -> list[str]:
    return [lag.cause for _, lag in sorted(lags(record_of(*arrivals, took=took)).items())]


# ── what a record tells ───────────────────────────────────────────────────────────────────────────────


def test_each_cause_is_told_from_the_others() -> None:
    assert causes((0.1, 0.2), (0.1, 0.2), (0.6, 0.7)) == ["", "", BEGAN_LATE]
    assert causes((0.1, 0.2), (0.1, 0.2), (0.1, 0.7)) == ["", "", SENT_SLOWLY]
    assert causes((0.1, 0.2), (0.1, 0.21), (0.11, 0.2)) == ["", "", ""]
    assert causes((0.1, 0.8), (0.1, 0.8), (0.6, 0.8)) == ["", "", UNKNOWN]  # it caught up, or they waited for it


def test_of_two_workers_the_lag_is_all_of_the_difference_and_never_negative() -> None:
    found = lags(record_of((0.1, 0.2), (0.5, 0.6)))
    assert found.keys() == {0, 1}
    assert (found[0], found[1].cause) == (Lag(0.0, ""), BEGAN_LATE)
    assert found[1].seconds == pytest.approx(0.4)
    assert slowest(found) == 1


def test_a_round_that_does_not_tell_names_no_worker() -> None:
    assert lags(record_of((0.1, None), (0.5, None))) == {}
    assert lags(RoundRecord(0, (1.0, 1.0), 0.0, 1.0, 0)) == {}
    assert slowest({}) == slowest(lags(record_of((0.1, 0.8), (0.1, 0.8), (0.6, 0.8)))) == -1
    assert lags(record_of((0.1, 0.2), (0.1, 0.2), (0.1, None))).keys() == {0, 1}


def test_each_share_has_the_rounds_in_which_the_others_waited() -> None:
    slow = [record_of((0.1, 0.2), (0.1, 0.2), (0.6, 0.7), number=number, took=1.0 + number) for number in range(4)]
    known, found = shares([*slow, record_of((0.1, None), (0.1, None), (0.6, None))])
    assert (known, set(found)) == (4, {2})
    assert (found[2].rounds, found[2].cause) == (4, BEGAN_LATE)
    assert found[2].seconds == pytest.approx(2.0)
    assert pace(slow) == pytest.approx(1.0)
    assert pace(slow[:1]) is None


def test_an_unknown_time_is_written_and_read() -> None:
    record = record_of((0.25, 0.5), (0.75, None))
    assert unpack_round(pack_round(record), 0.0) == record
    assert record.moved(1.0).arrivals == ((1.25, 1.5), (1.75, None))


# ── what the data half measures ───────────────────────────────────────────────────────────────────────

GRADIENT = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 4)


def test_what_waits_for_another_worker_is_left_out_of_the_measure() -> None:
    current = Round(0.0)
    for member_id, began in ((0, 0.1), (1, 0.9)):
        current.arrived(member_id, GRADIENT, began)
    for member_id in (0, 1):
        current.arrived(member_id, Operation(Kind.ALL_REDUCE, Op.FIRST, FLOAT32, 4), 1.0 + member_id / 10)
    assert current.measured(2, ()) == ((0.1, 0.1), (0.9, 0.9))
    assert current.measured(3, {1}) == ((0.1, 0.1), (0.9, None), (0.0, 0.0))
    assert current.measured(2, None) == ((0.1, None), (0.9, None))


def test_workers_that_wait_for_credit_are_measured_by_their_first_slice() -> None:
    current = Round(0.0)
    for moment in (0.1, 1.0):
        current.arrived(0, GRADIENT, moment)
    for moment in (0.9, 1.0):
        current.arrived(1, GRADIENT, moment)
    assert current.measured(2, ()) == ((0.1, 1.0), (0.9, 1.0))
    current.hold_back()
    assert current.measured(2, ()) == ((0.1, 0.1), (0.9, 0.9))


# ── trainings ─────────────────────────────────────────────────────────────────────────────────────────


class Masked(nn.Module):
    """A module with a constant buffer, as of a causal mask."""

    def __init__(self, norm: bool = False, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width) if norm else nn.Tanh(), nn.Linear(width, 4)
        )
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


def group_of(cluster: LocalCluster) -> dict[str, Any]:
    groups: Any = cluster.snapshot()["groups"]
    found: dict[str, Any] = groups["local"]
    return found


def train(worker: Worker, /, modules: int = 1, make: Callable[[], nn.Module] = Masked, **options: Any) -> None:
    """Train for some steps, before each of which one worker pauses."""
    torch.manual_seed(0)
    models = [gradserver.DistributedDataParallel(make(), worker, **options) for _ in range(modules)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for _ in range(ROUNDS):
        time.sleep(PAUSE if worker.rank == SLOW else 0)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            for _ in model.updates():
                optimizer.step()


def by_block(worker: Worker) -> None:
    exchange = gradserver.GradientExchange(worker, 3, (1000, 1000), lm_head=10)
    for step in range(ROUNDS):
        time.sleep(PAUSE if worker.rank == SLOW else 0)
        for block in range(3):
            exchange.push_block(step, block, np.ones(2000, np.float32))
        exchange.push_non_block(step, 0, np.ones(10, np.float32))
        exchange.finish()


def local(worker: Worker) -> None:
    torch.manual_seed(0)
    module = Masked()
    module.register_buffer("mask", None)
    inner = torch.optim.SGD(module.parameters(), lr=0.01)
    model = gradserver.LocalSGD(module, worker, inner, every=2)
    while model.round < ROUNDS:
        time.sleep(PAUSE / 2 if worker.rank == SLOW else 0)
        inner.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        inner.step()


def blamed(group: dict[str, Any]) -> dict[str, Any]:
    """Return what the status says of the workers that the others have waited for by a tenth of a second in a round."""
    held_up = {member["name"]: member["held_up"] for member in group["members"] if "held_up" in member}
    return {name: one for name, one in held_up.items() if one["seconds"] > 0.1 * ROUNDS}


def check(group: dict[str, Any], rounds: int = ROUNDS) -> None:
    """Check that the slow worker is named, with about the seconds of its pauses, and no other one."""
    found = blamed(group)
    assert found.keys() == {next(one["name"] for one in group["members"] if one["rank"] == SLOW)}, group["members"]
    (slow,) = found.values()
    assert slow["cause"] == BEGAN_LATE
    assert slow["rounds"] >= rounds - 1
    assert 0.5 * PAUSE * (rounds - 1) < slow["seconds"] < 2.5 * PAUSE * rounds


@pytest.mark.parametrize(
    ("work", "options"),
    [
        pytest.param(train, {}, id="mask"),
        pytest.param(lambda worker: train(worker, make=lambda: Masked(norm=True)), {}, id="batch-norm"),
        pytest.param(lambda worker: train(worker, modules=2), {}, id="two-modules"),
        pytest.param(train, {"wire": "int8"}, id="int8"),
        pytest.param(lambda worker: train(worker, make=lambda: Masked(width=40_000)), {"credit": 2 << 20}, id="credit"),
        pytest.param(lambda worker: train(worker, find_unused_parameters=True), {}, id="unused"),
        pytest.param(by_block, {}, id="blocks"),
        pytest.param(local, {}, id="local-sgd"),
        pytest.param(train, {"quorum": 4}, id="quorum-of-all"),
    ],
)
def test_a_worker_that_pauses_in_each_step_is_named_with_its_seconds(work: Any, options: dict[str, Any]) -> None:
    with LocalCluster(4, **options) as cluster:
        cluster.run(work)
        check(group_of(cluster))


@pytest.mark.long
def test_the_same_holds_on_the_direct_plane() -> None:
    with coordinator() as server, joined(server.url, 4, channel="tcp", plane="direct") as workers:
        together(workers, train)
        group = fetch(server.url)["groups"]["default"]
    assert group["plane"]["name"] == "direct"
    check(group)


LOOSE: list[dict[str, Any]] = [
    {"mode": "bounded", "staleness": 4, "elastic": (1, 4)},
    {"mode": "async", "elastic": (1, 4)},
    {"quorum": 3, "grace": 0},
]


@pytest.mark.parametrize("options", LOOSE)
def test_where_rounds_do_not_wait_for_all_no_worker_is_blamed_for_a_lag_that_is_not_known(
    options: dict[str, Any],
) -> None:
    with LocalCluster(4, **options) as cluster:
        cluster.run(train)
        group = group_of(cluster)
    assert blamed(group) == {}
    if "mode" in options:
        assert group["pace"]["known"] == 0


# ── the log ───────────────────────────────────────────────────────────────────────────────────────────


def pauses(worker: Worker) -> None:
    worker.agree(simple_plan([("b", 500)], FLOAT32, Op.MEAN))
    for _ in range(25):
        time.sleep(0.1 if worker.rank == SLOW else 0)
        worker.push(0, np.ones(500, np.float32))
        worker.finish_round()


def test_the_log_names_once_the_worker_that_holds_its_group_up(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(4) as cluster:
        cluster.run(pauses)
    (said,) = [record.getMessage() for record in caplog.records if "holds group" in record.getMessage()]
    assert said.startswith(f"{NAME!r} (rank {SLOW}) holds group 'local' up: in ")
    assert 0.05 < float(said.partition(" waited for it, ")[2].split()[0]) < 0.5
    assert "s each time; it began late. It computes longer than the others" in said


def test_the_log_names_no_worker_where_lateness_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(4, mode="bounded", staleness=4, elastic=(1, 4)) as cluster:
        cluster.run(train)
    assert "holds group" not in caplog.text


def test_the_status_names_workers_that_are_gone() -> None:
    with LocalCluster(3, elastic=(2, 3)) as cluster:

        def work(worker: Worker) -> None:
            worker.barrier()
            if worker.rank == SLOW:
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError):
            cluster.run(work)
        gone = group_of(cluster)["gone"]
    assert NAME in {one["name"] for one in gone}
