"""Errors and warnings about the graph of a backward: it is another one than the wrapper was told."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.errors import UsageError
from gradserver.worker.torch_ddp.buckets import Slot

_MAX_NAMED: Final = 8


def check_touched(slots: Sequence[Slot]) -> None:
    """Raise UsageError if no gradient came for some of the parameters."""
    unused = [slot.name for slot in slots if not slot.touched]
    if unused:
        more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
        raise UsageError(
            f"no gradient came for {', '.join(map(repr, unused[:_MAX_NAMED]))}{more} of {len(slots)} parameters, so "
            f"the buckets that they belong to were not pushed. If the loss does not always depend on them, pass "
            f"find_unused_parameters=True (or static_graph=True, if it is the same ones in every step)"
        )


def graph_changed(slot: Slot) -> UsageError:
    """Make the error for a parameter with another number of gradients than in the first backward."""
    return UsageError(
        f"static_graph=True, but the graph changed: the gradient of {slot.name!r} became ready {slot.fired} times "
        f"in this backward, and {slot.expected} times in the first. If the loss does not always depend on the same "
        f"parameters, pass find_unused_parameters=True instead"
    )


def warn_of_graph() -> None:
    """Warn of gradients with a graph: their averages have none."""
    warnings.warn(
        "backward(create_graph=True): the averaged gradients in .grad have no graph. For a penalty on gradients "
        "use torch.autograd.grad(…, create_graph=True), and add it to the loss",
        stacklevel=2,
    )
