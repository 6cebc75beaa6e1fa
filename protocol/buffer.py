"""The type of memory that tensors travel in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview
"""Anything contiguous with a `len` in bytes. A numpy array is passed as ``array.view(np.uint8).data``."""
Bytes = npt.NDArray[np.uint8]
"""Memory as it is exchanged: contiguous, and counted in bytes."""


def size_text(count: int) -> str:
    """Format a number of bytes: 1.5 MB, 1.5 kB, 15 bytes."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} bytes"
