"""This machine: versions, memory that processes can share, and limits."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
from importlib import metadata
from pathlib import Path
from typing import Final

import zmq

import gradserver
from gradserver.protocol.compiled import loader
from gradserver.protocol.limits import GIB, MIB, PROTOCOL_VERSION
from gradserver.tools.common.processes import available_cores
from gradserver.tools.doctor.report import Report, Section

_FEW_DESCRIPTORS: Final = 4096
"""Open files of a process below which a coordinator or a worker with a large model may not have enough."""
_SMALL_SHM: Final = 1 * GIB
"""Size of /dev/shm below which NCCL and DataLoader workers run out of it. Containers have 64 MiB by default."""
_PACKAGES: Final = ("numpy", "msgpack", "ml_dtypes")
_COMPILING_SECONDS: Final = 60.0
_INFINIBAND: Final = Path("/dev/infiniband")


def examine(report: Report) -> None:
    """Add what this machine is, and what it can do for processes on it."""
    _versions(report.section("machine", "this machine"))
    _kernels(report)
    _memory(report)
    _limits(report)


def _versions(section: Section) -> None:
    section.add("host", socket.gethostname())
    section.add("system", f"{platform.system()} {platform.release()}")
    section.add("cores", available_cores())
    section.add("python", platform.python_version())
    text = f"{gradserver.__version__}, protocol {PROTOCOL_VERSION}"
    section.add("gradserver", {"version": gradserver.__version__, "protocol": PROTOCOL_VERSION}, text)
    section.add("zmq", zmq.zmq_version(), f"libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}")
    for name in _PACKAGES:
        section.add(name, metadata.version(name))


def _kernels(report: Report) -> None:
    """Add what encodes, decodes and averages. Kernels are compiled first, if they never were: then it takes seconds."""
    found = loader.settle(_COMPILING_SECONDS)
    report.sections["machine"].add("kernels", found._asdict(), str(found))
    if found.failed:
        report.find(
            f"encoding, decoding and averaging take several times as long: {found.reason}", loader.remedy(found.reason)
        )


def _memory(report: Report) -> None:
    section = report.section("memory", "memory")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    section.add("memory", whole, _size(whole))
    limit = _cgroup_limit()
    if limit is not None and limit < whole:
        section.add("container_limit", limit, _size(limit))
    trouble = _sealing_trouble()
    section.add("shared_memory", trouble == "", trouble or f"yes, up to {_size(min(whole, limit or whole))}")
    if trouble:
        change = "run on Linux 3.17 or newer, and allow memfd_create in the container. Until then the plane is tcp"
        report.find(f"processes of this host cannot share memory ({trouble})", change)
    _shm(report, section)


def _shm(report: Report, section: Section) -> None:
    """Add /dev/shm. gradserver does not use it, but NCCL and DataLoader workers do."""
    path = Path("/dev/shm")
    if not path.is_dir():
        section.add("dev_shm", None, "none")
        return
    usage = shutil.disk_usage(path)
    text = f"{_size(usage.total)}, {_size(usage.free)} free (for NCCL and DataLoader workers)"
    section.add("dev_shm", {"size": usage.total, "free": usage.free}, text)
    if usage.total < _SMALL_SHM:
        report.find(
            f"/dev/shm has {_size(usage.total)}, which NCCL and DataLoader workers can exceed",
            "mount it with 1 GiB or more (docker run --shm-size=1g; in Kubernetes an emptyDir with medium: Memory)",
        )


def _limits(report: Report) -> None:
    section = report.section("limits", "limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    section.add("open_files", {"soft": soft, "hard": hard}, f"{_limit(soft)}, can be raised to {_limit(hard)}")
    if hard != resource.RLIM_INFINITY and hard < _FEW_DESCRIPTORS:
        report.find(
            f"a process can open {hard} files at most, and takes one for each worker and shared bucket",
            f"raise the hard limit to {_FEW_DESCRIPTORS} or more (ulimit -Hn, LimitNOFILE= of systemd)",
        )
    if _INFINIBAND.exists():
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        section.add("locked_memory", locked, _limit(locked))
        if locked != resource.RLIM_INFINITY:
            report.find(
                f"a process can lock {_size(locked)} of memory, and NCCL over InfiniBand needs more",
                "set the limit to unlimited (ulimit -l unlimited, LimitMEMLOCK=infinity of systemd)",
            )


def _sealing_trouble() -> str:
    """Return why this process cannot make memory that others may see; empty if it can."""
    try:
        descriptor = os.memfd_create("gradserver-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return f"memfd_create: {error}"
    try:
        os.ftruncate(descriptor, MIB)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (AttributeError, OSError) as error:
        return f"sealing: {error}"
    finally:
        os.close(descriptor)
    return ""


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this container may have; None if there is no limit that it sees."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _limit(count: int) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else str(count)
