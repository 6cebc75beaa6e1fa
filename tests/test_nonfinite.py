"""Gradients that are not finite, where that does not halt the group: left out, or the round is skipped by all."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradserver
from gradserver.local import LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import InvalidArgumentError, NonFiniteError
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.job.job import Job
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import AMONG_MEMBERS, Daemon, Gather, joined, together, wait_until
from tests.seeded import seeded

SLICE = 262_144
"""Elements of float32."""
LARGE, SMALL = 2 * SLICE + 1000, 100
"""Three slices, and one."""
PLAN = simple_plan([("large", LARGE), ("small", SMALL)], FLOAT32)
POLICIES = ["leave-out", "skip"]

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


class Round:
    """The results of a round at one worker: both buckets, and what it was told."""

    def __init__(self, worker: Worker, poison: dict[int, list[int]], weight: float = 1.0) -> None:
        large, small = worker.empty(LARGE, "float32"), np.full(SMALL, worker.rank, np.float32)
        large[:] = np.random.default_rng(worker.rank).standard_normal(LARGE)
        for place in poison.get(worker.rank, []):
            large[place] = np.nan
        handles = worker.push(0, large, weight=weight), worker.push(1, small, weight=weight)
        worker.finish_round()
        self.large, self.small = np.array(large), small
        self.skipped, self.left_out = worker.skipped, worker.left_out
        self.found = handles[0].not_finite


def given(rank: int) -> Array:
    return np.random.default_rng(rank).standard_normal(LARGE).astype(np.float32)


def mean_of(ranks: list[int], weights: list[float]) -> Array:
    total = np.sum([weights[rank] * given(rank).astype(np.float64) for rank in ranks], axis=0)
    mean: Array = total / sum(weights[rank] for rank in ranks)
    return mean


# ── one round, over every channel ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
def test_a_slice_with_nan_is_left_out_and_the_others_of_that_worker_count(gather: Gather, weights: list[float]) -> None:
    workers = gather(3, nonfinite="leave-out")
    together(workers, lambda worker: worker.agree(PLAN))
    poison = {1: [SLICE + 17], 2: [3]}

    rounds = together(workers, lambda worker: Round(worker, poison, weights[worker.rank]))

    first = rounds[0]
    assert all(one.large.tobytes() == first.large.tobytes() for one in rounds)
    for part, ranks in [
        (slice(0, SLICE), [0, 1]),
        (slice(SLICE, 2 * SLICE), [0, 2]),
        (slice(2 * SLICE, None), [0, 1, 2]),
    ]:
        np.testing.assert_allclose(first.large[part], mean_of(ranks, weights)[part], rtol=1e-5, atol=1e-6)
    assert [(one.skipped, one.left_out) for one in rounds] == [(False, False), (False, True), (False, True)]
    again = together(workers, lambda worker: Round(worker, {}, weights[worker.rank]))
    np.testing.assert_allclose(again[2].large, mean_of([0, 1, 2], weights), rtol=1e-5, atol=1e-6)
    assert not any(one.left_out or one.found for one in again)


def test_a_slice_in_which_all_have_nan_is_zeros(gather: Gather) -> None:
    workers = gather(2, nonfinite="leave-out")
    together(workers, lambda worker: worker.agree(PLAN))

    for one in together(workers, lambda worker: Round(worker, {0: [5], 1: [6]})):
        assert not one.large[:SLICE].any()
        np.testing.assert_allclose(one.large[SLICE:], mean_of([0, 1], [1.0, 1.0])[SLICE:], rtol=1e-5, atol=1e-6)
        assert one.left_out
        assert not one.skipped


def test_all_skip_a_round_in_which_one_has_nan_and_go_on(gather: Gather) -> None:
    workers = gather(3, nonfinite="skip")
    together(workers, lambda worker: worker.agree(PLAN))

    rounds = together(workers, lambda worker: Round(worker, {1: [LARGE - 1]}))
    assert [(one.skipped, one.left_out) for one in rounds] == [(True, False), (True, True), (True, False)]
    for one in together(workers, lambda worker: Round(worker, {})):
        assert not one.skipped
        np.testing.assert_allclose(one.large, mean_of([0, 1, 2], [1.0] * 3), rtol=1e-5, atol=1e-6)


def test_nan_stays_where_it_is_if_it_is_passed_on(gather: Gather) -> None:
    workers = gather(2, nonfinite="propagate")
    together(workers, lambda worker: worker.agree(PLAN))

    first, second = together(workers, lambda worker: Round(worker, {1: [SLICE + 17]}))
    assert np.flatnonzero(np.isnan(first.large)).tolist() == [SLICE + 17]
    assert first.large.tobytes() == second.large.tobytes()
    assert (first.skipped, first.left_out) == (False, False)


@pytest.mark.parametrize("policy", [*POLICIES, "halt", "propagate"])
def test_finite_elements_that_are_too_large_to_be_summed_have_a_mean(policy: Any) -> None:
    def work(worker: Worker) -> tuple[float, bool, bool]:
        worker.agree(simple_plan([("b", 4)], FLOAT32))
        values = np.full(4, 3e38, np.float32)
        worker.push(0, values)
        worker.finish_round()
        return float(values[0]), worker.skipped, worker.left_out

    with LocalCluster(3, nonfinite=policy) as cluster:
        for mean, skipped, left_out in cluster.run(work):
            assert mean == pytest.approx(3e38, rel=1e-6)
            assert (skipped, left_out) == (False, False)


@pytest.mark.parametrize("wire", ["bf16", "int8", "topk:0.1", "randomk:0.5"])
@pytest.mark.parametrize("policy", POLICIES)
def test_lossy_wires_do_the_same_and_owe_nothing_that_is_not_finite(wire: str, policy: Any) -> None:
    def work(worker: Worker) -> tuple[bytes, bool, bool, bool]:
        worker.agree(PLAN)
        results, told = [], []
        for number in range(3):
            large, small = given(worker.rank), np.ones(SMALL, np.float32)
            if (worker.rank, number) == (1, 1):
                large[SLICE + 3] = np.inf
            worker.push(0, large)
            worker.push(1, small)
            worker.finish_round()
            results.append(large.tobytes())
            told.append(worker.skipped if policy == "skip" else worker.left_out)
        residuals = [one.residual for one in worker._session.member.exchanges.feedback.values()]
        return b"".join(results), told[0], told[1], all(np.isfinite(one).all() for one in residuals)

    with LocalCluster(2, wire=wire, nonfinite=policy) as cluster:
        (bits, before, at_rank_0, finite), (others, _, at_rank_1, also_finite) = cluster.run(work)
        assert bits == others
        assert np.isfinite(np.frombuffer(bits, np.float32)).all()
        assert finite
        assert also_finite
        assert (before, at_rank_0, at_rank_1) == (False, policy == "skip", True)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_late_worker_keeps_is_finite(policy: Any) -> None:
    """Test that its NaN came too late for round 0, and that what it gives in round 1 counts by itself."""

    def work(worker: Worker) -> list[tuple[float, bool]]:
        worker.agree(simple_plan([("b", 8)], FLOAT32))
        found = []
        for number in range(3):
            values = np.full(8, 1.0 + worker.rank, np.float32)
            if worker.rank == 2 and number == 0:
                values[3] = np.nan
                gate.wait(20)
            worker.push(0, values)
            worker.finish_round()
            if worker.rank == 0 and number == 0:
                gate.release()
            found.append((float(values[0]), worker.skipped))
        return found

    gate = _Gate()
    with LocalCluster(3, quorum=2, grace=0.0, nonfinite=policy) as cluster:
        results = cluster.run(work)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == (1.5, False)
    assert all(np.isfinite(value) for value, _ in results[0])
    assert not any(skipped for _, skipped in results[0])


class _Gate:
    def __init__(self) -> None:
        import threading

        self._open = threading.Event()

    def wait(self, seconds: float) -> None:
        assert self._open.wait(seconds)

    def release(self) -> None:
        self._open.set()


# ── what people see of it ─────────────────────────────────────────────────────────────────────────────


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'halt', 'leave-out', 'skip', 'propagate', got 'ign"):
        LocalCluster(1, nonfinite="ignore")  # type: ignore[arg-type]


def test_the_log_and_the_status_name_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    def work(worker: Worker) -> None:
        worker.agree(PLAN)
        for _ in range(3):
            Round(worker, {1: [SLICE + 17]})

    with LocalCluster(2, nonfinite="leave-out") as cluster, caplog.at_level(logging.WARNING, "gradserver"):
        cluster.run(work)
        status: Any = cluster.snapshot()
    assert status["groups"]["local"]["nonfinite"] == {"policy": "leave-out", "rounds": 3, "workers": {"worker-1": 3}}
    warnings = [record.getMessage() for record in caplog.records if "has NaN or Inf" in record.getMessage()]
    assert len(warnings) == 1, "not in every round"
    assert "round 0 of group 'local'" in warnings[0]
    assert "'worker-1' (rank 1) in parameter 'large' of bucket 'large'" in warnings[0]
    own = [record.getMessage() for record in caplog.records if "what this worker, rank 1" in record.getMessage()]
    assert len(own) == 2, "the first time, and the second; then the fourth"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_ledger_names_the_worker_and_the_policy_outlives_the_coordinator(policy: str, tmp_path: Path) -> None:
    def rounds(worker: Worker, poison: dict[int, list[int]]) -> Round:
        return Round(worker, poison)

    directory = str(tmp_path / "state")
    told = "--workers", "2:2", "--shards", "2", "--state-dir", directory
    with Daemon(*told, "--nonfinite", policy) as first, joined(first.url, 2, channel="tcp") as workers:
        together(workers, lambda worker: worker.agree(PLAN))
        together(workers, rounds, {1: [3, SLICE + 1]})
        first.send_signal(signal.SIGKILL)
        first.end()
        with Daemon(*told, "--nonfinite", "halt") as second:
            for one in together(workers, rounds, {0: [LARGE - 1]}):
                assert np.isfinite(one.large).all()
                assert one.skipped == (policy == "skip")
            assert second.group()["nonfinite"]["policy"] == policy
            together(workers, Worker.close)  # while there is a coordinator to hear it
    shown = subprocess.run(
        [sys.executable, "-m", "gradserver", "ledger", directory, "--json"], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    found = {line["round"]: line["nonfinite"] for line in lines if line["kind"] == "round"}
    assert [(one["seat"], one["bucket"], one["slices"], one["element"]) for one in found[0]] == [(1, 0, 2, 3)]
    assert [(one["seat"], one["bucket"], one["slices"], one["element"]) for one in found[1]] == [(0, 0, 1, LARGE - 1)]
    text = subprocess.run(
        [sys.executable, "-m", "gradserver", "ledger", directory, "--round", "0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "NaN or Inf, " + ("skipped by all workers" if policy == "skip" else "left out") in text


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def module() -> nn.Module:
    with torch.no_grad():
        made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        for parameter in made.parameters():
            parameter.fill_(0.1)
    return made


def loss_of(model: nn.Module, rank: int, step: int, bad: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(6, 4, generator=generator)
    found: torch.Tensor = model(inputs).square().mean() * (float("nan") if bad else 1.0)
    return found


def train(worker: Worker, bad: Callable[[int, int], bool]) -> tuple[list[bool], list[bool], bytes, int]:
    model = DistributedDataParallel(seeded(0, module), worker)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    skipped, left_out = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, worker.rank, step, bad(worker.rank, step)).backward()  # type: ignore[no-untyped-call]
        skipped.append(model.skipped)
        left_out.append(model.left_out)
        if model.skipped:
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return skipped, left_out, weights, steps.pop()


def test_a_plain_loop_skips_the_round_and_replicas_stay_alike(gather: Gather) -> None:
    found = together(gather(3, nonfinite="skip"), train, lambda rank, step: (rank, step) == (1, 2))

    assert len({weights for _, _, weights, _ in found}) == 1
    assert np.isfinite(np.frombuffer(found[0][2], np.float32)).all()
    for rank, (skipped, left_out, _, steps) in enumerate(found):
        assert skipped == [False, False, True, False, False, False]
        assert left_out == [rank == 1 and step == 2 for step in range(6)]
        assert steps == 5


def test_a_plain_loop_goes_on_without_the_bad_batch(gather: Gather) -> None:
    found = together(gather(3, nonfinite="leave-out"), train, lambda rank, step: (rank, step) == (1, 2))

    assert len({weights for _, _, weights, _ in found}) == 1
    assert np.isfinite(np.frombuffer(found[0][2], np.float32)).all()
    assert [left_out for _, left_out, _, _ in found][1] == [False, False, True, False, False, False]
    assert all(steps == 6 for _, _, _, steps in found)


def test_workers_whose_data_is_used_up_take_part_in_what_is_skipped() -> None:
    def work(worker: Worker) -> bytes:
        model = DistributedDataParallel(module(), worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(optimizer):
            for step in range(3 if worker.rank else 1):
                optimizer.zero_grad()
                bad = worker.rank == 1 and step == 2
                loss_of(model, worker.rank, step, bad).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())

    for policy in POLICIES:
        with LocalCluster(2, nonfinite=policy) as cluster:  # type: ignore[arg-type]
            first, second = cluster.run(work)
        assert first == second
        assert np.isfinite(np.frombuffer(first, np.float32)).all()


def test_a_job_updates_nothing_in_a_round_that_is_skipped(tmp_path: Path) -> None:
    def work(worker: Worker) -> tuple[int, int, float]:
        model = DistributedDataParallel(module(), worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        job = Job(model, optimizer, scheduler, checkpoint=tmp_path, every=2)
        for step in range(4):
            loss_of(model, worker.rank, step, worker.rank == 0 and step in (0, 2)).backward()  # type: ignore[no-untyped-call]
            job.step()
        return job.round, job.round, float(scheduler.get_last_lr()[0])

    with LocalCluster(2, nonfinite="skip") as cluster:
        assert cluster.run(work) == [(2, 2, 0.25)] * 2
    saved = tmp_path / "round-000000002.gsckpt"
    wait_until(saved.exists, "the second update is saved")
    assert list(tmp_path.glob("*.gsckpt")) == [saved]


def test_a_gradient_exchange_says_that_a_step_is_skipped_and_gives_zeros() -> None:
    def work(worker: Worker) -> tuple[bool, bool, float]:
        exchange = gradserver.GradientExchange(worker, 0, [], lm_head=4, embedding=6)
        head, embedding = np.ones(4, np.float32), np.full(6, np.nan if worker.rank else 1, np.float32)
        exchange.push_non_block(0, 0, head)
        exchange.push_non_block(0, 2, embedding)
        exchange.finish()
        return exchange.skipped, exchange.left_out, float(np.abs(head).sum() + np.abs(embedding).sum())

    with LocalCluster(2, nonfinite="skip") as cluster:
        assert cluster.run(work) == [(True, False, 0.0), (True, True, 0.0)]


def test_an_overflow_on_purpose_ends_with_the_option_that_a_grad_scaler_needs() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(nn.Linear(2, 1), worker)
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 2), 1e3)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    with LocalCluster(2) as cluster, pytest.raises(NonFiniteError, match=r"GradScaler .*--nonfinite propagate"):
        cluster.run(work)
    with LocalCluster(2, nonfinite="propagate") as cluster:
        cluster.run(work)
