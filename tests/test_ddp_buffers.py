"""DistributedDataParallel: buffers are alike after each round, and only what has changed travels, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserver import DistributedDataParallel, LocalCluster, LocalSGD
from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError, UsageError
from gradserver.worker.client import Worker
from tests.cluster import AMONG_MEMBERS, PATIENCE, Gather, together
from tests.models import Convolutional, images, loss_of
from tests.replicas import on, same
from tests.seeded import seeded

torch.set_num_threads(1)

MASK_BYTES = 1 << 20
STEPS = 3


@pytest.fixture(params=["memory", "shm", "tcp", *AMONG_MEMBERS])
def channel(request: pytest.FixtureRequest) -> str:
    """Return the channel by which workers reach their coordinator, or the direct plane beside it."""
    return str(request.param)


class Masked(nn.Module):
    """A layer with few parameters and a large constant table, as older transformers have in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool).tril(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs) * self.mask[:4, 0]
        return result


class Counting(nn.Module):
    """Buffers that only change when a test changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table: Tensor
        self.count: Tensor
        self.phase: Tensor
        self.register_buffer("table", torch.zeros(100_000))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs)
        return result


def step(model: nn.Module, inputs: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(inputs).square().sum().backward()


def state(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.module.named_buffers()}


def bytes_in(cluster: LocalCluster) -> int:
    """Return the bytes that workers have contributed so far."""
    groups: Any = cluster.snapshot()["groups"]
    (group,) = groups.values() if isinstance(groups, dict) else groups
    return int(group["bytes_in"])


def spent(world: int, make: type[nn.Module], inputs: Tensor) -> tuple[int, int]:
    """Return the bytes that all workers contribute to a round, and those of their gradients."""
    marks: list[int] = []
    sizes: list[int] = []

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(make(), worker)
        for number in range(STEPS + 1):
            worker.barrier()
            if worker.rank == 0 and number in (0, STEPS):
                marks.append(bytes_in(cluster))
            worker.barrier()
            if number < STEPS:
                step(model, inputs + worker.rank)
        sizes.append(sum(4 * parameter.numel() for parameter in model.parameters()))

    with LocalCluster(world, timeout=PATIENCE) as cluster:
        cluster.run(work)
    return (marks[1] - marks[0]) // STEPS, world * sizes[0]


def test_a_constant_table_does_not_travel() -> None:
    a_round, gradients = spent(4, Masked, torch.ones(2, 4))

    assert gradients == 4 * 80
    assert a_round <= gradients + 4 * 8, "and a number of each worker"


def test_one_member_s_statistics_travel() -> None:
    a_round, gradients = spent(4, Convolutional, images(0, 4)[0])

    assert gradients + 4 * (4 + 4) + 8 <= a_round <= gradients + 4 * (4 + 4) + 8 + 4 * 8


@pytest.mark.parametrize("in_place", [True, False])
def test_what_the_lowest_rank_changes_reaches_all_and_what_others_change_is_undone(
    gather: Gather, in_place: bool
) -> None:
    workers = gather(3)

    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(seeded(worker.rank, Counting), worker)
        module: Any = model.module
        history = []
        for number in range(4):
            if number == 1 and worker.rank == 0:  # also by ways that torch does not count as a change
                module.table.data[7] = 1.0
                module.phase.data[0] = 1j
            if number == 2 and worker.rank > 0:
                if in_place:
                    module.table.add_(worker.rank)
                    module.count.add_(worker.rank)
                else:
                    module.table = torch.full((100_000,), 5.0 + worker.rank)
                    module.count = torch.tensor(worker.rank)
            if number == 3:
                module.count += 1
            step(model, torch.ones(1, 2))
            history.append(state(model))
        return history

    for zero, one, two in zip(*together(workers, work), strict=True):
        assert same(zero, one)
        assert same(zero, two)
        last = zero
    assert (last["table"].sum().item(), last["table"][7].item()) == (1.0, 1.0)
    assert last["phase"].tolist() == [1j, 0, 0]
    assert last["count"].item() == 1


def test_each_change_is_sent_by_the_lowest_rank_that_has_a_batch() -> None:
    """Test one, two and three batches at ranks 0, 1 and 2: in the end the statistics are those of rank 2."""

    def work(worker: Worker) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        model = DistributedDataParallel(Convolutional(), worker)
        own: dict[str, Tensor] = {}
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join([optimizer, lambda: seen.append(state(model))]):
            for number in range(worker.rank + 1):
                optimizer.zero_grad()
                loss = loss_of(model, *images(10 * number + worker.rank, 4))
                own = state(model)
                loss.backward()
                optimizer.step()
                seen.append(state(model))
        return own, seen

    results = on(3, work)
    for number, rank in enumerate((0, 1, 2)):
        own, _ = results[rank]
        assert all(same(seen[number], own) for _, seen in results), number


def test_a_member_that_dies_before_it_has_sent_its_buffers_leaves_them_as_they_were() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(), worker)
        step(model, images(0, 4)[0])
        before = state(model)
        if worker.rank == 0:
            rounds = model._rounds
            # All know then that its buffers are those to have.
            rounds._push_buffers = lambda: rounds._sends_buffers() and cluster.kill(0)  # type: ignore[assignment, func-returns-value, method-assign]
        inputs = images(1 + worker.rank, 4)[0]
        if worker.rank == 0:
            with pytest.raises(Exception, match="closed|killed|lost"):
                step(model, inputs)
            return []
        step(model, inputs)
        between = state(model)
        step(model, inputs)
        return [before, between, state(model)]

    with LocalCluster(3, elastic=(1, 3), timeout=PATIENCE) as cluster:
        _, first, second = cluster.run(work)
    for mine, theirs in zip(first, second, strict=True):
        assert same(mine, theirs)
    assert same(first[0], first[1])
    assert not same(first[1], first[2])


def test_in_a_group_that_does_not_wait_for_all_buffers_are_alike_too() -> None:
    """Test a rank 0 that comes too late: what it changed alone, and sent, does not count for itself either."""
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Counting(), worker)
        module: Any = model.module
        history = []
        for number in range(4):
            if worker.rank == 0:
                assert others_are_ahead.wait(PATIENCE)
                module.table += 1.0
            if worker.rank == 1 and number == 3:
                module.count += 9
            step(model, torch.ones(1, 2))
            history.append(state(model))
            if worker.rank == 1 and number == 2:
                others_are_ahead.set()
        worker.barrier()
        module.phase += 1
        step(model, torch.ones(1, 2))
        return [*history, state(model)]

    with LocalCluster(4, elastic=(1, 4), timeout=PATIENCE, quorum=3, grace=0.0) as cluster:
        results = cluster.run(work)
    for there in results[1:]:
        assert all(same(mine, theirs) for mine, theirs in zip(results[0], there, strict=True))
    assert results[0][2]["table"].sum().item() == 0.0
    assert results[0][-1]["phase"].tolist() == [1, 1, 1]


def test_ignored_buffers_and_parameters_are_left_alone() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], Tensor, Tensor | None, list[str]]:
        module: Any = Counting()
        module.own = nn.Parameter(torch.full((2,), float(worker.rank)))
        module._ddp_params_and_buffers_to_ignore = ["own"]  # as torch's wrapper reads it
        module.table.fill_(worker.rank)
        model = DistributedDataParallel(module, worker, buffers_to_ignore=["table"])
        module.table += 1
        module.count += 1
        (model(torch.ones(1, 2)).sum() + module.own.sum() * (1 + worker.rank)).backward()
        names = [component.name for bucket in model.plan.buckets for component in bucket.components]
        return state(model), module.own.detach(), module.own.grad, names

    for rank, (buffers, own, gradient, names) in enumerate(on(2, work)):
        assert buffers["table"].unique().tolist() == [1 + rank]
        assert buffers["count"].item() == 1
        assert own.tolist() == [rank, rank]
        assert gradient is not None
        assert gradient.tolist() == [1 + rank, 1 + rank]
        assert "table" not in names
        assert "own" not in names
        assert "count" in names


def test_a_buffer_to_ignore_must_exist() -> None:
    def work(worker: Worker) -> None:
        DistributedDataParallel(Counting(), worker, buffers_to_ignore=["tables"])

    with pytest.raises(InvalidArgumentError, match=r"buffers_to_ignore names 'tables', .* its buffers are 'table', "):
        on(1, work)


# ── buffers that come, change or go after the module is wrapped ───────────────────────────────────────


class Late(nn.Module):
    """A scale that the first batch sets, as in data-dependent initialisation."""

    def __init__(self, first: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.scale: Tensor | None
        self.register_buffer("scale", first)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scale is None or not self.scale.numel():
            self.scale = inputs.abs().mean(0)
        result: Tensor = self.linear(inputs / self.scale)
        return result


WRAPPERS: dict[str, Any] = {
    "DistributedDataParallel": DistributedDataParallel,
    "LocalSGD": lambda module, worker, **options: LocalSGD(module, worker, **options),
}


def batch(worker: Worker) -> Tensor:
    return torch.full((4, 2), 1.0 + worker.rank)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("first", [None, torch.empty(0)])
def test_a_buffer_that_a_first_forward_makes_is_refused_by_name_in_that_forward(
    wrapper: str, first: Tensor | None
) -> None:
    def work(worker: Worker) -> None:
        model = WRAPPERS[wrapper](Late(first), worker)
        with pytest.raises(
            UsageError, match=r"buffer 'scale' has come .* first forward .*buffers_to_ignore=\['scale'\]"
        ):
            model(batch(worker))

    on(2, work)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_its_remedies_work(wrapper: str) -> None:
    def work(worker: Worker) -> tuple[list[float], list[float]]:
        made, own = Late(), Late()
        made(batch(worker))
        together = WRAPPERS[wrapper](made, worker)
        apart = WRAPPERS[wrapper](own, worker, buffers_to_ignore=["scale"])
        for model in (together, apart):
            model(batch(worker)).sum().backward()
        assert made.scale is not None
        assert own.scale is not None
        return made.scale.tolist(), own.scale.tolist()

    assert on(2, work) == [([1, 1], [1, 1]), ([1, 1], [2, 2])]


CHANGES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "registered": (lambda net: net.register_buffer("late", torch.ones(1)), UsageError, "buffer 'late' has come"),
    "deep": (
        lambda net: net.linear.register_buffer("late", torch.ones(1)),
        UsageError,
        "buffer 'linear.late' has come",
    ),
    "module": (lambda net: net.add_module("norm", nn.BatchNorm1d(1)), UsageError, r"'norm\.\w+' (has come|came)"),
    "replaced": (lambda net: setattr(net, "linear", Masked()), UsageError, r"'linear\.[\w.]+' (has come|came)"),
    "untied": (lambda net: setattr(net, "other", torch.ones(3)), UsageError, "buffer 'other' has come"),
    "shape": (lambda net: setattr(net, "scale", torch.ones(3)), SizeMismatchError, r"'scale' had shape \(2,\)"),
    "dtype": (lambda net: setattr(net, "scale", torch.ones(2).double()), DTypeError, "'scale' was of torch.float32"),
    "gone": (lambda net: delattr(net, "scale"), SizeMismatchError, r"'scale' had shape \(2,\) .* is gone"),
    "none": (lambda net: setattr(net, "scale", None), SizeMismatchError, r"'scale' had shape \(2,\) .* is gone"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("change", CHANGES)
def test_buffers_that_come_change_or_go_are_named_before_anything_is_exchanged(change: str, wrapper: str) -> None:
    apply, error, match = CHANGES[change]

    def work(worker: Worker) -> None:
        module = Late(torch.ones(2))
        module.register_buffer("other", module.scale)
        model = WRAPPERS[wrapper](module, worker)
        model(batch(worker))
        apply(module)
        with pytest.raises(error, match=match):
            model(batch(worker))

    on(2, work)


def test_a_buffer_that_each_forward_assigns_anew_is_rank_0_s_everywhere() -> None:
    class Average(Late):
        def forward(self, inputs: Tensor) -> Tensor:
            assert self.scale is not None
            self.scale = 0.5 * self.scale + 0.5 * inputs.abs().mean(0)
            return super().forward(inputs)

    def work(worker: Worker) -> list[float]:
        model = DistributedDataParallel(Average(torch.ones(2)), worker)
        for _ in range(STEPS):
            model(3 * batch(worker)).sum().backward()
        found: list[float] = model.module.get_buffer("scale").tolist()
        return found

    assert on(2, work) == [[2.75, 2.75]] * 2


def test_looking_for_new_buffers_takes_a_hundredth_of_a_step_at_most() -> None:
    def work(worker: Worker) -> tuple[float, float]:
        module = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(250)])
        model = DistributedDataParallel(module, worker)
        steps, looks = list[float](), list[float]()
        for _ in range(10):
            began = time.thread_time()
            model(torch.randn(8, 2)).sum().backward()
            steps.append(time.thread_time() - began)
            began = time.thread_time()
            model._rounds.check_buffers()
            looks.append(time.thread_time() - began)
        return min(looks), min(steps)

    ((looks, step),) = on(1, work)
    assert looks < step / 100


# ── odd buffers, and odd modules ──────────────────────────────────────────────────────────────────────


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


IMPOSSIBLE: dict[str, Callable[[], Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "memory cell": lambda: torch.ones(1).expand(3),
    "one memory cell": lambda: torch.ones(5).unfold(0, 3, 1),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta device": lambda: torch.ones(3, device="meta"),
    "inference_mode": made_in_inference_mode,
}
POSSIBLE: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: torch.ones(2, 3, dtype=torch.complex64).conj().t(),
    "negative": lambda: torch._neg_view(torch.ones(3)),
    "zero-dimensional": lambda: torch.ones(()),
    "bool": lambda: torch.zeros(3, dtype=torch.bool),
    "channels_last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "column": lambda: torch.ones(3, 4)[:, 1],
    "cell": lambda: torch.ones(5, 3, dtype=torch.bfloat16)[2:3, 0],
    "complex32": lambda: torch.ones(3, dtype=torch.complex32),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "with a gradient": lambda: torch.ones(3, requires_grad=True),
}
ODD_TENSORS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("ComplexHalf support", "Sparse CSR", "The PyTorch API of nested", "torch.quantize_per_tensor")
]


def odd(buffer: Tensor) -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_buffer("odd", buffer)
    return module


class TestOddBuffers:
    pytestmark = ODD_TENSORS

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    @pytest.mark.parametrize("what", IMPOSSIBLE)
    def test_that_cannot_travel_are_refused_by_name_and_may_stay(self, what: str, wrapper: str) -> None:
        def work(worker: Worker) -> None:
            with pytest.raises(LayoutError, match=rf"buffer 'odd' .*{what}.*buffers_to_ignore=\['odd'\]"):
                WRAPPERS[wrapper](odd(IMPOSSIBLE[what]()), worker)
            model = WRAPPERS[wrapper](odd(IMPOSSIBLE[what]()), worker, buffers_to_ignore=["odd"])
            model(torch.ones(1, 2)).sum().backward()

        on(2, work)

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    @pytest.mark.parametrize("what", POSSIBLE)
    def test_that_can_travel_become_rank_0_s(self, what: str, wrapper: str) -> None:
        def work(worker: Worker) -> list[Any]:
            buffer = POSSIBLE[what]()
            if worker.rank:
                buffer = buffer.detach().clone().zero_()
            model = WRAPPERS[wrapper](odd(buffer), worker)
            model(torch.ones(1, 2)).sum().backward()
            if isinstance(model, LocalSGD):
                model.sync()
            found: list[Any] = model.module.odd.detach().resolve_conj().resolve_neg().tolist()
            return found

        expected = POSSIBLE[what]().detach().resolve_conj().resolve_neg().tolist()
        assert on(2, work) == [expected] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_with_statistics_is_trained() -> None:
    made = [seeded(0, lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))) for _ in range(4)]
    scripted = [torch.jit.script(module) for module in made[:2]]  # not in threads: the compiler has one for all

    def work(worker: Worker) -> list[dict[str, Tensor]]:
        states = []
        for module in (scripted[worker.rank], made[2 + worker.rank]):
            model = DistributedDataParallel(module, worker)
            for number in range(STEPS):
                generator = torch.Generator().manual_seed(number + 10 * worker.rank)
                model(torch.randn(4, 2, generator=generator)).square().sum().backward()
            states.append({name: tensor.clone() for name, tensor in model.module.state_dict().items()})
        return states

    (scripted_0, plain_0), (scripted_1, _) = on(2, work)
    assert scripted_0["1.num_batches_tracked"] == STEPS
    for name, tensor in plain_0.items():
        assert torch.equal(scripted_0[name], tensor)
        assert torch.equal(scripted_0[name], scripted_1[name])
