"""Collectives of tensors on a device: by a communicator of one member, and over the coordinator.

One device has one member of NCCL. So each operation of a communicator is tried with one. The CPU's cases rehearse it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

import gradserver
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.exchange import Kind, Op, operation_of
from gradserver.worker.client import Worker
from gradserver.worker.collectives.call import Call
from gradserver.worker.handle import finished
from gradserver.worker.planes.bodies import Body, Scratch
from gradserver.worker.planes.communicator import Communicator, Signal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REDUCING = [(kind, op) for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) for op in (Op.MEAN, Op.SUM, Op.MAX)]
MOVING = [(kind, Op.NONE) for kind in (Kind.BROADCAST, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL)]


@pytest.fixture(scope="module", params=DEVICES)
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[Communicator, torch.device]]:
    """A communicator of one member, and its device."""
    any_distributed: Any = distributed
    store = any_distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    found = Communicator(f"127.0.0.1:{store.port}", "alone", 0, 1, [device], "127.0.0.1")
    found.form(Signal(), 30.0)
    yield found, device
    found.give_up()


@pytest.mark.parametrize(
    ("kind", "op", "dtype"),
    [
        (kind, op, dtype)
        for kind, op in [*REDUCING, *MOVING]
        for dtype in ("float32", "bfloat16", "complex64")
        if op is not Op.MAX or dtype != "complex64"
    ],
)
def test_each_operation_of_a_communicator_gives_one_member_its_own(
    alone: tuple[Communicator, torch.device], kind: Kind, op: Op, dtype: str
) -> None:
    group, device = alone
    tensor = torch.arange(100, device=device).reshape(1, 4, 25).to(getattr(torch, dtype)).transpose(1, 2)
    before, parts = tensor.clone(), [tensor + 1] if kind is Kind.SCATTER else None
    rooted = kind in (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)
    operation = operation_of(kind, op, dtype_of(dtype), 100, 0 if rooted else -1)
    call = Call(operation, tensor, lambda: finished(None), 0 if rooted else -1, 3.0, parts)
    body, signal = Body(call, 0, 1), Signal()
    body.start(group, signal, [3.0], Scratch()).wait(30.0)
    value = body.commit()
    expected = {Kind.SCATTER: before + 1, Kind.ALL_GATHER: before[None], Kind.GATHER: before[None]}.get(kind, before)
    assert value.device.type == device.type
    assert value.shape == expected.shape
    assert torch.equal(value, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
def test_a_collective_is_in_order_with_the_stream_it_is_given(given: bool) -> None:
    def work(worker: Worker) -> bool:
        device: Any = torch.device("cuda", 0)
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        right = True
        for _ in range(5):
            with torch.cuda.stream(stream):
                large = torch.full((4096, 4096), 1.0 + worker.rank, device=device)
                tensor = (large @ large)[0] / 4096  # takes a while
                worker.all_reduce(tensor, "sum", stream=stream if given else None)
                right = right and bool((tensor == 5.0).all())
        worker.synchronize()
        return right

    with gradserver.LocalCluster(2, timeout=60.0) as cluster:
        assert cluster.run(work) == [True, True]
