"""The optimizers that step the parameters of a module, in a block of code.

Torch calls one list of hooks for all optimizers of the process. Other threads iterate over it at any time, so it
changes once only, when this module is imported. Each thread has its own blocks and notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Stepper: TypeAlias = Callable[[], object] | Optimizer
"""An optimizer, or a function that steps one."""


class _Blocks(threading.local):
    """The blocks that this thread is in: the ids of a module's parameters, and the optimizers that have stepped any."""

    def __init__(self) -> None:
        self.open: list[tuple[frozenset[int], list[Stepper]]] = []


_blocks = _Blocks()


@contextmanager
def noting_steps(module: nn.Module, noted: list[Stepper]) -> Iterator[None]:
    """Add to ``noted`` the optimizers that step parameters of ``module`` in the body, in this thread."""
    _blocks.open.append((frozenset(map(id, module.parameters())), noted))
    try:
        yield
    finally:
        _blocks.open.pop()


def step_once(stepper: Stepper) -> None:
    """Step the optimizer, or call the function."""
    if isinstance(stepper, Optimizer):
        stepper.step()
    else:
        stepper()


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for own, noted in _blocks.open:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer not in noted and any(id(parameter) in own for parameter in parameters):
            noted.append(optimizer)


register_optimizer_step_post_hook(_after_step)
