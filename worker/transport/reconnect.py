"""The channel of a durable group's member, which outlives its connections: it is made anew under the session.

    state     event                                   next      what happens
    ────────  ──────────────────────────────────────  ────────  ─────────────────────────────────────────────────────
    UP        the connection breaks                   DOWN      nothing fails; waits go on, and their clocks stop
    UP        … of a worker that is about to join     DOWN      the same
    UP        … and trains with the state already     CLOSED    LeftOutError: it has nothing that others may need
    UP        LeftOutError to one that does not yet   DOWN      the group recovers, and it joins anew
    UP        the coordinator says that it stops      DOWN      another one may take its place
    UP        any other Failure of the connection     CLOSED    everything open fails with it
    UP        a message violates the protocol         DOWN      it may have been made wrong once
    any       … again, in the same round              CLOSED    ProtocolError: it would come for ever
    DOWN      each 50 ms; 0.4 s if none answers       DOWN      it tries to connect; each 5 s the log says so
    DOWN      a connection stands                     RESUMING  Resume
    DOWN      … of a worker that is about to join     UP        it joins anew (`gradserver.worker.transport.rejoining`)
    DOWN      patience is over                        CLOSED    ConnectionLostError: how long, and what was tried
    RESUMING  Resumed                                 RESUMING  memory is shared again; Holding
    RESUMING  Standing                                UP        what has no result is sent again
    RESUMING  the connection breaks                   DOWN      again from the beginning
    RESUMING  Failure of the connection               CLOSED    for example LeftOutError
    any       close                                   CLOSED

Durable sub-groups go on, too: behind UP each resumes on a branch (`gradserver.worker.transport.lasting`).

From Resumed on `gradserver.worker.resumption` acts, as in a recovery because of another member. What is sent meanwhile
is dropped: Standing says what is sent again. A thread that waits for a result when a connection breaks goes on waiting
for its lock, which a message from the next connection releases. That connection's own thread reads until they are done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel, Lock, Receiver
from gradserver.protocol.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectionLostError,
    CoordinatorUnreachableError,
    GradServerError,
    LeftOutError,
    PlanMismatchError,
    ProtocolError,
    reason_of,
)
from gradserver.protocol.messages import Leave, Message, Place, Push
from gradserver.protocol.messages.recovery import Resumed
from gradserver.protocol.transport.reach import reach
from gradserver.worker.clock import Clock
from gradserver.worker.handle import VERDICT_SECONDS
from gradserver.worker.interrupts import uninterrupted
from gradserver.worker.member.regions import Regions
from gradserver.worker.resumption import Resumption
from gradserver.worker.session import Session, ShardReceiver
from gradserver.worker.transport import rejoining
from gradserver.worker.transport.beacon import Beacon
from gradserver.worker.transport.farewell import out_before_entry
from gradserver.worker.transport.lasting import ANSWER_SECONDS, LastingBranches
from gradserver.worker.transport.receiver import ConnectionReceiver
from gradserver.worker.transport.shared_memory import SharedMemory
from gradserver.worker.transport.tcp import TcpChannel

log = logging.getLogger("gradserver")

RETRY_SECONDS: Final = 0.05
_MOST_RETRY_SECONDS: Final = 0.4
"""Longest pause where what accepts connections says nothing, as a proxy: a coordinator needs the processor to start."""
SAY_SO_EVERY: Final = 5.0
"""Seconds between two lines of the log during a wait."""
_LOOK_SECONDS: Final = 0.1
"""Pause between two looks for messages while no thread waits."""
_REACH_SECONDS: Final = 1.0
"""Time limit of an attempt to connect."""


class ReconnectingChannel:
    """The channel of a durable group: a `gradserver.worker.transport.tcp.TcpChannel`, made anew whenever it breaks.

    Args:
        channel: the connection that stands.
        session: session of this channel.
        patience: seconds for which a lost coordinator is waited for.

    Attributes:
        resumption: resumes the session on a new connection.
        carried: the channels of durable sub-groups.
    """

    def __init__(self, channel: TcpChannel, session: Session, patience: float) -> None:
        self._channel, self._session, self._patience = channel, session, patience
        self._lock, self._clock = threading.Lock(), Clock()
        regions = Regions(self.region, self.place_of)
        self.resumption = Resumption(session.traffic, self.goes_on_with, self._clock, regions)
        self._up = threading.Event()
        """Set while this worker is in its group, and when that is over."""
        self._up.set()
        self._trying: TcpChannel | None = None
        """Connection through which this worker is resuming; None if it is not."""
        self._introduced = False
        """True once Resume was said there."""
        self._failed: GradServerError | None = None
        """Error of that connection, if it broke."""
        self._garbled: int | None = None
        """Last round in which a message violated the protocol."""
        self._enough: Callable[[], bool] = lambda: True
        self._waiting: Counter[int] = Counter()
        """Number of waiting threads, by the generation of the connection on which they began."""
        self._generation = 0
        self._shards = session.membership.shards
        """URLs of the data shards."""
        self._closing = threading.Event()
        self._news = threading.Event()
        """Set when the own thread has something to do."""
        self.carried = LastingBranches(self)
        self.look_after_branches = self._news.set
        self.stopped: Callable[[GradServerError], None] = self.make_anew  # another coordinator may take its place
        self.attach(session)
        self._thread = threading.Thread(target=self._live, name="gradserver-reconnect", daemon=True)
        self._thread.start()

    # ── as any channel ────────────────────────────────────────────────────────────────────────────────

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that arrive to ``receiver`` from now on, but not the end of a connection."""
        self._channel.attach(ConnectionReceiver(self, self._channel, receiver))

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        """Send, or drop what will be sent again when the coordinator is back."""
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("this worker is closed")
            channel = self._channel if self._up.is_set() else self._trying if self._introduced else None
        is_for_open = type(message) is Push or (shard > 0 and type(message) is Leave)
        if channel is None or not channel.reaches(shard) or (is_for_open and self.resumption.is_held(shard)):
            return
        try:
            channel.send(message, payloads, shard)
        except (ClosedError, ConnectionError) as error:
            self.broke(channel, error if isinstance(error, GradServerError) else ConnectionLostError(str(error)))

    @uninterrupted
    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired. Time without a coordinator does not count."""
        left, until = timeout, self._clock.seconds + timeout
        while True:
            with self._lock:
                channel, generation = self._channel, self._generation
                self._waiting[generation] += 1
            try:
                if channel.wait(done, left):
                    return True
            finally:
                with self._lock:
                    self._waiting[generation] -= 1
            left = until - self._clock.seconds
            if self._closing.is_set() or (left <= 0 and self._clock.runs):
                return done.acquire(blocking=False)
            left = max(left, RETRY_SECONDS)

    def watch(self, enough: Callable[[], bool]) -> None:
        """Receive messages until ``enough()``, although no thread waits for them yet."""
        self._enough = enough
        self._channel.watch(self._has_enough)

    def look(self) -> None:
        """Receive what has come in, without waiting for more."""
        self._channel.look()

    def _has_enough(self) -> bool:
        return self._enough() and not any(
            waiting for generation, waiting in self._waiting.copy().items() if generation != self._generation
        )

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator sees too; None if there is none."""
        return self._channel.empty(nbytes)

    def region(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator may write to; None if there is none."""
        return self._channel.region(nbytes)

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0) -> Place | None:
        """Return the place of ``data`` in memory that ``shard`` sees too; None if it is elsewhere."""
        return self._channel.place_of(data, shard)

    def branch(self) -> Channel:
        """Return a channel for a sub-group, as soon as there is a coordinator. It ends with the present connection."""
        self._up.wait(self._patience)
        return self._channel.branch()

    def prepare_to_leave(self, patience: float) -> None:
        """End waits from now on. If there is no coordinator, give it ``patience`` seconds to be back first.

        A worker that leaves during a recovery may hold results that others lack.
        """
        self._channel.look()
        self._clock.wait(patience)
        self._clock.run_on()

    def close(self) -> None:
        """Close all connections, and look for the coordinator no more."""
        with self._lock:
            self._closing.set()
            channels = [self._channel] if self._trying is None else [self._trying, self._channel]
        self._news.set()
        for channel in channels:
            channel.close()
        self.resumption.interrupt(ClosedError("this worker is closed"))  # what waits later finds closed channels
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ── while there is no coordinator ─────────────────────────────────────────────────────────────────

    def broke(self, channel: TcpChannel, error: GradServerError) -> None:
        """Handle the end of ``channel``."""
        session = self._session
        goes_on = joins_anew = False
        with self._lock:
            is_trying = channel is self._trying
            is_mine = is_trying or (self._up.is_set() and channel is self._channel)
            if self._closing.is_set() or session.closed or not is_mine:
                return
            if is_trying:
                self._failed = error
            else:
                self._up.clear()
                if session.may_join_anew and self._patience > 0:
                    self._clock.stop()
                    session.learner.begin_anew()  # a state that is here is of no use any more
                    goes_on = joins_anew = True
                    log.warning("%s; this worker was about to join, and joins again when it is back", error.message)
                    self._news.set()
                elif not session.member.is_inside:
                    error = out_before_entry(session.membership, error)
                elif not self._is_garbled_again(error):
                    self._clock.stop()
                    self.resumption.recovery.suspend()
                    self.carried.suspend()
                    goes_on = True
                    log.warning("%s; round %d goes on when it is back", error.message, session.round)
                    self._news.set()
        if is_trying or goes_on:  # `connect` may wait for an answer yet
            self.resumption.interrupt(error)
        if goes_on and not joins_anew:
            self.carried.interrupt(error)
        elif not (is_trying or goes_on):
            session.lost(error)

    def _is_garbled_again(self, error: GradServerError) -> bool:
        """Note a violation of the protocol. Return True for the second in a round: it would come on each connection."""
        if not isinstance(error, ProtocolError):
            return False
        last, self._garbled = self._garbled, self._session.round
        return last == self._garbled

    def is_on(self, channel: object) -> bool:
        """Return true if this worker is in its group on ``channel``."""
        with self._lock:
            return self._up.is_set() and self._channel is channel

    def stands(self) -> TcpChannel:
        """Return the connection on which this worker is in its group, when there is one. Raises why there is none."""
        while not self._up.wait(SAY_SO_EVERY):
            self._session.check_open()
        self._session.check_open()
        with self._lock:
            return self._channel

    def make_anew(self, error: GradServerError) -> None:
        """Make all connections anew, for ``error``."""
        self.broke(self._trying or self._channel, error)

    def put_out_beacon(self) -> None:
        """Put the beacon out. The membership is over, and a worker that joins again in its place has the same one."""
        with self._lock:
            channels = [self._channel] if self._trying is None else [self._trying, self._channel]
        for channel in channels:
            channel.put_out_beacon()

    def _live(self) -> None:
        """Run in the own thread: reconnect, and look for messages, as no other thread reads in a long forward pass."""
        while not self._closing.is_set() and not self._session.closed:
            if self._news.wait(_LOOK_SECONDS):
                self._news.clear()
            if not self._up.is_set():
                self._come_back()
            if self._up.is_set():
                self.carried.revive(self._channel)
                self._channel.look()
        self._up.set()  # for what waits in `branch`

    def _come_back(self) -> None:
        """Look for the coordinator until it is back, or the patience is over."""
        session, since, old = self._session, time.monotonic(), self._channel
        tried, said, pause = 0, since, RETRY_SECONDS
        memory, beacon = old.detach_memory(), old.detach_beacon()
        old.close()  # from now on nothing arrives, and what this member holds does not change
        session.subgroups.lose_passing(ConnectionLostError(f"lost the coordinator at {old.url}"))
        reason: GradServerError
        while not self._closing.is_set():
            tried += 1
            try:
                reach(old.url, _REACH_SECONDS)
                pause = min(2 * pause, _MOST_RETRY_SECONDS)
                come_back = self._join_anew if session.may_join_anew else self._resume
                come_back(memory, beacon, since)
                return
            except (LeftOutError, PlanMismatchError) as error:
                reason = error
                if not session.may_join_anew or isinstance(error, PlanMismatchError):
                    session.lost(error)
            except GradServerError as error:
                reason = error
                if self._is_garbled_again(error):
                    session.lost(error)
            except OSError as error:
                reason = CoordinatorUnreachableError(reason_of(error))
            finally:
                pause = RETRY_SECONDS if self._let_go() else pause
            if session.closed:
                break
            now = time.monotonic()
            if now - since >= self._patience:
                self._give_up(old.url, now - since, tried, reason)
                break
            if now - said >= SAY_SO_EVERY:
                said = now
                log.warning(
                    "waiting for the coordinator at %s since %.0f s (%s); round %d goes on when it is back, "
                    "giving up after %g s",
                    *(old.url, now - since, reason.message, session.round, self._patience),
                )
            self._closing.wait(pause)
        for kept in (memory, beacon):
            if kept is not None:
                kept.close()

    def _resume(self, memory: SharedMemory | None, beacon: Beacon | None, since: float) -> None:
        """Try once to resume on a new connection. Raises the reason for which it failed."""
        resumption = self.resumption
        channel = self._try(beacon)
        resuming = resumption.resume(channel)
        self._introduced = True  # and not before: a connection that says something else first is turned away
        channel.ask()
        self._check_trying()
        resumed: Resumed = resuming.wait(ANSWER_SECONDS)
        self._go_by(channel, memory, resumption.recovery.generation)
        standing = resumption.restate(channel)
        self._check_trying()  # if it broke before there was a handle, the handle does not hear of it
        again: int = standing.wait(self._session.timeout + VERDICT_SECONDS)
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._trying = None
            self._up.set()
        log.warning(  # as the lines about the wait, which this one ends
            "the coordinator at %s is back after %.1f s (incarnation %d); round %d goes on: %d slices are sent again",
            *(channel.url, time.monotonic() - since, resumed.incarnation, self._session.round, again),
        )

    def _join_anew(self, memory: SharedMemory | None, beacon: Beacon | None, since: float) -> None:
        """Try once to join anew on a new connection. Raises the reason for which it failed."""
        session = self._session
        channel = self._try(beacon)
        rejoining.let_in(session, channel, since + self._patience - time.monotonic(), self._check_trying)
        self._shards = session.membership.shards
        self._go_by(channel, memory, 0)
        rejoining.agree_again(session, channel, self._check_trying)
        with self._lock:  # what callers say meanwhile waits, and is said behind it
            if self._failed is not None:
                raise self._failed
            rejoining.ask_again(session, channel)
            self._trying = None
            self._up.set()
        self._clock.go()
        here = session.membership
        what = "the coordinator at %s is back after %.1f s; %r joins group %r again, as rank %d"
        log.info(what, channel.url, time.monotonic() - since, here.names[here.rank], here.group, here.rank)

    def _try(self, beacon: Beacon | None) -> TcpChannel:
        """Return a new connection, on which nothing is said yet."""
        channel = TcpChannel(self._channel.url, _REACH_SECONDS)
        with self._lock:
            self._trying, self._failed, self._introduced = channel, None, False
        self._check_trying()
        channel.attach_beacon(beacon)
        channel.attach(ConnectionReceiver(self, channel, self._session))
        return channel

    def _go_by(self, channel: TcpChannel, memory: SharedMemory | None, generation: int) -> None:
        """Attend the data shards in a recovery, or in none, and share memory again. All goes by ``channel`` then."""
        for number, url in enumerate(self._shards, 1):
            channel.add(url, ShardReceiver(self._session, number), _REACH_SECONDS)
            attending = self._session.attend(number, ANSWER_SECONDS, channel, generation)
            self._check_trying()
            attending.wait(ANSWER_SECONDS)
        if memory is not None:
            try:
                channel.share_again(memory, ANSWER_SECONDS)
            except BackendUnavailableError as error:
                self._check_trying()
                log.warning("gradients go through the connection from now on: %s", error)
        with self._lock:
            self._channel = channel
            self._generation += 1
        channel.watch(self._has_enough)

    def _check_trying(self) -> None:
        """Raise the error of the connection through which this worker is resuming, if it broke or is closed."""
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("this worker is closed")
            if self._failed is not None:
                raise self._failed

    def goes_on_with(self, shards: tuple[str, ...], answers: bool) -> bool:
        """Return True if this worker is connected to these ``shards``; else all connections are made anew.

        ``answers``: the list answers this worker's Resume, and is in force from now on.
        """
        with self._lock:
            if answers:
                self._shards = shards
            right = self._shards == shards
        if not right:
            self.make_anew(ConnectionLostError("another process has taken the place of a data shard"))
        return right

    def _let_go(self) -> bool:
        """Close a connection on which it was not possible to resume. Return True if a coordinator answered there."""
        with self._lock:
            channel, self._trying = self._trying, None
        if channel is not None:
            channel.detach_memory()
            channel.detach_beacon()
            channel.close()
        return channel is not None and channel.heard

    def _give_up(self, url: str, seconds: float, tried: int, reason: GradServerError) -> None:
        self._session.lost(
            ConnectionLostError(
                f"lost the coordinator at {url}, and tried for {seconds:.1f} s ({tried} times) to reach it: "
                f"{reason.message}. With `gradserver serve` there, and the same --state-dir, the group continues"
            )
        )
