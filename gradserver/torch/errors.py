"""gradserver's errors as torch.distributed raises them: each is an error of torch's backends, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch.distributed as dist

from gradserver.protocol.errors import DeadlineError, GradServerError

_SHOWN: Final = 16
"""Ranks that a text names at most."""


def as_torchs(error: GradServerError, ranks: Sequence[int] = ()) -> GradServerError:
    """Return ``error`` as one that scripts know: also a DistBackendError, and so a RuntimeError.

    The text of a wait that ran out says "timed out", as scripts look for these words. An error of a group in which
    ranks are not those of the default group tells which these are.

    Args:
        error: the error, with ranks of its group.
        ranks: ranks of the group's members in the default group, by their ranks in the group.
    """
    if isinstance(error, dist.DistBackendError):
        return error
    kind: Any = type(error)
    text = error.message
    if isinstance(error, DeadlineError):
        text = text.replace(" is not done after ", " timed out: it is not done after a timeout of ")
        text = text if "timed out" in text.lower() else f"Timed out: {text}"
    if "rank" in text and any(rank != place for place, rank in enumerate(ranks)):
        shown = ", ".join(map(str, ranks[:_SHOWN])) + ", …" * (len(ranks) > _SHOWN)
        text = f"{text} [in a sub-group of global ranks {shown}, in which rank 0 is global rank {ranks[0]}]"
    found: GradServerError = _both(kind)(text, **error.fields)
    return found


@cache
def _both(kind: Any) -> type[GradServerError]:
    """Return a class of ``kind`` that is a DistBackendError, under the same name."""

    def reduce(self: GradServerError) -> tuple[Any, ...]:
        return as_torchs, (kind(self.message, **self.fields),)

    fields = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": reduce}
    made: type[GradServerError] = type(kind.__name__, (kind, dist.DistBackendError), fields)
    return made
