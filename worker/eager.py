"""Exclusion of this package from torch.compile: what it does is communication, which no compiler can see through.

Dynamo runs the functions of files that it skips as they are, and compiles the caller's code around them. Nothing here
imports Dynamo, which takes seconds. Its rules hear of this package as soon as something else imports them.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_RULES: Final = "torch._dynamo.trace_rules"
_PACKAGE: Final = __name__.partition(".")[0]
_COMPILED: Final = frozenset({"tools"})
"""Parts of this package that may be compiled: the demo's model is a user's, for Dynamo."""


class _Watch(MetaPathFinder):
    """A finder that finds nothing, and notices when Dynamo's rules are imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  (MetaPathFinder's signature)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the specification that other finders have of Dynamo's rules; None of any other module."""
        if fullname != _RULES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _exclude(module)

            loader.exec_module = exec_module
        return spec


def _exclude(rules: Any) -> None:
    """Add the parts of this package to those that Dynamo skips."""
    for part in pkgutil.iter_modules([str(Path(__file__).parent.parent)]):
        if part.name not in _COMPILED:
            rules.add(f"{_PACKAGE}.{part.name}")


def run_eagerly() -> None:
    """Exclude this package from compilation, now or when Dynamo is imported."""
    if any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    rules = sys.modules.get(_RULES)
    if rules is None:
        sys.meta_path.insert(0, _Watch())
    else:
        _exclude(rules)


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs the present backward."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))
