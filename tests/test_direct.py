"""The direct plane between processes, over gloo: a death costs one contribution, and nothing waits for ever."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradserver
from gradserver.engine.policy import Policy
from gradserver.protocol.errors import WorkerLostError
from gradserver.protocol.limits import OTHERS
from gradserver.protocol.planes import AMONG_MEMBERS
from gradserver.worker.client import Worker
from gradserver.worker.planes.communicator import Communicator
from gradserver.worker.planes.direct import DirectPlane
from gradserver.worker.planes.epochs import Directs
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import (
    BUSY,
    STARTED_WITHIN,
    TIMEOUT,
    Daemon,
    Program,
    Task,
    coordinator,
    joined,
    members,
    together,
    wait_until,
)
from tests.elastic_course import lose, survivors_of
from tests.elastic_training import FATAL, STEPS, WORLD, alone
from tests.models import Transformer, loss_of, state_of, tokens
from tests.replicas import ROWS, distance, reference, same, sgd
from tests.test_ledger import rounds_of

PROGRAM = Path(__file__).with_name("direct_training.py")
MANY = 10**6
GOES_ON_WITHIN = 3.0 + BUSY
"""From a death to the end of its round: what is promised, and what a machine that has other things to do may add."""


@pytest.mark.parametrize(
    ("where", "shards"),
    [
        ("reducing", 1),
        pytest.param("committing", 1, marks=pytest.mark.long),
        pytest.param("reducing", 2, marks=pytest.mark.long),
    ],
)
def test_a_worker_killed_in_a_direct_round_costs_one_contribution_and_no_step(
    where: str, shards: int, tmp_path: Path
) -> None:
    course = lose(
        PROGRAM, tmp_path, "fell ", GOES_ON_WITHIN, where, options=("--shards", str(shards)), as_usual=True
    )  # fmt: skip

    assert course.ends == [f"[{FATAL}]"] * 3, "the rounds behind it are direct again"
    assert course.group["plane"]["name"] == "direct"
    expected = alone(lambda step, _: range(WORLD) if step < FATAL else survivors_of())
    assert distance(course.state, expected) < 1e-5
    assert STEPS > FATAL + 1


@pytest.mark.long
def test_a_stopped_worker_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    options = "--round-timeout", "5"
    lose(PROGRAM, tmp_path, "fell ", GOES_ON_WITHIN, "reducing", options=options, how=signal.SIGSTOP)


# ── several workers of this process ───────────────────────────────────────────────────────────────────


def train(
    worker: Worker,
    /,
    steps: int = 6,
    then: Callable[[int], object] = lambda _: None,
    *,
    to_none: bool = True,
    backwards: int = 1,
    **options: Any,
) -> bytes:
    """Train a small module, and return its weights."""
    module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    first = torch.Generator().manual_seed(7)  # not torch's own, which threads share
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=first) / 4)
    model = DistributedDataParallel(module, worker, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(1000 + worker.rank)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        model.set_weight(1.0 + worker.rank)
        for _ in range(backwards - 1):
            with model.no_sync():
                model(torch.randn(6, 8, generator=chance)).square().mean().backward()
        model(torch.randn(6, 8, generator=chance)).square().mean().backward()
        optimizer.step()
        then(step)
    tensors = [*module.parameters(), *module.buffers()]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def floats(weights: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(weights[: len(weights) - 8]), dtype=torch.float32)


def test_direct_rounds_give_all_members_the_bits_of_one_mean_as_the_coordinator_does_within_rounding() -> None:
    with members("direct", 3) as workers:
        assert {worker.plane for worker in workers} == {"direct"}
        direct = together(workers, train)
    with members("memory", 3) as workers:
        reduced = together(workers, train)
    assert len(set(direct)) == len(set(reduced)) == 1
    assert torch.allclose(floats(direct[0]), floats(reduced[0]), rtol=0, atol=1e-5)


def skipped_by_place(worker: Worker) -> list[bool]:
    """Train with one gradient that is infinite at rank 0, in another place each time. Return which rounds are skipped.

    The last round has none.
    """
    layer, numel, skipped = nn.Linear(12, 1, bias=False), 12, []
    model = DistributedDataParallel(layer, worker)
    for place in range(numel + 1):
        inputs = torch.ones(1, numel)
        if worker.rank == 0 and place < numel:
            inputs[0, place] = torch.inf
        model(inputs).sum().backward()
        skipped.append(worker.skipped)
        layer.weight.grad = None
    return skipped


def test_all_members_know_what_one_finds_in_its_part_of_a_mean() -> None:
    with members("direct", 3, nonfinite="skip") as workers:
        assert together(workers, skipped_by_place) == [[True] * 12 + [False]] * 3
        assert {Directs.of(worker).voids for worker in workers} == {0}


def test_the_ledger_has_digests_of_direct_rounds_if_it_is_to_have_all(tmp_path: Path) -> None:
    def digests(name: str, hashes: str, backwards: int) -> list[tuple[int, ...]]:
        path = tmp_path / name
        with (
            Daemon("--state-dir", str(path), "--ledger-hashes", hashes) as daemon,
            joined(daemon.url, 2, channel="tcp", plane="direct") as workers,
        ):
            together(workers, partial(train, backwards=backwards))
            wait_until(lambda: len(rounds_of(path)) == 6, "all rounds are written")
        return [(*record.inputs, *record.results) for record in rounds_of(path)]

    once, again, other, without = (
        digests("once", "all", 1),
        digests("again", "all", 1),
        digests("other", "all", 2),
        digests("without", "on", 1),
    )

    assert once == again
    assert all(mine and mine != others for mine, others in zip(once, other, strict=True))
    assert not any(map(any, without))


def test_a_reduction_that_fails_at_one_member_sends_its_round_and_some_more_over_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Communicator.all_reduce

    def failing(self: Communicator, *arguments: Any) -> Any:
        if self._rank == 1 and round_of[1] == 2:
            raise RuntimeError("the link broke")
        return begin(self, *arguments)

    round_of: dict[int, int] = {1: 0}
    monkeypatch.setattr(Communicator, "all_reduce", failing)

    def work(worker: Worker) -> tuple[bytes, int]:
        weights = train(worker, 12, lambda step: round_of.update({worker.rank: step + 1}))
        return weights, Directs.of(worker).voids

    with members("direct", 3) as workers:
        direct = together(workers, work)
    with members("memory", 3) as workers:
        reduced = together(workers, train, 12)
    assert len(set(direct)) == 1
    assert direct[0][1] == 1, "one round was void, and the epoch went on"
    assert torch.allclose(floats(direct[0][0]), floats(reduced[0]), rtol=0, atol=1e-5)
    assert "could not reduce round 2 with the others, and it goes over the coordinator: the link broke" in caplog.text


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": False}, {"backwards": 3}, {"backwards": 3, "accumulation": "mean"}],
    ids=str,
)
def test_contributions_are_kept_wherever_gradients_are_accumulated(
    options: dict[str, Any], to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, round_of = Communicator.all_reduce, {1: 0}

    def failing(self: Communicator, tensor: torch.Tensor, *arguments: Any) -> Any:
        if self._rank == 1 and round_of[1] == 2 and tensor.is_floating_point():
            tensor.fill_(float("nan"))  # what a reduction leaves that was given up
            raise RuntimeError("the link broke")
        return begin(self, tensor, *arguments)

    def work(worker: Worker) -> tuple[bytes, int]:
        def then(step: int) -> None:
            round_of[worker.rank] = step + 1

        return train(worker, 12, then, to_none=to_none, **options), Directs.of(worker).voids

    monkeypatch.setattr(Communicator, "all_reduce", failing)
    with members("direct", 3) as workers:
        direct = together(workers, work)
    with members("memory", 3) as workers:
        (expected, *_) = together(workers, lambda worker: train(worker, 12, to_none=to_none, **options))
    assert {voids for _, voids in direct} == {1}
    assert len({weights for weights, _ in direct}) == 1
    assert torch.allclose(floats(direct[0][0]), floats(expected), rtol=0, atol=1e-5)


def test_gradients_of_a_round_that_is_not_applied_are_the_worker_s_own() -> None:
    def work(worker: Worker) -> None:
        module = nn.Linear(3, 1, bias=False)
        model = DistributedDataParallel(module, worker)
        inputs = torch.full((1, 3), float("nan") if worker.rank else 2.0)
        with pytest.raises(gradserver.NonFiniteError):
            model(inputs).sum().backward()
        assert worker.rank or module.weight.grad is not None
        if not worker.rank:
            assert torch.equal(torch.full((1, 3), 2.0), module.weight.grad)  # type: ignore[arg-type]

    with members("direct", 2) as workers:
        together(workers, work)


def test_members_that_do_not_find_each_other_go_over_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Communicator, "_group", lost)
    with members("direct", 2) as workers:
        weights = together(workers, train)
    assert len(set(weights)) == 1
    assert "could not connect to each other for direct reductions" in caplog.text
    assert "no route to host" in caplog.text


def test_a_group_that_needs_all_its_members_ends_with_the_name_of_the_lost_one() -> None:
    def work(worker: Worker) -> str:
        def then(step: int) -> None:
            if step == 2 and worker.rank == 1:
                worker.abort("it was preempted")

        if worker.rank == 1:
            with pytest.raises(gradserver.ClosedError):
                train(worker, then=then)
            return ""
        with pytest.raises(WorkerLostError) as caught:
            train(worker, then=then)
        return caught.value.message

    with coordinator() as server, joined(server.url, 3, plane="direct") as workers:
        said = together(workers, work)
    assert "'w1'" in said[0]
    assert "'w1'" in said[2]


@pytest.mark.parametrize("plane", AMONG_MEMBERS)
@pytest.mark.parametrize(
    ("by_coordinator", "by_workers"),
    [(True, "--"), (False, "d-"), (False, "-d"), (True, "d-")],
    ids=["coordinator", "first", "second", "both"],
)
def test_one_demand_is_enough_and_all_members_meet(plane: str, by_coordinator: bool, by_workers: str) -> None:
    policy = Policy(2, 2, plane=plane if by_coordinator else None)
    with coordinator({OTHERS: policy}) as server, ExitStack() as stack:
        asked = [plane if one == "d" else None for one in by_workers]
        join = partial(gradserver.connect, server.url, world_size=2, timeout=TIMEOUT, channel="tcp")
        workers = together(range(2), lambda rank: join(rank=rank, name=f"w{rank}", plane=asked[rank]))
        for worker in workers:
            stack.enter_context(worker)
        assert {worker.plane for worker in workers} == {plane}
        assert len(set(together(workers, train))) == 1
        assert [Directs.of(worker).voids for worker in workers] == [0, 0]
        assert all(Directs.of(worker).joint is not None for worker in workers)


def test_a_worker_listens_for_others_only_where_members_are_to_meet() -> None:
    with coordinator() as server, joined(server.url, 2, channel="tcp") as workers:
        together(workers, train)
        stores = [offer.store for offer in workers[0]._session.membership.offers]
        assert all(stores)
        for store in stores:
            host, _, port = store.rpartition(":")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)), TIMEOUT)


@pytest.mark.parametrize("plane", AMONG_MEMBERS)
@pytest.mark.parametrize("shape", ["too few members", "no backlog"])
def test_a_round_that_waits_for_a_learner_goes_over_the_coordinator(shape: str, plane: str) -> None:
    few = shape == "too few members"
    policy = Policy(2, 4, backlog=Policy().backlog if few else 0, gather=0.1)
    with coordinator({OTHERS: policy}) as server:
        has_begun = threading.Event()

        def work(name: str, leaves: int | None = None) -> tuple[bytes, int, int]:
            ends: list[int] = []
            with gradserver.connect(server.url, name=name, plane=plane, timeout=TIMEOUT, channel="tcp") as worker:
                worker.on_membership(lambda news: ends.append(worker.round + 8) if "late" in news.names else None)
                module = nn.Linear(16, 16)
                model = DistributedDataParallel(module, worker)
                job = gradserver.Job(model, torch.optim.SGD(module.parameters(), lr=1e-3))
                while worker.round != leaves and worker.round < min(ends, default=MANY):
                    model(torch.ones(1, 16)).square().mean().backward()
                    job.step()
                    if worker.round == 5:
                        has_begun.set()
                return module.weight.detach().numpy().tobytes(), Directs.of(worker).voids, worker.world_size

        first = Task(work, "a"), Task(work, "b", 6 if few else None)
        assert has_begun.wait(TIMEOUT)
        ended = [task.result() for task in (*first, Task(work, "late"))]
        together_at_the_end = ended[::2] if few else ended
        assert set(together_at_the_end) == {(ended[0][0], 0, 2 if few else 3)}, "rounds of the new epoch are direct"


ENDS_WITHOUT_CLOSE = """
import torch, gradserver
worker = gradserver.connect(plane="direct", timeout=30)
model = gradserver.DistributedDataParallel(torch.nn.Linear(2, 2), worker)
model(torch.ones(1, 2)).sum().backward()
print(worker.plane)
"""


def test_a_script_that_ends_without_close_ends_well() -> None:
    with coordinator({OTHERS: Policy(2, 2)}) as server, ExitStack() as stack:
        place = {"GRADSERVER_URL": server.url, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        programs = [
            stack.enter_context(Program("-c", ENDS_WITHOUT_CLOSE, environment={**place, "RANK": str(rank)}))
            for rank in range(2)
        ]
        ends = [program.end(STARTED_WITHIN) for program in programs]
        said = [program.output() for program in programs]

    assert (ends, said) == ([0, 0], [["direct"]] * 2)


def test_a_closed_worker_ends_its_communicators() -> None:
    with members("direct", 2) as workers:
        together(workers, train)
        found = [Directs.of(worker) for worker in workers]
        assert all(one.joint is not None for one in found)
    assert all(one.joint is None for one in found)


def test_the_contribution_of_a_worker_that_is_alone_is_its_mean_bit_by_bit() -> None:
    with members("direct", 1) as (worker,):
        module = Transformer(0)
        model = DistributedDataParallel(module, worker)
        model.set_weight(3.0)  # neither that nor a division rounds anything
        optimizer = sgd(module)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *tokens(step, ROWS)).backward()
            optimizer.step()
        assert same(state_of(module), reference(Transformer(0), STEPS))
        plane = model._rounds._plane
        assert isinstance(plane, DirectPlane)
        assert not plane._scratch  # nor is there a copy
        with pytest.raises(gradserver.NonFiniteError, match="lm_head"):
            (loss_of(model, *tokens(0, ROWS)) * float("nan")).backward()
