"""Every line of docs/coming-from-ddp.md, run: its tables and the checks here name the same lines."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradserver
from gradserver import DistributedDataParallel, LocalCluster, Worker
from gradserver.worker.planes import staging
from gradserver.worker.torch_ddp.torch_names import KEYWORDS, NAMES
from tests.cluster import AMONG_MEMBERS
from tests.fake_device import FakeDevice, checked
from tests.seeded import seeded

PAGE = Path(gradserver.__file__).resolve().parent.parent / "docs" / "coming-from-ddp.md"

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


def line(text: str) -> Callable[[Check], Check]:
    """Let a function check the line of the page with ``text`` in its first cell."""

    def register(check: Check) -> Check:
        assert text not in CHECKS, text
        CHECKS[text] = check
        return check

    return register


def lines_of_page() -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    return [row for row in rows if not row.startswith("torch")]


def test_the_page_and_the_checks_have_the_same_lines() -> None:
    assert sorted(lines_of_page()) == sorted(CHECKS)


@pytest.mark.parametrize("text", lines_of_page() if PAGE.exists() else [])
def test_line(text: str) -> None:
    CHECKS[text]()


# ── what the checks are made of ───────────────────────────────────────────────────────────────────────


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)


def both(work: Callable[[Worker], Any], **options: Any) -> list[Any]:
    """Return the results of ``work`` at two workers."""
    with LocalCluster(2, timeout=20.0, **options) as cluster:
        return cluster.run(work)


def network(rank: int = 0) -> nn.Sequential:
    return seeded(rank, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))


def batch(rank: int, size: int = 6) -> torch.Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(100 + rank))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def expected(loss: Callable[[nn.Module, int], torch.Tensor]) -> list[torch.Tensor]:
    """Return the mean of both workers' gradients, computed by one process without any exchange."""
    each = []
    for rank in range(2):
        module = network()
        loss(module, rank).backward()  # type: ignore[no-untyped-call]
        each.append(gradients(module))
    return [(one + other) / 2 for one, other in zip(*each, strict=True)]


def is_mean(results: list[list[torch.Tensor]], mean: list[torch.Tensor]) -> None:
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    for got, due in zip(results[0], mean, strict=True):
        torch.testing.assert_close(got, due)


def trained(
    worker: Worker, step: Callable[[DistributedDataParallel, torch.optim.Optimizer], None]
) -> list[torch.Tensor]:
    """Return the weights after three steps."""
    model = DistributedDataParallel(network(worker.rank), worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return weights(model.module)


def alike(results: list[list[torch.Tensor]]) -> None:
    assert all(same(a, b) for a, b in zip(*results, strict=True))


# ── the same ──────────────────────────────────────────────────────────────────────────────────────────


@line("`DDP(module)` starts every replica from rank 0's parameters and buffers")
def _starts() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        return weights(DistributedDataParallel(network(worker.rank), worker).module)

    results = both(work)
    alike(results)
    assert same(results[0][0], weights(network(0))[0])


@line("`loss.backward()` leaves the mean over the workers in every `.grad`")
def _backward() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        model(batch(worker.rank)).square().mean().backward()
        return gradients(model)

    is_mean(both(work), expected(lambda module, rank: module(batch(rank)).square().mean()))


@line("`with model.no_sync():` accumulates; the next backward outside of it exchanges the sum")
def _no_sync() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        with model.no_sync():
            model(batch(worker.rank)).square().mean().backward()
        model(batch(worker.rank)).square().mean().backward()
        return gradients(model)

    is_mean(both(work), expected(lambda module, rank: 2 * module(batch(rank)).square().mean()))


@line("`model.require_backward_grad_sync = last` in place of `no_sync()`")
def _require_backward_grad_sync() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        for micro in range(4):
            model.require_backward_grad_sync = micro == 3
            model(batch(worker.rank)).square().mean().backward()
            assert model.exchanged == (micro == 3)
        with model.no_sync():
            assert not model.require_backward_grad_sync
        assert (worker.round, model.require_backward_grad_sync) == (1, True)
        return gradients(model)

    is_mean(both(work), expected(lambda module, rank: 4 * module(batch(rank)).square().mean()))


@line("`find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`, `broadcast_buffers`, `bucket_cap_mb`")
def _options() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for options in (
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"gradient_as_bucket_view": False},
            {"broadcast_buffers": False},
            {"bucket_cap_mb": 1},
        ):
            model = DistributedDataParallel(network(), worker, **options)
            model(batch(worker.rank)).square().mean().backward()
            results += gradients(model)
        return results

    is_mean(both(work), 5 * expected(lambda module, rank: module(batch(rank)).square().mean()))


@line("`clip_grad_norm_`, `zero_grad()` with and without `set_to_none`, any optimizer and scheduler")
def _clip() -> None:
    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(batch(model.worker.rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    alike(both(lambda worker: trained(worker, step)))


@line("bf16 autocast")
def _autocast() -> None:
    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(model.worker.rank)).float().square().mean()
        loss.backward()
        optimizer.step()

    alike(both(lambda worker: trained(worker, step)))


@line("fp16 and `GradScaler`, in a group with `--nonfinite propagate`")
def _scaler() -> None:
    def work(worker: Worker) -> tuple[list[torch.Tensor], float]:
        model = DistributedDataParallel(network(), worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(worker.rank)).square().mean() * (8.0 if worker.rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model.module), scaler.get_scale()

    one, other = both(work, nonfinite="propagate")
    alike([one[0], other[0]])
    assert one[1] == other[1] < 2.0**127


@line("activation checkpointing")
def _checkpointing() -> None:
    def loss(module: Callable[[torch.Tensor], torch.Tensor], rank: int) -> torch.Tensor:
        return module(batch(rank)).square().mean()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = checkpoint(self.inner, inputs, use_reentrant=False)
            return outputs

    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(Checkpointed(), worker)
        loss(model, worker.rank).backward()  # type: ignore[no-untyped-call]
        return gradients(model)

    is_mean(both(work), expected(loss))


@line("`torch.compile` of the module or of the wrapper")
def _compile() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        compiled = torch.compile(model, backend="eager")
        compiled(batch(worker.rank)).square().mean().backward()
        return gradients(model)

    is_mean(both(work), expected(lambda module, rank: module(batch(rank)).square().mean()))


def compiled_step(compiled_autograd: bool) -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        step = torch.compile(lambda: model(batch(0)).square().mean().backward(), backend="eager")
        with warnings.catch_warnings(), torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo looks at it itself
            step()
        return gradients(model)

    with LocalCluster(1) as cluster:  # Dynamo compiles for one thread at a time
        results = cluster.run(work)
    is_mean(results * 2, expected(lambda module, _: module(batch(0)).square().mean()))


@line("`torch.compile` of a whole step, of a module with synchronised BatchNorm, or of a function with collectives")
def _compile_step() -> None:
    compiled_step(compiled_autograd=False)


@line("`torch._dynamo.config.compiled_autograd = True`")
def _compile_autograd() -> None:
    compiled_step(compiled_autograd=True)


@line("tied weights, parameters without an axis, `channels_last`, complex parameters")
def _odd_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.one.weight
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.image = nn.Conv2d(1, 2, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.other(self.one(inputs)) * self.scale * self.phase.real
            image: torch.Tensor = self.image(inputs.reshape(1, 1, *inputs.shape))
            return hidden.sum() + image.sum()

    def work(worker: Worker) -> list[torch.Tensor]:
        odd = Odd()
        model = DistributedDataParallel(odd, worker)
        model(batch(worker.rank)).backward()
        assert odd.image.weight.grad is not None
        assert odd.image.weight.grad.stride() == odd.image.weight.stride()
        return gradients(model)

    results = both(work)
    alike(results)
    assert len(results[0]) == 7


@line("training in `eval()` mode (frozen BatchNorm) exchanges gradients")
def _eval() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker).eval()
        model(batch(worker.rank)).square().mean().backward()
        return gradients(model)

    is_mean(both(work), expected(lambda module, rank: module(batch(rank)).square().mean()))


@line("`with model.join(...):` for workers with different numbers of batches")
def _join() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(worker.rank), worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(optimizer):
            for _ in range(2 + worker.rank):
                optimizer.zero_grad()
                model(batch(worker.rank)).square().mean().backward()
                optimizer.step()
        return weights(model.module)

    alike(both(work))


@line("several wrapped modules on one worker: a GAN, twin critics, a teacher that learns")
def _several() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        one, other = (DistributedDataParallel(network(), worker) for _ in range(2))
        (one(batch(worker.rank)).square().mean() + 3 * other(batch(worker.rank)).square().mean()).backward()
        return gradients(one) + gradients(other)

    mean = expected(lambda module, rank: module(batch(rank)).square().mean())
    is_mean(both(work), mean + [3 * gradient for gradient in mean])


@line("buffers follow the lowest rank, after each exchange")
def _buffers() -> None:
    def work(worker: Worker) -> torch.Tensor:
        model = DistributedDataParallel(nn.BatchNorm1d(4), worker)
        model(batch(worker.rank)).square().sum().backward()
        assert isinstance(model.module.running_mean, torch.Tensor)
        return model.module.running_mean.clone()

    one, other = both(work)
    assert same(one, other)
    torch.testing.assert_close(one, 0.1 * batch(0).mean(0))


@line("hooks on parameters run before averaging; `DataLoader` workers, forked or spawned")
def _hooks() -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), worker)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        data = torch.utils.data.TensorDataset(batch(worker.rank))
        loader = torch.utils.data.DataLoader(data, batch_size=6)
        for (inputs,) in loader:
            model(inputs).square().mean().backward()
        return gradients(model)

    is_mean(both(work), [2 * g for g in expected(lambda module, rank: module(batch(rank)).square().mean())])


@line("`deepcopy`, `pickle`, `torch.save` and `AveragedModel` of the wrapper work on its module")
def _copies() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(network(), worker)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            alike([weights(copied.module), weights(model.module)])
            with pytest.raises(AttributeError, match="exchanges nothing"):
                _ = copied.worker
        torch.save(model, file := io.BytesIO())
        assert file.tell()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        alike([weights(averaged.module), weights(model.module)])

    both(work)


@line("`state_dict()` of the wrapper has the prefix `module.`; either form loads")
def _state_dict() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(network(), worker)
        assert set(model.state_dict()) == {f"module.{name}" for name in model.module.state_dict()}
        model.load_state_dict(model.module.state_dict())
        model.load_state_dict(model.state_dict())

    both(work)


# ── called otherwise ──────────────────────────────────────────────────────────────────────────────────


@line("`init_process_group`, `get_rank()`, `get_world_size()`, `destroy_process_group()`")
def _worker() -> None:
    def work(worker: Worker) -> tuple[int, int]:
        return worker.rank, worker.world_size

    assert both(work) == [(0, 2), (1, 2)]
    with gradserver.connect(world_size=1) as alone:
        assert (alone.rank, alone.world_size) == (0, 1)


@line("`all_reduce(t)` adds up")
def _all_reduce() -> None:
    def work(worker: Worker) -> list[float]:
        ops: list[Any] = ["mean", "avg", "AVG", "sum", "SUM", torch.distributed.ReduceOp.SUM, "prod", "max"]
        return [float(worker.all_reduce(torch.tensor([2.0 + worker.rank]), op)) for op in ops]

    assert both(work) == 2 * [[2.5, 2.5, 2.5, 5.0, 5.0, 5.0, 6.0, 3.0]]


@line("`broadcast(t, src=0)`, `send(t, dst=1)`, `recv(t, src=0)`, `barrier(async_op=True)`")
def _synonyms() -> None:
    def work(worker: Worker) -> list[float]:
        tensor = torch.tensor([float(worker.rank + 1)])
        worker.broadcast(tensor, src=1)
        other = torch.zeros(1)
        if worker.rank == 0:
            worker.send(tensor * 3, dst=1)
        else:
            worker.recv(other, src=0)
        worker.barrier(async_op=True).wait()
        return [float(tensor), float(other)]

    assert both(work) == [[2.0, 0.0], [2.0, 6.0]]


@line("`all_gather([...], t)`, `gather`, `scatter`, `all_to_all`, `reduce_scatter`")
def _gathers() -> None:
    def work(worker: Worker) -> list[Any]:
        mine = np.array([worker.rank, 10 + worker.rank])
        gathered = worker.gather(mine, root=1)
        return [
            worker.all_gather(mine).tolist(),
            None if gathered is None else gathered.tolist(),
            worker.all_to_all(mine).tolist(),
            worker.reduce_scatter(mine, "sum").tolist(),
        ]

    assert both(work) == [
        [[[0, 10], [1, 11]], None, [0, 1], [1]],
        [[[0, 10], [1, 11]], [[0, 10], [1, 11]], [10, 11], [21]],
    ]


@line("`all_gather_object`, `broadcast_object_list`")
def _objects() -> None:
    def work(worker: Worker) -> list[Any]:
        return [worker.all_gather_object({"rank": worker.rank}), worker.broadcast_object([worker.rank], root=1)]

    assert both(work) == 2 * [[[{"rank": 0}, {"rank": 1}], [1]]]


@line("`new_group(ranks)`, `new_subgroups()`, `DDP(module, process_group=)`")
def _new_group() -> None:
    def work(worker: Worker) -> bool:
        host = worker.hosts()
        group = worker.subgroup([1]) if worker.rank else host.subgroup([0])
        assert group is not None
        model = DistributedDataParallel(network(), group)
        return group.world_size == 1 and model.training

    assert both(work) == [True, True]


@line("`DistributedSampler(data, num_replicas=, rank=, drop_last=)`")
def _sampler() -> None:
    data = range(5)
    shards = [list(gradserver.ShardSampler(data, num_replicas=2, rank=rank, shuffle=False)) for rank in range(2)]
    samplers: list[Any] = [
        torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    theirs = [list(sampler) for sampler in samplers]
    assert shards == theirs == [[0, 2, 4], [1, 3, 0]]


@line("`SyncBatchNorm.convert_sync_batchnorm(module)`")
def _sync_batch_norm() -> None:
    def work(worker: Worker) -> torch.Tensor:
        model = DistributedDataParallel(gradserver.convert_sync_batchnorm(nn.BatchNorm1d(4), worker), worker)
        output: torch.Tensor = model(batch(worker.rank))
        output.square().sum().backward()  # type: ignore[no-untyped-call]
        return output.detach()

    whole = nn.BatchNorm1d(4)(torch.cat([batch(0), batch(1)]))
    torch.testing.assert_close(torch.cat(both(work)), whole.detach())


@line("`init_sync=False`")
def _init_sync() -> None:
    def work(worker: Worker) -> None:
        DistributedDataParallel(network(), worker, init_sync=False)
        with pytest.raises(gradserver.DivergedError, match=r"0\.weight"):
            DistributedDataParallel(network(worker.rank), worker, init_sync=False)

    both(work)


@line("`_ddp_params_and_buffers_to_ignore`")
def _ignore() -> None:
    def work(worker: Worker) -> float:
        module = nn.BatchNorm1d(4)
        model = DistributedDataParallel(module, worker, buffers_to_ignore=["running_mean"])
        assert isinstance(module.running_mean, torch.Tensor)
        module.running_mean.fill_(float(worker.rank))
        model.eval()
        model(batch(worker.rank)).sum().backward()
        return float(module.running_mean[0])

    assert both(work) == [0.0, 1.0]


@line("communication hooks (`bf16_compress_hook`, PowerSGD)")
def _wire() -> None:
    def work(worker: Worker) -> str:
        return worker.wire

    assert both(work, wire="bf16") == ["bf16", "bf16"]


@line("`init_process_group(timeout=)`, `monitored_barrier`")
def _timeout() -> None:
    def work(worker: Worker) -> str:
        if worker.rank == 1:
            worker.barrier()
            return ""
        with pytest.raises(gradserver.DeadlineError) as caught:
            worker.all_reduce(torch.ones(1), timeout=0.05)
        worker.barrier()
        return str(caught.value)

    # The other rank calls something else, so this one is told about it or runs out of time; both name it.
    with LocalCluster(2, timeout=20.0) as cluster:
        late = cluster.workers[1]
        handle = cluster.workers[0].all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(gradserver.DeadlineError, match=re.escape("'worker-1' (rank 1)")):
            handle.wait(0.05)
        late.all_reduce(torch.ones(1))
        handle.wait()


# ── not there ─────────────────────────────────────────────────────────────────────────────────────────


def refused(make: Callable[[Worker], object], kind: type[Exception], text: str) -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(kind, match=text):
            make(worker)

    both(work)


@line("`DDP(module)` without a worker, `device_ids=`, `process_group=`")
def _constructor() -> None:
    refused(lambda _: DistributedDataParallel(network()), TypeError, r"gradserver\.connect")
    refused(lambda worker: DistributedDataParallel(network(), worker, device_ids=[0]), TypeError, "device_ids")
    refused(lambda worker: DistributedDataParallel(network(), worker, process_group=0), TypeError, "process_group")


@line("sparse gradients (`nn.Embedding(sparse=True)`)")
def _sparse() -> None:
    make = lambda worker: DistributedDataParallel(nn.Embedding(4, 2, sparse=True), worker)  # noqa: E731
    refused(make, gradserver.GradServerError, "sparse")


@line("parameters that are replaced, added or thawed after wrapping")
def _replaced() -> None:
    def forward(worker: Worker) -> None:
        model = DistributedDataParallel(network(), worker)
        model.module.load_state_dict(copy.deepcopy(model.module.state_dict()), assign=True)
        model(batch(worker.rank))

    refused(forward, gradserver.UsageError, r"'0.weight' was replaced")


@line("an optimizer that steps inside backward")
def _in_backward() -> None:
    def work(worker: Worker) -> None:
        module = network()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()}
        model = DistributedDataParallel(module, worker)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())  # type: ignore[no-untyped-call]
        with pytest.raises(gradserver.GradServerError, match="step it after"):
            model(batch(worker.rank)).square().mean().backward()

    both(work)


@line("an optimizer that needs a closure, such as `LBFGS`")
def _closure() -> None:
    def work(worker: Worker) -> list[float]:
        model = DistributedDataParallel(network(), worker)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
        with pytest.raises(gradserver.InvalidArgumentError, match="needs 'closure'"):
            gradserver.Job(model, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(worker.rank)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        assert worker.round > 1
        return [one.sum().item() for one in model.parameters()]

    one, other = both(work)
    assert one == other


@line("CUDA graphs")
def _captured() -> None:
    device = FakeDevice()
    device.is_capturing = True

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(network(), worker)
        with pytest.raises(gradserver.UsageError, match="CUDA graph"):
            model(batch(worker.rank))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "open_device", lambda _: checked(device))
        both(work)


@line("`isinstance(model, torch.nn.parallel.DistributedDataParallel)`")
def _isinstance() -> None:
    def work(worker: Worker) -> bool:
        return isinstance(DistributedDataParallel(network(), worker), nn.parallel.DistributedDataParallel)

    assert both(work) == [False, False]


@line("`register_comm_hook`, `Join` for other classes")
def _absent() -> None:
    assert not any(hasattr(DistributedDataParallel, name) for name in ("register_comm_hook", "join_hook"))


# ── members ───────────────────────────────────────────────────────────────────────────────────────────


def _member(name: str) -> Check:
    def check() -> None:
        assert f"| `{name}` | {NAMES[name].says} |" in PAGE.read_text()
        with gradserver.connect(world_size=1) as worker:
            model = DistributedDataParallel(network(), worker)
            if NAMES[name].read is None:
                assert not hasattr(model, name)
                with pytest.raises(AttributeError, match=re.escape(f"{name} is a member of torch's wrapper")):
                    getattr(model, name)
            elif not callable(value := getattr(model, name)):
                setattr(model, name, value)
            with pytest.raises(AttributeError, match=re.escape(f"{name} of a wrapped module cannot be set to")):
                setattr(model, name, "another value")

    return check


for _name in NAMES:
    line(f"`{_name}`")(_member(_name))


def test_each_public_member_of_torchs_wrapper_is_here_or_in_the_table() -> None:
    theirs = torch.nn.parallel.DistributedDataParallel
    assigned = re.findall(r"^ +self\.([a-z]\w*)(?::.*)? = ", inspect.getsource(theirs), re.MULTILINE)
    members = {name for name in (*vars(theirs), *assigned) if not name.startswith("_")}
    with gradserver.connect(world_size=1) as worker:
        model = DistributedDataParallel(network(), worker)
        own = {name for name in members if name in NAMES or hasattr(model, name)}
    assert members == own
    assert {"forward", "module", "no_sync", "require_backward_grad_sync", "reducer", "scatter"} <= members


def test_members_have_the_values_of_torchs_wrapper() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 3}
        theirs: Any = torch.nn.parallel.DistributedDataParallel(nn.BatchNorm1d(4), **options)
        with gradserver.connect(world_size=1) as worker:
            ours: Any = DistributedDataParallel(nn.BatchNorm1d(4), worker, **options)
            for name in ("require_backward_grad_sync", *NAMES):
                differs = name in ("gradient_as_bucket_view", "_set_static_graph")
                if hasattr(ours, name) and hasattr(theirs, name) and not differs:
                    value, here = getattr(theirs, name), getattr(ours, name)
                    assert here == value or (callable(value) and here() == value()), name
    finally:
        torch.distributed.destroy_process_group()


def test_each_option_of_torchs_constructor_is_here_or_refused() -> None:
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    own = inspect.signature(DistributedDataParallel).parameters
    assert set(theirs) <= set(own) | set(KEYWORDS)
    with gradserver.connect(world_size=1) as worker:
        defaults: dict[str, Any] = {name: p.default for name, p in theirs.items() if p.default is not p.empty}
        DistributedDataParallel(network(), worker, **defaults)
        for name in set(KEYWORDS) - {"check_reduction", "batched_grad_copy"}:
            option: dict[str, Any] = {name: "another value"}
            with pytest.raises(TypeError, match=f"{name}='another value' is an option of torch's wrapper"):
                DistributedDataParallel(network(), worker, **option)
        typo: dict[str, Any] = {"find_unused": True}
        with pytest.raises(TypeError, match="has no option 'find_unused'"):
            DistributedDataParallel(network(), worker, **typo)
        model = DistributedDataParallel(network(), worker)
        with (
            pytest.raises(gradserver.GradServerError, match="set_weight"),
            model.join(divide_by_initial_world_size=True),
        ):
            pass
        with pytest.raises(gradserver.GradServerError, match="'drop'"), model.join(throw_on_early_termination=True):
            pass
        with model.join(enable=False):
            pass
        model._set_params_and_buffers_to_ignore_for_model(module := network(), ["0.bias"])
        assert DistributedDataParallel(module, worker).parameters_to_ignore == {"0.bias"}
        with pytest.raises(AttributeError, match="static_graph=True"):
            model._set_static_graph()
        DistributedDataParallel(network(), worker, static_graph=True)._set_static_graph()


logging.getLogger("torch").setLevel(logging.ERROR)
