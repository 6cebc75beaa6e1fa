"""torch.distributed's backend "gradserver": a training script changes one word.

    torch.distributed.init_process_group("gradserver")

Scripts need not import this package: torch does, by an entry point. docs/torch-backend.md is its guide.

    entry         what torch finds at `import torch`
    creating      groups, as torch asks for them
    coordinator   GRADSERVER_URL, or a coordinator that rank 0 starts
    groups        the classes that torch sees, over one table of operations
    operations    that table: each operation of torch, by the collectives of a worker
    work          operations under way, and their futures
    ddp           gradserver's wrapper, as a subclass of torch's
    rounds        gradients of torch's own wrapper, as rounds
    rendezvous    torchrun's agents: they meet at a coordinator
    reconfiguring process groups with members that change
    membership    which these are, as a coordinator decides it
    errors        gradserver's errors, which are errors of torch's backends too
    private       names of torch that are not public
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradserver.torch.ddp import DistributedDataParallel as DistributedDataParallel
    from gradserver.torch.groups import worker as worker
    from gradserver.torch.membership import Membership as Membership
    from gradserver.torch.rounds import Rounds as Rounds, hook as hook

_HOME = {
    "DistributedDataParallel": "gradserver.torch.ddp",
    "Membership": "gradserver.torch.membership",
    "Rounds": "gradserver.torch.rounds",
    "hook": "gradserver.torch.rounds",
    "worker": "gradserver.torch.groups",
}
"""Modules of the public names, which are imported when they are first used."""

__all__ = ["DistributedDataParallel", "Membership", "Rounds", "hook", "worker"]

if not TYPE_CHECKING:  # type checkers go by the imports above, and so report a name that does not exist

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
