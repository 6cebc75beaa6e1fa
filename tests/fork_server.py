"""Programs that begin with their imports done, as copies of a process that has done them once.

A short program spends most of its time on imports: 0.3 s of a processor for numpy and ZeroMQ, 2 s for torch. Compiled
kernels take another 0.5 s. A fork server does all that once, and forks for each program. That is a process like any
other, with its own memory, signals, descriptors and end. Tests of what a program loads, or of its time, start it in the
usual way. So do those with another choice of kernels.

To take torch to pieces at the end takes 0.4 s of a processor, eight times the rest of a short program. A program that
has ended well may leave that out.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from gradserver.protocol.compiled import loader

ROOT = Path(__file__).resolve().parent.parent
LOADED = {
    "numpy": ("gradserver.cli", "gradserver.daemon", "gradserver.ledger.state", "gradserver.worker.connect"),
    "torch": (
        "gradserver.cli",
        "gradserver.local",
        "gradserver.torch.creating",
        "gradserver.worker.connect",
        "gradserver.worker.job.job",
        "tests.without_compiler.sitecustomize",
        "torch",
        "torch.utils.data",
    ),
}
"""The imports of each fork server, and what these import."""
KERNELS = os.environ.get(loader.VARIABLE, loader.AUTO)
"""The kernels of each fork server: those that the tests are run with."""

# ── as tests use it ───────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Fate:
    """The exit status of a process, when it has ended."""

    pid: int
    status: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Child:
    """A process that a fork server has made. It is used as a `subprocess.Popen` with pipes."""

    def __init__(self, fate: Fate, ends: Sequence[int]) -> None:
        self.pid = fate.pid
        self.stdin: IO[str] = open(ends[0], "w", buffering=1)  # noqa: SIM115 (its owner closes it)
        self.stdout: IO[str] = open(ends[1], newline="\n")  # noqa: SIM115
        self.stderr: IO[str] = open(ends[2], newline="\n")  # noqa: SIM115
        self._fate = fate

    def poll(self) -> int | None:
        """Return the exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._fate.status

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Return the exit status."""
        if not self._fate.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self._fate.status is not None
        return self._fate.status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._fate.status is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process's end of a fork server, which has ``loaded`` one of `LOADED`."""

    def __init__(self, loaded: str) -> None:
        self._line, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-m", "tests.fork_server", loaded, str(there.fileno())]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), loader.VARIABLE: KERNELS}
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
        self._lock = threading.Lock()
        self._fates: dict[int, Fate] = {}
        self._born: Fate | None = None
        self._answered = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.end)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], ends_soon: bool) -> Child:
        """Start a process that does what ``python ARGUMENTS``, of a module or a script, would.

        If it ``ends_soon``, it does not take the interpreter to pieces when all has gone well.
        """
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = stdin[0], stdout[1], stderr[1]
        request = json.dumps([list(arguments), dict(environment), ends_soon]).encode()
        with self._lock:
            socket.send_fds(self._line, [request], theirs)
            for descriptor in theirs:
                os.close(descriptor)
            self._answered.acquire()
            assert self._born is not None, "the fork server has died"
            return Child(self._born, (stdin[1], stdout[0], stderr[0]))

    def _listen(self) -> None:
        while news := self._line.recv(4096):
            pid, status = json.loads(news)
            if status is None:
                self._born = self._fates[pid] = Fate(pid)
                self._answered.release()
            else:
                fate = self._fates.pop(pid)
                fate.status = status
                fate.ended.set()
        self._born = None
        self._answered.release()

    def end(self) -> None:
        """Close the connection: the fork server ends, and all that it has made with it."""
        self._line.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._line.close()


@cache
def fork_server(loaded: str) -> ForkServer:
    """Return this process's fork server."""
    return ForkServer(loaded)


# ── its process ───────────────────────────────────────────────────────────────────────────────────────


def serve(line: socket.socket) -> tuple[list[str], bool]:
    """Fork for every request. It returns in each child, with its arguments, and whether it ends soon."""
    heard, hears = os.pipe()
    os.set_blocking(hears, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the listening process has it too, and ends
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        selector.register(heard, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == heard:
                    os.read(heard, 4096)
                    _bury(line, children)
                    continue
                request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 3)
                if not request:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.close(heard)
                    os.close(hears)
                    line.close()
                    arguments, environment, ends_soon = json.loads(request)
                    _dress(environment, descriptors)
                    return list(arguments), ends_soon
                for descriptor in descriptors:
                    os.close(descriptor)
                children.add(pid)
                line.send(json.dumps([pid, None]).encode())


def _bury(line: socket.socket, children: set[int]) -> None:
    """Report the processes that have ended, and how."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.remove(pid)
            with contextlib.suppress(BrokenPipeError):
                line.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _dress(environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Give a child its own environment and descriptors."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)


def run(arguments: list[str]) -> None:
    """Run ``python ARGUMENTS``, of a module or a script."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _end_soon() -> None:
    """End a program that has ended well, but for the interpreter's parts."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve. In each child, run its program and end."""
    gc.disable()
    for name in LOADED[sys.argv[1]]:
        importlib.import_module(name)
    loader.settle(300)
    assert threading.active_count() == 1, "a fork has one thread, and may wait for locks of the others without an end"
    gc.freeze()  # no child looks for garbage in what is loaded, which would copy all of it
    gc.enable()
    arguments, ends_soon = serve(socket.socket(fileno=int(sys.argv[2])))
    try:
        run(arguments)
    except SystemExit as end:
        if end.code:
            raise
    if ends_soon:
        _end_soon()


if __name__ == "__main__":
    main()
