"""Replicas that the caller has made: checked, and given the module's parameters, buffers and modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradserver.protocol.errors import InvalidArgumentError, SizeMismatchError


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
        self._shares = shares
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
            if copies_buffers:
                for name, buffer in source._buffers.items():
                    mine = replica._buffers[name]
                    if mine is not None and buffer is not None:
                        mine.data.copy_(buffer.detach(), non_blocking=mine.is_cuda)


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
