"""The module that calls torch.cuda, with the calls of CUDA's runtime replaced: no device is needed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradserver.worker.devices import cuda
from gradserver.worker.devices.cuda import CudaDevice, fetch_whole, open_device
from gradserver.worker.devices.memory import HostMemory


class Runtime:
    """Functions of CUDA's runtime as torch binds them. They note the thread and its device."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.called: list[tuple[str, tuple[int, ...], int]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
        self.called.append(("lock", arguments, threading.get_ident()))
        return self.error

    def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802
        self.called.append(("unlock", arguments, threading.get_ident()))
        return self.error

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"text of {error}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(0)
    monkeypatch.setattr(cuda, "_cuda", SimpleNamespace(cudart=lambda: made))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return made


def test_pages_are_locked_and_unlocked_in_threads_of_their_own(runtime: Runtime) -> None:
    device, memory = CudaDevice(torch.device("cuda", 1)), torch.zeros(4096, dtype=torch.uint8)
    assert device.lock(memory) is None
    device.unlock(memory)
    (lock, locked, one), (unlock, unlocked, other) = runtime.called
    assert (lock, locked) == ("lock", (memory.data_ptr(), 4096, 1))
    assert (unlock, unlocked) == ("unlock", (memory.data_ptr(),))
    assert threading.get_ident() not in (one, other), "an error would be raised by the next kernel of this thread"


def test_a_lock_that_fails_says_why_once(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.error = 801
    monkeypatch.setattr(CudaDevice, "pinned", lambda _, nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    memory = HostMemory(CudaDevice(torch.device("cuda", 0)), lambda _: None)
    assert [memory.new(10).numel() for _ in range(2)] == [10, 10]
    (record,) = caplog.records
    assert record.getMessage().endswith("in pinned memory: cudaHostRegister says error 801, text of 801")


def test_the_cpu_is_no_device_to_copy_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_device(torch.device("cpu")) is None
    assert isinstance(open_device(torch.device("cuda", 0)), CudaDevice)
    fetched: list[Any] = []
    monkeypatch.setattr(cuda, "fetch", fetched.append)
    assert fetch_whole(torch.tensor(True)) == 1
    assert not fetched
