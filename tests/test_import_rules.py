"""Each import rule of pyproject.toml is broken once, and the check must name both ends of the import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradserver

ROOT = Path(gradserver.__file__).resolve().parent.parent
LINT = Path(sys.executable).with_name("lint-imports")

# Module to add -> what it imports; every single import breaks a rule.
BREACHES = {
    "gradserver.protocol.outward": ["socket", "ssl", "threading", "time", "os", "io", "torch", "zmq", "pickle"],
    "gradserver.protocol.upward": [
        "gradserver",
        "gradserver.config",
        "gradserver.engine",
        "gradserver.worker.client",
    ],
    "gradserver.protocol.aside": ["gradserver.protocol.transport", "gradserver.protocol.compiled", "numba"],
    "gradserver.protocol.compiled.outward": ["threading", "os", "torch"],
    "gradserver.protocol.transport.outward": ["threading", "os", "torch"],
    "gradserver.engine.outward": ["asyncio", "multiprocessing", "random", "selectors", "torch", "zmq"],
    "gradserver.engine.upward": ["gradserver", "gradserver.runtime", "gradserver.worker.client"],
    "gradserver.engine.sideways": ["gradserver.protocol.transport"],
    "gradserver.engine.control.aside": ["gradserver.engine.data"],
    "gradserver.engine.data.aside": ["gradserver.engine.control"],
    "gradserver.reducer": ["gradserver.protocol.compiled", "numba", "llvmlite"],
    "gradserver.aside": ["gradserver.worker", "gradserver.worker.client", "torch", "pickle"],
    "gradserver.upward": ["gradserver.local", "gradserver.cli", "gradserver.tools.demo"],
    "gradserver.worker.aside": ["gradserver", "gradserver.engine", "gradserver.protocol.transport", "pickle"],
    "gradserver.worker.member.outward": ["socket", "threading", "time", "logging", "torch", "zmq"],
    "gradserver.worker.member.upward": ["gradserver.worker.client"],
    "gradserver.worker.data_parallel.upward": ["gradserver.worker.job"],
    "gradserver.worker.torch_ddp.upward": ["gradserver.worker.job", "gradserver.worker.data_parallel"],
    "gradserver.worker.planes.upward": ["gradserver.worker.torch_ddp"],
    "gradserver.worker.collectives.upward": ["gradserver.worker.client"],
}

# Module to add -> what it imports; none of it breaks a rule.
PERMITTED = {
    "gradserver.protocol.fine": ["struct", "msgpack", "numpy", "gradserver.protocol.errors"],
    "gradserver.engine.fine": ["heapq", "gradserver.protocol.errors", "gradserver.engine"],
    "gradserver.worker.member.fine": ["numpy", "gradserver.protocol.errors", "gradserver.worker.member"],
    "gradserver.protocol.transport.fine": ["zmq", "socket", "time", "logging", "gradserver.protocol.errors"],
    "gradserver.protocol.compiled.cache": ["os", "fcntl", "subprocess", "shutil"],
    "gradserver.protocol.compiled.loader": ["os", "threading", "logging", "time"],
    "gradserver.protocol.compiled.fine": ["numba", "llvmlite", "numpy", "gradserver.protocol.codecs"],
    "gradserver.daemon": ["gradserver.protocol.compiled"],
    "gradserver.worker.workspace": ["gradserver.protocol.compiled"],
    "gradserver.transport.fine": ["gradserver.protocol.transport", "zmq"],
    "gradserver.worker.transport.fine": ["gradserver.protocol.transport", "zmq", "threading"],
    "gradserver.worker.job.fine": ["gradserver.worker.torch_ddp", "gradserver.worker.session"],
    "gradserver.worker.fine": ["torch", "zmq", "threading", "gradserver.protocol.errors"],
    "gradserver.fine": ["gradserver", "gradserver.engine", "zmq", "threading", "gradserver.protocol.errors"],
    "gradserver.local.fine": ["gradserver.worker.client"],
    "gradserver.alone": ["gradserver.worker.client", "gradserver.local"],
    "gradserver.cli.fine": ["gradserver.worker.client", "gradserver.local", "gradserver.tools.demo"],
    "gradserver.tools.demo.fine": ["gradserver", "torch"],
}

# A skeleton of the project: the rules are about names, and name more modules than a test should depend on.
MODULES = [
    *("gradserver.protocol", "gradserver.protocol.errors", "gradserver.protocol.transport"),
    *("gradserver.protocol.compiled", "gradserver.protocol.codecs"),
    *("gradserver.worker", "gradserver.worker.client", "gradserver.worker.member"),
    *(
        "gradserver.worker.job",
        "gradserver.worker.data_parallel",
        "gradserver.worker.torch_ddp",
        "gradserver.worker.planes",
        "gradserver.worker.data",
        "gradserver.worker.connect",
    ),
    *("gradserver.worker.collectives", "gradserver.worker.learner", "gradserver.worker.session"),
    *("gradserver", "gradserver.engine", "gradserver.engine.control", "gradserver.engine.data"),
    *("gradserver.runtime", "gradserver.config"),
    *("gradserver.cli", "gradserver.tools", "gradserver.tools.demo", "gradserver.local", "gradserver.alone"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT), "--no-logo", "--no-cache"]
    wide = {**os.environ, "COLUMNS": "500"}  # no line of the report is wrapped
    return subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, check=False)


def write_project(folder: Path, extra: dict[str, list[str]]) -> None:
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module in MODULES:
        write_module(folder, f"{module}.__init__", [])
    for module, imports in extra.items():
        write_module(folder, module, imports)


def write_module(folder: Path, module: str, imports: list[str]) -> None:
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"import {name}\n" for name in imports))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the check's output for a project with all the breaches."""
    folder = tmp_path_factory.mktemp("breached")
    write_project(folder, BREACHES)
    result = lint(folder)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("module", "imported"), [(module, name) for module, names in BREACHES.items() for name in names]
)
def test_breach_is_reported(report: str, module: str, imported: str) -> None:
    assert f"{module} -> {imported} (l." in report


def test_every_rule_is_broken_by_some_breach(report: str) -> None:
    assert "Contracts: 0 kept, 13 broken." in report


def test_what_the_rules_permit_passes(tmp_path: Path) -> None:
    write_project(tmp_path, PERMITTED)
    result = lint(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_project_itself_keeps_the_rules() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
