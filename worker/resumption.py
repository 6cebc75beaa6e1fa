"""The session's part in a recovery: it carries out what `gradserver.worker.member.recovery` says."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradserver.protocol.channel import Channel
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages.recovery import Fetch, Resumed, Standing
from gradserver.worker.clock import Clock
from gradserver.worker.handle import Handle
from gradserver.worker.member.inventory import Inventory
from gradserver.worker.member.recovery import Recovery
from gradserver.worker.member.regions import Regions
from gradserver.worker.member.sendqueue import ShardTraffic
from gradserver.worker.traffic import Traffic


class Resumption:
    """Resumes a member's session, and carries out its recoveries.

    Args:
        traffic: exchanges of the session that is resumed.
        goes_on_with: returns true if connections go to these data shards, or are yet to, if they answer a Resume.
        clock: stands still while it is not known what counts.
        regions: where in shared memory results are written.

    Attributes:
        inventory: what the member holds.
        recovery: what it says of that.
    """

    def __init__(
        self, traffic: Traffic, goes_on_with: Callable[[tuple[str, ...], bool], bool], clock: Clock, regions: Regions
    ) -> None:
        member = traffic.member
        self.inventory = Inventory(member.identity, member.rounds, regions)
        self.recovery = Recovery(member, self.inventory)
        self._traffic = traffic
        self._goes_on_with = goes_on_with
        self._clock = clock
        self._lock = threading.RLock()
        """Held while the inventory is said. If that fails as the connection broke, the same thread interrupts."""

    # ── what reconnecting calls ───────────────────────────────────────────────────────────────────────

    def is_held(self, shard: int) -> bool:
        """Return true if nothing is pushed to that shard."""
        return self._traffic.member.exchanges.shards[shard].held

    def resume(self, channel: Channel) -> Handle:
        """Say on a new connection which member this is; the handle is done, with the Resumed, when that is known."""
        handle = Handle(self._traffic.timeout, channel)
        with self._lock, self._traffic.mutex:
            message = self.recovery.resume(handle)
        channel.send(message)
        return handle

    def restate(self, channel: Channel) -> Handle:
        """Say what this member holds; the handle is done when all data halves have said what stands.

        Its value is the number of slices that are pushed again.
        """
        self._await_pushes()
        with self._lock:
            handle = Handle(self._traffic.timeout, channel)
            with self._traffic.mutex:
                self.recovery.restate(handle)
                again = self._traffic.member.again()
            for message, payloads in again:
                channel.send(message, payloads)
            self._hold(channel)
        return handle

    def interrupt(self, error: GradServerError) -> None:
        """End all that waits for the connection on which this member resumes."""
        with self._lock, self._traffic.mutex:
            waiting = self.recovery.interrupt()
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
            case Standing() if message.generation == self.recovery.generation:
                self._stands(there, message.round)

    def _resumed(self, message: Resumed, shard: ShardTraffic) -> None:
        """Take everything that was pushed and is unanswered as void."""
        is_primary = shard.number == 0
        if is_primary and not self._goes_on_with(message.shards, self.recovery.is_resuming):
            return  # all connections are made anew
        self.recovery.hold(shard)
        self._clock.stop()
        self._await_pushes()
        with self._traffic.mutex:
            self.recovery.void_states()
            effects = self._traffic.member.effects.take()
        self._traffic.carry_out(effects)
        with self._lock:
            with self._traffic.mutex:
                states = self.recovery.resumed(message, shard.number)
                effects = self._traffic.member.effects.take()
            self._traffic.carry_out(effects)
            if states:
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
        if done:
            self._clock.go()
        traffic.carry_out(effects)
        traffic.pump()
        traffic.channel.watch(traffic.member.idle)

    def _hold(self, channel: Channel) -> None:
        """Send each shard its part of the inventory, if nothing is on its way any more that was sent before."""
        with self._traffic.mutex:
            said = self.recovery.holdings()
        for shard, holding, spans in said:
            channel.send(holding, (spans,), shard)
