"""Collectives of Python objects: plain data, arrays and tensors of sizes that no other member knows.

An object travels as a tree (`gradserver.worker.tree`): nothing of it is evaluated, and no size is believed. Or it
travels pickled, if both sides allow that. Its first byte says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np

from gradserver.protocol.errors import (
    InvalidArgumentError,
    LimitExceededError,
    MalformedMessageError,
    UsageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import Kind
from gradserver.protocol.limits import MAX_OBJECT_BYTES
from gradserver.worker.collectives.arguments import root_of
from gradserver.worker.collectives.pickled import from_pickle, to_pickle
from gradserver.worker.collectives.rooted import RootedCollectives
from gradserver.worker.collectives.uneven import agree_on, exchange_parts
from gradserver.worker.handle import Timeout, seconds
from gradserver.worker.tree import from_bytes, to_bytes

V = TypeVar("V")

_TREE: Final = b"\0"
_PICKLE: Final = b"\1"


class ObjectCollectives(RootedCollectives):
    """Collectives of objects among the members of a group.

    An object is made of dict, list, tuple, None, bool, int, float, str, bytes, numpy arrays and torch tensors. It
    takes at most 256 MiB. With ``allow_pickle=True`` at all members, it may be anything that pickle knows. Unpickling
    runs code that another member has chosen. Allow it only where every worker is trusted.

    A member that gets an object gets a copy, also in a group of one. All members call these in the same order. The
    calls wait, at most for ``timeout``.
    """

    def all_gather_object(self, value: V, *, allow_pickle: bool = False, timeout: Timeout = None) -> list[V]:
        """Return every member's ``value``, by rank."""
        return self._gather_objects(Kind.ALL_GATHER, value, -1, allow_pickle, timeout)

    def gather_object(
        self, value: V, root: int = 0, *, dst: int | None = None, allow_pickle: bool = False, timeout: Timeout = None
    ) -> list[V] | None:
        """Return every member's ``value``, by rank, at rank ``root`` (or ``dst``; 0), and None at the others."""
        root = self._check_rank(root_of(root, "dst", dst), "root")
        found = self._gather_objects(Kind.GATHER, value, root, allow_pickle, timeout)
        return found if root == self.rank else None

    def broadcast_object(
        self,
        value: V | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        allow_pickle: bool = False,
        timeout: Timeout = None,
    ) -> V:
        """Return the ``value`` of rank ``root`` (or ``src``; 0) at every member. The others' values are ignored."""
        root = self._check_rank(root_of(root, "src", src), "root")
        patience = seconds(timeout)
        data = np.frombuffer(_encoded(value, allow_pickle), np.uint8) if root == self.rank else np.empty(0, np.uint8)
        (length,) = agree_on(self._session, [data.size], patience)
        self._check_root(root, length)
        if root != self.rank:
            data = np.empty(length, np.uint8)
        self.broadcast(data, root, timeout=patience)
        found: V = _decoded(data.tobytes(), allow_pickle, self._session.membership.names[root])
        return found

    def scatter_object(
        self,
        values: Sequence[V] | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        allow_pickle: bool = False,
        timeout: Timeout = None,
    ) -> V:
        """Return this rank's one of the ``values`` of rank ``root`` (or ``src``; 0). The others give None."""
        root = self._check_rank(root_of(root, "src", src), "root")
        given = None
        if root == self.rank:
            if values is None or len(values) != self.world_size:
                count = "None" if values is None else str(len(values))
                raise InvalidArgumentError(f"scatter_object needs {self.world_size} values at its root, not {count}")
            given = [_encoded(value, allow_pickle) for value in values]
        found: V = self._scatter_objects(given, root, allow_pickle, timeout)
        return found

    def _gather_objects(self, kind: Kind, value: Any, root: int, allow_pickle: bool, timeout: Timeout) -> list[Any]:
        data, patience = _encoded(value, allow_pickle), seconds(timeout)
        (longest,) = agree_on(self._session, [len(data)], patience)
        _check_size(longest)
        names = self._session.membership.names

        def made(parts: list[bytes]) -> list[Any]:
            return [_decoded(part, allow_pickle, names[rank]) for rank, part in enumerate(parts)]

        return exchange_parts(self._session, kind, [data], longest, root, made=made, timeout=patience).wait()

    def _scatter_objects(self, given: list[bytes] | None, root: int, allow_pickle: bool, timeout: Timeout) -> Any:
        patience = seconds(timeout)
        (longest,) = agree_on(self._session, [max(map(len, given or ()), default=0)], patience)
        self._check_root(root, longest)
        name = self._session.membership.names[root]

        def made(parts: list[bytes]) -> Any:
            return _decoded(parts[0], allow_pickle, name)

        scattered = exchange_parts(self._session, Kind.SCATTER, given, longest, root, made=made, timeout=patience)
        return scattered.wait()

    def _check_root(self, root: int, longest: int) -> None:
        """Check what all members agreed on as the length of the objects of rank ``root``: no object takes 0 bytes."""
        if not longest:
            raise WorkerLostError(f"{self._session.membership.names[root]!r} (rank {root}) was lost before it gave any")
        _check_size(longest)


def _encoded(value: object, allow_pickle: bool) -> bytes:
    """Encode an object as bytes."""
    try:
        data = _TREE + to_bytes(value)
    except InvalidArgumentError as error:
        if not allow_pickle:
            raise InvalidArgumentError(
                f"this object cannot travel: {error.message}. allow_pickle=True, at every member, lets any object "
                f"travel; unpickling runs code that the object names"
            ) from None
        data = _PICKLE + to_pickle(value)
    if len(data) > MAX_OBJECT_BYTES:
        raise LimitExceededError(
            f"this object takes {len(data):,} bytes, the limit is {MAX_OBJECT_BYTES:,}: send tensors as such"
        )
    return data


def _check_size(longest: int) -> None:
    if not 0 <= longest <= MAX_OBJECT_BYTES:
        raise LimitExceededError(f"a member's object takes {longest:,} bytes, the limit is {MAX_OBJECT_BYTES:,}")


def _decoded(data: bytes, allow_pickle: bool, giver: str) -> Any:
    """Return the object that ``giver`` has sent."""
    if data[:1] == _PICKLE and not allow_pickle:
        raise UsageError(f"{giver!r} has sent an object that has to be unpickled: say allow_pickle=True here, too")
    try:
        if data[:1] == _PICKLE:
            return from_pickle(data[1:])
        if data[:1] == _TREE:
            return from_bytes(data[1:])
    except MalformedMessageError as error:
        raise MalformedMessageError(f"what {giver!r} has sent is not an object: {error.message}") from error
    raise MalformedMessageError(f"what {giver!r} has sent is not an object but {len(data)} other bytes")
