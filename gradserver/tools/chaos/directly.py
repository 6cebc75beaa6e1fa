"""The exchange of a chaos run's worker that reduces with others: the one of a wrapped module, without the module."""

from __future__ import annotations

from typing import Any

import torch

import gradserver
from gradserver.protocol.planes import DIRECT
from gradserver.tools.chaos import generator, tally
from gradserver.worker.planes.calls import LEAST_BYTES_OF_A_HOST
from gradserver.worker.planes.commit import commit_plan
from gradserver.worker.planes.direct import DirectPlane
from gradserver.worker.planes.epochs import Directs
from gradserver.worker.planes.staging import Staging


class Directly:
    """An exchange that workers reduce among themselves, on the plane that a wrapped module has.

    Attributes:
        way: how the last round went: "direct", "void" if it was begun so and done again, or "coordinator".
        tallies: number of tallies in the largest tensor that is summed: on the direct plane the least number that
            workers of one host sum among themselves.
    """

    def __init__(self, worker: gradserver.Worker) -> None:
        torch.set_num_threads(1)
        plan, cpu = generator.plan(), torch.device("cpu")
        through = Staging(worker, worker.agree_beside(plan), None)
        self._plane = DirectPlane(worker, plan, worker.agree_beside(commit_plan(plan)), through, [cpu], None)
        self._flat = [self._plane.new_memory(size, torch.float32, cpu) for size in generator.SIZES]
        self.buckets: list[Any] = [flat.numpy() for flat in self._flat]
        self.order = range(len(generator.SIZES))
        self.way = ""
        self.tallies = LEAST_BYTES_OF_A_HOST // (8 * tally.LENGTH) if worker.plane == DIRECT else tally.LARGE
        self._directs = Directs.of(worker)
        self._is_direct, self._voids = False, 0

    def push(self, part: int, weight: float) -> None:
        """Contribute to a bucket."""
        if not self._plane.pushed:
            self._is_direct, self._voids = self._directs.reduces(), self._directs.voids
        self._plane.push(part, self._flat[part], weight)

    def finish(self) -> None:
        """Wait until all results are in the buckets."""
        self._plane.finish()
        is_void = self._directs.voids > self._voids
        self.way = "void" if is_void else "direct" if self._is_direct else "coordinator"
