"""Collectives on the direct plane, between workers of this process, over gloo: what they do on the coordinator's."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradserver
from gradserver.protocol.errors import CollectiveMismatchError
from gradserver.worker import meeting
from gradserver.worker.client import Worker
from gradserver.worker.planes import calls as calls_module, transfers as transfers_module
from gradserver.worker.planes.calls import DirectCalls
from gradserver.worker.planes.communicator import Communicator
from gradserver.worker.planes.transfers import DirectTransfers
from tests.cluster import BUSY, PATIENCE, STARTED_WITHIN, Daemon, Program, errors, members, together

PROGRAM = Path(__file__).with_name("direct_calls_program.py")
GOES_ON_WITHIN = 3.0 + BUSY
"""From a death to the end of its call: what is promised, and what a machine that has other things to do may add."""
N = 300
"""Elements of each rank's part: no multiple of anything."""


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the operations that members did among themselves."""
    found: list[str] = []
    exchange = DirectCalls._exchange

    def noted(self: DirectCalls, call: Any, *more: Any) -> bool:
        found.append(str(call.operation))
        return exchange(self, call, *more)

    monkeypatch.setattr(DirectCalls, "_exchange", noted)
    return found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """Return three workers. Their small tensors go directly, too."""
    monkeypatch.setattr(calls_module, "LEAST_BYTES_OF_A_HOST", 1)
    with members("direct", 3) as found:
        yield found


def given(rank: int, dtype: torch.dtype = torch.float32, numel: int = 3 * N) -> torch.Tensor:
    """Return what a rank gives."""
    numbers = torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(rank))
    return numbers.to(dtype)


def collectives(worker: Worker) -> list[Any]:
    """Call every collective, and return the results."""
    rank = worker.rank
    results: list[Any] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        results += [worker.all_reduce(given(rank, dtype)), worker.all_reduce(given(rank, dtype), weight=rank + 0.5)]
        results += [worker.all_reduce(given(rank, dtype), weight=float(rank != 1))]
    for dtype in (torch.float32, torch.int64, torch.uint8, torch.int8):
        results += [worker.all_reduce(given(rank, dtype), op) for op in ("sum", "min", "max", "product")]
    for dtype in (torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn):
        tensor = given(rank, dtype).reshape(3, N)
        results += [worker.broadcast(tensor.clone(), 1), worker.all_gather(tensor), worker.all_to_all(tensor)]
        results += [worker.gather(tensor, 2)]
        parts = list(given(7, dtype, 9 * N).reshape(3, 3, N)) if rank == 1 else None
        results += [worker.scatter(tensor.clone(), parts, root=1)]
    results += [worker.reduce_scatter(given(rank).reshape(3, N)), worker.reduce_scatter(given(rank), "sum")]
    transposed = given(rank).reshape(N, 3).T
    results += [worker.all_reduce(transposed, "sum"), worker.all_reduce(given(rank).numpy(), "sum")]
    results += [worker.all_gather(given(rank).numpy()[::2])]
    not_numbers = given(rank)
    not_numbers[rank * 10 : rank * 20] = float("nan")
    results += [worker.all_reduce(not_numbers.clone()), worker.all_reduce(not_numbers.clone(), "max")]
    worker.barrier()
    return results


def bits(value: Any) -> bytes:
    return b"" if value is None else torch.as_tensor(value).contiguous().view(torch.uint8).numpy().tobytes()


def test_every_collective_does_what_it_does_over_the_coordinator(workers: list[Worker], exchanged: list[str]) -> None:
    direct = together(workers, collectives)
    assert len(exchanged) == 3 * (12 + 16 + 20 + 2 + 3 + 1), "the maximum of what is no number is the coordinator's"
    with members("memory", 3) as others:
        through = together(others, collectives)
    for rank, (ours, theirs) in enumerate(zip(direct, through, strict=True)):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert type(one) is type(other), (rank, place)
            if one is not None:
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                expected = torch.as_tensor(other).to(torch.complex128)
                found = torch.as_tensor(one).to(torch.complex128)
                assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True), (rank, place)


def test_calls_that_are_not_waited_for_keep_their_order(workers: list[Worker]) -> None:
    def work(worker: Worker) -> list[float]:
        first = worker.all_reduce(torch.full((1000,), 1.0 + worker.rank), async_op=True)
        second = worker.all_reduce(np.full(1000, 10.0 + worker.rank), "sum", async_op=True)
        worker.barrier()
        third = worker.all_gather(torch.full((5,), float(worker.rank)), async_op=True)
        ends = [third.wait()[:, 0].sum(), second.wait()[0], first.wait()[0]]
        return [float(end) for end in ends]

    assert together(workers, work) == [[3.0, 33.0, 2.0]] * 3


def test_synchronize_waits_for_all_that_was_begun(workers: list[Worker]) -> None:
    def work(worker: Worker) -> list[float]:
        tensors = [torch.full((1000, 3), float(worker.rank)).T for _ in range(3)]
        handles = [worker.all_reduce(tensor, "sum", async_op=True) for tensor in tensors]
        worker.synchronize()
        assert all(handle.done() for handle in handles)
        return [float(tensor[0, 0]) for tensor in tensors]

    assert together(workers, work) == [[3.0] * 3] * 3


def test_a_call_that_fails_at_one_member_goes_over_the_coordinator_at_all(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exchanged: list[str]
) -> None:
    begin, all_formed, has_broken = Communicator.all_reduce, threading.Barrier(3), threading.Event()

    def failing(self: Communicator, *arguments: Any) -> Any:
        if not has_broken.is_set():
            all_formed.wait(PATIENCE)  # one that still looks for a member that has given up does so for 10 s
            if self._rank == 1:
                has_broken.set()
                raise RuntimeError("the link broke")
        return begin(self, *arguments)

    monkeypatch.setattr(Communicator, "all_reduce", failing)

    def work(worker: Worker) -> list[float]:
        return [float(worker.all_reduce(torch.full((1000,), 1.0 + worker.rank), "sum")[7]) for _ in range(12)]

    assert together(workers, work) == [[6.0] * 12] * 3
    assert "could not do all_reduce(sum) of float32[1000] with the others" in caplog.text
    assert len(exchanged) == 3 * (1 + 3), "eight calls rest after the one that failed"


def test_a_result_that_one_member_lacks_is_no_other_ones(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = DirectCalls._exchange
    lacking = [1, 2]

    def without(self: DirectCalls, *arguments: Any) -> bool:
        assert exchange(self, *arguments)
        return self._session.membership.rank not in lacking

    monkeypatch.setattr(DirectCalls, "_exchange", without)

    def work(worker: Worker) -> list[float]:
        tensor, rows = torch.full((1000,), 1.0 + worker.rank), torch.full((5,), float(worker.rank))
        return [float(worker.all_reduce(tensor, "sum")[7]), *worker.all_gather(rows)[:, 0].tolist()]

    assert together(workers, work) == [[6.0, 0.0, 1.0, 2.0]] * 3
    assert [DirectCalls.of(worker._session)._voids for worker in workers] == [1, 1, 1]


def test_calls_that_differ_are_an_error_with_both_sides(workers: list[Worker], exchanged: list[str]) -> None:
    def differ(worker: Worker) -> None:
        worker.all_reduce(torch.zeros(1000 + worker.rank // 2))

    for error in errors(CollectiveMismatchError, workers, differ):
        assert "float32[1000]" in error.message
        assert "float32[1001]" in error.message
    assert not exchanged


def test_a_wrong_tensor_is_refused_before_anything_is_said(workers: list[Worker]) -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(gradserver.UnsupportedOperationError):
            worker.all_reduce(torch.zeros(1000, dtype=torch.int64))
        with pytest.raises(gradserver.LayoutError):
            worker.all_reduce(torch.zeros(1).expand(1000))
        with pytest.raises(gradserver.SizeMismatchError):
            worker.reduce_scatter(torch.zeros(1000))
        with pytest.raises(gradserver.InvalidArgumentError, match="stream="):
            worker.all_reduce(torch.zeros(1000), stream=object())
        worker.barrier()

    together(workers, work)


# ── transfers ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have small transfers go directly, too. List those that have come."""
    monkeypatch.setattr(transfers_module, "LEAST_BYTES", 100)
    found: list[str] = []
    take = DirectTransfers._take

    def noted(self: DirectTransfers, call: Any, *more: Any) -> bool:
        came = take(self, call, *more)
        found.append(f"{call.operation} {came}")
        return came

    monkeypatch.setattr(DirectTransfers, "_take", noted)
    return found


def test_transfers_of_all_tags_and_both_ways_come_in_their_order(workers: list[Worker], passed: list[str]) -> None:
    def work(worker: Worker) -> list[float]:
        nxt, before = (worker.rank + 1) % 3, (worker.rank - 1) % 3
        own = [torch.full((50, 3), 100.0 * tag + 10 * number + worker.rank).T for tag in (1, 2) for number in (0, 1)]
        small = torch.full((1,), 7.0 + worker.rank)
        sent = [worker.send(tensor, nxt, 1 + place // 2, async_op=True) for place, tensor in enumerate(own)]
        sent.append(worker.send(small, nxt, 2, async_op=True))  # behind the others of its tag
        got = [torch.zeros(50, 3).T for _ in own] + [torch.zeros(1)]
        for place in (2, 3, 4, 0, 1):
            worker.recv(got[place], before, 2 if place in (2, 3, 4) else 1)
        for handle in sent:
            handle.wait()
        return [float(tensor.ravel()[0]) for tensor in got]

    expected = [[100.0, 110.0, 200.0, 210.0, 7.0], [100.0, 110.0, 200.0, 210.0, 7.0], [100.0, 110.0, 200.0, 210.0, 7.0]]
    for rank, row in enumerate(expected):
        row[:] = [value + (rank - 1) % 3 for value in row]
    assert together(workers, work) == expected
    assert passed == ["transfer of float32[150] True"] * 12


def test_a_transfer_that_fails_goes_over_the_coordinator_and_the_next_is_direct(
    workers: list[Worker], passed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = Communicator.receive

    def failing(*_: Any) -> Any:
        monkeypatch.setattr(Communicator, "receive", receive)
        raise RuntimeError("the link broke")

    monkeypatch.setattr(Communicator, "receive", failing)

    def work(worker: Worker) -> list[float]:
        found = []
        for number in range(3):
            tensor = np.full(100, float(number) if worker.rank == 0 else -1.0)
            if worker.rank < 2:
                found.append(float((worker.send(tensor, 1) if worker.rank == 0 else worker.recv(tensor, 0))[5]))
        return found

    assert together(workers, work) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []]
    assert [one.split()[-1] for one in passed] == ["False", "True", "True"]
    assert "the link broke" in caplog.text


def test_transfers_that_differ_are_an_error_with_both_sides(workers: list[Worker], passed: list[str]) -> None:
    def work(worker: Worker) -> None:
        if worker.rank == 0:
            worker.send(torch.zeros(100), 1)
        else:
            worker.recv(torch.zeros(101), 0)

    for error in errors(CollectiveMismatchError, workers[:2], work):
        assert "float32[100]" in error.message
        assert "float32[101]" in error.message
    assert not passed


def test_a_receiver_of_a_lost_source_hears_of_it(workers: list[Worker], passed: list[str]) -> None:
    def work(worker: Worker) -> None:
        if worker.rank == 0:
            worker.abort("it was preempted")
        elif worker.rank == 1:
            with pytest.raises(gradserver.WorkerLostError, match="w0"):
                worker.recv(torch.zeros(100), 0)

    together(workers, work)
    assert not passed


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_killed_in_a_direct_collective_leaves_no_half_of_it_and_no_other_waiting() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "2:8", "--gather", "60"))
        arguments = [(str(PROGRAM), daemon.url, str(rank)) for rank in range(4)]
        found = [stack.enter_context(Program(*each, loaded="torch")) for each in arguments]
        assert {program.expect("first ", STARTED_WITHIN) for program in found} == {"[10.0]"}

        def kill(rank: int, then: str) -> list[str]:
            """Kill a worker that has stopped. Return what the others say then, but for when."""
            found[rank].expect("halfway")
            killed = time.monotonic()
            found[rank].send_signal(signal.SIGKILL)
            found[rank].end()
            said = [program.expect(then).split(maxsplit=1) for program in found if program.running]
            assert max(float(moment) for moment, _ in said) - killed < GOES_ON_WITHIN
            return [rest for _, rest in said]

        assert set(kill(1, "reduced ")) == {"4 [8.0]"}, "the sum of those that are left, in the old membership"
        left = [program for program in found if program.running]
        assert {program.expect("changed ") for program in left} == {"3"}
        assert set(kill(2, "again ")) == {"2"}
        left = [found[0], found[3]]
        assert {program.expect("gathered ") for program in left} == {f"{[167.0, 170.0]} False"}
        assert [program.end() for program in left] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("workers", "said"), [("4", "lost "), ("2:8", "reduced ")])
def test_members_that_wait_for_a_lost_one_hear_of_it_at_once(workers: str, said: str, number: signal.Signals) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", workers, "--gather", "60"))
        arguments = [(str(PROGRAM), daemon.url, str(rank)) for rank in range(4)]
        found = [stack.enter_context(Program(*each, loaded="torch")) for each in arguments]
        found[1].expect("halfway", STARTED_WITHIN)
        lost = time.monotonic()
        found[1].send_signal(number)
        others = [found[0], *found[2:]]
        words = [program.expect(said).split(maxsplit=1) for program in others]
        assert max(float(moment) for moment, _ in words) - lost < GOES_ON_WITHIN
        assert {rest for _, rest in words} == ({"w1"} if workers == "4" else {"4 [8.0]"})
        if workers == "4":
            assert [program.end() for program in others] == [0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_target_that_waits_for_a_lost_source_hears_of_it_at_once(number: signal.Signals) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "2:8", "--gather", "60"))
        arguments = [(str(PROGRAM), daemon.url, str(rank), "transfer") for rank in range(4)]
        found = [stack.enter_context(Program(*each, loaded="torch")) for each in arguments]
        found[1].expect("halfway", STARTED_WITHIN)
        lost = time.monotonic()
        found[1].send_signal(number)
        moment, name = found[0].expect("lost ").split()
        assert float(moment) - lost < GOES_ON_WITHIN
        assert name == "w1"


# ── finding each other ────────────────────────────────────────────────────────────────────────────────


def test_members_find_each_other_by_files_which_go_with_the_membership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: list[str]
) -> None:
    stale = tmp_path / "gradserver-old"
    stale.mkdir()
    (stale / "a file").write_text("of a run that was killed")
    os.utime(stale, (0, 0))
    (tmp_path / "something else").touch()
    monkeypatch.setenv("GRADSERVER_RENDEZVOUS_DIR", str(tmp_path))
    monkeypatch.setattr(calls_module, "LEAST_BYTES_OF_A_HOST", 1)
    with members("direct", 2) as workers:
        assert not stale.exists()
        assert together(workers, lambda worker: float(worker.all_reduce(torch.ones(100), "sum")[0])) == [2.0, 2.0]
        store = workers[0]._session.membership.offers[0].store
        assert list((tmp_path / store.rpartition(":")[2]).iterdir())
    del workers
    gc.collect()
    assert len(exchanged) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["something else"]


@pytest.mark.parametrize("named", ["meetings", "~/meetings"])
def test_members_find_each_other_when_their_script_has_changed_its_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: list[str]
) -> None:
    (tmp_path / "meetings").mkdir()
    (tmp_path / "elsewhere").mkdir()
    meeting._directory.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRADSERVER_RENDEZVOUS_DIR", named)
    monkeypatch.setattr(calls_module, "LEAST_BYTES_OF_A_HOST", 1)
    with members("direct", 2) as workers:
        monkeypatch.chdir("elsewhere")
        assert together(workers, lambda worker: float(worker.all_reduce(torch.ones(100), "sum")[0])) == [2.0, 2.0]
    assert len(exchanged) == 2


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (None, "of GRADSERVER_RENDEZVOUS_DIR, and here that is None"),
        ("not mounted", "this host has no such folder: is GRADSERVER_RENDEZVOUS_DIR the shared one?"),
    ],
)
def test_a_worker_without_that_directory_sends_calls_over_the_coordinator(
    there: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADSERVER_RENDEZVOUS_DIR", str(tmp_path))
    monkeypatch.setattr(calls_module, "LEAST_BYTES_OF_A_HOST", 1)
    with members("direct", 2) as workers:
        if there is None:
            monkeypatch.delenv("GRADSERVER_RENDEZVOUS_DIR")
        else:
            monkeypatch.setenv("GRADSERVER_RENDEZVOUS_DIR", str(tmp_path / there))
        assert together(workers, lambda worker: float(worker.all_reduce(torch.ones(100), "sum")[0])) == [2.0, 2.0]
    assert said in caplog.text
