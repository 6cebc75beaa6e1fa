"""The training of `tests.restart_training` with buckets on a device, which encodes what travels with loss."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradserver.worker.client import Worker
from gradserver.worker.devices.copies import Copier
from gradserver.worker.handle import Handle
from tests.fake_device import FakeDevice, checked
from tests.restart_training import run, train


@dataclass(frozen=True)
class Staged:
    """A bucket that is copied and pushed later, as `Handle` has its results."""

    pushed: Future[Handle]

    @property
    def squares(self) -> dict[int, tuple[float, ...]]:
        """Squares of its mean, by slice."""
        return self.pushed.result(0).squares


def train_on_device(
    worker: Worker, rounds: int, after: Callable[[int], None], pushing: Callable[[int, bool], None]
) -> int:
    """Train with buckets that are copied as late as they may."""
    finish_round, copier = worker.finish_round, Copier(worker, 0, checked(FakeDevice()))
    flats: dict[int, Tensor] = {}
    pushed: list[Future[Handle]] = []
    push = worker.push

    def stage(part: int, data: Any, *, weight: float, **more: Any) -> Any:
        if more:  # the copier itself
            return push(part, data, weight=weight, **more)
        flat = flats.setdefault(part, torch.from_numpy(data))
        assert flat.data_ptr() == data.ctypes.data
        pushed.append(copier.push(part, flat, weight, True))
        return Staged(pushed[-1])

    def finish() -> None:
        for one in pushed:
            one.result(120).wait()
        pushed.clear()
        copier.join(60)
        finish_round()

    worker.push, worker.finish_round = stage, finish  # type: ignore[assignment]
    return train(worker, rounds, after, pushing)


if __name__ == "__main__":
    run(train_on_device)
