"""Picture of a run: time over size for gradserver, gloo and the limit, with a panel for each number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from gradserver.tools.bench.report import Row
from gradserver.tools.bench.stats import Stats, size_name
from gradserver.tools.common.picture import GREY, OURS, REFERENCE, finish, new_figure

_OTHERS = ("ddp", "none")
"""Variants that are not ours."""
_COLOURS = (OURS, "#c2410c", "#7c2d12", "#d97706", "#92400e", "#fbbf24")


def save_plot(path: Path, suite: str, rows: Sequence[Row]) -> None:
    """Write the picture to `path` as a PNG."""
    panels = list(dict.fromkeys((row.op, row.workers, row.place) for row in rows))
    figure = new_figure(max(6.5, 5.2 * len(panels)), 4.6)
    figure.suptitle(f"gradserver bench {suite}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    parts = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(parts, panels, strict=True):
        mine = [row for row in rows if (row.op, row.workers, row.place) == panel]
        op, workers, place = panel
        {"all_reduce": _draw_sizes, "codec": _draw_codecs}.get(op, _draw_bars)(axes, mine)
        title = f"{op}, {workers} workers" + (f"\n{place}" if place else "")
        axes.set_title(title, loc="left", fontsize=10, color=GREY)
        axes.set_axisbelow(True)
    finish(path, figure, parts)


def _draw_sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw time over size, logarithmic both ways; bands are quartiles."""
    for colour, key in zip(_cycle(len(rows)), dict.fromkeys((row.variant, row.wire) for row in rows), strict=False):
        mine = sorted((row for row in rows if (row.variant, row.wire) == key), key=lambda row: row.nbytes)
        label = key[0] if key[1] == "fp32" else f"{key[0]}, {key[1]}"
        _line(axes, mine, lambda row: row.time, colour, f"gradserver: {label}", 2.2)
    for peer in dict.fromkeys(row.peer for row in rows if row.peer_time):
        mine = _one_each(row for row in rows if row.peer == peer)
        _line(axes, mine, lambda row: row.peer_time, REFERENCE, peer, 1.4)
    limited = _one_each(row for row in rows if row.limit_seconds is not None and row.wire == rows[0].wire)
    if limited:
        sizes, seconds = [row.nbytes for row in limited], [row.limit_seconds or 0.0 for row in limited]
        axes.plot(sizes, seconds, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label=f"limit: {limited[0].limit}")
    sizes = sorted({row.nbytes for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_name(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("time of one operation (s)")
    axes.legend(frameon=False, fontsize=8)


def _draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar for each row. Its darker part is computing."""
    names = [f"{row.variant}\n{row.wire}" for row in rows]
    colours = [REFERENCE if row.variant in _OTHERS else OURS for row in rows]
    places = range(len(rows))
    axes.bar(places, [row.time.median for row in rows], color=colours, width=0.6)
    compute = [row.more.get("compute_s", 0.0) for row in rows]
    axes.bar(places, compute, color="black", alpha=0.25, width=0.6, label="computing alone")
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel("time (s)")
    axes.legend(frameon=False, fontsize=8)


def _draw_codecs(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw three bars for each row, and the copy as a line."""
    seconds = {"encode": [row.time.median for row in rows]}
    seconds |= {what: [row.more[f"{what}_s"] for row in rows] for what in ("decode", "combine")}
    for number, (what, taken) in enumerate(seconds.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        bandwidths = [row.nbytes / one / 1e9 for row, one in zip(rows, taken, strict=True)]
        axes.bar(places, bandwidths, width=0.25, color=_COLOURS[number], label=what)
    copies = [row.nbytes / (row.limit_seconds or math.inf) / 1e9 for row in rows]
    axes.plot(range(len(rows)), copies, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label="memcpy")
    axes.set_xticks(
        range(len(rows)), [f"{row.wire}\n{row.variant}\n{size_name(row.nbytes)}" for row in rows], fontsize=8
    )
    axes.set_ylabel("GB/s of fp32")
    axes.legend(frameon=False, fontsize=8)


def _line(
    axes: Axes, rows: Sequence[Row], times: Callable[[Row], Stats | None], colour: str, label: str, width: float
) -> None:
    known = [(row.nbytes, found) for row in rows if (found := times(row)) is not None]
    sizes = [nbytes for nbytes, _ in known]
    axes.plot(sizes, [one.median for _, one in known], "o-", color=colour, linewidth=width, markersize=4, label=label)
    low, high = [one.quartiles[0] for _, one in known], [one.quartiles[1] for _, one in known]
    axes.fill_between(sizes, low, high, color=colour, alpha=0.18, linewidth=0)


def _one_each(rows: Iterable[Row]) -> list[Row]:
    """Pick one row for each size: the others have the same measurement."""
    found: dict[int, Row] = {}
    for row in rows:
        found.setdefault(row.nbytes, row)
    return [found[size] for size in sorted(found)]


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
