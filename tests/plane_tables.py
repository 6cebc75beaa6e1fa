"""The table of obstacles in ``docs/reference/planes.md``: ``python -m tests.plane_tables`` writes it anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gradserver.engine.control.planes import OBSTACLES
from tests.commands import ROOT

PAGE: Final = ROOT / "docs" / "reference" / "planes.md"
_BEGIN: Final = "<!-- The table is generated from gradserver/engine/control/planes.py. -->"
_END: Final = "<!-- The end of the generated table. -->"


def table() -> str:
    """Return the table, of all planes."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| plane | obstacle | on demand | what to change |"
    yield "|---|---|---|---|"
    for plane, obstacles in OBSTACLES.items():
        for one in obstacles:
            remedy = one.remedy[0].upper() + one.remedy[1:]
            demanded = "possible" if not one.binds else "refused" if one.lasts else "by the coordinator, until then"
            yield f"| `{plane}` | {one.when} | {demanded} | {remedy} |"


def page() -> str:
    """Return the page with the table as it follows from the source."""
    text = PAGE.read_text("utf-8")
    return re.sub(f"(?s){re.escape(_BEGIN)}.*{re.escape(_END)}", f"{_BEGIN}\n\n{table()}\n\n{_END}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
