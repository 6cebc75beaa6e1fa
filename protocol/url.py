"""The address of a coordinator: ``tcp://HOST:PORT``."""

from __future__ import annotations

from typing import Final

from gradserver.protocol.errors import InvalidArgumentError

IS_IT_RUNNING: Final = "Is `gradserver serve` running there, and is the port right?"
_EVERYWHERE: Final = ("*", "0.0.0.0", "[::]", "::")


def parse_url(url: str) -> tuple[str, int]:
    """Return host and port of a coordinator's URL. An IPv6 address keeps its brackets.

    Raises:
        InvalidArgumentError: ``url`` is something else; the message shows the form.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme != "tcp":
        raise InvalidArgumentError(f"{url!r} is not a coordinator's URL: expected tcp://HOST:PORT")
    host, separator, port = rest.rpartition(":")
    if not separator or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise InvalidArgumentError(
            f"{url!r} is not a coordinator's URL: expected tcp://HOST:PORT, with IPv6 tcp://[::1]:PORT"
        )
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise InvalidArgumentError(f"{url!r} has the port {port!r}: a port is a number from 0 to 65535")
    return host, int(port)


def parse_target(url: str) -> tuple[str, int]:
    """Return host (an IPv6 address without its brackets) and port to connect to.

    Raises:
        InvalidArgumentError: ``url`` is something else, or names every address of a machine or no port.
    """
    host, port = parse_url(url)
    if port == 0 or host == "*":
        raise InvalidArgumentError(f"{url!r} names no single coordinator: give its host and port")
    return host.strip("[]"), port


def numeric_url(address: str, port: int) -> str:
    """Return the URL of a numeric address, IPv4 or IPv6."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def is_everywhere(host: str) -> bool:
    """Return True if a server at ``host`` listens at all addresses of its machine."""
    return host in _EVERYWHERE


def beside(url: str, primary: str) -> str:
    """Return ``url`` of a data shard, as a process finds it that has found the coordinator at ``primary``.

    A shard on the coordinator's own host may say that it listens everywhere: its host is the coordinator's then.
    """
    host, port = parse_url(url)
    return f"tcp://{parse_url(primary)[0]}:{port}" if is_everywhere(host) else url


def not_answered(url: str, seconds: float) -> str:
    """Say that what listens at ``url`` has said nothing within ``seconds``."""
    return f"the process that listens at {url} did not answer as a gradserver coordinator within {seconds:g} s"


def no_coordinator(url: str, what: str, closed: bool) -> str:
    """Say that no gradserver ``what`` is at ``url``. ``closed``: the connection closed; else it says other things.

    A relay that cannot reach its target closes the connection.
    """
    text = f"the process that listens at {url} is not a gradserver {what}: expected a handshake, and it"
    if not closed:
        return f"{text} speaks another protocol. Is the port right?"
    return (
        f"{text} closed the connection. If it is a relay (an ssh tunnel, kubectl port-forward, a load balancer), the "
        f"{what} behind it cannot be reached: is `gradserver serve` running where it leads to? If it is a {what}, it "
        f"has too few descriptors (open files), as its log says. Otherwise, is the port right?"
    )
