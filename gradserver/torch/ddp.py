"""gradserver's wrapper as a subclass of torch's DistributedDataParallel, for libraries that ask which class it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from gradserver.torch.groups import worker as worker_of
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel as OfGradserver
from gradserver.worker.torch_ddp.torch_names import NAMES, LikeTorch


def _as_here(name: str) -> property:
    """Return a member of torch's wrapper that has the value of `gradserver.DistributedDataParallel`, or its refusal."""
    return property(lambda model: LikeTorch.__getattr__(model, name), doc=NAMES[name].says)


class _Kin(OfTorch):
    """torch's wrapper without its machinery: none of its members is left that would work on that."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    __setstate__ = nn.Module.__setstate__
    locals().update({name: _as_here(name) for name in NAMES if hasattr(OfTorch, name)})


class DistributedDataParallel(OfGradserver, _Kin):  # type: ignore[misc] # join: torch's has other arguments
    """Wrapper of a module that is an instance of torch's wrapper, too, and exchanges gradients as rounds.

    For example:

        torch.distributed.init_process_group("gradserver")
        model = gradserver.torch.DistributedDataParallel(model)

    Training is that of `gradserver.DistributedDataParallel`: elastic and durable groups, quorums, formats on the wire,
    policies for gradients that are not finite, robust means, norms, the ledger, `gradserver.Job`. Libraries that look
    for torch's class, as Lightning and Accelerate do, find it. Members of torch's class do what they do there, or are
    refused with what to write in their place.

    Args:
        module: as in `gradserver.DistributedDataParallel`.
        device_ids: the module's own device, or None.
        output_device: the same.
        dim: 0, as batches are not cut.
        worker: the worker. None takes that of the process group.
        process_group: a process group of the backend "gradserver"; None for the default one.
        **options: options of `gradserver.DistributedDataParallel`, and those of torch's wrapper that are known there.

    Raises:
        UsageError: neither a worker is given, nor is there a process group that has one.
        GradServerError: as in `gradserver.DistributedDataParallel`.
    """

    of_the_connection: ClassVar[tuple[str, ...]] = (*OfGradserver.of_the_connection, "_given_group")

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        worker: Worker | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if worker is None:
            worker = worker_of(process_group)
        self.__dict__["_given_group"] = process_group  # a Module takes attributes behind its own __init__ only
        super().__init__(module, worker, device_ids=device_ids, output_device=output_device, dim=dim, **options)

    @property
    def process_group(self) -> Any:  # type: ignore[override] # torch's is an attribute
        """The process group: the one that was given, else the default one. None if there is none."""
        return self.__dict__.get("_given_group") or dist.group.WORLD
