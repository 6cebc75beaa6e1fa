"""Transfers for users, from one member to another."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from gradserver.protocol.errors import InvalidArgumentError, InvalidRankError, SendToSelfError
from gradserver.protocol.exchange import ANSWER_TAG, Kind, Op, operation_of
from gradserver.worker.collectives.arguments import Maybe, peer_of
from gradserver.worker.collectives.call import AmongTwo, Passing
from gradserver.worker.handle import Handle, Timeout, finished, seconds
from gradserver.worker.session import Session
from gradserver.worker.tensors import Binding, bind

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound="torch.Tensor | npt.NDArray[np.generic]")
V = TypeVar("V")
Yes: TypeAlias = Literal[True]
No: TypeAlias = Literal[False]


class Transfers:
    """A member's place in its group, and its transfers. They are matched by source, target and tag."""

    _session: Session

    @property
    def rank(self) -> int:
        """Place of this worker among the members, ``0 … world_size - 1``.

        Rank, world size, names and epoch change when other workers join, leave or are lost. They change in
        `Worker.finish_round` (and so in ``backward()``), in a collective that raises MembershipChangedError, and
        nowhere else.
        """
        return self._session.membership.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return len(self._session.membership.names)

    @overload
    def send(
        self,
        tensor: T,
        target: Maybe = ...,
        tag: int = ...,
        *,
        dst: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
    ) -> T: ...
    @overload
    def send(
        self, tensor: T, target: Maybe = ..., tag: int = ..., *, dst: Maybe = ..., async_op: Yes, timeout: Timeout = ...
    ) -> Handle[T]: ...
    def send(
        self,
        tensor: T,
        target: int | None = None,
        tag: int = 0,
        *,
        dst: int | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> T | Handle[T]:
        """Send ``tensor`` to rank ``target`` (or ``dst``). The send is done when that rank has taken it with `recv`.

        Returns:
            The tensor, or a Handle.
        """
        target = self._check_peer(peer_of("target", target, "dst", dst), "target", tag)
        bound = bind(tensor, writes=False)
        return self._transfer((self.rank, target, tag), bound, True, tensor, async_op, timeout)

    @overload
    def recv(
        self,
        tensor: T,
        source: Maybe = ...,
        tag: int = ...,
        *,
        src: Maybe = ...,
        async_op: No = ...,
        timeout: Timeout = ...,
    ) -> T: ...
    @overload
    def recv(
        self, tensor: T, source: Maybe = ..., tag: int = ..., *, src: Maybe = ..., async_op: Yes, timeout: Timeout = ...
    ) -> Handle[T]: ...
    def recv(
        self,
        tensor: T,
        source: int | None = None,
        tag: int = 0,
        *,
        src: int | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> T | Handle[T]:
        """Overwrite ``tensor`` by what rank ``source`` (or ``src``) sends with the same tag.

        Sends from one rank with one tag arrive in the order in which they were sent.

        Returns:
            The tensor, or a Handle.
        """
        source = self._check_peer(peer_of("source", source, "src", src), "source", tag)
        bound = bind(tensor, writes=True)
        return self._transfer((source, self.rank, tag), bound, False, tensor, async_op, timeout)

    def _transfer(
        self, ends: tuple[int, int, int], bound: Binding, gives: bool, tensor: V, async_op: bool, timeout: Timeout
    ) -> V | Handle[V]:
        operation, patience = operation_of(Kind.TRANSFER, Op.NONE, bound.dtype, bound.numel), seconds(timeout)
        source, target, tag = ends
        ids = self._session.member_of(source), self._session.member_of(target), tag

        def through() -> Handle[V]:
            given, taken = (bound.data, None) if gives else (None, bound.data)
            return self._session.transfer(operation, ids, given, taken, tensor, async_op, by_id=True)

        handle: Handle[V] | None = None
        if bound.numel == 0:
            self._session.check_open()
            handle = finished(tensor)
        elif self._session.membership.commits:
            handle = self._among_two().begin(Passing(operation, ids, bound.data, gives, through, tensor))
        if handle is None:
            handle = through()
        if bound.numel and not gives:
            handle.then(bound.store)
        if patience is not None:
            handle.within(patience)
        return handle if async_op else handle.wait()

    def _among_two(self) -> AmongTwo:
        """Return the transfers from member to member. Their module needs torch, and stands above this one."""
        among: AmongTwo = import_module("gradserver.worker.planes.transfers").DirectTransfers.of(self._session)
        return among

    def _check_rank(self, rank: int | None, what: str) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidRankError(f"{what} is {rank!r}, ranks of this group are 0 to {self.world_size - 1}")
        return rank

    def _check_peer(self, rank: int | None, what: str, tag: int) -> int:
        peer = self._check_rank(rank, what)
        if peer == self.rank:
            raise SendToSelfError(f"{what} is this worker's own rank, {rank}: there is nothing to send")
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < ANSWER_TAG:
            raise InvalidArgumentError(f"a tag is a number from 0 to {ANSWER_TAG - 1}, not {tag!r}")
        return peer
