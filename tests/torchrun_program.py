"""torchrun with this checkout's entry points, whatever is installed: ``torchrun_program.py FOLDER OPTION … SCRIPT``.

FOLDER gets the description of a package that has the entry points of pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ROOT / "gradserver" / "torch" / "entry"
"""The folder of the entry points' module, which is a module of its own in an installation."""


def entry_points(folder: Path) -> list[str]:
    """Write the entry points of this checkout to ``folder``. Return the paths on which Python finds them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    written = folder / "checkout-0.dist-info"
    written.mkdir(parents=True, exist_ok=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: checkout\nVersion: 0\n")
    lines = [
        line
        for group, entries in declared.items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()))
    ]
    (written / "entry_points.txt").write_text("\n".join(lines))
    return [str(folder), str(ENTRY)]


def main() -> None:
    """Run torchrun."""
    sys.path[:0] = entry_points(Path(sys.argv.pop(1)))
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
