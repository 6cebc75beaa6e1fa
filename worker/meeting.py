"""A place where workers find each other: a torch store that a worker hosts. It offers the address when it joins.

The store of the lowest rank that has one is the rendezvous of a group's direct plane. On the hierarchical plane each
host has such a rendezvous. The coordinator carries the addresses. So the coordinator needs no torch.

    address      store
    ───────────  ──────────────────────────────────────────────────────────────────────────────────────────────────
    HOST:PORT    a TCPStore of the worker, on a port that it has kept since it joined
    HOST:FOLDER  files in a folder that the worker has made in GRADSERVER_RENDEZVOUS_DIR, which all hosts see

When it joins, a worker does not know which plane the coordinator or another worker demands. So each worker that has
torch keeps a port. It listens there, in a thread of torch's, from the first time that members are to meet there.

Files are for hosts between which no port can be reached at will. Torch's FileStore is known for what an earlier run has
left, which misleads the next one, and for waits without an end. So each worker's folder has a name of its own, and
in it each communicator a file of its own. Waits have the limit of any rendezvous. The folder goes with the membership.
Those of workers that were killed are removed after a week. Each host may have the directory under another path.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from gradserver.protocol.offers import Offer
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO
from gradserver.protocol.url import parse_target

log = logging.getLogger("gradserver")

VARIABLE: Final = "GRADSERVER_RENDEZVOUS_DIR"
_SECONDS: Final = 60.0
_DISCARD: Final = 9
"""A port to look for a way to a host with: nothing is sent to it."""
_PREFIX: Final = "gradserver-"
_FOLDER: Final = re.compile(_PREFIX + r"\w+")
_KEPT_SECONDS: Final = 7 * 86400.0
"""Time after which a folder that nothing was added to is that of a worker which was killed."""


class Folder:
    """A folder for the files of a rendezvous. It is removed with the last reference to it.

    Attributes:
        path: where it is.
    """

    def __init__(self, directory: Path) -> None:
        for other in directory.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another worker may remove it, too
                if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        weakref.finalize(self, shutil.rmtree, self.path, True)


class Port:
    """A port of this host that is kept for a store. It is free again when nothing refers to it and to the store.

    Attributes:
        address: its host and number.
    """

    def __init__(self, host: str) -> None:
        self._host, self._lock = host, threading.Lock()
        self._bound: socket.socket | None = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        weakref.finalize(self, self._bound.close)
        self._bound.bind((host, 0))
        self._number: int = self._bound.getsockname()[1]
        self._store: object = None
        self.address = f"{host}:{self._number}"

    def open(self) -> None:
        """Have the store listen, if it does not yet."""
        with self._lock:
            if self._bound is None:
                return
            descriptor, self._bound = self._bound.detach(), None  # the store closes it
            self._store = _torch().TCPStore(
                self._host, self._number, None, True, timedelta(seconds=_SECONDS), wait_for_workers=False,
                master_listen_fd=descriptor,
            )  # fmt: skip


_ports: weakref.WeakValueDictionary[str, Port] = weakref.WeakValueDictionary()
"""Ports that this process keeps, by their addresses."""


def with_store(offer: Offer, url: str) -> tuple[Offer, object]:
    """Return ``offer`` with the address of a new store, if members may reduce among themselves; and the store.

    The store is reached at the address from which this host reaches the coordinator at ``url``. It lasts as long as it
    is referenced. Each membership has one of its own: what an earlier one has left there would mislead.
    """
    if not offer.backends or offer.plane not in (AUTO, *AMONG_MEMBERS):
        return offer, None
    if directory := os.environ.get(VARIABLE):
        return _with_folder(offer, url, directory)
    try:
        port = Port(address_towards(*parse_target(url)))
    except OSError as error:
        log.warning("this worker cannot host a rendezvous for other workers: %s", error)
        return offer, None
    _ports[port.address] = port
    return offer._replace(store=port.address), port


@cache
def _directory(named: str) -> Path:
    """Return the directory that the variable has ``named``. It is sought when a worker joins: its script may chdir."""
    return Path(os.path.expanduser(named)).absolute()


def _with_folder(offer: Offer, url: str, directory: str) -> tuple[Offer, object]:
    """Return ``offer`` with a folder in ``directory`` for the files of a rendezvous; and that."""
    try:
        folder = Folder(_directory(directory))
        return offer._replace(store=f"{address_towards(*parse_target(url))}:{folder.path.name}"), folder
    except OSError as error:
        log.warning("this worker cannot keep a rendezvous for other workers in %s: %s", VARIABLE, error)
        return offer, None


def store_at(address: str, name: str, limit: timedelta) -> Any:
    """Return the store at ``address``, for what is called ``name`` there. Each wait in it ends after ``limit``.

    Raises:
        ValueError: the address is none, or this worker does not know the directory, or its host lacks the folder.
        RuntimeError: the store cannot be reached, as torch says it.
    """
    host, _, place = address.rpartition(":")
    if place.isdecimal():
        if (port := _ports.get(address)) is not None:
            port.open()
        return _torch().TCPStore(host, int(place), None, False, limit)
    directory = os.environ.get(VARIABLE)
    if directory is None or not _FOLDER.fullmatch(place):
        raise ValueError(f"the members meet in the folder {place!r} of {VARIABLE}, and here that is {directory!r}")
    folder = _directory(directory) / place
    if not folder.is_dir():  # torch's store would wait for it without an end
        raise ValueError(
            f"the members meet in {folder}, and this host has no such folder: is {VARIABLE} the shared one?"
        )
    store = _torch().FileStore(str(folder / blake2b(name.encode(), digest_size=16).hexdigest()))
    store.set_timeout(limit)
    return store


def _torch() -> Any:
    """Return torch.distributed: not every worker has it."""
    return cast(Any, import_module("torch.distributed"))


def address_towards(host: str, port: int = _DISCARD) -> str:
    """Return the address of this host on the way to ``host``. Nothing is sent for that. OSError if there is no way."""
    trouble = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            trouble = error
    raise trouble
