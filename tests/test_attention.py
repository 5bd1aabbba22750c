"""Every implementation gives the oracle's numbers, and only what a token may see has a part in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, attention
from chex import assert_trees_all_equal
from jax import lax
from oracle import assert_matches_oracle

from paged_jax.attention import Tiling, paged_attention
from paged_jax.attention.xla import xla_attention
from paged_jax.testing import PagedInputs, paged_inputs

IMPLEMENTATIONS = ("reference", "xla")
TILINGS = [
    Tiling(tile_tokens, pages_per_step, num_splits)
    for tile_tokens, pages_per_step, num_splits in ((1, 1, 1), (3, 2, 2), (2, 1, 4), (4, 3, 8), (16, 5, 16))
]
EVERYTHING = next(case for case in CASES if case.name == "everything, mixture")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case, implementation: str):
    inputs, options = case.call()
    output, lse = attention(*inputs, **options, return_lse=True, implementation=implementation)
    assert_matches_oracle(output, lse, inputs, **options)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_any_tiling_matches_the_oracle(tiling: Tiling):
    inputs, options = EVERYTHING.call()
    output, lse = attention(*inputs, **options, return_lse=True, tiling=tiling)
    assert_matches_oracle(output, lse, inputs, **options)


@pytest.mark.parametrize("case", [EVERYTHING, CASES[0]], ids=str)
def test_all_pieces_at_once_match_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch):
    """The form for GPU and TPU, run on whatever there is."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    xla_attention.clear_cache()
    inputs, options = case.call()
    output, lse = paged_attention(*inputs, **options, return_lse=True, implementation="xla")
    xla_attention.clear_cache()
    assert_matches_oracle(output, lse, inputs, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_contract_leaves_open_changes_no_bit(case: Case, implementation: str):
    zero, nan = (
        attention(*inputs, **options, return_lse=True, implementation=implementation)
        for inputs, options in (case.call(dead=0.0), case.call(dead=np.nan))
    )
    assert_trees_all_equal(zero, nan, strict=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_page_ids_change_no_bit(case: Case, implementation: str):
    inputs, options = case.call()
    num_pages = inputs.k_pages.shape[0]
    old_ids = np.random.default_rng(1).permutation(num_pages)
    tables = np.array(inputs.block_tables)
    valid = (tables >= 0) & (tables < num_pages)
    tables[valid] = np.argsort(old_ids)[tables[valid]]
    renumbered = inputs._replace(
        k_pages=np.asarray(inputs.k_pages)[old_ids],
        v_pages=np.asarray(inputs.v_pages)[old_ids],
        block_tables=tables,
    )
    scales = {
        name: np.asarray(options[name])[old_ids] for name in options if name in ("k_scales", "v_scales")
    }
    expected = attention(*inputs, **options, return_lse=True, implementation=implementation)
    got = attention(*renumbered, **options | scales, return_lse=True, implementation=implementation)
    assert_trees_all_equal(expected, got, strict=True)


def test_nan_in_a_query_stays_in_its_token():
    """A number that is lost must show, and only where it was lost."""
    inputs = paged_inputs([6, 9, 3], [2, 3, 1])
    inputs = inputs._replace(q=inputs.q.at[3].set(jnp.nan))
    for implementation in IMPLEMENTATIONS:
        output, lse = attention(*inputs, return_lse=True, implementation=implementation)
        np.testing.assert_array_equal(np.isnan(output).all(axis=(1, 2)), np.arange(6) == 3)
        np.testing.assert_array_equal(np.isnan(lse).all(axis=1), np.arange(6) == 3)


def test_the_reference_has_gradients():
    """Also where a row is empty and dead slots hold NaN."""
    inputs = paged_inputs([5, 0, 7], [2, 0, 1])
    inputs = inputs._replace(q=jnp.pad(inputs.q, ((0, 1), (0, 0), (0, 0))))

    def loss(q: jax.Array) -> jax.Array:
        output, lse = attention(
            q, *inputs[1:], sinks=jnp.zeros(4), return_lse=True, implementation="reference"
        )
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

    gradient = jax.grad(loss)(inputs.q)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=inputs.q.shape), jnp.float32)
    numeric = (loss(inputs.q + 1e-2 * direction) - loss(inputs.q - 1e-2 * direction)) / 2e-2
    # The quotient's truncation and the cancellation of float32 both come to about 1e-4 here.
    np.testing.assert_allclose(jnp.vdot(gradient, direction), numeric, rtol=1e-3)
    np.testing.assert_array_equal(gradient[3], 0)


def test_vmap():
    """Over layers, or over the shards of a batch: everything has the leading axis."""
    calls = [paged_inputs([3, 9], [1, 4], seed=seed) for seed in range(3)]
    stacked = PagedInputs(*(jnp.stack(arrays) for arrays in zip(*calls, strict=True)))
    outputs = jax.vmap(attention)(*stacked)
    for output, inputs in zip(outputs, calls, strict=True):
        np.testing.assert_allclose(output, attention(*inputs), rtol=1e-5, atol=1e-6)
