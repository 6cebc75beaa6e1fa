"""Tensors of every layout in every collective: the result is that of a plain copy, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import gradserver
from gradserver.protocol.errors import DTypeError, LayoutError
from gradserver.worker.client import Worker
from gradserver.worker.tensors import bind, obstacle
from tests.cluster import members, together
from tests.reference import TYPES

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("ComplexHalf support", "Sparse CSR", "The PyTorch API of nested", "torch.quantize_per_tensor")
]

COLLECTIVES: dict[str, Callable[[Worker, torch.Tensor], Any]] = {
    "all_reduce": lambda worker, tensor: worker.all_reduce(tensor, "max" if not tensor.is_complex() else "sum"),
    "sum": lambda worker, tensor: worker.all_reduce(tensor, "sum"),
    "broadcast": lambda worker, tensor: worker.broadcast(tensor, 1),
    "all_gather": lambda worker, tensor: worker.all_gather(tensor),
    "gather": lambda worker, tensor: worker.gather(tensor, 0),
    "send": lambda worker, tensor: worker.send(tensor, 1) if worker.rank == 0 else worker.recv(tensor, 0),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    with members("memory", 2) as workers:
        yield workers


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, as a copy of ordinary layout has them."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bind(plain, writes=False).data.tobytes()


def base(name: str, numel: int, seed: int) -> torch.Tensor:
    """Return numbers of an element type, which all of them can hold and add up."""
    numbers = torch.arange(numel) % 7 + seed
    return (numbers % 2 == 1) if name == "bool" else numbers.to(getattr(torch, name))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Choose shape, strides and offset: cells, rows, columns, gaps, windows, expanded and empty ones."""
    shape = tuple(draw(st.lists(st.integers(0, 3) | st.just(1), min_size=0, max_size=3)))
    strides = tuple(draw(st.integers(0, 5)) for _ in shape)
    return shape, strides, draw(st.integers(0, 3))


@given(
    st.sampled_from(TYPES),
    layouts(),
    st.sampled_from(sorted(COLLECTIVES)),
    st.sampled_from(["", "conj", "neg", "grad", "inference"]),
)
@settings(max_examples=150)
def test_each_layout_gives_what_a_plain_copy_gives_or_is_refused(
    pair: list[Worker], name: str, layout: tuple[tuple[int, ...], tuple[int, ...], int], call: str, kind: str
) -> None:
    shape, strides, offset = layout
    room = offset + sum(stride * max(count - 1, 0) for count, stride in zip(shape, strides, strict=True)) + 1

    def work(worker: Worker) -> tuple[Any, bytes, Any, bytes]:
        with torch.inference_mode(kind == "inference"):
            odd = base(name, room, worker.rank).as_strided(shape, strides, offset)
        if kind == "conj" and odd.is_complex():
            odd = odd.conj()
        elif kind == "neg" and odd.dtype in (torch.float32, torch.float64):
            odd = torch._neg_view(odd)
        elif kind == "grad" and odd.is_floating_point():
            odd = odd.detach().requires_grad_()
        if obstacle(odd, writes=True) is not None:  # some members only read, and are not refused
            with pytest.raises(LayoutError, match=r"pass \.clone\(\)"):
                bind(odd, writes=True)
            return None, b"", None, b""
        plain = odd.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        result = COLLECTIVES[call](worker, odd)
        expected = COLLECTIVES[call](worker, plain)
        return result, bits(odd), expected, bits(plain)

    for result, odd, expected, plain in together(pair, work):
        assert odd == plain
        if isinstance(expected, torch.Tensor):
            assert bits(result) == bits(expected)


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_gather", "gather", "send"])
def test_tensors_without_an_order_of_elements_are_refused_with_a_remedy(pair: list[Worker], call: str) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    odd = {
        "to_dense": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
        "unbind|to_dense": [torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, layout=torch.jagged)],
        "dequantize": [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)],
        "meta device": [torch.ones(3, device="meta")],
    }

    def work(worker: Worker) -> None:
        for remedy, tensors in odd.items():
            for tensor in tensors:
                with pytest.raises((LayoutError, DTypeError), match=remedy):
                    COLLECTIVES[call](worker, tensor)

    together(pair, work)


def test_windows_that_do_not_overlap_are_written_and_overlapping_ones_refused(pair: list[Worker]) -> None:
    def work(worker: Worker) -> tuple[list[list[float]], str]:
        apart = torch.arange(6.0).as_strided((2, 2), (3, 2))  # 0, 2, 3, 5: no two share a cell
        worker.all_reduce(apart, "sum")
        with pytest.raises(LayoutError, match=r"share one memory cell.*clone") as refused:
            worker.all_reduce(torch.arange(5.0).unfold(0, 3, 1), "sum")
        return apart.tolist(), refused.value.message

    for apart, _ in together(pair, work):
        assert apart == [[0, 4], [6, 10]]


# ── as parameters of a module ─────────────────────────────────────────────────────────────────────────


class Cell(torch.nn.Module):
    """A parameter of one element that is a cell of a table, so that it has a stride of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = torch.nn.Parameter(torch.ones(5, 3, dtype=dtype)[2:3, 0])

    def forward(self, scale: float) -> torch.Tensor:
        return (self.cell * scale).sum()


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_parameter_that_is_a_cell_of_a_table_is_trained_and_saved(
    dtype: torch.dtype, init_sync: bool, tmp_path: Any
) -> None:
    def work(worker: Worker) -> list[float]:
        model = gradserver.DistributedDataParallel(Cell(dtype), worker, init_sync=init_sync)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        job = gradserver.Job(model, optimizer, checkpoint=tmp_path)
        model(worker.rank + 1.0).abs().backward()
        job.step()
        job.save()
        found: list[float] = model.module.get_parameter("cell").detach().abs().float().tolist()
        return found

    with gradserver.LocalCluster(2) as cluster:
        assert cluster.run(work) == [[0.25], [0.25]]
