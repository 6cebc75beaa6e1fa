"""Exchanges of a group that are open, or that failed a short time ago."""

from __future__ import annotations

from collections import deque
from typing import Final

from gradserver.engine.data.exchange import Exchange
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import ExchangeKey

_MAX_FAILED: Final = 1024
"""Failed exchanges that are kept for members that come late; a member that is later still waits for its deadline."""


class Exchanges(dict[ExchangeKey, Exchange]):
    """Exchanges by key. Other modules read it like any dict, and change it by the methods below.

    Attributes:
        failed: keys of exchanges that failed, the latest ones; some members have yet to hear of some of them.
        settled: slices of open exchanges that all members have the result of since the latest recovery.
        failed_before: collectives and transfers that had failed at a member by then, with the errors to tell others.
    """

    __slots__ = ("failed", "failed_before", "settled")

    def __init__(self) -> None:
        super().__init__()
        self.failed: deque[ExchangeKey] = deque()
        self.settled: dict[ExchangeKey, frozenset[int]] = {}
        self.failed_before: dict[ExchangeKey, GradServerError] = {}

    def begin(self, exchange: Exchange) -> None:
        """Open ``exchange``."""
        self[exchange.key] = exchange

    def end(self, exchange: Exchange) -> None:
        """Forget ``exchange``, if it is known: all have its results, or have heard of its failure."""
        self.pop(exchange.key, None)

    def keep_failed(self, exchange: Exchange) -> None:
        """Keep a failed exchange for members that have yet to hear of it."""
        self[exchange.key] = exchange
        self.failed.append(exchange.key)
        if len(self.failed) > _MAX_FAILED:
            self.pop(self.failed.popleft(), None)

    def void(self) -> None:
        """Forget all that is open, as members are about to say what they hold."""
        self.clear()
        self.settled.clear()
        self.failed.clear()

    def settle(self, key: ExchangeKey, slices: frozenset[int]) -> None:
        """Note ``slices`` of ``key`` that all members have the result of."""
        self.settled[key] = slices

    def recall(self, failed: dict[ExchangeKey, GradServerError]) -> None:
        """Fail collectives and transfers that had ``failed`` at a member for the others, too."""
        self.failed_before = failed
