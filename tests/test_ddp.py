"""DistributedDataParallel against training in one process, over a LocalCluster."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradserver import DistributedDataParallel, LocalCluster
from protocol.errors import (
    GradServerError,
    InvalidArgumentError,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
    WorkerLostError,
)
from protocol.limits import MIB
from tests.models import (
    Convolutional,
    Transformer,
    images,
    loss_of,
    optimizer_state,
    state_of,
    tokens,
)
from worker.client import Worker, finished
from worker.handle import Handle

torch.set_num_threads(1)

ROWS = 12
STEPS = 4


def on(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 10.0, **options: Any) -> list[Any]:
    with LocalCluster(world, timeout=timeout) as cluster:
        return cluster.run(fn, *args, **options)


def alone(fn: Callable[[Worker], Any]) -> Any:
    return on(1, fn)[0]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def shard(rank: int, world: int, *tensors: Tensor) -> Iterator[Tensor]:
    return (tensor[rank::world] for tensor in tensors)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative distance of two tensors with one name."""
    assert one.keys() == other.keys()
    return max(float((one[k].double() - v.double()).norm() / v.double().norm()) for k, v in other.items())


def reference(module: nn.Module, steps: int = STEPS) -> dict[str, Tensor]:
    """One process, all rows in one batch."""
    optimizer = sgd(module)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, *tokens(step, ROWS)).backward()
        optimizer.step()
    return state_of(module)


def train(worker: Worker, make: Callable[[int], nn.Module], **options: Any) -> dict[str, Tensor]:
    """A replica that starts with weights of its own and trains on its share of the rows."""
    model = DistributedDataParallel(make(worker.rank), worker, **options)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *shard(worker.rank, worker.world_size, *tokens(step, ROWS))).backward()
        optimizer.step()
    return state_of(model.module)


def assert_like_one_process(results: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert all(same(results[0], other) for other in results[1:])
    assert distance(results[0], expected) < 1e-6


# ── the average, during backward ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_trains_as_one_process_does(world: int) -> None:
    assert_like_one_process(on(world, train, Transformer), reference(Transformer(0)))


def test_without_the_exchange_replicas_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = finished(None)
    monkeypatch.setattr(Worker, "push", lambda *_, **__: handle)
    monkeypatch.setattr(Worker, "finish_round", lambda *_: None)
    results = on(2, train, Transformer)
    assert not same(*results)
    with pytest.raises(AssertionError):
        assert_like_one_process(results, reference(Transformer(0)))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": False},
        {"delay_all_reduce": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": False, "delay_all_reduce": True},
        {"static_graph": True, "gradient_as_bucket_view": False},
        {"blocks": (), "bucket_cap_mb": 0.001},
        {"broadcast_buffers": False, "accumulation": "mean"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_do_not_change_the_result(options: dict[str, Any]) -> None:
    assert_like_one_process(on(3, train, Transformer, **options), reference(Transformer(0)))


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_both_ways_of_zeroing(as_view: bool, to_none: bool) -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker, gradient_as_bucket_view=as_view)
        optimizer = sgd(model)
        for step in range(STEPS):
            loss_of(model, *shard(worker.rank, 2, *tokens(step, ROWS))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return state_of(model.module)

    assert_like_one_process(on(2, work), reference(Transformer(0)))


def test_gradients_live_in_the_buckets_and_stay_there() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        for local in (True, False, False):
            with model.no_sync() if local else nullcontext():
                loss_of(model, *tokens(0, 2)).backward()
            flats = [bucket.flat for bucket in model._rounds.gradients]
            owned = {flat.untyped_storage().data_ptr() for flat in flats}
            assert {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None} == owned
            model.zero_grad()

    alone(work)


def test_gradients_of_their_own_stay_apart() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker, gradient_as_bucket_view=False)
        loss_of(model, *tokens(0, 2)).backward()
        owned = {bucket.flat.untyped_storage().data_ptr() for bucket in model._rounds.gradients}
        assert owned.isdisjoint(p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None)

    alone(work)


Pushed = list[tuple[str, float, bool]]


def pushes(worker: Worker) -> Pushed:
    """Notes what this worker pushes from now on: key, weight, and whether there was data."""
    noted: Pushed = []
    push = worker.push

    def note(bucket: int, data: Any, *, weight: float = 1.0, present: bool = True) -> Handle:
        assert worker.plan is not None
        noted.append((worker.plan.buckets[bucket].key, weight, present))
        return push(bucket, data, weight=weight, present=present)

    worker.push = note  # type: ignore[method-assign]
    return noted


def note_backward(block: nn.Module, noted: Pushed, key: str) -> None:
    """Notes when the gradient of the block's input is there, which is after those of its parameters."""

    def before_forward(_: nn.Module, args: tuple[Any, ...]) -> None:
        args[0].register_hook(lambda _: noted.append((key, 0.0, False)))

    block.register_forward_pre_hook(before_forward)


IN_ORDER = ["lm_head", "final_norm", "block.3", "-3", "block.2", "-2", "block.1", "-1", "block.0", "-0", "embedding"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, IN_ORDER),
        ({"delay_all_reduce": True}, ["-3", "-2", "-1", "-0", *(key for key in IN_ORDER if key[0] != "-")]),
    ],
)
def test_blocks_are_pushed_while_backward_runs(options: dict[str, Any], expected: list[str]) -> None:
    def work(worker: Worker) -> list[str]:
        noted = pushes(worker)
        model = DistributedDataParallel(Transformer(), worker, **options)
        for index in range(4):
            note_backward(model.module.get_submodule(f"blocks.{index}"), noted, f"-{index}")
        loss_of(model, *tokens(0, 2)).backward()
        return [key for key, *_ in noted]

    assert alone(work) == expected


def test_buckets_larger_than_the_credit_in_different_orders() -> None:
    # Each worker fills its credit with the bucket that the other pushes last.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2))

        def forward(self, x: Tensor, first: int) -> Tensor:
            out: Tensor = self.parts[1 - first](self.parts[first](x))
            return out

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Two(), worker)
        model(torch.ones(1, 1024), worker.rank).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with LocalCluster(2, timeout=10.0, credit=2 * MIB) as cluster:
        assert same(*cluster.run(work))


def test_clipping_on_one_worker_does_not_touch_the_others() -> None:
    def work(worker: Worker) -> float:
        model = DistributedDataParallel(Transformer(), worker)
        loss_of(model, *tokens(worker.rank, 2)).backward()
        if worker.rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        worker.barrier()
        return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    norms = on(2, work)
    assert norms[0] == pytest.approx(1e-3, rel=1e-2)
    assert norms[1] > 0.1


def test_two_backwards_without_zeroing_add_up() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        for step in range(2):
            loss_of(model, *shard(worker.rank, 2, *tokens(step, ROWS))).backward()
        return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}

    single = Transformer()
    for step in range(2):
        loss_of(single, *tokens(step, ROWS)).backward()
    assert_like_one_process(on(2, work), {name: p.grad for name, p in single.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_element_types(dtype: torch.dtype) -> None:
    def work(worker: Worker) -> Tensor:
        linear = nn.Linear(3, 2, bias=False)
        linear.weight = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        model = DistributedDataParallel(linear, worker)
        output = model(torch.full((1, 3), worker.rank + 1.0, dtype=dtype)).sum()
        (output.real if dtype.is_complex else output).backward()
        assert linear.weight.grad is not None
        return linear.weight.grad

    for grad in on(2, work):
        assert grad.dtype == dtype
        assert grad.tolist() == [[1.5] * 3] * 2


def test_mixed_element_types() -> None:
    class Mixed(Transformer):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.lm_head.to(torch.float64)
            self.final_norm.to(torch.float64)
            self.final_norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))

    assert_like_one_process(on(2, train, Mixed), reference(Mixed(0)))


def test_tied_weights() -> None:
    def tied(seed: int) -> Transformer:
        return Transformer(seed, tied=True)

    assert_like_one_process(on(2, train, tied), reference(tied(0)))


def test_frozen_parameters_stay_and_are_broadcast() -> None:
    def frozen(seed: int) -> Transformer:
        module = Transformer(seed)
        module.blocks[0].requires_grad_(False)
        return module

    start = state_of(frozen(0))
    results = on(2, train, frozen)
    assert_like_one_process(results, reference(frozen(0)))
    assert torch.equal(results[1]["blocks.0.qkv.weight"], start["blocks.0.qkv.weight"])


def test_parameter_thawed_after_wrapping_is_refused() -> None:
    def work(worker: Worker) -> None:
        module = Transformer()
        module.token.requires_grad_(False)
        model = DistributedDataParallel(module, worker)
        module.token.requires_grad_(True)
        with pytest.raises(UsageError, match=r"'token.weight' was frozen when the module was wrapped"):
            model(tokens(0, 2)[0])

    alone(work)


def test_exchange_seconds_count_the_wait_for_others() -> None:
    def work(worker: Worker) -> float:
        model = DistributedDataParallel(Transformer(), worker)
        assert model.exchange_seconds == 0.0
        loss = loss_of(model, *tokens(0, 2))
        if worker.rank == 1:
            time.sleep(0.3)
        loss.backward()
        return model.exchange_seconds

    waited, late = on(2, work)
    assert 0.25 < waited < 5.0
    assert 0.0 < late < 0.25


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────


def test_weights_by_samples_give_the_mean_over_all_samples() -> None:
    shares = [slice(0, 1), slice(1, 4), slice(4, 12)]

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        for step in range(STEPS):
            inputs, targets = tokens(step, ROWS)
            share = shares[(worker.rank + step) % 3]
            model.set_weight(targets[share].numel())
            optimizer.zero_grad()
            loss_of(model, inputs[share], targets[share]).backward()
            optimizer.step()
        return state_of(model.module)

    assert_like_one_process(on(3, work), reference(Transformer(0)))


def test_weight_zero_has_no_say_not_even_with_nan() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = DistributedDataParallel(Transformer(), worker)
        loss = loss_of(model, *tokens(1, ROWS))
        if worker.rank == 0:
            model.set_weight(0)
            loss = loss * float("nan")
        loss.backward()
        grads = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
        return grads, state_of(model.module)

    single = Transformer()
    loss_of(single, *tokens(1, ROWS)).backward()
    assert_like_one_process(
        [grads for grads, _ in on(3, work)], {n: p.grad for n, p in single.named_parameters() if p.grad is not None}
    )


def test_all_weights_zero_give_zeros() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        model.set_weight(0)
        loss_of(model, *tokens(0, 2)).backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())

    on(2, work)


def test_weight_does_not_change_within_a_round() -> None:
    def work(worker: Worker) -> list[float]:
        noted = pushes(worker)
        model = DistributedDataParallel(Transformer(), worker)
        model.set_weight(3)
        weight: Any = model.get_parameter("module.blocks.1.qkv.weight")
        weight.register_hook(lambda _: model.set_weight(5))
        for _ in range(2):
            loss_of(model, *tokens(0, 2)).backward()
        return [weight for _, weight, _ in noted]

    assert alone(work) == [3.0] * 7 + [5.0] * 7


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weight_that_cannot_be(weight: float) -> None:
    with pytest.raises(InvalidArgumentError, match="a weight is a number from 0"):
        alone(lambda worker: DistributedDataParallel(Transformer(), worker).set_weight(weight))


# ── accumulation ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("accumulation", ["sum", "mean"])
@pytest.mark.parametrize("as_view", [True, False])
def test_gradients_accumulate_inside_no_sync(accumulation: Literal["sum", "mean"], as_view: bool) -> None:
    micro = 3

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(
            Transformer(), worker, accumulation=accumulation, gradient_as_bucket_view=as_view
        )
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(micro):
                with nullcontext() if part == micro - 1 else model.no_sync():
                    loss_of(model, *shard(micro * worker.rank + part, 2 * micro, *tokens(step, ROWS))).backward()
            optimizer.step()
        return state_of(model.module)

    single = Transformer()
    optimizer = sgd(single)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = micro if accumulation == "sum" else 1
        (factor * loss_of(single, *tokens(step, ROWS))).backward()
        optimizer.step()
    assert_like_one_process(on(2, work), state_of(single))


def test_nothing_is_exchanged_inside_no_sync() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        for _ in range(worker.rank):  # another number on each worker
            with model.no_sync(), model.no_sync():
                loss_of(model, *tokens(0, 2)).backward()
        assert worker.round == 0
        loss_of(model, *tokens(0, 2)).backward()
        assert worker.round == 1

    on(3, work)


def test_mean_counts_only_backwards_since_the_gradients_were_thrown_away() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker, accumulation="mean")
        loss_of(model, *tokens(0, 2)).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with model.no_sync():
            loss_of(model, *tokens(0, 2)).backward()
        model.zero_grad()
        loss_of(model, *tokens(0, 2)).backward()
        assert same(expected, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    alone(work)


def test_mean_is_taken_once() -> None:
    def work(worker: Worker) -> None:
        linear = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(linear, worker, accumulation="mean")
        for _ in range(2):
            for part in range(4):
                with nullcontext() if part == 3 else model.no_sync():
                    model(torch.ones(1, 1)).sum().backward()
            assert linear.weight.grad == torch.ones(1, 1)
            model.zero_grad()

    on(2, work)


def test_parameter_that_only_an_accumulated_backward_used() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        with model.no_sync():
            loss_of(model, *shard(worker.rank, 2, *tokens(0, ROWS)), branch=True).backward()
        loss_of(model, *shard(worker.rank, 2, *tokens(1, ROWS))).backward()
        return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}

    single = Transformer(branch=True)
    loss_of(single, *tokens(0, ROWS), branch=True).backward()
    loss_of(single, *tokens(1, ROWS)).backward()
    assert_like_one_process(on(2, work), {n: p.grad for n, p in single.named_parameters() if p.grad is not None})


# ── parameters that are not always used ───────────────────────────────────────────────────────────────


def test_unused_parameter_is_an_error_that_names_it() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        with pytest.raises(
            UsageError, match=r"no gradient came for 'branch.weight', 'branch.bias' of .*find_unused_parameters=True"
        ):
            loss_of(model, *tokens(0, 2)).backward()
        match = r"an exchange failed \(UsageError: no gradient came"
        with pytest.raises(OutOfStepError, match=match):
            loss_of(model, *tokens(0, 2))
        with pytest.raises(OutOfStepError, match=match):
            loss_of(model.module, *tokens(0, 2)).backward()

    on(2, work)


def test_parameter_that_is_unused_in_a_later_step_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        loss_of(model, *tokens(0, 2), branch=True).backward()
        with pytest.raises(UsageError, match=r"no gradient came for 'branch.weight', 'branch.bias'"):
            loss_of(model, *tokens(1, 2)).backward()

    alone(work)


def test_others_are_told_of_a_worker_that_failed() -> None:
    def work(worker: Worker) -> str:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        try:
            loss_of(model, *tokens(0, 2), branch=worker.rank == 0).backward()
        except UsageError:
            worker.abort("its loss does not depend on branch")
        except WorkerLostError as error:
            return str(error)
        return ""

    told, _ = on(2, work)
    assert "'worker-1'" in told
    assert "does not depend on branch" in told


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("as_view", [True, False])
def test_parameter_that_nobody_uses_is_left_alone(option: str, as_view: bool) -> None:
    # Weight decay and momentum would change it if it had a gradient of zeros.
    def branching(seed: int) -> Transformer:
        return Transformer(seed, branch=True)

    results = on(2, train, branching, gradient_as_bucket_view=as_view, **{option: True})
    assert_like_one_process(results, reference(branching(0)))
    assert torch.equal(results[0]["branch.weight"], branching(0).get_parameter("branch.weight"))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_parameter_that_one_worker_uses_counts_as_zeros_for_the_others(to_none: bool, as_view: bool) -> None:
    def uses(rank: int, step: int) -> bool:
        return (rank + step) % 3 == 0 and step != 1

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(
            Transformer(branch=True), worker, find_unused_parameters=True, gradient_as_bucket_view=as_view
        )
        optimizer = sgd(model)
        for step in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            data = shard(worker.rank, 2, *tokens(step, ROWS))
            loss_of(model, *data, branch=uses(worker.rank, step)).backward()
            optimizer.step()
        return state_of(model.module)

    single = Transformer(branch=True)
    optimizer = sgd(single)
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        losses = [loss_of(single, *shard(r, 2, *tokens(step, ROWS)), branch=uses(r, step)) for r in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
    assert_like_one_process(on(2, work), state_of(single))


def test_unused_bucket_is_not_sent() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Any:
            return self.blocks[0](x)

    def work(worker: Worker) -> Pushed:
        noted = pushes(worker)
        model = DistributedDataParallel(Half(), worker, find_unused_parameters=True)
        model(torch.ones(1, 2)).sum().backward()
        return noted

    assert on(2, work) == [[("block.0", 1.0, True), ("block.1", 1.0, False), ("used", 1.0, True)]] * 2


def test_static_graph_exchanges_during_backward_from_the_second_step_on() -> None:
    def work(worker: Worker) -> list[str]:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        loss_of(model, *tokens(0, 2)).backward()
        noted = pushes(worker)
        note_backward(model.get_submodule("module.blocks.0"), noted, "-0")
        loss_of(model, *tokens(0, 2)).backward()
        return [key for key, *_ in noted]

    # The head waits for nobody, though the branch in its bucket gets no gradient.
    expected = ["used", "lm_head", "final_norm", "block.3", "block.2", "block.1", "block.0", "-0", "embedding"]
    assert alone(work) == expected


def test_static_graph_that_changes_is_an_error() -> None:
    def work(worker: Worker, first: bool) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        loss_of(model, *tokens(0, 2), branch=first).backward()
        times = (0, 1) if first else (1, 0)
        match = r"the graph changed: the gradient of 'branch.(weight|bias)' became ready {} times .* and {} times in"
        with pytest.raises(UsageError, match=match.format(*times)):
            loss_of(model, *tokens(1, 2), branch=not first).backward()

    for first in (True, False):
        on(1, work, first)


def test_worker_may_learn_its_static_graph_late() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(3 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
        with model.join(optimizer):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, *tokens(step + worker.rank, 2)).backward()
                optimizer.step()
        return state_of(model.module)

    assert same(*on(2, work))


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_reentrant_checkpoints(options: dict[str, Any]) -> None:
    def checkpointed(seed: int) -> Transformer:
        return Transformer(seed, checkpointed=True)

    assert_like_one_process(on(2, train, checkpointed, **options), reference(Transformer(0)))


@pytest.mark.parametrize("options", [{"static_graph": True}, {"delay_all_reduce": True}])
def test_reentrant_checkpoints_of_a_part_that_is_used_twice(options: dict[str, Any]) -> None:
    def twice(seed: int) -> Transformer:
        return Transformer(seed, checkpointed=True, twice=True)

    assert_like_one_process(on(2, train, twice, **options), reference(Transformer(0, twice=True)))


def test_gradient_that_is_ready_twice_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(checkpointed=True, twice=True), worker)
        with pytest.raises(UsageError, match=r"'blocks.3.\S+' became ready a second time .*static_graph=True"):
            loss_of(model, *tokens(0, 2)).backward()

    alone(work)


def test_everything_inside_one_reentrant_checkpoint() -> None:
    # No parameter's hook runs in the outer backward: only the output tells of it.
    class Whole(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = Transformer(seed)
            self.second = nn.Linear(17, 17)

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            start = torch.zeros((), requires_grad=True)
            hidden = checkpoint(lambda x, _: self.inner(x), x, start, use_reentrant=True)
            return {"logits": [checkpoint(self.second, hidden, use_reentrant=True)]}

    def work(worker: Worker) -> int:
        model = DistributedDataParallel(Whole(0), worker)
        model(tokens(0, 2)[0])["logits"][0].sum().backward()
        return worker.round

    assert on(2, work) == [1, 1]


# ── uneven inputs ─────────────────────────────────────────────────────────────────────────────────────


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("batches", [[3, 1, 2], [0, 2, 2], [2, 2, 2]])
def test_workers_may_have_different_numbers_of_batches(
    batches: list[int], options: dict[str, Any], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Transformer(worker.rank, branch=bool(options)), worker, **options)
        optimizer = make_optimizer(model)
        for _ in range(2):
            with model.join(optimizer):
                for step in range(batches[worker.rank]):
                    optimizer.zero_grad()
                    loss_of(model, *shard(worker.rank, 3, *tokens(step, ROWS))).backward()
                    optimizer.step()
            assert all(p.grad is None for p in model.parameters())
        assert worker.round == 2 * (max(batches) + 1)
        return state_of(model.module), list(optimizer_state(optimizer))

    single = Transformer(branch=bool(options))
    optimizer = make_optimizer(single)
    for _ in range(2):
        for step in range(max(batches)):
            optimizer.zero_grad()
            active = [rank for rank in range(3) if step < batches[rank]]
            losses = [loss_of(single, *shard(rank, 3, *tokens(step, ROWS))) for rank in active]
            (sum(losses) / len(losses)).backward()
            optimizer.step()
    results = on(3, work)
    assert all(same(results[0][0], state) for state, _ in results)
    assert all(all(map(torch.equal, results[0][1], tensors)) for _, tensors in results)
    # Adam divides by the root of tiny second moments, which blows up the last bit.
    assert distance(results[0][0], state_of(single)) < (1e-6 if make_optimizer is sgd else 1e-4)


@pytest.mark.parametrize("to_none", [True, False])
def test_worker_without_batches_follows_what_is_unused_too(to_none: bool) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Transformer(branch=True), worker, find_unused_parameters=True)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(1 + 4 * worker.rank):
                optimizer.zero_grad(set_to_none=to_none)
                loss_of(model, *tokens(step, 2), branch=step % 2 == 0).backward()
                optimizer.step()
        return state_of(model.module), list(optimizer_state(optimizer))

    (state, momenta), (other_state, other_momenta) = on(2, work)
    assert same(state, other_state)
    assert all(map(torch.equal, momenta, other_momenta))


def test_join_takes_functions_and_several_steps() -> None:
    def work(worker: Worker) -> tuple[int, float]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        calls: list[int] = []
        with model.join([optimizer, scheduler.step, lambda: calls.append(1)]):
            for step in range(3 - 2 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
                scheduler.step()
        return len(calls), optimizer.param_groups[0]["lr"]

    assert on(2, work) == [(0, 0.1 / 8), (2, 0.1 / 8)]


def test_gradients_left_from_no_sync_count_in_one_more_exchange() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            if worker.rank == 0:
                with model.no_sync():
                    loss_of(model, *tokens(0, ROWS)).backward()
        return state_of(model.module)

    assert_like_one_process(on(2, work), reference(Transformer(), steps=1))


def test_worker_of_weight_zero_does_not_look_like_one_without_batches() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], int]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(1 + 2 * worker.rank):
                model.set_weight(step % 2)  # the first batch has no valid token anywhere
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
        return state_of(model.module), worker.round

    (state, rounds), (other, _) = on(2, work)
    assert same(state, other)
    assert rounds == 4


def test_join_passes_on_an_exception_at_once() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        with model.join(sgd(model)):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on(2, work)


# ── buffers, modes ────────────────────────────────────────────────────────────────────────────────────


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_those_of_the_lowest_rank_after_each_backward() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker)
        history = []
        for step in range(3):
            loss = loss_of(model, *images(10 * step + worker.rank, 4))
            mine = buffers(model.module)
            loss.backward()
            assert same(mine, buffers(model.module)) == (worker.rank == 0)
            history.append(buffers(model.module))
        return history

    for first, *others in zip(*on(3, work), strict=True):
        assert all(same(first, other) for other in others)


def test_buffers_are_those_of_the_lowest_rank_that_has_a_batch() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(), worker)
        optimizer = sgd(model)
        mine = {}
        with model.join(optimizer):
            for step in range(worker.rank):
                optimizer.zero_grad()
                loss = loss_of(model, *images(step, 4))
                mine = buffers(model.module)
                loss.backward()
                optimizer.step()
        return [mine, buffers(model.module)]

    (_, first), (of_rank_1, second) = on(2, work)
    assert same(first, second)
    assert same(second, of_rank_1)


def test_buffers_may_be_left_alone() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Convolutional()
        module.get_buffer("norm.running_mean").fill_(worker.rank)
        model = DistributedDataParallel(module, worker, broadcast_buffers=False)
        loss_of(model, *images(worker.rank, 4)).backward()
        return buffers(module)

    assert not same(*on(2, work))


def test_two_forwards_before_two_backwards() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Convolutional(), worker)
        losses = [loss_of(model, *images(step, 4)) for step in range(2)]
        for loss in losses:
            loss.backward()

    on(2, work)


def test_nothing_is_exchanged_in_eval_mode() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker)
        model.eval()
        assert not model.module.training
        before = buffers(model.module)
        for _ in range(worker.rank + 1):
            model(images(worker.rank, 4)[0])
        assert same(before, buffers(model.module))
        loss = loss_of(model, *images(worker.rank, 4))
        if worker.rank == 0:
            with pytest.warns(UserWarning, match="the gradients stay with this worker"):
                loss.backward()
            assert worker.round == 0
        model.zero_grad()
        model.train()
        loss_of(model, *images(worker.rank, 4)).backward()
        assert worker.round == 1
        return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}

    assert same(*on(2, work))


def test_module_wrapped_in_eval_mode_is_in_eval_mode() -> None:
    assert alone(lambda worker: DistributedDataParallel(Transformer().eval(), worker).training) is False


def test_autograd_grad_exchanges_nothing() -> None:
    def work(worker: Worker) -> int:
        model = DistributedDataParallel(Convolutional(), worker)
        inputs = images(0, 2)[0].requires_grad_()
        if worker.rank == 0:
            torch.autograd.grad(model(inputs).sum(), inputs)
        loss_of(model, *images(0, 2)).backward()
        return worker.round

    assert on(2, work) == [1, 1]


# ── construction and state ────────────────────────────────────────────────────────────────────────────


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


def test_second_module_on_one_worker_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        DistributedDataParallel(Convolutional(), worker)
        with pytest.raises(UsageError, match="agreed on another plan after this module was wrapped"):
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
    assert [line.split()[0] for line in lines[1:]] == ["bucket.0", "buffers.float32", "buffers.int64", "3"]


def test_wrapper_that_is_dropped_takes_its_hooks_along() -> None:
    def work(worker: Worker) -> int:
        module = Transformer()
        model = DistributedDataParallel(module, worker)
        del model
        loss_of(module, *tokens(0, 2)).backward()
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        return worker.round

    assert alone(work) == 0


# ── when things go wrong ──────────────────────────────────────────────────────────────────────────────


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
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

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
