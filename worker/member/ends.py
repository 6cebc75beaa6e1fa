"""The two ends of an exchange at a worker: where contributions come from, and where results go."""

from __future__ import annotations

from typing import Protocol

from gradserver.protocol.buffer import Buffer, Bytes


class Writer(Protocol):
    """Function that puts results of slices where they belong. Called for every slice, also those that others get."""

    def __call__(self, start: int, stop: int, payload: Buffer | None) -> None:
        """Take bytes ``start`` to ``stop`` of the exchange; None stands for zeros."""


Destination = Bytes | Writer
"""Destination of results: memory as long as the exchange, or a function that puts them elsewhere."""


class Parted(Protocol):
    """Contributions that do not lie in one piece of memory as they go."""

    def part(self, index: int) -> Bytes:
        """Give the contribution to slice ``index``."""


Source = Bytes | Parted
"""Source of contributions: memory as long as the exchange (or a slice, if there is one), or a piece for each."""
