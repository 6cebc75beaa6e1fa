"""Breakable connections: for each worker a port that passes its bytes on to the coordinator.

It is run as ``python -m gradserver.tools.chaos.wires HOST:PORT NAME…``. It prints the ports by name. On standard input
it takes lines, each of which it answers with ``done``, before that with ``hit WHAT NAME`` if it was connected:

    reset NAME             break every connection of this worker at both ends, with RST
    hold NAME S            pass nothing for S seconds, neither way, and tell neither end: a black hole
    throttle NAME S RATE   pass RATE bytes a second

Held bytes are delivered afterwards, as TCP does when a link is back; unless an end has given up meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 1 << 16
_NOW = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what is unsent, and sends RST


class Wire:
    """All connections of one worker."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._rate = 0.0
        """Rate in bytes a second; 0 for no limit."""

    async def listen(self) -> int:
        """Listen, and return the port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def reset(self) -> None:
        """Break all connections."""
        for writer in list(self._open):
            _break(writer)

    def hold(self, seconds: float) -> None:
        """Pass nothing for some seconds."""
        self._passes.clear()
        asyncio.get_running_loop().call_later(seconds, self._passes.set)

    def throttle(self, seconds: float, rate: float) -> None:
        """Limit the rate for some seconds."""
        self._rate = rate
        asyncio.get_running_loop().call_later(seconds, setattr, self, "_rate", 0.0)

    @property
    def is_used(self) -> bool:
        """True if there is a connection."""
        return bool(self._open)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()  # a connection that is asked for in a partition is made after it, if at all
        try:
            there, onward = await asyncio.open_connection(*self._target, limit=_CHUNK)
        except OSError:
            _break(writer)
            return
        self._open |= {writer, onward}
        ways = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, onward), (there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # one end has gone, and the other is told
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, onward):
                self._open.discard(end)
                end.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._passes.wait()
                if self._rate:
                    await asyncio.sleep(len(data) / self._rate)
                target.write(data)
                await target.drain()
        await self._passes.wait()  # nor does an end get through


def _break(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
    writer.transport.abort()


async def _run(address: str, names: list[str]) -> None:
    host, _, port = address.rpartition(":")
    wires = {name: Wire(host, int(port)) for name in names}
    print(json.dumps({name: await wire.listen() for name, wire in wires.items()}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        do, name, *numbers = line.decode().split()
        wire = wires[name]
        what: dict[str, Callable[..., None]] = {"reset": wire.reset, "hold": wire.hold, "throttle": wire.throttle}
        if wire.is_used:
            print(f"hit {do} {name}", flush=True)
        what[do](*map(float, numbers))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2:]))
