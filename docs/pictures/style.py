"""What all pictures share: the palette, a light panel that stands on any page, and files without dates."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from paged_jax.cli.plot import COLOURS

BLUE, AMBER, GREEN, PINK, SKY, BRICK = COLOURS
INK, MUTED, FAINT, EMPTY, PAPER = "#1f2933", "#5f6b78", "#d8dde3", "#eceff3", "#fdfdfc"
WIDTH = 480.0  # points; a phone shows this in about 360 pixels, so no text is smaller than SMALL
SMALL, NORMAL, TITLE = 11.5, 13.0, 16.0

matplotlib.rcParams |= {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "svg.fonttype": "path",
    "svg.hashsalt": "paged_jax",
    "text.color": INK,
}


def panel(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """A rounded panel; its axes are in points, from the upper left corner downwards."""
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    rounded(axes, 1, 1, width - 2, height - 2, fill=PAPER, edge=FAINT, radius=12)
    return figure, axes


def chart(height: float, title: str, subtitle: str, *, left: float = 58, right: float = 24) -> Axes:
    """A panel with a title and empty axes, of horizontal rules only."""
    figure, page = panel(height)
    page.text(24, 34, title, size=TITLE, weight="bold")
    page.text(24, 54, subtitle, size=SMALL, color=MUTED)
    top, bottom = 76.0, 58.0
    axes = figure.add_axes(
        (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - top - bottom) / height)
    )
    axes.set_facecolor("none")
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=EMPTY, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=MUTED, color=FAINT, length=0, pad=6)
    axes.xaxis.label.set(size=SMALL, color=MUTED)
    axes.xaxis.labelpad = 8
    return axes


def rounded(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = "none",
    edge: str = "none",
    radius: float = 3,
    line: float = 1,
) -> FancyBboxPatch:
    box = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle=f"round,pad=0,rounding_size={radius}",
        facecolor=fill,
        edgecolor=edge,
        linewidth=line,
    )
    axes.add_patch(box)
    return box


def box(axes: Axes, x: float, y: float, width: float, height: float, fill: str | None) -> Rectangle:
    rectangle = Rectangle((x, y), width, height, facecolor=fill, edgecolor="none")
    axes.add_patch(rectangle)
    return rectangle


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0
) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.22,head_length=0.45",
            "connectionstyle": f"arc3,rad={bend}",
            "color": colour,
            "linewidth": 1.6,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def mix(colour: str, share: float, ground: str = EMPTY) -> str:
    """So much of the colour on a ground."""
    return to_hex(share * np.array(to_rgb(colour)) + (1 - share) * np.array(to_rgb(ground)))


def tint(colour: str) -> str:
    """Of slots that are reserved and hold nothing."""
    return mix(colour, 0.28)


def save(figure: Figure, path: Path, title: str) -> None:
    """Writes an SVG that is the same bytes for the same picture."""
    metadata = {"Title": title, "Creator": None, "Date": None}
    figure.savefig(path, format="svg", metadata=metadata)
