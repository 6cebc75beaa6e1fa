"""DistributedDataParallel: uneven numbers of batches, buffers, and modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradserver import DistributedDataParallel, ShardSampler
from gradserver.protocol.errors import DisagreementError, DivergedError, UsageError, WorkerLeftError
from gradserver.worker.client import Worker
from tests.models import (
    Convolutional,
    Transformer,
    images,
    loss_of,
    optimizer_state,
    state_of,
    tokens,
)
from tests.replicas import (
    ROWS,
    alone,
    assert_like_one_process,
    distance,
    gradients,
    on,
    reference,
    same,
    sgd,
    shard,
)

torch.set_num_threads(1)

# ── uneven inputs ────────────────────────────────────────────────────────────────────────────────────


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def epochs_of(worker: Worker, **options: Any) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Train as a plain script, three epochs of 129 samples. Return those of each epoch, and the weights."""
    data = TensorDataset(torch.arange(129).float().unsqueeze(1) / 129, torch.arange(129))
    sampler = ShardSampler.for_worker(data, worker, **options)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(1, 1), worker)
    optimizer = adam(model)
    used: list[list[int]] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        used.append([])
        for inputs, numbers in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            used[-1] += numbers.tolist()
    worker.close("its work was done")
    return used, state_of(model.module)


def test_a_plain_loop_over_data_that_does_not_divide_evenly() -> None:
    (used, weights), (others, weights_there) = on(2, epochs_of)

    assert same(weights, weights_there)
    for mine, theirs in zip(used, others, strict=True):
        assert (len(mine), len(theirs)) == (65, 65)
        assert set(mine) | set(theirs) == set(range(129))


def test_a_worker_that_has_run_out_of_batches_is_told_of_with_what_to_do() -> None:
    with pytest.raises(WorkerLeftError) as caught:
        on(2, epochs_of, uneven="keep")

    assert str(caught.value) == (
        "'worker-1' (rank 1) left after round 5 and is needed to go on: its work was done. If it had no batches left: "
        "give all workers equally many, with ShardSampler(uneven='pad'), wrap the loop in model.join(optimizer), or "
        "hand samples out with DataRanges"
    )


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("batches", [[3, 1, 2], [0, 2, 2], [2, 2, 2]])
def test_workers_may_have_different_numbers_of_batches(
    batches: list[int], options: dict[str, Any], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Transformer(worker.rank, branch=bool(options)), worker, **options)
        optimizer = make_optimizer(model)
        for _ in range(2):
            with model.join(optimizer):
                for step in range(batches[worker.rank]):
                    optimizer.zero_grad()
                    loss_of(model, *shard(worker.rank, 3, *tokens(step, ROWS))).backward()
                    optimizer.step()
            assert all(p.grad is None for p in model.parameters())
        assert worker.round == 2 * (max(batches) + 1)
        return state_of(model.module), list(optimizer_state(optimizer))

    single = Transformer(branch=bool(options))
    optimizer = make_optimizer(single)
    for _ in range(2):
        for step in range(max(batches)):
            optimizer.zero_grad()
            active = [rank for rank in range(3) if step < batches[rank]]
            losses = [loss_of(single, *shard(rank, 3, *tokens(step, ROWS))) for rank in active]
            (sum(losses) / len(losses)).backward()
            optimizer.step()
    results = on(3, work)
    assert all(same(results[0][0], state) for state, _ in results)
    assert all(all(map(torch.equal, results[0][1], tensors)) for _, tensors in results)
    # Adam divides by the root of tiny second moments, which blows up the last bit.
    assert distance(results[0][0], state_of(single)) < (1e-6 if make_optimizer is sgd else 1e-4)


@pytest.mark.parametrize("to_none", [True, False])
def test_worker_without_batches_follows_what_is_unused_too(to_none: bool) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = DistributedDataParallel(Transformer(branch=True), worker, find_unused_parameters=True)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(1 + 4 * worker.rank):
                optimizer.zero_grad(set_to_none=to_none)
                loss_of(model, *tokens(step, 2), branch=step % 2 == 0).backward()
                optimizer.step()
        return state_of(model.module), list(optimizer_state(optimizer))

    (state, momenta), (other_state, other_momenta) = on(2, work)
    assert same(state, other_state)
    assert all(map(torch.equal, momenta, other_momenta))


@pytest.mark.parametrize("batches", [[3, 1, 2], [1, 1, 4]])
def test_join_learns_from_the_loop_what_to_step(batches: list[int]) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[Tensor], int]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer, other = adam(model), adam(nn.Linear(2, 2))
        for _ in range(2):
            with model.join():
                for step in range(batches[worker.rank]):
                    optimizer.zero_grad()
                    loss_of(model, *shard(worker.rank, 3, *tokens(step, ROWS))).backward()
                    optimizer.step()
                    other.step()
        return state_of(model.module), list(optimizer_state(optimizer)), worker.round

    first, *others = on(3, work)
    assert first[2] == 2 * (max(batches) + 1)
    for there in others:
        assert same(first[0], there[0])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[1], there[1], strict=True))


def test_join_without_a_step_needs_to_see_one() -> None:
    def work(worker: Worker, batches: int) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        with model.join():
            for step in range(2 if worker.rank else batches):
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()

    with pytest.raises(UsageError, match=r"this worker's loop has stepped none, .* give it what to step, mod"):
        on(2, work, 0)
    on(2, work, 1)


class Loop:
    """A loop that does more than step its optimizer: what it does is one of the methods here."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.optimizer = model, sgd(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizer.step()

    def clip_by_model(self) -> None:
        self.model.clip_grad_norm_(1e-3)
        self.optimizer.step()

    def clip_value(self) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)
        self.optimizer.step()

    def scale(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def unscale_and_clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.scale()

    def replace(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.grad * 0.5 if parameter.grad is not None else None
        self.optimizer.step()

    def drop(self) -> None:
        next(self.model.parameters()).grad = None
        self.optimizer.step()

    def schedule(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def clamp(self) -> None:
        self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    def past_autograd(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.5)
        self.optimizer.step()


AT_ONCE = [Loop.clip, Loop.clip_by_model, Loop.clip_value, Loop.scale, Loop.unscale_and_clip, Loop.replace, Loop.drop]
AT_ONCE.append(Loop.past_autograd)
AT_THE_END = [Loop.schedule, Loop.clamp]


def uneven(worker: Worker, what: Callable[[Loop], None], step: Callable[[Loop], Any], batches: int = 3) -> Any:
    """Train with one batch at rank 0, and several at rank 1. Return the weights and the learning rate."""
    model = DistributedDataParallel(Transformer(), worker, gradient_as_bucket_view=batches != 2)
    loop = Loop(model)
    with model.join(step(loop)):
        for number in range(batches if worker.rank else 1):
            loop.optimizer.zero_grad()
            loop.scaler.scale(loss_of(model, *tokens(number, 2))).backward()
            try:
                what(loop)
            except UsageError as error:
                raise UsageError(f"{error} (step {number})") from error
    return state_of(model.module), loop.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("what", AT_ONCE)
@pytest.mark.parametrize("step", [lambda loop: loop.optimizer, lambda _: None, lambda loop: [loop.optimizer]])
def test_join_with_an_optimizer_refuses_at_once_a_loop_that_changes_gradients(
    what: Callable[[Loop], None], step: Callable[[Loop], Any]
) -> None:
    with pytest.raises(UsageError, match=r"changes the averaged gradient of .* Give model.join a fun.*\(step 0\)"):
        on(2, uneven, what, step)


@pytest.mark.parametrize("what", AT_THE_END)
def test_join_with_an_optimizer_finds_at_its_end_what_else_the_loop_did(what: Callable[[Loop], None]) -> None:
    with pytest.raises(
        DivergedError, match=r"at the end of model.join\(\) the .* of 'worker-1' \(rank 1\) are not those"
    ):
        on(2, uneven, what, lambda loop: loop.optimizer)


def test_join_compares_learning_rates_even_if_weights_are_alike() -> None:
    with pytest.raises(DivergedError, match="the learning rates and other options of optimizers of 'worker-1'"):
        on(2, uneven, Loop.schedule, lambda loop: loop.optimizer, 2)


@pytest.mark.parametrize("what", [*AT_ONCE, *AT_THE_END])
def test_join_with_a_function_that_does_all_keeps_replicas_alike(what: Callable[[Loop], None]) -> None:
    (state, rate), (other, rate_there) = on(2, uneven, what, lambda loop: lambda: what(loop))
    assert same(state, other)
    assert rate == rate_there


def test_join_takes_no_flag_for_what_it_steps() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        with pytest.raises(TypeError, match=r"model.join takes .* not True"), model.join(True):  # type: ignore[arg-type]
            pass

    alone(work)


def test_ignored_parameters_may_differ_at_the_end_of_a_block() -> None:
    def work(worker: Worker) -> None:
        module: Any = Transformer()
        module.own = nn.Parameter(torch.full((2,), float(worker.rank)))
        module._ddp_params_and_buffers_to_ignore = ["own"]
        model = DistributedDataParallel(module, worker)
        with model.join(sgd(model)):
            pass

    on(2, work)


def test_join_takes_functions_and_several_steps() -> None:
    def work(worker: Worker) -> tuple[int, float]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        calls: list[int] = []
        with model.join([optimizer, scheduler.step, lambda: calls.append(1)]):
            for step in range(3 - 2 * worker.rank):
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
                scheduler.step()
        return len(calls), optimizer.param_groups[0]["lr"]

    assert on(2, work) == [(0, 0.1 / 8), (2, 0.1 / 8)]


def test_gradients_left_from_no_sync_count_in_one_more_exchange() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            if worker.rank == 0:
                with model.no_sync():
                    loss_of(model, *tokens(0, ROWS)).backward()
        return state_of(model.module)

    assert_like_one_process(on(2, work), reference(Transformer(), steps=1))


def test_worker_of_weight_zero_does_not_look_like_one_without_batches() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], int]:
        model = DistributedDataParallel(Transformer(), worker)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(1 + 2 * worker.rank):
                model.set_weight(step % 2)  # the first batch has no valid token anywhere
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                optimizer.step()
        return state_of(model.module), worker.round

    (state, rounds), (other, _) = on(2, work)
    assert same(state, other)
    assert rounds == 4


def test_join_passes_on_an_exception_at_once() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Transformer(), worker)
        with model.join(sgd(model)):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on(2, work)


# ── buffers, modes ───────────────────────────────────────────────────────────────────────────────────


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_those_of_the_lowest_rank_after_each_backward() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker)
        history = []
        for step in range(3):
            loss = loss_of(model, *images(10 * step + worker.rank, 4))
            mine = buffers(model.module)
            loss.backward()
            assert same(mine, buffers(model.module)) == (worker.rank == 0)
            history.append(buffers(model.module))
        return history

    for first, *others in zip(*on(3, work), strict=True):
        assert all(same(first, other) for other in others)


def test_buffers_are_those_of_the_lowest_rank_that_has_a_batch() -> None:
    def work(worker: Worker) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(), worker)
        optimizer = sgd(model)
        mine = {}
        with model.join(optimizer):
            for step in range(worker.rank):
                optimizer.zero_grad()
                loss = loss_of(model, *images(step, 4))
                mine = buffers(model.module)
                loss.backward()
                optimizer.step()
        return [mine, buffers(model.module)]

    (_, first), (of_rank_1, second) = on(2, work)
    assert same(first, second)
    assert same(second, of_rank_1)


def test_buffers_may_be_left_alone() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Convolutional()
        module.get_buffer("norm.running_mean").fill_(worker.rank)
        model = DistributedDataParallel(module, worker, broadcast_buffers=False)
        loss_of(model, *images(worker.rank, 4)).backward()
        return buffers(module)

    assert not same(*on(2, work))


def test_two_forwards_before_two_backwards() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Convolutional(), worker)
        losses = [loss_of(model, *images(step, 4)) for step in range(2)]
        for loss in losses:
            loss.backward()

    on(2, work)


def test_gradients_are_exchanged_in_eval_mode_as_in_training_mode() -> None:
    """Test fine-tuning with frozen statistics: the whole wrapper is in eval mode."""

    def work(worker: Worker) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker)
        optimizer = sgd(model)
        model.eval()
        before = buffers(model.module)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, *images(20 + step + worker.rank, 4)).backward()
            loss_of(model, *images(10 * step + worker.rank, 4)).backward()
            optimizer.step()
        assert same(before, buffers(model.module))
        with torch.no_grad():
            model(images(0, 4)[0])
        return worker.round, state_of(model.module), gradients(model.module)

    first, second = on(2, work)
    assert first[0] == second[0] == 3
    assert same(first[1], second[1])
    assert same(first[2], second[2])


def test_a_worker_in_eval_mode_and_one_in_training_mode_exchange() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        model = DistributedDataParallel(Transformer(), worker).train(worker.rank == 0)
        loss_of(model, *shard(worker.rank, 2, *tokens(0, ROWS))).backward()
        return gradients(model.module)

    assert same(*on(2, work))


def test_nothing_is_exchanged_in_eval_mode_if_that_is_said() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = DistributedDataParallel(Convolutional(worker.rank), worker, exchange_in_eval=False)
        model.eval()
        assert not model.module.training
        before = buffers(model.module)
        for _ in range(worker.rank + 1):
            model(images(worker.rank, 4)[0])
        assert same(before, buffers(model.module))
        loss_of(model, *images(worker.rank, 4)).backward()
        own = gradients(model.module)
        if worker.rank == 0:
            with model.no_sync():  # the others need not
                loss_of(model, *images(worker.rank, 4)).backward()
        assert worker.round == 0
        model.zero_grad()
        model.train()
        loss_of(model, *images(worker.rank, 4)).backward()
        assert worker.round == 1
        return own, gradients(model.module)

    (own, averaged), (own_there, averaged_there) = on(2, work)
    assert not same(own, own_there)
    assert same(averaged, averaged_there)


def test_workers_in_different_modes_are_told_so_at_once() -> None:
    def work(worker: Worker) -> str:
        model = DistributedDataParallel(Transformer(), worker, exchange_in_eval=False).train(worker.rank != 1)
        with pytest.raises(DisagreementError) as caught:
            loss_of(model, *tokens(0, 2)).backward()
        return str(caught.value)

    texts = on(3, work, timeout=1000.0)
    assert set(texts) == {
        "backward ran in training mode at 'worker-0' (rank 0), 'worker-2' (rank 2), and in eval mode at 'worker-1' "
        "(rank 1): with exchange_in_eval=False all workers must be in the same mode (a backward of one worker alone "
        "belongs in no_sync)"
    }


def test_uneven_batches_in_eval_mode_without_an_exchange() -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], int]:
        model = DistributedDataParallel(Transformer(), worker, exchange_in_eval=False)
        optimizer = sgd(model)
        with model.join(optimizer):
            for step in range(1 + 3 * worker.rank):
                model.train(step != 1)
                optimizer.zero_grad()
                loss_of(model, *tokens(step, 2)).backward()
                if model.training:
                    optimizer.step()
        return state_of(model.module), worker.round

    (state, rounds), (other, _) = on(2, work)
    assert same(state, other)
    assert rounds == 4, "three with gradients of rank 1, and the last, without any"


def test_module_wrapped_in_eval_mode_is_in_eval_mode() -> None:
    assert alone(lambda worker: DistributedDataParallel(Transformer().eval(), worker).training) is False


def test_autograd_grad_exchanges_nothing() -> None:
    def work(worker: Worker) -> int:
        model = DistributedDataParallel(Convolutional(), worker)
        inputs = images(0, 2)[0].requires_grad_()
        if worker.rank == 0:
            torch.autograd.grad(model(inputs).sum(), inputs)
        loss_of(model, *images(0, 2)).backward()
        return worker.round

    assert on(2, work) == [1, 1]
