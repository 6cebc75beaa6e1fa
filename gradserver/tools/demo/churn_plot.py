"""The picture of a run with kills: its loss beside that of an undisturbed one, and the number of workers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradserver.tools.common.picture import OURS, REFERENCE, finish
from gradserver.tools.demo.lives import Churned
from gradserver.tools.demo.outcome import Result
from gradserver.tools.demo.plot import label_losses, two_parts
from gradserver.tools.demo.settings import Settings

_DEATH, _ENTRY = "#b91c1c", "#15803d"


def save_churn_plot(path: Path, settings: Settings, group: Churned, reference: Result) -> None:
    """Write the picture to `path` as a PNG."""
    figure, upper, lower = two_parts()
    _draw_losses(upper, settings, group, reference)
    _draw_workers(lower, settings, group)
    finish(path, figure, (upper, lower))


def _draw_losses(axes: Axes, settings: Settings, group: Churned, reference: Result) -> None:
    rounds = [one for one in group.rounds if one.samples]
    label = f"{settings.workers} workers, {group.count(joined=False)} killed, {group.count(joined=True)} joined"
    axes.plot([one.used for one in rounds], [one.loss for one in rounds], color=OURS, linewidth=4.5, label=label)
    used = [(step.step + 1) * settings.global_batch for step in reference.steps]
    axes.plot(used, reference.losses, color=REFERENCE, linewidth=1.3, label="undisturbed")
    _mark(axes, group)
    label_losses(axes, settings, f"{settings.workers} workers, one killed every {settings.churn:g} s")


def _draw_workers(axes: Axes, settings: Settings, group: Churned) -> None:
    used = [one.used for one in group.rounds]
    axes.step(used, [one.workers for one in group.rounds], where="post", color=OURS, linewidth=2)
    _mark(axes, group)
    for text, colour, joined in (("killed", _DEATH, False), ("joined", _ENTRY, True)):
        at = [event.used for event in group.events if event.joined == joined]
        axes.plot(at, [settings.workers + 0.5] * len(at), "v" if joined else "x", color=colour, label=text)
    axes.set_ylim(0, settings.workers + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("workers")
    axes.set_xlabel("sequences used")
    axes.legend(frameon=False, loc="lower right", ncols=2, fontsize=8, borderaxespad=0)


def _mark(axes: Axes, group: Churned) -> None:
    for event in group.events:
        axes.axvline(event.used, color=_ENTRY if event.joined else _DEATH, linewidth=0.8, alpha=0.5)
