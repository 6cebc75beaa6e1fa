"""Trees of values and tensors: they come back bit by bit, and no bytes do more than raise one kind of error."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from gradserver.protocol.dtypes import BY_NAME, numpy_dtype
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, MalformedMessageError
from gradserver.worker import tree
from gradserver.worker.tensors import bind
from gradserver.worker.tree import Tree, from_bytes, pack, to_bytes, unpack
from tests.reference import TYPES

torch.set_num_threads(1)


def there_and_back(value: Tree) -> Tree:
    packed = pack(value)
    buffers = iter(packed.buffers)

    def take(nbytes: int) -> bytearray:
        buffer = bytearray(next(buffers))
        assert len(buffer) == nbytes
        return buffer

    result = unpack(packed.manifest, take)
    assert next(buffers, None) is None
    return result


def same(one: Any, other: Any) -> bool:
    """Return whether type and every bit are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        return one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return bool(one == other)


def raw(tensor: Tensor) -> bytes:
    return bytes(bind(tensor, writes=False).data)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(sorted(TYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = BY_NAME[name]
    size = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    if name == "bool":
        data &= 1
    if draw(st.booleans()) or name == "complex32":
        kind = getattr(torch, name)
        return torch.from_numpy(data).view(kind).reshape(shape) if size else torch.empty(shape, dtype=kind)
    return data.view(numpy_dtype(dtype)).reshape(shape)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(trees)
def test_a_tree_comes_back_bit_by_bit(value: Tree) -> None:
    assert same(there_and_back(value), value)
    assert same(from_bytes(to_bytes(value)), value)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_element_type_of_both_libraries(name: str) -> None:
    data = np.arange(48, dtype=np.uint8) & (1 if name == "bool" else 255)
    tensor = torch.from_numpy(data).view(getattr(torch, name)).reshape(-1, 1)
    assert same(there_and_back(tensor), tensor)
    if name != "complex32":
        array = data.view(numpy_dtype(BY_NAME[name]))
        assert same(there_and_back(array), array)
        assert same(there_and_back(array[1]), array[1])


def test_what_torch_makes_its_states_of() -> None:
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(network.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    for _ in range(3):
        loss: Any = network(torch.ones(2, 3)).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    for part in (network, optimizer, schedule):
        state = part.state_dict()
        back = there_and_back(state)
        assert same(back, state)
        part.load_state_dict(back)
    assert type(there_and_back(schedule.state_dict())["milestones"]) is Counter


def test_layouts_that_are_not_plain_come_back_plain() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (base.T, base[:, 1:3], base.expand(2, 3, 4), torch.ones(2, dtype=torch.complex64).conj()):
        back = there_and_back(tensor)
        assert back.is_contiguous()
        assert torch.equal(back, tensor)
    assert np.array_equal(there_and_back(np.asfortranarray(base.numpy())), base.numpy())
    assert not there_and_back(torch.nn.Parameter(base)).requires_grad


def test_buffers_are_the_tensors_memory_unless_a_copy_is_asked_for() -> None:
    tensor = torch.zeros(3)
    shared, own = pack(tensor), pack(tensor, copy=True)
    tensor.fill_(1.0)
    assert shared.buffers[0].any()
    assert not own.buffers[0].any()


def test_a_tensor_lies_in_the_memory_that_was_given() -> None:
    memory = bytearray(12)
    tensor = unpack(pack(torch.zeros(3)).manifest, lambda _: memory)
    tensor.fill_(1.0)
    assert memory == np.ones(3, np.float32).tobytes()


# ── what cannot be stored ────────────────────────────────────────────────────────────────────────────


class Strange(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ({"a": [1, {2}]}, InvalidArgumentError, r"the tree\['a'\]\[1\] is a builtins.set, which cannot be stored"),
        (deque(), InvalidArgumentError, "the tree is a collections.deque"),
        ((Strange(),), InvalidArgumentError, r"the tree\[0\] is a .*test_tree.Strange"),
        ({frozenset(): 1}, InvalidArgumentError, "the tree has a key of type frozenset"),
        ([np.array(["x"])], DTypeError, r"the tree\[0\] cannot be stored: element type 'str\d*'"),
        ([np.zeros(1, ">f4")], DTypeError, r"the tree\[0\] cannot be stored: .*big-endian"),
        ({"w": torch.ones(1).to_sparse()}, LayoutError, r"the tree\['w'\] cannot be stored: a sparse_coo tensor"),
        ({"w": torch.ones(1, device="meta")}, LayoutError, "meta device"),
        (1 << 40_000, InvalidArgumentError, "an integer of 5,001 bytes"),
        ([0.5] * 500_000, InvalidArgumentError, "make arrays of long lists"),
    ],
    ids=range(10),
)
def test_what_cannot_be_stored_is_named(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        pack(value)
    assert type(caught.value) is error


def test_a_list_that_holds_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidArgumentError, match="nested more than 64 deep, or holds itself"):
        pack(endless)


# ── bytes from anywhere ──────────────────────────────────────────────────────────────────────────────


def given_nothing(nbytes: int) -> bytearray:
    """Return memory for honest sizes only."""
    if nbytes > 1000:
        raise MalformedMessageError(f"there are not {nbytes} bytes")
    return bytearray(nbytes)


nodes = st.recursive(
    plain | st.integers(-1, 30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=2),
)


@given(nodes)
def test_any_msgpack_is_a_tree_or_malformed(node: Any) -> None:
    manifest = msgpack.packb(node, default=str, unicode_errors="surrogatepass") if small(node) else b"\xc1"
    with contextlib.suppress(MalformedMessageError):
        unpack(manifest, given_nothing)


def small(node: Any) -> bool:
    """Return whether msgpack can have it."""
    if isinstance(node, int):
        return -(1 << 63) <= node < 1 << 64
    if isinstance(node, list):
        return all(map(small, node))
    return all(map(small, node.values())) if isinstance(node, dict) else True


@given(st.binary(max_size=60))
def test_any_bytes_are_a_tree_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        unpack(data, given_nothing)
    with contextlib.suppress(MalformedMessageError):
        from_bytes(data)


@given(trees, st.data())
def test_a_flipped_or_cut_tree_is_a_tree_or_malformed(value: Tree, data: st.DataObject) -> None:
    damaged = bytearray(to_bytes(value))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    for one in (bytes(damaged), bytes(damaged[:at])):
        with contextlib.suppress(MalformedMessageError):
            from_bytes(one)


@pytest.mark.parametrize(
    "node",
    [
        [],
        [[]],
        [99],
        ["x"],
        {"a": 1},
        [tree._Kind.DICT, 1],
        [tree._Kind.DICT, 1, 2, 1, 3],
        [tree._Kind.DICT, 1, 2, True, 3],
        [tree._Kind.DICT, [tree._Kind.LIST], 2],
        [tree._Kind.INT],
        [tree._Kind.INT, 5],
        [tree._Kind.INT, bytes(5000)],
        [tree._Kind.NUMPY],
        [tree._Kind.NUMPY, 99, 1],
        [tree._Kind.NUMPY, 13, 1],
        [tree._Kind.NUMPY, 0, -1],
        [tree._Kind.NUMPY, 0, 1.0],
        [tree._Kind.NUMPY, 0, 0, (1 << 63) - 1, 9],
        [tree._Kind.TORCH, 0, 0, (1 << 63) - 1, 9],
        [tree._Kind.TORCH, 0, (1 << 62) - 1],
        [tree._Kind.TORCH, 0, *[1] * 65],
        [tree._Kind.SCALAR, 0, 1],
    ],
    ids=str,
)
def test_what_no_tree_says_is_malformed(node: Any) -> None:
    with pytest.raises(MalformedMessageError):
        unpack(msgpack.packb(node), lambda nbytes: bytearray(nbytes))


def test_nesting_and_length_have_a_limit() -> None:
    deep: Any = None
    for _ in range(tree.MAX_DEPTH + 2):
        deep = [tree._Kind.LIST, deep]
    with pytest.raises(MalformedMessageError, match="expected a part of a tree"):
        unpack(msgpack.packb(deep), given_nothing)
    with pytest.raises(MalformedMessageError, match="not msgpack"):
        unpack(b"\x91" * 5000 + b"\xc0", given_nothing)
    with pytest.raises(MalformedMessageError, match="the limit is 4,194,304"):
        unpack(bytes(tree.MAX_MANIFEST_BYTES + 1), given_nothing)
    with pytest.raises(MalformedMessageError, match="not msgpack"):
        unpack(b"\xdd\xff\xff\xff\xff", given_nothing)


def test_a_buffer_of_another_length_is_malformed() -> None:
    with pytest.raises(MalformedMessageError, match="a tensor of 3 × float32 takes 12 bytes, and 8 came"):
        unpack(pack(torch.zeros(3)).manifest, lambda _: bytearray(8))
