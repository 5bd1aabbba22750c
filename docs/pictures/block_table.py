"""How a position becomes a page and a slot: logical pages, block table, pool, and one token worked out."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import style
from matplotlib.axes import Axes

from paged_jax.cli.trace import trace
from paged_jax.page_table import NO_PAGE, PageTable, locate

TOKENS, PAGE_SIZE, FREE_PAGES, NUM_PAGES = 10, 4, (7, 2, 14), 16
POSITION = 9
LEFT, TABLE, POOL = 46.0, 188.0, 290.0
TOP, SLOT, STRIP = 86.5, 24.0, 62.0  # of the logical pages
POOL_TOP, POOL_SLOT, POOL_PITCH = 78.0, 14.0, 25.0
HEIGHT = 376.0
COLOURS = (style.BLUE, style.GREEN, style.AMBER)


def draw(path: Path) -> None:
    table = trace(PAGE_SIZE, TOKENS, 0, FREE_PAGES, NUM_PAGES).end
    figure, axes = style.panel(HEIGHT)
    page_ids = [page_id for page_id in table.block_tables[0].tolist() if page_id != NO_PAGE]
    logical_page, at = POSITION // PAGE_SIZE, translate(table, POSITION)

    for x, title, subtitle in (
        (LEFT - 22, f"a row of {TOKENS} tokens", "logical pages"),
        (TABLE - 2, "block table", "page ids"),
        (POOL - 4, f"pool of {NUM_PAGES} pages", f"{PAGE_SIZE} slots each"),
    ):
        axes.text(x, 38, title, size=style.NORMAL, weight="bold")
        axes.text(x, 56, subtitle, size=style.SMALL, color=style.MUTED)

    owner = dict(zip(page_ids, COLOURS, strict=True))
    for page_id in range(NUM_PAGES):
        x, y = pool_place(page_id)
        axes.text(
            x - 6, y + 10.5, str(page_id), size=style.SMALL, color=owner.get(page_id, style.MUTED), ha="right"
        )
        first = page_ids.index(page_id) * PAGE_SIZE if page_id in owner else TOKENS
        strip(axes, x, y, POOL_SLOT, POOL_SLOT, first, owner.get(page_id), names=False)
    for number, (page_id, colour) in enumerate(zip(page_ids, COLOURS, strict=True)):
        y = TOP + STRIP * number
        axes.text(LEFT - 8, y + 16.5, str(number), size=style.NORMAL, color=colour, weight="bold", ha="right")
        strip(axes, LEFT, y, SLOT, SLOT, number * PAGE_SIZE, colour, names=True)
        style.arrow(axes, (LEFT + PAGE_SIZE * SLOT + 4, y + SLOT / 2), (TABLE - 4, y + SLOT / 2), colour)
        style.rounded(axes, TABLE, y - 4, 44, SLOT + 8, fill=style.PAPER, edge=colour, line=1.6)
        axes.text(
            TABLE + 22, y + 17, str(page_id), size=style.TITLE, weight="bold", color=colour, ha="center"
        )
        start, (x, target) = (TABLE + 48, y + SLOT / 2), pool_place(page_id)
        if page_id >= NUM_PAGES // 2:  # on a way between the pages of the first column
            between = target - (POOL_PITCH - POOL_SLOT) / 2
            way = (POOL, x - 36)
            axes.plot((start[0], *way), (start[1], between, between), color=colour, linewidth=1.6)
            start = (way[1], between)
        style.arrow(axes, start, (x - 24, target + POOL_SLOT / 2), colour)

    x, y = LEFT + SLOT * (POSITION % PAGE_SIZE), TOP + STRIP * logical_page
    style.rounded(axes, x - 2, y - 2, SLOT + 3, SLOT + 4, edge=style.INK, line=2)
    x, y = pool_place(at[0])
    style.rounded(
        axes, x + POOL_SLOT * at[1] - 2, y - 2, POOL_SLOT + 3, POOL_SLOT + 4, edge=style.INK, line=2
    )

    axes.plot((24, style.WIDTH - 24), (HEIGHT - 84, HEIGHT - 84), color=style.FAINT, linewidth=1)
    for y, text in zip((HEIGHT - 54, HEIGHT - 30), explanation(table), strict=True):
        axes.text(24, y, text, size=12.5)
    style.save(figure, path, "A block table translates a position into a page and a slot")


def explanation(table: PageTable) -> tuple[str, str]:
    logical_page, slot = divmod(POSITION, PAGE_SIZE)
    page_id, page_slot = translate(table, POSITION)
    return (
        f"Token {POSITION}: logical page {POSITION} // {PAGE_SIZE} = {logical_page}, "
        f"slot {POSITION} % {PAGE_SIZE} = {slot}.",
        f"table[{logical_page}] = {page_id}: its key and value are in page {page_id}, slot {page_slot}.",
    )


def translate(table: PageTable, position: int) -> tuple[int, int]:
    """The page and the slot of a position of row 0."""
    page_ids, slots = locate(table, jnp.zeros(1, jnp.int32), jnp.full(1, position, jnp.int32))
    return int(np.asarray(page_ids)[0]), int(np.asarray(slots)[0])


def pool_place(page_id: int) -> tuple[float, float]:
    """Where a page's first slot is: two columns of eight."""
    half = NUM_PAGES // 2
    return POOL + 22 + 92 * (page_id // half), POOL_TOP + POOL_PITCH * (page_id % half)


def strip(
    axes: Axes, x: float, y: float, width: float, height: float, first: int, colour: str | None, names: bool
) -> None:
    """The slots of a page whose first token is at position `first`; free without a colour."""
    for slot in range(PAGE_SIZE):
        live = colour is not None and first + slot < TOKENS
        fill = colour if live else style.tint(colour) if colour else style.EMPTY
        left = x + width * slot
        style.box(axes, left, y, width - 1.5, height, fill)
        if names and live:
            axes.text(
                left + width / 2 - 0.75,
                y + height / 2 + 4.5,
                str(first + slot),
                size=style.SMALL,
                color="white",
                ha="center",
            )
