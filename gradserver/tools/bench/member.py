"""Connections of a worker process: gradserver, gloo, a ring of plain sockets, the plain pyzmq hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import zmq

import gradserver
from gradserver.tools.bench.cost import Usage
from gradserver.tools.bench.machine import await_kernels
from gradserver.tools.bench.places import Here
from gradserver.tools.bench.ring import Ring, listen
from gradserver.tools.bench.spec import Link, Seat


class Member:
    """One worker process, from its start to its end."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.rank, self.workers = seat.rank, seat.workers
        self.links: dict[Link, gradserver.Worker] = {}
        self._listener: socket.socket | None = listen(seat.host) if seat.ring else None
        self._ring: Ring | None = None
        self._hub: zmq.Socket[bytes] | None = None
        self._groups: dict[str, Any] = {}

    @property
    def port(self) -> int:
        """Port at which its left neighbour in the ring can reach it."""
        return self._listener.getsockname()[1] if self._listener else 0

    def join(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Make all connections that the seat names; `addresses` are those of all workers, for the ring."""
        seat = self.seat
        for link in seat.links:
            self.links[link] = _connect(seat, link)
        if seat.store:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{seat.store}",
                rank=seat.rank,
                world_size=seat.workers,
                timeout=timedelta(seconds=seat.timeout),
            )
        if self._listener is not None:
            self._ring = Ring(self._listener, seat.rank, addresses, seat.timeout)
        if seat.hub:
            self._hub = zmq.Context.instance().socket(zmq.DEALER)
            self._hub.setsockopt(zmq.LINGER, 0)
            self._hub.setsockopt(zmq.RCVTIMEO, int(1000 * seat.timeout))
            self._hub.connect(seat.hub)
        await_kernels()

    @property
    def ring(self) -> Ring:
        """Ring of plain sockets."""
        assert self._ring is not None, "the seat has no ring"
        return self._ring

    @property
    def hub(self) -> zmq.Socket[bytes]:
        """Plain pyzmq socket."""
        assert self._hub is not None, "the seat has no hub"
        return self._hub

    def process_group(self, plane: str) -> Any:
        """Return a process group of all workers with the backend "gradserver" on a plane."""
        if plane not in self._groups:
            os.environ["GRADSERVER_URL"] = self.seat.url
            with _said("GRADSERVER_PLANE", plane):
                self._groups[plane] = dist.new_group(backend="gradserver")
        return self._groups[plane]

    def usage(self) -> Usage:
        """Return what this process has used so far. Bytes are counted where it has an interface to itself."""
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return Usage.so_far("" if interface == Here().interface else interface)

    def barrier(self) -> None:
        """Wait at gloo's barrier, for contenders that have none of their own."""
        dist.barrier()

    def close(self) -> None:
        """Close all connections."""
        for worker in self.links.values():
            worker.close("the benchmark is done")
        if self.seat.store:
            dist.destroy_process_group()
        if self._ring is not None:
            self._ring.close()


def pattern(numel: int, rank: int, workers: int) -> torch.Tensor:
    """Make the contribution of `rank`. All sums of these numbers, and their mean, are exact in fp32.

    Neighbours differ, and so do slices: 251 is prime, so that a slice in another's place shows.
    """
    return mean_pattern(numel) + (rank - (workers - 1) / 2)


def mean_pattern(numel: int) -> torch.Tensor:
    """Make the mean of all ranks' patterns."""
    return torch.arange(251.0).repeat(-(-numel // 251))[:numel]


def _connect(seat: Seat, link: Link) -> gradserver.Worker:
    options: dict[str, Any] = {} if link.wire == "fp32" else {"wire": link.wire}
    if link.plane:
        options["plane"] = link.plane
    with _said("GRADSERVER_CHANNEL", link.channel):
        return gradserver.connect(
            seat.url,
            seat.rank,
            seat.workers,
            group=link.group,
            name=f"worker-{seat.rank}",
            timeout=seat.timeout,
            **options,
        )


@contextmanager
def _said(variable: str, value: str) -> Iterator[None]:
    """Have a variable of the environment inside the context; with "" gradserver chooses."""
    if value:
        os.environ[variable] = value
    try:
        yield
    finally:
        os.environ.pop(variable, None)
