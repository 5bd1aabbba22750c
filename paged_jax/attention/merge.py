"""Combining partial attention results by log-sum-exp.

Attention over a union of disjoint sets of keys is the average of the attentions over each set,
weighted by their softmax denominators (Rabe and Staats 2021, arXiv:2112.05682).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from paged_jax.attention.dtypes import wider


def merge_attention(
    outputs: Float[Array, "parts *batch head_dim"], lses: Float[Array, "parts *batch"]
) -> tuple[Float[Array, "*batch head_dim"], Float[Array, "*batch"]]:
    """Attention over all parts from the attention over each.

    Args:
        outputs: normalised results, one per part along the first axis.
        lses: natural log-sum-exp of each part's scores; -inf where a part attended nothing, whatever
            stands in its output.

    Returns:
        The merged output in the dtype of `outputs`, and its log-sum-exp in float32 or wider; 0 and
        -inf where every part is empty.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if outputs.shape[:-1] != lses.shape or outputs.ndim < 2:
        raise ValueError(
            "merge_attention: outputs [parts, ..., head_dim] need lses [parts, ...], "
            f"got {outputs.shape=} and {lses.shape=}"
        )
    accumulate = wider(lses.dtype, jnp.float32)
    lses = lses.astype(accumulate)
    top = jnp.max(lses, axis=0, keepdims=True)
    weights = jnp.exp(lses - jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top))
    total = jnp.sum(weights, axis=0)
    empty = total == 0
    divisor = jnp.where(empty, jnp.ones_like(total), total)
    lse = jnp.where(empty, -jnp.inf, top[0] + jnp.log(divisor))
    parts = jnp.where(weights[..., None] > 0, outputs.astype(accumulate), jnp.zeros((), accumulate))
    merged = jnp.sum(parts * weights[..., None], axis=0) / divisor[..., None]
    return merged.astype(outputs.dtype), lse


def apply_sinks(
    output: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "tokens q_heads"],
    sinks: Float[Array, " q_heads"],
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Adds each head's sink, a logit without a value, to the softmax denominator, once.

    A token that attends nothing stays 0 with log-sum-exp -inf.
    """
    sinks = jnp.broadcast_to(sinks.astype(lse.dtype)[None, :], lse.shape)
    with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks))
    share = jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), jnp.exp(lse - with_sink))
    return output * share[..., None], with_sink
