"""DistributedDataParallel: construction, state, and what happens when things go wrong."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gradserver import DistributedDataParallel
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    DivergedError,
    GradServerError,
    InvalidArgumentError,
    LayoutError,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
)
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.wrapping import check_module
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
    pushes,
    reference,
    same,
    sgd,
    train,
)

torch.set_num_threads(1)

# ── construction and state ───────────────────────────────────────────────────────────────────────────


def test_all_workers_start_with_parameters_and_buffers_of_rank_0() -> None:
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


def copies(model: DistributedDataParallel, tmp_path: Path) -> Iterator[Any]:
    """Return the copies that users make of a wrapper."""
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    yield torch.load(tmp_path / "model.pt", weights_only=False)
    yield AveragedModel(model).module


def test_a_copy_of_a_wrapper_has_a_module_of_its_own_and_exchanges_nothing(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Convolutional(), worker)
        inputs, targets = images(0, 4)
        loss_of(model, inputs, targets).backward()
        for other in copies(model, tmp_path):
            assert type(other) is DistributedDataParallel
            assert same(other.state_dict(), model.state_dict()), "with the same keys"
            assert all(a is not b for a, b in zip(other.parameters(), model.parameters(), strict=True))
            model.eval()
            assert torch.equal(other.eval()(inputs), model(inputs))
            assert not other.module.training
            model.train()
            loss_of(other.train(), inputs, targets).backward()
            assert worker.round == 1
            with pytest.raises(AttributeError, match="this is a copy of a wrapped module, which exchanges nothing"):
                other.set_weight(1.0)
            assert not hasattr(other, "worker")
            DistributedDataParallel(other.module, worker)
            DistributedDataParallel(model.module, worker)

    alone(work)


def test_averages_of_weights_follow_a_wrapper() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Convolutional(), worker)
        average = AveragedModel(model)
        weight = model.get_parameter("module.head.weight")
        for _ in range(2):
            with torch.no_grad():
                weight.add_(1.0)
            average.update_parameters(model)
        assert torch.allclose(average.get_parameter("module.module.head.weight"), weight - 0.5)

    alone(work)


class Sharded(nn.Parameter):
    """A parameter as FSDP2 and tensor parallelism make it."""

    placements = device_mesh = ()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (1, {}, "there is no worker to exchange gradients with: worker = gradserver.connect(); model = "),
        (2, {"process_group": object()}, "process_group= belongs to torch.distributed. Groups are workers': "),
        (2, {"device_ids": [0]}, "device_ids=[0] is not needed, and moves nothing: this module is on cpu. Move it "),
        (2, {"output_device": 1}, "output_device=1 is not needed, and moves nothing: this module is on cpu. "),
        ("model", {}, "module is a str, and must be a torch.nn.Module: worker = gradserver.connect()"),
        ("worker", {}, "worker is a str, and must be what connect returns: worker = gradserver.connect()"),
    ],
)
def test_what_is_not_a_module_and_a_worker_is_a_type_error(arguments: Any, options: Any, text: str) -> None:
    def work(worker: Worker) -> None:
        module: Any = Convolutional()
        given = {1: (module,), 2: (module, worker), "model": ("model", worker), "worker": (module, "worker")}
        with pytest.raises(TypeError) as caught:
            DistributedDataParallel(*given[arguments], **options)
        assert str(caught.value).startswith(text)
        DistributedDataParallel(module, worker, device_ids=[torch.device("cpu")])

    alone(work)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (
            lambda module: module.add_module("table", nn.Embedding(3, 2, sparse=True)),
            LayoutError,
            "module 'table' is an Embedding with sparse=True, and only dense gradients travel: build it with "
            "sparse=False",
        ),
        (
            lambda module: module.register_parameter("part", Sharded(torch.ones(2), requires_grad=False)),
            InvalidArgumentError,
            "parameter 'part' is a DTensor, of which this process has a part only: gradserver keeps whole replicas "
            "alike. Wrap a module that neither FSDP nor tensor parallelism has sharded",
        ),
        (
            lambda module: module.add_module("norm", nn.SyncBatchNorm(4)),
            InvalidArgumentError,
            "module 'norm' is a torch.nn.SyncBatchNorm, which needs a process group of torch.distributed: before "
            "wrapping call module = gradserver.convert_sync_batchnorm(module, worker)",
        ),
        (
            lambda module: setattr(module.head.bias, "_in_backward_optimizers", []),
            InvalidArgumentError,
            "the optimizer of parameter 'head.bias' steps inside backward (_apply_optimizer_in_backward), before "
            "gradients are averaged: step it after backward()",
        ),
    ],
    ids=["sparse", "sharded", "sync-batchnorm", "in-backward"],
)
def test_modules_that_cannot_be_replicas_are_refused_by_name(spoil: Any, error: type[Exception], text: str) -> None:
    def work(worker: Worker) -> None:
        module = Convolutional()
        spoil(module)
        with pytest.raises(error) as caught:
            DistributedDataParallel(module, worker)
        assert str(caught.value) == text

    alone(work)


def test_an_optimizer_that_steps_inside_backward_is_noticed() -> None:
    def work(worker: Worker) -> None:
        module = Convolutional()
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        model = DistributedDataParallel(module, worker)
        with pytest.raises(UsageError, match=r"parameter '.*' was changed during backward, before its gradient was av"):
            loss_of(model, *images(0, 4)).backward()

    on(2, work)


def test_a_backward_that_is_to_create_a_graph_warns() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Convolutional(), worker)
        with warnings.catch_warnings(record=True) as caught:  # torch has a warning of its own
            warnings.simplefilter("always")
            loss_of(model, *images(0, 4)).backward(create_graph=True)
        assert sum("the averaged gradients in .grad have no graph" in str(one.message) for one in caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model, *images(0, 4)).backward()

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


def test_nan_reaches_no_worker_and_is_named_at_all() -> None:
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


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("fails", ["backward", "forward", "nothing"])
def test_a_round_can_be_abandoned_and_all_go_on(fails: str, options: dict[str, Any]) -> None:
    """Test that what backward had pushed counts; the rest is the gradient of the other worker."""

    def work(worker: Worker) -> tuple[list[dict[str, Tensor]], list[str], dict[str, Tensor]]:
        model = DistributedDataParallel(Transformer(), worker, **options)
        optimizer = sgd(model)
        noted = pushes(worker)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if worker.rank == 1 and step == 1:
                noted.clear()
                hook = fails_behind(model.get_submodule("module.blocks.1"))
                if fails == "backward":
                    with pytest.raises(MemoryError):
                        loss_of(model, *tokens(step, 2)).backward()
                elif fails == "forward":
                    with pytest.raises(TypeError):
                        model(None)
                hook.remove()
                given = [key for key, _, present in noted if present]
                model.abandon_round()
            else:
                loss_of(model, *tokens(10 * worker.rank + step, 2)).backward()
            seen.append(gradients(model.module))
            optimizer.step()
        return seen, given if worker.rank else [], state_of(model.module)

    (zero, _, state), (one, given, state_there) = on(2, work)
    assert same(state, state_there)
    assert all(same(mine, theirs) for mine, theirs in zip(zero, one, strict=True))
    assert bool(given) == (fails == "backward")


def test_what_was_pushed_of_an_abandoned_round_counts_and_the_rest_does_not() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
        model = DistributedDataParallel(Transformer(), worker)
        inputs = tokens(worker.rank, 2)
        with model.no_sync():
            loss_of(model, *inputs).backward()
        own = gradients(model.module)
        model.zero_grad()
        if worker.rank == 1:
            hook = fails_behind(model.get_submodule("module.blocks.1"))
            with pytest.raises(MemoryError):
                loss_of(model, *inputs).backward()
            hook.remove()
            left = set(model._rounds.unpushed)
            model.abandon_round()
        else:
            left = set()
            loss_of(model, *inputs).backward()
        names = {c.name for bucket in model.plan.buckets if bucket.key in left for c in bucket.components}
        return own, gradients(model.module), names

    (zero, mean, _), (one, mean_there, left) = on(2, work)
    assert same(mean, mean_there)
    assert left
    assert left < mean.keys()
    for name, value in mean.items():
        expected = zero[name] if name in left else (zero[name] + one[name]) / 2
        torch.testing.assert_close(value, expected)


def test_errors_of_an_exchange_cannot_be_abandoned() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        with pytest.raises(UsageError, match="no gradient came for"):
            loss_of(model, *tokens(0, 2)).backward()
        with pytest.raises(OutOfStepError, match="an exchange failed"):
            model.abandon_round()

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
        table = nn.Embedding(3, 2)
        model = DistributedDataParallel(table, worker)
        table.sparse = True
        with pytest.raises(GradServerError, match=r"the gradient of 'weight' is sparse_coo"):
            model(torch.tensor([1])).sum().backward()

    alone(work)


def test_a_wrapped_module_that_is_itself_refused_is_called_the_module() -> None:
    with pytest.raises(LayoutError, match="^the module is an Embedding with sparse=True"):
        check_module(nn.Embedding(3, 2, sparse=True))
