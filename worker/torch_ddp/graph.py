"""The check of a backward: did every parameter get the gradients that the options promise?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.errors import UsageError
from gradserver.worker.torch_ddp.buckets import Slot
from gradserver.worker.torch_ddp.rounds import Options

MAX_NAMED: Final = 8


class Graph:
    """The parameters that a module's loss depends on.

    Args:
        options: what the user has said of them.
        slots: all parameters that are exchanged.

    Attributes:
        learned: whether a first backward has shown them, with a static graph.
    """

    def __init__(self, options: Options, slots: Sequence[Slot]) -> None:
        self.learned = self._warned = False
        self._options = options
        self._slots = slots

    def check(self) -> None:
        """Check a whole backward. The first one with a static graph is what later ones are compared with."""
        if not self._options.static_graph:
            self.check_all_touched()
        elif not self.learned:
            for slot in self._slots:
                slot.expected = slot.fired
            self.learned = True
        else:
            changed = next((slot for slot in self._slots if slot.fired != slot.expected), None)
            if changed is not None:
                raise self._changed(changed)

    def check_often(self, slot: Slot) -> None:
        """Check a gradient that has become ready: UsageError if that is once too often."""
        if slot.fired <= slot.expected:
            return
        if self._options.static_graph:
            raise self._changed(slot)
        raise UsageError(
            f"the gradient of {slot.name!r} became ready a second time in one backward, as it does when a "
            f"re-entrant checkpoint holds a part that is used twice: pass static_graph=True (or "
            f"delay_all_reduce=True), or checkpoint with use_reentrant=False"
        )

    def check_all_touched(self) -> None:
        """Check that every parameter has got a gradient since the last exchange, unless some may be unused."""
        if self._options.tracks_used:
            return
        unused = [slot.name for slot in self._slots if not slot.touched]
        if unused:
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            raise UsageError(
                f"no gradient came for {', '.join(map(repr, unused[:MAX_NAMED]))}{more} of "
                f"{len(self._slots)} parameters, so the buckets that they belong to were not pushed. If the loss "
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

    def _changed(self, slot: Slot) -> UsageError:
        return UsageError(
            f"static_graph=True, but the graph changed: the gradient of {slot.name!r} became ready {slot.fired} times "
            f"in this backward, and {slot.expected} times in the first. If the loss does not always depend on the same "
            f"parameters, pass find_unused_parameters=True instead"
        )
