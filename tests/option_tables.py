"""The reference of options, ``docs/reference/options.md``: ``python -m tests.option_tables`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gradserver.options import GENERAL, SECTIONS, Option
from tests.commands import ROOT

PAGE: Final = ROOT / "docs" / "reference" / "options.md"


def page() -> str:
    """Return the page as it follows from the declarations."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Options of a coordinator"
    yield ""
    yield (
        "Options of `gradserver serve`, and keys of its configuration file. `[group.NAME]` may have those of a group. "
        "This page is generated from `gradserver/options.py`."
    )
    yield from _section("coordinator", GENERAL[:3])
    for title, options in SECTIONS.items():
        yield from _section(title, options)


def _section(title: str, options: Iterable[Option]) -> Iterator[str]:
    yield from (
        "",
        f"## {title[0].upper()}{title[1:]}",
        "",
        "| key | value | default | of a group | |",
        "|---|---|---|---|---|",
    )
    for option in options:
        value = ", ".join(option.choices) or option.metavar or "true"
        cells = [f"`{option.key}`", value, option.default, "yes" if option.per_group else "", option.help]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
