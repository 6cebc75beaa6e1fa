"""The style of pictures: colours, axes, and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS: Final = "#f2a03d"
REFERENCE: Final = "#1f3a5f"
GREY: Final = "#6b7280"


def new_figure(width: float, height: float) -> Figure:
    """Make a figure. Without pyplot it draws into memory (Agg): no display is needed, and no state is left behind."""
    return Figure(figsize=(width, height), layout="constrained")


def finish(path: Path, figure: Figure, parts: Iterable[Axes]) -> None:
    """Style the parts of a figure, and write it to `path` as a PNG."""
    for axes in parts:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(colors=GREY)
    figure.savefig(path, dpi=130, format="png")
