"""Tests of torch's names where they mean the same, and of what type checkers know of calls and results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from gradserver.protocol.errors import DeadlineError, InvalidArgumentError, InvalidRankError
from gradserver.worker.client import Worker
from gradserver.worker.collectives.arguments import Reduction
from tests.cluster import ROOT, members, together

Array = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    with members("memory", 2) as workers:
        yield workers


def number(value: float) -> Array:
    return np.array([value], np.float32)


@pytest.mark.parametrize(
    ("op", "due"),
    [
        ("avg", 2.5),
        ("AVG", 2.5),
        ("MEAN", 2.5),
        (ReduceOp.AVG, 2.5),
        ("SUM", 5.0),
        (ReduceOp.SUM, 5.0),
        ("MIN", 2.0),
        (ReduceOp.MIN, 2.0),
        (ReduceOp.MAX, 3.0),
        ("prod", 6.0),
        ("PROD", 6.0),
        (ReduceOp.PRODUCT, 6.0),
    ],
)
def test_reductions_are_known_by_torchs_names(pair: list[Worker], op: Reduction, due: float) -> None:
    def work(worker: Worker) -> tuple[float, float]:
        whole = worker.all_reduce(number(2.0 + worker.rank), op)
        part = worker.reduce_scatter(np.full(2, 2.0 + worker.rank, np.float32), op)
        return float(whole[0]), float(part[0])

    assert together(pair, work) == [(due, due)] * 2


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BXOR, "average", "premul_sum", 1, None])
def test_a_reduction_that_there_is_not_is_refused_with_those_that_there_are(pair: list[Worker], op: object) -> None:
    with pytest.raises(InvalidArgumentError, match="must be one of mean, sum, min, max, product, avg, prod"):
        pair[0].all_reduce(number(1.0), cast(Any, op))


def test_ends_are_known_by_torchs_names(pair: list[Worker]) -> None:
    def work(worker: Worker) -> list[float]:
        mine = number(worker.rank)
        got = [float(worker.broadcast(mine.copy(), src=1)[0]), float(worker.broadcast(mine.copy(), 1, src=1)[0])]
        if worker.rank == 0:
            worker.send(number(7.0), dst=1)
            return [*got, float(worker.recv(number(0.0), src=1, tag=3)[0])]
        received = float(worker.recv(number(0.0), src=0)[0])
        worker.send(number(8.0), 0, 3)
        return [*got, received]

    assert together(pair, work) == [[1.0, 1.0, 8.0], [1.0, 1.0, 7.0]]


def test_two_names_with_two_values_are_refused(pair: list[Worker]) -> None:
    with pytest.raises(InvalidArgumentError, match="root is 1 and src is 0: they mean the same, give one"):
        pair[0].broadcast(number(1.0), 1, src=0)
    with pytest.raises(InvalidRankError, match="target is None, ranks of this group are 0 to 1"):
        pair[0].send(number(1.0))


def test_a_barrier_need_not_be_waited_for(pair: list[Worker]) -> None:
    zero, one = pair
    handle = zero.barrier(async_op=True)
    assert not handle.is_completed()
    one.barrier(async_op=True).wait()
    handle.wait()
    assert handle.is_completed()


@pytest.mark.parametrize("timeout", [0.01, timedelta(milliseconds=10)])
def test_each_call_waits_as_long_as_it_is_told(timeout: float | timedelta) -> None:
    with members("memory", 2, timeout=3600.0) as (zero, one):
        handles = [
            zero.all_reduce(number(1.0), "sum", async_op=True, timeout=timeout),
            zero.broadcast(number(1.0), 1, async_op=True, timeout=timeout),
            zero.all_gather(number(1.0), async_op=True, timeout=timeout),
            zero.reduce_scatter(np.ones(2, np.float32), async_op=True, timeout=timeout),
            zero.send(number(1.0), 1, async_op=True, timeout=timeout),
            zero.recv(number(1.0), 1, async_op=True, timeout=timeout),
        ]
        for handle in [*handles, zero.barrier(timeout, async_op=True)]:
            with pytest.raises(DeadlineError, match=r"is not done after 0.01 s; still missing: 'worker-1' \(rank 1\)"):
                handle.wait()
        with pytest.raises(DeadlineError):
            zero.all_reduce(number(1.0), timeout=timeout)

        assert float(one.all_reduce(number(2.0), "sum")[0]) == 3.0  # the exchange continues
        assert float(handles[0].wait()[0]) == 3.0


def test_a_timeout_that_is_none_is_refused(pair: list[Worker]) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout is '1 s', and must be seconds, a timedelta or None"):
        pair[0].barrier(cast(Any, "1 s"))


SCRIPT = """
import numpy as np
import torch
from torch.distributed import ReduceOp

import gradserver

worker = gradserver.connect("tcp://coordinator:7411", timeout=5.0)
reveal_type(worker.all_reduce(torch.ones(3)))
reveal_type(worker.all_reduce(torch.ones(3), ReduceOp.SUM, async_op=True))
reveal_type(worker.all_reduce(torch.ones(3), "avg", async_op=True).wait(timeout=1.0))
reveal_type(worker.broadcast(torch.ones(3), src=0))
reveal_type(worker.all_gather(np.ones((2, 2), np.float64)))
reveal_type(worker.all_gather(torch.ones(3), async_op=True))
reveal_type(worker.barrier())
reveal_type(worker.barrier(async_op=True))
reveal_type(worker.empty((3,), torch.float32))
reveal_type(worker.empty((3,), np.int32))
worker.all_reduce(torch.ones(3), "average")
worker.all_reduce([1.0, 2.0])
worker.broadcast(torch.ones(3), root="0")
"""
REVEALED = [
    "torch._tensor.Tensor",
    "gradserver.worker.handle.Handle[torch._tensor.Tensor]",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.float64]]",
    "gradserver.worker.handle.Handle[torch._tensor.Tensor]",
    "None",
    "gradserver.worker.handle.Handle[None]",
    "torch._tensor.Tensor",
    "numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.signedinteger[numpy._typing._nbit_base._32Bit]]]",
]


@pytest.mark.long
@pytest.mark.timeout(600)  # where nothing has been checked before
def test_a_users_script_is_checked_precisely(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--hide-error-context", str(script)]  # strict, as the project itself
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    revealed = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    errors = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    last = len(SCRIPT.splitlines())
    assert revealed == REVEALED, done.stdout
    assert errors == [str(line) for line in (last - 2, last - 1, last)], done.stdout


def test_torch_tensors_come_back_as_they_are_typed(pair: list[Worker]) -> None:
    assert all(torch.is_tensor(one) for one in together(pair, lambda worker: worker.all_gather(torch.ones(2))))
