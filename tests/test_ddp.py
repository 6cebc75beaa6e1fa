"""DistributedDataParallel: the average, against training in one process."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gradserver import DistributedDataParallel, LocalCluster
from gradserver.protocol.errors import (
    DTypeError,
    InvalidArgumentError,
    UsageError,
)
from gradserver.protocol.limits import MIB
from gradserver.worker.client import Worker, finished
from tests.models import (
    Transformer,
    loss_of,
    state_of,
    tokens,
)
from tests.replicas import (
    ROWS,
    STEPS,
    alone,
    assert_like_one_process,
    gradients,
    note_backward,
    on,
    pushes,
    reference,
    same,
    sgd,
    shard,
    train,
)

torch.set_num_threads(1)

# ── the average, during backward ─────────────────────────────────────────────────────────────────────


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
        return gradients(model)

    with LocalCluster(2, timeout=10.0, credit=2 * MIB) as cluster:
        assert same(*cluster.run(work))


def test_clipping_on_one_worker_does_not_touch_the_others() -> None:
    def work(worker: Worker) -> float:
        model = DistributedDataParallel(Transformer(), worker)
        loss_of(model, *tokens(worker.rank, 2)).backward()
        if worker.rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        worker.barrier()
        return float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))

    norms = on(2, work)
    assert norms[0] == pytest.approx(1e-3, rel=1e-2)
    assert norms[1] > 0.1


def test_two_backwards_without_zeroing_add_up() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        for step in range(2):
            loss_of(model, *shard(worker.rank, 2, *tokens(step, ROWS))).backward()
        return gradients(model.module)

    single = Transformer()
    for step in range(2):
        loss_of(single, *tokens(step, ROWS)).backward()
    assert_like_one_process(on(2, work), gradients(single))


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
    accumulated, late = threading.Semaphore(0), 0.3

    def work(worker: Worker) -> tuple[float, float]:
        model = DistributedDataParallel(Transformer(), worker)
        assert model.exchange_seconds == 0.0
        loss = loss_of(model, *tokens(0, 2))
        parameters = list(model.module.parameters())
        for parameter in parameters:
            if worker.rank == 0:
                parameter.register_post_accumulate_grad_hook(lambda _: accumulated.release())  # type: ignore[no-untyped-call]
            else:  # until the other worker has nothing to do but wait
                assert accumulated.acquire(timeout=60)
        if worker.rank == 1:
            time.sleep(late)
        began = time.perf_counter()
        loss.backward()
        return model.exchange_seconds, time.perf_counter() - began

    (waited, of_one), (of_late, of_other) = on(2, work)
    assert late / 2 < waited < of_one
    assert 0.0 < of_late < of_other, "the time before backward() is no exchange"


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────


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
        grads = gradients(model.module)
        return grads, state_of(model.module)

    single = Transformer()
    loss_of(single, *tokens(1, ROWS)).backward()
    assert_like_one_process([grads for grads, _ in on(3, work)], gradients(single))


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


# ── accumulation ─────────────────────────────────────────────────────────────────────────────────────


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
            with model.no_sync():
                with model.no_sync():
                    pass
                loss_of(model, *tokens(0, 2)).backward()
        assert worker.round == 0
        loss_of(model, *tokens(0, 2)).backward()
        assert worker.round == 1

    on(3, work)


def test_mean_counts_only_backwards_since_the_gradients_were_thrown_away() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker, accumulation="mean")
        loss_of(model, *tokens(0, 2)).backward()
        expected = gradients(model)
        model.zero_grad()
        with model.no_sync():
            loss_of(model, *tokens(0, 2)).backward()
        model.zero_grad()
        loss_of(model, *tokens(0, 2)).backward()
        assert same(expected, gradients(model))

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
        return gradients(model.module)

    single = Transformer(branch=True)
    loss_of(single, *tokens(0, ROWS), branch=True).backward()
    loss_of(single, *tokens(1, ROWS)).backward()
    assert_like_one_process(on(2, work), gradients(single))


# ── small gradients side by side ─────────────────────────────────────────────────────────────────────


class _Vectors(nn.Module):
    """Vectors of different lengths side by side, of which the first can be left unused, and a matrix before them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((1 + number % 3,), 0.5)) for number in range(12))
        self.matrix = nn.Parameter(torch.ones(2, 3))

    def forward(self, scale: float, uses_all: bool = True) -> Tensor:
        used = list(self.parts)[0 if uses_all else 1 :]
        parts = [(part * part * (scale + number)).sum() for number, part in enumerate(used)]
        return torch.stack([*parts, self.matrix.sum() * scale]).sum()


def _gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("uses_all", [True, False])
def test_vectors_side_by_side(as_view: bool, to_none: bool, local: int, uses_all: bool) -> None:
    def expected(step: int) -> list[Tensor]:
        found = []
        for rank in range(2):
            module = _Vectors()
            for part in range(local + 1):
                module(float(1 + rank + step + part), uses_all).backward()
            found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
        return [(one + other) / 2 for one, other in zip(*found, strict=True)]

    def work(worker: Worker) -> None:
        options: dict[str, Any] = {"gradient_as_bucket_view": as_view, "find_unused_parameters": not uses_all}
        model = DistributedDataParallel(_Vectors(), worker, **options)
        for step in range(3):
            for part in range(local + 1):
                with model.no_sync() if part < local else nullcontext():
                    model(float(1 + worker.rank + step + part), uses_all).backward()
            got = _gradients_of(model)
            assert [one is None for one in got] == [number == 1 and not uses_all for number in range(13)]
            wanted = expected(step)
            assert all(one is None or torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
            model.zero_grad(set_to_none=to_none)

    on(2, work)


def test_vectors_side_by_side_are_brought_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = torch._foreach_copy_

    def noted(to: list[Tensor], of: list[Tensor]) -> None:
        sizes.append(len(to))
        plain(to, of)

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(_Vectors(), worker)
        monkeypatch.setattr(torch, "_foreach_copy_", noted)
        model(1.0).backward()
        assert sizes == [1]  # the matrix

    alone(work)


@pytest.mark.parametrize("change", ["type", "length"])
def test_vector_that_does_not_fit_any_more_is_not_brought(change: str) -> None:
    def work(worker: Worker) -> None:
        vectors = _Vectors()
        model = DistributedDataParallel(vectors, worker)
        one, other = vectors.parts[1:3]
        if change == "type":
            one.grad_dtype = torch.float64
            one.register_hook(lambda grad: grad.double())
            with pytest.raises(DTypeError, match=r"the gradient of 'parts\.1' is torch\.float64"):
                model(1.0).backward()
        else:  # the sum of lengths is as before
            one.data, other.data = torch.ones(3), torch.ones(2)
            with pytest.raises(RuntimeError, match="size"):
                model(1.0).backward()

    alone(work)
