"""Which page belongs to which row: a page allocator that is an immutable pytree.

The idea is virtual memory for the KV cache (Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention", arXiv:2309.06180): a row's tokens lie in pages
of `page_size` slots anywhere in a pool, its block table maps logical page to page id, and a page
is taken only when a token needs it. Every transition is a pure function that can be jitted,
scanned and donated; its cost follows the rows and their tables, never the size of the pool.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int, Int32

from paged_jax.under_jit import as_int32, check_sizes, once_if, or_nowhere, require_now

Count = TypeVar("Count", int, np.ndarray, Array)

NO_PAGE = -1
"""Fills the entries of a block table, and of any list of page ids, that name no page."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """The state of the allocator: R rows over a pool of P pages, at most M pages a row.

    A page is free when nobody holds it. Its holders are the rows whose tables name it and the
    pins of a prefix index; a page with several holders is shared and never written.
    """

    block_tables: Int32[Array, "rows max_pages_per_row"]  # [R, M] logical page -> page id or NO_PAGE
    lengths: Int32[Array, " rows"]  # [R] tokens whose keys and values have a slot
    ref_counts: Int32[Array, " num_pages"]  # [P] holders of each page
    free_stack: Int32[Array, " num_pages"]  # [P] the first num_free entries are the free page ids
    num_free: Int32[Array, ""]
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int) -> "PageTable":
        """An empty table: every page free, to be handed out in the order 0, 1, 2, ...

        Raises:
            ValueError: if a size is not a positive integer, or a row has room for 2**31 tokens or more.
        """
        check_sizes(
            "PageTable.create",
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            max_pages_per_row=max_pages_per_row,
        )
        if max_pages_per_row * page_size > jnp.iinfo(jnp.int32).max:
            raise ValueError(
                "PageTable.create: a row must have room for fewer than 2**31 tokens, "
                f"got {max_pages_per_row=} of {page_size=}"
            )
        return cls(
            block_tables=jnp.full((max_rows, max_pages_per_row), NO_PAGE, jnp.int32),
            lengths=jnp.zeros(max_rows, jnp.int32),
            ref_counts=jnp.zeros(num_pages, jnp.int32),
            free_stack=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.asarray(num_pages, jnp.int32),
            page_size=page_size,
        )

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[0]

    @property
    def max_rows(self) -> int:
        return self.block_tables.shape[0]

    @property
    def max_pages_per_row(self) -> int:
        return self.block_tables.shape[1]


class Grant(NamedTuple):
    """What `extend` decided.

    `copies[r]` is a (source, destination) pair of page ids where row r was about to write into a
    shared page and got its own, else (NO_PAGE, NO_PAGE). Copy the pages before writing the step's
    keys and values: `KVPages.copy`.
    """

    granted: Bool[Array, " rows"]
    copies: Int32[Array, "rows 2"]


class Summary(NamedTuple):
    """What a host needs to know between steps, small enough to read at once."""

    lengths: Int32[Array, " rows"]
    num_free: Int32[Array, ""]
    pages_per_row: Int32[Array, " rows"]  # pages each row holds, shared ones counted in every row
    wasted_slots: Int32[Array, " rows"]  # slots past the length in each row's pages: < page_size


def extend(table: PageTable, num_tokens: Int[ArrayLike, " rows"]) -> tuple[PageTable, Grant]:
    """Makes room for `num_tokens` more tokens per row and advances the granted rows' lengths.

    A row gets everything it needs or nothing. Rows are served in order; the first that finds too
    few free pages stops those after it, except rows that need no page. A row is refused alone,
    and holds up nobody, when its number is negative, when its table has no room for the tokens,
    or when its partly filled last page was dropped. Refused rows keep every bit.

    The last page of a row is copied on write: when it is partly filled and somebody else holds
    it too, the row gets a page of its own in its place (`Grant.copies`). Of several rows that
    append to the same page, the last holder keeps it.

    Args:
        num_tokens: int [R], the increase, not the total. Zero is always granted.

    Raises:
        ValueError: if `num_tokens` is not an integer array of shape [R].
    """
    num_tokens = as_int32("extend", "num_tokens", num_tokens, table.lengths.shape)
    room = table.max_pages_per_row * table.page_size - table.lengths
    fits = (num_tokens >= 0) & (num_tokens <= room)
    lengths = table.lengths + jnp.where(fits, num_tokens, 0)
    held, wanted = pages_for(table.lengths, table.page_size), pages_for(lengths, table.page_size)

    # A row that appends in the middle of a page writes into its tail.
    appends = fits & (num_tokens > 0) & (table.lengths % table.page_size != 0)
    tails = _last_pages(table.block_tables, held)
    fits &= ~appends | (tails != NO_PAGE)
    appends &= fits
    shared = appends & (table.ref_counts[tails] > 1)
    copies = shared & (table.ref_counts[tails] - _count_earlier(tails, shared) > 1)

    need = jnp.where(fits, wanted - held + copies.astype(jnp.int32), 0)
    running = jnp.cumsum(need, dtype=jnp.int32)
    served = fits & (running <= table.num_free)
    copies &= served

    # A copied page keeps at least one holder, so this never frees one.
    ref_counts = table.ref_counts.at[jnp.where(copies, tails, table.num_pages)].add(-1, mode="drop")
    # Behind the row that stopped the others, a row may still append to a tail that is its own by now.
    granted = served | (fits & (wanted == held) & ~(appends & (ref_counts[tails] > 1)))
    # Such a row needs nothing. What is taken depends on every read of the counts, so that XLA can
    # update them in place: a read that might come after the update would cost a copy of the pool's counts.
    need = jnp.where(granted, need, 0)
    table = dataclasses.replace(
        table, ref_counts=ref_counts, lengths=jnp.where(granted, lengths, table.lengths)
    )
    table = _take_pages(table, first=held - copies.astype(jnp.int32), need=need)
    destinations = _last_pages(table.block_tables, held)
    pairs = jnp.where(copies[:, None], jnp.stack([tails, destinations], axis=1), NO_PAGE)
    return table, Grant(granted, pairs)


def release(table: PageTable, rows_mask: Bool[ArrayLike, " rows"]) -> PageTable:
    """Empties the rows of the mask; pages that nobody else holds go back to the free stack.

    An empty row has nothing to give back: releasing it again changes nothing.

    Raises:
        ValueError: if `rows_mask` is not a bool array of shape [R].
    """
    rows_mask = jnp.asarray(rows_mask)
    if rows_mask.dtype != bool or rows_mask.shape != table.lengths.shape:
        raise ValueError(
            f"release: rows_mask must be a bool array of shape {table.lengths.shape}, "
            f"got {rows_mask.dtype} {rows_mask.shape}"
        )
    table = dataclasses.replace(table, lengths=jnp.where(rows_mask, 0, table.lengths))
    return _drop_entries(table, jnp.broadcast_to(rows_mask[:, None], table.block_tables.shape))


def fork(table: PageTable, parents: Int[ArrayLike, " rows"]) -> PageTable:
    """Makes row r a second holder of all pages of row `parents[r]`, its partly filled tail included.

    Takes no page: all but the last of the sharers to append to the tail get a copy (see `extend`).
    Only empty rows become children, of parents as they were before the call; any other row, and a
    parent outside [0, R), is left alone.

    Args:
        parents: int [R], a row number, or NO_PAGE (-1) where nothing is to be forked.

    Raises:
        ValueError: if `parents` is not an integer array of shape [R].
    """
    parents = as_int32("fork", "parents", parents, table.lengths.shape)
    forked = (parents >= 0) & (parents < table.max_rows) & (table.lengths == 0)
    parents = jnp.where(forked, parents, 0)
    entries = jnp.where(forked[:, None], table.block_tables[parents], NO_PAGE)
    return dataclasses.replace(
        table,
        block_tables=jnp.where(forked[:, None], entries, table.block_tables),
        lengths=jnp.where(forked, table.lengths[parents], table.lengths),
        ref_counts=_hold(table.ref_counts, entries),
    )


def adopt(
    table: PageTable,
    row: Int[ArrayLike, ""],
    page_ids: Int[ArrayLike, " pages"],
    num_tokens: Int[ArrayLike, ""],
) -> PageTable:
    """Starts an empty row with pages that already hold the keys and values of its first tokens.

    The row becomes one more holder of the first ceil(num_tokens / page_size) pages of the list;
    the rest of the list is padding.

    Raises:
        ValueError: outside jit, if the row is not empty or not in the table, or if those pages are
            not different pages in use, enough for the tokens and no more than a row can have.
            Under jit such a call changes nothing.
    """
    row = as_int32("adopt", "row", row, ())
    num_tokens = as_int32("adopt", "num_tokens", num_tokens, ())
    page_ids = as_int32("adopt", "page_ids", page_ids, (None,))
    width = table.max_pages_per_row
    page_ids = jnp.pad(page_ids[:width], (0, max(0, width - page_ids.shape[0])), constant_values=NO_PAGE)
    used = jnp.arange(width, dtype=jnp.int32) < pages_for(num_tokens, table.page_size)
    entries = jnp.where(used, page_ids, NO_PAGE)
    in_order = jnp.sort(entries)
    distinct = jnp.all((in_order[1:] != in_order[:-1]) | (in_order[1:] == NO_PAGE))
    valid = (
        (row >= 0)
        & (row < table.max_rows)
        & (table.lengths.at[row].get(mode="fill", fill_value=1) == 0)
        & (num_tokens >= 0)
        & (num_tokens <= width * table.page_size)
        & distinct
        & jnp.all(~used | _in_use(table, entries))
    )
    require_now(
        valid,
        lambda: (
            f"adopt: needs an empty row and distinct pages in use, enough for the tokens; got {row=!s}, "
            f"page_ids={page_ids.tolist()}, {num_tokens=!s}"
        ),
    )
    at_row = jnp.where(valid, row, table.max_rows)
    return dataclasses.replace(
        table,
        block_tables=table.block_tables.at[at_row].set(entries, mode="drop"),
        lengths=table.lengths.at[at_row].set(num_tokens, mode="drop"),
        ref_counts=_hold(table.ref_counts, jnp.where(valid, entries, NO_PAGE)),
    )


def pin(table: PageTable, page_ids: Int[ArrayLike, " pages"]) -> PageTable:
    """Adds a hold of the caller's own to each page, so that it outlives its rows. NO_PAGE is skipped.

    Raises:
        ValueError: outside jit, if a page is free. Under jit it stays free.
    """
    return dataclasses.replace(
        table, ref_counts=_hold(table.ref_counts, _pages_in_use("pin", table, page_ids))
    )


def unpin(table: PageTable, page_ids: Int[ArrayLike, " pages"]) -> PageTable:
    """Takes back one `pin` per entry; pages that nobody else holds become free. NO_PAGE is skipped.

    The table counts holders and does not tell pins from rows: unpin only what was pinned.

    Raises:
        ValueError: outside jit, if a page is free. Under jit it stays as it is.
    """
    return _drop_holds(table, _pages_in_use("unpin", table, page_ids))


def truncate(table: PageTable, lengths: Int[ArrayLike, " rows"]) -> PageTable:
    """Rolls rows back to at most `lengths` tokens; pages wholly past the end go back.

    A row that is not longer stays as it is. Negative counts as zero.

    Raises:
        ValueError: if `lengths` is not an integer array of shape [R].
    """
    lengths = as_int32("truncate", "lengths", lengths, table.lengths.shape)
    lengths = jnp.clip(lengths, 0, table.lengths)
    logical_page = jnp.arange(table.max_pages_per_row, dtype=jnp.int32)[None, :]
    past_end = logical_page >= pages_for(lengths, table.page_size)[:, None]
    return _drop_entries(dataclasses.replace(table, lengths=lengths), past_end)


def drop_before(table: PageTable, positions: Int[ArrayLike, " rows"]) -> PageTable:
    """Gives back the pages that lie wholly before a position: what a sliding window has left behind.

    Their entries become NO_PAGE; lengths and the positions of later tokens stay the same.

    Args:
        positions: int [R], the first position of each row that is still needed; at most its length counts.

    Raises:
        ValueError: if `positions` is not an integer array of shape [R].
    """
    positions = as_int32("drop_before", "positions", positions, table.lengths.shape)
    first_kept = jnp.clip(positions, 0, table.lengths) // table.page_size
    logical_page = jnp.arange(table.max_pages_per_row, dtype=jnp.int32)[None, :]
    return _drop_entries(table, logical_page < first_kept[:, None])


def locate(
    table: PageTable, rows: Int[ArrayLike, " tokens"], positions: Int[ArrayLike, " tokens"]
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Translates (row, position) into (page id, slot in the page).

    The page id is NO_PAGE, and the slot 0, for a row outside the table, a position outside
    [0, length), and a page that was dropped.

    Raises:
        ValueError: if `rows` and `positions` are not integer arrays of one shape [T].
    """
    rows = as_int32("locate", "rows", rows, (None,))
    positions = as_int32("locate", "positions", positions, rows.shape)
    row_exists = (rows >= 0) & (rows < table.max_rows)
    rows = jnp.where(row_exists, rows, 0)
    live = row_exists & (positions >= 0) & (positions < table.lengths[rows])
    positions = jnp.where(live, positions, 0)
    page_ids = jnp.where(live, table.block_tables[rows, positions // table.page_size], NO_PAGE)
    return page_ids, jnp.where(page_ids == NO_PAGE, 0, positions % table.page_size)


def summary(table: PageTable) -> Summary:
    """The few numbers a host reads between steps."""
    tails = _last_pages(table.block_tables, pages_for(table.lengths, table.page_size))
    return Summary(
        lengths=table.lengths,
        num_free=table.num_free,
        pages_per_row=jnp.sum(table.block_tables != NO_PAGE, axis=1, dtype=jnp.int32),
        wasted_slots=jnp.where(tails == NO_PAGE, 0, -table.lengths % table.page_size),
    )


def pages_for(num_tokens: Count, page_size: int) -> Count:
    """ceil(num_tokens / page_size): the pages of so many tokens, without the overflow of adding first."""
    return -(-num_tokens // page_size)


def _last_pages(
    block_tables: Int32[Array, "rows max_pages_per_row"], held: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Each row's entry of its `held`-th logical page; NO_PAGE for a row without one."""
    return jnp.take_along_axis(block_tables, jnp.maximum(held - 1, 0)[:, None], axis=1)[:, 0]


# What loops or branches is jitted here, so that eager calls do not compile it again each time.


@jax.jit
def _take_pages(table: PageTable, first: Int32[Array, " rows"], need: Int32[Array, " rows"]) -> PageTable:
    """Pops `need[r]` pages for each row into its table entries from `first[r]` on."""
    below = jnp.cumsum(need, dtype=jnp.int32) - need  # pages popped for earlier rows

    def pop(most: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        block_tables, ref_counts = state
        nth = jnp.arange(most, dtype=jnp.int32)[None, :]
        taken = nth < need[:, None]
        page_ids = table.free_stack[jnp.where(taken, table.num_free - 1 - below[:, None] - nth, 0)]
        row = jnp.arange(table.max_rows, dtype=jnp.int32)[:, None]
        entry = jnp.where(taken, first[:, None] + nth, table.max_pages_per_row)
        block_tables = block_tables.at[row, entry].set(page_ids, mode="drop")
        ref_counts = ref_counts.at[jnp.where(taken, page_ids, table.num_pages)].set(1, mode="drop")
        return block_tables, ref_counts

    # A decode step takes at most one page a row; only longer steps pay for the width of the table.
    state = pop(1, (table.block_tables, table.ref_counts))
    block_tables, ref_counts = once_if(jnp.any(need > 1), partial(pop, table.max_pages_per_row), state)
    return dataclasses.replace(
        table,
        block_tables=block_tables,
        ref_counts=ref_counts,
        num_free=table.num_free - jnp.sum(need, dtype=jnp.int32),
    )


@jax.jit
def _drop_entries(table: PageTable, doomed: Bool[Array, "rows max_pages_per_row"]) -> PageTable:
    """Takes the rows' holds off the table entries of the mask and clears them."""
    doomed &= table.block_tables != NO_PAGE

    def drop(table: PageTable) -> PageTable:
        table = _drop_holds(table, jnp.where(doomed, table.block_tables, NO_PAGE).reshape(-1))
        return dataclasses.replace(table, block_tables=jnp.where(doomed, NO_PAGE, table.block_tables))

    return once_if(jnp.any(doomed), drop, table)


def _drop_holds(table: PageTable, page_ids: Int32[Array, " entries"]) -> PageTable:
    """Takes one hold off each listed page and pushes those that are left without one."""
    nowhere = table.num_pages
    ref_counts = table.ref_counts.at[or_nowhere(page_ids, nowhere)].add(-1, mode="drop")
    free = (page_ids != NO_PAGE) & (ref_counts[page_ids] <= 0)
    # Several entries may have named the same page: they bid for it in its own count, and one wins.
    bids = -1 - jnp.arange(page_ids.shape[0], dtype=jnp.int32)
    ref_counts = ref_counts.at[jnp.where(free, page_ids, nowhere)].min(bids, mode="drop")
    pushed = free & (ref_counts[page_ids] == bids)
    ref_counts = ref_counts.at[jnp.where(pushed, page_ids, nowhere)].set(0, mode="drop")
    height = table.num_free + jnp.cumsum(pushed, dtype=jnp.int32) - 1
    return dataclasses.replace(
        table,
        ref_counts=ref_counts,
        free_stack=table.free_stack.at[jnp.where(pushed, height, nowhere)].set(page_ids, mode="drop"),
        num_free=table.num_free + jnp.sum(pushed, dtype=jnp.int32),
    )


def _hold(
    ref_counts: Int32[Array, " num_pages"], page_ids: Int32[Array, "..."]
) -> Int32[Array, " num_pages"]:
    return ref_counts.at[or_nowhere(page_ids, ref_counts.shape[0])].add(1, mode="drop")


def _pages_in_use(verb: str, table: PageTable, page_ids: Int[ArrayLike, " pages"]) -> Int32[Array, " pages"]:
    """Checks the argument of `pin` and `unpin`; NO_PAGE for what is not a page in use."""
    page_ids = as_int32(verb, "page_ids", page_ids, (None,))
    in_use = _in_use(table, page_ids)
    require_now(
        jnp.all(in_use | (page_ids == NO_PAGE)),
        lambda: f"{verb}: only a page in use can be {verb}ned, got {page_ids=!s}",
    )
    return jnp.where(in_use, page_ids, NO_PAGE)


def _in_use(table: PageTable, page_ids: Int32[Array, " pages"]) -> Bool[Array, " pages"]:
    exists = (page_ids >= 0) & (page_ids < table.num_pages)
    return exists & (table.ref_counts[jnp.where(exists, page_ids, 0)] > 0)


@jax.jit
def _count_earlier(page_ids: Int32[Array, " rows"], mask: Bool[Array, " rows"]) -> Int32[Array, " rows"]:
    """For each row of the mask, how many rows of the mask before it have the same page id."""

    def count() -> Int32[Array, " rows"]:
        keys = jnp.where(mask, page_ids, jnp.iinfo(jnp.int32).max)
        order = jnp.argsort(keys, stable=True)
        in_order = keys[order]
        run_start = jnp.searchsorted(in_order, in_order, side="left").astype(jnp.int32)
        earlier = jnp.arange(keys.shape[0], dtype=jnp.int32) - run_start
        return jnp.zeros_like(keys).at[order].set(earlier)

    return lax.cond(jnp.any(mask), count, lambda: jnp.zeros_like(page_ids))
