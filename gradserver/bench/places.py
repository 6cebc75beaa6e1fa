"""Where the processes of a fleet run: on this machine as it is, or on hosts made of network namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Place(Protocol):
    """Hosts for workers and coordinator."""

    @property
    def interface(self) -> str:
        """Network interface that connects the workers."""

    def worker_prefix(self, rank: int) -> list[str]:
        """What to put before a command so that it runs where worker `rank` does."""

    def worker_address(self, rank: int) -> str:
        """Where the host of worker `rank` is reached."""

    def coordinator_prefix(self) -> list[str]:
        """What to put before a command so that it runs where the coordinator does."""

    def coordinator_address(self) -> str:
        """Where that host is reached."""


@dataclass(frozen=True, slots=True)
class Here:
    """All on this machine, over its loopback."""

    interface: str = "lo"

    def worker_prefix(self, rank: int) -> list[str]:  # noqa: ARG002  (Place's signature)
        """Nothing."""
        return []

    def worker_address(self, rank: int) -> str:  # noqa: ARG002
        """The loopback."""
        return "127.0.0.1"

    def coordinator_prefix(self) -> list[str]:
        """Nothing."""
        return []

    def coordinator_address(self) -> str:
        """The loopback."""
        return "127.0.0.1"
