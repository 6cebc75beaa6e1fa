"""Wrapped modules on sub-groups: each trains with the members of its own, as if there were no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradserver import DistributedDataParallel, GradientExchange, LocalCluster
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import Daemon, Program, coordinator, joined, members, together
from tests.replicas import distance, same
from tests.seeded import seeded
from tests.test_shard_processes import children_of

STEPS = 4
HIDDEN = 96


def model(seed: int) -> nn.Module:
    return seeded(seed, lambda: nn.Sequential(nn.Linear(16, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4)))


def batch(member: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * member + step))


def alone(seed: int, ranks: list[int], steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the weights after the training of one process that has all batches."""
    module = model(seed)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        sum(module(batch(rank, step)).square().mean() / len(ranks) for rank in ranks).backward()
        optimizer.step()
    return module.state_dict()


def step(module: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    module(data).square().mean().backward()
    optimizer.step()


def train_both(worker: Worker, strike: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """Train a module on each of two overlapping sub-groups, step by step in turns, and one on the parent.

    The worker in both calls ``strike`` with the number of each step before it takes part in that.
    """
    me, trained = worker.rank, dict[str, Any]()
    for name, ranks in (("left", [0, 1]), ("right", [1, 2]), ("all", [0, 1, 2])):
        group = worker if name == "all" else worker.subgroup(ranks)
        if group is not None:
            wrapped = DistributedDataParallel(model(len(name) if group.rank == 0 else 77), group)
            trained[name] = wrapped, torch.optim.SGD(wrapped.parameters(), 0.1)
    for number in range(STEPS):
        if len(trained) == 3:
            strike(number)
        for wrapped, optimizer in trained.values():
            step(wrapped, optimizer, batch(me, number))
    return {name: wrapped.module.state_dict() for name, (wrapped, _) in trained.items()}


def check_both(results: list[dict[str, Any]]) -> None:
    for name, ranks in (("left", [0, 1]), ("right", [1, 2]), ("all", [0, 1, 2])):
        states = [results[rank][name] for rank in ranks]
        assert all(same(states[0], other) for other in states)
        assert distance(states[0], alone(len(name), ranks)) < 1e-5
    assert [sorted(result) for result in results] == [["all", "left"], ["all", "left", "right"], ["all", "right"]]


@pytest.mark.parametrize("channel", ["memory", "tcp", "shm"])
def test_modules_on_overlapping_sub_groups_and_their_parent_train_as_one_process_would(channel: str) -> None:
    with members(channel, 3) as workers:
        check_both(together(workers, train_both))


def test_sub_groups_of_a_direct_plane_reduce_among_themselves() -> None:
    def join(place: tuple[str, int]) -> Worker:
        url, rank = place
        return connect(url, rank, 3, name=f"w{rank}", timeout=20.0, plane="direct")

    with coordinator() as server, ExitStack() as stack:
        workers = [stack.enter_context(one) for one in together([(server.url, rank) for rank in range(3)], join)]
        check_both(together(workers, train_both))
        groups: Any = server._runtime.snapshot()["groups"]
        assert {name: group["plane"]["name"] for name, group in groups.items()} == dict.fromkeys(groups, "direct")
        assert len(groups) == 3


def test_data_shards_have_parts_of_sub_groups_too() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "3", "--shards", "2"))
        workers = stack.enter_context(joined(daemon.url, 3))
        check_both(together(workers, train_both))

        def large(worker: Worker) -> list[float]:
            seen = []
            for ranks in ([0, 1], [0, 1, 2], [1, 2]):
                if (group := worker.subgroup(ranks)) is not None:
                    data = group.empty(1_000_000, torch.float32)
                    data.fill_(worker.rank)
                    group.all_reduce(data, "sum")
                    assert (data == data[0]).all()
                    seen.append(float(data[0]))
                    group.close()
            return seen

        assert together(workers, large) == [[1.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("channel", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_modules_of_sub_groups_go_on_when_coordinators_and_data_shards_are_killed(channel: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = "--workers", "3", "--shards", "2", "--state-dir", str(tmp_path)
        daemon = stack.enter_context(Daemon(*options))
        processes: list[Program] = [daemon]

        def strike(number: int) -> None:
            """Kill something, while the others have begun a step of their first sub-group."""
            if number == 2:
                (shard,) = children_of(processes[-1].pid)
                os.kill(shard, signal.SIGKILL)
            elif number in (1, 3):
                processes[-1].send_signal(signal.SIGKILL)
                processes[-1].end()
                again = Program("-m", "gradserver", "serve", "--bind", daemon.url, *options)
                processes.append(stack.enter_context(again))

        workers = stack.enter_context(joined(daemon.url, 3, channel=channel))
        check_both(together(workers, lambda worker: train_both(worker, strike)))
        for worker in workers:
            worker.close()  # while there is a coordinator that hears it


def test_a_gradient_exchange_on_a_sub_group() -> None:
    def work(worker: Worker) -> Any:
        group = worker.subgroup([0, 2])
        if group is None:
            return None
        exchange, seen = GradientExchange(group, 2, (6, 2), lm_head=3), []
        for number in range(STEPS):
            gradients = [np.full(size, worker.rank + number, np.float32) for size in (8, 8, 3)]
            for block in (1, 0):
                exchange.push_block(number, block, gradients[block])
            exchange.push_non_block(number, 0, gradients[2])
            exchange.finish()
            seen.append([float(gradient.mean()) for gradient in gradients])
        return seen

    with LocalCluster(3) as cluster:
        first, nothing, last = cluster.run(work)
    assert nothing is None
    assert first == last == [[1.0 + number] * 3 for number in range(STEPS)]


def test_a_module_on_an_elastic_sub_group_goes_on_when_a_member_dies_between_two_steps() -> None:
    with LocalCluster(4, elastic=(1, 4)) as cluster:

        def work(worker: Worker) -> Any:
            me, group = worker.rank, worker.subgroup([1, 2, 3])
            if group is None:
                return worker.barrier()  # it is in no sub-group, and its parent has lost a member
            wrapped = DistributedDataParallel(model(3), group)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
            for number in range(2 * STEPS):
                if me == 2 and number == STEPS:
                    return cluster.kill(2)
                step(wrapped, optimizer, batch(me, number))
            assert group.world_size == 2
            worker.barrier()
            return wrapped.module.state_dict()

        results = cluster.run(work)
    assert same(results[1], results[3])
    module = model(3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for number in range(2 * STEPS):
        ranks = [1, 2, 3] if number < STEPS else [1, 3]
        optimizer.zero_grad()
        sum(module(batch(rank, number)).square().mean() / len(ranks) for rank in ranks).backward()
        optimizer.step()
    assert distance(results[1], module.state_dict()) < 1e-5
