"""Paged attention as one reads it in a textbook: every token alone, over everything its row holds.

Dense, in float32 or wider, and slow on purpose: what the other implementations are held against.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from paged_jax.attention.dtypes import wider
from paged_jax.attention.merge import apply_sinks


@partial(jax.jit, static_argnames=("sliding_window", "logits_soft_cap"))
def reference_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages kv_heads page_size head_dim"],
    block_tables: Int32[Array, "rows max_pages_per_row"],
    lengths: Int32[Array, " rows"],
    query_starts: Int32[Array, " rows+1"] | None,
    *,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: Float[Array, " q_heads"] | None,
    k_scales: Float[Array, "num_pages kv_heads page_size"] | None,
    v_scales: Float[Array, "num_pages kv_heads page_size"] | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Output in float32 or wider, and log-sum-exp. Arguments as in `paged_attention`, already checked."""
    tokens, q_heads, head_dim = q.shape
    num_pages, kv_heads, page_size, _ = k_pages.shape
    num_rows, width = block_tables.shape
    dtype = wider(wider(q.dtype, k_pages.dtype if k_scales is None else k_scales.dtype), jnp.float32)
    if query_starts is None:
        query_starts = jnp.arange(num_rows + 1, dtype=jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(query_starts, token, side="right").astype(jnp.int32) - 1
    rows = jnp.minimum(rows, num_rows - 1)
    positions = jnp.where(token < query_starts[-1], lengths[rows] - (query_starts[rows + 1] - token), -1)
    kv_position = jnp.arange(width * page_size, dtype=jnp.int32)

    def read(pages: Array, scales: Array | None, row: Array) -> Array:  # [kv_heads, kv tokens, head_dim]
        page_ids = jnp.clip(block_tables[row], 0, num_pages - 1)
        values = pages[page_ids].astype(dtype)
        if scales is not None:
            values *= scales[page_ids].astype(dtype)[..., None]
        return values.swapaxes(0, 1).reshape(kv_heads, width * page_size, head_dim)

    def attend(work: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        query, row, position = work
        visible = kv_position <= position
        if sliding_window is not None:
            visible &= kv_position > position - sliding_window
        # A dead slot may hold NaN, and 0 * NaN is NaN.
        k, v = (
            jnp.where(visible[None, :, None], read(pages, scales, row), jnp.zeros((), dtype))
            for pages, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        query = query.reshape(kv_heads, -1, head_dim).astype(dtype)
        scores = jnp.einsum("hgd,hkd->hgk", query, k, precision=lax.Precision.HIGHEST)
        scores *= jnp.asarray(scale, dtype)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        scores = jnp.where(visible[None, None, :], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        output = jnp.einsum("hgk,hkd->hgd", weights, v, precision=lax.Precision.HIGHEST)
        divisor = jnp.where(total == 0, jnp.ones_like(total), total)
        output /= divisor
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor))
        return output.reshape(q_heads, head_dim), lse.reshape(q_heads)

    output, lse = lax.map(attend, (q, rows, positions))
    return (output, lse) if sinks is None else apply_sinks(output, lse, sinks)
