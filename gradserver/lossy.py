"""Means of what travels as lossy codecs: decoded, summed in fp32 in rank order, and encoded once for all.

What the encoding loses is kept, for each slice of each bucket, and added to the next round's mean (DoubleSqueeze,
Tang et al. 2019): so it comes late, and is not lost.
"""

from __future__ import annotations

import threading

import numpy as np

from gradserver.engine.events import NonFinite, Reduce, Undecodable
from gradserver.mean import Array, Outcome, is_finite, weigh
from protocol.codecs import Feedback, Scratch, seed_of
from protocol.errors import ProtocolError
from protocol.exchange import Stream

EXACT_PLACE = ("bf16", "fp16")
"""Codecs that keep an element that is not finite where it is, and spread it over no others."""


class _Memory(threading.local):
    """What a thread works in, used again and again."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.floats = np.empty((2, 0), np.float32)

    def rows(self, numel: int) -> tuple[Array, Array]:
        """Room for a sum and for one contribution."""
        if self.floats.shape[1] < numel:
            self.floats = np.empty((2, numel), np.float32)
        return self.floats[0, :numel], self.floats[1, :numel]


_memory = _Memory()


def reduce_lossy(command: Reduce) -> Outcome:
    """The encoded mean of encoded contributions of float32, weighed as any other."""
    key, codec, numel = command.key, command.operation.codec, command.numel
    seed = seed_of(key.number, key.part, command.slice)
    equal, divisor, weights = weigh([contribution.weight for contribution in command.contributions])
    total, values = _memory.rows(numel)
    total[:] = 0
    with np.errstate(all="ignore"):  # what is not finite is looked for, and reported with its owner
        for contribution, weight in zip(command.contributions, weights, strict=True):
            if contribution.payload is None:
                continue
            payload = memoryview(contribution.payload)[: command.nbytes]
            try:
                codec.decode(payload, numel, values, seed, _memory.scratch)
            except ProtocolError as error:
                return Undecodable(contribution.rank, error)
            if not equal:
                np.multiply(values, np.float32(weight), out=values)
            np.add(total, values, out=total)
        np.divide(total, np.float32(divisor), out=total)
    if not is_finite(total):
        return _blame(command, seed)
    if key.stream == Stream.BUCKET:
        feedback = command.state.get((key.part, command.slice))
        if feedback is None:
            feedback = command.state[key.part, command.slice] = Feedback(numel)
        result = feedback.encode(codec, 0, numel, total, None, seed, _memory.scratch)
    else:
        result = codec.encode(total, None, seed, _memory.scratch)
    for target in command.targets:
        memoryview(target)[: len(result)] = result
    return result if command.keep else None


def _blame(command: Reduce, seed: int) -> NonFinite:
    """The first contribution, in rank order, that has an element which is not finite."""
    codec, numel = command.operation.codec, command.numel
    _, values = _memory.rows(numel)
    for contribution in command.contributions:
        if contribution.payload is None:
            continue
        payload = memoryview(contribution.payload)[: command.nbytes]
        codec.decode(payload, numel, values, seed, _memory.scratch)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            return NonFinite(contribution.rank, int(bad[0]), "NaN or Inf", codec.family in EXACT_PLACE)
    return NonFinite(-1, 0, "Inf")
