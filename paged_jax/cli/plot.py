"""A picture of a pool: which page belongs to which row, and what is in its slots."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paged_jax.page_table import NO_PAGE, PageTable, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6db5", "#e08a1e", "#12946f", "#cc6ba6", "#56aede", "#a8321f")  # apart for the colour-blind too
_GREY, _FREE = "#a9b0b9", "#f3f4f6"
_MOST_TABLES, _MOST_ENTRIES = 8, 12
_WIDTH, _MARGIN, _TABLE_HEIGHT = 10.0, 0.45, 1.15  # inches
_SMALLEST_CELL = 0.09  # inches; slots smaller than that are drawn together


class _Contents(NamedTuple):
    """What a page shows: its row's colour, its logical page there, and how many of its slots hold a token."""

    colour: str
    logical_page: int
    tokens: int


def plot(table: PageTable, path: str | os.PathLike[str]) -> None:
    """Draws every page of the pool, coloured by the row that holds it, under the first rows' block tables.

    The suffix of the file says the format: pdf, svg, ..., and png where it has none.

    Raises:
        ModuleNotFoundError: if matplotlib is missing; it comes with the extra `paged-jax[plot]`.
        ValueError: if matplotlib does not know the format.
        OSError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a picture needs matplotlib: pip install 'paged-jax[plot]'") from error

    lengths, block_tables = np.asarray(table.lengths), np.asarray(table.block_tables)
    ref_counts, page_size = np.asarray(table.ref_counts).tolist(), table.page_size
    rows = np.flatnonzero(lengths).tolist()
    columns = 8 * math.ceil(math.sqrt(table.num_pages / 48))
    pitch = (_WIDTH - 2 * _MARGIN) / columns
    pool_top = 1.5 + _TABLE_HEIGHT * len(rows[:_MOST_TABLES])
    height = pool_top + 1.2 * pitch * math.ceil(table.num_pages / columns) + 0.65

    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))  # in inches, downwards
    axes.set_axis_off()
    held, wasted = table.num_pages - int(table.num_free), int(np.sum(np.asarray(summary(table).wasted_slots)))
    axes.text(
        _MARGIN, 0.6, f"{lengths.sum()} tokens in {held} of {table.num_pages} pages", size=17, weight="bold"
    )
    axes.text(
        _MARGIN,
        0.93,
        f"{page_size} slots a page, {wasted} slots wasted, {table.num_free} pages free",
        size=11,
    )

    contents: dict[int, _Contents] = {}
    for i, row in enumerate(rows):
        colour, length, page_ids = COLOURS[i % len(COLOURS)], int(lengths[row]), block_tables[row].tolist()
        if i < _MOST_TABLES:
            _draw_block_table(axes, 1.5 + _TABLE_HEIGHT * i, row, page_ids, length, page_size, colour)
        for logical_page, page_id in enumerate(page_ids):
            tokens = min(page_size, length - logical_page * page_size)
            contents.setdefault(page_id, _Contents(colour, logical_page, tokens))
    for page_id in range(table.num_pages):
        x, y = _MARGIN + pitch * (page_id % columns), pool_top + 1.2 * pitch * (page_id // columns)
        _draw_page(axes, x, y, 0.9 * pitch, page_id, page_size, contents.get(page_id), ref_counts[page_id])
    _draw_legend(axes, height - 0.45)
    figure.savefig(path, format=Path(path).suffix[1:] or "png", dpi=160)


def _draw_block_table(
    axes: "Axes", y: float, row: int, page_ids: list[int], length: int, page_size: int, colour: str
) -> None:
    """The last entries of the table, and how it translates the position of the last token."""
    axes.text(_MARGIN, y - 0.06, "logical page", size=8.5, color=colour)
    axes.text(_MARGIN, y + 0.26, f"row {row}", size=12, weight="bold", color=colour, va="center")
    left, width = _MARGIN + 1, 0.62
    held = [entry for entry in enumerate(page_ids) if entry[1] != NO_PAGE]
    for at, (logical_page, page_id) in enumerate(held[-_MOST_ENTRIES:]):
        x = left + width * at
        _draw_box(axes, x, y, width, 0.5, fill=colour, edge=colour, alpha=0.16)
        axes.text(x + width / 2, y + 0.26, str(page_id), size=14, ha="center", va="center")
        axes.text(x + width / 2, y - 0.06, str(logical_page), size=8.5, color=colour, ha="center")
    token, (logical_page, slot) = length - 1, divmod(length - 1, page_size)
    translation = (
        f"logical page {token} // {page_size} = {logical_page},  slot {token} % {page_size} = {slot}"
    )
    target = f"page {page_ids[logical_page]}, slot {slot}"
    axes.text(left, y + 0.72, f"token {token}:  {translation}  →  {target}", size=10)


def _draw_page(
    axes: "Axes",
    x: float,
    y: float,
    side: float,
    page_id: int,
    page_size: int,
    contents: _Contents | None,
    holders: int,
) -> None:
    """A card with the page's number and its slots, the positions of the live tokens written in them."""
    colour, first, tokens, pinned = _GREY, 0, 0, contents is None and holders > 0
    if contents:
        colour, first, tokens = contents.colour, contents.logical_page * page_size, contents.tokens
    _draw_box(axes, x, y, side, 1.14 * side, fill="white" if contents or pinned else _FREE, edge=colour)
    across = next(n for n in range(math.ceil(math.sqrt(page_size)), page_size + 1) if page_size % n == 0)
    down = page_size // across
    width, height = 0.88 * side / across, 0.88 * side / down
    left, top = x + 0.06 * side, y + 0.21 * side
    if min(width, height) < _SMALLEST_CELL:
        if contents or pinned:
            _draw_box(axes, x, y, side, 1.14 * side, fill="white", edge=colour, hatch="////")
        _draw_box(axes, x, y, side, 1.14 * side * tokens / page_size, fill=colour)
        return
    axes.text(left, y + 0.165 * side, str(page_id), size=10 * side, color=colour, weight="bold")
    if contents or pinned:
        label = f"logical {contents.logical_page}" if contents else "pinned"
        label += f", x{holders}" if holders > 1 else ""
        axes.text(left + 0.88 * side, y + 0.155 * side, label, size=7 * side, color=colour, ha="right")
    for slot in range(page_size):
        cell = left + width * (slot % across), top + height * (slot // across), 0.94 * width, 0.94 * height
        if slot < tokens:
            _draw_box(axes, *cell, fill=colour)
            middle = cell[0] + 0.47 * width, cell[1] + 0.49 * height
            axes.text(
                *middle,
                str(first + slot),
                size=24 * min(width, height),
                color="white",
                ha="center",
                va="center",
            )
        elif contents or pinned:
            _draw_box(axes, *cell, fill="white", edge=colour, hatch="////")
        else:
            _draw_box(axes, *cell, fill="white", edge=_GREY, alpha=0.5)


def _draw_legend(axes: "Axes", y: float) -> None:
    for x, label, fill, edge, hatch in (
        (_MARGIN, "token, by position", COLOURS[0], "none", ""),
        (_MARGIN + 2.1, "wasted slot", "white", COLOURS[0], "////"),
        (_MARGIN + 3.7, "free page", _FREE, _GREY, ""),
    ):
        _draw_box(axes, x, y, 0.18, 0.18, fill=fill, edge=edge, hatch=hatch)
        axes.text(x + 0.27, y + 0.1, label, size=10, va="center")


def _draw_box(
    axes: "Axes",
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    edge: str = "none",
    alpha: float = 1,
    hatch: str = "",
) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    fill_colour = to_rgba(fill, alpha)
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=fill_colour, edgecolor=edge, linewidth=0.8, hatch=hatch)
    )
