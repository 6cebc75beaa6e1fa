"""What tensors travel as."""

from __future__ import annotations

Buffer = bytes | bytearray | memoryview
"""Anything contiguous whose `len` counts bytes; numpy arrays go as ``array.view(np.uint8).data``."""
