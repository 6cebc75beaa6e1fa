"""Gathering, scattering and exchanging from each to each, of tensors and of objects, over each channel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from gradserver import LocalCluster
from gradserver.protocol.errors import (
    CollectiveMismatchError,
    DTypeError,
    InvalidArgumentError,
    InvalidRankError,
    LimitExceededError,
    MembershipChangedError,
    SizeMismatchError,
    UsageError,
    WorkerLeftError,
)
from gradserver.protocol.limits import MIN_CREDIT_BYTES, SLICE_BYTES
from gradserver.worker.client import Worker
from tests.cluster import Gather, Task, errors, members, together
from tests.reference import TYPES, samples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SIZES = (1, 1000, SLICE_BYTES // 4 // 3, 700_001)
"""Elements of float32 for each rank: one slice, the last that fits into one of three, several."""


@pytest.fixture(scope="module", params=["memory", "shm", "tcp"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with members(request.param, 3, credit=MIN_CREDIT_BYTES) as workers:
        yield workers


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype is torch.complex32:
        flat = flat.view(torch.float16)
    return flat.view(torch.uint8).numpy().tobytes()


def numbered(rank: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers that no other rank has."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * 4 + rank


# ── even ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, 2])
def test_gather_stacks_what_all_gave_at_one(three: list[Worker], root: int, size: int) -> None:
    results = together(three, lambda worker: worker.gather(numbered(worker.rank, size), root))

    assert [result is None for result in results] == [rank != root for rank in range(3)]
    np.testing.assert_array_equal(cast(Any, results[root]), np.stack([numbered(rank, size) for rank in range(3)]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, 2])
def test_scatter_gives_each_its_part(three: list[Worker], root: int, size: int) -> None:
    parts = [numbered(10 + rank, size) for rank in range(3)]

    def work(worker: Worker) -> np.ndarray[Any, Any]:
        return worker.scatter(np.empty(size, np.float32), parts if worker.rank == root else None, src=root)

    for rank, result in enumerate(together(three, work)):
        np.testing.assert_array_equal(result, parts[rank])


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_gives_each_what_each_has_for_it(three: list[Worker], size: int) -> None:
    given = [numbered(rank, 3, size) for rank in range(3)]

    for rank, result in enumerate(together(three, lambda worker: worker.all_to_all(given[worker.rank]))):
        np.testing.assert_array_equal(result, np.stack([given[source][rank] for source in range(3)]))


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_passed_on_bit_by_bit(three: list[Worker], name: str) -> None:
    given = [tensor.reshape(6, 5) for tensor in samples(name, 3, 30)]

    def work(worker: Worker) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        own = given[worker.rank]
        scattered = torch.zeros(2, 5).to(own.dtype)
        worker.scatter(scattered, [own[n : n + 2] for n in (0, 2, 4)] if worker.rank == 1 else None, 1)
        return worker.gather(own, dst=2), scattered, worker.all_to_all(own)

    results = together(three, work)
    gathered = results[2][0]
    assert gathered is not None
    assert bits(gathered) == b"".join(map(bits, given))
    for rank, (_, scattered, exchanged) in enumerate(results):
        rows = slice(2 * rank, 2 * rank + 2)
        assert bits(scattered) == bits(given[1][rows])
        assert bits(exchanged) == b"".join(bits(tensor[rows]) for tensor in given)


def test_calls_that_are_not_waited_for_are_done_in_their_order(three: list[Worker]) -> None:
    def work(worker: Worker) -> list[Any]:
        exchanged = worker.all_to_all(numbered(worker.rank, 3, 100_000), async_op=True)
        gathered = worker.gather(numbered(worker.rank, 2), 1, async_op=True)
        parts = numbered(7, 3, 2) if worker.rank == 0 else None
        scattered = worker.scatter(np.empty(2, np.float32), parts, async_op=True)
        lists = worker.all_to_all([numbered(worker.rank, n) for n in range(3)], async_op=True)
        sums = [float(one.sum()) for one in lists.wait()]
        return [scattered.wait().tolist(), gathered.wait() is None, exchanged.wait()[:, 0].tolist(), sums]

    for rank, (scattered, is_none, firsts, sums) in enumerate(together(three, work)):
        assert scattered == numbered(7, 3, 2)[rank].tolist()
        assert is_none == (rank != 1)
        assert firsts == [numbered(source, 3, 100_000)[rank, 0] for source in range(3)]
        assert sums == [float(numbered(source, rank).sum()) for source in range(3)]


def test_only_what_is_needed_travels() -> None:
    with LocalCluster(4) as cluster:

        def traffic() -> tuple[int, int]:
            group = cast(Any, cluster.snapshot())["groups"]["local"]
            return group["bytes_in"], group["bytes_out"]

        cluster.run(lambda worker: worker.gather(np.zeros(100, np.uint8)))
        assert traffic() == (400, 400)
        cluster.run(
            lambda worker: worker.scatter(
                np.zeros(100, np.uint8), [np.zeros(100, np.uint8)] * 4 if worker.rank == 0 else None
            )
        )
        assert traffic() == (800, 800)
        cluster.run(lambda worker: worker.all_to_all(np.zeros(400, np.uint8)))
        assert traffic() == (2400, 2400)


# ── uneven ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [1, 60_000])
def test_all_to_all_of_lists_may_be_uneven(three: list[Worker], scale: int) -> None:
    def part(source: int, target: int) -> np.ndarray[Any, Any]:
        return numbered(source, (source * target * scale + target) if source != 2 else 0, 2)

    def work(worker: Worker) -> list[np.ndarray[Any, Any]]:
        return worker.all_to_all([part(worker.rank, target) for target in range(3)])

    for rank, results in enumerate(together(three, work)):
        for source, result in enumerate(results):
            np.testing.assert_array_equal(result, part(source, rank))


def test_uneven_parts_are_not_filled_up() -> None:
    """Test that one long part among short ones costs its own length, and not that of all."""
    with LocalCluster(4) as cluster:
        long = np.zeros(3_000_000, np.uint8)

        def work(worker: Worker) -> None:
            parts = [np.zeros(1, np.uint8)] * 4
            worker.all_to_all([*parts[:3], long] if worker.rank == 0 else parts)

        cluster.run(work)
        assert cast(Any, cluster.snapshot())["groups"]["local"]["bytes_in"] < 3_010_000


def test_lists_that_do_not_fit_together_are_reported_to_all(three: list[Worker]) -> None:
    def work(worker: Worker) -> None:
        worker.all_to_all([np.zeros((2, 3 if worker.rank == 1 else 4), np.float32)] * 3)

    for error in errors(CollectiveMismatchError, three, work):
        assert "all_to_all of tensors that do not fit together" in error.message
    assert together(three, lambda worker: float(worker.all_reduce(np.ones(1, np.float32), "sum")[0])) == [3.0] * 3


# ── objects ───────────────────────────────────────────────────────────────────────────────────────────

PLAIN: list[Any] = [
    None,
    {"loss": 0.25, "step": 7, (1, "key"): [True, b"bytes", "ü"]},
    OrderedDict(a=(1, 2.5), b=-(1 << 90)),
]


def test_objects_of_any_size_are_gathered_scattered_and_broadcast(three: list[Worker]) -> None:
    given = [*PLAIN[:2], {**PLAIN[2], "array": np.arange(500_000), "tensor": torch.ones(3, dtype=torch.bfloat16)}]

    def work(worker: Worker) -> tuple[Any, Any, Any, Any]:
        own = given[worker.rank]
        values = given if worker.rank == 1 else None
        return (
            worker.all_gather_object(own),
            worker.gather_object(own, 2),
            worker.broadcast_object(own, root=2),
            worker.scatter_object(values, src=1),
        )

    for rank, (everything, gathered, sent, own) in enumerate(together(three, work)):
        assert everything[:2] == given[:2]
        assert (gathered is None) == (rank != 2)
        for last in (everything[2], sent, *([own] if rank == 2 else [])):
            assert last["a"] == (1, 2.5)
            assert last["b"] == -(1 << 90)
            np.testing.assert_array_equal(last["array"], given[2]["array"])
            assert torch.equal(last["tensor"], given[2]["tensor"])
        assert own == given[rank] if rank != 2 else True


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_anything_else_needs_pickle_and_is_allowed_by_giver_and_taker(three: list[Worker]) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"test_gather_and_scatter\.Point, which cannot be stored.*allow_pickle=True"
    ):
        three[0].all_gather_object(Point(1))

    points = together(three, lambda worker: worker.all_gather_object(Point(worker.rank), allow_pickle=True))
    assert [[point.x for point in row] for row in points] == [[0, 1, 2]] * 3

    def only_the_giver(worker: Worker) -> object:
        return worker.broadcast_object(Point(1) if worker.rank == 0 else None, allow_pickle=worker.rank == 0)

    tasks = [Task(only_the_giver, worker) for worker in three]
    assert cast(Point, tasks[0].result()).x == 1
    for task in tasks[1:]:
        assert (
            "has sent an object that has to be unpickled: say allow_pickle=True here" in task.error(UsageError).message
        )


def test_an_object_that_is_too_large_is_refused(three: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.worker.collectives.objects.MAX_OBJECT_BYTES", 1000)
    with pytest.raises(LimitExceededError, match=r"takes 2,\d+ bytes, the limit is 1,000: send tensors as such"):
        three[0].all_gather_object(b"x" * 2000)


# ── alone ─────────────────────────────────────────────────────────────────────────────────────────────


def test_alone_all_are_identities() -> None:
    with LocalCluster(1) as cluster:
        (worker,) = cluster.workers
        tensor = numbered(0, 2, 3)
        np.testing.assert_array_equal(cast(Any, worker.gather(tensor)), tensor[None])
        np.testing.assert_array_equal(worker.scatter(np.empty((2, 3), np.float32), [tensor]), tensor)
        np.testing.assert_array_equal(worker.all_to_all(tensor), tensor)
        np.testing.assert_array_equal(worker.all_to_all([tensor])[0], tensor)
        value = {"a": [1]}
        assert worker.all_gather_object(value) == [value]
        assert worker.gather_object(value) == [value]
        assert worker.broadcast_object(value) == value
        assert worker.scatter_object([value]) == value
        assert worker.broadcast_object(value) is not value


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────

ONE = np.ones(3, np.float32)
BAD: dict[str, tuple[Callable[[Worker], object], type[Exception], str]] = {
    "gather's root": (
        lambda worker: worker.gather(ONE, 3),
        InvalidRankError,
        "root is 3, ranks of this group are 0 to 2",
    ),
    "no parts": (lambda worker: worker.scatter(ONE.copy()), SizeMismatchError, "a part for each of 3 ranks, and got 0"),
    "parts of another": (
        lambda worker: worker.scatter(ONE.copy(), [ONE] * 3, 1),
        InvalidArgumentError,
        "the parts are those of rank 1: give None at rank 0",
    ),
    "a part's shape": (
        lambda worker: worker.scatter(ONE.copy(), [ONE, ONE[:2], ONE]),
        SizeMismatchError,
        "the part for rank 1 has shape (2,), the tensor (3,)",
    ),
    "a part's type": (
        lambda worker: worker.scatter(ONE.copy(), cast(Any, [ONE, ONE, ONE.astype(np.int32)])),
        DTypeError,
        "the part for rank 2 is int32, and the tensor float32",
    ),
    "division": (
        lambda worker: worker.all_to_all(np.ones(4)),
        SizeMismatchError,
        "all_to_all splits the first dimension",
    ),
    "too few": (lambda worker: worker.all_to_all([ONE]), SizeMismatchError, "a tensor for each of 3 ranks, and got 1"),
    "mixed types": (
        lambda worker: worker.all_to_all(cast(Any, [ONE, ONE, ONE.astype(np.int8)])),
        DTypeError,
        "the tensor for rank 2 is int8, that for rank 0 float32",
    ),
    "mixed shapes": (
        lambda worker: worker.all_to_all([ONE, ONE, np.ones((1, 2), np.float32)]),
        SizeMismatchError,
        "they may differ in the first dimension only",
    ),
    "too few objects": (
        lambda worker: worker.scatter_object([1]),
        InvalidArgumentError,
        "scatter_object needs 3 values at its root, not 1",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_call_that_cannot_be_right_fails_at_once_and_costs_nothing(three: list[Worker], what: str) -> None:
    call, kind, message = BAD[what]
    with pytest.raises(kind) as caught:
        call(three[0])
    assert message in str(caught.value)
    assert together(three, lambda worker: float(worker.all_reduce(ONE.copy(), "sum")[0])) == [3.0] * 3


MISMATCHES: dict[str, tuple[Callable[[Worker], object], str]] = {
    "root": (lambda worker: worker.gather(ONE, min(worker.rank, 1)), "gather of float32[3] to rank "),
    "sizes": (
        lambda worker: worker.all_to_all(np.ones(3 + 3 * (worker.rank == 2), np.float32)),
        "all_to_all of float32[",
    ),
    "kinds": (lambda worker: worker.gather(ONE) if worker.rank else worker.all_gather(ONE), "all_gather of float32[3]"),
    "types": (
        lambda worker: worker.scatter(
            np.ones(2, np.float32 if worker.rank else np.int32), np.ones((3, 2), np.int32) if worker.rank == 0 else None
        ),
        "scatter of float32[6] from rank 0",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_are_not_the_same_everywhere_are_reported_to_all(three: list[Worker], what: str) -> None:
    call, message = MISMATCHES[what]
    for error in errors(CollectiveMismatchError, three, call):
        assert message in error.message
        assert "is not the same everywhere" in error.message
    assert together(three, lambda worker: float(worker.all_reduce(ONE.copy(), "sum")[0])) == [3.0] * 3


CALLS: dict[str, Callable[[Worker], object]] = {
    "gather": lambda worker: worker.gather(ONE, worker.world_size - 2),
    "scatter": lambda worker: worker.scatter(ONE.copy(), [ONE] * worker.world_size if worker.rank == 0 else None),
    "all_to_all": lambda worker: worker.all_to_all(np.ones(worker.world_size * 2)),
    "lists": lambda worker: worker.all_to_all([ONE] * worker.world_size),
    "all_gather_object": lambda worker: worker.all_gather_object(worker.name),
    "gather_object": lambda worker: worker.gather_object(worker.name),
    "scatter_object": lambda worker: worker.scatter_object([7] * worker.world_size if worker.rank == 0 else None),
}


@pytest.mark.parametrize("what", CALLS)
def test_in_an_elastic_group_a_death_is_told_once_and_the_call_can_be_repeated(what: str) -> None:
    call = CALLS[what]

    def work(worker: Worker, cluster: LocalCluster) -> tuple[int, int]:
        if worker.rank == 1:
            cluster.kill(1)
        changes = 0
        while True:
            try:
                call(worker)
                return changes, worker.world_size
            except MembershipChangedError:
                changes += 1

    with LocalCluster(3, elastic=(1, 3), timeout=20.0) as cluster:
        ends = Task(cluster.run, work, cluster).result()
    assert [end for end in ends if end is not None] == [(1, 2)] * 2


@pytest.mark.parametrize("what", CALLS)
def test_in_a_fixed_group_the_others_are_told_which_worker_left(gather: Gather, what: str) -> None:
    call = CALLS[what]
    workers = gather(3)

    def work(worker: Worker) -> None:
        if worker.rank == 1:
            worker.close("it had enough")
        else:
            with pytest.raises(WorkerLeftError, match="it had enough"):
                call(worker)

    together(workers, work)
