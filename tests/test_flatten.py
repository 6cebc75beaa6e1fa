"""Flattening of a block's components, its inverse, and the local mean; in numpy and in torch."""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError
from gradserver.worker.torch_ddp.flatten import (
    COMPONENT_NAMES,
    NON_BLOCK_COMPONENTS,
    BlockShape,
    flatten,
    local_mean,
    unflatten,
)
from tests.refusals import refused

LIBRARIES = ["numpy", "torch"]
shape_lists = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def array_of(library: str, values: Any, dtype: str = "float32") -> Any:
    if library == "numpy":
        return np.array(values, dtype=getattr(ml_dtypes, dtype, None) or dtype)
    torch = pytest.importorskip("torch")
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))


def filled(library: str, shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[Any]:
    """Return components of these shapes which hold 0, 1, 2, … in order."""
    ends = np.cumsum([prod(shape) for shape in shapes])
    return [
        array_of(library, np.arange(end - prod(shape), end).tolist(), dtype).reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


def same_memory(view: Any, flat: Any) -> bool:
    if isinstance(flat, np.ndarray):
        return bool(view.size == 0 or np.shares_memory(view, flat))
    return bool(view.numel() == 0 or view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr())


# --- flatten and unflatten -------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@given(shapes=shape_lists)
def test_flatten_joins_in_order_and_unflatten_inverts_it(library: str, shapes: list[tuple[int, ...]]) -> None:
    parts = filled(library, shapes)

    flat, sizes = flatten(parts)
    views = unflatten(flat, sizes, shapes)

    assert type(flat) is type(parts[0])
    assert flat.dtype == parts[0].dtype
    assert flat.tolist() == list(range(sum(sizes)))
    assert sizes == tuple(prod(shape) for shape in shapes)
    assert [tuple(view.shape) for view in views] == shapes
    assert [view.tolist() for view in views] == [part.tolist() for part in parts]
    again, again_sizes = flatten(views)
    assert (again.tolist(), again_sizes) == (flat.tolist(), sizes)


@pytest.mark.parametrize("library", LIBRARIES)
@given(shapes=shape_lists)
def test_unflatten_gives_views_of_flat_and_flatten_a_copy(library: str, shapes: list[tuple[int, ...]]) -> None:
    parts = filled(library, shapes)
    flat, sizes = flatten(parts)
    assert not any(same_memory(part, flat) and prod(part.shape) for part in parts)

    for number, view in enumerate(unflatten(flat, sizes, shapes)):
        assert same_memory(view, flat)
        view[...] = -number

    expected = [-number for number, size in enumerate(sizes) for _ in range(size)]
    assert flat.tolist() == expected
    for view in unflatten(flat, sizes):
        assert view.ndim == 1
        assert same_memory(view, flat)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_component_is_copied_too(library: str) -> None:
    (part,) = filled(library, [(5,)])
    flat, _ = flatten([part])
    flat[0] = 9

    assert part.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "float8_e4m3fn", "complex64"])
def test_dtypes_survive_to_the_bit(library: str, dtype: str) -> None:
    parts = filled(library, [(2, 2), (3,)], dtype)

    flat, sizes = flatten(iter(parts))

    assert flat.dtype == parts[0].dtype
    assert [view.tolist() for view in unflatten(flat, sizes, [(2, 2), (3,)])] == [p.tolist() for p in parts]


def test_non_finite_bits_survive() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], dtype=np.uint32)
    flat, sizes = flatten([bits.view(np.float32)[:1], bits.view(np.float32)[1:]])

    assert flat.view(np.uint32).tolist() == bits.tolist()
    assert unflatten(flat, sizes)[1].view(np.uint32).tolist() == bits[1:].tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_components_that_are_not_contiguous_are_read_in_c_order(library: str) -> None:
    (matrix,) = filled(library, [(2, 3)])

    flat, sizes = flatten([matrix.T, matrix[:, 1]])

    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 1, 4]
    assert sizes == (6, 2)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_strided_flat_still_gives_views(library: str) -> None:
    (long,) = filled(library, [(12,)])
    flat = long[::2]

    views = unflatten(flat, (4, 2), [(2, 2), (1, 2)])
    views[0][...] = -1

    assert long.tolist() == [-1, 1, -1, 3, -1, 5, -1, 7, 8, 9, 10, 11]


def test_parameters_flatten_without_their_graph() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)

    flat, sizes = flatten(layer.parameters())

    assert sizes == (6, 2)
    assert not flat.requires_grad
    assert type(flat) is torch.Tensor
    assert torch.equal(unflatten(flat, sizes, [(2, 3), (2,)])[0], layer.weight)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("sizes", "shapes", "text"),
    [
        ((4, 5), None, "component sizes sum to 9, but the flat gradient has 10 elements"),
        ((4, 7), None, "component sizes sum to 11, but the flat gradient has 10 elements"),
        ((), None, "component sizes sum to 0, but the flat gradient has 10 elements"),
        ((4, 6), [(4,)], "there are 1 shapes, but 2 component sizes"),
        ((4, 6), [(4,), (2, 2)], "component 1 has 6 elements, which do not fill its shape (2, 2)"),
        ((4, 6), [(2, -1), (6,)], "component 0 has 4 elements, which do not fill its shape (2, -1)"),
        ((4, 6), [(-2, -2), (6,)], "component 0 has 4 elements, which do not fill its shape (-2, -2)"),
    ],
)
def test_sizes_that_do_not_fit(library: str, sizes: Any, shapes: Any, text: str) -> None:
    (flat,) = filled(library, [(10,)])

    with refused(SizeMismatchError, text):
        unflatten(flat, sizes, shapes)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_negative_size_does_not_hide_in_the_sum(library: str) -> None:
    (flat,) = filled(library, [(10,)])

    with refused(InvalidArgumentError, "size of component 1 must be at least 0, not -2"):
        unflatten(flat, (12, -2))


@pytest.mark.parametrize("library", LIBRARIES)
def test_flat_must_have_one_dimension(library: str) -> None:
    (matrix,) = filled(library, [(2, 3)])
    kind = {"numpy": "numpy array", "torch": "torch tensor"}[library]

    with refused(InvalidArgumentError, f"a flat gradient is a 1-D array or tensor, not a {kind} of shape (2, 3)"):
        unflatten(matrix, (6,))


def test_flat_must_be_an_array() -> None:
    with refused(InvalidArgumentError, "a flat gradient is a 1-D array or tensor, not a value of type list"):
        unflatten([1.0, 2.0], (2,))  # type: ignore[type-var]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_cannot_be_flattened(library: str) -> None:
    part = array_of(library, [1.0, 2.0])
    wide = array_of(library, [1.0], "float64")

    with refused(DTypeError, "component 2 has dtype float64, but component 0 has float32"):
        flatten([part, part, wide])
    with refused(InvalidArgumentError, "component 1 is None, not an array or tensor"):
        flatten([part, None])
    with refused(InvalidArgumentError, "component 0 is a value of type list, not an array or tensor"):
        flatten([[1.0], part])
    with refused(InvalidArgumentError, "flatten takes a sequence of components, not one array"):
        flatten(part)


def test_nothing_cannot_be_flattened() -> None:
    with refused(InvalidArgumentError, "there is nothing to flatten: no components, so no dtype either"):
        flatten([])


def test_libraries_do_not_mix() -> None:
    torch = pytest.importorskip("torch")

    with refused(
        InvalidArgumentError,
        "component 1 is a numpy array of shape (2, 2), but component 0 is a torch tensor of shape (2,)",
    ):
        flatten([torch.zeros(2), np.zeros((2, 2), np.float32)])


def test_only_dense_tensors_of_one_device_flatten() -> None:
    torch = pytest.importorskip("torch")

    with refused(LayoutError, "component 1 has layout torch.sparse_coo; only dense tensors flatten"):
        flatten([torch.zeros(2), torch.eye(2).to_sparse()])
    with refused(LayoutError, "component 1 is on meta, but component 0 is on cpu"):
        flatten([torch.zeros(2), torch.zeros(2, device="meta")])


# --- a transformer block ---------------------------------------------------------------------------


def test_block_components() -> None:
    shape = BlockShape(hidden=8, kv_dim=4, intermediate=24)

    # As a list: their order is the order on the wire.
    assert list(zip(COMPONENT_NAMES, shape.component_sizes, strict=True)) == [
        ("w_q", 64),
        ("w_k", 32),
        ("w_v", 32),
        ("w_o", 64),
        ("gate", 192),
        ("up", 192),
        ("down", 192),
        ("input_norm", 8),
        ("post_attn_norm", 8),
    ]
    assert shape.numel == 784


def test_a_block_can_be_unflattened_by_its_shape() -> None:
    shape = BlockShape(4, 2, 6)
    views = unflatten(np.arange(shape.numel, dtype=np.float32), shape.component_sizes)

    assert len(views) == len(COMPONENT_NAMES)
    assert views[COMPONENT_NAMES.index("w_v")].tolist() == list(range(24, 32))


def test_non_block_components_are_numbered() -> None:
    assert [NON_BLOCK_COMPONENTS.index(name) for name in ("lm_head", "final_norm", "embedding")] == [0, 1, 2]
    assert len(NON_BLOCK_COMPONENTS) == 3


def test_a_block_shape_is_checked_frozen_and_of_plain_ints() -> None:
    shape = BlockShape(np.int16(1024), 1, 1)  # type: ignore[arg-type]
    assert shape.component_sizes[0] == 1024 * 1024, "numpy's int16 would have wrapped around"
    with pytest.raises(AttributeError):
        shape.hidden = 5  # type: ignore[misc]
    assert shape == BlockShape(1024, 1, 1)
    with refused(InvalidArgumentError, "kv_dim must be at least 1, not 0"):
        BlockShape(8, 0, 24)
    with refused(InvalidArgumentError, "intermediate must be an integer, not 2.5 (float)"):
        BlockShape(8, 4, 2.5)  # type: ignore[arg-type]


# --- local mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "float8_e4m3fn"])
def test_local_mean_divides_in_place(library: str, dtype: str) -> None:
    total = array_of(library, [[3.0, -6.0], [12.0, 0.0]], dtype)

    mean = local_mean(total, 3)

    assert mean is total
    assert total.tolist() == [[1, -2], [4, 0]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_count_of_one_leaves_every_bit(library: str) -> None:
    # The first is a signalling NaN: even a division by 1 would make a quiet one of it.
    bits = np.array([0x7F800001, 0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], dtype=np.uint32)
    total: Any = bits.copy().view(np.float32)
    if library == "torch":
        total = pytest.importorskip("torch").from_numpy(total)

    assert local_mean(total, 1) is total
    assert np.asarray(total).view(np.uint32).tolist() == bits.tolist()


@given(
    values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False), max_size=8),
    count=st.integers(2, 2**20),
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_local_mean_is_the_correctly_rounded_quotient(library: str, values: list[float], count: int) -> None:
    total = array_of(library, values)

    local_mean(total, count)

    # A count below 2**24 is exact in fp32, and a float64 quotient rounds to the same fp32 quotient.
    assert total.tolist() == (np.array(values, np.float64) / count).astype(np.float32).tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_narrow_types_keep_the_count_exact(library: str) -> None:
    # 257 is no bfloat16, and 2**17 no float16.
    assert local_mean(array_of(library, [65536.0], "bfloat16"), 257).tolist() == [255.0]
    assert local_mean(array_of(library, [2.0**15], "float16"), 2**17).tolist() == [0.25]


@pytest.mark.parametrize("library", LIBRARIES)
def test_complex_parts_do_not_contaminate_each_other(library: str) -> None:
    total = array_of(library, [0.0, 0.0], "complex64")
    total[0] = complex(float("inf"), 3.0)
    total[1] = complex(6.0, -9.0)

    local_mean(total, 3)

    assert total.tolist() == [complex(float("inf"), 1.0), 2 - 3j]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_local_mean_of_half_precision_complex_numbers() -> None:
    torch = pytest.importorskip("torch")
    total = torch.tensor([3 - 6j, 12j]).to(torch.complex32)

    assert local_mean(total, 3) is total
    assert total.to(torch.complex64).tolist() == [1 - 2j, 4j]


@pytest.mark.parametrize("library", LIBRARIES)
def test_local_mean_of_views_and_of_nothing(library: str) -> None:
    (total,) = filled(library, [(6,)])

    local_mean(total[::2], 2)
    assert total.tolist() == [0, 1, 1, 3, 2, 5]
    assert local_mean(total[:0], 4).tolist() == []


def test_local_mean_of_a_parameter_leaves_its_graph_alone() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.full((2,), 6.0))

    assert local_mean(weight, 3) is weight
    assert weight.tolist() == [2, 2]
    assert weight.requires_grad


@pytest.mark.parametrize("library", LIBRARIES)
def test_local_mean_errors(library: str) -> None:
    total = array_of(library, [4.0])

    for count, text in [
        (0, "at least 1, not 0"),
        (-2, "at least 1, not -2"),
        (2.0, "an integer, not 2.0 (float)"),
    ]:
        with refused(InvalidArgumentError, f"the number of accumulated sequences must be {text}"):
            local_mean(total, count)  # type: ignore[arg-type]
    assert total.tolist() == [4.0]
    for dtype in ("int64", "bool"):
        with refused(DTypeError, f"a mean needs a floating dtype, not {dtype}"):
            local_mean(array_of(library, [1], dtype), 1)


def test_local_mean_needs_an_array() -> None:
    with refused(InvalidArgumentError, "need an array or tensor, not a value of type list"):
        local_mean([2.0], 2)  # type: ignore[type-var]
