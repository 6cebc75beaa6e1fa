"""Messages between processes of one host, through a local socket instead of the network."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import DeadlineError, LimitExceededError, MalformedMessageError
from gradserver.protocol.limits import KIB, MAX_FRAME_BYTES, MAX_HEADER_BYTES
from gradserver.protocol.transport.packets import PACKET_BYTES, PacketStream
from gradserver.protocol.transport.sharing import Offer, Refused, Taken, Talk, Talking
from gradserver.transport.local_peers import MAX_QUEUED
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from tests.cluster import Daemon, coordinator, joined, together, wait_until
from tests.examples import examples
from tests.test_memory_sharing import memfd
from tests.unix_host import WORKER, Host, Hostile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="local sockets that keep packets apart are Linux's")


class Pipe:
    """Two ends of a connection; what one sends the other receives."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in self.sockets:
            end.setblocking(False)
        self.left, self.right = (PacketStream(end.send, end.recv) for end in self.sockets)

    def close(self) -> None:
        for end in self.sockets:
            end.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


# ── packets ───────────────────────────────────────────────────────────────────────────────────────────

headers = st.integers(1, 200) | st.sampled_from([MAX_HEADER_BYTES])
sizes = st.none() | st.integers(0, 5000) | st.sampled_from([PACKET_BYTES - 8, PACKET_BYTES, 3 * PACKET_BYTES + 1])


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(headers, sizes, st.booleans()), max_size=12))
def test_messages_arrive_whole_and_in_order_at_a_slow_reader(
    messages: list[tuple[int, int | None, bool]],
) -> None:
    pipe = Pipe()
    due: deque[list[bytes]] = deque()

    def read() -> None:
        with suppress(BlockingIOError):
            while True:
                frames = pipe.right.receive()
                if frames is not None:
                    assert [bytes(frame) for frame in frames] == due.popleft()

    try:
        for number, (header_bytes, payload_bytes, reads) in enumerate(messages):
            header = bytes([number]) * header_bytes
            payloads: list[Buffer] = [] if payload_bytes is None else [memoryview(os.urandom(payload_bytes))]
            due.append([header, *map(bytes, payloads)])
            assert pipe.left.send(header, payloads) == (not pipe.left.queued)
            if reads:
                read()
        read()
        while pipe.left.queued:
            pipe.left.flush()
            read()
    finally:
        pipe.close()
    assert not due


def test_an_end_comes_after_all_that_was_said(pipe: Pipe) -> None:
    pipe.right.send(b"unread")  # because of which the system reports a broken connection first
    for text in (b"one", b"two"):
        pipe.left.send(text)
    pipe.sockets[0].close()

    assert [pipe.right.receive(), pipe.right.receive()] == [[b"one"], [b"two"]]
    with pytest.raises(EOFError):
        pipe.right.receive()


BAD_PACKETS = {
    "too short to begin a message": ([b"\0" * 7], MalformedMessageError, "begins no message"),
    "a header that is not there": ([b"\xff\0\0\0\0\0\0\0"], LimitExceededError, "255 bytes of header"),
    "a payload beyond all limits": (
        [b"\0\0\0\0" + (MAX_FRAME_BYTES + 2).to_bytes(4, "little")],
        LimitExceededError,
        "of payload",
    ),
    "a payload that nobody announced": ([b"\0" * 9], MalformedMessageError, "1 bytes of a payload"),
    "more than was announced": (
        [b"\0\0\0\0\2\0\0\0" + b"xx"],
        MalformedMessageError,
        "2 bytes of a payload of 1",
    ),
    "too much later": ([b"\0\0\0\0\4\0\0\0x", b"xxx"], MalformedMessageError, "4 bytes of a payload of 3"),
    "a packet that is too long": ([b"\0" * (PACKET_BYTES + 1)], LimitExceededError, "a packet of more than"),
}


@pytest.mark.parametrize("what", BAD_PACKETS)
def test_what_is_no_message_is_refused(pipe: Pipe, what: str) -> None:
    packets, kind, text = BAD_PACKETS[what]
    for packet in packets:
        pipe.sockets[0].send(packet)
    for _ in packets[1:]:
        assert pipe.right.receive() is None
    with pytest.raises(kind, match=text):
        pipe.right.receive()


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
def test_any_bytes_are_messages_or_refused(packets: list[bytes]) -> None:
    waiting = deque(packets)
    stream = PacketStream(lambda _: None, lambda _: waiting.popleft())
    with suppress(MalformedMessageError, LimitExceededError):
        while waiting:
            frames = stream.receive()
            assert frames is None or 1 <= len(frames) <= 2


# ── the coordinator's socket ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.server.close()


def talking(host: Host) -> Hostile:
    """Connect a worker that may say messages."""
    talker = Hostile(host, WORKER)
    talker.say(Talk(talker.token))
    assert talker.hear() == Talking()
    return talker


def message(header: bytes, payload: bytes | None = None) -> bytes:
    """Return the packet of a small message."""
    length = 0 if payload is None else len(payload) + 1
    return len(header).to_bytes(4, "little") + length.to_bytes(4, "little") + header + (payload or b"")


def test_messages_pass_both_ways(host: Host) -> None:
    with talking(host) as talker:
        talker.say(message(b"header", b"payload"))
        talker.say(message(b"alone"))
        assert host.messages == [(WORKER, [b"header", b"payload"]), (WORKER, [b"alone"])]
        assert host.lines[WORKER].send(b"answer", [b"result"])
        assert talker._socket.recv(100) == message(b"answer", b"result")
    assert host.ends == [WORKER]


def test_a_reader_that_is_slow_gets_all_of_it_even_when_it_was_forgotten(host: Host) -> None:
    with talking(host) as talker:
        line, payload = host.lines[WORKER], bytes(30 * KIB)
        while not line.stream.queued:
            assert line.send(b"result", [payload])
        for _ in range(10):
            assert line.send(b"result", [payload])
        line.send(b"the last", [])
        host.server.forget(WORKER)
        heard: list[bytes] = []
        while not heard or heard[-1]:
            with suppress(BlockingIOError):
                heard.append(talker._socket.recv(PACKET_BYTES))
            host.pump()
        assert heard[-2:] == [message(b"the last"), b""]
        assert set(heard[:-2]) == {message(b"result", payload)}
        assert len(heard) > 12
    assert host.ends == []


def test_what_a_worker_said_counts_though_it_never_read(host: Host) -> None:
    with talking(host) as talker:
        line = host.lines[WORKER]
        while not line.stream.queued:
            assert line.send(b"result", [bytes(30 * KIB)])
        for text in (b"one", b"two"):
            talker._socket.send(message(text))
    assert host.messages == [(WORKER, [b"one"]), (WORKER, [b"two"])]
    assert host.ends == [WORKER]


def test_a_reader_that_never_reads_is_given_up(host: Host) -> None:
    with talking(host):
        line = host.lines[WORKER]
        sent = 0
        while line.send(b"x", []):
            sent += 1
            assert sent < 2 * MAX_QUEUED
        assert len(line.stream.queued) == MAX_QUEUED


def test_what_is_no_message_ends_the_line_and_is_reported(host: Host) -> None:
    with talking(host) as talker:
        talker.say(message(b"good"))
        talker.say(b"bad")
        assert [who for who, _ in host.errors] == [WORKER]
        assert talker._socket.recv(100) == b""
    assert len(host.messages) == 1


def test_an_unknown_token_begins_no_talk(host: Host) -> None:
    with Hostile(host) as hostile:
        hostile.say(Talk("somebody's"))
        answer = hostile.hear()
        assert isinstance(answer, Refused)
        assert "given to no worker" in answer.reason
        assert hostile.hear() is None
    assert not host.lines


def test_a_token_is_good_for_one_line(host: Host) -> None:
    with talking(host) as talker, Hostile(host, WORKER) as second:
        second.say(Talk(talker.token))
        answer = second.hear()
        assert isinstance(answer, Refused)
        assert "another connection" in answer.reason
        talker.say(message(b"still here"))
    assert host.messages == [(WORKER, [b"still here"])]


def test_memory_is_handed_over_elsewhere(host: Host) -> None:
    with Hostile(host, WORKER) as worker:
        worker.offer(memfd())
        assert isinstance(worker.hear(), Taken)
        worker.say(Talk(worker.token))
        assert isinstance(worker.hear(), Refused)
    with talking(host) as talker:
        talker.say(Offer(talker.token, 5, 8192), memfd())
        assert [who for who, _ in host.errors] == [WORKER]


# ── a whole system ────────────────────────────────────────────────────────────────────────────────────


def exchange(worker: Worker, numel: int) -> float:
    array = np.full(numel, 1.0, np.float32)
    worker.all_reduce(array, op="sum")
    return float(array.min())


@pytest.mark.parametrize("numel", [1, 10_000, 3_000_000])
def test_workers_of_the_same_host_say_nothing_through_the_network(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    # One that waits for its Welcome for a second asks again, and what it asked may come late.
    monkeypatch.setattr("gradserver.worker.transport.tcp.PING_SECONDS", 3600.0)
    with coordinator() as server, joined(server.url, 3) as workers:
        wait_until(lambda: all(peer.line is not None for peer in server._peers.values()), "all talk locally")
        monkeypatch.setattr(
            server,
            "_take_one",
            lambda: pytest.fail(f"a message came through ZeroMQ: {server._router.recv_multipart()}"),
        )
        assert together(workers, lambda worker: exchange(worker, numel)) == [3.0] * 3
        gathered = together(workers, lambda worker: worker.all_gather(np.full(numel, worker.rank)))
        assert all((each == np.arange(3)[:, None]).all() for each in gathered)
        together(workers, lambda worker: worker.barrier())


def hang_up(server: TcpServer) -> None:
    """Close the coordinator's ends of all lines, in its loop."""
    unix = server._unix
    assert unix is not None
    for identity, guest in unix._guests.items():
        assert guest.line is not None
        unix._hang_up(guest.line)
        server.hung_up(identity)


def test_when_a_line_ends_messages_go_through_the_connection_again() -> None:
    with coordinator() as server, joined(server.url, 2) as workers:
        assert together(workers, lambda worker: exchange(worker, 10)) == [2.0] * 2
        server.look(lambda: hang_up(server))
        wait_until(lambda: all(peer.line is None for peer in server._peers.values()), "the lines are closed")
        for _ in range(3):
            assert together(workers, lambda worker: exchange(worker, 1_000_000)) == [2.0] * 2


def test_pushing_to_a_coordinator_that_does_not_read_does_not_block() -> None:
    with Daemon() as daemon, joined(daemon.url, 2) as workers:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            handles = [
                worker.all_reduce(np.ones(7000, np.float32), async_op=True) for _ in range(500) for worker in workers
            ]
            with pytest.raises(DeadlineError):
                handles[0].wait(0.1)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        for handle in handles:
            handle.wait()
