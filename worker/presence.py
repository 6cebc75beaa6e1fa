"""A worker's presence at its coordinator and each data shard."""

from __future__ import annotations

import zmq

from protocol.messages import BePresent, Ping
from protocol.presence import presence_options
from protocol.wire import encode


def be_present(context: zmq.Context[zmq.Socket[bytes]], address: str, wanted: BePresent) -> zmq.Socket[bytes]:
    """The presence that is ``wanted``, until it is closed."""
    presence: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in presence_options(wanted, address).items():
        presence.setsockopt(getattr(zmq, option), value)
    presence.connect(address)
    presence.send(encode(Ping()))
    return presence
