"""Replicas that the caller has made: checked, and given the module's parameters, buffers and modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradserver.protocol.errors import InvalidArgumentError, SizeMismatchError
from gradserver.worker.data_parallel.copies import has_memory


def check_count(replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Check that there is a replica for each further device.

    Raises:
        InvalidArgumentError: there are more or fewer, or one is there twice.
    """
    if len(replicas) != len(devices) - 1:
        raise InvalidArgumentError(
            f"replicas has {len(replicas)} modules for {len(devices)} devices: the module itself is the first replica, "
            f"so give {len(devices) - 1}, in the order of the devices"
        )
    if len({id(replica) for replica in replicas}) < len(replicas):
        raise InvalidArgumentError("replicas has a module twice: each replica is a module of its own")


class GivenReplica:
    """A further replica that the caller has made. Its attributes and hooks are its own.

    Args:
        source: the module that it follows.
        replica: the replica.
        rank: its place among all replicas.
        device: its device.
        shares: whether that is the module's device, so that its parameters are the module's own.
    """

    def __init__(self, source: nn.Module, replica: nn.Module, rank: int, device: torch.device, shares: bool) -> None:
        self.module = replica.to(device)
        self._shares, self._device = shares, device
        _check_alike(source, replica, rank)
        parts = dict(replica.named_modules(remove_duplicate=False))
        self._pairs = [(part, parts[path]) for path, part in source.named_modules(remove_duplicate=False)]

    def follow(self, parameters: Mapping[int, Tensor], copies_buffers: bool) -> None:
        """Take the module's parameters and modes, and its buffers if ``copies_buffers`` is true."""
        for source, replica in self._pairs:
            replica.training = source.training
            own: dict[str, Tensor | None] = replica._parameters
            for name, parameter in source._parameters.items():
                own[name] = parameter if parameter is None or self._shares else parameters[id(parameter)]
            with torch.inference_mode(False), torch.no_grad():
                follow_buffers(source, replica._buffers, self._device, copies_buffers)


def follow_buffers(source: nn.Module, mine: dict[str, Tensor | None], device: torch.device, copies: bool) -> None:
    """Make ``mine`` the buffers of ``source``, as it has them now, on ``device``. With ``copies`` values are new."""
    for name in mine.keys() - source._buffers.keys():
        del mine[name]
    for name, buffer in source._buffers.items():
        own = mine.get(name)
        if buffer is None:
            mine[name] = None
        elif not has_memory(buffer):
            if own is None or copies:
                mine[name] = buffer.detach().to(device, copy=True)
        elif own is None or own.shape != buffer.shape or own.dtype != buffer.dtype:
            mine[name] = torch.empty_like(buffer, device=device).copy_(buffer)
        elif copies:
            # Past autograd's counters, as a graph of before may still have it, and its values do not matter there.
            own.data.copy_(buffer, non_blocking=own.is_cuda)


def _check_alike(source: nn.Module, replica: nn.Module, rank: int) -> None:
    """Compare modules, parameters and buffers by name, shape and type. Raises SizeMismatchError."""
    theirs = dict(_described(replica))
    for name, shown in _described(source):
        other = theirs.pop(name, "not there")
        if other != shown:
            raise SizeMismatchError(f"{name} is {shown} in the module, and {other} in replica {rank}")
    for name, shown in theirs.items():
        raise SizeMismatchError(f"{name} is not there in the module, and {shown} in replica {rank}")


def _described(module: nn.Module) -> Iterator[tuple[str, str]]:
    for path, _ in module.named_modules(remove_duplicate=False):
        yield f"module {path!r}", "there"
    named = (("parameter", module.named_parameters), ("buffer", module.named_buffers))
    for kind, list_all in named:
        for name, tensor in list_all(remove_duplicate=False):
            yield f"{kind} {name!r}", f"{tuple(tensor.shape)} of {tensor.dtype}"
