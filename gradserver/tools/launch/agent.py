"""The agent of a host: ``python -m gradserver.tools.launch.agent SECONDS``, started by the launcher.

It starts processes, sends their output and their end to the launcher, and passes signals on to them. When its standard
input ends, the launcher has gone: it ends all processes, and kills them after SECONDS.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from types import FrameType
from typing import Any, Final

from gradserver import __version__
from gradserver.tools.common.processes import available_cores
from gradserver.tools.launch import frames
from gradserver.tools.launch.descendants import adopt, descendants, reap
from gradserver.tools.launch.devices import find_devices
from gradserver.tools.launch.frames import Decoder, Kind, Outbox
from gradserver.tools.launch.process import CannotStartError, Process, send_to

_MOST_WAITING: Final = 1 << 20
"""Bytes that wait for the launcher. Above it, processes are not read: they wait too."""
_LAST_READ: Final = 1 << 18
"""Bytes that are read of a process after its end. A pipe holds no more; its children may write on and on."""
_KILLING_SECONDS: Final = 5.0
"""Time after which a killed process is left behind: the kernel does not let go of it."""
_ASKING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


class Agent:
    """Agent between the launcher, at two descriptors, and the processes of this host.

    Args:
        incoming: descriptor of the launcher's frames.
        outgoing: descriptor of the frames to it.
        grace: seconds from a request to end until processes are killed.
    """

    def __init__(self, incoming: int, outgoing: int, grace: float) -> None:
        self._incoming, self._grace = incoming, grace
        self._outbox = Outbox(outgoing)
        self._decoder = Decoder()
        self._processes: dict[int, Process] = {}
        """All processes with output to come, by their number."""
        self._kill_at: float | None = None
        """Time at which everything is killed. The agent ends then, or before if nothing is left."""
        self._leftovers: dict[int, float] = {}
        """Groups of processes that have ended, with children that live on, and when these are killed."""
        self._asked: int | None = None
        """Signal that asked the processes to end."""
        self._port = _reserve_port()
        os.set_blocking(incoming, False)
        self._wakeup, waker = os.pipe()
        for descriptor in (self._wakeup, waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _wake)

    def run(self) -> None:
        """Serve until the launcher is gone, and then until no process is left."""
        with closing(self._port):
            self._serve()

    def _serve(self) -> None:
        self._outbox.put(frames.MARK)
        self._send(Kind.HELLO, **_hello(), port=self._port.getsockname()[1])
        while not self._is_over():
            reading = [self._wakeup] if self._is_ending else [self._wakeup, self._incoming]
            if self._outbox.size < _MOST_WAITING:
                reading += [descriptor for one in self._processes.values() for descriptor in one.streams]
            writing = [self._outbox.descriptor] if self._outbox.size else []
            readable, writable = frames.wait(reading, writing, self._patience())
            if writable:
                self._outbox.flush()
            self._read(readable)
            self._reap()
            self._kill_overdue()

    @property
    def _is_ending(self) -> bool:
        return self._kill_at is not None

    def _is_over(self) -> bool:
        if self._kill_at is None:
            return False
        if time.monotonic() > self._kill_at + _KILLING_SECONDS:
            return True
        return not self._processes and not self._outbox.size and not descendants()

    def _patience(self) -> float | None:
        """Return how long the agent may sleep. A descendant that is no child of it ends unnoticed, but for this."""
        deadlines = list(self._leftovers.values())
        if self._kill_at is not None:
            deadlines += [self._kill_at if self._kill_at > time.monotonic() else self._kill_at + _KILLING_SECONDS]
        return min(deadlines) - time.monotonic() if deadlines else None

    # ── the launcher ──────────────────────────────────────────────────────────────────────────────────

    def _read(self, readable: set[int]) -> None:
        if self._wakeup in readable:
            numbers = frames.read(self._wakeup) or b""
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self._finish(signal.SIGTERM)
        if self._incoming in readable:
            self._take(frames.read(self._incoming))
        for process in list(self._processes.values()):
            for descriptor in readable.intersection(process.streams):
                self._pass_on(process, descriptor)

    def _take(self, data: bytes | None) -> None:
        if data == b"":  # the launcher is gone, and reads nothing any more
            self._finish(signal.SIGTERM)
        for frame in self._decoder.feed(data or b""):
            (self._start if frame.kind is Kind.START else self._signal)(frame.fields())

    def _send(self, kind: Kind, **fields: Any) -> None:
        self._outbox.put(frames.encode(kind, fields))

    def _start(self, fields: Mapping[str, Any]) -> None:
        number = int(fields["number"])
        if self._is_ending:
            return
        try:
            command = [*[sys.executable] * fields["python"], *fields["command"]]
            process = Process(number, command, _environment(fields["environment"]), fields["folder"])
        except CannotStartError as error:
            self._send(Kind.STARTED, number=number, error=str(error), status=error.status)
            return
        self._processes[number] = process
        self._send(Kind.STARTED, number=number, pid=process.pid)

    def _signal(self, fields: Mapping[str, Any]) -> None:
        number = int(fields["signal"])
        if number in _ASKING or number == signal.SIGKILL:
            self._asked = number
        if number == signal.SIGKILL:
            _kill_all()
            return
        for process in self._processes.values():
            process.send(number)

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────

    def _pass_on(self, process: Process, descriptor: int) -> bool:
        """Read output of a process, and send it. False if there is none now."""
        data = frames.read(descriptor)
        if data:
            self._outbox.put(frames.encode_output(process.number, process.streams[descriptor], data))
        elif data == b"":
            process.close(descriptor)
            self._forget(process)
        return bool(data)

    def _forget(self, process: Process) -> None:
        if process.status is not None and not process.streams:
            self._processes.pop(process.number, None)

    def _reap(self) -> None:
        """Report the processes that have ended, behind their output. Orphans that came to this process are buried."""
        for process in reap({one.pid: one for one in self._processes.values() if one.status is None}):
            for descriptor in list(process.streams):
                left = _LAST_READ
                while left > 0 and self._pass_on(process, descriptor):
                    left -= frames.CHUNK
            self._send(Kind.ENDED, number=process.number, status=process.status)
            self._end_leftovers(process)
            self._forget(process)

    def _end_leftovers(self, process: Process) -> None:
        """End the children of a process that has ended: as it was asked to end, or at once if it failed."""
        if process.status and self._asked is None:
            process.send_group(signal.SIGKILL)
        elif process.send_group(self._asked or signal.SIGTERM):
            self._leftovers[process.pid] = time.monotonic() + self._grace

    def _finish(self, number: int) -> None:
        """End everything."""
        if self._is_ending:
            return
        self._asked, self._kill_at = number, time.monotonic() + self._grace
        for pid in descendants():
            send_to(pid, number)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for pid, deadline in list(self._leftovers.items()):
            if deadline <= now:
                del self._leftovers[pid]
                send_to(-pid, signal.SIGKILL)
        if self._kill_at is not None and self._kill_at <= now:
            _kill_all()


def _hello() -> dict[str, Any]:
    """Describe this host: what the launcher needs to know before it starts workers here."""
    return {
        "version": __version__,
        "host": socket.gethostname(),
        "address": (os.environ.get("SSH_CONNECTION", "").split() or [""] * 3)[2:3][0],
        "devices": find_devices(),
        "cores": available_cores(),
    }


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with ``changes``; None removes a variable."""
    changed = {**os.environ, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def _reserve_port() -> socket.socket:
    """Reserve a port of this host for rank 0's rendezvous: no process gets it that asks for any free port.

    Rank 0 can bind it as well, since nothing listens there yet. So can any other process that asks for this very port,
    also one of another account, until rank 0 listens. torchrun's port is not safer. Workers that exchange by way of
    gradserver alone do not use it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _kill_all() -> None:
    for pid in descendants():
        send_to(pid, signal.SIGKILL)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal: the descriptor that it writes to ends the wait."""


def main() -> None:
    """Run the agent between standard input and output."""
    outgoing = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed by accident must not get between frames
    adopt()
    Agent(sys.stdin.fileno(), outgoing, float(sys.argv[1])).run()


if __name__ == "__main__":
    main()
