"""Shares of a batch for unequal devices of one process: each gets as much as it computes while the others compute.

The time of each device's forward is measured, by events of its stream on CUDA and by the clock elsewhere. The backward
takes longer in the same proportion. A device that has several replicas is measured as one, as they run one after the
other, and they share its part evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradserver.protocol.balance import ThroughputTracker, shard_sizes
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.worker.data_parallel.devices import plain
from gradserver.worker.pacing.stopwatch import stopwatch


class Shares:
    """Shares of the replicas of one module.

    Args:
        devices: device of each replica.
        tracker: speeds of the devices, in the order in which they are first in ``devices``.
    """

    def __init__(self, devices: Sequence[torch.device], tracker: ThroughputTracker) -> None:
        self._devices, self._tracker = devices, tracker
        self._watches = {device: stopwatch(plain(device), lambda: 0.0) for device in dict.fromkeys(devices)}

    @property
    def ratios(self) -> tuple[float, ...]:
        """Part of the batch of each replica. Together they are 1."""
        of_device = dict(zip(self._watches, self._tracker.ratios, strict=True))
        return tuple(of_device[device] / self._devices.count(device) for device in self._devices)

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the samples of each replica in a batch of so many, which is not smaller than their number."""
        return shard_sizes(self.ratios, batch)

    def begin(self, device: torch.device) -> None:
        """Note that a device begins a forward, in the thread that runs it. An earlier one that failed is forgotten."""
        self._watches[device].cancel()
        self._watches[device].begin()

    def end(self, device: torch.device, samples: int) -> None:
        """Note that it has ended the forward, of so many samples."""
        self._watches[device].computed(1, samples)
        self._watches[device].arrived()

    def record(self) -> None:
        """Note what was measured since the last call. New shares may follow."""
        measured = [watch.read() for watch in self._watches.values()]
        if any(batches for _, batches, _, _ in measured):
            times = [milliseconds for milliseconds, *_ in measured]
            self._tracker.record([int(samples) for _, _, samples, _ in measured], times)


def tracker_of(devices: Sequence[torch.device], balance: ThroughputTracker | bool) -> ThroughputTracker | None:
    """Return the tracker of speeds that ``balance=`` asks for; None for equal shares.

    Raises:
        InvalidArgumentError: it is of another kind, or for another number of devices.
    """
    world = len(dict.fromkeys(devices))
    if isinstance(balance, bool):
        return ThroughputTracker(world) if balance and world > 1 else None
    if not isinstance(balance, ThroughputTracker):
        raise InvalidArgumentError(f"balance is True, or a gradserver.ThroughputTracker, not {balance!r}")
    if len(balance.throughputs) != world:
        raise InvalidArgumentError(
            f"balance has the speeds of {len(balance.throughputs)} devices, and the replicas are on {world}: make "
            f"ThroughputTracker(world_size={world})"
        )
    return balance
