"""DataParallel: several replicas in one process, against the module on one device."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gradserver import DataParallel, DistributedDataParallel, ThroughputTracker
from gradserver.protocol.errors import (
    ClosedError,
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    SizeMismatchError,
    UsageError,
)
from gradserver.worker.client import Worker
from gradserver.worker.data_parallel import copies, lanes, shares
from gradserver.worker.pacing.stopwatch import WallClock
from tests.models import Convolutional, Transformer, images, loss_of, seeded, state_of, tokens
from tests.replicas import STEPS, assert_like_one_process, distance, gradients, on, reference, same, sgd, shard

torch.set_num_threads(1)

SHARED, APART = ["cpu", "cpu"], ["cpu:0", "cpu:1"]
"""Devices of two replicas with the same parameters, and with a copy and a thread for the second one."""
MIXED = ["cpu", "cpu:1", "cpu", "cpu:2", "cpu:1"]


class Uncounted(torch.optim.SGD):
    """An optimizer that changes parameters past autograd's counters, as fused ones do."""

    def step(self, *_: Any) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])


@contextmanager
def parallel(module: nn.Module, devices: list[str], **options: Any) -> Iterator[DataParallel]:
    model = DataParallel(module, devices, **options)
    try:
        yield model
    finally:
        model.close()


def train(model: nn.Module, rows: int, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    optimizer = optimizer or sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *tokens(step, rows)).backward()
        optimizer.step()
    return state_of(model)


def mlp(seed: int = 0) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    seeded(module, seed)
    return module


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ── the result is that of one device ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("devices", [["cpu"], SHARED, APART, MIXED], ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_trains_as_one_device_does(devices: list[str], count: int) -> None:
    with parallel(Transformer(0), devices) as model:
        assert distance(train(model, count), train(Transformer(0), count)) < 1e-6


@given(
    devices=st.lists(st.sampled_from(["cpu", "cpu:1", "cpu:2"]), min_size=1, max_size=5),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    mean=st.booleans(),
)
def test_gradients_are_those_of_the_whole_batch(devices: list[str], sizes: list[int], mean: bool) -> None:
    plain = mlp()
    with parallel(mlp(), devices) as model:
        for number, size in enumerate(sizes):  # gradients accumulate
            inputs = rows(size, number)
            for one in (plain, model):
                outputs = one(inputs)
                assert outputs.shape == (size, 2)
                torch.testing.assert_close(outputs, plain(inputs), rtol=1e-12, atol=1e-12)
                (outputs.square().mean() if mean and size else outputs.square().sum()).backward()
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", [APART, MIXED], ids=str)
@pytest.mark.parametrize("make", [mlp, lambda: Transformer(0, tied=True).double(), lambda: Convolutional().double()])
def test_what_travels_packed_arrives_whole(
    devices: list[str], make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the way between devices that do not see each other's memory."""
    monkeypatch.setattr(copies, "is_near", lambda *_: False)
    plain, inputs = make().eval(), {nn.Sequential: rows(7), Transformer: tokens(0, 7)[0]}
    with parallel(make().eval(), devices) as model:
        given_inputs = inputs.get(type(plain), images(0, 7)[0].double())
        for one in (plain, model):
            optimizer = Uncounted(one.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                one(given_inputs).square().mean().backward()
                optimizer.step()
        assert distance(state_of(model), state_of(plain)) < 1e-9


def test_without_the_copies_gradients_the_result_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies._Bucket, "added_up", lambda self, _: [None] * len(self.parameters))
    with parallel(Transformer(0), APART) as model:
        assert distance(train(model, 6), train(Transformer(0), 6)) > 1e-3


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_two_runs_have_the_same_bits(devices: list[str]) -> None:
    def run() -> dict[str, Tensor]:
        with parallel(Transformer(0, tied=True), [*devices, *devices]) as model:
            return train(model, 7)

    assert same(run(), run())


@pytest.mark.parametrize(
    "kind", [{"tied": True}, {"checkpointed": True}, {"checkpointed": True, "twice": True}], ids=str
)
@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_trains_modules_of_all_kinds(devices: list[str], kind: dict[str, bool]) -> None:
    def embedded(module: Transformer) -> Transformer:
        if module.checkpointed:  # re-entrant checkpoints need inputs with gradients
            module.token.register_forward_hook(lambda *args: args[2].requires_grad_())
        return module

    with parallel(embedded(Transformer(0, **kind)), devices) as model:
        assert distance(train(model, 5), train(embedded(Transformer(0, **kind)), 5)) < 1e-6


def test_keeps_the_strides_of_gradients() -> None:
    def trained(wrap: bool) -> dict[str, Tensor]:
        module = Convolutional().eval()
        with torch.no_grad():
            module.conv.weight.data = module.conv.weight.contiguous(memory_format=torch.channels_last)
        with parallel(module, APART if wrap else ["cpu"]) as model:
            loss: Any = F.cross_entropy(model(images(0, 5)[0]), images(0, 5)[1])
            loss.backward()
            assert module.conv.weight.grad is not None
            assert module.conv.weight.grad.stride() == module.conv.weight.stride()
            return gradients(module)

    assert distance(trained(True), trained(False)) < 1e-6


class Recurrent(nn.Module):
    """Returns the last hidden state of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True).double()
        seeded(self, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.lstm(inputs)[0][:, -1]
        return result


def test_recurrent_modules_use_the_copies_of_their_device() -> None:
    plain = Recurrent()
    with parallel(Recurrent(), APART) as model:
        for one in (plain, model):
            one(rows(10).view(5, 2, 3)).sum().backward()
        assert distance(gradients(model.module), gradients(plain)) < 1e-12
        (further,) = model._made()._sites[torch.device("cpu:1")].replicas
        for weight in further.module.lstm._flat_weights:  # type: ignore[union-attr]
            assert not any(weight is parameter for parameter in model.parameters())


class Moving(nn.Linear):
    """Gives its weight other memory, unless that is a parameter, as recurrent modules do for cuDNN."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not isinstance(self.weight, nn.Parameter):
            with torch.no_grad():
                self.weight.set_(self.weight.clone())  # type: ignore[call-overload]
        return super().forward(inputs)


@pytest.mark.parametrize("near", [True, False])
@torch.no_grad()
def test_modules_may_move_the_copies(near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "is_near", lambda *_: near)
    with parallel(Moving(3, 2), APART) as model:
        for _ in range(3):
            torch.testing.assert_close(model(torch.ones(4, 3)), model.module(torch.ones(4, 3)))
            for parameter in model.parameters():
                parameter.add_(1.0)


class Branches(nn.Module):
    """Uses ``positive`` for samples above 0 alone, and never ``unused``."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.unused = nn.Linear(3, 2).double()
        seeded(self, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = (self.positive if inputs[0, 0] > 0 else self.negative)(inputs)
        return result


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_parameters_of_some_replicas_have_gradients_and_unused_ones_none(devices: list[str]) -> None:
    inputs = torch.cat([rows(2).abs(), -rows(2).abs()])
    plain = Branches()
    with parallel(Branches(), devices) as model:
        model(inputs).sum().backward()
        (plain(inputs[:2]).sum() + plain(inputs[2:]).sum()).backward()
        assert distance(gradients(model.module), gradients(plain)) < 1e-12
        assert model.get_parameter("module.unused.weight").grad is None


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_gradients_of_inputs_and_of_gradients(devices: list[str]) -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        inputs = rows(5).requires_grad_()
        loss = model(inputs).pow(3).mean()
        by_input, *by_parameters = torch.autograd.grad(loss, [inputs, *model.parameters()], create_graph=True)
        (sum(one.square().sum() for one in (by_input, *by_parameters)) + loss).backward()
        assert inputs.grad is not None
        return [inputs.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    with parallel(mlp(), devices) as model:
        torch.testing.assert_close(penalty(model), penalty(mlp()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_several_forwards_may_precede_their_backwards(
    devices: list[str], near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "is_near", lambda *_: near)

    def twice(model: nn.Module) -> None:
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            one, two = model(rows(4, step)).sum(), model(rows(5, step)).square().sum()
            one.backward()
            model(rows(3, step))
            two.backward()
            optimizer.step()

    plain = mlp()
    twice(plain)
    with parallel(mlp(), devices) as model:
        twice(model)
        assert distance(state_of(model), state_of(plain)) < 1e-12


def test_wrapped_once_more_it_is_one_worker_of_a_group() -> None:
    def replica(worker: Worker) -> dict[str, Tensor]:
        with parallel(Transformer(worker.rank), APART) as inner:
            model = DistributedDataParallel(inner, worker)
            optimizer = sgd(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *shard(worker.rank, worker.world_size, *tokens(step, 12))).backward()
                optimizer.step()
            return state_of(inner)

    assert_like_one_process(on(2, replica), reference(Transformer(0)))


# ── inputs and outputs ────────────────────────────────────────────────────────────────────────────────


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    inputs: Any
    name: str


class Echo(nn.Module):
    """Returns its arguments, and notes them."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self.seen.append((inputs, options))
        return inputs, options


@pytest.mark.parametrize("devices", [["cpu"], SHARED, APART, MIXED], ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_nested_inputs_are_cut_and_outputs_joined_in_order(devices: list[str], count: int) -> None:
    ids = torch.arange(count)
    inputs = (ids, Pair(ids + 1, [ids.float()[:, None]]), "text", None)
    options = {"a": {"b": ids * 2, "c": 3}, "record": Record(ids, "r"), "ordered": OrderedDict(z=ids, y=(ids,))}
    noted: list[Any] = []
    with parallel(Echo(noted), devices) as model:
        got, got_options = model(*inputs, **options)
        assert repr(got) == repr(inputs)
        assert repr(got_options) == repr(options)
        sizes = [len(seen[0][0]) for seen in noted]
        assert sum(sizes) == count
        assert len(sizes) == min(count, len(devices))
        assert max(sizes) - min(sizes) <= 1


def test_only_the_first_replica_runs_without_a_batch() -> None:
    noted: list[Any] = []
    with parallel(Echo(noted), SHARED) as model:
        assert model(2, key="word") == ((2,), {"key": "word"})
        assert len(noted) == 1


def test_tensors_without_samples_go_to_every_replica() -> None:
    noted: list[Any] = []
    with parallel(Echo(noted), APART, whole=["mask"]) as model:
        model(torch.arange(4), torch.tensor(5), mask=torch.ones(3, 3))
        assert len(noted) == 2
        for inputs, options in noted:
            assert inputs[1] == 5
            assert options["mask"].shape == (3, 3)


def test_samples_may_be_in_another_dimension() -> None:
    with parallel(nn.Identity(), APART, dim=1) as model:
        inputs = torch.arange(15).view(3, 5)
        assert torch.equal(model(inputs), inputs)


def test_a_batch_with_different_numbers_of_samples_is_refused() -> None:
    with (
        parallel(Echo([]), SHARED) as model,
        pytest.raises(SizeMismatchError, match=r"input 0 has 4, mask has 3.*whole="),
    ):
        model(torch.arange(4), mask=torch.ones(3, 3))


class Returning(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Any:
        return self.function(inputs)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda x: x.new_ones(2, len(x)), SizeMismatchError, r"output has \(2, 3\), \(2, 2\)"),
        (lambda x: {"n": [len(x)]}, InvalidArgumentError, r"output\['n'\]\[0\] differs, in their order: 3, 2"),
        (lambda x: {str(len(x)): x}, InvalidArgumentError, r"output differs, in their order: \[\"\['3'\]\"\]"),
        (lambda x: x if len(x) > 2 else [x], InvalidArgumentError, "output differs, in their order: Tensor, list"),
        (lambda x: x if len(x) > 2 else x.sum(), InvalidArgumentError, r"output differs, in their order: \(3,\), \(\)"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(function: Any, error: type[Exception], text: str) -> None:
    with parallel(Returning(function), SHARED) as model, pytest.raises(error, match=text):
        model(torch.arange(5.0))


def test_losses_of_replicas_are_stacked_or_averaged_by_samples() -> None:
    module = Returning(lambda x: x.mean())
    with parallel(module, SHARED) as stacking, parallel(module, APART, scalars="mean") as averaging:
        assert stacking(torch.arange(5.0)).tolist() == [1.0, 3.5]
        assert averaging(torch.arange(5.0)).item() == 2.0
    with parallel(Returning(len), APART, scalars="mean") as model, pytest.raises(InvalidArgumentError):
        model(torch.arange(5.0))


# ── following the module ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_running_statistics_are_the_first_replicas(devices: list[str]) -> None:
    plain = Convolutional()
    with parallel(Convolutional(), devices) as model:
        for step in range(3):
            model(images(step, 5)[0])
            plain(images(step, 5)[0][:3])
        assert same(state_of(model), state_of(plain))
        model.eval()
        assert torch.allclose(model(images(9, 5)[0]), plain.eval()(images(9, 5)[0]), atol=1e-6)
        assert same(state_of(model), state_of(plain))


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


CHANGES: list[Callable[[Any, nn.Module], object]] = [
    lambda module, _: module[1].train(False),
    lambda module, _: setattr(module[1], "p", 0.0),
    lambda module, _: module.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)).state_dict()),
    lambda module, _: setattr(module[0], "weight", nn.Parameter(torch.full((3, 3), 2.0))),
    lambda module, _: setattr(module, "0", nn.Linear(3, 7)),
    lambda module, _: module.append(nn.Linear(3, 1)),
    lambda module, _: module[0].requires_grad_(False),
    lambda module, _: module[0].register_forward_hook(lambda *args: args[2] + 1),
    lambda module, _: module.double(),
    lambda _, model: model.load_state_dict({"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)}, assign=True),
    lambda module, _: module[0].weight.data.mul_(2.0),  # which no counter shows, between training and evaluation
    lambda module, _: setattr(module[0], "__class__", Doubled),
    lambda module, _: nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Tanh()),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_replicas_follow_changes_of_the_module(devices: list[str], number: int) -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    with parallel(module, devices) as model:
        model(torch.ones(4, 3)).sum().backward()
        CHANGES[number](module, model)
        inputs = torch.ones(4, 3, dtype=module[0].bias.dtype)
        model.eval()
        torch.testing.assert_close(model(inputs), module(inputs))
        for row in model(inputs):
            torch.testing.assert_close(row, model(inputs)[0])


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
def test_layers_may_be_frozen_and_thawed(devices: list[str]) -> None:
    plain, module = mlp(), mlp()
    module[2].requires_grad_(False)
    with parallel(module, devices) as model:
        for frozen in (0, 2, None):
            for one in (plain, model):
                for number, parameter in enumerate(one.parameters()):
                    parameter.requires_grad_(number // 2 * 2 != frozen)
                one.zero_grad()
                one(rows(5)).square().sum().backward()
            expected = gradients(plain)
            assert len(expected) == (4 if frozen is None else 2)
            assert distance(gradients(model.module), expected) < 1e-12


@pytest.mark.parametrize("how", ["uncounted", "inside no_sync", "by hand", "sync_params", "small batch"])
def test_steps_that_autograd_does_not_count_reach_all_replicas(how: str) -> None:
    """Test also with a batch so small that no copy gets a gradient."""

    def steps(model: nn.Module) -> None:
        optimizer = Uncounted(model.parameters(), lr=0.1)
        for step in range(4):
            accumulating = how == "inside no_sync" and isinstance(model, DataParallel)
            with model.no_sync() if accumulating and isinstance(model, DataParallel) else nullcontext():
                loss = model(rows(1 if how == "small batch" and step % 2 else 5, step)).square().sum()
                model.zero_grad()
                loss.backward()
            if how in ("by hand", "small batch"):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.data.sub_(parameter.grad, alpha=0.1)
            elif how == "sync_params" and isinstance(model, DataParallel):
                with model.no_sync():
                    model(rows(5))
                    for parameter in model.parameters():
                        parameter.data.mul_(0.5)
                    model.sync_params()
            elif how == "sync_params":
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
            else:
                optimizer.step()

    plain = mlp()
    steps(plain)
    with parallel(mlp(), APART) as model:
        steps(model)
        assert distance(state_of(model), state_of(plain)) < 1e-12


def test_weights_swapped_for_evaluation_reach_all_replicas() -> None:
    """Test an average of weights that is copied in, and back, past autograd's counters."""
    with parallel(mlp(), APART) as model:
        model(rows(4)).sum().backward()
        for module in (mlp(1), mlp(0)):
            for own, other in zip(model.parameters(), module.parameters(), strict=True):
                own.data.copy_(other.data)
            model.train(not model.training)
            torch.testing.assert_close(model(rows(4)), module(rows(4)))


def test_parameters_travel_only_if_they_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    refresh = copies._Bucket.refresh

    def noting(bucket: copies._Bucket) -> None:
        sent.append(bucket)
        refresh(bucket)

    monkeypatch.setattr(copies._Bucket, "refresh", noting)
    with parallel(mlp(), APART) as model:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(rows(4))
        assert len(sent) == 1
        model.train()
        optimizer = sgd(model)
        del sent[:]
        for _ in range(2):
            for number in range(4):
                with model.no_sync() if number < 3 else nullcontext():
                    model(rows(4)).sum().backward()
            optimizer.step()
        assert len(sent) == 2


def test_accumulated_gradients_are_the_sum() -> None:
    plain = mlp()
    with parallel(mlp(), APART) as model:
        with model.no_sync():
            model(rows(5)).sum().backward()
        model(rows(3, 1)).sum().backward()
        (plain(rows(5)).sum() + plain(rows(3, 1)).sum()).backward()
        assert distance(gradients(model.module), gradients(plain)) < 1e-12


def test_modes_of_the_callers_thread_hold_in_the_others() -> None:
    seen = []

    def look(inputs: Tensor) -> Tensor:
        now = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), lanes._autocast_type("cpu") is not None)
        seen.append((threading.current_thread().name, *now))
        return inputs

    def modes() -> list[tuple[bool, ...]]:
        found = [tuple(one[1:]) for one in seen]
        assert len({one[0] for one in seen}) == 2
        seen.clear()
        return found

    with parallel(nn.Sequential(nn.Linear(3, 3), Returning(look)), APART) as model:
        inputs = torch.ones(2, 3)
        assert model(inputs).dtype == torch.float32
        assert modes() == [(True, False, False)] * 2
        with torch.no_grad():
            model(inputs)
        assert modes() == [(False, False, False)] * 2
        with torch.inference_mode():
            assert model(inputs).is_inference()
        assert modes() == [(False, True, False)] * 2
        with torch.autocast("cpu", torch.bfloat16):
            assert model(inputs).dtype == torch.bfloat16
        assert modes() == [(True, False, True)] * 2
        model(inputs).sum().backward()


def test_first_forward_in_inference_mode_leaves_training_possible() -> None:
    for made_inside in (False, True):
        with torch.inference_mode(made_inside):
            with torch.inference_mode(False):
                module = Convolutional()
            model = DataParallel(module, APART)
        with torch.inference_mode():
            model(images(0, 4)[0])
        model(images(0, 4)[0]).sum().backward()
        model.close()


class Noting(nn.Module):
    """A layer that notes the default device of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[torch.device] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.empty(0).device)
        return (inputs * self.weight).exp()


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="this torch does not tell its hooks"
)
def test_further_replicas_run_with_the_hooks_and_the_default_device_of_the_caller() -> None:
    packing: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packing.append(threading.current_thread().name)
        return tensor

    first, second = Noting(), Noting()
    with parallel(first, APART, replicas=[second]) as model:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(6, 2)).sum().backward()
        with torch.device("meta"):
            model(torch.ones(6, 2, device="cpu"))
    assert len(set(packing)) == 2
    assert first.seen == second.seen == [torch.device("cpu"), torch.device("meta")]


@pytest.mark.parametrize("devices", [SHARED, APART, MIXED], ids=str)
def test_given_replicas_take_the_place_of_copies(devices: list[str]) -> None:
    further = [mlp(seed).append(nn.BatchNorm1d(2).double().eval()) for seed in range(1, len(devices))]
    plain: nn.Module = mlp().append(nn.BatchNorm1d(2).double())
    with parallel(mlp().append(nn.BatchNorm1d(2).double()), devices, replicas=further) as model:
        model(rows(10))  # running statistics become those of the first samples
        assert all(other.training for other in further)
        plain.load_state_dict(model.state_dict())
        for one in (plain, model):
            one.eval()
            optimizer = sgd(one)
            for step in range(STEPS):
                optimizer.zero_grad()
                one(rows(7, step)).square().mean().backward()
                optimizer.step()
        assert distance(state_of(model), state_of(plain)) < 1e-12
        with torch.no_grad():
            model(rows(7))
        for other in further:
            assert not other.training
            assert same(state_of(other), state_of(model))


@pytest.mark.parametrize(
    ("replicas", "error", "text"),
    [
        ([mlp(), mlp()], InvalidArgumentError, "replicas has 2 modules for 2 devices.*so give 1"),
        (
            [mlp().float()],
            SizeMismatchError,
            r"parameter '0.weight' is \(5, 3\) of torch.float64 in the .*float32 in .* 1",
        ),
        ([mlp()[:2]], SizeMismatchError, "module '2' is there in the module, and not there in replica 1"),
        ([mlp().append(nn.ReLU())], SizeMismatchError, "module '3' is not there in the module, and there in replica 1"),
    ],
)
def test_given_replicas_must_be_like_the_module(replicas: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataParallel(mlp(), SHARED, replicas=replicas)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────


class Failing(nn.Module):
    """Fails for samples that are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if (inputs < 0).any():
            raise ValueError(f"negative: {inputs.tolist()}")
        return inputs * self.weight


@pytest.mark.parametrize("devices", [SHARED, APART], ids=str)
@pytest.mark.parametrize("bad", [0, 1])
def test_errors_of_a_replica_name_its_device(devices: list[str], bad: int) -> None:
    with parallel(Failing(), devices) as model:
        inputs = torch.tensor([1.0, 2.0])
        inputs[bad] = -1.0
        with pytest.raises(ValueError, match=r"negative: \[-1.0\]") as caught:
            model(inputs)
        (note,) = caught.value.__notes__
        at = "cpu:1" if devices == APART and bad else "cpu"
        assert note == f"replica {bad} on {at} raised this, which had samples {bad} to {bad} of 2"
        assert caught.traceback[-1].name == "forward"
        assert model(torch.ones(2)).tolist() == [1.0, 1.0]


def test_errors_of_several_replicas_are_all_told() -> None:
    with parallel(Failing(), APART) as model:
        with pytest.raises(ValueError, match=r"negative: \[-1.0\]") as caught:
            model(torch.tensor([-1.0, -2.0]))
        assert caught.value.__notes__[1] == "replica 1 on cpu:1 failed, too: ValueError: negative: [-2.0]"


def test_no_forward_is_waited_for_without_end() -> None:
    release = threading.Event()

    def waiting(inputs: Tensor) -> Tensor:
        if threading.current_thread().name.startswith("gradserver-"):
            release.wait()
        return inputs

    with parallel(Returning(waiting), APART, timeout=0.2) as model:
        for _ in range(2):
            with pytest.raises(DeadlineError, match=r"cpu:1 has not returned .* within 0.2 s: it is at .*threading.py"):
                model(torch.ones(2))
        release.set()
        assert model(torch.ones(2)).tolist() == [1.0, 1.0]


def test_two_threads_cannot_call_it_at_once() -> None:
    inside, release = threading.Event(), threading.Event()

    def waiting(inputs: Tensor) -> Tensor:
        inside.set()
        release.wait(10.0)
        return inputs

    with parallel(Returning(waiting), SHARED) as model:
        other = threading.Thread(target=model, args=(torch.ones(2),))
        other.start()
        assert inside.wait(10.0)
        with pytest.raises(UsageError, match="under way in another thread"):
            model(torch.ones(2))
        release.set()
        other.join()
        assert model(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("module", "arguments", "error", "text"),
    [
        (nn.Linear(2, 2), {"devices": []}, InvalidArgumentError, "devices is empty"),
        (nn.Linear(2, 2), {"devices": "cpu"}, InvalidArgumentError, "a list with the device of each replica"),
        (nn.Linear(2, 2), {"devices": ["cuda:99"]}, InvalidArgumentError, "there is no device 'cuda:99'"),
        (nn.Linear(2, 2), {"devices": [99]}, InvalidArgumentError, "there is no device 99"),
        (nn.Linear(2, 2), {"devices": ["disk"]}, InvalidArgumentError, "'disk' is not a device of torch"),
        (nn.Linear(2, 2), {"devices": ["meta"]}, LayoutError, "on the CPU or on CUDA devices"),
        (nn.Linear(2, 2), {"scalars": "sum"}, InvalidArgumentError, "scalars is 'stack' or 'mean'"),
        (nn.Linear(2, 2), {"dim": -1}, InvalidArgumentError, "dim is the number of a dimension"),
        (nn.Linear(2, 2), {"timeout": 0}, InvalidArgumentError, "timeout is a number of seconds above 0"),
        (nn.LazyLinear(2), {}, InvalidArgumentError, "'weight' has no shape yet"),
        (nn.SyncBatchNorm(2), {}, InvalidArgumentError, "use BatchNorm"),
        (nn.Embedding(2, 2, sparse=True), {"devices": APART}, LayoutError, "sparse"),
    ],
)
def test_what_cannot_be_is_refused(module: Any, arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataParallel(module, **{"devices": SHARED, **arguments})


def test_a_compiled_module_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is compiled"):
        DataParallel(torch.compile(nn.Linear(2, 2), backend="eager"), SHARED)  # type: ignore[arg-type]


def test_a_module_with_a_forward_of_its_own_is_refused() -> None:
    module = nn.Linear(2, 2)
    vars(module)["forward"] = lambda inputs: inputs
    with pytest.raises(InvalidArgumentError, match="replaced on the object itself"):
        DataParallel(module, SHARED)


# ── its life ──────────────────────────────────────────────────────────────────────────────────────────


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("gradserver-replica-")]


def test_threads_end_with_close_and_with_the_model() -> None:
    model = DataParallel(mlp(), [*APART, "cpu:2"])
    assert threads() == []  # none before the first forward
    model(rows(6))
    assert sorted(one.name for one in threads()) == ["gradserver-replica-cpu:1", "gradserver-replica-cpu:2"]
    model.close()
    model.close()
    assert threads() == []
    with pytest.raises(ClosedError, match="closed"):
        model(rows(6))
    assert model.module(rows(6)).shape == (6, 2)
    model = DataParallel(mlp(), APART)
    outputs = weakref.ref(model(rows(6)))
    known, running = weakref.ref(model), threads()
    assert outputs() is None  # no thread keeps a result
    del model
    gc.collect()
    assert known() is None
    until = time.monotonic() + 10.0
    for thread in running:
        thread.join(until - time.monotonic())
    assert threads() == []


@torch.no_grad()
def test_threads_keep_no_result() -> None:
    results = []

    def noting(inputs: Tensor) -> Tensor:
        result = inputs + 1
        results.append(weakref.ref(result))
        return result

    with parallel(Returning(noting), APART) as model:
        model(torch.ones(4))
        until = time.monotonic() + 10.0  # the thread lets go when it waits again
        while any(result() is not None for result in results) and time.monotonic() < until:
            gc.collect()
        assert [result() for result in results] == [None, None]


def test_state_has_the_modules_names() -> None:
    plain = mlp(1)
    with parallel(mlp(), SHARED) as model:
        assert list(model.state_dict()) == list(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        assert same(model.state_dict(), plain.state_dict())
        torch_made = nn.DataParallel(mlp(2)).state_dict()
        model.load_state_dict(torch_made)
        assert same(model.state_dict(), mlp(2).state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"other": torch.ones(1)})
        around, bare = nn.Sequential(model, nn.Linear(2, 2)), nn.Sequential(mlp(), nn.Linear(2, 2))
        assert list(around.state_dict()) == list(bare.state_dict())
        around.load_state_dict(bare.state_dict())
        assert same(around.state_dict(), bare.state_dict())
        assert [id(p) for p in model.parameters()] == [id(p) for p in model.module.parameters()]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_replicas_of_its_own(how: str) -> None:
    def copied(model: DataParallel) -> DataParallel:
        if how == "deepcopy":
            return copy.deepcopy(model)
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        read: DataParallel = torch.load(written, weights_only=False)
        return read

    with parallel(mlp(), APART) as model:
        model(rows(4))
        other = copied(model)
        model.close()
        with torch.no_grad():
            next(model.parameters()).zero_()
        torch.testing.assert_close(other(rows(4)), mlp()(rows(4)))
        other.close()


def test_devices_are_described_and_the_default_is_one_cpu() -> None:
    with parallel(mlp(), MIXED) as model:
        assert model.describe() == "5 replicas on cpu (1 thread), cpu:1 (1 thread), cpu:2 (1 thread)"
        assert [str(device) for device in model.devices] == MIXED
    if not torch.cuda.is_available():
        assert DataParallel(mlp()).devices == (torch.device("cpu"),)


# ── devices of unequal speed ──────────────────────────────────────────────────────────────────────────


class Now(threading.local):
    """The time of each thread, in which only forwards take any."""

    seconds = 0.0


class Slow(nn.Module):
    """A module that takes a time for each sample, more in the threads of further devices."""

    now = Now()

    def __init__(self, times: float) -> None:
        super().__init__()
        self.inner, self.times = mlp(), times

    def forward(self, inputs: Tensor) -> Tensor:
        at_home = threading.current_thread() is threading.main_thread()
        self.now.seconds += 2e-4 * len(inputs) * (1 if at_home else self.times)
        return self.inner(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("devices", "home"), [(["cpu", "cpu:1"], 0.75), (["cpu", "cpu:1", "cpu"], 0.75), (["cpu:1", "cpu"], 0.75)], ids=str
)
def test_a_slower_device_gets_less_of_a_batch(devices: list[str], home: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "stopwatch", lambda _, waiting: WallClock(waiting, lambda: Slow.now.seconds))
    slow = Slow(3.0)
    model = DataParallel(slow, devices, balance=ThroughputTracker(2, calibration_steps=3, rebalance_interval=3))
    try:
        assert model.ratios == pytest.approx([1 / 2, 1 / 2] if len(devices) == 2 else [1 / 4, 1 / 2, 1 / 4])
        for step in range(12):
            torch.testing.assert_close(model(rows(48, step)), slow.inner(rows(48, step)))
        first = sum(ratio for ratio, device in zip(model.ratios, devices, strict=True) if device == devices[0])
        assert first == pytest.approx(home)
        assert len(set(model.ratios)) == 2, "replicas of one device have equal parts"
        model(rows(1))
        assert sum(model.ratios) == pytest.approx(1.0)
    finally:
        model.close()


def test_gradients_are_those_of_the_whole_batch_with_any_shares() -> None:
    tracker = ThroughputTracker(2, speed_hint=(1, 7.0))
    with parallel(mlp(), APART, balance=tracker) as model:
        assert tracker.sizes(16) == (14, 2)
        copied = copy.deepcopy(model)
        for one in (model, copied):
            one(rows(16)).square().mean().backward()
            plain = mlp()
            plain(rows(16)).square().mean().backward()
            for mine, other in zip(one.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
        copied.close()


def test_forwards_that_fail_are_not_measured() -> None:
    with parallel(Slow(1.0), APART, balance=True) as model:
        with pytest.raises(RuntimeError):
            model(torch.ones(8, 1))
        assert model._tracker is not None
        assert not any(model._tracker.throughputs)
        model(rows(8))
        assert all(model._tracker.throughputs)


def test_names_of_what_goes_whole_are_a_list() -> None:
    with pytest.raises(InvalidArgumentError, match=r"whole is a list of names .* as \['mask'\], not 'mask'"):
        DataParallel(mlp(), SHARED, whole="mask")


def test_balance_is_of_as_many_devices() -> None:
    with pytest.raises(InvalidArgumentError, match="speeds of 3 devices, and the replicas are on 2"):
        DataParallel(mlp(), APART, balance=ThroughputTracker(3))
    with pytest.raises(InvalidArgumentError, match="balance is True, or"):
        DataParallel(mlp(), APART, balance="fast")  # type: ignore[arg-type]
    assert DataParallel(mlp(), SHARED, balance=True).ratios == (0.5, 0.5)


# ── on a GPU ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0", "cpu:1"]], ids=str)
def test_trains_on_several_kinds_of_devices_as_on_one(devices: list[str]) -> None:
    with parallel(Transformer(0).double(), devices) as model:
        trained = {name: tensor.cpu() for name, tensor in train(model, 7).items()}
        assert distance(trained, train(Transformer(0).double(), 7)) < 1e-6


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_share_a_batch_by_their_speeds() -> None:
    wide = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1))
    with parallel(
        wide, ["cuda:0", "cpu"], balance=ThroughputTracker(2, calibration_steps=3, rebalance_interval=1)
    ) as model:
        for _ in range(20):
            model(torch.ones(256, 512)).sum().backward()
        torch.cuda.synchronize()
        model(torch.ones(256, 512))
        assert model.ratios[0] > model.ratios[1]


@pytest.mark.gpu
def test_recurrent_modules_run_on_a_gpu_and_the_cpu() -> None:
    plain = Recurrent()
    with parallel(Recurrent(), ["cpu", "cuda:0"]) as model:
        for one in (plain, model):
            optimizer = sgd(one)
            for step in range(STEPS):
                optimizer.zero_grad()
                one(rows(10, step).view(5, 2, 3)).sum().backward()
                optimizer.step()
        assert distance(state_of(model), state_of(plain)) < 1e-6
        with torch.no_grad():
            torch.testing.assert_close(model(rows(10).view(5, 2, 3)), model.module(rows(10).view(5, 2, 3)))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("given", [False, True])
def test_buffers_that_come_change_or_go_are_followed(given: bool) -> None:
    def made() -> nn.Module:
        module = nn.Linear(2, 1)
        module.register_buffer("first", None)
        return module

    module = made()
    replica = made() if given else None
    model = DataParallel(module, ["cpu", "cpu:1"], replicas=() if replica is None else [replica])

    def followed() -> dict[str, torch.Tensor]:
        model(torch.ones(4, 2)).sum().backward()
        follower = model._made()._sites[torch.device("cpu:1")].replicas[0].module
        return dict(follower.named_buffers())

    assert followed() == {}
    for value in (torch.ones(2), torch.ones(3), torch.ones(3).double(), torch.eye(2).to_sparse().coalesce()):
        module.first = value
        found = followed()["first"]
        assert (found.shape, found.dtype) == (value.shape, value.dtype)
        assert torch.equal(found.to_dense(), value.to_dense())
    module.first = torch.eye(2).to_sparse_csr()
    assert torch.equal(followed()["first"].to_dense(), torch.eye(2))
    module.first = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert [len(part) for part in followed()["first"].unbind()] == [1, 2]
    module.register_buffer("later", torch.ones(1))
    assert followed().keys() == {"first", "later"}
    del module.later
    module.register_buffer("first", None)
    assert followed() == {}


def test_a_tensor_without_elements_is_refused_by_name() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("empty", torch.ones(2, device="meta"))
    with pytest.raises(LayoutError, match=r"'empty' is on the meta device.*to_empty"):
        DataParallel(module, ["cpu", "cpu:1"])
