"""Frames between the launcher and an agent: a kind, a length and a body, over a pipe that blocks neither side."""

from __future__ import annotations

import json
import math
import os
import select
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

MARK: Final = b"\0gradserver agent\0"
"""Bytes that an agent writes first. What comes before them was printed by the remote shell's start-up files."""
CHUNK: Final = 1 << 16
"""Bytes that are read at once."""
_MAX_BODY: Final = 1 << 24
_HEADER: Final = struct.Struct("!BI")
_ORIGIN: Final = struct.Struct("!IB")


class Kind(IntEnum):
    """Kind of a frame. The first two go to the agent, the others come from it."""

    START = 1
    """Start a process."""
    SIGNAL = 2
    """Send a signal to processes, or to all."""
    HELLO = 3
    """Say what the host has."""
    OUTPUT = 4
    """Output of a process."""
    STARTED = 5
    """A process has started, or could not be started."""
    ENDED = 6
    """A process has ended, and all of its output was sent."""


_KINDS: Final = frozenset(map(int, Kind))


class FrameError(Exception):
    """Bytes that are no frame."""


class Frame(NamedTuple):
    """One frame."""

    kind: Kind
    body: bytes

    def fields(self) -> dict[str, Any]:
        """Decode the body of a frame that is no output."""
        decoded = json.loads(self.body)
        if not isinstance(decoded, dict):
            raise FrameError(f"a frame {self.kind.name} has no fields")
        return decoded

    def output(self) -> tuple[int, int, bytes]:
        """Decode output: the number of the process, its stream (1 or 2), and the bytes."""
        number, stream = _ORIGIN.unpack_from(self.body)
        return number, stream, self.body[_ORIGIN.size :]


def encode(kind: Kind, fields: Mapping[str, Any]) -> bytes:
    """Encode a frame with fields."""
    body = json.dumps(fields).encode()
    return _HEADER.pack(kind, len(body)) + body


def encode_output(number: int, stream: int, data: bytes) -> bytes:
    """Encode a frame with output of a process."""
    return _HEADER.pack(Kind.OUTPUT, _ORIGIN.size + len(data)) + _ORIGIN.pack(number, stream) + data


class Decoder:
    """Decoder of frames that arrive in pieces."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that are complete with ``data``. FrameError if there is something else."""
        self._unread += data
        while len(self._unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread)
            if kind not in _KINDS or length > _MAX_BODY:
                raise FrameError(f"expected a frame, and got {bytes(self._unread[:40])!r}")
            end = _HEADER.size + length
            if len(self._unread) < end:
                return
            frame = Frame(Kind(kind), bytes(self._unread[_HEADER.size : end]))
            del self._unread[:end]
            yield frame


class Outbox:
    """Bytes that wait until a pipe takes them.

    Attributes:
        size: number of bytes that wait.
        is_broken: whether the reader is gone. All bytes are dropped then.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.size = 0
        self.is_broken = False
        self._waiting: deque[bytes] = deque()

    def put(self, data: bytes) -> None:
        """Write ``data``, now or later."""
        if not self.is_broken:
            self._waiting.append(data)
            self.size += len(data)
            self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._waiting:
                data = self._waiting[0]
                written = os.write(self.descriptor, data)
                self.size -= written
                if written == len(data):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = data[written:]
        except BlockingIOError:
            pass
        except OSError:
            self.drop()

    def drop(self) -> None:
        """Drop all bytes, now and later."""
        self.is_broken = True
        self._waiting.clear()
        self.size = 0


def read(descriptor: int) -> bytes | None:
    """Read what there is; empty at the end, None if there is nothing now."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # a terminal or a socket that was closed
        return b""


def wait(reading: Iterable[int], writing: Iterable[int], seconds: float | None) -> tuple[set[int], set[int]]:
    """Wait for descriptors. Return those that can be read, and those that can be written."""
    wishes = dict.fromkeys(reading, select.POLLIN)
    for descriptor in writing:
        wishes[descriptor] = wishes.get(descriptor, 0) | select.POLLOUT
    poller = select.poll()
    for descriptor, wish in wishes.items():
        poller.register(descriptor, wish)
    events = poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
    ended = select.POLLHUP | select.POLLERR | select.POLLNVAL
    readable = {one for one, event in events if event & (select.POLLIN | ended) and wishes[one] & select.POLLIN}
    writable = {one for one, event in events if event & (select.POLLOUT | ended) and wishes[one] & select.POLLOUT}
    return readable, writable
