"""The exchange of the buckets of a chaos run's worker."""

from __future__ import annotations

from typing import Any, Protocol

import gradserver
from gradserver.tools.chaos import generator, tally


class Exchange(Protocol):
    """The exchange of a worker's buckets.

    Attributes:
        buckets: memory of contributions and results.
        order: the order in which they are pushed.
        way: how the last round went, if workers may reduce among themselves.
        tallies: number of tallies in the largest tensor that is summed.
    """

    buckets: list[Any]
    order: range
    way: str
    tallies: int

    def push(self, part: int, weight: float) -> None:
        """Contribute to a bucket."""

    def finish(self) -> None:
        """Wait until all results are in the buckets."""


class Reduced:
    """An exchange that the coordinator reduces. The largest bucket is pushed first."""

    def __init__(self, worker: gradserver.Worker) -> None:
        self._worker = worker
        worker.agree(generator.plan())
        self.buckets: list[Any] = [worker.empty(size, "float32") for size in generator.SIZES]
        self.order = range(len(generator.SIZES))[::-1]
        self.way, self.tallies = "", tally.LARGE

    def push(self, part: int, weight: float) -> None:
        """Contribute to a bucket."""
        self._worker.push(part, self.buckets[part], weight=weight)

    def finish(self) -> None:
        """Wait until all results are in the buckets."""
        self._worker.finish_round()


def directly(worker: gradserver.Worker) -> Exchange:
    """Return an exchange that workers reduce among themselves."""
    from gradserver.tools.chaos.directly import Directly  # torch takes seconds to load

    return Directly(worker)
