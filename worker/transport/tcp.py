"""A worker's end of the tcp channel: a ZeroMQ DEALER socket for each data shard, shared by the threads that need it.

A small tensor should be two hops of the network and none between threads. So a thread sends by itself, and a thread
that waits for a result reads by itself: it becomes the *reader*, if there is none. The channel's own thread reads only
while results are due for which no thread waits (`TcpChannel.watch`).

Sockets are not safe to share, so every call on one is made under a lock. Their file descriptors are edge-triggered, and
any call can swallow the edge. Therefore a reader first takes all messages and then waits. A sender checks whether its
call has swallowed an edge, and then wakes the reader.

With processes of the same host messages pass through local sockets (`.local`), which signal as long as there is
something to take. ZeroMQ's connections stay, and show which processes are alive.

One reader reads all sockets. When one connection is lost, all are: no round is complete without each shard.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Lock, Receiver
from gradserver.protocol.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectionLostError,
    GradServerError,
    ProtocolError,
)
from gradserver.protocol.messages import (
    BePresent,
    Failure,
    MemoryAt,
    Message,
    Ping,
    Place,
    Probe,
    Probed,
    Scope,
    ShareMemory,
    Status,
)
from gradserver.protocol.transport.branches import MARK, branch_of, on_branch
from gradserver.protocol.transport.dealer import PING_SECONDS
from gradserver.protocol.transport.reach import wait_for_listener
from gradserver.protocol.transport.under_way import LOOK_SECONDS
from gradserver.protocol.transport.wakeup import Wakeup
from gradserver.protocol.transport.zeromq import EVENTS, NOBLOCK, NOBLOCK_MORE, POLLIN, ZERO_COPY_BYTES
from gradserver.protocol.url import beside
from gradserver.protocol.wire import decode, encode
from gradserver.worker.interrupts import admits, uninterrupted, watch
from gradserver.worker.transport.beacon import Beacon
from gradserver.worker.transport.branches import Branch
from gradserver.worker.transport.line import Line
from gradserver.worker.transport.local import LocalLine
from gradserver.worker.transport.shared_memory import SharedMemory

log = logging.getLogger("gradserver")

_LOST: Final = ConnectionLostError.__name__
_PING: Final = Ping()
_MARK: Final = bytes([MARK])


class TcpChannel:
    """Connects to a coordinator.

    Args:
        url: ``tcp://HOST:PORT``.
        timeout: seconds to keep trying while nothing listens there.

    Raises:
        InvalidArgumentError: ``url`` is no URL.
        CoordinatorUnreachableError: nothing listened there in time.
    """

    def __init__(self, url: str, timeout: float) -> None:
        address, _, self.on_this_host = wait_for_listener(url, timeout)
        self._context = zmq.Context()
        self._lines = [Line(self._context, url, address, 0)]
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._closing = False
        """True once nothing is sent or received any more."""
        self._broke: GradServerError | None = None
        """The loss that ended the connection. A thread that sends meanwhile may tell of it first."""
        self._closed = False
        self._wakeup = Wakeup()
        self._wake = self._wakeup.wake
        self._poller = select.poll()
        self._happened: list[tuple[int, int]] = []
        """Events of the poller that are not handled yet."""
        self._wake_fd = self._wakeup.descriptor
        self._poller.register(self._wake_fd, select.POLLIN)
        self._monitors: dict[int, Line] = {}
        """Lines by their monitors' descriptors."""
        self._locals: dict[int, Line] = {}
        """Lines by their local sockets' descriptors."""
        self._edgy: tuple[Line, ...] = tuple(self._lines)
        """Lines with messages that must be taken before a wait."""
        self._listen(self._lines[0])
        self.heard = False
        """True once a message has come that a coordinator or a shard would send."""
        self._ask_at = time.monotonic() + PING_SECONDS
        self._look_at = 0.0
        self._watches: dict[int, Callable[[], bool]] = {}
        """Conditions until which is read, by branch. 0 is this connection's own."""
        self._branches: dict[int, Branch] = {}
        self._branch_numbers = count(1)
        self._bystanders = 0
        """Number of threads that wait while another one reads."""
        self._watched = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._watch, name="gradserver-tcp", daemon=True)
        self._memory: SharedMemory | None = None
        self._answer: MemoryAt | Probed | None = None
        self._asking: threading.Lock | None = None
        """Lock of the thread that asks something of the connection. Released when that is known, or never will be."""

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that come in to ``receiver``, in the thread that reads."""
        self._lines[0].receiver = receiver
        if not self._thread.is_alive():
            self._thread.start()

    @property
    def url(self) -> str:
        """URL of the coordinator."""
        return self._lines[0].url

    def add(self, url: str, receiver: Receiver, timeout: float) -> None:
        """Connect to one more data shard, and hand its messages to ``receiver``.

        Raises:
            CoordinatorUnreachableError: nothing listened there in time.
            ClosedError: this connection was closed meanwhile.
        """
        url = beside(url, self._lines[0].url)
        what = f"data shard of {self._lines[0].url}"
        address, _, _ = wait_for_listener(url, timeout, what, lambda: not self._closing)
        with self._lock:
            if self._closing:
                raise ClosedError("this worker is closed")
            line = Line(self._context, url, address, len(self._lines))
            line.receiver = receiver
            self._lines.append(line)
            self._edgy = tuple(self._lines)
            self._listen(line)
        self._wake()

    def reaches(self, shard: int) -> bool:
        """Return true if there is a connection to ``shard``: they are made one after the other."""
        return shard < len(self._lines)

    def _listen(self, line: Line) -> None:
        self._monitors[line.monitor_fd] = line
        for descriptor in (line.socket_fd, line.monitor_fd):
            self._poller.register(descriptor, select.POLLIN)

    # ── branches ──────────────────────────────────────────────────────────────────────────────────────

    def branch(self) -> Branch:
        """Return a new branch of this connection, for a sub-group."""
        number = next(self._branch_numbers)
        branch = self._branches[number] = Branch(self, number)
        return branch

    def drop(self, branch: int) -> None:
        """Take nothing from this branch any more."""
        self._branches.pop(branch, None)
        self._watches.pop(branch, None)

    def line_to(self, url: str) -> int:
        """Return the number of the connection to the data shard at ``url``. ConnectionLostError if there is none."""
        url = beside(url, self._lines[0].url)
        for line in self._lines:
            if line.url == url:
                return line.number
        raise ConnectionLostError(f"this worker has no connection to the data shard at {url}")

    # ── what shows that this process runs ─────────────────────────────────────────────────────────────

    def settle(self, timeout: float) -> None:
        """Wait until all shards would notice if this process froze, ``timeout`` seconds at most."""
        until = time.monotonic() + timeout
        for line in self._lines:
            if line.beacon is not None:
                line.beacon.wait(max(until - time.monotonic(), 0.0))

    def detach_beacon(self) -> Beacon | None:
        """Return what shows the coordinator that this process runs, to be kept beyond this connection."""
        beacon, self._lines[0].beacon = self._lines[0].beacon, None
        return beacon

    def put_out_beacon(self) -> None:
        """Show no more that this process runs: it is out."""
        self._lines[0].put_out_beacon()

    def attach_beacon(self, beacon: Beacon | None) -> None:
        """Take over the beacon of an earlier connection."""
        self._lines[0].beacon = beacon

    # ── memory that the coordinator sees too ──────────────────────────────────────────────────────────

    def share_memory(self, timeout: float, durable: bool = False) -> None:
        """Share memory from now on with the coordinator and all data shards that run on this host.

        ``durable`` memory can be shared again, with another coordinator. Then `empty` is for contributions, which the
        coordinator cannot write to, and `region` for results.

        Raises:
            BackendUnavailableError: it cannot be shared. Everything goes through the connection then.
        """
        places = [self._ask_for_memory(line.number, timeout) for line in self._lines]
        level = logging.INFO if self.on_this_host else logging.DEBUG
        self._shares(SharedMemory(*places[0], timeout, level, places[1:], durable), places, timeout)

    def share_again(self, memory: SharedMemory, timeout: float) -> None:
        """Share memory that was shared through another connection. Errors as of `share_memory`."""
        places = [self._ask_for_memory(line.number, timeout) for line in self._lines]
        memory.share_again(places)
        self._shares(memory, places, timeout)

    def _shares(self, memory: SharedMemory, places: Sequence[tuple[str, str]], timeout: float) -> None:
        self._memory = memory
        for line, reached, place in zip(self._lines, self._memory.reached, places, strict=True):
            line.shares = reached
            if reached:
                self._talk(line, LocalLine(*place, timeout))

    def detach_memory(self) -> SharedMemory | None:
        """Give up the memory that is shared through this connection, and return it for another one."""
        memory, self._memory = self._memory, None
        return memory

    def _talk(self, line: Line, local: LocalLine) -> None:
        """Send and take messages through ``local`` from now on."""
        with self._lock:
            line.local, line.sends_locally = local, True
            self._edgy = tuple(line for line in self._lines if line.local is None)
            self._locals[local.descriptor] = line
            self._poller.register(local.descriptor, select.POLLIN)
        self._wake()  # the reader then looks for the last time without a signal

    def _ask_for_memory(self, shard: int, timeout: float) -> tuple[str, str]:
        """Return the address at which a shard takes memory, and the token for it."""
        answer = self._question(ShareMemory(), (), shard, timeout)
        if not isinstance(answer, MemoryAt):
            raise BackendUnavailableError("the coordinator does not say whether it shares memory")
        return answer.address, answer.token

    def _question(
        self, message: Message, payloads: Sequence[Buffer], shard: int, timeout: float
    ) -> MemoryAt | Probed | None:
        """Send a message that the transport of the other side answers. Return the answer; None if there is none."""
        self._answer = None
        self._asking = asking = threading.Lock()
        asking.acquire()
        with contextlib.suppress(ClosedError, ConnectionLostError):  # the next caller gets these, and handles them
            self.send(message, payloads, shard)
        return None if self._closing or not self.wait(asking, timeout) else self._answer

    def probe(self, payload: Buffer, timeout: float) -> bool:
        """Send bytes that mean nothing, before this worker joins. Return True when all have come."""
        return self._question(Probe(), (payload,) if len(payload) else (), 0, timeout) is not None

    @property
    def kind(self) -> str:
        """Path of gradients to the coordinator: "shm" or "tcp"."""
        return "tcp" if self._memory is None else "shm"

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator sees too; None if there is none."""
        return None if self._memory is None else self._memory.empty(nbytes)

    def region(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator may write to; None if there is none."""
        return None if self._memory is None else self._memory.empty(nbytes, writable=True)

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0) -> Place | None:
        """Return the place of ``data`` in memory that ``shard`` sees too; None if it is elsewhere."""
        return self._memory.place_of(data) if self._memory is not None and self._lines[shard].shares else None

    def _answered(self, answer: MemoryAt | Probed | None) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            self._answer = answer
            asking.release()

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0, branch: int = 0) -> None:
        """Send a message, or queue it. Large payloads are not copied."""
        header = on_branch(encode(message), branch) if branch else encode(message)
        line = self._lines[shard]
        with self._lock:
            if self._closing:
                raise ClosedError("this worker is closed") if self._broke is None else self._broke.again()
            if line.sends_locally and self._send_locally(line, header, payloads):
                return
            header = line.numbers.numbered(header)
            try:  # libzmq's own thread sends
                if payloads:
                    payload = payloads[0]
                    line.send(header, NOBLOCK_MORE)
                    line.send(payload, NOBLOCK, copy=len(payload) < ZERO_COPY_BYTES)
                else:
                    line.send(header, NOBLOCK)
            except zmq.Again:  # libzmq has given the connection up
                raise ConnectionLostError(line.lost_text("the connection is gone")) from None
            missed = self._reading.locked() and int(line.socket.get(EVENTS)) & POLLIN
        if missed:
            self._wake()

    def ask(self, shard: int = 0) -> None:
        """Send a Ping. Its answer shows whether a message was lost, and follows the first message at once."""
        self.send(_PING, (), shard)

    def _send_locally(self, line: Line, header: bytes, payloads: Sequence[Buffer]) -> bool:
        """Send through the local socket; False if the other side has closed it. Its last messages may be unread."""
        local = line.local
        assert local is not None
        waited = len(local.stream.queued)
        try:
            if not local.stream.send(header, payloads) and not waited:
                self._poller.modify(local.descriptor, select.POLLIN | select.POLLOUT)
                self._wake()
        except OSError:
            line.sends_locally = False
        return line.sends_locally

    # ── receiving ─────────────────────────────────────────────────────────────────────────────────────

    @uninterrupted
    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired: read meanwhile, unless another thread does."""
        watch()  # before the first message is taken: it may be there already
        until = time.monotonic() + timeout
        if self._reading.acquire(blocking=False):
            try:
                while not done.acquire(blocking=False):
                    left = until - time.monotonic()
                    if self._closing or left <= 0:
                        break
                    self._read(left)
                else:
                    return True
            finally:
                self._reading.release()
            return _acquire(done, until)
        # Another thread reads. It may leave before our result is there, and then the channel's own thread takes over.
        with self._lock:
            self._bystanders += 1
        self._watched.release()
        try:
            return _acquire(done, until)
        finally:
            with self._lock:
                self._bystanders -= 1

    def watch(self, enough: Callable[[], bool], branch: int = 0) -> None:
        """Have the channel's own thread read, whenever no other one does, until ``enough()``, for each branch."""
        self._watches[branch] = enough
        self._watched.release()

    def _has_enough(self) -> bool:
        return all(enough() for enough in tuple(self._watches.values()))

    @uninterrupted
    def look(self) -> None:
        """Take what has come in, unless another thread reads, and do not wait for more."""
        watch()
        if self._reading.acquire(blocking=False):
            try:
                while not self._closing and self._read(0.0):
                    pass
            finally:
                self._reading.release()

    def _watch(self) -> None:
        """Run in the channel's own thread: read when `watch` asks for it."""
        while True:
            self._watched.acquire()
            with self._reading:
                while not self._closing and (self._bystanders or not self._has_enough()):
                    self._read(None)
                if self._closing:
                    return

    def _read(self, timeout: float | None) -> bool:
        """Take one message; if there is none, wait for an event. Only for the one reader.

        Returns False if there was no event. Reports a broken connection to the receiver, and is closing then.
        """
        happened = False
        try:
            if self._take_one_of_each(self._edgy):
                return True
            if not self._happened:  # else a signal handler has raised before these were handled
                self._wait(timeout)
            happened = bool(self._happened)
            while self._happened:
                descriptor, events = self._happened.pop(0)
                if (line := self._locals.get(descriptor)) is not None:
                    self._take_locally(line, events)
                elif descriptor in self._monitors:
                    self._check_connection(self._monitors[descriptor])
                elif descriptor == self._wake_fd or len(self._edgy) < len(self._lines):
                    if descriptor == self._wake_fd:
                        self._wakeup.clear()
                    while self._take_one_of_each(self._lines):
                        pass
                elif len(self._lines) == 1:
                    self._take(self._lines[0], True)
                # Else every line is looked at anew before the next poll.
        except GradServerError as error:
            with self._lock:
                self._closing = True
                self._broke = error if isinstance(error, ConnectionError) else None
                for line in self._lines:
                    line.give_up()
            if self._lines[0].receiver is not None:
                self._lines[0].receiver.lost(error)
            self._answered(None)
        return happened

    def _wait(self, timeout: float | None) -> None:
        """Wait for an event, for a while.

        Sends a Ping each second, which is answered: that a message was lost shows only by another one behind it.
        """
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + PING_SECONDS
            for line in self._lines:
                if not line.sends_locally:
                    with contextlib.suppress(ClosedError):
                        self.ask(line.number)
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look_at_lines()
        until = min(self._ask_at, self._look_at, self._ask_at if timeout is None else now + timeout)
        for line in self._lines:
            if line.numbers.deadline is not None:
                line.numbers.check(now)
                until = min(until, line.numbers.deadline)
        watch()
        self._poll(max(math.ceil((until - now) * 1000), 0))

    def _look_at_lines(self) -> None:
        """Raise LimitExceededError if a message has no end, while all whole ones were taken."""
        with self._lock:
            if self._closing:
                return
            have_input = [line.look(line.what) for line in self._lines]
            if any(have_input):
                self._wake()  # the look may have swallowed the signal

    @admits
    def _poll(self, milliseconds: int) -> None:
        # A handler that raises right behind the call must not take with it what the call returned: signals of edges
        # are given once. Between a function of C and a list that it fills no handler runs.
        self._happened.extend(chain.from_iterable(map(self._poller.poll, (milliseconds,))))

    def _take_one_of_each(self, lines: Sequence[Line]) -> bool:
        took = False
        for line in lines:
            took = self._take(line) or took
        return took

    def _take(self, line: Line, signalled: bool = False) -> bool:
        """Hand one message of ZeroMQ's to its receiver; False if there was none."""
        with self._lock:
            if self._closing or not (signalled or line.has_input()):
                return False
            try:
                frames = line.receive()
            except zmq.Again:  # the signal was not that of a message
                return False
        for message in line.numbers.take(frames, time.monotonic()):
            self._hand_over(line, message)
        return True

    def _take_locally(self, line: Line, events: int = select.POLLIN) -> bool:
        """Take one packet from a local socket, or send what is queued there; False if there was no packet."""
        local = line.local
        if local is None:
            return False
        try:
            if events & select.POLLOUT:
                self._flush(line, local)
                return False
            frames = local.stream.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # the other side has closed it, or is gone: the ZeroMQ connection will tell
            with self._lock:
                line.local, line.sends_locally = None, False
                self._edgy = (*self._edgy, line)
                del self._locals[local.descriptor]
                self._poller.unregister(local.descriptor)
                local.close()
            return False
        if frames is not None:
            self._hand_over(line, frames)
        return True

    def _flush(self, line: Line, local: LocalLine) -> None:
        """Send what is queued. If the other side has closed the socket, its last messages are yet to be read."""
        with self._lock:
            try:
                if not local.stream.flush():
                    return
            except OSError:
                line.sends_locally = False
            self._poller.modify(local.descriptor, select.POLLIN)

    def _hand_over(self, line: Line, frames: Sequence[Buffer]) -> None:
        number = 0
        if frames[0][:1] == _MARK:
            number, frames = branch_of(frames)
        try:
            message, payloads = decode(frames)
        except ProtocolError as error:
            raise type(error)(f"{line.url} answers, but not as a gradserver {line.what}: {error}") from error
        assert line.receiver is not None
        self.heard = self.heard or type(message) is not Status  # which is asked for on other connections
        if number:
            if (branch := self._branches.get(number)) is not None:
                branch.hear(line.number, message, payloads)
        elif isinstance(message, (MemoryAt, Probed)):
            self._answered(message)
        elif type(message) is BePresent:
            line.light_beacon(message, partial(self.send, shard=line.number))
        elif type(message) is Failure and message.scope is Scope.CONNECTION and message.error == _LOST:
            raise ConnectionLostError(message.text)  # the other side has noticed it
        else:
            line.receiver.receive(message, payloads)
            if type(message) is Failure:
                self._answered(None)

    def _check_connection(self, line: Line) -> None:
        """Raise ConnectionLostError if the monitor says so, after taking in what arrived before the end."""
        with self._lock:
            if self._closing or not line.has_ended():
                return
            error = line.end(line.url, line.what)
            line.gone = True
        while any(self._take(there) or self._take_locally(there) for there in self._lines):
            pass
        raise error

    def give_up(self) -> None:
        """Close at once: no process is there that would read what is queued."""
        for line in self._lines:
            line.gone = True
        self.close()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Send what is queued, for a second at most, and close everything. May be called twice."""
        with self._lock:
            self._closing = True
            closed, self._closed = self._closed, True
        if closed:
            return
        self._answered(None)
        self._wake()
        self._watched.release()
        current = threading.current_thread()
        if self._thread.is_alive() and current is not self._thread:
            self._thread.join()
        with self._reading:  # a thread that still reads has been woken, and leaves
            for line in self._lines:
                line.put_out_beacon()  # without the lock: it waits for a thread that may be about to send
            with self._lock:
                for line in self._lines:
                    line.close()
                self._wakeup.close()
        self._context.term()
        if self._memory is not None:
            self._memory.close()


@admits
def _acquire(lock: Lock, until: float) -> bool:
    """Wait for a lock until a time of the monotonic clock."""
    return lock.acquire(timeout=max(until - time.monotonic(), 0.0))
