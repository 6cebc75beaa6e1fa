"""A mean or a sum that reaches members while it is computed: one pass over memory reads what they gave, and writes it.

Otherwise a block is computed first, and then written to each member, when what they gave has left the first-level
cache. This takes less than half of that time. It needs a kernel.

What members gave is written over. So nothing is handed out of which contributions are wanted afterwards: to leave those
out that are not finite, to hash them, or to compare them. A block that is compared only if its mean is unusually large
is handed out up to where that shows; what is left is computed, and compared, in two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradserver.engine.commands import Reduce
from gradserver.mean import Array, types_of, widen
from gradserver.protocol.exchange import Op
from gradserver.protocol.kernels import Given, active
from gradserver.squares import NOTHING, Sum, squares

HandOut = Callable[[int, int, float], tuple[int, Sum]]
"""Write the result to all targets, from one element up to another, as long as the sum of squares is within a limit.

It returns where it has ended, and the sum of squares of what is written, or `NOTHING` if that is not wanted."""


def hand_out_of(
    command: Reduce,
    rows: Sequence[Array | None],
    targets: Sequence[Array],
    scale: tuple[bool, float, Sequence[float]],
) -> HandOut | None:
    """Return what hands out the result of ``rows``; None if contributions are wanted behind it, or there is no kernel.

    ``scale`` has what `gradserver.mean.weigh` says of the weights.
    """
    op, kernel = command.operation.op, active().hand_out.get(command.operation.dtype.name)
    if kernel is None or not command.targets or command.spans or command.digests is not None or len(rows) < 2:
        return None
    equal, divisor, weights = scale
    if op is Op.SUM and all(row is not None for row in rows):  # adding zeros makes -0 a 0
        equal, divisor = True, 1.0
    elif op is not Op.MEAN or command.mean.is_robust:
        return None
    pairs = [(row, weight) for row, weight in zip(rows, weights, strict=True) if row is not None]
    given = Given.of([row for row, _ in pairs], [] if equal else [weight for _, weight in pairs], divisor)
    addresses = np.array([target.ctypes.data for target in targets], np.uint64)
    itemsize, (elements, _) = given.rows[0].itemsize, types_of(command.operation.dtype, op)

    def hand_out(begin: int, stop: int, limit: float) -> tuple[int, Sum]:
        end = begin + kernel(given, addresses, begin * itemsize, stop - begin, limit)
        if command.squares is None or end == begin:
            return end, NOTHING
        return end, squares(widen(targets[0][begin:end], command.operation.dtype, elements))

    return hand_out
