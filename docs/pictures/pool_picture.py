"""The pool as a grid coloured by owner, next to the rows that own it: a still, and an animation."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from PIL import Image
from pool_life import NOBODY, Moment, Request, live

from paged_jax.page_table import PageTable, pages_for

NUM_PAGES, PAGE_SIZE, ROWS, PAGES_PER_ROW = 80, 4, 6, 16
COLUMNS, SIDE, GAP = 10, 20.0, 2.0
LEFT, TOP, RIGHT, ROW_PITCH = 24.0, 54.0, 274.0, 29.8
HEIGHT = 278.0
FADE = (0.55, 0.25)  # how much of a page's colour is left in the moments after it was given back
MOST_OWNERS = 2
CAPTION_MOMENTS = 14  # that a caption stays at least
MILLISECONDS, PAUSE, DPI = 100, 1000, 120  # a moment lasts, and the empty pool
PALETTE = (
    *(style.PAPER, style.FAINT, style.EMPTY),
    *(
        style.mix(shade, strength)
        for colour in style.COLOURS
        for shade in (colour, style.tint(colour))
        for strength in (1.0, *FADE)
    ),
    # the edges of letters
    *(style.mix(style.INK, share, style.PAPER) for share in (1.0, 0.8, 0.6, 0.4, 0.2)),
    *(style.mix(style.MUTED, share, style.PAPER) for share in (1.0, 0.7, 0.4)),
    *(style.mix(colour, share, style.PAPER) for colour in style.COLOURS for share in (0.7, 0.4)),
)

REQUESTS = tuple(
    Request(number, arrives, prompt, new, samples)
    for number, (arrives, prompt, new, samples) in enumerate(
        [
            (0, 22, 34, 1),
            (2, 9, 30, 1),
            (4, 27, 32, 2),
            (9, 14, 44, 1),
            (14, 6, 30, 1),
            (22, 30, 30, 1),
            (25, 18, 26, 1),
            (28, 37, 22, 1),
            (40, 22, 36, 2),
            (44, 10, 28, 1),
            (46, 25, 36, 1),
            (52, 33, 22, 1),
            (56, 13, 24, 1),
            (60, 26, 18, 1),
            (62, 19, 22, 1),
        ],
        start=1,
    )
)


def moments() -> list[Moment]:
    return live(PageTable.create(NUM_PAGES, PAGE_SIZE, ROWS, PAGES_PER_ROW), REQUESTS)


class Cell(NamedTuple):
    """How a page looks."""

    owners: tuple[int, ...]  # rows; of a free page, those that held it last
    fill: float  # share of its slots that hold a token
    strength: float  # of the colour; below 1 for a page that was given back a moment ago


class Scene(NamedTuple):
    moment: Moment
    cells: list[Cell]
    caption: str


def scenes(moments: Iterable[Moment]) -> list[Scene]:
    """What is drawn of each moment: pages fade when they are given back, and captions stay to be read."""
    shown: list[Scene] = []
    cells = [Cell((), 0.0, 0.0)] * NUM_PAGES
    caption, since = "", CAPTION_MOMENTS
    for moment in moments:
        fade = {1.0: FADE[0], FADE[0]: FADE[1]}
        cells = [
            Cell(owners, tokens / PAGE_SIZE, 1.0)
            if owners
            else before._replace(strength=fade.get(before.strength, 0.0))
            for owners, tokens, before in zip(
                moment.owners(NUM_PAGES), moment.fill(PAGE_SIZE, NUM_PAGES), cells, strict=True
            )
        ]
        since += 1
        if moment.event and (since >= CAPTION_MOMENTS or moment.forked):
            caption, since = moment.event, 0
        shown.append(Scene(moment, cells, caption))
    return shown


class Board:
    """The drawing, made once; `show` changes its colours."""

    def __init__(self, num_pages: int, page_size: int, rows: int, pages_per_row: int):
        self.figure, axes = style.panel(HEIGHT)
        self._page_size = page_size
        axes.text(LEFT, 37, f"{num_pages} pages of {page_size} tokens", size=style.NORMAL, weight="bold")
        grid_edge, right_edge = LEFT + COLUMNS * (SIDE + GAP) - GAP, style.WIDTH - LEFT
        small = {"size": style.SMALL, "color": style.MUTED, "ha": "right"}
        self._free = axes.text(grid_edge, 37, "", **small)
        axes.text(RIGHT, 37, "requests", size=style.NORMAL, weight="bold")
        self._waiting = axes.text(right_edge, 37, "", **small)
        self.pages = [
            _Page(axes, LEFT + (SIDE + GAP) * (n % COLUMNS), TOP + (SIDE + GAP) * (n // COLUMNS), SIDE, SIDE)
            for n in range(num_pages)
        ]
        pitch = (right_edge - RIGHT) / pages_per_row
        self._names, self._lengths, self._bars = [], [], []
        for row in range(rows):
            y = TOP + ROW_PITCH * row + 9
            self._names.append(
                axes.text(RIGHT, y, "", size=style.SMALL, weight="bold", color=style.COLOURS[row])
            )
            self._lengths.append(axes.text(right_edge, y, "", **small))
            self._bars.append(
                [_Page(axes, RIGHT + pitch * n, y + 4, pitch - 1, 10) for n in range(pages_per_row)]
            )
        self._caption = axes.text(LEFT, HEIGHT - 24, "", size=style.SMALL)

    def show(self, scene: Scene) -> None:
        moment = scene.moment
        for page, cell in zip(self.pages, scene.cells, strict=True):
            page.colour(cell)
        for row, (request, length) in enumerate(zip(moment.requests, moment.lengths.tolist(), strict=True)):
            self._names[row].set_text("" if request == NOBODY else f"request {request}")
            self._lengths[row].set_text("" if request == NOBODY else f"{length} tokens")
            held = pages_for(length, self._page_size)
            for logical_page, segment in enumerate(self._bars[row]):
                tokens = min(self._page_size, length - logical_page * self._page_size)
                segment.colour(Cell((row,) if logical_page < held else (), tokens / self._page_size, 1.0))
        self._free.set_text(f"{moment.num_free} free")
        self._waiting.set_text(f"{len(moment.waiting)} waiting" if moment.waiting else "")
        self._caption.set_text(scene.caption)


class _Page:
    """A box that is filled from below, in the colour of its owner, or in halves for two of them."""

    def __init__(self, axes: Axes, x: float, y: float, width: float, height: float):
        self._left, self._bottom, self._width, self._height = x, y + height, width, height
        style.box(axes, x, y, width, height, style.EMPTY)
        self._parts = [
            (style.box(axes, x, y, 0, height, style.EMPTY), style.box(axes, x, y, 0, 0, style.EMPTY))
            for _ in range(MOST_OWNERS)
        ]

    def colour(self, cell: Cell) -> None:
        for place, (slots, tokens) in enumerate(self._parts):
            if place >= len(cell.owners):
                slots.set_width(0)
                tokens.set_width(0)
                continue
            colour, width = style.COLOURS[cell.owners[place]], self._width / len(cell.owners)
            left, height = self._left + place * width, self._height * cell.fill
            slots.set(x=left, width=width, facecolor=style.mix(style.tint(colour), cell.strength))
            tokens.set(x=left, width=width, facecolor=style.mix(colour, cell.strength))
            tokens.set(y=self._bottom - height, height=height)


def still(path: Path) -> None:
    """The moment after two rows that shared their pages have gone separate ways."""
    shown = scenes(moments())
    board = Board(NUM_PAGES, PAGE_SIZE, ROWS, PAGES_PER_ROW)
    board.show(shown[_most_shared(shown)])
    style.save(board.figure, path, "A pool of pages, coloured by the row that holds them")


def animate(path: Path, shown: Sequence[Scene] | None = None) -> None:
    """A loop that begins in a busy moment, since some readers show only the first."""
    if shown is None:
        shown = scenes(moments())
        start = _most_shared(shown)
        shown = [*shown[start:], *shown[:start]]
    board = Board(NUM_PAGES, PAGE_SIZE, ROWS, PAGES_PER_ROW)
    frames = [_pixels(board, scene) for scene in shown]
    first, *others = (_indexed(frame) for frame in frames)
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=[MILLISECONDS if any(scene.moment.lengths) else PAUSE for scene in shown],
        loop=0,
        transparency=len(PALETTE),
    )


def _most_shared(shown: Sequence[Scene]) -> int:
    """The fullest of the moments in which pages are shared."""
    return max(
        range(len(shown)),
        key=lambda n: (any(len(cell.owners) > 1 for cell in shown[n].cells), -shown[n].moment.num_free),
    )


def _pixels(board: Board, scene: Scene) -> Image.Image:
    board.show(scene)
    pixels = io.BytesIO()
    board.figure.savefig(pixels, format="png", dpi=DPI)
    return Image.open(pixels).convert("RGBA")


def _indexed(frame: Image.Image) -> Image.Image:
    """In the colours of the palette; what lies outside the rounded corners is transparent.

    One palette without dithering: what stands still from frame to frame then costs nothing.
    """
    palette = Image.new("P", (1, 1))
    palette.putpalette([round(255 * part) for colour in PALETTE for part in to_rgb(colour)])
    indices = np.array(frame.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE))
    indices[np.asarray(frame)[..., 3] < 128] = len(PALETTE)
    image = Image.fromarray(indices)
    image.putpalette([*palette.getpalette(), 255, 255, 255])
    return image
