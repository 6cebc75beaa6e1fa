"""Norms of averaged gradients, which come with results, and clipping by them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import gradserver
from gradserver import DistributedDataParallel, GradientExchange, LocalCluster
from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.policy import OnNonFinite
from gradserver.protocol.dtypes import FLOAT32, DType, dtype_of
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, operation_of
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.messages import Push
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.shards import Table
from gradserver.reducer import reduce
from gradserver.squares import _by_matmul, dots, joined as added, products, squares
from gradserver.worker.client import Worker
from gradserver.worker.norms import clip_factor, norm_of
from gradserver.worker.planes.communicator import Communicator
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import Daemon, coordinator, joined, members, together, wait_until
from tests.examples import examples
from tests.replicas import on
from tests.seeded import seeded

torch.set_num_threads(1)
KEY = ExchangeKey(0, 0, 0)
Floats = np.ndarray[Any, np.dtype[Any]]


def measured(rows: list[Floats], cuts: list[int], dtype: DType = FLOAT32, **more: Any) -> tuple[list[float], Floats]:
    """Reduce a bucket that is cut at these elements. Return the squares of all slices, and the mean."""
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, dtype, rows[0].size)
    found, parts = [], []
    for start, stop in pairwise(cuts):
        told: list[float] = []
        given = [Contribution(rank, 1.0 + rank, row[start:stop].data) for rank, row in enumerate(rows)]
        nbytes = (stop - start) * dtype.itemsize
        command = Reduce("g", 1, KEY, 0, operation, start, nbytes, stop - start, None, given, (), True, squares=told)
        outcome = reduce(command._replace(**more))
        assert isinstance(outcome, memoryview)
        found += told
        parts.append(np.frombuffer(outcome, rows[0].dtype))
    return found, np.concatenate(parts)


def exactly(values: Floats) -> float:
    return math.sqrt(math.fsum((np.abs(values).astype(np.float64) ** 2).tolist()))


scales = st.sampled_from([0.0, 1e-30, 1e-18, 1e-3, 1.0, 1e10, 1e18])


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.integers(1, 3000), st.integers(1, 3), scales, st.integers(0, 2**32))
def test_the_norm_is_exact_and_does_not_depend_on_how_a_bucket_is_cut(
    data: st.DataObject, numel: int, world: int, scale: float, seed: int
) -> None:
    noise = np.random.default_rng(seed)
    spread = np.exp2(noise.integers(-30, 10, numel)) if data.draw(st.booleans()) else 1.0
    rows = [(noise.standard_normal(numel) * scale * spread).astype(np.float32) for _ in range(world)]
    places = data.draw(st.sets(st.integers(1, max(numel // 256, 1)), max_size=6))
    cuts = [0, *sorted(256 * place for place in places if 256 * place < numel), numel]
    whole, mean = measured(rows, [0, numel])
    parts, same = measured(rows, cuts)
    assert same.tobytes() == mean.tobytes()
    assert norm_of(parts) == norm_of(whole)
    assert norm_of(whole) == pytest.approx(exactly(mean), rel=1e-6, abs=1e-43)


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "complex64"])
def test_the_norm_is_that_of_what_is_stored(name: str) -> None:
    dtype = dtype_of(name)
    noise = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3), dtype=getattr(torch, dtype.name))
    rows = [row.view(torch.uint8).numpy() for row in noise]
    told: list[float] = []
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, dtype, 5000)
    given = [Contribution(rank, 1.0, row.data) for rank, row in enumerate(rows)]
    command = Reduce("g", 1, KEY, 0, operation, 0, rows[0].size, 5000, None, given, (), True, squares=told)
    outcome = reduce(command)
    assert isinstance(outcome, memoryview)
    stored = torch.frombuffer(bytearray(outcome), dtype=noise.dtype)
    wide = stored.to(torch.complex128 if stored.is_complex() else torch.float64)
    assert norm_of(told) == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-6)


def test_a_run_of_slices_has_the_squares_of_each() -> None:
    step, noise = SLICE_BYTES // 4, np.random.default_rng(1)
    rows = [noise.standard_normal(3 * step + 1000, np.float32) for _ in range(2)]
    each, _ = measured(rows, [0, step, 2 * step, 3 * step, 3 * step + 1000])
    assert measured(rows, [0, 3 * step + 1000])[0] == each
    spans = [(0, step), (step, 2 * step), (2 * step, 3 * step), (3 * step, 3 * step + 1000)]
    sieved, _ = measured(rows, [0, 3 * step + 1000], spans=spans, nonfinite=OnNonFinite.LEAVE_OUT)
    assert len(sieved) == 8
    assert norm_of(sieved) == norm_of(each)


def test_a_slice_that_leaves_out_a_contribution_has_the_norm_of_the_others() -> None:
    rows = [np.full(1000, value, np.float32) for value in (3.0, 7.0)]
    rows[0][17] = np.nan
    found, _ = measured(rows, [0, 1000], spans=[(0, 1000)], nonfinite=OnNonFinite.PROPAGATE)
    assert math.isnan(norm_of(found))
    told: list[float] = []
    given = [Contribution(rank, 1.0, row.data) for rank, row in enumerate(rows)]
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 1000)
    policy: dict[str, Any] = {"nonfinite": OnNonFinite.LEAVE_OUT, "spans": [(0, 1000)], "squares": told}
    reduce(Reduce("g", 1, KEY, 0, operation, 0, 4000, 1000, None, given, (), True)._replace(**policy))
    assert norm_of(told) == pytest.approx(7.0 * math.sqrt(1000))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sum_of_what_is_not_finite_is_not_finite(value: float) -> None:
    values = np.ones(1000, np.float32)
    values[999] = value
    with np.errstate(all="ignore"):
        assert not math.isfinite(squares(values)[0])


def test_squares_that_float32_cannot_hold() -> None:
    values = np.full(131_072, 1e30, np.float32)
    with np.errstate(all="ignore"):
        assert norm_of(squares(values)) == pytest.approx(exactly(values), rel=1e-12)


def test_sums_of_float64_that_overflow_are_infinite() -> None:
    values = np.full(131_072, 1e152)
    assert squares(values[:4096])[0] == pytest.approx(4096e304, rel=1e-12)
    with np.errstate(over="ignore"):
        assert squares(values)[0] == math.inf
    assert added([1e308, 1e308]) == (math.inf, 0.0)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.integers(1, 3000), scales, scales, st.integers(0, 2**32))
def test_an_inner_product_is_exact_and_does_not_depend_on_how_arrays_are_cut(
    data: st.DataObject, numel: int, of_left: float, of_right: float, seed: int
) -> None:
    noise = np.random.default_rng(seed)
    left, right = ((noise.standard_normal(numel) * scale).astype(np.float32) for scale in (of_left, of_right))
    left[data.draw(st.integers(0, numel)) :] = 0.0
    places = data.draw(st.sets(st.integers(1, max(numel // 256, 1)), max_size=6))
    cuts = [0, *sorted(256 * place for place in places if 256 * place < numel), numel]
    whole, _ = products(left, right)
    parts = [number for start, stop in pairwise(cuts) for number in products(left[start:stop], right[start:stop])]
    assert added(parts)[0] == whole
    terms = (left.astype(np.float64) * right.astype(np.float64)).tolist()
    assert whole == pytest.approx(math.fsum(terms), abs=1e-6 * math.fsum(map(abs, terms)) + 1e-43)


def test_rows_have_the_same_sums_with_every_numpy() -> None:
    left, right = np.random.default_rng(4).standard_normal((2, 512, 256), np.float32)
    assert dots(left, right).tobytes() == _by_matmul(left, right).tobytes()


# ── at workers ────────────────────────────────────────────────────────────────────────────────────────


SIZES = (300_000, 1000, 77)


def exchanged(worker: Worker, rounds: int = 2) -> list[tuple[float, ...]]:
    """Return the norm of each bucket of each round, having compared it with the bucket."""
    worker.agree(simple_plan([(f"b{part}", size) for part, size in enumerate(SIZES)], FLOAT32))
    noise, found = np.random.default_rng(worker.rank), []
    for _ in range(rounds):
        data = [noise.standard_normal(size, np.float32) for size in SIZES]
        handles = [worker.push(part, values, weight=1.0 + worker.rank) for part, values in enumerate(data)]
        worker.finish_round()
        norms = [norm_of(number for pair in handle.squares.values() for number in pair) for handle in handles]
        for norm, mean in zip(norms, data, strict=True):
            assert norm == pytest.approx(exactly(mean), rel=1e-6)
        found.append(tuple(norms))
    return found


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8", "topk:0.05", "randomk:0.05"])
def test_every_wire_has_the_norm_of_what_members_apply(wire: str) -> None:
    with LocalCluster(3, timeout=20.0, wire=wire) as cluster:
        found = cluster.run(exchanged)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_every_channel_has_the_same_norm(channel: str) -> None:
    with LocalCluster(2, timeout=20.0) as cluster:
        expected = cluster.run(exchanged)
    with coordinator({"default": 2}) as server, joined(server.url, 2, channel=channel) as workers:
        assert together(workers, exchanged) == expected


@pytest.mark.parametrize("rates", [(1.0, 1.0), (3.0, 0.5, 1.0)])
def test_the_cuts_of_data_shards_change_no_bit_of_the_norm(rates: tuple[float, ...]) -> None:
    table, plan = Table(2, rates), simple_plan([("b0", 300_000)], FLOAT32)
    table.set_plan(plan)
    noise = np.random.default_rng(5)
    rows = [noise.standard_normal(300_000, np.float32) for _ in range(2)]
    layout, _ = table.share(KEY, plan.buckets[0].operation)
    cuts = [*(layout.span(index)[0] for index in range(layout.count)), 300_000]
    assert cuts[1] not in (0, 262_144)
    assert norm_of(measured(rows, cuts)[0]) == norm_of(measured(rows, [0, 262_144, 300_000])[0])


def test_several_data_shards_have_the_same_norm() -> None:
    with LocalCluster(2, timeout=20.0) as cluster:
        expected = cluster.run(exchanged)
    with Daemon("--workers", "2", "--shards", "3") as daemon, joined(daemon.url, 2, channel="tcp") as workers:
        assert together(workers, exchanged) == expected


class Course:
    """Replicas of which one is late, and the norm that each has after each round, with that of the mean it got."""

    def __init__(self) -> None:
        self.norms: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)

    def train(self, worker: Worker) -> None:
        model, rank = model_of(worker), worker.rank
        with model.join(lambda: self._note(model, rank)):
            for step in range(6):
                if rank == 1 and step in (1, 3):
                    wait_until(partial(self._is_at, min(worker.round + 2, 5)), "the others have gone on")
                backward(model, rank, step)
                for _ in model.updates():
                    self._note(model, rank)

    def _is_at(self, number: int) -> bool:
        return len(self.norms) >= number

    def _note(self, model: DistributedDataParallel, rank: int) -> None:
        mean = math.sqrt(math.fsum(float((one.double() ** 2).sum()) for one in grads(model)))
        self.norms[model.worker.round - 1][rank] = model.grad_norm, mean


@pytest.mark.parametrize(
    "options", [("--quorum", "2", "--grace", "0.01"), ("--mode", "bounded", "--staleness", "8"), ("--mode", "async")]
)
def test_late_workers_have_the_norm_of_the_mean_that_came(options: tuple[str, ...]) -> None:
    course = Course()
    with Daemon("--workers", "3", "--shards", "2", *options) as daemon, joined(daemon.url, 3) as workers:
        together(workers, course.train)

    for number, norms in course.norms.items():
        assert len(norms) == 3, number
        assert len(set(norms.values())) == 1, f"members have other norms of round {number}: {norms}"
        norm, mean = norms[0]
        assert norm == pytest.approx(mean, rel=1e-5)


# ── clipping ──────────────────────────────────────────────────────────────────────────────────────────


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))


def model_of(worker: Worker, **options: Any) -> DistributedDataParallel:
    module = seeded(0, lambda: nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3)))
    return DistributedDataParallel(module, worker, bucket_cap_mb=0.01, **options)


def backward(model: DistributedDataParallel, rank: int, step: int = 0) -> None:
    model.zero_grad()
    (model(batch(100 * step + rank)) ** 2).sum().backward()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def clipped(worker: Worker, as_view: bool = True) -> tuple[float, dict[str, float], list[torch.Tensor]]:
    whole = model_of(worker, gradient_as_bucket_view=as_view)
    assert math.isnan(whole.grad_norm)
    backward(whole, worker.rank)
    norm, norms = whole.grad_norm, whole.grad_norms
    reference = grads(whole)
    assert norm == pytest.approx(math.hypot(*norms.values()))
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    assert norm == pytest.approx(float(expected), rel=1e-5)
    by_torch = grads(whole)
    model = model_of(worker, clip_grad_norm=0.5, gradient_as_bucket_view=as_view)
    backward(model, worker.rank)
    assert model.grad_norm == pytest.approx(norm, rel=1e-6)
    for mine, theirs, before in zip(grads(model), by_torch, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
        assert not torch.equal(mine, before)
    later = model_of(worker)
    backward(later, worker.rank)
    assert later.clip_grad_norm_(1e6) == norm
    assert all(map(torch.equal, grads(later), reference)), "no bit changes below the limit"
    later.clip_grad_norm_(0.5)
    assert all(map(torch.equal, grads(later), grads(model)))
    return model.grad_norm, norms, grads(model)


@pytest.mark.parametrize("as_view", [True, False])
def test_clips_as_torch_does_with_the_same_bits_everywhere(as_view: bool) -> None:
    first, *others = on(3, clipped, as_view=as_view)
    for other in others:
        assert other[:2] == first[:2]
        assert all(map(torch.equal, other[2], first[2]))


def own(worker: Worker) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a clipped mean should be, by a collective, and what it is."""
    alone = model_of(worker)
    with alone.no_sync():
        backward(alone, worker.rank)
        for rank in range(2):
            (alone(batch(200 + rank + worker.rank)) ** 2).sum().backward()
    for grad in (p.grad for p in alone.parameters()):
        assert grad is not None
        grad /= 3
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 1.0 + worker.rank))
    expected = grads(alone)
    for grad in expected:
        worker.all_reduce(grad, weight=1.0 + 2 * worker.rank)
    model = model_of(worker, max_grad_norm=1.0 + worker.rank, accumulation="mean")
    model.set_weight(1.0 + 2 * worker.rank)
    with model.no_sync():
        backward(model, worker.rank)
        (model(batch(200 + worker.rank)) ** 2).sum().backward()
    (model(batch(201 + worker.rank)) ** 2).sum().backward()
    assert model.own_grad_norm == pytest.approx(norm, rel=1e-5)
    return expected, grads(model)


def test_per_worker_clipping_is_of_the_local_mean_and_before_the_weights() -> None:
    for expected, found in on(2, own):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def by_block(worker: Worker, clip: float | None) -> tuple[float, dict[str, float], list[Floats]]:
    exchange = GradientExchange(worker, 2, [[30, 7], [5]], lm_head=9, clip_grad_norm=clip)
    data = [np.full(size, 1.0 + worker.rank, np.float32) for size in (37, 5, 9)]
    for index, gradient in enumerate(data[:2]):
        exchange.push_block(0, index, gradient)
    for component, gradient in enumerate((data[2], np.zeros(0, np.float32), np.zeros(0, np.float32))):
        exchange.push_non_block(0, component, gradient)
    exchange.finish()
    return exchange.grad_norm, exchange.grad_norms, data


def test_a_gradient_exchange_has_norms_and_clips() -> None:
    for norm, norms, data in on(2, by_block, 1.0):
        assert norm == pytest.approx(1.5 * math.sqrt(51))
        assert norms["block.0"] == pytest.approx(1.5 * math.sqrt(37))
        assert math.hypot(*map(np.linalg.norm, data)) == pytest.approx(1.0, rel=1e-5)
    for _, _, data in on(2, by_block, None):
        assert all((part == 1.5).all() for part in data)


# ── on planes where members reduce ────────────────────────────────────────────────────────────────────


def over_steps(worker: Worker, how: str) -> tuple[list[float], list[torch.Tensor]]:
    """Make three steps, of which each is clipped by the option, by a call, or not at all. Return their norms."""
    model, found = model_of(worker, clip_grad_norm=0.5 if how == "option" else None), []
    for step in range(3):
        model.set_weight(1.0 + worker.rank)
        backward(model, worker.rank, step)
        found.append(model.clip_grad_norm_(0.5) if how == "call" else model.grad_norm)
    return found, grads(model)


@pytest.mark.parametrize("plane", ["direct", "hierarchical"])
def test_clipping_on_planes_of_members_has_the_coordinators_norm_and_takes_no_further_message(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def counting(owner: type, name: str, what: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if (key := what(*arguments)) is not None:
                counts[key] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    counting(Communicator, "_call", lambda _self, what, *_: what)
    counting(TcpChannel, "send", lambda _self, message, *_: "push" if isinstance(message, Push) else None)
    expected, _ = on(4, over_steps, "none")[0]
    taken: dict[str, Counter[str]] = {}
    for how in ("none", "option", "call"):
        with members(plane, 4) as workers:
            counts.clear()
            first, *others = together(workers, over_steps, how)
            taken[how] = counts.copy()
        assert first[0] == pytest.approx(expected, rel=1e-6)
        assert how == "none" or all(norms == first[0] for norms, _ in others), "the same bits"
        assert all(all(map(torch.equal, first[1], grads)) for _, grads in others)
        clips = how != "none"
        assert not clips or math.hypot(*(float(one.norm()) for one in first[1])) == pytest.approx(0.5, rel=1e-5)
    assert taken["option"] == taken["none"], "norms come with the commits"
    assert taken["call"] == taken["none"] + Counter(push=4), "at the first call alone each member says its norm"


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_norms_of_any_size_come_with_the_commit(value: float) -> None:
    def work(worker: Worker) -> float:
        module = nn.Linear(3, 1, bias=False)
        model = DistributedDataParallel(module, worker, clip_grad_norm=1.0)
        model(torch.full((1, 3), value if worker.rank else 1.0)).sum().backward()
        return model.grad_norm

    with members("direct", 2, nonfinite="propagate") as workers:
        first, second = together(workers, work)
    assert first == pytest.approx(value * math.sqrt(3) / 2, rel=1e-6, nan_ok=True)
    assert second == pytest.approx(first, rel=0, nan_ok=True)


def test_clips_what_a_trainer_is_about_to_give() -> None:
    parts = [np.full(3, 2.0, np.float32), torch.full((2, 2), 2.0)]
    assert gradserver.clip_local_norm(parts, 1.0) == pytest.approx(2.0 * math.sqrt(7))
    assert math.hypot(*(float(torch.as_tensor(part).norm()) for part in parts)) == pytest.approx(1.0, rel=1e-5)
    assert gradserver.clip_local_norm(parts, 10.0) == pytest.approx(1.0, rel=1e-5)


def job_of(worker: Worker) -> list[torch.Tensor]:
    model = model_of(worker)
    job = gradserver.Job(model, torch.optim.SGD(model.parameters(), 1.0), clip_grad_norm=0.25)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, worker.rank)
    job.step()
    return [one - p.detach() for one, p in zip(before, model.parameters(), strict=True)]


def test_a_job_clips_before_it_steps() -> None:
    first, second = on(2, job_of)
    assert all(map(torch.equal, first, second))
    assert math.sqrt(sum(float((step.double() ** 2).sum()) for step in first)) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_refuses_a_limit_that_is_none(limit: Any) -> None:
    with LocalCluster(1) as cluster, pytest.raises(InvalidArgumentError, match="clip_grad_norm"):
        cluster.run(lambda worker: model_of(worker, clip_grad_norm=limit))


def test_the_factor_is_torchs() -> None:
    assert clip_factor(0.5, 1.0) is None
    assert clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_factor(math.inf, 1.0) == 0.0
    factor = clip_factor(math.nan, 1.0)
    assert math.isnan(factor or 0.0)


def test_what_a_late_worker_gives_is_clipped_before_it_is_damped() -> None:
    done = list[int]()

    def train(worker: Worker) -> tuple[float, float, float | None, float]:
        model = model_of(worker, max_grad_norm=0.01)
        found, own = math.nan, math.nan
        with model.join(lambda: None):
            for step in range(1 if worker.rank else 5):
                if worker.rank:
                    wait_until(lambda: len(done) >= 5, "the other has done its steps")
                backward(model, worker.rank, step)
                own = math.sqrt(math.fsum(float((one.double() ** 2).sum()) for one in grads(model)))
                for _ in model.updates():
                    found = model.grad_norm
                done.append(worker.rank)
            return worker.damping, found, model.own_grad_norm, own

    with LocalCluster(2, timeout=20.0, mode="async", damping="inverse") as cluster:
        _, (damping, norm, own, expected) = cluster.run(train)
    assert damping <= 1 / 5
    assert norm == pytest.approx(0.01 * damping, rel=1e-3)
    assert own == pytest.approx(expected, rel=1e-5)
