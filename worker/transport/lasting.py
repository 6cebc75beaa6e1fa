"""The channel of a durable sub-group: a branch, which is made anew on each connection of the parent.

    state   event                                         next    what happens
    ──────  ────────────────────────────────────────────  ──────  ────────────────────────────────────────────────────
    UP      the parent's connection breaks                DOWN    nothing fails; waits go on, and their clocks stop
    DOWN    the parent has resumed on another connection  DOWN    Resume on a new branch of that; Attend; Holding
    DOWN    … and all this was said                       UP      Standing lets it push
    DOWN    … and that connection breaks, too             DOWN    again from the beginning
    DOWN    no answer to Resume                           DOWN    the parent makes all connections anew
    any     the other end says that it lost the branch    DOWN    the same
    any     the parent is over, or gives up               CLOSED  with the parent's error
    any     Failure of the connection                     CLOSED  for example LeftOutError
    any     close                                         CLOSED

A sub-group recovers for itself, as any group (`gradserver.worker.resumption`). It waits for its own members alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.channel import Channel, Lock, Receiver
from gradserver.protocol.errors import (
    ClosedError,
    ConnectionLostError,
    CoordinatorStoppedError,
    DeadlineError,
    GradServerError,
)
from gradserver.protocol.messages import Leave, Message, Place, Push
from gradserver.worker.clock import Clock
from gradserver.worker.handle import VERDICT_SECONDS
from gradserver.worker.member.regions import Regions
from gradserver.worker.resumption import Resumption
from gradserver.worker.session import Session, ShardReceiver
from gradserver.worker.transport.branches import Branch
from gradserver.worker.transport.tcp import TcpChannel

log = logging.getLogger("gradserver")

ANSWER_SECONDS: Final = 10.0
"""Time limit for the answer of a coordinator that accepts a connection."""
_LEAST_WAIT: Final = 0.05
"""Shortest wait for the parent's next connection, in seconds."""


class Trunk(Protocol):
    """The parent's channel: `gradserver.worker.transport.reconnect.ReconnectingChannel`."""

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired."""

    def look(self) -> None:
        """Receive what has come in."""

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator sees too."""

    def region(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator may write to."""

    def is_on(self, channel: object) -> bool:
        """Return true if the worker is in the parent on ``channel``."""

    def make_anew(self, error: GradServerError) -> None:
        """Make all connections anew."""

    def look_after_branches(self) -> None:
        """Resume soon in the sub-groups that are to be resumed."""


class LastingBranch:
    """The channel of a durable sub-group, which outlives branches.

    Args:
        trunk: the parent's channel.
        branch: the branch that stands.
        session: session of this channel.
        release: is called with this when it is closed.

    Attributes:
        resumption: resumes the session on a new branch.
        is_up: false until the session is resumed, or about to be so without further action.
    """

    def __init__(
        self, trunk: Trunk, branch: Branch, session: Session, release: Callable[[LastingBranch], object]
    ) -> None:
        self._trunk, self._branch, self._session, self._release = trunk, branch, session, release
        self._clock = Clock()
        self.resumption = Resumption(
            session.traffic, self.goes_on_with, self._clock, Regions(self.region, self.place_of)
        )
        self.is_up = True
        self._speaks = True
        """False while what is sent is dropped: no Resume was said on the next branch."""
        self._shards = session.membership.shards
        self._enough: Callable[[], bool] = lambda: True
        self._closing = False
        self._lock = threading.Lock()
        self._attending = threading.Lock()
        """Held while Attend is said. Of two connections only the later one is attended on."""
        self._cuts = 0
        """Number of times that the parent's connection broke."""
        branch.when_lost(trunk.make_anew)

    # ── as any channel ────────────────────────────────────────────────────────────────────────────────

    def attach(self, receiver: Receiver) -> None:
        """Hand messages that arrive to ``receiver`` from now on."""
        self._branch.attach(receiver)

    def send(self, message: Message, payloads: Sequence[Buffer] = (), shard: int = 0) -> None:
        """Send, or drop what will be sent again when the parent is back."""
        with self._lock:
            if self._closing:
                raise ClosedError("this sub-group is closed")
            branch = self._branch if self._speaks else None
        is_for_open = type(message) is Push or (shard > 0 and type(message) is Leave)
        if branch is None or not branch.reaches(shard) or (is_for_open and self.resumption.is_held(shard)):
            return
        try:
            branch.send(message, payloads, shard)
        except (ClosedError, ConnectionError):
            return  # the parent finds that its connection broke

    def wait(self, done: Lock, timeout: float) -> bool:
        """Wait until ``done`` can be acquired. Time without a coordinator does not count."""
        left, until = timeout, self._clock.seconds + timeout
        while not self._trunk.wait(done, left):
            left = until - self._clock.seconds
            if self._closing or self._session.closed or (left <= 0 and self._clock.runs):
                return done.acquire(blocking=False)
            left = max(left, _LEAST_WAIT)
        return True

    def watch(self, enough: Callable[[], bool]) -> None:
        """Receive messages until ``enough()``, although no thread waits for them yet."""
        self._enough = enough
        self._branch.watch(enough)

    def look(self) -> None:
        """Receive what has come in, without waiting for more."""
        self._trunk.look()

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator sees too; None if there is none."""
        return self._trunk.empty(nbytes)

    def region(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that the coordinator may write to; None if there is none."""
        return self._trunk.region(nbytes)

    def place_of(self, data: npt.NDArray[np.uint8], shard: int = 0) -> Place | None:
        """Return the place of ``data`` in memory that ``shard`` sees too; None if it is elsewhere."""
        return self._branch.place_of(data, shard) if self._branch.reaches(shard) else None

    def prepare_to_leave(self, patience: float) -> None:
        """End waits from now on. If there is no coordinator, give it ``patience`` seconds to be back first."""
        self._trunk.look()
        self._clock.wait(patience)
        self._clock.run_on()

    def put_out_beacon(self) -> None:
        """End what waits for a membership that is over, and resume in it no more. The beacon is the parent's."""
        self._release(self)
        self.interrupt(ClosedError("this sub-group is over"))

    def stopped(self, error: CoordinatorStoppedError) -> None:
        """Do nothing: the parent hears the same."""

    def make_anew(self, error: GradServerError) -> None:
        """Have the parent make its connections anew."""
        self._trunk.make_anew(error)

    def close(self) -> None:
        """Send and take nothing any more. The parent stays as it is."""
        with self._lock:
            self._closing = True
        self._branch.close()
        self._release(self)
        self.interrupt(ClosedError("this sub-group is closed"))

    def attend(self, branch: Branch) -> None:
        """Attend the data shards for the first time. If the connection breaks, that is done on the next one."""
        session, limit = self._session, self._session.timeout + VERDICT_SECONDS
        try:
            for number, url in enumerate(self._shards, 1):
                with self._attending:
                    branch.check_on(self._trunk)
                    branch.reach(url, ShardReceiver(session, number))
                    attending = session.attend(number, limit, branch)
                    branch.check_on(self._trunk)
                attending.wait(limit)
        except (ClosedError, ConnectionLostError) as error:
            if self._closing or session.closed:
                raise
            if branch.is_on(self._trunk):
                self._trunk.make_anew(error)

    # ── while there is no coordinator ─────────────────────────────────────────────────────────────────

    def suspend(self) -> None:
        """Send nothing: the parent's connection broke."""
        with self._lock:
            self._cuts += 1
            self.is_up = self._speaks = False
        self._clock.stop()
        self.resumption.recovery.suspend()

    def interrupt(self, error: GradServerError) -> None:
        """End all that waits for an answer on the present branch."""
        self.resumption.interrupt(error)

    def revive(self, channel: TcpChannel) -> None:
        """Resume on a branch of ``channel``, if that does not break first."""
        try:
            self._resume(channel)
        except DeadlineError as error:
            self._trunk.make_anew(ConnectionLostError(f"no answer for a sub-group: {error.message}"))
        except GradServerError as error:
            log.debug("group %r: not resumed: %s", self._session.membership.group, error.message)

    def _resume(self, channel: TcpChannel) -> None:
        session, resumption = self._session, self.resumption
        branch = channel.branch()
        with self._lock:
            cuts, before, self._branch = self._cuts, self._branch, branch
        before.close()
        branch.attach(session)
        branch.when_lost(self._trunk.make_anew)
        resuming = resumption.resume(branch)
        self._check(channel)
        with self._lock:
            self._speaks = cuts == self._cuts
        resuming.wait(ANSWER_SECONDS)
        for number, url in enumerate(self._shards, 1):
            with self._attending:
                branch.reach(url, ShardReceiver(session, number))
                attending = session.attend(number, ANSWER_SECONDS, branch, resumption.recovery.generation)
            self._check(channel)
            attending.wait(ANSWER_SECONDS)
        branch.watch(self._enough)
        resumption.restate(branch)
        with self._lock:
            self.is_up = cuts == self._cuts
        log.info("group %r: round %d goes on when all are back", session.membership.group, session.round)

    def _check(self, channel: TcpChannel) -> None:
        """Raise ConnectionLostError if the parent's connection broke meanwhile: no handle may have heard of it."""
        if self._closing or self._session.closed:
            raise ClosedError("this sub-group is closed")
        if not self._trunk.is_on(channel):
            raise ConnectionLostError("the parent's connection broke")

    def goes_on_with(self, shards: tuple[str, ...], answers: bool) -> bool:
        """Return true if this worker is connected to these ``shards``; else all connections are made anew.

        ``answers``: the list answers this worker's Resume, and is in force from now on.
        """
        if answers:
            self._shards = shards
        is_right = self._shards == shards
        if not is_right:
            self._trunk.make_anew(ConnectionLostError("another process has taken the place of a data shard"))
        return is_right


class LastingBranches:
    """The channels of a worker's durable sub-groups, which its parent's channel ``trunk`` carries."""

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self._all: list[LastingBranch] = []
        self._lock = threading.Lock()

    def keep(self, branch: Channel, session: Session, anew: bool) -> Callable[[], object]:
        """Have the sub-group of ``session`` go on, on a ``branch`` of the present connection and of later ones.

        ``anew``: the connection on which it was asked for first broke, and the member may be known there. It resumes.
        What is returned attends the data shards, or has that done soon.
        """
        assert isinstance(branch, Branch)
        kept = LastingBranch(self._trunk, branch, session, self._release)
        session.endure(kept)
        with self._lock:
            self._all.append(kept)
        if anew or not branch.is_on(self._trunk):
            kept.suspend()
            return self._trunk.look_after_branches
        return partial(kept.attend, branch)

    def check_carried(self, branch: Channel) -> None:
        """Raise ConnectionLostError if the connection that carries ``branch`` is the present one no more."""
        assert isinstance(branch, Branch)
        branch.check_on(self._trunk)

    def suspend(self) -> None:
        """Send nothing: the connection broke."""
        for kept in self._now():
            kept.suspend()

    def interrupt(self, error: GradServerError) -> None:
        """End all that waits for an answer."""
        for kept in self._now():
            kept.interrupt(error)

    def revive(self, channel: TcpChannel) -> None:
        """Resume in all that are not, on branches of ``channel``, each in its turn."""
        for kept in self._now():
            if not kept.is_up and self._trunk.is_on(channel):
                kept.revive(channel)

    def _release(self, kept: LastingBranch) -> None:
        with self._lock:
            self._all = [one for one in self._all if one is not kept]

    def _now(self) -> list[LastingBranch]:
        with self._lock:
            return [*self._all]
