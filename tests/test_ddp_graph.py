"""DistributedDataParallel: parameters that are not always used, or more than once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradserver import DistributedDataParallel
from gradserver.protocol.errors import (
    OutOfStepError,
    UsageError,
    WorkerLostError,
)
from gradserver.worker.client import Worker
from tests.models import (
    Transformer,
    loss_of,
    state_of,
    tokens,
)
from tests.replicas import (
    ROWS,
    Pushed,
    alone,
    assert_like_one_process,
    note_backward,
    on,
    pushes,
    reference,
    same,
    sgd,
    shard,
    train,
)

torch.set_num_threads(1)

# ── parameters that are not always used ──────────────────────────────────────────────────────────────


def test_unused_parameter_is_an_error_that_names_it() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        with pytest.raises(
            UsageError, match=r"no gradient came for 'branch.weight', 'branch.bias' of .*find_unused_parameters=True"
        ):
            loss_of(model, *tokens(0, 2)).backward()
        match = r"an exchange failed \(UsageError: no gradient came"
        with pytest.raises(OutOfStepError, match=match):
            loss_of(model, *tokens(0, 2))
        with pytest.raises(OutOfStepError, match=match):
            loss_of(model.module, *tokens(0, 2)).backward()

    on(2, work)


def test_parameter_that_is_unused_in_a_later_step_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        loss_of(model, *tokens(0, 2), branch=True).backward()
        with pytest.raises(UsageError, match=r"no gradient came for 'branch.weight', 'branch.bias'"):
            loss_of(model, *tokens(1, 2)).backward()

    alone(work)


def test_parameter_whose_gradient_was_thrown_away_is_unused() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        with model.no_sync():
            loss_of(model, *tokens(0, 2), branch=True).backward()
        model.zero_grad()
        with pytest.raises(UsageError, match=r"no gradient came for 'branch.weight', 'branch.bias'"):
            loss_of(model, *tokens(1, 2)).backward()

    alone(work)


def test_others_are_told_of_a_worker_that_failed() -> None:
    def work(worker: Worker) -> str:
        model = DistributedDataParallel(Transformer(branch=True), worker)
        try:
            loss_of(model, *tokens(0, 2), branch=worker.rank == 0).backward()
        except UsageError:
            worker.abort("its loss does not depend on branch")
        except WorkerLostError as error:
            return str(error)
        return ""

    told, _ = on(2, work)
    assert "'worker-1'" in told
    assert "does not depend on branch" in told


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("as_view", [True, False])
def test_parameter_that_no_worker_uses_is_left_alone(option: str, as_view: bool) -> None:
    # Weight decay and momentum would change it if it had a gradient of zeros.
    def branching(seed: int) -> Transformer:
        return Transformer(seed, branch=True)

    results = on(2, train, branching, gradient_as_bucket_view=as_view, **{option: True})
    assert_like_one_process(results, reference(branching(0)))
    assert torch.equal(results[0]["branch.weight"], branching(0).get_parameter("branch.weight"))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_parameter_that_one_worker_uses_counts_as_zeros_for_the_others(to_none: bool, as_view: bool) -> None:
    def uses(rank: int, step: int) -> bool:
        return (rank + step) % 3 == 0 and step != 1

    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(
            Transformer(branch=True), worker, find_unused_parameters=True, gradient_as_bucket_view=as_view
        )
        optimizer = sgd(model)
        for step in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            data = shard(worker.rank, 2, *tokens(step, ROWS))
            loss_of(model, *data, branch=uses(worker.rank, step)).backward()
            optimizer.step()
        return state_of(model.module)

    single = Transformer(branch=True)
    optimizer = sgd(single)
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        losses = [loss_of(single, *shard(r, 2, *tokens(step, ROWS)), branch=uses(r, step)) for r in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
    assert_like_one_process(on(2, work), state_of(single))


def test_unused_bucket_is_not_sent() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Any:
            return self.blocks[0](x)

    def work(worker: Worker) -> Pushed:
        noted = pushes(worker)
        model = DistributedDataParallel(Half(), worker, find_unused_parameters=True)
        model(torch.ones(1, 2)).sum().backward()
        return noted

    assert on(2, work) == [[("block.0", 1.0, True), ("block.1", 1.0, False), ("used", 1.0, True)]] * 2


def test_static_graph_exchanges_during_backward_from_the_second_step_on() -> None:
    def work(worker: Worker) -> list[str]:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        loss_of(model, *tokens(0, 2)).backward()
        noted = pushes(worker)
        note_backward(model.get_submodule("module.blocks.0"), noted, "-0")
        loss_of(model, *tokens(0, 2)).backward()
        return [key for key, *_ in noted]

    # The head is not delayed, though the branch in its bucket gets no gradient.
    expected = ["used", "lm_head", "final_norm", "block.3", "block.2", "block.1", "block.0", "-0", "embedding"]
    assert alone(work) == expected


def test_static_graph_that_changes_is_an_error() -> None:
    def work(worker: Worker, first: bool) -> None:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        loss_of(model, *tokens(0, 2), branch=first).backward()
        times = (0, 1) if first else (1, 0)
        match = r"the graph changed: the gradient of 'branch.(weight|bias)' became ready {} times .* and {} times in"
        with pytest.raises(UsageError, match=match.format(*times)):
            loss_of(model, *tokens(1, 2), branch=not first).backward()

    for first in (True, False):
        on(1, work, first)


def test_worker_may_learn_its_static_graph_late() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(branch=True), worker, static_graph=True)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(3 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
        with model.join(optimizer):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, *tokens(step + worker.rank, 2)).backward()
                optimizer.step()
        return state_of(model.module)

    assert same(*on(2, work))


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_reentrant_checkpoints(options: dict[str, Any]) -> None:
    def checkpointed(seed: int) -> Transformer:
        return Transformer(seed, checkpointed=True)

    assert_like_one_process(on(2, train, checkpointed, **options), reference(Transformer(0)))


@pytest.mark.parametrize("options", [{"static_graph": True}, {"delay_all_reduce": True}])
def test_reentrant_checkpoints_of_a_part_that_is_used_twice(options: dict[str, Any]) -> None:
    def twice(seed: int) -> Transformer:
        return Transformer(seed, checkpointed=True, twice=True)

    assert_like_one_process(on(2, train, twice, **options), reference(Transformer(0, twice=True)))


def test_gradient_that_is_ready_twice_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(checkpointed=True, twice=True), worker)
        with pytest.raises(UsageError, match=r"'blocks.3.\S+' became ready a second time .*static_graph=True"):
            loss_of(model, *tokens(0, 2)).backward()

    alone(work)


@dataclass
class Output:
    logits: Tensor


def test_everything_inside_one_reentrant_checkpoint() -> None:
    # No parameter's hook runs in the outer backward: only the output tells of it.
    class Whole(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = Transformer(seed)
            self.second = nn.Linear(17, 17)

        def forward(self, x: Tensor) -> dict[str, list[Output]]:
            start = torch.zeros((), requires_grad=True)
            hidden = checkpoint(lambda x, _: self.inner(x), x, start, use_reentrant=True)
            return {"all": [Output(checkpoint(self.second, hidden, use_reentrant=True))]}

    def work(worker: Worker) -> int:
        model = DistributedDataParallel(Whole(0), worker)
        model(tokens(0, 2)[0])["all"][0].logits.sum().backward()
        return worker.round

    assert on(2, work) == [1, 1]
