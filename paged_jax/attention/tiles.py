"""Queries gathered into tiles, and results taken out of them: the same for every GPU kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from paged_jax.attention.merge import merge_attention
from paged_jax.attention.schedule import Schedule


def pack_queries(
    q: Float[Array, "tokens q_heads head_dim"],
    schedule: Schedule,
    *,
    kv_heads: int,
    tile_tokens: int,
    heads_per_tile: int,
    tile_rows: int,
) -> Float[Array, "tiles heads tile_rows head_dim"]:
    """The rows of each tile: its tokens one after the other, each with the heads of one group.

    `heads` counts the kv heads, several times where a group is cut into parts of `heads_per_tile`. Rows
    that hold no query hold some other one.
    """
    tokens, q_heads, head_dim = q.shape
    group = q_heads // kv_heads
    parts = -(-group // heads_per_tile)
    q = q.reshape(tokens, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, parts * heads_per_tile - group), (0, 0)))
    q = q.reshape(tokens, kv_heads * parts, heads_per_tile, head_dim)
    in_tile = jnp.minimum(
        jnp.arange(tile_tokens, dtype=jnp.int32)[None, :], jnp.maximum(schedule.num_tokens - 1, 0)[:, None]
    )
    tiles = q[
        schedule.first_tokens[:, None] + in_tile
    ]  # [tiles, tile_tokens, heads, heads_per_tile, head_dim]
    tiles = tiles.swapaxes(1, 2).reshape(-1, kv_heads * parts, tile_tokens * heads_per_tile, head_dim)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, tile_rows - tiles.shape[2]), (0, 0)))


def unpack_outputs(
    outputs: Float[Array, "splits tiles heads tile_rows head_dim"],
    lses: Float[Array, "splits tiles heads tile_rows"],
    schedule: Schedule,
    *,
    kv_heads: int,
    group: int,
    tile_tokens: int,
    heads_per_tile: int,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """What each token's heads got, the splits merged; 0 and -inf for tokens of no tile.

    Where a log-sum-exp is -inf, the output may hold anything.
    """

    def of_tokens(tiled: Array, fill: float) -> Array:  # [splits, tiles, heads, tile_rows, ...]
        splits, tiles, heads, _, *rest = tiled.shape
        used = tiled[:, :, :, : tile_tokens * heads_per_tile]
        used = used.reshape(splits, tiles, heads, tile_tokens, heads_per_tile, *rest).swapaxes(2, 3)
        used = used.reshape(splits, tiles * tile_tokens, heads, heads_per_tile, *rest)
        # Padding has a tile past the last one: its place is out of range too.
        at = schedule.token_tiles * tile_tokens + schedule.token_offsets
        taken = used.at[:, at].get(mode="fill", fill_value=fill)
        taken = taken.reshape(splits, at.shape[0], kv_heads, heads // kv_heads * heads_per_tile, *rest)
        return taken[:, :, :, :group].reshape(splits, at.shape[0], kv_heads * group, *rest)

    output, lse = of_tokens(outputs, 0), of_tokens(lses, -jnp.inf)
    if output.shape[0] > 1:
        return merge_attention(output, lse)
    output, lse = output[0], lse[0]
    return jnp.where(jnp.isneginf(lse)[..., None], jnp.zeros((), output.dtype), output), lse
