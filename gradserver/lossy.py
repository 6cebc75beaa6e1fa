"""Means of lossy contributions: decoded, summed in fp32 in rank order, and encoded once for all members.

The residual of the encoding is kept, for each slice of each bucket, and added to the next round's mean (DoubleSqueeze,
Tang et al. 2019). It is applied late, and not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from gradserver.comparison import compare, is_due, square
from gradserver.engine.commands import RESULT, Digests, Measures, Reduce
from gradserver.engine.events import Finding, NonFinite, Sifted, Undecodable
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
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.means import UNIT
from gradserver.robust import FIRST_SCRATCH, robust_mean
from gradserver.squares import joined, squares

EXACT_PLACE: Final = ("bf16", "fp16")
"""Codecs in which an element that is not finite stays in its place, and does not spread."""

_FIRST_ROW: Final = FIRST_SCRATCH + MAX_WORLD_SIZE
"""Number of the scratch memory of the first decoded row, behind those of robust means."""


class _Codecs(threading.local):
    """Scratch memory of codecs, for each thread."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_codecs = _Codecs()


def reduce_lossy(command: Reduce) -> Outcome:
    """Compute the encoded mean of encoded contributions of float32, weighted as any other."""
    rows, member_id = list(command.contributions), -1
    if not rows:
        if (owed := _owed(command)) is not None:
            owed.keep(command.key.number)
        return Sifted(None, ())
    try:
        data: dict[int, Array] = {}
        for member_id, _, payload in rows:
            if payload is not None:
                data[member_id] = command.operation.codec.data_of(payload, command.numel)
    except ProtocolError as error:
        return Undecodable(member_id, error)
    findings: list[Finding] = []
    while True:
        made = _reduce(command, [(one.member_id, one.weight) for one in rows], data, False)
        if made is not None:
            break
        if not command.spans:
            return _blame(command)
        bad = _findings(command, data)
        if not bad:
            made = _reduce(command, [(one.member_id, one.weight) for one in rows], data, True)
            break
        findings += bad
        for _, member_id, _ in bad:
            del data[member_id]
        rows = [one for one in rows if one.member_id in data or one.payload is None]
        if command.nonfinite is OnNonFinite.SKIP or not data:
            return Sifted(None, tuple(sorted(findings)))
    assert made is not None
    if isinstance(made, Undecodable):
        return made
    for target in command.targets:
        memoryview(target)[: made.size] = made.data
    kept = made.data if command.keep else None
    return Sifted(kept, tuple(sorted(findings))) if findings else kept


def _reduce(
    command: Reduce, shares: Sequence[tuple[int, float]], data: Mapping[int, Array], in_range: bool
) -> Array | Undecodable | None:
    """Compute the encoded mean of ``data``, by member id, or return why there is none.

    A member without data counts as zeros. Returns None if the mean is not finite. With ``in_range`` no sum is larger
    than the largest contribution.
    """
    codec, guarded = command.operation.codec, command.nonfinite is not OnNonFinite.PROPAGATE
    weights = [weight for _, weight in shares]
    equal, divisor, scaled = (False, 1.0, shares_of(weights)) if in_range else weigh(weights)
    given = [
        _Given(member_id, None if equal else np.float32(weight), data[member_id])
        for (member_id, _), weight in zip(shares, scaled, strict=True)
        if member_id in data
    ]
    if (owed := _owed(command)) is not None:
        owed.begin(command.key.number)
    seed = seed_of(command.key.number, command.key.part, command.first)
    result = np.empty(command.nbytes, np.uint8)
    found: list[tuple[int, int]] = []
    measured: list[float] = []
    with np.errstate(all="ignore"):  # values that are not finite are looked for, and reported with their owner
        for number, elements, piece in codec.blocks(command.numel):  # one after the other they stay in cache
            mean = scratch(0, elements.stop - elements.start, np.float32)
            if command.mean.is_robust:
                done = _robust(command, shares, data, piece, mean, seed + number, in_range)
                if done is not True:
                    return done
            else:
                if (undecodable := _sum(given, codec, piece, mean, seed + number)) is not None:
                    return undecodable
                if in_range:
                    mean = to_range(mean, np.float32)
                divide(mean, divisor)
            if command.measures is not None and len(shares) > 1:
                _compare(command, command.measures, shares, data, elements, piece, mean, seed + number)
            rest = None if owed is None else owed.carry(elements)
            if not _encode(codec, mean, rest, result[piece], seed + number, guarded):
                return None
            if command.squares is not None:
                measured += squares(_decoded(codec, result[piece], mean, seed + number))
            if command.digests is not None:
                found += _hash(command, command.digests, elements, piece, [*given, _Given(RESULT, None, result)])
    if owed is not None:
        owed.end(command.key.number)
    if command.digests is not None:
        command.digests.found.extend(found)
    if command.squares is not None:
        command.squares.extend(joined(measured))
    return result


def _compare(
    command: Reduce,
    measures: Measures,
    shares: Sequence[tuple[int, float]],
    data: Mapping[int, Array],
    elements: slice,
    piece: slice,
    mean: Array,
    seed: int,
) -> None:
    """Compare the contributions to a block as they were decoded, if that is wanted and due."""
    of_mean = square(mean)
    start, stop = command.first + elements.start, command.first + elements.stop
    stands_out = is_due(measures, start, stop, of_mean)
    if stands_out is None:
        return
    rows: list[Array | None] = []
    for place, (member_id, _) in enumerate(shares):
        row = None if member_id not in data else scratch(_FIRST_ROW + place, mean.size, np.float32)
        if row is not None:
            command.operation.codec.decode_block(data[member_id][piece], row, seed, _codecs.scratch)
        rows.append(row)
    compare(measures, shares, rows, mean, of_mean, not command.mean.is_robust, stands_out, start)


def _decoded(codec: Codec, piece: Array, memory: Array, seed: int) -> Array:
    """Decode one block of a result into ``memory``, as members do."""
    codec.decode_block(piece, memory, seed, _codecs.scratch)
    return memory


class _Given(NamedTuple):
    """Contribution with its bytes. The weight is None if all are equal."""

    member_id: int
    weight: np.float32 | None
    data: Array


def _hash(
    command: Reduce, digests: Digests, elements: slice, piece: slice, rows: list[_Given]
) -> Iterator[tuple[int, int]]:
    """Compute the digests of one block of every contribution, and of the result."""
    start, stop = command.first + elements.start, command.first + elements.stop
    for part, at in command.operation.codec.places(start, stop, command.operation.numel):
        for member_id, _, data in rows:
            yield member_id, digest(data[piece][part], digests.at + at)


class Owed:
    """Residuals of one slice of a bucket: behind the last computed round, and behind the round before it.

    A round can therefore be computed once more, from the same contributions or others.

    Args:
        slots: two rows of float32, which may be mapped from a file.
        rounds: number of the round that left each row, plus one; 0 for none.
    """

    def __init__(self, slots: Array, rounds: Array) -> None:
        self._slots, self._rounds = slots, rounds
        self._next = 0
        self._is_owed = False

    @property
    def latest(self) -> Array:
        """Residual of the last round."""
        latest: Array = self._slots[0 if self._rounds[0] > self._rounds[1] else 1]
        return latest

    def begin(self, number: int) -> None:
        """Begin round ``number``."""
        self._rounds[self._rounds > number] = 0  # that was left by rounds which are made again, and is void
        self._next = 0 if self._rounds[1] > self._rounds[0] else 1
        self._is_owed = bool(self._rounds.any())
        self._rounds[self._next] = 0

    def keep(self, number: int) -> None:
        """Leave behind round ``number``, to which no member contributes, what the round before has left."""
        self.begin(number)
        self.carry(slice(None))
        self.end(number)

    def carry(self, elements: slice) -> Array:
        """Return the residual of some elements, to be replaced by what this round leaves. They are then in cache."""
        left: Array = self._slots[self._next, elements]
        left[:] = self._slots[1 - self._next, elements] if self._is_owed else 0
        return left

    def end(self, number: int) -> None:
        """End round ``number``."""
        self._rounds[self._next] = number + 1


def _owed(command: Reduce) -> Owed | None:
    """Find the residuals of this slice of a bucket; None for collectives, which have no next round."""
    if (memory := command.memory) is None:
        return None
    if memory.content is None:
        memory.content = Owed(np.zeros((2, command.numel), np.float32), np.zeros(2, np.uint64))
    owed: Owed = memory.content
    return owed


def _sum(given: list[_Given], codec: Codec, piece: slice, total: Array, seed: int) -> Undecodable | None:
    """Write the weighed sum of one block of every contribution, in rank order, to ``total``."""
    if not given:
        total.fill(0)
    for number, (member_id, weight, data) in enumerate(given):
        try:
            if number:
                codec.add_block(data[piece], total, weight, seed, _codecs.scratch)
                continue
            codec.decode_block(data[piece], total, seed, _codecs.scratch)
        except ProtocolError as error:
            return Undecodable(member_id, error)
        if weight is not None:
            np.multiply(total, weight, out=total)
    return None


def _robust(
    command: Reduce,
    shares: Sequence[tuple[int, float]],
    data: Mapping[int, Array],
    piece: slice,
    mean: Array,
    seed: int,
    in_range: bool,
) -> Undecodable | Literal[True] | None:
    """Write the robust mean of one block, which is a unit, to ``mean``. Return None if something is not finite."""
    rows: list[Array | None] = []
    for place, (member_id, _) in enumerate(shares):
        row = None if member_id not in data else scratch(_FIRST_ROW + place, mean.size, np.float32)
        if row is not None:
            try:
                command.operation.codec.decode_block(data[member_id][piece], row, seed, _codecs.scratch)
            except ProtocolError as error:
                return Undecodable(member_id, error)
        rows.append(row)
    guarded, weights = command.nonfinite is not OnNonFinite.PROPAGATE, [weight for _, weight in shares]
    return robust_mean(command.mean, rows, weights, mean, UNIT, guarded, in_range) or None


def _encode(codec: Codec, mean: Array, residual: Array | None, out: Array, seed: int, guarded: bool) -> bool:
    """Encode one block of the mean, with its residual if one is kept. If the mean is not finite, the residual stays.

    Returns False if it is not finite and ``guarded``: nothing was encoded then.
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
    """Find the first contribution, in rank order, with an element that is not finite."""
    codec = command.operation.codec
    for member_id, _, payload in command.contributions:
        if payload is None:
            continue
        element = _bad(command, codec.data_of(payload, command.numel))
        if element is not None:
            return NonFinite(member_id, element, "NaN or Inf", codec.family in EXACT_PLACE)
    return NonFinite(-1, 0, "Inf")


def _findings(command: Reduce, data: Mapping[int, Array]) -> list[Finding]:
    """Find the contributions with elements that are not finite."""
    found = [(member_id, _bad(command, payload)) for member_id, payload in data.items()]
    return [Finding(command.slice, member_id, element) for member_id, element in found if element is not None]


def _bad(command: Reduce, data: Array) -> int | None:
    """Find the first element that is not finite, as far as the codec keeps places; None if all are finite."""
    values = scratch(0, command.numel, np.float32)
    seed = seed_of(command.key.number, command.key.part, command.first)
    command.operation.codec.decode(data.data, command.numel, values, seed, _codecs.scratch)
    return first_non_finite(values)
