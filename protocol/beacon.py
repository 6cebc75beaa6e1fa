"""The beacon: a second connection, through which libzmq's own thread shows that a process runs.

Each worker and data shard has one. What the two sides agree on is here; the socket is in `.transport.beacon`.
"""

from __future__ import annotations

import hashlib
from typing import Final

from gradserver.protocol.messages import BePresent

_BEATS: Final = 0.09
"""Part of the allowed silence that passes between two beats. Silence is noticed behind the first."""
_BEAT_SECONDS: Final = 0.15
"""Longest time between two beats."""


def beacon_id(token: str) -> str:
    """Return the identity of the beacon of the member with this token.

    It follows from the token alone, so a coordinator that was started anew knows it, too.
    """
    return hashlib.sha256(b"presence " + token.encode()).hexdigest()


def beat_seconds(wanted: BePresent) -> float:
    """Return the seconds between two of libzmq's beats. The first comes as long after the connection was made."""
    return min(max(wanted.silence * _BEATS, 0.001), _BEAT_SECONDS)
