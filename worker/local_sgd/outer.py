"""Outer optimizers of local SGD: they take the mean of what workers have changed as a gradient of the group's weights.

Every member has the same weights and gets the same means, so its optimizer comes to the same bits. To keep that on
other kinds of processor, too, each operation here rounds once: no product is added to a sum in one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.worker.torch_ddp.stepping import check_steps_alone

Outer: TypeAlias = str | Callable[[list[nn.Parameter]], Optimizer]
"""An outer optimizer: ``average``, ``nesterov``, or a function that makes one of parameters."""

LEARNING_RATE: Final = 0.7
MOMENTUM: Final = 0.9


_MOST_TEXT: Final = 200


class Nesterov(Optimizer):
    """SGD with Nesterov's momentum, as DiLoCo (Douillard et al. 2023) has it.

    ``v = m·v + g``, and ``w = w - r·(g + m·v)``. The values are those of ``torch.optim.SGD(nesterov=True)`` within
    rounding.

    Args:
        parameters: the group's weights.
        lr: outer learning rate r.
        momentum: momentum m.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = LEARNING_RATE, momentum: float = MOMENTUM):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, lr, momentum)

    def _update(self, weight: nn.Parameter, gradient: Tensor, lr: float, momentum: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" in state:
            velocity: Tensor = state["momentum_buffer"]
            velocity.mul_(momentum).add_(gradient)
        else:
            velocity = state["momentum_buffer"] = gradient.clone()
        weight.sub_(velocity.mul(momentum).add_(gradient).mul_(lr))


class Average(Optimizer):
    """Plain averaging: the group's weights become the mean of the workers'."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad)


_BY_NAME: Final[dict[str, Callable[[list[nn.Parameter]], Optimizer]]] = {"average": Average, "nesterov": Nesterov}


def make_outer(outer: Outer, weights: list[nn.Parameter]) -> Optimizer:
    """Return the outer optimizer of ``weights``. InvalidArgumentError if there is none of that name."""
    made = _BY_NAME.get(outer) if isinstance(outer, str) else outer
    if not callable(made):
        raise InvalidArgumentError(
            f"outer is {outer!r}, and must be one of {', '.join(map(repr, _BY_NAME))}, or a function that makes an "
            f"optimizer, such as lambda weights: torch.optim.SGD(weights, lr=0.5)"
            if isinstance(outer, str)
            else f"outer is a {type(outer).__name__}, and must be a function that makes an optimizer of the group's "
            f"weights, such as lambda weights: torch.optim.SGD(weights, lr=0.5)"
        )
    optimizer = made(weights)
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(f"outer has made a {type(optimizer).__name__}, which is not a torch.optim.Optimizer")
    check_steps_alone(optimizer, "LocalSGD")
    return optimizer


def description(optimizer: Optimizer) -> str:
    """Return a text that is the same for optimizers that do the same: the class, and its options that are numbers."""
    options = (f"{name}={value!r}" for name, value in sorted(optimizer.defaults.items()) if value is not None)
    return f"outer {type(optimizer).__name__}({', '.join(options)})"[:_MOST_TEXT]
