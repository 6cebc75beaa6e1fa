"""How long a round takes in which a worker dies or freezes: the figures in docs/architecture.md.

Run as ``python -m tests.detection_times CHANNEL KILL|STOP [COUNT]``. One after another, COUNT members of an elastic
group are killed or stopped; times are from the signal to the end of the round at a survivor.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from contextlib import ExitStack

from tests.cluster import Daemon, worker_program


def main(channel: str, event: str, count: int) -> None:
    world = count + 2
    with Daemon("--workers", f"2:{world}", "--gather", "60", "--quiet") as daemon, ExitStack() as stack:
        workers = [
            stack.enter_context(worker_program(daemon.url, "exchange_and_tell", rank, world, channel))
            for rank in range(world)
        ]
        for worker in workers:
            worker.expect("exchanging")
        times = []
        for victim in workers[2:]:
            time.sleep(0.3)  # some rounds
            since = time.monotonic()
            victim.send_signal(signal.SIGKILL if event == "KILL" else signal.SIGSTOP)
            times.append(float(workers[0].expect("fewer ")) - since)
    print(f"{channel} {event}: median {statistics.median(times):.3f} s, worst of {count} {max(times):.3f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].upper(), int(sys.argv[3]) if len(sys.argv) > 3 else 20)
