"""Tests of jobs that are stopped and continue: the same bits, every sample once, and every absent worker named."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradserver
from gradserver import DistributedDataParallel, Job, LocalCluster, ShardSampler
from gradserver.protocol.errors import (
    DisagreementError,
    DivergedError,
    GradServerError,
    InvalidArgumentError,
    StateError,
    UsageError,
    WorkerLeftError,
)
from gradserver.worker.client import Worker
from gradserver.worker.job import checkpoint
from gradserver.worker.job.checkpoint import Directory, read, write
from gradserver.worker.job.position import Position
from gradserver.worker.job.stopping import stop_on_sigterm
from gradserver.worker.tree import Packed, pack
from tests.cluster import PATIENCE, STARTED_WITHIN, Daemon, Program, wait_until
from tests.job_training import EPOCHS, ROUNDS, SAMPLES, Run, train
from tests.replicas import alone, on, same
from tests.seeded import seeded
from tests.test_checkpoint import largest_file, names

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def undisturbed() -> Run:
    """Train three workers, from the beginning to the end."""
    first: Run
    first, *others = on(3, train)
    assert all(same(first.state, other.state) for other in others)
    assert first.round == ROUNDS
    return first


def latest(directory: Path) -> dict[str, Any]:
    """Return the content of the checkpoint written last."""
    path = Directory(directory, keep=1).latest()
    assert path is not None
    tree: dict[str, Any] = read(path).tree
    return tree


def outcomes(world: int, *arguments: Any, **options: Any) -> list[Any]:
    """Return the results, or errors, of `train` at each of ``world`` workers; errors do not end the others."""

    def work(worker: Worker) -> Any:
        try:
            return train(worker, *arguments, **options)
        except (GradServerError, SystemExit) as error:
            return error

    return on(world, work)


def stopping(at: int, rank: int) -> Callable[[Job], None]:
    """Return a function that stops the worker of ``rank`` when ``at`` rounds are over."""

    def after(job: Job) -> None:
        if job.round == at and job.model.worker.rank == rank:
            job.stop()

    return after


# ── going on, in threads ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", range(2, ROUNDS + 1))
def test_with_the_same_number_of_workers_bits_are_those_of_the_undisturbed_run(
    tmp_path: Path, undisturbed: Run, at: int
) -> None:
    """Test a stop after any round, also after those in which only one worker had a batch."""
    outcomes(3, tmp_path, after=stopping(at - 1, 1))
    runs = on(3, train, tmp_path)
    assert all(same(run.state, undisturbed.state) for run in runs)
    assert {run.round for run in runs} == {ROUNDS}
    assert {run.resumed for run in runs} == {tmp_path / f"round-{at:09}.gsckpt"}


def test_saving_changes_nothing(tmp_path: Path, undisturbed: Run) -> None:
    assert all(same(run.state, undisturbed.state) for run in on(3, train, tmp_path, every=1, after=settle))
    assert names(tmp_path) == ["latest", f"round-{ROUNDS - 1:09}.gsckpt", f"round-{ROUNDS:09}.gsckpt"]


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Test that the state at the due time is written, and that a save which is due meanwhile is omitted."""
    outcomes(3, tmp_path / "stopped", after=stopping(1, 0))
    go_on = threading.Event()

    def slow(path: Path, packed: Packed) -> None:
        assert go_on.wait(PATIENCE)
        write(path, packed)

    def after(job: Job) -> None:
        if job.round == 7:
            go_on.set()
            settle(job)

    monkeypatch.setattr(checkpoint, "write", slow)
    with caplog.at_level(logging.WARNING, "gradserver"):
        runs = on(3, train, tmp_path / "slow", every=2, after=after)
    assert all(same(run.state, undisturbed.state) for run in runs)
    left_out = "round {} is not saved: the last checkpoint is still being written"
    assert [left_out.format(number) for number in (4, 6)] == [m for m in caplog.messages if "is not saved" in m]
    wait_until((tmp_path / "slow" / "round-000000008.gsckpt").exists, "the last one is written")
    late = read(tmp_path / "slow" / "round-000000002.gsckpt").tree
    assert same(late["model"], latest(tmp_path / "stopped")["model"])


def settle(job: Job) -> None:
    """Let rank 0 wait until it has written what is due: a save that is due meanwhile would be omitted."""
    if job.model.worker.rank == 0:
        for thread in threading.enumerate():
            if thread.name == "gradserver-checkpoint" and thread.is_alive():  # another worker's may not have begun
                thread.join()


@pytest.mark.parametrize("worlds", [(3, 2), (2, 3, 3, 2), (1, 4), (4, 1, 5)], ids=str)
def test_another_number_of_workers_uses_what_is_left_of_the_epoch_once(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """Test that all but the last ones are stopped after a round."""
    used: list[tuple[int, list[int]]] = []
    for number, world in enumerate(worlds[:-1], 1):
        told = outcomes(world, tmp_path, after=stopping(2 * number - 1, 0), used=used)
        assert not any(isinstance(one, Run) for one in told)
    runs = on(worlds[-1], train, tmp_path, used=used)
    assert all(same(runs[0].state, run.state) for run in runs)
    for epoch in range(EPOCHS):
        samples = [number for at, numbers in used for number in numbers if at == epoch]
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}"


def test_a_new_job_and_one_that_is_done(tmp_path: Path) -> None:
    assert [run.resumed for run in on(2, train, tmp_path / "none")] == [None, None]
    assert not (tmp_path / "none").exists()
    done = on(2, train, tmp_path, every=1, after=settle)
    again = on(2, train, tmp_path)
    assert [run.round for run in again] == [run.round for run in done]
    assert same(again[0].state, done[0].state)


# ── being told to stop, in threads ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_is_told_to_stop_leaves_and_the_others_are_told(tmp_path: Path, rank: int) -> None:
    told = outcomes(3, tmp_path, after=stopping(3, rank))
    assert isinstance(told[rank], SystemExit)
    assert told[rank].code == 0
    for other in {0, 1, 2} - {rank}:
        assert type(told[other]) is WorkerLeftError
        assert (told[other].worker, told[other].rank) == (f"worker-{rank}", rank)
        assert str(told[other]) == (
            f"'worker-{rank}' was told to stop, and left after round 4, which is saved in {tmp_path}. This group needs "
            f"all of its workers: start again from there"
        )
    assert latest(tmp_path)["round"] == 4


def test_an_elastic_group_goes_on_without_a_worker_that_is_told_to_stop(tmp_path: Path) -> None:
    def work(worker: Worker) -> Any:
        try:
            return train(worker, tmp_path, after=stopping(3, 0) if worker.name == "worker-0" else lambda _: None)
        except SystemExit as error:
            return error

    with gradserver.LocalCluster(3, elastic=(1, 3), timeout=10.0) as cluster:
        left, *others = cluster.run(work)
    assert isinstance(left, SystemExit)
    assert [run.round for run in others] == [4 + 5] * 2  # the second epoch is dealt among the two that are left
    assert same(others[0].state, others[1].state)


class Stoppable:
    """A job that notes that it was told to stop."""

    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@contextmanager
def handler(present: Any) -> Iterator[None]:
    """Check that SIGTERM is handled by ``present``, and afterwards as it was before."""
    before = signal.signal(signal.SIGTERM, present)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_a_batch_that_is_late_for_the_end_of_an_epoch_asks_no_more_than_workers_without_one(
    late: str, tmp_path: Path
) -> None:
    """Test that each round may close with the worker that has no batch, so that no batch is in it."""

    def work(worker: Worker) -> tuple[int, dict[str, Any]]:
        module = nn.Linear(3, 1)
        model = DistributedDataParallel(module, worker)
        data = TensorDataset(torch.ones(1, 3))
        sampler = ShardSampler.for_worker(data, worker, uneven="keep")
        job = Job(model, torch.optim.SGD(module.parameters(), lr=0.1), data=sampler, checkpoint=tmp_path, every=1)
        for (inputs,) in job.batches(DataLoader(data, sampler=sampler), epochs=3):
            model.set_weight(1.0)
            wait_until(lambda: is_over(worker.round), "the other one has closed the round")
            model(inputs).square().mean().backward()
            job.step()
        job.save()
        return worker.round, module.state_dict()

    with LocalCluster(2, backup=1, late=late, timeout=10.0) as cluster:

        def is_over(number: int) -> bool:
            group: dict[str, Any] = cluster.snapshot()["groups"]["local"]  # type: ignore[index]
            return bool(group["round"] > number)

        (first, weights), (second, others) = cluster.run(work)
    assert first == second
    assert same(weights, others)


def test_sigterm_tells_every_job_once_and_a_second_one_ends_the_process() -> None:
    one, other = Stoppable(), Stoppable()
    with handler(signal.SIG_DFL):
        stop_on_sigterm(one)
        stop_on_sigterm(other)
        signal.raise_signal(signal.SIGTERM)
        assert (one.stopped, other.stopped) == (1, 1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_scripts_own_stays() -> None:
    job, noted = Stoppable(), list[int]()
    with handler(lambda number, _: noted.append(number)):
        stop_on_sigterm(job)
        signal.raise_signal(signal.SIGTERM)
    assert (job.stopped, noted) == (0, [signal.SIGTERM])


def test_a_job_of_another_thread_says_that_sigterm_does_not_reach_it(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        thread = threading.Thread(target=stop_on_sigterm, args=(Stoppable(),), name="trainer")
        thread.start()
        thread.join()

    with handler(signal.SIG_DFL):
        make()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (told,) = caplog.messages
    assert told.startswith("this job does not save on SIGTERM: it was made in the thread 'trainer'")
    assert "Make the job in the main thread, or call job.stop() from a SIGTERM handler" in told


def test_a_job_of_another_thread_is_silent_where_sigterm_is_handled(caplog: pytest.LogCaptureFixture) -> None:
    job, first = Stoppable(), Stoppable()
    thread = threading.Thread(target=stop_on_sigterm, args=(job,))
    with handler(signal.SIG_DFL):
        stop_on_sigterm(first)  # of the main thread: it handles the signal for all
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
    assert (job.stopped, caplog.messages) == (1, [])
    with handler(lambda *_: None):
        thread = threading.Thread(target=stop_on_sigterm, args=(job,))
        thread.start()
        thread.join()
    assert caplog.messages == []


def test_a_job_of_a_process_that_was_forked_behind_another_job_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
from tests.test_job import Stoppable
from gradserver.worker.job.stopping import stop_on_sigterm
first = Stoppable()
stop_on_sigterm(first)
if os.fork() == 0:
    job = Stoppable()
    stop_on_sigterm(job)
    signal.raise_signal(signal.SIGTERM)
    print("stopped", job.stopped, flush=True)
    os._exit(0)
os.wait()
""")
    with Program(str(script), loaded="torch") as program:
        assert program.expect("stopped ", STARTED_WITHIN) == "1"
        assert program.end(10.0) == 0


@pytest.mark.parametrize("case", ["del job", "os.fork() and os.wait() and os._exit(0)"])
def test_sigterm_ends_a_process_without_a_job_and_a_forked_one(case: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, time
from tests.test_job import Stoppable
from gradserver.worker.job.stopping import stop_on_sigterm
job = Stoppable()
stop_on_sigterm(job)
{case}
print("pid", os.getpid(), flush=True)
time.sleep(60)
""")
    with Program(str(script), loaded="torch") as program:
        os.kill(int(program.expect("pid ", STARTED_WITHIN)), signal.SIGTERM)
        assert program.end(10.0) == (0 if "fork" in case else -signal.SIGTERM)


def test_stop_and_save_need_a_place(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        job = job_of(worker)
        with pytest.raises(UsageError, match=r"no directory to save in: Job\(…, checkpoint=DIRECTORY\)"):
            job.stop()
        with pytest.raises(UsageError, match=r"where to\? Give save\(path\), or Job\(…, checkpoint=DIRECTORY\)"):
            job.save()
        with pytest.raises(StateError, match=f"there is no checkpoint in {tmp_path}"):
            job.load(tmp_path)

    alone(work)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────


def job_of(worker: Worker, seed: int = 0, **options: Any) -> Job:
    """Return a job without data."""
    model = DistributedDataParallel(seeded(seed, lambda: nn.Linear(2, 1)), worker)
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def rounds(job: Job, count: int) -> None:
    for _ in range(count):
        loss: Any = job.model(torch.full((1, 2), job.round + job.model.worker.rank + 1.0)).sum()
        loss.backward()
        job.step()


def test_saved_and_loaded_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "by-hand.gsckpt"

    def work(worker: Worker) -> None:
        job = job_of(worker)
        rounds(job, 2)
        job.save(file)
        rounds(job, 3)
        after = job.model.module.state_dict()
        other = job_of(worker, seed=5)
        other.load(file)
        assert (other.round, other.resumed) == (2, file)
        rounds(other, 3)
        assert same(after, other.model.module.state_dict())

    on(2, work)
    assert names(tmp_path) == ["by-hand.gsckpt"]


def test_what_a_checkpoint_has(tmp_path: Path) -> None:
    outcomes(2, tmp_path, after=stopping(1, 0))
    tree = latest(tmp_path)
    layers = [f"layers.{number}.{name}" for number in (0, 1, 3) for name in ("weight", "bias")]
    assert sorted(tree["model"]) == sorted([*layers, "mean"])
    assert len(tree["optimizer"]["state"]) == 6
    assert tree["scheduler"]["last_epoch"] == 2
    assert list(tree["state"]) == ["average"]
    assert (tree["round"], tree["group"], tree["workers"]) == (2, "local", ["worker-0", "worker-1"])
    assert tree["data"] == {
        "order": {"length": SAMPLES, "shuffle": True, "seed": 17, "uneven": "keep"},
        "epoch": 0,
        "begun": True,
        "done": [(10, 10)],
    }
    assert [one.keys() >= {"torch", "python", "numpy"} for one in tree["chance"]] == [True, True]
    assert tree["versions"]["torch"] == torch.__version__


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    def work(worker: Worker) -> None:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(InvalidArgumentError) as caught:
            Job(DistributedDataParallel(module, worker), optimizer)
        assert str(caught.value) == (
            "parameter 0 of the optimizer's group 0, of shape (2, 2), is none of the model's: make the optimizer with "
            "model.parameters()"
        )

    alone(work)


def test_an_optimizer_that_needs_a_closure_is_refused_before_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(nn.Linear(2, 2), worker)
        optimizer = torch.optim.LBFGS(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, float)  # which wraps step
        with pytest.raises(InvalidArgumentError, match=r"LBFGS\.step needs 'closure'.* a job steps"):
            Job(model, optimizer)
        with pytest.raises(InvalidArgumentError, match="model.join steps"), model.join(optimizer):
            pass
        with pytest.raises(InvalidArgumentError, match="LocalSGD steps"):
            gradserver.LocalSGD(nn.Linear(2, 2), worker, every=2, outer=lambda weights: torch.optim.LBFGS(weights))

    alone(work)
    monkeypatch.delenv("GRADSERVER_URL", raising=False)
    module = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match=r"gradserver\.setup steps"):
        gradserver.setup(module, torch.optim.LBFGS(module.parameters()))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file, other = tmp_path / "job.gsckpt", tmp_path / "other.gsckpt"

    def saved(worker: Worker) -> None:
        job_of(worker).save(file)

    alone(saved)
    write(other, pack({"round": 1}))
    data = ShardSampler(10, 0, 1)

    def work(worker: Worker) -> None:
        job = job_of(worker)
        with pytest.raises(StateError, match="other.gsckpt is not the checkpoint of a job"):
            job.load(other)
        with pytest.raises(StateError, match="job.gsckpt does not fit this job: it was saved without data="):
            job_of(worker, data=data).load(file)
        with pytest.raises(StateError, match=r"it has state= \[\], and this job \['ema'\]"):
            job_of(worker, state={"ema": job.optimizer}).load(file)
        half = DistributedDataParallel(nn.Linear(2, 1).bfloat16(), worker)
        with pytest.raises(
            StateError, match="its weights change when they are loaded: this model's have another type or order"
        ):
            Job(half, torch.optim.SGD(half.parameters(), lr=0.1)).load(file)
        larger = DistributedDataParallel(nn.Linear(3, 1), worker)
        with pytest.raises(StateError, match="(?s)job.gsckpt does not fit this job: .*size mismatch for weight"):
            Job(larger, torch.optim.SGD(larger.parameters(), lr=0.1)).load(file)

    alone(work)


def test_other_data_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"

    def work(worker: Worker) -> None:
        job_of(worker, data=ShardSampler(10, 0, 1)).save(file)
        with pytest.raises(StateError, match="its data is .*'length': 10.*, and this job's is .*'length': 11"):
            job_of(worker, data=ShardSampler(11, 0, 1)).load(file)

    alone(work)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 2}, UsageError, r"every= says when to save, and not where"),
        ({"every": 0, "checkpoint": "x"}, InvalidArgumentError, "every is 0, and must be a number of rounds"),
        ({"keep": 0, "checkpoint": "x"}, InvalidArgumentError, "keep is 0"),
        ({"data": [1, 2]}, InvalidArgumentError, "data is a list, and must be a gradserver.ShardSampler"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], text: str) -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(error, match=text):
            job_of(worker, **options)

    alone(work)


def test_model_must_be_wrapped() -> None:
    module: Any = nn.Linear(1, 1)
    with pytest.raises(InvalidArgumentError, match="model is a Linear: wrap it first"):
        Job(module, torch.optim.SGD(module.parameters(), lr=0.1))


def test_loops_that_would_lose_count_are_refused() -> None:
    def work(worker: Worker) -> None:
        dataset = TensorDataset(torch.ones(4, 2))
        data = ShardSampler(dataset, 0, 1)
        job = job_of(worker, data=data)
        with pytest.raises(UsageError, match=r"loop over job.batches\(loader\)"):
            rounds(job, 1)
        with pytest.raises(UsageError, match=r"DataLoader\(dataset, sampler=data, …\)"):
            next(job.batches(DataLoader(dataset)))
        for _ in job.batches(DataLoader(dataset, sampler=data)):
            with pytest.raises(UsageError, match=r"give it to job.batches\(loader, step=…\) too"):
                job.step(after=print)
            break
        with pytest.raises(UsageError, match=r"Job\(…, data=sampler\)"):
            next(job_of(worker).batches(DataLoader(dataset)))

    alone(work)


def test_what_is_read_ahead_does_not_count(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        dataset = TensorDataset(torch.ones(20, 2))
        data = ShardSampler(dataset, 0, 1)
        job = job_of(worker, data=data)
        for (inputs,) in job.batches(DataLoader(dataset, 3, sampler=data, num_workers=1, prefetch_factor=4)):
            loss: Any = job.model(inputs).sum()
            loss.backward()
            job.step()
            if job.round == 2:
                job.save(tmp_path / "f")
                break

    alone(work)
    assert read(tmp_path / "f").tree["data"]["done"] == [(6,)]


def test_what_a_loader_drops_is_used_when_the_epoch_is_over() -> None:
    position = Position(ShardSampler(20, 0, 1))
    batches = list(
        position.batches(DataLoader(TensorDataset(torch.ones(20)), 3, sampler=position.sampler, drop_last=True))
    )
    assert len(batches) == 6
    assert position.own() == {"rank": 0, "of": 1, "used": 20}


def test_what_a_lost_worker_had_said_last_stays_used() -> None:
    position = Position(ShardSampler(20, 0, 2))
    assert position.of_all([{"rank": 0, "of": 2, "used": 3}, {"rank": 1, "of": 2, "used": 4}])["done"] == [(3, 4)]
    assert position.of_all([{"rank": 0, "of": 2, "used": 6}])["done"] == [(6, 4)]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────


def test_weights_that_differ_are_named_and_not_saved(tmp_path: Path) -> None:
    def spoil(job: Job) -> None:
        if job.round == 3 and job.model.worker.rank == 1:
            with torch.no_grad():
                next(job.model.parameters()).view(-1)[0] += 1e-6

    told = outcomes(3, tmp_path, every=2, after=spoil)
    assert {type(one) for one in told} == {DivergedError}
    said = "after round 4 the weights of 'worker-1' (rank 1) are not those of 'worker-0' (rank 0): nothing was saved"
    assert all(str(one).startswith(said) for one in told)
    wait_until((tmp_path / "round-000000002.gsckpt").exists, "the one before is there")
    assert "round-000000004.gsckpt" not in names(tmp_path)


def test_no_room_is_a_warning_and_training_goes_on(
    tmp_path: Path, undisturbed: Run, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ExitStack()

    def fill(job: Job) -> None:
        settle(job)
        if (job.model.worker.rank, job.round) == (0, 2):
            limits.enter_context(largest_file(100))
        elif (job.model.worker.rank, job.round) == (0, 5):
            limits.close()

    with limits, caplog.at_level(logging.WARNING, "gradserver"):
        runs = on(3, train, tmp_path, every=1, after=fill)
    assert all(same(run.state, undisturbed.state) for run in runs)
    warnings = [record.message for record in caplog.records if "Training goes on" in record.message]
    file = tmp_path / "round-000000003.gsckpt"
    assert warnings[0] == (
        f"cannot write the checkpoint {file}: file too large. Training goes on; the last checkpoint stays"
    )
    assert len(warnings) == 3
    assert latest(tmp_path)["round"] == ROUNDS


def test_a_save_that_fails_fails_at_all_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(worker: Worker) -> None:
        job = job_of(worker)
        rounds(job, 1)
        with pytest.raises(StateError, match="cannot write the checkpoint .*/file/x: not a directory"):
            job.save(tmp_path / "file" / "x")
        rounds(job, 1)
        job.save(tmp_path / "good")

    on(2, work)
    assert read(tmp_path / "good").tree["round"] == 2


@pytest.mark.parametrize("places", [("a", "none", "b"), ("none", "b", "none")], ids=str)
def test_founders_without_the_newest_checkpoint_get_it_and_write_it(
    tmp_path: Path, undisturbed: Run, caplog: pytest.LogCaptureFixture, places: tuple[str, ...]
) -> None:
    """Test members with an older one, and with none, each with a directory of its own."""
    for name, at in (("a", 2), ("b", 3)):
        outcomes(3, tmp_path / name, after=stopping(at - 1, 0))
    homes = [tmp_path / f"{rank}-{name}" for rank, name in enumerate(places)]
    for home, name in zip(homes, places, strict=True):
        if name != "none":
            shutil.copytree(tmp_path / name, home, symlinks=True)

    runs = on(3, lambda worker: train(worker, homes[worker.rank]))
    assert all(same(run.state, undisturbed.state) for run in runs)
    assert [run.resumed for run in runs] == [home / "round-000000003.gsckpt" for home in homes]
    assert {digest(home) for home in homes} == {digest(tmp_path / "b")}
    giver = places.index("b")
    assert caplog.text.count(f"from 'worker-{giver}' (rank {giver})") == 2


def test_explicit_files_that_differ_are_named_and_an_absent_one_is_written(tmp_path: Path) -> None:
    for name, at in (("a", 2), ("b", 3)):
        outcomes(2, tmp_path / name, after=stopping(at - 1, 0))
    files = [tmp_path / "a" / "round-000000002.gsckpt", tmp_path / "b" / "round-000000003.gsckpt"]

    def work(worker: Worker) -> None:
        job = job_of(worker)
        with pytest.raises(DisagreementError, match=r"\(rank 0\) has round 2 .*, and .* \(rank 1\) has round 3 "):
            job.load(files[worker.rank])
        with pytest.raises(StateError, match="cannot read the checkpoint .*/no: no such file or directory, at"):
            job.load(tmp_path / "no")
        job.save(tmp_path / f"own-{worker.rank}")
        worker.barrier()
        if worker.rank == 0:
            (tmp_path / "own-0").unlink()
        worker.barrier()
        job.load(tmp_path / f"own-{worker.rank}")

    on(2, work)
    assert read(tmp_path / "own-0").digest == read(tmp_path / "own-1").digest


def test_a_disk_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes(2, tmp_path / "a", after=stopping(2, 0))
    (tmp_path / "file").write_text("")
    homes = [tmp_path / "a", tmp_path / "file" / "runs"]
    runs = on(2, lambda worker: train(worker, homes[worker.rank], every=2, after=settle))
    assert same(runs[0].state, runs[1].state)
    assert runs[1].round == runs[0].round > 3
    assert f"{homes[1]} for checkpoints: not a directory. The job goes on without this copy" in caplog.text
    assert latest(homes[0])["round"] > 3


class Own:
    """State that differs among workers, in its values and sizes."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {
            "rank": rank,
            "values": torch.full((5 - rank,), rank),
            "late": torch.full((3,), rank),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_copies_of_several_disks_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test three workers on two disks: the files are those of rank 0, whatever the others have."""
    monkeypatch.setattr("gradserver.worker.job.copies.CHUNK_BYTES", 10)

    def work(worker: Worker) -> None:
        own = Own(worker.rank)
        job = job_of(worker, state={"own": own}, checkpoint=tmp_path / "aab"[worker.rank], every=1)
        rounds(job, 1)
        job.save()
        assert own.state["late"].tolist() == [worker.rank] * 3, "saving changes nothing"

    on(3, work)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["latest", "round-000000001.gsckpt"]
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert latest(tmp_path / "b")["state"]["own"]["values"].tolist() == [0] * 5


def digest(directory: Path) -> str:
    path = Directory(directory, keep=1).latest()
    assert path is not None
    return read(path).digest.hex()[:12]


def test_same_round_of_another_job_is_noticed(tmp_path: Path) -> None:
    outcomes(2, tmp_path / "a", after=stopping(1, 0))
    outcomes(2, tmp_path / "b", after=stopping(1, 1), epochs=3)
    tree = latest(tmp_path / "b")
    tree["model"]["mean"] += 1.0
    Directory(tmp_path / "b", keep=1).write(2, pack(tree))

    def work(worker: Worker) -> None:
        with pytest.raises(DisagreementError, match=r"has round 2 \(digest .*, and .* has round 2 \(digest"):
            train(worker, tmp_path / "ab"[worker.rank])

    on(2, work)


def test_damaged_checkpoint_of_one_is_an_error_at_all(tmp_path: Path) -> None:
    outcomes(2, tmp_path, after=stopping(1, 0))
    bad = tmp_path / "bad.gsckpt"
    bad.write_bytes((tmp_path / "round-000000002.gsckpt").read_bytes()[:-40])

    def work(worker: Worker) -> None:
        job = job_of(worker)
        match = r"'worker-1' \(rank 1\) cannot load the checkpoint: .*bad.gsckpt is not a whole checkpoint"
        with pytest.raises(StateError, match=match):
            job.load(bad if worker.rank == 1 else tmp_path)
        assert job.round == 0

    on(2, work)


# ── in processes ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def programs(url: str, world: int, *checkpoints: Path, pause: int = -1) -> Iterator[list[Program]]:
    """Start the processes of a job. With several directories each process has its own, and its own host."""
    environment = {"GRADSERVER_URL": url, "PAUSE_AFTER": str(pause)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Program(
                    "-m",
                    "tests.job_training",
                    str(rank),
                    str(world),
                    str(checkpoints[rank % len(checkpoints)]),
                    environment={**environment, "GRADSERVER_HOST": f"box-{rank % len(checkpoints)}"},
                    loaded="torch",
                )
            )
            for rank in range(world)
        ]


@pytest.mark.long
def test_killed_and_terminated_processes_go_on_to_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Test all killed after a save, then one told to stop, as on a spot host. Threads run undisturbed."""
    undisturbed, _ = on(2, train)
    with Daemon("--workers", "2") as daemon:
        with programs(daemon.url, 2, tmp_path, pause=3) as processes:
            for process in processes:
                process.expect("round 3", STARTED_WITHIN)
            wait_until((tmp_path / "round-000000002.gsckpt").exists, "round 2 is saved")
            for process in processes:
                process.send_signal(signal.SIGKILL)
            assert {process.end() for process in processes} == {-signal.SIGKILL}
        wait_until(lambda: not daemon.snapshot()["groups"], "the coordinator has noticed")

        with programs(daemon.url, 2, tmp_path, pause=5) as processes:
            for process in processes:
                process.expect("round 5", STARTED_WITHIN)
            processes[1].send_signal(signal.SIGTERM)
            for process in processes:
                process.tell()
            assert [process.end() for process in processes] == [1, 0]
            said = "WorkerLeftError: 'w1' was told to stop, and left after round 6, which is saved in "
            assert any(said in line for line in processes[0].complaints())
            assert processes[1].complaints() == []

        with programs(daemon.url, 2, tmp_path) as processes:
            ends = {(process.expect("resumed ", STARTED_WITHIN), process.expect("weights ")) for process in processes}
            assert ends == {("round-000000006.gsckpt", str(undisturbed.digest))}
            assert [process.end() for process in processes] == [0, 0]


def test_a_buffer_that_a_first_forward_makes_is_in_the_checkpoint_and_comes_back(tmp_path: Path) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.scale: torch.Tensor | None
            self.register_buffer("scale", None)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.scale is None:
                self.scale = inputs.abs().mean(0)
            result: torch.Tensor = self.linear(inputs / self.scale)
            return result

    def work(worker: Worker, value: float) -> tuple[int, list[float]]:
        module = Late()
        model = DistributedDataParallel(module, worker, buffers_to_ignore=["scale"])
        job = Job(model, torch.optim.SGD(model.parameters(), 0.1), checkpoint=tmp_path)
        begun = job.round
        model(torch.full((3, 2), value)).sum().backward()
        job.step()
        job.save()
        assert module.scale is not None
        return begun, module.scale.tolist()

    with LocalCluster(1) as cluster:
        assert cluster.run(work, 2.0) == [(0, [2.0, 2.0])]
    with LocalCluster(1) as cluster:
        assert cluster.run(work, 5.0) == [(1, [2.0, 2.0])]


def test_boxes_without_a_shared_disk_each_have_the_checkpoint_and_go_on_from_any(tmp_path: Path) -> None:
    homes = tmp_path / "box-0", tmp_path / "box-1"
    with Daemon("--workers", "2") as daemon:
        with programs(daemon.url, 2, *homes, pause=3) as processes:
            for process in processes:
                process.expect("round 3", STARTED_WITHIN)
            for home in homes:
                wait_until((home / "round-000000002.gsckpt").exists, "round 2 is saved at each host")
            for process in processes:
                process.send_signal(signal.SIGKILL)
            assert {process.end() for process in processes} == {-signal.SIGKILL}
        assert digest(homes[0]) == digest(homes[1])
        shutil.rmtree(homes[0])
        wait_until(lambda: not daemon.snapshot()["groups"], "the coordinator has noticed")
        with programs(daemon.url, 2, *homes) as processes:
            ends = {(process.expect("resumed ", STARTED_WITHIN), process.expect("weights ")) for process in processes}
            assert [resumed for resumed, _ in ends] == ["round-000000002.gsckpt"], "all have the same weights"
            assert [process.end() for process in processes] == [0, 0]
            assert any("gets round 2 (digest" in line for line in processes[0].complaints())
    assert digest(homes[0]) == digest(homes[1])
