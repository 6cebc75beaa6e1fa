"""The launcher's end of one host: its agent, reached through pipes, or through the pipes of a remote shell."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from gradserver import __version__
from gradserver.protocol.harmless import harmless
from gradserver.tools.common.processes import STOP_SECONDS, inherited_environment
from gradserver.tools.launch import frames
from gradserver.tools.launch.failures import describe
from gradserver.tools.launch.frames import Decoder, Frame, FrameError, Kind, Outbox
from gradserver.tools.launch.hosts import Host, agent_command
from gradserver.tools.launch.places import Hello

_WORDS: Final = 12
_LONGEST_PREAMBLE: Final = 1 << 20


class StationError(Exception):
    """An agent that cannot be used."""


class Station:
    """One host of a run.

    Attributes:
        host: the host.
        hello: what its agent said of it; None until then.
        is_open: whether the agent may still send something.
        is_heard: whether it, or the remote shell, may still print something on standard error.
        outbox: frames to it.
        incoming: descriptor of its frames.
        errors: descriptor of the standard error.
    """

    def __init__(self, host: Host, rsh: Sequence[str], python: str, grace: float) -> None:
        self.host = host
        self.hello: Hello | None = None
        self.is_open = True
        self._words: deque[bytes] = deque(maxlen=_WORDS)
        self._decoder = Decoder()
        self._preamble: bytes | None = b""
        self._error_rest = b""
        command = self._command = agent_command(host, rsh, python, grace)
        try:
            self._process = subprocess.Popen(
                command,
                env=inherited_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # it outlives this process for as long as its workers take to end
            )
        except OSError as error:
            raise StationError(f"{command[0]!r} cannot be run: {error.strerror}. --rsh names it") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outbox = Outbox(self._process.stdin.fileno())
        self.incoming = self._process.stdout.fileno()
        self.errors = self._process.stderr.fileno()
        self.is_heard = True
        for descriptor in (self.incoming, self.errors):
            os.set_blocking(descriptor, False)

    def send(self, kind: Kind, **fields: Any) -> None:
        """Send a frame."""
        self.outbox.put(frames.encode(kind, fields))

    def receive(self) -> Iterator[Frame]:
        """Read what the agent has sent. StationError if it is no agent, or one of another version."""
        data = frames.read(self.incoming)
        if data == b"":
            self.is_open = False
        try:
            for frame in self._decoder.feed(self._behind_mark(data or b"")):
                if frame.kind is Kind.HELLO:
                    self._meet(frame)
                else:
                    yield frame
        except (FrameError, ValueError, KeyError, TypeError) as error:
            raise StationError(f"what answers there is not an agent of gradserver {__version__}: {error}") from None

    def listen(self) -> list[bytes]:
        """Read what the remote shell or the agent has printed. Return the whole lines."""
        data = frames.read(self.errors)
        if data == b"":
            self.is_heard = False
            data = b"\n" if self._error_rest else b""
        *lines, self._error_rest = (self._error_rest + (data or b"")).split(b"\n")
        lines = [line.rstrip(b"\r") for line in lines if line.strip()]
        self._words += lines
        return lines

    def _behind_mark(self, data: bytes) -> bytes:
        """Return the bytes behind the agent's mark. What the shell's start-up files print comes first."""
        if self._preamble is None:
            return data
        self._preamble += data
        before, mark, rest = self._preamble.partition(frames.MARK)
        if mark:
            self._preamble = None
            return rest
        if len(before) > _LONGEST_PREAMBLE:
            raise FrameError(f"it prints something else: {before[:40]!r}…")
        return b""

    def _meet(self, frame: Frame) -> None:
        fields = frame.fields()
        if fields["version"] != __version__:
            raise StationError(f"gradserver is {fields['version']} there and {__version__} here: install the same")
        self.hello = Hello.of(fields)

    def describe_end(self) -> str:
        """Describe how the agent, or the remote shell, has ended, by its last words if it was never met."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.is_heard = self.is_heard and bool(self.listen())
        status = self._process.returncode
        fate = "closed its connection" if status is None else f"ended ({describe(status)})"
        if self.host.is_here or self.hello:
            return f"its agent {fate}"
        return f"the remote shell {fate}. It must work without a password: try `{self._command[0]} {self.host} true`"

    @property
    def has_ended(self) -> bool:
        """True if the agent, or the remote shell, has ended."""
        return self._process.poll() is not None

    def last_words(self) -> list[str]:
        """Return the last lines that the remote shell or the agent has printed on standard error."""
        return [harmless(line.decode("utf-8", "replace")) for line in self._words]

    @property
    def status(self) -> int:
        """Exit status of the agent or the remote shell; 1 if it says nothing."""
        return self._process.poll() or 1

    def finish(self) -> None:
        """Let the agent end what is left, and itself."""
        assert self._process.stdin is not None
        self.outbox.drop()
        with suppress(OSError):
            self._process.stdin.close()

    def give_up(self) -> None:
        """Hear nothing more of the agent."""
        self.is_open = self.is_heard = False

    def close(self, seconds: float) -> None:
        """Wait until the agent has ended, and kill it then. What it has started dies with it."""
        self.finish()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
