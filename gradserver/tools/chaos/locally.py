"""Local SGD of a chaos run's worker: a wrapped module, of which the parameters are set instead of trained."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import gradserver
from gradserver.tools.chaos import generator
from gradserver.tools.chaos.workload import Workload
from gradserver.worker.local_sgd.outer import Average, Nesterov

Array = npt.NDArray[Any]

_STEPS: Final = 2
"""Steps between two exchanges."""
_MIXING: Final = 0.5
"""Part of a worker's own parameters, if a mean comes a step after the fragment was sent."""


class Locally:
    """The local SGD of one membership.

    Attributes:
        mean: the mean of the last round.
    """

    def __init__(self, worker: gradserver.Worker, workload: Workload) -> None:
        torch.set_num_threads(1)
        self._worker, self._workload = worker, workload
        self.mean = np.empty(0, np.float32)
        module = nn.Module()
        for vector, size in enumerate(generator.SIZES):
            module.register_parameter(f"vector{vector}", nn.Parameter(torch.zeros(size)))
        self._own: list[Array] = [parameter.detach().numpy() for parameter in module.parameters()]
        several = workload.fragments > 1
        self._model = gradserver.LocalSGD(
            module,
            worker,
            every=_STEPS * workload.fragments,
            outer=self._outer,
            fragments=workload.fragments,
            delay=int(several),
            mixing=_MIXING if several else 0.0,
        )
        self._model.on_boundary(self._at_boundary)

    def _outer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the outer optimizer, and have it note the means that it takes."""
        outer = Nesterov(weights) if self._workload.outer == "nesterov" else Average(weights)
        outer.register_step_pre_hook(lambda *_: self._note(weights))
        return outer

    def _note(self, weights: list[nn.Parameter]) -> None:
        taken = [weight.grad.numpy() for weight in weights if weight.grad is not None]
        self.mean = np.concatenate(taken)

    def _at_boundary(self) -> None:
        if not self._worker.observes:
            self._worker.boundary()

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_inside(self) -> bool:
        """True if this worker contributes, or was told that it is to."""
        return self._worker._session.member.is_inside

    def replay(self) -> None:
        """Take part in a round without contributing, as a learner."""
        self._model.replay()

    def exchange(self, number: int, weight: float) -> str:
        """Contribute to round ``number``, and take its mean. Return what is wrong with this worker's own parameters."""
        seed, name, vectors = self._workload.seed, self._worker.name, self._workload.fragment(number)
        changes = {vector: generator.values(seed, name, number, vector) for vector in vectors}
        while self._model.round == number:
            group = self._weights()
            for vector, change in changes.items():
                np.subtract(group[vector], change, out=self._own[vector])
            trained = {vector: self._own[vector].copy() for vector in vectors}
            self._model.set_weight(weight)
            self._model.step()
            weight = 0.0
        return self._wrong(trained)

    def _wrong(self, trained: dict[int, Array]) -> str:
        """Compare this worker's parameters with those that it trained: they are the group's, or mixed with these."""
        share, group = np.float32(_MIXING if self._workload.fragments > 1 else 0), self._weights()
        for vector, before in trained.items():
            due = before * share + group[vector] * (1 - share) if share else group[vector]
            if not np.array_equal(due.view(np.uint32), self._own[vector].view(np.uint32)):
                return f"vector {vector} of the worker's own parameters is not mixed from these and the group's"
        return ""

    def _weights(self) -> list[Array]:
        """Return the group's weights, vector by vector."""
        return [weight.numpy() for weight in self._model.weights().values()]

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────

    def fingerprint(self) -> int:
        """Compute 64 bits of the group's weights, and of the momentum behind them."""
        buffers = [state["momentum_buffer"].numpy() for state in self._momenta()]
        return generator.fingerprint([*self._weights(), *buffers])

    def _momenta(self) -> list[dict[str, Any]]:
        """List the states of the outer optimizer, in the order of vectors."""
        outer = self._model.outer
        named = {vector: part for part, vector in enumerate(self._order())}
        weights = [weight for group in outer.param_groups for weight in group["params"]]
        found = [outer.state.get(weights[named[vector]], {}) for vector in sorted(named)]
        return [state for state in found if "momentum_buffer" in state]

    def _order(self) -> list[int]:
        """List the vectors in the order of fragments, as the outer optimizer has them."""
        return [vector for number in range(self._workload.fragments) for vector in self._workload.fragment(number)]

    def state(self) -> dict[str, Any]:
        """Return the state that a learner needs."""
        return {"weights": self._weights(), "outer": self._model.outer_state()}

    def install(self, state: dict[str, Any]) -> None:
        """Install the state of a member."""
        for own, given in zip(self._own, state["weights"], strict=True):
            own[:] = given
        self._model.load_outer_state(state["outer"])
