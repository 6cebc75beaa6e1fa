"""Building blocks of a training step that exchanges gradients block by block.

The step accumulates gradients over the local shard, and takes the `local_mean` by the number of sequences. For blocks
last to first, it joins the nine components into one gradient (`flatten`), exchanges that, and takes it apart
(`unflatten`). Then come the non-block components in the order of `NON_BLOCK_COMPONENTS`, then the optimizer.

All functions take numpy arrays and torch tensors. They never import torch themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError
from gradserver.protocol.whole import whole_number

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from typing_extensions import TypeIs

ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")

COMPONENT_NAMES: Final = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
"""The components of one transformer block, in the order in which they are flattened."""

NON_BLOCK_COMPONENTS: Final = ("lm_head", "final_norm", "embedding")
"""The components that are exchanged after the blocks; the index is the component's number. Any may have length 0."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Widths of one transformer block, in elements: model, keys and values, feed-forward.

    Raises:
        InvalidArgumentError: a width is not a positive integer.
    """

    hidden: int
    kv_dim: int
    intermediate: int

    def __post_init__(self) -> None:
        for field in fields(self):
            # Python's own integers from here on: products of numpy's narrow ones wrap around.
            plain = whole_number(getattr(self, field.name), field.name, least=1)
            object.__setattr__(self, field.name, plain)

    @property
    def component_sizes(self) -> tuple[int, ...]:
        """Elements of each component, in the order of `COMPONENT_NAMES`."""
        h, kv, i = self.hidden, self.kv_dim, self.intermediate
        return (h * h, h * kv, h * kv, h * h, h * i, h * i, i * h, h, h)

    @property
    def numel(self) -> int:
        """Elements of the whole flat gradient."""
        return sum(self.component_sizes)


def flatten(components: Iterable[ArrayT]) -> tuple[ArrayT, tuple[int, ...]]:
    """Copy arrays of any shapes into one 1-D array. Return it, and each component's number of elements.

    ``components`` are all numpy arrays or all torch tensors, of one dtype and on one device. There is at least one, and
    each may be empty. They are read in C order. The result has their library, dtype and device, and no autograd graph.
    `unflatten` is the inverse.

    Raises:
        InvalidArgumentError: there are no components, or one is no array, or not of the first one's library.
        DTypeError: the dtypes are mixed.
        LayoutError: the devices are mixed, or a tensor is sparse.
    """
    if _is_array(components):
        raise InvalidArgumentError("flatten takes a sequence of components, not one array")
    parts = list(components)
    if not parts:
        raise InvalidArgumentError("there is nothing to flatten: no components, so no dtype either")
    _check_alike(parts)
    if _is_tensor(parts[0]):
        import torch

        return torch.cat([part.detach().reshape(-1) for part in parts]), tuple(part.numel() for part in parts)
    return np.concatenate([part.reshape(-1) for part in parts]), tuple(part.size for part in parts)


def unflatten(flat: ArrayT, sizes: Sequence[int], shapes: Sequence[Sequence[int]] | None = None) -> list[ArrayT]:
    """Return views of ``flat``, one per component. Writing to a view writes to ``flat``. No element is copied.

    ``flat`` is a 1-D array or tensor, and ``sizes`` has the elements of each component in order. Without ``shapes``
    every view is 1-D. With them, view i has shape ``shapes[i]``.

    Raises:
        SizeMismatchError: the sizes do not sum to the length of ``flat``, or a shape does not hold its size.
        InvalidArgumentError: a size is negative, or ``flat`` is no 1-D array.
    """
    if not _is_array(flat) or flat.ndim != 1:
        raise InvalidArgumentError(f"a flat gradient is a 1-D array or tensor, not {_describe(flat)}")
    checked = [whole_number(size, f"size of component {i}") for i, size in enumerate(sizes)]
    if sum(checked) != flat.shape[0]:
        raise SizeMismatchError(
            f"component sizes sum to {sum(checked)}, but the flat gradient has {flat.shape[0]} elements"
        )
    views = [flat[begin:end] for begin, end in pairwise(accumulate(checked, initial=0))]
    if shapes is None:
        return views
    _check_shapes(shapes, checked)
    # Splitting a 1-D array never needs a copy, in either library.
    return [view.reshape(tuple(shape)) for view, shape in zip(views, shapes, strict=True)]


def local_mean(array: ArrayT, count: int) -> ArrayT:
    """Turn a sum over ``count`` sequences into their mean, in place. Return ``array`` itself.

    ``array`` has any shape and any floating or complex dtype. Narrow types are divided in fp32 and rounded once. So
    neither the count nor the quotient loses bits to the type. A count of 1 leaves every bit unchanged. On a GPU torch
    may multiply by the reciprocal, which can differ in the last bit.

    A worker without any valid sequence has no mean. It should contribute with weight 0.

    Raises:
        InvalidArgumentError: ``count`` is not a positive integer, or ``array`` is no array.
        DTypeError: the dtype is an integer or bool.
    """
    count = whole_number(count, "the number of accumulated sequences", least=1)
    if not _is_array(array):
        raise InvalidArgumentError(f"need an array or tensor, not {_describe(array)}")
    if not dtype_of(_dtype_name(array)).is_floating:
        raise DTypeError(f"a mean needs a floating dtype, not {_dtype_name(array)}")
    if count > 1:
        if _is_tensor(array):
            _divide_tensor(array, count)
        else:
            _divide_numpy(array, count)
    return array


def _divide_tensor(tensor: torch.Tensor, count: int) -> None:
    import torch

    values = tensor.detach()
    if values.is_complex():  # complex32 has no division of its own
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:  # nor have the 8-bit floats
        values.copy_(values.float().div_(count))
    else:
        values.div_(count)


def _divide_numpy(array: npt.NDArray[Any], count: int) -> None:
    # By parts: numpy divides complex numbers by way of a reciprocal, and turns (inf, 0) into nan.
    for part in (array.real, array.imag) if np.iscomplexobj(array) else (array,):
        # Without a dtype, count itself would be rounded to the array's: 257 is 256 in bfloat16.
        wide = np.result_type(part.dtype, np.float32)
        np.divide(part, count, out=part, dtype=wide, casting="same_kind")


def _component(number: int, value: object) -> npt.NDArray[Any] | torch.Tensor:
    if not _is_array(value):
        raise InvalidArgumentError(f"component {number} is {_describe(value)}, not an array or tensor")
    if _is_tensor(value) and str(value.layout) != "torch.strided":
        raise LayoutError(f"component {number} has layout {value.layout}; only dense tensors flatten")
    return value


def _check_alike(parts: Sequence[object]) -> None:
    first, *others = (_component(number, part) for number, part in enumerate(parts))
    for number, part in enumerate(others, start=1):
        if _is_tensor(part) != _is_tensor(first):
            raise InvalidArgumentError(
                f"component {number} is {_describe(part)}, but component 0 is {_describe(first)}"
            )
        if part.dtype != first.dtype:
            raise DTypeError(
                f"component {number} has dtype {_dtype_name(part)}, but component 0 has {_dtype_name(first)}"
            )
        if _is_tensor(part) and _is_tensor(first) and part.device != first.device:
            raise LayoutError(f"component {number} is on {part.device}, but component 0 is on {first.device}")


def _check_shapes(shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
    if len(shapes) != len(sizes):
        raise SizeMismatchError(f"there are {len(shapes)} shapes, but {len(sizes)} component sizes")
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        # A negative dimension would let the library infer one, and hide a wrong size.
        if any(dimension < 0 for dimension in shape) or prod(shape) != size:
            raise SizeMismatchError(
                f"component {number} has {size} elements, which do not fill its shape {tuple(shape)}"
            )


def _is_tensor(value: object) -> TypeIs[torch.Tensor]:
    # Without an import of torch there are no tensors, so this need not import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: object) -> TypeIs[npt.NDArray[Any] | torch.Tensor]:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _dtype_name(array: npt.NDArray[Any] | torch.Tensor) -> str:
    """Return the name that both libraries use: ``float32``."""
    return str(array.dtype).removeprefix("torch.")


def _describe(value: object) -> str:
    if not _is_array(value):
        return "None" if value is None else f"a value of type {type(value).__name__}"
    library = "torch tensor" if _is_tensor(value) else "numpy array"
    return f"a {library} of shape {tuple(value.shape)}"
