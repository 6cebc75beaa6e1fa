"""torch's own DistributedDataParallel, with gradients that are exchanged as rounds of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradserver.torch
from gradserver import (
    LocalCluster,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.torch import private
from gradserver.torch.rounds import Rounds, hook
from gradserver.worker.client import Worker
from tests.models import state_of
from tests.replicas import same

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Make a process group of one member, over which torch's wrapper has nothing to exchange."""
    dist.init_process_group("gloo", store=private.c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(width: int = 16) -> nn.Module:
    generator, module = torch.Generator().manual_seed(3), nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def inputs(step: int, rank: int, width: int = 16) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(worker: Worker, module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Rounds]:
    """Wrap with buckets of 1 KB: there are several, and other ones in the second step."""
    model, rounds = DistributedDataParallel(module, bucket_cap_mb=0.001, **options), Rounds(worker, module)
    model.register_comm_hook(rounds, hook)
    return model, rounds


def train(worker: Worker, /, steps: int = STEPS, **options: Any) -> dict[str, Tensor]:
    model, _ = wrapped(worker, layers(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step, worker.rank)).square().mean().backward()
        optimizer.step()
    return state_of(model.module)


def expected(world: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Train one module with the mean of the gradients of all ranks."""
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            module(inputs(step, rank)).square().mean().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= world
        optimizer.step()
    return state_of(module)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_weights_are_those_of_the_mean_of_all_gradients(options: dict[str, bool]) -> None:
    with LocalCluster(2) as cluster:
        first, second = cluster.run(train, **options)
    assert same(first, second)
    assert same(first, expected(2))


def test_buckets_are_pushed_while_backward_runs_once_torch_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> list[int]:
            module = layers()
            model, rounds = wrapped(worker, module)
            push = worker.push

            def noting(bucket: int, data: Tensor, **options: Any) -> Any:
                events.append(("push", worker.round))
                return push(bucket, data, **options)

            monkeypatch.setattr(worker, "push", noting)
            first: Any = next(module.parameters())  # its gradient is the last of a backward
            first.register_hook(lambda _: events.append(("backward ends", worker.round)))
            for step in range(5):
                model(inputs(step, 0)).sum().backward()
            return [len(rounds._agreed)]

        ((buckets,),) = cluster.run(run)
    assert buckets > 2
    for number, before in ((0, 0), (1, 0), (2, 0), (3, buckets - 1), (4, buckets - 1)):
        of_round = [what for what, one in events if one == number]
        assert of_round.index("backward ends") == before, number


def test_gradients_accumulate_without_a_round_and_weights_of_workers_count() -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> tuple[int, Tensor]:
            model, rounds = wrapped(worker, nn.Linear(2, 1, bias=False))
            rounds.set_weight(1.0 + 2 * worker.rank)
            for _ in range(2):
                model.zero_grad()
                with model.no_sync():
                    model(torch.full((1, 2), 1.0)).sum().backward()
                model(torch.full((1, 2), float(worker.rank))).sum().backward()
            (parameter,) = model.parameters()
            assert parameter.grad is not None
            return worker.round, parameter.grad

        for rounds, gradient in cluster.run(run):
            assert rounds == 2
            assert torch.equal(gradient, torch.full((1, 2), (1 * 1.0 + 3 * 2.0) / 4))


def test_two_models_of_a_worker_have_rounds_of_their_own() -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            models = [wrapped(worker, layers(width))[0] for width in (8, 16)]
            for step in range(STEPS):
                for width, model in zip((8, 16), models, strict=True):
                    model.zero_grad()
                    model(inputs(step, worker.rank, width)).square().mean().backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            assert parameter.grad is not None
                            parameter.sub_(0.1 * parameter.grad)
            return state_of(models[0]), state_of(models[1])

        first, second = cluster.run(run)
    assert same(first[0], second[0])
    assert same(first[1], second[1])


def test_others_go_on_when_a_worker_of_an_elastic_group_is_lost() -> None:
    with LocalCluster(3, elastic=(2, 3)) as cluster:

        def run(worker: Worker) -> tuple[int, dict[str, Tensor]] | None:
            model, _ = wrapped(worker, layers())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2 * STEPS):
                if step == STEPS and worker.name == "worker-1":
                    cluster.kill(worker.rank)
                    return None
                optimizer.zero_grad()
                model(inputs(step, worker.rank)).square().mean().backward()
                optimizer.step()
            return worker.world_size, state_of(model)

        (size, weights), (other_size, others) = [one for one in cluster.run(run) if one is not None]
    assert size == other_size == 2
    assert same(weights, others)


def test_an_error_of_a_round_is_raised_by_backward_with_the_name_of_a_parameter() -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> str:
            model, _ = wrapped(worker, layers())
            for step in range(5):
                images = inputs(step, worker.rank)
                if step == 4 and worker.rank == 1:
                    images[:] = torch.nan
                try:
                    model(images).sum().backward()
                except NonFiniteError as error:
                    return error.message
            return "no error"

        for message in cluster.run(run):
            assert "worker-1" in message
            assert ".weight" in message or ".bias" in message, message


def test_a_round_that_none_applies_has_zeros() -> None:
    with LocalCluster(2, nonfinite="skip") as cluster:

        def run(worker: Worker) -> list[tuple[bool, bool]]:
            model, rounds = wrapped(worker, layers())
            found = []
            for step in range(4):
                model.zero_grad()
                images = inputs(step, worker.rank)
                if step == 2 and worker.rank == 1:
                    images[:] = torch.inf
                model(images).sum().backward()
                gradients = [parameter.grad for parameter in model.parameters()]
                found.append((rounds.skipped, all(one is not None and not one.any() for one in gradients)))
            return found

        assert cluster.run(run) == [[(False, False), (False, False), (True, True), (False, False)]] * 2


def test_other_modules_are_an_error_that_names_the_first_difference() -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> str:
            model, _ = wrapped(worker, nn.Linear(3, 1 + worker.rank))
            with pytest.raises((PlanMismatchError, WorkerLeftError)) as caught:  # the plan of the lowest rank stands
                model(torch.ones(1, 3)).sum().backward()
            return caught.value.message

        kept, refused = cluster.run(run)
    assert "'worker-1' (rank 1) left" in kept
    assert "bias (1, float32, mean)" in refused or "weight (1×3, float32, mean)" in refused, refused


def test_one_state_for_two_models_is_an_error_at_the_worker_that_has_it() -> None:
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> None:
            model, rounds = wrapped(worker, layers())
            for step in range(4):
                model(inputs(step, 0)).sum().backward()
            other = DistributedDataParallel(nn.Linear(16, 16))
            other.register_comm_hook(rounds, hook)
            with pytest.raises(OutOfStepError, match="One state of the hook is of one model"):
                other(inputs(0, 0)).sum().backward()

        cluster.run(run)


def test_another_state_and_a_mode_with_several_updates_are_refused() -> None:
    with LocalCluster(1, mode="async") as cluster:

        def run(worker: Worker) -> None:
            model, _ = wrapped(worker, layers())
            with pytest.raises(UsageError, match="--mode async"):
                model(inputs(0, 0)).sum().backward()
            other = DistributedDataParallel(layers())
            other.register_comm_hook(worker, hook)
            with pytest.raises(UsageError, match="must be gradserver.torch.Rounds()"):
                other(inputs(0, 0)).sum().backward()

        cluster.run(run)


def test_a_worker_that_is_needed_and_lost_is_named_by_backward() -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> str:
            model, _ = wrapped(worker, layers())
            for step in range(5):
                if step == 4 and worker.rank == 1:
                    cluster.kill(1)
                    return ""
                try:
                    model(inputs(step, worker.rank)).sum().backward()
                except WorkerLostError as error:
                    return error.message
            return "no error"

        assert "worker-1" in cluster.run(run)[0]


def test_the_package_has_the_hook_itself_under_its_name() -> None:
    assert gradserver.torch.Rounds is Rounds
    assert gradserver.torch.hook is hook
