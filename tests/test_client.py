"""Tests of the collectives, over each channel, as users see them."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

from gradserver import LocalCluster
from gradserver.protocol.dtypes import BY_NAME
from gradserver.protocol.errors import (
    ClosedError,
    CollectiveMismatchError,
    DeadlineError,
    DTypeError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    LayoutError,
    SendToSelfError,
    SizeMismatchError,
    UnsupportedOperationError,
    WorkerLeftError,
)
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import MIN_CREDIT_BYTES, SLICE_BYTES
from gradserver.worker.client import Worker
from gradserver.worker.collectives.arguments import ReductionName
from tests.cluster import Gather, Task, errors, members, together, wait_until
from tests.reference import REDUCTIONS, TYPES, expected, samples, wide

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(scope="module", params=["memory", "tcp"])
def four(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Yield a group of four for tests that leave it as they found it."""
    with members(request.param, 4) as workers:
        yield workers


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype is torch.complex32:
        flat = flat.view(torch.float16)
    return flat.view(torch.uint8).numpy().tobytes()


def named(op: Op) -> ReductionName:
    """Return the names that users give to ``op``."""
    return cast(ReductionName, op.name.lower())


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


# ── all_reduce ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_all_reduce_gives_every_member_the_same_right_bits(four: list[Worker], name: str, op: Op) -> None:
    given = samples(name, 4, 103)
    tensors = [tensor.clone() for tensor in given]

    results = together(four, lambda worker: worker.all_reduce(tensors[worker.rank], named(op)))

    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert len({bits(result) for result in results}) == 1
    np.testing.assert_array_equal(wide(results[0]), expected(given, op))


@pytest.mark.parametrize("name", [name for name in TYPES if name != "complex32"])
def test_all_reduce_takes_numpy_arrays(four: list[Worker], name: str) -> None:
    arrays = [tensor.view(torch.uint8).numpy().copy() for tensor in samples(name, 4, 103)]
    given = [array.view(getattr(ml_dtypes, name, name)) for array in arrays]
    sums = together(four, lambda worker: worker.all_reduce(given[worker.rank], "sum"))

    tensors = samples(name, 4, 103)
    together(four, lambda worker: worker.all_reduce(tensors[worker.rank], "sum"))

    assert all(total is array for total, array in zip(sums, given, strict=True))
    assert [total.tobytes() for total in sums] == [bits(tensor) for tensor in tensors]


def test_mean_is_weighted_and_its_handle_knows_the_sum(four: list[Worker]) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    data = [floats(10.0 * rank) for rank in range(4)]

    handles = [worker.all_reduce(data[worker.rank], weight=weights[worker.rank], async_op=True) for worker in four]

    assert [handle.wait().tolist() for handle in handles] == [[20.0]] * 4
    assert {(handle.weight, handle.present) for handle in handles} == {(10.0, True)}


def test_weight_of_zero_does_not_count_and_gets_the_result(four: list[Worker]) -> None:
    data = [floats(rank, math.nan if rank == 2 else 1.0) for rank in range(4)]

    results = together(four, lambda worker: worker.all_reduce(data[worker.rank], weight=float(worker.rank != 2)))

    assert [result.tolist() for result in results] == [[pytest.approx(4 / 3), 1.0]] * 4


def test_nobodys_weight_gives_zeros(four: list[Worker]) -> None:
    data = [floats(1.0, 2.0) for _ in four]

    handles = [worker.all_reduce(data[worker.rank], weight=0.0, async_op=True) for worker in four]

    assert [handle.wait().tolist() for handle in handles] == [[0.0, 0.0]] * 4
    assert {(handle.weight, handle.present) for handle in handles} == {(0.0, False)}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e31, "much", None])
def test_weight_that_is_no_weight_is_refused(four: list[Worker], weight: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a weight is a number from 0 to 1e"):
        four[0].all_reduce(floats(1.0), weight=weight)


# ── the other collectives ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("root", range(4))
@pytest.mark.parametrize("name", TYPES)
def test_broadcast_gives_the_roots_bits(four: list[Worker], name: str, root: int) -> None:
    tensors = samples(name, 1, 33, seed=root) + [torch.zeros(33, dtype=getattr(torch, name)) for _ in range(3)]
    tensors[0], tensors[root] = tensors[root], tensors[0]
    before = bits(tensors[root])

    results = together(four, lambda worker: worker.broadcast(tensors[worker.rank], root))

    assert [bits(result) for result in results] == [before] * 4


@pytest.mark.parametrize("name", TYPES)
def test_all_gather_stacks_by_rank(four: list[Worker], name: str) -> None:
    tensors = [tensor.reshape(3, 5) for tensor in samples(name, 4, 15)]

    results = together(four, lambda worker: worker.all_gather(tensors[worker.rank]))

    stacked = b"".join(bits(tensor) for tensor in tensors)
    assert {(result.dtype, tuple(result.shape)) for result in results} == {(tensors[0].dtype, (4, 3, 5))}
    assert [bits(result) for result in results] == [stacked] * 4


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_reduce_scatter_gives_each_rank_its_part(four: list[Worker], name: str, op: Op) -> None:
    tensors = [tensor.reshape(8, 3) for tensor in samples(name, 4, 24)]
    before = [bits(tensor) for tensor in tensors]

    parts = together(four, lambda worker: worker.reduce_scatter(tensors[worker.rank], named(op)))

    assert [tuple(part.shape) for part in parts] == [(2, 3)] * 4
    np.testing.assert_array_equal(np.concatenate([wide(part) for part in parts]), expected(tensors, op))
    assert [bits(tensor) for tensor in tensors] == before


def test_reduce_scatter_is_weighted(four: list[Worker]) -> None:
    data = [np.full(4, worker.rank, np.float32) for worker in four]

    parts = together(four, lambda worker: worker.reduce_scatter(data[worker.rank], weight=float(worker.rank)))

    assert [part.tolist() for part in parts] == [[pytest.approx(14 / 6)]] * 4


def test_no_member_passes_a_barrier_before_the_last_has_come(four: list[Worker]) -> None:
    early = [Task(worker.barrier) for worker in four[:3]]
    assert not any(task.ended(0.05) for task in early)

    four[3].barrier()

    for task in early:
        task.result()


# ── send and recv ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TYPES)
def test_sent_bits_are_received(four: list[Worker], name: str) -> None:
    (tensor,) = samples(name, 1, 33)

    sending = Task(four[3].send, tensor, 1)
    received = four[1].recv(torch.empty(33, dtype=tensor.dtype), 3)

    assert bits(received) == bits(tensor)
    assert sending.result() is tensor


def test_sends_with_one_tag_arrive_in_order(four: list[Worker]) -> None:
    sent = [four[0].send(floats(number), 1, async_op=True) for number in range(5)]

    assert [float(four[1].recv(floats(-1), 0)[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    for handle in sent:
        handle.wait()


def test_tags_are_received_in_any_order(four: list[Worker]) -> None:
    sent = [four[0].send(floats(tag), 1, tag, async_op=True) for tag in range(5)]

    assert [float(four[1].recv(floats(-1), 0, tag)[0]) for tag in (4, 0, 3, 1, 2)] == [4, 0, 3, 1, 2]
    for handle in sent:
        handle.wait()


def test_all_members_send_to_all_at_once(four: list[Worker]) -> None:
    def swap(worker: Worker) -> list[float]:
        others = [rank for rank in range(4) if rank != worker.rank]
        sent = [worker.send(floats(10 * worker.rank + rank), rank, tag=7, async_op=True) for rank in others]
        received = [worker.recv(floats(-1), rank, tag=7, async_op=True) for rank in others]
        values = [float(handle.wait()[0]) for handle in reversed(received)]
        for handle in sent:
            handle.wait()
        return values[::-1]

    assert together(four, swap) == [[10 * s + r for s in range(4) if s != r] for r in range(4)]


def test_send_is_done_when_it_was_received(four: list[Worker]) -> None:
    handle = four[0].send(floats(1), 1, async_op=True)
    four[2].send(floats(2), 3, async_op=True)
    four[3].recv(floats(0), 2)
    assert not handle.done()

    four[1].recv(floats(0), 0)

    handle.wait()


def test_transfers_do_not_disturb_collectives(four: list[Worker]) -> None:
    def work(worker: Worker) -> float:
        if worker.rank == 0:
            sent = worker.send(floats(5), 1, async_op=True)
            mean = worker.all_reduce(floats(worker.rank))
            sent.wait()
        else:
            mean = worker.all_reduce(floats(worker.rank))
            if worker.rank == 1:
                assert worker.recv(floats(0), 0).tolist() == [5]
        return float(mean[0])

    assert together(four, work) == [1.5] * 4


def test_large_transfer_without_a_receiver_yet_holds_back_no_other(gather: Gather) -> None:
    zero, one, two = gather(3, credit=MIN_CREDIT_BYTES, timeout=0.5)
    large = np.arange(SLICE_BYTES, dtype=np.float32)  # four slices, twice the credit

    first = zero.send(large, 1, async_op=True)
    second = zero.send(floats(7), 2, async_op=True)

    assert two.recv(floats(0), 0).tolist() == [7]
    second.wait()
    np.testing.assert_array_equal(one.recv(np.empty_like(large), 0), large)
    first.wait()


def test_large_tensor_without_a_sender_yet_holds_back_no_other(gather: Gather) -> None:
    zero, one, two = gather(3, credit=MIN_CREDIT_BYTES, timeout=0.5)
    large = np.arange(SLICE_BYTES, dtype=np.float32)

    first = zero.recv(np.empty_like(large), 1, async_op=True)
    second = zero.recv(floats(0), 2, async_op=True)

    two.send(floats(7), 0)
    assert second.wait().tolist() == [7]
    one.send(large, 0)
    np.testing.assert_array_equal(first.wait(), large)


# ── many at once ──────────────────────────────────────────────────────────────────────────────────────


def test_many_outstanding_collectives_may_be_waited_for_in_any_order(four: list[Worker]) -> None:
    def begin(worker: Worker, number: int) -> Any:
        match number % 4:
            case 0:
                return worker.all_reduce(floats(worker.rank, number), "sum", async_op=True)
            case 1:
                return worker.broadcast(floats(worker.rank, number), root=number % 3, async_op=True)
            case 2:
                return worker.all_gather(floats(worker.rank + number), async_op=True)
        return worker.reduce_scatter(np.arange(4) + number, "sum", async_op=True)

    def right(rank: int, number: int) -> object:
        return {
            0: [6, 4 * number],
            1: [number % 3, number],
            2: [[number], [1 + number], [2 + number], [3 + number]],
            3: [4 * (rank + number)],
        }[number % 4]

    def work(worker: Worker) -> list[object]:
        handles = [begin(worker, number) for number in range(20)]
        order = random.Random(worker.rank).sample(range(20), 20)
        results = {number: handles[number].wait().tolist() for number in order}
        return [results[number] for number in range(20)]

    assert together(four, work) == [[right(rank, number) for number in range(20)] for rank in range(4)]


def test_handle_can_be_waited_for_twice(four: list[Worker]) -> None:
    handles = [worker.all_reduce(np.zeros((2, 3), np.float32).T + worker.rank, async_op=True) for worker in four]

    for handle in handles:
        assert handle.wait() is handle.wait()
        assert handle.done()


COLLECTIVES: dict[str, Callable[[Worker, np.ndarray[Any, Any]], Any]] = {
    "all_reduce": lambda worker, data: worker.all_reduce(data, "sum"),
    "broadcast": lambda worker, data: worker.broadcast(data, 1),
    "all_gather": lambda worker, data: worker.all_gather(data),
    "reduce_scatter": lambda worker, data: worker.reduce_scatter(data, "sum"),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_tensor_of_many_slices_passes_through_little_credit(gather: Gather, kind: str) -> None:
    workers = gather(3, credit=MIN_CREDIT_BYTES)
    data = [np.random.default_rng(rank).integers(0, 2**30, 2_400_003, dtype=np.int32) for rank in range(3)]
    total = data[0] + data[1] + data[2]
    right = {
        "all_reduce": [total] * 3,
        "broadcast": [data[1].copy()] * 3,
        "all_gather": [np.stack(data)] * 3,
        "reduce_scatter": np.split(total, 3),
    }[kind]

    results = together(workers, lambda worker: COLLECTIVES[kind](worker, data[worker.rank]))

    for result, wanted in zip(results, right, strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_large_tensors_pass_in_both_directions_at_once_with_little_credit(gather: Gather) -> None:
    workers = gather(2, credit=MIN_CREDIT_BYTES)

    def swap(worker: Worker) -> bool:
        peer = 1 - worker.rank
        sent = worker.send(np.full(2_000_000, worker.rank, np.float32), peer, async_op=True)
        received = worker.recv(np.empty(2_000_000, np.float32), peer)
        sent.wait()
        return bool((received == peer).all())

    assert together(workers, swap) == [True, True]


# ── shapes and layouts ────────────────────────────────────────────────────────────────────────────────

LAYOUTS: dict[str, Callable[[], Any]] = {
    "0-dim": lambda: torch.zeros(()),
    "transposed": lambda: torch.zeros(5, 3).t(),
    "every other column": lambda: torch.zeros(3, 6)[:, ::2],
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a tensor": lambda: torch.zeros(10)[3:7],
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "float16 view": lambda: torch.zeros(4, 4, dtype=torch.float16)[1:, 1],
    "numpy 0-dim": lambda: np.zeros(()),
    "numpy transposed": lambda: np.zeros((5, 3)).T,
    "numpy reversed": lambda: np.zeros(5)[::-1],
    "numpy field": lambda: np.zeros(4, "f4,f4")["f1"],
    "numpy part": lambda: np.zeros((4, 4), np.float16)[1:3, 1:3],
    "bfloat16": lambda: np.zeros(3, ml_dtypes.bfloat16),
}


def fill(tensor: Any, value: float) -> Any:
    with torch.no_grad():
        tensor[...] = value
    return tensor


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_reduced_in_place(four: list[Worker], layout: str) -> None:
    tensors = [fill(LAYOUTS[layout](), worker.rank) for worker in four]

    results = together(four, lambda worker: worker.all_reduce(tensors[worker.rank]))

    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    for tensor in tensors:
        assert (tensor == 1.5).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_broadcast_in_place(four: list[Worker], layout: str) -> None:
    tensors = [fill(LAYOUTS[layout](), worker.rank) for worker in four]

    together(four, lambda worker: worker.broadcast(tensors[worker.rank], root=2))

    for tensor in tensors:
        assert (tensor == 2).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_sent_and_received(four: list[Worker], layout: str) -> None:
    given, place = fill(LAYOUTS[layout](), 3), LAYOUTS[layout]()

    sending = Task(four[0].send, given, 1)
    assert four[1].recv(place, 0) is place
    sending.result()

    assert (place == 3).all()


def test_strided_tensors_of_different_memory_layout_match_by_their_elements(four: list[Worker]) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors: list[Any] = [
        rows.copy(),
        rows.T.copy().T,
        torch.from_numpy(rows.copy()),
        torch.from_numpy(rows.T.copy()).T,
    ]

    together(four, lambda worker: worker.all_reduce(tensors[worker.rank], "sum"))

    for tensor in tensors:
        np.testing.assert_array_equal(np.asarray(tensor), 4 * rows)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_empty_tensors_are_identities(four: list[Worker], shape: tuple[int, ...], library: str) -> None:
    def work(worker: Worker) -> None:
        empty: Any = torch.zeros(shape) if library == "torch" else np.zeros(shape, np.float32)
        assert worker.all_reduce(empty) is empty
        assert worker.broadcast(empty) is empty
        assert tuple(worker.all_gather(empty).shape) == (4, *shape)
        assert tuple(worker.reduce_scatter(empty).shape) == (shape[0] // 4, *shape[1:])
        assert worker.all_reduce(empty, async_op=True).wait() is empty
        if worker.rank == 0:
            assert worker.send(empty, 1) is empty
        if worker.rank == 1:
            assert worker.recv(empty, 0) is empty

    together(four, work)


def test_an_empty_tensor_at_one_worker_alone_is_refused() -> None:
    """Test that it has its place in the order of collectives: the next one would meet another one's."""

    def work(worker: Worker) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            worker.all_reduce(torch.zeros(3 * worker.rank))
        assert worker.all_reduce(torch.ones(3), "sum").tolist() == [2.0, 2.0, 2.0]
        return str(caught.value)

    with LocalCluster(2) as cluster:
        for told in cluster.run(work):
            assert "'worker-0' (rank 0) called a collective of float32[0]" in told
            assert "'worker-1' (rank 1) called all_reduce(mean) of float32[3]" in told


def test_memory_from_the_worker_is_exchanged_like_any_other(four: list[Worker]) -> None:
    def work(worker: Worker) -> tuple[Any, Any]:
        tensor, array = worker.empty((2, 3), torch.bfloat16), worker.empty(4, "float16")
        return worker.all_reduce(fill(tensor, worker.rank)), worker.all_reduce(fill(array, worker.rank))

    for tensor, array in together(four, work):
        assert (tensor.dtype, array.dtype) == (torch.bfloat16, np.float16)
        assert (tensor == 1.5).all()
        assert (array == 1.5).all()


def test_gradient_flows_past_an_exchange(gather: Gather) -> None:
    def work(worker: Worker) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(2))
        torch.autograd.backward((weight * (worker.rank + 1)).sum())
        assert weight.grad is not None
        worker.all_reduce(weight.grad)
        worker.broadcast(weight)
        return [float(value) for value in weight.grad]

    assert together(gather(2), work) == [[1.5, 1.5]] * 2


# ── a group of one ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TYPES)
def test_alone_everything_is_an_identity(gather: Gather, name: str) -> None:
    (worker,) = gather(1)
    (tensor,) = samples(name, 1, 6)
    before = bits(tensor)
    op: ReductionName = "mean" if BY_NAME[name].is_floating else "sum"

    assert worker.all_reduce(tensor, op) is tensor
    assert worker.broadcast(tensor) is tensor
    gathered, part = worker.all_gather(tensor), worker.reduce_scatter(tensor, op)
    worker.barrier()
    tensor.view(torch.uint8)[:] = 1  # results are memory of their own

    assert (gathered.shape, part.shape) == ((1, 6), (6,))
    assert (bits(gathered), bits(part)) == (before, before)


# ── what is not finite ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_the_mean_minds_what_is_not_finite(four: list[Worker], value: float) -> None:
    def work(worker: Worker) -> list[Any]:
        given = value if worker.rank == 2 else 1.0
        return [
            *(float(worker.all_reduce(floats(given), op)[0]) for op in ("sum", "product")),
            float(worker.all_reduce(floats(given), "max" if value > 0 else "min")[0]),
            float(worker.broadcast(floats(given), 2)[0]),
            float(worker.all_gather(floats(given))[2, 0]),
        ]

    for result in together(four, work):
        np.testing.assert_array_equal(result, [value] * 5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", ["mean", "sum", "min", "max", "product"])
def test_collective_carries_what_is_not_finite_as_any_number(gather: Gather, op: ReductionName, value: float) -> None:
    given = np.ones((3, 9), np.float32)
    given[1, 5] = value
    due = getattr(np, {"product": "prod"}.get(op, op))(given, axis=0)

    def work(worker: Worker) -> tuple[Any, Any, Any]:
        summed, gathered = worker.all_reduce(given[worker.rank].copy(), op), worker.all_gather(given[worker.rank])
        return summed, worker.reduce_scatter(given[worker.rank], op), gathered

    for rank, (summed, scattered, gathered) in enumerate(together(gather(3), work)):
        np.testing.assert_array_equal(summed, due)
        np.testing.assert_array_equal(scattered, due[3 * rank : 3 * rank + 3])
        np.testing.assert_array_equal(gathered, given)


# ── the memory of results ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_result_is_the_workers_own_to_change(gather: Gather, kind: str) -> None:
    workers = gather(3)
    numel, repetitions = 30_000, 60

    def work(worker: Worker) -> None:
        for number in range(repetitions):
            data = np.full(numel, worker.rank + number, np.float32)
            result = COLLECTIVES[kind](worker, data)
            gathered = [[rank + number] for rank in range(3)]
            right: Any = {"broadcast": 1 + number, "all_gather": gathered}.get(kind, 3 + 3 * number)
            assert (result == np.array(right)).all()
            result[...] = -1000 * (worker.rank + 1)  # while others still read theirs
            data[...] = -1

    together(workers, work)


def test_sent_memory_is_the_senders_again_when_it_is_done(gather: Gather) -> None:
    workers = gather(2)

    def work(worker: Worker) -> None:
        for number in range(60):
            data = np.full(30_000, number, np.float32)
            if worker.rank == 0:
                worker.send(data, 1)
                data[...] = -1
            else:
                data[...] = -1
                assert (worker.recv(data, 0) == number).all()

    together(workers, work)


# ── errors of the caller ──────────────────────────────────────────────────────────────────────────────

BAD_CALLS: dict[str, tuple[Callable[[Worker], object], type[GradServerError], str]] = {
    "op": (
        lambda worker: worker.all_reduce(floats(1), cast(Any, "average")),
        InvalidArgumentError,
        "op is 'average', and must be one of mean, sum, min, max, product",
    ),
    "no op": (lambda worker: worker.all_reduce(floats(1), cast(Any, [])), InvalidArgumentError, "op is []"),
    "mean of integers": (
        lambda worker: worker.all_reduce(np.ones(2, np.int32)),
        UnsupportedOperationError,
        "the mean of int32 is not an int32: use op='sum', or convert to a floating type",
    ),
    "order of complex": (
        lambda worker: worker.reduce_scatter(np.ones(4, np.complex64), "max"),
        UnsupportedOperationError,
        "complex numbers have no order: no max of complex64",
    ),
    "root": (
        lambda worker: worker.broadcast(floats(1), 4),
        InvalidRankError,
        "root is 4, ranks of this group are 0 to 3",
    ),
    "negative root": (lambda worker: worker.broadcast(floats(1), -1), InvalidRankError, "root is -1"),
    "target": (lambda worker: worker.send(floats(1), 4), InvalidRankError, "target is 4, ranks of this group"),
    "source": (lambda worker: worker.recv(floats(1), True), InvalidRankError, "source is True, ranks of this group"),
    "itself": (
        lambda worker: worker.send(floats(1), worker.rank),
        SendToSelfError,
        "target is this worker's own rank, 0",
    ),
    "tag": (lambda worker: worker.send(floats(1), 1, -1), InvalidArgumentError, "a tag is a number from 0 to "),
    "uneven": (
        lambda worker: worker.reduce_scatter(np.ones((6, 4), np.float32)),
        SizeMismatchError,
        "splits the first dimension among 4 workers, and that of shape (6, 4) cannot be split evenly",
    ),
    "0-dim scatter": (lambda worker: worker.reduce_scatter(torch.zeros(())), SizeMismatchError, "shape ()"),
    "list": (
        lambda worker: worker.all_reduce(cast(Any, [1.0])),
        DTypeError,
        "expected a torch tensor or a numpy array, got list",
    ),
    "objects": (lambda worker: worker.all_gather(np.array([{}])), DTypeError, "element type 'object' cannot travel"),
    "read-only": (lambda worker: worker.recv(np.broadcast_to(1.0, 3), 1), LayoutError, "read-only array"),
    "expanded": (lambda worker: worker.all_reduce(torch.zeros(1).expand(3)), LayoutError, "pass .clone()"),
    "sparse": (lambda worker: worker.broadcast(torch.zeros(3).to_sparse()), LayoutError, "call .to_dense() first"),
    "meta": (lambda worker: worker.send(torch.zeros(3, device="meta"), 1), LayoutError, "meta device"),
    "big-endian": (lambda worker: worker.all_reduce(np.zeros(3, ">f4")), DTypeError, "big-endian"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_call_that_cannot_be_right_fails_at_once_and_costs_nothing(four: list[Worker], what: str) -> None:
    call, kind, message = BAD_CALLS[what]

    with pytest.raises(kind) as caught:
        call(four[0])

    assert message in str(caught.value)
    assert together(four, lambda worker: worker.all_reduce(floats(worker.rank)).tolist()) == [[1.5]] * 4


MISMATCHES: dict[str, tuple[Callable[[Worker], object], str]] = {
    "dtype": (lambda worker: worker.all_reduce(np.zeros(3)), "all_reduce(mean) of float64[3]"),
    "length": (lambda worker: worker.all_reduce(floats(1, 2)), "all_reduce(mean) of float32[2]"),
    "op": (lambda worker: worker.all_reduce(floats(1, 2, 3), "sum"), "all_reduce(sum) of float32[3]"),
    "kind": (lambda worker: worker.broadcast(floats(1, 2, 3), 1), "broadcast of float32[3] from rank 1"),
    "barrier": (lambda worker: worker.barrier(), "barrier"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_different_collectives_are_reported_to_all_members(four: list[Worker], what: str) -> None:
    call, called = MISMATCHES[what]

    def work(worker: Worker) -> object:
        return call(worker) if worker.rank == 2 else worker.all_reduce(floats(1, 2, 3))

    for error in errors(CollectiveMismatchError, four, work):
        assert "is not the same everywhere: " in str(error)
        assert f"{four[2].name!r} (rank 2) called {called}" in str(error)
        assert "called all_reduce(mean) of float32[3]" in str(error)
    assert together(four, lambda worker: worker.all_reduce(floats(worker.rank)).tolist()) == [[1.5]] * 4


def test_transfer_of_different_lengths_is_told_to_both(four: list[Worker]) -> None:
    sending = Task(four[0].send, floats(1, 2, 3), 1)
    receiving = Task(four[1].recv, floats(0, 0), 0)

    for task in (sending, receiving):
        error = task.error(CollectiveMismatchError)
        assert "transfer of float32[3]" in str(error)
        assert "transfer of float32[2]" in str(error)
    handle = four[0].send(floats(5), 1, async_op=True)
    assert four[1].recv(floats(0), 0).tolist() == [5]
    handle.wait()


# ── deadlines, threads, closing ───────────────────────────────────────────────────────────────────────


def test_wait_that_runs_out_names_missing_workers_and_may_be_repeated(gather: Gather) -> None:
    zero, one, two = gather(3)
    handle = zero.all_reduce(floats(0), async_op=True)
    early = two.all_reduce(floats(2), async_op=True)

    with pytest.raises(DeadlineError) as caught:
        handle.wait(timeout=0.2)

    assert caught.value.missing == (f"{one.name!r} (rank 1)",)
    assert f"all_reduce(mean) of float32[1] is not done after 0.2 s; still missing: {one.name!r} (rank 1)" in str(
        caught.value
    )
    assert one.all_reduce(floats(1)).tolist() == [1]
    assert handle.wait(timeout=5).tolist() == [1]
    assert early.wait().tolist() == [1]


def test_coordinators_deadline_names_missing_workers_to_the_others(gather: Gather) -> None:
    zero, one, two = gather(3, timeout=0.3)

    for error in errors(DeadlineError, [zero, two], lambda worker: worker.all_reduce(floats(0))):
        assert error.missing == (f"{one.name!r} (rank 1)",)
        come = f"{zero.name!r} (rank 0), {two.name!r} (rank 2) had come"
        assert f"waited 0.3 s (--round-timeout) for {one.name!r} (rank 1); {come}" in str(error)


def test_group_goes_on_after_a_collective_that_was_overdue(gather: Gather) -> None:
    workers = gather(2, timeout=0.3)
    task = Task(workers[0].barrier)
    task.error(DeadlineError)
    with pytest.raises(DeadlineError):
        workers[1].barrier()  # the same barrier, which has failed for all

    assert together(workers, lambda worker: worker.all_reduce(floats(worker.rank)).tolist()) == [[0.5]] * 2


def test_threads_of_one_worker_wait_for_transfers_independently(gather: Gather) -> None:
    zero, one = gather(2)
    tags = range(6)
    waiting = [Task(one.recv, floats(-1), 0, tag) for tag in tags]

    for tag in reversed(tags):
        zero.send(floats(tag), 1, tag)
        assert waiting[tag].result(5.0).tolist() == [tag]


def test_threads_of_one_worker_exchange_with_each_other_side_by_side(gather: Gather) -> None:
    workers = gather(2)

    def ping(worker: Worker, tag: int) -> None:
        for number in range(40):
            if (worker.rank + number) % 2:
                worker.send(floats(number), 1 - worker.rank, tag)
            else:
                assert worker.recv(floats(-1), 1 - worker.rank, tag).tolist() == [number]

    tasks = [Task(ping, worker, tag) for worker in workers for tag in range(4)]
    for task in tasks:
        task.result()


def test_closing_wakes_a_thread_that_waits(gather: Gather) -> None:
    zero, one = gather(2)
    begun = zero.all_reduce(floats(1), async_op=True)
    tasks = [Task(begun.wait), Task(zero.recv, floats(0), 1)]
    assert not any(task.ended(0.05) for task in tasks)

    zero.close("it is late")

    for task in tasks:
        assert "the worker was closed (it is late)" in str(task.error(ClosedError, 5.0))
    assert one.all_reduce(floats(3)).tolist() == [2], "what was contributed before counts"
    with pytest.raises(WorkerLeftError, match=rf"{zero.name!r} \(rank 0\) left and is needed to go on: it is late"):
        one.barrier()


def test_closing_from_several_threads_closes_once(gather: Gather) -> None:
    zero, _ = gather(2)
    barrier = threading.Barrier(4)

    def close(_: int) -> None:
        barrier.wait()
        zero.close()

    together(range(4), close)
    assert zero.closed


AFTER_CLOSE: dict[str, Callable[[Worker], object]] = {
    "all_reduce": lambda worker: worker.all_reduce(floats(1)),
    "all_reduce later": lambda worker: worker.all_reduce(floats(1), async_op=True),
    "broadcast": lambda worker: worker.broadcast(floats(1)),
    "all_gather": lambda worker: worker.all_gather(floats(1)),
    "reduce_scatter": lambda worker: worker.reduce_scatter(np.ones(worker.world_size)),
    "barrier": lambda worker: worker.barrier(),
    "empty tensor": lambda worker: worker.all_reduce(floats()),
    "agree": lambda worker: worker.agree(_plan()),
    "push": lambda worker: worker.push(0, floats(1)),
    "finish_round": lambda worker: worker.finish_round(),
}
AFTER_CLOSE_OF_TWO: dict[str, Callable[[Worker], object]] = {
    **AFTER_CLOSE,
    "send": lambda worker: worker.send(floats(1), 1),
    "recv": lambda worker: worker.recv(floats(1), 1),
}


def _plan() -> Any:
    from gradserver.protocol.dtypes import FLOAT32
    from gradserver.protocol.plan import simple_plan

    return simple_plan([("b0", 1)], FLOAT32)


@pytest.mark.parametrize("method", AFTER_CLOSE_OF_TWO)
def test_nothing_works_after_close(gather: Gather, method: str) -> None:
    workers = gather(2)
    together(workers, lambda worker: worker.agree(_plan()))
    workers[0].close("its work was done")

    with pytest.raises(ClosedError, match=r"the worker was closed \(its work was done\)"):
        AFTER_CLOSE_OF_TWO[method](workers[0])
    workers[0].close()


@pytest.mark.parametrize("method", AFTER_CLOSE)
def test_nothing_works_alone_after_close(gather: Gather, method: str) -> None:
    (worker,) = gather(1)
    worker.agree(_plan())
    worker.close()

    with pytest.raises(ClosedError, match="the worker was closed"):
        AFTER_CLOSE[method](worker)


def test_the_last_push_of_a_round_is_done_without_a_wait(gather: Gather) -> None:
    workers = gather(2)
    together(workers, lambda worker: worker.agree(_plan()))
    buckets = [worker.empty(1, np.float32) for worker in workers]
    for number in range(3):
        for worker, bucket in zip(workers, buckets, strict=True):
            bucket[:] = number + worker.rank
        handles = [worker.push(0, bucket) for worker, bucket in zip(workers, buckets, strict=True)]
        for handle in handles:
            wait_until(handle.done, "its result is there, though no thread waits for it")
        assert [float(bucket[0]) for bucket in buckets] == [number + 0.5] * 2
        together(workers, lambda worker: worker.finish_round())


def test_leaving_when_nothing_is_open_disturbs_no_member(gather: Gather) -> None:
    workers = gather(2)
    handles = [worker.all_reduce(floats(worker.rank), async_op=True) for worker in workers]
    handles[0].wait()
    workers[0].close()

    assert handles[1].wait().tolist() == [0.5]


def test_error_inside_a_with_block_is_told_to_the_others(gather: Gather) -> None:
    zero, one = gather(2)

    def fail() -> None:
        with zero:
            raise ValueError("no data left")

    with pytest.raises(ValueError, match="no data left"):
        fail()
    with pytest.raises(GradServerError) as caught:
        one.barrier()
    assert f"{zero.name!r} (rank 0) was lost and is needed to go on: it raised ValueError: no data left" in str(
        caught.value
    )
