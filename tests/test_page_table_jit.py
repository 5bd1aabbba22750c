"""The page table inside transformations: traced once, updated in place, the same numbers everywhere."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax import page_table
from paged_jax.page_table import PageTable
from paged_jax.testing import check_page_table

ROWS, WIDTH = 4, 6

# Two calls of each transition on a table that `crowded` made; the second undoes or goes beyond the first.
CALLS = {
    "extend": [([1, 1, 0, 2],), ([9, 1, 1, -1],)],
    "release": [([True, False, False, True],), ([True, True, False, False],)],
    "fork": [([-1, -1, 0, 1],), ([-1, -1, -1, 4],)],
    "adopt": [(2, [0, 1], 7), (3, [1, 9], 8)],
    "pin": [([0, -1, 1],), ([1, 1, 9],)],
    "unpin": [([2, -1, -1],), ([2, 9, -1],)],
    "truncate": [([3, 9, 9, 0],), ([0, 2, 2, 2],)],
    "drop_before": [([5, 0, 0, 0],), ([99, 4, 0, -3],)],
    "locate": [([0, 1, 5], [5, 4, 0]), ([0, 0, 1], [6, -1, 2])],
}
TRANSITIONS = [name for name in CALLS if name != "locate"]
JITTED = {name: jax.jit(getattr(page_table, name)) for name in CALLS}
each_call = pytest.mark.parametrize("name", CALLS)
each_transition = pytest.mark.parametrize("name", TRANSITIONS)


def crowded() -> PageTable:
    """Two rows that share a page, their tails apart; page 2 pinned twice."""
    table, _ = JITTED["extend"](PageTable.create(12, 4, ROWS, WIDTH), np.array([6, 0, 0, 0]))
    table, _ = JITTED["extend"](JITTED["fork"](table, np.array([-1, 0, -1, -1])), np.array([0, 1, 0, 0]))
    return JITTED["pin"](table, np.array([2, 2, -1]))


def arrays(call: tuple, dtype: type = np.int32) -> tuple:
    """The arguments as arrays; numbers get the dtype, masks stay bool."""
    return tuple(
        np.asarray(x) if isinstance(x, list) and x[0] is True else np.asarray(x, dtype) for x in call
    )


def apply(name: str, table: PageTable, *arguments) -> PageTable:
    """The transition's new table alone."""
    result = getattr(page_table, name)(table, *arguments)
    return result[0] if name == "extend" else result


@each_call
def test_one_trace_serves_every_call_of_one_shape(name):
    chex.clear_trace_counter()
    transition = jax.jit(chex.assert_max_traces(getattr(page_table, name), n=1))
    table = PageTable.create(12, 4, ROWS, WIDTH)
    for call in CALLS[name] * 2:
        for dtype in (np.int32, np.int64):
            result = transition(table, *arrays(call, dtype))
        table = {"extend": result[0], "locate": table}[name] if isinstance(result, tuple) else result


@each_call
def test_eager_calls_compile_once(name):
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compilations.append(event))
    call = arrays(CALLS[name][0])
    for _ in range(2):
        compilations.clear()
        getattr(page_table, name)(crowded(), *call)
    assert not [event for event in compilations if "backend_compile" in event]


@each_call
def test_vmap_is_one_table_after_the_other(name):
    tables = [crowded(), PageTable.create(12, 4, ROWS, WIDTH)]
    calls = [arrays(call) for call in CALLS[name]]
    together = jax.vmap(JITTED[name])(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables),
        *(np.stack(x) for x in zip(*calls, strict=True)),
    )
    alone = [JITTED[name](table, *call) for table, call in zip(tables, calls, strict=True)]
    chex.assert_trees_all_equal(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


def test_scan_is_one_step_after_the_other():
    steps = np.random.default_rng(0).integers(-1, 5, (12, ROWS))
    table, grants = crowded(), []
    for num_tokens in steps:
        table, grant = JITTED["extend"](table, num_tokens)
        grants.append(grant)
    scanned, scanned_grants = lax.scan(page_table.extend, crowded(), steps)
    chex.assert_trees_all_equal(scanned, table)
    chex.assert_trees_all_equal(scanned_grants, jax.tree.map(lambda *leaves: jnp.stack(leaves), *grants))
    check_page_table(table, pins=[2, 2])


@each_call
@pytest.mark.parametrize("dtype", [np.int64, np.int8])
def test_x64_changes_neither_numbers_nor_types(name, dtype):
    expected = JITTED[name](crowded(), *arrays(CALLS[name][0]))
    with jax.enable_x64(True):
        result = JITTED[name](crowded(), *arrays(CALLS[name][0], dtype))
    chex.assert_trees_all_equal(result, expected)
    chex.assert_trees_all_equal_dtypes(result, expected)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_a_number_beyond_int32_never_wraps_into_the_table(x64, dtype):
    huge = np.array([2**32 + 1 if dtype != np.uint32 else 2**32 - 1] * ROWS, dtype)
    table = crowded()
    with jax.enable_x64(x64):
        assert not page_table.extend(table, huge)[1].granted.any()
        chex.assert_trees_all_equal(page_table.fork(table, huge), table)
        chex.assert_trees_all_equal(page_table.truncate(table, huge), table)
        assert (page_table.locate(table, huge, np.zeros_like(huge))[0] == page_table.NO_PAGE).all()
        assert (page_table.locate(table, np.zeros_like(huge), huge)[0] == page_table.NO_PAGE).all()
        for transition in (page_table.pin, page_table.unpin):
            with pytest.raises(ValueError, match="only a page in use"):
                transition(table, huge)
        with pytest.raises(ValueError, match="adopt: needs"):
            page_table.adopt(table, huge[0], np.array([0]), 4)
        with pytest.raises(ValueError, match="adopt: needs"):
            page_table.adopt(table, 2, huge, 4)


@each_transition
def test_the_old_table_stays_as_it_was(name):
    table = crowded()
    before = jax.tree.map(np.array, table)
    for call in CALLS[name]:
        JITTED[name](table, *arrays(call))
    chex.assert_trees_all_equal(table, before)


def memory(step, num_pages: int):
    """What a compiled, donated step over a pool of this size needs besides its arguments."""
    shapes = jax.eval_shape(lambda: PageTable.create(num_pages, 4, ROWS, WIDTH))
    return jax.jit(step, donate_argnums=0).lower(shapes).compile().memory_analysis()


def in_a_loop(name: str):
    calls = [jnp.stack(x) for x in zip(*map(arrays, CALLS[name]), strict=True)]

    def step(table: PageTable) -> PageTable:
        return lax.fori_loop(0, 8, lambda i, table: apply(name, table, *(x[i % 2] for x in calls)), table)

    return step


def one_after_the_other(table: PageTable) -> PageTable:
    for name in TRANSITIONS:
        table = apply(name, table, *arrays(CALLS[name][0]))
    return table


@pytest.mark.parametrize(
    "step", [*map(in_a_loop, TRANSITIONS), one_after_the_other], ids=[*TRANSITIONS, "one after the other"]
)
def test_no_transition_copies_the_pool(step):
    small, large = memory(step, 1_000), memory(step, 64_000)
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.alias_size_in_bytes >= 2 * 4 * 64_000


ARGUMENTS = {
    "a float": ("extend", ([1.0] * ROWS,), "num_tokens must be an integer array of shape"),
    "a row too few": ("extend", ([1] * (ROWS - 1),), r"\[4\], got int.. \[3\]"),
    "a column": ("extend", ([[1]] * ROWS,), r"got int.. \[4, 1\]"),
    "numbers as a mask": ("release", ([1] * ROWS,), "rows_mask must be a bool array"),
    "a short mask": ("release", ([True],), "rows_mask must be a bool array"),
    "a parent too few": ("fork", ([0],), "parents must be an integer array"),
    "rows": ("adopt", ([0], [0], 1), "row must be an integer array of shape"),
    "a page": ("adopt", (0, 0, 1), "page_ids must be an integer array of shape"),
    "half a token": ("adopt", (0, [0], 1.5), "num_tokens must be an integer array"),
    "a mask to pin": ("pin", ([True],), "page_ids must be an integer array of shape"),
    "one page": ("unpin", (0,), "page_ids must be an integer array of shape"),
    "one length": ("truncate", (0,), "lengths must be an integer array of shape"),
    "one position": ("drop_before", (0,), "positions must be an integer array of shape"),
    "unlike shapes": ("locate", ([0, 1], [0]), r"positions must be an integer array of shape \[2\]"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrong_argument_is_named(name, arguments, message, compiled):
    transition = JITTED[name] if compiled else getattr(page_table, name)
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        transition(crowded(), *map(np.asarray, arguments))


def test_a_row_that_int32_cannot_count_is_refused_at_once():
    assert PageTable.create(4, 2**20, 2, 2**11 - 1).max_pages_per_row == 2**11 - 1
    with pytest.raises(
        ValueError, match=r"fewer than 2.*31 tokens, got max_pages_per_row=2048 of page_size=1048576"
    ):
        PageTable.create(4, 2**20, 2, 2**11)


@pytest.mark.parametrize("size", ["num_pages", "page_size", "max_rows", "max_pages_per_row"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_sizes_are_positive_integers(size, value):
    sizes = {"num_pages": 4, "page_size": 4, "max_rows": 2, "max_pages_per_row": 2} | {size: value}
    with pytest.raises(ValueError, match=f"{size} must be a positive integer, got {size}={value!r}"):
        PageTable.create(**sizes)
