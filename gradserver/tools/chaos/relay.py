"""A network that loses, repeats, delays and swaps messages: for each worker a port and a relay of whole messages.

It is run as ``python -m gradserver.tools.chaos.relay HOST:PORT NAME…``. It prints the ports by name. On standard input
it takes lines, each of which it answers with ``done``:

    drop NAME            lose the next message, to the worker or from it
    repeat NAME COUNT    deliver the next messages twice
    swap NAME COUNT      deliver a message behind the one after it, COUNT times
    delay NAME S FOR     delay messages by S seconds, for so long

Whenever one takes effect, it prints ``hit WHAT NAME``.

TCP loses and swaps nothing, so this speaks ZMTP at both ends. It answers heartbeats itself, and therefore closes its
connection at one end when that at the other breaks. A drop, repeat or swap hits whichever direction comes first.

Beacons (`gradserver.protocol.beacon`) have names of their own, and only heartbeats pass through them. Each has a
counterpart of its name at the coordinator for as long as it exists. Faults never hit them, so a worker that freezes
behind a relay is detected like any other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradserver.protocol.limits import COORDINATOR_SILENCE, HEARTBEAT_SECONDS

_UNBOUND_MS: Final = 2000
_FAREWELL_MS: Final = 500
_TOGETHER_SECONDS: Final = 0.05
"""Time after which a message that is to be overtaken goes on, if no other comes."""
_LOOK_SECONDS: Final = 0.1
"""Interval at which to look which beacons exist."""
_FORGET_SECONDS: Final = 60.0
"""Time after which a lost beacon is forgotten."""
Frames = list[zmq.Frame]


class Fate(Enum):
    """Treatment of a message."""

    PASSES = auto()
    LOST = auto()
    TWICE = auto()
    OVERTAKEN = auto()


@dataclass(slots=True)
class Faults:
    """Faults that are to hit messages of one worker."""

    drop: int = 0
    repeat: int = 0
    swap: int = 0
    delay: float = 0.0
    delay_until: float = 0.0
    on_hit: Callable[[str], object] = lambda _fault: None
    """Called with each fault that takes effect."""

    def fate(self, lane: Lane, _frames: Frames) -> Fate:
        """Choose the treatment of the next message in ``lane``."""
        if self.drop:
            self.drop -= 1
            self.on_hit("drop")
            return Fate.LOST
        if self.swap and lane.kept is None:
            self.swap -= 1
            return Fate.OVERTAKEN
        if self.repeat:
            self.repeat -= 1
            self.on_hit("repeat")
            return Fate.TWICE
        return Fate.PASSES


@dataclass(slots=True)
class Lane:
    """One direction of one connection: its waiting messages, with the time at which each goes on."""

    faults: Faults
    upwards: bool
    """True for the direction to the coordinator."""
    waiting: deque[tuple[float, Frames]] = field(default_factory=deque)
    kept: tuple[float, Frames] | None = None
    """Message that is to be overtaken, and the time until which it waits for that."""

    def take(self, frames: Frames, now: float) -> None:
        """Take a message."""
        fate = self.faults.fate(self, frames)
        if fate is Fate.LOST:
            return
        if fate is Fate.OVERTAKEN and self.kept is None:
            self.kept = now + _TOGETHER_SECONDS, frames
            return
        due = now
        if now < self.faults.delay_until:
            due += self.faults.delay
            self.faults.on_hit("delay")
        if self.waiting:
            due = max(due, self.waiting[-1][0])  # delayed, and not overtaken
        self.waiting += [(due, frames)] * (2 if fate is Fate.TWICE else 1)
        if self.kept is not None:
            self.faults.on_hit("swap")
        self._let_go(due)

    def _let_go(self, due: float) -> None:
        if self.kept is not None:
            self.waiting.append((due, self.kept[1]))
            self.kept = None

    def due(self, now: float) -> list[Frames]:
        """Return the messages that go on now."""
        if self.kept is not None and self.kept[0] <= now:
            self._let_go(now)
        ready = []
        while self.waiting and self.waiting[0][0] <= now:
            ready.append(self.waiting.popleft()[1])
        return ready

    def next(self) -> float | None:
        """Return when the next message goes on."""
        moments = [self.waiting[0][0]] if self.waiting else []
        moments += [self.kept[0]] if self.kept is not None else []
        return min(moments, default=None)


class Connection:
    """One connection of a worker, on the descriptor ``fd``, and its counterpart to the coordinator."""

    def __init__(self, context: zmq.Context[Any], target: str, faults: Faults, fd: int) -> None:
        self.fd = fd
        self.onward = context.socket(zmq.DEALER)
        _set_up(self.onward)
        self.onward.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
        self.onward.setsockopt(zmq.HEARTBEAT_TIMEOUT, int((COORDINATOR_SILENCE - HEARTBEAT_SECONDS) * 1000))
        self.onward.setsockopt(zmq.RECONNECT_IVL, -1)  # the coordinator would not know a new one
        self.monitor = self.onward.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.onward.connect(target)
        self.up, self.down = Lane(faults, True), Lane(faults, False)

    def close(self) -> None:
        """Close the counterpart, behind the last messages of the worker."""
        for frames in self.up.due(float("inf")):
            _send(self.onward, frames)
        _end(self.onward, self.monitor, _FAREWELL_MS)


class Beacon:
    """One beacon of a worker, and its counterpart while it exists."""

    def __init__(self, identity: bytes, hello: bytes) -> None:
        self._identity, self._hello = identity, hello
        self._onward: zmq.Socket[Any] | None = None
        self._seen = 0.0

    def look(self, is_there: bool, context: zmq.Context[Any], target: str, now: float) -> bool:
        """Keep a counterpart at ``target`` if the beacon exists, and else none. Return False if it may be forgotten."""
        if is_there:
            self._seen = now
            if self._onward is None:
                self._onward = context.socket(zmq.DEALER)
                _set_up(self._onward)
                self._onward.setsockopt(zmq.ROUTING_ID, self._identity)
                self._onward.setsockopt(zmq.CONFLATE, 1)
                self._onward.connect(target)
                self._onward.send(self._hello)
        else:
            self.close()
        return now < self._seen + _FORGET_SECONDS

    def close(self) -> None:
        """Close the counterpart."""
        onward, self._onward = self._onward, None
        if onward is not None:
            onward.close()


class Relay:
    """One worker's port."""

    def __init__(self, context: zmq.Context[Any], target: str, faults: Faults) -> None:
        self._context, self._target = context, target
        self.faults = faults
        self._beacons: dict[bytes, Beacon] = {}
        self._look_at = 0.0
        self.connections: dict[bytes, Connection] = {}
        self._alive: set[int] = set()
        """Descriptors of connections to this port."""
        self._doomed: set[bytes] = set()
        """Connections that have ended, of which messages may still be read."""
        self.port = 0
        self._listen()

    def _listen(self) -> None:
        self.socket = self._context.socket(zmq.ROUTER)
        _set_up(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        if self.port:
            self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        else:
            self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def break_off(self) -> None:
        """Close all connections of the worker, as the coordinator has closed one."""
        self._let_go()  # beacons only for a moment: they come again by themselves
        self._alive.clear()
        self._doomed.clear()
        self.socket.unbind(self.socket.getsockopt(zmq.LAST_ENDPOINT))
        while self.monitor.poll(_UNBOUND_MS) and recv_monitor_message(self.monitor)["event"] != zmq.EVENT_CLOSED:
            pass  # only then is the port free
        _end(self.socket, self.monitor)
        self._listen()

    def close(self) -> None:
        """Close the port."""
        self._let_go()
        _end(self.socket, self.monitor)

    def _let_go(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for beacon in self._beacons.values():
            beacon.close()
        self.connections.clear()

    def _note(self) -> None:
        """Read which connections have begun and ended. A connection without messages has no counterpart."""
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
            if identity[:1] != b"\0":  # ZeroMQ's own names begin so: this one is a beacon's
                self._beacons.setdefault(identity, Beacon(identity, frames[0].bytes))
                self._look_at = now
                continue
            if identity not in self.connections:
                self._note()  # descriptors are used again
                fd = int(frames[-1].get(zmq.SRCFD))
                if fd not in self._alive:  # the last messages of a connection with a closed counterpart
                    continue
                self.connections[identity] = Connection(self._context, self._target, self.faults, fd)
            self.connections[identity].up.take(frames, now)

    def take_all(self, now: float) -> None:
        """Take the messages of both sides, and send those that are due. Never waits."""
        self._receive(now)
        self._bury()
        self._look(now)
        for identity, connection in self.connections.items():
            while (frames := _received(connection.onward)) is not None:
                connection.down.take(frames, now)
            for frames in connection.up.due(now):
                _send(connection.onward, frames)
            for frames in connection.down.due(now):
                _send(self.socket, [identity, *frames])

    def next(self) -> float | None:
        """Return when the next message is due."""
        moments = [lane.next() for one in self.connections.values() for lane in (one.up, one.down)]
        moments += [self._look_at] if self._beacons else []
        return min((moment for moment in moments if moment is not None), default=None)

    def heed(self, now: float) -> None:
        """Close the counterparts of connections that have ended."""
        self._note()
        if self._doomed:
            self._receive(now)
            self._bury()
        if any(_happened(connection.monitor) is not None for connection in self.connections.values()):
            self.break_off()

    def _bury(self) -> None:
        """Close connections that have ended and were read to the end, before a successor's messages go on."""
        for identity in self._doomed:
            self.connections.pop(identity).close()
        self._doomed.clear()

    def _look(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            for identity, beacon in list(self._beacons.items()):
                if not beacon.look(_send(self.socket, [identity, b""]), self._context, self._target, now):
                    del self._beacons[identity]

    def sockets(self) -> list[zmq.Socket[Any]]:
        """Return the sockets to wait at."""
        ends = [socket for one in self.connections.values() for socket in (one.onward, one.monitor)]
        return [self.socket, self.monitor, *ends]


def turn(relays: Collection[Relay], descriptor: int) -> bool:
    """Take and send messages, and wait for more. Return whether ``descriptor`` can be read."""
    now = time.monotonic()
    for relay in relays:
        relay.heed(now)
        relay.take_all(now)
    poller = zmq.Poller()
    poller.register(descriptor, zmq.POLLIN)
    for relay in relays:
        for socket in relay.sockets():
            poller.register(socket, zmq.POLLIN)
    due = min((moment for relay in relays if (moment := relay.next()) is not None), default=None)
    ready = dict(poller.poll(None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)))
    return descriptor in ready


def _set_up(socket: zmq.Socket[Any]) -> None:
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)


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


def _send(socket: zmq.Socket[Any], frames: list[Any]) -> bool:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.ZMQError:  # that side has just ended, as its monitor will report
        return False
    return True


def _happened(monitor: zmq.Socket[Any]) -> tuple[int, int] | None:
    """Read an event of a monitor, with its descriptor; None if there is none."""
    try:
        news = recv_monitor_message(monitor, zmq.DONTWAIT)
    except zmq.Again:
        return None
    return int(news["event"]), int(news["value"])


def _tell(name: str, fault: str) -> None:
    print(f"hit {fault} {name}", flush=True)


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
    """Relay until the parent has ended."""
    context = zmq.Context()
    relays = {
        name: Relay(context, f"tcp://{sys.argv[1]}", Faults(on_hit=partial(_tell, name))) for name in sys.argv[2:]
    }
    print(json.dumps({name: relay.port for name, relay in relays.items()}), flush=True)
    unread = b""
    while True:
        if turn(relays.values(), sys.stdin.fileno()):
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                _obey(relays, line.decode())
                print("done", flush=True)


if __name__ == "__main__":
    main()
