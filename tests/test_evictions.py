"""Workers that are far off and are evicted from real trainings: the others go on, and each sample counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradserver import DistributedDataParallel, LocalCluster, LocalSGD, OutlierError, Worker, daemon
from gradserver.cli import main
from gradserver.engine.control.outliers import EVERY, FEWEST
from gradserver.engine.records import Round
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import Entry, scan
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.messages import Welcome
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.ranges import Ranges
from gradserver.worker.transport.farewell import reason_of_group
from tests.cluster import Daemon, Program, joined, together
from tests.eviction_training import BAD, BATCH, LENGTH, WORLD, loss_of, loss_with, train
from tests.replicas import same
from tests.test_modes import Replica

torch.set_num_threads(1)
PROGRAM = Path(__file__).with_name("eviction_training.py")


def evicted_or(worker: Worker, work: Any) -> Any:
    """Return what ``work()`` returns, or None at the worker that is off, which has to be evicted."""
    if worker.rank != BAD:
        return work()
    with pytest.raises(OutlierError, match="the others go on without it"):
        work()
    return None


def check_used_once(taken: list[list[list[int]]]) -> None:
    """Check that each sample was used once: what the evicted worker took last counted, or was handed out again."""
    others = Counter(index for rank, found in enumerate(taken) if rank != BAD for batch in found for index in batch)
    assert max(others.values()) == 1
    rest = set(range(LENGTH)) - set(others)
    assert len(taken[BAD]) <= FEWEST + EVERY + 2
    for place, batch in enumerate(taken[BAD]):
        counted = rest.intersection(batch)
        assert counted == set(batch) or (not counted and place >= len(taken[BAD]) - 2)
        rest -= counted
    assert not rest


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({"audit": "0.5"}, {"mean": "median"}, {"wire": "bf16"})
        ),
    ],
    ids=str,
)
def test_a_worker_with_a_scaled_loss_is_evicted_and_training_goes_on(options: dict[str, Any]) -> None:
    taken: list[list[list[int]]] = [[] for _ in range(WORLD)]

    def work(worker: Worker) -> Any:
        factor = 10.0 if worker.rank == BAD else 1.0
        return evicted_or(worker, partial(train, worker, factor, taken[worker.rank]))

    with LocalCluster(WORLD, elastic=(3, WORLD), outliers="leave-out", **options) as cluster:
        results = cluster.run(work)
        group: dict[str, Any] = cluster.snapshot()["groups"]["local"]  # type: ignore[index]
    with LocalCluster(WORLD) as cluster:
        clean = cluster.run(train, 1.0, [])
    others = [weights for weights in results if weights is not None]
    assert len(others) == WORLD - 1
    assert all(same(weights, others[0]) for weights in others)
    assert list(group["outliers"]["evicted"]) == ["worker-2"]
    if "audit" not in options:  # witnesses take samples that count at others
        check_used_once(taken)
    assert loss_with(others[0]) < 1.5 * loss_with(clean[0])


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_processes_go_on_without_an_evicted_one_and_the_ledger_has_each_sample_once(
    shards: int, tmp_path: Path
) -> None:
    options = ("--workers", f"2:{WORLD}", "--outliers", "leave-out", "--shards", str(shards))
    with Daemon(*options, "--state-dir", str(tmp_path)) as coordinator, ExitStack() as stack:
        words = [(str(PROGRAM), coordinator.url, str(rank)) for rank in range(WORLD)]
        workers = [stack.enter_context(Program(*one, loaded="torch")) for one in words]
        assert [worker.end() for worker in workers] == [int(rank == BAD) for rank in range(WORLD)]
        said = {tuple(worker.output()) for rank, worker in enumerate(workers) if rank != BAD}
        assert len(said) == 1, "the others end with the same weights"
        assert float(said.pop()[0].removeprefix("loss ")) < 0.02, "0.01 is the noise"
        *_, last = workers[BAD].complaints()
    assert "OutlierError: round" in last
    assert "the others go on without it (--outliers leave-out). Look at that worker's GPU" in last
    used = Counter(one for committed in _committed(tmp_path) for start, stop in committed for one in range(start, stop))
    assert used == Counter(range(LENGTH))


def test_an_evicted_process_that_lost_its_connection_hears_why_when_it_asks() -> None:
    def work(worker: Worker) -> Welcome:
        welcome: Welcome = worker._session.membership
        worker.agree(simple_plan([("b", 500)], FLOAT32))
        chance = np.random.default_rng(worker.rank)

        def loop() -> None:
            while worker.world_size == WORLD:
                values = (-10 if worker.rank == BAD else 1) * (1 + chance.standard_normal(500))
                worker.push(0, values.astype(np.float32))
                worker.finish_round()

        evicted_or(worker, loop)
        return welcome

    options = ("--workers", f"2:{WORLD}", "--outliers", "leave-out")
    with Daemon(*options) as coordinator, joined(coordinator.url, WORLD, channel="tcp") as workers:
        welcomes = together(workers, work)
        error = reason_of_group(coordinator.url, welcomes[BAD])
    assert isinstance(error, OutlierError)
    assert (error.worker, error.rank) == ("w2", 2)
    assert "the others go on without it" in error.message


def _committed(path: Path) -> Iterator[Ranges]:
    """Yield what rounds have used up, as the ledger has it."""
    for _, file in files_of(path):
        for entry in scan(file.read_bytes()):
            record = entry.read().record if isinstance(entry, Entry) else None
            if isinstance(record, Round):
                yield from (one.ranges for one in record.used_up)


def test_workers_with_unequal_numbers_of_batches_come_to_the_end_without_an_evicted_one() -> None:
    def work(worker: Worker) -> Any:
        torch.manual_seed(0)
        module, factor, count = nn.Linear(20, 3), 10.0 if worker.rank == BAD else 1.0, 48 + 3 * worker.rank
        model = DistributedDataParallel(module, worker)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

        def loop() -> dict[str, torch.Tensor]:
            with model.join(optimizer):
                for number in range(count):
                    optimizer.zero_grad()
                    (factor * loss_of(model, slice(number * BATCH, (number + 1) * BATCH))).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            return {name: value.clone() for name, value in module.state_dict().items()}

        return evicted_or(worker, loop)

    with LocalCluster(WORLD, elastic=(2, WORLD), outliers="leave-out") as cluster:
        results = cluster.run(work)
        group: dict[str, Any] = cluster.snapshot()["groups"]["local"]  # type: ignore[index]
    others = [weights for weights in results if weights is not None]
    assert len(others) == WORLD - 1
    assert all(same(weights, others[0]) for weights in others)
    assert group["round"] == 48 + 3 * (WORLD - 1) + 1, "in the last round no worker has a batch"


@pytest.mark.parametrize(
    "options",
    [{"mode": "async", "quorum": 3}, {"mode": "bounded", "staleness": 2, "quorum": 3}],  # two of a round tell less
    ids=lambda options: options["mode"],
)
def test_updates_go_on_in_groups_that_do_not_wait_for_all(options: dict[str, Any]) -> None:
    def work(worker: Worker) -> Any:
        replica = Replica(worker)

        def loop() -> dict[int, bytes]:
            while worker.world_size == WORLD or len(replica.staleness) < 10:
                # The sign changes, so that weights stay in range until the evidence is there.
                off = 100.0 * (-1) ** len(replica.staleness) if worker.rank == BAD else 1.0
                replica.contribute([np.float32(off) * (1 + gradient) for gradient in replica.compute()])
            replica.end()
            return replica.after

        return evicted_or(worker, loop)

    with LocalCluster(WORLD, elastic=(2, WORLD), outliers="leave-out", timeout=20.0, **options) as cluster:
        results = cluster.run(work)
    others = [after for after in results if after is not None]
    assert len(others) == WORLD - 1
    assert all(after == others[0] for after in others)


@pytest.mark.parametrize("fragments", [1, 2])
def test_workers_that_average_parameters_go_on_without_an_evicted_one(fragments: int) -> None:
    def work(worker: Worker) -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2 if worker.rank == BAD else 0.002)
        model = LocalSGD(module, worker, optimizer, every=2, fragments=fragments)

        def loop() -> dict[str, torch.Tensor]:
            for number in range(120 if fragments == 2 else 240):  # a verdict takes 32 rounds of evidence
                optimizer.zero_grad()
                start = (number * WORLD + worker.rank) * BATCH % LENGTH
                loss_of(model, slice(start, start + BATCH)).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            return {name: value.clone() for name, value in model.weights().items()}

        return evicted_or(worker, loop)

    with LocalCluster(WORLD, elastic=(2, WORLD), outliers="leave-out", timeout=20.0) as cluster:
        results = cluster.run(work)
    others = [weights for weights in results if weights is not None]
    assert len(others) == WORLD - 1
    assert all(same(weights, others[0]) for weights in others)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--workers 4", "evicts a worker, and the group needs all its 4 workers: make it elastic"),
        ("", "evicts a worker, and a group needs all its workers: make it elastic"),
        ("--workers a=2:4 --workers b=3", "group 'b': outliers is 'leave-out'"),
        ("--workers 2:4 --plane direct", "--plane direct is not possible with --outliers leave-out"),
        ("--workers 2:4 --plane hierarchical", "--plane hierarchical is not possible with --outliers leave-out"),
    ],
)
def test_what_can_never_act_is_refused_at_the_start(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "serve", lambda *_, **__: pytest.fail("it served"))
    assert main(["serve", "--outliers", "leave-out", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--workers 2:4", "--workers a=2:4", "--workers a=2:4 --groups any"])
def test_what_can_act_is_not_refused(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "serve", lambda *_, **__: 0)
    assert main(["serve", "--outliers", "leave-out", *arguments.split()]) == 0


def test_a_group_that_needs_all_its_workers_evicts_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"needs all its 4 workers: make it elastic"):
        LocalCluster(WORLD, outliers="leave-out")
