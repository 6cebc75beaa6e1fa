"""Whether the members of a job are alike: what they tell each other before they save, and before they go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from torch import nn

from protocol.digest import MODULUS, digest
from protocol.errors import DisagreementError, DivergedError, LimitExceededError, MembershipChangedError, StateError
from protocol.limits import MIB
from worker.client import Worker
from worker.tensors import bind
from worker.tree import Tree, from_bytes, to_bytes

_MOST_BYTES: Final = 16 * MIB
"""What one member may tell the others at once."""


def gather(worker: Worker, tree: Tree) -> list[Tree]:
    """What every member tells, by rank: small trees, which need not be alike. A collective."""
    told = np.frombuffer(to_bytes(tree), np.uint8)
    while True:
        try:
            lengths = worker.all_gather(np.array([told.size])).ravel().tolist()
            if max(lengths) > _MOST_BYTES:
                raise LimitExceededError(f"a member tells {max(lengths):,} bytes of its state, and {_MOST_BYTES:,} go")
            padded = np.zeros(max(lengths), np.uint8)
            padded[: told.size] = told
            rows = worker.all_gather(padded)
        except MembershipChangedError:  # raised at everybody, so everybody tells again
            continue
        return [from_bytes(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def digest_of(module: nn.Module) -> int:
    """The digest (`protocol.digest`) of a module's parameters, one behind the other."""
    total = at = 0
    for parameter in module.parameters():
        data = bind(parameter, writes=False).data
        total += digest(data, at)
        at += data.size
    return total % MODULUS


def check_weights(worker: Worker, digests: Sequence[int], number: int) -> None:
    """Raise DivergedError, which names those who differ from most, unless all weights are the same."""
    usual = max(digests, key=Counter(digests).__getitem__)  # the first of them, so the lowest rank's, if it is a draw
    others = [rank for rank, one in enumerate(digests) if one != usual]
    if others:
        raise DivergedError(
            f"after round {number} the weights of {_named(worker, others)} are not those of "
            f"{_named(worker, [digests.index(usual)])}: nothing was saved. Replicas stay alike if all of them change "
            f"their weights by job.step() only, in the same way, with the same versions of torch on the same kind of "
            f"processor. Start again from the last checkpoint"
        )


def check_same_start(worker: Worker, told: Sequence[Tree]) -> None:
    """Raise unless all members found the same checkpoint, or none.

    Raises:
        StateError: one of them could not read its own; says who and why.
        DisagreementError: they found different ones; says who found which.
    """
    for rank, one in enumerate(told):
        if one["error"]:
            raise StateError(f"{_named(worker, [rank])} cannot load the checkpoint: {one['error']}")
    for rank, one in enumerate(told):
        if one["digest"] != told[0]["digest"]:
            raise DisagreementError(
                f"all members must load the same checkpoint: {_named(worker, [0])} has {_found(told[0])}, and "
                f"{_named(worker, [rank])} has {_found(one)}. Give all of them the same file, or a shared directory"
            )


def _found(one: Tree) -> str:
    return f"round {one['round']} (digest {one['digest'].hex()[:12]}, {one['path']})" if one["path"] else "none"


def _named(worker: Worker, ranks: Sequence[int]) -> str:
    return ", ".join(f"{worker.names[rank]!r} (rank {rank})" for rank in ranks)
