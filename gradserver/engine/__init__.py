"""Engine of the coordinator: ``handle(event, now) -> commands``. It has no sockets, no clock, no threads.

Laws that this package keeps, whatever order events come in (each has a property test):

- A contribution counts once or not at all (L3). Slices of one worker come in order; a second one for
  the same place is refused.
- Contributions are reduced in rank order (L2), when the last one is in, and all get the same result (L1).
- Everything that waits has a deadline (L5), and its error names the missing members.
- What becomes of a non-finite contribution to a bucket is the group's policy, and the same at every member (L6).
- What a member has in flight is bounded by its credit (L7).
- Whatever one connection sends, others lose nothing but the partner they cannot do without (L8).

Control (`gradserver.engine.control.half`) knows groups, membership and plans; data (`gradserver.engine.data.half`)
holds slices and matches them. They share nothing: orders go one way and reports the other, and so several
data halves can run elsewhere (`gradserver.engine.shard` is the engine of one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradserver.engine.commands import Command
from gradserver.engine.control.access import OPEN, Access
from gradserver.engine.control.half import Control
from gradserver.engine.control.registry import Registry
from gradserver.engine.data.half import Data
from gradserver.engine.effects import Effects
from gradserver.engine.events import Branched, Disconnected, Event, Garbled, Received, Reduced, Restored, Stop, Tick
from gradserver.engine.policy import Hashes, OnNonFinite, Policy
from gradserver.engine.reports import Violation
from gradserver.protocol.limits import CREDIT_BYTES
from gradserver.protocol.messages import Inquire, Push, Taken
from gradserver.protocol.messages.recovery import Held, Holding
from gradserver.protocol.planes import AUTO


class Engine:
    """Both halves in one process.

    Args:
        worlds: world sizes by group, or policies of elastic ones, for groups of a known size.
        credit: bytes that one worker may have in flight.
        entropy: gives text that cannot be guessed; without it no data shards are taken.
        rate: of this process's link in Gbit/s, as others state theirs; None if it is unknown.
        hashes: which rounds are hashed, for the ledger.
        incarnation: number of coordinators that have begun where this one writes its records; 0 if none are kept.
            Groups are durable if they are.
        runs: whether the process that has a beacon (`gradserver.protocol.beacon`) is known to run, whatever else
            it does.
        access: rules for founding groups and for taking data shards.
        round_timeout: seconds that an exchange waits for a member that is alive. None: as long as the longest timeout
            that a founder of the group named.
        nonfinite: what becomes of gradients that are not finite; a group that was restored goes on as it began.
        quota: bytes of the journal that members of one group may fill in an hour, beside its rounds; 0 for no limit.
        plane: the plane that all groups are to go by (`gradserver.protocol.offers`); "auto" for any.
    """

    def __init__(
        self,
        worlds: Mapping[str, int | Policy] | None = None,
        credit: int = CREDIT_BYTES,
        entropy: Callable[[], str] | None = None,
        rate: float | None = None,
        hashes: Hashes = Hashes.OFF,
        incarnation: int = 0,
        runs: Callable[[str], bool] = lambda _: False,
        access: Access = OPEN,
        round_timeout: float | None = None,
        nonfinite: OnNonFinite = OnNonFinite.HALT,
        quota: int = 0,
        plane: str = AUTO,
    ) -> None:
        told = worlds or {}, credit, entropy, rate, hashes, incarnation, runs, access, round_timeout, nonfinite
        self.control = Control(Registry(*told, quota, plane))
        self.data = Data()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return what to do about ``event``, in this order. ``now`` in seconds, never decreasing."""
        effects = Effects()
        match event:
            case Received() if type(event.message) is Push:
                self.data.push(event.connection, event.message, event.payloads, now, effects)
            case Reduced():
                self.data.reduced(event, now, effects)
            case Received(connection, Inquire() as inquire):
                self.data.inquire(connection, inquire, effects)
            case Received(connection, Taken() as taken):
                self.data.taken(connection, taken, effects)
            case Received(connection, (Holding() | Held()) as message, payloads):
                self.data.hold(connection, message, payloads, now, effects)
            case Received(connection, message, payloads):
                self.control.receive(connection, message, payloads, now, effects)
            case Branched(connection, base, message):
                self.control.split(connection, base, message, now, effects)
            case Garbled(connection, error):
                effects.report(Violation(connection, error))
            case Disconnected(connection, reason, ended, silent):
                if silent:
                    self.control.left_out(connection, reason, effects)
                self.control.disconnected(connection, reason, ended, silent, now, effects)
            case Tick():
                self.data.tick(now, effects)
                self.control.tick(now, effects)
            case Stop(reason):
                self.control.stop(reason, effects)
            case Restored(records, kept):
                self.control.restore(records, kept, now, effects)
        while effects.orders or effects.reports:
            for order in effects.take_orders():
                self.data.obey(order, now, effects)
            for report in effects.take_reports():
                self.control.heed(report, now, effects)
        return effects.commands

    def next_deadline(self) -> float | None:
        """Return the time at which a `Tick` is due at the latest; None when nothing waits."""
        control, data = self.control.next_deadline(), self.data.next_deadline()
        if control is None or data is None:
            return data if control is None else control
        return min(control, data)

    def awaited(self, group: str) -> set[int]:
        """Return connections of members that others wait for, and that have not begun what these wait for."""
        return self.data.awaited(group) | self.control.awaited(group)

    def allowance(self) -> int:
        """Bytes that one member may have under way, or leave unread, at most."""
        return self.data.allowance()

    def snapshot(self, now: float) -> dict[str, object]:
        """Return what the coordinator sees, as plain JSON values."""
        groups = self.control.snapshot(now)
        for name, traffic in self.data.snapshot(now).items():
            groups[name].update(traffic)
        return {"shards": self.control.roster.snapshot(), "groups": groups, "totals": self.control.totals()}

    def validate(self) -> None:
        """Raise AssertionError if the engine's own invariants do not hold. For tests."""
        self.control.validate()
        self.data.validate()
        active = {name for name, group in self.control.groups.items() if group.begun}
        assert active == set(self.data.groups), (active, set(self.data.groups))


__all__ = ["Engine"]
