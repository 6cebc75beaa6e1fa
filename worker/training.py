"""`gradserver.setup`: a module on one device, on several, or beside other workers, in one line."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.nearest import did_you_mean
from gradserver.protocol.offers import summary
from gradserver.worker.client import Worker
from gradserver.worker.data_parallel.devices import Device as Device, are_alike, checked_devices, described, plain
from gradserver.worker.data_parallel.wrapper import DataParallel
from gradserver.worker.offer import LOCAL_VARIABLES, local_place
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from gradserver.worker.torch_ddp.stepping import check_steps_alone
from gradserver.worker.torch_ddp.torch_names import KEYWORDS
from gradserver.worker.torch_ddp.wrapping import check_is_optimizer

Module: TypeAlias = nn.Module
Stepper: TypeAlias = Optimizer
"""Names of torch's types for `gradserver.alone`, which does not import torch."""


class Training:
    """A module, wrapped for where it trains, with its optimizer. The loop is the same everywhere.

    It is also a context manager, which leaves the group at its end. Its call is the model's.

    Attributes:
        model: the wrapper, with the whole surface of `DistributedDataParallel` (``no_sync``, ``join``, …).
        module: the module that was given.
        optimizer: the optimizer that was given; None if none was.
        worker: the worker; without a coordinator it is alone.
        devices: devices of this process that compute.
        chosen: what was chosen, and why, as one line.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        module: nn.Module,
        optimizer: Optimizer | None,
        devices: tuple[torch.device, ...],
        chosen: str,
    ) -> None:
        self.model, self.module, self.optimizer = model, module, optimizer
        self.worker: Worker = model.worker
        self.devices, self.chosen = devices, chosen

    @property
    def rank(self) -> int:
        """The rank of this worker; 0 if it is alone."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """The number of workers; 1 without a coordinator."""
        return self.worker.world_size

    @property
    def device(self) -> torch.device:
        """The device of the module, to which inputs go."""
        return plain(self.devices[0])

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        return self.model(*inputs, **options)

    def step(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``, average them over the workers, step the optimizer, and zero them.

        In modes "bounded" and "async" the optimizer steps for each update that this leads to
        (`DistributedDataParallel.updates`). Inside `no_sync`, and between two exchanges of a cadence, gradients add up
        and it does not step.

        Args:
            loss: a tensor with one element, which depends on outputs of the model.

        Raises:
            InvalidArgumentError: no optimizer was given.
        """
        if self.optimizer is None:
            raise InvalidArgumentError("step needs an optimizer: give one to gradserver.setup(model, optimizer)")
        loss.backward()  # type: ignore[no-untyped-call]
        for _ in self.model.updates():
            self.optimizer.step()
            self.optimizer.zero_grad()

    def set_lr(self, rate: float) -> None:
        """Set the learning rate of all groups of parameters."""
        if self.optimizer is None:
            raise InvalidArgumentError("set_lr needs an optimizer: give one to gradserver.setup(model, optimizer)")
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or with False into evaluation mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(False)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        if isinstance(self.model.module, DataParallel):
            self.model.module.close()
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.model.module, DataParallel):
            self.model.module.close()
        self.worker.__exit__(kind, error, trace)


def set_up(
    connect: Callable[..., Worker],
    module: nn.Module,
    optimizer: Optimizer | None,
    devices: Iterable[Device] | None,
    url: str | None,
    quiet: bool,
    joining: dict[str, Any],
    options: dict[str, Any],
) -> Training:
    """Put ``module`` on its devices, join the group if there is one, and wrap the module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model is a {type(module).__name__}, and must be a torch.nn.Module: gradserver.setup(model, optimizer)"
        )
    if optimizer is not None:
        check_is_optimizer(optimizer)
        check_steps_alone(optimizer, "gradserver.setup")
        _check_optimizer(module, optimizer)
    _check_names(options)
    chosen = _devices(devices)
    if chosen[0].type == "cuda":
        torch.cuda.set_device(chosen[0])  # which the worker then offers to others
    is_alone = not (os.environ.get("GRADSERVER_URL") if url is None else url)
    worker = connect(url, **joining)
    try:
        inner: nn.Module = module.to(plain(chosen[0]))
        if len(chosen) > 1:
            inner = DataParallel(module, chosen, balance=not are_alike(chosen))
        model = DistributedDataParallel(inner, worker, **options)
    except BaseException:
        worker.close("the module could not be wrapped")
        raise
    line = _line(worker, chosen, is_alone)
    if worker.rank == 0 and not quiet:
        sys.stderr.write(f"gradserver: {line}\n")
    return Training(model, module, optimizer, chosen, line)


def _devices(devices: Iterable[Device] | None) -> tuple[torch.device, ...]:
    """Return the devices of this process: those that are named; else the launcher's one; else all that there are."""
    if devices is not None:
        return checked_devices(devices)
    found = checked_devices(None)
    if any(os.environ.get(name) for name in LOCAL_VARIABLES):
        return (found[local_place(os.environ, len(found))],)
    return found


def _check_optimizer(module: nn.Module, optimizer: Optimizer) -> None:
    """Raise InvalidArgumentError if the optimizer steps a parameter that is not the module's."""
    own = {id(parameter) for parameter in module.parameters()}
    foreign = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
    if foreign:
        raise InvalidArgumentError(
            f"the optimizer steps {foreign} parameters that are not the model's: make it of model.parameters(), and "
            f"give both to gradserver.setup"
        )


def _check_names(options: Iterable[str]) -> None:
    """Raise TypeError if one of these is no option of the wrapper, before any group is joined."""
    own = [*inspect.signature(DistributedDataParallel).parameters][2:-1]  # between module and worker, and torch's
    known = [*own, *KEYWORDS]
    for name in options:
        if name not in known:
            nearest = did_you_mean(name, [*own, "devices", "quiet", "group", "plane"], 0.0)
            raise TypeError(
                f"gradserver.setup has no option {name!r}{nearest} Beside its own options it has those of "
                f"gradserver.DistributedDataParallel"
            )


def _line(worker: Worker, devices: tuple[torch.device, ...], is_alone: bool) -> str:
    """Return what was chosen, and the devices."""
    here = described(devices, is_balanced=True)
    if is_alone:
        return f"one worker without a coordinator: {here}"
    offers = worker._session.membership.offers
    everywhere = f"; devices: {summary(offers)}" if offers else ""
    why = f", because {worker.plane_reason}" if worker.plane_reason else ""
    return f"{worker.world_size} workers, plane {worker.plane}{why}; rank 0 has {here}{everywhere}"
