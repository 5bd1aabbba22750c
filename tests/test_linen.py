import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from rows import (
    as_float64,
    assert_close,
    extend,
    far,
    full_forward,
    linen_call,
    packed,
    random_like,
    run_rows,
)

from paged_jax.kv_pages import KVPages
from paged_jax.linen import PagedAttention
from paged_jax.page_table import PageTable
from paged_jax.rotary import RotaryEmbedding

FEATURES, HEADS, HEAD_DIM, PAGE_SIZE, SIZE = 24, 4, 8, 4, 16
WIDTHS = {"qkv_features": HEADS * HEAD_DIM, "out_features": 20}

# Prompts of 5 and 3 tokens, then 1, 1 and 3 more; the last row starts while the others decode.
CHUNKS = [[5, 3, 0], [1, 1, 7], [1, 0, 1], [3, 1, 1]]


def token_rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(length, FEATURES)).astype(np.float32) for length in lengths]


def memory(kv_heads: int = HEADS, head_dim: int = HEAD_DIM) -> tuple[PageTable, KVPages]:
    pages = KVPages.create(1, 64, kv_heads, PAGE_SIZE, head_dim, jnp.float32)
    return PageTable.create(64, PAGE_SIZE, max_rows=3, max_pages_per_row=8), pages


def some_batch():
    table, _ = extend(memory()[0], jnp.array([5, 3, 0]))
    return packed(table, jnp.array([5, 3, 0]), SIZE)


def variables_of(module: PagedAttention, pages: KVPages) -> dict:
    """Random parameters of the shapes that the module asks for."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((SIZE, FEATURES)), pages, some_batch())
    return random_like(shapes, seed=5)


@pytest.mark.parametrize(
    "options",
    [WIDTHS, {"use_bias": False}, {**WIDTHS, "normalize_qk": True}],
    ids=["bias", "no bias", "normalize_qk"],
)
def test_takes_the_parameters_of_the_contiguous_module(options):
    """Prefill, chunks and decode steps, every row at its own length, against one full causal forward."""
    contiguous = nn.MultiHeadDotProductAttention(HEADS, **options)
    rows = token_rows(10, 7, 9)
    x = np.stack([np.pad(row, ((0, 10 - len(row)), (0, 0))) for row in rows])
    variables = random_like(jax.eval_shape(contiguous.init, jax.random.key(0), x), seed=3)
    expected = jax.jit(contiguous.apply)(variables, x, mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))

    module = PagedAttention(HEADS, **options)
    table, pages = memory(head_dim=options.get("qkv_features", FEATURES) // HEADS)
    assert set(variables_of(module, pages)["params"]) == set(variables["params"])
    call = linen_call(module, variables)
    chunked, table, pages = run_rows(call, rows, CHUNKS, table, pages, size=SIZE)
    decoded, *_ = run_rows(call, rows, [[0, 1, 0]] * 2, table, pages, size=None)
    got = [np.concatenate(outputs) for outputs in zip(chunked, decoded, strict=True)]
    assert_close(got, [expected[r, : len(row)] for r, row in enumerate(rows)])


@pytest.mark.parametrize("size", [None, SIZE], ids=["decode", "packed"])
def test_options(size):
    module = PagedAttention(
        HEADS,
        **WIDTHS,
        num_kv_heads=2,
        rotary=RotaryEmbedding(HEAD_DIM, 50.0),
        scale=0.5,
        sliding_window=3,
        logits_soft_cap=2.0,
        use_out_bias=False,
        use_sinks=True,
        normalize_qk=True,
    )
    variables = variables_of(module, memory(2)[1])
    params = variables["params"]
    assert set(params) == {"query", "key", "value", "out", "query_ln", "key_ln", "sinks"}
    assert set(params["query"]) == {"kernel", "bias"}
    assert set(params["out"]) == {"kernel"}
    rows = token_rows(5, 5, 5)
    chunks = [[1, 1, 1]] * 5 if size is None else [[5, 2, 0], [0, 3, 5]]
    got, _, _ = run_rows(linen_call(module, variables), rows, chunks, *memory(2), size=size)
    weights = as_float64(params)
    options = {"theta": 50.0, "scale": 0.5, "window": 3, "soft_cap": 2.0}
    assert_close(got, [full_forward(weights, row, **options) for row in rows])
    for left_out in options:
        rest = {name: value for name, value in options.items() if name != left_out}
        assert far(got, [full_forward(weights, row, **rest) for row in rows]), left_out


def test_dtypes():
    module = PagedAttention(HEADS, **WIDTHS, dtype=jnp.bfloat16)
    variables = variables_of(module, memory()[1])
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    rows = token_rows(3, 3, 3)
    got, _, pages = run_rows(linen_call(module, variables), rows, [[1, 1, 1]] * 3, *memory(), size=None)
    assert {y.dtype for y in got} == {jnp.dtype(jnp.bfloat16)}
    assert pages.k_pages[0].dtype == jnp.float32
    assert_close(got, [full_forward(as_float64(variables["params"]), row) for row in rows], jnp.bfloat16)
    narrow = PagedAttention(HEADS, **WIDTHS, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, use_sinks=True)
    leaves = jax.tree.leaves(variables_of(narrow, memory()[1]))
    assert len(leaves) == 9
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_init_gives_sinks_of_zero_and_stores_nothing_else():
    module = PagedAttention(HEADS, use_sinks=True, num_kv_heads=1)
    pages = memory(kv_heads=1, head_dim=FEATURES // HEADS)[1]
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((SIZE, FEATURES)), pages, some_batch())
    assert set(variables) == {"params"}
    chex.assert_trees_all_equal(variables["params"]["sinks"], jnp.zeros(HEADS))


@pytest.mark.parametrize(
    ("options", "x_shape", "message"),
    [
        ({"num_heads": 5}, (SIZE, FEATURES), "got num_heads=5, qkv_features=32"),
        ({"num_kv_heads": 3}, (SIZE, FEATURES), "got num_heads=4, num_kv_heads=3"),
        ({"layer": 1}, (SIZE, FEATURES), "layer=1 is not among the 1 layers"),
        ({"sliding_window": 0}, (SIZE, FEATURES), "sliding_window=0"),
        ({"rotary": RotaryEmbedding(16)}, (SIZE, FEATURES), "rotary_dim=16.*heads of 8"),
        ({"num_kv_heads": 2}, (SIZE, FEATURES), "k must have shape"),
        ({}, (SIZE + 1, FEATURES), r"shape \[tokens=16, in_features=24\], got \[17, 24\]"),
        ({}, (1, SIZE, FEATURES), r"shape \[tokens=16, in_features=24\], got \[1, 16, 24\]"),
    ],
)
def test_wrong_arguments(options, x_shape, message):
    module = PagedAttention(**{"num_heads": HEADS, **WIDTHS, **options})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(x_shape), memory()[1], some_batch())
