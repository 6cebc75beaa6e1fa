"""A mean or a sum that reaches members while it is computed: one pass over memory reads what they gave, and writes it.

Otherwise a block is computed first, and then written to each member, when what they gave has left the first-level
cache. This takes less than half of that time. It needs a kernel, and a result of which nothing else is wanted. Nothing
is written over if values that are not finite must not be passed on: they are found behind others that are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradserver.engine.commands import Reduce
from gradserver.engine.policy import PROPAGATE
from gradserver.mean import Array
from gradserver.protocol.exchange import Op
from gradserver.protocol.kernels import Given, active

HandOut = Callable[[slice], slice]
"""Write a part of the result to all targets, and return what of that part is left to be done otherwise."""


def hand_out_of(
    command: Reduce,
    rows: Sequence[Array | None],
    targets: Sequence[Array],
    scale: tuple[bool, float, Sequence[float]],
) -> HandOut | None:
    """Return what hands out the result of ``rows``; None if it is kept or looked at, or no kernel computes it.

    ``scale`` has what `gradserver.mean.weigh` says of the weights.
    """
    op, kernel = command.operation.op, active().hand_out.get(command.operation.dtype.name)
    wanted = command.keep, command.digests, command.squares, command.measures
    if kernel is None or command.nonfinite is not PROPAGATE or len(rows) < 2:
        return None
    if any(one is not None and one is not False for one in wanted):
        return None
    equal, divisor, weights = scale
    if op is Op.SUM and all(row is not None for row in rows):  # adding zeros makes -0 a 0
        equal, divisor = True, 1.0
    elif op is not Op.MEAN or command.mean.is_robust:
        return None
    pairs = [(row, weight) for row, weight in zip(rows, weights, strict=True) if row is not None]
    given = Given.of([row for row, _ in pairs], [] if equal else [weight for _, weight in pairs], divisor)
    addresses = np.array([target.ctypes.data for target in targets], np.uint64)
    numel, itemsize = given.rows[0].size, given.rows[0].itemsize

    def hand_out(cut: slice) -> slice:
        stop = min(cut.stop, numel)
        done = kernel(given, addresses, cut.start * itemsize, stop - cut.start)
        return slice(cut.start + done, stop)

    return hand_out
