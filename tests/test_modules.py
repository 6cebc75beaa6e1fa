"""Several modules on one worker: each has rounds of its own, matched and kept apart from the others'."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradserver import LocalCluster, OutOfStepError, PlanMismatchError
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.blocks import GradientExchange
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import AMONG_MEMBERS, Daemon, Gather, joined, together
from tests.replicas import alone, on

WIDE = 20_000
"""Parameters of a module that travels with a loss."""


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


class Scale(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient_of(module: nn.Module) -> Tensor:
    gradient = next(module.parameters()).grad
    assert gradient is not None
    return gradient.clone()


def wrapped(worker: Worker, *sizes: int, **options: Any) -> list[DistributedDataParallel]:
    return [DistributedDataParallel(Scale(size), worker, **options) for size in sizes]


def test_twins_have_rounds_of_their_own() -> None:
    def work(worker: Worker) -> list[list[float]]:
        one, two = wrapped(worker, 2, 2)
        found = []
        for step in range(3):
            for number, model in enumerate((one, two)):
                model.zero_grad()
                model(torch.full((2,), 10.0 * step + number + worker.rank)).backward()
            found.append([gradient_of(one)[0].item(), gradient_of(two)[0].item()])
        assert worker.round == 6
        return found

    assert on(2, work) == [[[0.5, 1.5], [10.5, 11.5], [20.5, 21.5]]] * 2


def test_what_a_lossy_wire_keeps_back_is_each_twin_s_own() -> None:
    """Test the small twin without the large one's residual, which was 9.8 times as large as its own gradient."""

    def noise(rank: int, step: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
        return torch.randn(WIDE, generator=generator) * (1000.0, 1.0)[number]

    def work(worker: Worker) -> float:
        twins, worst = wrapped(worker, WIDE, WIDE), 0.0
        for step in range(3):
            for number, model in enumerate(twins):
                model.zero_grad()
                model(noise(worker.rank, step, number)).backward()
            exact = (noise(0, step, 1) + noise(1, step, 1)) / 2
            worst = max(worst, float((gradient_of(twins[1]) - exact).norm() / exact.norm()))
        return worst

    with LocalCluster(2, wire="int8", timeout=10.0) as cluster:
        assert max(cluster.run(work)) < 0.03


def test_one_loss_over_both() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        one, two = wrapped(worker, 2, 3)
        own = 1.0 + worker.rank
        (two(torch.full((3,), 10 * own)) + one(torch.full((2,), own))).backward()
        assert worker.round == 2
        return gradient_of(one), gradient_of(two)

    for first, second in on(2, work):
        assert first.tolist() == [1.5] * 2
        assert second.tolist() == [15.0] * 3


def test_workers_that_train_in_another_order_are_told_at_once() -> None:
    def work(worker: Worker) -> str:
        models = wrapped(worker, 2, 2)
        with pytest.raises(OutOfStepError) as caught:
            models[worker.rank](torch.ones(2)).backward()
        return caught.value.message

    for message in on(2, work):
        assert message == (
            "round 0 exchanges module 1 at 'worker-0' (rank 0) and module 2 at 'worker-1' (rank 1): all workers must "
            "train their modules in the same order"
        )


# ── training as people do it ──────────────────────────────────────────────────────────────────────────


class Gan(nn.Module):
    """A generator and a discriminator, and the step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: nn.Module = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.critic: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def train_on(self, rows: slice, steps: int = 4) -> list[Tensor]:
        """Return its parameters when it was trained on these rows of each batch."""
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (self.generator, self.critic)]
        for step in range(steps):
            chance = torch.Generator().manual_seed(step)
            real, noise = torch.randn(8, 4, generator=chance)[rows], torch.randn(8, 3, generator=chance)[rows]
            optimizers[1].zero_grad()
            (self.critic(self.generator(noise).detach()).square() + (self.critic(real) - 1).square()).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (self.critic(self.generator(noise)) - 1).square().mean().backward()
            optimizers[0].step()
        return [parameter.detach().clone() for parameter in self.parameters()]


with torch.random.fork_rng():
    torch.manual_seed(1)
    GAN = Gan()


def train_gan(worker: Worker, **options: Any) -> list[Tensor]:
    gan, steps = deepcopy(GAN), 4
    gan.generator = DistributedDataParallel(gan.generator, worker, **options)
    gan.critic = DistributedDataParallel(gan.critic, worker, **options)
    found = gan.train_on(slice(worker.rank, None, worker.world_size))
    assert worker.round == 3 * steps  # in its own step the generator's gradient comes through the critic
    return found


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_gan_trains_as_in_one_process(gather: Gather) -> None:
    first, second = together(gather(2), lambda worker: train_gan(worker))
    assert_alike(first, second)
    for mine, expected in zip(first, deepcopy(GAN).train_on(slice(None)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"delay_all_reduce": True}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-4}],
    ids=lambda options: "-".join(options),
)
def test_a_gan_trains_with_all_options(options: dict[str, Any]) -> None:
    found = on(2, train_gan, **options)
    assert_alike(*found)
    for mine, expected in zip(found[0], deepcopy(GAN).train_on(slice(None)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_a_gan_over_two_data_shards() -> None:
    with Daemon("--workers", "2", "--shards", "2") as daemon, joined(daemon.url, 2, channel="tcp") as workers:
        assert_alike(*together(workers, lambda worker: train_gan(worker)))


def test_twin_critics_and_their_teachers() -> None:
    """Test any loss: each module has the mean of its own gradients."""

    def work(worker: Worker) -> list[float]:
        one, two, actor = wrapped(worker, 3, 3, 3)
        x = torch.full((3,), 1.0 + worker.rank)
        found = []
        for _ in range(3):
            for model in (one, two, actor):
                model.zero_grad()
            (2 * one(x) + 3 * two(x)).backward()
            found += [gradient_of(one)[0].item(), gradient_of(two)[0].item()]
            (5 * actor(x)).backward()
            found.append(gradient_of(actor)[0].item())
            with torch.no_grad():
                one(x)
        assert worker.round == 9
        return found

    assert on(2, work) == [[3.0, 4.5, 7.5] * 3] * 2


def test_accumulation_concerns_the_module_that_accumulates() -> None:
    def work(worker: Worker) -> list[float]:
        one, two = wrapped(worker, 1, 1)
        x = torch.full((1,), 1.0 + worker.rank)
        with one.no_sync():
            (one(x) + two(x)).backward()
        (one(x) + two(x)).backward()
        return [gradient_of(one).item(), gradient_of(two).item()]

    # of the second one what the first backward has left is the mean already
    assert on(2, work) == [[3.0, 3.0]] * 2


def test_the_order_does_not_depend_on_what_backward_reaches_first() -> None:
    def work(worker: Worker) -> list[list[float]]:
        models = wrapped(worker, 2, 2, 2)
        for model in models if worker.rank else reversed(models):
            model.zero_grad()
        losses = [model(torch.full((2,), number + 1.0)) for number, model in enumerate(models)]
        (sum(losses) if worker.rank else sum(reversed(losses))).backward()
        return [gradient_of(model).tolist() for model in models]

    assert on(2, work) == [[[1.0] * 2, [2.0] * 2, [3.0] * 2]] * 2


def test_a_module_called_past_its_wrapper_takes_part_at_the_end() -> None:
    def work(worker: Worker) -> list[float]:
        one, two = wrapped(worker, 1, 1)
        (one.module(torch.ones(1)) + two(torch.ones(1))).backward()
        return [gradient_of(one).item(), gradient_of(two).item()]

    assert on(2, work) == [[1.0, 1.0]] * 2


def test_an_exchange_beside_a_wrapped_module() -> None:
    def work(worker: Worker) -> list[float]:
        (model,) = wrapped(worker, 2)
        exchange = GradientExchange(worker, 1, (2,))
        blocks = np.zeros(2, np.float32)
        for step in range(2):
            model.zero_grad()
            model(torch.full((2,), float(worker.rank))).backward()
            blocks[:] = 10 * worker.rank
            exchange.push_block(step, 0, blocks)
            exchange.finish()
        assert worker.round == 4
        return [gradient_of(model)[0].item(), float(blocks[0])]

    assert on(2, work) == [[0.5, 5.0]] * 2


# ── agreements ────────────────────────────────────────────────────────────────────────────────────────


def test_a_module_that_comes_later_leaves_the_others_what_they_have() -> None:
    """Test that int8's residual of the first one is not forgotten: over time no error is left."""

    def work(worker: Worker) -> float:
        total = torch.zeros(WIDE)
        (model,) = wrapped(worker, WIDE)
        later = []
        x = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
        for step in range(40):
            if step % 10 == 5:
                later += wrapped(worker, WIDE)
            model.zero_grad()
            model(x).backward()
            total += gradient_of(model)
        assert worker.plan is not None
        assert len(worker.plan.each) == 5
        return float((total / 40 - x).norm() / x.norm())

    with LocalCluster(2, wire="int8", timeout=10.0) as cluster:
        assert max(cluster.run(work)) < 5e-4  # 0.007 in one round


def test_modules_that_are_gone_make_room_for_others() -> None:
    def work(worker: Worker) -> int:
        (kept,) = wrapped(worker, 3)
        for number in range(25):
            model = DistributedDataParallel(nn.Sequential(Scale(2), nn.Linear(2, number % 3 + 1)), worker)
            model.module[1](model.module[0](torch.ones(2)).expand(2)).sum().backward()  # type: ignore[index]
            assert worker.plan is not None
            assert len(worker.plan.each) <= 3
        kept(torch.full((3,), float(worker.rank))).backward()
        assert gradient_of(kept).tolist() == [0.5] * 3
        assert worker.plan is not None
        return len(worker.plan.buckets)

    assert max(on(2, work)) <= 9


def test_a_module_that_one_worker_keeps_stays_for_all() -> None:
    def work(worker: Worker) -> int:
        models = wrapped(worker, 2, 2)
        if worker.rank == 0:
            del models[0]
        gc.collect()
        models += wrapped(worker, 2)
        models[-1](torch.full((2,), float(worker.rank))).backward()
        assert gradient_of(models[-1]).tolist() == [0.5] * 2
        assert worker.plan is not None
        return len(worker.plan.each)

    assert on(2, work) == [3, 3]


def test_one_worker_has_a_module_more() -> None:
    def work(worker: Worker) -> None:
        wrapped(worker, 2)
        if worker.rank:
            worker.agree(simple_plan([("b0", 3)], FLOAT32))
        else:
            wrapped(worker, 3)

    with pytest.raises(PlanMismatchError, match="plans of group 'local' differ"):
        on(2, work)


def test_the_plan_says_what_shares_it() -> None:
    def work(worker: Worker) -> str:
        models = wrapped(worker, 2, 5)
        assert worker.plan is not None
        assert [model.plan.nbytes for model in models] == [8, 20]
        return worker.plan.size

    assert alone(work) == "2 buckets of 2 modules, 28 bytes"


def test_a_round_of_two_modules_at_once_is_refused() -> None:
    def work(worker: Worker) -> None:
        plan = simple_plan([("b0", 2)], FLOAT32)
        one, two = worker.agree_beside(plan), worker.agree_beside(plan)
        worker.push(one.first, np.zeros(2, np.float32))
        with pytest.raises(OutOfStepError, match="'b0' is another module's than those that were pushed in round 0"):
            worker.push(two.first, np.zeros(2, np.float32))
        worker.finish_round()

    alone(work)


def test_a_round_of_one_module_is_not_finished_for_another() -> None:
    def work(worker: Worker) -> None:
        plan = simple_plan([("b0", 2)], FLOAT32)
        one, two = worker.agree_beside(plan), worker.agree_beside(plan)
        worker.push(one.first, np.zeros(2, np.float32))
        with pytest.raises(
            OutOfStepError, match=r"round 0 cannot be finished: these buckets were not pushed: \['b0'\]"
        ):
            two.finish(None)
        one.finish(None)
        assert worker.round == 1

    alone(work)


# ── elastic groups ────────────────────────────────────────────────────────────────────────────────────


def test_the_others_go_on_when_a_worker_dies_in_a_round_of_two_modules() -> None:
    def work(worker: Worker) -> list[list[float]]:
        one, two = wrapped(worker, 2, 2)
        found = []
        for step in range(3):
            for model in (one, two):
                model.zero_grad()
            if step == 1 and worker.rank == 2:
                one(torch.full((2,), 9.0)).backward()
                cluster.kill(2)
            x = torch.full((2,), 1.0 + worker.rank)
            if step == 1:
                one(x).backward()
                (two(x) * 2).backward()
            else:
                (one(x) + two(x) * 2).backward()
            found.append([gradient_of(one)[0].item(), gradient_of(two)[0].item()])
        return found

    with LocalCluster(3, elastic=(1, 3), timeout=10.0) as cluster:
        first, second, *_ = cluster.run(work)
    assert first == second == [[2.0, 4.0], [4.0, 3.0], [1.5, 3.0]]
