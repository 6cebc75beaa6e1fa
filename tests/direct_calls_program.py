"""Four workers that call collectives on the direct plane. Two of them stop in the middle of one.

Run as ``direct_calls_program.py URL RANK``. Worker 1 stops when all have prepared an all_reduce, and worker 2 when it
has the result of an all_gather and has not said so. The others print what they get, and when. With ``transfer`` behind
that, worker 1 stops when worker 0 waits for its bytes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import gradserver
from gradserver.protocol.errors import MembershipChangedError, WorkerLostError
from gradserver.worker.client import Worker
from gradserver.worker.planes.calls import DirectCalls
from gradserver.worker.planes.transfers import DirectTransfers
from tests.worker_programs import say, told

NUMEL = 1 << 21
"""Elements of a tensor that goes directly between members of one host."""


def stop(*_: Any) -> None:
    say("halfway")
    told()


def stop_before_exchange() -> None:
    DirectCalls._exchange = stop  # type: ignore[method-assign,assignment]


def stop_before_confirmation() -> None:
    exchange = DirectCalls._exchange

    def exchanged(self: DirectCalls, *arguments: Any) -> bool:
        exchange(self, *arguments)
        stop()
        return True

    DirectCalls._exchange = exchanged  # type: ignore[method-assign,assignment]


def gathered(worker: Worker) -> list[float]:
    rows = worker.all_gather(torch.full((NUMEL,), float(sum(map(ord, worker.name)))))
    return rows[:, 99].tolist()


def transfer(worker: Worker) -> None:
    """Have worker 1 stop when worker 0 waits for its bytes."""
    tensor = torch.zeros(NUMEL)
    DirectTransfers._give = stop  # type: ignore[method-assign,assignment]
    if worker.rank == 1:
        worker.send(tensor, 0)
    elif worker.rank == 0:
        try:
            worker.recv(tensor, 1)
        except WorkerLostError as error:
            say(f"lost {time.monotonic()} {error.worker}")
    else:
        told()


def main(url: str, rank: int, what: str) -> None:
    torch.set_num_threads(1)
    with gradserver.connect(url, rank, 4, name=f"w{rank}", timeout=60.0, plane="direct") as worker:
        if what == "transfer":
            transfer(worker)
            return
        tensor = torch.full((NUMEL,), 1.0 + rank)
        say(f"first {sorted(set(worker.all_reduce(tensor, 'sum').tolist()))}")
        tensor.fill_(1.0 + rank)
        if rank == 1:
            stop_before_exchange()
        try:
            values = sorted(set(worker.all_reduce(tensor, "sum").tolist()))
        except WorkerLostError as error:  # the group needs all its members
            say(f"lost {time.monotonic()} {error.worker}")
            return
        say(f"reduced {time.monotonic()} {worker.world_size} {values}")
        try:
            gathered(worker)
        except MembershipChangedError:
            say(f"changed {worker.world_size}")
        if rank == 2:
            stop_before_confirmation()
        try:
            gathered(worker)
        except MembershipChangedError:
            say(f"again {time.monotonic()} {worker.world_size}")
        say(f"gathered {gathered(worker)} {DirectCalls.of(worker._session)._is_broken}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:]))
