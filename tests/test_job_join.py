"""Tests of jobs that others join: these get a member's state, and from then on all have the same bits.

Without a backlog the others wait for a learner, so that a test knows in which round it joins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradserver import DistributedDataParallel, Job, LocalCluster, Membership, ShardSampler
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    DeadlineError,
    DivergedError,
    JoinTimeoutError,
    PlanMismatchError,
    StateError,
    UsageError,
)
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp import alike
from tests.cluster import Task, add_waiting, wait_until
from tests.models import Convolutional, images, loss_of, optimizer_state, state_of
from tests.replicas import same

ROUNDS = 14
Place = tuple[int, int]
"""Rank and world size."""


class Average:
    """A moving average of the weights: state that only the loop knows of."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.mean = {name: value.detach().clone().float() for name, value in module.named_parameters()}

    def update(self) -> None:
        for name, value in self._module.named_parameters():
            self.mean[name].mul_(0.9).add_(value.detach().float(), alpha=0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.mean

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean = state


class Run:
    """Jobs on a cluster to which workers come and go; what each had after each round."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.cluster = LocalCluster(1, elastic=(1, 8), timeout=20.0, backlog=0)
        self.dtype = dtype
        self.seen: dict[int, dict[str, tuple[Place, list[Tensor]]]] = {}
        self.entered: dict[str, int] = {}
        self.changes: dict[str, list[Membership]] = {}
        self.lock = threading.Lock()
        self.at: dict[int, Callable[[], None]] = {}
        """The action of rank 0 after a round."""

    def train(self, worker: Worker) -> int:
        name = worker.name
        generator = torch.Generator().manual_seed(len(self.entered))
        model = DistributedDataParallel(Convolutional(len(self.entered) + 1).to(self.dtype), worker)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        average = Average(model.module)
        changes: list[Membership] = []
        worker.on_membership(changes.append)
        job = Job(model, optimizer, scheduler, state={"average": average})
        with self.lock:
            self.entered[name], self.changes[name] = job.entered, changes
        while job.round < ROUNDS:
            inputs, targets = images(int(torch.randint(1 << 30, (1,), generator=generator)), 4)
            loss_of(model, inputs.to(self.dtype), targets).backward()
            job.step(after=average.update)
            everything = [*state_of(model.module).values(), *optimizer_state(optimizer), *average.mean.values()]
            state = [value.clone() for value in everything] + [torch.tensor(scheduler.get_last_lr())]
            with self.lock:
                self.seen.setdefault(job.round, {})[name] = (worker.rank, worker.world_size), state
            if worker.rank == 0 and (happening := self.at.pop(job.round, None)) is not None:
                happening()
        return job.round

    def go(self) -> None:
        with self.cluster as cluster:
            cluster.run(self.train)

    def check(self) -> list[int]:
        """Check that all that did a round had the same bits. Return the founder's world size after each."""
        worlds = []
        for number in range(1, ROUNDS + 1):
            there = self.seen[number]
            (_, first), *_ = there.values()
            for name, (_, state) in there.items():
                assert all(torch.equal(a, b) for a, b in zip(first, state, strict=True)), (number, name)
            worlds.append(there["worker-0"][0][1])
        return worlds


def joined(cluster: LocalCluster, count: int = 1, name: str | None = None) -> Callable[[], None]:
    """Return a function that lets others join, and waits until the coordinator knows that they want to."""
    return lambda: add_waiting(cluster, count, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_worlds_grow_and_shrink_and_all_have_the_same_bits_after_every_round(dtype: torch.dtype) -> None:
    run = Run(dtype)
    run.at = {
        2: joined(run.cluster),
        4: joined(run.cluster, 2),
        7: lambda: run.cluster.kill(2),
        9: joined(run.cluster),
    }

    run.go()

    assert run.check() == [1, 1, 1, 2, 2, 4, 4, 3, 3, 3, 4, 4, 4, 4]
    assert run.entered == {"worker-0": 0, "worker-1": 3, "worker-2": 5, "worker-3": 5, "worker-4": 10}
    places = {name: place for name, (place, _) in run.seen[ROUNDS].items()}
    assert places == {"worker-0": (0, 4), "worker-1": (1, 4), "worker-3": (2, 4), "worker-4": (3, 4)}
    epochs = [news.epoch for news in run.changes["worker-0"]]
    assert epochs == sorted(epochs)
    assert [len(news.names) for news in run.changes["worker-0"]] == [2, 4, 3, 4]


def test_a_worker_that_comes_back_has_its_rank_again() -> None:
    run = Run()

    run.at = {
        2: joined(run.cluster, 2),
        5: lambda: run.cluster.kill(1),
        8: joined(run.cluster, name="worker-1"),
    }

    run.go()

    assert run.check() == [1, 1, 1, 2, 3, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    places = {name: place for name, (place, _) in run.seen[ROUNDS].items()}
    assert places == {"worker-0": (0, 3), "worker-1": (1, 3), "worker-2": (2, 3)}


def test_a_joiner_and_a_death_at_the_same_boundary() -> None:
    run = Run()

    run.at = {2: joined(run.cluster), 5: joined(run.cluster), 6: lambda: run.cluster.kill(1)}

    run.go()

    assert run.check() == [1, 1, 1, *[2] * 11]
    places = {name: place for name, (place, _) in run.seen[ROUNDS].items()}
    assert places == {"worker-0": (0, 2), "worker-2": (1, 2)}


def test_a_worker_too_many_waits_and_is_told_why() -> None:
    with LocalCluster(2, elastic=(1, 2), timeout=0.5) as cluster:
        with pytest.raises(JoinTimeoutError, match=r"has 2 workers, 'worker-0' \(rank 0\), 'worker-1' \(rank 1\), and"):
            cluster.add()
        adding = Task(cluster.add)
        wait_until(lambda: cluster.snapshot()["groups"]["local"]["waiting"], "it waits")  # type: ignore[index]
        cluster.kill(1)
        assert adding.result().rank == 1


def test_a_group_without_jobs_takes_no_worker_in_when_it_trains() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=5.0) as cluster:
        (worker,) = cluster.workers
        worker.agree(simple_plan([("b", 3)], FLOAT32))
        worker.push(0, np.zeros(3, np.float32))
        worker.finish_round()
        with pytest.raises(UsageError, match=r"'worker-1' joins group 'local' in round 1, and .* gradserver\.Job"):
            cluster.add()


def test_a_learner_that_does_not_enter_can_do_nothing() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=5.0) as cluster:
        plan = simple_plan([("b", 3)], FLOAT32)
        cluster.workers[0].serve_state(dict)
        cluster.workers[0].agree(plan)
        learner = cluster.add()
        assert learner.joins
        assert (learner.rank, learner.world_size) == (1, 2)
        with pytest.raises(UsageError, match="agrees on the plan"):
            learner.enter(print)
        learner.agree(plan)
        with pytest.raises(UsageError, match="cannot exchange gradients before it has the state"):
            learner.push(0, np.zeros(3, np.float32))
        with pytest.raises(UsageError, match="cannot call collectives before it has the state"):
            learner.barrier()
        with pytest.raises(UsageError, match="cannot send and receive before"):
            learner.send(np.zeros(3), 0)


def test_a_learner_with_another_model_hears_of_it_before_anything_is_sent() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=5.0) as cluster:
        cluster.workers[0].agree(simple_plan([("b", 3)], FLOAT32))
        learner = cluster.add()
        with pytest.raises(PlanMismatchError, match=r"'worker-0' \(rank 0\) have b \(3, .*'worker-1' .* has b \(4,"):
            learner.agree(simple_plan([("b", 4)], FLOAT32))
        assert learner.agree(simple_plan([("b", 3)], FLOAT32)) is not None


def test_a_learner_before_there_is_a_plan_hears_of_it_when_there_is() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=5.0) as cluster:
        plan = simple_plan([("b", 3)], FLOAT32)
        agreeing = Task(cluster.add().agree, plan)
        assert not agreeing.ended(0.05)
        cluster.workers[0].agree(plan)
        assert agreeing.result() == plan


def test_a_learner_in_a_group_that_ends_no_round_is_told_after_its_timeout() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=0.3) as cluster:
        plan = simple_plan([("b", 3)], FLOAT32)
        cluster.workers[0].serve_state(dict)
        cluster.workers[0].agree(plan)
        learner = cluster.add()
        learner.agree(plan)
        with pytest.raises(DeadlineError, match=r"to end round 0, so that it can join \('worker-0' \(rank 0\)\)"):
            learner.enter(print)


def test_a_job_that_is_not_like_the_others_does_not_come_in_and_the_others_go_on() -> None:
    with LocalCluster(1, elastic=(1, 4), timeout=10.0) as cluster:
        stop = threading.Event()

        def train(worker: Worker, **options: Any) -> int:
            model = DistributedDataParallel(Convolutional(), worker)
            job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1, **options))
            while not stop.is_set() and job.round < 10_000:
                loss_of(model, *images(job.round, 2)).backward()
                job.step()
            return job.round

        founder = Task(train, cluster.workers[0])
        learner = cluster.add()

        def other(worker: Worker) -> Job:
            model = DistributedDataParallel(Convolutional(), worker)
            return Job(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1))

        with pytest.raises(StateError, match="this job is not like the one that it joins: loaded state dict"):
            other(learner)
        learner.abort("it is another job")
        stop.set()
        assert founder.result() > 0


def decaying(worker: Worker, decays: Callable[[Worker, Job], bool], rounds: int) -> tuple[int, dict[str, Any]]:
    """Return a loop that does more to the weights than its job knows of."""
    model = DistributedDataParallel(Convolutional(), worker)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while job.round < rounds:
        loss_of(model, *images(job.round, 2)).backward()
        if decays(worker, job):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
        job.step()
        if worker.rank == 0 and job.round == 2:
            add_waiting(worker.cluster)  # type: ignore[attr-defined]
    return job.round, state_of(model.module)


@pytest.mark.parametrize("world", [1, 2])
def test_a_newcomer_with_other_weights_after_its_first_round_is_refused_and_the_others_go_on(
    world: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Test with one other: there is no majority, so the newcomer is wrong."""
    said: list[str] = []
    with LocalCluster(world, elastic=(1, 4), timeout=20.0, backlog=0) as cluster:

        def train(worker: Worker) -> Any:
            worker.cluster = cluster  # type: ignore[attr-defined]
            joins = worker.joins
            try:
                return decaying(worker, lambda *_: not joins, 8)
            except DivergedError as error:
                said.append(error.message)
                return None

        with caplog.at_level("WARNING"):
            *results, refused = cluster.run(train)

    assert refused is None
    assert [number for number, _ in results] == [8] * world
    assert all(same(results[0][1], state) for _, state in results)
    text = (
        f"after round 4 the weights of 'worker-{world}' (rank {world}) are not those of 'worker-0' (rank 0): "
        f"the worker that has just joined leaves, and the others go on. Replicas stay alike if all of them "
        f"change their weights by job"
    )
    assert [message[: len(text)] for message in said] == [text]
    reason = (
        f"'worker-{world}' (rank {world}) was lost in round 5 (behind round 4 its weights were not those of 'worker-0'"
    )
    assert any(reason in message for message in caplog.messages)


def test_no_weights_are_asked_for_when_no_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "digest_of", None)
    with LocalCluster(3, elastic=(1, 4), timeout=20.0) as cluster:

        def train(worker: Worker) -> int:
            member_id = worker.rank
            model = DistributedDataParallel(Convolutional(), worker)
            job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1))
            while job.round < 4:
                if member_id == 2 and job.round == 2:
                    cluster.kill(worker.rank)
                loss_of(model, *images(job.round, 2)).backward()
                job.step()
            return job.round

        assert cluster.run(train) == [4, 4, None]


def test_a_member_that_cannot_send_its_state_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    plan = simple_plan([("b", 3)], FLOAT32)
    with LocalCluster(2, elastic=(1, 4), timeout=10.0, backlog=0) as cluster:
        asked: list[str] = []

        def train(worker: Worker) -> Any:
            found: list[Any] = []

            def snapshot() -> Any:
                asked.append(worker.name)
                return {"round": worker.round, "weights": object() if worker.name == "worker-0" else np.arange(3)}

            worker.serve_state(snapshot) if not worker.joins else None
            worker.agree(plan)
            if worker.joins:
                number = worker.enter(found.append)
                assert found[-1]["round"] == number
            elif worker.rank == 0:
                add_waiting(cluster)
            while worker.round < 12:
                worker.push(0, np.ones(3, np.float32))
                worker.finish_round()
            return worker.world_size

        with caplog.at_level("WARNING"):
            assert cluster.run(train) == [3, 3, 3]
        assert asked == ["worker-0", "worker-1"]
        assert "this worker's state cannot be sent to learners: the tree['weights'] is a builtins.object" in caplog.text


def test_a_learner_goes_on_in_the_present_epoch_and_later_ones_are_dealt_among_all() -> None:
    dataset = TensorDataset(torch.arange(24).float().reshape(-1, 1))
    used: dict[int, list[list[int]]] = {}
    with LocalCluster(2, elastic=(1, 4), timeout=10.0, backlog=0) as cluster:
        lock = threading.Lock()

        def train(worker: Worker) -> tuple[int, int]:
            network = nn.Linear(1, 1)
            model = DistributedDataParallel(network, worker)
            sampler = ShardSampler.for_worker(dataset, worker, seed=3, uneven="keep")
            loader = DataLoader(dataset, batch_size=2, sampler=sampler)
            job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), data=sampler)
            for (inputs,) in job.batches(loader, epochs=3):
                with lock:
                    used.setdefault(sampler.epoch, []).append([int(value) for value in inputs.ravel()])
                model(inputs).sum().backward()
                job.step()
                if job.round == 2 and worker.rank == 0:
                    add_waiting(cluster)
            return job.round, worker.world_size

        results = cluster.run(train)

    assert len(set(results)) == 1
    assert results[0][1] == 3
    for epoch in (1, 2):
        assert sorted(sample for batch in used[epoch] for sample in batch) == list(range(24))
    assert set(range(24)) == {sample for batch in used[0] for sample in batch}


def test_a_loop_that_reports_its_loss_by_a_collective_can_be_joined() -> None:
    with LocalCluster(2, elastic=(1, 4), timeout=10.0, backlog=0) as cluster:

        def train(worker: Worker) -> list[int]:
            model = DistributedDataParallel(Convolutional(), worker)
            job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1))
            worlds = []
            while job.round < 8:
                loss_of(model, *images(job.round, 2)).backward()
                job.step()
                worlds.append(len(worker.all_gather(np.array([worker.rank]))))
                if job.round == 3 and worker.rank == 0:
                    add_waiting(cluster)
            return worlds

        results = cluster.run(train)

    assert results == [[2, 2, 2, 2, 3, 3, 3, 3], [2, 2, 2, 2, 3, 3, 3, 3], [3, 3, 3, 3]]


def test_states_are_the_same_bits() -> None:
    """Test also what is empty, large, or smaller than a part."""
    sent: dict[str, Any] = {
        "empty": np.zeros((0, 3)),
        "many": [np.full(index, index, np.int16) for index in range(300)],
        "large": torch.randn(700_001, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "text": "ü" * 1000,
    }
    plan = simple_plan([("b", 3)], FLOAT32)
    with LocalCluster(1, elastic=(1, 2), timeout=10.0, backlog=0) as cluster:

        def train(worker: Worker) -> Any:
            got: list[Any] = []
            if not worker.joins:
                worker.serve_state(lambda: sent)
            worker.agree(plan)
            if worker.joins:
                worker.enter(got.append)
            while worker.round < 3:
                worker.push(0, np.ones(3, np.float32))
                worker.finish_round()
                if worker.round == 1:
                    add_waiting(cluster)
            return got

        _, (got,) = cluster.run(train)

    assert got.keys() == sent.keys()
    assert all(np.array_equal(a, b) for a, b in zip(got["many"], sent["many"], strict=True))
    assert torch.equal(got["large"], sent["large"])
    assert got["text"] == sent["text"]
    assert got["empty"].shape == (0, 3)


class Gate:
    """State that takes its time to be loaded."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        self.reached.set()
        assert self.open.wait(20.0)


MEANWHILE = 6
"""Rounds that are over while a learner loads its state."""


def test_the_others_go_on_while_a_worker_joins_and_it_does_their_rounds_when_it_has_the_state() -> None:
    gate = Gate()
    seen: dict[int, dict[str, list[Tensor]]] = {}
    entered: dict[str, int] = {}
    lock = threading.Lock()
    with LocalCluster(1, elastic=(1, 4), timeout=20.0) as cluster:

        def train(worker: Worker) -> int:
            model = DistributedDataParallel(Convolutional(), worker)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            average = Average(model.module)
            job = Job(model, optimizer, state={"average": average, "gate": gate})
            loaded_after, alike = job.round, 0

            def step() -> None:
                nonlocal alike
                job.step(before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5), after=average.update)
                everything = [*state_of(model.module).values(), *optimizer_state(optimizer), *average.mean.values()]
                with lock:
                    seen.setdefault(job.round, {})[worker.name] = [value.clone() for value in everything]
                alike += worker.world_size == 2 and not worker.observes
                if worker.name == "worker-0":
                    if job.round == 2:
                        add_waiting(cluster)
                    elif job.round == 4:
                        assert gate.reached.wait(20.0)
                    elif job.round == 4 + MEANWHILE:
                        gate.open.set()

            while alike < 3:
                loss_of(model, *images(job.round, 4)).backward()
                step()
            entered[worker.name] = job.entered
            return loaded_after

        assert cluster.run(train) == [0, 3]

    assert entered["worker-1"] >= 4 + MEANWHILE
    later = [number for number in seen if len(seen[number]) == 2]
    assert len(later) >= 3
    for number in later:
        one, other = seen[number].values()
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), number


@pytest.mark.parametrize("waits", [True, False])
def test_a_learner_in_a_group_with_a_quorum_can_be_late_from_its_first_round_on(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that it stops before that round, which the others close without it, and three more.

    Before that they may have waited until it had the state, as they do for a worker that claims samples.
    """
    enter = Worker.enter
    monkeypatch.setattr(Worker, "enter", lambda worker, install, **_: enter(worker, install, waits))
    holding, released = threading.Event(), threading.Event()
    seen: dict[int, dict[str, list[Tensor]]] = {}
    lock = threading.Lock()
    end = first = 0
    with LocalCluster(2, elastic=(1, 4), timeout=20.0, quorum=2, grace=0.0) as cluster:

        def train(worker: Worker) -> None:
            nonlocal end, first
            model = DistributedDataParallel(Convolutional(), worker)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            job = Job(model, optimizer)
            entry = worker._session.learner
            while not end or job.round < end:
                if entry.round is not None and job.round >= entry.round and not holding.is_set():
                    first = entry.round
                    holding.set()
                    assert released.wait(20.0)
                loss_of(model, *images(job.round, 4)).backward()
                job.step()
                with lock:
                    everything = [*state_of(model.module).values(), *optimizer_state(optimizer)]
                    seen.setdefault(job.round, {})[worker.name] = [value.clone() for value in everything]
                if worker.name != "worker-0":
                    continue
                if job.round == 2:
                    add_waiting(cluster)
                elif not end and job.round > 2 and holding.is_set():
                    end = job.round + 8
                elif end and job.round == end - 4:
                    released.set()

        cluster.run(train)

    assert released.is_set()
    assert first < end - 4
    assert len(seen[end]) == 3
    for number, there in seen.items():
        one, *others = there.values()
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), number


def test_a_learner_that_is_late_for_its_first_round_asks_and_saves_as_the_others_do_behind_it(tmp_path: Path) -> None:
    """Test that it comes to the first round in which it counts while it repeats what the others have done."""
    first: list[int] = []
    with LocalCluster(2, elastic=(1, 4), timeout=20.0, quorum=2, grace=0.0) as cluster:

        def train(worker: Worker) -> tuple[int, int]:
            model = DistributedDataParallel(Convolutional(), worker)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            job = Job(model, optimizer, checkpoint=tmp_path, every=2)
            member, entry = worker._session.member, worker._session.learner
            while not first or job.round < first[0] + 4:
                loss_of(model, *images(job.round, 4)).backward()
                if worker.observes and entry.ready:

                    def is_late() -> bool:
                        return entry.round is not None and member.stragglers.backlog.has(entry.round)

                    wait_until(is_late, "the others have closed its first round")
                    assert entry.round is not None
                    first.append(entry.round)
                job.step()
                if job.round == 2 and worker.rank == 0:
                    add_waiting(cluster)
            return job.round, worker.world_size

        found = cluster.run(train)

    assert found == [(first[0] + 4, 3)] * 3


class Phased(nn.Module):
    """With a buffer that changes and is in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.phase: Tensor
        self.register_buffer("phase", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs + self.phase)
        return result


def test_a_learner_gets_buffers_that_are_in_no_state() -> None:
    """Test also one that changed long before, and is not sent any more."""
    phases: dict[int, set[float]] = {}
    with LocalCluster(1, elastic=(1, 2), timeout=20.0, backlog=0) as cluster:

        def train(worker: Worker) -> None:
            model = DistributedDataParallel(Phased(), worker)
            job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01))
            while job.round < 8:
                if job.round == 1:
                    model.module.get_buffer("phase").fill_(0.5)
                model(torch.ones(1, 2)).sum().backward()
                job.step()
                phases.setdefault(job.round, set()).add(float(model.module.get_buffer("phase")))
                if job.round == 4 and worker.name == "worker-0":
                    joined(cluster)()

        cluster.run(train)
        assert len(cluster.workers) == 2
    assert phases == {1: {0.0}} | {number: {0.5} for number in range(2, 9)}
