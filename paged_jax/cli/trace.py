"""One row's block table growing token by token, to look at: as text and as data.

What happens to the pages is what `paged_jax.page_table` does; nothing is worked out a second time here.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from paged_jax.capacity import pages_for
from paged_jax.page_table import NO_PAGE, PageTable, Summary, extend, locate, summary

MAX_PAGES = 4096
"""The largest pool that is traced: more than a person looks at."""

_LARGEST = 2**20  # of any number, far from where int32 ends
_TABLE_WIDTH = 18  # characters of a block table, in a line of text


@dataclass(frozen=True)
class Step:
    """One token's arrival, and the state after it."""

    token: int  # its position in the row, from 0
    logical_page: int
    slot: int
    page_id: int
    taken: bool  # whether the page came off the free stack for this token
    block_table: tuple[int, ...]
    wasted_slots: int
    free_pages: int


@dataclass(frozen=True)
class Trace:
    """A row that starts with some tokens and then gets one at a time.

    Attributes:
        tokens: how many the row starts with.
        start: the table when those tokens have their slots, in row 0.
        steps: one for each token after them.
        end: the table after the last step.
    """

    tokens: int
    start: PageTable
    steps: tuple[Step, ...]
    end: PageTable

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        state = summary(self.start)
        return {
            "page_size": self.start.page_size,
            "num_pages": self.start.num_pages,
            "tokens": self.tokens,
            "block_table": _held_pages(self.start),
            "wasted_slots": int(state.wasted_slots[0]),
            "free_pages": int(state.num_free),
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }


def trace(
    page_size: int, tokens: int, steps: int, free_pages: Sequence[int] = (7, 2, 14, 9), num_pages: int = 16
) -> Trace:
    """Gives a row `tokens` tokens at once, and then `steps` tokens more, one by one.

    Args:
        free_pages: the pages that the pool hands out first; the others follow in ascending order.
        num_pages: of the pool; it becomes larger where the tokens or `free_pages` need it.

    Raises:
        ValueError: if a number is negative or absurdly large, a size is zero, `free_pages` names a page
            twice, or more than `MAX_PAGES` pages are needed.
    """
    for name, number, least in (
        ("page_size", page_size, 1),
        ("tokens", tokens, 0),
        ("steps", steps, 0),
        ("num_pages", num_pages, 1),
        *(("a page of free_pages", page_id, 0) for page_id in free_pages),
    ):
        if not least <= number <= _LARGEST:
            raise ValueError(f"{name} must be from {least} to {_LARGEST}, got {number}")
    if len(set(free_pages)) < len(free_pages):
        raise ValueError(f"free_pages must name each page once, got {list(free_pages)}")
    width = max(1, pages_for(tokens + steps, page_size))
    num_pages = max(num_pages, width, *(page_id + 1 for page_id in free_pages))
    if num_pages > MAX_PAGES:
        raise ValueError(
            f"a pool of {num_pages} pages is needed, and at most {MAX_PAGES} are traced: take fewer tokens"
        )

    order = [*free_pages, *(page_id for page_id in range(num_pages) if page_id not in set(free_pages))]
    table = PageTable.create(num_pages, page_size, max_rows=1, max_pages_per_row=width)
    table = dataclasses.replace(table, free_stack=jnp.asarray(order[::-1], jnp.int32))
    start, *_ = _append(table, tokens)
    table, arrivals = start, []
    for _ in range(steps):
        before, (table, page_id, slot, state) = table, _append(table, 1)
        arrivals.append(
            Step(
                token=int(before.lengths[0]),
                logical_page=pages_for(int(table.lengths[0]), page_size) - 1,
                slot=int(slot),
                page_id=int(page_id),
                taken=bool(before.num_free > table.num_free),
                block_table=tuple(_held_pages(table)),
                wasted_slots=int(state.wasted_slots[0]),
                free_pages=int(state.num_free),
            )
        )
    return Trace(tokens, start, tuple(arrivals), table)


@jax.jit
def _append(table: PageTable, num_tokens: int) -> tuple[PageTable, jax.Array, jax.Array, Summary]:
    """More tokens in row 0: the table, the last one's page id and slot, and the summary."""
    table, _ = extend(table, jnp.asarray(num_tokens, jnp.int32)[None])
    page_ids, slots = locate(table, jnp.zeros(1, jnp.int32), table.lengths - 1)
    return table, page_ids[0], slots[0], summary(table)


def _held_pages(table: PageTable) -> list[int]:
    return [page_id for page_id in np.asarray(table.block_tables[0]).tolist() if page_id != NO_PAGE]


def as_text(trace: Trace) -> Group:
    """What `rich.print` shows, at most 80 columns wide for rows of a few thousand tokens."""
    page_size, held = trace.start.page_size, _held_pages(trace.start)
    wasted = int(summary(trace.start).wasted_slots[0])
    head = f"A pool of {trace.start.num_pages} pages of {page_size} slots.\n"
    if held:
        head += f"The first {trace.tokens} tokens leave {wasted} slots of their pages unused:\n"
    first = Table("logical page", "tokens", "page id", box=None, padding=(0, 2), header_style="dim")
    for logical_page, page_id in enumerate(held):
        begin, last = logical_page * page_size, min((logical_page + 1) * page_size, trace.tokens) - 1
        first.add_row(str(logical_page), f"{begin} to {last}" if last > begin else str(begin), str(page_id))
    columns = ("token", "logical page", "slot", "page id", "block table", "wasted", "free")
    steps = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for step in trace.steps:
        steps.add_row(
            str(step.token),
            f"{step.token} // {page_size} = {step.logical_page}",
            f"{step.token} % {page_size} = {step.slot}",
            f"{step.page_id} new" if step.taken else str(step.page_id),
            _as_text(step.block_table),
            str(step.wasted_slots),
            str(step.free_pages),
            style="bold green" if step.taken else "",
        )
    parts: list[RenderableType] = [head]
    if held:
        parts.append(first)
    if trace.steps:
        parts += ["\nThen one token after the other:\n" if held else "One token after the other:\n", steps]
    return Group(*parts)


def _as_text(block_table: Sequence[int]) -> str:
    """The whole table, or its end where that would be too wide."""
    text = f"[{', '.join(map(str, block_table))}]"
    for first in range(1, len(block_table)):
        if len(text) <= _TABLE_WIDTH:
            break
        text = f"[..., {', '.join(map(str, block_table[first:]))}]"
    return text
