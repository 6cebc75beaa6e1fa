"""Means of what travels as lossy codecs: decoded, summed in fp32 in rank order, and encoded once for all.

What the encoding loses is kept, for each slice of each bucket, and added to the next round's mean (DoubleSqueeze,
Tang et al. 2019): so it comes late, and is not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from gradserver.engine.events import NonFinite, Reduce, Undecodable
from gradserver.mean import Array, Outcome, is_finite, scratch, weigh
from protocol.codecs import Codec, Scratch, encode_with_feedback, seed_of
from protocol.codecs.base import BLOCK
from protocol.errors import ProtocolError
from protocol.exchange import Stream

_EXACT_PLACE = ("bf16", "fp16")
"""Codecs that keep an element that is not finite where it is, and spread it over no others."""


class _Codecs(threading.local):
    """What codecs work in, for each thread."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_codecs = _Codecs()


def reduce_lossy(command: Reduce) -> Outcome:
    """The encoded mean of encoded contributions of float32, weighed as any other."""
    key, codec = command.key, command.operation.codec
    equal, divisor, weights = weigh([contribution.weight for contribution in command.contributions])
    given = [
        (contribution.rank, None if equal else np.float32(weight), np.frombuffer(contribution.payload, np.uint8))
        for contribution, weight in zip(command.contributions, weights, strict=True)
        if contribution.payload is not None
    ]
    residual = None
    if key.stream == Stream.BUCKET:
        residual = command.state.get((key.part, command.slice))
        if residual is None:
            residual = command.state[key.part, command.slice] = np.zeros(command.numel, np.float32)
    seed = seed_of(key.number, key.part, command.first)
    result = np.empty(command.nbytes, np.uint8)
    for start, stop in _blocks(codec, command.numel):
        first, last = codec.nbytes(start), codec.nbytes(stop)
        total = _sum([(rank, weight, data[first:last]) for rank, weight, data in given], codec, stop - start, seed)
        if isinstance(total, Undecodable):
            return total
        with np.errstate(all="ignore"):
            np.divide(total, np.float32(divisor), out=total)
        if not is_finite(total):
            return _blame(command, seed)
        out = result[first:last]
        if residual is None:
            codec.encode(total, out, seed, _codecs.scratch)
        else:
            encode_with_feedback(codec, total, residual[start:stop], out, seed, _codecs.scratch)
    for target in command.targets:
        memoryview(target)[: result.size] = result.data
    return result.data if command.keep else None


def _blocks(codec: Codec, numel: int) -> Iterator[tuple[int, int]]:
    """Dense codecs encode blocks apart from each other: one after the other they stay in cache."""
    step = BLOCK if codec.parameter == 0 else numel
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _sum(given: list[tuple[int, np.float32 | None, Array]], codec: Codec, numel: int, seed: int) -> Array | Undecodable:
    """The weighed sum of some elements of every contribution, in rank order."""
    total, values = scratch(0, numel, np.float32), scratch(1, numel, np.float32)
    row = total
    with np.errstate(all="ignore"):  # what is not finite is looked for, and reported with its owner
        for rank, weight, payload in given:
            try:
                codec.decode(payload.data, numel, row, seed, _codecs.scratch)
            except ProtocolError as error:
                return Undecodable(rank, error)
            if weight is not None:
                np.multiply(row, weight, out=row)
            if row is values:
                np.add(total, values, out=total)
            row = values
    return total


def _blame(command: Reduce, seed: int) -> NonFinite:
    """The first contribution, in rank order, that has an element which is not finite."""
    codec, numel = command.operation.codec, command.numel
    values = scratch(0, numel, np.float32)
    for contribution in command.contributions:
        if contribution.payload is None:
            continue
        payload = memoryview(contribution.payload)[: command.nbytes]
        codec.decode(payload, numel, values, seed, _codecs.scratch)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            return NonFinite(contribution.rank, int(bad[0]), "NaN or Inf", codec.family in _EXACT_PLACE)
    return NonFinite(-1, 0, "Inf")
