"""What a presence is set to: a second connection, by which libzmq's own thread says that a process runs.

Workers and data shards have one each. This module knows libzmq's options by name only.
"""

from __future__ import annotations

import hashlib
from typing import Final

from gradserver.protocol.messages import BePresent

_BEATS: Final = 0.09
"""One in this part of the silence that is allowed. Silence is noticed behind the first."""
_BEAT_SECONDS: Final = 0.15
"""Between two of them, at most."""
_AGAIN_MS: Final = 100
_MOST_MS: Final = 0xFFFF * 100
"""More ZMTP cannot say."""


def presence_of(token: str) -> str:
    """The identity of the presence of whoever has this token: a coordinator that was started anew knows it, too."""
    return hashlib.sha256(b"presence " + token.encode()).hexdigest()


def beat_of(wanted: BePresent) -> float:
    """Seconds between two beats of libzmq's; the first comes as long after the connection was made."""
    return min(max(wanted.silence * _BEATS, 0.001), _BEAT_SECONDS)


def presence_options(wanted: BePresent, address: str) -> dict[str, int | bytes]:
    """The options of a DEALER that is ``wanted`` at ``address``, by libzmq's names for them.

    It is to say Ping once, and nothing else. If it breaks, libzmq makes it again, by itself.
    """
    return {
        "ROUTING_ID": wanted.identity.encode(),
        "IPV6": int("[" in address),
        "CONFLATE": 1,  # nobody reads what comes
        "LINGER": 0,
        "RECONNECT_IVL": _AGAIN_MS,
        "HEARTBEAT_IVL": int(beat_of(wanted) * 1000),
        "HEARTBEAT_TTL": min(int(wanted.silence * 1000), _MOST_MS),  # after which the other side closes it
        "HEARTBEAT_TIMEOUT": 0,  # and never this one: its successor would come before it is forgotten there
    }
