"""Small engines that share their compiled programs, and what must hold of them after every visit."""

import jax
import numpy as np
import pytest
from tiny import tiny_llama

from paged_jax.engine import Delta, Engine
from paged_jax.page_table import PageTable
from paged_jax.testing import check_page_table

# Pages for 96 tokens: the rows of up to 64 tokens do not all fit. Steps of 8 or 32 tokens.
SIZES = {"max_rows": 4, "max_length": 64, "page_size": 4, "num_pages": 24}
SIZES |= {"step_tokens": (8, 32), "steps_per_visit": 4}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """At these sizes compiling is all the time there is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_engine(model=None, **changes) -> Engine:
    return Engine(model or tiny_llama(), **{**SIZES, **changes})


def table_of(engine: Engine) -> PageTable:
    return engine._core._runner.state.rows.table


def check_engine(engine: Engine) -> None:
    """Pages are conserved, the metrics tell the truth of them, and a row wastes less than a page."""
    table, metrics = table_of(engine), engine.metrics
    scheduler = engine._core.scheduler
    pinned = scheduler.pinned()
    check_page_table(table, pins=pinned)
    lengths = np.asarray(table.lengths)
    assert {row: int(lengths[row]) for row in np.flatnonzero(lengths)} == {
        row: job.length for row, job in scheduler.running.items() if job.length
    }
    assert metrics.pages_free == int(table.num_free)
    held = {int(page) for page in np.asarray(table.block_tables).ravel() if page >= 0}
    assert metrics.pages_cached == len(set(pinned) - held)
    assert metrics.pages_used == len(held)
    assert metrics.wasted_slots <= (table.page_size - 1) * metrics.running


def check_at_rest(engine: Engine) -> None:
    """Nobody runs or waits, and every page is free or kept for its prefix alone."""
    check_engine(engine)
    metrics = engine.metrics
    assert not engine.has_work
    assert (metrics.running, metrics.waiting, metrics.pages_used) == (0, 0, 0)
    assert metrics.submitted == metrics.finished + metrics.aborted


def finish(engine: Engine, limit: int = 500) -> dict[tuple[str, int], list[Delta]]:
    """Steps until nothing is left to do, checks every visit, and returns the deltas of each completion."""
    deltas: dict[tuple[str, int], list[Delta]] = {}
    for _ in range(limit):
        if not engine.has_work:
            check_at_rest(engine)
            return deltas
        for delta in engine.step():
            so_far = deltas.setdefault((delta.request_id, delta.index), [])
            assert not (so_far and so_far[-1].finish_reason), "news of a completion that has ended"
            so_far.append(delta)
        check_engine(engine)
    raise AssertionError(f"not finished after {limit} visits")


def joined(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)
