"""A network that loses, repeats, delays and swaps messages: for each worker a port, and a relay of whole messages.

Run as ``python -m gradserver.chaos.relay HOST:PORT NAME…``. Prints the ports by name, and takes on standard input, each
in a line which it answers with ``done``:

    drop NAME            the next message, to the worker or from it, is lost
    repeat NAME COUNT    the next ones come twice
    swap NAME COUNT      so often a message comes behind the one after it
    delay NAME S FOR     messages take S seconds longer, for so long

TCP loses and swaps nothing, so this speaks ZMTP at both ends. It answers heartbeats itself, and therefore closes its
connection at one end when that at the other is gone. A drop, repeat or swap hits whichever direction comes first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

_HEARTBEAT_MS, _SILENCE_MS = 700, 1800
_UNBOUND_MS = 2000
_FAREWELL_MS = 500
_TOGETHER_SECONDS = 0.05
"""A message that is to be overtaken goes on after this, if none comes."""
Frames = list[zmq.Frame]


@dataclass(slots=True)
class Faults:
    """What is to happen to messages of one worker."""

    drop: int = 0
    repeat: int = 0
    swap: int = 0
    delay: float = 0.0
    delay_until: float = 0.0


@dataclass(slots=True)
class Lane:
    """One direction of one connection: what waits in it, with the time at which each goes on."""

    faults: Faults
    waiting: deque[tuple[float, Frames]] = field(default_factory=deque)
    kept: tuple[float, Frames] | None = None
    """One that is to be overtaken, and until when it waits for that."""

    def take(self, frames: Frames, now: float) -> None:
        """A message has come."""
        faults = self.faults
        if faults.drop:
            faults.drop -= 1
            return
        due = now + faults.delay if now < faults.delay_until else now
        if self.waiting:
            due = max(due, self.waiting[-1][0])  # delayed, and not overtaken
        if faults.swap and self.kept is None:
            faults.swap -= 1
            self.kept = now + _TOGETHER_SECONDS, frames
            return
        self.waiting.append((due, frames))
        if faults.repeat:
            faults.repeat -= 1
            self.waiting.append((due, frames))
        self._let_go(due)

    def _let_go(self, due: float) -> None:
        if self.kept is not None:
            self.waiting.append((due, self.kept[1]))
            self.kept = None

    def due(self, now: float) -> list[Frames]:
        """What goes on now."""
        if self.kept is not None and self.kept[0] <= now:
            self._let_go(now)
        ready = []
        while self.waiting and self.waiting[0][0] <= now:
            ready.append(self.waiting.popleft()[1])
        return ready

    def next(self) -> float | None:
        """When something goes on."""
        moments = [self.waiting[0][0]] if self.waiting else []
        moments += [self.kept[0]] if self.kept is not None else []
        return min(moments, default=None)


class Connection:
    """One connection of a worker, on the descriptor ``fd``, and its counterpart to the coordinator."""

    def __init__(self, context: zmq.Context[Any], target: str, faults: Faults, fd: int) -> None:
        self.fd = fd
        self.onward = context.socket(zmq.DEALER)
        _heartbeats(self.onward)
        self.onward.setsockopt(zmq.RECONNECT_IVL, -1)  # a new one would be a stranger
        self.monitor = self.onward.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.onward.connect(target)
        self.up, self.down = Lane(faults), Lane(faults)

    def close(self) -> None:
        """Have the coordinator see that it is gone, behind what it had said."""
        for frames in self.up.due(float("inf")):
            _send(self.onward, frames)
        _end(self.onward, self.monitor, _FAREWELL_MS)


class Relay:
    """One worker's port."""

    def __init__(self, context: zmq.Context[Any], target: str) -> None:
        self._context, self._target = context, target
        self.faults = Faults()
        self.connections: dict[bytes, Connection] = {}
        self._alive: set[int] = set()
        """Descriptors of connections to this port."""
        self._doomed: set[bytes] = set()
        """Connections that have ended, of which something may still be read."""
        self.port = 0
        self._listen()

    def _listen(self) -> None:
        self.socket = self._context.socket(zmq.ROUTER)
        _heartbeats(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        if self.port:
            self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        else:
            self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def break_off(self) -> None:
        """The coordinator has closed a connection: close all of the worker's, which it then sees."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._alive.clear()
        self._doomed.clear()
        self.socket.unbind(self.socket.getsockopt(zmq.LAST_ENDPOINT))
        while self.monitor.poll(_UNBOUND_MS) and recv_monitor_message(self.monitor)["event"] != zmq.EVENT_CLOSED:
            pass  # only then the port is free
        _end(self.socket, self.monitor)
        self._listen()

    def _note(self) -> None:
        """See who has come, and who has gone. Who only tried the port has no counterpart."""
        while (news := _happened(self.monitor)) is not None:
            event, fd = news
            if event == zmq.EVENT_ACCEPTED:
                self._alive.add(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self._alive.discard(fd)
                self._doomed |= {identity for identity, one in self.connections.items() if one.fd == fd}

    def _receive(self, now: float) -> None:
        while (frames := _received(self.socket)) is not None:
            identity = frames.pop(0).bytes
            if identity not in self.connections:
                self._note()  # descriptors are used again
                fd = int(frames[-1].get(zmq.SRCFD))
                if fd not in self._alive:  # the last words of somebody whose counterpart is closed
                    continue
                self.connections[identity] = Connection(self._context, self._target, self.faults, fd)
            self.connections[identity].up.take(frames, now)

    def take_all(self, now: float) -> None:
        """Take what has come from either side, and send on what is due. Never waits."""
        self._receive(now)
        for identity, connection in self.connections.items():
            while (frames := _received(connection.onward)) is not None:
                connection.down.take(frames, now)
            for frames in connection.up.due(now):
                _send(connection.onward, frames)
            for frames in connection.down.due(now):
                _send(self.socket, [identity, *frames])

    def next(self) -> float | None:
        """When something is due."""
        moments = [lane.next() for one in self.connections.values() for lane in (one.up, one.down)]
        return min((moment for moment in moments if moment is not None), default=None)

    def heed(self, now: float) -> None:
        """Close the counterparts of those who have gone."""
        self._note()
        if self._doomed:
            self._receive(now)
            for identity in self._doomed:
                self.connections.pop(identity).close()
            self._doomed.clear()
        if any(_happened(connection.monitor) is not None for connection in self.connections.values()):
            self.break_off()


def _heartbeats(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def _end(socket: zmq.Socket[Any], monitor: zmq.Socket[Any], linger: int = 0) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(linger)


def _received(socket: zmq.Socket[Any]) -> Frames | None:
    try:
        frames: Frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    return frames


def _send(socket: zmq.Socket[Any], frames: list[Any]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.ZMQError:  # that side has just gone, and its monitor will say so
        return


def _happened(monitor: zmq.Socket[Any]) -> tuple[int, int] | None:
    """What a monitor has to tell, and of which descriptor; None if there is no news."""
    try:
        news = recv_monitor_message(monitor, zmq.DONTWAIT)
    except zmq.Again:
        return None
    return int(news["event"]), int(news["value"])


def _obey(relays: dict[str, Relay], line: str) -> None:
    do, name, *numbers = line.split()
    faults, values = relays[name].faults, [float(number) for number in numbers]
    match do:
        case "drop":
            faults.drop += 1
        case "repeat":
            faults.repeat += int(values[0])
        case "swap":
            faults.swap += int(values[0])
        case "delay":
            faults.delay, faults.delay_until = values[0], time.monotonic() + values[1]


def main() -> None:
    """Relay until the parent is gone."""
    context = zmq.Context()
    relays = {name: Relay(context, f"tcp://{sys.argv[1]}") for name in sys.argv[2:]}
    print(json.dumps({name: relay.port for name, relay in relays.items()}), flush=True)
    unread = b""
    while True:
        now = time.monotonic()
        for relay in relays.values():
            relay.heed(now)
            relay.take_all(now)
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        for relay in relays.values():
            for socket in (relay.socket, relay.monitor):
                poller.register(socket, zmq.POLLIN)
            for connection in relay.connections.values():
                for socket in (connection.onward, connection.monitor):
                    poller.register(socket, zmq.POLLIN)
        due = min((moment for relay in relays.values() if (moment := relay.next()) is not None), default=None)
        ready = dict(poller.poll(None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)))
        if sys.stdin.fileno() in ready:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                _obey(relays, line.decode())
                print("done", flush=True)


if __name__ == "__main__":
    main()
