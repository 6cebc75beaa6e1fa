"""The options of a presence: a second connection, by which libzmq's own thread shows that a process runs.

Workers and data shards have one each. This module knows libzmq's options by name only.
"""

from __future__ import annotations

import hashlib
from typing import Final

from gradserver.protocol.messages import BePresent

_BEATS: Final = 0.09
"""Beats in the silence that is allowed. Silence is noticed after the first."""
_BEAT_SECONDS: Final = 0.15
"""Seconds between two beats, at most."""
_AGAIN_MS: Final = 100
_MOST_MS: Final = 0xFFFF * 100
"""The most milliseconds that ZMTP can say."""


def presence_of(token: str) -> str:
    """Return the identity of the presence with this token, which a restarted coordinator knows, too."""
    return hashlib.sha256(b"presence " + token.encode()).hexdigest()


def beat_of(wanted: BePresent) -> float:
    """Return the seconds between two of libzmq's beats. The first comes as long after the connection was made."""
    return min(max(wanted.silence * _BEATS, 0.001), _BEAT_SECONDS)


def presence_options(wanted: BePresent, address: str) -> dict[str, int | bytes]:
    """Return the options of a DEALER that is ``wanted`` at ``address``, by libzmq's names for them.

    It says Ping once, and nothing else. If it breaks, libzmq makes it again, by itself.
    """
    return {
        "ROUTING_ID": wanted.identity.encode(),
        "IPV6": int("[" in address),
        "CONFLATE": 1,  # nothing reads what comes
        "LINGER": 0,
        "RECONNECT_IVL": _AGAIN_MS,
        "HEARTBEAT_IVL": int(beat_of(wanted) * 1000),
        "HEARTBEAT_TTL": min(int(wanted.silence * 1000), _MOST_MS),  # then the other side closes it
        "HEARTBEAT_TIMEOUT": 0,  # this side never does: its successor would come before it is forgotten there
    }
