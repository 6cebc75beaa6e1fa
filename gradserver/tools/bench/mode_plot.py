"""Picture of the suite `modes`: the speed of each mode, with its loss, and a panel for each scenario."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from gradserver.tools.bench.mode_report import Finished, by_mode, loss_of_sync
from gradserver.tools.common.picture import GREY, OURS, REFERENCE, finish, new_figure

_NARROW = 0.22
"""Share below which a bar has its text behind it."""


def save_plot(path: Path, found: Sequence[Finished]) -> None:
    """Write the picture to ``path`` as a PNG. Several trainings of a mode are shown by their medians and ranges."""
    scenarios = list(dict.fromkeys(one.scenario.name for one in found))
    most = max(len({one.mode.name for one in found if one.scenario.name == name}) for name in scenarios)
    figure = new_figure(4.4 * len(scenarios), 1.6 + 0.34 * most)
    parts = figure.subplots(1, len(scenarios), squeeze=False)[0]
    for axes, name in zip(parts, scenarios, strict=True):
        _draw(axes, [one for one in found if one.scenario.name == name])
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")
        axes.set_axisbelow(True)
    finish(path, figure, parts)


def _draw(axes: Axes, found: Sequence[Finished]) -> None:
    """Draw a bar for each mode: samples per second beside those of workers by themselves. Its text is the loss."""
    groups, sync = by_mode(found), loss_of_sync(found)
    for place, group in enumerate(groups):
        shares = [one.share for one in group]
        share = statistics.median(shares)
        axes.barh(place, share, color=REFERENCE if place == 0 else OURS, height=0.68)
        axes.plot([min(shares), max(shares)], [place, place], color="black", linewidth=1)
        loss = statistics.median(one.loss for one in group)
        text = f"loss {loss:.3f}" if sync is None else f"loss {loss / sync - 1:+.1%}"
        inside = share > _NARROW
        axes.annotate(
            text,
            (0 if inside else max(shares), place),  # apart from the line of the range
            xytext=(5, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=8,
            color="white" if place == 0 and inside else "black",
        )
    axes.set_yticks(range(len(groups)), [group[0].mode.name for group in groups], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05)
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("samples per second, of those of the workers by themselves", fontsize=8, color=GREY)
