"""The socket of a beacon (`gradserver.protocol.beacon`), as workers and data shards open it."""

from __future__ import annotations

from typing import Final

import zmq

from gradserver.protocol.beacon import beat_seconds
from gradserver.protocol.messages import BePresent, Ping
from gradserver.protocol.wire import encode

_RECONNECT_MS: Final = 100
_MAX_TTL_MS: Final = 0xFFFF * 100
"""Longest time to live that ZMTP can say."""


def beacon_socket(context: zmq.Context[zmq.Socket[bytes]], wanted: BePresent, address: str) -> zmq.Socket[bytes]:
    """Return a DEALER for `light_beacon`, with the options that ``wanted`` asks for at ``address``."""
    dealer = context.socket(zmq.DEALER)
    option = dealer.setsockopt
    option(zmq.ROUTING_ID, wanted.identity.encode())
    option(zmq.IPV6, int("[" in address))
    option(zmq.CONFLATE, 1)  # what comes is not read
    option(zmq.LINGER, 0)
    option(zmq.RECONNECT_IVL, _RECONNECT_MS)
    option(zmq.HEARTBEAT_IVL, int(beat_seconds(wanted) * 1000))
    option(zmq.HEARTBEAT_TTL, min(int(wanted.silence * 1000), _MAX_TTL_MS))  # after which the other side closes it
    option(zmq.HEARTBEAT_TIMEOUT, 0)  # and never this one: its successor would come before it is forgotten there
    return dealer


def light_beacon(dealer: zmq.Socket[bytes], address: str) -> None:
    """Connect a `beacon_socket`, and say Ping: the one message that passes through it.

    If the connection breaks, libzmq makes it again, by itself.
    """
    dealer.connect(address)
    dealer.send(encode(Ping()))
