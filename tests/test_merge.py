"""Attention over a set of keys from attention over its parts."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from cases import attention
from oracle import assert_matches_oracle

from paged_jax.attention import merge_attention
from paged_jax.testing import paged_inputs

RNG = np.random.default_rng(0)
OUTPUTS = jnp.asarray(RNG.normal(size=(3, 4, 2, 8)), jnp.float32)  # [parts, tokens, heads, head_dim]
LSES = jnp.asarray(3 * RNG.normal(size=(3, 4, 2)), jnp.float32)


def test_a_row_in_parts_is_the_whole_row():
    """A row of 23 tokens attended by its last one, in parts of 8, 11 and 4 tokens, some of them empty."""
    whole = paged_inputs([23], page_size=1)
    table = np.asarray(whole.block_tables)[0]
    parts = np.full((5, 11), -1, np.int32)
    ends = (0, 8, 8, 19, 23)
    for part, (begin, end) in enumerate(pairwise(ends)):
        parts[part, : end - begin] = table[begin:end]
    lengths = jnp.asarray([*np.diff(ends), 0], jnp.int32)
    rows = whole._replace(q=jnp.repeat(whole.q, 5, axis=0), block_tables=jnp.asarray(parts), lengths=lengths)
    outputs, lses = attention(*rows, return_lse=True)
    output, lse = merge_attention(outputs[:, None], lses[:, None])
    assert_matches_oracle(output, lse, whole)


def test_a_part_alone_is_itself():
    output, lse = merge_attention(OUTPUTS[:1], LSES[:1])
    np.testing.assert_allclose(output, OUTPUTS[0], rtol=1e-6)
    np.testing.assert_allclose(lse, LSES[0], rtol=1e-6)


def test_the_order_of_merging_does_not_matter():
    expected, expected_lse = merge_attention(OUTPUTS, LSES)
    first, first_lse = merge_attention(OUTPUTS[:2], LSES[:2])
    output, lse = merge_attention(jnp.stack([OUTPUTS[2], first]), jnp.stack([LSES[2], first_lse]))
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_weights_are_the_softmax_of_the_log_sum_exps():
    output, lse = merge_attention(jnp.array([[[1.0]], [[5.0]]]), jnp.log(jnp.array([[1.0], [3.0]])) + 700)
    np.testing.assert_allclose(output, [[4.0]], rtol=1e-4)  # 700 in float32 is known to 3e-5
    np.testing.assert_allclose(lse, [700 + np.log(4)], rtol=1e-6)


@pytest.mark.parametrize("rubbish", [0.0, np.nan, np.inf])
def test_an_empty_part_has_no_say_whatever_stands_in_it(rubbish: float):
    expected = merge_attention(OUTPUTS[1:], LSES[1:])
    merged = merge_attention(OUTPUTS.at[0].set(rubbish), LSES.at[0].set(-jnp.inf))
    for got, right in zip(merged, expected, strict=True):
        np.testing.assert_array_equal(got, right)


def test_all_parts_empty():
    lses = LSES.at[:, 1].set(-jnp.inf)
    output, lse = merge_attention(OUTPUTS.at[:, 1].set(jnp.nan), lses)
    np.testing.assert_array_equal(output[1], 0)
    np.testing.assert_array_equal(lse[1], -np.inf)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(lses[0]))


def test_a_lost_part_shows():
    """NaN as log-sum-exp is what a part gives that could not be computed."""
    output, lse = merge_attention(OUTPUTS, LSES.at[0, 2].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(output).all(axis=(1, 2)), np.arange(4) == 2)
    np.testing.assert_array_equal(np.isnan(lse).all(axis=1), np.arange(4) == 2)


def test_dtypes():
    """The output keeps its dtype, sums are float32: many small parts are not lost beside each other."""
    output, lse = merge_attention(jnp.ones((1000, 1, 8), jnp.bfloat16), jnp.zeros((1000, 1), jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(output, np.float32), 1)
    np.testing.assert_allclose(lse, np.log([1000]), rtol=1e-6)


def test_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match=r"merge_attention: .*\(3, 4, 2, 8\).*\(3, 4\)"):
        merge_attention(OUTPUTS, LSES[..., 0])
    with pytest.raises(ValueError, match="merge_attention"):
        merge_attention(jnp.ones(3), jnp.ones(()))
