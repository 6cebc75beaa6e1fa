"""Clients of a server that is no coordinator: an error within their timeout, in little memory, and no traceback."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq

from gradserver import cli
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Status
from gradserver.protocol.wire import encode
from gradserver.snapshot import snapshot_in
from tests.cluster import STARTED_WITHIN, Program
from tests.strangers import impostor

READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PART = b"\x03" + struct.pack(">Q", MIB) + bytes(MIB)
ENOUGH = 600
"""Parts of a message after which the server gives up."""


@contextmanager
def endless() -> Iterator[tuple[str, list[int]]]:
    """Run a server that sends each client a message that does not end, and count its parts."""
    sent: list[int] = []
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while not over.is_set():
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
                    sent.append(0)
                    while sent[-1] < ENOUGH and not over.is_set():
                        connection.sendall(PART)
                        sent[-1] += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", sent
        over.set()
        with suppress(OSError):
            socket.create_connection(listener.getsockname()).close()
    thread.join(10)


CLIENT = """
import resource, sys
import gradserver
from gradserver import cli
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    if sys.argv[1] == "connect":
        gradserver.connect(sys.argv[2], rank=0, world_size=2, timeout=8)
    elif sys.argv[1] == "serve":
        status = cli.main(["serve", "--join", sys.argv[2], "--bind", "tcp://127.0.0.1:0"])
    else:
        status = cli.main([sys.argv[1], sys.argv[2]])
    print("ended", status)
except gradserver.GradServerError as error:
    print("raised", error)
print("grew", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the bytes of a connection")
@pytest.mark.parametrize("what", ["status", "connect", "doctor", "serve"])
def test_a_message_without_an_end_takes_little_memory(what: str) -> None:
    with endless() as (url, sent), Program("-c", CLIENT, what, url) as client:
        client.end(STARTED_WITHIN)  # the doctor looks at torch and at kernels, too
        told = "\n".join([*client.output(), *client.complaints()])
        assert "a message without an end" in told
        grew = int(told.partition("grew ")[2].split()[0])
        assert grew < 300
        assert max(sent) < ENOUGH


# ── the status ────────────────────────────────────────────────────────────────────────────────────────

FORMS: list[bytes] = [
    *(b"[" * 100_000, b'{"a":' * 50_000, b"", b"\xff", b"null", b"[]", b"3", b'"x"', b"{}", b"9" * 5000),
    *(b'{"shard": 3}', b'{"shard": {"number": "x", "primary": 3}, "groups": {}}'),
]
RIGHT: dict[str, Any] = {
    "url": "tcp://127.0.0.1:1",
    "version": "0.1.0",
    "uptime": 1.5,
    "groups": {},
    "shards": [],
    "totals": {"came": 0, "joined": 0, "lost": 0, "rounds": 0},
}
WRONG: list[dict[str, Any]] = [
    {"uptime": "long"},
    {"uptime": 10**400},
    {"uptime": True},
    {"groups": []},
    {"groups": None},
    {"groups": {"g": {}}},
    {"groups": {"g": {"state": "active"}}},
    {"shards": [{}]},
    {"shards": [{"number": 1, "url": "tcp://127.0.0.1:1", "rate": None}] * 2000},
    {"kernels": 3},
    {"ledger": {"trouble": 1}},
    {"totals": {"came": "x"}},
]


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_status_of_a_wrong_form_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    forms = [*FORMS, *(json.dumps(RIGHT | wrong).encode() for wrong in WRONG)]
    forms += [json.dumps(RIGHT).replace("1.5", number).encode() for number in ("NaN", "Infinity", "1e999")]
    given = iter(forms if command == "status" else forms[:3])

    def answer(_: Sequence[bytes]) -> Sequence[bytes]:
        return [encode(Status()), next(given)]

    with impostor(zmq.ROUTER, answer) as url:
        for _ in forms if command == "status" else forms[:3]:
            assert cli.main([command, url]) != 0
            told = capsys.readouterr()
            assert "not as a gradserver coordinator: " in " ".join((told.err + told.out).split()) + " "


def test_a_status_of_the_right_form_is_taken() -> None:
    assert snapshot_in(json.dumps(RIGHT).encode()) == RIGHT
    with pytest.raises(MalformedMessageError, match=r"the status\.groups\.g has no 'state'"):
        snapshot_in(json.dumps(RIGHT | {"groups": {"g": {}}}).encode())


def test_shards_that_never_answer_are_asked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        there = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        shards = [{"number": number, "url": there, "rate": None} for number in range(1, 32)]
        own = {"number": 0, "url": "", "rate": None}

        def answer(_: Sequence[bytes]) -> Sequence[bytes]:
            return [encode(Status()), json.dumps(RIGHT | {"shards": [own, *shards]}).encode()]

        with impostor(zmq.ROUTER, answer) as url:
            program = Program("-m", "gradserver", "status", url)
            with program:
                assert program.end(40) == 0
                shown = "\n".join(program.output())
    assert shown.count("unreachable") == 31
    assert "Traceback" not in capsys.readouterr().err
