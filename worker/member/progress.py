"""Progress of a bucket that fills while it is sent, as the host memory of a device's bucket does.

    copied so far        sent so far      answered so far
    ├──────────────┬─────────────────┬───────────────────┐
    0              advance ►         Push ►              wrote ► back to the device

A slice is sent when all of it is there, and not before.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """How much of one bucket's memory is there to be sent. Not safe to share: the session's lock guards it.

    Args:
        wrote: function that is called with the first byte and the one behind the last of each result that was written.
            It is called by any thread, and must not wait.

    Attributes:
        nbytes: bytes from the beginning that are there.
        wrote: that function.
    """

    __slots__ = ("nbytes", "wrote")

    def __init__(self, wrote: Callable[[int, int], None]) -> None:
        self.nbytes = 0
        self.wrote = wrote

    def advance(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` bytes are there."""
        self.nbytes = max(self.nbytes, nbytes)
