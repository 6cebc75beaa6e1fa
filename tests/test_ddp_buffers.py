"""DistributedDataParallel: buffers are alike after each round, and only what has changed travels, once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserver import DistributedDataParallel, LocalCluster
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.worker.client import Worker
from tests.cluster import AMONG_MEMBERS, PATIENCE, Gather, together
from tests.models import Convolutional, images, loss_of
from tests.replicas import on, same
from tests.seeded import seeded

torch.set_num_threads(1)

MASK_BYTES = 1 << 20
STEPS = 3


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


class Masked(nn.Module):
    """A layer with few parameters and a large constant table, as older transformers have in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool).tril(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs) * self.mask[:4, 0]
        return result


class Counting(nn.Module):
    """Buffers that only change when a test changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table: Tensor
        self.count: Tensor
        self.phase: Tensor
        self.register_buffer("table", torch.zeros(100_000))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs)
        return result


def step(model: nn.Module, inputs: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(inputs).square().sum().backward()


def state(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.module.named_buffers()}


def bytes_in(cluster: LocalCluster) -> int:
    """Return the bytes that workers have contributed so far."""
    groups: Any = cluster.snapshot()["groups"]
    (group,) = groups.values() if isinstance(groups, dict) else groups
    return int(group["bytes_in"])


def spent(world: int, make: type[nn.Module], inputs: Tensor) -> tuple[int, int]:
    """Return the bytes that all workers contribute to a round, and those of their gradients."""
    marks: list[int] = []
    sizes: list[int] = []

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(make(), worker)
        for number in range(STEPS + 1):
            worker.barrier()
            if worker.rank == 0 and number in (0, STEPS):
                marks.append(bytes_in(cluster))
            worker.barrier()
            if number < STEPS:
                step(model, inputs + worker.rank)
        sizes.append(sum(4 * parameter.numel() for parameter in model.parameters()))

    with LocalCluster(world, timeout=PATIENCE) as cluster:
        cluster.run(work)
    return (marks[1] - marks[0]) // STEPS, world * sizes[0]


def test_a_constant_table_does_not_travel() -> None:
    a_round, gradients = spent(4, Masked, torch.ones(2, 4))

    assert gradients == 4 * 80
    assert a_round <= gradients + 4 * 8, "and a number of each worker"


def test_one_member_s_statistics_travel() -> None:
    a_round, gradients = spent(4, Convolutional, images(0, 4)[0])

    assert gradients + 4 * (4 + 4) + 8 <= a_round <= gradients + 4 * (4 + 4) + 8 + 4 * 8


@pytest.mark.parametrize("in_place", [True, False])
def test_what_the_lowest_rank_changes_reaches_all_and_what_others_change_is_undone(
    gather: Gather, in_place: bool
) -> None:
    workers = gather(3)

    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(seeded(worker.rank, Counting), worker)
        module: Any = model.module
        history = []
        for number in range(4):
            if number == 1 and worker.rank == 0:  # also by ways that torch does not count as a change
                module.table.data[7] = 1.0
                module.phase.data[0] = 1j
            if number == 2 and worker.rank > 0:
                if in_place:
                    module.table.add_(worker.rank)
                    module.count.add_(worker.rank)
                else:
                    module.table = torch.full((100_000,), 5.0 + worker.rank)
                    module.count = torch.tensor(worker.rank)
            if number == 3:
                module.count += 1
            step(model, torch.ones(1, 2))
            history.append(state(model))
        return history

    for zero, one, two in zip(*together(workers, work), strict=True):
        assert same(zero, one)
        assert same(zero, two)
        last = zero
    assert (last["table"].sum().item(), last["table"][7].item()) == (1.0, 1.0)
    assert last["phase"].tolist() == [1j, 0, 0]
    assert last["count"].item() == 1


def test_each_change_is_sent_by_the_lowest_rank_that_has_a_batch() -> None:
    """Test one, two and three batches at ranks 0, 1 and 2: in the end the statistics are those of rank 2."""

    def work(worker: Worker) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        model = DistributedDataParallel(Convolutional(), worker)
        own: dict[str, Tensor] = {}
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join([optimizer, lambda: seen.append(state(model))]):
            for number in range(worker.rank + 1):
                optimizer.zero_grad()
                loss = loss_of(model, *images(10 * number + worker.rank, 4))
                own = state(model)
                loss.backward()
                optimizer.step()
                seen.append(state(model))
        return own, seen

    results = on(3, work)
    for number, rank in enumerate((0, 1, 2)):
        own, _ = results[rank]
        assert all(same(seen[number], own) for _, seen in results), number


def test_a_member_that_dies_before_it_has_sent_its_buffers_leaves_them_as_they_were() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(), worker)
        step(model, images(0, 4)[0])
        before = state(model)
        if worker.rank == 0:
            rounds = model._rounds
            # All know then that its buffers are those to have.
            rounds._push_buffers = lambda: rounds._sends_buffers() and cluster.kill(0)  # type: ignore[assignment, func-returns-value, method-assign]
        inputs = images(1 + worker.rank, 4)[0]
        if worker.rank == 0:
            with pytest.raises(Exception, match="closed|killed|lost"):
                step(model, inputs)
            return []
        step(model, inputs)
        between = state(model)
        step(model, inputs)
        return [before, between, state(model)]

    with LocalCluster(3, elastic=(1, 3), timeout=PATIENCE) as cluster:
        _, first, second = cluster.run(work)
    for mine, theirs in zip(first, second, strict=True):
        assert same(mine, theirs)
    assert same(first[0], first[1])
    assert not same(first[1], first[2])


def test_in_a_group_that_does_not_wait_for_all_buffers_are_alike_too() -> None:
    """Test a rank 0 that comes too late: what it changed alone, and sent, does not count for itself either."""
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Counting(), worker)
        module: Any = model.module
        history = []
        for number in range(4):
            if worker.rank == 0:
                assert others_are_ahead.wait(PATIENCE)
                module.table += 1.0
            if worker.rank == 1 and number == 3:
                module.count += 9
            step(model, torch.ones(1, 2))
            history.append(state(model))
            if worker.rank == 1 and number == 2:
                others_are_ahead.set()
        worker.barrier()
        module.phase += 1
        step(model, torch.ones(1, 2))
        return [*history, state(model)]

    with LocalCluster(4, elastic=(1, 4), timeout=PATIENCE, quorum=3, grace=0.0) as cluster:
        results = cluster.run(work)
    for there in results[1:]:
        assert all(same(mine, theirs) for mine, theirs in zip(results[0], there, strict=True))
    assert results[0][2]["table"].sum().item() == 0.0
    assert results[0][-1]["phase"].tolist() == [1, 1, 1]


def test_ignored_buffers_and_parameters_are_left_alone() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], Tensor, Tensor | None, list[str]]:
        module: Any = Counting()
        module.own = nn.Parameter(torch.full((2,), float(worker.rank)))
        module._ddp_params_and_buffers_to_ignore = ["own"]  # as torch's wrapper reads it
        module.table.fill_(worker.rank)
        model = DistributedDataParallel(module, worker, buffers_to_ignore=["table"])
        module.table += 1
        module.count += 1
        (model(torch.ones(1, 2)).sum() + module.own.sum() * (1 + worker.rank)).backward()
        names = [component.name for bucket in model.plan.buckets for component in bucket.components]
        return state(model), module.own.detach(), module.own.grad, names

    for rank, (buffers, own, gradient, names) in enumerate(on(2, work)):
        assert buffers["table"].unique().tolist() == [1 + rank]
        assert buffers["count"].item() == 1
        assert own.tolist() == [rank, rank]
        assert gradient is not None
        assert gradient.tolist() == [1 + rank, 1 + rank]
        assert "table" not in names
        assert "own" not in names
        assert "count" in names


def test_a_buffer_to_ignore_must_exist() -> None:
    def work(worker: Worker) -> None:
        DistributedDataParallel(Counting(), worker, buffers_to_ignore=["tables"])

    with pytest.raises(InvalidArgumentError, match=r"buffers_to_ignore names 'tables', .* its buffers are 'table', "):
        on(1, work)
