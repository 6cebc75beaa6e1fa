"""The check of a backward: did every parameter get the gradients that the options promise?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.errors import UsageError
from gradserver.worker.torch_ddp.buckets import Slot
from gradserver.worker.torch_ddp.hooks import Arrivals
from gradserver.worker.torch_ddp.rounds import Options

MAX_NAMED: Final = 8


class Graph:
    """The parameters that a module's loss depends on.

    Args:
        options: what the user has said of them.
        arrivals: the gradients of each bucket that have become ready.

    Attributes:
        learned: whether a first backward has shown them, with a static graph.
    """

    def __init__(self, options: Options, arrivals: Sequence[Arrivals]) -> None:
        self.learned = self._warned = False
        self._options = options
        self._arrivals = arrivals

    def check(self) -> None:
        """Check a whole backward. The first one with a static graph is what later ones are compared with."""
        if not self._options.static_graph:
            self.check_all_touched()
            return
        for arrivals in self._arrivals:
            counts = Counter(arrivals.ready)
            for slot in arrivals.bucket.slots:
                if not self.learned:
                    slot.expected = counts[slot]
                elif counts[slot] != slot.expected:
                    raise self._changed(slot, counts[slot])
        self.learned = True

    def check_often(self, arrivals: Arrivals) -> None:
        """Check gradients that have become ready: UsageError if that was once too often."""
        slot = arrivals.once_too_often()
        if slot is None:
            return
        if self._options.static_graph:
            raise self._changed(slot, arrivals.ready.count(slot))
        raise UsageError(
            f"the gradient of {slot.name!r} became ready a second time in one backward, as it does when a "
            f"re-entrant checkpoint holds a part that is used twice: pass static_graph=True (or "
            f"delay_all_reduce=True), or checkpoint with use_reentrant=False"
        )

    def check_all_touched(self) -> None:
        """Check that every parameter has got a gradient since the last exchange, unless some may be unused."""
        if self._options.tracks_used:
            return
        unused = [slot.name for arrivals in self._arrivals for slot in arrivals.untouched()]
        if unused:
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            count = sum(len(arrivals.bucket.slots) for arrivals in self._arrivals)
            raise UsageError(
                f"no gradient came for {', '.join(map(repr, unused[:MAX_NAMED]))}{more} of "
                f"{count} parameters, so the buckets that they belong to were not pushed. If the loss "
                f"does not always depend on them, pass find_unused_parameters=True (or static_graph=True, if it is "
                f"the same ones in every step)"
            )

    def warn_of_graph(self) -> None:
        """Warn, once, of gradients that have a graph themselves."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "backward(create_graph=True): the averaged gradients in .grad have no graph. For a penalty on "
                "gradients use torch.autograd.grad(…, create_graph=True), and add it to the loss",
                stacklevel=3,
            )

    def _changed(self, slot: Slot, count: int) -> UsageError:
        return UsageError(
            f"static_graph=True, but the graph changed: the gradient of {slot.name!r} became ready {count} times "
            f"in this backward, and {slot.expected} times in the first. If the loss does not always depend on the same "
            f"parameters, pass find_unused_parameters=True instead"
        )
