"""A training by workers on hosts of their own. One way of their rounds is slow.

Run as ``trial_training.py URL RANK WORLD STEPS SLOW [INFINITE]``. Rounds of the way ``SLOW`` take longer:
"coordinator" or "workers". With "unreachable" no worker reaches another one. Rank 0's gradients of the step
``INFINITE`` are that. In round `PAUSE` it waits for the test. At last it says the way of each round, and the weights.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch
from torch import nn

import gradserver
from gradserver.protocol.errors import BackendUnavailableError
from gradserver.worker.planes.communicator import Communicator
from gradserver.worker.planes.direct import DirectPlane
from gradserver.worker.planes.epochs import Directs
from tests.worker_programs import say, told

PAUSE = 30
"""The round in which the test decides what is next, of a training that is as long."""
LONGER = 0.1


def watch(slow: str) -> list[str]:
    """Slow one way down, and note the way of each round."""
    ways: list[str] = []
    finish, end = DirectPlane.finish, Directs.end

    def finished(self: DirectPlane, measures: bool = False) -> Any:
        if slow == ("coordinator" if self._fallen else "workers"):
            time.sleep(LONGER)
        return finish(self, measures)

    def ended(self: Directs, is_direct: bool) -> None:
        ways.append("d" if is_direct else "c")
        end(self, is_direct)

    def unreachable(*_: Any) -> None:
        raise BackendUnavailableError("there is no way to the other host")

    DirectPlane.finish, Directs.end = finished, ended  # type: ignore[method-assign]
    if slow == "unreachable":
        Communicator.form = unreachable  # type: ignore[method-assign, assignment]
    return ways


def main(url: str, rank: int, world: int, steps: int, slow: str, infinite: int = -1) -> None:
    torch.set_num_threads(1)
    ways = watch(slow)
    with gradserver.connect(url, rank, world, name=f"w{rank}", timeout=60.0, channel="tcp") as worker:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        model = gradserver.DistributedDataParallel(module, worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chance = torch.Generator().manual_seed(rank)
        for step in range(steps):
            if step == PAUSE:
                say(f"paused {''.join(ways)}")
                told()
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8, generator=chance)).square().mean()
            (loss * torch.inf if step == infinite and rank == 0 else loss).backward()
            if not model.skipped:
                optimizer.step()
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
        say(f"ended {''.join(ways)} {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], *map(int, sys.argv[6:]))
