"""Checks of what is wrapped: the module, its parameters, its outputs, and arguments that torch's wrapper has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, UsageError
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.module_buffers import names_of_buffers
from gradserver.worker.torch_ddp.wrapped import WrappedModule


def checked_worker(
    module: object,
    worker: object,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    process_group: object,
    call: str = "DistributedDataParallel(module, worker)",
) -> Worker:
    """Return ``worker`` if the arguments of ``call`` are possible; else raise an error that says what to give."""
    connected = f"worker = gradserver.connect(); model = gradserver.{call}"
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, and must be a torch.nn.Module: {connected}")
    if isinstance(module, WrappedModule):
        raise InvalidArgumentError(
            f"module is a {type(module).__name__}, which a worker exchanges already: wrap its .module instead"
        )
    if process_group is not None:
        raise TypeError(f"process_group= belongs to torch.distributed. Groups are workers': {connected}")
    if worker is None:
        raise TypeError(f"there is no worker to exchange gradients with: {connected}")
    if not isinstance(worker, Worker):
        raise TypeError(f"worker is a {type(worker).__name__}, and must be what connect returns: {connected}")
    there = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    for option, devices in (("device_ids", device_ids), ("output_device", output_device)):
        for device in devices if isinstance(devices, Sequence) and not isinstance(devices, str) else (devices,):
            if device is not None and {_device(device)} != there:
                found = ", ".join(sorted(map(str, there))) or "no device"
                raise TypeError(
                    f"{option}={devices!r} is not needed, and moves nothing: this module is on {found}. Move it with "
                    f"module.to(device) first, and then wrap it; one process trains on one device"
                )
    return worker


def check_is_optimizer(optimizer: object) -> None:
    """Raise TypeError unless this is an optimizer of torch."""
    if not isinstance(optimizer, Optimizer):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise TypeError(
            f"optimizer is {what}, and must be a torch.optim.Optimizer: optimizer = torch.optim.AdamW("
            f"module.parameters())"
        )


def _device(device: int | str | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def ignored_names(module: nn.Module, buffers: Iterable[str]) -> frozenset[str]:
    """Return the names of the parameters and buffers that are not exchanged."""
    known, named = names_of_buffers(module), frozenset(buffers)
    for name in sorted(named.difference(known)):
        have = f"its buffers are {', '.join(map(repr, known[:16]))}" if known else "it has no buffers"
        raise InvalidArgumentError(f"buffers_to_ignore names {name!r}, which is not a buffer of this module: {have}")
    return named.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _called(path: str) -> str:
    """Return a module by its path, which the wrapped one itself has not."""
    return f"module {path!r}" if path else "the module"


def check_module(module: nn.Module, ignored: Collection[str] = ()) -> None:
    """Refuse what cannot be trained as a replica. Raises InvalidArgumentError, or LayoutError for sparse gradients."""
    for path, part in module.named_modules():
        own = part.named_parameters(path, recurse=False)
        trained = any(parameter.requires_grad and name not in ignored for name, parameter in own)
        if trained and getattr(part, "sparse", False) is True:
            raise LayoutError(
                f"{_called(path)} is an {type(part).__name__} with sparse=True, and only dense gradients travel: "
                f"build it with sparse=False"
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidArgumentError(
                f"{_called(path)} is a torch.nn.SyncBatchNorm, which needs a process group of torch.distributed: "
                f"before wrapping call module = gradserver.convert_sync_batchnorm(module, worker)"
            )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
            raise InvalidArgumentError(
                f"parameter {name!r} is a DTensor, of which this process has a part only: gradserver keeps whole "
                f"replicas alike. Wrap a module that neither FSDP nor tensor parallelism has sharded"
            )
        if type(parameter).__name__ == "FlatParameter" and name not in ignored:
            raise InvalidArgumentError(
                f"parameter {name!r} is FSDP's, of which this process has a part only: gradserver keeps whole replicas "
                f"alike. Wrap a module that FSDP has not wrapped"
            )
        if hasattr(parameter, "_in_backward_optimizers") and name not in ignored:
            raise InvalidArgumentError(
                f"the optimizer of parameter {name!r} steps inside backward (_apply_optimizer_in_backward), before "
                f"gradients are averaged: step it after backward()"
            )


def is_exchangeable(name: str, parameter: nn.Parameter) -> bool:
    """Return whether there is anything to exchange; raise for parameters that cannot be exchanged."""
    if isinstance(parameter, nn.UninitializedParameter):
        raise InvalidArgumentError(f"parameter {name!r} has no shape yet: run the lazy module once before wrapping it")
    if parameter.device.type not in ("cpu", "cuda"):
        then = "give it memory first, as module.to_empty(device='cpu') does" if parameter.is_meta else "move it first"
        raise LayoutError(f"parameter {name!r} is on {parameter.device}; gradients travel from cpu and cuda: {then}")
    if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
        raise DTypeError(f"parameter {name!r} is {parameter.dtype}, which has no mean")
    return parameter.numel() > 0


def check_mode(worker: Worker, what: str) -> None:
    """Raise UsageError if ``worker`` is in a group where rounds do not wait for all, and ``what`` needs that."""
    if worker.mode != "sync":
        raise UsageError(
            f"{what} needs a group of mode 'sync', where each round has all workers, and group {worker.group!r} has "
            f"mode {worker.mode!r}: start the coordinator with --mode sync for this group"
        )


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a forward's result."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
