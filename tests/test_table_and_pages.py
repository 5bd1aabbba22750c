"""The page table and the pages together: a row reads what was appended to it, whoever shares its pages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.testing import check_page_table

release, fork, truncate = map(jax.jit, (page_table.release, page_table.fork, page_table.truncate))
gather = jax.jit(KVPages.gather, static_argnums=1)

PAGE_SIZE, SIZE = 4, 16
State = tuple[PageTable, KVPages]


def create(num_pages: int, max_rows: int, max_pages_per_row: int = 4, dtype: str = "float32") -> State:
    """Pages, or their scales, full of NaN: whatever is read without having been written shows."""
    kv = KVPages.create(1, num_pages, 1, PAGE_SIZE, 1, dtype)
    table = PageTable.create(num_pages, PAGE_SIZE, max_rows, max_pages_per_row)
    return table, jax.tree.map(
        lambda pool: pool * jnp.nan if jnp.issubdtype(pool.dtype, jnp.floating) else pool, kv
    )


@jax.jit
def step(state: State, num_tokens: jax.Array, numbers: jax.Array) -> tuple[State, jax.Array]:
    """Appends `num_tokens` of the numbers to each row in turn, as keys, and minus them as values."""
    table, grant = page_table.extend(state[0], num_tokens)
    kv = state[1].copy(grant.copies)
    batch = RaggedBatch.packed(table, jnp.where(grant.granted, num_tokens, 0), SIZE)
    asked = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens  # refused rows leave a gap in `numbers`
    row = jnp.minimum(batch.rows, table.max_rows - 1)
    index = asked[row] + jnp.arange(SIZE, dtype=jnp.int32) - batch.query_starts[row]
    k = numbers[index][:, None, None]
    return (table, kv.write(0, k, -k, batch.page_ids, batch.slots)), grant.granted


def append(state: State, tokens: dict[int, list[int]]) -> tuple[State, list[bool]]:
    rows = [tokens.get(row, []) for row in range(state[0].max_rows)]
    numbers = np.array([*itertools.chain(*rows), *[0] * SIZE], np.float32)[:SIZE]
    state, granted = step(state, np.array([len(row) for row in rows], np.int32), numbers)
    return state, granted.tolist()


def contents(state: State) -> list[list[float]]:
    table, kv = state
    rows = []
    for block_table, length in zip(table.block_tables, table.lengths.tolist(), strict=True):
        k, v = gather(kv, 0, block_table, length)
        assert (k == -v).all()
        numbers = k[:length, 0, 0]
        whole = jnp.round(numbers)
        np.testing.assert_allclose(numbers, whole, rtol=2**-23)  # quantised, they come back as good as that
        rows.append(whole.tolist())
    return rows


def pages(table: PageTable, row: int) -> list[int]:
    return [page for page in table.block_tables[row].tolist() if page != NO_PAGE]


def only(table: PageTable, *rows: int) -> np.ndarray:
    return np.isin(np.arange(table.max_rows), rows)


@pytest.mark.parametrize("num_pages", [8, 30], ids=["scarce", "plenty"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_share_pages_read_their_own_tokens(seed, num_pages):
    rng, num_rows = np.random.default_rng(seed), 5
    state, expected, numbers = create(num_pages, num_rows), [[] for _ in range(num_rows)], itertools.count(1)
    for _ in range(80):
        kind, row, other = (
            rng.choice(["append"] * 4 + ["fork", "release", "truncate"]),
            *rng.integers(5, size=2),
        )
        table, kv = state
        if kind == "append":
            more = [[next(numbers) for _ in range(n)] for n in rng.choice([0, 1, 1, 2, 3], num_rows)]
            state, granted = append(state, dict(enumerate(more)))
            expected = [old + new * yes for old, new, yes in zip(expected, more, granted, strict=True)]
        elif kind == "fork":
            state = fork(table, np.where(only(table, row), other, NO_PAGE)), kv
            expected[row] = expected[row] or list(expected[other])
        elif kind == "release":
            state = release(table, only(table, row)), kv
            expected[row] = []
        else:
            state = truncate(table, np.where(only(table, row), 3 * other, 99)), kv
            expected[row] = expected[row][: 3 * other]
        assert contents(state) == expected
        check_page_table(state[0], pins=[])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_b16_children_of_a_fork_write_pages_of_their_own(dtype):
    """Quantised, a head of one number has all that it knows in its scale: that is copied too."""
    prompt = [1, 2, 3, 4, 5, 6]
    (table, kv), _ = append(create(24, 7, dtype=dtype), {0: prompt})
    table = fork(table, np.array([-1, 0, 0, 0, -1, -1, -1]))
    state, _ = append((table, kv), {row: [10 + row] for row in range(4)})
    expected = [[*prompt, 10 + row] for row in range(4)] + [[]] * 3
    assert contents(state) == expected
    assert len({pages(state[0], row)[1] for row in range(4)}) == 4
    assert state[0].ref_counts[pages(state[0], 0)[0]] == 4

    # A beam search reorders its rows: fork into three others, then leave the old ones. The parent goes on.
    for old, new, first in [((1, 2, 3), (4, 5, 6), 20), ((4, 5, 6), (1, 2, 3), 30)]:
        parents = np.full(7, NO_PAGE)
        parents[list(new)] = [old[0], old[0], old[1]]
        table = release(fork(state[0], parents), only(state[0], *old))
        more = {row: [first + row] for row in (0, *new)}
        state, _ = append((table, state[1]), more)
        before = expected
        expected = [before[0], *[[]] * 6]
        for row in new:
            expected[row] = before[parents[row]]
        expected = [tokens + more.get(row, []) for row, tokens in enumerate(expected)]
        assert contents(state) == expected
        check_page_table(state[0], pins=[])

    for order in itertools.permutations((0, *new)):
        table = state[0]
        for row in order:
            table = release(table, only(table, row))
            check_page_table(table, pins=[])
        assert table.num_free == 24


def test_b47_appending_to_a_full_row_is_refused_and_overwrites_nothing():
    full = [1, 2, 3, 4, 5, 6, 7, 8]
    state, _ = append(create(8, 2, max_pages_per_row=2), {0: full})
    state, granted = append(state, {0: [9], 1: [10]})
    assert granted == [False, True]
    assert contents(state) == [full, [10]]


def test_b51_page_0_is_a_page_like_any_other():
    (table, kv), _ = append(create(2, 2), {0: [1, 2, 3, 4, 5]})
    assert pages(table, 0) == [0, 1]
    assert table.num_free == 0
    table = release(page_table.pin(table, np.array([0])), only(table, 0))
    table = page_table.adopt(table, 1, np.array([0]), 4)
    assert contents((table, kv)) == [[], [1, 2, 3, 4]]
    assert release(page_table.unpin(table, np.array([0])), only(table, 1)).num_free == 2


def test_b72_a_refused_token_is_not_written_in_a_donated_loop():
    """Rows 0 and 1 share a page of two tokens; three pages must do for three rows."""
    (table, kv), _ = append(create(3, 3), {0: [1, 2]})
    state = fork(table, np.array([-1, 0, -1])), kv
    numbers = np.full((6, SIZE), 7, np.float32)

    def loop(state: State) -> tuple[State, jax.Array]:
        return lax.scan(lambda state, numbers: step(state, jnp.ones(3, jnp.int32), numbers), state, numbers)

    state, granted = jax.jit(loop, donate_argnums=0)(state)
    assert granted.tolist() == [[True] * 3] * 2 + [[False, False, True]] * 2 + [[False] * 3] * 2
    assert contents(state) == [[1, 2, 7, 7], [1, 2, 7, 7], [7, 7, 7, 7]]
    assert state[0].num_free == 0
