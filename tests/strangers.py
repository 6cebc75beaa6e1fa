"""Peers that are no gradserver: they speak ZeroMQ or plain TCP, and say what a test makes them say."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import zmq

from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import BePresent, Failure, Message, Ping
from gradserver.protocol.transport.numbers import split
from gradserver.protocol.url import parse_url
from gradserver.protocol.wire import decode, encode
from tests.cluster import PATIENCE, Task


class Stranger:
    """A ZeroMQ socket that is connected to a coordinator and sends whatever frames it likes."""

    def __init__(self, url: str, kind: int = zmq.DEALER) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(url)
        self._next: Message = Ping()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(self, message: Message, *payloads: bytes) -> None:
        self.say(encode(message), *payloads)

    def hear(self) -> Message:
        """Return the next message that is neither a Ping nor a BePresent."""
        while not self.has_heard():
            assert self._socket.poll(int(PATIENCE * 1000)), "nothing came"
        message, self._next = self._next, Ping()
        return message

    def has_heard(self) -> bool:
        """Return whether such a message has come."""
        while isinstance(self._next, Ping | BePresent) and self._socket.poll(0):
            header, *payloads = self._socket.recv_multipart()
            self._next, _ = decode([split(header)[1], *payloads])
        return not isinstance(self._next, Ping | BePresent)

    def error(self) -> GradServerError:
        """Return the error that the next message carries."""
        message = self.hear()
        assert isinstance(message, Failure), message
        return message.exception()

    def is_cut_off(self, timeout: float = PATIENCE) -> bool:
        """Return whether the other side closes the connection."""
        return bool(self._monitor.poll(int(timeout * 1000)))


def say_plainly(url: str, data: bytes) -> None:
    """Write bytes to a coordinator's port without any protocol, and end when it has closed or they are sent."""
    host, port = parse_url(url)
    with socket.create_connection((host, port), timeout=PATIENCE) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(0.2)
            while connection.recv(4096):
                pass
        except OSError:  # cut off, or nothing more is said
            pass


Answer = Callable[[Sequence[bytes]], Sequence[bytes]]


@contextmanager
def impostor(kind: int, answer: Answer | None = None) -> Iterator[str]:
    """Run a ZeroMQ socket of some kind that listens at the URL given. A ROUTER may answer every message."""
    context = zmq.Context()
    listener = context.socket(kind)
    listener.setsockopt(zmq.LINGER, 0)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    ended: list[bool] = []

    def serve() -> None:
        while not ended:
            if listener.poll(5, zmq.POLLIN) and answer is not None:
                identity, header, *payloads = listener.recv_multipart()
                listener.send_multipart([identity, *answer([bytes(split(header)[1]), *payloads])])

    task = Task(serve) if answer is not None else None
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        ended.append(True)
        if task is not None:
            task.result()
        listener.close()
        context.term()


@contextmanager
def plain_server(reply: bytes = b"") -> Iterator[str]:
    """Run a TCP server that answers every connection with ``reply``, as an HTTP server would, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.01)
        ended: list[bool] = []
        kept: list[socket.socket] = []

        def serve() -> None:
            while not ended:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                if reply:
                    with connection:
                        connection.settimeout(0.2)
                        try:
                            connection.recv(4096)
                            connection.sendall(reply)
                        except OSError:
                            pass
                else:
                    kept.append(connection)

        task = Task(serve)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.append(True)
            task.result()
            for connection in kept:
                connection.close()


@contextmanager
def tunnel(target: str) -> Iterator[str]:
    """Run a TCP relay, as `ssh -L` and `kubectl port-forward` are: it accepts, and closes if its target does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended: list[bool] = []
        passing: list[Task[None]] = []
        ends: list[socket.socket] = []

        def passes(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            while True:
                near, _ = listener.accept()
                if ended:
                    near.close()
                    return
                try:
                    far = socket.create_connection(parse_url(target), timeout=PATIENCE)
                except OSError:
                    near.close()
                    continue
                ends.extend((near, far))
                passing.extend((Task(passes, near, far), Task(passes, far, near)))

        task = Task(serve)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.append(True)
            socket.create_connection(listener.getsockname()).close()
            task.result()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for one in passing:
                one.result()
            for end in ends:
                end.close()
