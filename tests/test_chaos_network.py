"""Tests of the network in a chaos run: connections that break, and a relay that loses, repeats and swaps messages."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from tests.cluster import PATIENCE, Daemon, Program, wait_until, worker_program


class Between(Program):
    """The process ``module`` in front of ``address``, with one worker called "w"."""

    def __init__(self, module: str, address: str) -> None:
        super().__init__("-m", f"gradserver.tools.chaos.{module}", address, "w")
        self.port: int = json.loads(self.expect(""))["w"]

    def say(self, line: str) -> None:
        self.tell(line)
        self.expect("done")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextmanager
def connection() -> Iterator[tuple[Between, socket.socket, socket.socket]]:
    """Yield both ends of a connection through the wires."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        with (
            Between("wires", f"127.0.0.1:{server.getsockname()[1]}") as wires,
            socket.create_connection(("127.0.0.1", wires.port), PATIENCE) as here,
        ):
            there, _ = server.accept()
            there.settimeout(PATIENCE)
            with there:
                yield wires, here, there


def test_bytes_get_through_a_wire_both_ways_and_so_does_an_end() -> None:
    with connection() as (_, here, there):
        here.sendall(b"forth")
        assert exactly(there, 5) == b"forth"
        there.sendall(b"back")
        assert exactly(here, 4) == b"back"
        here.close()
        assert there.recv(1) == b""


def test_a_wire_that_is_reset_breaks_at_both_ends() -> None:
    with connection() as (wires, here, there):
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        wires.say("reset w")
        for end in (here, there):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_a_wire_says_whether_there_was_anything_to_break() -> None:
    with Between("wires", "127.0.0.1:9") as wires:
        wires.tell("reset w")
        assert wires.expect("") == "done"
    with connection() as (wires, here, there):
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        wires.tell("reset w")
        assert [wires.expect(""), wires.expect("")] == ["hit reset w", "done"]


def test_nothing_gets_through_a_black_hole_and_all_of_it_afterwards() -> None:
    with connection() as (wires, here, there):
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        wires.say("hold w 0.5")
        began = time.monotonic()
        here.sendall(b"y" * 100_000)
        assert exactly(there, 100_000) == b"y" * 100_000
        assert time.monotonic() - began > 0.1


def test_a_slow_wire_takes_its_time() -> None:
    with connection() as (wires, here, there):
        wires.say("throttle w 60 1000000")
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        data = b"z" * 500_000
        began = time.monotonic()
        threading.Thread(target=here.sendall, args=(data,)).start()
        assert exactly(there, len(data)) == data
        assert time.monotonic() - began > 0.25


def exactly(end: socket.socket, size: int) -> bytes:
    """Receive so many bytes, in however many pieces they come."""
    data = b""
    while len(data) < size and (piece := end.recv(size - len(data))):
        data += piece
    return data


@contextmanager
def relayed() -> Iterator[tuple[Between, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Yield a coordinator's socket, and a worker's in front of the relay, which have said hello."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for end in (router, dealer):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Between("relay", f"127.0.0.1:{port}") as relay:
            dealer.connect(f"tcp://127.0.0.1:{relay.port}")
            dealer.send(b"hello")
            yield relay, dealer, router


def test_messages_get_through_a_relay_as_they_are() -> None:
    with relayed() as (_, dealer, router):
        identity, hello = router.recv_multipart()
        assert hello == b"hello"
        frames = [b"head", b"x" * 100_000]
        router.send_multipart([identity, *frames])
        assert dealer.recv_multipart() == frames


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        ("drop w", [1, 2, 3]),
        ("repeat w 2", [0, 0, 1, 1, 2, 3]),
        ("swap w 1", [1, 0, 2, 3]),
        ("delay w 0.1 60", [0, 1, 2, 3]),
    ],
)
def test_a_relay_does_to_messages_what_it_is_told(fault: str, arrives: list[int]) -> None:
    with relayed() as (relay, dealer, router):
        identity, _ = router.recv_multipart()
        relay.say(fault)
        began = time.monotonic()
        for number in range(4):
            dealer.send(b"%d" % number)
        assert [int(router.recv_multipart()[1]) for _ in arrives] == arrives
        assert relay.expect("hit") == f" {fault.split()[0]} w"
        if fault.startswith("delay"):
            assert time.monotonic() - began > 0.1
        router.send_multipart([identity, b"done"])
        assert dealer.recv() == b"done"


def test_a_swapped_message_that_nothing_follows_comes_by_itself() -> None:
    with relayed() as (relay, dealer, router):
        router.recv_multipart()
        relay.say("swap w 1")
        dealer.send(b"last")
        assert router.recv_multipart()[1] == b"last"


def test_a_probe_of_the_port_costs_no_connection() -> None:
    with relayed() as (relay, dealer, router):
        identity, _ = router.recv_multipart()
        for number in range(20):
            with socket.create_connection(("127.0.0.1", relay.port), PATIENCE):
                pass
            router.send_multipart([identity, b"%d" % number])
            assert dealer.recv() == b"%d" % number


def test_last_words_get_through_and_leave_nothing_behind() -> None:
    with relayed() as (relay, _dealer, router):
        router.recv_multipart()
        before = relay.descriptors()
        for number in range(30):
            with router.context.socket(zmq.DEALER) as other:
                other.setsockopt(zmq.LINGER, int(PATIENCE * 1000))
                other.connect(f"tcp://127.0.0.1:{relay.port}")
                other.send(b"first")
                identity, said = router.recv_multipart()
                assert said == b"first"
                other.send(b"last %d" % number)
            assert router.recv_multipart() == [identity, b"last %d" % number]
        wait_until(lambda: relay.descriptors() <= before, "it has closed all that it opened")


def test_a_worker_that_freezes_behind_a_relay_is_found_out_and_told_as_any_other() -> None:
    with Daemon("--workers", "2:3", "--gather", "60", "--frozen-after", "1") as daemon, ExitStack() as stack:
        through = stack.enter_context(Between("relay", daemon.url.removeprefix("tcp://")))
        urls = daemon.url, f"tcp://127.0.0.1:{through.port}", daemon.url
        workers = [
            stack.enter_context(worker_program(url, "exchange_until_fewer", rank, 3, "tcp"))
            for rank, url in enumerate(urls)
        ]
        for worker in workers:
            worker.expect("exchanging")
        victim = workers.pop(1)
        for seconds in (0.2, 0.3):  # for so long it is not missed
            victim.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            victim.send_signal(signal.SIGCONT)
            before = daemon.group()["round"]
            wait_until(lambda before=before: daemon.group()["round"] > before + 5, "they go on")  # type: ignore[misc]
        victim.send_signal(signal.SIGSTOP)
        for survivor in workers:
            survivor.expect("fewer")
            survivor.expect("ok")
        victim.send_signal(signal.SIGCONT)
        _, kind, text = json.loads(victim.expect("error "))
        assert kind == "LeftOutError"
        assert text.endswith("nothing was heard of it for 1 s. It has to join again")


@pytest.mark.parametrize("gone", ["worker", "coordinator"])
def test_the_end_of_one_side_is_seen_at_the_other(gone: str) -> None:
    with relayed() as (_, dealer, router):
        router.recv_multipart()
        ending, staying = (dealer, router) if gone == "worker" else (router, dealer)
        with staying.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            monitor.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
            ending.close(0)
            assert monitor.recv_multipart()
            staying.disable_monitor()


def test_a_coordinator_that_is_back_is_reached_by_another_try() -> None:
    with relayed() as (relay, dealer, router):
        router.recv_multipart()
        context, address = router.context, router.getsockopt_string(zmq.LAST_ENDPOINT)
        for _ in range(3):
            with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                monitor.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
                router.unbind(address)
                router.close(0)
                assert monitor.recv_multipart()
                dealer.disable_monitor()
            dealer.close(0)
            router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            for end in (router, dealer):
                end.setsockopt(zmq.LINGER, 0)
                end.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
            wait_until(partial(binds, router, address), "the port is free")
            dealer.connect(f"tcp://127.0.0.1:{relay.port}")
            dealer.send(b"hello again")
            assert router.recv_multipart()[1] == b"hello again"
        router.close(0)
        dealer.close(0)


def binds(socket: zmq.Socket[bytes], address: str) -> bool:
    try:
        socket.bind(address)
    except zmq.ZMQError:
        return False
    return True
