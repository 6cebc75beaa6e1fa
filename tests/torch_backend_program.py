"""Programs of ranks of torch.distributed. Run as ``torch_backend_program.py NAMES FOLDER RANK WORLD_SIZE [ARGUMENTS]``.

Names stand between commas. Each program makes the default group of the backend "gradserver" by a store in the folder.
At its end it prints ``ok`` with its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed import ReduceOp

import gradserver
import gradserver.torch

warnings.simplefilter("ignore", FutureWarning)  # torch's, about old names of operations
sys.path.append(str(Path(__file__).resolve().parents[1] / "gradserver/torch/entry"))

dist: Any = torch.distributed  # many of its functions have no types
BACKEND = "gradserver"
PATIENCE = timedelta(seconds=60)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def start(folder: str, rank: int, size: int, timeout: timedelta = PATIENCE, name: str = "store", **more: Any) -> None:
    backend = more.pop("backend", BACKEND)
    method = f"file://{folder}/{name}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=timeout, **more)


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if missing := [word for word in words if word not in str(error)]:
            raise AssertionError(f"{missing} not in {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"nothing was raised, and {kind} was expected")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape, generator=chance).to(dtype)


def together(folder: str, rank: int, size: int, name: str = "there") -> None:
    """Wait for all ranks, without their group."""
    (Path(folder) / f"{name}-{rank}").touch()
    while not all((Path(folder) / f"{name}-{one}").exists() for one in range(size)):
        time.sleep(0.01)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(100 + dist.get_rank() + 10 * seed)
    model(torch.randn(4, 8, generator=chance)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)).hexdigest()[:16]


# ── operations, beside gloo ───────────────────────────────────────────────────────────────────────────────

Operation = Callable[[Any], list[torch.Tensor]]


def reductions() -> Iterator[tuple[str, Operation]]:
    """Yield what gloo can reduce, too."""
    kinds: dict[str, tuple[Any, ...]] = {"f": (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)}
    kinds["i"] = (*kinds["f"], ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        for op in kinds["f" if dtype.is_floating_point else "i"]:
            yield f"all_reduce {op} {dtype}", partial(all_reduced, dtype=dtype, op=op)
    yield "all_reduce SUM complex", partial(all_reduced, dtype=torch.complex64)
    yield "all_reduce of nothing", partial(all_reduced, size=0)
    yield "all_reduce SUM of a transposed tensor", all_reduced_transposed
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        yield f"reduce {op}", partial(reduced, op=op)
        yield f"reduce_scatter_tensor {op}", partial(scattered, op=op)
        yield f"reduce_scatter {op}", partial(scattered_list, op=op)


def all_reduced(
    group: Any, dtype: torch.dtype = torch.float32, op: Any = ReduceOp.SUM, size: int = 7
) -> list[torch.Tensor]:
    tensor = numbers(size, dtype=dtype)
    dist.all_reduce(tensor, op, group)
    return [tensor]


def all_reduced_transposed(group: Any) -> list[torch.Tensor]:
    tensor = numbers(3, 5)
    given = tensor.contiguous() if group is not None else tensor.t().contiguous().t()  # gloo takes no other layout
    dist.all_reduce(given, group=group)
    return [given.contiguous()]


def reduced(group: Any, op: Any) -> list[torch.Tensor]:
    tensor = numbers(6)
    dist.reduce(tensor, 1, op, group)
    return [tensor] if dist.get_rank() == 1 else []


def scattered(group: Any, op: Any) -> list[torch.Tensor]:
    size, output = dist.get_world_size(), torch.empty(3, 2)
    dist.reduce_scatter_tensor(output, numbers(3 * size, 2), op, group)
    return [output]


def scattered_list(group: Any, op: Any) -> list[torch.Tensor]:
    size, output = dist.get_world_size(), torch.empty(4)
    dist.reduce_scatter(output, [numbers(4, seed=place) for place in range(size)], op, group)
    return [output]


def copies() -> Iterator[tuple[str, Operation]]:
    """Yield operations that copy."""
    for function in (broadcast, gathered, gathered_tensor, gathered_coalesced, gathered_at, scattered_from):
        yield function.__name__, function
    for function in (exchanged, exchanged_unevenly, messages, several_messages, objects):
        yield function.__name__, function


def broadcast(group: Any) -> list[torch.Tensor]:
    found = [numbers(5), numbers(2, 3, dtype=torch.bfloat16), numbers(4, dtype=torch.bool)]
    for root, tensor in enumerate(found):
        dist.broadcast(tensor, root % dist.get_world_size(), group)
    return found


def gathered(group: Any) -> list[torch.Tensor]:
    found = [torch.empty(2, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(found, numbers(2, 3), group)
    return found


def gathered_tensor(group: Any) -> list[torch.Tensor]:
    output = torch.empty(2 * dist.get_world_size(), 3, dtype=torch.int64)
    dist.all_gather_into_tensor(output, numbers(2, 3, dtype=torch.int64), group)
    return [output]


def gathered_coalesced(group: Any) -> list[torch.Tensor]:
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(lists, [numbers(2), numbers(3)], group)
    return [tensor for tensors in lists for tensor in tensors]


def gathered_at(group: Any) -> list[torch.Tensor]:
    is_root = dist.get_rank() == 1
    found = [torch.empty(3) for _ in range(dist.get_world_size())] if is_root else None
    dist.gather(numbers(3), found, 1, group)
    return found or []


def scattered_from(group: Any) -> list[torch.Tensor]:
    parts = [numbers(3, seed=place) for place in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    output = torch.empty(3)
    dist.scatter(output, parts, 1, group)
    return [output]


def exchanged(group: Any) -> list[torch.Tensor]:
    output = torch.empty(2 * dist.get_world_size(), 3)
    dist.all_to_all_single(output, numbers(2 * dist.get_world_size(), 3), group=group)
    return [output]


def exchanged_unevenly(group: Any) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [(rank + peer) % 3 for peer in range(size)]
    taken = [(peer + rank) % 3 for peer in range(size)]
    output = torch.empty(sum(taken), 2)
    dist.all_to_all_single(output, numbers(sum(given), 2), taken, given, group)
    lists = [torch.empty(peer + 1) for peer in range(size)]
    if group is None:  # gloo of this torch has no lists
        dist.all_to_all(lists, [numbers(rank + 1, seed=peer) for peer in range(size)])
        assert [tensor.numel() for tensor in lists] == [peer + 1 for peer in range(size)]
    return [output]


def messages(group: Any) -> list[torch.Tensor]:
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty(4)
    sending = dist.isend(numbers(4), (rank + 1) % size, group, tag=3)
    dist.recv(received, (rank - 1) % size, group, tag=3)
    sending.wait()
    return [received]


def several_messages(group: Any) -> list[torch.Tensor]:
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty(4)
    there = dist.P2POp(dist.isend, numbers(4), (rank + 1) % size, group)
    back = dist.P2POp(dist.irecv, received, (rank - 1) % size, group)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()
    return [received]


def objects(group: Any) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "words": "x" * rank * 1000}, group)
    assert [one["rank"] for one in found] == list(range(size))
    told = [rank, "text"]
    dist.broadcast_object_list(told, 1, group)
    own: list[Any] = [None]
    dist.scatter_object_list(own, [str(one) for one in range(size)] if rank == 0 else None, 0, group)
    assert (told, own) == ([1, "text"], [str(rank)])
    return [torch.tensor([len(one["words"]) for one in found])]


def operations(folder: str, rank: int, size: int) -> None:
    """Run each operation over this backend and over gloo, and compare the results bit by bit.

    Sums and products of more than two ranks may differ by their rounding: gloo has another order.
    """
    start(folder, rank, size)
    gloo, bad = dist.new_group(backend="gloo"), []
    for name, operation in (*reductions(), *copies()):
        ours, theirs = operation(None), operation(gloo)
        compare = close if size > 2 and ("SUM" in name or "PRODUCT" in name) else equal
        if not all(compare(one, other) for one, other in zip(ours, theirs, strict=True)):
            bad.append((name, ours, theirs))
    assert not bad, bad


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return equal(one, other)
    rounding = torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=8 * rounding, atol=32 * rounding)


def means_and_more(folder: str, rank: int, size: int) -> None:
    """Run what gloo has not: means, bool, sums that are sparse, sizes that differ, coalesced calls."""
    start(folder, rank, size)
    mean = torch.full((5,), float(rank))
    dist.all_reduce(mean, ReduceOp.AVG)
    assert mean.tolist() == [(size - 1) / 2] * 5
    for op, is_true in ((ReduceOp.MAX, True), (ReduceOp.SUM, True), (ReduceOp.MIN, False), (ReduceOp.BOR, True)):
        flag = torch.tensor([rank == 0])
        dist.all_reduce(flag, op)
        assert flag.dtype is torch.bool
        assert flag.item() is is_true, op
    not_finite = torch.tensor([float("nan"), float(rank), float("inf")])
    dist.all_reduce(not_finite)
    assert not_finite.isnan().tolist() == [True, False, False]
    uneven = [torch.empty(one + 1) for one in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [one.tolist() for one in uneven] == [[float(one)] * (one + 1) for one in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.ones(one + 1) for one in range(size)])
    assert output.tolist() == [float(size)] * (rank + 1)
    several = [torch.ones(3) * (rank + 1) for _ in range(3)]
    manager = dist.distributed_c10d._coalescing_manager
    with manager():
        for tensor in several:
            dist.all_reduce(tensor)
    assert all(tensor.tolist() == [size * (size + 1) / 2] * 3 for tensor in several)
    outputs = [torch.empty(2 * size) for _ in range(2)]
    with manager():
        for one in outputs:
            dist.all_gather_into_tensor(one, torch.full((2,), float(rank)))
    assert outputs[1].tolist() == [float(one) for one in range(size) for _ in range(2)]
    sums_of_sparse(rank, size)
    with torch.inference_mode():
        made = torch.ones(2, 3).t()
        dist.all_reduce(made, async_op=True).get_future().wait()
    assert made.sum() == 6 * size


def sums_of_sparse(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int64):
        dense = torch.zeros(5, 3, dtype=dtype)
        dense[rank], dense[4, 1] = rank + 1, 2
        sparse = dense.to_sparse(1 if dtype is torch.float32 else 2)
        dist.all_reduce(sparse)
        expected = torch.zeros(5, 3, dtype=dtype)
        for one in range(size):
            expected[one] += one + 1
            expected[4, 1] += 2
        assert torch.equal(sparse.to_dense(), expected), (sparse, expected)
    empty = torch.zeros(4).to_sparse()
    dist.all_reduce(empty)
    assert empty.to_dense().tolist() == [0.0] * 4
    with raises(RuntimeError, "sparse", "MAX"):
        dist.all_reduce(empty, ReduceOp.MAX)
    with raises(gradserver.CollectiveMismatchError, "shapes"):
        dist.all_reduce(torch.zeros(4, 2 + rank).to_sparse())


def spellings(folder: str, rank: int, size: int) -> None:
    """Call the methods of the group itself, by all names that versions of torch have had, and in short."""
    start(folder, rank, size)
    group: Any = dist.group.WORLD
    one, total = torch.tensor([rank + 1.0]), size * (size + 1) / 2
    calls: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce(t, ReduceOp.SUM),
        lambda t: group.allreduce(t, op=ReduceOp.SUM),
        lambda t: group.allreduce([t], dist.AllreduceOptions()),
        lambda t: group.allreduce_coalesced([t]),
    )
    for call in calls:
        tensor = one.clone()
        work = call(tensor)
        assert work.wait() is True
        assert tensor.item() == total
        assert work.result()[0] is tensor
    for name in ("all_gather_single", "_allgather_base"):
        output = torch.empty(size)
        getattr(group, name)(output, one).wait()
        assert output.tolist() == [place + 1.0 for place in range(size)]
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        output = torch.empty(size)
        getattr(group, name)([output], [one]).wait()
        assert output.tolist() == [place + 1.0 for place in range(size)]
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        output = torch.empty(1)
        getattr(group, name)(output, torch.ones(size)).wait()
        assert output.item() == size
    for name in ("all_to_all_single", "alltoall_base"):
        output = torch.empty(size)
        getattr(group, name)(output, torch.full((size,), float(rank)), [], []).wait()
        assert output.tolist() == [float(place) for place in range(size)]
    tensor = one.clone()
    group.broadcast(tensor, 1).wait()
    assert tensor.item() == 2.0
    group.barrier().wait()
    assert (group.rank(), group.size(), group.name()) == (rank, size, BACKEND)
    assert dist.get_backend() == BACKEND
    assert gradserver.torch.worker().rank == rank


# ── works and futures ─────────────────────────────────────────────────────────────────────────────────────


def futures(folder: str, rank: int, size: int) -> None:
    """Wait in callbacks, several deep; poll; and have many futures at once with few threads."""
    start(folder, rank, size)

    def again(depth: int, future: Any) -> list[torch.Tensor]:
        (tensor,) = future.value()
        if depth:
            inner = dist.all_reduce(tensor, async_op=True).get_future()
            inner.then(lambda done: again(depth - 1, done)).wait()
        return [tensor]

    tensor = torch.ones(3)
    outer = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: again(5, done))
    assert outer.wait()[0].tolist() == [float(size**6)] * 3
    first, second = torch.ones(1), torch.ones(1)
    early, late = (dist.all_reduce(one, async_op=True).get_future() for one in (first, second))
    assert early.then(lambda _: late.wait()[0].item()).wait() == size
    for _ in range(20):
        many = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(8)]
        torch.futures.wait_all([work.get_future() for work in many])
    assert sum(thread.name == "gradserver-futures" for thread in threading.enumerate()) <= 20
    work = dist.irecv(tensor, 1 - rank) if rank == 0 else None
    if work is not None:
        assert not work.is_completed()
        dist.barrier()
        until = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < until
        assert (tensor.tolist(), work.is_success(), work.exception()) == ([7.0] * 3, True, None)
    else:
        dist.barrier()
        dist.send(torch.full((3,), 7.0), 0)


def profiles(folder: str, rank: int, size: int) -> None:
    """Find operations in a profile, each as long as this thread was in it."""
    start(folder, rank, size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(5, 3))
        later = dist.broadcast(torch.ones(2), 0, async_op=True).get_future()
        dist.barrier()
        later.wait()
        time.sleep(0.3)
    found = {event.name: event for event in profile.events() if event.name.startswith("gradserver:")}
    assert found.keys() == {"gradserver:all_reduce", "gradserver:broadcast", "gradserver:barrier"}
    assert found["gradserver:all_reduce"].input_shapes == [[5, 3]]
    assert found["gradserver:broadcast"].time_range.elapsed_us() < 3e5  # and not until the profile's end


def deadlines(folder: str, rank: int, size: int) -> None:
    """Let waits run out: the error has torch's words, and names the rank that is missing."""
    start(folder, rank, size)
    dist.barrier()
    if rank == 0:
        tensor, brief = torch.ones(3), timedelta(seconds=0.5)
        work = dist.all_reduce(tensor, async_op=True)
        with raises((gradserver.DeadlineError,), "timed out", "(rank 1)"):
            work.wait(brief)
        with raises(dist.DistBackendError, " timed out: it is not done after a timeout of 0.5 s"):
            work.wait(brief)
        options = dist.AllreduceOptions()
        options.timeout = brief
        group: Any = dist.group.WORLD
        with raises(RuntimeError, "timed out"):
            group.allreduce([tensor], options).get_future().wait()
        with raises(RuntimeError, "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms"):
            group.monitored_barrier(brief)
        with raises(RuntimeError, "Rank 0 timed out in monitoredBarrier after 0 ms"):
            group.monitored_barrier(timedelta(0))
    together(folder, rank, size)


def monitored(folder: str, rank: int, size: int) -> None:
    """Have the last two ranks miss a barrier."""
    start(folder, rank, size)
    group: Any = dist.group.WORLD
    group.monitored_barrier(PATIENCE, wait_all_ranks=True)
    dist.monitored_barrier(timeout=60.0)
    if rank == 0:
        with raises(RuntimeError, f"[Rank 0]: Ranks {size - 2}, {size - 1} failed to pass monitoredBarrier in 700 ms"):
            group.monitored_barrier(timedelta(seconds=0.7), wait_all_ranks=True)
    elif rank < size - 2:
        with raises(RuntimeError, f"Rank {rank} successfully reached monitoredBarrier", "check rank 0 logs"):
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    together(folder, rank, size)


def any_source(folder: str, rank: int, size: int) -> None:
    """Receive from any rank: in the order of each, beside receives from a certain one, and from one that dies."""
    start(folder, rank, size)
    if rank == 0:
        found: list[tuple[int, float]] = []
        for _ in range(3 * (size - 1)):
            tensor = torch.empty(2)
            found.append((dist.recv(tensor), tensor[0].item()))
        for peer in range(1, size):
            assert [value for source, value in found if source == peer] == [10.0 * peer + one for one in range(3)]
        early, late = torch.empty(1), torch.empty(1)
        works = dist.irecv(early, tag=7), dist.irecv(late, src=1, tag=8)
        dist.barrier()  # the others send before it: this is under way already
        for work in works:
            work.wait()
        assert (works[0]._source_rank(), early.item(), late.item()) == (2, 7.0, 8.0)
        with raises(RuntimeError, "without elements"):
            dist.recv(torch.empty(0))
        with raises(gradserver.DeadlineError, "any rank", "timed out"):
            dist.irecv(early).wait(timedelta(seconds=0.3))
        work = dist.irecv(early, tag=10)
        work.get_future()
        while not work._completing.locked():  # another thread waits for it
            time.sleep(0.001)
        with raises(gradserver.DeadlineError, "any rank", "tag 10", "timed out"):
            work.wait(timedelta(seconds=0.3))
        together(folder, rank, size)
        with raises(gradserver.WorkerLostError, "(rank 2)"):
            dist.recv(early, tag=9)
    else:
        for number in range(3):
            dist.send(torch.full((2,), 10.0 * rank + number), 0)
        if rank == 2:
            dist.send(torch.tensor([7.0]), 0, tag=7)
        if rank == 1:
            dist.send(torch.tensor([8.0]), 0, tag=8)
        dist.barrier()
        together(folder, rank, size)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    together(folder, rank, size - 1, "over")


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────


def groups(folder: str, rank: int, size: int) -> None:
    """Make groups within, beside, after, and in another order of ranks."""
    with raises(gradserver.UsageError, "init_process_group"):
        gradserver.torch.worker()
    for number in range(3):  # one store for all: names begin anew each time
        start(folder, rank, size)
        inner = dist.new_group([0, size - 1])
        alone = [dist.new_group([one]) for one in range(size)][rank]
        dist.all_reduce(torch.ones(1), group=alone)
        backward = dist.new_group(list(reversed(range(size))), sort_ranks=False)
        for group, members in ((None, range(size)), (inner, (0, size - 1)), (backward, range(size))):
            if rank in members:
                tensor = torch.tensor([2.0**rank])
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == sum(2.0**one for one in members)
        assert dist.get_rank(backward) == size - 1 - rank
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, group_src=0, group=backward)
        assert tensor.item() == size - 1
        assert gradserver.torch.worker(backward).rank == size - 1 - rank
        default: Any = dist.group.WORLD
        if number == 1:
            dist.distributed_c10d._abort_process_group() if rank == 0 else dist.destroy_process_group()
        else:
            dist.destroy_process_group()
        with raises(gradserver.ClosedError, "closed"):
            default.allreduce([torch.ones(1)])
    start(folder, rank, size, name="beside", backend="gloo")
    with raises(gradserver.UsageError, "'gloo'"):
        gradserver.torch.worker()
    beside = dist.new_group(backend=BACKEND)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=beside)
    within = dist.new_group([0, 1], backend=BACKEND)
    if rank in (0, 1):
        dist.all_reduce(tensor, group=within)
    assert tensor.item() == size * (2 if rank in (0, 1) else 1)
    dist.barrier()


def forked(folder: str, rank: int, size: int) -> None:
    """Load data in forked processes while there is a group, and use the group in one, which is refused."""
    start(folder, rank, size)
    numbers: Any = list(range(8))
    loader = torch.utils.data.DataLoader[Any](numbers, batch_size=2, num_workers=2)
    assert sum(int(batch.sum()) for batch in loader) == 28
    dist.barrier()
    child = os.fork()
    if not child:
        code = 1
        try:
            with raises(gradserver.UsageError, "forked child"):
                dist.all_reduce(torch.ones(1))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()


# ── trainers' parts ───────────────────────────────────────────────────────────────────────────────────────


def trained(group: Any, **more: Any) -> str:
    model = nn.parallel.DistributedDataParallel(net(), process_group=group, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(5):
        if number == 2:
            with model.no_sync():
                step(model, seed=9)
        step(model, optimizer, number)
    return digest(model.parameters())


def ddp(folder: str, rank: int, size: int) -> None:
    """Train with torch's DDP over both backends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    start(folder, rank, size)
    gloo = dist.new_group(backend="gloo")
    for more in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}):
        ours, theirs = trained(None, **more), trained(gloo, **more)
        assert ours == theirs or size > 2, more
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        found = []
        for group in (None, gloo):
            model = nn.parallel.DistributedDataParallel(net(), process_group=group)
            is_power = hook is powerSGD_hook.powerSGD_hook
            model.register_comm_hook(
                powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2) if is_power else group, hook
            )
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for number in range(4):
                step(model, optimizer, number)
            found.append(digest(model.parameters()))
        assert found[0] == found[1] or size > 2, hook
    model = nn.parallel.DistributedDataParallel(net())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    step(model, sharded)
    sharded.consolidate_state_dict(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for number in range(3 + 2 * rank):
            step(model, optimizer, number)


def sharded(folder: str, rank: int, size: int) -> None:
    """Train with FSDP2, or HSDP with four ranks, and save: the weights are those of gloo."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    start(folder, rank, size)
    dcp: Any = import_module("torch.distributed.checkpoint")
    shape, names = ((size,), ("shard",)) if size < 4 else ((2, size // 2), ("replicate", "shard"))
    found = []
    for number, backend in enumerate((BACKEND, "gloo")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend))
        model = net()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for one in range(3):
            step(model, seed=one)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved-{number}")
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved-{number}")
        found.append(digest(one.full_tensor() for one in model.parameters() if isinstance(one, DTensor)))
    assert found[0] == found[1], found


def composed(folder: str, rank: int, size: int) -> None:
    """Run functional collectives, tensor parallelism, autograd collectives, and an async checkpoint."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start(folder, rank, size)
    dcp: Any = import_module("torch.distributed.checkpoint")
    differentiable: Any = import_module("torch.distributed.nn.functional")
    world: Any = dist.group.WORLD
    tensor = torch.ones(4) * (rank + 1)
    assert functional.all_reduce(tensor, "sum", world).sum() == 2 * size * (size + 1)
    assert functional.all_gather_tensor(tensor, 0, world).numel() == 4 * size
    assert functional.reduce_scatter_tensor(torch.ones(4 * size), "sum", 0, world).tolist() == [float(size)] * 4
    assert functional.all_to_all_single(torch.ones(2 * size), None, None, world).sum() == 2 * size
    assert functional.broadcast(tensor, 0, world).tolist() == [1.0] * 4
    assert functional.all_reduce_coalesced([tensor, tensor], "sum", world)[1].sum() == 2 * size * (size + 1)
    leaf = torch.ones(2, requires_grad=True)
    differentiable.all_reduce(leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0 * size] * 2
    parallel = parallelize_module(
        net(), init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    given = torch.ones(4, 8)
    assert torch.allclose(parallel(given), net()(given), atol=1e-6)
    saving: Any = dcp.async_save({"m": net().state_dict()}, checkpoint_id=f"{folder}/async")
    saving.result()


def training(
    folder: str, rank: int, size: int, steps: int, pause: float, how: str = "", backend: str = BACKEND
) -> None:
    """Train slowly with DDP, FSDP2 or HSDP. One rank ends in the middle, and each says what it saw, and when.

    Rank 1 is killed, is frozen, raises, or leaves in step 5, as ``how`` says.
    """
    start(folder, rank, size, backend=backend)
    way, _, end = how.rpartition(" ")
    if way:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((size,), ("shard",)) if way == "sharded" else ((2, size // 2), ("replicate", "shard"))
        model: nn.Module = net()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    else:
        model = nn.parallel.DistributedDataParallel(net())
    optimizer, since = torch.optim.AdamW(model.parameters(), lr=0.01), time.monotonic()
    say("training")
    try:
        for number in range(steps):
            if number == 5 and rank == 1:
                say("pid", os.getpid())
                _end(end)
            since = time.monotonic()
            step(model, optimizer, number)
            say("step", number)
            time.sleep(pause)
    except Exception as error:
        say("failed", json.dumps([type(error).__name__, str(error), time.monotonic() - since]))
        raise
    say("digest", digest(model.parameters()))


def _end(how: str) -> None:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ValueError("a fault of the script")
        case "leaves":
            dist.destroy_process_group()
            raise SystemExit(0)
        case "exits":
            os._exit(7)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────


def wrong_tensors(folder: str, rank: int, size: int) -> None:
    """Give tensors that cannot be right: this rank alone raises, and the next operation is as usual."""
    start(folder, rank, size)
    ones, tensor = [torch.ones(2) for _ in range(size)], torch.ones(2)
    wrong: tuple[tuple[tuple[str, ...], Callable[[], Any]], ...] = (
        (("mean", "int64"), lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVG)),
        (("PREMUL_SUM", "SUM, AVG"), lambda: dist.group.WORLD.allreduce([tensor], ReduceOp.PREMUL_SUM)),
        (("BAND", "float32"), lambda: dist.all_reduce(tensor, ReduceOp.BAND)),
        (
            ("complex", "order"),
            lambda: dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], ReduceOp.MAX),
        ),
        (("world_size times",), lambda: dist.all_gather_into_tensor(torch.ones(2), tensor)),
        (("same size",), lambda: dist.reduce_scatter_tensor(torch.ones(2), tensor)),
        (("same size",), lambda: dist.all_gather([torch.ones(3) for _ in range(size)], tensor)),
        (("each of",), lambda: dist.all_gather(ones[1:], tensor)),
        (("divide equally",), lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1))),
        (("total dim 0",), lambda: dist.all_to_all_single(torch.ones(2), tensor, [1] * size, [5] * size)),
        (("to_dense",), lambda: dist.broadcast(tensor.to_sparse(), 0)),
        (("share one memory",), lambda: dist.all_reduce(torch.ones(1).expand(3))),
        (("meta",), lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        (("share one memory",), lambda: dist.recv(torch.ones(1).expand(3), 1 - rank)),
    )
    for words, call in wrong:
        with raises((RuntimeError, ValueError, gradserver.GradServerError), *words):
            call()
        check = torch.ones(1)
        dist.all_reduce(check)
        assert check.item() == size, words


def _disagree(folder: str, rank: int, size: int, *calls: Callable[[], Any]) -> None:
    """Have the ranks make different calls: each raises at once, and names both sides."""
    start(folder, rank, size)
    since = time.monotonic()
    with raises(gradserver.DisagreementError, "(rank 0)", "(rank 1)"):
        calls[min(rank, 1)]()
    assert time.monotonic() - since < 10


def other_shape(folder: str, rank: int, size: int) -> None:
    _disagree(folder, rank, size, lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3)))


def other_dtype(folder: str, rank: int, size: int) -> None:
    _disagree(folder, rank, size, lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2).half()))


def other_order(folder: str, rank: int, size: int) -> None:
    _disagree(folder, rank, size, lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0))


def other_reduction(folder: str, rank: int, size: int) -> None:
    calls = [lambda op=op: dist.all_reduce(torch.ones(2), op) for op in (ReduceOp.SUM, ReduceOp.MAX)]
    _disagree(folder, rank, size, *calls)


def other_root(folder: str, rank: int, size: int) -> None:
    _disagree(folder, rank, size, lambda: dist.broadcast(torch.ones(2), 0), lambda: dist.broadcast(torch.ones(2), 1))


def elastic(folder: str, rank: int, size: int) -> None:
    """Make a group that can go on without a member: it sums nothing, and copies as usual."""
    start(folder, rank, size)
    with raises(gradserver.UsageError, "elastic", f"--workers {size}", "DistributedDataParallel"):
        dist.all_reduce(torch.ones(1))
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, 1)
    assert tensor.item() == 1.0


def failing(folder: str, rank: int, size: int, **more: Any) -> None:
    """Make the group, and say why that failed."""
    import_module("gradserver.torch.creating")
    timeout = timedelta(seconds=more.pop("timeout", 30))
    since = time.monotonic()
    try:
        start(folder, rank, size, timeout, **more)
    except Exception as error:
        say("failed", json.dumps([type(error).__name__, str(error), time.monotonic() - since]))
    else:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        say("sum", int(tensor.item()))


def main(names: str, folder: str, rank: str, size: str, more: str = "{}") -> None:
    import_module("gradserver_torch_entry").register()
    for name in names.split(","):
        own = Path(folder) / name if "," in names else Path(folder)
        own.mkdir(exist_ok=True)
        globals()[name](str(own), int(rank), int(size), **json.loads(more))
        if dist.is_initialized():
            dist.destroy_process_group()
        say("ok", name)


if __name__ == "__main__":
    main(*sys.argv[1:])
