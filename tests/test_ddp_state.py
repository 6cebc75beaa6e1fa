"""DistributedDataParallel: construction, state, and what happens when things go wrong."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserver import DistributedDataParallel
from protocol.dtypes import FLOAT32
from protocol.errors import (
    DivergedError,
    GradServerError,
    InvalidArgumentError,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
)
from protocol.plan import simple_plan
from tests.models import (
    Convolutional,
    Transformer,
    images,
    loss_of,
    state_of,
    tokens,
)
from tests.replicas import (
    alone,
    assert_like_one_process,
    gradients,
    on,
    reference,
    same,
    sgd,
    train,
)
from worker.client import Worker

torch.set_num_threads(1)

# ── construction and state ───────────────────────────────────────────────────────────────────────────


def test_everybody_starts_with_parameters_and_buffers_of_rank_0() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Convolutional(worker.rank)
        module.conv.requires_grad_(False)
        module.get_buffer("norm.running_mean").fill_(worker.rank + 1.0)
        return state_of(DistributedDataParallel(module, worker, bucket_cap_mb=0.0001).module)

    first, *others = on(3, work)
    assert all(same(first, other) for other in others)
    assert torch.equal(first["conv.weight"], Convolutional(0).conv.weight)
    assert first["norm.running_mean"].tolist() == [1.0] * 4


def test_without_a_first_sync_weights_are_compared_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> None:
        module = Convolutional(seed=3)
        module.head.weight.requires_grad_(False)
        monkeypatch.setattr(worker, "broadcast", None)
        DistributedDataParallel(module, worker, init_sync=False)

    on(3, work)


@pytest.mark.parametrize("name", ["conv.bias", "head.weight", "norm.running_var"])
def test_without_a_first_sync_the_first_parameter_that_differs_is_named(name: str) -> None:
    def work(worker: Worker) -> str:
        module = Convolutional(seed=3)
        module.head.weight.requires_grad_(False)
        if worker.rank == 1:
            module.state_dict()[name].view(-1)[0] += 1e-6
        module.get_buffer("norm.num_batches_tracked").add_(int(worker.rank == 2))
        with pytest.raises(DivergedError) as caught:
            DistributedDataParallel(module, worker, init_sync=False)
        return str(caught.value)

    assert set(on(3, work)) == {
        f"{name!r} of 'worker-1' (rank 1) is not that of 'worker-0' (rank 0). With init_sync=False all workers must "
        f"start alike: load the same file everywhere, or leave it out"
    }


def test_modules_that_differ_are_refused_and_left_as_they_were() -> None:
    kept: dict[int, bool] = {}

    def work(worker: Worker) -> None:
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + worker.rank))
        before = state_of(module)
        try:
            DistributedDataParallel(module, worker)
        finally:
            kept[worker.rank] = same(before, state_of(module))

    with pytest.raises(PlanMismatchError, match=r"has 1.weight \(4×3, float32.*has 1.weight \(5×3, float32"):
        on(2, work)
    assert kept == {0: True, 1: True}


def test_options_that_change_the_plan_must_agree() -> None:
    def work(worker: Worker) -> None:
        DistributedDataParallel(Transformer(), worker, find_unused_parameters=worker.rank == 1)

    with pytest.raises(PlanMismatchError, match="parameters with a gradient"):
        on(2, work)


def test_accumulation_must_be_known() -> None:
    with pytest.raises(InvalidArgumentError, match="accumulation is 'sum' or 'mean', not 'average'"):
        on(1, train, Transformer, accumulation="average")


def test_a_plan_in_place_of_all_others_ends_what_was_wrapped_before() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        worker.agree(simple_plan([("b0", 3)], FLOAT32))
        with pytest.raises(UsageError, match="agreed on a plan in place of all others after this module was wrapped"):
            loss_of(model, *tokens(0, 2)).backward()

    alone(work)


def test_module_that_returns_a_parameter() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.value

    def work(worker: Worker) -> list[float]:
        module: Any = Constant()
        model = DistributedDataParallel(module, worker)
        for _ in range(3):
            model.zero_grad()
            (model().sum() * (worker.rank + 1)).backward()
        assert not module.value._backward_hooks  # they would pile up
        result: list[float] = module.value.grad.tolist()
        return result

    assert on(2, work) == [[1.5, 1.5]] * 2


def test_module_may_be_wrapped_again() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Transformer(worker.rank)
        DistributedDataParallel(module, worker)
        return train(worker, lambda _: module)

    assert_like_one_process(on(2, work), reference(Transformer(0)))


def test_state_has_the_keys_of_the_wrapper_or_of_the_module() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        bare = model.state_dict(unwrapped=True)
        assert bare.keys() == Transformer().state_dict().keys()
        assert model.state_dict().keys() == {f"module.{key}" for key in bare}
        assert nn.ModuleDict({"outer": model}).state_dict().keys() == {f"outer.module.{key}" for key in bare}
        other = Transformer(5).state_dict()
        model.load_state_dict(other)
        assert same(model.state_dict(unwrapped=True), other)
        model.load_state_dict({f"module.{key}": value for key, value in Transformer(6).state_dict().items()})
        assert same(model.state_dict(unwrapped=True), Transformer(6).state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"lm_head.weight": other["lm_head.weight"]})
        with pytest.raises(InvalidArgumentError, match="assign=True"):
            model.load_state_dict(other, assign=True)

    alone(work)


def test_state_of_a_module_that_has_a_module_called_module() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.x = nn.Linear(1, 1), nn.Linear(1, 1)

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Odd(), worker)
        for unwrapped in (True, False):
            model.load_state_dict(model.state_dict(unwrapped=unwrapped))

    alone(work)


def test_wrapper_is_not_copied() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        loss_of(model, *tokens(0, 2)).backward()
        with pytest.raises(UsageError, match="do that with its .module"):
            copy.deepcopy(model)
        loss_of(copy.deepcopy(model.module), *tokens(0, 2)).backward()  # exchanges nothing
        assert worker.round == 1

    alone(work)


def test_describe_lists_the_buckets() -> None:
    lines = alone(lambda worker: DistributedDataParallel(Convolutional(), worker).describe()).splitlines()
    assert lines[0].split() == ["bucket", "type", "elements", "MiB"]
    assert lines[1].split() == ["bucket.0", "float32", "145", "0.00"]
    assert [line.split()[0] for line in lines[1:]] == ["bucket.0", "sender", "buffers.float32", "buffers.int64", "4"]


def test_wrapper_that_is_dropped_takes_its_hooks_along() -> None:
    def work(worker: Worker) -> int:
        module = Transformer()
        model = DistributedDataParallel(module, worker)
        del model
        loss_of(module, *tokens(0, 2)).backward()
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        return worker.round

    assert alone(work) == 0


# ── when things go wrong ─────────────────────────────────────────────────────────────────────────────


def test_nan_reaches_nobody_and_is_named_everywhere() -> None:
    def work(worker: Worker) -> tuple[NonFiniteError, bool]:
        model = DistributedDataParallel(Transformer(), worker)
        before = state_of(model.module)
        weight: Any = model.get_parameter("module.blocks.2.up.weight")
        if worker.rank == 1:
            weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(NonFiniteError) as caught:
            loss_of(model, *tokens(worker.rank, 2)).backward()
        return caught.value, same(before, state_of(model.module))

    for error, unchanged in on(3, work):
        assert (error.worker, error.bucket, error.parameter) == ("worker-1", "block.2", "blocks.2.up.weight")
        assert unchanged


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise MemoryError("out of memory")


def fails_behind(module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Let backward fail when it comes to the output of ``module``."""
    fail: Any = Failing.apply
    return module.register_forward_hook(lambda _, __, output: fail(output))


def test_backward_that_failed_in_the_midst_of_an_exchange() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        hook = fails_behind(model.get_submodule("module.blocks.1"))
        with pytest.raises(MemoryError):
            loss_of(model, *tokens(0, 2)).backward()
        hook.remove()
        match = r"a backward failed when it had begun to push round 0 \(left was: block.1, block.0, embedding\)"
        for _ in range(2):
            with pytest.raises(OutOfStepError, match=match):
                loss_of(model, *tokens(0, 2))
        with pytest.raises(OutOfStepError, match=match):
            loss_of(model.module, *tokens(0, 2)).backward()
        with pytest.raises(OutOfStepError, match=match), model.join(sgd(model)):
            pass
        with torch.no_grad():
            model(tokens(0, 2)[0])

    alone(work)


@pytest.mark.parametrize("delayed", [True, False])
def test_backward_that_failed_before_anything_was_pushed_can_be_repeated(delayed: bool) -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Convolutional(), worker, delay_all_reduce=delayed)
        hook = fails_behind(model.get_submodule("module.norm" if delayed else "module.head"))
        if worker.rank == 1:
            with pytest.raises(MemoryError):
                loss_of(model, *images(1, 4)).backward()
            with pytest.raises(MemoryError), model.no_sync():
                loss_of(model, *images(1, 4)).backward()
            model.zero_grad()
        hook.remove()
        loss_of(model, *images(worker.rank, 4)).backward()
        return gradients(model)

    assert same(*on(2, work))


def test_error_of_the_exchange_comes_out_of_backward() -> None:
    ready = threading.Event()

    def work(worker: Worker) -> str:
        model = DistributedDataParallel(Transformer(), worker)
        if worker.rank == 1:
            ready.wait()
            worker.abort("its disk is full")
            return ""
        loss = loss_of(model, *tokens(0, 2))
        ready.set()
        with pytest.raises(GradServerError) as caught:
            loss.backward()
        return str(caught.value)

    told, _ = on(2, work)
    assert "'worker-1'" in told
    assert "its disk is full" in told


def test_sparse_gradients_are_refused() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(nn.Embedding(3, 2, sparse=True), worker)
        with pytest.raises(GradServerError, match=r"the gradient of 'weight' is sparse_coo"):
            model(torch.tensor([1])).sum().backward()

    alone(work)
