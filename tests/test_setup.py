"""`gradserver.setup`: one device, several, and several workers, with one loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradserver
from gradserver import InvalidArgumentError
from gradserver.engine.policy import Mode, ModeName, Policy, in_mode
from gradserver.worker.data_parallel import devices as devices_of_torch
from gradserver.worker.data_parallel.wrapper import DataParallel
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from gradserver.worker.training import Training
from tests.cluster import coordinator, together
from tests.models import seeded

VARIABLES = ("GRADSERVER_URL", "GRADSERVER_NAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
INPUTS = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(24, 4)
TARGETS = INPUTS.sum(1, keepdim=True).sin()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    seeded(module, 3)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(training: Training, rows: slice = slice(None)) -> torch.Tensor:
    """Return the parameters behind ten steps."""
    for _ in range(10):
        loss: Any = nn.functional.mse_loss(training(INPUTS[rows]), TARGETS[rows])
        training.step(loss)
    return torch.cat([parameter.detach().flatten() for parameter in training.module.parameters()])


def by_hand() -> torch.Tensor:
    module, optimizer = network()
    for _ in range(10):
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(module(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_one_device_without_a_coordinator_trains_as_without_gradserver(capsys: pytest.CaptureFixture[str]) -> None:
    with gradserver.setup(*network()) as training:
        assert isinstance(training.model, DistributedDataParallel)
        assert (training.rank, training.world_size, training.devices) == (0, 1, (torch.device("cpu"),))
        assert torch.equal(train(training), by_hand())
    assert training.worker.closed
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradserver: ")]
    assert line == f"gradserver: {training.chosen}"
    assert line.startswith("gradserver: one worker without a coordinator: 1 replica on cpu")


def test_several_devices_of_one_process_share_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with gradserver.setup(*network(), devices=["cpu", "cpu:1"]) as training:
        assert isinstance(training.model.module, DataParallel)
        assert training.device == torch.device("cpu")
        torch.testing.assert_close(train(training), by_hand(), rtol=1e-12, atol=1e-12)
    assert "2 replicas on cpu" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu:1"]])
def test_workers_of_a_coordinator_average(
    devices: list[str] | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator({"default": 3}) as server:
        monkeypatch.setenv("GRADSERVER_URL", server.url)

        def work(number: int) -> torch.Tensor:
            with gradserver.setup(*network(), devices=devices, name=f"w{number}") as training:
                assert training.world_size == 3
                return train(training, slice(8 * training.rank, 8 * training.rank + 8))

        found = together(range(3), work)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], by_hand(), rtol=1e-12, atol=1e-12)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradserver: ")]
    assert len(lines) == 1, "rank 0 alone says what was chosen"
    assert lines[0].startswith("gradserver: 3 workers, plane shm")


@pytest.mark.parametrize(
    "mode", [Mode(ModeName.SYNC), Mode(ModeName.BOUNDED, 2), Mode(ModeName.ASYNC)], ids=lambda mode: str(mode.name)
)
def test_a_step_makes_all_updates_that_a_backward_leads_to(mode: Mode) -> None:
    mode, lateness = in_mode(mode, None, 0, None, None, 2)
    with coordinator({"default": Policy(2, 2, mode=mode, lateness=lateness)}) as server:

        def work(number: int) -> torch.Tensor:
            with gradserver.setup(*network(), url=server.url, name=f"w{number}", quiet=True) as training:
                with training.model.join(training.optimizer):
                    for _ in range(10 - 4 * number):
                        loss: Any = nn.functional.mse_loss(training(INPUTS[number::2]), TARGETS[number::2])
                        training.step(loss)
                assert training.worker.round > 9
                return torch.cat([parameter.detach().flatten() for parameter in training.module.parameters()])

        first, second = together(range(2), work)
    assert torch.equal(first, second)
    assert not torch.allclose(first, torch.cat([one.detach().flatten() for one in network()[0].parameters()]))


def test_a_step_waits_for_the_exchange_of_a_cadence_and_of_accumulated_gradients() -> None:
    with coordinator({"default": 2}) as server:

        def work(number: int) -> list[int]:
            options: Any = {"cadence": gradserver.CadenceOptions(anchor=3, max_anchor=3, max_total=6)}
            steps = list[int]()
            with gradserver.setup(*network(), url=server.url, rank=number, world_size=2, **options) as training:
                assert training.rank == number
                assert training.optimizer is not None
                training.optimizer.register_step_post_hook(lambda *_: steps.append(training.worker.round))
                for _ in range(3):
                    assert not steps
                    training.step(nn.functional.mse_loss(training(INPUTS[number::2]), TARGETS[number::2]))
            with gradserver.setup(*network(), url="", quiet=True) as alone:
                with alone.model.no_sync():
                    alone.step(alone(INPUTS).sum())
                assert torch.equal(alone.module[0].weight, network()[0][0].weight)  # type: ignore[index]
            return steps

        assert together(range(2), work) == [[1], [1]]


def test_devices_of_different_kinds_get_parts_by_their_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gradserver.setup(*network(), devices=["cpu", "cpu:1"]) as training:
        assert training.model.module._tracker is None
    monkeypatch.setattr(devices_of_torch, "_kind", lambda device: "slow" if device.index else "fast")
    with gradserver.setup(*network(), devices=["cpu", "cpu:1"]) as training:
        assert training.model.module._tracker is not None
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "2 replicas on cpu (fast), cpu:1 (slow); devices differ, and each gets a part of the batch by its speed"
    )


def test_a_launcher_gives_each_process_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradserver.worker import training

    found = tuple(torch.device("cuda", number) for number in range(4))
    monkeypatch.setattr(training, "checked_devices", lambda devices: found if devices is None else tuple(devices))
    assert training._devices(None) == found
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.setenv(variable, "6")
        assert training._devices(None) == (found[2],)
        assert training._devices(found[:2]) == found[:2]
        monkeypatch.delenv(variable)


def test_what_cannot_be_is_told_before_anything_is_joined() -> None:
    module, _ = network()
    _, foreign = network()
    with pytest.raises(InvalidArgumentError, match="the optimizer steps 4 parameters that are not the model's"):
        gradserver.setup(module, foreign, url="tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match="model is a SGD, and must be a torch.nn.Module"):
        gradserver.setup(foreign, module, url="tcp://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer is the class SGD, and must be a torch.optim.Optimizer"):
        gradserver.setup(module, torch.optim.SGD, url="tcp://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="devices is empty"):
        gradserver.setup(module, devices=[], url="tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match="setup has no option 'cadance': did you mean 'cadence'"):
        gradserver.setup(module, url="tcp://127.0.0.1:1", cadance=True)


def test_a_training_without_an_optimizer_has_modes_and_gradients_only() -> None:
    module, optimizer = network()
    with gradserver.setup(module, quiet=True) as training:
        assert not training.eval().model.training
        assert training.train().module.training
        with pytest.raises(InvalidArgumentError, match="step needs an optimizer"):
            training.step(training(INPUTS).sum())
        with pytest.raises(InvalidArgumentError, match="set_lr needs an optimizer"):
            training.set_lr(0.1)
    with gradserver.setup(module, optimizer, quiet=True) as training:
        training.set_lr(0.25)
        assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_a_module_that_cannot_be_wrapped_leaves_no_worker_behind() -> None:
    module, optimizer = network()
    with coordinator({"default": 1}) as server:
        with pytest.raises(InvalidArgumentError):
            gradserver.setup(module, optimizer, url=server.url, bucket_cap_mb=-1.0)
        with gradserver.setup(module, optimizer, url=server.url, quiet=True) as training:
            assert training.world_size == 1
