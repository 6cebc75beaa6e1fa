"""GradientExchange: the training step of a trainer that owns its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradserver import LocalCluster
from gradserver.protocol.errors import (
    DisagreementError,
    DTypeError,
    GradServerError,
    InvalidArgumentError,
    LayoutError,
    OutOfStepError,
    PlanMismatchError,
    SizeMismatchError,
    UsageError,
)
from gradserver.worker.client import Worker
from gradserver.worker.planes.epochs import Directs
from gradserver.worker.torch_ddp.blocks import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    GradientExchange,
    flatten,
    local_mean,
    unflatten,
)
from gradserver.worker.torch_ddp.flatten import BlockShape
from tests.cluster import members, together, wait_until

torch.set_num_threads(1)

SHAPE = BlockShape(hidden=4, kv_dim=2, intermediate=6)
BLOCKS = 3
HEAD, NORM, EMBED = 20, 4, 12


_channel = {"over": "memory"}
"""The channel of the test that runs."""


@pytest.fixture(autouse=True, params=["memory", pytest.param("direct", marks=pytest.mark.long)])
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test over the coordinator, and on the direct plane."""
    monkeypatch.setitem(_channel, "over", request.param)


def in_a_cluster(world: int, fn: Callable[[Worker], Any]) -> list[Any]:
    with LocalCluster(world, timeout=10.0) as cluster:
        return cluster.run(fn)


def on(world: int, fn: Callable[[Worker], Any]) -> list[Any]:
    with members(_channel["over"], world, timeout=10.0) as workers:
        return together(workers, fn)


def alone(fn: Callable[[Worker], Any]) -> Any:
    return on(1, fn)[0]


def exchange_for(worker: Worker, **changes: Any) -> GradientExchange:
    sizes = {"lm_head": HEAD, "final_norm": NORM, "embedding": EMBED} | changes
    return GradientExchange(worker, BLOCKS, SHAPE, **sizes)


def gradients(rank: int, step: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng([rank, step])
    sizes = {f"block.{i}": SHAPE.numel for i in range(BLOCKS)} | {"lm_head": HEAD, "norm": NORM, "embedding": EMBED}
    return {key: random.standard_normal(size).astype(np.float32) for key, size in sizes.items()}


def test_whole_step_as_in_the_docstring() -> None:
    counts, world, steps = (3, 1, 4), 3, 4

    def train(worker: Worker) -> dict[str, Any]:
        exchange = exchange_for(worker)
        weights = {key: np.zeros_like(g) for key, g in gradients(0, 0).items()}
        for step in range(steps):
            sums, count = gradients(worker.rank, step), counts[worker.rank]
            for gradient in sums.values():
                local_mean(gradient, count)
            for index in reversed(range(BLOCKS)):
                exchange.push_block(step, index, sums[f"block.{index}"])
            for component, key in enumerate(("lm_head", "norm", "embedding")):
                exchange.push_non_block(step, component, sums[key])
            exchange.finish()
            for key, weight in weights.items():
                weight -= 0.1 * sums[key]
        assert exchange.step == steps
        return weights

    results = on(world, train)
    for key, first in results[0].items():
        exact = sum(
            -0.1 * np.mean([gradients(r, s)[key].astype(np.float64) / counts[r] for r in range(world)], axis=0)
            for s in range(steps)
        )
        assert np.allclose(first, exact, rtol=1e-6, atol=1e-6)
        assert all(np.array_equal(first, other[key]) for other in results)


def test_weights_make_the_mean_one_over_samples() -> None:
    def push(worker: Worker) -> float:
        exchange = GradientExchange(worker, 0, (), lm_head=1)
        data = np.array([float(worker.rank)], np.float32)
        handle = exchange.push_non_block(0, LM_HEAD, data, weight=worker.rank + 1)
        exchange.finish()
        assert handle.weight == 6.0
        return float(data[0])

    assert on(3, push) == [pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)] * 3


def test_weight_zero_gets_the_mean_of_the_others() -> None:
    def push(worker: Worker) -> float:
        exchange = GradientExchange(worker, 1, (1,))
        data = np.array([np.nan if worker.rank == 0 else worker.rank], np.float32)
        exchange.push_block(0, 0, data, weight=min(worker.rank, 1))
        exchange.finish()
        return float(data[0])

    assert on(3, push) == [1.5] * 3


def test_blocks_may_come_in_any_order_and_differ_between_workers() -> None:
    def push(worker: Worker) -> list[float]:
        exchange = GradientExchange(worker, 3, [(1,), (2,), (3,)])
        data = [np.full(index + 1, worker.rank + 10.0 * index, np.float32) for index in range(3)]
        order = [0, 1, 2] if worker.rank else [1, 2, 0]
        for index in order:
            exchange.push_block(0, index, data[index])
        exchange.finish()
        return [float(array[-1]) for array in data]

    assert on(2, push) == [[0.5, 10.5, 20.5]] * 2


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_components_get_their_means_in_place(library: str) -> None:
    def push(worker: Worker) -> None:
        exchange = GradientExchange(worker, 1, (6, 2))
        parts: list[Any] = [np.full((2, 3), worker.rank, np.float32), np.full(2, 3.0 * worker.rank, np.float32)]
        if library == "torch":
            parts = [torch.from_numpy(part).requires_grad_() for part in parts]
        exchange.push_block(0, 0, parts, component_sizes=(6, 2))
        exchange.finish()
        assert [part.tolist() for part in parts] == [[[0.5] * 3] * 2, [1.5] * 2]

    on(2, push)


def test_gradient_that_does_not_lie_well_goes_through_a_copy() -> None:
    def push(worker: Worker) -> None:
        exchange = GradientExchange(worker, 2, (3,))
        strided = torch.zeros(6)
        every_other = np.zeros(6, np.float32)
        strided[::2] = worker.rank
        every_other[::2] = worker.rank
        handle = exchange.push_block(0, 1, strided[::2])
        exchange.push_block(0, 0, every_other[::2])
        handle.wait()
        assert strided.tolist() == [0.5, 0] * 3
        exchange.finish()
        assert every_other.tolist() == [0.5, 0] * 3

    on(2, push)


def test_flatten_and_unflatten_are_there() -> None:
    parts = [torch.ones(2, 2), torch.zeros(3)]
    flat, sizes = flatten(parts)
    assert [part.tolist() for part in unflatten(flat, sizes)] == [[1.0] * 4, [0.0] * 3]


def test_element_type() -> None:
    def push(worker: Worker) -> float:
        exchange = GradientExchange(worker, 1, (1,), dtype="bfloat16")
        data = torch.tensor([float(worker.rank)], dtype=torch.bfloat16)
        exchange.push_block(0, 0, data)
        exchange.finish()
        return data.item()

    assert on(2, push) == [0.5, 0.5]


def test_plan_is_in_the_order_of_the_step_and_names_components() -> None:
    plan = alone(lambda worker: exchange_for(worker).plan)
    assert [b.key for b in plan.buckets] == ["block.2", "block.1", "block.0", "lm_head", "final_norm", "embedding"]
    assert [c.name for c in plan.buckets[0].components][:2] == ["block.2.w_q", "block.2.w_k"]
    assert plan.buckets[0].sizes == SHAPE.component_sizes


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────


def refused(error: type[GradServerError], match: str, fn: Callable[[GradientExchange], object]) -> None:
    """Check that ``fn`` raises, and that afterwards the step can still be done."""

    def work(worker: Worker) -> None:
        exchange = exchange_for(worker)
        with pytest.raises(error, match=match):
            fn(exchange)
        data = gradients(0, 0)
        for index in range(BLOCKS):
            exchange.push_block(0, index, data[f"block.{index}"])
        for component, key in enumerate(("lm_head", "norm", "embedding")):
            exchange.push_non_block(0, component, data[key])
        exchange.finish()

    alone(work)


BLOCK = np.zeros(SHAPE.numel, np.float32)
READ_ONLY = np.zeros(SHAPE.numel, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("error", "match", "fn"),
    [
        (OutOfStepError, "block 0 came for step 1, but step 0 is due", lambda e: e.push_block(1, 0, BLOCK)),
        (OutOfStepError, "final_norm came for step 7", lambda e: e.push_non_block(7, FINAL_NORM, np.zeros(NORM))),
        (InvalidArgumentError, "no block 3: this exchange has 3", lambda e: e.push_block(0, 3, BLOCK)),
        (InvalidArgumentError, "no block -1", lambda e: e.push_block(0, -1, BLOCK)),
        (InvalidArgumentError, "component is 0", lambda e: e.push_non_block(0, 3, BLOCK)),
        (SizeMismatchError, "'block.0' was agreed with 128 elements, got 127", lambda e: e.push_block(0, 0, BLOCK[1:])),
        (DTypeError, "agreed as float32, got float64", lambda e: e.push_block(0, 0, BLOCK.astype(np.float64))),
        (LayoutError, "read-only", lambda e: e.push_block(0, 0, READ_ONLY)),
        (
            SizeMismatchError,
            "component sizes of block 0 sum to 3, but its gradient has 128 elements",
            lambda e: e.push_block(0, 0, BLOCK, component_sizes=(1, 2)),
        ),
        (
            SizeMismatchError,
            "block 0 has component sizes (100, 28), agreed on were",
            lambda e: e.push_block(0, 0, BLOCK, component_sizes=(100, 28)),
        ),
        (
            SizeMismatchError,
            "the components of block.0 have (100, 28) elements, agreed on were",
            lambda e: e.push_block(0, 0, [BLOCK[:100], BLOCK[100:]]),
        ),
        (InvalidArgumentError, "a weight is", lambda e: e.push_block(0, 0, BLOCK, weight=-1.0)),
        (OutOfStepError, "not pushed: .'block.2'", lambda e: e.finish()),
    ],
)
def test_refused_before_anything_is_sent(
    error: type[GradServerError], match: str, fn: Callable[[GradientExchange], object]
) -> None:
    refused(error, match.replace("(", "\\(").replace(")", "\\)"), fn)


def test_second_push_of_one_block_is_out_of_step() -> None:
    def work(worker: Worker) -> None:
        exchange = exchange_for(worker)
        exchange.push_block(0, 0, BLOCK.copy())
        with pytest.raises(OutOfStepError, match="'block.0' was already pushed"):
            exchange.push_block(0, 0, BLOCK.copy())

    alone(work)


def test_sizes_that_differ_are_named() -> None:
    with pytest.raises(PlanMismatchError, match=r"has block\.1\.1 \(4, float32.*has block\.1\.1 \(5, float32"):
        in_a_cluster(2, lambda worker: GradientExchange(worker, 2, (3, 4 + worker.rank)))


def test_first_steps_that_differ_are_named() -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(DisagreementError) as caught:
            exchange_for(worker, step=5 * worker.rank)
        return str(caught.value)

    assert in_a_cluster(2, work) == ["the workers begin at different steps: 'worker-0' at 0, 'worker-1' at 5"] * 2


def test_first_step_of_a_resumed_run() -> None:
    def work(worker: Worker) -> None:
        exchange = GradientExchange(worker, 1, (2,), step=100)
        exchange.push_block(100, 0, np.ones(2, np.float32))
        exchange.finish()
        assert exchange.step == 101

    on(2, work)


def test_missing_embedding_is_an_empty_bucket() -> None:
    def work(worker: Worker) -> float:
        exchange = GradientExchange(worker, 1, (1,), embedding=0)
        data = np.array([worker.rank], np.float32)
        exchange.push_block(0, 0, data)
        exchange.push_non_block(0, EMBEDDING, np.zeros(0, np.float32))
        exchange.finish()
        return float(data[0])

    assert on(2, work) == [0.5, 0.5]


def test_sizes_for_another_number_of_blocks() -> None:
    with pytest.raises(InvalidArgumentError, match="sizes for 2 blocks, but 3 blocks"):
        alone(lambda worker: GradientExchange(worker, 3, [(1,), (2,)]))


def test_exchange_whose_plan_was_replaced() -> None:
    def work(worker: Worker) -> None:
        first = GradientExchange(worker, 1, (2,))
        worker.agree(first.plan)
        with pytest.raises(UsageError, match="agreed on a plan in place of all others"):
            first.push_block(0, 0, np.zeros(2, np.float32))

    alone(work)


# ── on the direct plane ───────────────────────────────────────────────────────────────────────────────


def step_of(worker: Worker, exchange: GradientExchange, waits: bool) -> list[float]:
    """Do a step, with a wait for the first block before the others are pushed, if it ``waits``."""
    own = gradients(worker.rank, exchange.step)
    for index in reversed(range(BLOCKS)):
        handle = exchange.push_block(exchange.step, index, own[f"block.{index}"], weight=1.0 + worker.rank)
        if waits:
            handle.wait()
    for component, key in enumerate(("lm_head", "norm", "embedding")):
        handle = exchange.push_non_block(exchange.step, component, own[key], weight=1.0 + worker.rank)
    handle.wait()
    assert handle.weight == 6.0
    found = [float(one) for one in own["embedding"]] + [float(one) for one in own["block.2"]]
    exchange.finish()
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_rounds_of_an_exchange_are_direct_and_a_wait_for_one_block_sends_them_over_the_coordinator(waits: bool) -> None:
    def work(worker: Worker) -> tuple[list[list[float]], int]:
        exchange = exchange_for(worker)
        steps = [step_of(worker, exchange, waits and worker.rank == 1) for _ in range(4)]
        return steps, Directs.of(worker).voids

    with members("direct", 3) as workers:
        found = together(workers, work)
    for step in range(4):
        each = [gradients(rank, step) for rank in range(3)]
        means = [sum((rank + 1) * each[rank][key] for rank in range(3)) / 6 for key in ("embedding", "block.2")]
        assert np.allclose(found[0][0][step], np.concatenate(means), rtol=1e-5, atol=1e-6)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == int(waits)


def test_a_member_that_makes_a_round_void_closes_its_connections_before_the_round_is_over() -> None:
    """Test a reduction that is done at this member: when it is dropped, the others' next ones fail, and do not wait."""

    def are_given_up() -> bool:
        return not any(thread.name == "gradserver-give-up" for thread in threading.enumerate())

    def work(worker: Worker) -> None:
        exchange = exchange_for(worker)
        if worker.rank != 1:
            step_of(worker, exchange, False)
            return
        own = gradients(worker.rank, 0)
        handle = exchange.push_block(0, 2, own["block.2"], weight=2.0)
        assert exchange._rounds is not None
        under_way: dict[int, Any] = exchange._rounds._plane._under_way
        wait_until(lambda: all(one._work.is_completed() for one in under_way.values()), "the first reduction is done")
        handle.wait()
        wait_until(are_given_up, "no thread of gloo waits for another member", 10)
        for index in (1, 0):
            exchange.push_block(0, index, own[f"block.{index}"], weight=2.0)
        for component, key in enumerate(("lm_head", "norm", "embedding")):
            exchange.push_non_block(0, component, own[key], weight=2.0)
        exchange.finish()

    with members("direct", 3) as workers:
        together(workers, work)
