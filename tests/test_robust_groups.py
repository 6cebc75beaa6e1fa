"""Groups with a robust mean: over every channel and several shards, through restarts, and in training."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradserver import cli
from gradserver.local import LocalCluster
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import (
    GradServerError,
    InvalidArgumentError,
    InvalidWorldSizeError,
    JoinRefusedError,
)
from gradserver.protocol.means import UNIT, mean_of
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import Daemon, Gather, coordinator, errors, joined, together, wait_until
from tests.models import seeded
from tests.test_means import expected

RULES = ["median", "trimmed:0.25", "clipped:1", "krum:1"]
LARGE, SMALL = 3 * UNIT + 700, 100
PLAN = simple_plan([("large", LARGE), ("small", SMALL)], FLOAT32)
Array = np.ndarray[Any, Any]


def gradient(rank: int, numel: int) -> Array:
    chance = np.random.default_rng(7)
    signal_, noise = chance.standard_normal(numel), np.random.default_rng(rank).standard_normal(numel)
    return ((signal_ + 0.3 * noise) * (-10 if rank == 4 else 1)).astype(np.float32)


def exchanged(worker: Worker, shared: bool = True) -> tuple[bytes, bytes]:
    """Return the results of one round of `PLAN`."""
    found = []
    for part, numel in enumerate((LARGE, SMALL)):
        tensor = worker.empty(numel, "float32") if shared else np.empty(numel, np.float32)
        tensor[:] = gradient(worker.rank, numel)
        found.append((worker.push(part, tensor), tensor))
    worker.finish_round()
    for handle, _ in found:
        handle.wait()
    return found[0][1].tobytes(), found[1][1].tobytes()


@pytest.fixture(params=["memory", "shm", "tcp"])
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("rule", RULES)
def test_all_members_get_the_mean_of_the_group(gather: Gather, rule: str) -> None:
    workers = gather(5, mean=rule)
    together(workers, lambda worker: worker.agree(PLAN))
    first, *others = together(workers, exchanged)
    assert all(one == first for one in others)
    for numel, result in zip((LARGE, SMALL), first, strict=True):
        wanted = expected(mean_of(rule), [gradient(rank, numel) for rank in range(5)], [1.0] * 5)
        np.testing.assert_allclose(np.frombuffer(result, np.float32), wanted, rtol=1e-5, atol=1e-5)
    assert together(workers, exchanged)[0] == first
    plain = together(workers, lambda worker: worker.all_reduce(np.full(3, worker.rank**2, np.float32)))
    assert {float(one[0]) for one in plain} == {6.0}, "a collective is no gradient, and its mean is the plain one"


@pytest.mark.parametrize("rule", ["trimmed:0.25", pytest.param("krum:1", marks=pytest.mark.long)])
def test_shards_and_channels_give_the_same_bits(rule: str) -> None:
    with LocalCluster(5, mean=rule) as cluster:
        together(cluster.workers, lambda worker: worker.agree(PLAN))
        (wanted, *_) = together(cluster.workers, exchanged)
    for options, channel in ((("--shards", "2"), "tcp"), (("--shards", "3"), "shm")):
        with (
            Daemon("--workers", "5", "--mean", rule, *options) as daemon,
            joined(daemon.url, 5, channel=channel) as workers,
        ):
            together(workers, lambda worker: worker.agree(PLAN))
            assert set(together(workers, exchanged)) == {wanted}
            assert daemon.group()["mean"] == rule


def test_a_lossy_wire_owes_what_it_loses() -> None:
    """Means of equal gradients add up to those of exact ones: the error of a round is made up for in the next."""
    rounds = 40
    with LocalCluster(4, mean="trimmed:0.25") as cluster:
        plan = with_codec(simple_plan([("bucket", 40_000)], FLOAT32), codec_of("int8"))
        gradients = [gradient(rank, 40_000) for rank in (0, 1, 2, 4)]

        def train(worker: Worker) -> Array:
            worker.agree(plan)
            total = np.zeros(40_000)
            for _ in range(rounds):
                tensor = gradients[worker.rank].copy()
                worker.push(0, tensor)
                worker.finish_round()
                total += tensor
            return total

        totals = cluster.run(train)
    wanted = expected(mean_of("trimmed:0.25"), gradients, [1.0] * 4)
    assert all(total.tobytes() == totals[0].tobytes() for total in totals)
    assert np.linalg.norm(totals[0] / rounds - wanted) < 0.002 * np.linalg.norm(wanted)


# ── what cannot be ────────────────────────────────────────────────────────────────────────────────────


def test_a_group_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidWorldSizeError, match="mean krum:1 needs at least 5 workers, and a round may have 4"):
        LocalCluster(4, mean="krum:1")
    with pytest.raises(InvalidWorldSizeError, match="trim more: trimmed:0.34"):
        LocalCluster(4, elastic=(3, 8), mean="trimmed:0.25")
    with coordinator(mean="median") as server, pytest.raises(GradServerError, match="needs at least 3 workers"):
        connect(server.url, world_size=2, timeout=10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--workers", "2:8", "--mean", "median"],
            "the mean median needs at least 3 workers, and a round may have 2",
        ),
        (["--workers", "8", "--mode", "async", "--mean", "median"], "needs at least 3 workers, and a round may have 1"),
        (["--workers", "8", "--backup", "6", "--mean", "median"], "needs at least 3 workers, and a round may have 2"),
        (["--mean", "trimmed:0.6"], "there is no mean 'trimmed:0.6': B is the share"),
        (["--mean", "average"], "there is no mean 'average'; there are plain, median, trimmed:B"),
        (
            ["--workers", "4", "--mean", "median", "--plane", "direct"],
            "--plane direct is not possible with --mean median",
        ),
        (["--join", "tcp://127.0.0.1:1", "--mean", "median"], "--mean is an option of coordinators"),
    ],
)
def test_the_command_line_says_what_is_wrong(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["serve", *options])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status in (1, 2)
    assert said in capsys.readouterr().err


def test_the_direct_plane_is_not_chosen_and_cannot_be_demanded() -> None:
    with coordinator(mean="median") as server:
        with pytest.raises(JoinRefusedError, match="plane 'direct'.*the mean is median, which needs each contribution"):
            connect(server.url, world_size=3, plane="direct", timeout=10)
        with joined(server.url, 3) as workers:
            assert {worker._session.membership.plane for worker in workers} == {"shm"}


def test_zeros_of_topk_would_be_the_median() -> None:
    with LocalCluster(3, mean="median", wire="topk") as cluster:
        plan = with_codec(PLAN, codec_of("topk"))
        for error in errors(InvalidArgumentError, cluster.workers, lambda worker: worker.agree(plan)):
            assert "has the mean median, and gradients travel as topk" in str(error)
            assert "int8 or randomk" in str(error)


# ── an elastic and durable group ──────────────────────────────────────────────────────────────────────


def test_a_slice_of_fewer_contributions_has_the_mean_of_those() -> None:
    """A worker dies behind its first bucket: that one is trimmed among five, the second among four."""
    with LocalCluster(5, elastic=(4, 5), mean="trimmed:0.25") as cluster:
        plan = simple_plan([("first", SMALL), ("second", SMALL)], FLOAT32)
        together(cluster.workers, lambda worker: worker.agree(plan))
        tensors = {worker: [gradient(worker.rank, SMALL), gradient(worker.rank, SMALL)] for worker in cluster.workers}
        victim = cluster.workers[0]
        for worker, (first, second) in tensors.items():
            handle = worker.push(0, first)
            if worker is not victim:
                worker.push(1, second)
        handle.wait()
        cluster.kill(0)
        together(cluster.workers[1:], lambda worker: worker.finish_round())
    ranks = range(5), range(1, 5)
    for part, counted in enumerate(ranks):
        wanted = expected(mean_of("trimmed:0.25"), [gradient(rank, SMALL) for rank in counted], [1.0] * len(counted))
        for worker in cluster.workers[1:]:
            np.testing.assert_allclose(tensors[worker][part], wanted, rtol=1e-5, atol=1e-6)


def test_a_restarted_coordinator_goes_on_with_the_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--workers", "3:3", "--state-dir", str(tmp_path)
    with Daemon(*options, "--mean", "median") as daemon, joined(daemon.url, 3) as workers:
        together(workers, lambda worker: worker.agree(PLAN))
        before = together(workers, exchanged)
        daemon.send_signal(signal.SIGKILL)
        daemon.end()
        with Daemon(*options) as successor:
            assert successor.url == daemon.url
            assert together(workers, exchanged) == before
            assert successor.group()["mean"] == "median"
            for worker in workers:
                worker.close()
            wait_until(lambda: not successor.group(), "the group has ended")
    assert cli.main(["ledger", str(tmp_path)]) == 0
    assert "gradients are averaged by the mean median" in capsys.readouterr().out
    assert cli.main(["ledger", str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["mean"] for line in lines if "mean" in line} == {"median"}


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def samples(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [rows, 16] and their classes [rows], of which one in five is drawn by chance."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 16, generator=generator)
    classes = (inputs[:, :4] * 3 + inputs[:, 4:8]).argmax(1)
    wrong = torch.rand(rows, generator=generator) < 0.2
    return inputs, torch.where(wrong, torch.randint(4, (rows,), generator=generator), classes)


def trained(rule: str, faulty: bool) -> float:
    """Return the loss behind 60 steps of 4 workers, of which one may send its gradients times -10."""

    def train(worker: Worker) -> float:
        module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        seeded(module, 1)
        model = DistributedDataParallel(module, worker)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(60):
            inputs, targets = samples(4 * step + worker.rank, 256)
            optimizer.zero_grad()
            loss: Any = F.cross_entropy(model(inputs), targets) * (-10 if faulty and worker.rank == 3 else 1)
            loss.backward()
            optimizer.step()
        inputs, targets = samples(99_999, 4096)
        with torch.no_grad():
            return float(F.cross_entropy(module(inputs), targets))

    with LocalCluster(4, mean=rule) as cluster:
        losses = cluster.run(train)
    assert len(set(losses)) == 1, "replicas differ"
    return losses[0]


def test_a_trimmed_mean_withstands_gradients_times_minus_ten() -> None:
    clean = trained("plain", faulty=False)
    assert abs(trained("trimmed:0.25", faulty=True) / clean - 1) < 0.03
    assert not trained("plain", faulty=True) < 1.5 * clean
