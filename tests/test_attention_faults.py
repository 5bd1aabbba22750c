"""Faults that users of paged attention have reported, each with its input and its right answer."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, attention
from oracle import assert_matches_oracle, oracle

from paged_jax import page_table
from paged_jax.attention import Tiling, merge_attention, paged_attention
from paged_jax.kv_pages import KVPages
from paged_jax.page_table import NO_PAGE, PageTable
from paged_jax.testing import (
    PagedInputs,
    check_own,
    check_page_table,
    check_poison,
    check_twin,
    mean_position,
    own,
    paged_inputs,
    poison,
)

IMPLEMENTATIONS = ("reference", "xla")
SPLITS = {
    num_splits: Tiling(tile_tokens=2, pages_per_step=1, num_splits=num_splits)
    for num_splits in (1, 2, 4, 8, 16)
}


def assert_means(expected: list[float], inputs: PagedInputs, **options):
    """The mean position that each token sees, in all heads and channels, to the last bit or two."""
    output = attention(*mean_position(inputs), **options)
    np.testing.assert_allclose(
        output, np.broadcast_to(np.reshape(expected, (-1, 1, 1)), output.shape), rtol=3e-7
    )


@pytest.mark.parametrize("num_splits", [1, 4])
def test_b18_nan_in_unwritten_slots(num_splits: int):
    inputs = paged_inputs([1, 3, 5, 8], page_size=4)
    check_poison(attention, inputs, return_lse=True, tiling=SPLITS[num_splits])
    check_poison(attention, inputs, return_lse=True, implementation="reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b20_rows_with_nothing_to_attend(implementation: str):
    attend = partial(attention, return_lse=True, implementation=implementation)
    inputs = paged_inputs([5, 0, 7])
    output, lse = attend(*inputs)
    np.testing.assert_array_equal(output[1], 0)
    np.testing.assert_array_equal(lse[1], -np.inf)
    others = np.array([0, 2])
    without = inputs._replace(
        q=inputs.q[others], block_tables=inputs.block_tables[others], lengths=inputs.lengths[others]
    )
    for got, expected in zip((output, lse), attend(*without), strict=True):
        np.testing.assert_array_equal(got[others], expected)

    output, lse = attend(*inputs._replace(lengths=jnp.zeros(3, jnp.int32)))
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    output, lse = merge_attention(jnp.full((2, 3, 8), jnp.nan), jnp.full((2, 3), -jnp.inf))
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b20_more_queries_than_tokens(implementation: str):
    """Under jit, where it is not refused: the queries are the last tokens, so the first have no position."""
    inputs = mean_position(paged_inputs([3, 7], [5, 2]))
    output, lse = attention(*inputs, return_lse=True, implementation=implementation)
    np.testing.assert_allclose(output[:, 0, 0], [0, 0, 0, 0.5, 1, 2.5, 3], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], [-np.inf, -np.inf, *np.log([1, 2, 3, 6, 7])], rtol=1e-6)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_b22_empty_splits(num_splits: int):
    inputs = mean_position(paged_inputs([3, 200], page_size=4))
    output, lse = attention(*inputs, return_lse=True, tiling=SPLITS[num_splits])
    np.testing.assert_allclose(output[:, 0, 0], [1.0, 99.5], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log([3, 200]), rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b24_soft_cap_before_the_mask(implementation: str):
    assert_means([1.0], paged_inputs([3], page_size=16), logits_soft_cap=5.0, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [None, (4, 9)], ids=["decode", "chunked prefill"])
def test_b25_soft_cap_in_every_path(query_lens: tuple[int, ...] | None, implementation: str):
    inputs = paged_inputs([9, 14], query_lens)
    inputs = inputs._replace(q=inputs.q * 30)
    uncapped, lse = oracle(*inputs)
    assert np.max(lse) > 50
    output, lse = attention(*inputs, logits_soft_cap=20.0, return_lse=True, implementation=implementation)
    assert_matches_oracle(output, lse, inputs, logits_soft_cap=20.0)
    assert np.max(np.abs(np.asarray(output) - uncapped)) > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b26_fewer_queries_than_keys(implementation: str):
    assert_means([3.0, 3.5, 4.0, 4.5], paged_inputs([10], [4], page_size=4), implementation=implementation)


def test_b27_the_same_from_run_to_run():
    inputs = paged_inputs([4092, 17, 1], page_size=16)
    runs = []
    for _ in range(10):
        garbage = jnp.full((8, 1 << 20), jnp.nan).block_until_ready()
        garbage.delete()
        runs.append(attention(*inputs, return_lse=True))
    assert_matches_oracle(*runs[0], inputs)
    for output, lse in runs[1:]:
        np.testing.assert_array_equal(output, runs[0][0])
        np.testing.assert_array_equal(lse, runs[0][1])


@pytest.mark.parametrize(
    ("window", "expected"), [(8, [12.5, 2.0]), (1, [16.0, 4.0]), (17, [8.0, 2.0]), (18, [8.0, 2.0])]
)
def test_b28_window_counts_the_token_itself(window: int, expected: list[float]):
    assert_means(expected, paged_inputs([17, 5]), sliding_window=window)


@pytest.mark.parametrize("dropped", [NO_PAGE, 0], ids=["no page", "dummy page 0"])
@pytest.mark.parametrize(("length", "window", "expected"), [(9, 6, 5.5), (64, 8, 59.5)])
def test_b29_window_starts_in_mid_page(length: int, window: int, expected: float, dropped: int):
    inputs = paged_inputs([length], page_size=4)
    old_tables = np.asarray(inputs.block_tables)
    # A pool with a page 0 that is no row's.
    inputs = mean_position(inputs)
    pools = (jnp.concatenate([jnp.full_like(pool[:1], jnp.nan), pool]) for pool in inputs[1:3])
    tables = np.where(old_tables >= 0, np.minimum(old_tables, 2**31 - 2) + 1, old_tables)
    tables[0, : (length - window) // 4] = dropped
    inputs = PagedInputs(inputs.q, *pools, jnp.asarray(tables), inputs.lengths)
    for tiling in (None, Tiling(tile_tokens=1, pages_per_step=2)):
        output = attention(*poison(inputs, np.nan, window), sliding_window=window, tiling=tiling)
        np.testing.assert_allclose(output, np.full_like(output, expected), rtol=3e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b31_every_query_of_a_chunk_has_its_own_window(implementation: str):
    chunk = paged_inputs([12], [4])
    assert_means([6.5, 7.5, 8.5, 9.5], chunk, sliding_window=4, implementation=implementation)
    if implementation == "xla":
        check_twin(attention, chunk, sliding_window=4)  # unchunked


@pytest.mark.parametrize(
    ("expected", "kv_heads"),
    [([0, 0, 1, 1], 2), ([0] * 7 + [1] * 7 + [2] * 7 + [3] * 7, 4), (list(range(12)), 12)],
    ids=["4 to 2", "28 to 4", "12 to 12"],
)
def test_b33_heads_are_repeated_not_tiled(expected: list[int], kv_heads: int):
    inputs = paged_inputs([3, 9], q_heads=len(expected), kv_heads=kv_heads)
    np.testing.assert_allclose(attention(*own(inputs))[0, :, 1], expected, rtol=3e-7)
    check_own(attention, inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b35_float32_is_float32(implementation: str):
    inputs = paged_inputs([128], head_dim=64, page_size=16)
    output = attention(*inputs, implementation=implementation)
    exact, _ = oracle(*inputs)
    assert np.linalg.norm(np.asarray(output) - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b36_scales_of_quantised_pages(dtype: str):
    rtol = 2**-8 if dtype == "bfloat16" else 1e-6
    attend = partial(attention, scale=1.0, return_lse=True)
    inputs = paged_inputs([6], page_size=4, q_heads=1, kv_heads=1, head_dim=8)
    inputs = inputs._replace(q=inputs.q.astype(dtype))
    position = np.asarray(mean_position(inputs).v_pages[..., :1])
    live = np.asarray(~jnp.isnan(inputs.k_pages[..., :1]))
    ones = jnp.asarray(np.where(live, 1, 99), jnp.int8)
    powers = jnp.asarray(np.where(live, 2.0**position, np.nan)[..., 0], jnp.float32)
    unit = jnp.asarray(np.where(live, 1, np.nan)[..., 0], jnp.float32)
    values = jnp.broadcast_to(ones, inputs.v_pages.shape)

    # The denominator carries no scale of the values: (1 + 2 + 4 + 8 + 16 + 32) / 6.
    inputs = inputs._replace(q=jnp.zeros_like(inputs.q), k_pages=values, v_pages=values)
    output, _ = attend(*inputs, k_scales=unit, v_scales=powers)
    np.testing.assert_allclose(
        np.asarray(output, np.float32), np.full_like(output, 10.5, np.float32), rtol=3e-7
    )

    # The keys' scales work on the logits: with one-hot values the output is the softmax of 1, 2, 4, ... / 16.
    one_hot = jnp.asarray(np.arange(8) == position, jnp.int8)
    inputs = inputs._replace(q=jnp.zeros_like(inputs.q).at[..., 0].set(1 / 16), v_pages=one_hot)
    output, lse = attend(*inputs, k_scales=powers, v_scales=unit)
    assert_matches_oracle(output, lse, inputs, scale=1.0, k_scales=powers, v_scales=unit)
    weights = np.exp(2.0 ** np.arange(6) / 16)
    np.testing.assert_allclose(np.asarray(output, np.float32)[0, 0], [*weights / weights.sum(), 0, 0], rtol)

    # A token of zeros has a scale of 0: its logit is 0, the others' 1.
    zero_token = jnp.asarray(position[..., 0] == 3)
    zeros = jnp.where(zero_token[..., None], 0, values).astype(jnp.int8)
    inputs = inputs._replace(q=jnp.zeros_like(inputs.q).at[..., 0].set(1), k_pages=zeros, v_pages=zeros)
    output, _ = attend(*inputs, **dict.fromkeys(("k_scales", "v_scales"), jnp.where(zero_token, 0, unit)))
    exact = 5 * math.e / (5 * math.e + 1)
    np.testing.assert_allclose(np.asarray(output, np.float32), np.full_like(output, exact, np.float32), rtol)


@pytest.mark.parametrize(("page_size", "pages_per_step"), [(16, 8), (7, 18), (24, 5), (1, 127)])
def test_b37_a_row_does_not_notice_its_batch(page_size, pages_per_step):
    """Bit by bit, alone and in slots 0 and 7 beside others, on other pages, in a wider table."""
    shape = {"page_size": page_size, "q_heads": 16, "head_dim": 32}
    batch = paged_inputs([300, 0, 1, 17, 700, 2000, 64, 300], **shape)
    alone = paged_inputs([300], **shape, seed=1)
    attend = partial(paged_attention, tiling=Tiling(1, pages_per_step), implementation="xla", return_lse=True)
    expected = attend(*alone)
    k_pages, v_pages, q = batch.k_pages, batch.v_pages, batch.q
    pages = -(-300 // page_size)
    for slot in (0, 7):
        mine, its = (np.asarray(x.block_tables)[i, :pages] for x, i in ((batch, slot), (alone, 0)))
        k_pages, v_pages = k_pages.at[mine].set(alone.k_pages[its]), v_pages.at[mine].set(alone.v_pages[its])
        q = q.at[slot].set(alone.q[0])
    batch = batch._replace(q=q, k_pages=k_pages, v_pages=v_pages)
    for got, right in zip(attend(*batch), expected, strict=True):
        np.testing.assert_array_equal(got[0], right[0])
        np.testing.assert_array_equal(got[7], right[0])


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8"])
def test_b38_a_sink_counts_once(page_dtype: str, num_splits: int):
    inputs = mean_position(paged_inputs([4], page_size=1, dtype="bfloat16"))
    scales = {}
    if page_dtype == "int8":
        inputs = inputs._replace(
            k_pages=inputs.k_pages.astype(jnp.int8), v_pages=inputs.v_pages.astype(jnp.int8)
        )
        scales = dict.fromkeys(("k_scales", "v_scales"), jnp.ones(inputs.k_pages.shape[:3]))
    sinks = jnp.full(4, math.log(4))
    output, lse = attention(*inputs, sinks=sinks, **scales, return_lse=True, tiling=SPLITS[num_splits])
    np.testing.assert_array_equal(output, jnp.full_like(output, 0.75))
    np.testing.assert_allclose(lse, np.full_like(lse, math.log(8)), rtol=1e-6)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 112, 160, 192])
def test_b39_head_dims_that_are_no_powers_of_two(head_dim: int):
    case = next(case for case in CASES if case.head_dim == head_dim)
    inputs, options = case.call()
    # Slices of larger arrays, with NaN just past the end.
    sliced = (
        jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 256 - head_dim)], constant_values=jnp.nan)
        for a in inputs[:3]
    )
    inputs = PagedInputs(*(array[..., :head_dim] for array in sliced), *inputs[3:])
    output, lse = attention(*inputs, **options, return_lse=True, implementation="xla")
    assert_matches_oracle(output, lse, inputs, **options, scale=1 / math.sqrt(head_dim))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_b40_one_query_row_and_tiny_pages(page_size: int):
    assert_means([4.0], paged_inputs([9], page_size=page_size, q_heads=2, kv_heads=2))


@pytest.mark.parametrize("width", [1, 5, 7, 295])
def test_b41_any_table_width(width: int):
    inputs = paged_inputs([width * 4 - 1, 2], page_size=4, max_pages_per_row=width)
    assert_means([(width * 4 - 2) / 2, 0.5], inputs)


def test_b42_any_page_size():
    lengths = [300, 5, 128]
    flat = paged_inputs(lengths, page_size=1)
    rows = [np.asarray(flat.block_tables)[row, :length] for row, length in enumerate(lengths)]
    expected = attention(*flat)
    for page_size in (2, 3, 16, 48, 128, 256, 512):
        inputs = paged_inputs(lengths, page_size=page_size)
        pools = [np.array(pool) for pool in inputs[1:3]]
        for row, length in enumerate(lengths):
            position = np.arange(length)
            pages = np.asarray(inputs.block_tables)[row, position // page_size]
            for pool, source in zip(pools, flat[1:3], strict=True):
                pool[pages, :, position % page_size] = np.asarray(source)[rows[row], :, 0]
        output = attention(flat.q, *map(jnp.asarray, pools), *inputs[3:])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_b43_sequences_shorter_than_a_page():
    inputs = paged_inputs([1, 1, 1, 9], page_size=2)
    first, second = np.asarray(inputs.block_tables)[:2, 0]
    inputs = PagedInputs(
        inputs.q.at[1].set(inputs.q[0]),
        *(pool.at[second].set(pool[first]) for pool in inputs[1:3]),
        *inputs[3:],
    )
    output, lse = attention(*inputs, return_lse=True)
    np.testing.assert_array_equal(output[0], output[1])
    np.testing.assert_array_equal(lse[0], lse[1])
    assert_matches_oracle(output, lse, inputs)


@pytest.mark.parametrize(("head_dim", "page_size", "dtype"), [(256, 128, "float32"), (512, 16, "bfloat16")])
def test_b45_large_tiles_run_by_default(head_dim: int, page_size: int, dtype: str):
    inputs = paged_inputs([150, 129], [3, 1], head_dim=head_dim, page_size=page_size, dtype=dtype)
    output, lse = attention(*inputs, return_lse=True)
    assert_matches_oracle(output, lse, inputs)


def test_b50_pages_go_when_their_last_token_leaves_the_window():
    """A prompt of 6 and six steps, window 8, pages of 4; what is given back is overwritten at once."""
    table = PageTable.create(num_pages=4, page_size=4, max_rows=1, max_pages_per_row=3)
    pages = KVPages.create(1, num_pages=4, num_kv_heads=1, page_size=4, head_dim=8, dtype=jnp.float32)

    @jax.jit
    def step(table: PageTable, pages: KVPages, new: jax.Array):  # new: [tokens] of zeros
        position = table.lengths[0] + jnp.arange(len(new), dtype=jnp.int32)
        table, grant = page_table.extend(table, jnp.full(1, len(new)))
        v = jnp.broadcast_to(position.astype(jnp.float32)[:, None, None], (len(new), 1, 8))
        pages = pages.write(0, jnp.zeros_like(v), v, *page_table.locate(table, new, position))
        arrays = (*pages.k_pages, *pages.v_pages, table.block_tables, table.lengths)
        output = paged_attention(jnp.ones((1, 2, 8)), *arrays, sliding_window=8)
        # The next token sees positions from length - 7 on.
        table = page_table.drop_before(table, table.lengths - 7)
        held = (table.ref_counts > 0)[:, None, None, None]
        pages = jax.tree.map(lambda pool: jnp.where(held, pool, jnp.nan), pages)
        return table, pages, grant.granted, output[0, 0, 0]

    means, held = [], []
    for num_tokens in (6, 1, 1, 1, 1, 1, 1):
        table, pages, granted, mean = step(table, pages, jnp.zeros(num_tokens, jnp.int32))
        assert granted.all()
        check_page_table(table, pins=[])
        means.append(mean)
        held.append(4 - int(table.num_free))
    np.testing.assert_allclose(means, [2.5, 3.0, 3.5, 4.5, 5.5, 6.5, 7.5], rtol=3e-7)
    assert held == [2, 2, 2, 3, 3, 2, 2]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [case for case in CASES if case.page_dtype not in (None, "int8")], ids=str)
def test_b53_mixed_dtypes(case: Case, implementation: str):
    inputs, options = case.call()
    assert inputs.q.dtype != inputs.k_pages.dtype
    output, lse = attention(*inputs, **options, return_lse=True, implementation=implementation)
    assert lse.dtype == jnp.float32
    assert_matches_oracle(output, lse, inputs)  # float32 inside: one rounding, to the dtype of q


def test_b60_capacity_has_no_say():
    """Table widths of 2, 3 and 8 and pools of 4 and 64 pages: the same bits for the same tiling."""
    small = paged_inputs([8], page_size=4)
    outputs = []
    for width, num_pages, page_ids in ((2, 4, [3, 0]), (3, 4, [0, 1]), (8, 64, [40, 63])):
        tables = np.full((1, width), NO_PAGE, np.int32)
        tables[0, :2] = page_ids
        pools = (
            jnp.full((num_pages, *pool.shape[1:]), jnp.nan, jnp.float32)
            .at[np.array(page_ids)]
            .set(pool[small.block_tables[0, :2]])
            for pool in small[1:3]
        )
        tiling = Tiling(tile_tokens=1, pages_per_step=2)
        outputs.append(attention(small.q, *pools, jnp.asarray(tables), small.lengths, tiling=tiling))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
