"""Pages of int8 and float8: what `write` makes of keys and values, and that nothing else tells them apart."""

import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import attention
from flax import linen as nn
from flax import nnx
from oracle import assert_matches_oracle
from rows import decode, extend, linen_call, nnx_call, packed, quick_jit, random_like, randomized, run_rows
from tiny import NO_STOPS, random_prompts, tiny_llama

from paged_jax import linen
from paged_jax.generate import _run, generate, run, start
from paged_jax.kv_pages import KVPages, quantise
from paged_jax.nnx import PagedAttention
from paged_jax.page_table import PageTable
from paged_jax.ragged_batch import RaggedBatch
from paged_jax.rotary import RotaryEmbedding
from paged_jax.testing import PagedInputs

IMPLEMENTATIONS = ("reference", "xla")
DTYPES = ("int8", "float8_e4m3fn")
LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0}
DIVISION = 2**-23  # of a quotient that is not the true one but its float32 neighbour


def meaning(values, scales) -> np.ndarray:
    """What quantised numbers stand for, float64."""
    return np.asarray(values).astype(np.float64) * np.asarray(scales, np.float64)[..., None]


def allowed_error(x: np.ndarray, scales, dtype: str) -> np.ndarray:
    """Half a step: one half for integers; with 3 bits of mantissa 2**-4 of the number and at least 2**-10."""
    scales = np.asarray(scales, np.float64)[..., None]
    steps = np.full_like(x, 0.5) if dtype == "int8" else np.maximum(np.abs(x / scales) * 2**-4, 2.0**-10)
    return scales * (steps + LIMIT[dtype] * DIVISION)


# What is written


def awkward_tokens() -> np.ndarray:
    """[tokens, 2 heads, 16] of all magnitudes; each has its sign, its ties and its channels."""
    x = np.random.default_rng(0).normal(size=(600, 2, 16))
    x[:300] *= 10.0 ** np.linspace(-37, 37, 300)[:, None, None]
    x[300:320, :, 3] *= 1000  # an outlier channel
    x[320] = 0
    x[321, 0] = 0
    x[322] = 1e-30
    x[323, :, 1:] = 0
    x[324] = 1e-38  # one that hardware takes for zero
    x[325] = np.arange(16) + 0.5
    x[325, :, 0] = 127
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b36_the_round_trip_is_wrong_by_half_a_step_at_most(dtype):
    x = awkward_tokens()
    values, scales = jax.jit(quantise, static_argnums=1)(x, dtype)
    assert (values.dtype, scales.dtype) == (jnp.dtype(dtype), jnp.float32)
    x = x.astype(np.float64)
    assert np.all(np.abs(meaning(values, scales) - x) <= allowed_error(x, scales, dtype))
    # No coarser than the numbers need, down to where a step would no longer be a normal number.
    needed = np.abs(x).max(axis=-1) / LIMIT[dtype]
    np.testing.assert_allclose(scales, np.maximum(needed, 2.0**-116), rtol=1e-6)
    largest = np.abs(np.asarray(values).astype(np.float64)).max(axis=-1)
    assert np.all(largest[needed > 2.0**-116] == LIMIT[dtype])


def test_int8_is_rounded_to_nearest_even():
    x = jnp.array([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]]])
    values, scales = quantise(x, "int8")
    assert (values[0, 0].tolist(), scales.item()) == ([127, 0, 2, 2, 0, -2, 126, -126], 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
def test_zero_is_exact_and_the_largest_number_saturates(dtype, given):
    """Whatever the quotient's last bit: float8 has no infinity, it would be NaN."""
    x = np.random.default_rng(1).normal(size=(2000, 1, 2)).astype(jnp.dtype(given))
    x[:, :, 0] = 0
    values = np.asarray(quantise(jnp.asarray(x), dtype)[0]).astype(np.float64)
    np.testing.assert_array_equal(values, np.sign(x.astype(np.float64)) * LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_lost_shows(dtype, lost):
    x = jnp.ones((2, 2, 4)).at[1, 0, 2].set(lost)
    values, scales = quantise(x, dtype)
    np.testing.assert_array_equal(
        np.isnan(meaning(values, scales)).all(axis=-1), [[False] * 2, [True, False]]
    )
    assert np.isfinite(meaning(values, scales)).sum() == 3 * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_read_back_from_where_it_was_written(dtype):
    rng = np.random.default_rng(2)
    k, v = rng.normal(size=(2, 10, 2, 8)).astype(np.float32)
    block_table = np.array([5, 0, 3], np.int32)
    kv = dead_pages(KVPages.create(2, 8, 2, 4, 8, dtype))
    token, write = np.arange(10, dtype=np.int32), jax.jit(KVPages.write, static_argnums=1)
    for at in np.split(token, [3, 8]):
        kv = write(kv, 1, k[at], v[at], block_table[at // 4], at % 4)
    gathered = jax.jit(KVPages.gather, static_argnums=1)(kv, 1, block_table, 10)
    for got, given in zip(gathered, (k, v), strict=True):
        chex.assert_shape(got, (12, 2, 8))
        assert got.dtype == jnp.float32
        values, scales = quantise(given, dtype)
        np.testing.assert_allclose(got[:10], meaning(values, scales), rtol=2**-24)
        assert not got[10:].any()
    # All other slots and the other layer are as they were.
    old, new = (
        jax.tree.map(lambda pool: np.asarray(pool).astype(np.float64), pages)
        for pages in (dead_pages(KVPages.create(2, 8, 2, 4, 8, dtype)), kv)
    )
    for pools in (*vars(old).values(), *vars(new).values()):
        pools[1].swapaxes(1, 2)[block_table[token // 4], token % 4] = 0
    chex.assert_trees_all_equal(new, old)


# What is read


def dead_pages(kv: KVPages) -> KVPages:
    """With the worst that a slot without a token can hold."""
    return jax.tree.map(
        lambda pool: jnp.full_like(pool, jnp.nan if jnp.issubdtype(pool.dtype, jnp.floating) else -99), kv
    )


def written_inputs(
    k: np.ndarray, v: np.ndarray, lengths, query_lens, *, q_heads: int, dtype: str
) -> tuple[PagedInputs, dict]:
    """One layer's pages after the tokens of all rows were written in one step, and their scales."""
    _, kv_heads, head_dim = k.shape
    rows = len(lengths)
    table, grant = extend(PageTable.create(16, 4, rows, 8), jnp.array(lengths, jnp.int32))
    assert grant.granted.all()
    batch = packed(table, jnp.array(lengths, jnp.int32), len(k))
    kv = dead_pages(KVPages.create(1, 16, kv_heads, 4, head_dim, dtype))
    kv = kv.write(0, jnp.asarray(k), jnp.asarray(v), batch.page_ids, batch.slots)
    q = np.random.default_rng(3).normal(size=(sum(query_lens), q_heads, head_dim)).astype(np.float32)
    starts = jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32)
    inputs = PagedInputs(
        jnp.asarray(q), kv.k_pages[0], kv.v_pages[0], table.block_tables, table.lengths, starts
    )
    return inputs, {"k_scales": kv.k_scales[0], "v_scales": kv.v_scales[0]}


EVERYTHING = {
    "sliding_window": 6,
    "logits_soft_cap": 5.0,
    "sinks": jnp.linspace(-1, 2, 6, dtype=jnp.float32),
    "scale": 1.0,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("int8", {}),
        ("int8", {"sliding_window": 5}),
        ("int8", {"logits_soft_cap": 2.0, "scale": 3.0}),
        ("int8", EVERYTHING),
        ("float8_e4m3fn", EVERYTHING),
    ],
    ids=["int8", "int8, window", "int8, soft cap", "int8, everything", "float8, everything"],
)
def test_options_work_on_quantised_pages(options, dtype, implementation):
    lengths, query_lens = (11, 0, 5, 17), (3, 0, 5, 1)
    k, v = np.random.default_rng(4).normal(size=(2, sum(lengths), 2, 8)).astype(np.float32)
    inputs, scales = written_inputs(k, v, lengths, query_lens, q_heads=6, dtype=dtype)
    output, lse = attention(*inputs, **scales, **options, return_lse=True, implementation=implementation)
    assert_matches_oracle(output, lse, inputs, **scales, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_b36_scales_of_what_was_written(dtype, implementation):
    attend = partial(attention, scale=1.0, implementation=implementation)
    powers = np.broadcast_to(2.0 ** np.arange(6, dtype=np.float32)[:, None, None], (6, 1, 8))
    zeros = np.zeros_like(powers)

    # The softmax is uniform, and its denominator knows nothing of the values: (1 + 2 + 4 + 8 + 16 + 32) / 6.
    inputs, scales = written_inputs(zeros, powers, [6], [1], q_heads=1, dtype=dtype)
    np.testing.assert_allclose(attend(*inputs, **scales), np.full((1, 1, 8), 10.5), rtol=3e-7)

    # With one-hot values the output is the softmax of 1, 2, 4, ... / 16.
    one_hot = np.eye(6, 8, dtype=np.float32)[:, None, :]
    inputs, scales = written_inputs(powers, one_hot, [6], [1], q_heads=1, dtype=dtype)
    inputs = inputs._replace(q=jnp.zeros_like(inputs.q).at[..., 0].set(1 / 16))
    weights = np.exp(2.0 ** np.arange(6) / 16)
    np.testing.assert_allclose(attend(*inputs, **scales)[0, 0], [*weights / weights.sum(), 0, 0], rtol=2e-6)

    # A token of zeros, and one of numbers that are next to nothing: logits of 0, beside four of 1.
    ones = np.ones_like(powers)
    ones[2], ones[4] = 0, 1e-30
    inputs, scales = written_inputs(ones, ones, [6], [1], q_heads=1, dtype=dtype)
    inputs = inputs._replace(q=jnp.zeros_like(inputs.q).at[..., 0].set(1))
    exact = 4 * math.e / (4 * math.e + 2)
    np.testing.assert_allclose(attend(*inputs, **scales), np.full((1, 1, 8), exact), rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_b38_a_sink_beside_quantised_pages(dtype, implementation):
    v = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None], (4, 2, 8))
    inputs, scales = written_inputs(np.zeros_like(v), v, [4], [1], q_heads=4, dtype=dtype)
    output, lse = attention(
        *inputs,
        **scales,
        sinks=jnp.full(4, math.log(4)),
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(output, np.full_like(output, 0.75), rtol=3e-7)
    np.testing.assert_allclose(lse, np.full_like(lse, math.log(8)), rtol=1e-6)


# Module, model and loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundTripped(KVPages):
    """float32 pages that hold what pages of another dtype would mean."""

    dtype: str = dataclasses.field(default="int8", metadata={"static": True})

    def write(self, layer, k, v, page_ids, slots):
        (k, k_scales), (v, v_scales) = quantise(k, self.dtype), quantise(v, self.dtype)
        k, v = k.astype(jnp.float32) * k_scales[..., None], v.astype(jnp.float32) * v_scales[..., None]
        return KVPages.write(self, layer, k, v, page_ids, slots)


def round_tripped(kv: KVPages, dtype: str) -> RoundTripped:
    """Empty pages of the sizes of `kv`."""
    num_pages, kv_heads, page_size, head_dim = kv.k_pages[0].shape
    kv = KVPages.create(kv.num_layers, num_pages, kv_heads, page_size, head_dim, jnp.float32)
    return RoundTripped(kv.k_pages, kv.v_pages, dtype=dtype)


def nnx_module(implementation: str, **options):
    module = randomized(
        lambda: PagedAttention(4, 16, 32, num_kv_heads=2, rngs=nnx.Rngs(0), **options), seed=5
    )
    module.implementation = implementation
    return nnx_call(module)


def linen_module(implementation: str, **options):
    module = linen.PagedAttention(4, 32, num_kv_heads=2, implementation=implementation, **options)
    assert isinstance(module, nn.Module)
    table, kv = PageTable.create(1, 1, 1, 1), KVPages.create(1, 1, 2, 1, 8)
    shapes = jax.eval_shape(
        module.init, jax.random.key(0), jnp.zeros((1, 16)), kv, decode(table, jnp.ones(1, bool))
    )
    return linen_call(module, random_like(shapes, 5))


@pytest.mark.parametrize(
    ("make", "dtype", "implementation"),
    [
        (nnx_module, "int8", "xla"),
        (nnx_module, "int8", "reference"),
        (nnx_module, "float8_e4m3fn", "xla"),
        (linen_module, "int8", "xla"),
    ],
)
def test_a_module_attends_what_the_pages_mean(make, dtype, implementation):
    """Bit by bit, packed and one by one, whatever stands in dead slots and in their scales."""
    call = make(
        implementation,
        rotary=RotaryEmbedding(8, theta=100.0),
        sliding_window=6,
        logits_soft_cap=4.0,
        use_sinks=True,
    )
    rng = np.random.default_rng(6)
    rows = [rng.normal(size=(length, 16)).astype(np.float32) for length in (9, 6, 3)]
    table, kv = PageTable.create(12, 4, 3, 4), KVPages.create(1, 12, 2, 4, 8, dtype)

    def outputs(kv: KVPages) -> list[np.ndarray]:
        prompts, *state = run_rows(call, rows, [[5, 3, 0], [2, 1, 1]], table, kv, size=8)
        steps, *_ = run_rows(call, rows, [[1, 1, 1], [1, 1, 1]], *state, size=None)
        return [np.concatenate(parts) for parts in zip(prompts, steps, strict=True)]

    expected = outputs(round_tripped(kv, dtype))
    chex.assert_trees_all_equal(outputs(kv), expected)
    chex.assert_trees_all_equal(outputs(dead_pages(kv)), expected)


@partial(quick_jit, static_argnums=0)
def _logits(graphdef, state, tokens, kv, batch):
    model = nnx.merge(graphdef, state)
    hidden, _ = model(tokens, kv, batch)
    return model.logits(hidden)


def tiny_logits(kv: KVPages) -> np.ndarray:
    (prompt,) = random_prompts(40)
    count = jnp.array([len(prompt)], jnp.int32)
    table, _ = extend(PageTable.create(16, 4, 1, 16), count)
    batch = RaggedBatch.packed(table, count, len(prompt))
    return np.asarray(_logits(*nnx.split(tiny_llama()), jnp.array(prompt, jnp.int32), kv, batch))


@pytest.mark.parametrize(("dtype", "step"), [("int8", 1 / 127), ("float8_e4m3fn", 1 / 8)])
def test_a_models_logits_stay_close(dtype, step):
    """Two layers, each with keys and values, whose largest numbers are wrong by half a step or less."""
    exact = tiny_logits(tiny_llama().create_pages(16, 4, "float32"))
    pages = tiny_llama().create_pages(16, 4, dtype)
    got = tiny_logits(pages)
    error = np.abs(got - exact).max()
    assert 0 < error < 2 * 2 * (step / 2) * np.abs(exact).max()
    chex.assert_trees_all_equal(got, tiny_logits(round_tripped(pages, dtype)))


@pytest.fixture
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_quick_compilation")
def test_generate_writes_what_the_pages_mean():
    prompts = random_prompts(9, 1, 20)
    options = {"page_size": 4, "max_new_tokens": 12, "stop_token_ids": NO_STOPS}
    got = generate(tiny_llama(), prompts, dtype=jnp.int8, **options)
    state = start(tiny_llama(), prompts, dtype="int8", **options)
    assert state.pages.k_pages[0].dtype == jnp.int8
    state = dataclasses.replace(state, pages=round_tripped(state.pages, "int8"))
    tokens = np.asarray(run(tiny_llama(), state).tokens)
    for row, done in enumerate(got):
        assert (*done.prompt_ids, *done.token_ids) == tuple(tokens[row, : len(prompts[row]) + 12].tolist())


@pytest.mark.usefixtures("_quick_compilation")
def test_b72_generate_updates_int8_pages_in_place():
    state = start(tiny_llama(), random_prompts(9, 1, 20), page_size=4, num_pages=32768, dtype="int8")
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(state.pages))
    memory = _run.lower(*nnx.split(tiny_llama()), state, np.int32(1)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < 0.05 * pool
