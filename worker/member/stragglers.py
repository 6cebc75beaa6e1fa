"""What comes unasked to a worker: it keeps that until it comes to these rounds, and says how much it has read."""

from __future__ import annotations

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import LeftOutError
from gradserver.protocol.exchange import unasked_cost
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Result
from gradserver.worker.member.backlog import Backlog

_TOLD_BYTES = 1 * MIB
"""So much is read before a data shard is told of it."""


class Read:
    """How much was read of what each data shard has sent. Not safe to share: the session's lock guards it."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}

    def more(self, shard: int, payload: Buffer | None) -> int:
        """One more result was read; gives what ``shard`` is to be told, 0 for nothing yet."""
        untold = self._untold.get(shard, 0) + unasked_cost(payload)
        self._untold[shard] = 0 if untold >= _TOLD_BYTES else untold
        return untold if untold >= _TOLD_BYTES else 0


def lacks(result: Result, seat: int) -> bool:
    """Whether what ``seat`` gives to these slices does not count."""
    return bool(result.without) and seat in result.without


def overrun(backlog: Backlog, number: int, others: int, rank: int) -> LeftOutError:
    """What to raise when there is no room for results of round ``others`` at a worker in round ``number``."""
    return LeftOutError(
        f"this worker is late for round {number}, while the others are in round {others}: more than "
        f"{backlog.limit / MIB:g} MiB of results wait for it. It has to join again",
        rank=rank,
    )
