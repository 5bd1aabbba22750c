"""Prompt lookup against a search in plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.engine.drafts import lookup_drafts

lookup = jax.jit(lookup_drafts, static_argnums=2)


def expected(known: list[int], num_drafts: int) -> list[int]:
    """What followed the longest match, of 3, 2 or 1 tokens, and of equally long ones the latest."""
    for size in (3, 2, 1):
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == known[-size:]:
                return known[start + size :][:num_drafts]
    return []


def look_up(rows: list[list[int]], num_drafts: int, width: int = 16, rubbish: int = 7) -> list[list[int]]:
    """Of rows of known tokens, with something else behind them."""
    tokens = np.full((len(rows), width), rubbish, np.int32)
    for row, known in enumerate(rows):
        tokens[row, : len(known)] = known
    drafts, counts = lookup(
        jnp.asarray(tokens), jnp.asarray([len(known) for known in rows], jnp.int32), num_drafts
    )
    assert drafts.shape == (len(rows), num_drafts)
    return [row[:count].tolist() for row, count in zip(np.asarray(drafts), np.asarray(counts), strict=True)]


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([], []),
        ([5], []),
        ([5, 6], []),
        ([5, 5], [5]),
        ([5, 6, 5], [6, 5]),
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),  # three tokens before one or two
        ([2, 3, 8, 3, 9, 2, 3], [8, 3, 9, 2]),  # two before a later one
        ([3, 8, 3, 9, 3], [9, 3]),  # the latest of equally long ones
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([7, 1, 1, 1, 1], [1]),  # a match may reach into the last tokens themselves
        ([0, 0, 9, 4, 0, 0], [9, 4, 0, 0]),
        (list(range(16)), []),
        ([4] * 16, [4]),
    ],
    ids=str,
)
def test_what_followed_the_last_time(known, drafts):
    assert expected(known, 4) == drafts
    assert look_up([known], 4) == [drafts]


@given(st.lists(st.lists(st.integers(0, 3), max_size=16), min_size=4, max_size=4), st.sampled_from([1, 3]))
def test_every_row_for_itself(rows, num_drafts):
    assert look_up(rows, num_drafts) == [expected(known, num_drafts) for known in rows]


@given(st.lists(st.integers(0, 2), max_size=15), st.integers(0, 2))
def test_what_stands_behind_the_known_tokens_is_not_read(known, rubbish):
    rows = [known] * 4
    assert look_up(rows, 3, rubbish=rubbish) == [expected(known, 3)] * 4


def test_under_jit_the_shapes_and_dtypes_are_fixed():
    out = jax.eval_shape(
        partial(lookup_drafts, num_drafts=5),
        jax.ShapeDtypeStruct((3, 40), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    assert [(leaf.shape, leaf.dtype) for leaf in out] == [((3, 5), jnp.int32), ((3,), jnp.int32)]
