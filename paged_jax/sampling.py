"""Choosing the next token from logits: pure functions, every row for itself.

A row's token depends on its own logits, settings, seed and position, and on nothing of the other
rows, so it is the same whoever shares the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """The settings of every row, R of them. `create` fills in defaults and checks."""

    temperature: Float[Array, " rows"]  # 0: greedy
    top_k: Int32[Array, " rows"]  # 0: all
    top_p: Float[Array, " rows"]  # 1: all
    min_p: Float[Array, " rows"]  # 0: all
    repetition_penalty: Float[Array, " rows"]  # 1: none
    presence_penalty: Float[Array, " rows"]  # 0: none
    frequency_penalty: Float[Array, " rows"]  # 0: none
    seed: UInt32[Array, " rows"]

    @classmethod
    def create(
        cls,
        rows: int,
        *,
        temperature: ArrayLike = 0.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        min_p: ArrayLike = 0.0,
        repetition_penalty: ArrayLike = 1.0,
        presence_penalty: ArrayLike = 0.0,
        frequency_penalty: ArrayLike = 0.0,
        seed: ArrayLike = 0,
    ) -> "Sampling":
        """Each setting is one number for all rows or an array of one per row; greedy by default.

        Args:
            temperature: logits are divided by it; 0 takes the largest.
            top_k: only the k largest logits stay (and those equal to the k-th); 0 keeps all.
            top_p: of the most probable tokens only the fewest whose probabilities sum to at least p
                stay (Holtzman et al. 2019, arXiv:1904.09751), after `top_k`.
            min_p: only tokens at least this fraction as probable as the most probable stay (Nguyen et
                al. 2024, arXiv:2407.01082).
            repetition_penalty: positive logits of tokens that a row already holds are divided by it,
                negative ones multiplied (Keskar et al. 2019, arXiv:1909.05858).
            presence_penalty: is taken off the logits of tokens that a row has written after its prompt.
            frequency_penalty: likewise, once for every time it has written them.
            seed: rows of equal seed, settings and tokens continue equally; give rows different ones
                to get different samples of one prompt.

        Raises:
            ValueError: for a setting outside its range or of a shape that is neither one nor [rows].
        """
        ranges: dict[str, tuple[ArrayLike, Any, Callable[[Any], Any], str]] = {
            "temperature": (temperature, jnp.float32, lambda x: x >= 0, "at least 0"),
            "top_k": (top_k, jnp.int32, lambda x: (x >= 0) & (x < 2**31), "a whole number in [0, 2**31)"),
            "top_p": (top_p, jnp.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
            "min_p": (min_p, jnp.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
            "repetition_penalty": (repetition_penalty, jnp.float32, lambda x: x >= 2**-126, "greater than 0"),
            "presence_penalty": (presence_penalty, jnp.float32, np.isfinite, "finite"),
            "frequency_penalty": (frequency_penalty, jnp.float32, np.isfinite, "finite"),
            "seed": (seed, jnp.uint32, lambda x: (x >= 0) & (x < 2**32), "a whole number in [0, 2**32)"),
        }
        fields = {}
        for name, (value, dtype, in_range, wanted) in ranges.items():
            array = np.asarray(value)
            is_number = jnp.issubdtype(array.dtype, jnp.integer) or (
                jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(array.dtype, jnp.floating)
            )
            fits = is_number and array.shape in ((), (rows,))
            if not fits or not np.all(in_range(array) & np.isfinite(array)):
                raise ValueError(
                    f"Sampling: {name} must be {wanted}, one for all or each of {rows} rows, got {value!r}"
                )
            fields[name] = jnp.asarray(np.broadcast_to(array.astype(dtype), (rows,)))
        return cls(**fields)


def sample(
    logits: Float[Array, "rows vocab"], sampling: Sampling, positions: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """The next token of every row.

    Args:
        positions: where the new token will stand in its row; with the row's seed it fixes the draw.
    """
    logits = logits.astype(jnp.float32)
    greedy = _argmax(logits)

    def draw(logits: Array) -> Array:
        # Below the largest, which is 0 then: no temperature is too small to divide by.
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled /= jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
        scaled = lax.cond(
            jnp.any((sampling.top_k > 0) | (sampling.top_p < 1)),
            lambda scaled: _keep_top(scaled, sampling.top_k, sampling.top_p),
            lambda scaled: scaled,
            scaled,
        )
        scaled = jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)

        def noise(seed: Array, position: Array) -> Array:
            # Whatever jax's default is: others draw for a whole batch at once, from its first row's seed.
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
            return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

        drawn = scaled + jax.vmap(noise)(sampling.seed, positions)
        return jnp.where(sampling.temperature > 0, _argmax(drawn), greedy)

    return lax.cond(jnp.any(sampling.temperature > 0), draw, lambda _: greedy, logits)


def penalize(
    logits: Float[Array, "rows vocab"],
    sampling: Sampling,
    tokens: Int32[Array, "rows max_tokens"],
    prompt_lens: Int32[Array, " rows"],
    num_tokens: Int32[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Makes the tokens that a row holds less likely, or more; see `Sampling.create`.

    Args:
        tokens: of each row, the prompt first; `num_tokens` of them count.
    """
    rows, vocab = logits.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    held = index < num_tokens[:, None]

    def repetition(logits: Array) -> Array:
        seen = jnp.zeros((rows, vocab), bool).at[row, jnp.where(held, tokens, vocab)].set(True, mode="drop")
        by = sampling.repetition_penalty[:, None].astype(logits.dtype)
        return jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)

    def presence_and_frequency(logits: Array) -> Array:
        written = jnp.where(held & (index >= prompt_lens[:, None]), tokens, vocab)
        counts = jnp.zeros((rows, vocab), logits.dtype).at[row, written].add(1, mode="drop")
        presence = sampling.presence_penalty[:, None].astype(logits.dtype)
        frequency = sampling.frequency_penalty[:, None].astype(logits.dtype)
        return logits - jnp.where(counts > 0, presence, 0) - frequency * counts

    logits = lax.cond(jnp.any(sampling.repetition_penalty != 1), repetition, lambda logits: logits, logits)
    return lax.cond(
        jnp.any((sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)),
        presence_and_frequency,
        lambda logits: logits,
        logits,
    )


def _argmax(values: Float[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """The first of the largest, by two plain reductions: XLA on CPU vectorises those, and not its argmax."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(values == largest, index, values.shape[1] - 1), axis=-1)


def _keep_top(logits: Array, top_k: Array, top_p: Array) -> Array:
    """-inf for every logit outside a row's `top_k` largest, and then outside its `top_p` mass."""
    vocab = logits.shape[1]
    descending = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(top_k > 0, top_k, vocab)[:, None]
    descending = jnp.where(rank < top_k, descending, -jnp.inf)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The cumulative sum may round to just below 1: top_p = 1 must still keep everything.
    kept = jnp.where(top_p[:, None] < 1, (before < top_p[:, None]) & (rank < top_k), rank < top_k)
    last = jnp.maximum(jnp.sum(kept, axis=-1, dtype=jnp.int32) - 1, 0)
    threshold = jnp.take_along_axis(descending, last[:, None], axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
