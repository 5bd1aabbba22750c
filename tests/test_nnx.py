"""The module on its own: its numbers, its options, its dtypes, and what it leaves alone."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rows import (
    assert_close,
    decode,
    extend,
    far,
    full_forward,
    nnx_call,
    packed,
    random_like,
    randomized,
    run_rows,
    weights_of,
)

from paged_jax import page_table
from paged_jax.kv_pages import KVPages
from paged_jax.nnx import PagedAttention
from paged_jax.page_table import PageTable
from paged_jax.rotary import RotaryEmbedding

FEATURES, QKV_FEATURES, HEADS, HEAD_DIM, PAGE_SIZE, SIZE = 24, 32, 4, 8, 4, 16
THETA = 100.0
STANDARD = {"use_bias": True, "rotary": RotaryEmbedding(HEAD_DIM, THETA)}  # many tests, compiled once

# Prompts of 5 and 3 tokens, then 1, 1 and 3 more; the last row starts while the others decode.
CHUNKS = [[5, 3, 0], [1, 1, 7], [1, 0, 1], [3, 1, 1]]


def token_rows(*lengths: int, features: int = FEATURES, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(length, features)).astype(dtype) for length in lengths]


def memory(kv_heads=2, *, pages=64, width=8, dtype=jnp.float32) -> tuple[PageTable, KVPages]:
    table = PageTable.create(pages, PAGE_SIZE, 3, width)
    return table, KVPages.create(1, pages, kv_heads, PAGE_SIZE, HEAD_DIM, dtype)


def contiguous(**options) -> nnx.MultiHeadAttention:
    def make() -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(
            HEADS, FEATURES, QKV_FEATURES, FEATURES, decode=False, rngs=nnx.Rngs(0), **options
        )

    return randomized(make, seed=1)


def full_forwards(attention: nnx.MultiHeadAttention, rows: list[np.ndarray]) -> list[np.ndarray]:
    """In one batch: what stands behind the end of a row, its causal mask hides."""
    longest = max(len(row) for row in rows)
    x = np.stack([np.pad(row, ((0, longest - len(row)), (0, 0))) for row in rows])
    with jax.numpy_dtype_promotion("standard"):  # the contiguous module needs it for narrow dtypes
        y = nnx.jit(type(attention).__call__)(attention, x, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
    return [y[r, : len(row)] for r, row in enumerate(rows)]


def paged(**options) -> PagedAttention:
    def make() -> PagedAttention:
        return PagedAttention(HEADS, FEATURES, QKV_FEATURES, num_kv_heads=2, rngs=nnx.Rngs(0), **options)

    return randomized(make, seed=2)


def expected_rows(module: PagedAttention, rows: list[np.ndarray], **options) -> list[np.ndarray]:
    return [full_forward(weights_of(module), row, **options) for row in rows]


class TestFromMultiHeadAttention:
    @pytest.mark.parametrize(
        "options",
        [{}, {"num_kv_heads": 2, "use_bias": False}, {"num_kv_heads": 1, "normalize_qk": True}],
        ids=str,
    )
    def test_b54_b55_equals_the_full_forward(self, options):
        attention = contiguous(**options)
        rows = token_rows(10, 5, 9)
        call = nnx_call(PagedAttention.from_multi_head_attention(attention))
        got, _, _ = run_rows(call, rows, CHUNKS, *memory(attention.num_kv_heads), size=SIZE)
        assert_close(got, full_forwards(attention, rows))

    def test_b54_every_decode_step_equals_the_full_forward(self):
        attention = contiguous()
        rows = token_rows(9, 6, 5)
        call = nnx_call(PagedAttention.from_multi_head_attention(attention))
        prompts, *state = run_rows(call, rows, [[4, 1, 0]], *memory(HEADS), size=SIZE)
        steps, *_ = run_rows(call, rows, [[1, 1, 1]] * 5, *state, size=None)
        got = [np.concatenate(outputs) for outputs in zip(prompts, steps, strict=True)]
        assert_close(got, full_forwards(attention, rows))

    def test_shares_the_parameters(self):
        attention = contiguous(num_kv_heads=1, normalize_qk=True)
        module = PagedAttention.from_multi_head_attention(attention)
        names = {name: name for name in ("query", "key", "value", "out")}
        for ours, theirs in {**names, "query_norm": "query_ln", "key_norm": "key_ln"}.items():
            assert getattr(module, ours) is getattr(attention, theirs)
        assert module.num_kv_heads == attention.num_kv_heads
        assert len(jax.tree.leaves(nnx.state(module))) == len(jax.tree.leaves(nnx.state(attention)))

        nnx.update(attention, random_like(nnx.state(attention, nnx.Param), seed=9))
        rows = token_rows(3, 1, 2)
        got, _, _ = run_rows(nnx_call(module), rows, [[3, 1, 2]], *memory(1), size=SIZE)
        assert_close(got, full_forwards(attention, rows))

    def test_keeps_the_dtype_of_the_computation(self):
        attention = contiguous(dtype=jnp.bfloat16)
        module = PagedAttention.from_multi_head_attention(attention)
        rows = token_rows(3, 3, 3)
        got, _, _ = run_rows(nnx_call(module), rows, [[1, 1, 1]] * 3, *memory(HEADS), size=None)
        assert {y.dtype for y in got} == {jnp.dtype(jnp.bfloat16)}
        assert_close(got, full_forwards(attention, rows), jnp.bfloat16)

    def test_refuses_what_it_cannot_compute(self):
        with pytest.raises(ValueError, match=r"self-attention.*in_features=24.*in_kv_features=16"):
            PagedAttention.from_multi_head_attention(contiguous(in_kv_features=16))
        other = contiguous(attention_fn=lambda query, *_, **__: query)
        with pytest.raises(ValueError, match=r"nnx.dot_product_attention as attention_fn, got <function"):
            PagedAttention.from_multi_head_attention(other)


def test_parameters_are_those_of_the_contiguous_module():
    def shapes(module: nnx.Module) -> dict:
        return jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(module)))

    assert shapes(paged(use_bias=True)) == shapes(contiguous(num_kv_heads=2))
    other = shapes(paged(use_out_bias=True, use_sinks=True))
    assert set(other["query"]) == {"kernel"}
    assert set(other["out"]) == {"kernel", "bias"}
    assert other["sinks"] == (HEADS,)


def test_b55_a_later_token_changes_nothing_before_it():
    call, rows = nnx_call(paged(**STANDARD)), token_rows(10, 5, 9)
    before, _, _ = run_rows(call, rows, CHUNKS, *memory(), size=SIZE)
    rows[0][4] += 1
    after, _, _ = run_rows(call, rows, CHUNKS, *memory(), size=SIZE)
    chex.assert_trees_all_equal(before[0][:4], after[0][:4])
    chex.assert_trees_all_equal(before[1:], after[1:])
    assert (np.abs(before[0][4:] - after[0][4:]).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("size", [None, SIZE], ids=["decode", "packed"])
def test_b25_b38_b59_options_reach_every_path(implementation, size):
    """All at once, with logits of about a hundred; leaving out any one of them would show."""
    options = {"sliding_window": 3, "logits_soft_cap": 20.0, "scale": 4.0, "use_sinks": True}
    module = paged(**STANDARD, **options, implementation=implementation)
    chunks = [[1, 1, 1]] * 5 if size is None else [[5, 2, 0], [0, 2, 5], [0, 1, 0]]
    rows = token_rows(5, 5, 5)
    got, _, _ = run_rows(nnx_call(module), rows, chunks, *memory(), size=size)
    right = {"window": 3, "soft_cap": 20.0, "scale": 4.0, "theta": THETA}
    expected = expected_rows(module, rows, **right)
    assert_close(got, expected)

    weights = weights_of(module)
    for name in right:
        others = {other: value for other, value in right.items() if other != name}
        assert far(got, expected_rows(module, rows, **others)), name
    unbiased = {name: {"kernel": weights[name]["kernel"]} for name in ("query", "key", "value", "out")}
    for name in unbiased:
        assert far(got, [full_forward({**weights, name: unbiased[name]}, row, **right) for row in rows]), name
    del weights["sinks"]
    assert far(got, [full_forward(weights, row, **right) for row in rows])


def test_norms_come_before_the_rotation():
    def make() -> PagedAttention:
        norm = partial(nnx.LayerNorm, HEAD_DIM, use_bias=False, rngs=nnx.Rngs(0))
        options = {"num_kv_heads": 2, "query_norm": norm(), "key_norm": norm(), **STANDARD}
        return PagedAttention(HEADS, FEATURES, QKV_FEATURES, **options, rngs=nnx.Rngs(0))

    module, rows = randomized(make, seed=2), token_rows(5, 5, 5)
    got, _, _ = run_rows(nnx_call(module), rows, [[1, 1, 1]] * 5, *memory(), size=None)
    assert_close(got, expected_rows(module, rows, theta=THETA))
    assert far(got, expected_rows(module, rows, theta=THETA, norm_first=False))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (28, 4), (12, 12)])
def test_b33_each_query_head_reads_its_own_kv_head(heads, kv_heads):
    """The value of kv head j is j; the output says, for each query head, who was read."""
    zeros = nnx.initializers.zeros
    module = PagedAttention(
        heads, 3, heads * 2, heads, num_kv_heads=kv_heads, use_bias=True, kernel_init=zeros, rngs=nnx.Rngs(0)
    )
    module.value.bias[...] = jnp.repeat(jnp.arange(kv_heads, dtype=jnp.float32), 2).reshape(kv_heads, 2)
    module.out.kernel[...] = jnp.zeros((heads, 2, heads)).at[:, 0].set(jnp.eye(heads))
    table, pages = memory()[0], KVPages.create(1, 64, kv_heads, PAGE_SIZE, 2)
    rows = token_rows(3, 3, 3, features=3)
    got, *_ = run_rows(nnx_call(module), rows, [[1, 1, 1]] * 3, table, pages, size=None)
    read = np.float32([head * kv_heads // heads for head in range(heads)])
    chex.assert_trees_all_equal(got, [np.broadcast_to(read, (3, heads))] * 3)


@pytest.mark.parametrize(
    ("dtype", "pages_dtype", "out_dtype", "coarsest"),
    [
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (None, jnp.bfloat16, jnp.float32, jnp.bfloat16),
        (jnp.float16, jnp.float32, jnp.float16, jnp.float16),
    ],
)
def test_b53_mixed_dtypes(dtype, pages_dtype, out_dtype, coarsest):
    module, rows = paged(**STANDARD, use_sinks=True, dtype=dtype), token_rows(5, 3, 4)
    chunks = [[1, 1, 1]] * 3 + [[1, 0, 1], [1, 0, 0]]
    got, _, pages = run_rows(nnx_call(module), rows, chunks, *memory(dtype=pages_dtype), size=None)
    assert {y.dtype for y in got} == {jnp.dtype(out_dtype)}
    assert pages.k_pages[0].dtype == pages.v_pages[0].dtype == pages_dtype
    assert module.query.kernel.dtype == jnp.float32
    assert_close(got, expected_rows(module, rows, theta=THETA), coarsest)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_b56_x64(dtype):
    with jax.enable_x64(True):
        module, rows = paged(**STANDARD, use_sinks=True, param_dtype=dtype), token_rows(10, 5, 9, dtype=dtype)
        before = memory(dtype=dtype)
        got, *after = run_rows(nnx_call(module), rows, CHUNKS, *before, size=SIZE)
        chex.assert_trees_all_equal_shapes_and_dtypes(tuple(after), before)
        batches = packed(after[0], jnp.array([1, 2, 0]), SIZE), decode(after[0], jnp.ones(3, bool))
        assert {array.dtype for array in jax.tree.leaves((after[0], batches))} == {jnp.dtype(jnp.int32)}
    assert module.head_dim == 8
    assert {y.dtype for y in got} == {jnp.dtype(dtype)}
    assert_close(got, expected_rows(module, rows, theta=THETA), dtype)


def test_b58_rows_of_a_ragged_batch_are_as_alone():
    module, rows = paged(**STANDARD), token_rows(7, 12, 1)
    chunks = np.array([[3, 7, 0], [1, 1, 1], [3, 4, 0]])
    together, _, _ = run_rows(nnx_call(module), rows, chunks, *memory(), size=SIZE)
    assert_close(together, expected_rows(module, rows, theta=THETA))
    for row in range(2):
        own = chunks * (np.arange(3) == row)
        alone, _, _ = run_rows(nnx_call(module), rows, own, *memory(), size=SIZE)
        chex.assert_trees_all_equal(alone[row], together[row])


def test_b58_adopted_prefix():
    module = paged(**STANDARD)
    first, second, cold = rows = token_rows(13, 13, 13)
    second[:8] = cold[:8] = first[:8]
    _, table, pages = run_rows(nnx_call(module), rows, [[8, 0, 0]], *memory(), size=SIZE)
    table = page_table.adopt(table, 1, table.block_tables[0, :2], 8)
    got, *_ = run_rows(nnx_call(module), rows, [[2, 5, 0], [1, 0, 13]], table, pages, size=SIZE)
    expected = expected_rows(module, rows, theta=THETA)
    assert_close(got, [expected[0][8:11], expected[1][8:], expected[2]])


def test_b58_a_repeated_token_depends_on_its_position():
    """One token, then the same other one again and again."""
    module = paged(**STANDARD)
    rows = [np.repeat(token_rows(2)[0], [1, 9], axis=0)] * 3
    got, _, _ = run_rows(nnx_call(module), rows, [[5, 10, 1], [5, 0, 2], [0, 0, 7]], *memory(), size=SIZE)
    assert_close(got, expected_rows(module, rows, theta=THETA))
    assert np.abs(np.diff(got[0][1:], axis=0)).max(axis=1).min() > 1e-3
    assert far(got, expected_rows(module, rows, theta=THETA, positions=np.minimum(np.arange(10), 1)))


def test_b58_b59_window_goes_on_where_pages_were_dropped():
    """Dropped pages are poisoned at once, and taken again by the next row that grows."""
    window = 6
    module, rows = paged(**STANDARD, sliding_window=window), token_rows(19, 17, 14)
    table, pages = memory()
    got = [[], [], []]
    for chunk in [[9, 7, 0]] + [[1, 1, 1]] * 10 + [[0, 0, 4]]:
        step, table, pages = run_rows(nnx_call(module), rows, [chunk], table, pages, size=SIZE)
        got = [[*outputs, *new] for outputs, new in zip(got, step, strict=True)]
        table = page_table.drop_before(table, table.lengths - (window - 1))
        free = (table.ref_counts == 0)[:, None, None, None]
        pages = jax.tree.map(lambda pool, free=free: jnp.where(free, jnp.nan, pool), pages)
        assert table.num_pages - table.num_free <= 3 * 2
    assert_close(got, expected_rows(module, rows, theta=THETA, window=window))


class TestB60Capacity:
    """What is reserved and how it is padded does not change the answer."""

    ROWS, CHUNKS = token_rows(7, 6, 1), ((5, 2, 1), (1, 2, 0), (1, 2, 0))

    def run(self, *, pages: int = 64, width: int = 8, size: int = SIZE) -> list[np.ndarray]:
        state = memory(pages=pages, width=width)
        return run_rows(nnx_call(paged(**STANDARD)), self.ROWS, self.CHUNKS, *state, size=size)[0]

    @pytest.mark.parametrize("reserved", [{}, {"width": 2, "size": 64}, {"width": 3, "size": 8}], ids=str)
    def test_table_width_and_padding(self, reserved):
        assert_close(self.run(**reserved), expected_rows(paged(**STANDARD), self.ROWS, theta=THETA))

    def test_pool_size_is_bitwise_invisible(self):
        chex.assert_trees_all_equal(self.run(pages=5), self.run(pages=64))


class TestPoison:
    """NaN wherever no live token of a row is: bitwise the same as zeros."""

    @pytest.mark.parametrize(("size", "window"), [(None, None), (SIZE, None), (SIZE, 6)])
    def test_slots_without_a_token(self, size, window):
        call, rows = nnx_call(paged(**STANDARD, sliding_window=window)), token_rows(9, 5, 6)
        chunks = [[1, 1, 1]] * 5 if size is None else [[7, 3, 0], [2, 2, 6]]
        rows = [row[: sum(chunk[r] for chunk in chunks)] for r, row in enumerate(rows)]
        table, zeros = memory()
        nans = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), zeros)
        expected, _, _ = run_rows(call, rows, chunks, table, zeros, size=size)
        got, _, _ = run_rows(call, rows, chunks, table, nans, size=size)
        chex.assert_trees_all_equal(got, expected)
        assert all(np.isfinite(y).all() for y in got)

    def test_pages_of_other_rows(self):
        call, rows = nnx_call(paged(**STANDARD)), token_rows(6, 6, 6)
        _, table, pages = run_rows(call, rows, [[5, 5, 5]], *memory(), size=SIZE)
        theirs = jnp.isin(jnp.arange(64), table.block_tables[1:])[:, None, None, None]
        poisoned = jax.tree.map(lambda pool: jnp.where(theirs, jnp.nan, pool), pages)
        expected, _, _ = run_rows(call, rows, [[1, 0, 0]], table, pages, size=None)
        got, _, _ = run_rows(call, rows, [[1, 0, 0]], table, poisoned, size=None)
        chex.assert_trees_all_equal(got[0], expected[0])
        assert np.isfinite(got[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide qkv_features, got num_heads=5, qkv_features=32"),
        ({"num_heads": 0}, "num_heads must divide qkv_features, got num_heads=0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got num_heads=4, num_kv_heads=3"),
        ({"num_kv_heads": 8}, "num_kv_heads must divide num_heads, got num_heads=4, num_kv_heads=8"),
        ({"num_kv_heads": 0}, "num_kv_heads must divide num_heads, got num_heads=4, num_kv_heads=0"),
    ],
)
def test_wrong_heads(options, message):
    arguments = {"num_heads": HEADS, "in_features": FEATURES, "qkv_features": QKV_FEATURES, **options}
    with pytest.raises(ValueError, match=message):
        PagedAttention(**arguments, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "x_shape", "pages_options", "message"),
    [
        ({}, (SIZE, FEATURES + 1), {}, r"shape \[tokens=16, in_features=24\], got \[16, 25\]"),
        ({}, (SIZE - 1, FEATURES), {}, r"shape \[tokens=16, in_features=24\], got \[15, 24\]"),
        ({}, (1, SIZE, FEATURES), {}, r"shape \[tokens=16, in_features=24\], got \[1, 16, 24\]"),
        ({"layer": 1}, (SIZE, FEATURES), {}, "layer=1 is not among the 1 layers"),
        ({"layer": -1}, (SIZE, FEATURES), {}, "layer=-1 is not among the 1 layers"),
        ({}, (SIZE, FEATURES), {"num_kv_heads": 4}, "k must have shape"),
        ({}, (SIZE, FEATURES), {"head_dim": 16}, "k must have shape"),
        ({"sliding_window": 0}, (SIZE, FEATURES), {}, "sliding_window=0"),
        ({"logits_soft_cap": 0.0}, (SIZE, FEATURES), {}, "logits_soft_cap=0.0"),
        ({"rotary": RotaryEmbedding(16)}, (SIZE, FEATURES), {}, "rotary_dim=16.*heads of 8"),
        ({"implementation": "fast"}, (SIZE, FEATURES), {}, "implementation='fast' is not known"),
    ],
)
def test_wrong_call(options, x_shape, pages_options, message):
    sizes = {"num_kv_heads": 2, "page_size": PAGE_SIZE, "head_dim": HEAD_DIM, **pages_options}
    pages = KVPages.create(1, 64, **sizes)
    table, _ = extend(memory()[0], jnp.array([5, 3, 0]))
    batch = packed(table, jnp.array([5, 3, 0]), SIZE)
    with pytest.raises(ValueError, match=message):
        paged(**options)(jnp.zeros(x_shape), pages, batch)
