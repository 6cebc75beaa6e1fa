"""Stands in for torch's compiler where this folder is in ``PYTHONPATH``, for programs that compile nothing.

The first optimizer of a process imports `torch._dynamo`, only to leave its own methods alone. That takes 1.5 s of a
processor, as long as all of torch. Where a module of that name is there, a process group has it forget what it knows.
Whatever else is asked of the compiler loads it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _real(name: str) -> ModuleType:
    """Load a module of torch's compiler. From then on nothing stands in for it."""
    if isinstance(sys.modules.get("torch._dynamo"), _Compiler):
        del sys.modules["torch._dynamo"]
    return importlib.import_module(name)


class _Part:
    """A module of `torch._dynamo`, with the ``functions`` of it that process groups and torch's wrapper use."""

    def __init__(self, name: str, **functions: Callable[[], Any]) -> None:
        self._name = name
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(f"torch._dynamo.{self._name}"), name)


class _Compiler(ModuleType):
    """Functions of `torch._dynamo` that optimizers use."""

    trace_rules = _Part("trace_rules", clear_lru_cache=lambda: None)
    utils = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


sys.modules["torch._dynamo"] = _Compiler("torch._dynamo")
