"""The tests of process groups that torch's wheel has, for a backend that torch does not know.

They are written for gloo, NCCL, MPI and UCC: conditions on these names decide which tests run. Here conditions on gloo
hold for the other backend, too. So it must pass what gloo must pass.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
import unittest
from pathlib import Path
from typing import Any, Final

GLOO: Final = "gloo"
MODULE: Final = "torch.testing._internal.distributed.distributed_test"
CONDITIONS: Final = {
    r'\{"gloo"\}': '{{"gloo", "{0}"}}',
    r'BACKEND != "gloo"': 'BACKEND not in ("gloo", "{0}")',
    r'BACKEND == "gloo"': 'BACKEND in ("gloo", "{0}")',
}
"""Conditions on gloo in the text of torch's tests, and what they become for the backend in place of ``{0}``."""


class SuiteError(Exception):
    """The error of tests that cannot be adapted, or not be run. The text says what is missing."""


def adapted(text: str, backend: str) -> str:
    """Return the text of torch's tests with conditions that hold for ``backend`` as they do for gloo."""
    for condition, becomes in CONDITIONS.items():
        text, count = re.subn(condition, becomes.format(backend), text)
        if not count:
            raise SuiteError(f"{MODULE} has no text like {condition} any more: how does it speak of gloo now?")
    return text


def load(backend: str, world: int, folder: Path) -> Any:
    """Import torch's tests for ``backend`` in a world of so many ranks. Temporary files are in ``folder``.

    Once in a process: they read the environment when they are imported.
    """
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(parents=True)
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(world), "TEMP_DIR": str(folder)}
    if backend == GLOO:
        return importlib.import_module(MODULE)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    cases = common.DistTestCases
    for names in (*cases.backend_feature.values(), *cases.skip_collective.values()):
        if GLOO in names:
            names.add(backend)
    cases.backend_feature["plugin"].add(backend)
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise SuiteError(f"this torch has no {MODULE}")
    module = types.ModuleType(MODULE)
    module.__file__, module.__spec__, module.__package__ = spec.origin, spec, spec.parent
    sys.modules[MODULE] = module
    text = adapted(Path(spec.origin).read_text("utf-8"), backend)
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def case_of(module: Any) -> type[unittest.TestCase]:
    """Return the class that has all tests. torch's own repository joins the two in the same way."""
    bases = module.TestDistBackend, module.DistributedTest._DistTestBase
    return type("Conformance", bases, {"__module__": __name__})


def names_of(case: type[unittest.TestCase], only: str) -> list[str]:
    """Return the names of the tests in which the expression ``only`` is found."""
    return [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if re.search(only, name)]
