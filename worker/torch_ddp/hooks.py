"""Hooks of torch that tell of a backward: of gradients that are ready, and of the end.

A hook of a small gradient takes no more than a list's append and a comparison. The course of backward hears of the
first one of a bucket, and of the last. It hears of each large one, and brings it while it is in cache.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, Protocol

from torch import Tensor

from gradserver.worker.torch_ddp.buckets import GradientBucket, Slot

NEVER: Final = sys.maxsize
"""Number of gradients that no bucket has."""
_expected = attrgetter("expected")


class Arrivals:
    """The gradients of one bucket that have become ready.

    Attributes:
        index: the bucket's place in the plan.
        bucket: the bucket.
        ready: slots of gradients that became ready in this backward, in order, each as often as that was.
        due: length of ``ready`` from which on each hook tells of its gradient.
        touched: slots with gradients from earlier backwards since the last exchange.
    """

    def __init__(self, index: int, bucket: GradientBucket) -> None:
        self.index = index
        self.bucket = bucket
        self.ready: list[Slot] = []
        self.due = 0
        self.touched: set[Slot] = set()
        self._right = 0
        """Length of ``ready`` in which no gradient was found too often."""

    @property
    def expected(self) -> int:
        """Number of gradients that become ready in a whole backward."""
        return sum(map(_expected, self.bucket.slots))

    def once_too_often(self) -> Slot | None:
        """Return a slot with a gradient that became ready more often than expected, if there is one."""
        count = len(self.ready)
        if count == self._right or (len(set(self.ready)) == count and all(map(_expected, self.ready))):
            self._right = count
            return None
        return next((slot for slot, count in Counter(self.ready).items() if count > slot.expected), None)

    def untouched(self) -> list[Slot]:
        """Return the slots without a gradient since the last exchange."""
        touched = self.touched.union(self.ready)
        return [] if len(touched) == len(self.bucket.slots) else [s for s in self.bucket.slots if s not in touched]

    def rest(self) -> None:
        """Note the gradients of a backward that is over. The next hook is one of another backward."""
        self.due = self._right = 0
        self.touched.update(self.ready)
        self.ready.clear()

    def forget(self) -> None:
        """Forget all gradients: they were exchanged."""
        self.due = self._right = 0
        self.touched.clear()
        self.ready.clear()


class Told(Protocol):
    """Object that is told of backwards: `gradserver.worker.torch_ddp.backward.Backward`."""

    def on_gradient(self, arrivals: Arrivals, slot: Slot) -> None:
        """Take the gradient of one parameter, which is ready."""

    def end_all(self) -> None:
        """End backward at all modules that it has reached."""

    def fail(self, number: int | None = None) -> None:
        """Handle the error that ended backward ``number``."""


def hook_parameters(told: Told, buckets: Iterable[GradientBucket]) -> list[Arrivals]:
    """Tell ``told`` of gradients in ``buckets`` that are ready, as long as it lives. Return what hooks note."""
    found = weakref.ref(told)  # parameters outlive their wrapper, and must not keep it alive

    def hook(arrivals: Arrivals, slot: Slot) -> Callable[[Tensor], None]:
        ready, is_small = arrivals.ready, slot.is_small
        note = ready.append

        def on_gradient(_: Tensor) -> None:
            note(slot)
            if is_small and len(ready) < arrivals.due:
                return
            if (there := found()) is not None:
                there.on_gradient(arrivals, slot)

        return on_gradient

    handles, each = [], []
    for index, bucket in enumerate(buckets):
        each.append(arrivals := Arrivals(index, bucket))
        for slot in bucket.slots:
            parameter: Any = slot.parameter  # torch has not typed the method
            handles.append(parameter.register_post_accumulate_grad_hook(hook(arrivals, slot)))
    weakref.finalize(told, lambda: [handle.remove() for handle in handles])
    return each


class Ending:
    """A callback at the end of a backward. The autograd engine drops it uncalled when backward fails.

    The first one that is called serves all modules.
    """

    _told: Told | None = None

    def __init__(self, told: Told, number: int) -> None:
        self._told = told
        self._number = number

    def __call__(self) -> None:
        """End backward."""
        told, self._told = self._told, None
        if told is not None:
            told.end_all()

    def __del__(self) -> None:
        if self._told is not None:
            self._told.fail(self._number)
