"""Tests of what is built: its content, and that it works where nothing else is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import gradserver

pytestmark = pytest.mark.long  # to build and to install takes a while; `make check` does it

ROOT = Path(gradserver.__file__).resolve().parent.parent
CORE_DEPENDENCIES = {"numpy", "pyzmq", "msgpack", "ml_dtypes"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, away from this checkout's own settings. Return its output."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of a virtual environment with the wheel and its dependencies, and nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)
    binaries = environment / "bin"
    pip_install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(binaries / "python", *pip_install, "-c", ROOT / "constraints.txt", wheel, cwd=environment)
    return binaries


def test_wheel_has_the_version_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Version"] == gradserver.__version__


def test_wheel_has_one_root_that_is_typed_and_the_entry_point_of_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(f"gradserver-{gradserver.__version__}.dist-info/entry_points.txt").decode()
    for group in ("torch.backends", "torch.distributed.backends"):
        assert f"[{group}]\ngradserver = gradserver_torch_entry:register" in entries
    roots = {name.partition("/")[0] for name in names}
    information = f"gradserver-{gradserver.__version__}.dist-info"
    assert roots == {"gradserver", information, "gradserver_torch_entry.py"}
    assert not [name for name in names if name.startswith("gradserver/torch/entry/")]
    assert {"gradserver/py.typed", "gradserver/worker/client.py", "gradserver/protocol/wire.py"} <= names


def test_sdist_has_what_a_packager_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "tests/test_packaging.py"} <= names
    roots = {name.partition("/")[0] for name in names if "/" in name}
    assert roots <= {"gradserver", "tests", "docs", "examples", "deploy"}


def test_every_constraint_is_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", pin)] == []


def test_installs_without_torch(empty_environment: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import distributions; print(*(d.name for d in distributions()))"
    installed = set(run(empty_environment / "python", "-c", code, cwd=tmp_path).split())
    assert installed - {"pip", "setuptools"} == CORE_DEPENDENCIES | {"gradserver"}


def test_installed_package_is_used_from_its_own_place(empty_environment: Path, tmp_path: Path) -> None:
    code = "import gradserver; print(gradserver.__file__); gradserver.GradServerError"
    output = run(empty_environment / "python", "-c", code, cwd=tmp_path)
    assert Path(output.strip()).is_relative_to(empty_environment.parent)


def test_installed_command_works(empty_environment: Path, tmp_path: Path) -> None:
    command = empty_environment / "gradserver"
    assert gradserver.__version__ in run(command, "--version", cwd=tmp_path)
    help_text = run(command, "--help", cwd=tmp_path)
    assert "serve" in help_text
    assert "demo" in help_text


def test_entry_point_of_torch_is_light_where_it_is_installed(empty_environment: Path, tmp_path: Path) -> None:
    code = "import gradserver_torch_entry, sys; print(*(n for n in sys.modules if n.startswith('gradserver')))"
    assert run(empty_environment / "python", "-c", code, cwd=tmp_path).split() == ["gradserver_torch_entry"]


def test_import_is_light(tmp_path: Path) -> None:
    """Test that `gradserver --version` does not wait for numpy."""
    code = "import gradserver, sys; print(*sorted(sys.modules))"
    loaded = run(sys.executable, "-c", code, cwd=tmp_path).split()
    heavy = {"torch", "zmq", "numpy", "msgpack", "ml_dtypes"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in loaded)
    ours = {name for name in loaded if name.startswith("gradserver")}
    assert ours == {"gradserver", "gradserver.protocol", "gradserver.protocol.version"}
