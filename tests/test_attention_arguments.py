"""What `paged_attention` refuses, what it accepts, and what it costs to compile."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, attention
from oracle import assert_matches_oracle, oracle

from paged_jax.attention import Choice, Tiling, paged_attention, paged_attention_implementation
from paged_jax.attention.xla import default_tiling
from paged_jax.testing import mean_position, paged_inputs

INPUTS = paged_inputs([5, 7], [2, 3])  # q [5, 4, 8], pages [7, 2, 4, 8], block tables [2, 3]
FLOATS = jnp.ones((7, 2, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((5, 32))}, "q must have shape [tokens, q_heads, head_dim].*(5, 32)"),
        ({"q": jnp.ones((0, 4, 8))}, "q must have shape.*(0, 4, 8)"),
        ({"q": jnp.ones((5, 4, 8), jnp.int32)}, "q must be floating.*int32"),
        ({"q": jnp.ones((5, 4, 16))}, "q and k_pages must have one head_dim.*(5, 4, 16).*(7, 2, 4, 8)"),
        ({"q": jnp.ones((5, 3, 8))}, "q_heads must be a multiple of kv_heads.*q_heads=3, kv_heads=2"),
        ({"k_pages": jnp.ones((7, 2, 32))}, "k_pages must have shape.*(7, 2, 32)"),
        (
            {"k_pages": jnp.ones((0, 2, 4, 8)), "v_pages": jnp.ones((0, 2, 4, 8))},
            "k_pages must not be empty.*(0, 2, 4, 8)",
        ),
        (
            {"v_pages": jnp.ones((7, 2, 8, 8))},
            "v_pages must have the shape of k_pages.*(7, 2, 8, 8).*(7, 2, 4, 8)",
        ),
        (
            {"v_pages": jnp.ones((7, 2, 4, 8), jnp.bfloat16)},
            "v_pages must have the dtype of k_pages.*bfloat16.*float32",
        ),
        (
            dict.fromkeys(("k_pages", "v_pages"), jnp.ones((7, 2, 4, 8), jnp.int8)),
            "need k_scales and v_scales.*int8",
        ),
        (
            dict.fromkeys(("k_pages", "v_pages"), jnp.ones((7, 2, 4, 8), jnp.float8_e4m3fn)),
            "need k_scales and v_scales.*float8_e4m3fn",
        ),
        ({"block_tables": jnp.zeros((2, 3))}, "block_tables must be an integer array.*float"),
        ({"block_tables": jnp.zeros(6, jnp.int32)}, "block_tables must be an integer array.*(6,)"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, "block_tables must.*(2, 0)"),
        ({"lengths": jnp.zeros(2)}, "lengths must be an integer array.*float"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, "lengths must be.*rows=2.*(3,)"),
        ({"query_starts": jnp.zeros(2, jnp.int32)}, "query_starts must be.*rows + 1 = 3.*(2,)"),
        ({"query_starts": jnp.zeros(3)}, "query_starts must be an integer array.*float"),
        ({"query_starts": None}, "one token for each of the 2 rows where query_starts is None.*(5, 4, 8)"),
        ({"query_starts": jnp.array([1, 2, 5])}, "query_starts must rise from 0.*[1, 2, 5]"),
        ({"query_starts": jnp.array([0, 3, 2])}, "query_starts must rise.*[0, 3, 2]"),
        ({"query_starts": jnp.array([0, 2, 6])}, "query_starts must rise.*5 tokens of q.*[0, 2, 6]"),
        ({"lengths": jnp.array([1, 7])}, "more new tokens than its length.*[0, 2, 5].*[1, 7]"),
        (
            {"lengths": jnp.array([-1, 7])},
            "lengths must lie in [0, max_pages_per_row * page_size = 12].*[-1, 7]",
        ),
        (
            {"lengths": jnp.array([5, 13])},
            "lengths must lie in [0, max_pages_per_row * page_size = 12].*[5, 13]",
        ),
        ({"scale": jnp.ones(4)}, "scale must be one number.*(4,)"),
        ({"sliding_window": 0}, "sliding_window.*at least 1.*sliding_window=0"),
        ({"sliding_window": -1}, "sliding_window.*at least 1.*sliding_window=-1"),
        ({"sliding_window": 4.0}, "sliding_window.*integer.*sliding_window=4.0"),
        ({"sliding_window": True}, "sliding_window.*integer.*sliding_window=True"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a number, positive.*logits_soft_cap=0.0"),
        ({"logits_soft_cap": -5.0}, "logits_soft_cap must be a number, positive.*logits_soft_cap=-5.0"),
        ({"logits_soft_cap": np.inf}, "logits_soft_cap must be a number, positive and finite.*=inf"),
        ({"logits_soft_cap": jnp.float32(3)}, "logits_soft_cap must be a number.*logits_soft_cap=Array(3"),
        ({"sinks": jnp.zeros(2)}, "sinks must have shape [q_heads=4].*(2,)"),
        ({"k_scales": FLOATS}, "k_scales and v_scales go together"),
        ({"k_scales": FLOATS, "v_scales": jnp.ones((7, 2))}, "v_scales must.*[7, 2, 4].*[7, 2]"),
        ({"k_scales": FLOATS.astype(jnp.int32), "v_scales": FLOATS}, "k_scales must be floating.*int32"),
        ({"implementation": "triton"}, "implementation='triton'.*'reference', 'xla'"),
        (
            {"implementation": "reference", "tiling": Tiling(1, 1)},
            "tiling belongs to implementation=\"xla\".*'reference'",
        ),
    ],
)
def test_b77_a_wrong_argument_is_named_with_what_came_and_what_was_wanted(change: dict, message: str):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(ValueError, match=f"^paged_attention: .*{pattern}"):
        paged_attention(**INPUTS._asdict() | change)


def test_a_tile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_splits must be at least 1, got num_splits=0"):
        Tiling(tile_tokens=1, pages_per_step=1, num_splits=0)


def test_which_implementation_and_why():
    choice = paged_attention_implementation()
    assert choice.name == "xla"
    assert jax.default_backend() in choice.reason
    assert paged_attention_implementation("reference") == Choice("reference", "asked for by name")
    with pytest.raises(ValueError, match=r"'mosaic'.*'reference', 'xla'"):
        paged_attention_implementation("mosaic")


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_b76_a_length_that_the_table_cannot_hold(implementation: str):
    """Refused where it can be read; under jit NaN, in the tokens of that row alone."""
    inputs = mean_position(paged_inputs([16, 3, 7], [2, 1, 1], page_size=4, max_pages_per_row=4))
    inputs = inputs._replace(q=jnp.pad(inputs.q, ((0, 1), (0, 0), (0, 0))))
    for length in (80, 17):
        wrong = inputs._replace(lengths=inputs.lengths.at[0].set(length))
        with pytest.raises(ValueError, match=rf"max_pages_per_row \* page_size = 16.*{length}"):
            paged_attention(*wrong, implementation=implementation)
        output, lse = attention(*wrong, return_lse=True, implementation=implementation)
        assert np.all(np.isnan(output[:2]))
        assert np.all(np.isnan(lse[:2]))
        np.testing.assert_allclose(output[2:, 0, 0], [1.0, 3.0, 0.0], rtol=3e-7)
    last = inputs._replace(lengths=inputs.lengths.at[2].set(17))
    output = attention(*last, return_lse=True, implementation=implementation)[0]
    assert np.all(np.isnan(output[3]))
    assert np.all(output[4] == 0)  # padding
    negative = inputs._replace(lengths=inputs.lengths.at[0].set(-2))
    with pytest.raises(ValueError, match=r"lengths must lie in.*-2"):
        paged_attention(*negative, implementation=implementation)
    output, lse = attention(*negative, return_lse=True, implementation=implementation)
    np.testing.assert_array_equal(output[:2], 0)
    np.testing.assert_array_equal(lse[:2], -np.inf)
    decode = mean_position(paged_inputs([3, 7, 16]))
    output = attention(*decode._replace(lengths=jnp.array([-2, 7, 16])), implementation=implementation)
    np.testing.assert_allclose(output[:, 0, 0], [0.0, 3.0, 7.5], rtol=3e-7)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_b77_integers_of_any_width(dtype: type):
    """As numpy arrays; block tables too, where they hold page ids alone."""
    inputs = paged_inputs([5, 7], [2, 3])
    integers = (np.asarray(array).astype(dtype) for array in inputs[3:])
    np.testing.assert_array_equal(attention(*inputs[:3], *integers), attention(*inputs))


def test_b77_numpy_arrays_and_lists():
    expected = attention(*INPUTS)
    lists = (array.tolist() for array in INPUTS[3:])
    np.testing.assert_array_equal(paged_attention(*map(np.asarray, INPUTS[:3]), *lists), expected)


def test_b77_no_window_is_a_window_over_everything():
    expected = attention(*INPUTS)
    for window in (None, 7, 1 << 40):
        np.testing.assert_allclose(attention(*INPUTS, sliding_window=window), expected, rtol=1e-6)


def test_b77_the_default_scale():
    output = attention(*INPUTS)
    np.testing.assert_array_equal(output, attention(*INPUTS, scale=8**-0.5))
    np.testing.assert_array_equal(output, attention(*INPUTS, scale=jnp.asarray(8**-0.5, jnp.float32)))
    output = attention(*INPUTS, scale=1.0)
    np.testing.assert_allclose(output, oracle(*INPUTS, scale=1.0)[0], rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(output - attention(*INPUTS))) > 0.1


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_one_trace_per_shape(implementation: str):
    """Other lengths, other chunks and other pages compile nothing, jitted by the caller or not."""
    first, second = (
        paged_inputs([9, 4], [3, 2], max_pages_per_row=4),
        paged_inputs([6, 7], [1, 4], max_pages_per_row=4),
    )
    assert [array.shape for array in first] == [array.shape for array in second]
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def traced_once(*inputs):
        return paged_attention(*inputs, implementation=implementation)

    traced_once(*first)
    np.testing.assert_allclose(traced_once(*second), oracle(*second)[0], rtol=1e-5, atol=1e-6)
    paged_attention(*first, implementation=implementation)
    with jax.no_tracing():
        paged_attention(*second, implementation=implementation)


converts_whole = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA for CPU widened bfloat16 pools whole"
)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=converts_whole)])
def test_temporaries_stay_under_a_twentieth_of_the_pool(dtype: str):
    """A pool of 256 MB; nothing of it is copied, converted or gathered whole."""
    page_size, kv_heads, head_dim, rows = 16, 8, 128, 16
    num_pages = 128 * 2**20 // (page_size * kv_heads * head_dim * jnp.dtype(dtype).itemsize)
    pool = jax.ShapeDtypeStruct((num_pages, kv_heads, page_size, head_dim), dtype)
    tables, lengths = (
        jax.ShapeDtypeStruct((rows, num_pages // rows), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    for num_tokens, starts in ((rows, None), (64, jax.ShapeDtypeStruct((rows + 1,), jnp.int32))):
        for q_dtype in {"float32", dtype}:
            q = jax.ShapeDtypeStruct((num_tokens, 32, head_dim), q_dtype)
            compiled = attention.lower(q, pool, pool, tables, lengths, starts).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * 256 * 2**20


def test_b56_x64():
    """The same numbers and dtypes with 64-bit mode on; float64 all the way where that is what came."""
    with jax.enable_x64(True):
        for case in CASES:
            if case.name in ("everything, mixture", "int8 pages"):
                inputs, options = case.call()
                integers = [None if array is None else array.astype(jnp.int64) for array in inputs[3:]]
                for implementation in ("reference", "xla"):
                    output, lse = attention(
                        *inputs[:3], *integers, **options, return_lse=True, implementation=implementation
                    )
                    assert lse.dtype == jnp.float32
                    assert_matches_oracle(output, lse, inputs, **options)
        inputs = paged_inputs([9, 4], [3, 2], dtype="float64")
        for implementation in ("reference", "xla"):
            output = attention(*inputs, implementation=implementation)
            assert output.dtype == jnp.float64
            np.testing.assert_allclose(output, oracle(*inputs)[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_b56_numbers_of_numpy_widen_nothing(implementation: str):
    expected = attention(*INPUTS, scale=0.3, logits_soft_cap=3.0, implementation=implementation)
    with jax.enable_x64(True):
        for scale in (np.float64(0.3), jnp.float64(0.3)):
            options = {"scale": scale, "logits_soft_cap": np.float64(3.0)}
            output = paged_attention(*INPUTS, **options, implementation=implementation)
            assert output.dtype == jnp.float32
            np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-6)


def test_default_tiles_do_not_outgrow_the_work():
    assert default_tiling(max_query_len=1, group=4, page_size=16, max_pages_per_row=100).tile_tokens == 1
    assert default_tiling(max_query_len=3, group=1, page_size=512, max_pages_per_row=2) == Tiling(3, 1)
    assert default_tiling(max_query_len=1000, group=200, page_size=1, max_pages_per_row=7) == Tiling(1, 7)
