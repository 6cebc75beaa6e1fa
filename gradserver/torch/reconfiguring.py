"""Process groups with members that change: ``init_process_group("gradserver", enable_reconfigure=True)``.

torch 2.14 and newer has this as an experiment: `torch.distributed._reconfigure` takes the handles of the members that
a group is to have from now on, in the order of their ranks. The group is in one of two states:

    state   event                                     next    what happens
    ──────  ────────────────────────────────────────  ──────  ────────────────────────────────────────────────────────
    EMPTY   a collective                              EMPTY   UsageError
    any     reconfigure, and all members call it      FORMED  the members before are left, and hear that
    any     reconfigure, and a member does not come   EMPTY   JoinTimeoutError, which names it
    any     reconfigure, and it cannot be right       as was  UsageError: not in it, or the uuid was used
    FORMED  a member is lost, or leaves               FORMED  the error that names it, in each call until reconfigure
    FORMED  abort                                     EMPTY   the others hear that
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid as uuids
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple, NoReturn

import gradserver
from gradserver.protocol.errors import CoordinatorUnreachableError, GradServerError, MalformedMessageError, UsageError
from gradserver.protocol.limits import MAX_TIMEOUT
from gradserver.torch.coordinator import REACHING_SECONDS, URL, coordinator_url, hear, reach, tell
from gradserver.torch.errors import as_torchs
from gradserver.torch.groups import MADE, ProcessGroupGradServer
from gradserver.torch.operations import Operations
from gradserver.torch.private import Store, c10d, host_of
from gradserver.torch.work import GradServerWork, Resolvers
from gradserver.worker.client import Worker

_KEY: Final = "gradserver/reconfigure"


class Handle(NamedTuple):
    """Text by which others know a process: the coordinator that it was told of, its name, and a random part."""

    url: str
    name: str
    random: str

    def __str__(self) -> str:
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Handle:
        """Read a handle. MalformedMessageError if it is none of this backend."""
        try:
            url, name, random = map(str, json.loads(text))
        except ValueError:
            raise MalformedMessageError(
                f"{text[:64]!r} is no handle of the backend 'gradserver': give those of _get_reconfigure_handle()"
            ) from None
        return cls(url, name, random)


class _Unformed:
    """Operations of a group without members: none."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.ranks, self.sequence = rank, size, (), 0

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            "this process group has no members: call torch.distributed._reconfigure with their handles, and wait for it"
        )


class ReconfigurableProcessGroup(ProcessGroupGradServer):
    """A process group that has the members of its last `reconfigure`.

    Args:
        rank: rank in the group until then.
        size: size of the group until then.
        store: the store, by which members without GRADSERVER_URL agree on a coordinator.
        name: torch's name of the group.
        timeout: limit of waits that name none.
        formed: is called with the coordinator's URL and each new worker.
    """

    supports_reconfigure = True

    def __init__(
        self, rank: int, size: int, store: Store, name: str, timeout: timedelta, formed: Callable[[str, Worker], None]
    ) -> None:
        super().__init__(_Unformed(rank, size), store, name)  # type: ignore[arg-type]  # these have no operations
        self._timeout, self._formed, self._resolvers = timeout, formed, Resolvers()
        self._handle = Handle(os.environ.get(URL, ""), f"{socket.gethostname()}:{os.getpid()}", uuids.uuid4().hex)
        self._used = set[int]()

    def get_reconfigure_handle(self) -> str:
        """Return the text by which others name this process in `reconfigure`."""
        return str(self._handle)

    def reconfigure(self, options: Any) -> GradServerWork:
        """Become a member of a new group, of the processes with the handles in ``options``. It returns when that is so.

        A list of handles has the order of the ranks. Of a set the backend decides it. Each process gives the same
        handles, and the same ``uuid``, which was not used before.

        Raises:
            UsageError: the uuid was used, this process is not among the members, or one is there twice.
            MalformedMessageError: a handle is none.
            JoinTimeoutError: a member has not come in time.
            CoordinatorUnreachableError: there is no coordinator, or rank 0 has not told which.
        """
        seconds = (options.timeout or self._timeout).total_seconds()
        handles = list(options.handles) if isinstance(options.handles, list) else sorted(options.handles)
        try:
            self._form(int(options.uuid), handles, min(seconds, MAX_TIMEOUT))
        except GradServerError as error:
            raise as_torchs(error) from error.__cause__
        return GradServerWork(self._resolvers, (), None, [], seconds)

    def _form(self, uuid: int, handles: list[str], seconds: float) -> None:
        own, members = str(self._handle), [Handle.read(handle) for handle in handles]
        names = ", ".join(member.name for member in members)
        if uuid in self._used:
            raise UsageError(f"uuid {uuid} was already used for this group: give a new one, the same at all members")
        if own not in handles:
            raise UsageError(f"this process, {self._handle.name}, is not among the members: {names}")
        if len(set(handles)) < len(handles):
            raise UsageError(f"a process is there twice among the members: {names}")
        self._used.add(uuid)
        self._leave("its process group is reconfigured")
        rank, size = handles.index(own), len(handles)
        group = f"torch-{uuid}-{hashlib.sha256(chr(10).join(handles).encode()).hexdigest()[:12]}"
        url = members[0].url
        if not url and size > 1:
            url = self._agreed(f"{_KEY}/{group}", rank, members[0].name, seconds)
        if url:
            reach(url, min(seconds, REACHING_SECONDS))
        worker = gradserver.connect(url, rank, size, group, timeout=max(seconds, 1.0))
        self.operations = Operations(worker, rank, size, self._timeout)
        MADE[self._named] = self
        self._formed(url, worker)

    def _agreed(self, key: str, rank: int, first: str, seconds: float) -> str:
        """Return the URL of the coordinator of rank 0, which tells it by the store."""
        if rank == 0:
            return str(tell(self._store, key, lambda: coordinator_url(host_of(self._store)))["url"])
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise CoordinatorUnreachableError(
                f"rank 0 of the new group, {first}, has told no coordinator in {seconds:g} s. Has it called "
                f"_reconfigure with the same handles and uuid? If its store is another one, set {URL} for all processes"
            ) from error
        return str(hear(self._store, key)["url"])

    def _leave(self, reason: str, aborts: bool = False) -> None:
        """Leave the group, if there is one."""
        operations = self.operations
        self.operations = _Unformed(operations.rank, operations.size)  # type: ignore[assignment]
        if isinstance(operations, Operations):
            (operations.worker.abort if aborts else operations.worker.close)(reason)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit waits that name no limit, also in later groups."""
        self._timeout = timeout
        if isinstance(self.operations, Operations):
            self.operations.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def get_error(self) -> Any:
        """Return that there is no error beyond those of works."""
        return c10d.ErrorType.SUCCESS

    def abort(self) -> None:
        """Leave at once, because of an error. The next `reconfigure` forms a new group."""
        self._leave("its process group was aborted", aborts=True)

    def shutdown(self) -> None:
        """Leave the group for good."""
        MADE.pop(self._named, None)
        self._leave("destroy_process_group() was called")
