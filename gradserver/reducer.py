"""The reduction of contributions. This is the only place where gradients meet.

Sums run in rank order, in fp32 or wider (integers in their own type, where they wrap). The same contributions therefore
give the same bits, whenever they arrive and however tensors are cut. A mean is ``sum(w·g) / sum(w)``. When all weights
are equal it is ``sum(g) / n``, which rounds less. A single contribution is its own mean, bit by bit.

Work goes in blocks that stay in a core's cache: every contribution is read from memory once, and every result written
once. Blocks of large reductions are spread over threads.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Final

import numpy as np

from gradserver.comparison import Comparison
from gradserver.concatenation import PASSED_ON, pass_on
from gradserver.engine.commands import RESULT, Reduce
from gradserver.engine.events import Broken, Finding, NonFinite, Sifted
from gradserver.engine.policy import PROPAGATE, OnNonFinite
from gradserver.handing_out import hand_out_of
from gradserver.lossy import reduce_lossy
from gradserver.mean import (
    FOLDS,
    Array,
    Outcome,
    add_up,
    blame,
    broken_by,
    divide,
    first_non_finite,
    fold,
    is_finite,
    mend_overflow,
    narrow,
    scratch,
    types_of,
    weigh,
    widen,
    with_one_nan,
)
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.digest import digest
from gradserver.protocol.exchange import Op
from gradserver.protocol.kernels import NONE, Given, Words, active
from gradserver.protocol.keyed import hashed, rows as rows_of
from gradserver.protocol.limits import KIB, MIB, SLICE_BYTES
from gradserver.protocol.means import UNIT
from gradserver.repeated import compare_repeated
from gradserver.robust import robust_mean
from gradserver.squares import NOTHING, Sum, by_slice, joined, squares

log = logging.getLogger("gradserver")

_BLOCK_BYTES: Final = 512 * KIB
"""Size of a block, as it is computed: the sum stays in a core's cache, and calls are long enough for threads."""
_SPREAD_BYTES: Final = 16 * MIB
"""Total size of contributions below which combining them is faster than waking another thread."""
_LOSSY_NUMEL: Final = 65_536
"""Number of elements from which on decoding and encoding take longer than waking another thread."""
_MEAN: Final = Op.MEAN
_ROBUST_COST: Final = 8
"""Time of a robust mean over that of the plain one, about."""


class Pending(Enum):
    """Outcome of a reduction that is still running."""

    PENDING = 0


PENDING: Final = Pending.PENDING


class Reducer:
    """Executor of reductions: small ones run at once, large ones in its own threads.

    Args:
        threads: number of threads; None for one on each processor, up to 8.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(len(os.sched_getaffinity(0)), 8) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def start(self, command: Reduce, later: Callable[[Outcome], None]) -> Outcome | Pending:
        """Carry out ``command``. If this is left to other threads, one of them will call ``later`` with the outcome.

        An exception of the reduction is an outcome as well, `Broken`.
        """
        try:
            if self._threads < 2 or command.operation.kind in PASSED_ON or _is_small(command):
                return reduce(command)
            with self._starting:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._threads, "gradserver-reducer")
            if command.operation.is_lossy or command.repeated is not None:  # many at a time; two passes, and rare
                self._pool.submit(_reduce_then, command, later)
            else:
                _Spread(command, self._threads, later).submit(self._pool)
        except Exception as error:
            return broken_by(error, command)
        return PENDING

    def close(self) -> None:
        """Wait for running reductions, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class _Spread:
    """Reduction in several threads. Each takes the next block until there is none."""

    def __init__(self, command: Reduce, threads: int, later: Callable[[Outcome], None]) -> None:
        self._command, self._job = command, _Sieve(command) if command.spans else _Job(command)
        self._blocks = itertools.count()
        self._threads = threads
        self._finished = itertools.count(1)
        self._found: list[NonFinite] = []
        self._broken: Broken | None = None
        self._later = later

    def submit(self, pool: ThreadPoolExecutor) -> None:
        for _ in range(self._threads):
            pool.submit(self._work)

    def _work(self) -> None:
        try:
            with np.errstate(all="ignore"):  # values that are not finite are looked for, and reported with their owner
                while (block := next(self._blocks)) < self._job.blocks and not self._found and self._broken is None:
                    if (found := self._job.combine(block)) is not None:
                        self._found.append(found)
        except Exception as error:
            self._broken = broken_by(error, self._command)
        if next(self._finished) == self._threads:
            first = min(self._found, key=lambda found: found.element) if self._found else self._job.outcome()
            _tell(self._later, self._broken or first)


def _reduce_then(command: Reduce, later: Callable[[Outcome], None]) -> None:
    try:
        outcome = reduce(command)
    except Exception as error:
        outcome = broken_by(error, command)
    _tell(later, outcome)


def _tell(later: Callable[[Outcome], None], outcome: Outcome) -> None:
    try:
        later(outcome)
    except Exception:  # nothing reads this thread's errors; members that wait for the outcome reach their deadline
        log.exception("cannot report the outcome of a reduction. This is a bug of gradserver")


def _is_small(command: Reduce) -> bool:
    """Return whether other threads would not be faster."""
    if command.operation.is_lossy:
        return command.numel < _LOSSY_NUMEL
    cost = _ROBUST_COST if command.mean.is_robust else 1
    return command.nbytes * len(command.contributions) * cost < _SPREAD_BYTES


def reduce(command: Reduce) -> Outcome:
    """Carry out ``command`` in this thread. Return the kept result, or the reason for no result."""
    if command.repeated is not None:
        compare_repeated(command, command.repeated)
    if command.operation.is_lossy or command.operation.kind in PASSED_ON:
        return reduce_lossy(command) if command.operation.is_lossy else pass_on(command)
    job = _Sieve(command) if command.spans else _Job(command)
    with np.errstate(all="ignore"):
        for block in range(job.blocks):
            if (found := job.combine(block)) is not None:
                return found
    return job.outcome()


class _Job:
    """Reduction, cut into blocks which can be combined in any order.

    Attributes:
        blocks: number of blocks.
        kept: result, once every block is combined; None if it is written to the targets only.
    """

    def __init__(self, command: Reduce) -> None:
        operation = command.operation
        self._op, self._dtype, self._rule = operation.op, operation.dtype, command.mean
        self._guarded = command.nonfinite is not PROPAGATE
        self._elements, self._stored = types_of(self._dtype, self._op)
        numel, given = command.nbytes // self._stored.itemsize, command.contributions
        self._member_ids = [one.member_id for one in given]
        self._rows = [None if one.payload is None else np.frombuffer(one.payload, self._stored, numel) for one in given]
        self._weights = [one.weight for one in given]
        self._scale = weigh(self._weights)
        self._is_plain = self._stored == self._elements
        self._parts = self._dtype.itemsize // self._stored.itemsize
        self._targets = [np.frombuffer(target, self._stored, numel) for target in command.targets]
        kept = self._kept = np.empty(numel, self._stored) if command.keep else None
        self.kept: Buffer | None = None if kept is None else kept.view(np.uint8).data
        self._targets += [] if kept is None else [kept]
        self._hand_out = hand_out_of(command, self._rows, self._targets, self._scale)
        least = UNIT * self._parts if self._rule.is_robust else 0
        nbytes = SLICE_BYTES if self._hand_out and command.squares is None else _BLOCK_BYTES  # nothing is read again
        self._step = max(nbytes // max(self._elements.itemsize, self._stored.itemsize), least)
        each = (command.each or SLICE_BYTES // self._dtype.itemsize) * self._parts
        self._step = each if each < numel and each % self._step else self._step  # blocks end where slices do
        self._numel, self.blocks = numel, -(-numel // self._step)
        # Memory for a sum in one block: the result's own, so that nothing is copied.
        self._total = kept if self._is_plain and self.blocks == 1 and not self._hand_out else None
        self._digests, self._first = command.digests, command.first * self._dtype.itemsize
        self._told, self._of_slice = command.squares, max(each // self._step, 1)
        self._squares: list[Sum | None] = [None] * (0 if command.squares is None else self.blocks)
        self._hashes, self._each, self._rows_of = command.hashes, each, [b""] * self.blocks
        self._look = command.measures and Comparison(command, command.measures, self._starts(command), self._parts)

    def _starts(self, command: Reduce) -> Sequence[int]:
        """Return the first element of each block in the bucket."""
        return range(command.first, command.first + command.numel, self._step // self._parts)

    def outcome(self) -> Outcome:
        """Return the outcome, once every block is combined."""
        if self._told is not None:
            self._told.extend(by_slice(self._squares, self._of_slice))
        if self._hashes is not None:
            self._hashes.found.extend(self._hashed())
        return self.kept

    def _hashed(self) -> Iterator[bytes]:
        """Yield the keyed hash of each slice."""
        for start in range(0, self._numel, self._each):
            stop = min(start + self._each, self._numel)
            parts = b"".join(self._rows_of[start // self._step : -(-stop // self._step)])
            yield hashed((stop - start) * self._stored.itemsize, parts)

    def combine(self, block: int) -> NonFinite | None:
        """Write one block of the result to all targets, unless a value in it is not finite."""
        start, stop, told = block * self._step, min((block + 1) * self._step, self._numel), NOTHING
        if self._hand_out and (limit := self._look.thresholds[block] if self._look else math.inf) > 0:
            start, told = self._hand_out(start, stop, limit)
            if (wanted := self._hashes) and not (start == stop and self._hash_handed_out(block, wanted.key)):
                start, told = block * self._step, NOTHING  # once more, in memory of its own
        if start == stop:
            if self._squares:
                self._squares[block] = told
            return None
        cut, is_whole = slice(start, stop), self.blocks == 1 and not start
        rows = self._rows if is_whole else [None if row is None else row[cut] for row in self._rows]
        if self._op is _MEAN:
            result = self._mean(rows, self._scale, block)
            if result is None:
                return self._blame(rows, start)
        elif self._op in FOLDS:
            values = [None if row is None else self._widen(row) for row in rows]
            size = next(row.size for row in values if row is not None)
            out = scratch(0, size, self._elements) if self._kept is None or not self._is_plain else self._kept[cut]
            result = self._narrow(fold(self._op, self._dtype.kind == "c", values, out))
        else:  # one participant contributes, and perhaps receives its own contribution
            result = next(row for row in rows if row is not None)
        self._account(block, start, dict(enumerate(rows)), result, told)
        for target in self._targets:
            if target is not result and target is not result.base:
                target[cut] = result
        return None

    def _hash_handed_out(self, block: int, key: Words) -> bool:
        """Hash a block that was handed out. Return False if members have it in different forms.

        Only their memory has it, or also what is kept. One of them may have changed its memory since.
        """
        cut, own = slice(block * self._step, min((block + 1) * self._step, self._numel)), self.kept is not None
        self._rows_of[block] = rows_of(self._targets[-1][cut], key)
        return own or len(self._targets) == 1 or rows_of(self._targets[0][cut], key) == self._rows_of[block]

    def _account(self, block: int, start: int, rows: Mapping[int, Array | None], result: Array, told: Sum) -> None:
        """Hash, measure and compare a block of a result and the contributions to it, by their places, as wanted.

        This comes before the result is written, as a target may be where a contribution lies. ``told`` are the squares
        of what is handed out of this block already.
        """
        if (digests := self._digests) is not None:
            at = digests.at + self._first + start * self._stored.itemsize
            given = [(self._member_ids[place], digest(row, at)) for place, row in rows.items() if row is not None]
            digests.found.extend([*given, (RESULT, digest(result, at))])
        if (wanted := self._hashes) is not None:
            self._rows_of[block] = rows_of(result, wanted.key)
        if self._squares:
            own = self._squares[block] or squares(self._widen(result))
            self._squares[block] = own if told is NOTHING else joined([*told, *own])
        if (look := self._look) and (known := self._squares[block]) and known[0] > look.thresholds[block]:
            look.compare(block, list(rows.values()), rows, result, known[0])

    def _mean(
        self, rows: Sequence[Array | None], scale: tuple[bool, float, Sequence[float]], block: int
    ) -> Array | None:
        """Compute the mean of a block; None if it has elements that are not finite and must not have any."""
        equal, divisor, weights = scale
        given = [(weight, row) for weight, row in zip(weights, rows, strict=True) if row is not None]
        first = given[0][1]
        if len(rows) == 1:  # its own mean, bit by bit; copied first, as a sharer could change it after the check
            own = scratch(0, first.size, first.dtype)
            own[:] = first
            return own if not self._guarded or is_finite(self._widen(own)) else None
        if self._rule.is_robust:
            return self._robust(rows, weights)
        if (made := self._at_once(given, equal, divisor, block)) is not None:
            return made
        values = given if self._is_plain else [(weight, self._widen(row)) for weight, row in given]
        total = self._total if self._total is not None else scratch(0, values[0][1].size, self._elements)
        add_up(values, equal, total)
        divide(total, divisor)
        return self._checked(total, values, equal, divisor, block)

    def _at_once(self, given: Sequence[tuple[float, Array]], equal: bool, divisor: float, block: int) -> Array | None:
        """Compute the mean of a block by a kernel; None if there is none, or if something is not finite."""
        if (kernel := active().average.get(self._dtype.name)) is None:
            return None
        size = given[0][1].size
        total, arrived = scratch(0, size, self._stored), scratch(1, size, np.float32) if self._squares else NONE
        rows = Given.of([row for _, row in given], [] if equal else [weight for weight, _ in given], divisor)
        if kernel(rows, 0, size, NONE, NONE, total.view(np.uint8), arrived) < 0:
            return None
        if self._squares:
            self._squares[block] = squares(arrived)
        return total

    def _robust(self, rows: Sequence[Array | None], weights: Sequence[float]) -> Array | None:
        """Compute a robust mean of a block that begins with a unit, as `_mean` does."""
        values = [None if row is None else self._widen(row) for row in rows]
        first = next(row for row in values if row is not None)
        total = self._total if self._total is not None else scratch(0, first.size, first.dtype)
        known = robust_mean(self._rule, values, weights, total, UNIT * self._parts, self._guarded)
        return self._narrow(total) if known else None

    def _checked(
        self, total: Array, values: Sequence[tuple[float, Array]], equal: bool, divisor: float, block: int
    ) -> Array | None:
        """Narrow a block of a mean, if it is finite. Its sum of squares says so, if that is wanted, too.

        ``values`` are the contributions with their weights, for elements with a sum that is out of range.
        """
        if self._squares:
            result = self._narrow(total)
            found = squares(self._widen(result))
            if math.isfinite(found[0]):
                self._squares[block] = found
                return result
        if is_finite(total):
            return self._narrow(total)
        if mend_overflow(total, [((1.0 if equal else weight) / divisor, row) for weight, row in values]):
            return self._narrow(total)
        return None if self._guarded else self._narrow(with_one_nan(total))

    def _blame(self, rows: Sequence[Array | None], start: int) -> NonFinite:
        """Find the first contribution to a block, in rank order, with an element that is not finite."""
        given = ((m, self._widen(row)) for m, row in zip(self._member_ids, rows, strict=True) if row is not None)
        return blame(given, start, self._parts)

    def _widen(self, row: Array) -> Array:
        """Convert stored values to numbers to compute with: unchanged where the bits allow it, else a wider copy."""
        return row if self._is_plain else widen(row, self._dtype, self._elements)

    def _narrow(self, values: Array) -> Array:
        """Convert numbers to the stored type, rounded to nearest."""
        return values if self._is_plain else narrow(values, self._dtype, self._stored)


class _Sieve(_Job):
    """Mean in which contributions that are not finite do not count, slice by slice.

    A slice is written when it is known which contributions count, as a target may be where one of them lies. The
    check reads the result. Only if a value in it is not finite are the contributions checked.
    """

    def __init__(self, command: Reduce) -> None:
        super().__init__(command)
        self._total = None  # a mean is of one slice
        self._spans, self._slice, self._skips = command.spans, command.slice, command.nonfinite is OnNonFinite.SKIP
        self._findings: list[Finding] = []
        self.blocks, self._of_slice = len(self._spans), 1
        self._rows_of = [b""] * self.blocks
        self._squares = [None] * (0 if command.squares is None else self.blocks)

    def _starts(self, command: Reduce) -> Sequence[int]:
        """Return the first element of each slice."""
        return [command.first + start for start, _ in command.spans]

    def outcome(self) -> Outcome:
        """Return the result, with the findings."""
        kept = super().outcome()
        return Sifted(self.kept, tuple(sorted(self._findings))) if self._findings else kept

    def _hashed(self) -> Iterator[bytes]:
        for (start, stop), rows in zip(self._spans, self._rows_of, strict=True):
            yield hashed((stop - start) * self._parts * self._stored.itemsize, rows)

    def combine(self, block: int) -> None:
        """Write one slice of the result to all targets, if there is one."""
        start, stop = (place * self._parts for place in self._spans[block])
        rows = {place: None if row is None else row[start:stop] for place, row in enumerate(self._rows)}
        result = self._mean(list(rows.values()), self._scale, block)
        while result is None:
            bad = {place: element for place, row in rows.items() if (element := self._bad(row)) is not None}
            found = [Finding(self._slice + block, self._member_ids[p], (start + bad[p]) // self._parts) for p in bad]
            self._findings += found
            rows = {place: row for place, row in rows.items() if place not in bad}
            if self._skips or all(row is None for row in rows.values()):
                return
            result = self._mean(list(rows.values()), weigh([self._weights[place] for place in rows]), block)
        self._account(block, start, rows, result, NOTHING)
        for target in self._targets:
            target[start:stop] = result

    def _bad(self, row: Array | None) -> int | None:
        return None if row is None else first_non_finite(self._widen(row))
