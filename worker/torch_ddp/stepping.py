"""The optimizers that step the parameters of a module: in a block of code, and when they begin and end.

Torch calls one list of hooks for all optimizers of the process. Other threads iterate over it at any time, so it
changes once only, when this module is imported. Each thread has its own blocks and notes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradserver.protocol.errors import InvalidArgumentError, UsageError

Stepper: TypeAlias = Callable[[], object] | Optimizer
"""An optimizer, or a function that steps one."""


class _Block(NamedTuple):
    """A block: the ids of a module's parameters, the optimizers that have stepped any, and a check before they do."""

    parameters: frozenset[int]
    noted: list[Stepper]
    check: Callable[[Optimizer], object] | None

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` steps any of the parameters."""
        return any(id(one) in self.parameters for group in optimizer.param_groups for one in group["params"])


class _Blocks(threading.local):
    """The blocks that this thread is in."""

    def __init__(self) -> None:
        self.open: list[_Block] = []


_blocks = _Blocks()


@contextmanager
def noting_steps(
    module: nn.Module, noted: list[Stepper], check: Callable[[Optimizer], object] | None = None
) -> Iterator[None]:
    """Add to ``noted`` the optimizers that step parameters of ``module`` in the body, in this thread.

    Args:
        module: the module.
        noted: gets the optimizers.
        check: function that is called with an optimizer before each of these steps.
    """
    _blocks.open.append(_Block(frozenset(map(id, module.parameters())), noted, check))
    try:
        yield
    finally:
        _blocks.open.pop()


def check_steps_alone(optimizer: Optimizer, caller: str) -> None:
    """Raise InvalidArgumentError if ``caller`` cannot step ``optimizer``: its step wants a closure, as L-BFGS does."""
    for one in list(signature(type(optimizer).step).parameters.values())[1:]:
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            raise InvalidArgumentError(
                f"{type(optimizer).__name__}.step needs {one.name!r}, which computes gradients again, and {caller} "
                f"steps once for each exchange: use an optimizer that steps without it, such as torch.optim.AdamW"
            )


def step_once(stepper: Stepper) -> None:
    """Step the optimizer, or call the function."""
    if isinstance(stepper, Optimizer):
        check_steps_alone(stepper, "model.join")
        stepper.step()
    else:
        stepper()


def steppers(step: object) -> list[Stepper]:
    """Return what an argument of `DistributedDataParallel.join` names; TypeError if that cannot step."""
    found: list[Any] = list(step) if isinstance(step, Sequence) else [step]
    for one in found:
        if isinstance(one, Optimizer):
            check_steps_alone(one, "model.join")
        elif not callable(one):
            raise TypeError(
                f"model.join takes what the loop does after each backward, an optimizer, a function, or several of "
                f"these, and not {one!r:.80}"
            )
    return found


def checked_steps(block: Sequence[Stepper] | None, mode: str) -> Sequence[Stepper]:
    """Return what steps an update at the end of a ``block`` of join; UsageError if nothing does."""
    if block is None:
        raise UsageError(
            f"another module of this worker is updated at the end of a block of model.join(): in a group of mode "
            f"{mode!r} any module can be, so open a block for each, as in "
            f"`with generator.join(…), discriminator.join(…):`"
        )
    if not block:
        raise UsageError(
            "model.join() steps the optimizers that the loop has stepped, and this worker's loop has stepped none, "
            "while others still have batches: give it what to step, model.join(optimizer)"
        )
    return block


class Watcher(Protocol):
    """Object that is told of the steps of some parameters."""

    def stepping(self) -> None:
        """Note that an optimizer begins a step."""

    def stepped(self) -> None:
        """Note that it has ended the step."""


class _Watched(NamedTuple):
    watcher: weakref.ref[Watcher]
    parameters: frozenset[int]


_watched: tuple[_Watched, ...] = ()
"""All that are told, of all threads: a new tuple when one comes."""
_coming = threading.Lock()


def watch_steps(watcher: Watcher, parameters: Iterable[nn.Parameter]) -> None:
    """Tell ``watcher`` of each step of an optimizer that has any of ``parameters``, as long as it lives."""
    global _watched
    own = frozenset(map(id, parameters))
    if own:
        with _coming:
            living = (one for one in _watched if one.watcher() is not None)
            _watched = (*living, _Watched(weakref.ref(watcher), own))


def _watchers(optimizer: Optimizer) -> Iterator[Watcher]:
    for one in _watched:
        parameters = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if (watcher := one.watcher()) is not None and any(parameter in one.parameters for parameter in parameters):
            yield watcher


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for watcher in _watchers(optimizer):
        watcher.stepping()
    for block in _blocks.open:
        if block.check is not None and block.steps(optimizer):
            block.check(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for watcher in _watchers(optimizer):
        watcher.stepped()
    for block in _blocks.open:
        if optimizer not in block.noted and block.steps(optimizer):
            block.noted.append(optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
