"""Local SGD: the schedule, the outer optimizers, and groups that average parameters while members come and go."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gradserver import ConvergenceGuard, LocalCluster, LocalSGD
from gradserver.protocol.convergence import next_interval
from gradserver.protocol.errors import (
    InvalidArgumentError,
    NonFiniteError,
    OutOfStepError,
    PlanMismatchError,
    UsageError,
    WorkerLeftError,
)
from gradserver.worker.client import Worker
from gradserver.worker.local_sgd.outer import Nesterov
from gradserver.worker.local_sgd.pace import most_times
from gradserver.worker.local_sgd.schedule import Schedule
from gradserver.worker.pacing.stopwatch import WallClock
from tests.cluster import AMONG_MEMBERS, members, together, wait_until
from tests.models import Transformer, loss_of, tokens
from tests.replicas import distance, on, same
from tests.seeded import seeded

torch.set_num_threads(1)

EVERY = 4
STEPS = 18
"""Steps of a training: some are left over behind the last exchange."""
STREAMING = [{"fragments": 2}, {"fragments": 2, "delay": 2}, {"fragments": 4, "delay": 1, "mixing": 0.25}]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, member: int) -> None:
    optimizer.zero_grad()
    loss_of(model, *tokens(100 * step + member, 4)).backward()
    optimizer.step()


def train(worker: Worker, steps: Callable[[int], int] = lambda _: STEPS, **options: Any) -> dict[str, Tensor]:
    """Train on batches of this member's own. Return the group's weights."""
    module, member = Transformer(worker.rank), worker.rank
    optimizer = sgd(module)
    model = LocalSGD(module, worker, optimizer, **{"every": EVERY, **options})
    with model.join():
        for step in range(steps(member)):
            step_of(model, optimizer, step, member)
    assert all(
        torch.equal(one, other) for one, other in zip(model.weights().values(), module.parameters(), strict=True)
    )
    return {name: one.clone() for name, one in model.weights().items()}


def clustered(world: int, fn: Callable[[Worker], Any], **options: Any) -> list[Any]:
    """Return the results of ``fn(worker)`` on a cluster with ``options``."""
    with LocalCluster(world, timeout=10.0, **options) as cluster:
        return cluster.run(fn)


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, int]:
    every = draw(st.integers(1, 40))
    fragments = draw(st.integers(1, min(every, 9)))
    return every, fragments, draw(st.integers(0, every // fragments))


@given(schedules(), st.integers(1, 4))
def test_each_fragment_is_sent_once_in_an_interval_and_one_is_under_way(
    options: tuple[int, int, int], intervals: int
) -> None:
    every, fragments, delay = options
    schedule, sent, waits = Schedule(every, fragments, delay), Counter[int](), list[int]()
    begun = 0
    for step in range(1, every * intervals + 1):
        schedule.step()
        if schedule.takes:
            waits.append(step - begun)
            schedule.taken()
        if schedule.sends:
            assert schedule.fragment == sum(sent.values()) % fragments
            sent[schedule.fragment] += 1
            schedule.sent()
            begun = step
            if schedule.takes:
                waits.append(0)
                schedule.taken()
        assert not schedule.under_way or step - begun < max(delay, 1)
        if step % every == 0:
            assert set(sent.values()) == {step // every}
            assert len(sent) == fragments
    assert set(waits) <= {delay}
    assert schedule.round == fragments * intervals - schedule.under_way


def take_all(schedule: Schedule, needs: list[int]) -> list[int]:
    """Go through a round for each of ``needs``, the steps that its fragment is on its way. Return the delays."""
    delays = []
    for needed in needs:
        while not schedule.sends:
            schedule.step()
        schedule.sent()
        delays.append(schedule.delay)
        while not schedule.takes:
            schedule.step()
            if schedule.looks and schedule._steps >= needed:
                schedule.arrived()
        late = max(needed - 0.5 - schedule._steps, 0.0)  # it comes in the middle of a step
        schedule.taken(late / schedule._steps)
    return [*delays, schedule.delay]


def test_a_measured_delay_is_that_of_the_slowest_fragment_of_an_interval() -> None:
    schedule = Schedule(20, 2, "auto")
    assert take_all(schedule, [3, 4, 3, 6, 1, 1, 1]) == [10, 10, 4, 4, 6, 6, 1, 1]
    assert take_all(schedule, [5, 1, 1, 1, 40]) == [1, 5, 5, 1, 1, 10]


def test_a_measured_delay_stays_within_the_interval() -> None:
    schedule = Schedule(20, 2, "auto")
    schedule.set_every(8)
    assert schedule.delay == 4
    schedule.set_every(40)
    assert take_all(schedule, [15, 15, 15]) == [4, 15, 15, 15]


def test_a_fragment_that_is_taken_before_its_time_says_nothing_of_delays() -> None:
    schedule = Schedule(20, 2, "auto")
    schedule.sent()
    schedule.taken(5.0)
    assert schedule.delay == 10


def test_members_with_measured_delays_are_alike() -> None:
    def work(worker: Worker) -> tuple[int, dict[str, Tensor]]:
        module, member = Transformer(worker.rank), worker.rank
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=8, fragments=2, delay="auto")
        assert model.delay == 4
        averaging = model._averaging
        with model.join():
            for step in range(8 * 2):
                step_of(model, optimizer, step, member)
                if model._schedule.under_way:  # it is there before the next step
                    way = averaging._ways[model._schedule.fragment]
                    wait_until(partial(getattr, way, "is_there"), "a fragment has arrived")
        return model.delay, {name: one.clone() for name, one in model.weights().items()}

    (first, weights), (second, others) = on(2, work)
    assert (first, second) == (1, 1)
    assert same(weights, others)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((0,), "every must be at least 1, not 0"),
        ((2.5,), "every must be an integer, not 2.5"),
        ((4, 5), "every=4 steps are too few for 5 fragments"),
        ((8, 2, 5), "a fragment must arrive before the next one is sent, which is after 4 of every=8 steps"),
        ((8, True), "fragments must be an integer, not True"),
    ],
)
def test_a_schedule_that_is_not_possible(options: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Schedule(*options)
    schedule = Schedule(8, *options[1:]) if options[1:] in ((), (5,)) else Schedule(8)
    with pytest.raises(InvalidArgumentError):
        schedule.set_every(0 if schedule.fragments == 1 else 4)
    assert (schedule.every, schedule.sends) == (8, False), "an interval that is refused changes nothing"


def test_the_outer_optimizer_is_sgd_with_nesterovs_momentum() -> None:
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 1001)) for _ in range(2))
    mine = Nesterov([ours])
    reference = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(20):
        gradient = torch.randn(1001, generator=generator) / 100
        ours.grad, theirs.grad = gradient, gradient.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    # Each operation rounds once, so another processor comes to the same bits: here plain float32 of numpy.
    weight, velocity, gradient = torch.tensor([0.3]), torch.tensor([0.17]), torch.tensor([0.011])
    one = nn.Parameter(weight.clone())
    optimizer = Nesterov([one])
    optimizer.state[one]["momentum_buffer"] = velocity.clone()
    one.grad = gradient
    optimizer.step()
    w, v, g = (array.numpy() for array in (weight, velocity, gradient))
    m, r = w.dtype.type(0.9), w.dtype.type(0.7)
    v = v * m + g
    assert one.detach().numpy() == w - (v * m + g) * r


def test_the_guard_holds_when_changes_rise_and_are_large() -> None:
    for changes, holds in (
        ((0.02, 0.04, 0.08), True),
        ((0.02, 0.04, 0.05), False),  # not above 0.05
        ((0.2, 0.02, 0.04, 0.08), True),
        ((0.08, 0.09), False),  # too few
        ((0.06, 0.06, 0.08), False),
        ((0.9, 0.02, 0.04, 0.08, 0.07, 0.06), False),
    ):
        guard = ConvergenceGuard()
        for change in changes:
            guard.record(change)
        assert guard.holds is holds, changes
    assert list(ConvergenceGuard([0.1] * 7).changes) == [0.1] * 5
    with pytest.raises(InvalidArgumentError, match="must be at least 0"):
        ConvergenceGuard().record(-1.0)


def test_the_interval_grows_and_shrinks_by_the_overhead_and_not_past_the_guard() -> None:
    free, held = ConvergenceGuard(), ConvergenceGuard([0.1, 0.2, 0.3])
    for every, overhead, guard, then in (
        (16, 0.30, free, 48),
        (16, 0.11, free, 18),
        (16, 0.90, free, 100),
        (16, 0.30, held, 16),
        (16, 0.10, free, 16),
        (20, 0.04, free, 19),
        (20, 0.04, held, 19),
        (16, 0.04, free, 16),
    ):
        assert next_interval(every, overhead, 16, 100, guard) == then


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def by_hand(world: int, outer: str, steps: int) -> dict[str, Tensor]:
    """Train as local SGD does, in one process: DiLoCo's algorithm 1, and plain averages of what is left at the end."""
    group = Transformer(0)
    replicas = [copy.deepcopy(group) for _ in range(world)]
    inner = [sgd(replica) for replica in replicas]
    plain = torch.optim.SGD(group.parameters(), lr=1.0)
    optimizer = plain
    if outer == "nesterov":
        optimizer = torch.optim.SGD(group.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        for member, replica in enumerate(replicas):
            step_of(replica, inner[member], step, member)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            for weight, *own in zip(group.parameters(), *(one.parameters() for one in replicas), strict=True):
                weight.grad = torch.stack([weight.detach() - one.detach() for one in own]).mean(0)
            (optimizer if (step + 1) % EVERY == 0 else plain).step()
            with torch.no_grad():
                for replica in replicas:
                    for one, weight in zip(replica.parameters(), group.parameters(), strict=True):
                        one.copy_(weight)
    return {name: one.detach() for name, one in group.named_parameters()}


@pytest.mark.parametrize("outer", ["nesterov", "average"])
@pytest.mark.parametrize("steps", [16, STEPS])
def test_a_group_trains_as_one_process_that_does_the_same(outer: str, steps: int) -> None:
    found = on(3, train, lambda _: steps, outer=outer)
    assert all(same(found[0], other) for other in found)
    assert distance(found[0], by_hand(3, outer, steps)) < 1e-5


@pytest.mark.parametrize("options", STREAMING)
def test_fragments_that_stream_leave_the_same_weights_at_all_members(options: dict[str, Any]) -> None:
    found = on(3, train, **options)
    assert all(same(found[0], other) for other in found)
    assert distance(found[0], by_hand(3, "nesterov", STEPS)) < 0.5


def test_a_worker_without_a_step_leaves_the_weights_of_rank_0() -> None:
    found = on(2, train, lambda _: 0, fragments=4)
    assert all(same(one, {name: one.detach() for name, one in Transformer().named_parameters()}) for one in found)


def test_workers_with_unequal_numbers_of_steps_and_intervals_weigh_by_steps() -> None:
    def moves(worker: Worker) -> list[float]:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        model = LocalSGD(module, worker, every=2 if worker.rank else 6, outer="average")
        seen = []
        for _ in range(2):
            for _ in range(model.every):
                with torch.no_grad():
                    module.weight += 1.0 + worker.rank
                model.step()
            seen.append(module.weight.item())
        model.set_weight(3.0)
        model.every = 1
        with torch.no_grad():
            module.weight += 1.0 - worker.rank
        model.step()
        return [*seen, module.weight.item()]

    first, second = on(2, moves)
    assert first == second
    assert first == pytest.approx([(6 * 6 + 4 * 2) / 8, 2 * (6 * 6 + 4 * 2) / 8, 11 + 0.5])


# ── unequal workers ───────────────────────────────────────────────────────────────────────────────────


def regress(
    worker: Worker, slowness: float, intervals: int, fragments: int = 1, **options: Any
) -> tuple[dict[str, Tensor], float, list[int]]:
    """Fit a line for so many intervals. Return the group's weights, their loss, and this worker's steps in each.

    Steps take time by a clock of their own, and exchanges take none.
    """
    now = 0.0
    module = nn.Linear(8, 1)
    torch.nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = LocalSGD(module, worker, optimizer, every=4, outer="average", fragments=fragments, **options)
    model.set_weight(4.0)
    if (pace := model._averaging._pace) is not None:
        pace._pacing._watch = WallClock(lambda: 0.0, lambda: now)
    noise, steps = torch.Generator().manual_seed(worker.rank), list[int]()
    while model.round < intervals * fragments:
        if model.round % fragments == 0 and len(steps) <= model.round // fragments:
            steps.append(model.steps)
        inputs = torch.randn(4, 8, generator=noise)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        now += slowness
        optimizer.step()
    test = torch.randn(256, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad(), model.group_weights():
        loss = float((module(test) - test.sum(1, keepdim=True)).square().mean())
    return {name: one.clone() for name, one in model.weights().items()}, loss, steps


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}, {"max_every": 8}], ids=str)
def test_a_fast_worker_makes_more_steps_and_the_loss_is_that_of_equal_workers(options: dict[str, Any]) -> None:
    def slowed(worker: Worker, times: float, **options: Any) -> tuple[dict[str, Tensor], float, list[int]]:
        return regress(worker, times if worker.rank else 1.0, round(40 / times) + 10, **options)

    (weights, loss, fast), (others, _, slow) = clustered(2, lambda worker: slowed(worker, 3.0, balance=True, **options))
    (_, expected, _), _ = clustered(2, lambda worker: slowed(worker, 1.0, **options))
    assert same(weights, others)
    assert fast[0] == slow[0] == 4
    assert set(slow) <= ({4} if "max_every" not in options else set(range(4, 9))), "the slower one makes `every`"
    assert [mine / other for mine, other in zip(fast, slow, strict=True)][2:] == [3.0] * (len(slow) - 2)
    assert loss < 0.05
    assert expected < 0.05


def test_the_limit_of_a_balance_and_a_worker_that_is_alone() -> None:
    assert [most_times(one) for one in (False, True, 1, 2.5)] == [None, 4.0, 1.0, 2.5]
    for wrong in (0.5, math.inf, math.nan, "4"):
        with pytest.raises(InvalidArgumentError, match="balance is True, or the most times"):
            most_times(wrong)  # type: ignore[arg-type]
    (_, _, fast), (_, _, slow) = clustered(
        2, lambda worker: regress(worker, 3.0 if worker.rank else 1.0, 6, balance=1.5)
    )
    assert max(fast) == 6
    assert set(slow) == {4}
    ((_, _, steps),) = clustered(1, lambda worker: regress(worker, 1.0, 3, balance=True))
    assert set(steps) == {4}


@pytest.mark.parametrize("options", [{}, *STREAMING])
def test_a_worker_that_runs_out_of_batches_takes_part_until_all_have(options: dict[str, Any]) -> None:
    found = on(3, train, lambda member: (STEPS, 5, 0)[member], **options)
    assert all(same(found[0], other) for other in found)


DEATHS_SOON = (3, 0), (9, 1), (10, 2), (9, 3)
"""Steps of deaths, each with the number of a schedule, so that each step and each schedule is tried soon."""


@pytest.mark.parametrize(
    ("step", "options"),
    [
        pytest.param(step, options, marks=() if (step, number) in DEATHS_SOON else pytest.mark.long)
        for step in (3, 9, 10)
        for number, options in enumerate(({}, *STREAMING))
    ],
)
def test_the_others_go_on_when_a_worker_dies(step: int, options: dict[str, Any]) -> None:
    """Test each step and each schedule. The long tests have all pairs of them."""
    with LocalCluster(3, elastic=(1, 3), timeout=10.0) as cluster:

        def work(worker: Worker) -> tuple[dict[str, Tensor], int]:
            module, member = Transformer(), worker.rank
            optimizer = sgd(module)
            model = LocalSGD(module, worker, optimizer, every=EVERY, **options)
            with model.join():
                for number in range(STEPS):
                    if member == 1 and number == step:
                        cluster.kill(1)
                    step_of(model, optimizer, number, member)
            return {name: one.clone() for name, one in model.weights().items()}, worker.world_size

        first, dead, last = cluster.run(work)
    assert dead is None
    assert same(first[0], last[0])
    assert first[1] == last[1] == 2


@pytest.mark.parametrize("wire", ["bf16", "int8", "topk:0.1"])
def test_changes_travel_with_a_loss_and_members_stay_alike(wire: str) -> None:
    def work(worker: Worker) -> tuple[dict[str, Tensor], list[str]]:
        module = copy.deepcopy(modules[worker.rank])
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=2, outer="average", fragments=2, delay=1)
        with model.join():
            for step in range(8):
                inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + worker.rank))
                optimizer.zero_grad()
                ((model(inputs) - inputs) ** 2).mean().backward()
                optimizer.step()
        codecs = [bucket.codec.name for plan in model.plans for bucket in plan.buckets if bucket.codec is not None]
        return {name: one.clone() for name, one in model.weights().items()}, codecs

    modules = [nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64)) for _ in range(2)]
    lossy, exact = clustered(2, work, wire=wire), on(2, work)
    assert same(lossy[0][0], lossy[1][0])
    assert {name.split(":")[0] for name in lossy[0][1]} == {wire.split(":")[0]}
    assert not exact[0][1]
    assert 0 < distance(lossy[0][0], exact[0][0]) < 0.2


def test_narrow_tied_and_frozen_parameters_and_running_statistics() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.frozen = nn.Linear(8, 8)
            self.frozen.requires_grad_(False)
            self.norm = nn.BatchNorm1d(8)
            self.second = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            mixed = self.norm(self.frozen(self.first(inputs.bfloat16()).float()))
            out: Tensor = self.second(mixed.bfloat16()).float()
            return out

    def work(worker: Worker) -> tuple[dict[str, Tensor], list[torch.dtype], dict[str, Tensor]]:
        module = modules[worker.rank]
        optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)
        model = LocalSGD(module, worker, optimizer, every=3, fragments=2)
        for step in range(6):
            optimizer.zero_grad()
            model(
                torch.randn(8, 8, generator=torch.Generator().manual_seed(step + worker.rank))
            ).square().mean().backward()
            optimizer.step()
        model.sync()
        wide = [part.dtype for part in model.outer.param_groups[0]["params"]]
        return {k: v.clone() for k, v in model.state_dict().items()}, wide, model.outer_state()["wide"]

    modules = [Tied(), Tied()]
    (first, wide, kept), (second, *_) = on(2, work)
    assert same(first, second)
    assert first["module.norm.num_batches_tracked"].item() == 6
    assert set(wide) == {torch.float32}
    assert len(wide) == 5
    assert kept.keys() == {"first.weight", "first.bias", "second.bias"}


def test_the_interval_grows_while_exchanges_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.worker.local_sgd.averaging.Averaging._rest", lambda _: 0.8)

    def intervals(worker: Worker) -> list[int]:
        module = Transformer()
        optimizer, seen = sgd(module), list[int]()
        model = LocalSGD(module, worker, optimizer, every=2, max_every=7, outer="average")
        model.on_boundary(lambda: seen.append(model.every))
        for step in range(2 + 4 + 7):
            step_of(model, optimizer, step, worker.rank)
        assert not model.guard_holds
        return seen

    assert on(2, intervals) == [[4, 7, 7]] * 2


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


def test_changes_that_are_not_finite_are_skipped_and_the_worker_goes_on_from_the_groups_weights() -> None:
    def work(worker: Worker) -> dict[str, Tensor]:
        module = Transformer()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        model = LocalSGD(module, worker, optimizer, every=2)
        for step in range(6):
            step_of(model, optimizer, step, worker.rank)
            if step == 2 and worker.rank == 1:
                with torch.no_grad():
                    module.position.fill_(torch.nan)
        model.sync()
        return {name: one.clone() for name, one in model.weights().items()}

    first, second = clustered(2, work, nonfinite="skip")
    assert same(first, second)
    assert all(bool(one.isfinite().all()) for one in first.values())


def test_an_exchange_that_failed_is_named_and_the_next_step_says_so() -> None:
    def work(worker: Worker) -> None:
        module = Transformer()
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=1)
        if worker.rank == 1:
            with torch.no_grad():
                module.position.fill_(torch.inf)
        with pytest.raises(NonFiniteError, match="position"):
            step_of(model, optimizer, 0, worker.rank)
        with pytest.raises(OutOfStepError, match="an exchange failed"):
            model.step()

    on(2, work)


def test_what_is_not_possible() -> None:
    def work(worker: Worker) -> None:
        module = nn.Linear(2, 2)
        for options, text in (
            ({"outer": "adam"}, "outer is 'adam', and must be one of 'average', 'nesterov'"),
            ({"outer": lambda _: 3}, "outer has made a int"),
            ({"outer": sgd(module)}, "outer is a SGD, and must be a function that makes an optimizer"),
            ({"fragments": 3}, "the module has 2 parameters that are trained: give at most 2"),
            ({"mixing": 1.0}, "mixing is 1.0, and must be a number from 0 to below 1"),
            ({"mixing": "half"}, "mixing is 'half', and must be a number"),
            ({"max_every": 2}, "max_every=2 is below every=16, the interval to begin with: give at least 16"),
            ({"max_every": "2"}, "max_every must be an integer, not '2'"),
            ({"wire": "int8"}, "wire is 'int8', and must have a format for each bucket"),
            ({"wire": {"fragment.1": "int8"}}, "the buckets are fragment.0"),
            ({"optimizer": sgd(nn.Linear(1, 1))}, "steps no parameter of the module"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                LocalSGD(module, worker, **options)
        with pytest.raises(TypeError, match="optimizer is the class SGD, and must be a torch.optim.Optimizer"):
            LocalSGD(module, worker, torch.optim.SGD)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"there is no worker .*model = gradserver.LocalSGD\(module, worker, opt"):
            LocalSGD(module)
        with pytest.raises(InvalidArgumentError, match="module is a LocalSGD, which a worker exchanges already: wrap"):
            LocalSGD(LocalSGD(module, worker), worker)

    on(1, work)

    for unlike in ({"fragments": 2}, {"outer": lambda weights: Nesterov(weights, lr=0.5)}):

        def differ(worker: Worker, unlike: dict[str, Any] = unlike) -> str:
            with pytest.raises((PlanMismatchError, WorkerLeftError)) as raised:
                LocalSGD(Transformer(), worker, **unlike if worker.rank else {})
            return str(raised.value)

        assert any("fragment.0" in text or "outer Nesterov(lr=0.5" in text for text in on(2, differ))


def test_rounds_that_do_not_wait_for_all_are_refused() -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(UsageError, match="LocalSGD needs a group of mode 'sync'.*has mode 'async'"):
            LocalSGD(Transformer(), worker)

    clustered(2, work, mode="async")


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_has_a_module_of_its_own_and_averages_nothing() -> None:
    def work(worker: Worker) -> None:
        model = LocalSGD(Transformer(), worker, every=1)
        inputs, _ = tokens(0, 4)
        copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), AveragedModel(model).module)
        for other in copies:
            assert type(other) is LocalSGD
            assert same(other.state_dict(), model.state_dict()), "with the same keys"
            assert torch.equal(other(inputs), model(inputs))
            other.load_state_dict({name: 0 * one for name, one in model.state_dict().items()})
            assert not any(one.any() for one in other.state_dict().values())
            with pytest.raises(AttributeError, match="this is a copy of a wrapped module, which exchanges nothing"):
                other.step()
            assert not hasattr(other, "worker")
        assert all(one.any() for one in model.state_dict().values())

    on(1, work)


def test_the_groups_weights_can_be_evaluated_saved_and_loaded() -> None:
    def work(worker: Worker) -> None:
        module = Transformer()
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=EVERY, fragments=2)
        for step in range(7):
            step_of(model, optimizer, step, worker.rank)
        own = {name: one.detach().clone() for name, one in module.named_parameters()}
        group = {name: one.clone() for name, one in model.weights().items()}
        assert not same(own, group)
        with model.group_weights():
            assert same(group, {name: one.detach() for name, one in module.named_parameters()})
        assert same(own, {name: one.detach() for name, one in module.named_parameters()})
        saved, outer = copy.deepcopy(model.state_dict(unwrapped=True)), copy.deepcopy(model.outer_state())
        again = LocalSGD(Transformer(3), worker, every=EVERY, fragments=2)
        again.load_state_dict(saved)
        again.load_outer_state(outer)
        assert same(group, again.weights())
        assert again.round == model.round == 3
        buffers = [one["momentum_buffer"] for one in again.outer.state.values()]
        kept = [one["momentum_buffer"] for one in model.outer.state.values()]
        assert all(torch.equal(one, other) for one, other in zip(buffers, kept, strict=True))

    on(2, work)


def test_a_straggler_gives_its_changes_later_and_members_stay_alike() -> None:
    late = threading.Event()

    def work(worker: Worker) -> dict[str, Tensor]:
        module, member = Transformer(), worker.rank
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=2, fragments=2)
        with model.join():
            for step in range(12):
                if member == 2 and step == 4:
                    assert late.wait(20.0)  # until the others have done a round without it
                step_of(model, optimizer, step, member)
                if member == 0 and step == 6:
                    late.set()
        return {name: one.clone() for name, one in model.weights().items()}

    found = clustered(3, work, quorum=2, grace=0.01)
    assert all(same(found[0], other) for other in found)


@pytest.mark.parametrize("channel", ["shm", "tcp", *AMONG_MEMBERS])
def test_every_way_of_gradients_leads_to_the_same_bits(channel: str) -> None:
    options: dict[str, Any] = {"fragments": 4, "delay": 1}
    with members(channel, 2) as workers:
        found = together(workers, lambda worker: train(worker, **options))
    expected = on(2, train, **options)
    assert all(same(expected[0], one) for one in found)


@pytest.mark.gpu
def test_modules_on_a_device_stay_alike_and_near_to_those_on_the_cpu() -> None:
    def work(worker: Worker, device: str) -> dict[str, Tensor]:
        module, member = Transformer().to(device), worker.rank
        optimizer = sgd(module)
        model = LocalSGD(module, worker, optimizer, every=EVERY, fragments=2, delay=1)
        with model.join():
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *(one.to(device) for one in tokens(100 * step + member, 4))).backward()
                optimizer.step()
        return {name: one.cpu().clone() for name, one in model.weights().items()}

    found, expected = on(2, work, "cuda"), on(2, work, "cpu")
    assert same(*found)
    assert distance(found[0], expected[0]) < 1e-3


# ── buffers ───────────────────────────────────────────────────────────────────────────────────────────


class Attending(nn.Module):
    """A module with a causal mask, which has -Inf and never changes, beside running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.linear(inputs)) + self.mask[0], -1)


def attend(worker: Worker, /, steps: int, spoil: Callable[[Attending], object] = lambda _: None, **options: Any) -> Any:
    module = seeded(0, Attending)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    model = LocalSGD(module, worker, optimizer, every=2, **options)
    with model.join():
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + worker.rank)
            model(torch.randn(6, 4, generator=generator) + worker.rank).square().sum().backward()
            if worker.rank == 1 and step == 2:
                spoil(module)
            optimizer.step()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("nonfinite", ["halt", "leave-out", "skip", "propagate"])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}, {"wire": {"buffers": "bf16"}}])
def test_a_constant_mask_with_infinities_is_left_alone_and_statistics_are_averaged(
    options: dict[str, Any], nonfinite: Any
) -> None:
    with LocalCluster(2, nonfinite=nonfinite) as cluster:
        one, other = cluster.run(attend, 6, **options)
        exact, _ = cluster.run(attend, 6, average_buffers=False)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert torch.equal(one["mask"], mask)
    assert torch.equal(other["mask"], mask)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(one[name], other[name])
    assert not torch.equal(one["norm.running_mean"], exact["norm.running_mean"])


def test_statistics_are_the_mean_of_all_workers_after_the_first_exchange() -> None:
    averaged = on(2, attend, 2)
    own = on(2, attend, 2, average_buffers=False)
    for name in ("norm.running_mean", "norm.running_var"):
        expected = (own[0][name] + own[1][name]) / 2
        torch.testing.assert_close(averaged[0][name], expected)
        assert torch.equal(averaged[0][name], averaged[1][name])


def test_a_constant_table_does_not_travel() -> None:
    class Tabled(nn.Module):
        def __init__(self, numel: int) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("table", torch.randn(numel))

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.norm(self.linear(inputs))
            return result

    def spent(numel: int) -> int:
        def work(worker: Worker) -> None:
            module = Tabled(numel)
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            model = LocalSGD(module, worker, optimizer, every=1)
            for step in range(4):
                worker.barrier()
                if worker.rank == 0 and step in (0, 3):
                    marks.append(cluster.snapshot()["groups"])
                worker.barrier()
                model(torch.randn(6, 4)).sum().backward()
                optimizer.step()

        marks = list[Any]()
        with LocalCluster(2) as cluster:
            cluster.run(work)
        first, last = ((one.values() if isinstance(one, dict) else one) for one in marks)
        return sum(int(group["bytes_in"]) for group in last) - sum(int(group["bytes_in"]) for group in first)

    assert 0 < spent(1 << 18) <= spent(1)


@pytest.mark.parametrize("nonfinite", ["halt", "skip"])
def test_a_buffer_that_becomes_infinite_is_called_a_buffer_with_the_options_that_fit(
    nonfinite: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(module: Attending) -> None:
        module.mask[3, 0] = -math.inf
        module.mask[3, 1] = math.inf

    with LocalCluster(2, nonfinite=nonfinite) as cluster:
        if nonfinite == "halt":
            with pytest.raises(NonFiniteError) as found:
                cluster.run(attend, 6, spoil)
            texts = [found.value.message]
            assert (found.value.rank, found.value.parameter) == (1, "mask")
        else:
            cluster.run(attend, 6, spoil)
            texts = [record.getMessage() for record in caplog.records if "NaN or Inf" in record.getMessage()]
    assert texts
    assert "in buffer 'mask'" in texts[0]
    assert "buffers_to_ignore=['mask'], and average_buffers=False" in texts[0]
    assert "learning rate" not in texts[0]


def test_a_worker_that_joins_has_the_group_s_buffers_between_two_exchanges() -> None:
    def work(worker: Worker) -> tuple[Any, ...]:
        module = Attending()
        model = LocalSGD(module, worker, every=4)
        buffers = model._averaging._fragments[-1].buffers
        with torch.no_grad():
            module.get_buffer("norm.running_mean").add_(1.0 + worker.rank)  # since the last exchange
            module.mask[0, 0] = float(worker.rank)
        state = model.outer_state()
        buffers.begin()
        model.load_outer_state(state)
        group = buffers._group
        return group["norm.running_mean"].tolist(), group["mask"][0, 0].item(), module.mask[0, 0].item()

    assert on(2, work) == [([0.0] * 4, 0.0, 0.0), ([0.0] * 4, 0.0, 1.0)]
