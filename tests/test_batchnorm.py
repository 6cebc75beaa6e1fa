"""BatchNorm over the batches of all workers: as one process that has all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradserver
from gradserver import DistributedDataParallel, SyncBatchNorm
from gradserver.protocol.errors import DisagreementError
from gradserver.worker.client import Worker
from tests.cluster import AMONG_MEMBERS, Gather, together
from tests.models import Convolutional, images, seeded
from tests.replicas import alone, gradients, on, same

torch.set_num_threads(1)

CUTS = [0, 1, 4, 10]
"""The beginnings and ends of the rows of each of three workers."""


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


def part(rank: int, rows: Tensor) -> Tensor:
    return rows[CUTS[rank] : CUTS[rank + 1]]


@pytest.mark.parametrize("shape", [(10, 4), (10, 4, 5), (10, 4, 3, 2)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_forward_and_backward_are_those_of_the_whole_batch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(*shape, generator=generator) * 3 + 100
    pull = torch.randn(*shape, generator=generator)
    plain: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    expected = plain(4, **options).double()
    whole = rows.double().requires_grad_()
    for _ in range(2):
        results = expected(whole)
    (results * pull).sum().backward()

    def work(worker: Worker) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        norm = gradserver.convert_sync_batchnorm(plain(4, **options), worker)
        assert isinstance(norm, SyncBatchNorm)
        own = part(worker.rank, rows).clone().requires_grad_()
        for _ in range(2):
            output = norm(own)
        (output * part(worker.rank, pull)).sum().backward()
        assert own.grad is not None
        return output.detach(), own.grad, gradients(norm), norm.state_dict()

    outputs, of_inputs, of_parameters, states = zip(*on(3, work), strict=True)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat(outputs).double(), results.detach(), **close)
    torch.testing.assert_close(torch.cat(of_inputs).double(), whole.grad, **close)
    for name, parameter in expected.named_parameters():
        total = sum(there[name].double() for there in of_parameters)
        torch.testing.assert_close(total, parameter.grad, **close)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(states[0][name].to(buffer.dtype), buffer, **close)
    assert all(same(states[0], other) for other in states[1:])


def test_a_model_trains_as_one_process_does(gather: Gather) -> None:
    def steps(model: nn.Module, world: int, cut: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            inputs, targets = images(step, 10)
            optimizer.zero_grad()
            summed = nn.functional.cross_entropy(model(cut(inputs)), cut(targets), reduction="sum")
            (summed * (world / 10)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {name: value.double() for name, value in model.state_dict().items()}

    expected = steps(nn.Sequential(Convolutional()), 1, lambda rows: rows)

    def work(worker: Worker) -> dict[str, Tensor]:
        network = gradserver.convert_sync_batchnorm(Convolutional(worker.rank), worker)
        model = DistributedDataParallel(network, worker)
        return steps(model, 3, lambda rows: part(worker.rank, rows))

    first, *others = together(gather(3), work)
    assert all(same(first, other) for other in others)
    for (name, value), wanted in zip(first.items(), expected.values(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_inside_no_sync_statistics_are_exchanged_and_in_eval_mode_they_are_not() -> None:
    def work(worker: Worker) -> None:
        network = gradserver.convert_sync_batchnorm(Convolutional(), worker)
        model = DistributedDataParallel(network, worker)
        with model.no_sync():
            model(images(worker.rank, 4)[0]).sum().backward()
        assert worker.round == 0
        statistics = worker.all_gather(network.get_buffer("norm.running_mean"))
        assert torch.equal(statistics[0], statistics[1])
        model.eval()
        if worker.rank == 0:  # the others need not
            model(images(0, 4)[0])

    on(2, work)


def test_conversion_keeps_parameters_and_a_copy_is_a_plain_one() -> None:
    def work(worker: Worker) -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Sequential(nn.SyncBatchNorm(4)))
        before = dict(plain.named_parameters())
        module: Any = gradserver.convert_sync_batchnorm(plain.eval(), worker)
        assert module is plain
        assert [type(part) for part in module.modules() if "Norm" in type(part).__name__] == [SyncBatchNorm] * 2
        assert all(before[name] is parameter for name, parameter in module.named_parameters())
        assert not any(part.training for part in module.modules())
        other = copy.deepcopy(module).train()
        assert other[1]._worker is None
        assert other(torch.ones(3, 4)).shape == (3, 4)
        norm = module[1]
        gradserver.convert_sync_batchnorm(module, worker)
        assert module[1] is norm

    alone(work)


class Elementary(nn.BatchNorm1d):
    """BatchNorm of elementary operations: third derivatives of torch's own are not right."""

    def forward(self, inputs: Tensor) -> Tensor:
        mean, variance = inputs.mean((0, 2), keepdim=True), inputs.var((0, 2), unbiased=False, keepdim=True)
        normal = (inputs - mean) * (variance + self.eps).rsqrt()
        return normal * self.weight[:, None] + self.bias[:, None] if self.affine else normal


def of_order(order: int, model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return a loss made of derivatives of the output by the inputs, up to one below ``order``."""
    inputs = inputs.clone().requires_grad_()
    loss = model(inputs).square().sum()
    for _ in range(order - 1):
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = loss + slope.square().sum()
    return loss


@pytest.mark.parametrize(
    ("order", "options", "cuts"),
    [
        (2, {}, [0, 1, 4, 10]),
        (2, {}, [0, 10, 10, 10]),
        (2, {"affine": False}, [0, 0, 4, 10]),
        (3, {}, [0, 1, 4, 10]),
    ],
    ids=str,
)
def test_derivatives_of_derivatives_are_those_of_the_whole_batch(
    order: int, options: dict[str, Any], cuts: list[int]
) -> None:
    """Test losses with a gradient in them: penalties, and forces. Some workers may have no row at all."""
    rows = torch.randn(10, 3, 2, generator=torch.Generator().manual_seed(5)).double()

    def network(norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> nn.Sequential:
        parts = (nn.Conv1d(3, 4, 1), norm(4, **options), nn.Tanh(), norm(4), nn.Conv1d(4, 1, 1))
        made = nn.Sequential(*parts)
        seeded(made, 3)
        return made.double()

    expected = network(Elementary)
    of_order(order, expected, rows).backward()  # type: ignore[no-untyped-call]

    def work(worker: Worker) -> dict[str, Tensor]:
        module = gradserver.convert_sync_batchnorm(network(), worker)
        model = DistributedDataParallel(module, worker, find_unused_parameters=worker.world_size > 2)
        begin, end = cuts[worker.rank : worker.rank + 2]
        of_order(order, model, rows[begin:end]).backward()  # type: ignore[no-untyped-call]
        return gradients(module)

    for there in on(3, work):
        for name, gradient in gradients(expected).items():
            torch.testing.assert_close(3 * there[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_a_penalty_in_eval_mode_is_that_of_one_process() -> None:
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))

    def network() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        seeded(made, 3)
        return made.eval()

    expected = network()
    of_order(2, expected, rows).backward()  # type: ignore[no-untyped-call]

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(gradserver.convert_sync_batchnorm(network(), worker), worker)
        of_order(2, model, rows[worker.rank :: 2]).backward()  # type: ignore[no-untyped-call]
        return gradients(model.module)

    for there in on(2, work):
        for name, gradient in gradients(expected).items():
            torch.testing.assert_close(2 * there[name], gradient, msg=name)


def test_workers_that_differentiate_other_graphs_are_told_so() -> None:
    def work(worker: Worker) -> None:
        network = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
        module = gradserver.convert_sync_batchnorm(network, worker)
        rows = torch.randn(5, 4).requires_grad_()
        assert isinstance(module, nn.Sequential)
        hidden = module[0](rows)
        output = module[2](hidden.tanh())
        (slope,) = torch.autograd.grad(output.square().sum(), rows, create_graph=True)
        (inner,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        (inner if worker.rank else slope).square().sum().backward()

    with pytest.raises(DisagreementError, match="other graphs|all_reduce"):
        on(2, work)
