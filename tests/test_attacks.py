"""Tests of what strangers and members can cost a coordinator: little memory, and no other group's training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import MIB, SLICE_BYTES
from gradserver.protocol.messages import Join, Message, Ping, Push, StatusRequest, Welcome
from gradserver.protocol.wire import encode
from gradserver.status import fetch
from gradserver.transport.system import Spare, queued
from gradserver.transport.traffic import (
    MEMBERS_MESSAGES,
    MESSAGE_BYTES,
    PARTED_MESSAGES,
    STRANGERS_BYTES,
    STRANGERS_MESSAGES,
    STRANGERS_TALK,
    Connections,
    Traffic,
)
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, Daemon, Program, Task, joined, wait_until, worker_program
from tests.strangers import Stranger
from tests.test_bad_input import Bystanders, frame, speaking_zmtp

MOST_BYTES = 300 * MIB
"""More memory than so much no attack may cost."""
FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from gradserver.cli import main
sys.exit(main(["serve", "--quiet", "--bind", "tcp://127.0.0.1:0"]))
"""


@contextmanager
def under_attack() -> Iterator[Daemon]:
    """Run a daemon at which a group exchanges, bit by bit as it should. Attacks on it must not cost much memory."""
    with Daemon("--quiet", loaded="") as daemon, joined(daemon.url, 2, group="innocent") as workers:
        bystanders = Bystanders(workers)
        wait_until(lambda: bystanders.rounds > 3, "they exchange")
        idle = daemon.memory()
        yield daemon
        bystanders.check()
        assert daemon.memory("VmHWM") < idle + MOST_BYTES
        assert daemon.running


def shout(peer: socket.socket, data: bytes, most: int) -> int:
    """Send ``data`` again and again until the other side ends that, or stops to read. Return the bytes sent."""
    peer.settimeout(1.0)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most:
            peer.sendall(data)
            sent += len(data)
    return sent


def large_frame(payload: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(payload)) + payload


def push(number: int) -> bytes:
    """Return the whole of a collective of a group of one."""
    operation = Operation(Kind.ALL_REDUCE, Op.SUM, FLOAT32, SLICE_BYTES // 4)
    header = encode(Push(ExchangeKey(Stream.COLLECTIVE, number), 0, 1.0, True, operation))
    return b"\x01" + bytes([len(header)]) + header + large_frame(bytes(SLICE_BYTES))


def push_until_cut_off(peer: socket.socket) -> None:
    """Push one collective after another, and read no result. A pause would be silence, for which it is lost, too."""
    peer.settimeout(PATIENCE)
    until, numbers = time.monotonic() + PATIENCE, count()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < until:
            peer.sendall(push(next(numbers)))
        raise AssertionError("it is still connected")


def said(message: Message) -> bytes:
    return frame(encode(message))


def become_a_member(peer: socket.socket) -> None:
    """Join a group of its own, and wait for the Welcome. What else the coordinator says stays unread."""
    peer.sendall(said(Join("own", "member", 0, 1, 60.0)))
    peer.settimeout(PATIENCE)
    heard = b""
    while b"member" not in heard:
        heard += peer.recv(4096)
    peer.settimeout(1.0)


# ── floods ────────────────────────────────────────────────────────────────────────────────────────────

MANY = 20_000
FLOODS: dict[str, bytes] = {
    "bytes": b"\x00\x01x" * MANY,
    "pings": said(Ping()) * MANY,
    "an endless message": b"\x01\x01x" * MANY,
    "an endless message of large frames": (b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)),
    "requests for status": said(StatusRequest()) * MANY,
}


MOST_SENT = 200_000_000
"""Bytes. How much gets through before the coordinator has the processor is the machine's affair."""


USUAL = ("bytes", "requests for status")
"""Floods of the usual tests: what is no message, and messages that want an answer."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what not in USUAL)) for what in FLOODS]
)
def test_a_stranger_that_floods_a_coordinator_is_cut_off(what: str) -> None:
    with under_attack() as daemon, speaking_zmtp(daemon.url) as peer:
        assert shout(peer, FLOODS[what], MOST_SENT) < MOST_SENT


@pytest.mark.parametrize("what", [what for what in FLOODS if what != "bytes"])
def test_a_member_that_floods_a_coordinator_is_cut_off(what: str) -> None:
    with under_attack() as daemon, speaking_zmtp(daemon.url) as peer:
        become_a_member(peer)
        assert shout(peer, FLOODS[what], MOST_SENT) < MOST_SENT
        wait_until(lambda: not daemon.group("own"), "it is one no more")


def test_a_member_that_never_reads_is_cut_off() -> None:
    with under_attack() as daemon, speaking_zmtp(daemon.url) as peer:
        become_a_member(peer)
        push_until_cut_off(peer)
        wait_until(lambda: not daemon.group("own"), "it is lost")


def test_the_log_about_a_member_that_never_reads() -> None:
    with Daemon(loaded="") as daemon, speaking_zmtp(daemon.url) as peer:
        become_a_member(peer)
        push_until_cut_off(peer)
        wait_until(lambda: not daemon.group("own"), "it is lost")
        daemon.send_signal(signal.SIGTERM)
        daemon.end()
        (said_of_it,) = [line for line in daemon.complaints() if "'member' (rank 0) was lost" in line]
        assert "68.0 MiB is the limit" in said_of_it  # unread, or under way: what the coordinator came to first


def test_honest_workers_may_have_all_their_credit_under_way() -> None:
    with Daemon("--quiet", "--workers", "2", loaded="") as daemon, ExitStack() as stack:
        programs = [
            stack.enter_context(
                worker_program(daemon.url, "rounds", rank, 2, "tcp", count=3, buckets=20, numel=1_000_000)
            )
            for rank in range(2)
        ]
        for program in programs:
            assert program.end() == 0


# ── descriptors ───────────────────────────────────────────────────────────────────────────────────────


def test_connections_that_take_all_descriptors_keep_no_worker_out() -> None:
    with Program("-c", FEW_DESCRIPTORS) as daemon, ExitStack() as stack:
        url = daemon.expect("listening on ")
        host, port = url.removeprefix("tcp://").split(":")
        workers = stack.enter_context(joined(url, 2, group="innocent"))
        bystanders = Bystanders(workers)
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
        with connect(url, 0, 1, "late", timeout=PATIENCE) as worker:
            worker.barrier()
        bystanders.check()
        assert daemon.running


def exchange_at(url: str, name: str) -> str:
    """Join the group of six, and exchange. Return the error, if there is one."""
    try:
        with connect(url, name=name, timeout=6.0) as worker:
            for _ in range(3):
                tensor = np.ones(200_000, np.float32)
                worker.all_reduce(tensor, "sum")
                assert (tensor == 6).all()
    except GradServerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("limit", [40, 50, 58])
def test_a_coordinator_with_few_descriptors_refuses_workers_and_serves_the_others(limit: int) -> None:
    code = FEW_DESCRIPTORS.replace("200", str(limit)).replace('"--quiet"', '"--workers", "6"')
    none = {"GRADSERVER_KERNELS": "numpy"}  # a thread that loads them has files open, for a moment
    with Program("-c", code, loaded="", environment=none) as daemon:
        url = daemon.expect("listening on ")
        errors = [task.result() for task in [Task(exchange_at, url, f"w{rank}") for rank in range(6)]]
        assert fetch(url)["url"] == url  # it lives
        if limit > 45:
            assert errors == [""] * 6  # without memory that is shared, all can come
        else:
            # A connection that is cut off before it said anything cannot be told why, but the coordinator's log is.
            said = "too few descriptors", "missing: ", "is needed to go on", "did not answer", "lost the coordinator"
            for error in errors:
                assert any(words in error for words in said), error
        assert daemon.running
        daemon.send_signal(signal.SIGTERM)
        daemon.end()
        log = "\n".join([*errors, *daemon.output(), *daemon.complaints()])
        assert ("too few descriptors" in log) == (limit <= 45), log


@pytest.mark.parametrize("options", [(), ("--join", "tcp://127.0.0.1:1")])
def test_a_server_with_too_few_descriptors_for_a_group_does_not_start(options: tuple[str, ...]) -> None:
    code = FEW_DESCRIPTORS.replace("200", "37").replace('"--quiet"', ", ".join(map(repr, ("--quiet", *options))))
    with Program("-c", code, loaded="", environment={"GRADSERVER_KERNELS": "numpy"}) as daemon:
        assert daemon.end() == 1
        (told,) = daemon.complaints()
    assert "this process may have 37 descriptors (open files), and needs 40" in told
    assert "ulimit -n 65536" in told


@contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Yield TCP connections, both ends of each."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        found = []
        for _ in range(count):
            here = stack.enter_context(socket.create_connection(listener.getsockname()))
            found.append((stack.enter_context(listener.accept()[0]), here))
        yield found


def is_cut_off(end: socket.socket) -> bool:
    end.settimeout(0.0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_stranger_goes_when_descriptors_are_short() -> None:
    with pairs(4) as ends:
        connections = Connections()
        connections._most = connections._others + 3
        for accepted, _ in ends[:3]:
            connections.accepted(accepted.fileno())
        member = connections.admit(b"nobody known")
        assert member.descriptor == -1
        saying = connections.introduce(b"member", ends[0][0].fileno(), time.monotonic())
        assert connections.admit(b"member") is saying.traffic
        connections.accepted(ends[3][0].fileno())

        assert [is_cut_off(there) for _, there in ends] == [False, True, False, False]
        connections.close()


def test_a_look_from_which_the_processor_was_taken_puts_no_later_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with pairs(1) as [(accepted, _)]:
        connections = Connections()
        connections.accepted(accepted.fileno())
        waits = threading.Event()
        monkeypatch.setattr(Traffic, "measure", lambda *_: waits.wait(0.2))  # as other processes have it
        began = time.monotonic()

        connections.look(began, ALLOWANCE, True)

        assert time.monotonic() - began >= 0.2
        assert connections.due - time.monotonic() < 1.0
        connections.close()


# ── one connection ────────────────────────────────────────────────────────────────────────────────────


def test_a_number_that_became_another_connections_is_left_alone() -> None:
    with pairs(2) as ends:
        (accepted, _), (other, there) = ends
        traffic = Traffic(accepted.fileno())
        os.dup2(other.fileno(), accepted.fileno())

        spare = Spare()
        traffic.shutdown(spare)

        assert traffic.shut
        assert not is_cut_off(there)
        traffic.forget()
        spare.close()


def test_a_connection_that_closed_before_the_look_is_nothing() -> None:
    with pairs(1) as [(accepted, _)]:
        number = accepted.fileno()
        accepted.close()
        traffic = Traffic(number)
        assert not traffic.measure(time.monotonic())
        assert traffic.descriptor == -1


def measured(traffic: Traffic) -> Traffic:
    assert traffic.measure(time.monotonic())
    return traffic


def test_what_a_connection_holds_is_what_came_less_what_was_taken() -> None:
    with pairs(1) as [(accepted, there)]:
        traffic = Traffic(accepted.fileno())
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * MIB)
        sender = threading.Thread(target=there.sendall, args=(bytes(MIB),))
        sender.start()
        wait_until(lambda: queued(accepted.fileno()) > MIB // 8, "much of it has come")
        assert measured(traffic).untaken == 0  # the kernel has it
        accepted.settimeout(PATIENCE)
        left = MIB
        while left:
            left -= len(accepted.recv(left))
        sender.join()
        before = measured(traffic).untaken
        traffic.taken = MIB // 2
        assert before - measured(traffic).untaken == MIB // 2
        traffic.taken = MIB
        assert measured(traffic).untaken == 0

        traffic.sent = 5000
        assert measured(traffic).unread == 5000
        accepted.sendall(bytes(5000))
        wait_until(lambda: measured(traffic).unread == 0, "the other side has it")
        accepted.sendall(bytes(3000))  # as libzmq's own words are
        wait_until(lambda: measured(traffic)._floor == -3000, "and more")
        traffic.sent += 100
        assert measured(traffic).unread == 100
        traffic.forget()


ALLOWANCE = 68 * MIB


def troubles(caught_up: bool = True, **facts: Any) -> list[str]:
    """Return the faults found in three looks at a member, or at the peer that ``facts`` describe."""
    traffic = Traffic()
    traffic.member = True
    for name, value in facts.items():
        setattr(traffic, name, value)
    return [traffic.trouble(100.0, ALLOWANCE, caught_up) for _ in range(3)]


def test_limits_of_members_and_strangers() -> None:
    fine = ["", "", ""]
    assert troubles(unread=ALLOWANCE, untaken=MESSAGE_BYTES) == fine
    assert "it has not read 68.0 MiB that it was sent" in troubles(unread=ALLOWANCE + 1)[0]
    assert troubles(caught_up=False, untaken=ALLOWANCE) == fine
    assert "under way" in troubles(caught_up=False, untaken=ALLOWANCE + MESSAGE_BYTES + 1)[0]
    assert troubles(untaken=MESSAGE_BYTES + 1)[0] == ""
    assert "of one message came, and no end of it" in troubles(untaken=MESSAGE_BYTES + 1)[1]
    stranger = {"member": False}
    assert troubles(**stranger, untaken=STRANGERS_BYTES) == fine
    assert "and has not joined" in troubles(**stranger, untaken=STRANGERS_BYTES + 1)[0]
    assert "of answers" in troubles(**stranger, unread=9 * MIB)[0]
    assert troubles(**stranger, parted=90.0, unread=20 * MIB) == fine
    assert "it was given up" in troubles(**stranger, parted=60.0, unread=20 * MIB)[0]
    assert STRANGERS_TALK < STRANGERS_BYTES
    assert SLICE_BYTES < STRANGERS_BYTES


def test_what_may_be_said_in_messages_is_counted() -> None:
    connections = Connections()
    now = time.monotonic()
    saying = connections.introduce(b"stranger", -1, now)
    assert sum(saying.one_more(now) for _ in range(2 * STRANGERS_MESSAGES)) == STRANGERS_MESSAGES
    assert saying.one_more(now + 3600.0)
    connections.part(b"member", Traffic(), now)
    parted = connections.stranger(b"member")
    assert parted is not None
    assert sum(parted.one_more(now) for _ in range(2 * PARTED_MESSAGES)) == PARTED_MESSAGES

    connections.part(b"member", Traffic(), now, flooded=True)
    flooding = connections.stranger(b"member")
    assert flooding is not None
    assert sum(flooding.one_more(now) for _ in range(2 * PARTED_MESSAGES)) == STRANGERS_MESSAGES
    connections.close()


def test_strangers_together_are_limited_too() -> None:
    with pairs(3) as ends:
        connections = Connections()
        for index, (accepted, there) in enumerate(ends):
            connections.accepted(accepted.fileno())
            there.sendall(bytes(50_000 * (index + 1)))
            accepted.settimeout(PATIENCE)
            left = 50_000 * (index + 1)
            while left:
                left -= len(accepted.recv(left))
        connections._memory = 200_000

        def one_is_gone() -> bool:
            connections.look(time.monotonic(), ALLOWANCE, False)
            return any(is_cut_off(there) for _, there in ends)

        wait_until(one_is_gone, "one goes")
        assert [is_cut_off(there) for _, there in ends] == [False, False, True]
        connections.close()


def test_a_member_that_asks_for_ever_is_told() -> None:
    with Daemon("--quiet", loaded="") as daemon, Stranger(daemon.url) as member:
        member.send(Join("own", "member", 0, 1, 60.0))
        assert isinstance(member.hear(), Welcome)
        until = time.monotonic() + PATIENCE
        while not member.has_heard():
            assert time.monotonic() < until
            for _ in range(MEMBERS_MESSAGES // 8):
                member.send(Ping())
        assert "messages a second that take no credit" in str(member.error())


# ── beside a training ─────────────────────────────────────────────────────────────────────────────────

ATTACKER = """
import socket, sys, time
from tests.test_attacks import FLOODS, become_a_member, push, shout
from tests.test_bad_input import speaking_zmtp
url, what = sys.argv[1:]
with speaking_zmtp(url) as peer:
    print("ready", flush=True)
    sys.stdin.readline()
    if what == "a member that never reads":
        become_a_member(peer)
        try:
            for number in range(3000):
                peer.sendall(push(number))
        except OSError:
            pass
    else:
        shout(peer, FLOODS[what], 100_000_000)
    print("over", flush=True)
    sys.stdin.readline()
"""
STEPS = 1000


def trained(daemon: Daemon, attack: Callable[[], None] = lambda: None) -> tuple[list[str], float]:
    """Return the workers' weights with an ``attack`` from half-way on, and the second half's rate by the first's."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_program(daemon.url, "regression", rank, 2, "tcp", steps=STEPS, pause=0.005))
            for rank in range(2)
        ]
        workers[0].expect("half", 120.0)
        attack()
        first, second = json.loads(workers[0].expect("halves ", 120.0))
        return [worker.expect("weights ", 120.0) for worker in workers], first / second


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Return the weights of a training without an attack."""
    with Daemon("--quiet", loaded="") as daemon:
        weights, _ = trained(daemon)
    assert weights[0] == weights[1]
    return weights


@pytest.mark.long
@pytest.mark.parametrize("what", [*FLOODS, "a member that never reads"])
def test_an_attack_costs_a_training_neither_bits_nor_a_fifth_of_its_rate(what: str, undisturbed: list[str]) -> None:
    with Daemon("--quiet", loaded="") as daemon, ExitStack() as stack:
        count = 3 if what == "requests for status" else 1
        attackers = [stack.enter_context(Program("-c", ATTACKER, daemon.url, what)) for _ in range(count)]
        for attacker in attackers:
            attacker.expect("ready")
        idle = daemon.memory()

        def attack() -> None:
            for attacker in attackers:
                attacker.tell()

        weights, rate = trained(daemon, attack)
        for attacker in attackers:
            attacker.expect("over")
        print(f"{what}: {rate:.0%} of the rate, {(daemon.memory('VmHWM') - idle) / MIB:.0f} MiB more")
        assert weights == undisturbed
        assert daemon.memory("VmHWM") < idle + MOST_BYTES
        assert rate > 0.8
