"""`import gradserver`: one place to import from, which loads nothing early and trusts no namesake."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradserver
import protocol.errors

ROOT = Path(gradserver.__file__).resolve().parent.parent


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a bare interpreter: no site-packages, no environment, `path` first on sys.path."""
    setup = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n"
    command = [sys.executable, "-I", "-S", "-c", setup + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusal(code: str, *path: Path) -> str:
    """The message of the ImportError that `code` must end with."""
    result = run(code, *path)
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    kind, _, message = last.partition(": ")
    assert kind == "ImportError"
    return message


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installation that has the façade and the errors, and a worker package without contents."""
    site = tmp_path / "site"
    for name in ("gradserver/__init__.py", "gradserver/_siblings.py", "protocol/errors.py"):
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    for name in ("protocol", "worker"):
        write(site, f"{name}/__init__.py", f'"""Stub."""\n\n__version__ = "{gradserver.__version__}"\n')
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
    assert len(protocol.errors.ERRORS) > 20
    for name, error in protocol.errors.ERRORS.items():
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
    assert declared == gradserver._HOME | dict.fromkeys(protocol.errors.ERRORS, "protocol.errors")


def test_dir_lists_all_names() -> None:
    assert {*gradserver._HOME, *protocol.errors.ERRORS, "__version__"} <= set(dir(gradserver))


@pytest.mark.parametrize("name", ["no_such_name", "ERRORS", "_private"])
def test_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'gradserver' has no attribute '{name}'"):
        getattr(gradserver, name)


def test_submodule_that_shares_no_name_is_still_importable(site: Path) -> None:
    write(site, "gradserver/extra.py", "value = 7")
    assert run("from gradserver import extra; print(extra.value)", site).stdout == "7\n"


def test_name_is_loaded_once_and_only_when_used(site: Path) -> None:
    write(site, "worker/handle.py", "print('loaded')\nclass Handle: ...")
    code = "import gradserver; print('imported'); gradserver.Handle; gradserver.Handle"
    assert run(code, site).stdout.split() == ["imported", "loaded"]


def test_import_loads_neither_sibling(site: Path) -> None:
    code = "import gradserver; print(*(n for n in sys.modules if n.startswith(('worker', 'protocol'))))"
    assert run(code, site).stdout == "\n"


NO_TORCH = (
    "gradserver.DistributedDataParallel needs PyTorch, which is not installed here: pip install 'gradserver[torch]'"
)


def test_missing_torch_says_what_to_install(site: Path) -> None:
    write(site, "worker/ddp.py", "import torch.nn")

    assert refusal("from gradserver import DistributedDataParallel", site) == NO_TORCH
    used = run("import gradserver; gradserver.DistributedDataParallel", site)
    assert used.stderr.strip().splitlines()[-1] == f"AttributeError: {NO_TORCH}"


def test_what_needs_torch_is_an_attribute_that_is_not_there_without_it(site: Path) -> None:
    write(site, "worker/ddp.py", "import torch.nn")
    write(site, "worker/handle.py", "class Handle: ...")
    code = "import gradserver; print(*(hasattr(gradserver, n) for n in ('DistributedDataParallel', 'Handle')))"

    assert run(code, site).stdout == "False True\n"


def test_star_gives_the_public_names_and_nothing_else() -> None:
    assert set(gradserver.__all__) == {*gradserver._HOME, *protocol.errors.ERRORS}
    space: dict[str, object] = {}
    exec("from gradserver import *", space)
    assert set(space) - {"__builtins__"} == set(gradserver.__all__)


def test_another_missing_module_is_not_blamed_on_torch(site: Path) -> None:
    write(site, "worker/ddp.py", "import torchless")
    result = run("import gradserver; gradserver.DistributedDataParallel", site)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'torchless'\n")


# --- Siblings ---


def test_complete_installation_imports(site: Path) -> None:
    result = run("import gradserver; print(gradserver.__version__)", site)
    assert (result.stdout, result.stderr) == (f"{gradserver.__version__}\n", "")


def test_installation_behind_a_link_imports(site: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(site, target_is_directory=True)
    code = f"import worker; sys.path.insert(0, {str(link)!r}); import gradserver; print(gradserver.__file__)"
    assert run(code, site).stdout == f"{link}/gradserver/__init__.py\n"


@pytest.mark.parametrize("name", ["protocol", "worker"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_intruder_earlier_on_the_path_is_named(site: Path, tmp_path: Path, name: str, form: str) -> None:
    intruder = write(tmp_path / "project", form.format(name), f'__version__ = "{gradserver.__version__}"')
    assert refusal("import gradserver", tmp_path / "project", site) == (
        f"gradserver {gradserver.__version__} needs its own package '{name}' at {site}/{name}/__init__.py, "
        f"but `import {name}` finds {intruder}. If that file is yours, rename it; if another distribution "
        f"installed it, install gradserver into an environment of its own."
    )


def test_intruder_later_on_the_path_does_no_harm(site: Path, tmp_path: Path) -> None:
    write(tmp_path / "project", "worker.py")
    assert run("import gradserver; print('ok')", site, tmp_path / "project").stdout == "ok\n"


def test_intruder_that_is_imported_already_is_named(site: Path, tmp_path: Path) -> None:
    intruder = write(tmp_path / "project", "worker.py")
    code = f"import worker; sys.path.remove({str(intruder.parent)!r}); import gradserver"
    assert f"`import worker` finds {intruder}." in refusal(code, intruder.parent, site)


def test_intruder_made_at_run_time_is_named(site: Path) -> None:
    code = "import types; sys.modules['worker'] = types.ModuleType('worker'); import gradserver"
    assert "`import worker` finds a module without a file." in refusal(code, site)


def test_intruding_folder_without_a_package_file_is_named(site: Path, tmp_path: Path) -> None:
    (site / "worker" / "__init__.py").unlink()
    (site / "worker").rmdir()
    folder = write(tmp_path / "project", "worker/job.txt").parent
    assert f"`import worker` finds {folder}." in refusal("import gradserver", tmp_path / "project", site)


@pytest.mark.parametrize("name", ["protocol", "worker"])
def test_missing_package_is_named(site: Path, name: str) -> None:
    shutil.rmtree(site / name)
    assert refusal("import gradserver", site) == (
        f"gradserver {gradserver.__version__} needs its own package '{name}' at {site}/{name}/__init__.py, "
        f"but no package of that name can be imported: the installation is incomplete. "
        f"Install gradserver again (pip install --force-reinstall gradserver)."
    )


@pytest.mark.parametrize("loaded", ["", "import worker; "])
@pytest.mark.parametrize(("text", "said"), [("__version__ = '0.0.9'", "0.0.9"), ("", "no version")])
def test_another_version_is_named(site: Path, text: str, said: str, loaded: str) -> None:
    file = write(site, "worker/__init__.py", text)
    assert refusal(loaded + "import gradserver", site) == (
        f"gradserver {gradserver.__version__} needs its own package 'worker' at {file} in the same version, "
        f"but that one says {said}: the installation mixes two versions. "
        f"Install gradserver again (pip install --force-reinstall gradserver)."
    )


def test_version_that_is_loaded_counts_not_the_one_on_disk(site: Path) -> None:
    """An upgrade under a running interpreter leaves the old package in memory."""
    code = "import worker; worker.__version__ = '0.0.8'; import gradserver"
    assert "that one says 0.0.8" in refusal(code, site)
