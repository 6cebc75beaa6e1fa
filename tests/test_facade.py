"""`import gradserver`: one place to import from, which loads nothing early, and is disturbed by no namesake."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradserver
from gradserver.protocol import errors

ROOT = Path(gradserver.__file__).resolve().parent.parent


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a bare interpreter: no site-packages, no environment, `path` first on sys.path."""
    setup = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n"
    command = [sys.executable, "-I", "-S", "-c", setup + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusal(code: str, *path: Path) -> str:
    """Return the message of the ImportError that `code` must end with."""
    result = run(code, *path)
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    kind, _, message = last.partition(": ")
    assert kind == "ImportError"
    return message


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make an installation that has the façade and the errors, and a worker package without contents."""
    site = tmp_path / "site"
    for name in ("gradserver/__init__.py", "gradserver/protocol/errors.py", "gradserver/protocol/version.py"):
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    for name in ("protocol", "worker"):
        write(site, f"gradserver/{name}/__init__.py", '"""Stub."""\n')
    return site


def write(folder: Path, name: str, text: str = "") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# --- Lazy names ---


@pytest.mark.parametrize(("name", "home"), sorted(gradserver._HOME.items()))
def test_lazy_name_is_the_object_of_its_module(name: str, home: str) -> None:
    assert getattr(gradserver, name) is getattr(import_module(home), name)


def test_every_error_class_is_there() -> None:
    assert len(errors.ERRORS) > 20
    for name, error in errors.ERRORS.items():
        assert getattr(gradserver, name) is error


def test_type_checkers_see_the_names_that_run_time_has() -> None:
    tree = ast.parse(Path(gradserver.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {
        alias.asname: imports.module
        for imports in block.body
        if isinstance(imports, ast.ImportFrom)
        for alias in imports.names
        if alias.asname == alias.name  # the form that re-exports
    }
    assert declared == gradserver._HOME | dict.fromkeys(errors.ERRORS, "gradserver.protocol.errors")


def test_dir_lists_all_names() -> None:
    assert {*gradserver._HOME, *errors.ERRORS, "__version__"} <= set(dir(gradserver))


@pytest.mark.parametrize("name", ["no_such_name", "ERRORS", "_private"])
def test_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'gradserver' has no attribute '{name}'"):
        getattr(gradserver, name)


def test_submodule_that_shares_no_name_is_still_importable(site: Path) -> None:
    write(site, "gradserver/extra.py", "value = 7")
    assert run("from gradserver import extra; print(extra.value)", site).stdout == "7\n"


def test_name_is_loaded_once_and_only_when_used(site: Path) -> None:
    write(site, "gradserver/worker/handle.py", "print('loaded')\nclass Handle: ...")
    code = "import gradserver; print('imported'); gradserver.Handle; gradserver.Handle"
    assert run(code, site).stdout.split() == ["imported", "loaded"]


def test_import_loads_nothing_else_of_the_package(site: Path) -> None:
    code = "import gradserver; print(*(n for n in sys.modules if n.startswith('gradserver.')))"
    assert run(code, site).stdout.split() == ["gradserver.protocol", "gradserver.protocol.version"]


NO_TORCH = (
    "gradserver.DistributedDataParallel needs PyTorch, which is not installed here: pip install 'gradserver[torch]'"
)


def test_missing_torch_says_what_to_install(site: Path) -> None:
    write(site, "gradserver/worker/torch_ddp/ddp.py", "import torch.nn")

    assert refusal("from gradserver import DistributedDataParallel", site) == NO_TORCH
    used = run("import gradserver; gradserver.DistributedDataParallel", site)
    assert used.stderr.strip().splitlines()[-1] == f"AttributeError: {NO_TORCH}"


def test_what_needs_torch_is_an_attribute_that_is_not_there_without_it(site: Path) -> None:
    write(site, "gradserver/worker/torch_ddp/ddp.py", "import torch.nn")
    write(site, "gradserver/worker/handle.py", "class Handle: ...")
    code = "import gradserver; print(*(hasattr(gradserver, n) for n in ('DistributedDataParallel', 'Handle')))"

    assert run(code, site).stdout == "False True\n"


def test_star_gives_the_public_names_and_nothing_else() -> None:
    assert set(gradserver.__all__) == {*gradserver._HOME, *errors.ERRORS}
    space: dict[str, object] = {}
    exec("from gradserver import *", space)
    assert set(space) - {"__builtins__"} == set(gradserver.__all__)


def test_another_missing_module_is_not_blamed_on_torch(site: Path) -> None:
    write(site, "gradserver/worker/torch_ddp/ddp.py", "import torchless")
    result = run("import gradserver; gradserver.DistributedDataParallel", site)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'torchless'\n")


# --- Namesakes ---


@pytest.mark.parametrize("name", ["protocol", "worker"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_a_script_may_have_modules_of_the_same_names(tmp_path: Path, name: str, form: str) -> None:
    write(tmp_path, form.format(name), "raise SystemExit('the namesake was imported')")
    script = write(
        tmp_path,
        "train.py",
        "import gradserver\n"
        "from gradserver.protocol import errors\n"
        "from gradserver.worker import client\n"
        "print(gradserver.Worker is client.Worker, gradserver.UsageError is errors.UsageError)\n",
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("True True\n", "")
    write(tmp_path, form.format(name), "value = 7")
    script.write_text(f"import gradserver\nimport {name}\ngradserver.Worker\nprint({name}.value)\n")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("7\n", "")
