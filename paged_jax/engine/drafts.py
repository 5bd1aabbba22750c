"""Guessing a row's next tokens from its own text: prompt lookup (Saxena 2023; also "n-gram speculation")."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

_MAX_NGRAM = 3


def lookup_drafts(
    tokens: Int32[Array, "rows max_tokens"], num_tokens: Int32[Array, " rows"], num_drafts: int
) -> tuple[Int32[Array, "rows num_drafts"], Int32[Array, " rows"]]:
    """What followed the last place where a row's last tokens stood before.

    The longest match of its last 3, 2 or 1 tokens counts, and of equally long ones the latest.

    Args:
        tokens: of each row; `num_tokens` of them are known.

    Returns:
        The guesses, and how many of them there are in each row.
    """
    rows, width = tokens.shape
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    known = num_tokens[:, None]
    # matched[r, i]: how many tokens before position i equal the row's last ones
    matched = jnp.zeros((rows, width), jnp.int32)
    same = jnp.ones((rows, width), bool)
    for back in range(1, _MAX_NGRAM + 1):
        last = tokens[row, jnp.maximum(known - back, 0)]
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :width]
        same &= (index >= back) & (earlier == last)
        matched += same.astype(jnp.int32)
    matched = jnp.where(index < known, matched, 0)
    best = jnp.argmax(jnp.where(matched > 0, matched * width + index, -1), axis=1).astype(jnp.int32)
    found = jnp.max(matched, axis=1) > 0
    guess = best[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    counts = jnp.where(found, jnp.clip(num_tokens - best, 0, num_drafts), 0)
    return tokens[row, jnp.minimum(guess, width - 1)], counts
