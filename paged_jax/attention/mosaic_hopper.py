"""Paged attention on Hopper GPUs: one Pallas Mosaic GPU kernel for prefill, decode and their mixture.

A block works on one tile of queries, one kv head and one split of the kv range, in steps of `kv_step`
keys. One warpgroup, the loader, brings the pages of each step into a ring of shared memory by TMA, page by
page through the block table; one or two more compute: scores by wgmma, an online softmax (Milakov
and Gimelshein 2018, arXiv:1805.02867) in base 2, and the weighted values by wgmma. Two computing
warpgroups take turns, so that one's softmax hides the other's products (Shah et al. 2024,
arXiv:2407.08608). docs/concepts/kernel.md has the arithmetic.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from paged_jax.attention.hopper_warpgroups import LOG2E, Block, Sizes, compute, load
from paged_jax.attention.kernel_config import KernelConfig, choose_config, problem_of
from paged_jax.attention.merge import apply_sinks
from paged_jax.attention.mosaic_compat import interpreted
from paged_jax.attention.schedule import make_schedule
from paged_jax.attention.tiles import pack_queries, unpack_outputs


def mosaic_hopper_attention(*arrays: Array | None, **options: Any) -> tuple[Array, Array]:
    """Output in the dtype of q or float32, and log-sum-exp. Arguments as in `paged_attention`, checked."""
    with jax.enable_x64(False):  # where it is on, plain integers would become int64 beside the kernel's int32
        return _mosaic_hopper_attention(*arrays, **options)


@partial(jax.jit, static_argnames=("sliding_window", "logits_soft_cap", "tiling"))
def _mosaic_hopper_attention(
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
    tiling: KernelConfig | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    problem = problem_of(q, k_pages, block_tables, query_starts, k_scales)
    config = choose_config(problem) if tiling is None else tiling
    config.check(problem)
    tokens, num_rows = problem.num_tokens, problem.num_rows
    if query_starts is None:
        starts, query_lens = jnp.arange(num_rows, dtype=jnp.int32), jnp.minimum(lengths, 1)
    else:
        query_lens = jnp.clip(jnp.diff(query_starts), 0, lengths)
        starts = query_starts[1:] - query_lens
    schedule = make_schedule(
        starts,
        query_lens,
        lengths,
        num_tokens=tokens,
        tile_tokens=config.tile_tokens,
        page_size=min(problem.page_size, config.kv_step),
        sliding_window=sliding_window,
    )
    heads_per_tile = config.heads_per_tile(problem.group)
    tile_rows = config.tile_rows(problem.group)
    layout = {
        "kv_heads": problem.kv_heads,
        "tile_tokens": config.tile_tokens,
        "heads_per_tile": heads_per_tile,
    }
    q_tiles = pack_queries(q, schedule, **layout, tile_rows=tile_rows)
    steps = -(-(schedule.kv_ends - schedule.kv_begins) // config.kv_step)
    split_tokens = -(-steps // config.num_splits) * config.kv_step
    split = jnp.arange(config.num_splits, dtype=jnp.int32)[:, None]
    split_begins = schedule.kv_begins[None] + split * split_tokens[None]  # [splits, tiles]
    split_ends = jnp.minimum(split_begins + split_tokens[None], schedule.kv_ends[None])
    splits = jnp.stack(
        [
            jnp.broadcast_to(array, split_begins.shape)
            for array in (schedule.rows, schedule.first_positions, schedule.kv_ends, split_begins, split_ends)
        ],
        axis=-1,
    )
    score_scale = jnp.asarray(scale, jnp.float32) * (
        LOG2E if logits_soft_cap is None else 2 * LOG2E / logits_soft_cap
    )
    given = (array for array in (k_scales, v_scales) if array is not None)
    scales = tuple(array.astype(jnp.float32) for array in given)
    outputs, lses = _attend(
        q_tiles,
        (k_pages, v_pages),
        scales,
        block_tables,
        splits,
        score_scale.reshape(1),
        heads_per_tile=heads_per_tile,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        final=config.num_splits == 1 and sinks is None,
        config=config,
    )
    # A split without keys is not worked on, and nothing is written.
    empty = split_begins >= split_ends
    lses = jnp.where(empty[:, :, None, None], -jnp.inf, lses)
    output, lse = unpack_outputs(outputs, lses, schedule, group=problem.group, **layout)
    return (output, lse) if sinks is None else apply_sinks(output, lse, sinks)


def _attend(
    q_tiles: Array,  # [tiles, heads, tile_rows, head_dim]
    pools: tuple[Array, Array],  # [num_pages, kv_heads, page_size, head_dim]
    scales: tuple[Array, ...],  # [num_pages, kv_heads, page_size], none or two
    block_tables: Array,  # [rows, max_pages_per_row]
    splits: Array,  # [splits, tiles, 5]: row, first position, kv end, begin and end of the split
    score_scale: Array,  # [1]
    *,
    heads_per_tile: int,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    final: bool,
    config: KernelConfig,
) -> tuple[Array, Array]:
    """Outputs [splits, tiles, heads, tile_rows, head_dim] and log-sum-exp [splits, tiles, heads, tile_rows].

    `final` outputs have the dtype of the queries; others are float32, rounded only after what follows.
    """
    num_tiles, heads, tile_rows, head_dim = q_tiles.shape
    num_pages, kv_heads, page_size, _ = pools[0].shape
    warpgroups = config.compute_warpgroups
    sizes = Sizes(
        config=config,
        dtype=q_tiles.dtype,
        page_dtype=pools[0].dtype,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_pages_per_row=block_tables.shape[1],
        heads_per_tile=heads_per_tile,
        tile_rows=tile_rows,
        quantised=bool(scales),
        final=final,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        on_device=not interpreted(),
    )

    def kernel(q_ref, k_ref, v_ref, *refs, **shared):
        *scale_refs, table_ref, splits_ref, score_scale_ref, outputs_ref, lses_ref = refs
        wg, split, head = (lax.axis_index(name) for name in ("wg", "split", "head"))
        # The last tiles of a row have the most keys: they go first.
        tile = num_tiles - 1 - lax.axis_index("tile")
        row, first_position, kv_end, begin, end = (splits_ref[split, tile, i] for i in range(5))
        num_steps = jnp.where(end > begin, lax.div(end - begin + (config.kv_step - 1), config.kv_step), 0)
        block = Block(
            sizes=sizes,
            q=q_ref.at[tile, head],
            pools=(k_ref, v_ref),
            scales=tuple(scale_refs),
            block_tables=table_ref,
            outputs=outputs_ref.at[:, split, tile, head],
            lse=lses_ref.at[split, tile, head],
            score_scale=score_scale_ref,
            row=row,
            kv_head=lax.div(head, heads // kv_heads),
            first_position=first_position,
            kv_end=kv_end,
            begin=begin,
            num_steps=num_steps,
            shared=shared,
        )
        pl.when((wg < warpgroups) & (num_steps > 0))(lambda: compute(block, wg))
        pl.when((wg == warpgroups) & (num_steps > 0))(lambda: load(block))

    num_splits = config.num_splits
    outputs, lses = plgpu.kernel(
        kernel,
        out_type=[
            # A float32 leaves as the sum of two narrow numbers, through the memory that held the queries.
            jax.ShapeDtypeStruct((1 if final else 2, num_splits, *q_tiles.shape), q_tiles.dtype),
            jax.ShapeDtypeStruct((num_splits, *q_tiles.shape[:3]), jnp.float32),
        ],
        scratch_types=sizes.scratch(),
        grid=(num_splits, heads, num_tiles),
        grid_names=("split", "head", "tile"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q_tiles, *pools, *scales, block_tables, splits, score_scale)
    return (outputs[0] if final else outputs.astype(jnp.float32).sum(0)), lses
