"""The classes that torch sees: a whole process group, or a backend beside others in one, from torch 2.14 on.

A whole group says more of its works: some C++ of torch stands between a backend in Python and the script.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gradserver.protocol.errors import GradServerError, UsageError
from gradserver.torch.errors import as_torchs
from gradserver.torch.operations import Operations
from gradserver.torch.private import HAS_PYTHON_BACKENDS, BackendBase, Store, admit_monitored_barrier, c10d, profiled
from gradserver.torch.work import GradServerWork
from gradserver.worker.client import Worker

_SPELLINGS: Final = {
    "allreduce": ("allreduce", "allreduce_coalesced"),
    "reduce": ("reduce",),
    "reduce_scatter": ("reduce_scatter",),
    "reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "broadcast": ("broadcast",),
    "allgather": ("allgather",),
    "allgather_coalesced": ("allgather_coalesced",),
    "all_gather_single": ("all_gather_single", "_allgather_base"),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "all_to_all_single": ("all_to_all_single", "alltoall_base"),
    "alltoall": ("alltoall",),
    "barrier": ("barrier",),
    "monitored_barrier": ("monitored_barrier",),
    "send": ("send",),
    "recv": ("recv",),
    "recv_anysource": ("recv_anysource",),
}
"""Names by which versions of torch call each operation."""
_EVENTS: Final = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_anysource": "recvAnySource",
}
"""Names of operations in profiles, as gloo's are called there, where they are others."""
MADE: Final[dict[str, _Common]] = {}
"""Groups by name. Without a reference of ours, C++ would lose the Python half of one."""


class _Common:
    """The methods of both classes."""

    operations: Operations
    _named: str

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def _hold(self, operations: Operations, store: Store, name: str) -> None:
        self.operations, self._store, self._named, self._described = operations, store, name, "undefined"
        MADE[name] = self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: there is no memory of its own."""
        del device
        return False

    def getBackendName(self) -> str:  # noqa: N802 - the name is torch's, here and below
        """Return the backend's name."""
        return "gradserver"

    def _set_sequence_number_for_group(self) -> None:
        self.operations.sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.operations.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit waits that name no limit."""
        self.operations.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _wait_for_pending_works(self) -> None:
        self.operations.worker.synchronize()

    def abort(self) -> None:
        """Leave at once, because of an error: the others, which need this rank, are told."""
        MADE.pop(self._named, None)
        self.operations.worker.abort("its process group was aborted")

    def shutdown(self) -> None:
        """Leave the group."""
        MADE.pop(self._named, None)
        self.operations.worker.close("destroy_process_group() was called")


def _forward(name: str) -> Callable[..., Any]:
    """Return a method that calls an operation. Its errors are also torch's."""
    event = _EVENTS.get(name, name)

    def call(self: _Common, *given: Any, **more: Any) -> Any:
        profiling = profiled(event, given)
        try:
            work = getattr(self.operations, name)(*given, **more)
        except GradServerError as error:
            raise as_torchs(error, self.operations.ranks) from None
        if profiling is not None and isinstance(work, GradServerWork):
            work.ends(profiling)
        return work

    return call


for _name, _spellings in _SPELLINGS.items():
    for _spelling in _spellings:
        setattr(_Common, _spelling, _forward(_name))


class ProcessGroupGradServer(_Common, dist.ProcessGroup):
    """A whole process group, for all devices. Before torch 2.14 there is no other way from Python."""

    def __init__(self, operations: Operations, store: Store, name: str) -> None:
        super().__init__(operations.rank, operations.size)  # type: ignore[call-arg]  # torch's stubs lack it
        self._hold(operations, store, name)

    def getRank(self) -> int:  # noqa: N802
        """Return this process's rank."""
        return self.operations.rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self.operations.size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives."""
        self._named = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave."""
        return self._named

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the description that torch gives."""
        self._described = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch gave."""
        return self._described

    def get_group_store(self) -> Store:
        """Return the store."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        del device
        return self

    def _get_backend_name(self) -> str:
        return "gradserver"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]


class BackendGradServer(_Common, BackendBase):  # type: ignore[misc]  # torch has no types for it
    """One of several backends of a process group, from torch 2.14 on."""

    def __init__(self, operations: Operations, store: Store, name: str, timeout: timedelta) -> None:
        super().__init__(operations.rank, operations.size)
        self._hold(operations, store, name)
        self._options = BackendBase.Options("gradserver", timeout=timeout)

    @property
    def options(self) -> Any:
        """Options of the backend: the timeout."""
        return self._options

    def get_error(self) -> Any:
        """Return that there is no error beyond those of works."""
        return c10d.ErrorType.SUCCESS

    def monitored_barrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as `Operations.monitored_barrier` does."""
        timeout = options if isinstance(options, timedelta | None) else options.timeout
        _forward("monitored_barrier")(self, timeout, wait_all_ranks)


def worker(group: Any = None) -> Worker:
    """Return this process's membership of a process group with the backend "gradserver".

    Args:
        group: the process group; None for the default one.

    Raises:
        UsageError: there is no default group, this process is not in the group, or the group has another backend.
    """
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group('gradserver') first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this process is not a member of that process group: call this at its members")
    chosen: Any = dist.group.WORLD if group is None else group
    found = MADE.get(chosen.group_name)
    if found is None:
        raise UsageError(
            f"the process group has the backend {dist.get_backend(chosen)!r}, and no worker of gradserver: make it by "
            f"init_process_group('gradserver') or new_group(backend='gradserver')"
        )
    return found.operations.worker


def made_of(operations: Operations, store: Store, name: str, timeout: timedelta, beside: bool) -> Any:
    """Return the object that torch takes for a group; one of a group with other backends ``beside`` it if there are."""
    admit_monitored_barrier(lambda group: isinstance(group, _Common))
    if HAS_PYTHON_BACKENDS and beside:
        return BackendGradServer(operations, store, name, timeout)
    return ProcessGroupGradServer(operations, store, name)
