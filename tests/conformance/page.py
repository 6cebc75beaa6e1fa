"""The parts of ``docs/torch-conformance.md`` that come from files: ``python -m tests.conformance.page`` writes them."""

from __future__ import annotations

from typing import Final

from tests.conformance.expected import Entry, entries, figures
from tests.conformance.repository import ROOT

PAGE: Final = ROOT / "docs" / "torch-conformance.md"


def figures_shown() -> str:
    """Return the figures as a table."""
    rows = [
        "| torch | ranks | gloo: passed, not, skipped | gradserver: passed, not, skipped | tried |",
        "|---|---|---|---|---|",
    ]
    for row in figures():
        gloo, ours = (" / ".join(map(str, counts)) for counts in (row.gloo, row.gradserver))
        rows.append(f"| {row.torch} | {row.world} | {gloo} | {ours} | {row.date} |")
    return "\n".join(rows)


def list_shown() -> str:
    """Return the list of tests that do not pass, by reason."""
    return "\n\n".join(_shown(entry) for entry in entries()) or "All that gloo passes pass."


def _shown(entry: Entry) -> str:
    where = [entry.backend, *(f"{world} ranks" for world in entry.worlds if len(entry.worlds) == 1)]
    if entry.since != "0":
        where.append(f"torch {entry.since} and newer")
    if entry.before != "1000":
        where.append(f"torch before {entry.before}")
    tests = "\n".join(f"- `{test}`" for test in entry.tests)
    return f"**{entry.reason}** ({', '.join(where)}; {entry.kind})\n\n{tests}"


PARTS: Final = {"figures": figures_shown, "list": list_shown}


def written() -> str:
    """Return the page with these parts as they must be."""
    text = PAGE.read_text("utf-8")
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{PAGE} has no part '{name}'"
        text = f"{before}{begin}\n{part()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
