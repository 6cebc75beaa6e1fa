"""Rounds of a plan, over each channel: buckets pushed as they become ready, and handed back averaged."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.errors import (
    DeadlineError,
    DTypeError,
    GradServerError,
    InvalidArgumentError,
    LayoutError,
    LimitExceededError,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    SizeMismatchError,
    UnsupportedOperationError,
    UsageError,
    WorkerLeftError,
    WorkerLostError,
)
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import MIN_CREDIT_BYTES
from gradserver.protocol.plan import Bucket, Component, Plan, simple_plan
from gradserver.worker.client import Worker
from tests.cluster import Gather, Task, errors, together
from tests.reference import TYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Array = np.ndarray[Any, Any]


def plan_of(*sizes: int) -> Plan:
    """Return a plan of buckets ``b0``, ``b1``, … of float32."""
    return simple_plan([(f"b{index}", size) for index, size in enumerate(sizes)], FLOAT32)


def agree(workers: list[Worker], plan: Plan) -> None:
    together(workers, lambda worker: worker.agree(plan))


def agreed(gather: Gather, world_size: int, *sizes: int) -> list[Worker]:
    workers = gather(world_size)
    agree(workers, plan_of(*sizes))
    return workers


def full(worker: Worker, bucket: int, value: float) -> Array:
    assert worker.plan is not None
    return np.full(worker.plan.buckets[bucket].numel, value, np.float32)


def exchange(worker: Worker, value: float) -> list[float]:
    """Exchange one round with ``value`` in every element. Return the first element of each bucket's result."""
    assert worker.plan is not None
    data = [full(worker, index, value) for index, bucket in enumerate(worker.plan.buckets) if bucket.numel]
    for index, array in enumerate(data):
        worker.push(index, array)
    worker.finish_round()
    for array in data:
        assert (array == array[0]).all()
    return [float(array[0]) for array in data]


# ── averages ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_bucket_is_averaged_in_its_own_type(gather: Gather) -> None:
    workers = gather(3)
    names = [name for name in TYPES if BY_NAME[name].is_floating]
    buckets = tuple(Bucket(name, BY_NAME[name], (Component("weight", (4, 2)),)) for name in names)
    agree(workers, Plan(buckets))

    def work(worker: Worker) -> None:
        for index, name in enumerate(names):
            data = torch.full((8,), 2.0, dtype=torch.float32).to(getattr(torch, name))
            worker.push(index, data).wait()
            assert (data.to(torch.complex64) == 2.0).all(), name
        worker.finish_round()

    together(workers, work)


def test_result_is_there_when_the_handle_is_done(gather: Gather) -> None:
    workers = agreed(gather, 2, 10, 20)

    def work(worker: Worker) -> tuple[float, float]:
        data = [full(worker, index, 2 * worker.rank + index) for index in range(2)]
        handles = [worker.push(index, data[index]) for index in (1, 0)]
        for handle in handles:
            handle.wait()
        assert {(handle.weight, handle.present) for handle in handles} == {(2.0, True)}
        return float(data[0][9]), float(data[1][19])

    assert together(workers, work) == [(1.0, 2.0)] * 2


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_buckets_may_be_arrays_or_tensors(gather: Gather, make: Callable[..., Any]) -> None:
    workers = agreed(gather, 2, 10)
    dtype = torch.float32 if make is torch.zeros else np.float32

    def work(worker: Worker) -> bool:
        data = make(10, dtype=dtype) + worker.rank
        worker.push(0, data)
        worker.finish_round()
        return bool((data == 0.5).all())

    assert together(workers, work) == [True, True]


def test_contribution_counts_by_its_weight_and_absent_data_as_zeros(gather: Gather) -> None:
    workers = agreed(gather, 4, 3)
    given: list[tuple[float, float, bool]] = [(10, 1, True), (20, 3, True), (99, 0, True), (99, 1, False)]

    def work(worker: Worker) -> tuple[float, float]:
        value, weight, present = given[worker.rank]
        data = full(worker, 0, value)
        handle = worker.push(0, data, weight=weight, present=present)
        handle.wait()
        worker.finish_round()
        return float(data[0]), handle.weight

    assert together(workers, work) == [(14.0, 5.0)] * 4


def test_bucket_that_no_worker_has_is_zeros(gather: Gather) -> None:
    workers = agreed(gather, 2, 3)

    def work(worker: Worker) -> tuple[list[float], bool, float]:
        data = full(worker, 0, 5)
        handle = worker.push(0, data, present=False)
        handle.wait()
        return data.tolist(), handle.present, handle.weight

    assert together(workers, work) == [([0, 0, 0], False, 2.0)] * 2


def test_bucket_may_be_taken_from_the_first_instead_of_averaged(gather: Gather) -> None:
    workers = gather(3)
    agree(workers, simple_plan([("buffers", 2)], BY_NAME["int64"], Op.FIRST))

    def work(worker: Worker) -> list[int]:
        data = np.array([worker.rank, 7], np.int64)
        worker.push(0, data, weight=float(worker.rank > 0)).wait()
        numbers: list[int] = data.tolist()
        return numbers

    assert together(workers, work) == [[1, 7]] * 3


def test_empty_bucket_need_not_be_pushed(gather: Gather) -> None:
    workers = agreed(gather, 2, 3, 0, 2)

    def work(worker: Worker) -> int:
        for index in (0, 2) if worker.rank else (2, 1, 0):
            worker.push(index, full(worker, index, 1))
        worker.finish_round()
        return worker.round

    assert together(workers, work) == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_buckets_may_become_ready_in_any_order_with_little_credit(gather: Gather, seed: int) -> None:
    workers = gather(3, credit=MIN_CREDIT_BYTES)
    sizes = [700_000, 10, 1_100_000, 300_000, 0, 900_000, 262_144, 262_145]
    agree(workers, plan_of(*sizes))

    def work(worker: Worker) -> None:
        order = random.Random(seed * 10 + worker.rank)
        for number in range(2):
            data = [full(worker, index, worker.rank + index + number) for index in range(len(sizes))]
            for index in order.sample(range(len(sizes)), len(sizes)):
                worker.push(index, data[index])
            worker.finish_round()
            for index, array in enumerate(data):
                assert (array == 1 + index + number).all(), (number, index)

    together(workers, work)


def test_buckets_that_fill_all_slots_in_opposite_orders_do_not_block_each_other(gather: Gather) -> None:
    workers = gather(2)
    agree(workers, plan_of(*[3_000_000] * 2))  # 12 MB each: one of them takes every slot of shared memory

    def work(worker: Worker) -> None:
        data = [full(worker, index, worker.rank) for index in range(2)]
        for index in (0, 1) if worker.rank else (1, 0):
            worker.push(index, data[index])
        worker.finish_round()
        assert all((array == 0.5).all() for array in data)

    together(workers, work)


# ── rounds and plans ──────────────────────────────────────────────────────────────────────────────────


def test_rounds_count_on_over_several_plans(gather: Gather) -> None:
    workers = agreed(gather, 2, 3, 4)
    assert together(workers, exchange, 1.0) == [[1.0, 1.0]] * 2
    assert together(workers, exchange, 2.0) == [[2.0, 2.0]] * 2

    agree(workers, plan_of(5))

    assert [worker.round for worker in workers] == [2, 2]
    assert together(workers, exchange, 3.0) == [[3.0]] * 2
    assert [worker.round for worker in workers] == [3, 3]


def test_collectives_and_rounds_interleave_freely(gather: Gather) -> None:
    workers = agreed(gather, 2, 3, 3)

    def work(worker: Worker) -> list[float]:
        data = [full(worker, index, worker.rank) for index in range(2)]
        if worker.rank:
            total = worker.all_reduce(np.ones(1, np.float32), "sum", async_op=True)
        worker.push(1, data[1])
        if not worker.rank:
            total = worker.all_reduce(np.ones(1, np.float32), "sum", async_op=True)
        worker.push(0, data[0])
        worker.finish_round()
        return [float(data[0][0]), float(data[1][0]), float(total.wait()[0])]

    assert together(workers, work) == [[0.5, 0.5, 2.0]] * 2


DIFFERENCES: dict[str, tuple[Plan, list[str]]] = {
    "shape": (
        Plan((Bucket("b0", FLOAT32, (Component("weight", (2, 3)), Component("bias", (4,)))),)),
        ["has bias (3, float32, mean) in bucket 'b0'", "has bias (4, float32, mean) in bucket 'b0'"],
    ),
    "name": (
        Plan((Bucket("b0", FLOAT32, (Component("kernel", (2, 3)), Component("bias", (3,)))),)),
        ["has weight (2×3, ", "has kernel (2×3, "],
    ),
    "dtype": (
        Plan((Bucket("b0", BY_NAME["bfloat16"], (Component("weight", (2, 3)), Component("bias", (3,)))),)),
        ["has weight (2×3, float32, mean)", "has weight (2×3, bfloat16, mean)"],
    ),
    "one parameter fewer": (
        Plan((Bucket("b0", FLOAT32, (Component("weight", (2, 3)),)),)),
        ["has bias (3, ", "has the end of bucket 'b0'"],
    ),
}
REFERENCE = Plan((Bucket("b0", FLOAT32, (Component("weight", (2, 3)), Component("bias", (3,)))),))


@pytest.mark.parametrize("what", DIFFERENCES)
def test_plan_that_differs_is_refused_with_the_first_difference(gather: Gather, what: str) -> None:
    workers = gather(3)
    zero, one, two = workers
    plan, mentioned = DIFFERENCES[what]
    others = [Task(worker.agree, REFERENCE) for worker in (zero, two)]

    with pytest.raises(PlanMismatchError) as caught:
        one.agree(plan)

    for word in [*mentioned, f"{zero.name!r} (rank 0) has ", f"{one.name!r} (rank 1) has ", "Every worker must wrap"]:
        assert word in str(caught.value)
    one.agree(REFERENCE)  # the others' proposals stand
    for task in others:
        task.result()
    assert together(workers, exchange, 1.0) == [[1.0]] * 3


def test_waiting_for_the_plan_names_missing_workers(gather: Gather) -> None:
    zero, one, two = gather(3, timeout=0.3)

    for error in errors(DeadlineError, [zero, two], lambda worker: worker.agree(plan_of(1))):
        assert error.missing == (f"{one.name!r} (rank 1)",)
        assert f"waited 0.3 s for {one.name!r} (rank 1) to propose one" in str(error)


def test_plan_can_be_proposed_again_after_a_wait_that_ran_out(gather: Gather) -> None:
    zero, one = gather(2)
    with pytest.raises(DeadlineError):
        zero.agree(plan_of(3), timeout=0.05)

    one_agrees = Task(one.agree, plan_of(3))
    zero.agree(plan_of(3))
    one_agrees.result()

    assert together([zero, one], exchange, 1.0) == [[1.0]] * 2


# ── errors of the caller ──────────────────────────────────────────────────────────────────────────────

BAD_PUSHES: dict[str, tuple[Callable[[Worker], object], type[GradServerError], str]] = {
    "no such bucket": (
        lambda worker: worker.push(2, np.zeros(3, np.float32)),
        InvalidArgumentError,
        "there is no bucket 2: the plan has 2",
    ),
    "negative bucket": (
        lambda worker: worker.push(-1, np.zeros(3, np.float32)),
        InvalidArgumentError,
        "there is no bucket -1",
    ),
    "length": (
        lambda worker: worker.push(0, np.zeros(4, np.float32)),
        SizeMismatchError,
        "bucket 'b0' was agreed with 3 elements, got 4",
    ),
    "dtype": (
        lambda worker: worker.push(0, np.zeros(3)),
        DTypeError,
        "bucket 'b0' was agreed as float32, got float64",
    ),
    "other library's dtype": (
        lambda worker: worker.push(0, np.zeros(3, ml_dtypes.bfloat16)),
        DTypeError,
        "bucket 'b0' was agreed as float32, got bfloat16",
    ),
    "strided": (
        lambda worker: worker.push(0, np.zeros(6, np.float32)[::2]),
        UsageError,
        "bucket 'b0': a bucket's memory must be contiguous and on the CPU",
    ),
    "read-only": (
        lambda worker: worker.push(0, np.broadcast_to(np.float32(0), 3)),
        LayoutError,
        "read-only array",
    ),
    "sparse": (lambda worker: worker.push(0, torch.zeros(3).to_sparse()), LayoutError, "call .to_dense() first"),
    "meta": (lambda worker: worker.push(0, torch.zeros(3, device="meta")), LayoutError, "meta device"),
    "no tensor": (lambda worker: worker.push(0, cast(Any, [0.0] * 3)), DTypeError, "got list"),
    "weight": (
        lambda worker: worker.push(0, np.zeros(3, np.float32), weight=-1),
        InvalidArgumentError,
        "a weight is a number from 0",
    ),
    "unfinished round": (
        lambda worker: worker.finish_round(),
        OutOfStepError,
        "round 0 cannot be finished: these buckets were not pushed: ['b0', 'b1']",
    ),
}


@pytest.mark.parametrize("what", BAD_PUSHES)
def test_push_that_cannot_be_right_fails_at_once_and_costs_nothing(gather: Gather, what: str) -> None:
    workers = agreed(gather, 2, 3, 4)
    call, kind, message = BAD_PUSHES[what]

    with pytest.raises(kind) as caught:
        call(workers[0])

    assert message in str(caught.value)
    assert together(workers, exchange, 1.0) == [[1.0, 1.0]] * 2


def test_bucket_cannot_be_pushed_twice_in_a_round(gather: Gather) -> None:
    workers = agreed(gather, 2, 3, 4)

    def work(worker: Worker) -> list[float]:
        data = [full(worker, index, worker.rank) for index in range(2)]
        worker.push(1, data[1])
        with pytest.raises(OutOfStepError, match="bucket 'b1' was already pushed in round 0"):
            worker.push(1, data[1])
        worker.push(0, data[0])
        worker.finish_round()
        return [float(array[0]) for array in data]

    assert together(workers, work) == [[0.5, 0.5]] * 2


def test_pushing_needs_a_plan(gather: Gather) -> None:
    worker, _ = gather(2)

    for call in (lambda: worker.push(0, np.zeros(1)), worker.finish_round):
        with pytest.raises(UsageError, match=r"no plan was agreed on: call agree\(plan\) first, on every worker"):
            call()


def test_plan_cannot_change_in_the_middle_of_a_round(gather: Gather) -> None:
    worker, _ = agreed(gather, 2, 3, 4)
    worker.push(0, full(worker, 0, 1))

    with pytest.raises(OutOfStepError, match="round 0 is not finished: a new plan has to wait until it is"):
        worker.agree(plan_of(1))


def test_plan_that_cannot_be_exchanged_is_refused_where_it_is_made() -> None:
    with pytest.raises(UnsupportedOperationError, match="the mean of int64 is not an int64"):
        simple_plan([("b0", 1)], BY_NAME["int64"])


def test_plan_too_large_to_send_is_refused_and_another_can_follow(gather: Gather) -> None:
    workers = gather(2)
    names = random.Random(0)
    too_large = simple_plan([(f"{index}{names.randbytes(1990).hex()}", 1) for index in range(2600)], FLOAT32)

    for worker in workers:
        with pytest.raises(LimitExceededError, match="the plan can be packed to"):
            worker.agree(too_large)
    agree(workers, plan_of(2))


# ── errors of others ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("value", "called"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf")])
def test_gradient_that_is_not_finite_halts_the_group_and_names_the_parameter(
    gather: Gather, value: float, called: str
) -> None:
    workers = gather(3)
    agree(workers, Plan((Bucket("block.0", FLOAT32, (Component("up.weight", (2, 3)), Component("up.bias", (3,)))),)))
    together(workers, exchange, 1.0)

    def work(worker: Worker) -> None:
        data = full(worker, 0, worker.rank)
        data[7] = value if worker.rank == 1 else 0
        before = data.copy()
        worker.push(0, data)
        try:
            worker.finish_round()
        finally:
            np.testing.assert_array_equal(data, before)

    for error in errors(NonFiniteError, workers, work):
        assert (error.worker, error.rank) == (workers[1].name, 1)
        assert (error.bucket, error.parameter, error.round) == ("block.0", "up.bias", 1)
        assert (
            f"{workers[1].name!r} (rank 1) contributed {called} in parameter 'up.bias' of bucket 'block.0' of round 1"
            in str(error)
        )
    errors(NonFiniteError, workers, lambda worker: worker.push(0, full(worker, 0, 1)).wait())
    errors(NonFiniteError, workers, lambda worker: worker.all_reduce(np.zeros(1, np.float32)))


def test_one_slow_worker_is_named_with_bucket_and_round(gather: Gather) -> None:
    workers = gather(3, timeout=0.3)
    agree(workers, plan_of(3, 4))
    together(workers, exchange, 1.0)
    zero, one, two = workers
    one.push(0, full(one, 0, 1))

    def work(worker: Worker) -> None:
        for index in range(2):
            worker.push(index, full(worker, index, 1))
        worker.finish_round()

    for error in errors(DeadlineError, [zero, two], work):
        assert error.missing == (f"{one.name!r} (rank 1)",)
        assert (error.bucket, error.round) == ("b1", 1)
        assert f"bucket 'b1' of round 1 waited 0.3 s (--round-timeout) for {one.name!r} (rank 1)" in str(error)


def test_round_that_is_not_done_in_time_can_be_waited_for_again(gather: Gather) -> None:
    zero, one = agreed(gather, 2, 3)
    data = full(zero, 0, 1)
    zero.push(0, data)
    with pytest.raises(DeadlineError) as caught:
        zero.finish_round(timeout=0.05)
    assert f"bucket 'b0' of round 0 is not done after 0.05 s; still missing: {one.name!r} (rank 1)" in str(caught.value)
    assert (caught.value.bucket, caught.value.round) == ("b0", 0)

    exchanging = Task(exchange, one, 2.0)
    zero.finish_round()

    assert exchanging.result() == [1.5]
    assert data.tolist() == [1.5] * 3


@pytest.mark.parametrize(
    ("leave", "kind", "verb"),
    [(Worker.close, WorkerLeftError, "left"), (Worker.abort, WorkerLostError, "was lost")],
    ids=["close", "abort"],
)
def test_worker_that_goes_in_the_middle_of_a_round_is_named(
    gather: Gather, leave: Callable[[Worker, str], None], kind: type[GradServerError], verb: str
) -> None:
    workers = agreed(gather, 3, 3, 4)
    together(workers, exchange, 1.0)
    waiting = [Task(exchange, worker, 1.0) for worker in (workers[0], workers[2])]
    workers[1].push(0, full(workers[1], 0, 1))

    leave(workers[1], "out of data")

    for task in waiting:
        error = task.error(kind)
        assert f"{workers[1].name!r} (rank 1) {verb} after round 0 and is needed to go on: out of data" in str(error)


def test_contributions_of_a_worker_that_left_count(gather: Gather) -> None:
    zero, one = agreed(gather, 2, 3)
    handle = one.push(0, full(one, 0, 2))
    data = full(zero, 0, 0)
    zero.push(0, data)
    handle.wait()
    one.close()

    zero.finish_round()

    assert data.tolist() == [1.0] * 3
