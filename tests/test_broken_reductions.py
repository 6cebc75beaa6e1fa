"""Tests that an exception inside a reduction ends that exchange, with an error that names it, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from gradserver import mean, reducer
from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.events import Broken
from gradserver.mean import Outcome
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, UINT8, DType
from gradserver.protocol.errors import CoordinatorError
from gradserver.protocol.exchange import EXACT, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import MIB
from gradserver.protocol.plan import simple_plan
from gradserver.reducer import PENDING, Reducer
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, Gather, coordinator, errors, joined, together


@pytest.fixture(autouse=True)
def no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reductions of bytes raise an exception, as those of a type that an old ml_dtypes does not know."""
    types = mean.types_of

    def refused(dtype: DType, op: Op) -> Any:
        if dtype == UINT8:
            raise AttributeError("module 'ml_dtypes' has no attribute 'uint8'")
        return types(dtype, op)

    monkeypatch.setattr(reducer, "types_of", refused)


def total(worker: Worker, dtype: type = np.float32) -> float:
    return float(worker.all_reduce(np.ones(5, dtype), "sum")[0])


def test_a_collective_that_cannot_be_reduced_fails_alone_and_says_why(gather: Gather) -> None:
    workers = gather(2)
    assert together(workers, total) == [2.0, 2.0]

    for error in errors(CoordinatorError, workers, lambda worker: total(worker, np.uint8)):
        assert "all_reduce(sum) of uint8[5]" in error.message
        assert "AttributeError: module 'ml_dtypes' has no attribute 'uint8'" in error.message

    assert together(workers, total) == [2.0, 2.0]


def test_a_bucket_that_cannot_be_reduced_ends_its_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mean(*_: object) -> None:
        raise MemoryError("no block of scratch memory")

    plan = simple_plan([("b0", 7)], FLOAT32)

    def one_round(worker: Worker) -> None:
        worker.agree(plan)
        worker.push(0, np.ones(7, np.float32))
        worker.finish_round()

    with coordinator() as server, joined(server.url, 2) as workers, joined(server.url, 2, group="other") as others:
        with monkeypatch.context() as patch:
            patch.setattr(reducer._Job, "_mean", no_mean)
            for error in errors(CoordinatorError, workers, one_round):
                assert "bucket 'b0' of round 0" in error.message
                assert "MemoryError: no block of scratch memory" in error.message
        together(others, one_round)
        assert together(workers, total) == [2.0, 2.0]


def broken(reduction: Reducer, op: Op, dtype: DType, nbytes: int, codec: str = "fp32") -> Outcome:
    """Return the outcome of a reduction by ``reduction``, in whatever thread."""
    payloads = [bytes(nbytes), bytes(nbytes)]
    given = [Contribution(rank, 1.0, payload) for rank, payload in enumerate(payloads)]
    wire = EXACT if codec == "fp32" else codec_of(codec)
    operation = Operation(Kind.ALL_REDUCE, op, dtype, nbytes // dtype.itemsize, codec=wire)
    key, numel = ExchangeKey(Stream.BUCKET, 0), operation.numel
    there = threading.Event()
    outcomes: list[Outcome] = []

    def later(outcome: Outcome) -> None:
        outcomes.append(outcome)
        there.set()

    outcome = reduction.start(Reduce("group", 1, key, 0, operation, 0, nbytes, numel, None, given, (), True), later)
    if outcome is not PENDING:
        return outcome
    assert there.wait(PATIENCE)
    return outcomes[0]


@pytest.mark.parametrize("nbytes", [16, 16 * MIB])
def test_in_whichever_thread_it_is_an_outcome(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(reducer, "fold", refused)
    reduction = Reducer(threads=2)

    assert broken(reduction, Op.SUM, FLOAT32, nbytes) == Broken("ZeroDivisionError: by nothing")
    reduction.close()


def test_of_lossy_means_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(reducer, "reduce_lossy", refused)
    reduction = Reducer(threads=2)

    assert broken(reduction, Op.MEAN, BY_NAME["float32"], 4 * MIB, "bf16") == Broken("ZeroDivisionError: by nothing")
    reduction.close()
