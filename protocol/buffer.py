"""The type of memory that tensors travel in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview
"""Anything contiguous with a `len` in bytes. A numpy array is passed as ``array.view(np.uint8).data``."""
Bytes = npt.NDArray[np.uint8]
"""Memory as it is exchanged: contiguous, and counted in bytes."""
