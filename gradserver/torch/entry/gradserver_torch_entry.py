"""Entry points of torch: `init_process_group("gradserver")` and `torchrun --rdzv-backend=gradserver` need no import.

`import torch` calls `register` in every process of an environment. So it imports nothing of gradserver, and no error of
it reaches `import torch`: the log tells of one, and `init_process_group("gradserver")` raises it. Each start of
torchrun calls `rendezvous`.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "gradserver"
DEVICES = ("cpu", "cuda")


def register() -> None:
    """Register the backend's name at torch. Its package is imported when a group of it is made."""
    try:
        _register(_create)
    except Exception as error:
        _tell_of(error)


def _register(create: Any) -> None:
    from torch.distributed import is_available

    if not is_available():
        return
    from torch.distributed import Backend

    if NAME in Backend.backend_list:
        return
    try:
        Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))
    except TypeError:
        Backend.register_backend(NAME, _refuse)


def _create(options: Any, more: Any) -> Any:
    """Make a group of this backend, as torch asks for it."""
    from gradserver.torch.creating import create

    return create(options, more)


def _refuse(*_: object) -> Any:
    """Refuse a torch that does not tell a backend which ranks a group has."""
    import torch

    raise RuntimeError(f"the backend {NAME!r} needs torch 2.3 or newer, and this is {torch.__version__}")


def _tell_of(error: Exception) -> None:
    """Have groups of this backend raise ``error``; if even that is not possible, the log tells of it."""

    def fail(*_: object) -> Any:
        raise RuntimeError(f"the backend {NAME!r} could not be registered: {error}") from error

    try:
        _register(fail)
    except Exception:
        logging.getLogger(NAME).warning("torch.distributed has no backend %r: %s", NAME, error)


def rendezvous() -> Any:
    """Return the function that makes a rendezvous of torchrun. Its module is imported when that is called."""
    return _create_rendezvous


def _create_rendezvous(parameters: Any) -> Any:
    from gradserver.torch.rendezvous import create

    return create(parameters)
