"""Resources that the processes of a chaos run use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """Resources that a process uses."""

    descriptors: int
    segments: int
    memory: int


def use_of(pid: int) -> Use:
    """Measure what the process ``pid`` uses."""
    folder = Path(f"/proc/{pid}")
    maps = (folder / "maps").read_text()
    pages = int((folder / "statm").read_text().split()[1])
    segments = sum("/memfd:" in line for line in maps.splitlines())
    return Use(len(os.listdir(folder / "fd")), segments, pages * os.sysconf("SC_PAGE_SIZE"))
