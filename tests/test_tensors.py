"""Tensors as bytes: what of torch and numpy can travel, without a copy where possible, and what cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.errors import DTypeError, LayoutError
from gradserver.worker.tensors import bind, empty, like
from tests.reference import TYPES

# torch says so of each complex32 tensor
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def zeros(name: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, name))


def change(data: np.ndarray[Any, Any]) -> None:
    """Set every byte to 1, which is a number, and true, in every element type."""
    data[:] = 1


# ── without a copy ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_contiguous_torch_tensor_is_bound_where_it_lies(name: str, shape: tuple[int, ...]) -> None:
    tensor = zeros(name, *shape)

    bound = bind(tensor, writes=True)

    assert (bound.dtype, bound.numel, bound.shape) == (dtype_of(name), tensor.numel(), shape)
    assert bound.data.nbytes == tensor.numel() * dtype_of(name).itemsize
    assert bound.store is None
    if tensor.numel():
        assert bound.data.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("name", [name for name in TYPES if name != "complex32"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_contiguous_numpy_array_is_bound_where_it_lies(name: str, shape: tuple[int, ...]) -> None:
    array: np.ndarray[Any, Any] = empty(shape, name)

    bound = bind(array, writes=True)

    assert (bound.dtype, bound.numel, bound.shape) == (dtype_of(name), array.size, shape)
    assert bound.store is None
    if array.size:
        assert bound.data.ctypes.data == array.ctypes.data


def test_elements_are_bound_in_row_major_order() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)

    for tensor in (array, array.T.copy().T, torch.from_numpy(array), torch.from_numpy(array).t().contiguous().t()):
        assert bind(tensor, writes=False).data.view(np.int16).tolist() == [0, 1, 2, 3, 4, 5]


def test_leaf_that_requires_grad_is_bound_where_it_lies_and_stays_a_leaf() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))

    change(bind(parameter, writes=True).data)

    assert parameter.is_leaf
    assert parameter.requires_grad
    assert (parameter != 0).all()


def test_result_of_a_computation_is_bound_without_its_graph() -> None:
    result = torch.nn.Parameter(torch.zeros(3)) * 2

    assert bind(result, writes=True).data.ctypes.data == result.data_ptr()


# ── by way of a copy ──────────────────────────────────────────────────────────────────────────────────

VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda tensor: tensor.T,
    "column": lambda tensor: tensor[:, 1],
    "every other row": lambda tensor: tensor[::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", TYPES)
def test_strided_torch_view_gets_its_result_on_store(name: str, view: str) -> None:
    whole = zeros(name, 4, 3)
    part = VIEWS[view](whole)
    bound = bind(part, writes=True)

    change(bound.data)
    assert not whole.view(torch.uint8).any()

    assert bound.store is not None
    bound.store()
    assert torch.equal(part.contiguous().view(torch.uint8), torch.ones_like(part.contiguous().view(torch.uint8)))
    assert int(whole.view(torch.uint8).sum()) == part.numel() * whole.itemsize


@pytest.mark.parametrize("view", [*VIEWS, "reversed"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "complex128"])
def test_strided_numpy_view_gets_its_result_on_store(name: str, view: str) -> None:
    whole = np.zeros((4, 3), empty(0, name).dtype)
    part = whole[::-1] if view == "reversed" else VIEWS[view](whole)
    bound = bind(part, writes=True)

    change(bound.data)
    assert not whole.view(np.uint8).any()

    assert bound.store is not None
    bound.store()
    assert (np.ascontiguousarray(part).view(np.uint8) == 1).all()
    assert int(whole.view(np.uint8).sum()) == part.size * whole.itemsize


@pytest.mark.parametrize("view", VIEWS)
def test_strided_view_that_is_only_read_needs_no_store(view: str) -> None:
    assert bind(VIEWS[view](torch.zeros(4, 3)), writes=False).store is None
    assert bind(VIEWS[view](np.zeros((4, 3))), writes=False).store is None


def test_conjugate_view_travels_as_what_it_means() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    bound = bind(tensor.conj(), writes=True)

    assert bound.data.view(np.complex64).tolist() == [1 - 2j, 3 + 4j]

    bound.data.view(np.complex64)[:] = [5 + 6j, 7]
    assert bound.store is not None
    bound.store()
    assert tensor.tolist() == [5 - 6j, 7]


def test_negated_view_travels_as_what_it_means() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert tensor.is_neg()

    assert bind(tensor, writes=False).data.view(np.float32).tolist() == [-2, 4]


def test_subclass_of_array_is_bound_like_an_array() -> None:
    matrix = np.zeros((2, 3), np.float32).view(_Labelled)

    assert bind(matrix, writes=True).data.shape == (24,)


class _Labelled(np.ndarray[Any, Any]):
    """An array that insists on two dimensions, as numpy's own matrix does."""

    def reshape(self, *_: Any, **__: Any) -> Any:
        return self


# ── what cannot travel ────────────────────────────────────────────────────────────────────────────────


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


UNWRITABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "read-only array": (read_only, "read-only array: pass a copy"),
    "broadcast array": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)),
        "share one memory cell (broadcast_to?): pass a copy",
    ),
    "expanded tensor": (lambda: torch.zeros(1).expand(3), r"share one memory cell (expand?): pass .clone()"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_cannot_be_written_is_refused_as_the_place_of_a_result(what: str) -> None:
    make, message = UNWRITABLE[what]

    with pytest.raises(LayoutError) as caught:
        bind(make(), writes=True)
    assert message in str(caught.value)


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_cannot_be_written_can_be_read(what: str) -> None:
    assert not bind(UNWRITABLE[what][0](), writes=False).data.any()


def sparse(convert: str) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: sparse CSR tensor support is in beta state
            tensor: torch.Tensor = getattr(torch.zeros(2, 2), convert)()
            return tensor

    return make


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [1.0], DTypeError, "expected a torch tensor or a numpy array, got list"),
    "float": (lambda: 1.0, DTypeError, "expected a torch tensor or a numpy array, got float"),
    "numpy scalar": (lambda: np.float32(1), DTypeError, "expected a torch tensor or a numpy array, got float32"),
    "None": (lambda: None, DTypeError, "expected a torch tensor or a numpy array, got NoneType"),
    "objects": (lambda: np.array([{}]), DTypeError, "element type 'object' cannot travel; these can: float32, "),
    "text": (lambda: np.array(["a"]), DTypeError, "cannot travel"),
    "records": (lambda: np.zeros(2, "i4,f4"), DTypeError, "cannot travel"),
    "dates": (lambda: np.zeros(2, "M8[s]"), DTypeError, "cannot travel"),
    "long double": (lambda: np.zeros(2, np.longdouble), DTypeError, "cannot travel"),
    "masked array": (lambda: np.ma.zeros(2), LayoutError, "a masked array cannot travel: call .filled(…) first"),
    "big-endian": (lambda: np.zeros(2, ">f4"), DTypeError, "big-endian, and the wire is little-endian"),
    "sparse": (sparse("to_sparse"), LayoutError, "a sparse_coo tensor cannot travel: call .to_dense() first"),
    "sparse rows": (sparse("to_sparse_csr"), LayoutError, "a sparse_csr tensor cannot travel"),
    "meta": (lambda: torch.zeros(2, device="meta"), LayoutError, "meta device has no elements that could travel"),
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_tensor_of_numbers_is_refused(what: str, writes: bool) -> None:
    make, kind, message = REFUSED[what]

    with pytest.raises(kind) as caught:
        bind(make(), writes)
    assert message in str(caught.value)


# ── new tensors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TYPES)
def test_like_keeps_library_and_element_type(name: str) -> None:
    tensor = like(zeros(name, 2).requires_grad_(name == "float32"), (3, 2))

    assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (getattr(torch, name), (3, 2), False)


def test_like_a_numpy_array_is_one() -> None:
    array = like(np.zeros(2, ml_dtypes.bfloat16), (3, 2))

    assert (type(array), array.dtype, array.shape) == (np.ndarray, ml_dtypes.bfloat16, (3, 2))


def test_empty_takes_types_of_both_libraries_and_names() -> None:
    assert empty((2, 3), torch.bfloat16).dtype is torch.bfloat16
    assert empty(4, np.float64).shape == (4,)
    assert empty((), "bfloat16").dtype == ml_dtypes.bfloat16
    assert empty(2, "float8_e4m3fn").nbytes == 2
    with pytest.raises(DTypeError, match="element type 'float31' cannot travel"):
        empty(2, "float31")
