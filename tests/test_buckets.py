"""From a module to buckets: grouping, order, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError
from gradserver.protocol.exchange import Op
from gradserver.tools.demo.model import GPT
from gradserver.tools.demo.settings import Settings
from gradserver.worker.torch_ddp.buckets import GradientBucket, bring, buffer_buckets, hand_out, memory_order
from gradserver.worker.torch_ddp.grouping import Group, find_blocks, group_parameters
from gradserver.worker.torch_ddp.kept import KeptGradients
from gradserver.worker.torch_ddp.module_buffers import exchanged_buffers
from tests.models import Block, Convolutional, Transformer

torch.set_num_threads(1)


def keys(module: nn.Module, blocks: Any = None, cap_mb: float = 25.0) -> list[str]:
    return [group.key for group in group_parameters(module, blocks, cap_mb)]


def members(module: nn.Module, **options: Any) -> dict[str, list[str]]:
    groups = group_parameters(module, options.get("blocks"), options.get("cap_mb", 25.0))
    return {group.key: [name for name, _ in group.parameters] for group in groups}


class Stack(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


class Seq2Seq(nn.Module):
    """Two stacks: the larger one is the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(2)
        self.decoder = Stack(3)
        self.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


# ── which parameters belong together ──────────────────────────────────────────────────────────────────


def test_transformer_in_the_order_of_backward() -> None:
    found = members(Transformer())
    assert list(found) == ["lm_head", "final_norm", "block.3", "block.2", "block.1", "block.0", "embedding"]
    assert found["embedding"] == ["position", "token.weight"]
    assert found["final_norm"] == ["final_norm.weight", "final_norm.bias"]
    assert found["block.2"] == [f"blocks.2.{name}" for name, _ in Block().named_parameters()]


def test_model_of_the_demo() -> None:
    settings = Settings()
    expected = ["lm_head", "final_norm", *(f"block.{i}" for i in reversed(range(settings.blocks))), "embedding"]
    assert keys(GPT(settings)) == expected


def test_every_parameter_is_in_one_bucket_once() -> None:
    for module in (
        Transformer(tied=True, branch=True),
        Convolutional(),
        Seq2Seq(),
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    ):
        names = [name for group in members(module, cap_mb=0.0005).values() for name in group]
        assert sorted(names) == sorted(name for name, _ in module.named_parameters())


def test_tied_weight_lives_where_backward_ends() -> None:
    found = members(Transformer(tied=True))
    assert "lm_head" not in found
    assert found["embedding"] == ["position", "token.weight"]


def test_weight_shared_by_blocks_lives_in_the_first() -> None:
    shared = nn.Linear(2, 2)
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), shared, nn.Linear(2, 2), shared])})
    assert list(members(module)) == ["block.2", "block.1", "block.0"]
    assert members(module)["block.1"] == ["layers.1.weight", "layers.1.bias"]


def test_weight_shared_by_a_block_and_the_head_lives_in_the_block() -> None:
    last, head = nn.Linear(2, 2), nn.Linear(2, 2)
    head.weight = last.weight
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), last]), "head": head})
    assert members(module)["lm_head"] == ["head.bias"]
    assert members(module)["block.1"] == ["layers.1.weight", "layers.1.bias"]


def test_blocks_are_the_list_with_most_parameters() -> None:
    module = Seq2Seq()
    assert find_blocks(module) == list(module.decoder.layers)
    assert members(module) == {
        "lm_head": ["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"],
        "block.1": ["decoder.layers.1.weight", "decoder.layers.1.bias"],
        "block.0": ["decoder.layers.0.weight", "decoder.layers.0.bias"],
        "bucket.0": [f"encoder.layers.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")],
    }


def test_blocks_may_be_named() -> None:
    module = Seq2Seq()
    stacks = [*module.encoder.layers, *module.decoder.layers]
    assert keys(module, blocks=stacks) == ["lm_head", "block.3", "block.2", "block.1", "block.0"]
    assert keys(Transformer(), blocks=nn.ModuleList())[0] == "bucket.0"


def test_blocks_must_be_of_the_module() -> None:
    with pytest.raises(InvalidArgumentError, match=r"block 0 \(Linear\) is not a part"):
        keys(Transformer(), blocks=[nn.Linear(2, 2)])


def test_stack_behind_the_blocks_is_cut_into_runs() -> None:
    module = Seq2Seq()
    first, second = keys(module, blocks=module.encoder.layers)[:2]
    assert (first, second) == ("lm_head", "bucket.0")


def test_module_without_blocks_is_cut_last_parameters_first() -> None:
    module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(5)])  # 256 KiB each
    assert members(module, cap_mb=0.5) == {
        "bucket.0": ["3.weight", "4.weight"],
        "bucket.1": ["1.weight", "2.weight"],
        "bucket.2": ["0.weight"],
    }


def test_parameter_above_the_cap_travels_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(512, 512, bias=False), nn.Linear(2, 2))
    assert list(members(module, cap_mb=0.1).values()) == [
        ["2.weight", "2.bias"],
        ["1.weight"],
        ["0.weight", "0.bias"],
    ]


def test_mixed_element_types_are_split() -> None:
    module = Transformer()
    module.blocks[1].up.to(torch.bfloat16)
    found = members(module)
    assert found["block.1.bfloat16"] == ["blocks.1.up.weight", "blocks.1.up.bias"]
    assert len(found["block.1"]) == 8


def test_frozen_and_empty_parameters_are_left_out() -> None:
    module = Transformer()
    module.token.requires_grad_(False)
    module.empty = nn.Parameter(torch.empty(0, 3))
    assert members(module)["embedding"] == ["position"]
    assert all("empty" not in names for names in members(module).values())


@pytest.mark.parametrize(
    ("module", "error", "match"),
    [
        (nn.ReLU(), InvalidArgumentError, "no parameter that requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), InvalidArgumentError, "no parameter that requires a gradient"),
        (nn.ParameterList([torch.ones(0)]), InvalidArgumentError, "a gradient but '0', without elements"),
        (nn.LazyLinear(2), InvalidArgumentError, "'weight' has no shape yet"),
        (nn.Linear(2, 2, device="meta"), LayoutError, "'weight' is on meta.*to_empty"),
    ],
)
def test_module_that_cannot_be_exchanged(module: nn.Module, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        keys(module)


@pytest.mark.parametrize("cap_mb", [0, -1.0, float("nan")])
def test_cap_must_be_positive(cap_mb: float) -> None:
    with pytest.raises(InvalidArgumentError, match="bucket_cap_mb"):
        keys(nn.Linear(2, 2), cap_mb=cap_mb)


# ── the memory they live in ───────────────────────────────────────────────────────────────────────────


def bucket_of(*parameters: nn.Parameter) -> GradientBucket:
    bucket = GradientBucket(Group("b", tuple((f"p{i}", p) for i, p in enumerate(parameters))))
    bucket.place(torch.zeros(bucket.spec.numel, dtype=parameters[0].dtype))
    return bucket


def test_gradient_becomes_a_view_of_the_bucket() -> None:
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    bucket = bucket_of(first, second)
    first.grad, second.grad = torch.full((2, 3), 1.0), torch.full((4,), 2.0)
    assert bring(bucket.slots, as_view=True) == [True, True]
    assert bucket.flat.tolist() == [1.0] * 6 + [2.0] * 4
    bucket.flat.fill_(7.0)
    assert first.grad.tolist() == [[7.0] * 3] * 2
    assert second.grad.tolist() == [7.0] * 4


def test_gradient_of_its_own_is_copied_in_and_out() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    (slot,) = (bucket := bucket_of(parameter)).slots
    parameter.grad = own = torch.ones(2)
    bring((slot,), as_view=False)
    bucket.flat.mul_(3.0)
    assert parameter.grad is own
    assert own.tolist() == [1.0, 1.0]
    hand_out((slot,), as_view=False)
    assert own.tolist() == [3.0, 3.0]
    parameter.grad = None
    hand_out((slot,), as_view=False)
    given: Any = parameter.grad
    assert given.tolist() == [3.0, 3.0]
    assert given.data_ptr() != bucket.flat.data_ptr()


def test_scaled_gradient_stays_where_it_is_until_the_bucket_moves() -> None:
    start = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    parameter, absent = nn.Parameter(start.to(memory_format=torch.channels_last)), nn.Parameter(torch.zeros(2))
    bucket = bucket_of(parameter, absent)
    own = parameter.grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([own.permute(0, 2, 3, 1).reshape(-1), torch.zeros(2)])
    assert bucket.scale(0.5)
    before = bucket.flat
    assert torch.equal(before, expected / 2)
    assert parameter.grad is own
    assert torch.equal(kept_of(bucket).flat(), expected)

    before.fill_(9.0)  # parts of a sum
    kept_of(bucket).scale_again()
    assert torch.equal(before, expected / 2)
    parameter.grad = None  # as an optimizer would after a backward that failed
    assert kept_of(bucket).move() is bucket.flat
    before.fill_(9.0)  # something still writes there
    assert torch.equal(bucket.flat, expected)
    found: Any = parameter.grad
    assert torch.equal(found, own)
    assert found.data_ptr() == bucket.flat.data_ptr()


def test_gradient_is_scaled_once_unless_it_changes() -> None:
    (slot,) = (bucket := bucket_of(parameter := nn.Parameter(torch.zeros(2)))).slots
    own = parameter.grad = torch.ones(2)
    assert slot.scale(0.5)
    bucket.flat.fill_(9.0)
    assert slot.scale(0.5)
    assert bucket.flat.tolist() == [9.0, 9.0]
    own.mul_(4.0)  # a hook of the user's
    assert slot.scale(0.5)
    assert bucket.flat.tolist() == [2.0, 2.0]
    assert slot.scale(0.25)
    assert bucket.flat.tolist() == [1.0, 1.0]


def test_bucket_makes_room_for_gradients_that_lie_in_it() -> None:
    bucket = bucket_of(parameter := nn.Parameter(torch.zeros(2)))
    made: list[torch.Tensor] = []

    def new_memory() -> torch.Tensor:
        made.append(torch.zeros(2))
        return made[-1]

    bucket.vacate(new_memory)
    assert not made
    for value in (1.0, 2.0, 3.0):
        hand_out(bucket.slots, as_view=True)
        grad: Any = parameter.grad
        grad.fill_(value)  # accumulated where the last result was
        bucket.vacate(new_memory)
        bucket.scale(2.0)
        assert grad.tolist() == [value] * 2
        assert bucket.flat.tolist() == [2 * value] * 2
    assert len(made) == 1


def kept_of(bucket: GradientBucket) -> KeptGradients:
    return KeptGradients(bucket, as_view=True, new_memory=lambda: torch.zeros(bucket.spec.numel))


def test_missing_gradient_is_zeros() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    (slot,) = (bucket := bucket_of(parameter)).slots
    bucket.flat.fill_(5.0)
    assert bring((slot,), as_view=True) == [False]
    assert bucket.flat.tolist() == [0.0, 0.0]
    assert parameter.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_element_types(dtype: torch.dtype) -> None:
    bucket = bucket_of(parameter := nn.Parameter(torch.zeros(3, dtype=dtype)))
    parameter.grad = torch.ones(3, dtype=dtype)
    bring(bucket.slots, as_view=True)
    assert bucket.flat.tolist() == [1.0] * 3
    assert bucket.spec.dtype.name == str(dtype).removeprefix("torch.")


def test_gradient_has_the_strides_of_its_parameter() -> None:
    # Fused optimizers walk parameter and gradient side by side, whatever their strides say.
    start = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(start.to(memory_format=torch.channels_last))
    bucket = bucket_of(parameter)
    assert bucket.spec.components[0].shape == (4, 2, 2, 3)
    gradient = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    parameter.grad = gradient.clone()
    bring(bucket.slots, as_view=True)
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, gradient)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        pytest.skip("torch has fused optimizers for the CPU since 2.4; the gradient is as it should be")
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert torch.allclose(parameter, start - 0.1 * gradient)


def test_memory_order() -> None:
    assert memory_order(torch.empty(2, 3, 4)) == (0, 1, 2)
    assert memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(torch.empty(2, 3).t()) == (1, 0)
    assert memory_order(torch.empty(4, 6)[:, ::2]) == (0, 1)
    assert memory_order(torch.empty(1).expand(3)) == (0,)
    assert memory_order(torch.tensor(1.0)) == ()


def test_gradient_whose_memory_was_swapped_is_taken_anew() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    (slot,) = (bucket := bucket_of(parameter)).slots
    parameter.grad = torch.ones(2)
    bring((slot,), as_view=True)
    parameter.grad.data = torch.full((2,), 9.0)  # as Module.to() does it
    bring((slot,), as_view=True)
    assert bucket.flat.tolist() == [9.0, 9.0]
    assert parameter.grad.data_ptr() == bucket.flat.data_ptr()


def test_module_converted_after_wrapping_is_refused() -> None:
    module = nn.Linear(2, 2)
    bucket = bucket_of(nn.Parameter(module.weight))
    module.weight = bucket.slots[0].parameter
    module.weight.grad = torch.ones(2, 2)
    bring(bucket.slots, as_view=True)
    module.to(torch.float64)
    with pytest.raises(DTypeError, match="'p0' is torch.float64.*before wrapping"):
        bring(bucket.slots, as_view=True)


def test_sparse_gradient_is_refused() -> None:
    bucket = bucket_of(parameter := nn.Parameter(torch.zeros(2, 2)))
    parameter.grad = torch.eye(2).to_sparse()
    with pytest.raises(LayoutError, match="'p0' is sparse_coo"):
        bring(bucket.slots, as_view=True)


# ── buffers ───────────────────────────────────────────────────────────────────────────────────────────


def test_buffers_are_packed_by_element_type() -> None:
    module = Convolutional()
    floats, counts = buffer_buckets(exchanged_buffers(module, ()))
    assert [bucket.spec.key for bucket in (floats, counts)] == ["buffers.float32", "buffers.int64"]
    assert [c.name for c in floats.spec.components] == ["norm.running_mean", "norm.running_var"]
    assert floats.spec.op is counts.spec.op is Op.FIRST
    floats.place(torch.empty(8))
    floats.pack()
    assert floats.flat.tolist() == [0.0] * 4 + [1.0] * 4
    floats.flat.fill_(3.0)
    floats.unpack()
    assert module.get_buffer("norm.running_var").tolist() == [3.0] * 4


def test_buffer_that_was_assigned_to_is_found() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2))
    (bucket,) = buffer_buckets(exchanged_buffers(module, ()))
    bucket.place(torch.empty(2))
    module.table = torch.ones(2)
    bucket.pack()
    assert bucket.flat.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [None, torch.zeros(3)])
def test_buffer_that_changed_its_shape_is_named(value: torch.Tensor | None) -> None:
    inner = nn.Module()
    inner.register_buffer("table", torch.zeros(2))
    (bucket,) = buffer_buckets(exchanged_buffers(nn.Sequential(inner), ()))
    bucket.place(torch.empty(2))
    inner.register_buffer("table", value)
    with pytest.raises(SizeMismatchError, match=r"'0.table' had shape \(2,\)"):
        bucket.pack()
