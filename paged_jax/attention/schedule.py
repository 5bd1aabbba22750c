"""How the queries of a ragged step are cut into tiles, for every implementation.

A tile is up to `tile_tokens` consecutive tokens of one row. With the heads that share a kv head
they form the rows of one small matrix, so prefill, decode and their mixture are one computation:
a tile walks the pages of its own row, from the start of its window to its causal end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


@dataclass(frozen=True)
class Tiling:
    """Sizes of the pieces of work. With the same tiling, a row's result has the same bits in any batch.

    Raises:
        ValueError: if a size is not positive.
    """

    tile_tokens: int  # query tokens a tile
    pages_per_step: int  # pages read at once
    num_splits: int = 1  # parts a tile's kv range is cut into, merged by log-sum-exp

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"Tiling: {name} must be at least 1, got {name}={value}")


class Schedule(NamedTuple):
    """The tiles of a step: N of them for T tokens. Unused tiles have no tokens and no kv range."""

    rows: Int32[Array, " tiles"]  # whose block table
    first_tokens: Int32[Array, " tiles"]  # index among the T packed tokens
    num_tokens: Int32[Array, " tiles"]
    first_positions: Int32[Array, " tiles"]  # position of the first token in its row
    kv_begins: Int32[Array, " tiles"]  # multiple of page_size; no query of the tile sees anything before it
    kv_ends: Int32[Array, " tiles"]  # one past the last position that the tile's last query sees
    token_tiles: Int32[Array, " tokens"]  # for each token its tile; out of range on the high side for padding
    token_offsets: Int32[Array, " tokens"]  # and its place in the tile


def make_schedule(
    query_starts: Int32[Array, " rows"],
    query_lens: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    *,
    num_tokens: int,
    tile_tokens: int,
    page_size: int,
    sliding_window: int | None,
) -> Schedule:
    """Cuts the last `query_lens[r]` tokens of every row into tiles.

    There are as many tiles as `num_tokens` tokens of so many rows can need at most.
    """
    num_rows = lengths.shape[0]
    num_tiles = num_tokens if tile_tokens == 1 else num_tokens // tile_tokens + min(num_rows, num_tokens)
    tile_counts = -(-query_lens // tile_tokens)
    tile_ends = jnp.cumsum(tile_counts, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), num_rows - 1).astype(jnp.int32)
    used = tile < tile_ends[-1]
    offset = (tile - (tile_ends - tile_counts)[rows]) * tile_tokens
    num_in_tile = jnp.where(used, jnp.minimum(query_lens[rows] - offset, tile_tokens), 0)
    first_positions = jnp.where(used, (lengths - query_lens)[rows] + offset, 0)
    kv_ends = jnp.where(used, first_positions + num_in_tile, 0)
    kv_begins = jnp.zeros_like(kv_ends)
    if sliding_window is not None:
        kv_begins = jnp.maximum(first_positions - (sliding_window - 1), 0) // page_size * page_size

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(query_starts, token, side="right") - 1, num_rows - 1).astype(jnp.int32)
    in_row = token - query_starts[row]
    token_tiles = (tile_ends - tile_counts)[row] + in_row // tile_tokens
    return Schedule(
        rows=rows,
        first_tokens=jnp.where(used, query_starts[rows] + offset, 0),
        num_tokens=num_in_tile,
        first_positions=first_positions,
        kv_begins=kv_begins,
        kv_ends=kv_ends,
        token_tiles=jnp.where((in_row >= 0) & (in_row < query_lens[row]), token_tiles, num_tiles),
        token_offsets=in_row % tile_tokens,
    )


def longest_first(schedule: Schedule) -> Schedule:
    """The same tiles, those with the longest kv range first, so that neighbours take about as long."""
    order = jnp.argsort(schedule.kv_begins - schedule.kv_ends)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    token_tiles = places.at[schedule.token_tiles].get(mode="fill", fill_value=order.shape[0])
    return Schedule(
        rows=schedule.rows[order],
        first_tokens=schedule.first_tokens[order],
        num_tokens=schedule.num_tokens[order],
        first_positions=schedule.first_positions[order],
        kv_begins=schedule.kv_begins[order],
        kv_ends=schedule.kv_ends[order],
        token_tiles=token_tiles,
        token_offsets=schedule.token_offsets,
    )
