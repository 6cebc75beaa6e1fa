"""Traffic of a group: bytes that came and went, and bytes that each member has in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gradserver.engine.data.exchange import Exchange, Run
from gradserver.engine.identities import Identities
from gradserver.protocol.errors import LimitExceededError
from gradserver.protocol.exchange import Pool, pool_of
from gradserver.protocol.limits import SLICE_BYTES

_ENDS: Final = 512
_RATES_SECONDS: Final = 10.0


@dataclass(slots=True)
class Traffic:
    """Counters of one group."""

    identities: Identities
    credit: int
    """Bytes that a member may have in flight in each pool."""
    outstanding: Counter[tuple[int, Pool]] = field(default_factory=Counter)
    """Bytes in flight, by member and pool."""
    bytes_in: int = 0
    bytes_out: int = 0
    slices: int = 0
    ends: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_ENDS))
    """Times at which the last rounds ended, with the bytes that had come and gone by then."""

    def end_round(self, now: float) -> None:
        """Note that a round has ended."""
        self.ends.append((now, self.bytes_in, self.bytes_out))

    def rates(self, now: float) -> dict[str, float] | None:
        """Return rounds and bytes a second, over whole rounds; None before there are two.

        They are those of the last seconds, or of the last round if that took longer. If the present one takes longer
        than all these, they fall.
        """
        if len(self.ends) < 2:
            return None
        latest = self.ends[-1]
        place = next((place for place, end in enumerate(self.ends) if end[0] >= latest[0] - _RATES_SECONDS), 0)
        place = min(place, len(self.ends) - 2)
        seconds = max(latest[0] - self.ends[place][0], 1e-9)
        if now - latest[0] > seconds:
            seconds = now - self.ends[place][0]
        gone_in, gone_out = (latest[i] - self.ends[place][i] for i in (1, 2))
        return {"rounds": (len(self.ends) - 1 - place) / seconds, "in": gone_in / seconds, "out": gone_out / seconds}

    def charge(self, exchange: Exchange, member_id: int, run: Run) -> None:
        """Let ``member_id`` have more in flight. It may overdraw its credit by one slice, for its frontier."""
        account = member_id, pool_of(exchange.key, member_id)
        outstanding = self.outstanding[account] + exchange.cost(run)
        if outstanding > self.credit + SLICE_BYTES:
            raise LimitExceededError(
                f"{self.identities.call(member_id)} has {outstanding} bytes in flight, its credit is {self.credit}"
            )
        self.outstanding[account] = outstanding

    def refund(self, exchange: Exchange, given: Iterable[tuple[int, Run]]) -> None:
        """Take slices off their givers' debts: they are answered, or never will be."""
        outstanding, key, cost = self.outstanding, exchange.key, exchange.cost
        for member_id, run in given:
            outstanding[member_id, pool_of(key, member_id)] -= cost(run)

    def has_no_credit(self, member_id: int) -> bool:
        """Tell whether ``member_id`` has used up its credit for buckets."""
        return self.outstanding[member_id, Pool.BUCKETS] > self.credit - SLICE_BYTES

    def is_short(self, member_id: int) -> bool:
        """Tell whether ``member_id`` may have to wait for credit: a message takes a quarter of it at most."""
        return 4 * self.outstanding[member_id, Pool.BUCKETS] > 3 * self.credit

    def receive(self, nbytes: int) -> None:
        """Count bytes that came."""
        self.bytes_in += nbytes

    def send(self, nbytes: int) -> None:
        """Count bytes that are sent."""
        self.bytes_out += nbytes

    def answer(self, slices: int) -> None:
        """Count slices that have their results."""
        self.slices += slices

    def hand_over(self, member_id: int, exchanges: Iterable[Exchange]) -> None:
        """Give ``member_id`` to a new member, with the debt for what its predecessor gave to open ``exchanges``."""
        for pool in Pool:
            self.outstanding.pop((member_id, pool), None)
        for exchange in exchanges:
            for giver, run in exchange.unanswered() if exchange.failure is None else ():
                if giver == member_id:
                    self.outstanding[member_id, pool_of(exchange.key, member_id)] += exchange.cost(run)

    def void(self) -> None:
        """Forget what is in flight: it is given once more."""
        self.outstanding.clear()

    def snapshot(self, world: int, now: float) -> dict[str, object]:
        """Return the counters, as plain JSON values."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "slices": self.slices,
            "rates": self.rates(now),
            "outstanding": [sum(self.outstanding[member_id, pool] for pool in Pool) for member_id in range(world)],
        }
