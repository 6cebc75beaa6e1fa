"""The parts of one exchange at several data shards."""

from __future__ import annotations

from typing import Generic, TypeVar

from gradserver.protocol.errors import GradServerError

P = TypeVar("P")


class Siblings(Generic[P]):
    """The parts of one exchange at several data shards, which are one thing to the caller that waits for it.

    Attributes:
        left: how many are neither done nor given up.
        error: why the exchange failed, if a shard has said so.
        verdict: what is known if no shard says why.
        done: parts that are done, of a collective that a recovery begins again whole.
    """

    __slots__ = ("done", "error", "left", "verdict")

    def __init__(self, left: int) -> None:
        self.left = left
        self.error: GradServerError | None = None
        self.verdict: GradServerError | None = None
        self.done: list[P] = []

    def take_back(self, part: P) -> None:
        """Count a part that was done as open."""
        self.done.remove(part)
        self.left += 1
