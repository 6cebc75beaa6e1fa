"""Members that are far off, in real groups: they are named, or halt their group. `test_evictions` has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradserver
from gradserver.engine.control.outliers import EVERY, FEWEST
from gradserver.protocol.errors import OutlierError
from tests.seeded import seeded


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))


def model_of(worker: gradserver.Worker, seed: int = 0) -> tuple[Any, torch.nn.Module]:
    """Wrap a small model."""
    module = seeded(seed, small)
    return gradserver.DistributedDataParallel(module, worker), module


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 20, generator=generator)
    return inputs, (inputs[:, :4] * 3).softmax(1)


def train(
    worker: gradserver.Worker, rounds: int, bad: int, fault: str, cluster: gradserver.LocalCluster
) -> tuple[dict[str, torch.Tensor], int]:
    """Train for some rounds, in which rank ``bad`` has a ``fault``. Return the weights, and when it is named."""
    model, module = model_of(worker)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(worker.rank)
    named = 0
    for number in range(rounds):
        inputs, targets = batch(generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        if worker.rank == bad and fault in ("scaled", "sign"):
            loss = (10 if fault == "scaled" else -1) * loss
        if worker.rank == bad and fault == "bit":
            weight = next(iter(module.parameters()))

            def flip(gradient: torch.Tensor, number: int = number) -> torch.Tensor:
                wrong = gradient.clone()
                wrong.view(-1).view(torch.int32)[number * 7 % wrong.numel()] ^= 1 << 30
                return wrong

            hook = weight.register_hook(flip)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if worker.rank == bad and fault == "bit":
            hook.remove()
        if fault not in ("bit", "sign"):
            optimizer.step()
        members = cluster.snapshot()["groups"]["local"]["members"]  # type: ignore[index]
        if any(member.get("gradients", {}).get("off") for member in members) and not named:
            named = number + 1
    return {name: value.clone() for name, value in module.state_dict().items()}, named


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("fault", ["scaled", "bit", "sign"])
def test_a_faulty_worker_is_named_within_forty_rounds(
    workers: int, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = FEWEST + EVERY
    with gradserver.LocalCluster(workers) as cluster:
        results = cluster.run(train, rounds + 1, 1, fault, cluster)
        members = cluster.snapshot()["groups"]["local"]["members"]  # type: ignore[index]
    assert {member["name"] for member in members if member["gradients"]["off"]} == {"worker-1"}
    assert FEWEST <= results[0][1] <= rounds + 1  # seen in the round behind that one
    warnings = [record.message for record in caplog.records if "--outliers report" in record.message]
    warning = next(one for one in warnings if "'worker-1' (rank 1)" in one)
    assert ("times the median" in warning) == (fault != "sign")
    told = [r.message for r in caplog.records if "far off" in r.message and "(--outliers" not in r.message]
    assert len(told) == len(warnings) == 1  # by its worker


def test_nobody_is_named_in_a_training_without_faults(caplog: pytest.LogCaptureFixture) -> None:
    with gradserver.LocalCluster(3) as cluster:
        cluster.run(train, 60, -1, "", cluster)
        group: dict[str, Any] = cluster.snapshot()["groups"]["local"]  # type: ignore[index]
    assert [member["gradients"]["off"] for member in group["members"]] == [None] * 3
    assert 0.5 < group["members"][0]["gradients"]["norm_ratio"] < 2
    assert group["noise_scale"]["scale"] > 0
    assert "far off" not in caplog.text


def test_a_faulty_worker_halts_its_group() -> None:
    expected = pytest.raises(OutlierError, match=r"'worker-1' \(rank 1\) are far off")
    with gradserver.LocalCluster(3, outliers="halt") as cluster, expected as raised:
        cluster.run(train, FEWEST + EVERY, 1, "scaled", cluster)
    assert (raised.value.worker, raised.value.rank) == ("worker-1", 1)
    assert FEWEST - 1 <= raised.value.round < FEWEST + EVERY


def test_a_policy_must_be_one_of_three() -> None:
    with pytest.raises(gradserver.InvalidArgumentError, match="expected one of 'report', 'leave-out', 'halt'"):
        gradserver.LocalCluster(2, outliers="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_noise_scale_is_that_of_the_gradients_of_single_samples(wire: str) -> None:
    """Within 10 %, for a model that does not move meanwhile."""

    def work(worker: gradserver.Worker) -> tuple[Any, float]:
        model, module = model_of(worker)
        generator = torch.Generator().manual_seed(100 + worker.rank)
        size = 8 * (worker.rank + 1)
        model.set_weight(size)
        for _ in range(200):
            inputs = torch.randn(size, 20, generator=generator)
            loss = torch.nn.functional.cross_entropy(model(inputs), (inputs[:, :4] * 3).softmax(1))
            module.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        return None, 0.0

    with gradserver.LocalCluster(3, wire=wire) as cluster:
        cluster.run(work)
        group: dict[str, Any] = cluster.snapshot()["groups"]["local"]  # type: ignore[index]
    module = seeded(0, small)
    inputs = torch.randn(4096, 20, generator=torch.Generator().manual_seed(5))
    targets = (inputs[:, :4] * 3).softmax(1)

    def loss_of(parameters: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(module, parameters, (one[None],))
        return torch.nn.functional.cross_entropy(output, target[None])

    parameters = {name: value.detach() for name, value in module.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
    samples = torch.cat([value.flatten(1) for value in found.values()], 1).double().numpy()
    mean, trace = samples.mean(0), samples.var(0, ddof=1).sum()
    expected = trace / (mean @ mean - trace / len(samples))
    assert group["noise_scale"]["scale"] == pytest.approx(expected, rel=0.1)
    assert np.isfinite(expected)
