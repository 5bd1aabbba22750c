"""Paged attention in plain JAX: CPU, GPU and TPU, nothing but XLA.

Each piece of work is one tile of queries, one kv head and one split of the kv range: a loop over
the pages of its own row with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
On CPU a few pieces of about the same length run at a time, so that each does just the work its
row has; elsewhere all run at once, as long as the longest.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from paged_jax.attention.dtypes import wider
from paged_jax.attention.merge import apply_sinks, merge_attention
from paged_jax.attention.schedule import Schedule, Tiling, longest_first, make_schedule

Results = TypeVar("Results")

# Pieces that run at a time on CPU: alone, half of a piece's time goes into starting its operations; with
# more of them what they read no longer fits a core's cache.
_CPU_BATCH = 24


def default_tiling(max_query_len: int, group: int, page_size: int, max_pages_per_row: int) -> Tiling:
    """About 128 kv tokens a step, and query tiles of about 32 (token, head) rows.

    The matrices of one step then stay within a core's cache and fill its vector units. Larger tiles read a
    prompt's keys less often, and are wasted on rows that decode beside it: on CPU, tiles of 64 rows take
    0.73 of the time for long prompts alone, and 1.23 of it where short prompts and decoding rows mix.
    """
    return Tiling(
        tile_tokens=max(1, min(32 // group, max_query_len)),
        pages_per_step=max(1, min(128 // page_size, max_pages_per_row)),
    )


# Jitted on its own so that the layers of a model trace it once.
@partial(jax.jit, static_argnames=("sliding_window", "logits_soft_cap", "tiling"))
def xla_attention(
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
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Output in float32 or wider, and log-sum-exp. Arguments as in `paged_attention`, already checked."""
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    num_rows, width = block_tables.shape
    group = q_heads // kv_heads
    if query_starts is None:
        starts, query_lens, max_query_len = jnp.arange(num_rows, dtype=jnp.int32), jnp.minimum(lengths, 1), 1
    else:
        query_lens = jnp.clip(jnp.diff(query_starts), 0, lengths)
        starts, max_query_len = query_starts[1:] - query_lens, tokens
    if tiling is None:
        tiling = default_tiling(max_query_len, group, page_size, width)
    schedule = longest_first(
        make_schedule(
            starts,
            query_lens,
            lengths,
            num_tokens=tokens,
            tile_tokens=tiling.tile_tokens,
            page_size=page_size,
            sliding_window=sliding_window,
        )
    )
    output, lse = _attend_tiles(
        q.reshape(tokens, kv_heads, group, head_dim),
        (k_pages, v_pages, k_scales, v_scales),
        block_tables,
        schedule,
        tiling=tiling,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
    )
    output, lse = output.reshape(q.shape), lse.reshape(tokens, q_heads)
    return (output, lse) if sinks is None else apply_sinks(output, lse, sinks)


def _attend_tiles(
    q: Array,  # [tokens, kv_heads, group, head_dim]
    pools: tuple[Array, Array, Array | None, Array | None],
    block_tables: Array,
    schedule: Schedule,
    *,
    tiling: Tiling,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> tuple[Array, Array]:
    """Output [tokens, kv_heads, group, head_dim] and log-sum-exp; 0 and -inf for tokens of no tile."""
    _, kv_heads, group, head_dim = q.shape
    num_pages, _, page_size, _ = pools[0].shape
    tile_tokens, pages_per_step, num_splits = tiling.tile_tokens, tiling.pages_per_step, tiling.num_splits
    num_tiles = schedule.rows.shape[0]
    kv_step = pages_per_step * page_size
    compute = wider(q.dtype, pools[0].dtype if pools[2] is None else pools[2].dtype)
    accumulate = wider(compute, jnp.float32)
    precision = lax.Precision.HIGHEST if compute == accumulate else None
    q = jnp.pad(q, ((0, tile_tokens), (0, 0), (0, 0), (0, 0)))  # the last tile's slice may reach past the end
    tables = jnp.clip(jnp.pad(block_tables, ((0, 0), (0, pages_per_step))), 0, num_pages - 1)

    def read(pool: Array, scales: Array | None, page_ids: Array, head: Array) -> Array:  # [kv_step, head_dim]
        values = pool[page_ids, head].reshape(kv_step, head_dim).astype(compute)
        return (
            values if scales is None else values * scales[page_ids, head].reshape(kv_step, 1).astype(compute)
        )

    def attend(work: tuple[Array, ...]) -> tuple[Array, Array]:
        tile, head, split = work
        row, last = schedule.rows[tile], schedule.num_tokens[tile] - 1
        first_position, kv_end = schedule.first_positions[tile], schedule.kv_ends[tile]
        steps = -(-(kv_end - schedule.kv_begins[tile]) // (kv_step * num_splits))
        begin = schedule.kv_begins[tile] + split * steps * kv_step
        end = jnp.minimum(begin + steps * kv_step, kv_end)
        window_start = 0 if sliding_window is None else first_position - (sliding_window - 1)
        in_tile = jnp.arange(tile_tokens, dtype=jnp.int32)
        q_position = jnp.repeat(first_position + jnp.minimum(in_tile, last), group)[:, None]  # [tile_rows, 1]
        corner = (schedule.first_tokens[tile], head, *jnp.zeros(2, jnp.int32))
        queries = lax.dynamic_slice(q, corner, (tile_tokens, 1, group, head_dim))
        queries = queries.reshape(tile_tokens * group, head_dim).astype(compute)

        def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            start, acc, top, total = carry
            page_ids = lax.dynamic_slice(tables, (row, start // page_size), (1, pages_per_step))[0]
            position = start + jnp.arange(kv_step, dtype=jnp.int32)
            # A dead slot may hold NaN, and 0 * NaN is NaN.
            live = (position >= window_start) & (position < kv_end)
            k, v = (
                jnp.where(live[:, None], read(pool, scales, page_ids, head), 0)
                for pool, scales in zip(pools[:2], pools[2:], strict=True)
            )
            scores = jnp.dot(queries, k.T, precision=precision, preferred_element_type=accumulate)
            scores *= jnp.asarray(scale, accumulate)
            if logits_soft_cap is not None:
                scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
            visible = position[None, :] <= q_position
            if sliding_window is not None:
                visible &= position[None, :] > q_position - sliding_window
            scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            # Nothing visible so far leaves -inf, and -inf - -inf would be NaN.
            shift = jnp.where(jnp.isneginf(new_top), jnp.zeros_like(new_top), new_top)
            weights = jnp.exp(scores - shift)
            decay = jnp.exp(top - shift)
            acc = acc * decay + jnp.dot(
                weights.astype(compute), v, precision=precision, preferred_element_type=accumulate
            )
            return start + kv_step, acc, new_top, total * decay + _row_sums(weights)

        tile_rows = tile_tokens * group
        _, acc, top, total = lax.while_loop(
            lambda carry: carry[0] < end,
            step,
            (
                begin,
                jnp.zeros((tile_rows, head_dim), accumulate),
                jnp.full((tile_rows, 1), -jnp.inf, accumulate),
                jnp.zeros((tile_rows, 1), accumulate),
            ),
        )
        divisor = jnp.where(total == 0, jnp.ones_like(total), total)
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor))
        return acc / divisor, lse[:, 0]

    grid = (num_tiles, kv_heads, num_splits)
    output, lse = run_pieces(attend, grid)
    output = output.reshape(*grid, tile_tokens, group, head_dim)
    lse = lse.reshape(*grid, tile_tokens, group)
    output, lse = output.swapaxes(0, 2), lse.swapaxes(0, 2)  # [num_splits, kv_heads, tiles, ...]
    output, lse = (output[0], lse[0]) if num_splits == 1 else merge_attention(output, lse)

    at = (slice(None), schedule.token_tiles, schedule.token_offsets)
    output = output.at[at].get(mode="fill", fill_value=0).swapaxes(0, 1)
    lse = lse.at[at].get(mode="fill", fill_value=-jnp.inf).swapaxes(0, 1)
    return output, lse


def run_pieces(attend: Callable[[tuple[Array, ...]], Results], grid: tuple[int, ...]) -> Results:
    """What `attend` makes of each index into `grid`, one after the other in the results.

    On CPU a few at a time, which should be about equally long, elsewhere all at once.
    """
    work = tuple(index.reshape(-1) for index in jnp.indices(grid, dtype=jnp.int32))

    def in_batches(work: tuple[Array, ...]) -> Results:
        pieces = math.prod(grid)
        # Not one alone: XLA rounds a product differently when it has no batch dimension.
        batch = min(_CPU_BATCH, max(pieces, 2))
        # The last piece is one of the shortest: to fill up with it costs nothing.
        batches = (jnp.pad(index, (0, -pieces % batch), mode="edge").reshape(-1, batch) for index in work)
        results = lax.map(jax.vmap(attend), tuple(batches))
        return jax.tree.map(lambda result: result.reshape(-1, *result.shape[2:])[:pieces], results)

    return lax.platform_dependent(work, cpu=in_batches, default=jax.vmap(attend))


def _row_sums(matrix: Array) -> Array:  # [rows, columns] -> [rows, 1]
    """Sums by halves, in an order that is the same in any batch, as XLA's own on CPU is not."""
    columns = matrix.shape[1]
    width = 1 << (columns - 1).bit_length()
    matrix = jnp.pad(matrix, ((0, 0), (0, width - columns)))
    while width > 1:
        width //= 2
        matrix = matrix[:, :width] + matrix[:, width:]
    return matrix
