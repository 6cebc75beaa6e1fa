"""A second connection to a coordinator, by which libzmq's own thread says that this process runs."""

from __future__ import annotations

from typing import Final

import zmq

from protocol.messages import BePresent, Ping
from protocol.wire import encode

_BEATS: Final = 0.09
"""One in this part of the silence that is allowed. Silence is noticed behind the first."""
_AGAIN_MS: Final = 100


def be_present(context: zmq.Context[zmq.Socket[bytes]], address: str, wanted: BePresent) -> zmq.Socket[bytes]:
    """The connection that is ``wanted``, open until it is closed. If it breaks, libzmq makes it again, by itself."""
    presence: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    option = presence.setsockopt
    option(zmq.ROUTING_ID, wanted.identity.encode())
    option(zmq.IPV6, int("[" in address))
    option(zmq.CONFLATE, 1)  # nobody reads what comes
    option(zmq.LINGER, 0)
    option(zmq.RECONNECT_IVL, _AGAIN_MS)
    option(zmq.HEARTBEAT_IVL, max(int(wanted.silence * _BEATS * 1000), 1))
    option(zmq.HEARTBEAT_TTL, min(int(wanted.silence * 1000), 0xFFFF * 100))  # after which the other side closes it
    option(zmq.HEARTBEAT_TIMEOUT, 0)  # and never this one: its successor would come before it is forgotten there
    presence.connect(address)
    presence.send(encode(Ping()))
    return presence
