"""Tests of the whole: workers end with the same bits, and with those that one process would have computed.

A four-block transformer, fp32, no dropout, 50 steps (18 in the fast suite); 1 to 4 workers over memory, and as
processes over TCP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from gradserver.local import LocalCluster
from tests.cluster import STARTED_WITHIN, Daemon, Program
from tests.training import RECIPES, digest, distance, train, train_alone

pytestmark = pytest.mark.timeout(300)  # torch starts slowly where four processes do it at once

Case = tuple[int, str]
"""World size, and name of the recipe."""

ALL = [(world_size, name) for name in RECIPES for world_size in (1, 2, 3, 4)]
FAST = (1, "sgd"), (2, "sgd"), (2, "adamw"), (3, "by tokens"), (4, "unused")
OVER_TCP = (2, "sgd"), (3, "by tokens"), (4, "unused")
REST = tuple(case for case in ALL if case not in OVER_TCP)


def cases(soon: Sequence[Case]) -> list[Any]:
    """Return all of them; those that are not to be tried ``soon`` among the long tests."""
    return [
        pytest.param(*case, id=f"{case[0]} {case[1]}", marks=() if case in soon else pytest.mark.long) for case in ALL
    ]


@cache
def alone(name: str) -> nn.Module:
    return train_alone(RECIPES[name])


@cache
def over_memory(world_size: int, name: str) -> list[nn.Module]:
    """Return every worker's module after training in a LocalCluster."""
    with LocalCluster(world_size) as cluster:
        return cluster.run(train, RECIPES[name])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def over_tcp(cases: tuple[Case, ...]) -> dict[Case, list[str]]:
    """Return digests of the weights by case, each rank's, after training in processes of their own.

    Rank 1 shares memory with the coordinator, as the others do by default.
    """
    found: dict[Case, list[str]] = {}
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon())
        programs = [
            stack.enter_context(
                Program(
                    *("-m", "tests.training", daemon.url, str(rank), json.dumps(cases)),
                    environment={"GRADSERVER_CHANNEL": "auto" if rank == 1 else "tcp"},
                    loaded="torch",
                )
            )
            for rank in range(4)
        ]
        for rank, program in enumerate(programs):
            for case in cases:
                if rank < case[0]:
                    world_size, name, weights = json.loads(program.expect("trained ", STARTED_WITHIN))
                    assert (world_size, name) == case
                    found.setdefault(case, []).append(weights)
            assert program.end() == 0, program.complaints()
    return found


def tolerance(name: str) -> float:
    """Return the tolerance. AdamW divides by the root of the gradient's square: near 0, rounding decides."""
    return 2e-3 if RECIPES[name].adam else 1e-6


@pytest.mark.parametrize(("world_size", "name"), cases(FAST))
def test_replicas_are_bit_identical_and_as_one_process_would_have_them(world_size: int, name: str) -> None:
    modules = over_memory(world_size, name)

    assert len({digest(module) for module in modules}) == 1
    assert distance(modules[0], alone(name)) <= tolerance(name)


@pytest.mark.parametrize(("world_size", "name"), cases(OVER_TCP))
def test_processes_over_tcp_get_the_same_bits_as_threads_over_memory(world_size: int, name: str) -> None:
    case = (world_size, name)
    digests = over_tcp(OVER_TCP if case in OVER_TCP else REST)[case]

    assert digests == [digest(over_memory(world_size, name)[0])] * world_size


def test_the_same_run_gives_the_same_bits_again() -> None:
    with LocalCluster(3) as cluster:
        again = cluster.run(train, RECIPES["by tokens"])

    assert digest(again[0]) == digest(over_memory(3, "by tokens")[0])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_without_the_exchange_replicas_diverge_and_parity_fails(name: str) -> None:
    with LocalCluster(2) as cluster:
        modules = cluster.run(train, RECIPES[name], exchanged=False)

    assert len({digest(module) for module in modules}) == 2
    assert distance(modules[0], alone(name)) > tolerance(name)


def test_weights_that_are_ignored_are_noticed() -> None:
    """Test that a plain mean of the workers' means is not the mean over all tokens."""
    recipe = RECIPES["by tokens"]
    with LocalCluster(3) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.worker.torch_ddp.ddp.DistributedDataParallel.set_weight", lambda *_: None)
        modules = cluster.run(train, recipe)

    assert distance(modules[0], alone(recipe.name)) > tolerance(recipe.name)
