"""Lossy wires: all get the same bytes over every channel, what is lost comes later, and nothing is lossy unasked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradserver
from gradserver.engine.commands import Contribution, Memory, Reduce
from gradserver.engine.events import Undecodable
from gradserver.engine.policy import OnNonFinite
from gradserver.protocol.codecs import codec_of, seed_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    NonFiniteError,
    UnsupportedOperationError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream, layout_of, operation_of
from gradserver.protocol.plan import Plan, decode_plan, simple_plan
from gradserver.protocol.plan_changes import first_difference
from gradserver.protocol.plan_codecs import with_codec, with_named_codecs
from gradserver.reducer import reduce
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.member.coder import Coder
from gradserver.worker.workspace import WORKSPACE
from tests.cluster import Daemon, coordinator, errors, together

CODECS = ["bf16", "fp16", "int8", "topk:0.1", "randomk:0.1"]
DENSE = CODECS[:3]
SIZE = 300_000
"""Elements: two slices, of which the second is no whole number of anything."""
PLAN = simple_plan([("large", SIZE), ("small", 100)], FLOAT32)

Array = np.ndarray[Any, Any]


def on(world_size: int, wire: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``fn(worker, …)`` on each worker of a local cluster."""
    with gradserver.LocalCluster(world_size, wire=wire, timeout=20) as cluster:
        return cluster.run(fn, *args)


def gradient(rank: int, size: int = SIZE) -> Array:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


def rounds(worker: Worker, number: int) -> list[bytes]:
    """Return all results of the large bucket in each of some rounds, with the same contributions every time."""
    worker.agree(PLAN)
    results = []
    for _ in range(number):
        large, small = gradient(worker.rank), np.full(100, worker.rank, np.float32)
        worker.push(0, large, weight=1.0 + worker.rank)
        worker.push(1, small, weight=1.0 + worker.rank)
        worker.finish_round()
        assert small.tolist() == [np.float32(2 / 3 if worker.world_size == 2 else 4 / 3)] * 100  # exact: it is small
        results.append(large.tobytes())
    return results


def at(url: str, world_size: int, wire: str, fn: Callable[..., Any], *args: Any, channel: str = "tcp") -> list[Any]:
    """Return the results of ``fn(worker, …)`` on each worker of a group at ``url``."""

    def work(rank: int) -> Any:
        with connect(url, rank, world_size, wire=wire, channel=channel, timeout=20) as worker:
            return fn(worker, *args)

    return together(range(world_size), work)


@pytest.mark.parametrize("wire", CODECS)
def test_all_get_the_same_bytes_over_every_channel(wire: str) -> None:
    memory = on(3, wire, rounds, 3)
    with coordinator() as server:
        tcp = at(server.url, 3, wire, rounds, 3)
    with coordinator() as server:
        shared = at(server.url, 3, wire, rounds, 3, channel="auto")

    assert memory == tcp == shared
    assert memory[0] == memory[1] == memory[2]


@pytest.fixture(scope="module")
def three_shards() -> Iterator[str]:
    with Daemon("--shards", "3") as three:
        yield three.url


@pytest.mark.parametrize("wire", CODECS)
def test_bytes_do_not_depend_on_the_number_of_shards(wire: str, three_shards: str) -> None:
    one, other = at(three_shards, 2, wire, rounds, 3)

    assert one == other
    assert one == on(2, wire, rounds, 3)[0]


@pytest.mark.parametrize("wire", CODECS)
def test_what_is_lost_in_a_round_comes_in_later_ones(wire: str) -> None:
    exact = sum((1 + rank) * gradient(rank).astype(np.float64) for rank in range(2)) / 3
    results = [np.frombuffer(data, np.float32) for data in on(2, wire, rounds, 40)[0]]

    def error(averaged: int) -> float:
        return float(np.sqrt(np.mean((np.mean(results[:averaged], 0, np.float64) - exact) ** 2)))

    assert error(40) < error(1) / (20 if wire in DENSE else 2.5)


def test_only_what_is_worth_it_travels_lossy() -> None:
    plan = with_codec(Plan((*simple_plan([("large", 16384), ("small", 16383)], FLOAT32).buckets,)), codec_of("int8"))

    assert [bucket.codec and bucket.codec.name for bucket in plan.buckets] == ["int8", None]
    named = with_named_codecs(plan, {"small": "topk:0.5", "large": "fp32"})
    assert [str(bucket.operation) for bucket in named.buckets] == [
        "all_reduce(mean) of float32[16384]",
        "all_reduce(mean) of float32[16383] as topk:0.5",
    ]
    assert decode_plan(named.encoded).encoded == named.encoded
    assert first_difference(named, plan) == (
        "the end of bucket 'large' (float32, mean as fp32)",
        "the end of bucket 'large' (float32, mean as int8)",
    )


def test_nothing_is_lossy_that_is_no_mean_of_floats() -> None:
    def work(worker: Worker) -> list[list[float]]:
        values = gradient(worker.rank)
        ints = np.arange(SIZE, dtype=np.int64)
        got = worker.all_reduce(values.copy(), "sum"), worker.all_reduce(values.copy(), "max")
        for result, right in zip(got, (np.add, np.maximum), strict=True):
            np.testing.assert_array_equal(result, right(gradient(0), gradient(1)))
        np.testing.assert_array_equal(worker.all_reduce(ints, "sum"), 2 * np.arange(SIZE))
        np.testing.assert_array_equal(worker.broadcast(values.copy(), 1), gradient(1))
        np.testing.assert_array_equal(worker.all_gather(values)[1], gradient(1))
        mean = worker.all_reduce(values.copy())
        assert not np.array_equal(mean, (gradient(0) + gradient(1)) / 2)
        np.testing.assert_allclose(mean, (gradient(0) + gradient(1)) / 2, atol=0.05)
        return [mean.tolist()]

    one, other = on(2, "int8", work)
    assert one == other


def test_members_that_disagree_about_the_wire_are_told() -> None:
    with coordinator() as server:

        def all_reduce(rank: int) -> None:
            with connect(server.url, rank, 2, wire=("bf16", "int8")[rank], timeout=20) as worker:
                with pytest.raises(CollectiveMismatchError, match=r"as (int8|bf16)"):
                    worker.all_reduce(gradient(rank))
                worker.barrier()

        together(range(2), all_reduce)


@pytest.mark.parametrize("wire", CODECS)
def test_what_is_not_finite_halts_all_and_names_the_worker(wire: str) -> None:
    def work(worker: Worker) -> NonFiniteError:
        worker.agree(PLAN)
        values = gradient(worker.rank)
        if worker.rank == 1:
            values[SIZE - 5] = np.nan
        worker.push(0, values)
        worker.push(1, np.ones(100, np.float32))
        with pytest.raises(NonFiniteError, match=r"'worker-1' \(rank 1\) contributed .*bucket 'large'") as caught:
            worker.finish_round()
        return caught.value

    for error in on(2, wire, work):
        assert (error.rank, error.bucket, error.parameter) == (1, "large", "large")
        assert ("or one beside it" in str(error)) == (wire not in ("bf16", "fp16"))


@pytest.mark.parametrize("wire", DENSE)
def test_lossy_collective_carries_what_is_not_finite_as_any_number(wire: str) -> None:
    def work(worker: Worker) -> tuple[Array, Array]:
        values = np.ones(SIZE, np.float32)
        if worker.rank == 1:
            values[[77, SIZE - 1]] = np.nan, np.inf
        worker.all_reduce(values)
        return values, worker.all_reduce(np.ones(SIZE, np.float32))

    for mean, next_mean in on(3, wire, work):
        assert np.isnan(mean[77])
        assert np.isnan(mean[-1]) if wire == "int8" else mean[-1] == np.inf
        assert np.isfinite(mean[1000:100_000]).all()
        np.testing.assert_allclose(next_mean, 1, rtol=1e-2)


def test_bytes_that_say_nothing_are_their_senders_fault() -> None:
    codec = codec_of("topk:0.1")
    good = bytes(codec.encode(gradient(0, 1000), None, seed_of(0, 0, 0)))
    bad = bytes([0xFF]) * len(good)
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 1000, codec=codec)
    contributions = [Contribution(0, 1.0, good), Contribution(3, 1.0, bad)]
    key = ExchangeKey(Stream.BUCKET, 0, 0)

    outcome = reduce(Reduce("group", 1, key, 0, operation, 0, len(good), 1000, Memory(), contributions, (), True))

    assert isinstance(outcome, Undecodable)
    assert outcome.member_id == 3


@pytest.mark.parametrize("policy", [OnNonFinite.HALT, OnNonFinite.PROPAGATE])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0]])
@pytest.mark.parametrize("wire", ["bf16", "int8", "topk:0.5"])
def test_a_sum_out_of_range_is_mended_before_it_is_encoded(
    wire: str, weights: list[float], policy: OnNonFinite
) -> None:
    codec = codec_of(wire)
    large = np.array([3e38, -3e38, 0, 0], np.float32)
    payload = bytes(codec.encode(large, None, 0))
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 4, codec=codec)
    contributions = [Contribution(rank, weight, payload) for rank, weight in enumerate(weights)]
    key = ExchangeKey(Stream.BUCKET, 0)
    memory = Memory()

    def made() -> Array:
        given = Reduce("group", 1, key, 0, operation, 0, len(payload), 4, memory, contributions, (), True)
        outcome = reduce(given._replace(nonfinite=policy))
        assert isinstance(outcome, np.ndarray | memoryview)
        result = np.empty(4, np.float32)
        codec.decode(outcome, 4, result, 0)
        return result

    np.testing.assert_allclose(made(), large, 2e-2)


@pytest.mark.parametrize(
    ("operation", "complaint"),
    [
        ((Kind.ALL_REDUCE, Op.SUM, FLOAT32, 8), "only the mean of float32 can"),
        ((Kind.BROADCAST, Op.NONE, FLOAT32, 8, 0), "only the mean of float32 can"),
    ],
)
def test_what_must_not_be_lossy_is_refused(operation: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=complaint):
        operation_of(*operation, codec=codec_of("bf16"))


def test_codec_that_saves_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="more bytes than fp32"):
        operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 8, codec=codec_of("topk:1"))


def test_unknown_wire_is_refused_before_anything_is_connected() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no codec 'int4'"):
        connect("tcp://127.0.0.1:1", wire="int4")
    assert errors(InvalidArgumentError, [None], lambda _: gradserver.LocalCluster(1, wire="float8"))


def test_operation_speaks_of_its_codec() -> None:
    assert str(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 8, codec=codec_of("int8"))).endswith("as int8")


def test_memory_of_a_payload_is_used_again_when_it_was_answered_and_not_before() -> None:
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 3 * 262_144, codec=codec_of("int8"))
    values = gradient(0, operation.numel)
    source = values.view(np.uint8)
    coder = Coder(WORKSPACE, ExchangeKey(Stream.COLLECTIVE, 0), layout_of(operation, 2), source, source.copy(), None)
    first, second = (np.frombuffer(coder.encode(index), np.uint8) for index in (0, 1))
    assert not np.shares_memory(first, second)
    before = second.tobytes()

    coder.decode(0, first.data)
    third = np.frombuffer(coder.encode(2), np.uint8)

    assert np.shares_memory(first, third)
    assert second.tobytes() == before
    assert third.tobytes() == codec_of("int8").encode(values[2 * 262_144 :]).tobytes()


def test_training_with_lossy_gradients_keeps_replicas_alike_and_learns_as_much() -> None:
    torch.manual_seed(7)  # here, since workers are threads, which share torch's own generator
    initial = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def train(worker: Worker, wire: dict[str, str]) -> tuple[bytes, float]:
        module = copy.deepcopy(initial)
        model = gradserver.DistributedDataParallel(module, worker, bucket_cap_mb=0.125, wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(60):
            chance = torch.Generator().manual_seed(100 * step + worker.rank)
            inputs = torch.randn(32, 64, generator=chance)
            loss = (model(inputs) - inputs.flip(1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        return state, float(loss.detach())

    exact = on(2, "fp32", train, {})
    for wire in ("int8", "topk:0.1"):
        one, other = on(2, wire, train, {})
        assert one[0] == other[0]
        assert one[0] != exact[0][0]
        assert one[1] == pytest.approx(exact[0][1], rel=0.02 if wire == "int8" else 0.25)
    with pytest.raises(InvalidArgumentError, match="no bucket 'block.7'"):
        on(2, "fp32", train, {"block.7": "int8"})
