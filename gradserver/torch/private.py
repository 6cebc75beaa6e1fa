"""Names of torch that are not public, all of them here. Tried with torch 2.13.0 and 2.14.1."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._profiler import _RecordFunctionFast

c10d: Final[Any] = _distributed_c10d
"""The module itself. It has no complete types."""
Store = Any
"""A store: ``torch.distributed.Store``."""
TCPStore: Final[Any] = c10d.TCPStore
"""The class of stores that one process keeps for others."""
BackendBase: Final[Any] = c10d.Backend
"""The class of backends that a process group has for its devices."""
HAS_PYTHON_BACKENDS: Final = hasattr(BackendBase, "all_gather_single") and hasattr(BackendBase, "reconfigure")
"""True from torch 2.14 on: a backend may be a Python class. Before, it has to be the whole process group."""
TORCHCOMMS: Final = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
"""Environment variable with which torch gives all groups to torchcomms."""


def uses_torchcomms() -> bool:
    """Return True if the environment has torch give all groups to torchcomms."""
    return os.environ.get(TORCHCOMMS, "").lower() in ("1", "true", "yes", "on")


def admit_monitored_barrier(is_ours: Callable[[Any], bool]) -> None:
    """Have `torch.distributed.monitored_barrier` call groups of ours, which torch before 2.14 refuses by their name."""
    torchs = dist.distributed_c10d.monitored_barrier
    if HAS_PYTHON_BACKENDS or hasattr(torchs, "gradserver"):
        return

    @wraps(torchs)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        if not is_ours(chosen):
            torchs(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        chosen.monitored_barrier(limit, wait_all_ranks)

    monitored_barrier.gradserver = True  # type: ignore[attr-defined]
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def profiled(name: str, given: Iterable[Any]) -> Any:
    """Begin an event of torch's profiler, with the shapes of tensors in ``given``; None if nothing is profiled.

    The thread that has begun it ends it, by `__exit__`.
    """
    if not torch._C._autograd._profiler_enabled():
        return None
    tensors = [one for some in given for one in (some if isinstance(some, list) else [some])]
    event = _RecordFunctionFast(f"gradserver:{name}", [one for one in tensors if isinstance(one, torch.Tensor)])
    event.__enter__()
    return event


def backends_by_device() -> dict[str, str]:
    """Return the backends of the group that torch makes just now, by device; empty if torch does not tell.

    A creator is not told. But it is called by the function that has read what the caller wants.
    """
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        frame = above
        if frame.f_code.co_name == "_new_process_group_helper":
            config = frame.f_locals.get("backend_config")
            return dict(config.get_device_backend_map()) if config is not None else {}
    return {}


def host_of(store: Store) -> str | None:
    """Return the host at which a store is, as processes find it; None if it is a file or memory."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)
