"""Which token goes where in a step: compared with lists, and with each row on its own."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.ragged_batch import RaggedBatch

extend = jax.jit(page_table.extend)
packed = jax.jit(RaggedBatch.packed, static_argnums=2)
decode = jax.jit(RaggedBatch.decode, static_argnames="size")

ROWS, PAGE_SIZE = 4, 4


def table_of(*lengths: int, page_ids: tuple[int, ...] = ()) -> PageTable:
    """Rows of these lengths, the pool's first pages handed out in the order of `page_ids`."""
    table = PageTable.create(20, PAGE_SIZE, ROWS, 5)
    others = [page for page in range(table.num_pages) if page not in page_ids]
    table = dataclasses.replace(table, free_stack=jnp.array(others + list(page_ids[::-1]), jnp.int32))
    return extend(table, np.array([*lengths, *[0] * (ROWS - len(lengths))]))[0]


def addresses(batch: RaggedBatch) -> list[tuple[int, int]]:
    return list(zip(batch.page_ids.tolist(), batch.slots.tolist(), strict=True))


@given(
    st.lists(st.integers(0, 20), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(-2, 22), min_size=ROWS, max_size=ROWS),
)
def test_packed_lists_the_last_tokens_of_each_row_in_turn(lengths, num_tokens):
    table = table_of(*lengths)
    block_tables = table.block_tables.tolist()
    expected, starts, size = [], [0], 24
    for row, length in enumerate(lengths):
        count = min(max(num_tokens[row], 0), length)
        full = len(expected) + count > size or len(starts) <= row  # neither this row nor any after it fits
        if not full:
            expected += [(row, position) for position in range(length - count, length)]
            starts.append(len(expected))
    starts += [len(expected)] * (ROWS + 1 - len(starts))
    batch = packed(table, np.array(num_tokens), size)

    assert batch.query_starts.tolist() == starts
    tokens = list(zip(batch.rows.tolist(), batch.positions.tolist(), strict=True))
    assert tokens == expected + [(ROWS, -1)] * (size - len(expected))
    live = [(block_tables[row][position // 4], position % 4) for row, position in expected]
    assert addresses(batch) == live + [(NO_PAGE, 0)] * (size - len(expected))
    taking_part = {row for row, _ in expected}
    assert batch.lengths.tolist() == [length * (row in taking_part) for row, length in enumerate(lengths)]
    for row in taking_part:
        assert tokens[int(batch.last_tokens[row])] == (row, lengths[row] - 1)
    assert (batch.last_tokens >= 0).all()
    assert (batch.last_tokens < size).all()
    chex.assert_trees_all_equal(batch.block_tables, table.block_tables)


@given(st.lists(st.integers(0, 20), min_size=ROWS, max_size=ROWS), st.integers(0, 15))
def test_decode_is_packed_with_one_token_per_active_row(lengths, mask):
    table, active = table_of(*lengths), np.array([bool(mask >> row & 1) for row in range(ROWS)])
    one_each, batch = decode(table, active), packed(table, active.astype(int), ROWS)
    assert one_each.query_starts is None
    assert one_each.last_tokens.tolist() == list(range(ROWS))
    chex.assert_trees_all_equal(one_each.lengths, batch.lengths)
    for name in ("rows", "positions", "page_ids", "slots"):
        of_rows, live = np.asarray(getattr(one_each, name)), np.asarray(one_each.rows) < ROWS
        assert of_rows[live].tolist() == np.asarray(getattr(batch, name))[: live.sum()].tolist()
        assert np.unique(of_rows[~live]).tolist() in ([], [{"rows": ROWS, "slots": 0}.get(name, -1)])


@given(st.lists(st.integers(0, 20), min_size=ROWS, max_size=ROWS), st.integers(0, 15), st.integers(1, 6))
def test_decode_of_a_size_takes_the_active_rows_alone(lengths, mask, size):
    """The first `size` of them, as packed without the others."""
    table, active = table_of(*lengths), np.array([bool(mask >> row & 1) for row in range(ROWS)])
    live = [row for row in range(ROWS) if active[row] and lengths[row]]
    taken = live[:size]
    batch = decode(table, active, size=size)
    expected = packed(table, np.isin(np.arange(ROWS), taken).astype(int), size)
    for name in ("rows", "positions", "page_ids", "slots"):
        chex.assert_trees_all_equal(getattr(batch, name), getattr(expected, name))
    padding = [0] * (size - len(taken))
    assert batch.lengths.tolist() == [lengths[row] for row in taken] + padding
    chex.assert_trees_all_equal(batch.block_tables[: len(taken)], table.block_tables[np.array(taken, int)])
    chex.assert_shape(batch.block_tables, (size, table.max_pages_per_row))
    assert [int(batch.last_tokens[row]) for row in taken] == list(range(len(taken)))
    assert all(0 <= token < size for token in batch.last_tokens.tolist())
    if len(live) > size:
        with pytest.raises(ValueError, match=rf"{len(live)} rows are active, for size={size}"):
            RaggedBatch.decode(table, active, size)
    else:
        chex.assert_trees_all_equal(RaggedBatch.decode(table, active, size), batch)


@pytest.mark.parametrize("size", [0, -1])
def test_decode_has_room_for_a_row(size):
    with pytest.raises(
        ValueError, match=rf"decode: size must be at least 1, or None for all rows, got size={size}"
    ):
        decode(table_of(3), np.ones(ROWS, bool), size=size)


def test_b49_chunks_lie_where_the_table_says():
    page_ids = (5, 0, 3)
    table, found = table_of(page_ids=page_ids), []
    for chunk in (3, 5, 2):
        num_tokens = np.array([chunk, 0, 0, 0])
        table, _ = extend(table, num_tokens)
        found += addresses(packed(table, num_tokens, 6))[:chunk]
    assert found == [(page_ids[token // 4], token % 4) for token in range(10)]


def test_b49_a_batch_of_prompts_is_each_prompt_alone():
    together = addresses(packed(table_of(3, 5, page_ids=(5, 0, 3)), np.array([3, 5, 0, 0]), 8))
    alone = addresses(packed(table_of(3, page_ids=(5,)), np.array([3, 0, 0, 0]), 3))
    assert together[:3] == alone == [(5, 0), (5, 1), (5, 2)]
    alone = addresses(packed(table_of(5, page_ids=(0, 3)), np.array([5, 0, 0, 0]), 5))
    assert together[3:] == alone == [(0, 0), (0, 1), (0, 2), (0, 3), (3, 0)]


@pytest.mark.parametrize("size", [0, 5, 8])
def test_a_step_without_tokens_is_all_padding(size):
    batch = packed(table_of(3, 5), np.zeros(ROWS, int), size)
    assert batch.query_starts.tolist() == [0] * (ROWS + 1)
    assert batch.lengths.tolist() == [0] * ROWS
    assert batch.rows.tolist() == [ROWS] * size
    assert batch.page_ids.tolist() == [NO_PAGE] * size
    idle = decode(table_of(3, 5), np.zeros(ROWS, bool))
    assert idle.lengths.tolist() == [0] * ROWS
    assert idle.page_ids.tolist() == [NO_PAGE] * ROWS


def test_an_empty_row_does_not_decode():
    assert decode(table_of(3), np.ones(ROWS, bool)).rows.tolist() == [0, ROWS, ROWS, ROWS]


def test_a_dropped_page_gets_no_token():
    table = page_table.drop_before(table_of(8, page_ids=(5, 0)), np.array([4, 0, 0, 0]))
    batch = packed(table, np.array([6, 0, 0, 0]), 6)
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.page_ids.tolist() == [NO_PAGE] * 2 + [0] * 4


def test_padding_never_changes_a_slot():
    table, rng = table_of(3, 5, 4), np.random.default_rng(0)
    pools = KVPages.create(1, 20, 2, PAGE_SIZE, 3)
    pools = jax.tree.map(lambda pool: jnp.asarray(rng.normal(size=pool.shape), pool.dtype), pools)
    for batch in (
        packed(table, np.array([1, 0, 2, 0]), 9),
        decode(table, np.array([True, False, True, True])),
    ):
        live = np.asarray(batch.rows) < ROWS
        assert not live.all()
        new = np.where(live[:, None, None], 1.0, np.nan) * np.ones((live.size, 2, 3))
        written = pools.write(
            0, jnp.asarray(new, jnp.float32), jnp.asarray(new, jnp.float32), batch.page_ids, batch.slots
        )
        expected = np.array(pools.k_pages[0])
        for page_id, slot in np.array(addresses(batch))[live]:
            expected[page_id, :, slot] = 1.0
        chex.assert_trees_all_equal(written.k_pages[0], expected)


@pytest.mark.parametrize("num_tokens", [[4, 0, 0, 0], [-1, 0, 0, 0], [3, 5, 1, 0], [3, 5, 0, 1]])
def test_numbers_that_cannot_be_raise_outside_jit(num_tokens):
    """More than the row has, negative, more than the size in all, of an empty row."""
    with pytest.raises(
        ValueError, match="packed: needs 0 <= num_tokens <= lengths and a sum of at most size=8"
    ):
        RaggedBatch.packed(table_of(3, 5, 4), np.array(num_tokens), 8)


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_arguments_are_named(compiled):
    table = table_of(3)
    pack, one_each = (packed, decode) if compiled else (RaggedBatch.packed, RaggedBatch.decode)
    for num_tokens in (
        np.zeros(3, int),
        np.zeros(ROWS, np.float32),
        np.zeros((ROWS, 1), int),
        np.zeros(ROWS, bool),
    ):
        with pytest.raises(
            ValueError, match=r"packed: num_tokens must be an integer array of shape .4., got"
        ):
            pack(table, num_tokens, 8)
    for active in (np.zeros(3, bool), np.zeros(ROWS, int)):
        with pytest.raises(ValueError, match=r"decode: active must be a bool array of shape .4., got"):
            one_each(table, active)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_other_integer_types_give_the_same_batch(x64, dtype):
    expected = packed(table_of(3, 5), np.array([2, 5, 0, 0], np.int32), 8)
    with jax.enable_x64(x64):
        for pack in (RaggedBatch.packed, packed):
            batch = pack(table_of(3, 5), np.array([2, 5, 0, 0], dtype), 8)
            chex.assert_trees_all_equal(batch, expected)
            chex.assert_trees_all_equal_dtypes(batch, expected)


def test_a_number_beyond_int32_does_not_wrap():
    with pytest.raises(ValueError, match="packed: needs"):
        RaggedBatch.packed(table_of(3), np.array([2**32 + 1, 0, 0, 0]), 8)


def test_one_trace_serves_every_step_of_one_size():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(RaggedBatch.packed, n=1), static_argnums=2)
    for num_tokens in ([3, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]):
        step(table_of(3, 5), np.array(num_tokens), 8)
