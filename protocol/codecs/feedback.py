"""Error feedback: what an encoding loses is added to what is encoded next.

So nothing is lost for good, only late. Over any number of steps, the sum of what was decoded differs from the sum of
what was given by the last residual alone. That is why lossy gradients still train: Seide et al. 2014 (*1-bit SGD*),
Stich et al. 2018 (*Sparsified SGD with Memory*), Karimireddy et al. 2019 (*Error Feedback Fixes SignSGD*). The
coordinator does the same with the mean before it replies, as in Tang et al. 2019, *DoubleSqueeze*.
"""

from __future__ import annotations

import numpy as np

from gradserver.protocol.codecs.base import Codec, Scratch
from gradserver.protocol.errors import SizeMismatchError
from gradserver.protocol.kernels import Bytes, Floats


def encode_with_feedback(
    codec: Codec,
    values: Floats,
    residual: Floats,
    out: Bytes | None = None,
    seed: int = 0,
    scratch: Scratch | None = None,
) -> memoryview:
    """Encode ``values + residual``, and leave in ``residual`` what that lost.

    If the sums of a block are not all finite, its ``values`` alone are encoded and its ``residual`` stays as it was.
    The coordinator sees a NaN or Inf and counts it for nothing, so it must not come back in every later step.

    Args:
        codec: the codec that encodes.
        values: float32, one-dimensional, contiguous. Not changed.
        residual: float32, as many, changed in place; zeros before the first call.
        out: uint8, at least ``codec.nbytes(values.size)`` long, apart from the others; by default new memory.
        seed: as for `Codec.encode`.
        scratch: working memory; by default new memory.

    Returns:
        The payload.

    Raises:
        SizeMismatchError: ``residual`` is not as long as ``values``, or ``out`` is too small.
        DTypeError, LayoutError: as `Codec.encode`.
    """
    if residual.shape != values.shape:
        raise SizeMismatchError(f"residual has shape {residual.shape}, values have {values.shape}")
    scratch = scratch or Scratch()
    payload = codec.room(values, out)
    with np.errstate(all="ignore"):
        for number, elements, piece in codec.blocks(values.size):
            block = values[elements]
            if not codec.compensate_block(block, residual[elements], payload[piece], seed + number, scratch):
                codec.encode_block(block, payload[piece], seed + number, scratch)
    return payload.data


class Feedback:
    """The residual of one exchange: of a bucket's contribution at a worker, of its reply at the coordinator.

    Attributes:
        residual: float32, one for each element; what is still owed. It is state, to be saved with the optimizer's.
    """

    __slots__ = ("residual",)

    def __init__(self, numel: int) -> None:
        self.residual: Floats = np.zeros(numel, np.float32)

    def compensate(self, start: int, stop: int, values: Floats) -> Floats:
        """Return ``values`` of elements ``start`` to ``stop`` with their residual: what `encode` would encode.

        It serves to choose a codec by its error. Nothing is changed.
        """
        with np.errstate(all="ignore"):
            compensated: Floats = np.add(values, self.residual[start:stop])
        return compensated

    def encode(
        self,
        codec: Codec,
        start: int,
        stop: int,
        values: Floats,
        out: Bytes | None = None,
        seed: int = 0,
        scratch: Scratch | None = None,
    ) -> memoryview:
        """Call `encode_with_feedback` for elements ``start`` to ``stop``."""
        return encode_with_feedback(codec, values, self.residual[start:stop], out, seed, scratch)
