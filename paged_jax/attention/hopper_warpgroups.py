"""What the warpgroups of a block do on Hopper: one loads pages, the others compute attention over them.

They meet at barriers in shared memory. For each slot of the ring of steps, `k_ready` and `v_ready` say
that keys and values have arrived, `k_free` and `v_free` that every computing warpgroup is done with them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from paged_jax.attention.kernel_config import CONVERTED_STAGES, WARPGROUP_ROWS, KernelConfig

LOG2E = math.log2(math.e)
COMPUTE_REGISTERS, LOAD_REGISTERS = 216, 72  # of the 3 * 168 that three warpgroups have
VALUE_FACTOR = 64
"""Of the scales of quantised values, times weights in float16: those from 1e-6 to 1e3 keep its precision."""
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
read: Any = plgpu.load  # typed otherwise in versions of jax that are too old for this
MATRIX, PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Sizes:
    """What is known of all blocks of a kernel when it is compiled."""

    config: KernelConfig
    dtype: DTypeLike  # of the queries
    page_dtype: DTypeLike
    head_dim: int
    page_size: int
    num_pages: int
    max_pages_per_row: int
    heads_per_tile: int
    tile_rows: int  # that are read and written
    quantised: bool
    final: bool  # outputs leave in the dtype of the queries, not as the sum of two
    sliding_window: int | None
    logits_soft_cap: float | None
    on_device: bool  # not interpreted

    @property
    def value_dtype(self) -> DTypeLike:
        """Of weights and values in their product: float16 holds 8 bits, and is finer than bfloat16."""
        return jnp.float16 if self.quantised else self.dtype

    @property
    def copies(self) -> int:
        """Pages a step."""
        return max(1, self.config.kv_step // self.page_size)

    @property
    def copy_rows(self) -> int:
        """Slots of a page that a step reads."""
        return min(self.page_size, self.config.kv_step)

    @property
    def ring(self) -> int:
        """Steps that stand in shared memory, ready for the matrix units."""
        return CONVERTED_STAGES if self.quantised else self.config.stages

    @property
    def scale_ring(self) -> int:
        """Steps whose scales do: those that are on their way, and those of the ring."""
        return self.config.stages + CONVERTED_STAGES

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a block."""
        warpgroups, kv_step, stages = self.config.compute_warpgroups, self.config.kv_step, self.config.stages

        def operand(*shape: int, dtype: DTypeLike = self.dtype, width: int = 0) -> Any:
            """In the widest pattern that divides a head, and the inner side of its product if given."""
            swizzle = next(s for s in (128, 64, 32) if math.gcd(self.head_dim, width) % (s // 2) == 0)
            transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def barriers(num_arrivals: int, num_barriers: int = self.ring) -> Any:
            return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

        arrivals = 1 if self.quantised else self.copies
        scratch = {
            "q": operand(warpgroups * WARPGROUP_ROWS, self.head_dim),
            "k": operand(self.ring, kv_step, self.head_dim),
            "v": operand(self.ring, kv_step, self.head_dim, dtype=self.value_dtype, width=kv_step),
            "lse": plgpu.SMEM((warpgroups * WARPGROUP_ROWS,), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "k_ready": barriers(arrivals),
            "v_ready": barriers(arrivals),
            "k_free": barriers(warpgroups),
            "v_free": barriers(warpgroups),
        }
        if self.quantised:
            raw = plgpu.SMEM((stages, kv_step, self.head_dim), self.page_dtype)
            scales = plgpu.SMEM((self.scale_ring, kv_step), jnp.float32)
            scratch |= {"k_raw": raw, "v_raw": raw, "k_scales": scales, "v_scales": scales}
            scratch |= {name: barriers(self.copies, stages) for name in ("k_arrived", "v_arrived")}
        else:
            scratch["arrived"] = plgpu.Barrier(num_arrivals=self.copies)
        if warpgroups > 1:
            scratch["turn"] = plgpu.Barrier(num_arrivals=warpgroups)
        if not self.on_device:
            scratch["weights"] = operand(
                warpgroups, WARPGROUP_ROWS, kv_step, dtype=self.value_dtype, width=kv_step
            )
        return scratch


@dataclass(frozen=True)
class Block:
    """One tile of queries, one kv head and one split: where they are, and the shared memory to work in."""

    sizes: Sizes
    q: Any  # [tile_rows, head_dim], in global memory, as all but `shared`
    pools: tuple[Any, Any]  # [num_pages, kv_heads, page_size, head_dim]
    scales: tuple[Any, ...]  # [num_pages, kv_heads, page_size], two or none
    block_tables: Any  # [rows, max_pages_per_row]
    outputs: Any  # [1 or 2, tile_rows, head_dim]
    lse: Any  # [tile_rows]
    score_scale: Any  # [1]
    row: Array  # whose block table
    kv_head: Array
    first_position: Array  # of the tile's first token
    kv_end: Array  # one past the last position that the tile sees
    begin: Array  # the split's first position
    num_steps: Array
    shared: dict[str, Any]  # as in `Sizes.scratch`


def compute(block: Block, wg: Array) -> None:
    """Attention of 64 rows of the tile over the steps of the split."""
    sizes, shared, begin, kv_end = block.sizes, block.shared, block.begin, block.kv_end
    kv_step, warpgroups = sizes.config.kv_step, sizes.config.compute_warpgroups
    if warpgroups > 1:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    tile_shape = (WARPGROUP_ROWS, kv_step)
    own = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=PER_ROW) + wg * WARPGROUP_ROWS
    q_position = jnp.minimum(block.first_position + lax.div(row, sizes.heads_per_tile), kv_end - 1)
    score_scale = block.score_scale[0]
    q = shared["q"].at[own]

    def over_columns(ref: Any) -> Array:
        return lax.broadcast_in_dim(read(ref, layout=PER_COLUMN), tile_shape, [1])

    def over_rows(values: Array, shape: tuple[int, ...]) -> Array:
        return lax.broadcast_in_dim(values, shape, [0])

    def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def arrive() -> None:
        if warpgroups > 1:
            plgpu.barrier_arrive(shared["turn"])

    def wait_turn() -> None:
        if warpgroups > 1:
            plgpu.barrier_wait(shared["turn"])

    def take_turns() -> None:
        arrive()
        wait_turn()

    def mask(s: Array, start: Array) -> Array:
        position = plgpu.broadcasted_iota(jnp.int32, tile_shape, 1, layout=MATRIX) + start
        back = over_rows(q_position, tile_shape) - position
        visible = back >= 0
        if sizes.sliding_window is not None:
            visible &= back < sizes.sliding_window
        return jnp.where(visible, s, -jnp.inf)

    def scores(i: Array, start: Array) -> Array:
        """In base 2: the logits of all that a row sees, and -inf."""
        slot = lax.rem(i, sizes.ring)
        k = shared["k"].at[slot]
        plgpu.barrier_wait(shared["k_ready"].at[slot])

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
            take_turns()
            return acc[...]

        s = pl.run_scoped(product, plgpu.ACC(tile_shape, jnp.float32)) * score_scale
        if sizes.quantised:
            s *= over_columns(shared["k_scales"].at[lax.rem(i, sizes.scale_ring)])
        plgpu.barrier_arrive(shared["k_free"].at[slot])
        if (cap := sizes.logits_soft_cap) is not None:  # cap * tanh(s / cap), for s times 2 / cap in base 2
            s = cap * LOG2E - (2 * cap * LOG2E) / (1 + jnp.exp2(s))
        if warpgroups == 1 or sizes.head_dim > 192:  # a branch would take registers that these lack
            return mask(s, start)
        partly = start + (kv_step - 1) > block.first_position
        if sizes.sliding_window is not None:
            partly |= start <= kv_end - 1 - sizes.sliding_window
        return lax.cond(partly, mask, lambda s, _: s, s, start)

    def add_values(acc: Array, weights: Array, v: Any) -> Array:
        if sizes.on_device:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(acc))
        # The interpreter has neither operands in registers nor accumulators with a past.
        weights_s = shared["weights"].at[wg]
        weights_s[...] = weights
        plgpu.commit_smem()

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, weights_s, v)
            return acc[...]

        return acc + pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, sizes.head_dim), jnp.float32))

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        s = scores(i, begin + i * kv_step)
        new_top = jnp.maximum(top, s.max(axis=1))
        # Nothing visible so far leaves -inf, and -inf - -inf would be NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay = jnp.exp2(top - shift)
        weights = jnp.exp2(s - over_rows(shift, tile_shape))
        total = total * decay + weights.sum(axis=1)
        acc *= over_rows(decay, acc.shape)
        if sizes.quantised:
            weights *= over_columns(shared["v_scales"].at[lax.rem(i, sizes.scale_ring)])
        weights = weights.astype(sizes.value_dtype)
        slot = lax.rem(i, sizes.ring)
        arrive()  # the softmax is done: the other may have its own
        plgpu.barrier_wait(shared["v_ready"].at[slot])
        wait_turn()
        acc = add_values(acc, weights, shared["v"].at[slot])
        plgpu.barrier_arrive(shared["v_free"].at[slot])
        return acc, new_top, total

    plgpu.barrier_wait(shared["q_ready"])
    pl.when(wg == 1)(take_turns)
    zero = full((WARPGROUP_ROWS, sizes.head_dim), 0, MATRIX)
    nothing = (zero, full((WARPGROUP_ROWS,), -jnp.inf, PER_ROW), full((WARPGROUP_ROWS,), 0, PER_ROW))
    acc, top, total = lax.fori_loop(0, block.num_steps, step, nothing)
    if warpgroups > 1:
        pl.when(wg == 0)(take_turns)

    divisor = jnp.where(total == 0, 1.0, total)
    acc *= over_rows(1 / (divisor * VALUE_FACTOR if sizes.quantised else divisor), acc.shape)
    shared["lse"][own] = jnp.where(total == 0, -jnp.inf, top / LOG2E + jnp.log(divisor))
    leaving = pl.ds(wg * (sizes.tile_rows // warpgroups), sizes.tile_rows // warpgroups)
    for part in range(1 if sizes.final else 2):
        if part > 0:  # read back rather than kept, for the registers
            acc -= read(q, layout=MATRIX).astype(jnp.float32)
        q[...] = acc.astype(sizes.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared["q"].at[leaving], block.outputs.at[part, leaving])
        if part == 0:
            plgpu.copy_smem_to_gmem(shared["lse"].at[leaving], block.lse.at[leaving])
        plgpu.wait_smem_to_gmem(0)


def load(block: Block) -> None:
    """The queries, and step by step the pages, into shared memory."""
    sizes, shared, begin, kv_end = block.sizes, block.shared, block.begin, block.kv_end
    kv_step, stages, ring = sizes.config.kv_step, sizes.config.stages, sizes.ring
    if sizes.config.compute_warpgroups > 1:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    last_page = jnp.minimum(lax.div(kv_end - 1, sizes.page_size), sizes.max_pages_per_row - 1)

    def page_ids(i: Array | int) -> tuple[Array, ...]:
        """Of one step's pages; past the last one it is that again, which costs no memory traffic."""
        first = lax.div(begin + i * kv_step, sizes.page_size)
        logical = (jnp.clip(first + j, 0, last_page) for j in range(sizes.copies))
        ids = (block.block_tables[block.row, page] for page in logical)
        return tuple(jnp.clip(page, 0, sizes.num_pages - 1) for page in ids)

    def read_by(i: Array, pool: Any, page: Array) -> Any:
        """What step i reads of a page: all of it, or a part where pages are longer than steps."""
        if sizes.page_size <= kv_step:
            return pool.at[page, block.kv_head]
        offset = pl.multiple_of(lax.rem(begin + i * kv_step, sizes.page_size), kv_step)
        return pool.at[page, block.kv_head, pl.ds(offset, kv_step)]

    def copy(i: Array, pool: Any, ids: tuple[Array, ...], buffer: Any, ready: Any) -> None:
        for j, page in enumerate(ids):
            rows = pl.ds(j * sizes.copy_rows, sizes.copy_rows)
            plgpu.copy_gmem_to_smem(read_by(i, pool, page), buffer.at[rows], ready)

    def chunk(c: Array) -> Any:
        return pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK)

    def live_rows(values: Array, c: Array, num_live: Array) -> Array:
        """Zeros in the slots that hold no live token: anything may stand there, and 0 * NaN is NaN."""
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=CHUNK_LAYOUT) + c * CHUNK
        zeros = plgpu.layout_cast(jnp.zeros_like(values), CHUNK_LAYOUT)
        return jnp.where(row < num_live, values, zeros)

    def wait_free(name: str, i: Array) -> None:
        plgpu.barrier_wait(shared[f"{name}_free"].at[lax.rem(i, ring)])

    def load_step(i: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
        slot, num_live = lax.rem(i, ring), kv_end - (begin + i * kv_step)
        following = page_ids(i + 1)  # before the waits, which hide it
        pl.when(i >= ring)(partial(wait_free, "k", i))
        copy(i, block.pools[0], ids, shared["k"].at[slot], shared["k_ready"].at[slot])
        pl.when(i >= ring)(partial(wait_free, "v", i))
        v, ready = shared["v"].at[slot], shared["v_ready"].at[slot]

        @pl.when(num_live >= kv_step)
        def _() -> None:
            copy(i, block.pools[1], ids, v, ready)

        @pl.when(num_live < kv_step)
        def _() -> None:
            copy(i, block.pools[1], ids, v, shared["arrived"])
            plgpu.barrier_wait(shared["arrived"])

            @pl.loop(lax.div(num_live, CHUNK), kv_step // CHUNK)
            def _(c: Array) -> None:
                values = read(v.at[chunk(c)], layout=CHUNK_LAYOUT)
                v[chunk(c)] = live_rows(values, c, num_live)

            plgpu.commit_smem()
            for _page in ids:
                plgpu.barrier_arrive(ready)

        return following

    def fetch_quantised(i: Array) -> None:
        """A step's pages and scales, on their way."""
        ids, slot, scale_slot = page_ids(i), lax.rem(i, stages), lax.rem(i, sizes.scale_ring)
        for name, pool in zip("kv", block.pools, strict=True):
            copy(i, pool, ids, shared[f"{name}_raw"].at[slot], shared[f"{name}_arrived"].at[slot])
        # The scales of a page are too few for TMA, which writes to multiples of 128 bytes.
        loaded = [
            [read(read_by(i, scales, page), layout=SCALE_LAYOUT, optimized=False) for page in ids]
            for scales in block.scales
        ]
        for name, factor, of_pages in zip("kv", (1, VALUE_FACTOR), loaded, strict=True):
            for j, values in enumerate(of_pages):
                position = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=SCALE_LAYOUT)
                live = position + (begin + i * kv_step + j * sizes.copy_rows) < kv_end
                zeros = plgpu.layout_cast(jnp.zeros_like(values), SCALE_LAYOUT)
                rows = pl.ds(j * sizes.copy_rows, sizes.copy_rows)
                shared[f"{name}_scales"][scale_slot, rows] = jnp.where(live, values * factor, zeros)

    def widen(values: Array, dtype: DTypeLike) -> Array:
        if values.dtype != jnp.int8:
            values = values.astype(jnp.float16)  # the one way from 8 bits
            if dtype != jnp.float16:
                values = values.astype(jnp.float32)
        return values.astype(dtype)

    def convert_step(i: Array, _: None) -> None:
        slot, raw_slot, num_live = lax.rem(i, ring), lax.rem(i, stages), kv_end - (begin + i * kv_step)
        for name in "kv":
            raw, wide = shared[f"{name}_raw"].at[raw_slot], shared[name].at[slot]
            plgpu.barrier_wait(shared[f"{name}_arrived"].at[raw_slot])
            pl.when(i >= ring)(partial(wait_free, name, i))

            @pl.loop(0, kv_step // CHUNK)
            def _(c: Array, raw: Any = raw, wide: Any = wide) -> None:
                values = read(raw.at[chunk(c)], layout=CHUNK_LAYOUT, optimized=False)
                wide[chunk(c)] = live_rows(widen(values, wide.dtype), c, num_live)

            plgpu.commit_smem()
            plgpu.barrier_arrive(shared[f"{name}_ready"].at[slot])
        pl.when(i + stages < block.num_steps)(lambda: fetch_quantised(i + stages))

    plgpu.copy_gmem_to_smem(block.q, shared["q"].at[pl.ds(0, sizes.tile_rows)], shared["q_ready"])
    if sizes.quantised:
        pl.loop(0, jnp.minimum(stages, block.num_steps))(fetch_quantised)
        lax.fori_loop(0, block.num_steps, convert_step, None)
    else:
        lax.fori_loop(0, block.num_steps, load_step, page_ids(0))

    @pl.loop(jnp.maximum(block.num_steps - ring, 0), block.num_steps)
    def _(i: Array) -> None:  # no phase of a barrier may pass unseen
        wait_free("k", i)
        wait_free("v", i)
