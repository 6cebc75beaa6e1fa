"""The order of all samples in one epoch, the same on every machine.

Workers agree on it without a message. So it has to be the same on different processors, and with different versions of
torch and numpy. ``torch.randperm`` and numpy's ``Generator.permutation`` may both change their algorithms. So each
sample gets a 64-bit key from Philox4x64-10, a published counter-based generator: numpy promises to keep its integer
stream. The permutation is the stable sort of the keys, of which only one answer can be right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.whole import whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices: TypeAlias = npt.NDArray[np.int64]

_KEY_BITS: Final = 64


def epoch_permutation(length: int, seed: int, epoch: int) -> Indices:
    """The order of all samples in one epoch: an int64 array of shape (length,), a permutation.

    It depends on nothing but the arguments. ``seed`` and ``epoch`` are integers of 64 bits without sign, together the
    generator's key, so no two pairs share one. Takes 16 bytes per sample, and a few more while it sorts.

    Raises InvalidArgumentError for an argument outside of its range.
    """
    length = whole_number(length, "length")
    key = np.array([key_half(seed, "seed"), key_half(epoch, "epoch")], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(length)
    # Two equal keys are next to impossible (length² / 2⁶⁵), and "stable" settles even those.
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def key_half(value: int, name: str) -> int:
    """Return ``value`` as a half of the generator's key; InvalidArgumentError with ``name`` if it is none."""
    number = whole_number(value, name)
    if number.bit_length() > _KEY_BITS:
        raise InvalidArgumentError(f"{name} must be below 2**{_KEY_BITS}, not {number}")
    return number


def length_of(dataset_or_length: Any) -> int:
    """Return how many samples there are; InvalidArgumentError if that cannot be known."""
    what = type(dataset_or_length).__name__
    if isinstance(dataset_or_length, str | bytes):
        raise InvalidArgumentError(f"need a data set or its length, not the {what} {dataset_or_length!r}")
    if not hasattr(dataset_or_length, "__len__"):
        try:
            return whole_number(dataset_or_length, "the number of samples")
        except InvalidArgumentError:
            if isinstance(dataset_or_length, int | float | None):
                raise
            raise InvalidArgumentError(
                f"{what} has no length, so it cannot be sharded by index; "
                "give a data set with __len__ or the number of samples"
            ) from None
    try:
        return len(dataset_or_length)
    except (TypeError, NotImplementedError) as error:
        raise InvalidArgumentError(f"the length of {what} is not known: {error}") from error
