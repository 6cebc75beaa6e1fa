"""Combines contributions: the only place where gradients meet.

Sums run in rank order, in fp32 or wider (integers in their own type, where they wrap), so that the
same contributions give the same bits whenever they arrive and however tensors are cut. A mean is
``sum(w·g) / sum(w)``; when all weights are equal it is ``sum(g) / n``, which rounds less; a single
contribution is its own mean, bit by bit.

Work goes in blocks that stay in a core's cache: every contribution is read from memory once, and every
result written once. Blocks of large reductions are spread over threads.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.engine.events import NonFinite, Reduce
from gradserver.lossy import reduce_lossy
from gradserver.mean import Outcome, is_finite, weigh
from protocol.buffer import Buffer
from protocol.dtypes import FLOAT32, DType, numpy_dtype
from protocol.exchange import Kind, Op
from protocol.limits import KIB, MIB

log = logging.getLogger("gradserver")

Array = npt.NDArray[Any]

_BLOCK_BYTES: Final = 512 * KIB
"""Of the type that is computed in: the sum stays in a core's second-level cache, and calls are long enough that
threads do not wait for each other between them."""
_SPREAD_BYTES: Final = 16 * MIB
"""Contributions of less than this in all are combined faster than another thread wakes up."""
_LOSSY_NUMEL: Final = 65_536
"""Elements from which on decoding and encoding take longer than another thread's waking up."""
_UFUNCS: Final = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
_WIDE: Final = {"float64": np.float64, "complex128": np.float64}


class Pending(Enum):
    """The outcome that is not there yet."""

    PENDING = 0


PENDING: Final = Pending.PENDING


class Reducer:
    """Carries out reductions: small ones at once, large ones in threads of its own.

    Args:
        threads: how many; None for one on each processor, up to 8.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(len(os.sched_getaffinity(0)), 8) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def start(self, command: Reduce, later: Callable[[Outcome], None]) -> Outcome | Pending:
        """Carry out ``command``; if that is left to other threads, one of them will call ``later`` with the outcome."""
        lossy = command.operation.is_lossy
        small = command.numel < _LOSSY_NUMEL if lossy else command.nbytes * len(command.contributions) < _SPREAD_BYTES
        if self._threads < 2 or small:
            return reduce(command)
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "gradserver-reducer")
        if lossy:  # slice by slice: of these there are many at a time
            self._pool.submit(_reduce_then, command, later)
        else:
            _Spread(command, self._threads, later).submit(self._pool)
        return PENDING

    def close(self) -> None:
        """End the threads, when what was started is done."""
        if self._pool is not None:
            self._pool.shutdown()


class _Spread:
    """One reduction in several threads: each takes the next block until there is none."""

    def __init__(self, command: Reduce, threads: int, later: Callable[[Outcome], None]) -> None:
        self._job = _Job(command)
        self._blocks = itertools.count()
        self._threads = threads
        self._finished = itertools.count(1)
        self._found: list[NonFinite] = []
        self._later = later

    def submit(self, pool: ThreadPoolExecutor) -> None:
        for _ in range(self._threads):
            pool.submit(self._work)

    def _work(self) -> None:
        try:
            with np.errstate(all="ignore"):  # what is not finite is looked for, and reported with its owner
                while (block := next(self._blocks)) < self._job.blocks and not self._found:
                    if (found := self._job.combine(block)) is not None:
                        self._found.append(found)
            if next(self._finished) == self._threads:
                self._later(min(self._found, key=lambda found: found.element) if self._found else self._job.kept)
        except Exception:  # nobody looks at this thread; whoever waits for the outcome runs into its deadline
            log.exception("a reduction failed: this is a fault of gradserver")


def _reduce_then(command: Reduce, later: Callable[[Outcome], None]) -> None:
    try:
        later(reduce(command))
    except Exception:  # as above
        log.exception("a reduction failed: this is a fault of gradserver")


def reduce(command: Reduce) -> Outcome:
    """Carry out ``command`` in this thread. The result's bytes, if they are to be kept; or what forbids a result."""
    if command.operation.is_lossy:
        return reduce_lossy(command)
    job = _Job(command)
    with np.errstate(all="ignore"):
        for block in range(job.blocks):
            if (found := job.combine(block)) is not None:
                return found
    return job.kept


class _Job:
    """One reduction, cut into blocks which can be combined in any order.

    Attributes:
        blocks: how many.
        kept: the result, once every block is combined; None if only the targets are to have it.
    """

    def __init__(self, command: Reduce) -> None:
        operation = command.operation
        self._op, self._dtype = operation.op, operation.dtype
        size = command.nbytes
        self._given = [
            (c.rank, c.weight, None if c.payload is None else np.frombuffer(c.payload, np.uint8, size))
            for c in command.contributions
        ]
        self._elements = _number_type(self._dtype, Op.SUM if self._op is Op.MEAN else self._op)
        self._equal, self._divisor, self._weights = weigh([weight for _, weight, _ in self._given])
        self.kept: Buffer | None = None
        if operation.kind is Kind.ALL_GATHER:
            self.blocks = 0
            self._gather(command)
            return
        self._outputs = [np.frombuffer(target, np.uint8, size) for target in command.targets]
        if command.keep:
            kept = np.empty(size, np.uint8)
            self.kept = kept.data
            self._outputs.append(kept)
        self._common = self._is_common()
        per_element = max(self._elements.itemsize * (2 if self._dtype.kind == "c" else 1), 1)
        self._step = _BLOCK_BYTES // per_element * self._dtype.itemsize
        self._size = size
        self.blocks = -(-size // self._step)

    def _is_common(self) -> bool:
        """Whether this is what most are, an unweighted mean of float32 from all; then its rows are numbers already."""
        rows = [given for _, _, given in self._given if given is not None]
        if (
            self._op is not Op.MEAN
            or self._dtype != FLOAT32
            or not self._equal
            or not 1 < len(rows) == len(self._given)
        ):
            return False
        self._rows = [row.view(np.float32) for row in rows]
        self._targets = [output.view(np.float32) for output in self._outputs]
        return True

    def _gather(self, command: Reduce) -> None:
        gathered = b"".join(given.data for _, _, given in self._given if given is not None)
        for target in command.targets:
            memoryview(target)[: len(gathered)] = gathered
        self.kept = gathered if command.keep else None

    def combine(self, block: int) -> NonFinite | None:
        """Write one block of the result everywhere, unless something in it is not finite."""
        start = block * self._step
        stop = min(start + self._step, self._size)
        if self._common:
            return self._combine_common(start, stop)
        rows = [(weight, given) for (_, _, given), weight in zip(self._given, self._weights, strict=True)]
        cut = [(weight, None if given is None else given[start:stop]) for weight, given in rows]
        if self._op is Op.MEAN:
            result = self._mean(cut)
            if result is None:
                return self._blame(start, stop)
        elif self._op in _UFUNCS:
            result = self._fold([given for _, given in cut], stop - start)
        else:  # one gives, and gets it too, perhaps
            result = next(given for _, given in cut if given is not None)
        for output in self._outputs:
            output[start:stop] = result
        return None

    def _combine_common(self, start: int, stop: int) -> NonFinite | None:
        """`combine` with as few calls as can be: they take turns with those of other threads."""
        block = slice(start // 4, stop // 4)
        first, second, *rest = self._rows
        total = np.add(first[block], second[block], out=_scratch(0, first[block]))
        for row in rest:
            np.add(total, row[block], out=total)
        self._divide(total)
        if not is_finite(total):
            return self._blame(start, stop)
        for target in self._targets:
            target[block] = total
        return None

    def _divide(self, total: Array) -> None:
        """Make a mean of a sum. By a power of two a product has the same bits, and comes sooner."""
        if math.frexp(self._divisor)[0] == 0.5:
            np.multiply(total, self._elements.type(1 / self._divisor), out=total)
        else:
            np.divide(total, self._elements.type(self._divisor), out=total)

    def _mean(self, given: Sequence[tuple[float, Array | None]]) -> Array | None:
        """The mean of a block, as bytes; None if it has elements that are not finite."""
        values = [(weight, self._widen(block)) for weight, block in given if block is not None]
        if len(given) == 1:  # its own mean, bit by bit
            return given[0][1] if is_finite(values[0][1]) else None
        total = _scratch(0, values[0][1])
        if self._equal:
            if len(values) > 1:
                np.add(values[0][1], values[1][1], out=total)
            else:
                total[:] = values[0][1]
            for _, block in values[2:]:
                np.add(total, block, out=total)
        else:
            np.multiply(values[0][1], self._elements.type(values[0][0]), out=total)
            product = _scratch(1, total)
            for weight, block in values[1:]:
                np.multiply(block, self._elements.type(weight), out=product)
                np.add(total, product, out=total)
        self._divide(total)
        return self._narrow(total) if is_finite(total) else None

    def _fold(self, given: Sequence[Array | None], size: int) -> Array:
        """Sum, minimum, maximum or product of a block, as bytes."""
        result: Array | None = None
        for block in given:
            if block is None:
                values = np.zeros(size // self._dtype.itemsize, self._elements)
            else:
                values = self._widen(block)
            if result is None:
                result = values.copy()
            elif self._dtype.kind == "c" and self._op is Op.PRODUCT:
                result = _multiply(result, values)
            else:
                result = _UFUNCS[self._op](result, values, out=result)
        assert result is not None
        return self._narrow(result)

    def _blame(self, start: int, stop: int) -> NonFinite:
        """The first contribution to a block, in rank order, that has an element which is not finite."""
        first = start // self._dtype.itemsize
        for rank, _, given in self._given:
            if given is None:
                continue
            values = self._widen(given[start:stop])
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                value = values[bad[0]]
                what = "NaN" if np.isnan(value) else "Inf" if value > 0 else "-Inf"
                per_element = 2 if self._dtype.kind == "c" else 1
                return NonFinite(rank, first + int(bad[0]) // per_element, what)
        return NonFinite(-1, first, "Inf")

    def _widen(self, block: Array) -> Array:
        """Bytes as numbers to compute with: a view where the bits allow it, else a wider copy."""
        dtype = self._dtype
        if dtype.name == "complex32":
            return block.view(np.float16).astype(np.float32).view(self._elements)
        if dtype.kind == "c":
            return block.view(self._elements)
        if dtype.name == "bfloat16":  # the upper half of a float32: ten times faster than an element-wise cast
            bits = block.view(np.uint16).astype(np.uint32)
            return np.left_shift(bits, 16, out=bits).view(np.float32)
        return block.view(numpy_dtype(dtype)).astype(self._elements, copy=False)

    def _narrow(self, values: Array) -> Array:
        """Numbers in the bits of the exchange's type, rounded to nearest, as bytes."""
        if self._dtype.name == "complex32":
            values = values.view(np.float32).astype(np.float16)
        elif self._dtype.kind != "c":
            values = values.astype(numpy_dtype(self._dtype), copy=False)
        return values.view(np.uint8)


_threads = threading.local()


def _scratch(number: int, like: Array) -> Array:
    """Memory for a block, the same again for this thread: new memory would cost as much as what is done in it."""
    blocks: dict[int, Array] | None = getattr(_threads, "blocks", None)
    if blocks is None:
        blocks = _threads.blocks = {}
    block = blocks.get(number)
    if block is None or block.size < like.nbytes:
        block = blocks[number] = np.empty(max(like.nbytes, _BLOCK_BYTES), np.uint8)
    return block[: like.nbytes].view(like.dtype)


def _multiply(left: Array, right: Array) -> Array:
    """The product of complex numbers: numpy's own rounds otherwise at the edge of an array than in its middle."""
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


@cache
def _number_type(dtype: DType, op: Op) -> np.dtype[Any]:
    """What to compute in. Complex numbers add as pairs of real ones, and multiply as themselves."""
    if dtype.kind in "iub":
        return numpy_dtype(dtype)
    if dtype.kind == "c" and op is Op.PRODUCT:
        return np.dtype(np.complex128 if dtype.name == "complex128" else np.complex64)
    return np.dtype(_WIDE.get(dtype.name, np.float32))
