"""Advice from the suite `train`: the contender to choose in each place, by the figures alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradserver.tools.bench.report import Row
from gradserver.tools.bench.stats import milliseconds

EQUAL_LOSS: Final = 0.005
"""Largest share by which a loss may be above that of torch's wrapper with fp32, and still count as the same."""
_TORCH: Final = "ddp"
_NONE: Final = "none"


def advise(rows: Sequence[Row]) -> list[str]:
    """Say for each place which contender to choose; one sentence each."""
    steps = [row for row in rows if row.op == "step" and row.variant != _NONE]
    places = dict.fromkeys(row.place for row in steps)
    return [_sentence(place, [row for row in steps if row.place == place]) for place in places]


def _sentence(place: str, rows: Sequence[Row]) -> str:
    reference = next((row for row in rows if (row.variant, row.wire) == (_TORCH, "fp32")), None)
    if reference is None:
        best = min(rows, key=_seconds)
        return f"{place}: {_name(best)} is the quickest of these, with {_time(best)}; torch's fp32 was not measured."
    same = [row for row in rows if row.more["loss"] <= (1 + EQUAL_LOSS) * reference.more["loss"]]
    best = min(same, key=_seconds)
    parts = [f"{place}: choose {_name(best)}, with {_time(best)}{_beside(best, reference, same)}"]
    exact = min((row for row in rows if row.wire == "fp32"), key=_seconds)
    if exact is not best:
        parts.append(f"to lose nothing, {_name(exact)}, with {_time(exact)}{_beside(exact, reference, ())}")
    for row in sorted(rows, key=_seconds):
        if row not in same and _seconds(row) < _seconds(best):
            more = row.more["loss"] / reference.more["loss"] - 1
            loss = f"its loss after {row.more['steps']:.0f} steps is {more:.1%} higher"
            parts.append(f"{_name(row)} takes {_time(row)}, but {loss}")
    return f"{'; '.join(parts)}."


def _beside(row: Row, reference: Row, same: Sequence[Row]) -> str:
    """Compare with torch's fp32, and with the quickest of the other side that keeps the loss."""
    peers = [] if row is reference else [reference]
    others = [one for one in same if (one.variant == _TORCH) != (row.variant == _TORCH) and one is not reference]
    peers += [min(others, key=_seconds)] if others else []
    said = [f"{_seconds(peer) / _seconds(row):.2f} times as quick as {_name(peer)}" for peer in peers]
    return f" ({' and '.join(said)})" if said else ""


def _name(row: Row) -> str:
    return f"{row.variant} {row.wire}"


def _seconds(row: Row) -> float:
    return row.time.median


def _time(row: Row) -> str:
    return f"{milliseconds(_seconds(row))} ms a step"
