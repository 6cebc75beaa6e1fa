"""Plain sockets in a ring: the limit of the network stack when all processes send and receive at once.

Each process sends `nbytes` to both neighbours and receives as much from both. Together they send 2·W·nbytes, as much
as a round through a coordinator does, over W connections in both directions.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence


class Ring:
    """The two connections of this process."""

    def __init__(
        self, listener: socket.socket, rank: int, addresses: Sequence[tuple[str, int]], timeout: float
    ) -> None:
        """Connect to both neighbours. `addresses` are the listeners of all ranks."""
        self._timeout = timeout
        following = socket.create_connection(addresses[(rank + 1) % len(addresses)], timeout)
        listener.settimeout(timeout)
        previous, _ = listener.accept()
        self._sockets = {one.fileno(): one for one in (following, previous)}
        for one in self._sockets.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send `outgoing` to both neighbours, and receive as much from each into `incoming`.

        One thread and one loop: threads would wait for each other's interpreter lock instead of the network.
        """
        sent = dict.fromkeys(self._sockets, 0)
        got = dict.fromkeys(self._sockets, 0)
        total, poll = len(outgoing), select.poll()
        for number in self._sockets:
            poll.register(number, select.POLLIN | select.POLLOUT)
        open_ends = len(self._sockets)
        while open_ends:
            ready = poll.poll(1000 * self._timeout)
            if not ready:
                raise TimeoutError(f"the ring of plain sockets made no progress for {self._timeout:.0f} s")
            for number, event in ready:
                one = self._sockets[number]
                if event & select.POLLOUT and sent[number] < total:
                    sent[number] += one.send(outgoing[sent[number] :])
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and got[number] < total:
                    count = one.recv_into(incoming[got[number] :])
                    if count == 0:
                        raise ConnectionError("a neighbour in the ring of plain sockets has closed its connection")
                    got[number] += count
                wants = (select.POLLOUT if sent[number] < total else 0) | (select.POLLIN if got[number] < total else 0)
                if wants:
                    poll.modify(number, wants)
                else:
                    poll.unregister(number)
                    open_ends -= 1

    def close(self) -> None:
        """Close both connections."""
        for one in self._sockets.values():
            one.close()


def listen(host: str) -> socket.socket:
    """Open a listener on a free port."""
    listener = socket.create_server((host, 0))
    listener.listen(4)
    return listener
