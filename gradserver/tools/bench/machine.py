"""Description of the machine: without it, a result says nothing."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import gradserver
from gradserver.protocol.compiled import loader
from gradserver.tools.common.processes import available_cores

_COMPILING_SECONDS: Final = 120.0


def describe() -> dict[str, Any]:
    """Describe this machine, as plain values."""
    return {
        "cpu": _cpu(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Collect the versions of all packages that take part, and what does the work. Kernels are compiled before that."""
    found = {"gradserver": gradserver.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pyzmq"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return {**found, "kernels": await_kernels().kernels}


def await_kernels() -> loader.Standing:
    """Load kernels, so that no thread does it beside what is measured. They are compiled once on a machine."""
    return loader.settle(_COMPILING_SECONDS)


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
