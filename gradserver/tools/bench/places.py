"""Places where the processes of a fleet run: this machine as it is, or hosts made of network namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Place(Protocol):
    """Hosts for workers and coordinator."""

    @property
    def interface(self) -> str:
        """Network interface that connects the workers."""

    def worker_prefix(self, rank: int) -> list[str]:
        """Return the prefix of a command on the host of worker `rank`."""

    def worker_address(self, rank: int) -> str:
        """Return the address of the host of worker `rank`."""

    def coordinator_prefix(self) -> list[str]:
        """Return the prefix of a command on the coordinator's host."""

    def coordinator_address(self) -> str:
        """Return the address of the coordinator's host."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Place with several workers on each host of ``place``. They say so, as all are on this machine in fact."""

    place: Place
    each: int

    @property
    def interface(self) -> str:
        """Network interface that connects the hosts."""
        return self.place.interface

    def worker_prefix(self, rank: int) -> list[str]:
        """Return the command prefix of a worker's host."""
        host = rank // self.each
        return [*self.place.worker_prefix(host), "env", f"GRADSERVER_HOST=host-{host}"]

    def worker_address(self, rank: int) -> str:
        """Return the address of a worker's host."""
        return self.place.worker_address(rank // self.each)

    def coordinator_prefix(self) -> list[str]:
        """Return the command prefix of the coordinator's host."""
        return self.place.coordinator_prefix()

    def coordinator_address(self) -> str:
        """Return the address of the coordinator's host."""
        return self.place.coordinator_address()


@dataclass(frozen=True, slots=True)
class Here:
    """Place of all processes on this machine, over its loopback."""

    interface: str = "lo"

    def worker_prefix(self, rank: int) -> list[str]:  # noqa: ARG002  (Place's signature)
        """Return no prefix."""
        return []

    def worker_address(self, rank: int) -> str:  # noqa: ARG002
        """Return the loopback's address."""
        return "127.0.0.1"

    def coordinator_prefix(self) -> list[str]:
        """Return no prefix."""
        return []

    def coordinator_address(self) -> str:
        """Return the loopback's address."""
        return "127.0.0.1"
