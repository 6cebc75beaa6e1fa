"""The session's part in a recovery: it carries out what `gradserver.worker.member.recovery` says."""

from __future__ import annotations

import threading
from typing import Protocol

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages.recovery import Fetch, Resumed, Standing
from gradserver.worker.clock import Clock
from gradserver.worker.donor import Donor, nobody_takes_it
from gradserver.worker.handle import Handle
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.recovery import Recovery
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.traffic import Traffic


class Owner(Protocol):
    """The session, as far as its resumption needs it."""

    @property
    def traffic(self) -> Traffic:
        """Exchanges of the session."""

    @property
    def donor(self) -> Donor:
        """The state that it sends to learners."""

    def goes_on_with(self, shards: tuple[str, ...], answers: bool) -> bool:
        """Return true if connections go to ``shards``, or are yet to, if that ``answers`` a Resume."""

    def propose_again(self, channel: Channel) -> None:
        """Say on a new connection what has no answer yet."""

    def stop_attending(self) -> list[Handle]:
        """Attend at no shard any more, and give what waits for that."""


class Resumption:
    """Resumes a member's session, and carries out its recoveries.

    Args:
        session: the session that is resumed.
        clock: stands still while it is not known what counts.
        regions: where in shared memory results are written.

    Attributes:
        inventory: what the member holds.
        recovery: what it says of that.
    """

    def __init__(self, session: Owner, clock: Clock, regions: Regions) -> None:
        member = session.traffic.member
        self.inventory = Inventory(member.identity, member.rounds, regions)
        self.recovery = Recovery(member, self.inventory)
        self._session = session
        self._traffic = session.traffic
        self._clock = clock
        self._lock = threading.RLock()
        """Held while the inventory is said. If that fails as the connection broke, the same thread interrupts."""
        self._expected: Handle | None = None
        """Handle of the Resumed that answers this member's Resume."""
        self._silent = False
        """True from that Resumed until Holding, when nothing else is said."""
        self._standing: Handle | None = None
        """Handle of the last Standing."""

    # ── what reconnecting calls ───────────────────────────────────────────────────────────────────────

    def suspend(self) -> None:
        """Push nothing, until it is known what counts."""
        self.recovery.suspend()

    def is_held(self, shard: int) -> bool:
        """Return true if nothing is pushed to that shard."""
        return self._traffic.member.exchanges.shards[shard].held

    @property
    def generation(self) -> int:
        """The latest recovery that the primary has told of."""
        return self.recovery.generation

    def resume(self, channel: Channel) -> Handle:
        """Say on a new connection which member this is; the handle is done, with the Resumed, when that is known."""
        with self._lock, self._traffic.mutex:
            self._expected = handle = Handle(self._traffic.timeout, channel)
            self._silent = True
            message = self.recovery.resume(self._session.donor.serves)
        channel.send(message)
        return handle

    def restate(self, channel: Channel) -> Handle:
        """Say what this member holds; the handle is done when all data halves have said what stands.

        Its value is the number of slices that are pushed again.
        """
        self._await_pushes()
        with self._lock:
            self._silent = False
            self.recovery.restate()
            self._standing = handle = Handle(self._traffic.timeout, channel)
            self._session.propose_again(channel)
            self._hold(channel)
        return handle

    def interrupt(self, error: GradServerError) -> None:
        """End all that waits for the connection on which this member resumes."""
        with self._lock:
            waiting = [handle for handle in (self._expected, self._standing) if handle is not None]
            waiting += self._session.stop_attending()
            self._expected = self._standing = None
        for handle in waiting:
            handle._complete(error)

    # ── what the coordinator says ─────────────────────────────────────────────────────────────────────

    def heed(self, message: Resumed | Fetch | Standing, shard: int) -> None:
        """Take what is said of a recovery."""
        there = self._traffic.member.exchanges.shards[shard]
        match message:
            case Resumed():
                self._resumed(message, there)
            case Fetch():
                with self._traffic.mutex:
                    held, payload = self.recovery.fetch(message)
                self._traffic.channel.send(held, (payload,) if payload is not None else (), shard)
            case Standing() if message.version == self.recovery.generation:
                self._stands(there, message.round)

    def _resumed(self, message: Resumed, shard: ShardTraffic) -> None:
        """Take everything that was pushed and is unanswered as void."""
        is_primary = shard.number == 0
        if is_primary and not self._session.goes_on_with(message.shards, self._expected is not None):
            return  # all connections are made anew
        self.recovery.hold(shard)
        self._clock.stop()
        self._await_pushes()
        with self._traffic.mutex:
            self._session.donor.forget()
            self.recovery.void_states(nobody_takes_it())
            effects = self._traffic.member.effects.take()
        self._traffic.carry_out(effects)
        with self._lock:
            with self._traffic.mutex:
                self.recovery.resumed(message.version, shard.number)
            expected = None
            if is_primary:
                expected, self._expected = self._expected, None
            if expected is not None:
                expected._value = message
                expected._complete()
            elif not self._silent:
                self._hold(self._traffic.channel)

    def _await_pushes(self) -> None:
        """Wait until another thread has sent the push that it is about to send.

        A push that comes to a data half before Holding is void. Behind Holding it would count, and come once more.
        """
        with self._traffic.pumping:
            pass

    def _stands(self, shard: ShardTraffic, number: int) -> None:
        """Push (again) what has no result."""
        traffic = self._traffic
        with traffic.pumping, traffic.mutex:  # no thread is about to push what it took before
            done = self.recovery.stands(shard, number)
            effects = traffic.member.effects.take()
        traffic.carry_out(effects)
        if done:
            self._clock.go()
            with self._lock:
                handle, self._standing = self._standing, None
            if handle is not None:
                handle._value = self.recovery.again
                handle._complete()
        traffic.pump()
        traffic.channel.watch(traffic.member.idle)

    def _hold(self, channel: Channel) -> None:
        """Send each shard its part of the inventory, if nothing is on its way any more that was sent before."""
        with self._traffic.mutex:
            said = self.recovery.holdings()
        for shard, holding, spans in said:
            channel.send(holding, (spans,), shard)
