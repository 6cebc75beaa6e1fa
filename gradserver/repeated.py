"""Comparison of contributions that were computed from the same samples (`gradserver.protocol.audits`).

It comes before the reduction: its result may be written to where a contribution lies. It reads every contribution in
blocks that stay in cache, and adds up in float64: a square of any float32 is in its range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Final

import numpy as np

from gradserver.engine.commands import Contribution, Reduce, Repeated
from gradserver.mean import Array, types_of, widen
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import Scratch, seed_of
from gradserver.protocol.errors import ProtocolError

_BLOCK: Final = 65_536
"""Elements that are compared at a time."""


def compare_repeated(command: Reduce, repeated: Repeated) -> None:
    """Put the differences of all pairs into ``repeated``. A contribution that cannot be decoded differs from any."""
    sums = {(one.member_id, other.member_id): [0.0, 0.0] for one, other in combinations(repeated.rows, 2)}
    with np.errstate(all="ignore"):  # what is not finite differs from any, and the reduction deals with it
        blocks = [_blocks(command, one) for one in repeated.rows]
        for values in zip(*blocks, strict=True):
            wide = [block.astype(np.float64) for block in values]
            norms = [float(np.dot(block, block)) for block in wide]
            for which, (one, other) in zip(sums, combinations(range(len(wide)), 2), strict=True):
                difference = wide[one] - wide[other]
                sums[which][0] += float(np.dot(difference, difference))
                sums[which][1] += (norms[one] + norms[other]) / 2
    for (one_id, other_id), (apart, size) in sums.items():
        repeated.found.append((one_id, other_id, _known(apart), _known(size)))


def _known(value: float) -> float:
    """Return infinity for NaN."""
    return math.inf if math.isnan(value) else value


def _blocks(command: Reduce, given: Contribution) -> Iterator[Array]:
    """Yield the numbers of a contribution."""
    elements, stored = types_of(command.operation.dtype, command.operation.op)
    if given.payload is not None and command.operation.is_lossy:
        row = _decoded(command, given.payload)
    elif given.payload is not None:
        row = np.frombuffer(given.payload, stored, command.nbytes // stored.itemsize)
    else:
        count = command.numel if command.operation.is_lossy else command.nbytes // stored.itemsize
        row = np.zeros(count, stored)
    for start in range(0, row.size, _BLOCK):
        block = row[start : start + _BLOCK]
        yield widen(block, command.operation.dtype, elements)


def _decoded(command: Reduce, payload: Buffer) -> Array:
    """Decode a contribution: all of it, as it is one slice at most."""
    row = np.empty(command.numel, np.float32)
    seed = seed_of(command.key.number, command.key.part, command.first)
    try:
        command.operation.codec.decode(payload, command.numel, row, seed, Scratch())
    except ProtocolError:
        row.fill(np.nan)
    return row
