"""What each transition of the page table promises, and the faults that users of such allocators reported."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import page_table
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.testing import check_page_table

extend, release, fork = jax.jit(page_table.extend), jax.jit(page_table.release), jax.jit(page_table.fork)
truncate, drop_before = jax.jit(page_table.truncate), jax.jit(page_table.drop_before)
locate, summary = jax.jit(page_table.locate), jax.jit(page_table.summary)
adopt, pin, unpin = page_table.adopt, page_table.pin, page_table.unpin  # outside jit they raise


def create(num_pages=8, page_size=4, max_rows=3, max_pages_per_row=4) -> PageTable:
    return PageTable.create(num_pages, page_size, max_rows, max_pages_per_row)


def handing_out(table: PageTable, *page_ids: int) -> PageTable:
    """The same empty table, whose first free pages are these."""
    others = [page for page in range(table.num_pages) if page not in page_ids]
    return dataclasses.replace(table, free_stack=jnp.array(others + list(page_ids[::-1]), jnp.int32))


def grow(table: PageTable, *num_tokens: int) -> PageTable:
    """Extends by the numbers, all of which must be granted; missing ones are zero."""
    num_tokens = np.array([*num_tokens, *[0] * (table.max_rows - len(num_tokens))])
    table, grant = extend(table, num_tokens)
    assert all(grant.granted)
    return table


def pages(table: PageTable, row: int) -> list[int]:
    return [page for page in table.block_tables[row].tolist() if page != NO_PAGE]


def only(table: PageTable, *rows: int) -> np.ndarray:
    return np.isin(np.arange(table.max_rows), rows)


# The course text's trace: 9 tokens on pages 7, 2 and 14, then one token after the other.


def test_a_page_is_taken_by_the_token_that_needs_it():
    table = grow(handing_out(create(num_pages=16), 7, 2, 14, 9), 9)
    assert pages(table, 0) == [7, 2, 14]
    for token in (9, 10, 11):
        table = grow(table, 1)
        assert pages(table, 0) == [7, 2, 14]
        assert [x.item() for x in locate(table, np.array([0]), np.array([token]))] == [14, token % 4]
    table = grow(table, 1)
    assert pages(table, 0) == [7, 2, 14, 9]
    assert [x.item() for x in locate(table, np.array([0]), np.array([12]))] == [9, 0]
    assert summary(table).wasted_slots.tolist() == [3, 0, 0]


def test_a_new_table_is_empty_and_hands_out_pages_in_order():
    table = create()
    check_page_table(table)
    assert (table.num_pages, table.max_rows, table.max_pages_per_row, table.num_free) == (8, 3, 4, 8)
    assert (table.lengths == 0).all()
    assert (table.block_tables == NO_PAGE).all()
    assert pages(grow(table, 16), 0) == [0, 1, 2, 3]


# extend


def test_a_row_is_granted_whole_or_not_at_all():
    table = grow(create(num_pages=3), 4)
    after, grant = extend(table, np.array([4, 9, 0]))
    assert grant.granted.tolist() == [True, False, True]
    chex.assert_trees_all_equal(after, grow(table, 4))


def test_rows_are_served_in_order_and_the_first_refusal_stops_those_that_need_a_page():
    table = grow(create(num_pages=5, max_rows=5), 3, 3, 4, 4, 0)
    table, grant = extend(table, np.array([1, 6, 1, 0, 1]))
    assert grant.granted.tolist() == [True, False, False, True, False]
    assert table.lengths.tolist() == [4, 3, 4, 4, 0]
    assert table.num_free == 1
    check_page_table(table)


def test_a_row_behind_the_refusal_may_fill_its_own_last_page():
    table = grow(create(num_pages=3, max_rows=3), 4, 3, 3)
    table, grant = extend(table, np.array([1, 1, 1]))
    assert grant.granted.tolist() == [False, True, True]
    assert table.lengths.tolist() == [4, 4, 4]


@pytest.mark.parametrize("impossible", [-1, -(2**31), 17, 2**31 - 1])
def test_an_impossible_number_is_refused_alone(impossible):
    table = grow(create(), 0, 3)
    after, grant = extend(table, np.array([impossible, 2, 16]))
    assert grant.granted.tolist() == [False, True, True]
    assert after.lengths.tolist() == [0, 5, 16]
    assert pages(after, 0) == []
    check_page_table(after)


def test_tokens_are_refused_that_the_table_of_a_row_cannot_hold():
    table = grow(create(num_pages=20), 15)
    table, grant = extend(table, np.array([2, 0, 0]))
    assert not grant.granted[0]
    table = grow(table, 1)
    table, grant = extend(table, np.array([1, 0, 0]))
    assert not grant.granted[0]
    assert table.lengths[0] == 16
    assert len(pages(table, 0)) == 4


def test_of_several_rows_that_append_to_a_page_the_last_keeps_it():
    table = fork(grow(create(), 6), np.array([-1, 0, 0]))
    shared = pages(table, 0)[1]
    table, grant = extend(table, np.ones(3, int))
    tails = [pages(table, row)[1] for row in range(3)]
    assert grant.copies.tolist() == [[shared, tails[0]], [shared, tails[1]], [NO_PAGE, NO_PAGE]]
    assert tails[2] == shared
    assert len(set(tails)) == 3
    assert table.ref_counts[jnp.array(tails)].tolist() == [1, 1, 1]
    check_page_table(table)


def test_a_pinned_last_page_is_copied_even_by_its_only_row():
    table = grow(create(), 6)
    tail = pages(table, 0)[1]
    table, grant = extend(pin(table, np.array([tail])), np.array([1, 0, 0]))
    assert grant.copies[0].tolist() == [tail, pages(table, 0)[1]]
    assert pages(table, 0)[1] != tail
    check_page_table(table, pins=[tail])


def test_a_copy_that_finds_no_page_is_refused_until_the_page_is_the_rows_own():
    table = fork(grow(create(num_pages=2), 6), np.array([-1, 0, -1]))
    refused, grant = extend(table, np.array([1, 1, 0]))
    assert grant.granted.tolist() == [False, False, True]
    chex.assert_trees_all_equal(refused, table)
    alone = release(refused, only(table, 0))
    assert pages(grow(alone, 0, 1), 1) == pages(table, 0)


def test_a_row_whose_partly_filled_last_page_was_dropped_is_refused_alone():
    table = truncate(drop_before(grow(create(), 8, 8), np.array([8, 0, 0])), np.array([6, 8, 0]))
    after, grant = extend(table, np.array([1, 1, 0]))
    assert grant.granted.tolist() == [False, True, True]
    assert after.lengths.tolist() == [6, 9, 0]


# release, fork, adopt, pin, unpin, truncate, drop_before, locate, summary


def test_a_shared_page_outlives_all_but_its_last_holder():
    table = pin(fork(grow(create(), 6), np.array([-1, 0, -1])), np.array([0]))
    for holders, free in [((0,), 6), ((1,), 7)]:
        table = release(table, only(table, *holders))
        assert table.num_free == free
    assert unpin(table, np.array([0])).num_free == 8


def test_fork_fills_empty_rows_only_and_sees_the_table_as_it_was():
    table = grow(create(max_rows=5), 6, 2)
    forked = fork(table, np.array([1, 0, 0, 2, 5]))
    assert forked.lengths.tolist() == [6, 2, 6, 0, 0]
    assert pages(forked, 2) == pages(table, 0)
    assert pages(forked, 1) == pages(table, 1)
    assert forked.num_free == table.num_free
    check_page_table(forked)


def test_adopt_starts_a_row_on_pages_that_are_in_use():
    table = adopt(grow(create(), 12), 1, np.array([0, 1, 77]), 8)
    assert pages(table, 1) == [0, 1]
    assert table.lengths.tolist() == [12, 8, 0]
    assert table.ref_counts[:3].tolist() == [2, 2, 1]
    check_page_table(table)
    assert pages(grow(table, 0, 1), 1) == [0, 1, 3]


ADOPTIONS = {
    "the row is not empty": (0, [0, 1], 8),
    "the row does not exist": (3, [0, 1], 8),
    "a row number that would wrap": (-1, [0, 1], 8),
    "a free page": (1, [0, 5], 8),
    "a page that does not exist": (1, [0, 8], 8),
    "a page number that would wrap": (1, [0, -8], 8),
    "a page twice": (1, [0, 0], 8),
    "too few pages": (1, [0, 1], 9),
    "more tokens than a row can have": (1, [0, 1, 2, 0, 1], 17),
    "a negative number of tokens": (1, [0, 1], -1),
}


@pytest.mark.parametrize("arguments", ADOPTIONS.values(), ids=ADOPTIONS)
def test_an_adoption_that_cannot_be_raises_and_changes_nothing_under_jit(arguments):
    table, (row, page_ids, num_tokens) = grow(create(), 12), arguments
    with pytest.raises(ValueError, match="adopt: needs an empty row and distinct pages in use"):
        adopt(table, row, np.array(page_ids), num_tokens)
    chex.assert_trees_all_equal(jax.jit(adopt)(table, row, np.array(page_ids), num_tokens), table)


@pytest.mark.parametrize("transition", [pin, unpin])
@pytest.mark.parametrize("page", [5, 8, -2, -8, 2**31 - 1])
def test_only_a_page_in_use_can_be_pinned_or_unpinned(transition, page):
    table = pin(grow(create(), 12), np.array([0]))
    with pytest.raises(ValueError, match="only a page in use"):
        transition(table, np.array([0, page]))
    after = jax.jit(transition)(table, np.array([0, page, NO_PAGE]))
    chex.assert_trees_all_equal(after, transition(table, np.array([0])))


def test_truncate_gives_back_pages_wholly_past_the_end():
    table = grow(create(), 14, 5, 3)
    for lengths, left in [([20, 5, 4], [4, 2, 1]), ([9, 4, 3], [3, 1, 1]), ([8, 1, -7], [2, 1, 0])]:
        table = truncate(table, np.array(lengths))
        assert summary(table).pages_per_row.tolist() == left
        check_page_table(table)
    assert table.lengths.tolist() == [8, 1, 0]


def test_drop_before_leaves_positions_as_they_are():
    table = grow(create(), 10)
    kept = pages(table, 0)[1:]
    table = drop_before(table, np.array([7, 3, 9]))
    assert table.block_tables[0].tolist() == [NO_PAGE, *kept, NO_PAGE]
    assert table.lengths[0] == 10
    page_ids, slots = locate(table, np.zeros(10, int), np.arange(10))
    assert page_ids.tolist() == [NO_PAGE] * 4 + [kept[0]] * 4 + [kept[1]] * 2
    assert slots.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 0, 1]
    assert drop_before(table, np.array([2**31 - 1, 0, 0])).block_tables[0].tolist() == [-1, -1, kept[1], -1]
    assert drop_before(grow(table, 2), np.array([99, 0, 0])).num_free == table.num_pages


def test_locate_finds_no_page_outside_the_row():
    table = grow(create(), 3, 5)
    rows, positions = np.array([-1, 3, 0, 0, 1, 1, 2]), np.array([0, 0, -1, 3, 4, 5, 0])
    page_ids, slots = locate(table, rows, positions)
    assert page_ids.tolist() == [-1, -1, -1, -1, pages(table, 1)[1], -1, -1]
    assert not slots.any()


# Reported faults.


def test_b01_double_free():
    table = release(grow(create(num_pages=4), 8), only(create(), 0))
    chex.assert_trees_all_equal(release(table, only(table, 0)), table)
    table = grow(table, 0, 8, 8)
    assert sorted(pages(table, 1) + pages(table, 2)) == [0, 1, 2, 3]
    table = release(table, only(table, 0, 1, 2))
    assert table.num_free == 4
    with pytest.raises(ValueError, match="unpin: only a page in use"):
        unpin(table, np.array([2]))
    chex.assert_trees_all_equal(unpin(table, np.array([NO_PAGE, NO_PAGE])), table)


def test_b01_a_page_listed_twice_is_freed_once():
    table = pin(grow(create(num_pages=4), 8), np.array([1, 1]))
    table = unpin(release(table, only(table, 0)), np.array([1, 1]))
    assert sorted(table.free_stack[: int(table.num_free)].tolist()) == [0, 1, 2, 3]
    check_page_table(table)


@pytest.mark.parametrize("pinned", [[], [0], [0, 1]], ids=["nothing pinned", "a full page", "the tail too"])
def test_b02_no_page_leaks_over_200_requests(pinned):
    table = create(num_pages=16, max_rows=2)
    for request in range(200):
        table = grow(table, 5)
        pins = np.array([pages(table, 0)[i] for i in pinned] + [NO_PAGE])
        table = jax.jit(pin)(table, pins)
        for _ in range(request % 8 + 1):
            table = grow(table, 1)
        table = jax.jit(unpin)(release(table, only(table, 0)), pins)
        assert table.num_free == 16
    check_page_table(table)


def test_b03_growing_takes_only_the_difference():
    table = grow(create(num_pages=16, page_size=16, max_pages_per_row=16), 100)
    first = pages(table, 0)
    assert len(first) == 7
    table = grow(table, 100)
    assert len(pages(table, 0)) == 13
    assert pages(table, 0)[:7] == first
    chex.assert_trees_all_equal(grow(table, 0), table)


def test_b05_page_boundaries():
    table = create(num_pages=3, max_rows=10)
    for n in range(10):
        row = grow(table, n)
        numbers = summary(row)
        assert numbers.pages_per_row[0] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3][n]
        in_last_page = 0 if n == 0 else 4 - numbers.wasted_slots[0]
        assert in_last_page == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1][n]
    full = grow(create(num_pages=1), 3)
    full = grow(full, 1)
    after, grant = extend(full, np.array([1, 0, 0]))
    assert not grant.granted[0]
    chex.assert_trees_all_equal(after, full)


def test_b50_a_page_is_freed_when_its_last_token_leaves_the_window():
    window, table = 8, grow(create(), 6)
    for length, dropped in zip(range(7, 17), [0, 0, 0, 0, 0, 1, 1, 1, 1, 2], strict=True):
        table = grow(table, 1)
        before, table = table, drop_before(table, np.array([length - window, 0, 0]))
        assert len(pages(table, 0)) == -(-length // 4) - dropped
        assert (table.block_tables[0, :dropped] == NO_PAGE).all()
        check_page_table(table)
    (freed,) = set(pages(before, 0)) - set(pages(table, 0))
    with pytest.raises(ValueError, match="adopt"):
        adopt(table, 1, np.array([freed]), 4)


@pytest.mark.parametrize(("num_pages", "tokens_written"), [(2, 32), (3, 33)])
def test_b64_a_token_that_is_never_written_takes_no_page(num_pages, tokens_written):
    """Prompt 16 and 17 new tokens: the last one is sampled and never written."""
    table = grow(create(num_pages=num_pages, page_size=16), 16)
    for _ in range(tokens_written - 16):
        table = grow(table, 1)
    assert table.num_free == 0
    assert bool(extend(table, np.array([1, 0, 0]))[1].granted[0]) == (num_pages == 3)


def test_b64_rolled_back_tokens_return_their_pages():
    table = grow(create(num_pages=9, page_size=2, max_pages_per_row=8), 3)
    for _ in range(5):
        length = table.lengths
        table = grow(table, 5)
        table = truncate(table, length + 1)
        assert len(pages(table, 0)) == -(-int(table.lengths[0]) // 2)
        check_page_table(table)
