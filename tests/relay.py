"""Something between workers and a coordinator that loses, repeats and delays whole messages, as no TCP does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq

from tests.cluster import Task

Frames = list[bytes]
Tamper = Callable[[bool, int, Frames], Sequence[Frames]]
"""What goes on instead of a message: (whether it is to the coordinator, how many went before it, its frames)."""

_IDLE_MS = 20


def is_presence(identity: bytes) -> bool:
    """Whether that is a connection which no message passes through: ZeroMQ's own identities begin with a zero."""
    return identity[:1] != b"\0"


@contextmanager
def relay(url: str, tamper: Tamper) -> Iterator[str]:
    """A worker that connects to the URL given is connected to the coordinator at ``url``, for as long as it stays."""
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.setsockopt(zmq.LINGER, 0)
    monitor = front.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    backs: dict[bytes, zmq.Socket[bytes]] = {}
    counts = {True: 0, False: 0}
    ended: list[bool] = []

    def altered(upwards: bool, frames: Frames) -> Sequence[Frames]:
        counts[upwards] += 1
        return tamper(upwards, counts[upwards] - 1, frames)

    def serve() -> None:
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while not ended:
            ready = dict(poller.poll(_IDLE_MS))
            if monitor in ready:
                monitor.recv_multipart()
                for back in backs.values():
                    poller.unregister(back)
                    back.close()
                backs.clear()
            if front in ready:
                identity, *frames = front.recv_multipart()
                if identity not in backs:
                    back = backs[identity] = context.socket(zmq.DEALER)
                    back.setsockopt(zmq.LINGER, 0)
                    if is_presence(identity):
                        back.setsockopt(zmq.ROUTING_ID, identity)
                    back.connect(url)
                    poller.register(back, zmq.POLLIN)
                for message in [frames] if is_presence(identity) else altered(True, frames):
                    backs[identity].send_multipart(message)
            for identity, back in backs.items():
                if is_presence(identity):
                    continue
                if back in ready:
                    for message in altered(False, back.recv_multipart()):
                        front.send_multipart([identity, *message])
                if not ready and isinstance(tamper, Swap):
                    for message in tamper.late(True):
                        back.send_multipart(message)
                    for message in tamper.late(False):
                        front.send_multipart([identity, *message])

    task = Task(serve)
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        ended.append(True)
        task.result()
        front.disable_monitor()
        for socket in (monitor, front, *backs.values()):
            socket.close()
        context.term()


def twice(_upwards: bool, number: int, frames: Frames) -> Sequence[Frames]:
    """Every third message is repeated."""
    return [frames] * (2 if number % 3 == 0 else 1)


class Swap:
    """Every other message waits for the one behind it, which goes first, or until nothing happens any more."""

    def __init__(self) -> None:
        self._kept: dict[bool, Frames] = {}

    def __call__(self, upwards: bool, number: int, frames: Frames) -> Sequence[Frames]:
        if upwards in self._kept:
            return [frames, self._kept.pop(upwards)]
        if number % 2 and number > 2:
            self._kept[upwards] = frames
            return []
        return [frames]

    def late(self, upwards: bool) -> Sequence[Frames]:
        """What still waits."""
        return [self._kept.pop(upwards)] if upwards in self._kept else []
