"""Means of what travels as lossy codecs: decoded, summed in fp32 in rank order, and encoded once for all.

What the encoding loses is kept, for each slice of each bucket, and added to the next round's mean (DoubleSqueeze,
Tang et al. 2019): so it comes late, and is not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from gradserver.engine.events import RESULT, Digests, Finding, NonFinite, Reduce, Sifted, Undecodable
from gradserver.engine.policy import OnNonFinite
from gradserver.mean import (
    Array,
    Outcome,
    divide,
    first_non_finite,
    in_range as to_range,
    is_finite,
    scratch,
    shares_of,
    weigh,
    with_one_nan,
)
from gradserver.protocol.codecs import Codec, Scratch, seed_of
from gradserver.protocol.digest import digest
from gradserver.protocol.errors import ProtocolError
from gradserver.protocol.exchange import Stream

EXACT_PLACE: Final = ("bf16", "fp16")
"""Codecs that keep an element that is not finite where it is, and spread it over no others."""


class _Codecs(threading.local):
    """What codecs work in, for each thread."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_codecs = _Codecs()


def reduce_lossy(command: Reduce) -> Outcome:
    """The encoded mean of encoded contributions of float32, weighed as any other."""
    rows, rank = list(command.contributions), -1
    try:
        codec = command.operation.codec
        data: dict[int, Array] = {}
        for rank, _, payload in rows:
            if payload is not None:
                data[rank] = codec.data_of(payload, command.numel)
    except ProtocolError as error:
        return Undecodable(rank, error)
    findings: list[Finding] = []
    while True:
        made = _reduce(command, [(one.rank, one.weight) for one in rows], data, False)
        if made is not _NOT_FINITE:
            break
        if not command.spans:
            return _blame(command)
        bad = _findings(command, data)
        if not bad:
            made = _reduce(command, [(one.rank, one.weight) for one in rows], data, True)
            break
        findings += bad
        for _, rank, _ in bad:
            del data[rank]
        rows = [one for one in rows if one.rank in data or one.payload is None]
        if command.nonfinite is OnNonFinite.SKIP or not data:
            return Sifted(None, tuple(sorted(findings)))
    assert made is not _NOT_FINITE
    if isinstance(made, Undecodable):
        return made
    for target in command.targets:
        memoryview(target)[: made.size] = made.data
    kept = made.data if command.keep else None
    return Sifted(kept, tuple(sorted(findings))) if findings else kept


class _Verdict(Enum):
    NOT_FINITE = 0


_NOT_FINITE: Final = _Verdict.NOT_FINITE


def _reduce(
    command: Reduce, shares: Sequence[tuple[int, float]], data: Mapping[int, Array], in_range: bool
) -> Array | Undecodable | _Verdict:
    """The encoded mean of ``data``, by rank; who is not in it gives zeros. If it is not to be encoded, why not.

    With ``in_range`` no sum is larger than the largest contribution.
    """
    codec, guarded = command.operation.codec, command.nonfinite is not OnNonFinite.PROPAGATE
    weights = [weight for _, weight in shares]
    equal, divisor, scaled = (False, 1.0, shares_of(weights)) if in_range else weigh(weights)
    given = [
        _Given(rank, None if equal else np.float32(weight), data[rank])
        for (rank, _), weight in zip(shares, scaled, strict=True)
        if rank in data
    ]
    owed = _owed(command)
    if owed is not None:
        owed.begin(command.key.number)
    seed = seed_of(command.key.number, command.key.part, command.first)
    result = np.empty(command.nbytes, np.uint8)
    found: list[tuple[int, int]] = []
    with np.errstate(all="ignore"):  # what is not finite is looked for, and reported with its owner
        for number, elements, piece in codec.blocks(command.numel):  # one after the other they stay in cache
            mean = scratch(0, elements.stop - elements.start, np.float32)
            if (undecodable := _sum(given, codec, piece, mean, seed + number)) is not None:
                return undecodable
            if in_range:
                mean = to_range(mean, np.float32)
            divide(mean, divisor)
            rest = None if owed is None else owed.carry(elements)
            if not _encode(codec, mean, rest, result[piece], seed + number, guarded):
                return _NOT_FINITE
            if command.digests is not None:
                found += _hash(command, command.digests, elements, piece, [*given, _Given(RESULT, None, result)])
    if owed is not None:
        owed.end(command.key.number)
    if command.digests is not None:
        command.digests.found.extend(found)
    return result


class _Given(NamedTuple):
    """A contribution with its bytes. The weight is None if all weigh the same."""

    rank: int
    weight: np.float32 | None
    data: Array


def _hash(
    command: Reduce, digests: Digests, elements: slice, piece: slice, rows: list[_Given]
) -> Iterator[tuple[int, int]]:
    """The digest of one block of every contribution, and of the result."""
    start, stop = command.first + elements.start, command.first + elements.stop
    for part, at in command.operation.codec.places(start, stop, command.operation.numel):
        for rank, _, data in rows:
            yield rank, digest(data[piece][part], digests.at + at)


class Owed:
    """What one slice of a bucket is still owed: behind the last round that was made, and behind the one before.

    So a round can be made once more, from the same contributions or others.

    Args:
        slots: two rows of float32, which may be mapped from a file.
        rounds: of each the number of the round that left it, plus one; 0 for none.
    """

    def __init__(self, slots: Array, rounds: Array) -> None:
        self._slots, self._rounds = slots, rounds
        self._next = 0
        self._is_owed = False

    @property
    def latest(self) -> Array:
        """What the last round left."""
        latest: Array = self._slots[0 if self._rounds[0] > self._rounds[1] else 1]
        return latest

    def begin(self, number: int) -> None:
        """Round ``number`` is to be made."""
        before = [int(left) if left <= number else 0 for left in self._rounds]
        self._next = 0 if before[1] > before[0] else 1
        self._is_owed = max(before) > 0
        self._rounds[self._next] = 0

    def carry(self, elements: slice) -> Array:
        """What is owed to some elements of that round, to be made what it leaves. They are in cache then."""
        left: Array = self._slots[self._next, elements]
        left[:] = self._slots[1 - self._next, elements] if self._is_owed else 0
        return left

    def end(self, number: int) -> None:
        """It was made."""
        self._rounds[self._next] = number + 1


def _owed(command: Reduce) -> Owed | None:
    """What this slice of a bucket is still owed; None for what has no next time."""
    key = command.key
    if key.stream != Stream.BUCKET:
        return None
    owed: Owed | None = command.state.get((key.part, command.slice))
    if owed is None:
        owed = Owed(np.zeros((2, command.numel), np.float32), np.zeros(2, np.uint64))
        command.state[key.part, command.slice] = owed
    return owed


def _sum(given: list[_Given], codec: Codec, piece: slice, total: Array, seed: int) -> Undecodable | None:
    """Write the weighed sum of one block of every contribution, in rank order, to ``total``."""
    if not given:
        total.fill(0)
    for number, (rank, weight, data) in enumerate(given):
        try:
            if number:
                codec.add_block(data[piece], total, weight, seed, _codecs.scratch)
                continue
            codec.decode_block(data[piece], total, seed, _codecs.scratch)
        except ProtocolError as error:
            return Undecodable(rank, error)
        if weight is not None:
            np.multiply(total, weight, out=total)
    return None


def _encode(codec: Codec, mean: Array, residual: Array | None, out: Array, seed: int, guarded: bool) -> bool:
    """Encode one block of the mean, with what it is owed if somebody keeps count; that stays owed if it is not finite.

    False if it is not finite and ``guarded``: nothing was encoded then.
    """
    if residual is not None and codec.compensate_block(mean, residual, out, seed, _codecs.scratch):
        return True
    if not is_finite(mean):
        if guarded:
            return False
        with_one_nan(mean)
    codec.encode_block(mean, out, seed, _codecs.scratch)
    return True


def _blame(command: Reduce) -> NonFinite:
    """The first contribution, in rank order, that has an element which is not finite."""
    codec = command.operation.codec
    for rank, _, payload in command.contributions:
        if payload is None:
            continue
        element = _bad(command, codec.data_of(payload, command.numel))
        if element is not None:
            return NonFinite(rank, element, "NaN or Inf", codec.family in EXACT_PLACE)
    return NonFinite(-1, 0, "Inf")


def _findings(command: Reduce, data: Mapping[int, Array]) -> list[Finding]:
    """Contributions with elements that are not finite."""
    found = [(rank, _bad(command, payload)) for rank, payload in data.items()]
    return [Finding(command.slice, rank, element) for rank, element in found if element is not None]


def _bad(command: Reduce, data: Array) -> int | None:
    """The first element of a contribution that is not finite, as far as its codec keeps places; None if all are."""
    values = scratch(0, command.numel, np.float32)
    seed = seed_of(command.key.number, command.key.part, command.first)
    command.operation.codec.decode(data.data, command.numel, values, seed, _codecs.scratch)
    return first_non_finite(values)
