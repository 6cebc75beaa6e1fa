"""Jobs with local SGD: they are saved, continue with other workers, and others join them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradserver import DataRanges, DistributedDataParallel, Job, LocalCluster, LocalSGD, ShardSampler
from gradserver.protocol.errors import InvalidArgumentError, UsageError
from gradserver.worker.client import Worker
from gradserver.worker.job.checkpoint import Directory, read
from tests.cluster import add_waiting, wait_until
from tests.models import Transformer, loss_of, seeded, tokens
from tests.replicas import on, same

torch.set_num_threads(1)

SAMPLES, BATCH = 60, 3
MODES: list[dict[str, Any]] = [{}, {"fragments": 2, "delay": 1}, {"fragments": 4, "mixing": 0.25, "delay": 1}]


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5))
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        seeded(self, 7)


Used = list[int]
Ended = tuple[dict[str, Tensor], list[Tensor], int, Used]
"""The group's weights, the outer optimizer's momenta, the round, and the samples that this worker has used."""


def train(
    worker: Worker,
    /,
    checkpoint: Path | None = None,
    epochs: int = 1,
    limit: int = 1000,
    every: int | None = None,
    ranges: bool = False,
    **options: Any,
) -> Ended:
    """Train for ``epochs``, or ``limit`` batches. Return what this worker has in the end."""
    module, data = Network(), dataset()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model = LocalSGD(module, worker, optimizer, **{"every": 4, **options})
    source: Any = (
        DataRanges(SAMPLES, worker, batch_size=BATCH, seed=3)
        if ranges
        else ShardSampler.for_worker(data, worker, seed=3, uneven="keep")
    )
    job = Job(model, optimizer, scheduler, data=source, checkpoint=checkpoint, every=every)
    loader = DataLoader(data, batch_sampler=source) if ranges else DataLoader(data, batch_size=BATCH, sampler=source)
    used: Used = []
    for numbers, inputs, targets in job.batches(loader, epochs=epochs):
        used += numbers.tolist()
        (model(inputs) - targets).square().mean().backward()
        job.step()
        limit -= 1
        if limit == 0:
            job.save()
            break
    momenta = [one["momentum_buffer"].clone() for one in model.outer.state.values()]
    return {name: one.clone() for name, one in model.weights().items()}, momenta, job.round, used


def alike(ended: list[Ended]) -> bool:
    first = ended[0]
    return all(
        same(first[0], one[0])
        and all(torch.equal(a, b) for a, b in zip(first[1], one[1], strict=True))
        and first[2] == one[2]
        for one in ended
    )


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("ranges", [False, True])
def test_a_job_uses_each_sample_once_and_members_are_alike(options: dict[str, Any], ranges: bool) -> None:
    ended = on(3, train, ranges=ranges, **options)
    assert alike(ended)
    assert sorted(number for *_, used in ended for number in used) == list(range(SAMPLES))


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_job_continues_with_another_number_of_workers(options: dict[str, Any], world: int, tmp_path: Path) -> None:
    before = on(3, train, tmp_path, limit=3, **options)
    path = Directory(tmp_path, keep=1).latest()
    assert path is not None
    saved = read(path).tree
    assert alike(before)
    assert all(torch.equal(before[0][0][name], one) for name, one in saved["model"].items())
    after = on(world, train, tmp_path, **options)
    assert alike(after)
    assert after[0][2] > before[0][2] == saved["round"]
    used = [number for ended in (before, after) for *_, used in ended for number in used]
    assert sorted(used) == list(range(SAMPLES))


def test_a_job_with_lossy_wires_continues_with_another_number_of_workers(tmp_path: Path) -> None:
    with LocalCluster(3, timeout=20.0, wire="int8") as cluster:
        before = cluster.run(train, tmp_path, limit=3, **MODES[1])
    with LocalCluster(2, timeout=20.0, wire="int8") as cluster:
        after = cluster.run(train, tmp_path, **MODES[1])
    assert alike(before)
    assert alike(after)
    assert after[0][2] > before[0][2]
    used = [number for ended in (before, after) for *_, used in ended for number in used]
    assert sorted(used) == list(range(SAMPLES))


def test_a_job_is_saved_every_few_exchanges_with_what_was_not_exchanged_yet(tmp_path: Path) -> None:
    ended = on(2, train, tmp_path, every=2, fragments=2)
    assert alike(ended)
    path = Directory(tmp_path, keep=1).latest()
    assert path is not None
    tree = read(path).tree
    assert tree["round"] >= 2
    assert tree["outer"]["round"] == tree["round"]


def test_a_job_that_continues_counts_from_the_checkpoint_until_the_next_save(tmp_path: Path) -> None:
    def work(worker: Worker) -> list[str]:
        module = Network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = LocalSGD(module, worker, optimizer, every=1)
        job = Job(model, optimizer, checkpoint=tmp_path, every=4, keep=9)
        begun = job.round
        while job.round < begun + 5:
            model(torch.ones(2, 3)).sum().backward()
            job.step()
        job.save()
        return sorted(path.stem[-2:] for path in tmp_path.iterdir() if path.stem[-2:].isdigit())

    # A save exchanges what was not exchanged yet, so its round is one more.
    assert on(1, work) == [["05", "06"]]
    assert on(1, work) == [["05", "06", "09", "12"]]


def test_a_job_continues_from_one_that_has_exchanged_gradients(tmp_path: Path) -> None:
    def synchronous(worker: Worker) -> dict[str, Tensor]:
        module = Network()
        model = DistributedDataParallel(module, worker)
        job = Job(model, torch.optim.AdamW(module.parameters(), lr=0.01), checkpoint=tmp_path)
        model(torch.ones(2, 3)).sum().backward()
        job.step()
        job.save()
        return {name: one.detach().clone() for name, one in module.named_parameters()}

    def local(worker: Worker) -> dict[str, Tensor]:
        module = Network()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model = LocalSGD(module, worker, optimizer)
        Job(model, optimizer, checkpoint=tmp_path)
        return {name: one.clone() for name, one in model.weights().items()}

    assert same(on(2, synchronous)[0], on(2, local)[0])


def test_gradients_are_clipped_by_each_worker_as_no_average_of_them_exists() -> None:
    def work(worker: Worker) -> tuple[float, float]:
        module = Network()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = LocalSGD(module, worker, optimizer)
        with pytest.raises(UsageError, match=r"clip_grad_norm=1 limits averaged.*job\.step\(before=clip\)"):
            Job(model, optimizer, clip_grad_norm=1.0)
        job, norms = Job(model, optimizer), list[float]()

        def clip() -> None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

        (100 * model(torch.ones(2, 3))).square().mean().backward()
        start = [one.detach().clone() for one in model.parameters()]
        job.step(before=clip)
        moved = [before - after for before, after in zip(start, model.parameters(), strict=True)]
        return norms[0], float(torch.cat([one.detach().flatten() for one in moved]).norm())

    for norm, moved in on(2, work):
        assert norm > 0.5
        assert moved == pytest.approx(0.5, rel=1e-3)


def test_several_models_exchange_gradients() -> None:
    def work(worker: Worker) -> None:
        modules = [Network(), Network()]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in modules]
        models = [LocalSGD(one, worker) for one in modules]
        with pytest.raises(InvalidArgumentError, match="model '0' is a LocalSGD"):
            Job(models, optimizers)  # type: ignore[arg-type]

    on(1, work)


@pytest.mark.parametrize(
    ("options", "backlog"),
    [
        (MODES[0], 0),
        pytest.param(MODES[1], 1 << 20, marks=pytest.mark.long),
        pytest.param(MODES[2], 1 << 20, marks=pytest.mark.long),
        ({**MODES[2], "balance": True}, 1 << 20),
    ],
)
def test_a_worker_that_joins_gets_the_outer_optimizer_and_the_schedule(options: dict[str, Any], backlog: int) -> None:
    seen: dict[int, dict[str, list[Tensor]]] = {}
    entered: dict[str, int] = {}
    counts: dict[str, tuple[int, ...]] = {}
    lock, rounds = threading.Lock(), 14 * options.get("fragments", 1)
    with LocalCluster(2, elastic=(1, 8), timeout=20.0, backlog=backlog) as cluster:

        def work(worker: Worker) -> int:
            name, module = worker.name, Transformer(len(entered))
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            model = LocalSGD(module, worker, optimizer, every=4, **options)
            job = Job(model, optimizer)
            entered[name] = job.entered

            def look() -> None:
                state = [*model.weights().values(), *(one["momentum_buffer"] for one in model.outer.state.values())]
                with lock:
                    seen.setdefault(job.round, {})[name] = [one.clone() for one in state]
                if job.round == 3 and worker.rank == 0:
                    cluster.add()

            model.on_boundary(look)
            step = 0
            while job.round < rounds:
                loss_of(model, *tokens(100 * step + worker.rank, 4)).backward()
                job.step()
                step += 1
            if (pace := model._averaging._pace) is not None:
                counts[name] = pace._pacing.counts
            return worker.world_size

        found = cluster.run(work)
    assert set(entered) == {"worker-0", "worker-1", "worker-2"}
    assert entered["worker-2"] >= 3
    assert found == [3, 3, 3]
    for number, states in seen.items():
        first, *others = states.values()
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)), number
    assert len(seen[rounds]) == 3
    assert len(counts) == (3 if "balance" in options else 0)
    assert not counts or (len(set(counts.values())) == 1 and len(counts["worker-2"]) == 3)


class Gate:
    """State that is loaded when an event has happened."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        assert self._event.wait(20.0)


SAVED_AFTER = 8
"""Round after which members save: at a boundary where all fragments were exchanged equally often."""


SAVES = [
    (fragments, first, how)
    for fragments, rounds in ((1, (7, 8, 9)), (4, (7, 8, 9, 11, 12)))
    for first in rounds
    for how in ("every", "told", "file", "directory")
]
"""Number of fragments, first round of a worker that joins, and what the others save for."""
AT_ONCE = ((1, 8, "every"), (1, 8, "told"), (1, 9, "every"), (4, 8, "file"), (4, 9, "directory"), (4, 11, "every"))
"""Cases that are no long tests."""


@pytest.mark.parametrize(
    ("fragments", "first", "how"),
    [pytest.param(*one, marks=() if one in AT_ONCE else pytest.mark.long) for one in SAVES],
)
def test_a_worker_that_becomes_a_member_around_a_save_takes_part_in_the_rest_of_it(
    fragments: int, first: int, how: str, tmp_path: Path
) -> None:
    """Test it where a save exchanges what is left: its first round is before that, one of these rounds, or the next."""
    entered: list[int] = []
    learners: list[Worker] = []
    holding = threading.Event()
    with LocalCluster(3, elastic=(1, 4), timeout=20.0) as cluster:

        def train_on(worker: Worker) -> tuple[int, dict[str, Tensor]] | None:
            is_founder, module, saved = not worker.joins, Transformer(worker.rank), False
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
            model = LocalSGD(module, worker, optimizer, every=4, fragments=fragments)

            def look() -> None:
                if not is_founder and not worker.observes and not entered:
                    entered.append(worker.round - 1)
                elif is_founder and worker.round == 3 and worker.rank == 0:
                    add_waiting(cluster)
                elif is_founder and worker.round == first - 1:
                    holding.set()
                    wait_until(lambda: learners[0]._session.learner.ready, "it has caught up")

            model.on_boundary(look)  # before the job does, which saves then
            if not is_founder:
                learners.append(worker)
            every = SAVED_AFTER if how == "every" else None
            job = Job(model, optimizer, state={"gate": Gate(holding)}, checkpoint=tmp_path / "all", every=every)
            try:
                while job.round < 20:
                    if how == "told" and worker.name == "worker-2" and job.round == SAVED_AFTER - 1:
                        job.stop()
                    loss_of(model, *tokens(job.round, 4)).backward()
                    job.step()
                    if how in ("file", "directory") and worker.round == SAVED_AFTER and not (worker.observes or saved):
                        saved = True
                        job.save(tmp_path / "file" if how == "file" else None)
            except SystemExit:
                return None
            return job.round, {name: one.clone() for name, one in model.weights().items()}

        found = [one for one in cluster.run(train_on) if one is not None]
    assert entered == [first]
    assert len(found) == (3 if how == "told" else 4)
    assert all(number == found[0][0] and same(weights, found[0][1]) for number, weights in found)
    path = tmp_path / "file" if how == "file" else Directory(tmp_path / "all", keep=1).latest()
    assert path is not None
    assert read(path).tree["round"] % fragments == 0


@pytest.mark.parametrize("options", MODES)
def test_a_worker_that_is_told_to_stop_saves_and_the_others_go_on(options: dict[str, Any], tmp_path: Path) -> None:
    def work(worker: Worker) -> int | dict[str, Tensor]:
        module, member = Transformer(), worker.rank
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = LocalSGD(module, worker, optimizer, every=4, **options)
        job = Job(model, optimizer, checkpoint=tmp_path)
        try:
            while job.round < 20:
                if job.round == 5 and member == 1:
                    job.stop()
                loss_of(model, *tokens(job.round, 4)).backward()
                job.step()
        except SystemExit:
            return job.round
        return {name: one.clone() for name, one in model.weights().items()}

    with LocalCluster(3, elastic=(1, 3), timeout=20.0) as cluster:
        first, stopped, last = cluster.run(work)
    assert isinstance(stopped, int)
    path = Directory(tmp_path, keep=1).latest()
    assert path is not None
    assert read(path).tree["round"] == stopped
    assert isinstance(first, dict)
    assert isinstance(last, dict)
    assert same(first, last)
