"""torch.compile around what gradserver does: it runs as without, and the caller's code is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradserver
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.hooks import Ending

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it itself

Step = Callable[[Tensor], Any]


def alone(work: Callable[[Worker], list[Tensor]]) -> list[Tensor]:
    with gradserver.LocalCluster(1) as cluster:
        (result,) = cluster.run(work)
    return result


def net(worker: Worker, normalizes: bool) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if normalizes else nn.Tanh(), nn.Linear(4, 1))
    return gradserver.convert_sync_batchnorm(plain, worker)


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()  # or an earlier test's recompilations count
    return torch.compile(function, backend="eager", **options)


def whole_step(worker: Worker, compiles: bool) -> tuple[nn.Module, Step]:
    model = gradserver.DistributedDataParallel(net(worker, normalizes=False), worker)

    def step(inputs: Tensor) -> None:
        model(inputs).square().mean().backward()

    return model, compiled(step) if compiles else step


def module_inside(worker: Worker, compiles: bool) -> tuple[nn.Module, Step]:
    module = net(worker, normalizes=True)
    model = gradserver.DistributedDataParallel(compiled(module) if compiles else module, worker)
    return model, lambda inputs: model(inputs).square().mean().backward()


def wrapper(worker: Worker, compiles: bool) -> tuple[nn.Module, Step]:
    model = gradserver.DistributedDataParallel(net(worker, normalizes=True), worker)
    called = compiled(model) if compiles else model
    return model, lambda inputs: called(inputs).square().mean().backward()


@pytest.mark.parametrize("made", [whole_step, module_inside, wrapper], ids=lambda made: made.__name__)
def test_compiled_training_has_the_bits_of_the_eager_one(made: Any) -> None:
    def train(worker: Worker, compiles: bool) -> list[Tensor]:
        model, step = made(worker, compiles)
        for seed in range(2):
            torch.manual_seed(seed)
            step(torch.randn(5, 3))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    eager = alone(lambda worker: train(worker, compiles=False))
    assert len(eager) >= 4
    for one, other in zip(alone(lambda worker: train(worker, compiles=True)), eager, strict=True):
        assert torch.equal(one, other)


def test_collective_in_a_compiled_function_runs_as_it_is() -> None:
    def total(worker: Worker) -> list[Tensor]:
        def doubled(inputs: Tensor) -> Tensor:
            twice = inputs * 2
            worker.all_reduce(twice)
            return twice + 1

        return [compiled(doubled)(torch.ones(3))]

    assert alone(total)[0].tolist() == [3.0] * 3


def test_whole_graph_with_a_collective_is_refused_by_torch() -> None:
    def total(worker: Worker) -> list[Tensor]:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="skipped"):
            compiled(lambda inputs: worker.all_reduce(inputs * 2), fullgraph=True)(torch.ones(3))
        return []

    alone(total)


def test_last_gradient_ends_a_backward_of_compiled_autograd() -> None:
    def train(worker: Worker, compiles: bool) -> list[Tensor]:
        model, step = whole_step(worker, compiles=compiles)
        with torch._dynamo.config.patch(compiled_autograd=compiles):
            for _ in range(2):
                step(torch.ones(5, 3))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    eager = alone(lambda worker: train(worker, compiles=False))
    assert len(eager) == 4
    for one, other in zip(alone(lambda worker: train(worker, compiles=True)), eager, strict=True):
        assert torch.equal(one, other)


def test_compiled_autograd_is_refused_where_the_last_gradient_is_not_known() -> None:
    def train(worker: Worker) -> list[Tensor]:
        model = gradserver.DistributedDataParallel(net(worker, False), worker, find_unused_parameters=True)
        with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(gradserver.UsageError, match="leave"):
            compiled(lambda inputs: model(inputs).sum().backward())(torch.ones(5, 3))
        return []

    alone(train)


@pytest.mark.parametrize(
    "first", ["import gradserver.worker.client", pytest.param("import torch._dynamo", marks=pytest.mark.long)]
)
def test_dynamo_is_not_imported_and_knows_of_this_package_in_either_order(first: str) -> None:
    program = f"""
import sys
{first}
assert "torch._dynamo" not in sys.modules or "gradserver" not in sys.modules
import gradserver.worker.client
from torch._dynamo import trace_rules
home = gradserver.__path__[0]
assert trace_rules.check_file(home + "/worker/client.py").skipped
assert trace_rules.check_file(home + "/local.py").skipped
assert not trace_rules.check_file(home + "/tools/demo/model.py").skipped
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "gradserver.worker.eager"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_callback_that_was_never_made_goes_silently() -> None:
    Ending.__new__(Ending).__del__()
