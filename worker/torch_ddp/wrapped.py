"""The state and the copies of a module that is wrapped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.worker.client import Worker


class WrappedModule(nn.Module):
    """A module that a worker trains with others. A copy of it, or a pickle, has a module of its own, and no worker.

    Attributes:
        module: the wrapped module.
        worker: the worker.
    """

    of_the_connection: ClassVar[tuple[str, ...]] = ("worker",)
    """Names of attributes that a copy does not have."""
    module: nn.Module
    worker: Worker

    def metrics(self) -> dict[str, float]:
        """Return figures of the group and of the last exchange, by name: a flat dict, as loggers of trainers take it.

        For example ``self.log_dict(model.metrics())`` with Lightning, ``wandb.log(model.metrics())``,
        ``mlflow.log_metrics(model.metrics())``. All names begin with ``gradserver/``. A figure that is not known is
        left out.
        """
        worker = self.worker
        figures: dict[str, float] = {
            "round": worker.round,
            "world_size": worker.world_size,
            "membership_epoch": worker.epoch,
        }
        figures.update(self._figures())
        return {f"gradserver/{name}": float(value) for name, value in figures.items() if not math.isnan(value)}

    def _figures(self) -> dict[str, float]:
        """Return figures of the last exchange; NaN for one that is not known."""
        return {}

    def state_dict(self, *args: Any, unwrapped: bool = False, **kwargs: Any) -> Any:
        """Return the module's state. Unless ``unwrapped``, keys begin with ``module.``, as with torch's wrapper."""
        owner = self.module.state_dict if unwrapped else super().state_dict
        return owner(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state, with or without ``module.`` in front of its keys.

        All workers must load the same state: it is not exchanged.

        Raises:
            InvalidArgumentError: ``assign`` is true. It would replace the parameters that are exchanged.
        """
        if assign:
            raise InvalidArgumentError("assign=True would replace the parameters: load into the module, then wrap it")
        bare, prefixed = self.module.state_dict().keys(), super().state_dict().keys()
        if len(bare & state_dict.keys()) > len(prefixed & state_dict.keys()):
            return self.module.load_state_dict(state_dict, strict)
        return super().load_state_dict(state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the connection."""
        return {name: value for name, value in self.__dict__.items() if name not in self.of_the_connection}

    def __getattr__(self, name: str) -> Any:
        if name in self.of_the_connection:
            raise AttributeError(
                "this is a copy of a wrapped module, which exchanges nothing: to train it, wrap its .module"
            )
        return super().__getattr__(name)
