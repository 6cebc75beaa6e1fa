"""Tests of bad input: a coordinator tells the sender what is wrong, and no other peer loses anything."""

from __future__ import annotations

import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.errors import (
    CollectiveMismatchError,
    CoordinatorUnreachableError,
    GradServerError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    LimitExceededError,
    MalformedMessageError,
    OutOfStepError,
    ProtocolError,
    SizeMismatchError,
    UnexpectedMessageError,
    VersionMismatchError,
    WorkerLostError,
)
from gradserver.protocol.exchange import WORLD_BOUND, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import CREDIT_BYTES, MAX_FRAME_BYTES, MAX_HEADER_BYTES, PROTOCOL_VERSION, SLICE_BYTES
from gradserver.protocol.messages import (
    Agreed,
    Failure,
    Inquire,
    Join,
    Leave,
    Message,
    Missing,
    Ping,
    Propose,
    Push,
    Result,
    Scope,
    Status,
    StatusRequest,
    Welcome,
)
from gradserver.protocol.messages.recovery import Held
from gradserver.protocol.offers import Offer, pack_offers
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.url import no_coordinator, parse_target
from gradserver.protocol.wire import decode, encode
from gradserver.transport.server import TcpServer
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.transport.greeting import takes_no_workers
from tests.cluster import PATIENCE, Daemon, Program, Task, coordinator, joined, wait_until
from tests.strangers import Stranger, impostor, plain_server, say_plainly, tunnel

PLAN = simple_plan([("b0", 3000), ("b1", 5)], FLOAT32)
KEY = ExchangeKey(Stream.BUCKET, 0, 0)
COLLECTIVE = ExchangeKey(Stream.COLLECTIVE, 0)
SUM = Operation(Kind.ALL_REDUCE, Op.SUM, FLOAT32, 3)


class Bystanders:
    """A group that exchanges rounds all the while, bit by bit as it should, and counts them."""

    def __init__(self, workers: list[Worker]) -> None:
        self._over = False
        self.rounds = 0
        self._tasks = [Task(self._exchange, worker) for worker in workers]

    def _exchange(self, worker: Worker) -> None:
        worker.agree(PLAN)
        go_on = np.ones(1, np.int8)
        random = np.random.default_rng(worker.rank)
        others = np.random.default_rng(1 - worker.rank)
        while go_on:
            for index, bucket in enumerate(PLAN.buckets):
                given, theirs = (r.normal(size=bucket.numel).astype(np.float32) for r in (random, others))
                right = ((given + theirs) / np.float32(2)).tobytes()
                worker.push(index, given).wait()
                assert given.tobytes() == right
            worker.finish_round()
            self.rounds = worker.round
            go_on[:] = not self._over
            worker.broadcast(go_on)

    def check(self) -> None:
        """Check that they go on as if nothing had happened."""
        done = self.rounds
        wait_until(lambda: self.rounds >= done + 3 or any(task.ended(0) for task in self._tasks), "they go on")
        self.end()

    def end(self) -> None:
        self._over = True
        for task in self._tasks:
            task.result()


@pytest.fixture
def server() -> Iterator[TcpServer]:
    """Run a coordinator at which a group is at work. It must be unharmed when the test is over."""
    with coordinator({"told": 2}) as server, joined(server.url, 2, group="innocent") as workers:
        bystanders = Bystanders(workers)
        yield server
        bystanders.check()


def header(*values: Any, version: int = PROTOCOL_VERSION) -> bytes:
    """Draw a header of any values."""
    packed: bytes = msgpack.packb(values)
    return b"GS" + bytes([version]) + packed


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────────

NO_OFFER = ["auto", "tcp", "", "", "", [], "", "", [], "", "", 0.0, 0.0]
JOIN = Join("crowd", "stranger", -1, 2, 5.0)

STRANGE: dict[str, tuple[list[bytes], type[GradServerError], str]] = {
    "nothing": ([b""], MalformedMessageError, "not a gradserver message"),
    "text": ([b"hello there"], MalformedMessageError, "not a gradserver message: it begins with b'hello th'"),
    "other version": (
        [header(1, "g", "n", 0, 2, 5.0, "a field of the future", version=PROTOCOL_VERSION + 1)],
        VersionMismatchError,
        f"the peer speaks protocol version {PROTOCOL_VERSION + 1}, this side version {PROTOCOL_VERSION}: "
        f"install the same gradserver on both",
    ),
    "no msgpack": ([b"GS" + bytes([PROTOCOL_VERSION]) + b"\xc1\xc1"], MalformedMessageError, "not msgpack"),
    "cut off": ([encode(JOIN)[:-5]], MalformedMessageError, "not msgpack"),
    "no array": ([header()[:3] + msgpack.packb({"a": 1})], MalformedMessageError, "begins with a message type"),
    "unknown type": ([header(99)], MalformedMessageError, "unknown message type 99"),
    "negative type": ([header(-1)], MalformedMessageError, "unknown message type -1"),
    "fields too few": ([header(1, "g")], MalformedMessageError, "Join has 7 fields, got 1"),
    "fields too many": ([header(10, 1)], MalformedMessageError, "Ping has 0 fields, got 1"),
    "field of another type": (
        [header(1, "g", "n", "0", 2, 5.0, NO_OFFER, "")],
        MalformedMessageError,
        "expected an integer from -1 to 1023, got str",
    ),
    "number out of range": (
        [header(1, "g", "n", 0, 2**40, 5.0, NO_OFFER, "")],
        MalformedMessageError,
        "expected an integer from 0",
    ),
    "not a number": (
        [header(1, "g", "n", 0, 2, float("nan"), NO_OFFER, "")],
        MalformedMessageError,
        "expected a number from 0",
    ),
    "no plane": (
        [header(1, "g", "n", 0, 2, 5.0, ["nccl", *NO_OFFER[1:]], "")],
        MalformedMessageError,
        "Join.offer: expected one of auto, tcp, shm, in_process, direct, hierarchical, got str of length 4",
    ),
    "long header": ([b"GS\x01" + bytes(MAX_HEADER_BYTES)], LimitExceededError, f"the limit is {MAX_HEADER_BYTES}"),
    "payload where none goes": ([encode(JOIN), b"payload"], MalformedMessageError, "Join with 1 payloads; 0 to 0 go"),
    "payload missing": ([encode(Propose(PLAN.hash))], MalformedMessageError, "Propose with 0 payloads; 1 to 1 go"),
    "slice too large": (
        [encode(Held(1, KEY, 0, 1.0, True)), bytes(SLICE_BYTES + 1)],
        LimitExceededError,
        f"Held with a payload of {SLICE_BYTES + 1} bytes, the limit is {SLICE_BYTES}",
    ),
    "many frames": ([encode(Push(KEY, 0))] + [b"x"] * 5000, MalformedMessageError, "Push with 5000 payloads"),
    "push": (
        [encode(Push(KEY, 0)), b"data"],
        UnexpectedMessageError,
        "Push from a worker that is in no group: join first",
    ),
    "plan": ([encode(Propose(PLAN.hash)), PLAN.encoded], UnexpectedMessageError, "Propose from a worker"),
    "inquiry": (
        [encode(Inquire(KEY))],
        UnexpectedMessageError,
        "Inquire from a worker that is in no group",
    ),
    "goodbye": ([encode(Leave("bye"))], UnexpectedMessageError, "Leave from a worker that is in no group"),
    "coordinator's": ([encode(Agreed(PLAN.hash, 0))], UnexpectedMessageError, "Agreed from a worker"),
    "empty group": ([encode(Join("", "n", 0, 2, 5.0))], InvalidArgumentError, "and must be printable text"),
    "name that writes on terminals": (
        [encode(Join("crowd", "\x1b[2J", 0, 2, 5.0))],
        InvalidArgumentError,
        "the worker's name is '\\x1b[2J', and must be printable text",
    ),
    "long name": ([encode(Join("crowd", "n" * 200, 0, 2, 5.0))], InvalidArgumentError, "is 200 bytes long"),
    "no world size": (
        [encode(Join("crowd", "n", 0, 0, 5.0))],
        InvalidWorldSizeError,
        "the world size of group 'crowd' is unknown",
    ),
    "rank out of range": (
        [encode(Join("told", "n", 2, 0, 5.0))],
        InvalidRankError,
        "'n' wants rank 2, but the ranks of group 'told' are 0 to 1",
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_stranger_is_told_what_is_wrong(server: TcpServer, what: str) -> None:
    frames, kind, message = STRANGE[what]

    with Stranger(server.url) as stranger:
        stranger.say(*frames)
        error = stranger.error()

    assert isinstance(error, kind), error
    assert message in str(error)


def test_stranger_may_ask_again_after_nonsense(server: TcpServer) -> None:
    with Stranger(server.url) as stranger:
        for _ in range(3):
            stranger.say(b"nonsense")
            assert isinstance(stranger.error(), MalformedMessageError)
        stranger.send(StatusRequest())
        assert isinstance(stranger.hear(), Status)


def test_frame_beyond_the_limit_costs_its_sender_the_connection(server: TcpServer) -> None:
    with Stranger(server.url) as stranger:
        stranger.say(encode(Push(KEY, 0)), bytes(MAX_FRAME_BYTES + 1))

        assert stranger.is_cut_off()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: coordinator\r\n\r\n",
        bytes(1000),
        b"\xff" * 1000,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),  # a greeting, and then nothing
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48) + b"\x06" + struct.pack(">Q", 2**63 - 1),
        random.Random(0).randbytes(100_000),
    ],
    ids=["nothing", "http", "zeros", "ones", "greeting", "endless frame", "noise"],
)
def test_plain_bytes_on_the_port_harm_no_group(server: TcpServer, data: bytes) -> None:
    say_plainly(server.url, data)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.ROUTER, zmq.PUB, zmq.PUSH, zmq.PAIR])
def test_sockets_of_other_kinds_harm_no_group(server: TcpServer, kind: int) -> None:
    with Stranger(server.url, kind) as stranger:
        if kind in (zmq.REQ, zmq.PUB):
            stranger.say(b"hello")
        else:
            stranger.is_cut_off(0.1)


# ── noise ─────────────────────────────────────────────────────────────────────────────────────────────


def messages(chance: random.Random) -> Iterator[list[bytes]]:
    """Yield frames of all kinds without end: noise, and messages that are nearly right."""
    key = ExchangeKey(chance.randrange(3), chance.randrange(3), chance.randrange(3), chance.randrange(-1, 3), -1)
    good: list[tuple[Message, list[bytes]]] = [
        (Push(KEY, 0), [bytes(12)]),
        (Push(COLLECTIVE, 0, 1.0, True, SUM), [bytes(12)]),
        (Push(key, chance.randrange(5), 0.0, False, SUM), []),
        (Result(KEY, 0, 1.0, False), []),
        (Propose(PLAN.hash), [PLAN.encoded]),
        (Inquire(KEY), []),
        (Leave("bye"), []),
        (Ping(), []),
        (Status(), [b"{}"]),
        (Welcome("innocent", 0, 1, 1 << 24, ("w0", "w1")), []),
        (Agreed(PLAN.hash, 0), []),
        (Missing(KEY, ("w0",)), []),
        (Failure.of(WorkerLostError("w0 is lost"), Scope.CONNECTION), []),
        (Join("innocent", "intruder", chance.randrange(-1, 3), 2, 5.0), []),
    ]
    while True:
        message, payloads = chance.choice(good)
        frames = [bytearray(encode(message)), *(bytearray(payload) for payload in payloads)]
        match chance.randrange(6):
            case 0:
                yield [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 4))]
                continue
            case 1:
                frame = chance.choice(frames)
                for _ in range(chance.randrange(1, 4)):
                    if frame:
                        frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 2:
                frame = chance.choice(frames)
                del frame[chance.randrange(len(frame) + 1) :]
            case 3:
                frames.append(bytearray(chance.randbytes(20)))
            case 4:
                frames.pop()
        yield [bytes(frame) for frame in frames] or [b""]


def test_thousands_of_messages_from_strangers_while_a_group_trains() -> None:
    with Daemon("--quiet") as daemon, joined(daemon.url, 2, group="innocent") as workers:
        bystanders = Bystanders(workers)
        wait_until(lambda: bystanders.rounds > 1, "the group is at work")
        before = bystanders.rounds
        for seed in range(8):
            frames = messages(random.Random(seed))
            with Stranger(daemon.url) as stranger:
                for _ in range(500):
                    stranger.say(*next(frames))
                stranger.send(StatusRequest())
                while not isinstance(stranger.hear(), Status):
                    pass
        assert bystanders.rounds > before
        bystanders.check()
        assert daemon.running


LISTENER = """
import sys, zmq
from gradserver.transport.binding import bind_router
router = zmq.Context().socket(zmq.ROUTER)
print(bind_router(router, "tcp://127.0.0.1:0"), flush=True)
sys.stdin.readline()
print(sum(len(router.recv_multipart()) == 2 for _ in range(int(sys.argv[1]))), flush=True)
"""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
"""ZMTP 3.1, as https://rfc.zeromq.org/spec/37 has it."""


def frame(body: bytes, is_command: bool = False) -> bytes:
    return bytes([4 * is_command, len(body)]) + body


@contextmanager
def speaking_zmtp(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(parse_target(url), PATIENCE) as peer, peer.makefile("rb") as heard:
        peer.sendall(GREETING + frame(READY, is_command=True))
        assert len(heard.read(64)) == 64
        assert heard.read(2)[0] == 4
        yield peer


def test_a_connection_that_breaks_behind_much_that_was_not_read_and_a_ping_ends_nothing() -> None:
    """libzmq 4.3 ends the process, if it stopped to read when the connection broke."""
    count = 500
    with Program("-c", LISTENER, str(count)) as listener:
        url = listener.expect("")
        with speaking_zmtp(url) as peer:
            peer.sendall(frame(b"message") * count + frame(b"\x04PING\0\x0a", is_command=True))
            with speaking_zmtp(url):  # which is answered behind what the other has said,
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with speaking_zmtp(url):  # and this one behind its end
            listener.tell()
            assert listener.expect("") == str(count)
            assert listener.end() == 0


def test_thousands_of_messages_from_a_member_harm_no_other_group() -> None:
    with Daemon("--quiet") as daemon, joined(daemon.url, 2, group="innocent") as workers:
        bystanders = Bystanders(workers)
        for seed in range(40):
            chance = random.Random(seed)
            frames = messages(chance)
            with Stranger(daemon.url) as one, Stranger(daemon.url) as other:
                for stranger in (one, other):
                    stranger.send(Join(f"crowd {seed}", "stranger", -1, 2, 5.0))
                for stranger in (one, other):
                    stranger.hear()
                    stranger.send(Propose(PLAN.hash), PLAN.encoded)
                for stranger in (one, other):
                    for _ in range(30):
                        stranger.say(*next(frames))
                    stranger.send(StatusRequest())
                    while not isinstance(stranger.hear(), Status):
                        pass
        bystanders.check()
        assert daemon.running


# ── members that break the protocol ───────────────────────────────────────────────────────────────────


@contextmanager
def rogue(url: str, name: str = "rogue") -> Iterator[tuple[Stranger, Worker]]:
    """Yield a member of a group of two that says what a test likes, rank 1, and its honest partner.

    Both have agreed on PLAN.
    """
    with Stranger(url) as stranger:
        stranger.send(Join("crowd", name, 1, 2, 10.0))
        with connect(url, 0, 2, "crowd", "honest", 10.0) as partner:
            assert isinstance(stranger.hear(), Welcome)
            stranger.send(Propose(PLAN.hash), PLAN.encoded)
            partner.agree(PLAN)
            assert isinstance(stranger.hear(), Agreed)
            yield stranger, partner


def push(number: int, part: int, size: int, index: int = 0) -> list[bytes]:
    return [encode(Push(ExchangeKey(Stream.BUCKET, number, part), index)), bytes(size)]


def begin(operation: Operation | None, size: int, number: int = 0) -> list[bytes]:
    key = ExchangeKey(Stream.COLLECTIVE, number)
    return [encode(Push(key, 0, 1.0, size > 0, operation)), *([bytes(size)] if size else [])]


def in_epoch(frames: list[bytes], epoch: int) -> list[bytes]:
    """Return ``frames``, with ``epoch`` if they begin what is of one membership only."""
    try:
        message, _ = decode(frames)
    except GradServerError:
        return frames
    if not isinstance(message, Push) or message.operation is None or message.operation.kind not in WORLD_BOUND:
        return frames
    return [encode(message._replace(epoch=epoch)), *frames[1:]]


HUGE = Operation(Kind.ALL_REDUCE, Op.SUM, FLOAT32, 1 << 40)

ROGUISH: dict[str, tuple[list[list[bytes]], type[GradServerError], str]] = {
    "garbage": ([[b"garbage"]], MalformedMessageError, "not a gradserver message: it begins with b'garbage'"),
    "short slice": (
        [push(0, 0, 11_996)],
        SizeMismatchError,
        "bucket 'b0' of round 0 from 'rogue' (rank 1): slice 0 has 11996 bytes, 12000 were agreed",
    ),
    "long slice": ([push(0, 1, 24)], SizeMismatchError, "slice 0 has 24 bytes, 20 were agreed"),
    "later round": (
        [push(5, 0, 12_000)],
        OutOfStepError,
        "bucket 'b0' of round 5 from 'rogue' (rank 1): round 0 is due, 5 came",
    ),
    "same slice twice": ([push(0, 0, 12_000)] * 2, OutOfStepError, "round 1 is due, 0 came"),
    "slice behind the end": (
        [push(0, 0, 12_000), push(0, 0, 12_000, index=1)],
        OutOfStepError,
        "slice 1 came, 1 of 1 is due",
    ),
    "second slice first": ([push(0, 0, 12_000, index=1)], UnexpectedMessageError, "did not begin with its first slice"),
    "bucket of no plan": (
        [push(0, 7, 12_000)],
        OutOfStepError,
        "bucket 7 is in no plan that 'rogue' (rank 1)",
    ),
    "later collective": ([begin(SUM, 12, number=3)], OutOfStepError, "number 0 is due, 3 came"),
    "collective without a name": ([begin(None, 12)], UnexpectedMessageError, "must say which one it is"),
    "mean of integers": (
        [begin(Operation(Kind.ALL_REDUCE, Op.MEAN, BY_NAME["int32"], 3), 12)],
        GradServerError,
        "the mean of int32 is not an int32",
    ),
    "root that is not there": (
        [begin(Operation(Kind.BROADCAST, Op.NONE, FLOAT32, 3, 9), 12)],
        InvalidRankError,
        "root 9 is not in a group of 2",
    ),
    "uneven scatter": (
        [begin(Operation(Kind.REDUCE_SCATTER, Op.SUM, FLOAT32, 3), 12)],
        InvalidArgumentError,
        "reduce_scatter of 3 elements among 2 workers",
    ),
    "more than the credit": (
        [
            [encode(Push(COLLECTIVE, index, 1.0, True, None if index else HUGE)), bytes(SLICE_BYTES)]
            for index in range(CREDIT_BYTES // SLICE_BYTES + 2)
        ],
        LimitExceededError,
        f"'rogue' (rank 1) has {CREDIT_BYTES + 2 * SLICE_BYTES} bytes in flight, its credit is {CREDIT_BYTES}",
    ),
    "second join": (
        [[encode(Join("crowd", "rogue", 1, 2, 5.0))]],
        UnexpectedMessageError,
        "already joined group 'crowd'",
    ),
    "result": ([[encode(Result(KEY, 0, 1.0, False))]], UnexpectedMessageError, "Result is not for a coordinator"),
    "second plan": (
        [[encode(Propose(PLAN.hash)), PLAN.encoded]] * 2,
        UnexpectedMessageError,
        "'rogue' (rank 1) proposed a second plan before the first was settled",
    ),
    "plan that is none": ([[encode(Propose("")), b"plan"]], ProtocolError, "plan"),
}


@pytest.mark.parametrize("what", ROGUISH)
def test_member_that_breaks_the_protocol_is_told_and_its_group_too(server: TcpServer, what: str) -> None:
    said, kind, message = ROGUISH[what]

    with rogue(server.url) as (stranger, partner):
        for frames in said:
            stranger.say(*in_epoch(frames, partner.epoch))
        error = stranger.error()
        with pytest.raises(WorkerLostError) as caught:
            partner.barrier()

    assert isinstance(error, kind), error
    assert message in str(error)
    assert "'rogue' (rank 1) was lost" in str(caught.value)
    assert str(error) in str(caught.value)


def test_collective_of_another_length_is_told_to_both(server: TcpServer) -> None:
    with rogue(server.url) as (stranger, partner):
        stranger.say(*begin(SUM, 12))
        with pytest.raises(CollectiveMismatchError) as caught:
            partner.all_reduce(np.zeros(4, np.float32), "sum")

        assert str(stranger.error()) == str(caught.value)
    for word in ("'rogue' (rank 1) called all_reduce(sum) of float32[3]", "'honest' (rank 0) called", "float32[4]"):
        assert word in str(caught.value)


# ── coordinators that are none ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a worker that does not wait for a coordinator's verdict after its own time is up."""
    monkeypatch.setattr("gradserver.worker.connect.VERDICT_SECONDS", 0.1)


def closed_at_once(url: str) -> str:
    return (
        f"the process that listens at {url} is not a gradserver coordinator: expected a handshake, and it closed the "
        f"connection. If it is a relay (an ssh tunnel, kubectl port-forward, a load balancer), the coordinator behind "
        f"it cannot be reached: is `gradserver serve` running where it leads to? If it is a coordinator, it "
        f"has too few descriptors (open files), as its log says. Otherwise, is the port right?"
    )


def test_web_server_is_told_from_a_coordinator_at_once() -> None:
    with plain_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        error = Task(connect, url, 0, 2, timeout=PATIENCE).error(CoordinatorUnreachableError, timeout=PATIENCE / 2)

    assert str(error) == closed_at_once(url)


@pytest.fixture
def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a worker that waits for hours, beyond its own timeout, for a peer that has shown to be a coordinator."""
    monkeypatch.setattr("gradserver.worker.connect.VERDICT_SECONDS", 3600.0)
    monkeypatch.setattr("gradserver.worker.session._FAREWELL_SECONDS", 3600.0)
    monkeypatch.setattr("gradserver.worker.transport.line._LINGER_MS", 3_600_000)


@pytest.mark.usefixtures("punctual")
def test_silent_server_is_told_from_a_coordinator() -> None:
    with plain_server() as url:
        error = Task(connect, url, 0, 2, timeout=0.2).error(CoordinatorUnreachableError)

    assert str(error) == f"the process that listens at {url} did not answer as a gradserver coordinator within 0.2 s"


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.PULL, zmq.PAIR, zmq.SUB])
def test_socket_that_takes_no_worker_is_told_from_a_coordinator_at_once(
    kind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Test with the first connection, whichever side ends that one."""
    with impostor(kind) as url:
        for _ in range(5):
            error = Task(connect, url, 0, 2, timeout=PATIENCE).error(CoordinatorUnreachableError, timeout=PATIENCE / 2)
            assert str(error) == no_coordinator(url, "coordinator", closed=False)
    assert "joining again" not in caplog.text


@pytest.mark.parametrize("kind", [zmq.REP, zmq.ROUTER, zmq.DEALER])
def test_socket_that_may_take_workers_is_not_told_from_a_coordinator_by_its_kind(kind: int) -> None:
    with impostor(kind) as url:
        assert not takes_no_workers(url, PATIENCE)
    assert not takes_no_workers(url, PATIENCE), "no process is there any more"


@pytest.mark.usefixtures("punctual")
@pytest.mark.parametrize("kind", [zmq.REP, zmq.ROUTER, zmq.DEALER])
def test_socket_that_never_answers_is_told_from_a_coordinator(kind: int) -> None:
    with impostor(kind) as url:
        error = Task(connect, url, 0, 2, timeout=0.2).error(CoordinatorUnreachableError)

    assert str(error) == f"the process that listens at {url} did not answer as a gradserver coordinator within 0.2 s"


def other_version(error: GradServerError) -> bytes:
    """Return a Failure as a coordinator of the next version says it."""
    frame = bytearray(encode(Failure.of(error, Scope.CONNECTION)))
    frame[2] += 1
    return bytes(frame)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        ([b"hello"], MalformedMessageError, "answers, but not as a gradserver coordinator: not a gradserver message"),
        ([encode(Status()), b"x" * (MAX_FRAME_BYTES - 1)], CoordinatorUnreachableError, "did not answer as"),
        ([encode(Welcome("g", 7, 1, 1 << 24, ("a", "b")))], MalformedMessageError, "a Welcome as rank 7 of 2"),
        (
            [encode(Welcome("g", 0, 1, 1 << 24, ("a", "b"), member_ids=(0, 1))), *pack_offers((Offer(host="x"),))],
            MalformedMessageError,
            "a Welcome with 1 offers for 2 names",
        ),
        (
            [encode(Welcome("g", 0, 1, 1 << 24, ("a", "b"), member_ids=(0, 1))), b"\x91\x01"],
            MalformedMessageError,
            "expected the 13 fields of a Offer, got 1",
        ),
        (
            [other_version(VersionMismatchError("the peer speaks protocol version 1, this side version 2"))],
            VersionMismatchError,
            "the peer speaks protocol version 1, this side version 2",
        ),
        (
            [b"GS" + bytes([PROTOCOL_VERSION + 1]) + encode(Ping())[3:]],
            VersionMismatchError,
            f"the peer speaks protocol version {PROTOCOL_VERSION + 1}, this side version {PROTOCOL_VERSION}",
        ),
    ],
    ids=[
        *("garbage", "something else", "impossible", "an offer too few", "no offers"),
        *("refused by another version", "another version"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_answer_that_is_no_coordinators_is_told(reply: list[bytes], kind: type[GradServerError], message: str) -> None:
    with impostor(zmq.ROUTER, lambda _: reply) as url, pytest.raises(kind) as caught:
        connect(url, 0, 2, timeout=0.2)

    assert message in str(caught.value)


def lying(result: Callable[[Push], list[bytes]]) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
    """Run a coordinator that welcomes all and answers each Push as ``result`` says."""

    def answer(frames: Sequence[bytes]) -> Sequence[bytes]:
        message, _ = decode(frames)
        if isinstance(message, Join):
            return [encode(Welcome(message.group, 0, 1, 1 << 24, ("me", "nobody"), member_ids=(0, 1)))]
        return result(message) if isinstance(message, Push) else [encode(Ping())]

    return answer


@pytest.mark.parametrize("size", [0, 11, 13, 4000])
def test_result_of_another_length_is_refused(size: int) -> None:
    data = np.ones(3, np.float32)
    coordinator = lying(lambda push: [encode(Result(push.key, 0, 2.0, True)), bytes(size)])

    with impostor(zmq.ROUTER, coordinator) as url, connect(url, 0, 2, timeout=5.0, channel="tcp") as worker:
        with pytest.raises(MalformedMessageError) as caught:
            worker.all_reduce(data, "sum")
        with pytest.raises(MalformedMessageError):
            worker.barrier()

    assert f"slice 0 of all_reduce(sum) of float32[3] came with {size} bytes, 12 are due" in str(caught.value)
    assert data.tolist() == [1, 1, 1]


# ── coordinators behind a relay ───────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def dead_end() -> Iterator[str]:
    """Run a relay to a coordinator that has ended. While that ran, the relay led to it."""
    with Daemon("--quiet") as daemon, tunnel(daemon.url) as url:
        with connect(url, 0, 1, channel="tcp") as worker:
            ones = np.ones(3, np.float32)
            worker.all_reduce(ones, "sum")
            assert ones.tolist() == [1, 1, 1]
        daemon.send_signal(signal.SIGTERM)
        assert daemon.end() == 0
        yield url


def test_a_relay_without_a_coordinator_behind_it_is_called_so(dead_end: str) -> None:
    error = Task(connect, dead_end, 0, 1, timeout=PATIENCE).error(CoordinatorUnreachableError, timeout=PATIENCE / 2)

    assert str(error) == closed_at_once(dead_end)


@pytest.mark.parametrize("command", [("status",), ("serve", "--join")])
def test_a_relay_without_a_coordinator_behind_it_is_called_so_by_commands(
    dead_end: str, command: tuple[str, ...]
) -> None:
    with Program("-m", "gradserver", *command, dead_end) as program:
        assert program.end() == 1
        assert program.complaints() == [f"gradserver: {closed_at_once(dead_end)}"]
