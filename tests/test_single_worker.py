"""Tests that a single worker trains by itself, without a coordinator, as it would in a group of one."""

from __future__ import annotations

import inspect
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradserver
from gradserver import (
    ClosedError,
    DataRanges,
    DistributedDataParallel,
    GradientExchange,
    InvalidArgumentError,
    Job,
    ShardSampler,
    Worker,
)
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from tests import job_training
from tests.cluster import PATIENCE, ROOT, coordinator

VARIABLES = ("GRADSERVER_URL", "GRADSERVER_NAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")
PLAN = simple_plan([("b0", 5)], FLOAT32)
INPUTS = torch.linspace(-1, 1, 60).reshape(20, 3)
TARGETS = INPUTS.sum(1, keepdim=True).sin()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a worker that trains by itself opens no port")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)


def said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# ── a single worker ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_port")
@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        ({}, {}, "neither GRADSERVER_URL nor RANK is set"),
        ({"world_size": 1}, {}, "the world size is 1"),
        ({"world_size": 1}, {"RANK": "3", "WORLD_SIZE": "8"}, "the world size is 1"),
        ({"rank": 0, "world_size": 1}, {}, "the world size is 1"),
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "the world size is 1"),
        ({}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "the world size is 1"),
        ({"url": "", "world_size": 1}, {"GRADSERVER_URL": "tcp://127.0.0.1:1"}, "the world size is 1"),
    ],
)
def test_a_single_worker_without_a_url_trains_by_itself_and_says_so(
    arguments: dict[str, Any],
    environment: dict[str, str],
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with gradserver.connect(**arguments, name="me", group="mine") as worker:
        assert (worker.rank, worker.world_size, worker.names, worker.group) == (0, 1, ("me",), "mine")

    assert said(caplog) == [f"'me' trains alone, without a coordinator: {why}"]


@pytest.mark.parametrize(
    "environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "0"}, {"SLURM_NTASKS": "2"}, {"WORLD_SIZE": "4"}]
)
def test_one_of_several_is_told_that_the_url_is_missing(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(InvalidArgumentError, match="no coordinator's URL, and .* set GRADSERVER_URL"):
        gradserver.connect()


def test_with_a_url_a_group_of_one_is_the_daemons(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as server, gradserver.connect(server.url, world_size=1) as worker:
        assert worker.world_size == 1
        assert worker.channel != "memory"
    assert said(caplog) == []


def test_a_script_of_its_own_says_it_in_one_line_and_ends() -> None:
    code = "import gradserver; worker = gradserver.connect(); print(worker.world_size)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)

    assert (done.returncode, done.stdout) == (0, "1\n")
    (line,) = done.stderr.splitlines()
    assert line.endswith("trains alone, without a coordinator: neither GRADSERVER_URL nor RANK is set")


# ── what it can do ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def alone() -> Iterator[Worker]:
    with gradserver.connect(world_size=1) as worker:
        yield worker


def test_collectives_are_identities(alone: Worker) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)

    assert torch.equal(alone.all_reduce(tensor.clone()), tensor)
    assert torch.equal(alone.broadcast(tensor.clone()), tensor)
    assert torch.equal(alone.all_gather(tensor)[0], tensor)
    assert torch.equal(alone.reduce_scatter(tensor), tensor)
    alone.barrier()


def test_rounds_are_exchanged(alone: Worker) -> None:
    alone.agree(PLAN)
    for number in range(3):
        data = np.full(5, number, np.float32)
        alone.push(0, data, weight=2.0)
        alone.finish_round()
        assert (data == number).all()
    assert alone.round == 3


def train(module: nn.Module, worker: Worker | None, steps: int = 6) -> list[float]:
    model = module if worker is None else DistributedDataParallel(module, worker)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    losses = []
    for step in range(steps):
        part = slice(step % 4 * 5, step % 4 * 5 + 5)
        loss: Any = nn.functional.mse_loss(model(INPUTS[part]), TARGETS[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def test_a_wrapped_model_trains_as_a_plain_one(alone: Worker) -> None:
    assert train(network(), alone) == train(network(), None)


def test_the_own_gradients_of_an_exchange_come_back(alone: Worker) -> None:
    exchange = GradientExchange(alone, 1, (4,))
    data = np.arange(4, dtype=np.float32)
    exchange.push_block(0, 0, data)
    exchange.finish()
    assert data.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_data_is_dealt_whole(alone: Worker) -> None:
    assert sorted(ShardSampler.for_worker(range(10), alone)) == list(range(10))
    alone.agree(PLAN)
    found: list[int] = []
    data = DataRanges(10, alone, batch_size=3)
    while not data.finished():
        found += data.take().tolist()
        alone.push(0, np.ones(5, np.float32))
        alone.finish_round()
    assert sorted(found) == list(range(10))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_job_goes_on_from_its_checkpoint_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    with gradserver.connect() as worker:
        whole = job_training.train(worker)

    class EndedError(Exception):
        """The end of the process."""

    def end_in_the_midst(job: Job) -> None:
        if job.round == 13:
            raise EndedError

    with pytest.raises(EndedError), gradserver.connect() as worker:
        job_training.train(worker, tmp_path, every=4, after=end_in_the_midst)
    with gradserver.connect() as worker:
        resumed = job_training.train(worker, tmp_path, every=4)

    assert resumed.resumed is not None
    assert (resumed.digest, resumed.round) == (whole.digest, whole.round)


def test_after_close_nothing_works_and_nothing_is_left() -> None:
    before = set(threading.enumerate())
    alone = gradserver.connect(world_size=1)
    alone.agree(PLAN)
    alone.push(0, np.ones(5, np.float32))
    alone.finish_round()
    alone.close()
    alone.close()

    with pytest.raises(ClosedError):
        alone.push(0, np.ones(5, np.float32))
    with pytest.raises(ClosedError):
        alone.barrier()
    assert set(threading.enumerate()) <= before


def test_with_or_without_a_coordinator_connect_takes_the_same_arguments() -> None:
    arguments = inspect.signature(gradserver.connect).parameters
    assert {name: argument.default for name, argument in arguments.items()} == {
        "url": None,
        "rank": None,
        "world_size": None,
        "group": "default",
        "name": None,
        "timeout": 60.0,
        "channel": None,
        "wire": "fp32",
        "reconnect": 60.0,
        "plane": None,
    }
