"""Advice of errors and warnings about values that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gradserver.protocol.plan import Bucket

_GRADIENTS: Final = (
    "Look at that worker's data, loss and learning rate. A GradScaler lets gradients overflow on purpose: it needs a "
    "coordinator with --nonfinite propagate"
)
_BUFFERS: Final = (
    "Look at what that worker's forward writes into it. A buffer that may hold such values stays with each worker by "
    "buffers_to_ignore=[{names}], and average_buffers=False leaves all of them there"
)
OVERFLOW: Final = "Scale the loss down, or lower the learning rate"
"""Advice for a mean out of its type's range, of contributions that are all finite."""


def on_not_finite(found: Iterable[tuple[Bucket | None, int]]) -> str:
    """Advise about elements that are not finite, each with its bucket. The bucket is None if it is not known."""
    buffers, gradients = list[str](), False
    for bucket, element in found:
        if bucket is None or not bucket.has_buffers:
            gradients = True
        elif 0 <= element < bucket.numel:
            buffers.append(repr(bucket.component_at(element).name))
    told = [_GRADIENTS] if gradients else []
    if buffers or not gradients:
        told.append(_BUFFERS.format(names=", ".join(dict.fromkeys(buffers)) or "…"))
    return ". ".join(told)
