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
from gradserver.engine.commands import RESULT, Digests, Reduce
from gradserver.engine.events import Finding, NonFinite, Sifted, Undecodable
from gradserver.engine.policy import OnNonFinite
from gradserver.mean import (
    Array,
    Outcome,
    divide,
    first_non_finite,
    is_finite,
    mend_overflow,
    scratch,
    weigh,
    with_one_nan,
)
from gradserver.protocol.codecs import Codec, Scratch, seed_of
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.digest import digest
from gradserver.protocol.errors import ProtocolError
from gradserver.protocol.kernels import NONE, Combine, Given, active
from gradserver.protocol.keyed import keyed_hash
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
        made = _Mean(command, [(one.member_id, one.weight) for one in rows], data).compute()
        if made is not None:
            break
        if not command.spans:
            return _blame(command)
        bad = _findings(command, data)
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


_Done = Undecodable | Literal[True] | None
"""True if a block was computed; None if something is not finite and must be."""


class _Given(NamedTuple):
    """Contribution with its bytes. The weight is None if all are equal."""

    member_id: int
    weight: np.float32 | None
    data: Array


class _Mean:
    """Encoded mean of the contributions to a slice, weighted as any other, block by block.

    Args:
        command: the reduction.
        shares: member id and weight of those that count. A member without data counts as zeros.
        data: contributions by member id.
    """

    def __init__(self, command: Reduce, shares: Sequence[tuple[int, float]], data: Mapping[int, Array]) -> None:
        self._command, self._shares, self._data = command, shares, data
        self._codec, self._is_robust = command.operation.codec, command.mean.is_robust
        self._guarded = command.nonfinite is not OnNonFinite.PROPAGATE
        equal, self._divisor, scaled = weigh([weight for _, weight in shares])
        self._parts = [(1.0 if equal else weight) / self._divisor for weight in scaled]
        """Share of each in the mean."""
        self._given = [
            _Given(member_id, None if equal else np.float32(weight), data[member_id])
            for (member_id, _), weight in zip(shares, scaled, strict=True)
            if member_id in data
        ]
        self._owed = _owed(command)
        self._seed = seed_of(command.key.number, command.key.part, command.first)
        self._result = np.empty(command.nbytes, np.uint8)
        self._kernel: Combine | None = None
        if self._given and not self._is_robust:
            self._kernel = active().combine.get(self._codec.code)
        if self._kernel is not None:
            rows = [one.data for one in self._given]
            self._rows = Given.of(rows, [one.weight for one in self._given if one.weight is not None], self._divisor)

    def compute(self) -> Array | Undecodable | None:
        """Compute the mean. Return None if it is not finite and must be."""
        command, owed = self._command, self._owed
        found: list[tuple[int, int]] = []
        measured: list[float] = []
        if owed is not None:
            owed.begin(command.key.number)
        with np.errstate(all="ignore"):  # values that are not finite are looked for, and reported with their owner
            for number, elements, piece in self._codec.blocks(command.numel):  # one after the other they stay in cache
                arrived = NONE if command.squares is None else scratch(1, elements.stop - elements.start, np.float32)
                if not self._at_once(number, elements, piece, arrived):
                    done = self._in_steps(number, elements, piece, arrived)
                    if done is not True:
                        return done
                if command.squares is not None:
                    measured += squares(arrived)
                if command.digests is not None:
                    rows = [*self._given, _Given(RESULT, None, self._result)]
                    found += _hash(command, command.digests, elements, piece, rows)
        if owed is not None:
            owed.end(command.key.number)
        if command.digests is not None:
            command.digests.found.extend(found)
        if command.squares is not None:
            command.squares.extend(joined(measured))
        if command.hashes is not None:
            command.hashes.found.append(keyed_hash(self._result, command.hashes.key))
        return self._result

    def _at_once(self, number: int, elements: slice, piece: slice, arrived: Array) -> bool:
        """Compute one block by a kernel. False if there is none, or something is not finite."""
        if self._kernel is None:
            return False
        size, out = elements.stop - elements.start, self._result[piece]
        before, after = (NONE, NONE) if self._owed is None else self._owed.around(elements)
        of_mean = self._kernel(self._rows, piece.start, size, before, after, out, arrived)
        if of_mean < 0:
            return False
        if (stands_out := self._is_due(elements, of_mean)) is not None:
            mean = scratch(0, size, np.float32)
            self._plain(number, piece, mean)
            self._compare(number, elements, piece, mean, of_mean, stands_out)
        return True

    def _in_steps(self, number: int, elements: slice, piece: slice, arrived: Array) -> _Done:
        """Compute one block step by step."""
        mean, out = scratch(0, elements.stop - elements.start, np.float32), self._result[piece]
        done = self._robust(number, piece, mean) if self._is_robust else self._plain(number, piece, mean)
        if done is not True:
            return done
        rest = None if self._owed is None else self._owed.carry(elements)
        if not _encode(self._codec, mean, rest, out, self._seed + number, True):
            if not self._mend(number, piece, mean) and self._guarded:
                return None
            _encode(self._codec, mean, rest, out, self._seed + number, False)
        if self._command.measures is not None:
            of_mean = square(mean)
            if (stands_out := self._is_due(elements, of_mean)) is not None:
                self._compare(number, elements, piece, mean, of_mean, stands_out)
        if arrived.size:
            self._codec.decode_block(out, arrived, self._seed + number, _codecs.scratch)
        return True

    def _mend(self, number: int, piece: slice, mean: Array) -> bool:
        """Compute elements of a block anew that are out of range. Return whether all are finite then."""
        rows = self._decoded(number, piece)
        assert not isinstance(rows, Undecodable), "they were decoded for their mean"
        given = [(part, row) for part, row in zip(self._parts, rows, strict=True) if row is not None]
        return mend_overflow(mean, given)

    def _plain(self, number: int, piece: slice, mean: Array) -> _Done:
        """Write the weighted mean of one block to ``mean``."""
        if not self._given:
            mean.fill(0)
        for place, (member_id, weight, data) in enumerate(self._given):
            try:
                if place:
                    self._codec.add_block(data[piece], mean, weight, self._seed + number, _codecs.scratch)
                    continue
                self._codec.decode_block(data[piece], mean, self._seed + number, _codecs.scratch)
            except ProtocolError as error:
                return Undecodable(member_id, error)
            if weight is not None:
                np.multiply(mean, weight, out=mean)
        divide(mean, self._divisor)
        return True

    def _robust(self, number: int, piece: slice, mean: Array) -> _Done:
        """Write the robust mean of one block, which is a unit, to ``mean``. Return None if something is not finite."""
        rows = self._decoded(number, piece)
        if isinstance(rows, Undecodable):
            return rows
        weights = [weight for _, weight in self._shares]
        return robust_mean(self._command.mean, rows, weights, mean, UNIT, self._guarded) or None

    def _is_due(self, elements: slice, of_mean: float) -> bool | None:
        """Return whether a block that is to be compared stands out; None if it is not to be compared."""
        measures, first = self._command.measures, self._command.first
        if measures is None or len(self._shares) < 2:
            return None
        return is_due(measures, first + elements.start, first + elements.stop, of_mean)

    def _compare(
        self, number: int, elements: slice, piece: slice, mean: Array, of_mean: float, stands_out: bool
    ) -> None:
        """Compare the contributions to a block as they were decoded."""
        measures, rows = self._command.measures, self._decoded(number, piece)
        assert measures is not None, "it is due"
        assert not isinstance(rows, Undecodable), "they were decoded for their mean"
        start = self._command.first + elements.start
        compare(measures, self._shares, rows, mean, of_mean, not self._is_robust, stands_out, start)

    def _decoded(self, number: int, piece: slice) -> list[Array | None] | Undecodable:
        """Decode all contributions to one block, in memory of this thread."""
        rows: list[Array | None] = []
        numel = min(BLOCK, self._command.numel - number * BLOCK)
        for place, (member_id, _) in enumerate(self._shares):
            row = None if member_id not in self._data else scratch(_FIRST_ROW + place, numel, np.float32)
            if row is not None:
                try:
                    self._codec.decode_block(self._data[member_id][piece], row, self._seed + number, _codecs.scratch)
                except ProtocolError as error:
                    return Undecodable(member_id, error)
            rows.append(row)
        return rows


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

    def around(self, elements: slice) -> tuple[Array, Array]:
        """Return the residual of some elements (`NONE` for zeros), and where to leave the new one."""
        return self._slots[1 - self._next, elements] if self._is_owed else NONE, self._slots[self._next, elements]

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
