"""A cluster on one machine: a network namespace for each host, one link each to a switch, limited in both directions.

Names contain this process's id: several runs do not conflict, and the leftovers of a killed run can be found. The
interfaces and addresses are inside the namespaces, so that this machine's own network does not change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradserver.tools.common.processes import RunError, uninterrupted

PREFIX = "gsb"
_SECONDS = 30.0  # time limit of one command
_LEAST_BURST = 256 << 10  # bytes that a link may send at once. A timer's tick at high rates needs more
_BURST_SECONDS = 0.5e-3
_NAME = re.compile(rf"{PREFIX}-(\d+)-\w+")


class Lab:
    """Namespaces of hosts. `links` makes and removes them."""

    interface = "e0"

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def worker_prefix(self, rank: int) -> list[str]:
        """Return the command prefix of a worker's host."""
        return _inside(_name(f"h{rank + 1}"))

    def worker_address(self, rank: int) -> str:
        """Return the address of a worker's host."""
        return f"10.77.0.{rank + 1}"

    def plug(self, rank: int, in_place: bool) -> None:
        """Connect a worker's host, or disconnect it."""
        _run("ip", "-n", _name(f"h{rank + 1}"), "link", "set", self.interface, "up" if in_place else "down")

    def coordinator_prefix(self) -> list[str]:
        """Return the command prefix of the coordinator's host."""
        return _inside(_name("c"))

    def coordinator_address(self) -> str:
        """Return the address of the coordinator's host."""
        return "10.77.0.200"


def why_not() -> str | None:
    """Explain why no such cluster can be made here, and what to do; None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (Debian, Ubuntu: apt install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces require root: run the command with sudo"
    return None


@contextmanager
def links(workers: int, rate: float, coordinator_rate: float, congestion: str | None = None) -> Iterator[Lab]:
    """Make hosts for `workers` and a coordinator, with links of these rates (bytes per second each way).

    `congestion` is TCP's congestion control between them; None for this machine's.
    """
    reason = why_not()
    if reason is not None:
        raise RunError(reason)
    remove_leftovers()
    lab = Lab(workers)
    try:
        switch = _name("sw")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for rank in range(workers):
            _add_host(f"h{rank + 1}", lab.worker_address(rank), rate, congestion)
        _add_host("c", lab.coordinator_address(), coordinator_rate, congestion)
        yield lab
    finally:
        with uninterrupted():
            _remove({os.getpid()})


def remove_leftovers() -> None:
    """Remove the namespaces of runs after the end of their process."""
    _remove({pid for pid in _owners() if pid != os.getpid() and not Path(f"/proc/{pid}").exists()})


def existing() -> list[str]:
    """List all namespaces that a bench made, of this process or others."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir("/run/netns") if _NAME.fullmatch(name))
    return []


def _owners() -> set[int]:
    return {int(match[1]) for name in existing() if (match := _NAME.fullmatch(name))}


def _remove(pids: set[int]) -> None:
    for name in existing():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) in pids:
            with suppress(RunError):  # the others are still removed
                _run("ip", "netns", "delete", name)


def _add_host(host: str, address: str, rate: float, congestion: str | None) -> None:
    switch, name, port = _name("sw"), _name(host), f"p-{host}"
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", Lab.interface, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", Lab.interface)
    _run("ip", "-n", name, "link", "set", Lab.interface, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    if congestion is not None:  # by route: a namespace's own default can only be what this machine allows to all users
        route = ["10.77.0.0/24", "dev", Lab.interface, "proto", "kernel", "scope", "link", "src", address]
        _run("ip", "-n", name, "route", "change", *route, "congctl", congestion)
    burst = max(_LEAST_BURST, round(rate * _BURST_SECONDS))
    shape = ["root", "tbf", "rate", f"{rate * 8:.0f}bit", "burst", f"{burst}b", "latency", "100ms"]
    _run(*_inside(name), "tc", "qdisc", "add", "dev", Lab.interface, *shape)  # packets that the host sends
    _run(*_inside(switch), "tc", "qdisc", "add", "dev", port, *shape)  # packets to the host


def _name(host: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{host}"


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _run(*command: str) -> None:
    # In its own session: Ctrl-C must not reach it, which would leave its work half done.
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{' '.join(command)}` did not end within {_SECONDS:.0f} s") from None
    if ran.returncode != 0:
        reason = ran.stderr.strip() or f"status {ran.returncode}"
        raise RunError(f"`{' '.join(command)}` failed: {reason}")
