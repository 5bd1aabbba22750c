"""Time of the allocator per step, over the number of rows and the size of the pool.

    python benchmarks/page_table.py

Two steps, inside a jitted loop on a donated table: `append` adds a token to every row, and every
page_size-th time a page; `grow and release` gives every row a page and takes all back. Neither may
grow with the pool.

One thread: XLA on CPU hands any operation on an array of more than 512 KiB to a pool of threads, at
about 2 us each, whatever it reads of the array. That constant would hide the scaling.
"""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax counts the processors

from collections.abc import Callable
from functools import partial

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
STEPS = 320  # a multiple of the page size, so that `append` ends where it began


def append(table: PageTable) -> PageTable:
    table, _ = page_table.extend(table, jnp.ones(table.max_rows, jnp.int32))
    return page_table.truncate(table, table.lengths % PAGE_SIZE)


def grow_and_release(table: PageTable) -> PageTable:
    table, _ = page_table.extend(table, jnp.full(table.max_rows, PAGE_SIZE, jnp.int32))
    return page_table.release(table, jnp.ones(table.max_rows, bool))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def loop(step: Callable[[PageTable], PageTable], table: PageTable) -> PageTable:
    return lax.fori_loop(0, STEPS, lambda _, table: step(table), table)


class Run:
    def __init__(self, step: Callable[[PageTable], PageTable], rows: int, pages: int):
        self.step = step
        self.table = PageTable.create(pages, PAGE_SIZE, rows, MAX_PAGES_PER_ROW)

    def __call__(self) -> jax.Array:
        self.table = loop(self.step, self.table)
        return self.table.num_free


def check() -> None:
    table = PageTable.create(2048, PAGE_SIZE, 16, MAX_PAGES_PER_ROW)
    for tokens in range(1, PAGE_SIZE + 2):
        table, grant = page_table.extend(table, jnp.ones(16, jnp.int32))
        assert bool(grant.granted.all())
        assert int(table.num_free) == 2048 - 16 * -(-tokens // PAGE_SIZE)
        check_page_table(table)
    table = loop(grow_and_release, PageTable.create(2048, PAGE_SIZE, 16, MAX_PAGES_PER_ROW))
    check_page_table(table)
    np.testing.assert_array_equal(table.ref_counts, 0)


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    check()
    steps = {"append": append, "grow and release": grow_and_release}
    runs = {
        (name, rows, pages): Run(step, rows, pages)
        for name, step in steps.items()
        for rows in ROWS
        for pages in PAGES
        if pages >= rows
    }
    seconds = time_in_turns(runs, options.rounds)
    results, table = [], []
    for name in steps:
        for rows in ROWS:
            micros = {pages: seconds[name, rows, pages] / STEPS * 1e6 for pages in PAGES}
            ratio = micros[PAGES[-1]] / micros[PAGES[0]]
            results.append({"step": name, "rows": rows, "microseconds": micros, "largest_to_smallest": ratio})
            table.append(
                {"step": name, "rows": rows}
                | {f"{p} pages, us": t for p, t in micros.items()}
                | {"ratio": ratio}
            )
    worst = max(result["largest_to_smallest"] for result in results)
    report(
        options,
        {"benchmark": "page_table", "results": results, "worst_largest_to_smallest": worst},
        table,
        [f"{PAGES[-1]} pages take at most {worst:.2f} times as long as {PAGES[0]} (wanted: at most 1.5)"],
    )


if __name__ == "__main__":
    main()
