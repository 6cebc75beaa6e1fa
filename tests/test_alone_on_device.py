"""A worker with a CUDA device that trains alone: its gradients stay where they are. The CPU stands for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradserver
from gradserver import DistributedDataParallel
from gradserver.protocol.offers import Device, Offer
from gradserver.worker import offer
from gradserver.worker.planes.direct import DirectPlane
from gradserver.worker.planes.staging import Staging
from tests.models import Convolutional, Transformer, images, loss_of, state_of, tokens
from tests.replicas import ROWS, STEPS, same, sgd


@pytest.fixture(autouse=True)
def _alone_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_device(given: Offer, _: Any) -> Offer:
        device = Device("a device", "GPU-00000000-0000-0000-0000-000000000000", 1 << 30)
        return given._replace(devices=(device,), nccl="2.28.9", backends=("gloo", "nccl"))

    monkeypatch.setattr(offer, "_of_cuda", with_device)
    monkeypatch.delenv("GRADSERVER_URL", raising=False)


def trained(make: Callable[[int], nn.Module], data: Callable[[int, int], tuple[Tensor, Tensor]], **how: Any) -> Any:
    with gradserver.connect(rank=0, world_size=1, **how) as worker:
        module = make(0)
        model = DistributedDataParallel(module, worker)
        model.set_weight(3.0)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *data(step, ROWS)).backward()
            optimizer.step()
        return state_of(module), model._rounds._plane


@pytest.mark.parametrize(("make", "data"), [(Transformer, tokens), (Convolutional, images)])
def test_it_trains_with_the_bits_of_the_host_path_and_copies_nothing(
    make: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, plane = trained(make, data)
    assert isinstance(plane, DirectPlane)
    assert not any(flat.numel() > 64 for flat in plane._scratch.values())
    monkeypatch.setattr(offer, "_of_cuda", lambda given, _: given)
    through, other = trained(make, data)
    assert isinstance(other, Staging)
    assert same(state, through)


def test_a_lossy_wire_loses_what_it_loses_in_a_group() -> None:
    _, plane = trained(Transformer, tokens, wire="bf16")
    assert isinstance(plane, Staging)


def test_a_round_without_data_and_one_that_is_not_finite() -> None:
    with gradserver.connect(rank=0, world_size=1) as worker:
        module = nn.Linear(4, 2, bias=False)
        model = DistributedDataParallel(module, worker)
        model(torch.ones(1, 4)).sum().backward()
        model.abandon_round()
        assert module.weight.grad is not None
        assert module.weight.grad.eq(0).all()
        with pytest.raises(gradserver.NonFiniteError, match="weight"):
            (model(torch.ones(1, 4)).sum() * float("inf")).backward()
