"""Processes that begin with their imports done, as copies of a process that has done them once.

Importing torch takes a worker two seconds of a processor, and 12 to 36 s on a busy machine. A fork server imports it
once, starts no thread, and forks for each process. Each is then like one that `subprocess.Popen` has started: it has
its own memory, session, pipes, log and end, and takes signals by its id.

    run                                      fork server                             process
    ───────────────────────────────────────  ──────────────────────────────────────  ─────────────────────────────────
    `ForkServer`                             imports, says that it is ready
    `start`: arguments, descriptors          forks, says the id                      runs ``python ARGUMENTS``
                                             says how it has ended                   ends
    `close`, or the end of the run           kills all that still run, and ends      ends with the fork server

Each process has a pipe of its own, through which the fork server says its id and its end. A process of which the fork
server was lost counts as killed: the kernel ends it with its parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Final

from gradserver.tools.common.processes import RunError, Starter, before_exec, die_with_parent, uninterrupted

_READY: Final = b"ready"
_ENDS_SECONDS: Final = 5.0
_LARGEST_REQUEST: Final = 1 << 17
_LAST_WORDS: Final = 12
_DESCRIPTORS: Final = 4
"""Standard input, output and error of a process, and the pipe for its id and its end."""


class Forked:
    """A process that a fork server has made, with the methods of a `subprocess.Popen` with pipes."""

    def __init__(self, news: int, stdin: int, stdout: int) -> None:
        self._news = os.fdopen(news, "rb", buffering=0)
        self.returncode: int | None = None
        """The exit status, or minus the number of the signal that ended it; None as far as is known."""
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)
        self.pid = int(self._news.read(_NUMBER) or 0)
        if not self.pid:
            self._take_end()

    def poll(self) -> int | None:
        """Return the exit status, or None if it runs."""
        if self.returncode is None and select.select([self._news], [], [], 0)[0]:
            self._take_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Return the exit status."""
        if self.returncode is None and not select.select([self._news], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._take_end()

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _take_end(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._news.read(_NUMBER) or -signal.SIGKILL)
            self._news.close()
        return self.returncode


_NUMBER: Final = 12
"""Length of a number in a pipe: the id and the status are both there, if it ended at once."""


class ForkServer:
    """A run's end of a fork server that has imported ``modules``. Its output goes to the file ``log``."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._line, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, log.open("wb") as errors, uninterrupted() as mask:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *modules],
                stdin=there.fileno(),
                stdout=errors,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=partial(before_exec, os.getpid(), mask, signal.SIGKILL),
            )

    def await_ready(self, seconds: float) -> None:
        """Wait until it has imported everything.

        Raises:
            RunError: it has not, within ``seconds``, or has ended.
        """
        if not select.select([self._line], [], [], seconds)[0]:
            raise RunError(f"the fork server has not imported everything after {seconds:g} s; its log is {self._log}")
        if self._line.recv(len(_READY)) != _READY:
            raise self._lost()

    def start(self, arguments: Sequence[str], errors: int, last: signal.Signals) -> Forked:
        """Start a process that does what ``python ARGUMENTS``, of a module, would.

        Args:
            arguments: ``-m``, the module, and its arguments.
            errors: descriptor of the file for its standard error.
            last: signal that it gets when the fork server ends.
        """
        stdin, stdout, news = os.pipe(), os.pipe(), os.pipe()
        theirs = stdin[0], stdout[1], errors, news[1]
        try:
            socket.send_fds(self._line, [json.dumps([int(last), *arguments]).encode()], theirs)
        except OSError:  # it has ended, or was closed
            pass
        finally:
            for descriptor in (stdin[0], stdout[1], news[1]):
                os.close(descriptor)
        made = Forked(news[0], stdin[1], stdout[0])
        if not made.pid:
            made.stdin.close()
            made.stdout.close()
            raise self._lost()
        return made

    def _lost(self) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_SECONDS)  # it says why, and ends
        words = self._log.read_text("utf-8", "replace").splitlines()[-_LAST_WORDS:]
        return RunError("\n".join(["the fork server has ended:", *(f"  | {line}" for line in words)]))

    def close(self) -> None:
        """End it, and all processes that it has made."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._line.close()


class Copies:
    """Processes that begin with ``modules`` imported: copies of one that has imported them, where that is possible.

    The first use starts the fork server.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        # OpenBLAS starts threads when numpy is imported, and a process with threads cannot be forked.
        self._modules, self._environment = modules, {**environment, "OPENBLAS_NUM_THREADS": "1"}
        self._log = log
        self._forks: ForkServer | None = None
        self._can_fork = True

    def starter(self, seconds: float) -> Starter | None:
        """Return what starts such a process, once all is imported.

        If that takes more than ``seconds``, fails, or starts threads, it is None: each process imports by itself.
        """
        if self._forks is None:
            self._forks = ForkServer(self._modules, self._environment, self._log)
            try:
                self._forks.await_ready(seconds)
            except RunError:
                self._can_fork = False
        return self._forks.start if self._can_fork else None

    def close(self) -> None:
        """End the fork server, and all processes that it has made."""
        if self._forks is not None:
            self._forks.close()


# ── the fork server itself ────────────────────────────────────────────────────────────────────────────


def _serve(line: socket.socket) -> list[str]:
    """Fork for each request, until the line closes. Return in each process, with its arguments."""
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    _report(key.fd, *running.pop(key.fd))
                    continue
                request, descriptors, _, _ = socket.recv_fds(line, _LARGEST_REQUEST, _DESCRIPTORS)
                if not request:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                server = os.getpid()
                if (pid := os.fork()) == 0:
                    for handle, (_, other) in running.items():
                        os.close(handle)
                        os.close(other)
                    line.detach()  # standard input is another one from here on
                    last, *arguments = json.loads(request)
                    _dress(server, descriptors, last)
                    return list(arguments)
                *given, news = descriptors
                for descriptor in given:
                    os.close(descriptor)
                _say(news, pid)
                handle = os.pidfd_open(pid)
                running[handle] = pid, news
                selector.register(handle, selectors.EVENT_READ)


def _report(handle: int, pid: int, news: int) -> None:
    """Say how a process has ended. Only then is its id free for another one."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    _say(news, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    os.waitpid(pid, 0)
    os.close(news)
    os.close(handle)


def _say(news: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the run has ended, or does not want to know
        os.write(news, f"{number:{_NUMBER}d}".encode())


def _dress(server: int, descriptors: Sequence[int], last: int) -> None:
    """Give a process its session, the signal at the fork server's end, and its descriptors."""
    os.setsid()
    die_with_parent(server, last)
    *standard, news = descriptors
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(news)


def _run(arguments: Sequence[str]) -> None:
    """Run ``python -m MODULE ARGUMENTS``."""
    option, module, *rest = arguments
    if option != "-m":
        raise ValueError(f"a fork server runs modules, with -m; it was asked for {option!r}")
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Import, and serve. In each process that it forks, run its program, and end as any program does."""
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # no process looks for garbage in what is imported, which would copy all of it
    gc.enable()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"importing {', '.join(sys.argv[1:])} has started {threads - 1} threads: it cannot be forked")
    line = socket.socket(fileno=sys.stdin.fileno())
    line.send(_READY)
    _run(_serve(line))


if __name__ == "__main__":
    main()
