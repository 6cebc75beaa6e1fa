"""The length of a round in which a worker dies, freezes or is cut off: the figures in docs/reliability.md.

Run as ``python -m tests.detection_times CHANNEL KILL|STOP|CUT [COUNT]``. One after another, COUNT members of an elastic
group are killed, stopped, or cut off by a connection that passes nothing any more (tcp only). Times are from
there to the end of the round at a survivor.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Final

from tests.cluster import Daemon, Program, worker_program

_SIGNALS: Final = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
_FOR_GOOD: Final = 600
"""Seconds."""


class Wires:
    """The wires between some workers and the coordinator, which can be cut."""

    def __init__(self, stack: ExitStack, url: str, names: list[str]) -> None:
        address = url.removeprefix("tcp://")
        self._program = stack.enter_context(Program("-m", "gradserver.tools.chaos.wires", address, *names))
        self._ports: dict[str, int] = json.loads(self._program.expect(""))

    def url(self, name: str) -> str:
        """The URL by which a worker reaches the coordinator."""
        return f"tcp://127.0.0.1:{self._ports[name]}"

    def cut(self, name: str) -> None:
        """Let nothing through any more."""
        self._program.tell(f"hold {name} {_FOR_GOOD}")
        self._program.expect("done")


def main(channel: str, event: str, count: int) -> None:
    world, stays = count + 2, 2
    names = [f"w{rank}" for rank in range(world)]
    with Daemon("--workers", f"2:{world}", "--gather", "60", "--quiet") as daemon, ExitStack() as stack:
        wires = Wires(stack, daemon.url, names[stays:]) if event == "CUT" else None
        workers = [
            stack.enter_context(worker_program(url, "exchange_and_tell", rank, world, channel))
            for rank, url in enumerate(
                daemon.url if wires is None or rank < stays else wires.url(names[rank]) for rank in range(world)
            )
        ]
        for worker in workers:
            worker.expect("exchanging")
        times = []
        for name, victim in zip(names[stays:], workers[stays:], strict=True):
            time.sleep(0.3)  # some rounds
            since = time.monotonic()
            if wires is None:
                victim.send_signal(_SIGNALS[event])
            else:
                wires.cut(name)
            times.append(float(workers[0].expect("fewer ")) - since)
    print(f"{channel} {event}: median {statistics.median(times):.3f} s, worst of {count} {max(times):.3f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].upper(), int(sys.argv[3]) if len(sys.argv) > 3 else 20)
