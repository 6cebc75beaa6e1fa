"""Tables and numbers for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Align ``rows`` under ``header`` in columns, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return (indent + "  ".join(padded)).rstrip()

    return [line(row) for row in cells]


def counted(count: int, what: str) -> str:
    """Format a number of things: 1 worker, 2 workers."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
