"""Hooks of torch that tell of a backward: of each parameter's gradient, and of the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from gradserver.worker.torch_ddp.buckets import GradientBucket, Slot


class Told(Protocol):
    """Object that is told of backwards: `gradserver.worker.torch_ddp.backward.Backward`."""

    def on_gradient(self, index: int, slot: Slot) -> None:
        """Take the gradient of one parameter, which is ready."""

    def end_all(self) -> None:
        """End backward at all modules that it has reached."""

    def fail(self, number: int | None = None) -> None:
        """Handle the error that ended backward ``number``."""


def hook_parameters(told: Told, buckets: Iterable[GradientBucket]) -> None:
    """Tell ``told`` of each gradient in ``buckets`` that is ready, as long as it lives."""
    found = weakref.ref(told)  # parameters outlive their wrapper, and must not keep it alive

    def hook(index: int, slot: Slot) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            if (there := found()) is not None:
                there.on_gradient(index, slot)

        return on_gradient

    handles = []
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            parameter: Any = slot.parameter  # torch has not typed the method
            handles.append(parameter.register_post_accumulate_grad_hook(hook(index, slot)))
    weakref.finalize(told, lambda: [handle.remove() for handle in handles])


class Ending:
    """A callback at the end of a backward. The autograd engine drops it uncalled when backward fails.

    The first one that is called serves all modules.
    """

    def __init__(self, told: Told, number: int) -> None:
        self._told: Told | None = told
        self._number = number

    def __call__(self) -> None:
        """End backward."""
        told, self._told = self._told, None
        if told is not None:
            told.end_all()

    def __del__(self) -> None:
        if self._told is not None:
            self._told.fail(self._number)
