"""The GPUs of a host, found without torch, and those that each of its workers sees."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DRIVER: Final = ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version")
_SMI_SECONDS: Final = 20.0
"""Time that nvidia-smi may take. Without persistence mode it initializes each GPU."""


def find_devices(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """Find the GPUs that processes of this host may use, as CUDA_VISIBLE_DEVICES names them.

    That variable comes first. CUDA ignores what follows an invalid entry, and so does this.
    """
    told = environment.get(VISIBLE)
    if told is not None:
        return _valid_entries(told)
    if not any((root / path).exists() for path in _DRIVER):
        return []
    listed = _listed_by_tool()
    if listed is not None:
        return listed
    return [str(index) for index, _ in enumerate(path for path in (root / "dev").glob("nvidia[0-9]*"))]


def _valid_entries(told: str) -> list[str]:
    found: list[str] = []
    for entry in map(str.strip, told.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", entry) or entry in found:
            break
        found.append(entry)
    return found


def _listed_by_tool() -> list[str] | None:
    """Return the GPUs that the driver lists; None if its tool is missing, or fails.

    A GPU that is divided (MIG) counts as its parts, which have no other name than their UUIDs.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        told = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found: dict[str, list[str]] = {}
    for line in told.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            found[match[1]] = []
        elif found and (match := re.search(r"UUID: (MIG-[\w/-]+)", line)):
            found[list(found)[-1]].append(match[1])
    return [device for index, parts in found.items() for device in (parts or [index])]


def visible_to(local_rank: int, devices: Sequence[str]) -> str | None:
    """Return the CUDA_VISIBLE_DEVICES of one worker: a device of its own, or one in turn. None without devices."""
    return devices[local_rank % len(devices)] if devices else None
