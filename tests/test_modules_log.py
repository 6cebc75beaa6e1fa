"""Several modules on one worker in groups where rounds do not wait for all: one log of updates, each of one module.

Each worker's optimizers make the updates of the log, at different places of their loops. So all modules are equal, bit
by bit, at workers with as many updates.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradserver import DataRanges, DistributedDataParallel, Job, LocalCluster, ShardSampler
from gradserver.engine.records import Begun, Round
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import Entry, scan
from gradserver.protocol.errors import OutOfStepError, UsageError
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, STARTED_WITHIN, Daemon, Program, wait_until
from tests.models import optimizer_state, state_of
from tests.modules_log_training import STEPS, Modules, batch, train
from tests.replicas import distance, gradients, same, sgd
from tests.seeded import seeded

torch.set_num_threads(1)

PROGRAM = Path(__file__).with_name("modules_log_training.py")
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "async"},
    {"mode": "async", "staleness": 2, "damping": "inverse"},
    {"mode": "bounded", "staleness": 0},
    {"mode": "bounded", "staleness": 1},
    {"mode": "bounded", "staleness": 2, "quorum": "75%", "grace": 0.002},
)


def named(mode: dict[str, Any]) -> str:
    return " ".join(map(str, mode.values()))


class Log:
    """Digests of replicas after each update, and the module that it was of."""

    def __init__(self) -> None:
        self.had: dict[int, dict[int, tuple[bool, int]]] = defaultdict(dict)
        self._lock = threading.Lock()

    def note(self, modules: Modules, model: DistributedDataParallel) -> None:
        worker = modules.worker
        with self._lock:
            self.had[worker.round - 1][worker.rank] = model is modules.maker, modules.digest()

    def check(self, world: int) -> None:
        """Check that all replicas made the same updates, in the same order, and had the same bits after each."""
        assert {is_maker for there in self.had.values() for is_maker, _ in there.values()} == {True, False}
        for number, there in sorted(self.had.items()):
            assert len(there) == world, number
            assert len(set(there.values())) == 1, f"replicas differ after update {number}"


@pytest.mark.parametrize("mode", MODES, ids=named)
def test_modules_that_take_turns_are_the_same_at_all_workers(mode: dict[str, Any]) -> None:
    log, chance = Log(), random.Random(named(mode))

    def work(worker: Worker) -> int:
        def dawdle(_: int) -> None:
            if worker.rank == 2:
                time.sleep(0.004 * chance.random())  # it computes for longer

        return train(worker, log.note, dawdle).digest()

    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        digests = cluster.run(work)
        members: list[dict[str, Any]] = cluster.snapshot()["groups"]["local"]["members"]  # type: ignore[index]
    assert len(set(digests)) == 1
    log.check(3)
    counted = sum(one["staleness"]["contributions"] + one["staleness"]["refused"] for one in members)
    assert counted == 3 * sum(STEPS + rank for rank in range(3)), "each contribution counts once, or is refused"
    if "staleness" in mode:
        assert all(one["staleness"]["max"] <= mode["staleness"] for one in members)
    if mode["mode"] == "bounded":
        assert not any(one["staleness"]["refused"] for one in members)


class Twins:
    """Two modules that one loss goes through."""

    def __init__(self, worker: Worker, **options: Any) -> None:
        self.front = DistributedDataParallel(seeded(0, lambda: nn.Linear(4, 5)), worker, **options)
        self.back = DistributedDataParallel(seeded(1, lambda: nn.Linear(5, 1)), worker, **options)
        self.models = [self.front, self.back]

    def backward(self, seed: int) -> None:
        inputs, _ = batch(seed)
        self.back(self.front(inputs).tanh()).square().mean().backward()

    @property
    def state(self) -> dict[str, Tensor]:
        return {
            f"{at}.{name}": one for at, model in enumerate(self.models) for name, one in state_of(model.module).items()
        }


@pytest.mark.parametrize("mode", MODES[:4], ids=named)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["view", "copy"])
def test_one_backward_through_two_modules_updates_each_in_a_round_of_its_own(
    mode: dict[str, Any], options: dict[str, Any]
) -> None:
    """Test one optimizer of both modules. A process repeats the log of updates from what was contributed."""
    given: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
    had: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
    of: dict[int, int] = {}
    lock = threading.Lock()

    def work(worker: Worker) -> dict[str, Tensor]:
        twins = Twins(worker, **options)
        optimizer = torch.optim.AdamW([one for model in twins.models for one in model.parameters()], lr=0.05)

        def step(model: DistributedDataParallel) -> None:
            others = [one for other in twins.models if other is not model for one in other.parameters()]
            assert all(parameter.grad is None for parameter in others), "only the updated module has gradients"
            optimizer.step()
            optimizer.zero_grad()
            with lock:
                of[worker.round - 1] = twins.models.index(model)
                had[worker.round - 1].append(twins.state)

        with twins.front.join(lambda: step(twins.front)), twins.back.join(lambda: step(twins.back)):
            for at in range(8 + worker.rank):
                if worker.rank == 1 and at % 3 == 0:
                    time.sleep(0.003)  # it computes for longer
                twins.backward(10 * at + worker.rank)
                own = [gradients(model.module) for model in twins.models]
                for model in twins.back.updates():
                    step(model)
                    index = twins.models.index(model)
                    if own[index] and not model.waits:
                        with lock:
                            given[worker.round - 1][worker.rank] = own[index]
                        own[index] = {}
        return twins.state

    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        states = cluster.run(work)
    assert all(same(states[0], other) for other in states)
    for number, there in had.items():
        assert len(there) == 3
        assert all(same(there[0], other) for other in there), f"replicas differ after update {number}"
    if "staleness" in mode and mode["mode"] == "async":
        return  # some were dropped, so what counted is not known here

    models = [seeded(0, lambda: nn.Linear(4, 5)), seeded(1, lambda: nn.Linear(5, 1))]
    optimizer = torch.optim.AdamW([one for model in models for one in model.parameters()], lr=0.05)
    for number in sorted(had):
        for name, parameter in models[of[number]].named_parameters():
            parameter.grad = torch.stack([one[name] for one in given[number].values()]).mean(dim=0)
        optimizer.step()
        optimizer.zero_grad()
        state = {f"{at}.{name}": one for at, model in enumerate(models) for name, one in state_of(model).items()}
        assert distance(had[number][0], state) < 1e-4, number


def test_gradients_that_are_accumulated_wait_while_others_update_their_module() -> None:
    counts = defaultdict[int, int](int)

    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        twins, found = Twins(worker), list[Tensor]()
        optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1) for model in twins.models}

        def apply(model: DistributedDataParallel) -> None:
            optimizers[model].step()
            optimizers[model].zero_grad()
            counts[worker.rank] += 1

        inputs, others = batch(1)
        with twins.front.join(lambda: apply(twins.front)), twins.back.join(lambda: apply(twins.back)):
            if worker.rank == 0:
                for _ in range(3):
                    twins.front(inputs).square().mean().backward()
                    for model in twins.front.updates():
                        apply(model)
            else:
                with twins.front.no_sync():
                    twins.front(inputs).square().mean().backward()
                weight = next(twins.front.parameters())
                assert weight.grad is not None
                found.append(weight.grad.clone())
                wait_until(lambda: counts[0] == 3, "the other has updated that module")
                twins.back(others).square().mean().backward()
                for model in twins.back.updates():
                    assert (weight.grad is None) == (model is twins.back)
                    apply(model)
                assert weight.grad is not None, "the gradients are there again"
                found.append(weight.grad.clone())
                twins.front(inputs).square().mean().backward()
                for model in twins.front.updates():
                    apply(model)
                assert worker.staleness == 3, "the first of them was computed before the others' updates"
        return twins.state, found

    with LocalCluster(2, timeout=20.0, mode="async") as cluster:
        (one, _), (other, found) = cluster.run(work)
    assert same(one, other)
    assert torch.equal(*found)


def test_a_backward_through_a_graph_from_before_updates_is_refused() -> None:
    """Test what many scripts do: the generator's output is used before and after the discriminator's step."""

    def work(worker: Worker) -> None:
        twins = Twins(worker)
        inputs, _ = batch(0)
        made = twins.front(inputs)
        twins.back(made.detach()).mean().backward()
        for _ in twins.back.updates():
            pass
        with pytest.raises(UsageError, match="a forward from before the last updates.*call the module again"):
            twins.back(made).mean().backward()
        twins.back.zero_grad()
        with twins.back.no_sync():
            twins.back(twins.front(inputs)).mean().backward()
        assert list(twins.front.updates()) == [twins.front]

    with LocalCluster(1, timeout=20.0, mode="async") as cluster:
        cluster.run(work)


def test_two_backwards_before_their_updates_are_one_queue() -> None:
    def work(worker: Worker) -> None:
        twins = Twins(worker)
        inputs, others = batch(0)
        twins.back(others).mean().backward()
        twins.front(inputs).mean().backward()
        assert twins.front.waits
        assert twins.back.waits
        with pytest.raises(UsageError, match="updates that were not applied"):
            twins.back(others)
        assert list(twins.back.updates()) == [twins.front, twins.back], "in the order in which they were wrapped"
        assert not twins.front.waits

    with LocalCluster(1, timeout=20.0, mode="async") as cluster:
        cluster.run(work)


def test_a_loop_that_is_left_in_the_midst_goes_on_where_it_was() -> None:
    def work(worker: Worker) -> None:
        twins = Twins(worker)
        twins.backward(0)
        for model in twins.back.updates():
            assert model is twins.front
            break
        assert list(twins.front.updates()) == [twins.back]

    with LocalCluster(1, timeout=20.0, mode="bounded", staleness=0) as cluster:
        cluster.run(work)


def test_each_module_needs_a_block_of_its_own() -> None:
    def work(worker: Worker) -> None:
        twins = Twins(worker)
        optimizer = sgd(nn.ModuleList(twins.models))
        if worker.rank == 0:
            twins.backward(0)
            for _ in twins.front.updates():
                optimizer.step()
            with twins.front.join(optimizer), twins.back.join(optimizer):
                pass
        else:
            with pytest.raises(UsageError, match="open a block for each"), twins.front.join(optimizer):
                pass
            for model in twins.models:
                with pytest.raises(OutOfStepError, match="was not applied.*out of step"):
                    model(batch(0)[0])

    with LocalCluster(2, elastic=(1, 2), timeout=20.0, mode="async") as cluster:
        cluster.run(work)


@pytest.mark.parametrize("mode", [MODES[0], {"mode": "async", "staleness": 0}, MODES[3]], ids=named)
def test_each_sample_is_used_once_though_contributions_are_refused(mode: dict[str, Any]) -> None:
    used: list[int] = []

    def work(worker: Worker) -> dict[str, Tensor]:
        twins = Twins(worker)
        optimizer = sgd(nn.ModuleList(twins.models))

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        data = DataRanges(60, worker, batch_size=3, seed=5)
        while not data.finished():
            with twins.front.join(step), twins.back.join(step):
                while len(indices := data.take()):
                    if worker.rank == 0:
                        time.sleep(0.003)  # it computes for longer
                    twins.backward(int(indices[0]))
                    counts = False
                    for model in twins.front.updates():
                        counts = counts or (model is twins.front and not model.waits)
                        step()
                    if counts:
                        used.extend(indices.tolist())
        return twins.state

    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        first, *others = cluster.run(work)
    assert all(same(first, other) for other in others)
    assert sorted(used) == list(range(60))


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────


def job_of_two(worker: Worker, /, epochs: int, **options: Any) -> tuple[Job, list[Tensor]]:
    """Train a module, and another one through it, on 48 samples. Return the job, and all that it has."""
    data = TensorDataset(torch.randn(48, 5, generator=torch.Generator().manual_seed(1)))
    modules = Modules(worker)
    sampler = ShardSampler.for_worker(data, worker, seed=3, uneven="keep")
    models = {"maker": modules.maker, "critic": modules.critic}
    optimizers = {"maker": modules.optimizers[modules.maker], "critic": modules.optimizers[modules.critic]}
    job = Job(models, optimizers, data=sampler, **options)
    noise = torch.Generator().manual_seed(worker.rank)
    for (real,) in job.batches(data, epochs=epochs, batch_size=4):
        if worker.rank == 0:
            time.sleep(0.002)  # it computes for longer
        made = modules.maker(torch.randn(len(real), 4, generator=noise)).detach()
        (modules.critic(made).mean() - modules.critic(real).tanh().mean()).backward()
        job.step("critic")
        (-modules.critic(modules.maker(torch.randn(len(real), 4, generator=noise))).mean()).backward()
        job.step("maker")
        if (writing := job._saving._writing) is not None:
            writing.join()  # the disk may be slow, and the training is short
    states = [*state_of(modules.maker.module).values(), *state_of(modules.critic.module).values()]
    return job, [*states, *(one for optimizer in optimizers.values() for one in optimizer_state(optimizer))]


@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=named)
def test_a_job_of_two_models_goes_on_from_a_checkpoint_with_another_number_of_workers(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    with LocalCluster(3, timeout=20.0, **mode) as cluster:
        before = cluster.run(job_of_two, 1, checkpoint=tmp_path, every=5)
    with LocalCluster(2, timeout=20.0, **mode) as cluster:
        after = cluster.run(job_of_two, 2, checkpoint=tmp_path, every=5)

    for results in (before, after):
        first = results[0][1]
        assert all(torch.equal(a, b) for _, state in results for a, b in zip(first, state, strict=True))
        assert len({job.round for job, _ in results}) == 1
    (start,) = {job.resumed for job, _ in after}
    assert start is not None, "it goes on from a checkpoint"
    (number,) = map(int, re.findall(r"\d+", start.stem))
    assert 0 < number <= before[0][0].round
    assert after[0][0].round > number


def test_what_another_model_got_in_the_same_backward_is_no_contribution() -> None:
    """Test that the critic is updated by its own step alone."""
    with LocalCluster(1, timeout=20.0, mode="async") as cluster:
        ((job, _),) = cluster.run(job_of_two, 1)
        (group,) = cluster.snapshot()["groups"].values()  # type: ignore[attr-defined]
    assert job.round == 2 * 12
    assert group["round"] == job.round + 1, "and the end"


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────

WORLD = 3


class Processes:
    """A coordinator with a directory, and workers that say the digest of their modules after each update."""

    def __init__(self, stack: ExitStack, directory: Path, *options: str, held: int = -1, least: int = 1) -> None:
        self._stack, self.directory = stack, directory
        self.options = "--workers", f"{least}:{WORLD}", "--state-dir", str(directory), *options
        self.daemon = stack.enter_context(Daemon(*self.options))
        words = [[str(PROGRAM), self.daemon.url, str(rank), str(WORLD)] for rank in range(WORLD)]
        self.workers = [
            stack.enter_context(Program(*each, *(["held"] if rank == held else []), loaded="torch"))
            for rank, each in enumerate(words)
        ]

    def restart(self) -> None:
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.end()
        self.daemon = self._stack.enter_context(Daemon(*self.options))

    def check(self, *ranks: int) -> None:
        """Check that these have ended well, with the same bits after each update."""
        there: dict[int, set[str]] = defaultdict(set)
        ends: set[str] = set()
        for rank in ranks or range(WORLD):
            assert self.workers[rank].end(STARTED_WITHIN) == 0, self.workers[rank].complaints()
            lines = self.workers[rank].output()
            ends.update(line for line in lines if line.startswith("end "))
            for line in lines:
                if line.startswith("update "):
                    _, updated, *rest = line.split()
                    there[int(updated)].add(" ".join(rest))
        assert len(ends) == 1
        assert all(len(said) == 1 for said in there.values()), "members at the same version hold other bits"
        records = [
            entry.read().record
            for _, path in files_of(self.directory)
            for entry in scan(path.read_bytes())
            if isinstance(entry, Entry)
        ]
        sections = {one.round: one.section for one in records if isinstance(one, Begun)}
        done = {one.record.round: one.record.section for one in records if isinstance(one, Round)}
        assert sorted(done) == list(range(len(done)))
        assert done.items() <= sections.items()
        for number, said in there.items():
            assert said.pop().startswith(("maker", "critic")[done[number]])


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "async", "--shards", "2"),
        ("--mode", "bounded", "--staleness", "1"),
        pytest.param(("--mode", "async"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_processes_of_which_one_is_slow_hold_the_same_bits_at_the_same_version(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        Processes(stack, tmp_path, *options).check()


@pytest.mark.parametrize("mode", [("async",), ("bounded", "--staleness", "1")], ids=" ".join)
def test_a_process_that_is_killed_between_two_modules_costs_no_other_a_step(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        group = Processes(stack, tmp_path, "--mode", *mode, held=1)
        group.workers[1].expect("held", STARTED_WITHIN)
        group.workers[1].send_signal(signal.SIGKILL)
        group.check(0, 2)


@pytest.mark.parametrize("mode", [("async",), ("bounded", "--staleness", "2")], ids=" ".join)
def test_a_coordinator_that_is_killed_between_two_modules_costs_nothing(mode: tuple[str, ...], tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = Processes(stack, tmp_path, "--mode", *mode, held=1, least=WORLD)
        group.workers[1].expect("held", STARTED_WITHIN)
        group.restart()
        group.workers[1].tell()
        group.workers[0].expect("update ", PATIENCE)
        group.check()
