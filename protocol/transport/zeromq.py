"""ZeroMQ's flags as plain numbers: combining its enumeration takes longer than sending."""

from typing import Final

import zmq

NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
ZERO_COPY_BYTES: Final = 32 * 1024
"""Payload size from which zero-copy pays. Below it a copy costs less than handing memory over and getting it back."""
