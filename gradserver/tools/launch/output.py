"""The workers' output as people see it: whole lines, with the worker's rank in front, and as it was in files."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradserver.protocol.harmless import one_line

_MOST_WAITING: Final = 1 << 20
"""Bytes that wait for a slow reader. Above it, workers wait too."""
_LONGEST: Final = 1 << 16
"""Bytes of a line above which it is shown in pieces."""
_SHOWN_SECONDS: Final = 2.0
"""Time between two sights of a line that has no end yet, such as a progress bar."""
_HURRIED_SECONDS: Final = 1.0
"""Time that a slow reader still gets when the user has asked twice to end."""
AS_IT_WAS: Final = "surrogateescape"
"""Handling of bytes in paths and arguments that the locale could not decode: they become what they were."""
_COLOURS: Final = ("36", "33", "32", "35", "34", "31")


class Sink:
    """Writer to standard output or standard error. A slow reader does not stop the caller.

    Args:
        descriptor: descriptor to write to.
        drained: descriptor of a pipe that gets a byte when a full sink has room again.
    """

    def __init__(self, descriptor: int, drained: int) -> None:
        self.descriptor = descriptor
        self.is_broken = False
        """True if the reader is gone, so that everything is dropped."""
        self._drained = drained
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="gradserver-output", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if so much waits that nothing should be added."""
        return self._size > _MOST_WAITING

    def put(self, data: bytes) -> None:
        """Write ``data``, in time."""
        with self._changed:
            if not self.is_broken:
                self._waiting.append(data)
                self._size += len(data)
                self._changed.notify_all()

    def discard(self) -> None:
        """Drop what waits, and all that comes."""
        with self._changed:
            self.is_broken = True
            self._waiting.clear()
            self._size = 0
            self._changed.notify_all()

    def close(self, seconds: float | None) -> None:
        """Write what waits, for ``seconds`` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self.is_broken:
            self._thread.join(seconds)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
            try:
                _write_all(self.descriptor, data)
            except OSError:  # it is not read any more
                self.discard()
            with self._changed:
                was_full = self.is_full
                self._size = max(0, self._size - len(data))
            if was_full or self.is_broken:
                with suppress(OSError):
                    os.write(self._drained, b".")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process has made the terminal so
            time.sleep(0.01)


class Lines:
    """Lines of one output of a worker, from pieces that end anywhere.

    A carriage return takes back what is in front of it, as on a terminal.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that are complete with ``data``."""
        if not self._rest:
            self._shown = now
        *lines, rest = (self._rest + data).split(b"\n")
        found = [_last_layer(line) for line in lines]
        if len(rest) > _LONGEST:
            whole = _whole_characters(rest)
            found.append(_last_layer(rest[:whole]))
            rest = rest[whole:]
        if lines:
            self._shown = now
        self._rest = _last_layer(rest) + b"\r" * rest.endswith(b"\r") if b"\r" in rest else rest
        return found

    def deadline(self) -> float | None:
        """Return when an unfinished line is to be shown."""
        return self._shown + _SHOWN_SECONDS if self._rest.rstrip(b"\r") else None

    def unfinished(self, now: float) -> list[bytes]:
        """Return the line that has been unfinished for long; what follows will be another line."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return []
        whole = _whole_characters(self._rest)
        found, self._rest, self._shown = self._rest[:whole], self._rest[whole:], now
        return [_last_layer(found)] if found.rstrip(b"\r") else []

    def end(self) -> list[bytes]:
        """Return what is left behind the last line end."""
        found, self._rest = self._rest, b""
        return [_last_layer(found)] if found.rstrip(b"\r") else []


def _last_layer(line: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns: the last layer."""
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line


def _whole_characters(data: bytes) -> int:
    """Return the length of ``data`` without the beginning of a UTF-8 character at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character, which says how long that is
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)


class Console:
    """Standard output and standard error of the launcher, each written by a thread of its own.

    Attributes:
        drained: descriptor that can be read when there is room again.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self.drained, drained = os.pipe()
        for descriptor in (self.drained, drained):
            os.set_blocking(descriptor, False)
        self._out = Sink(out, drained)
        same = os.path.sameopenfile(out, err)  # lines of both are to stay in order then
        self._err = self._out if same else Sink(err, drained)
        self._sinks = {1: self._out, 2: self._err}
        self._coloured = {stream: _has_colours(sink.descriptor) for stream, sink in self._sinks.items()}
        self._width = 1
        self._told_of_loss = False
        self._patience: float | None = None

    def begin(self, world_size: int) -> None:
        """Prepare for the output of so many workers."""
        self._width = len(str(world_size - 1))

    @property
    def is_full(self) -> bool:
        """True if workers are to wait until more of their output is read."""
        return any(sink.is_full for sink in self._sinks.values())

    def lines(self, rank: int, stream: int, lines: list[bytes]) -> None:
        """Write lines of a worker."""
        if lines:
            prefix = self._prefix(f"[{rank:{self._width}}]", rank, stream)
            self._sinks[stream].put(b"".join(b"%s %s\n" % (prefix, line) for line in lines))

    def host_line(self, host: str, line: bytes) -> None:
        """Write a line that was printed by a host's remote shell."""
        self._err.put(b"[%s] %s\n" % (host.encode(), line))

    def say(self, text: str) -> None:
        """Write a message of the launcher's own, which may have several lines."""
        lines = "\n".join(map(one_line, text.split("\n")))
        self._err.put(f"{self.emphasized('gradserver run:')} {lines}\n".encode(errors="backslashreplace"))

    def block(self, text: str) -> None:
        """Write lines as they are."""
        self._err.put(f"{text}\n".encode(errors="backslashreplace"))

    def emphasized(self, text: str) -> str:
        """Return ``text`` in bold, where that is possible."""
        return f"\x1b[1m{text}\x1b[0m" if self._coloured[2] else text

    def tell_of_loss(self) -> None:
        """Say once that the reader of standard output is gone."""
        if self._out.is_broken and self._err is not self._out and not self._told_of_loss:
            self._told_of_loss = True
            self.say("standard output is closed, so that what workers print there is lost. Training goes on")

    def give_up(self) -> None:
        """Drop what a reader does not take, now and at the end: the user is in a hurry."""
        self._patience = _HURRIED_SECONDS
        for sink in self._sinks.values():
            if sink.is_full:
                sink.discard()

    def close(self) -> None:
        """Write what waits."""
        for sink in self._sinks.values():
            sink.close(self._patience)

    def _prefix(self, text: str, rank: int, stream: int) -> bytes:
        coloured = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m" if self._coloured[stream] else text
        return coloured.encode()


def _has_colours(descriptor: int) -> bool:
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


class Logs:
    """Files with the workers' output, byte for byte: ``rank-N.log``. An earlier run's lines stay in front."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self.trouble: OSError | None = None
        """The first error of writing."""

    def begin(self, rank: int, title: str) -> None:
        """Write a title line: a worker starts, or starts again."""
        if self._folder is not None and rank not in self._files:
            path = self._folder / f"rank-{rank}.log"
            self._files[rank] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.write(rank, f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n".encode(errors=AS_IT_WAS))

    def write(self, rank: int, data: bytes) -> None:
        """Write what a worker has printed. An error does not stop the training."""
        if rank in self._files and self.trouble is None:
            try:
                _write_all(self._files[rank], data)
            except OSError as error:
                self.trouble = error

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
