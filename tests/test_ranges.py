"""Tests of DataRanges: each sample of an epoch is used once, with deaths, departures, restarts, and reading ahead."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradserver
from gradserver import DataRanges, DistributedDataParallel, Job, LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import DisagreementError, GradServerError, InvalidArgumentError, StateError, UsageError
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.data.permutation import epoch_permutation
from tests.cluster import PATIENCE, Daemon, Program
from tests.replicas import on

torch.set_num_threads(1)
PLAN = simple_plan([("b", 3)], FLOAT32)
PROGRAM = Path(__file__).with_name("ranges_program.py")
LENGTH = 50
NUMBERS: Any = range(20)


def rounds(worker: Worker, data: DataRanges, after: Callable[[np.ndarray[Any, Any]], object] = lambda _: None) -> None:
    """Run rounds until an epoch is used up. ``after`` each is called with what this worker had taken for it."""
    while not data.finished():
        indices = data.take()
        worker.push(0, np.ones(3, np.float32), weight=float(len(indices)))
        worker.finish_round()
        after(indices)


def test_each_sample_is_used_once_in_each_epoch_at_any_speeds() -> None:
    used: list[tuple[int, int]] = []

    def work(worker: Worker) -> None:
        worker.agree(PLAN)
        data = DataRanges(LENGTH, worker, batch_size=1 + 3 * worker.rank, seed=17)
        for _ in range(2):
            rounds(worker, data, lambda indices: used.extend((data.epoch, int(i)) for i in indices))
            data.next_epoch()

    on(3, work)
    assert Counter(used) == {(epoch, index): 1 for epoch in range(2) for index in range(LENGTH)}


def test_the_order_is_that_of_the_seed() -> None:
    def work(worker: Worker) -> list[int]:
        worker.agree(PLAN)
        found: list[int] = []
        rounds(worker, DataRanges(range(20), worker, batch_size=3, seed=5, prefetch=0), found.extend)
        rounds(worker, DataRanges(4, worker, batch_size=3, shuffle=False, name="plain"), found.extend)
        return found

    assert on(1, work) == [[*epoch_permutation(20, 5, 0).tolist(), 0, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(8))
def test_the_others_use_what_a_killed_worker_left(seed: int) -> None:
    """Test kills between two rounds, with batches claimed ahead, or before its first push of one."""
    used: Counter[int] = Counter()
    lock = threading.Lock()

    with LocalCluster(4, elastic=(1, 4)) as cluster:

        def work(worker: Worker) -> None:
            member_id, chance = worker.rank, random.Random(f"{seed} {worker.rank}")
            fatal = chance.randint(0, 3) if member_id else -1
            worker.agree(PLAN)
            data = DataRanges(LENGTH, worker, batch_size=chance.randint(1, 4), seed=seed, prefetch=chance.randint(0, 3))

            def after(indices: np.ndarray[Any, Any]) -> None:
                with lock:
                    used.update(indices.tolist())
                if worker.round == fatal:
                    if chance.random() < 0.5:
                        data.take()
                    cluster.kill(worker.rank)

            rounds(worker, data, after)

        cluster.run(work)
    assert used == dict.fromkeys(range(LENGTH), 1)


# ── a training ────────────────────────────────────────────────────────────────────────────────────────

DATASET = TensorDataset(torch.randn(LENGTH, 3), torch.arange(LENGTH))


def train(
    worker: Worker,
    used: list[tuple[int, int]],
    checkpoint: Path | None = None,
    after: Callable[[Job], object] = lambda _: None,
    epochs: int = 2,
    **options: Any,
) -> Job:
    """Train. ``used`` gets epoch and sample of what this worker trained on, when the round is over."""
    model = DistributedDataParallel(nn.Linear(3, 1), worker)
    data = DataRanges(LENGTH, worker, batch_size=2 + worker.rank, seed=17)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), data=data, checkpoint=checkpoint)

    def step() -> None:
        job.step()
        after(job)

    for inputs, numbers in job.batches(DATASET, epochs, step, **options):
        model.set_weight(len(inputs))
        model(inputs).square().mean().backward()
        used.extend((data.epoch, number) for number in numbers.tolist())
        step()
    return job


EACH_ONCE = {(epoch, index): 1 for epoch in range(2) for index in range(LENGTH)}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_job_uses_each_sample_once_also_with_loaders_that_read_ahead(processes: int) -> None:
    used: list[tuple[int, int]] = []
    options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True} if processes else {}
    jobs = on(2, lambda worker: train(worker, used, num_workers=processes, **options))
    assert Counter(used) == EACH_ONCE
    assert jobs[0].round == jobs[1].round


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)], ids=str)
def test_a_job_goes_on_from_its_checkpoint_with_any_number_of_workers(tmp_path: Path, worlds: tuple[int, int]) -> None:
    used: list[tuple[int, int]] = []

    def stopping(job: Job) -> None:
        if job.round == 4 and job.model.worker.rank == 0:
            job.stop()

    def stopped(worker: Worker) -> None:
        with pytest.raises((GradServerError, SystemExit)):
            train(worker, used, tmp_path, stopping)

    on(worlds[0], stopped)
    before = len(used)
    assert 0 < before < len(EACH_ONCE)
    jobs = on(worlds[1], lambda worker: train(worker, used, tmp_path))
    assert all(job.resumed for job in jobs)
    assert Counter(used) == EACH_ONCE


def test_the_survivors_of_an_elastic_job_use_what_the_dead_left() -> None:
    used: dict[str, list[tuple[int, int]]] = {f"worker-{member_id}": [] for member_id in range(3)}

    with LocalCluster(3, elastic=(1, 3)) as cluster:

        def after(job: Job) -> None:
            if job.model.worker.name == "worker-2" and job.round == 3:
                cluster.kill(job.model.worker.rank)

        cluster.run(lambda worker: train(worker, used[worker.name], after=after))
    assert Counter(one for by in used.values() for one in by) == EACH_ONCE


def test_a_loop_over_epochs_without_a_job() -> None:
    used: list[int] = []

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(nn.Linear(3, 1), worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = DataRanges(DATASET, worker, batch_size=4)
        loader: Any = DataLoader(DATASET, batch_sampler=data)
        for _ in data.epochs(1):
            with model.join(optimizer):
                for inputs, numbers in data.batches(loader):
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    used.extend(numbers.tolist())

    on(2, work)
    assert sorted(used) == list(range(LENGTH))


def test_what_a_loop_that_ended_early_had_read_ahead_is_its_own_again() -> None:
    def work(worker: Worker) -> list[int]:
        worker.agree(PLAN)
        data, found = DataRanges(20, worker, batch_size=2, shuffle=False), []
        loader: Any = DataLoader(NUMBERS, batch_sampler=data, num_workers=1, multiprocessing_context="fork")
        for batch in data.batches(loader):
            found += batch.tolist()
            break
        rounds(worker, data, found.extend)
        return found

    assert on(1, work) == [list(range(20))]


# ── between processes ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_process_that_is_killed_leaves_what_it_has_not_used_to_the_others(shards: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            Daemon("--workers", "1:3", "--gather", "60", "--shards", str(shards), "--state-dir", str(tmp_path))
        )
        workers = [
            stack.enter_context(Program(str(PROGRAM), coordinator.url, str(member_id), loaded="torch"))
            for member_id in range(3)
        ]
        workers[1].expect("round 2")
        workers[1].send_signal(signal.SIGKILL)
        for member_id in (0, 2):
            workers[member_id].expect("ok")
            assert workers[member_id].end() == 0
    committed, partly = of_ledger(tmp_path)
    assert committed == dict.fromkeys(range(300), 1)
    assert partly <= {1}


def test_a_coordinator_that_is_killed_and_comes_back_knows_each_workers_data(tmp_path: Path) -> None:
    options = "--workers", "1:3", "--gather", "60", "--state-dir", str(tmp_path)
    with ExitStack() as stack:
        coordinator = stack.enter_context(Daemon(*options))
        workers = [
            stack.enter_context(Program(str(PROGRAM), coordinator.url, str(member_id), loaded="torch"))
            for member_id in range(3)
        ]
        for number in (3, 9):
            workers[0].expect(f"round {number}")
            coordinator.send_signal(signal.SIGKILL)
            coordinator.end()
            again = Program("-m", "gradserver", "serve", "--bind", coordinator.url, *options)
            url = stack.enter_context(again).expect("listening on ")
            coordinator, again.url = again, url  # type: ignore[assignment,attr-defined]
        for worker in workers:
            worker.expect("ok")
            assert worker.end() == 0
    committed, partly = of_ledger(tmp_path)
    assert committed == dict.fromkeys(range(300), 1)
    assert not partly


def of_ledger(directory: Path) -> tuple[Counter[int], set[int]]:
    """Return how often each position was used up, and those of members that counted in some slices only."""
    from gradserver.engine.records import Round
    from gradserver.ledger.command import _files, _read

    rounds = {  # the last record of a round is the one that counts
        one.record.record.round: one.record.used_up
        for one in _read(_files(directory), [])
        if isinstance(one.record, Round) and not one.restated
    }
    used_up = [used for found in rounds.values() for used in found]
    positions = (position for used in used_up for start, stop in used.ranges for position in range(start, stop))
    return Counter(positions), {used.member_id for used in used_up if used.partly}


# ── what cannot be ────────────────────────────────────────────────────────────────────────────────────


def test_members_that_use_other_data_are_told_of_both() -> None:
    def work(worker: Worker) -> str:
        worker.agree(PLAN)
        if worker.rank == 1:
            worker.barrier()
        data = DataRanges(LENGTH + worker.rank, worker, batch_size=2)
        said = ""
        try:
            data.take()
        except DisagreementError as error:
            said = str(error)
        if worker.rank == 0:
            worker.barrier()
        return said

    nothing, said = on(2, work)
    assert nothing == ""
    assert said.startswith("'worker-1' (rank 1) uses data 'data' as 51 samples, shuffled with seed 0, and 'worker-0'")


def test_what_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        data = DataRanges(10, worker, batch_size=2)
        with pytest.raises(UsageError, match="group 'local' has no rounds, and samples of data 'data' count as used"):
            data.take()
        with pytest.raises(UsageError, match="this worker has DataRanges of the name 'data' already"):
            DataRanges(10, worker, batch_size=2)
        bad: list[dict[str, Any]] = [{"batch_size": 0}, {"batch_size": 1, "name": ""}, {"batch_size": 1, "seed": -1}]
        for options in bad:
            with pytest.raises(InvalidArgumentError):
                DataRanges(10, worker, **options)
        with pytest.raises(UsageError, match="take batches of these DataRanges by job.batches"):
            next(iter(data))
        with pytest.raises(UsageError, match="batches needs a loader of these"):
            next(data.batches(DataLoader(DATASET)))
        model = DistributedDataParallel(nn.Linear(3, 1), worker)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data)
        job.save(tmp_path / "a")
        with pytest.raises(UsageError, match="num_workers: give these to the DataLoader itself"):
            next(job.batches(DataLoader(DATASET), num_workers=1))
        data.take()
        with pytest.raises(StateError, match="batches of data 'data' were taken already"):
            job.load(tmp_path / "a")
        other = Job(model, job.optimizer, data=DataRanges(11, worker, batch_size=2, name="other"))
        with pytest.raises(StateError, match="'name': 'data'}, and this job's is"):
            other.load(tmp_path / "a")

    on(1, work)


def test_no_torch_is_needed() -> None:
    assert gradserver.DataRanges is DataRanges
    with Program(
        "-c", "import sys, gradserver; gradserver.DataRanges; print('torch' in sys.modules, flush=True)"
    ) as one:
        one.expect("False", PATIENCE)
        assert one.end() == 0
