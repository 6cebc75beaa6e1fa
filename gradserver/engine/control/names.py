"""Names that strangers choose."""

from __future__ import annotations

from gradserver.protocol.errors import InvalidArgumentError


def check_name(what: str, name: str, limit: int) -> None:
    """Raise InvalidArgumentError if ``name`` has more than ``limit`` bytes, or could upset a terminal that shows it."""
    if not name or not name.isprintable():
        raise InvalidArgumentError(f"{what} is {name[:40]!r}, and must be printable text")
    length = len(name.encode(errors="replace"))
    if length > limit:
        raise InvalidArgumentError(f"{what} {name[:40]!r}… is {length} bytes long, the limit is {limit}")
