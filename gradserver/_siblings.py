"""Makes sure that the `protocol` and `worker` which Python would import are the ones of this installation.

Both names are generic: another distribution, or a file `worker.py` beside a training script, may take them.
Found out later, that shows as an attribute error deep inside, so it is found out at `import gradserver`.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

SIBLINGS = ("protocol", "worker")


def check_siblings(version: str) -> None:
    """Raise ImportError unless both packages lie beside this one and carry `version`. Imports neither."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in SIBLINGS:
        _check(name, os.path.join(home, name, "__init__.py"), version)


def _check(name: str, expected: str, version: str) -> None:
    found = _find(name)
    needs = f"gradserver {version} needs its own package '{name}' at {expected}"
    again = "Install gradserver again (pip install --force-reinstall gradserver)."
    if found is None:
        raise ImportError(
            f"{needs}, but no package of that name can be imported: the installation is incomplete. {again}",
            name=name,
        )
    if os.path.realpath(found) != os.path.realpath(expected):
        raise ImportError(
            f"{needs}, but `import {name}` finds {found}. If that file is yours, rename it; if another "
            f"distribution installed it, install gradserver into an environment of its own.",
            name=name,
            path=found,
        )
    carried = _version(name, found)
    if carried != version:
        raise ImportError(
            f"{needs} in the same version, but that one says {carried or 'no version'}: "
            f"the installation mixes two versions. {again}",
            name=name,
            path=found,
        )


def _find(name: str) -> str | None:
    """What `import name` gives: a file, or a folder without `__init__.py`; None if there is nothing."""
    try:
        spec = find_spec(name)
    except ValueError:  # imported already, and by something that left no spec
        return str(getattr(sys.modules[name], "__file__", None) or "a module without a file")
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), "a module without a file")


def _version(name: str, path: str) -> str | None:
    """`__version__` as the loaded module has it, or as the source in file `path` says without being run."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__version__", None)
    with open(path, "rb") as source:
        for line in source:
            left, equals, right = line.partition(b"=")
            if equals and left.strip() == b"__version__":
                return right.strip().strip(b"\"'").decode(errors="replace")
    return None
