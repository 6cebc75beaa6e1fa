"""The hosts of a run: how they are named, reached, and how they reach this one."""

from __future__ import annotations

import argparse
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from gradserver.arguments import number
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.tools.common.processes import inherited_environment

DEFAULT_RSH: Final = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
AGENT: Final = "gradserver.tools.launch.agent"
_NOWHERE: Final = "192.0.2.1"
"""Address of no host (RFC 5737). The route towards it is the default one; nothing is sent."""
_DISCARD: Final = 9


class Host(NamedTuple):
    """A host.

    Attributes:
        name: name by which the remote shell finds it. Empty if no host was named: then it is this one.
        workers: number of its workers; None for the number that all hosts have.
    """

    name: str = ""
    workers: int | None = None

    @property
    def is_here(self) -> bool:
        """True if it is this machine, which needs no remote shell."""
        own = socket.gethostname()
        return self.name in ("", "localhost", "127.0.0.1", "[::1]", own, own.partition(".")[0])

    @property
    def address(self) -> str:
        """The name without brackets around an IPv6 address, as remote shells take it, with the user in front."""
        return re.sub(r"[\[\]]", "", self.name)

    def __str__(self) -> str:
        return self.name or socket.gethostname()


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse names of hosts with commas between them, each with ``:N`` behind it if it has a number of workers."""
    found = tuple(_parse_host(part.strip(), text) for part in text.split(","))
    for host in found:
        if sum(other.name == host.name for other in found) > 1:
            raise argparse.ArgumentTypeError(f"{host.name!r} is named twice: write {host.name}:N for N workers there")
    return found


def _parse_host(part: str, text: str) -> Host:
    match = re.fullmatch(r"([\w.@%+-]+|(?:\w+@)?\[[\w:.%]+\])(?::(\S*))?", part)
    if match is None or part.startswith("-"):
        example = "expected names with commas between them, such as gpu1,gpu2:4"
        raise argparse.ArgumentTypeError(f"{part!r} in {text!r} is not a host: {example}")
    name, count = match.groups()
    limits = number(int, 1, MAX_WORLD_SIZE, f"the number of workers on {name}")
    return Host(name, None if count is None else limits(count))


def agent_command(host: Host, rsh: Sequence[str], python: str, grace: float) -> list[str]:
    """Return the command that starts the agent of a host."""
    command = [sys.executable if host.is_here else python, "-P", "-m", AGENT, f"{grace:g}"]
    if host.is_here:
        return command
    path = inherited_environment().get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}", *command] if path else command
    return [*rsh, host.address, f"exec {shlex.join(words)}"]  # one argument, which the shell there reads


def own_address(hosts: Sequence[Host]) -> str | None:
    """Return the address by which the other hosts reach this one; None if there is no route to any."""
    others = [host.address.rpartition("@")[2] for host in hosts if not host.is_here]
    if not others:
        return "127.0.0.1"
    for target in (*others, _NOWHERE):
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(target, _DISCARD, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                found: str = probe.getsockname()[0]
                return found
    return None
