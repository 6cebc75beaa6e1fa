"""Progress of a bucket that fills while it is sent, as the host memory of a device's bucket does.

    copied so far        sent so far      answered so far
    ├──────────────┬─────────────────┬───────────────────┐
    0              advance ►         Push ►              wrote ► back to the device

A slice is sent when all of it is there, and not before.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """The part of one bucket's memory that is there to be sent. Not safe to share: the session's lock guards it.

    Args:
        wrote: function that is called with the first byte and the one behind the last of each result that was written.
            It is called by any thread, and must not wait.
        encoded: true if the memory has payloads of the bucket's codec instead of elements: those that are given, slice
            behind slice, and behind them room for as many results. Bytes count as those of elements all the same.

    Attributes:
        nbytes: bytes from the beginning that are there.
        wrote: that function.
        encoded: as given.
    """

    __slots__ = ("encoded", "nbytes", "wrote")

    def __init__(self, wrote: Callable[[int, int], None], encoded: bool = False) -> None:
        self.nbytes = 0
        self.wrote = wrote
        self.encoded = encoded

    def advance(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` bytes are there."""
        self.nbytes = max(self.nbytes, nbytes)
