"""Time of the allocator per step, over the number of rows and the size of the pool.

    python benchmarks/page_table.py

Two steps, inside a jitted loop on a donated table: `append` adds a token to every row, and every
page_size-th time a page; `grow and release` gives every row a page and takes all back. Neither may
grow with the pool.

For comparison, `argmin per page` is the second step without a free stack: each page is looked for by
an argmin over the holders of all pages, one row after the other.

One thread: XLA on CPU hands any operation on an array of more than 512 KiB to a pool of threads, at
about 2 us each, whatever it reads of the array. That constant would hide the scaling.
"""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax counts the processors

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, report, time_in_turns
from jax import lax

from paged_jax import PageTable, page_table
from paged_jax.testing import check_page_table

PAGE_SIZE = 16
ROWS = (16, 64, 256, 1024)
PAGES = (1024, 16384, 131072)
MAX_PAGES_PER_ROW = 32
NAIVE_ROWS, NAIVE_STEPS = (64,), 20
STEPS = 320  # a multiple of the page size, so that `append` ends where it began


def append(table: PageTable) -> PageTable:
    table, _ = page_table.extend(table, jnp.ones(table.max_rows, jnp.int32))
    return page_table.truncate(table, table.lengths % PAGE_SIZE)


def grow_and_release(table: PageTable) -> PageTable:
    table, _ = page_table.extend(table, jnp.full(table.max_rows, PAGE_SIZE, jnp.int32))
    return page_table.release(table, jnp.ones(table.max_rows, bool))


Naive = tuple[jax.Array, jax.Array]  # holders of each page [P], page of each row [R]


def argmin_per_page(state: Naive) -> Naive:
    def give(row: jax.Array, state: Naive) -> Naive:
        holders, pages = state
        page = jnp.argmin(holders)
        return holders.at[page].add(1), pages.at[row].set(page.astype(jnp.int32))

    holders, pages = lax.fori_loop(0, state[1].shape[0], give, state)
    return holders.at[pages].add(-1), pages


State = TypeVar("State", PageTable, Naive)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def loop(step: Callable[[State], State], steps: int, state: State) -> State:
    return lax.fori_loop(0, steps, lambda _, state: step(state), state)


class Run:
    def __init__(self, step: Callable[[State], State], steps: int, state: State):
        self.step, self.steps, self.state = step, steps, state

    def __call__(self) -> jax.Array:
        self.state = loop(self.step, self.steps, self.state)
        return jax.tree.leaves(self.state)[0]


def empty_table(rows: int, pages: int) -> PageTable:
    return PageTable.create(pages, PAGE_SIZE, rows, MAX_PAGES_PER_ROW)


def empty_naive(rows: int, pages: int) -> Naive:
    return jnp.zeros(pages, jnp.int32), jnp.zeros(rows, jnp.int32)


def check() -> None:
    table = PageTable.create(2048, PAGE_SIZE, 16, MAX_PAGES_PER_ROW)
    for tokens in range(1, PAGE_SIZE + 2):
        table, grant = page_table.extend(table, jnp.ones(16, jnp.int32))
        assert bool(grant.granted.all())
        assert int(table.num_free) == 2048 - 16 * -(-tokens // PAGE_SIZE)
        check_page_table(table)
    table = loop(grow_and_release, STEPS, PageTable.create(2048, PAGE_SIZE, 16, MAX_PAGES_PER_ROW))
    check_page_table(table)
    np.testing.assert_array_equal(table.ref_counts, 0)
    holders, pages = argmin_per_page((jnp.zeros(64, jnp.int32), jnp.zeros(16, jnp.int32)))
    np.testing.assert_array_equal(pages, np.arange(16))
    np.testing.assert_array_equal(holders, 0)


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    check()
    steps = {
        "append": (append, STEPS, empty_table),
        "grow and release": (grow_and_release, STEPS, empty_table),
        "argmin per page": (argmin_per_page, NAIVE_STEPS, empty_naive),
    }
    runs = {
        (name, rows, pages): Run(step, count, create(rows, pages))
        for name, (step, count, create) in steps.items()
        for rows in (ROWS if name != "argmin per page" else NAIVE_ROWS)
        for pages in PAGES
    }
    seconds = time_in_turns(runs, options.rounds)
    results, table = [], []
    for name, rows in dict.fromkeys((name, rows) for name, rows, _ in runs):
        micros = {pages: seconds[name, rows, pages] / steps[name][1] * 1e6 for pages in PAGES}
        ratio = micros[PAGES[-1]] / micros[PAGES[0]]
        results.append({"step": name, "rows": rows, "microseconds": micros, "largest_to_smallest": ratio})
        table.append(
            {"step": name, "rows": rows} | {f"{p} pages, us": t for p, t in micros.items()} | {"ratio": ratio}
        )
    worst = max(result["largest_to_smallest"] for result in results if result["step"] != "argmin per page")
    report(
        options,
        {"benchmark": "page_table", "results": results, "worst_largest_to_smallest": worst},
        table,
        [
            f"{PAGES[-1]} pages take the page table at most {worst:.2f} times as long as {PAGES[0]} "
            "(wanted: at most 1.5)"
        ],
    )


if __name__ == "__main__":
    main()
