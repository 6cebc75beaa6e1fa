"""DistributedDataParallel with modules on a CUDA device, against one process on that device.

The workers are threads that share the device: the exchange is the same as with one device for each.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradserver
from gradserver import DistributedDataParallel, LocalCluster
from gradserver.protocol.errors import NonFiniteError, UsageError
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.devices.cuda import CudaDevice, fetch
from tests.cluster import coordinator
from tests.models import Convolutional, Transformer, images, loss_of, optimizer_state, state_of, tokens
from tests.replicas import ROWS, STEPS, distance, gradients, same, sgd

pytestmark = pytest.mark.gpu


def train(worker: Worker, module: nn.Module, data: Any, **options: Any) -> dict[str, Tensor]:
    model = DistributedDataParallel(module, worker, **options)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        shard = (tensor[worker.rank :: worker.world_size].cuda() for tensor in data(step, ROWS))
        loss_of(model, *shard).backward()
        optimizer.step()
    return state_of(model.module)


def reference(module: nn.Module) -> dict[str, Tensor]:
    optimizer = sgd(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, *(tensor.cuda() for tensor in tokens(step, ROWS))).backward()
        optimizer.step()
    return state_of(module)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": False},
        {"delay_all_reduce": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"blocks": (), "bucket_cap_mb": 0.001},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_trains_as_one_process_does(world: int, options: dict[str, Any]) -> None:
    with LocalCluster(world, timeout=30.0) as cluster:
        results = cluster.run(lambda worker: train(worker, Transformer(worker.rank).cuda(), tokens, **options))
    assert all(same(results[0], other) for other in results)
    assert distance(results[0], reference(Transformer(0).cuda())) < 1e-4


def test_reentrant_checkpoints() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        return train(worker, Transformer(worker.rank, checkpointed=True, twice=True).cuda(), tokens, static_graph=True)

    with LocalCluster(2, timeout=30.0) as cluster:
        results = cluster.run(work)
    assert same(*results)
    assert distance(results[0], reference(Transformer(0, twice=True).cuda())) < 1e-4


def test_buffers_on_the_device_are_kept_alike() -> None:
    with LocalCluster(3, timeout=30.0) as cluster:
        results = cluster.run(lambda worker: train(worker, Convolutional(worker.rank).cuda(), images))
    assert all(same(results[0], other) for other in results)


def test_workers_with_different_numbers_of_batches() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank).cuda(), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(2 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *(tensor.cuda() for tensor in images(step + worker.rank, 4))).backward()
                optimizer.step()
        return state_of(model.module), list(optimizer_state(optimizer))

    with LocalCluster(3, timeout=30.0) as cluster:
        (state, momenta), *others = cluster.run(work)
    for other_state, other_momenta in others:
        assert same(state, other_state)
        assert all(map(torch.equal, momenta, other_momenta))


def test_accumulation_on_a_stream_of_the_caller() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            module = Transformer(worker.rank).cuda()
            model = DistributedDataParallel(module, worker, accumulation="mean")
            data = [[tensor.cuda() for tensor in tokens(10 * worker.rank + part, 4)] for part in range(2)]
            with model.no_sync():
                loss_of(model, *data[0]).backward()
            loss_of(model, *data[1]).backward()
            grads = gradients(module)
        stream.synchronize()
        return grads

    single = Transformer(0).cuda()
    losses = [
        loss_of(single, *(t.cuda() for t in tokens(10 * rank + part, 4))) for rank in range(2) for part in range(2)
    ]
    (sum(losses) / 4).backward()
    with LocalCluster(2, timeout=30.0) as cluster:
        results = cluster.run(work)
    assert same(*results)
    assert distance(results[0], gradients(single)) < 1e-4


def test_module_on_host_and_device() -> None:
    class Split(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).cuda()])
            nn.init.constant_(self.blocks[0].weight, seed + 1.0)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Any:
            return self.blocks[1](self.blocks[0](x).cuda())

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Split(worker.rank), worker)
        for _ in range(3):
            model(torch.full((2, 4), worker.rank + 1.0)).sum().backward()
        return {name: grad.cpu() for name, grad in gradients(model.module).items()}

    with LocalCluster(2, timeout=30.0) as cluster:
        results = cluster.run(work)
    assert len(results[0]) == 4
    assert same(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_element_types(dtype: torch.dtype) -> None:
    def work(worker: Worker) -> list[list[float]]:
        linear = nn.Linear(3, 2, bias=False, device="cuda", dtype=dtype)
        DistributedDataParallel(linear, worker)(torch.full((1, 3), worker.rank + 1.0).cuda().to(dtype)).sum().backward()
        assert linear.weight.grad is not None
        result: list[list[float]] = linear.weight.grad.tolist()
        return result

    with LocalCluster(2, timeout=30.0) as cluster:
        assert cluster.run(work) == [[[1.5] * 3] * 2] * 2


def test_nan_is_named_by_all() -> None:
    def work(worker: Worker) -> tuple[str, str]:
        model = DistributedDataParallel(Transformer().cuda(), worker)
        loss = loss_of(model, *(tensor.cuda() for tensor in tokens(0, 2)))
        with pytest.raises(NonFiniteError) as caught:
            (loss * float("nan") if worker.rank == 1 else loss).backward()
        return caught.value.worker, caught.value.bucket

    with LocalCluster(2, timeout=30.0) as cluster:
        assert cluster.run(work) == [("worker-1", "lm_head")] * 2


def test_results_are_there_for_what_is_queued_next() -> None:
    # Large enough for the copy back to be still under way when backward returns.
    def work(worker: Worker) -> float:
        linear = nn.Linear(4096, 2048, bias=False, device="cuda")
        model = DistributedDataParallel(linear, worker)
        worst = 0.0
        for step in range(5):
            model.zero_grad()
            model(torch.full((1, 4096), float(worker.rank + step), device="cuda")).sum().backward()
            assert linear.weight.grad is not None
            worst = max(worst, float((linear.weight.grad - (step + 0.5)).abs().max()))
        return worst

    with LocalCluster(2, timeout=30.0) as cluster:
        assert cluster.run(work) == [0.0, 0.0]


# ── the host path ─────────────────────────────────────────────────────────────────────────────────────


def test_memory_of_the_host_is_locked_and_unlocked() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8))
    assert not memory.is_pinned()
    for _ in range(2):
        assert device.lock(memory) is None
        assert memory.is_pinned()
        device.unlock(memory)
    assert not memory.is_pinned()


def test_a_lock_that_fails_spoils_no_kernel() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8))
    assert device.lock(memory) is None
    assert "cudaHostRegister says error 712, " in str(device.lock(memory))  # it is locked already
    assert float((torch.ones(1000, device="cuda") * 2).sum()) == 2000
    device.unlock(memory)


def test_shared_memory_is_locked() -> None:
    with coordinator({"default": 1}) as server, connect(server.url, 0, 1, plane="shm") as worker:
        model = DistributedDataParallel(Transformer().cuda(), worker)
        loss_of(model, *(tensor.cuda() for tensor in tokens(0, 4))).backward()
        (copier,) = (one for one in model._rounds._plane._devices.values() if one is not None)  # type: ignore[attr-defined]
        channel = worker._session.traffic.channel
        staged = list(copier._buckets.values())
        assert staged
        for one in staged:
            assert one.host.is_pinned()
            assert channel.place_of(one.host.view(torch.uint8).numpy()) is not None


def test_a_small_tensor_is_fetched() -> None:
    assert fetch(torch.arange(5, device="cuda")).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_lossy_wires_have_the_bits_of_the_host(wire: str) -> None:
    def work(worker: Worker, where: str) -> list[Tensor]:
        linear = nn.Linear(1024, 512, bias=False, device=where)
        model = DistributedDataParallel(linear, worker)
        found = []
        for step in range(4):
            model.zero_grad()
            rows = torch.linspace(-1, 1 + step + worker.rank, 1024).expand(1, -1).to(where)
            model(rows).sum().backward()
            assert linear.weight.grad is not None
            found.append(linear.weight.grad.cpu())
        return found

    results = []
    for where in ("cpu", "cuda"):
        with LocalCluster(2, wire=wire, timeout=30.0) as cluster:
            results += cluster.run(work, where)
    for one in results[1:]:
        assert all(map(torch.equal, one, results[0]))


# ── CUDA graphs ───────────────────────────────────────────────────────────────────────────────────────


def test_a_module_that_is_captured_trains_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSERVER_URL", raising=False)

    def trained(captures: bool) -> dict[str, Tensor]:
        module: Any = Transformer(0).cuda()
        inputs, targets = (tensor.cuda() for tensor in tokens(0, ROWS))
        if captures:
            torch.cuda.make_graphed_callables(module, (inputs,))
        with gradserver.connect(rank=0, world_size=1) as worker:
            model = DistributedDataParallel(module, worker)
            optimizer = sgd(model)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                optimizer.step()
        return {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}

    assert distance(trained(True), trained(False)) < 1e-5


def test_a_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSERVER_URL", raising=False)
    inputs, targets = (tensor.cuda() for tensor in tokens(0, ROWS))
    with gradserver.connect(rank=0, world_size=1) as worker:
        model = DistributedDataParallel(Transformer(0).cuda(), worker)
        loss_of(model, inputs, targets).backward()
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UsageError, match="wrap what that returns"):
            model(inputs)
        loss_of(model, inputs, targets).backward()


def test_unequal_workers_are_measured_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers share the device: what counts is that events give times, and that nothing waits for the device."""

    def paced(worker: Worker) -> tuple[list[Any], dict[str, Tensor]]:
        cadence = gradserver.CadenceOptions(anchor=2, max_anchor=4)
        model = DistributedDataParallel(Transformer().cuda(), worker, cadence=cadence)
        optimizer = sgd(model)
        decisions: list[Any] = []
        while len(decisions) < STEPS:
            shard = (tensor[worker.rank :: worker.world_size].cuda() for tensor in tokens(len(decisions), ROWS))
            loss_of(model, *shard).backward()
            if model.exchanged:
                optimizer.step()
                optimizer.zero_grad()
                pacing = model.pacing
                assert pacing is not None
                decisions.append((pacing.counts, [pacing._pace.rule.speed(one) for one in (0, 1)]))
        return decisions, state_of(model.module)

    def wait(*_: object) -> None:
        raise AssertionError("the device was waited for")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    with LocalCluster(2) as cluster:
        (first, weights), (second, others) = cluster.run(paced)

    assert first == second
    assert min(first[-1][1]) > 0, "both were measured"
    assert same(weights, others)
