"""A Llama over contiguous caches: each row's keys and values lie in slots of its own, one after the other."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from paged_jax.attention.schedule import Schedule, longest_first, make_schedule
from paged_jax.attention.xla import run_pieces
from paged_jax.models import Llama, LlamaConfig

Cache = tuple[tuple[Array, Array], ...]  # of each layer k and v, [rows, kv_heads, max_length, head_dim]

# As in the package's attention: keys read at once, and queries times heads of one matrix.
_KV_STEP, _TILE_ROWS = 128, 32


@dataclass(frozen=True)
class StepLayout:
    """Where each of T tokens stands: its row and position, out of range on the high side for padding."""

    rows: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    last_tokens: Int32[Array, " rows"]
    schedule: Schedule
    tile_tokens: int

    @property
    def row(self) -> Int32[Array, " tokens"]:
        """`rows`, with any row for padding."""
        return jnp.minimum(self.rows, self.last_tokens.shape[0] - 1)


def layout_step(
    taken: Int32[Array, " rows"], lengths: Int32[Array, " rows"], chunk: int | None, config: LlamaConfig
) -> StepLayout:
    """The last `taken` tokens of every row; without a chunk, token r is that of row r."""
    num_rows = lengths.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    if chunk is None:
        starts, rows, tile_tokens = row, jnp.where(taken > 0, row, num_rows), 1
        positions = jnp.where(taken > 0, lengths - 1, 0)
        last_tokens = row
    else:
        ends = jnp.cumsum(taken, dtype=jnp.int32)
        starts, tile_tokens = ends - taken, max(1, _TILE_ROWS * config.num_kv_heads // config.num_heads)
        token = jnp.arange(chunk, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
        in_range = jnp.minimum(rows, num_rows - 1)
        positions = jnp.where(rows < num_rows, lengths[in_range] - (ends[in_range] - token), 0)
        last_tokens = jnp.maximum(ends - 1, 0)
    schedule = make_schedule(
        starts,
        taken,
        lengths,
        num_tokens=rows.shape[0],
        tile_tokens=tile_tokens,
        page_size=1,
        sliding_window=config.sliding_window,
    )
    return StepLayout(rows, positions, last_tokens, longest_first(schedule), tile_tokens)


def forward(
    model: Llama, tokens: Int32[Array, " tokens"], cache: Cache, layout: StepLayout
) -> tuple[Float[Array, "tokens width"], Cache]:
    """The last hidden states of one step's tokens, and the caches with their keys and values."""
    x = model.embed(tokens)
    new_cache = []
    for block, (k_cache, v_cache) in zip(model.blocks, cache, strict=True):
        attention, y = block.attention, block.attention_norm(x)
        q, k, v = attention.query(y), attention.key(y), attention.value(y)
        if attention.rotary is not None:
            q, k = attention.rotary(q, layout.positions), attention.rotary(k, layout.positions)
        heads = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
        at = (layout.rows[:, None], heads, layout.positions[:, None])
        k_cache = k_cache.at[at].set(k.astype(k_cache.dtype), mode="drop")
        v_cache = v_cache.at[at].set(v.astype(v_cache.dtype), mode="drop")
        attended = _attend(
            q,
            k_cache,
            v_cache,
            layout.schedule,
            tile_tokens=layout.tile_tokens,
            sliding_window=attention.sliding_window,
        )
        x += attention.out(attended)
        x += block.mlp(block.mlp_norm(x))
        new_cache.append((k_cache, v_cache))
    return model.norm(x), tuple(new_cache)


# Jitted on its own so that the layers trace it once.
@partial(jax.jit, static_argnames=("tile_tokens", "sliding_window"))
def _attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_cache: Float[Array, "rows kv_heads max_length head_dim"],
    v_cache: Float[Array, "rows kv_heads max_length head_dim"],
    schedule: Schedule,
    *,
    tile_tokens: int,
    sliding_window: int | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention of each tile over its row's slots up to its end, with an online softmax.

    On CPU a few (tile, kv head) pairs of about the same length at a time: products of just the keys that the
    rows have are faster there than one product over the full width.
    """
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, max_length, _ = k_cache.shape
    group, kv_step = q_heads // kv_heads, min(_KV_STEP, max_length)
    padded = jnp.pad(q.reshape(tokens, kv_heads, group, head_dim), ((0, tile_tokens), *[(0, 0)] * 3))
    num_tiles = schedule.rows.shape[0]
    dot = partial(jnp.dot, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def attend(work: tuple[Array, ...]) -> Array:  # [tile_tokens, group, head_dim]
        tile, head = work
        zero = jnp.zeros((), jnp.int32)
        corner = (schedule.first_tokens[tile], head, zero, zero)
        queries = lax.dynamic_slice(padded, corner, (tile_tokens, 1, group, head_dim))
        queries = queries.reshape(tile_tokens * group, head_dim)
        in_tile = jnp.minimum(jnp.arange(tile_tokens, dtype=jnp.int32), schedule.num_tokens[tile] - 1)
        q_position = jnp.repeat(schedule.first_positions[tile] + in_tile, group)[:, None]

        def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            start, acc, top, total = carry
            first = jnp.minimum(start, max_length - kv_step)
            k, v = (
                lax.dynamic_slice(
                    pool, (schedule.rows[tile], head, first, zero), (1, 1, kv_step, head_dim)
                ).reshape(kv_step, head_dim)
                for pool in (k_cache, v_cache)
            )
            position = (first + jnp.arange(kv_step, dtype=jnp.int32))[None, :]
            scores = dot(queries.astype(k.dtype), k.T)
            visible = (position >= start) & (position <= q_position)
            if sliding_window is not None:
                visible &= position > q_position - sliding_window
            scores = jnp.where(visible, scores / math.sqrt(head_dim), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            weights, decay = jnp.exp(scores - shift), jnp.exp(top - shift)
            acc = acc * decay + dot(weights.astype(v.dtype), v)
            return start + kv_step, acc, new_top, total * decay + jnp.sum(weights, axis=1, keepdims=True)

        tile_rows = tile_tokens * group
        _, acc, _, total = lax.while_loop(
            lambda carry: carry[0] < schedule.kv_ends[tile],
            step,
            (
                schedule.kv_begins[tile],
                jnp.zeros((tile_rows, head_dim), jnp.float32),
                jnp.full((tile_rows, 1), -jnp.inf, jnp.float32),
                jnp.zeros((tile_rows, 1), jnp.float32),
            ),
        )
        return (acc / jnp.where(total == 0, 1.0, total)).reshape(tile_tokens, group, head_dim)

    output = run_pieces(attend, (num_tiles, kv_heads))
    output = output.reshape(num_tiles, kv_heads, tile_tokens, group, head_dim)
    at = (schedule.token_tiles, slice(None), schedule.token_offsets)
    return output.at[at].get(mode="fill", fill_value=0).reshape(q.shape).astype(q.dtype)
