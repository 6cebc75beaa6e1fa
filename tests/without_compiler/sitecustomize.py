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


class _Rules:
    """The function of `torch._dynamo.trace_rules` that process groups use."""

    @staticmethod
    def clear_lru_cache() -> None: ...


class _Compiler(ModuleType):
    """Functions of `torch._dynamo` that optimizers use."""

    trace_rules = _Rules

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


sys.modules["torch._dynamo"] = _Compiler("torch._dynamo")
