"""Files at paths where others may have put something else: a pipe that never ends, a link, or a file of any size."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_AS_THEY_ARE: Final = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags with which a pipe that has no other end is opened at once."""


def open_regular(path: os.PathLike[str] | str, flags: int = os.O_RDONLY, mode: int = 0o600, links: bool = True) -> int:
    """Open a regular file, as `os.open` does; without ``links``, only if its path ends with none.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    fd = os.open(path, flags & ~os.O_TRUNC | _AS_THEY_ARE | (0 if links else os.O_NOFOLLOW), mode)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: os.PathLike[str] | str, most: int, links: bool = True) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Errors as of `open_regular`."""
    fd = open_regular(path, links=links)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} is the limit", os.fspath(path))
        return file.read(most)
