"""Modules with parameters that change after wrapping: replicas stay alike, or the change is refused by name."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from gradserver import DataParallel, DistributedDataParallel, LocalSGD
from gradserver.protocol.errors import DTypeError, GradServerError, UsageError
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.composition import Composition
from tests.models import seeded
from tests.replicas import alone, on

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")

_swapping = threading.Lock()
"""Torch has one setting for all threads."""

Change = Callable[[Any], object]


class Network(nn.Module):
    """Two layers, and a place for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        seeded(self, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs)) * self.frozen
        adapter = getattr(self, "adapter", None)
        outputs: Tensor = self.head(hidden) if hasattr(self, "head") else hidden
        return outputs if adapter is None else outputs + adapter(inputs)


@contextmanager
def swapping() -> Iterator[None]:
    with _swapping:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assign(model: Any) -> None:
    model.module.load_state_dict(copied(model.module), assign=True)


def to_meta_and_back(model: Any) -> None:
    state = copied(model.module)
    model.module.to("meta").to_empty(device="cpu").load_state_dict(state)


def to_meta(model: Any) -> None:
    model.module.to("meta")


def another_module(model: Any) -> None:
    model.module = copy.deepcopy(model.module)


def adapter(model: Any) -> None:
    model.module.adapter = nn.Linear(3, 2)


def new_head(model: Any) -> None:
    model.module.head = nn.Linear(4, 2)


def new_parameter(model: Any) -> None:
    model.module.body.weight = nn.Parameter(model.module.body.weight.detach().clone())


def no_head(model: Any) -> None:
    del model.module.head


def thaw(model: Any) -> None:
    model.module.frozen.requires_grad_()


def swap(model: Any) -> None:
    with swapping():
        model.module.to(torch.float64).to(torch.float32)


def swap_in_load(model: Any) -> None:
    with swapping():
        model.module.load_state_dict(copied(model.module))


def prune_body(model: Any) -> None:
    prune.l1_unstructured(model.module.body, "weight", 0.25)  # type: ignore[no-untyped-call]


def compile_module(model: Any) -> None:
    model.module = torch.compile(model.module, backend="eager")


REFUSED: list[tuple[Change, str]] = [
    (assign, r"'body.weight' was replaced .*\(so were 'body.bias', 'head.weight', 'head.bias'\)"),
    (to_meta_and_back, r"'body.weight' was replaced"),
    (to_meta, r"'body.weight' was replaced"),
    (another_module, r"'body.weight' was replaced"),
    (new_head, r"'head.weight' was replaced .*\(so was 'head.bias'\)"),
    (new_parameter, r"'body.weight' was replaced"),
    (adapter, r"'adapter.weight' came into the module"),
    (lambda model: nn.utils.weight_norm(model.module.body), r"'body.weight_g' came into the module"),
    (lambda model: parametrizations.weight_norm(model.module.body), r"original0' came into the module"),
    (no_head, r"'head.weight' left the module"),
    (thaw, r"'frozen' was frozen when the module was wrapped"),
]
SWAPPED: list[tuple[Change, str]] = [
    (swap, r"'body.weight' got another tensor"),
    (swap_in_load, r"'body.weight' got another tensor"),
    (lambda model: model.module.double(), r"'body.weight' is torch.float64 on cpu, but .* torch.float32"),
    (lambda model: model.bfloat16(), r"'body.weight' is torch.bfloat16"),
]
WITH_BUFFERS: list[Change] = [
    lambda model: parametrizations.spectral_norm(model.module.body),
    lambda model: parametrizations.orthogonal(model.module.body),
    prune_body,
]
SAME: list[Change] = [
    compile_module,
    lambda model: model.module.to(torch.float32),
    lambda model: model.load_state_dict(copied(model.module)),
    lambda model: model.module.register_parameter("unused", nn.Parameter(torch.ones(2), requires_grad=False)),
]


def steps(model: Any, worker: Worker) -> Tensor:
    """Return all parameters after three steps, with other inputs at each worker."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = next(model.parameters()).dtype
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step + worker.rank, dtype=kind)).square().mean().backward()
        optimizer.step()
        if isinstance(model, LocalSGD):
            model.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(("change", "text"), [*REFUSED, *SWAPPED])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_a_change_is_refused_in_the_next_forward(
    change: Change, text: str, options: dict[str, Any], later: bool
) -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Network(), worker, **options)
        if later:
            steps(model, worker)
        change(model)
        with pytest.raises((UsageError, DTypeError), match=text):
            model(torch.ones(2, 3))
        assert worker.round == (3 if later else 0)

    on(2, work)


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_local_sgd_refuses_it_too(change: Change, text: str) -> None:
    def work(worker: Worker) -> None:
        model = LocalSGD(Network(), worker, every=2)
        change(model)
        with pytest.raises(UsageError, match=text):
            model(torch.ones(2, 3))
        with pytest.raises(UsageError, match=text):
            model.step()

    on(2, work)


@pytest.mark.parametrize("change", WITH_BUFFERS)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda module, worker: LocalSGD(module, worker, every=1)])
def test_a_change_that_brings_buffers_is_refused_by_their_names(change: Change, wrap: Callable[..., Any]) -> None:
    def work(worker: Worker) -> None:
        model = wrap(Network(), worker)
        change(model)
        with pytest.raises(UsageError, match=r"buffer 'body\.[\w.]+' has come since the module was wrapped"):
            model(torch.ones(2, 3))

    on(2, work)


@pytest.mark.parametrize("change", SAME)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda module, worker: LocalSGD(module, worker, every=1)])
def test_a_change_that_keeps_the_parameters_keeps_replicas_alike(change: Change, wrap: Callable[..., Any]) -> None:
    def work(worker: Worker) -> Tensor:
        model = wrap(Network(), worker)
        change(model)
        return steps(model, worker)

    one, other = on(2, work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("change", [swap, swap_in_load, lambda model: model.module.double()])
def test_local_sgd_follows_conversions(change: Change) -> None:
    def work(worker: Worker) -> Tensor:
        model = LocalSGD(Network(), worker, every=1)
        change(model)
        return steps(model, worker)

    one, other = on(2, work)
    assert torch.equal(one, other)


def test_a_parameter_that_a_forward_makes_is_refused_in_this_forward() -> None:
    class Lazy(Network):
        def forward(self, inputs: Tensor) -> Tensor:
            self.scale = nn.Parameter(torch.ones(2))
            return super().forward(inputs) * self.scale

    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Lazy(), worker)
        with pytest.raises(UsageError, match=r"'scale' came into the module"):
            model(torch.ones(2, 3))

    on(2, work)


def test_a_change_is_refused_where_the_wrapper_is_not_called_or_in_eval_mode() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Network(), worker)
        adapter(model)
        with pytest.raises(UsageError, match=r"'adapter.weight' came into the module"):
            model.module(torch.ones(2, 3)).sum().backward()
        model = DistributedDataParallel(Network(), worker).eval()
        assign(model)
        with torch.no_grad():
            assert model(torch.ones(2, 3)).shape == (2, 2)
        with pytest.raises(UsageError, match=r"'body.weight' was replaced"):
            model(torch.ones(2, 3)).sum().backward()
        assert worker.round == 0

    on(2, work)


def test_functional_call_of_the_wrapper_is_refused_and_of_its_module_is_right() -> None:
    """Test a loss of weights that were updated once, as in meta-learning: gradients are those of the parameters."""

    def backward(module: Any, inputs: Tensor, module_called: nn.Module) -> Tensor:
        weights = dict(module_called.named_parameters())
        gradients = torch.autograd.grad(module(inputs).sum(), [*weights.values()], create_graph=True)
        faster = {name: weight - 0.1 * one for (name, weight), one in zip(weights.items(), gradients, strict=True)}
        torch.func.functional_call(module_called, faster, (inputs,)).square().mean().backward()
        return torch.cat([weight.grad.reshape(-1) for weight in weights.values() if weight.grad is not None])

    def work(worker: Worker) -> Tensor:
        model = DistributedDataParallel(_two()[0], worker)
        inputs = torch.ones(2, 3) * (1 + worker.rank)
        with pytest.raises(UsageError, match=r"functional_call give it model.module"):
            backward(model, inputs, model)
        return backward(model, inputs, model.module)

    each = [backward(module, torch.ones(2, 3) * rank, module) for rank, module in enumerate(_two(), 1)]
    for found in on(2, work):
        torch.testing.assert_close(found, (each[0] + each[1]) / 2)


def _two() -> list[nn.Module]:
    modules: list[nn.Module] = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for module in modules:
        seeded(module, 1)
    return modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_another_type_than_the_parameters_are_refused(dtype: torch.dtype) -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(_two()[0], worker)
        model.module.weight.grad_dtype = dtype
        with pytest.raises(DTypeError, match=f"'weight' is {dtype}, and the parameter torch.float32.*grad_dtype"):
            model(torch.ones(2, 3)).sum().backward()

    if not hasattr(nn.Parameter(torch.ones(1)), "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    alone(work)


def test_an_attribute_of_the_module_is_named_where_the_wrapper_has_none() -> None:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(Network(), worker)
        with pytest.raises(AttributeError, match=r"no attribute 'body'. The wrapped module has it: model.module.body"):
            model.body  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
            model.other  # noqa: B018
        assert not hasattr(model, "body")

    alone(work)


def test_copies_of_a_module_share_its_worker_and_pickles_have_none() -> None:
    def work(worker: Worker) -> None:
        module: Any = Network()
        module.worker = worker
        averaged: Any = torch.optim.swa_utils.AveragedModel(module)
        assert averaged.module.worker is copy.copy(worker) is worker
        with pytest.raises(
            TypeError, match=r"a worker is a connection of this process, and cannot be pickled: .*connect"
        ):
            pickle.dumps(module)

    alone(work)


def test_ignored_and_frozen_parameters_may_be_replaced() -> None:
    def work(worker: Worker) -> Tensor:
        module: Any = Network()
        module.adapter = seeded_linear()
        module._ddp_params_and_buffers_to_ignore = ["adapter.weight", "adapter.bias"]
        model = DistributedDataParallel(module, worker)
        module.adapter = seeded_linear()
        module.frozen = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        steps(model, worker)
        return torch.cat([module.body.weight.detach().reshape(-1), module.head.bias.detach()])

    one, other = on(2, work)
    assert torch.equal(one, other)


def seeded_linear() -> nn.Linear:
    layer = nn.Linear(3, 2)
    seeded(layer, 2)
    return layer


def test_a_discriminator_may_be_frozen_and_thawed() -> None:
    def work(worker: Worker) -> Tensor:
        model = DistributedDataParallel(Network(), worker)
        model.requires_grad_(False)
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        for parameter in (*model.module.body.parameters(), *model.module.head.parameters()):  # type: ignore[union-attr]
            parameter.requires_grad_()
        return steps(model, worker)

    one, other = on(2, work)
    assert torch.equal(one, other)


def test_replicas_of_one_process_follow_another_module() -> None:
    model = DataParallel(Network(), ["cpu", "cpu:1"])
    inputs = torch.ones(4, 3)
    model(inputs)
    for change in (assign, another_module, new_head, adapter):
        change(model)
        with torch.no_grad():
            model.module.head.bias.add_(1.0)  # type: ignore[union-attr, operator]
        model.zero_grad()
        torch.testing.assert_close(model(inputs), model.module(inputs))
        model(inputs).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    model.close()


def test_the_check_names_at_most_nine_and_takes_no_part_in_a_copy() -> None:
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(12))
    composition = Composition(module, list(module.named_parameters()))
    composition.check()
    another = copy.deepcopy(module)
    with pytest.raises(GradServerError, match=r"'0.weight' was replaced .* '8.weight' and 3 more\)"):
        composition.check(another)

    def work(worker: Worker) -> None:
        for model in (DistributedDataParallel(Network(), worker), LocalSGD(Network(), worker)):
            plain: Any = copy.deepcopy(model)
            plain.module.head = nn.Linear(4, 2)
            assert plain(torch.ones(1, 3)).shape == (1, 2)

    alone(work)
