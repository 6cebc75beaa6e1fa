"""Communicators: reductions on a device, and torch's settings. Gloo and a device of the CPU stand for NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from gradserver.protocol.errors import BackendUnavailableError, RoundVoidError
from gradserver.protocol.exchange import Op
from gradserver.worker.planes import bodies, communicator
from gradserver.worker.planes.bodies import Scratch
from gradserver.worker.planes.communicator import Communicator, Reduction, Signal
from tests.cluster import members, together
from tests.fake_device import FakeDevice, FakeEvent, FakeStream, Pace
from tests.test_direct import train

dist: Any = distributed
CPU = torch.device("cpu")


class Nccl:
    """A process group with NCCL, which notes what is set in the environment when it is made."""

    def __init__(self, *arguments: Any) -> None:
        self.found = {name: os.environ.get(name) for name in communicator._SETTINGS}
        self.options = arguments[-1]
        self.aborted = threading.Event()

    class Options:
        _timeout = timedelta()

    def abort(self) -> None:
        self.aborted.set()


def test_torch_s_settings_are_those_of_this_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "yes")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    made = Communicator("localhost:1", "one", 0, 1, [], "")._group("cuda", dist.HashStore(), timedelta(seconds=1))
    assert made.found == communicator._SETTINGS
    assert made.options._timeout > timedelta(days=1)
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "yes"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_what_was_begun_is_aborted_when_it_is_given_up() -> None:
    given_up = Communicator("localhost:1", "one", 0, 1, [], "")
    begun = Nccl(None)
    given_up._begun["cuda"] = begun
    given_up.give_up()
    assert begun.aborted.wait(10)
    assert given_up._groups == given_up._begun == {}


def test_devices_are_connected_in_the_same_order_everywhere() -> None:
    devices = [torch.device("cuda", number) for number in (1, 0, 1)]
    one, other = (Communicator("", "", 0, 1, some, "")._devices for some in (devices, reversed([*devices, CPU])))
    assert one == {"cuda": [torch.device("cuda", 0), torch.device("cuda", 1)]}
    assert other == {"cpu": [CPU], **one}


# ── reductions on a device ────────────────────────────────────────────────────────────────────────────


class Work:
    """A reduction that ends on its device when ``ends`` is called, and may have failed then."""

    def __init__(self, ends: Callable[[], object], error: str = "") -> None:
        self.synchronize, self._error = ends, error

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class Endless(FakeDevice):
    """A device with a reduction that only an abort ends."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = threading.Event()

    def new_event(self) -> FakeEvent:
        event = FakeEvent()
        event.synchronize = lambda: self.aborted.wait(60)  # type: ignore[method-assign,assignment]
        event.query = self.aborted.is_set  # type: ignore[method-assign]
        return event


def queue_of(device: FakeDevice) -> Any:
    return communicator._Queue(device, device.new_stream())


@pytest.mark.parametrize("pace", ["late", "at once"])
def test_a_stream_beside_the_computation_waits_for_a_reduction(pace: Pace) -> None:
    device, tensor = FakeDevice(pace, compute="late"), torch.zeros(3)
    before = device.compute._queued
    Reduction(Work(lambda: tensor.fill_(2.0)), tensor, Signal(), queue_of(device)).wait(10)
    assert tensor.tolist() == [2.0] * 3
    assert device.compute._queued == before, "nothing on the stream of the computation waits"


def test_a_reduction_that_failed_on_its_device_raises() -> None:
    reduction = Reduction(Work(lambda: None, "a peer is gone"), torch.zeros(1), Signal(), queue_of(FakeDevice()))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        reduction.wait(10)


def test_word_that_a_round_is_void_aborts_a_reduction_on_its_device() -> None:
    device, signal = Endless(), Signal()
    signal.on_interrupt(device.aborted.set)
    reduction = Reduction(Work(lambda: None), torch.zeros(1), signal, queue_of(device))
    signal.interrupt(RoundVoidError("a member is gone"))
    with pytest.raises(RoundVoidError):
        reduction.wait(60)


def test_a_reduction_on_a_device_has_a_deadline() -> None:
    device, signal = Endless(), Signal()
    signal.on_interrupt(device.aborted.set)
    reduction = Reduction(Work(lambda: None), torch.zeros(1), signal, queue_of(device))
    with pytest.raises(BackendUnavailableError, match="not done after 0.01 s"):
        reduction.wait(0.01)


def test_memory_for_results_is_free_when_the_call_before_has_read_it_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, scratch, read = FakeDevice(compute="late"), Scratch(), list[float]()
    monkeypatch.setattr(bodies, "open_device", lambda _: device)
    memory = scratch.take(3, torch.float32, CPU).fill_(1.0)
    device.compute.enqueue(lambda: read.extend(memory.tolist()))
    scratch.give_back(CPU)
    device.compute = FakeStream(device, "late")  # the next call is on another stream
    assert scratch.take(2, torch.float32, CPU).data_ptr() == memory.data_ptr()
    device.compute.enqueue(lambda: memory.fill_(2.0))
    device.compute.synchronize()
    assert read == [1.0] * 3


# ── over gloo ─────────────────────────────────────────────────────────────────────────────────────────


class GlooDevice(FakeDevice):
    """The CPU as a device on which gloo's reductions end when a stream has come that far."""

    def run(self, work: Callable[[], object], stream: Any) -> None:
        stream.enqueue(work.__self__.wait)  # type: ignore[attr-defined]


def test_direct_rounds_go_over_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with members("direct", 2) as workers:
        expected = together(workers, train)
    opened: list[GlooDevice] = []

    def open_device(_: torch.device) -> GlooDevice:
        opened.append(GlooDevice())
        return opened[-1]

    monkeypatch.setattr(communicator, "open_device", open_device)
    with members("direct", 2) as workers:
        assert together(workers, train) == expected
    assert len(opened) == 2


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.bfloat16], ids=str)
def test_buffers_of_any_type_are_broadcast_as_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, Tensor]] = []

    class Group:
        def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
            sent.append((options.rootRank, tensors[0]))
            return Work(lambda: None)

    made = Communicator("", "", 0, 1, [CPU], "")
    made._groups["cpu"] = Group()
    monkeypatch.setattr(communicator, "open_device", lambda _: FakeDevice())
    tensor = torch.ones(3).to(dtype)
    made.broadcast(tensor, 1, Signal()).wait(10)
    ((root, bytes_),) = sent
    assert root == 1
    assert bytes_.dtype == torch.uint8
    assert bytes_.data_ptr() == tensor.data_ptr()


def test_a_group_that_is_given_up_during_a_call_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's destructor waits for a reduction that is under way: here, it would wait in the training's thread."""
    made, ended, ends_in = Communicator("", "", 0, 1, [CPU], ""), threading.Event(), list[threading.Thread]()

    class Group:
        def allreduce(self, _: list[Tensor], __: Any) -> Any:
            made.give_up()
            for thread in [one for one in threading.enumerate() if one.name == "gradserver-give-up"]:
                thread.join(0.2)  # it may end before the call does
            return Work(lambda: None)

        def __del__(self) -> None:
            ends_in.append(threading.current_thread())
            ended.set()

    made._groups["cpu"] = Group()
    monkeypatch.setattr(communicator, "open_device", lambda _: FakeDevice())
    made.all_reduce(torch.ones(3), Op.SUM, Signal())
    assert ended.wait(10)
    assert ends_in != [threading.current_thread()]
    with pytest.raises(RuntimeError, match="were given up"):
        made.all_reduce(torch.ones(3), Op.SUM, Signal())


# ── over NCCL ─────────────────────────────────────────────────────────────────────────────────────────

GPU = torch.device("cuda", 0)


@pytest.fixture
def store() -> Iterator[str]:
    """Return the address of a store."""
    served = dist.TCPStore("127.0.0.1", 0, None, True)
    yield f"127.0.0.1:{served.port}"
    del served  # not before: it ends with its object


def formed(store: str, name: str) -> tuple[Communicator, Signal]:
    made, signal = Communicator(store, name, 0, 1, [CPU, GPU], "127.0.0.1"), Signal()
    signal.on_interrupt(made.give_up)
    made.form(signal, 60)
    return made, signal


def keep_busy() -> None:
    """Give the device something to do for about half a second."""
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_communicators_of_nccl_come_one_after_the_other(store: str) -> None:
    for epoch in range(3):
        made, signal = formed(store, str(epoch))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            tensor = torch.arange(5, device=GPU).to(dtype)
            made.all_reduce(tensor, Op.SUM, signal).wait(30)
            made.reduce(tensor, 0, signal).wait(30)
            assert tensor.tolist() == [0, 1, 2, 3, 4]
        for dtype in (torch.bool, torch.int16, torch.complex64):
            tensor = torch.arange(3, device=GPU).to(dtype)
            made.broadcast(tensor, 0, signal).wait(30)
            assert torch.equal(tensor.cpu(), torch.arange(3).to(dtype))
        given, rows = torch.arange(4, dtype=torch.uint8, device=GPU), torch.zeros(4, dtype=torch.uint8, device=GPU)
        made.all_gather(rows, given, signal).wait(30)
        assert rows.tolist() == [0, 1, 2, 3]
        made.give_up()
        made.give_up()
        with pytest.raises(RuntimeError, match="given up"):
            made.all_reduce(given, Op.SUM, signal)
    assert not [name for name in os.environ if name in communicator._SETTINGS]


@pytest.mark.gpu
def test_an_interrupted_reduction_of_nccl_is_followed_by_another_communicator(store: str) -> None:
    made, signal = formed(store, "first")
    tensor = torch.ones(1 << 20, device=GPU)
    keep_busy()  # in front of the reduction
    reduction = made.all_reduce(tensor, Op.SUM, signal)
    signal.interrupt(RoundVoidError("a member is gone"))
    with pytest.raises(RoundVoidError):
        reduction.wait(30)
    again, signal = formed(store, "second")
    again.all_reduce(tensor, Op.SUM, signal).wait(30)
    assert float(tensor.sum()) == 1 << 20
    again.give_up()


@pytest.mark.gpu
def test_a_reduction_of_nccl_has_a_deadline(store: str) -> None:
    made, signal = formed(store, "only")
    keep_busy()
    with pytest.raises(BackendUnavailableError, match="not done after 0.01 s"):
        made.all_reduce(torch.ones(4, device=GPU), Op.SUM, signal).wait(0.01)
