"""Replicas that are alike: made so when they begin, and compared before they save and continue."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    DivergedError,
    LimitExceededError,
    MembershipChangedError,
    PeerError,
)
from gradserver.protocol.limits import MIB
from gradserver.protocol.messages import Membership
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.tensors import bind
from gradserver.worker.tree import Tree, from_bytes, to_bytes

log = logging.getLogger("gradserver")

_WEIGHTS: Final = slice(0, 8)
"""Bytes of the digest in the row in which a member answers. Its kind is behind them, and then what it is doing."""
_KIND: Final = 8
_DOING: Final = slice(9, 13)
_ROW_BYTES: Final = 13
_OLD: Final = 1
_NEW: Final = 2
_MOST_BYTES: Final = 16 * MIB
"""Bytes that one member may tell the others at once."""


def gather(worker: Worker, tree: Tree) -> list[Tree]:
    """Return what every member tells, by rank: small trees, which may differ. It is a collective."""
    told = np.frombuffer(to_bytes(tree), np.uint8)
    while True:
        try:
            lengths = worker.all_gather(np.array([told.size])).ravel().tolist()
            if max(lengths) > _MOST_BYTES:
                raise LimitExceededError(
                    f"a member tells {max(lengths):,} bytes of its state, the limit is {_MOST_BYTES:,}"
                )
            padded = np.zeros(max(lengths), np.uint8)
            padded[: told.size] = told
            rows = worker.all_gather(padded)
        except MembershipChangedError:  # raised at all members, so all tell again
            continue
        return [from_bytes(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def digest_of(*modules: nn.Module) -> int:
    """Return the digest (`gradserver.protocol.digest`) of modules' parameters, one behind the other."""
    return digest_of_all(parameter for module in modules for parameter in module.parameters())


def digest_of_all(tensors: Iterable[Tensor]) -> int:
    """Return the digest of ``tensors``, one behind the other."""
    total = at = 0
    for tensor in tensors:
        data = bind(tensor, writes=False).data
        total += digest(data, at)
        at += data.size
    return total % MODULUS


def check_weights(worker: Worker, digests: Sequence[int], number: int) -> None:
    """Raise DivergedError, which names the members that differ from most, unless all weights are the same."""
    usual = max(digests, key=Counter(digests).__getitem__)  # the first of them in a draw, so the lowest rank's
    others = [rank for rank, one in enumerate(digests) if one != usual]
    if others:
        then = "Start again from the last checkpoint"
        raise _diverged(worker.names, others, digests.index(usual), number, "nothing was saved", then)


def check_same_tensors(worker: Worker, tensors: Mapping[str, Tensor]) -> None:
    """Compare the digests of ``tensors``, the same parameters and buffers at every member. It is a collective.

    Raises:
        DivergedError: they differ. The error names the first such tensor, and the members that differ from most.
    """
    digests = [digest(bind(tensor, writes=False).data) for tensor in tensors.values()]
    told = gather(worker, {"names": "\n".join(tensors), "digests": np.array(digests, np.uint64)})
    remedy = "With init_sync=False all workers must start alike: load the same file everywhere, or leave it out"
    rows = [(one["names"].split("\n"), one["digests"].tolist()) for one in told]
    for index in range(max(len(names) for names, _ in rows)):
        column = [(names[index], digests[index]) if index < len(digests) else None for names, digests in rows]
        usual = max(column, key=Counter(column).__getitem__)
        others = [rank for rank, one in enumerate(column) if one != usual]
        if others:
            name = next(one for one in (usual, *column) if one is not None)[0]
            raise DivergedError(
                f"{name!r} of {named(worker.names, others)} is not that of "
                f"{named(worker.names, [column.index(usual)])}. {remedy}"
            )


@torch.no_grad()
def broadcast_tensors(worker: Worker, tensors: Iterable[Tensor], chunk_bytes: int) -> None:
    """Overwrite ``tensors`` at every worker by those of rank 0; small ones travel together, in chunks."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        chunk: list[Tensor] = []
        room = chunk_bytes
        for tensor in alike:
            size = tensor.numel() * tensor.element_size()
            if size > room and chunk:
                _broadcast_chunk(worker, chunk)
                chunk, room = [], chunk_bytes
            chunk.append(tensor)
            room -= size
        _broadcast_chunk(worker, chunk)


def _broadcast_chunk(worker: Worker, tensors: list[Tensor]) -> None:
    if len(tensors) == 1:
        worker.broadcast(tensors[0])
        return
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    worker.broadcast(packed)
    if worker.rank != 0:
        for tensor, part in zip(tensors, torch.split(packed, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class _Asked(NamedTuple):
    """The answers of members after a round: a row for each, with a digest, whether it is new, and what it is doing."""

    round: int
    names: Sequence[str]
    rank: int
    rows: npt.NDArray[np.uint8]
    handle: Handle


class Newcomers:
    """The comparison of new members' weights with the others', after the first round that they contributed to.

    A loop may change weights beside `Job.step`. A learner has not done so for rounds before it joined. The answer is
    there a round later, and no member waits for it. Without new members nothing is asked.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_one = worker.joins
        """True if this worker has not been compared yet."""
        self._attached = frozenset(worker._session.membership.member_ids)
        self._due = False
        self._first: _Asked | None = None
        """The answers at the boundary behind which this worker is a member."""
        self._asked: deque[_Asked] = deque()
        worker.on_membership(self._heard)

    def _heard(self, news: Membership) -> None:
        """Note the new members of a membership, which is in force after the first round that they took part in."""
        self._due = self._due or self._is_one or not self._attached.issuperset(news.member_ids)
        self._attached = frozenset(news.member_ids)

    def check(self, replicated: Iterable[Tensor], number: int, doing: int = 0) -> None:
        """Compare ``replicated`` weights if a member is new. All members call it between the same two rounds.

        New members hear of what this one is ``doing`` there, by `others_do`.

        Raises:
            DivergedError: this worker is new, and its weights differ: it has left. The others continue.
        """
        while self._asked and not self._asked[0].handle._open:
            self._compare(self._asked.popleft())
        if self._due:
            is_one, self._due, self._is_one = self._is_one, False, False
            rows = np.zeros((self._worker.world_size, _ROW_BYTES), np.uint8)
            weights = digest_of_all(replicated).to_bytes(8, "little")
            rows[self._worker.rank] = [*weights, _NEW if is_one else _OLD, *doing.to_bytes(4, "little")]
            handle = self._worker.all_reduce(rows, op="max", async_op=True)  # it continues if a member is lost
            self._asked.append(_Asked(number, self._worker.names, self._worker.rank, rows, handle))
            self._first = self._asked[-1] if is_one else None

    def others_do(self) -> int:
        """Return what the others are doing, if this worker was just compared as a new one; else 0. It waits for that.

        All are at the same boundary, and for the new one nothing else says what they do there.
        """
        first, self._first = self._first, None
        if first is None:
            return 0
        first.handle.wait()
        return max(int.from_bytes(row[_DOING].tobytes(), "little") for row in first.rows)

    def _compare(self, asked: _Asked) -> None:
        try:
            asked.handle.wait()
        except (PeerError, DeadlineError, ConnectionLostError) as failure:
            log.info("weights after round %d could not be compared: %s", asked.round, failure.message)
            self._worker._session.check_open()
            return
        digests = {rank: row[_WEIGHTS].tobytes() for rank, row in enumerate(asked.rows) if row[_KIND]}
        usual = next((rank for rank in digests if asked.rows[rank][_KIND] == _OLD), -1)
        others = [rank for rank in digests if asked.rows[rank][_KIND] == _NEW and digests[rank] != digests.get(usual)]
        if usual < 0 or asked.rank not in others:  # a worker that leaves says why
            return
        self._worker.abort(f"behind round {asked.round} its weights were not those of {named(asked.names, [usual])}")
        so = "the worker that has just joined leaves, and the others go on"
        raise _diverged(asked.names, others, usual, asked.round, so, "It can join again with a loop like theirs")


def _diverged(
    names: Sequence[str], others: Sequence[int], usual: int, number: int, so: str, then: str
) -> DivergedError:
    who, whose = named(names, others), named(names, [usual])
    return DivergedError(
        f"after round {number} the weights of {who} are not those of {whose}: {so}. Replicas stay alike if all of them "
        f"change their weights by job.step() only, in the same way, with the same versions of torch on the same kind "
        f"of processor. {then}"
    )


def named(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Name the members with these ranks, for people."""
    return ", ".join(f"{names[rank]!r} (rank {rank})" for rank in ranks)
