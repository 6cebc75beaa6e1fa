"""Copies of a device's buckets to the host and back, with a device that executes each copy as late as it may."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradserver
from gradserver import DistributedDataParallel, LocalCluster
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import ClosedError, MalformedMessageError, NonFiniteError, UsageError
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Kind, Op, Pool, operation_of
from gradserver.protocol.in_process import in_process_pair
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Result
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.shards import Table
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.devices import copies, staged as hosts
from gradserver.worker.devices.copies import Copier
from gradserver.worker.handle import Handle
from gradserver.worker.member.exchange import Exchange
from gradserver.worker.member.progress import Progress
from gradserver.worker.member.slots import Slots
from gradserver.worker.planes import staging
from tests.cluster import Daemon, Gather, Task, together, wait_until
from tests.fake_device import FakeDevice, FakeStream, Pace, checked
from tests.models import Convolutional, Transformer, images, loss_of, optimizer_state, state_of, tokens
from tests.replicas import assert_like_one_process, gradients, on, reference, same, sgd, train

torch.set_num_threads(1)

PACES: tuple[Pace, ...] = get_args(Pace)
OpenFake = Callable[..., FakeDevice]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenFake]:
    """Return a maker of the device that all buckets are on from then on. In the end nothing of it must be locked."""
    made: list[FakeDevice] = []

    def make(*args: Any, **options: Any) -> FakeDevice:
        made.append(FakeDevice(*args, **options))
        monkeypatch.setattr(staging, "open_device", lambda _: checked(made[-1]))
        return made[-1]

    yield make
    gc.collect()
    wait_until(lambda: not any(device.locked for device in made), "all pages are unlocked")


# ── whole trainings ───────────────────────────────────────────────────────────────────────────────────


def kinds_of_training() -> Iterator[Any]:
    """Yield pace, piece and options. Options are tried soon with one pace, and the other paces without options."""
    for options in (
        {},
        {"gradient_as_bucket_view": False},
        {"delay_all_reduce": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"blocks": (), "bucket_cap_mb": 0.001},
    ):
        for pace in PACES:
            for piece, name in ((64, "in pieces"), (4 * MIB, "whole")):
                soon = not options or (pace, piece) == ("late", 64)
                label = f"{'-'.join(options) or 'defaults'}-{name}-{pace}"
                yield pytest.param(pace, piece, options, id=label, marks=() if soon else pytest.mark.long)


@pytest.mark.parametrize(("pace", "piece", "options"), list(kinds_of_training()))
def test_trains_as_one_process_does(
    pace: Pace, piece: int, options: dict[str, Any], fake: OpenFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "PIECE_BYTES", piece)
    device = fake(pace)
    assert_like_one_process(on(3, train, Transformer, **options), reference(Transformer(0)))
    assert min(device.copied) > 0


@pytest.mark.parametrize("pace", PACES)
def test_over_each_channel(pace: Pace, fake: OpenFake, gather: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PIECE_BYTES", 4096)
    fake(pace)
    results = together(gather(2), lambda worker: train(worker, Transformer))
    assert_like_one_process(results, reference(Transformer(0)))


@pytest.mark.parametrize("pace", PACES)
def test_buffers_are_kept_alike(pace: Pace, fake: OpenFake) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(2 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *images(step + worker.rank, 4)).backward()
                optimizer.step()
        return state_of(model.module), list(optimizer_state(optimizer))

    fake(pace)
    (state, momenta), *others = on(3, work)
    for other_state, other_momenta in others:
        assert same(state, other_state)
        assert all(map(torch.equal, momenta, other_momenta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pace", PACES)
def test_element_types(dtype: torch.dtype, pace: Pace, fake: OpenFake) -> None:
    def work(worker: Worker) -> list[list[float]]:
        linear = nn.Linear(3, 2, bias=False, dtype=dtype)
        DistributedDataParallel(linear, worker)(torch.full((1, 3), worker.rank + 1.0).to(dtype)).sum().backward()
        assert linear.weight.grad is not None
        result: list[list[float]] = linear.weight.grad.tolist()
        return result

    fake(pace)
    assert on(2, work) == [[[1.5] * 3] * 2] * 2


def test_a_gradient_that_is_not_finite_is_named(fake: OpenFake) -> None:
    def work(worker: Worker) -> tuple[str, str]:
        model = DistributedDataParallel(Transformer(), worker)
        loss = loss_of(model, *tokens(0, 2))
        with pytest.raises(NonFiniteError) as caught:
            (loss * float("nan") if worker.rank == 1 else loss).backward()
        return caught.value.worker, caught.value.bucket

    fake()
    assert on(2, work) == [("worker-1", "lm_head")] * 2


def test_accumulation(fake: OpenFake) -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Transformer(worker.rank)
        model = DistributedDataParallel(module, worker, accumulation="mean")
        with model.no_sync():
            loss_of(model, *tokens(10 * worker.rank, 4)).backward()
        loss_of(model, *tokens(10 * worker.rank + 1, 4)).backward()
        return gradients(module)

    fake()
    results = on(2, work)
    single = Transformer(0)
    total = sum(loss_of(single, *tokens(10 * rank + part, 4)) for rank in range(2) for part in range(2))
    (total / 4).backward()
    assert_like_one_process(results, gradients(single))


# ── one copier ────────────────────────────────────────────────────────────────────────────────────────


class Staged:
    """A worker that is alone, and a copier of its buckets."""

    def __init__(self, worker: Worker, device: FakeDevice, numel: int, buckets: int = 1) -> None:
        self.agreement = worker.agree_beside(simple_plan([(f"b{i}", numel) for i in range(buckets)], FLOAT32))
        self.worker, self.device = worker, device
        self.copier = Copier(worker, self.agreement.first, checked(device))
        self.flats = [torch.zeros(numel) for _ in range(buckets)]

    def push(self, index: int, value: float) -> Future[Handle]:
        """Compute a gradient on the device's current stream, and push it."""
        flat = self.flats[index]
        self.device.compute.enqueue(lambda: flat.fill_(value))
        return self.copier.push(index, flat, 1.0, True)

    def finish(self, *pushes: Future[Handle]) -> None:
        for push in pushes:
            push.result(10).wait(10)
        self.copier.join(10)
        self.worker.finish_round(10)


@pytest.fixture
def alone(fake: OpenFake) -> Iterator[Callable[..., Staged]]:
    with ExitStack() as stack:

        def make(numel: int, buckets: int = 1, **options: Any) -> Staged:
            cluster = stack.enter_context(LocalCluster(1))
            return Staged(cluster.workers[0], fake(**options), numel, buckets)

        yield make


@pytest.mark.parametrize("pace", PACES)
def test_copies_begin_behind_the_computation(pace: Pace, alone: Callable[..., Staged]) -> None:
    staged = alone(1000, pace=pace, compute="late")
    for value in (1.0, 2.0, 3.0):
        staged.finish(staged.push(0, value))
        staged.device.compute.synchronize()
        assert staged.flats[0].tolist() == [value] * 1000


def test_copies_wait_for_every_stream_that_wrote_to_the_bucket(alone: Callable[..., Staged]) -> None:
    staged = alone(1000, compute="late")
    device, flat = staged.device, staged.flats[0]
    first, second = device.compute, FakeStream(device, "late")
    for stream, part, value in ((second, flat[:500], 7.0), (first, flat[500:], 8.0)):
        device.compute = stream
        stream.enqueue(lambda part=part, value=value: part.fill_(value))  # type: ignore[misc]
        staged.copier.note_writer(0)
    staged.finish(staged.copier.push(0, flat, 1.0, True))
    first.synchronize()
    assert flat.tolist() == [7.0] * 500 + [8.0] * 500


def test_a_piece_is_pushed_while_later_ones_are_not_copied(
    alone: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "PIECE_BYTES", MIB)
    staged = alone(4 * MIB // 4)
    worker, order = staged.worker, list[str]()
    copy, push, advance = staged.device.copy, worker.push, worker.advance

    def noted(target: Tensor, source: Tensor, stream: Any) -> None:
        way = "back" if stream is staged.copier._inbound.stream else "out"
        copy(target, source, stream)
        stream.enqueue(lambda: order.append(way))
        if way == "back":
            returned.set()

    def pushed(*args: Any, **options: Any) -> Any:
        order.append("push")
        return push(*args, **options)

    def advanced(progress: Progress, nbytes: int) -> None:
        if nbytes == 4 * MIB:
            assert returned.wait(10), "the result of an earlier piece comes back before the last is pushed"
        order.append(f"advance {nbytes // MIB}")
        advance(progress, nbytes)

    returned = threading.Event()
    monkeypatch.setattr(staged.device, "copy", noted)
    monkeypatch.setattr(worker, "push", pushed)
    monkeypatch.setattr(worker, "advance", advanced)
    staged.finish(staged.push(0, 3.0))
    outbound = [step for step in order if step != "back"]
    assert outbound == ["out", "push", "out", "advance 2", "out", "advance 3", "out", "advance 4"]
    assert staged.flats[0].tolist() == [3.0] * MIB


def test_a_round_begins_once_though_two_threads_push(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(dict[int, Any]):
        """The values that were pushed; it notes that the second thread has seen that this is nothing."""

        def __len__(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                seen.set()
            return super().__len__()

    seen, begun, others = threading.Event(), list[int](), list[Task[Any]]()
    with LocalCluster(1) as cluster:
        (worker,) = cluster.workers
        first = worker.agree_beside(simple_plan([("a", 10), ("b", 10)], FLOAT32)).first
        member, boundaries = worker._session.member, worker._session.boundaries
        watched = Watched()
        monkeypatch.setattr(member.rounds, "pushed", watched)
        monkeypatch.setattr(boundaries, "_pushed", watched)
        begin = member.begin_round

        def begin_round(index: int, weight: float) -> None:
            begun.append(index)
            if not others:
                others.append(Task(worker.push, first + 1, torch.ones(10)))
                assert seen.wait(10)
            begin(index, weight)

        monkeypatch.setattr(member, "begin_round", begin_round)
        worker.push(first, torch.ones(10))
        others[0].result()
        worker.finish_round()
    assert begun == [first]


def test_results_that_follow_each_other_are_copied_as_one() -> None:
    one, other = (hosts.Staged(torch.empty(0), torch.empty(0), [], []) for _ in range(2))
    done: Future[Any] = Future()
    first = [(one, 0, 4), (one, 4, 8), (one, 8, 9), (other, 9, 12), (one, 9, 10)]
    last = [(one, 10, 11), (one, 12, 13)]
    expected = [(one, 0, 9), (other, 9, 12), (one, 9, 10), done, *last, None]
    assert list(copies._merged([*first, done, *last, None])) == expected


def test_a_bucket_that_is_there_does_not_wait_for_one_that_is_not(alone: Callable[..., Staged]) -> None:
    staged = alone(MIB // 4, 2)
    worker, first = staged.worker, staged.agreement.first
    filling = Progress(lambda *_: None)
    pushed = worker.push(first, torch.full((MIB // 4,), 1.0), progress=filling)
    worker.push(first + 1, torch.full((MIB // 4,), 2.0)).wait(10)
    assert not pushed.done()
    worker.advance(filling, MIB)
    pushed.wait(10)
    worker.finish_round(10)


def test_an_error_of_the_device_is_raised_where_the_round_ends(
    alone: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = alone(1000)

    def breaks(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(staged.device, "copy", breaks)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        staged.push(0, 1.0).result(10)


def test_an_error_of_a_copy_back_is_raised_by_the_wait_for_it(
    alone: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = alone(1000)
    copy = staged.device.copy

    def breaks(target: Tensor, source: Tensor, stream: Any) -> None:
        if stream is staged.copier._inbound.stream:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        copy(target, source, stream)

    monkeypatch.setattr(staged.device, "copy", breaks)
    staged.push(0, 1.0).result(10).wait(10)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        staged.copier.join(10)


def test_a_closed_worker_frees_the_memory_and_takes_no_more(alone: Callable[..., Staged]) -> None:
    staged = alone(1000)
    staged.finish(staged.push(0, 1.0))
    assert staged.device.locked
    staged.worker.close()
    wait_until(lambda: not staged.device.locked, "all pages are unlocked")
    with pytest.raises(ClosedError):
        staged.push(0, 1.0).result(10)
    with pytest.raises(ClosedError):
        staged.copier.join(10)
    with pytest.raises(ClosedError):
        staged.copier.push(0, torch.zeros(1000), 1.0, True).result(10)  # with new memory
    assert not staged.device.locked


def test_an_empty_bucket_is_exchanged_like_any_other(alone: Callable[..., Staged]) -> None:
    staged = alone(0, 2)
    staged.finish(staged.push(0, 1.0), staged.push(1, 1.0))


def test_a_contribution_without_data_is_not_copied_but_once(alone: Callable[..., Staged]) -> None:
    staged = alone(1000)
    for _ in range(3):
        staged.finish(staged.copier.push(0, staged.flats[0], 1.0, False))
    assert staged.device.copied == [4000, 3 * 4000]
    staged.copier.forget(0)
    staged.finish(staged.copier.push(0, staged.flats[0], 1.0, False))
    assert staged.device.copied[0] == 8000


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_bucket_that_moves_on_its_device_keeps_its_memory_on_the_host(wire: str, fake: OpenFake) -> None:
    device, numel = fake(), 1 << 18
    with LocalCluster(1, wire=wire) as cluster:
        staged = Staged(cluster.workers[0], device, numel)
        for value in (1.0, 2.0, 3.0):
            staged.flats[0] = torch.zeros(numel)
            staged.finish(staged.push(0, value))
            assert staged.flats[0].eq(value).all()
        assert len(device.locked) == 1


# ── payloads of codecs ────────────────────────────────────────────────────────────────────────────────


def gradients_of(worker: Worker, rounds: int, numel: int, is_staged: bool, device: FakeDevice) -> list[Tensor]:
    """Exchange a bucket, staged or from the host. Return the results of each round."""
    agreement = worker.agree_beside(simple_plan([("small", 100), ("large", numel)], FLOAT32), 30)
    copier = Copier(worker, agreement.first, checked(device)) if is_staged else None
    flats = [torch.zeros(100), torch.zeros(numel)]
    found = []
    for number in range(rounds):
        generator = torch.Generator().manual_seed(100 * number + worker.rank)
        for flat in flats:
            flat.normal_(0.0, 10.0 ** (number - 2), generator=generator)
        present = number != 3 and (number + worker.rank) % 3 != 2  # in one round no worker has anything to give
        if copier is not None:
            pushes = [copier.push(index, flat, 1.0 + worker.rank, present) for index, flat in enumerate(flats)]
            for push in pushes:
                push.result(30).wait(30)
            copier.join(30)
        else:
            for index, flat in enumerate(flats):
                worker.push(agreement.first + index, flat, weight=1.0 + worker.rank, present=present)
        worker.finish_round(30)
        found += [flat.clone() for flat in flats]
    return found


@contextmanager
def lossy(wire: str, channel: str, world: int, *options: str) -> Iterator[list[Worker]]:
    """Yield the workers of a group with a lossy wire."""
    with ExitStack() as stack:
        if channel == "memory":
            yield stack.enter_context(LocalCluster(world, wire=wire)).workers
            return
        daemon = stack.enter_context(Daemon("--workers", str(world), *options))
        workers = together(range(world), lambda rank: connect(daemon.url, rank, world, channel=channel, wire=wire))
        yield [stack.enter_context(worker) for worker in workers]


def results_of(
    workers: list[Worker], rounds: int, numel: int, staged: Collection[int], pace: Pace
) -> list[list[Tensor]]:
    """Return all results of each worker. Those with these ranks have their buckets on a device."""
    device = FakeDevice(pace)
    return together(workers, lambda worker: gradients_of(worker, rounds, numel, worker.rank in staged, device))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("channel", "pace"),
    [
        pytest.param(channel, pace, marks=() if (channel, pace) == ("shm", "late") else pytest.mark.long)
        for channel in ("memory", "tcp", "shm")
        for pace in PACES
    ],
)
def test_payloads_of_a_device_give_the_bits_of_the_host(
    pace: Pace, wire: str, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_SLICES", 2)
    found = []
    for staged in (set[int](), {0}, {0, 1, 2}):
        with lossy(wire, channel, 3) as workers:
            found += results_of(workers, 5, 5 * MIB // 4 + 777, staged, pace)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.long
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_payloads_of_several_data_shards(wire: str) -> None:
    found = []
    for staged in (set[int](), {0, 1}):
        with lossy(wire, "tcp", 2, "--shards", "2") as workers:
            found += results_of(workers, 3, 3 * MIB // 4 + 12345, staged, "late")
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_a_worker_that_may_be_late_encodes_on_the_host() -> None:
    found = []
    for staged in (set[int](), {0, 1}):
        with LocalCluster(2, elastic=(1, 2), quorum=2, wire="bf16") as cluster:
            found += results_of(cluster.workers, 4, 2 * MIB // 4, staged, "late")
            assert not hosts.takes_payloads(cluster.workers[0], 1)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_what_the_host_owes_is_owed_by_the_device_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = hosts.takes_payloads

    def from_the_third_round_on(worker: Worker, number: int) -> bool:
        return takes(worker, number) and worker.round >= 2

    for module in (copies, hosts):
        monkeypatch.setattr(module, "takes_payloads", from_the_third_round_on)
    found = []
    for staged in (set[int](), {0, 1}):
        with lossy("int8", "memory", 2) as workers:
            found += results_of(workers, 5, 2 * MIB // 4, staged, "late")
            assert bool(workers[0]._session.member.exchanges.feedback) != bool(staged)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_payloads_cross_the_bus_in_place_of_elements(fake: OpenFake) -> None:
    device = fake()
    with LocalCluster(1, wire="int8") as cluster:
        gradients_of(cluster.workers[0], 2, 4 * MIB, True, device)
        assert sum(device.locked.values()) < 4 * MIB * 4
    assert device.copied == [2 * 400, 2 * 400]  # those of the bucket that is too small for a codec


@pytest.mark.parametrize("nonfinite", ["leave-out", "skip"])
def test_payloads_that_are_not_finite_keep_what_is_owed(nonfinite: Any, fake: OpenFake) -> None:
    def work(worker: Worker, device: FakeDevice | None) -> list[Tensor]:
        agreement = worker.agree_beside(simple_plan([("b", 2 * MIB // 4)], FLOAT32))
        copier = Copier(worker, agreement.first, checked(device)) if device is not None else None
        found = []
        for number in range(4):
            flat = torch.linspace(-1 - worker.rank, 1 + number, 2 * MIB // 4)
            if number == 1 and worker.rank == 1:
                flat[MIB // 4 + 3] = float("nan")
            if copier is not None:
                copier.push(0, flat, 1.0, True).result(10).wait(10)
                copier.join(10)
            else:
                worker.push(agreement.first, flat)
            worker.finish_round(10)
            if not worker.skipped:
                found.append(flat)
        return found

    results = []
    for device in (None, fake("late")):
        with LocalCluster(2, wire="int8", nonfinite=nonfinite) as cluster:
            results.append(cluster.run(work, device))
    for one in (results[0][1], *results[1]):
        assert len(one) == len(results[0][0])
        assert all(map(torch.equal, one, results[0][0]))


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channel", ["shm"])
def test_memory_of_the_host_is_that_which_the_coordinator_sees(fake: OpenFake, gather: Gather) -> None:
    device, (worker,) = fake(), gather(1)
    model = DistributedDataParallel(Transformer(), worker)
    for step in range(2):
        loss_of(model, *tokens(step, 4)).backward()
    nbytes = sum(bucket.numel * bucket.dtype.itemsize for bucket in model.plan.buckets)
    assert device.copied == [2 * nbytes, 2 * nbytes]
    assert device.pinned_bytes == 0
    channel = worker._session.traffic.channel
    for address in device.locked:
        seen = (ctypes.c_uint8 * 64).from_address(address)
        assert channel.place_of(np.ctypeslib.as_array(seen)) is not None


def test_memory_that_cannot_be_locked_is_replaced_by_pinned_memory(
    fake: OpenFake, caplog: pytest.LogCaptureFixture
) -> None:
    device = fake(refuses="cudaHostRegister says error 801")
    with caplog.at_level(logging.WARNING, "gradserver"):
        assert_like_one_process(on(1, train, Transformer), reference(Transformer(0)))
    assert device.pinned_bytes > 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == "gradients of fake are copied once more on the host, in pinned memory: cudaHostRegister says error 801"
    )


def test_a_model_that_is_gone_frees_its_memory(fake: OpenFake) -> None:
    device = fake()
    with LocalCluster(1) as cluster:
        model = DistributedDataParallel(Transformer(), cluster.workers[0])
        loss_of(model, *tokens(0, 4)).backward()
        assert device.locked
        del model
        gc.collect()
        wait_until(lambda: not device.locked, "all pages are unlocked")


# ── groups that lose members, and wait for none ───────────────────────────────────────────────────────


def test_a_worker_that_may_be_late_pushes_whole_buckets(fake: OpenFake, monkeypatch: pytest.MonkeyPatch) -> None:
    advanced = list[int]()
    monkeypatch.setattr(Worker, "advance", lambda *arguments: advanced.append(arguments[-1]))
    monkeypatch.setattr(hosts, "PIECE_BYTES", 64)
    fake()
    with LocalCluster(2, elastic=(1, 2), quorum=2, timeout=10.0) as cluster:
        results = cluster.run(lambda worker: train(worker, Transformer))
    assert_like_one_process(results, reference(Transformer(0)))
    assert not advanced


def test_a_result_before_its_piece_is_refused() -> None:
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 4 * MIB // 4)
    memory, progress = np.zeros(4 * MIB, np.uint8), Progress(lambda start, stop: written.append((start, stop)))
    written = list[tuple[int, int]]()
    key, (layout, _) = ExchangeKey(BUCKET, 0, 0), Table(1).share(ExchangeKey(BUCKET, 0, 0), operation)
    channel = in_process_pair("worker")[0]
    exchange = Exchange(
        key,
        Pool.BUCKETS,
        operation,
        layout,
        memory,
        memory,
        1.0,
        Handle(1.0),
        channel,
        Slots(channel),
        progress=progress,
    )
    assert exchange.is_filling
    progress.advance(MIB)
    exchange.write(Result(key, 0, 1.0, True), bytes(MIB))
    assert written == [(0, MIB)]
    with pytest.raises(MalformedMessageError, match="came before that slice was sent"):
        exchange.write(Result(key, 1, 1.0, True), bytes(MIB))


def test_a_step_is_not_captured_into_a_graph(fake: OpenFake) -> None:
    device = fake()
    with gradserver.connect(rank=0, world_size=1) as worker:
        model = DistributedDataParallel(Transformer(), worker)
        device.is_capturing = True
        with pytest.raises(UsageError, match="wrap what that returns"):
            loss_of(model, *tokens(0, 2))
        with torch.no_grad():
            loss_of(model, *tokens(0, 2))
        device.is_capturing = False
        loss_of(model, *tokens(0, 2)).backward()
