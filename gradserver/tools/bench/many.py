"""Contenders of the suite `parameters`: steps of a module with many parameters of a few elements."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import Tensor, nn

import gradserver
from gradserver.tools.bench.contenders import Contestant
from gradserver.tools.bench.cost import Timed
from gradserver.tools.bench.member import Member
from gradserver.tools.bench.spec import Case, Contender

ELEMENTS: Final = 3
"""Elements of each parameter."""
_RATE: Final = 1e-4


class _Sum(nn.Module):
    """A module that does as little as possible with each parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((ELEMENTS,), 0.5)) for _ in range(count)])

    def forward(self, inputs: Tensor) -> Tensor:
        for part in self.parts:
            inputs = inputs + part
        return inputs.mean()


class _Replica:
    """One replica of it, with its optimizer."""

    def __init__(self, count: int) -> None:
        self.module = _Sum(count)
        self.wrapped: nn.Module = self.module
        self._optimizer = torch.optim.SGD(self.module.parameters(), _RATE)
        self._inputs = torch.ones(ELEMENTS)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.wrapped(self._inputs).backward()
        self._optimizer.step()

    def wrong(self) -> int:
        """Count the gradients that are not the mean. All workers have the same inputs, so it is that of one."""
        self._optimizer.zero_grad()
        self.wrapped(self._inputs).backward()
        alone = torch.autograd.grad(self.module(self._inputs), list(self.module.parameters()))
        pairs = zip(self.module.parameters(), alone, strict=True)
        return sum(one.grad is None or not torch.allclose(one.grad, other) for one, other in pairs)


class ManyParameters(Contestant):
    """Steps in a process for each worker. Option `engine`: ``ours``, ``ddp`` or ``alone``."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self._replica = _Replica(case.numel // ELEMENTS)
        if (engine := spec.options["engine"]) == "ours":
            self._replica.wrapped = gradserver.DistributedDataParallel(
                self._replica.module, member.links[spec.link], init_sync=False
            )
        elif engine == "ddp":
            self._replica.wrapped = nn.parallel.DistributedDataParallel(self._replica.module)
        for _ in range(2):  # torch's wrapper rebuilds its buckets
            self._replica.step()

    def once(self) -> None:
        """Train one step."""
        self._replica.step()

    def check(self) -> dict[str, Any]:
        """Compare the gradients with those of the module alone."""
        return {"wrong": self._replica.wrong()}


class ManyInThreads(Contestant):
    """The same steps by the workers of a LocalCluster, which are threads of this process."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self._cluster = gradserver.LocalCluster(member.workers, timeout=member.seat.timeout)
        self._replicas = [_Replica(case.numel // ELEMENTS) for _ in range(member.workers)]
        self._cluster.run(self._wrap)

    def _wrap(self, worker: gradserver.Worker) -> None:
        torch.set_num_threads(1)
        replica = self._replicas[worker.rank]
        replica.wrapped = gradserver.DistributedDataParallel(replica.module, worker, init_sync=False)
        replica.step()

    def once(self) -> None:
        """Train one step in all threads."""
        self.timed(1)

    def timed(self, count: int) -> Timed:
        """Measure the longest time of all threads."""

        def work(worker: gradserver.Worker) -> float:
            worker.barrier()
            began = time.perf_counter()
            for _ in range(count):
                self._replicas[worker.rank].step()
            return time.perf_counter() - began

        return Timed(max(self._cluster.run(work)))

    def check(self) -> dict[str, Any]:
        """Check as `ManyParameters.check` does."""
        return {"wrong": sum(self._cluster.run(lambda worker: self._replicas[worker.rank].wrong()))}

    def close(self) -> None:
        """End the threads."""
        self._cluster.close()
