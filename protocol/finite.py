"""The check that all numbers in a slice are finite, however they are encoded."""

from __future__ import annotations

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import numpy_dtype
from gradserver.protocol.exchange import Operation


def is_finite(data: Buffer, operation: Operation, numel: int) -> bool:
    """Return whether none of the ``numel`` elements of ``operation`` that ``data`` holds is NaN or infinite.

    Raises:
        MalformedMessageError: ``data`` is nothing in the codec of the operation.
    """
    import numpy as np  # here, as a command line starts without numpy

    if operation.is_lossy:
        values = np.empty(numel, np.float32)
        operation.codec.decode(data, numel, values)
        return bool(np.isfinite(values).all())
    if operation.dtype.kind not in "fc":
        return True
    return bool(np.isfinite(np.frombuffer(data, numpy_dtype(operation.dtype))).all())
