"""Memory that a worker and the coordinator of one host share: how it is handed over, and how both get rid of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import logging
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradserver.engine import Engine
from gradserver.protocol.buffer import Buffer, Bytes
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    BackendUnavailableError,
    GradServerError,
    InvalidArgumentError,
    MalformedMessageError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Stream, operation_of
from gradserver.protocol.limits import CREDIT_BYTES, MAX_COUNTER
from gradserver.protocol.messages import Join, MemoryAt, Message, Place, Push, ShareMemory, Welcome
from gradserver.protocol.transport.sharing import (
    ADDRESS_PREFIX,
    COORDINATORS_PROOF,
    F_SEAL_FUTURE_WRITE,
    MAX_PACKET_BYTES,
    MAX_REASON,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    PROOF_BYTES,
    SEGMENT_HEADER_BYTES,
    Lend,
    Lent,
    Offer,
    Refused,
    Release,
    SharingMessage,
    Taken,
    Talk,
    Talking,
    decode_packet,
    encode_packet,
)
from gradserver.runtime import Runtime
from gradserver.transport.local import MAX_STRANGERS
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.tensors import empty
from gradserver.worker.transport.segments import ALIGNMENT
from gradserver.worker.transport.shared_memory import ARENA_BYTES, OWN_SEGMENT_BYTES, SharedMemory
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import PATIENCE, ROOT, Daemon, Program, Task, coordinator, together, wait_until
from tests.examples import examples
from tests.memory import names_in_shm
from tests.strangers import Stranger
from tests.unix_host import WORKER, Host, Hostile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")

LARGE = 1_000_000
"""Bytes that have a segment of their own."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def host() -> Iterator[Host]:
    """Run a host with a server that must leave no descriptor behind."""
    before = descriptors()  # and perhaps some that a collection closes: it takes half a second with torch about
    host = Host()
    yield host
    host.server.close()
    del host
    if descriptors() > before:
        gc.collect()
    assert descriptors() <= before


@pytest.fixture
def memory(host: Host) -> Iterator[SharedMemory]:
    """Return a worker's shared memory with ``host``, which is serving."""
    with host.serving():
        shared = SharedMemory(*host.admit(WORKER), PATIENCE)
        yield shared
        shared.close()


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def maps_of_ours(pid: int | str = "self") -> int:
    """Return the mappings of shared memory in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:gradserver")


def some(memory: Any, nbytes: int) -> Bytes:
    array: Bytes | None = memory.empty(nbytes)
    assert array is not None
    assert array.nbytes == nbytes
    return array


# ── both see the same ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("nbytes", [1, 1000, OWN_SEGMENT_BYTES - 1, OWN_SEGMENT_BYTES, LARGE])
def test_what_one_writes_the_other_reads(host: Host, memory: SharedMemory, nbytes: int) -> None:
    array = some(memory, nbytes)
    array[:] = 7
    view = host.view(memory.place_of(array))

    assert bytes(view[:nbytes]) == b"\7" * nbytes
    view[nbytes - 1] = 9
    assert array[-1] == 9
    assert array.ctypes.data % ALIGNMENT == 0


def test_a_place_leads_to_the_end_of_its_segment_and_there_are_no_others(host: Host, memory: SharedMemory) -> None:
    array = some(memory, LARGE)
    place = memory.place_of(array)
    assert place is not None
    length = len(host.view(place))

    assert length >= LARGE
    assert len(host.view(Place(place.segment, place.offset + 10))) == length - 10
    for offset in (0, SEGMENT_HEADER_BYTES - 1, SEGMENT_HEADER_BYTES + length, MAX_COUNTER):
        assert host.server.view(WORKER, Place(place.segment, offset)) is None
    assert host.server.view(WORKER, Place(place.segment + 1, place.offset)) is None
    assert host.server.view(b"someone else", place) is None


@pytest.mark.parametrize("lie", ["seen", "written"])
def test_memory_that_is_not_the_same_is_not_shared(lie: str) -> None:
    address = f"{ADDRESS_PREFIX}{os.getpid()}-{lie}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen()

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                packet, (descriptor,), _, _ = socket.recv_fds(connection, 1000, 1)
                offer = decode_packet(packet)
                assert isinstance(offer, Offer)
                with mmap.mmap(descriptor, offer.size) as mapping:
                    seen, written = mapping[:PROOF_BYTES], os.urandom(PROOF_BYTES)
                    if lie == "seen":
                        mapping[COORDINATORS_PROOF], seen = written, os.urandom(PROOF_BYTES)
                os.close(descriptor)
                connection.send(encode_packet(Taken(offer.segment, seen, written)))

        task = Task(pretend)
        with pytest.raises(BackendUnavailableError, match="other memory"):
            SharedMemory(address, "token", PATIENCE)
        task.result()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", "offers none"),
        (ADDRESS_PREFIX + "nobody", "another host, or in another container"),
        ("/run/other.sock", "no name of gradserver's"),
        (ADDRESS_PREFIX + "\udcff", "no name of gradserver's"),
        (ADDRESS_PREFIX + 200 * "x", "too long"),
    ],
)
def test_why_nothing_can_be_shared_is_said(address: str, why: str) -> None:
    with pytest.raises(BackendUnavailableError, match=why):
        SharedMemory(address, "token", PATIENCE)


def test_a_coordinator_that_does_not_answer_is_not_waited_for(host: Host) -> None:
    with pytest.raises(BackendUnavailableError, match="did not answer in time"):
        SharedMemory(*host.admit(WORKER), 0.05)  # nothing serves


# ── memory comes and goes ─────────────────────────────────────────────────────────────────────────────


def test_garbage_is_given_back_on_both_sides(host: Host, memory: SharedMemory) -> None:
    gc.collect()  # what other tests have left is not to go meanwhile
    before, open_before = maps_of_ours(), descriptors()
    arrays = [some(memory, LARGE) for _ in range(10)]
    assert host.server.segments == memory.segments == 11
    assert host.server.nbytes > 10 * LARGE

    del arrays
    host.has(1)
    assert memory.segments == 1
    # The host's thread counts a segment out before it has unmapped it.
    wait_until(lambda: (maps_of_ours(), descriptors()) == (before, open_before), "all is unmapped and closed")


KEEPERS: dict[str, Callable[[Bytes], Any]] = {
    "a slice": lambda array: array[10:20],
    "a view of a view": lambda array: array[10:].view(np.int8)[5:].reshape(1, -1),
    "another type": lambda array: array.view(np.float32),
    "a memoryview": lambda array: array.data[10:20],
    "a tensor": lambda array: torch.from_numpy(array),
    "a tensor's slice": lambda array: torch.from_numpy(array)[8:16].view(torch.bfloat16),
    "numpy of a tensor": lambda array: torch.from_numpy(array)[8:16].numpy(),
}


@pytest.mark.parametrize("what", KEEPERS)
@pytest.mark.parametrize("nbytes", [1024, LARGE])
def test_memory_stays_as_long_as_something_views_it(host: Host, memory: SharedMemory, what: str, nbytes: int) -> None:
    others = [some(memory, nbytes)]
    array = some(memory, nbytes)
    place, segments = memory.place_of(array), memory.segments
    keeper = KEEPERS[what](array)
    del array
    gc.collect()

    others.append(some(memory, nbytes))
    assert memory.place_of(others[-1]) != place
    assert memory.segments >= segments
    del keeper
    if nbytes < OWN_SEGMENT_BYTES:
        assert memory.place_of(some(memory, nbytes)) == place
    else:
        host.has(3)


def test_arrays_in_a_cycle_are_given_back_by_the_collector(host: Host, memory: SharedMemory) -> None:
    cycle: list[Any] = [some(memory, LARGE)]
    cycle.append(cycle)
    del cycle
    gc.collect()

    host.has(1)


def test_what_the_collector_finds_while_the_lock_is_held_is_given_back_later(host: Host, memory: SharedMemory) -> None:
    array = some(memory, LARGE)
    with memory._lock:  # this thread's: waiting for it would be for ever
        del array
        assert memory.segments == 2

    small = some(memory, 10)
    host.has(1)
    del small


def test_a_coordinator_that_is_busy_hears_of_it_later(host: Host) -> None:
    with host.serving():
        memory = SharedMemory(*host.admit(WORKER), PATIENCE)
        memory._peers[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        arrays = [some(memory, OWN_SEGMENT_BYTES) for _ in range(100)]
    arrays.clear()  # takes no time, although nothing listens
    assert memory.segments == 1
    assert memory._peers[0]._released
    with host.serving():
        del arrays
        array = some(memory, OWN_SEGMENT_BYTES)
        host.has(2)
        assert not memory._peers[0]._released
    memory.close()
    assert memory.place_of(array) is None


# ── several shards of one host ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def another() -> Iterator[Host]:
    """Start a second process that takes memory."""
    another = Host()
    yield another
    another.server.close()


def test_several_shards_see_the_same_memory(host: Host, another: Host) -> None:
    with host.serving(), another.serving():
        memory = SharedMemory(*host.admit(WORKER), PATIENCE, others=[another.admit(WORKER)])
        assert memory.reached == [True, True]
        for nbytes in (1000, LARGE):
            array = some(memory, nbytes)
            views = [server.view(memory.place_of(array)) for server in (host, another)]
            array[:] = 3
            assert [bytes(view[:nbytes]) for view in views] == [b"\3" * nbytes] * 2
            views[0][:nbytes] = b"\4" * nbytes
            assert (array == 4).all()
            assert bytes(views[1][:nbytes]) == b"\4" * nbytes
            views.clear()
            del array
        host.has(1)
        another.has(1)
    memory.close()


def test_shards_that_cannot_be_reached_are_left_out(host: Host) -> None:
    with host.serving():
        nobody = ADDRESS_PREFIX + "nobody", "0" * 32
        memory = SharedMemory(*nobody, PATIENCE, others=[host.admit(WORKER), nobody])
        assert memory.reached == [False, True, False]
        place = memory.place_of(some(memory, 1000))
        assert len(host.view(place)) >= 1000
        memory.close()
        with pytest.raises(BackendUnavailableError, match="cannot be reached"):
            SharedMemory(*nobody, PATIENCE, others=[nobody])


def test_what_was_lent_is_touched_only_when_it_is_offered_and_safe(host: Host) -> None:
    descriptor = memfd()
    with Hostile(host) as hostile:
        hostile.say(Lend(hostile.token, 0, 8192), os.dup(descriptor))
        assert hostile.hear() == Lent(0)
        assert host.server.segments == 0
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)  # as another shard does
        hostile.offer(os.dup(descriptor))
        assert isinstance(hostile.hear(), Taken)
        assert host.server.segments == 1
    os.close(descriptor)


@pytest.mark.parametrize(
    ("lent", "offered", "what"),
    [
        ("small", "sealed", "Operation not permitted"),  # other memory, sealed before it was mapped
        ("holes", "same", "memory with holes"),
        ("unsealed", "same", "not sealed against shrinking"),
    ],
)
def test_lending_passes_no_check(host: Host, lent: str, offered: str, what: str) -> None:
    one = memfd(seals=0) if lent == "unsealed" else memfd(allocated=lent != "holes")
    other = memfd()
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    with Hostile(host) as hostile:
        hostile.say(Lend(hostile.token, 0, 8192), os.dup(one))
        answer = hostile.hear()
        if isinstance(answer, Lent):
            hostile.offer(os.dup(one if offered == "same" else other))
            answer = hostile.hear()
        assert isinstance(answer, Refused)
        assert what in answer.reason
    assert host.server.segments == 0
    os.close(one)
    os.close(other)


SIZES = st.integers(1, ARENA_BYTES // 8) | st.integers(1, 2000)


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(SIZES, st.integers(0, 10)), max_size=60))
def test_no_two_arrays_share_a_byte(wishes: list[tuple[int, int]]) -> None:
    host = Host()
    with host.serving():
        memory = SharedMemory(*host.admit(WORKER), PATIENCE)
        arrays: list[Bytes] = []
        for number, (nbytes, victim) in enumerate(wishes):
            arrays.append(some(memory, nbytes))
            arrays[-1][:] = number % 256
            if victim < len(arrays):
                del arrays[victim]
        for array in arrays:
            assert (array == array[0]).all()
            assert memory.place_of(array) is not None
            del array
        arrays.clear()

        host.has(1)
        assert memory._arenas[0].is_unused()
        memory.close()
    host.server.close()


def test_threads_share_memory_side_by_side(host: Host, memory: SharedMemory) -> None:
    def work(mark: int) -> None:
        for number in range(30):
            array = some(memory, OWN_SEGMENT_BYTES if number % 3 == 0 else 1000 * (number + 1))
            array[:] = mark
            assert memory.place_of(array) is not None
            assert (array == mark).all()

    for task in [Task(work, mark) for mark in range(4)]:
        task.result()
    host.has(1)


def test_nothing_of_nothing(memory: SharedMemory) -> None:
    assert memory.empty(0) is None
    assert memory.place_of(np.empty(0, np.uint8)) is None


# ── where something lies ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def a_few() -> Iterator[tuple[SharedMemory, list[Bytes]]]:
    host = Host()
    with host.serving():
        memory = SharedMemory(*host.admit(WORKER), PATIENCE)
        yield memory, [some(memory, nbytes) for nbytes in (LARGE, 100, 5000, OWN_SEGMENT_BYTES, 64, 3 * LARGE)]
        memory.close()
    host.server.close()


@given(st.integers(0, 5), st.integers(0, 3 * LARGE), st.integers(0, 3 * LARGE), st.booleans())
def test_place_of_any_part(
    a_few: tuple[SharedMemory, list[Bytes]], which: int, start: int, length: int, frozen: bool
) -> None:
    memory, arrays = a_few
    array = arrays[which]
    whole = memory.place_of(array)
    assert whole is not None
    start = min(start, array.nbytes)
    part = array[start : start + length]
    part.flags.writeable = not frozen

    expected = Place(whole.segment, whole.offset + start) if part.nbytes else None
    assert memory.place_of(part) == expected


@given(st.integers(-SEGMENT_HEADER_BYTES, 2 * LARGE), st.integers(1, 2 * LARGE))
def test_all_of_it_has_to_lie_there(a_few: tuple[SharedMemory, list[Bytes]], start: int, length: int) -> None:
    memory, (array, *_) = a_few
    # It is never touched: it may lie outside of anything. Only its address counts.
    data = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(array.ctypes.data + start))
    place, whole = memory.place_of(data), memory.place_of(array)
    assert whole is not None
    inside = start >= 0 and start + length <= -(-LARGE // 4096) * 4096

    assert (place is not None and place.segment == whole.segment) == inside


def test_ordinary_and_scattered_memory_lies_nowhere(memory: SharedMemory) -> None:
    assert memory.place_of(np.zeros(LARGE, np.uint8)) is None
    array = some(memory, LARGE)
    assert memory.place_of(array[::2]) is None


# ── when there is no memory ───────────────────────────────────────────────────────────────────────────


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("module", "function", "why"),
    [
        (os, "posix_fallocate", "No space left"),
        (os, "memfd_create", "No space left"),
        (mmap, "mmap", "No space left"),
        (fcntl, "fcntl", "No space left"),
    ],
)
def test_what_cannot_be_had_is_said_once_and_memory_is_ordinary(
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    function: str,
    why: str,
) -> None:
    gc.collect()  # what earlier tests have left in cycles would close its descriptors meanwhile
    before = descriptors()
    with caplog.at_level(logging.INFO, "gradserver"):
        monkeypatch.setattr(module, function, fail_with(errno.ENOSPC))
        assert memory.empty(LARGE) is None
        assert memory.empty(LARGE) is None
        monkeypatch.undo()

    assert descriptors() == before
    assert len(caplog.records) == 1
    assert why in caplog.text
    assert memory.empty(LARGE) is not None  # perhaps there is some now


def test_more_than_there_is_is_not_even_tried(memory: SharedMemory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradserver"):
        assert memory.empty(1 << 50) is None

    assert "MB are not available" in caplog.text


def test_there_are_only_so_many_segments(memory: SharedMemory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradserver"):
        arrays = [memory.empty(OWN_SEGMENT_BYTES) for _ in range(MAX_SEGMENTS + 2)]

    assert [array is None for array in arrays] == [False] * (MAX_SEGMENTS - 1) + [True] * 3
    assert len(caplog.records) == 1
    assert str(MAX_SEGMENTS) in caplog.text
    assert memory.empty(100) is not None


# ── hostile workers ───────────────────────────────────────────────────────────────────────────────────


def memfd(size: int = 8192, seals: int = SEALS, allocated: bool = True) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocated:
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pipe_end() -> int:
    end, other = os.pipe()
    os.close(other)
    return end


def file_in(folder: str) -> int:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    os.posix_fallocate(descriptor, 0, 8192)
    return descriptor


HOSTILITIES: dict[str, tuple[Callable[[Hostile], None], str]] = {
    "no descriptor": (lambda h: h.offer(), "one descriptor, got none"),
    "two descriptors": (lambda h: h.offer(memfd(), memfd()), "one descriptor, got 2"),
    "many descriptors": (lambda h: h.offer(*(memfd() for _ in range(50))), "one descriptor, got 4"),
    "no seals": (lambda h: h.offer(memfd(seals=0)), "not sealed"),
    "may shrink": (lambda h: h.offer(memfd(seals=fcntl.F_SEAL_GROW)), "not sealed"),
    "may grow": (lambda h: h.offer(memfd(seals=fcntl.F_SEAL_SHRINK)), "not sealed"),
    "may have holes": (lambda h: h.offer(memfd(seals=SEALS | fcntl.F_SEAL_SEAL)), "sealed against holes"),
    "read only": (lambda h: h.offer(memfd(seals=SEALS | fcntl.F_SEAL_WRITE)), "not permitted"),
    "shorter than announced": (lambda h: h.offer(memfd(), size=1 << 20), "8192 bytes was announced as 1048576"),
    "longer than announced": (lambda h: h.offer(memfd(1 << 20)), "was announced as 8192"),
    "holes": (lambda h: h.offer(memfd(allocated=False)), "with holes"),
    "huge and empty": (lambda h: h.offer(memfd(1 << 40, allocated=False), size=1 << 40), "with holes"),
    "too large": (lambda h: h.say(raw(h.token, 0, (1 << 40) + 4096), memfd()), "out of range"),
    "no size": (lambda h: h.offer(memfd(), size=0), "not a number of pages"),
    "header only": (lambda h: h.offer(memfd(4096), size=4096), "not a number of pages"),
    "odd size": (lambda h: h.offer(memfd(8200), size=8200), "not a number of pages"),
    "a pipe": (lambda h: h.offer(pipe_end()), "not of memory"),
    "a socket": (lambda h: h.offer(os.dup(h._socket.fileno())), "not of memory"),
    "a file": (lambda h: h.offer(file_in("/var/tmp")), "not of memory|not sealed"),
    "a directory": (lambda h: h.offer(os.open("/", os.O_RDONLY)), "not of memory"),
    "a wrong token": (lambda h: h.offer(memfd(), token="0" * 32), "token that was given to no worker"),
    "no token": (lambda h: h.offer(memfd(), token=""), "token that was given to no worker"),
    "another's token": (lambda h: h.offer(memfd(), token=h._host.server.admit(WORKER)[1]), "of another connection"),
    "garbage": (lambda h: h.say(b"\xff\x00garbage"), "not"),
    "garbage with descriptors": (lambda h: h.say(b"garbage", memfd(), memfd()), "not"),
    "a packet too long": (lambda h: h.say(bytes(100_000), memfd()), "not"),
    "a packet just too long": (lambda h: h.say(bytes(MAX_PACKET_BYTES + 1)), "not"),
    "a deep packet": (lambda h: h.say(b"\x91" * 1000), "not msgpack"),
    "a wide packet": (lambda h: h.say(b"\xdd\x7f\xff\xff\xff"), "not msgpack"),
    "an unknown type": (lambda h: h.say(msgpack.packb([9])), "unknown packet type"),
    "fields of other types": (lambda h: h.say(msgpack.packb([0, 1, 2, 3, True])), "Offer.token is int"),
    "too few fields": (lambda h: h.say(msgpack.packb([0, "token"])), "has 4 fields"),
    "what a coordinator says": (lambda h: h.say(Refused("you")), "not what a worker says"),
    "a release of nothing": (lambda h: h.say(Release(0)), "never given"),
    "a release with memory": (lambda h: h.say(Release(0), memfd()), "not what a worker says"),
}


def raw(*values: object) -> bytes:
    """Send an Offer of anything."""
    packet: bytes = msgpack.packb([0, *values, True])
    return packet


@pytest.mark.parametrize("what", HOSTILITIES)
def test_hostile_worker_is_told_and_hung_up_on(host: Host, what: str) -> None:
    do, why = HOSTILITIES[what]
    with Hostile(host, WORKER) as worker:
        worker.offer(memfd())
        assert isinstance(worker.hear(), Taken)
        before = descriptors()
        with Hostile(host) as hostile:
            do(hostile)
            answer = hostile.hear()
            assert isinstance(answer, Refused)
            assert re.search(why, answer.reason), answer.reason
            assert hostile.hear() is None
        host.server.forget(b"hostile")
        assert descriptors() == before
        assert host.server.segments == 1
        worker.offer(memfd(), segment=1)  # no other worker notices
        assert isinstance(worker.hear(), Taken)
    host.server.forget(WORKER)


def test_hostile_worker_that_stays_silent_or_goes_leaves_nothing(host: Host) -> None:
    before = descriptors()
    for _ in range(20):
        with Hostile(host):
            host.pump()
        with Hostile(host) as hostile:
            hostile.say(b"")
    assert descriptors() == before


def test_a_segment_cannot_be_given_twice(host: Host) -> None:
    with Hostile(host) as hostile:
        hostile.offer(memfd())
        assert isinstance(hostile.hear(), Taken)
        hostile.offer(memfd())
        assert hostile.hear() == Refused("segment 0 a second time")
    assert host.server.segments == 1  # what came before stays, until the worker is forgotten
    host.server.forget(b"hostile")
    assert host.server.segments == 0


def test_a_token_is_good_for_one_connection(host: Host) -> None:
    with Hostile(host) as first:
        first.offer(memfd())
    with Hostile(host) as second:
        second.offer(memfd(), segment=1)
        assert isinstance(second.hear(), Refused)


def test_hostile_worker_cannot_give_more_than_its_share(host: Host) -> None:
    before = descriptors()
    with Hostile(host) as hostile:
        for number in range(MAX_SEGMENTS):
            hostile.offer(memfd(), segment=number)
            assert isinstance(hostile.hear(), Taken)
        hostile.offer(memfd(), segment=MAX_SEGMENTS)
        answer = hostile.hear()
        assert isinstance(answer, Refused)
        assert str(MAX_SEGMENTS) in answer.reason
    assert host.server.segments == MAX_SEGMENTS
    host.server.forget(b"hostile")
    assert host.server.segments == 0
    assert descriptors() == before


def test_hostile_worker_that_does_not_listen_is_hung_up_on(host: Host) -> None:
    with Hostile(host) as hostile:
        hostile._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(100_000):
                hostile.offer(memfd(), segment=number)
                hostile.say(Release(number))
        assert host.server._connections == {}


def test_pages_cannot_be_taken_away_from_the_coordinator(host: Host) -> None:
    descriptor = memfd(1 << 16)
    mapping = mmap.mmap(descriptor, 1 << 16)
    with Hostile(host) as hostile:
        hostile.offer(os.dup(descriptor), size=1 << 16)
        assert isinstance(hostile.hear(), Taken)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 4096)
        with pytest.raises(PermissionError):
            mapping.madvise(mmap.MADV_REMOVE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
    mapping.close()
    os.close(descriptor)


def test_flood_of_connections_keeps_no_worker_out(host: Host) -> None:
    before = descriptors()
    with ExitStack() as stack:
        flood = [stack.enter_context(Hostile(host)) for _ in range(3 * MAX_STRANGERS)]
        host.pump()
        assert len(host.server._connections) == MAX_STRANGERS
        assert flood[0].hear() is None
        with host.serving():
            memory = SharedMemory(*host.admit(WORKER), PATIENCE)
        more = [stack.enter_context(Hostile(host)) for _ in range(3 * MAX_STRANGERS)]
        with host.serving():
            array = some(memory, LARGE)
        assert len(host.view(memory.place_of(array))) >= LARGE
        memory.close()
        del array, more, flood
    host.pump()
    host.server.forget(WORKER)
    del memory
    gc.collect()
    assert descriptors() == before


def test_coordinator_without_descriptors_goes_on_and_recovers(host: Host) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Hostile(host) as hostile:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            host.pump()  # and does not go round for ever
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        host.server.admit(WORKER)
        hostile.offer(memfd())
        assert isinstance(hostile.hear(), Taken)


def test_what_is_still_read_outlives_its_worker(host: Host) -> None:
    with host.serving():
        memory = SharedMemory(*host.admit(WORKER), PATIENCE)
        array = some(memory, LARGE)
        array[:] = 5
        view = host.view(memory.place_of(array))
    host.forget(WORKER)
    memory.close()
    del array

    assert host.server.segments == 0
    assert bytes(view[:10]) == b"\5" * 10
    view.release()
    del view


texts = st.text(max_size=64)
packets = st.one_of(
    st.builds(Offer, texts, st.integers(0, MAX_COUNTER), st.integers(0, MAX_SEGMENT_BYTES), st.booleans()),
    st.builds(Release, st.integers(0, MAX_COUNTER)),
    st.builds(Lend, texts, st.integers(0, MAX_COUNTER), st.integers(0, MAX_SEGMENT_BYTES)),
    st.builds(Lent, st.integers(0, MAX_COUNTER)),
    st.builds(
        Taken,
        st.integers(0, MAX_COUNTER),
        st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES),
        st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES),
    ),
    st.builds(Refused, st.text(max_size=MAX_REASON)),
    st.builds(Talk, texts),
    st.just(Talking()),
)


@given(packets)
def test_packets_arrive_as_they_were_sent(message: SharingMessage) -> None:
    packet = encode_packet(message)

    assert decode_packet(packet) == message
    assert len(packet) <= MAX_PACKET_BYTES


@given(
    st.binary(max_size=100) | packets.map(encode_packet).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
)
def test_any_bytes_are_a_packet_or_malformed(packet: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        assert decode_packet(packet) is not None


# ── a whole system ────────────────────────────────────────────────────────────────────────────────────


SHARE = """
import sys
from gradserver.worker.connect import connect
worker = connect(sys.argv[1], 0, 1)
array = worker.empty(1_000_000, "float32")
array[:] = 1
print(worker.channel, flush=True)
sys.stdin.readline()
"""


def sharing(url: str) -> Program:
    return Program("-c", SHARE, url)


def segments_of(daemon: Daemon) -> int:
    shared: dict[str, int] = daemon.snapshot()["shared_memory"]
    return shared["segments"]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_stays_of_a_worker_that_ends(end: str) -> None:
    names = names_in_shm()
    with Daemon("--quiet") as daemon:
        before = descriptors(daemon.pid)
        with sharing(daemon.url) as worker:
            worker.expect("shm")
            assert segments_of(daemon) == 2
            assert maps_of_ours(daemon.pid) == 2
            if end == "close":
                worker.tell()
                assert worker.end() == 0
                assert worker.complaints() == []
            else:
                worker.send_signal(signal.SIGKILL)
        wait_until(lambda: segments_of(daemon) == 0, "the coordinator has let go")
        assert maps_of_ours(daemon.pid) == 0
        wait_until(lambda: descriptors(daemon.pid) <= before, "its descriptors are closed")
    assert names_in_shm() == names


def test_nothing_stays_of_a_coordinator_that_was_killed() -> None:
    names = names_in_shm()
    before = maps_of_ours()
    with Daemon("--quiet") as daemon:
        worker = connect(daemon.url, 0, 1)
        array = worker.empty(LARGE, np.uint8)
        array[:] = 3
        daemon.send_signal(signal.SIGKILL)
        daemon.end()
    worker.close()

    assert (array == 3).all()  # it is memory, as any other
    del array, worker
    gc.collect()
    assert maps_of_ours() == before
    assert names_in_shm() == names


def test_ordinary_memory_after_the_coordinator_died(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradserver"):
        with coordinator() as server:
            worker = connect(server.url, 0, 1)
        assert worker.empty(LARGE, np.uint8).nbytes == LARGE
        assert worker.empty(LARGE, np.uint8).nbytes == LARGE
        worker.close()
    lines = [record.getMessage() for record in caplog.records if "is not shared" in record.getMessage()]
    assert len(lines) == 1


def test_a_worker_that_has_left_has_its_memory_for_itself() -> None:
    with coordinator() as server:
        worker = connect(server.url, 0, 1)
        array = worker.empty(LARGE, np.uint8)
        assert server._unix is not None
        assert server._unix.segments == 2
        worker.close()
        assert server._unix.segments == 0
        array[:] = 1


@pytest.mark.parametrize("numel", [1, 1000, 100_000, 3_000_001])
@pytest.mark.parametrize("channels", [("shm", "shm", "shm"), ("tcp", "shm", "shm")])
def test_gradients_in_shared_memory_do_not_travel(
    monkeypatch: pytest.MonkeyPatch, numel: int, channels: tuple[str, ...]
) -> None:
    travelled = dict.fromkeys(range(3), 0)
    ranks: dict[TcpChannel, int] = {}
    send = TcpChannel.send

    def count(self: TcpChannel, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        if isinstance(message, Push):
            travelled[ranks[self]] += sum(len(payload) for payload in payloads)
        send(self, message, payloads, shard)

    def work(worker: Worker) -> Any:
        channel = worker._session.traffic.channel
        assert isinstance(channel, TcpChannel)
        ranks[channel] = worker.rank
        for _ in range(3):
            array = worker.empty(numel, np.float32)
            array[:] = np.arange(numel) % 1000 + worker.rank
            worker.all_reduce(array)
            worker.all_reduce(array[: numel // 2], "sum")
        return array

    monkeypatch.setattr(TcpChannel, "send", count)
    with coordinator() as server, ExitStack() as stack:
        joining = [Task(connect, server.url, rank, 3, channel=channel) for rank, channel in enumerate(channels)]
        workers = [stack.enter_context(task.result()) for task in joining]
        expected = (np.arange(numel) % 1000 + 1).astype(np.float32)
        expected[: numel // 2] *= 3
        for result in together(workers, work):
            np.testing.assert_array_equal(result, expected)

    assert [travelled[rank] > 0 for rank in range(3)] == [channel == "tcp" for channel in channels]


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("channel", ["auto", "shm", "tcp"])
def test_channel_is_as_asked_for(monkeypatch: pytest.MonkeyPatch, how: str, channel: str) -> None:
    monkeypatch.setenv("GRADSERVER_CHANNEL", channel if how == "environment" else "no such")
    with coordinator() as server, connect(server.url, 0, 1, channel=channel if how == "argument" else None) as worker:
        assert worker.channel == ("tcp" if channel == "tcp" else "shm")
        array = worker.empty((3, 5), np.float32)
        place = worker._session.traffic.channel.place_of(array.reshape(-1).view(np.uint8))
        assert (place is None) == (channel == "tcp")


def test_unknown_channel_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'ipc', and must be one of auto, shm, tcp"):
        connect("tcp://127.0.0.1:1", channel="ipc")


def test_coordinator_that_shares_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = TcpServer(Runtime(Engine({}, CREDIT_BYTES)), "tcp://127.0.0.1:0", share_memory=False)
    task = Task(server.run)
    try:
        with caplog.at_level(logging.INFO, "gradserver"), connect(server.url, 0, 1) as worker:
            assert worker.channel == "tcp"
            assert worker.empty(10, np.uint8).nbytes == 10
        assert [record.getMessage() for record in caplog.records if "no memory can be shared" in record.getMessage()]
        with pytest.raises(BackendUnavailableError, match="the coordinator offers none"):
            connect(server.url, 0, 1, channel="shm")
    finally:
        server.request_stop("the test is over")
        task.result()
        server.close()


def test_stranger_is_told_once_where_to_share_and_pays_for_a_wrong_place() -> None:
    with coordinator() as server, Stranger(server.url) as stranger:
        stranger.send(Join("default", "stranger", 0, 1, 10.0))
        assert isinstance(stranger.hear(), Welcome)
        stranger.send(ShareMemory())
        first = stranger.hear()
        stranger.send(ShareMemory())
        assert first == stranger.hear()
        assert isinstance(first, MemoryAt)
        assert first.address.startswith(ADDRESS_PREFIX)
        stranger.send(Push(ExchangeKey(Stream.COLLECTIVE, 0), 0, place=Place(0, SEGMENT_HEADER_BYTES)))
        error = stranger.error()
        assert isinstance(error, MalformedMessageError)
        assert "memory that is not shared" in str(error)


@pytest.mark.parametrize(
    ("offset", "slices", "fits"),
    [
        (0, 1, True),
        (1, 1, True),
        (LARGE - 4000, 1, True),
        (LARGE + 4096 - 3999, 1, False),
        (LARGE, 1, False),
        (0, 2, False),
    ],
)
def test_stranger_with_an_odd_or_too_short_place_harms_no_worker(offset: int, slices: int, fits: bool) -> None:
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 1000)
    with coordinator() as server, Stranger(server.url) as stranger:
        joining = Task(connect, server.url, 0, 2, timeout=5.0)
        stranger.send(Join("default", "stranger", 1, 2, 5.0))
        assert isinstance(stranger.hear(), Welcome)
        stranger.send(ShareMemory())
        where = stranger.hear()
        assert isinstance(where, MemoryAt)
        memory = SharedMemory(where.address, where.token, PATIENCE)
        data = some(memory, LARGE)
        data[:] = 0
        place = memory.place_of(data)
        assert place is not None
        with joining.result() as worker:
            reducing = Task(worker.all_reduce, np.full(1000, 2, np.float32))
            there = Place(place.segment, place.offset + offset)
            stranger.send(Push(ExchangeKey(Stream.COLLECTIVE, 0), 0, operation=operation, slices=slices, place=there))
            if fits:
                assert (reducing.result() == 1).all()
                assert data[offset : offset + 4000].tobytes() == np.full(1000, 1, np.float32).tobytes()
            else:
                assert isinstance(stranger.error(), GradServerError)
                assert "stranger" in str(reducing.error(GradServerError))
        memory.close()


FORK = """
import gc, os, sys
import numpy as np
from gradserver.worker.connect import connect
worker = connect(sys.argv[1], 0, 1)
array = worker.empty(1_000_000, "float32")
channel = worker._session.traffic.channel
data = array.view(np.uint8)
child = os.fork()
if child == 0:
    fine = channel.empty(1000) is None and channel.place_of(data) is None and worker.empty(10, "float32").size == 10
    del array, data
    gc.collect()
    os._exit(0 if fine else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print("parent", channel.place_of(data) is not None and channel.empty(1000) is not None, flush=True)
sys.stdin.readline()
"""


def test_forked_child_shares_nothing_and_releases_nothing() -> None:
    with Daemon("--quiet") as daemon, Program("-c", FORK, daemon.url) as worker:
        assert worker.expect("child ") == "0"
        assert worker.expect("parent ") == "True"
        assert segments_of(daemon) == 2
        worker.tell()
        assert worker.end() == 0


@contextmanager
def network_namespace() -> Iterator[tuple[str, str]]:
    """Make a network of its own, connected to ours. Yield its name, and our address as seen from there."""
    name = f"gs{os.getpid() % 100_000}"
    net = os.getpid() % 250

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            ip("netns", "add", name)
            ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
            ip("address", "add", f"198.18.{net}.1/24", "dev", f"{name}a")
            ip("link", "set", f"{name}a", "up")
            ip("-n", name, "address", "add", f"198.18.{net}.2/24", "dev", f"{name}b")
            ip("-n", name, "link", "set", f"{name}b", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', None) or error}")
        yield name, f"198.18.{net}.1"
    finally:
        subprocess.run(["ip", "link", "delete", f"{name}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


ELSEWHERE = """
import json, logging, sys
from gradserver.protocol.errors import BackendUnavailableError
from gradserver.worker.connect import connect
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
with connect(sys.argv[1], 0, 1) as worker:
    said = [worker.channel, int(worker.empty(10, "float32").size)]
try:
    connect(sys.argv[1], 0, 1, channel="shm")
except BackendUnavailableError as error:
    print(json.dumps([*said, str(error)]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
def test_worker_in_another_network_namespace_uses_the_connection() -> None:
    with network_namespace() as (name, address), coordinator(bind=f"tcp://{address}:0") as server:
        command = ["ip", "netns", "exec", name, sys.executable, "-c", ELSEWHERE, server.url]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    channel, size, error = json.loads(ended.stdout)

    assert (channel, size) == ("tcp", 10)
    assert "another container" in error
    assert "DEBUG:gradserver:gradients go through the connection" in ended.stderr


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────────

TORCH_TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [*TORCH_TYPES, np.float64, np.dtype(np.int16), "bfloat16", "float8_e4m3fn", "bool"])
@pytest.mark.parametrize("shape", [5, (3, 7), (2, 0, 3), (), (0,), (1000, 1000)])
def test_tensors_lie_in_memory_that_is_shared(memory: SharedMemory, shape: Any, dtype: Any) -> None:
    tensor = empty(shape, dtype, memory.empty)
    ordinary = empty(shape, dtype)

    assert type(tensor) is type(ordinary)
    assert tensor.dtype == ordinary.dtype
    assert tensor.shape == ordinary.shape
    data = tensor.reshape(-1).view(torch.uint8).numpy() if isinstance(tensor, torch.Tensor) else tensor.reshape(-1)
    assert (memory.place_of(data.view(np.uint8)) is not None) == (data.nbytes > 0)


def test_tensor_keeps_its_memory(host: Host, memory: SharedMemory) -> None:
    tensor = empty((1000, 1000), torch.bfloat16, memory.empty)
    part = tensor[10:20]
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None
    assert host.server.segments == 2
    del part
    host.has(1)


@pytest.mark.parametrize("shape", [-1, (3, -2), (-1, -1)])
@pytest.mark.parametrize("dtype", [torch.float32, np.float32])
def test_impossible_shapes_fail_as_ever(memory: SharedMemory, shape: Any, dtype: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        empty(shape, dtype, memory.empty)
