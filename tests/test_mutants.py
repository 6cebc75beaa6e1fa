"""Tests that the faults of `tests.mutants` can be planted, and that chaos's words about them are read right."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import MUTANTS, PACKAGES, ROOT, Change, Mutant, PlantError, why_not


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    for path in {change.path for change in mutant.changes}:
        copied = tmp_path / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes((ROOT / path).read_bytes())
    for change in mutant.changes:
        change.make(tmp_path)
        assert change.path.split("/")[0] in PACKAGES
        assert "chaos" not in change.path
    for path in {change.path for change in mutant.changes}:
        assert_names_are_known(tmp_path / path)


def assert_names_are_known(path: Path) -> None:
    """Check that a file with a fault knows all its names: chaos is to find the fault, and not an ImportError."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not checked.returncode, checked.stdout
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), alias.name


def test_a_text_that_is_not_there_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(PlantError, match=r"twice\.py has 2 times, and not once:\nx = 1"):
        Change("twice.py", "x = 1", "x = 2").make(tmp_path)
    with pytest.raises(PlantError, match="has 0 times"):
        Change("absent.py", "x = 1", "x = 2").make(tmp_path)


def test_a_fault_counts_as_found_for_the_right_reason_only() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("wrong", "double", "lost", "diverged", "fault"), 0)
    nothing |= {"rounds": 90, "failed_because": []}
    twice = next(mutant for mutant in MUTANTS if mutant.name == "twice")
    assert why_not(twice, nothing) == "found nothing in 90 rounds; expected: double"
    assert why_not(twice, {**nothing, "fault": 1}) == "found only fault in 90 rounds; expected: double"
    assert why_not(twice, {**nothing, "fault": 1, "double": 3}) == ""
    assert why_not(twice, {"broken": "it had not ended"}) == "it had not ended"
    assert why_not(None, nothing) == ""
    assert why_not(None, {**nothing, "failed_because": ["1 surprises"]}) == "1 surprises"
