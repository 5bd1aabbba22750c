"""Paged attention on Hopper GPUs: one Pallas Mosaic GPU kernel for prefill, decode and their mixture.

A block works on one tile of queries, one kv head and one split of the kv range, in steps of `kv_step`
keys. One warpgroup, the loader, brings the pages of each step into a ring of shared memory by TMA, page by
page through the block table; one or two more compute: scores by wgmma, an online softmax (Milakov
and Gimelshein 2018, arXiv:1805.02867) in base 2, and the weighted values by wgmma. Two computing
warpgroups take turns, so that one's softmax hides the other's products (Shah et al. 2024,
arXiv:2407.08608). docs/concepts/kernel.md has the arithmetic.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from paged_jax.attention.kernel_config import (
    CONVERTED_STAGES,
    WARPGROUP_ROWS,
    KernelConfig,
    choose_config,
    problem_of,
)
from paged_jax.attention.merge import apply_sinks
from paged_jax.attention.mosaic_compat import interpreted
from paged_jax.attention.schedule import make_schedule
from paged_jax.attention.tiles import pack_queries, unpack_outputs

LOG2E = math.log2(math.e)
COMPUTE_REGISTERS, LOAD_REGISTERS = 216, 72  # of the 3 * 168 that three warpgroups have
CHUNK = 16  # rows that the loader cleans or converts at once

# Pairs of elements in 8x8 matrices, one a warp: any chunk of 16 rows and a multiple of 16 columns has it.
CHUNK_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 16), (8, 8), (2,))), warp_dims=(-5, -4), lane_dims=(-3, -2), vector_dim=-1
)

# One element a lane, the same in each warp: any multiple of 8 elements has it.
SCALE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


@partial(jax.jit, static_argnames=("sliding_window", "logits_soft_cap", "tiling"))
def mosaic_hopper_attention(
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
    """Output in the dtype of q or float32, and log-sum-exp. Arguments as in `paged_attention`, checked."""
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
    scales = () if k_scales is None else (k_scales.astype(jnp.float32), v_scales.astype(jnp.float32))
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
    width = block_tables.shape[1]
    dtype, quantised = q_tiles.dtype, bool(scales)
    kv_step, stages, num_splits, warpgroups = (
        config.kv_step,
        config.stages,
        config.num_splits,
        config.compute_warpgroups,
    )
    own_rows = tile_rows // warpgroups  # of a warpgroup that leave it
    copies = max(1, kv_step // page_size)
    copy_rows = min(page_size, kv_step)
    ring = CONVERTED_STAGES if quantised else stages
    scale_ring = stages + CONVERTED_STAGES
    # A float32 as the sum of two narrow numbers leaves through the tile that held the queries.
    parts = 1 if final else 2
    on_device = not interpreted()

    def kernel(q_ref, k_ref, v_ref, *refs, **scratch):
        k_scale_ref, v_scale_ref = refs[:2] if quantised else (None, None)
        table_ref, splits_ref, score_scale_ref, out_ref, lse_ref = refs[-5:]
        wg = lax.axis_index("wg")
        split, head = lax.axis_index("split"), lax.axis_index("head")
        # The last tiles of a row have the most keys: they go first.
        tile = num_tiles - 1 - lax.axis_index("tile")
        row, first_position, kv_end, begin, end = (splits_ref[split, tile, i] for i in range(5))
        num_steps = jnp.where(end > begin, lax.div(end - begin + (kv_step - 1), kv_step), 0)
        kv_head = lax.div(head, heads // kv_heads)

        @pl.when((wg < warpgroups) & (num_steps > 0))
        def _compute():
            if warpgroups > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            own = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
            q_s, k_s, v_s, lse_s = (scratch[name] for name in ("q_s", "k_s", "v_s", "lse_s"))

            def take_turns():
                if warpgroups > 1:
                    plgpu.barrier_arrive(scratch["turn"])
                    plgpu.barrier_wait(scratch["turn"])

            per_row, per_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
            tile_shape = (WARPGROUP_ROWS, kv_step)
            token = lax.div(
                plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=per_row) + wg * WARPGROUP_ROWS,
                heads_per_tile,
            )
            q_position = jnp.minimum(first_position + token, kv_end - 1)
            score_scale = score_scale_ref[0]
            plgpu.barrier_wait(scratch["q_ready"])

            def scores(start, slot, scale_slot):
                def product(acc_ref):
                    plgpu.wgmma(acc_ref, q_s.at[own], k_s.at[slot].transpose((1, 0)))
                    take_turns()
                    return acc_ref[...]

                s = pl.run_scoped(product, plgpu.ACC(tile_shape, jnp.float32)) * score_scale
                if quantised:
                    s *= of_columns(scratch["k_scale_s"].at[scale_slot])
                plgpu.barrier_arrive(scratch["k_free"].at[slot])
                if logits_soft_cap is not None:
                    s = logits_soft_cap * LOG2E - (2 * logits_soft_cap * LOG2E) / (1 + jnp.exp2(s))

                def mask(s):
                    position = (
                        plgpu.broadcasted_iota(jnp.int32, tile_shape, 1, layout=plgpu.Layout.WGMMA) + start
                    )
                    back = lax.broadcast_in_dim(q_position, tile_shape, [0]) - position
                    visible = back >= 0
                    if sliding_window is not None:
                        visible &= back < sliding_window
                    return jnp.where(visible, s, -jnp.inf)

                partly = start + (kv_step - 1) > first_position
                if sliding_window is not None:
                    partly |= start <= kv_end - 1 - sliding_window
                if warpgroups == 1:  # no branch where memory is what bounds: it would take registers
                    return mask(s)
                return lax.cond(partly, mask, lambda s: s, s)

            def of_columns(ref):
                column = plgpu.load(ref, layout=per_column)
                return lax.broadcast_in_dim(column, tile_shape, [1])

            def step(i, carry):
                acc, top, total = carry
                slot, scale_slot, start = lax.rem(i, ring), lax.rem(i, scale_ring), begin + i * kv_step
                plgpu.barrier_wait(scratch["k_ready"].at[slot])
                s = scores(start, slot, scale_slot)
                new_top = jnp.maximum(top, s.max(axis=1))
                # Nothing visible so far leaves -inf, and -inf - -inf would be NaN.
                shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                decay = jnp.exp2(top - shift)
                weights = jnp.exp2(s - lax.broadcast_in_dim(shift, tile_shape, [0]))
                total = total * decay + weights.sum(axis=1)
                acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
                if quantised:
                    weights *= of_columns(scratch["v_scale_s"].at[scale_slot])
                weights = weights.astype(dtype)
                if warpgroups > 1:
                    plgpu.barrier_arrive(scratch["turn"])
                plgpu.barrier_wait(scratch["v_ready"].at[slot])
                if warpgroups > 1:
                    plgpu.barrier_wait(scratch["turn"])
                acc = add_values(acc, weights, v_s.at[slot])
                plgpu.barrier_arrive(scratch["v_free"].at[slot])
                return acc, new_top, total

            def add_values(acc, weights, v):
                if on_device:

                    def product(acc_ref):
                        plgpu.wgmma(acc_ref, weights, v)

                    return pl.run_state(product)(plgpu.ACC.init(acc))

                # The interpreter has neither operands in registers nor accumulators with a past.
                weights_s = scratch["weights_s"].at[wg]
                weights_s[...] = weights
                plgpu.commit_smem()

                def product(acc_ref):
                    plgpu.wgmma(acc_ref, weights_s, v)
                    return acc_ref[...]

                return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

            def full(shape, value, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            if warpgroups > 1:
                pl.when(wg == 1)(take_turns)
            acc, top, total = lax.fori_loop(
                0,
                num_steps,
                step,
                (
                    full((WARPGROUP_ROWS, head_dim), 0, plgpu.Layout.WGMMA),
                    full((WARPGROUP_ROWS,), -jnp.inf, per_row),
                    full((WARPGROUP_ROWS,), 0, per_row),
                ),
            )
            if warpgroups > 1:
                pl.when(wg == 0)(take_turns)
            divisor = jnp.where(total == 0, 1.0, total)
            acc *= lax.broadcast_in_dim(1 / divisor, acc.shape, [0])
            lse_s[own] = jnp.where(total == 0, -jnp.inf, top / LOG2E + jnp.log(divisor))
            leaving = pl.ds(wg * own_rows, own_rows)
            for part in range(parts):
                if part > 0:  # read back rather than kept, for the registers
                    acc -= plgpu.load(q_s.at[own], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                q_s[own] = acc.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_s.at[leaving], out_ref.at[part, split, tile, head, leaving])
                if part == 0:
                    plgpu.copy_smem_to_gmem(lse_s.at[leaving], lse_ref.at[split, tile, head, leaving])
                plgpu.wait_smem_to_gmem(0)

        @pl.when((wg == warpgroups) & (num_steps > 0))
        def _load():
            if warpgroups > 1:
                plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            rows = pl.ds(0, tile_rows)
            plgpu.copy_gmem_to_smem(q_ref.at[tile, head], scratch["q_s"].at[rows], scratch["q_ready"])
            k_s, v_s, k_free, v_free, k_ready, v_ready = (
                scratch[name] for name in ("k_s", "v_s", "k_free", "v_free", "k_ready", "v_ready")
            )
            last_page = lax.div(kv_end - 1, page_size)

            def page_ids(i):
                """Of one step's pages; past the last one it is that again, which costs no memory traffic."""
                first = lax.div(begin + i * kv_step, page_size)
                logical = (jnp.clip(first + j, 0, jnp.minimum(last_page, width - 1)) for j in range(copies))
                return tuple(jnp.clip(table_ref[row, page], 0, num_pages - 1) for page in logical)

            def source(pool, page, i):
                """What step i reads of a page: all of it, or a part where pages are longer than steps."""
                if page_size <= kv_step:
                    return pool.at[page, kv_head]
                offset = lax.rem(begin + i * kv_step, page_size)
                return pool.at[page, kv_head, pl.ds(pl.multiple_of(offset, kv_step), kv_step)]

            def copy(pool, ids, i, buffer, ready):
                for j, page in enumerate(ids):
                    rows = pl.ds(j * copy_rows, copy_rows)
                    plgpu.copy_gmem_to_smem(source(pool, page, i), buffer.at[rows], ready)

            def rows_of(c):
                return pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK)

            def widen(values):
                if values.dtype == jnp.int8:
                    return values.astype(dtype)
                return (
                    values.astype(jnp.float16).astype(jnp.float32).astype(dtype)
                )  # the way there is for 8 bits

            def live_rows(values, c, num_live):
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=CHUNK_LAYOUT) + c * CHUNK
                zeros = plgpu.layout_cast(jnp.zeros_like(values), CHUNK_LAYOUT)
                return jnp.where(row < num_live, values, zeros)

            def clear(buffer, num_live):
                """Zeros in the slots that hold no live token: anything may stand there, and 0 * NaN is NaN."""

                @pl.loop(lax.div(num_live, CHUNK), kv_step // CHUNK)
                def _(c):
                    values = plgpu.load(buffer.at[rows_of(c)], layout=CHUNK_LAYOUT)
                    buffer[rows_of(c)] = live_rows(values, c, num_live)

            def wait_free(free, i):
                plgpu.barrier_wait(free.at[lax.rem(i, ring)])

            def load(i, ids):
                slot, num_live = lax.rem(i, ring), kv_end - (begin + i * kv_step)
                following = page_ids(i + 1)  # before the waits, which hide it
                pl.when(i >= ring)(lambda: wait_free(k_free, i))
                copy(k_ref, ids, i, k_s.at[slot], k_ready.at[slot])
                pl.when(i >= ring)(lambda: wait_free(v_free, i))
                buffer, ready = v_s.at[slot], v_ready.at[slot]
                pl.when(num_live >= kv_step)(lambda: copy(v_ref, ids, i, buffer, ready))

                @pl.when(num_live < kv_step)
                def _():
                    copy(v_ref, ids, i, buffer, scratch["arrived"])
                    plgpu.barrier_wait(scratch["arrived"])
                    clear(buffer, num_live)
                    plgpu.commit_smem()
                    for _ in range(copies):
                        plgpu.barrier_arrive(ready)

                return following

            def fetch(i):
                """The quantised pages of a step, and their scales, on their way."""
                ids, slot, scale_slot = page_ids(i), lax.rem(i, stages), lax.rem(i, scale_ring)
                for name, pool in (("k", k_ref), ("v", v_ref)):
                    copy(pool, ids, i, scratch[f"{name}_raw"].at[slot], scratch[f"{name}_raw_ready"].at[slot])
                # The scales of a page are too few for TMA, which writes to multiples of 128 bytes.
                scales = [
                    [plgpu.load(source(ref, page, i), layout=SCALE_LAYOUT, optimized=False) for page in ids]
                    for ref in (k_scale_ref, v_scale_ref)
                ]
                for name, of_pages in zip("kv", scales, strict=True):
                    for j, values in enumerate(of_pages):
                        position = plgpu.broadcasted_iota(jnp.int32, (copy_rows,), 0, layout=SCALE_LAYOUT)
                        position += begin + i * kv_step + j * copy_rows
                        zeros = plgpu.layout_cast(jnp.zeros_like(values), SCALE_LAYOUT)
                        # That of a dead slot may be NaN.
                        values = jnp.where(position < kv_end, values, zeros)
                        scratch[f"{name}_scale_s"][scale_slot, pl.ds(j * copy_rows, copy_rows)] = values

            def convert(i, _):
                slot, raw_slot, num_live = (
                    lax.rem(i, ring),
                    lax.rem(i, stages),
                    kv_end - (begin + i * kv_step),
                )
                for name, buffer, free, ready in (("k", k_s, k_free, k_ready), ("v", v_s, v_free, v_ready)):
                    plgpu.barrier_wait(scratch[f"{name}_raw_ready"].at[raw_slot])
                    pl.when(i >= ring)(partial(wait_free, free, i))
                    raw = scratch[f"{name}_raw"]

                    @pl.loop(0, kv_step // CHUNK)
                    def _(c):
                        values = plgpu.load(
                            raw.at[raw_slot, rows_of(c)], layout=CHUNK_LAYOUT, optimized=False
                        )
                        values = widen(values)
                        buffer[slot, rows_of(c)] = live_rows(values, c, num_live)

                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready.at[slot])
                pl.when(i + stages < num_steps)(lambda: fetch(i + stages))

            if quantised:
                pl.loop(0, jnp.minimum(stages, num_steps))(fetch)
                lax.fori_loop(0, num_steps, convert, None)
            else:
                lax.fori_loop(0, num_steps, load, page_ids(0))

            @pl.loop(jnp.maximum(num_steps - ring, 0), num_steps)
            def _(i):  # no phase of a barrier may pass unseen
                wait_free(k_free, i)
                wait_free(v_free, i)

    def tiled(*shape, width=0):
        """For wgmma: in the widest pattern that divides the rows, and the other side of the product."""
        swizzle = next(s for s in (128, 64, 32) if math.gcd(head_dim, width) % (s // 2) == 0)
        transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def barriers(num_arrivals, num_barriers=ring):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    scratch_types = {
        "q_s": tiled(warpgroups * WARPGROUP_ROWS, head_dim),
        "k_s": tiled(ring, kv_step, head_dim),
        "v_s": tiled(ring, kv_step, head_dim, width=kv_step),
        "lse_s": plgpu.SMEM((warpgroups * WARPGROUP_ROWS,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "k_ready": barriers(1 if quantised else copies),
        "v_ready": barriers(1 if quantised else copies),
        "k_free": barriers(warpgroups),
        "v_free": barriers(warpgroups),
    }
    if quantised:
        raw = plgpu.SMEM((stages, kv_step, head_dim), pools[0].dtype)
        scale_s = plgpu.SMEM((scale_ring, kv_step), jnp.float32)
        scratch_types |= {"k_raw": raw, "v_raw": raw, "k_scale_s": scale_s, "v_scale_s": scale_s}
        scratch_types |= {f"{name}_raw_ready": barriers(copies, stages) for name in "kv"}
    else:
        scratch_types["arrived"] = plgpu.Barrier(num_arrivals=copies)
    if warpgroups > 1:
        scratch_types["turn"] = plgpu.Barrier(num_arrivals=warpgroups)
    if not on_device:
        scratch_types["weights_s"] = tiled(warpgroups, WARPGROUP_ROWS, kv_step, width=kv_step)

    outputs, lses = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((parts, num_splits, *q_tiles.shape), dtype),
            jax.ShapeDtypeStruct((num_splits, *q_tiles.shape[:3]), jnp.float32),
        ],
        scratch_types=scratch_types,
        grid=(num_splits, heads, num_tiles),
        grid_names=("split", "head", "tile"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q_tiles, *pools, *scales, block_tables, splits, score_scale)
    return (outputs[0] if parts == 1 else outputs.astype(jnp.float32).sum(0)), lses
