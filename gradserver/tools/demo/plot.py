"""The picture of a run: both loss curves, and their distance."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradserver.tools.common.picture import GREY, OURS, REFERENCE, finish, new_figure
from gradserver.tools.demo.outcome import Result, distances
from gradserver.tools.demo.settings import TOLERANCE, Settings

_NORM = "#9db4d0"
_FLOOR = 3e-9


def save_plot(path: Path, settings: Settings, group: Result, reference: Result) -> None:
    """Write the picture to `path` as a PNG."""
    figure, upper, lower = two_parts()
    _draw_losses(upper, settings, group, reference)
    _draw_distances(lower, settings, group, reference)
    finish(path, figure, (upper, lower))


def two_parts() -> tuple[Figure, Axes, Axes]:
    """Make a figure with an upper and a lower part, which share the x axis."""
    figure = new_figure(9, 6.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.15])
    return figure, upper, lower


def _draw_losses(axes: Axes, settings: Settings, group: Result, reference: Result) -> None:
    steps = range(1, settings.steps + 1)
    many = f"{settings.crew}, {settings.wire}," if settings.is_lossy else settings.crew
    axes.plot(steps, group.losses, color=OURS, linewidth=4.5, label=f"{many} through the coordinator")
    label = f"one process, batch {settings.global_batch}"
    axes.plot(steps, reference.losses, color=REFERENCE, linewidth=1.3, label=label)
    axes.axhline(group.validation_loss, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"held-out text: {group.validation_loss:.2f}",
        (1, group.validation_loss),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=GREY,
    )
    label_losses(
        axes,
        settings,
        f"{settings.crew} with {settings.batch} sequences each, and one process with {settings.global_batch}",
    )


def label_losses(axes: Axes, settings: Settings, title: str) -> None:
    """Label the axes of loss curves."""
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    model = f"byte-level GPT of {settings.parameters / 1e6:.1f} M parameters on Python's standard library"
    axes.text(0, 1.025, f"{model}, seed {settings.seed}", transform=axes.transAxes, color=GREY)
    axes.legend(frameon=False, loc="upper right")


def _draw_distances(axes: Axes, settings: Settings, group: Result, reference: Result) -> None:
    norms = distances(group.gradient_norms, reference.gradient_norms)
    losses = distances(group.losses, reference.losses)
    for label, gaps, colour in (("gradient norm", norms, _NORM), ("loss", losses, REFERENCE)):
        # A logarithmic axis has no zero: equal values are drawn at the bottom.
        shown = [max(gap, _FLOOR) for gap in gaps]
        axes.semilogy(range(1, len(gaps) + 1), shown, ".", markersize=5, color=colour, label=label)
    if not settings.is_lossy:
        red = "#b91c1c"
        axes.axhline(TOLERANCE, color=red, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate("tolerance", (1, TOLERANCE), xytext=(4, -4), textcoords="offset points", va="top", color=red)
    finite = [gap for gap in (*norms, *losses) if math.isfinite(gap)]
    axes.set_ylim(_FLOOR, 10 * max([TOLERANCE, *finite]))
    axes.set_ylabel("relative\ndifference")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right", ncols=2, fontsize=8, borderaxespad=0)
