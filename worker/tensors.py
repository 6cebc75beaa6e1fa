"""Tensors as bytes: the types of torch and numpy that can travel, and how results get back into place."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import DType, dtype_of, numpy_dtype
from gradserver.protocol.errors import DTypeError, LayoutError

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor | npt.NDArray[np.generic]"
"""A tensor that is exchanged."""
"""A flat, contiguous view of a tensor's memory."""


class Binding(NamedTuple):
    """A tensor, bound to memory that a channel can read and write.

    Attributes:
        data: the elements as bytes, in row-major order: the tensor's own memory if it allows, else a copy.
        dtype: element type.
        numel: number of elements.
        shape: the tensor's shape.
        store: writes ``data`` back into the tensor; None where ``data`` is the tensor's own memory.
    """

    data: Bytes
    dtype: DType
    numel: int
    shape: tuple[int, ...]
    store: Callable[[], None] | None


def is_torch(value: object) -> bool:
    """Return whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def wire_dtype(tensor: Any) -> DType:
    """Return the element type of a torch tensor or numpy array on the wire. DTypeError if it has none."""
    if not isinstance(tensor, np.ndarray) and not is_torch(tensor):
        raise DTypeError(f"expected a torch tensor or a numpy array, got {type(tensor).__name__}")
    try:
        return _wire_dtype(tensor.dtype)
    except DTypeError as error:
        if is_torch(tensor) and tensor.is_quantized:
            raise DTypeError(f"{error.message}. Call .dequantize() first, or send .int_repr()") from None
        raise


def numel_of(tensor: Any) -> int:
    """Return the number of elements of a torch tensor or numpy array."""
    return int(tensor.numel() if is_torch(tensor) else tensor.size)


@cache
def _wire_dtype(dtype: Any) -> DType:
    if not isinstance(dtype, np.dtype):
        return dtype_of(str(dtype).removeprefix("torch."))
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        raise DTypeError(f"{dtype} is big-endian, and the wire is little-endian: convert it first")
    return dtype_of(dtype.name)


def bind(tensor: Any, writes: bool) -> Binding:
    """Bind ``tensor`` for an exchange; with ``writes`` the result goes back into it.

    Raises:
        DTypeError: it is no tensor, or its elements cannot travel.
        LayoutError: its device or memory layout cannot travel, or it cannot be written to.
    """
    dtype = wire_dtype(tensor)
    if is_torch(tensor):
        return _bind_torch(tensor, dtype, writes)
    return _bind_numpy(tensor, dtype, writes)


def like(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Return an uninitialised tensor of ``shape`` in the same library, element type and device as ``tensor``."""
    if is_torch(tensor):
        return tensor.detach().new_empty(shape)
    return np.empty(shape, tensor.dtype)


Memory = Callable[[int], Bytes | None]
"""A source of uninitialised memory of a special kind, by its bytes; None where there is none."""


def empty(shape: tuple[int, ...] | int, dtype: Any, memory: Memory = lambda _: None) -> Any:
    """Return an uninitialised torch tensor if ``dtype`` is torch's, else a numpy array of that dtype (or its name).

    It lies in the memory of ``memory``, or else in ordinary memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        given = memory(_elements(shape) * dtype.itemsize)
        if given is None:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(given).view(dtype).reshape(shape)
    if isinstance(dtype, str):
        dtype = numpy_dtype(dtype_of(dtype))
    dtype = np.dtype(dtype)
    given = memory(_elements(shape) * dtype.itemsize) if not dtype.hasobject else None
    if given is None:
        return np.empty(shape, dtype)
    return given.view(dtype).reshape(shape)


def _elements(shape: tuple[int, ...] | int) -> int:
    """Return the number of elements of an array of ``shape``; none if there can be no such array."""
    sizes = (shape,) if isinstance(shape, int) else shape
    return math.prod(sizes) if all(size >= 0 for size in sizes) else 0


def _bind_numpy(array: npt.NDArray[Any], dtype: DType, writes: bool) -> Binding:
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError("a masked array cannot travel: call .filled(…) first")
    array = np.asarray(array)  # subclasses such as numpy.matrix reshape in their own way
    if writes and not array.flags.writeable:
        raise LayoutError("the result cannot be written into a read-only array: pass a copy")
    if array.flags.c_contiguous:
        return Binding(array.reshape(-1).view(np.uint8), dtype, array.size, array.shape, None)
    if writes and _overlaps(array.shape, array.strides, array.itemsize):
        raise LayoutError("several elements of this array share one memory cell (broadcast_to?): pass a copy")
    copy = np.ascontiguousarray(array)

    def store() -> None:
        array[...] = copy

    return Binding(copy.reshape(-1).view(np.uint8), dtype, array.size, array.shape, store if writes else None)


def _bind_torch(tensor: torch.Tensor, dtype: DType, writes: bool) -> Binding:
    torch = sys.modules["torch"]
    if type(tensor) is torch.Tensor and (array := _seen_by_numpy(tensor)) is not None and array.flags.c_contiguous:
        flat = array if array.ndim == 1 else array.reshape(-1)
        return Binding(flat.view(np.uint8), dtype, array.size, array.shape, None)
    if (why := obstacle(tensor, writes)) is not None:
        raise LayoutError(why)
    plain = tensor.detach()
    shape, numel, is_contiguous = tuple(plain.shape), plain.numel(), plain.is_contiguous()
    if is_contiguous and plain.is_cpu and not plain.is_conj() and not plain.is_neg():
        return Binding(_torch_bytes(plain), dtype, numel, shape, None)
    copy = plain.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()

    def store() -> None:
        plain.copy_(copy)

    return Binding(_torch_bytes(copy), dtype, numel, shape, store if writes else None)


def obstacle(tensor: torch.Tensor, writes: bool) -> str | None:
    """Say why a tensor cannot travel, or why with ``writes`` no result can be written into it; None if all is well."""
    torch = sys.modules["torch"]
    if tensor.is_nested:
        return "a nested tensor cannot travel: send its parts (.unbind()) one by one, or .to_padded_tensor(0.0)"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor cannot travel: call .to_dense() first"
    if tensor.is_meta:
        return "a tensor on the meta device has no elements that could travel"
    if not writes or tensor.is_contiguous():
        return None
    if _overlaps(tuple(tensor.shape), tensor.stride()):
        return "several elements of this tensor share one memory cell (expand?): pass .clone()"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "this tensor was made in torch.inference_mode(), and is read-only outside of it: pass .clone()"
    return None


def _torch_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor."""
    torch = sys.modules["torch"]
    flat = tensor.as_strided((tensor.numel(),), (1,))  # one element, or none, is contiguous with any stride
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1) if flat.dtype is not torch.complex32 else flat.view(torch.float16)
    result: Bytes = flat.view(torch.uint8).numpy()
    return result


def _seen_by_numpy(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a tensor's memory as numpy sees it; None if it cannot. Each look by torch takes a tenth of a small round.

    numpy cannot see memory of another device, sparse or conjugate tensors, those that need gradients, nor bfloat16.
    """
    try:
        return tensor.numpy() if _numpy_has(tensor.dtype) else None
    except (RuntimeError, TypeError):
        return None


@cache
def _numpy_has(dtype: torch.dtype) -> bool:
    """Return whether numpy has this element type of torch's, too."""
    try:
        sys.modules["torch"].empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...], size: int = 1) -> bool:
    """Return whether elements share memory, as in an expanded dimension, or in windows. Each has ``size`` units."""
    if 0 in shape:
        return False
    steps = sorted((abs(stride), count) for count, stride in zip(shape, strides, strict=True) if count > 1)
    reach = size
    for stride, count in steps:
        if stride < reach:
            return stride == 0 or _collides(steps, size)
        reach += stride * (count - 1)
    return False


def _collides(steps: list[tuple[int, int]], size: int) -> bool:
    """Return whether two elements lie less than ``size`` apart, given the steps of dimensions. It looks at all."""
    places = np.zeros(1, np.int64)
    for stride, count in steps:
        places = np.add.outer(places, stride * np.arange(count)).ravel()
    places.sort()
    return bool((np.diff(places) < size).any())
