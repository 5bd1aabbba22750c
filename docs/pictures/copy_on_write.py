"""A fork shares pages; the first write into the shared last page copies that page alone."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import style
from matplotlib.axes import Axes

from paged_jax import page_table
from paged_jax.page_table import NO_PAGE, Grant, PageTable

PAGE_SIZE, TOKENS, NUM_PAGES = 4, 6, 3
COLOURS = (style.BLUE, style.AMBER)
PAGES, PAGE_PITCH, SLOT, SLOT_HEIGHT = 190.0, 92.0, 20.0, 24.0
BAND, TOP = 124.0, 22.0


class Stage(NamedTuple):
    title: str
    table: PageTable
    copies: list[tuple[int, int]]  # (source, destination) page ids, copied on the way to this stage


def stages() -> list[Stage]:
    """A row of six tokens; its fork; both after one has written a token."""

    @jax.jit
    def run(table: PageTable) -> tuple[PageTable, PageTable, PageTable, Grant]:
        before, _ = page_table.extend(table, np.array([TOKENS, 0], np.int32))
        forked = page_table.fork(before, np.array([NO_PAGE, 0], np.int32))
        written, grant = page_table.extend(forked, np.array([0, 1], np.int32))
        return before, forked, written, grant

    before, forked, written, grant = run(PageTable.create(NUM_PAGES, PAGE_SIZE, 2, 2))
    copies = [tuple(pair) for pair in np.asarray(grant.copies).tolist() if pair[0] != NO_PAGE]
    return [
        Stage(f"A row of {TOKENS} tokens", before, []),
        Stage("Fork: both rows hold its pages, nothing is copied", forked, []),
        Stage("Row 1 writes a token: its last page is copied first", written, copies),
    ]


def draw(path: Path) -> None:
    found = stages()
    figure, axes = style.panel(TOP + BAND * len(found))
    for number, stage in enumerate(found):
        top = TOP + BAND * number
        axes.text(24, top + 14, stage.title, size=style.NORMAL, weight="bold")
        _draw_stage(axes, top + 30, stage)
        if number:
            axes.plot((24, style.WIDTH - 24), (top - 9, top - 9), color=style.EMPTY, linewidth=1)
    style.save(figure, path, "Copy-on-write: a fork shares pages until one of the rows writes")


def _draw_stage(axes: Axes, top: float, stage: Stage) -> None:
    block_tables, lengths = np.asarray(stage.table.block_tables), np.asarray(stage.table.lengths).tolist()
    for row, page_ids in enumerate(block_tables.tolist()):
        y = top + 4 + 30 * row
        colour = COLOURS[row] if lengths[row] else style.FAINT
        axes.text(24, y + 16, f"row {row}", size=style.NORMAL, color=colour if lengths[row] else style.MUTED)
        for logical_page, page_id in enumerate(page_ids):
            x = 76 + 34 * logical_page
            style.rounded(axes, x, y, 30, 23, edge=colour, line=1.6 if lengths[row] else 1)
            if page_id != NO_PAGE:
                axes.text(
                    x + 15, y + 16, str(page_id), size=style.NORMAL, weight="bold", color=colour, ha="center"
                )
    holders, tokens = owners(stage.table)
    for page_id in range(NUM_PAGES):
        x = PAGES + PAGE_PITCH * page_id
        _draw_page(axes, x, top + 8, holders[page_id], tokens[page_id])
        count = int(stage.table.ref_counts[page_id])
        held = "free" if count == 0 else "1 holder" if count == 1 else f"{count} holders"
        for y, text in ((top + 47, f"page {page_id}"), (top + 63, held)):
            axes.text(x, y, text, size=style.SMALL, color=style.INK if count else style.MUTED)
    for source, destination in stage.copies:
        start, end = (PAGES + PAGE_PITCH * page_id + 2.9 * SLOT for page_id in (source, destination))
        style.arrow(axes, (start, top + 5), (end, top + 5), style.INK, bend=-0.25)


def owners(table: PageTable) -> tuple[list[list[int]], list[int]]:
    """For each page, the rows that hold it and the tokens in it."""
    holders: list[list[int]] = [[] for _ in range(table.num_pages)]
    tokens = [0] * table.num_pages
    for row, page_ids in enumerate(np.asarray(table.block_tables).tolist()):
        for logical_page, page_id in enumerate(page_ids):
            if page_id != NO_PAGE:
                holders[page_id].append(row)
                live = min(PAGE_SIZE, int(table.lengths[row]) - logical_page * PAGE_SIZE)
                tokens[page_id] = max(tokens[page_id], live)
    return holders, tokens


def _draw_page(axes: Axes, x: float, y: float, holders: list[int], tokens: int) -> None:
    """Its slots, each in a stripe for each holder."""
    for slot in range(PAGE_SIZE):
        left = x + SLOT * slot
        style.box(axes, left, y, SLOT - 1.5, SLOT_HEIGHT, style.EMPTY)
        for place, row in enumerate(holders):
            colour = COLOURS[row] if slot < tokens else style.tint(COLOURS[row])
            height = SLOT_HEIGHT / len(holders)
            style.box(axes, left, y + place * height, SLOT - 1.5, height, colour)
