"""A training by four workers on the direct plane, or another one, of which one stops in the middle of a round.

Run as ``direct_training.py URL SEAT OUT WHERE [PLANE]``. The victim stops as ``WHERE`` says: "reducing", when it has
begun one bucket and the others wait for the next. Or "committing", when it has all results and the others wait for its
commit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import gradserver
from gradserver.worker.client import Worker
from gradserver.worker.planes.direct import DirectPlane
from tests.elastic_training import FATAL, VICTIM, WORLD, train
from tests.worker_programs import say, told


def stop_at(where: str, worker: Worker) -> None:
    """Say "halfway" in the fatal round, and wait to be killed or stopped."""

    def stop() -> None:
        say("halfway")
        told()

    if where == "committing":
        push = worker.push

        def committing(*arguments: Any, **more: Any) -> Any:
            if worker.round == FATAL:
                stop()
            return push(*arguments, **more)

        worker.push = committing  # type: ignore[method-assign]
    else:
        reduce, pushed = DirectPlane.push, 0

        def reducing(self: DirectPlane, *arguments: Any, **more: Any) -> None:
            nonlocal pushed
            if worker.round == FATAL:
                if pushed == 1:
                    stop()
                pushed += 1
            reduce(self, *arguments, **more)

        DirectPlane.push = reducing  # type: ignore[method-assign]


def main(url: str, member_id: int, out: Path, where: str, plane: str = "direct") -> None:
    torch.set_num_threads(1)
    with gradserver.connect(url, member_id, WORLD, name=f"w{member_id}", timeout=60.0, plane=plane) as worker:
        fallen: list[int] = []
        fall = DirectPlane._fall

        def noted(self: DirectPlane, error: BaseException) -> None:
            fallen.append(worker.round)
            fall(self, error)

        DirectPlane._fall = noted  # type: ignore[method-assign]
        if member_id == VICTIM:
            stop_at(where, worker)

        def after(step: int) -> None:
            say(f"step {step} {time.monotonic()} {worker.world_size}")
            if step == FATAL:
                told()

        torch.save(train(worker, member_id, after), out)
        say(f"fell {fallen}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
