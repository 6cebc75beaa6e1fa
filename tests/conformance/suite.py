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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Suite:
    """Tests for the ranks of one process group."""

    backend: str
    size: int
    """The number of ranks."""
    case: type[unittest.TestCase]
    """The class that has the tests. Its instances are told their ``rank``."""
    folder: Path
    """A folder for files."""
    skips: Mapping[int, str]
    """Exit statuses by which a test says that it is skipped, and why."""
    prepare: Callable[[str], float]
    """A call before a test in each rank. It returns the timeout of the test's process group, in seconds."""


def load(backend: str, size: int, folder: Path) -> Suite:
    """Import torch's tests for ``backend`` in a world of so many ranks.

    Once in a process: they read the environment when they are imported.
    """
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(parents=True)
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(size), "TEMP_DIR": str(folder)}
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    module: Any = importlib.import_module(MODULE) if backend == GLOO else _import_adapted(backend, common)
    # torch's own repository joins the two in the same way.
    case = type("Conformance", (module.TestDistBackend, module.DistributedTest._DistTestBase), {"__module__": __name__})

    def prepare(test: str) -> float:
        module.Barrier.barrier_id = 0
        common.common_utils.set_rng_seed()
        return float(module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout))

    skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    return Suite(backend, size, case, folder, skips, prepare)


def _import_adapted(backend: str, common: Any) -> Any:
    """Import the tests with conditions that hold for ``backend`` as they do for gloo."""
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


def names_of(case: type[unittest.TestCase], only: str) -> list[str]:
    """Return the names of the tests in which the expression ``only`` is found."""
    return [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if re.search(only, name)]
