"""gradserver's wrapper as a subclass of torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

import gradserver
from gradserver import Job, LocalCluster, UsageError
from gradserver.torch.ddp import DistributedDataParallel
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.torch_names import NAMES
from tests.cluster import add_waiting
from tests.models import Transformer, loss_of, state_of, tokens
from tests.replicas import same


def train(worker: Worker, /, wrapper: type[gradserver.DistributedDataParallel], **options: Any) -> dict[str, Tensor]:
    model = wrapper(Transformer(), worker=worker, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, *tokens(step, 2, seed=worker.rank)).backward()
        optimizer.step()
    return state_of(model.module)


@pytest.mark.parametrize("options", [{}, {"device_ids": None, "dim": 0}, {"gradient_as_bucket_view": False}])
def test_it_is_an_instance_of_both_and_trains_as_gradservers(options: dict[str, Any]) -> None:
    assert issubclass(DistributedDataParallel, OfTorch)
    assert issubclass(DistributedDataParallel, gradserver.DistributedDataParallel)
    with LocalCluster(2) as cluster:
        here = cluster.run(train, DistributedDataParallel, **options)
    with LocalCluster(2) as cluster:
        there = cluster.run(train, gradserver.DistributedDataParallel)
    assert same(here[0], here[1])
    assert same(here[0], there[0])


def test_members_of_torchs_class_have_values_or_are_refused_as_in_gradservers() -> None:
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for wrapper in (DistributedDataParallel, gradserver.DistributedDataParallel):
                model = wrapper(nn.Linear(2, 1), worker=worker)
                for name in NAMES:
                    try:
                        told = repr(getattr(model, name)).split(" at 0x")[0]
                    except AttributeError as error:
                        told = str(error)
                    found.setdefault(name, []).append(told)
            return found

        ((found),) = cluster.run(run)
    del found["process_group"]  # the subclass has one
    assert {name: told for name, told in found.items() if told[0] != told[1]} == {}


def test_no_method_of_torchs_class_works_on_machinery_that_is_not_there() -> None:
    """Test that each public member of torch's class is gradserver's, in the table of members, or of any module."""
    module = set(dir(nn.Module))
    here = set(dir(gradserver.DistributedDataParallel))
    public = {name for name in vars(OfTorch) if not name.startswith("_")}
    assert public - module - here - NAMES.keys() == set()


def test_torchs_arguments_keep_their_places_and_wrong_ones_are_refused() -> None:
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> None:
            with pytest.raises(TypeError, match="device_ids=.* is not needed"):
                DistributedDataParallel(nn.Linear(1, 1), [0], worker=worker)
            with pytest.raises(TypeError, match="dim=1 is an option of torch's wrapper"):
                DistributedDataParallel(nn.Linear(1, 1), None, None, 1, worker=worker)
            with pytest.raises(TypeError, match="bucket_cap"):
                DistributedDataParallel(nn.Linear(1, 1), worker=worker, bucket_cap=25)

        cluster.run(run)


def test_without_a_worker_and_a_process_group_it_says_what_to_make() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        DistributedDataParallel(nn.Linear(1, 1))


def test_its_process_group_is_the_one_that_was_given() -> None:
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> None:
            group: Any = object()
            model = DistributedDataParallel(nn.Linear(2, 1), worker=worker, process_group=group)
            assert model.process_group is group
            assert copy.deepcopy(model).process_group is None
            assert DistributedDataParallel(nn.Linear(2, 1), worker=worker).process_group is None

        cluster.run(run)


def test_a_copy_and_a_pickle_have_the_module_and_no_worker() -> None:
    with LocalCluster(1) as cluster:

        def run(worker: Worker) -> None:
            model = DistributedDataParallel(nn.Linear(2, 1), worker=worker)
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert same(state_of(other), state_of(model))
                with pytest.raises(AttributeError, match="a copy of a wrapped module"):
                    _ = other.worker

        cluster.run(run)


def test_a_worker_joins_a_group_that_trains_with_it(tmp_path: Path) -> None:
    with LocalCluster(2, elastic=(1, 3)) as cluster:

        def run(worker: Worker) -> tuple[int, dict[str, Tensor]]:
            model = DistributedDataParallel(Transformer(), worker=worker)
            job = Job(model, torch.optim.AdamW(model.parameters(), lr=0.01), checkpoint=tmp_path)
            while job.round < 8:
                loss_of(model, *tokens(job.round, 2, seed=worker.rank)).backward()
                job.step()
                if job.round == 2 and worker.name == "worker-0":
                    add_waiting(cluster)
            return job.round, state_of(model)

        first, *others = cluster.run(run)
    assert len(others) == 2
    for other in others:
        assert other[0] == first[0]
        assert same(other[1], first[1])


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, gradserver.DistributedDataParallel])
def test_metrics_are_a_flat_dict_of_numbers(wrapper: type[gradserver.DistributedDataParallel]) -> None:
    with LocalCluster(2) as cluster:

        def run(worker: Worker) -> tuple[dict[str, float], dict[str, float], float]:
            model = wrapper(nn.Linear(2, 1), worker=worker, max_grad_norm=100.0)
            before = model.metrics()
            model.set_weight(3.0)
            model(torch.ones(4, 2)).sum().backward()
            return before, model.metrics(), model.grad_norm

        for before, after, norm in cluster.run(run):
            assert before == {**before, "gradserver/round": 0.0, "gradserver/world_size": 2.0}
            assert "gradserver/grad_norm" not in before
            assert all(type(value) is float for value in after.values())
            assert after.pop("gradserver/exchange_seconds") > 0
            epoch = after.pop("gradserver/membership_epoch")
            assert epoch >= 1
            assert after == {
                "gradserver/round": 1.0,
                "gradserver/world_size": 2.0,
                "gradserver/total_weight": 6.0,
                "gradserver/grad_norm": norm,
                "gradserver/own_grad_norm": pytest.approx(norm),
                "gradserver/skipped": 0.0,
                "gradserver/left_out": 0.0,
            }


def test_metrics_of_local_sgd_are_those_of_the_group() -> None:
    with LocalCluster(1) as cluster:
        ((found),) = cluster.run(lambda worker: gradserver.LocalSGD(nn.Linear(2, 1), worker, every=2).metrics())
    assert found == {**found, "gradserver/round": 0.0, "gradserver/world_size": 1.0}
    assert found.keys() == {"gradserver/round", "gradserver/world_size", "gradserver/membership_epoch"}
