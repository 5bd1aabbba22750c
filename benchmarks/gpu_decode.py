"""Decode steps from a pool that fills most of the device's memory, so that no cache knows its pages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import roundings, worst_roundings
from gpu_child import Programs
from gpu_supervisor import send
from jax import Array, lax

from paged_jax.cli.tune import attend_repeatedly, iterations_for, time_calls
from paged_jax.testing import PagedInputs

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DRAWN_PAGE = 64  # slots of a page as pools are drawn
PAGES_AT_ONCE = 1024  # are drawn: their temporaries are small
RESERVE = 24 << 30  # bytes of the device's memory that are not for the pool


@dataclass(frozen=True)
class Shape:
    """One decode step: `rows` rows of up to `kv` tokens; uniform: all of just so many."""

    rows: int
    kv: int
    page_size: int
    dtype: str = "bfloat16"
    lengths: str = "uniform"

    @property
    def tokens(self) -> int:
        return self.rows * self.kv

    def __str__(self) -> str:
        return f"{self.rows} x {self.kv}, pages of {self.page_size}, {self.dtype}, {self.lengths}"


def token_bytes(dtype: str) -> int:
    """Of one token's keys and values, scales included."""
    scale = 4 if jnp.dtype(dtype).itemsize == 1 else 0
    return 2 * KV_HEADS * (HEAD_DIM * jnp.dtype(dtype).itemsize + scale)


def draw_lengths(shape: Shape) -> np.ndarray:
    """Ragged: evenly from 1 to `kv`, one row of just `kv`."""
    if shape.lengths == "uniform":
        return np.full(shape.rows, shape.kv, np.int32)
    lengths = np.random.default_rng(shape.rows).integers(
        1, shape.kv, shape.rows, endpoint=True, dtype=np.int32
    )
    lengths[-1] = shape.kv
    return lengths


@partial(jax.jit, static_argnames=("num_pages", "dtype"))
def draw_pool(seed: int, num_pages: int, dtype: str) -> tuple[Array, Array | None]:
    """Pages [num_pages, kv_heads, 64, head_dim] of normal numbers, and scales where they are quantised."""
    shape = (min(num_pages, PAGES_AT_ONCE), KV_HEADS, DRAWN_PAGE, HEAD_DIM)

    def draw(key: Array) -> Array:
        numbers = jax.random.normal(key, shape, jnp.float32)
        if dtype == "int8":
            numbers = jnp.clip(jnp.round(numbers * 30), -127, 127)
        return numbers.astype(dtype)

    key = jax.random.key(seed)
    pages = lax.map(draw, jax.random.split(key, num_pages // shape[0])).reshape(num_pages, *shape[1:])
    if pages.dtype.itemsize > 1:
        return pages, None
    return pages, jax.random.uniform(key, pages.shape[:3], minval=0.02, maxval=0.04)


def in_pages_of(page_size: int, pool: Array) -> Array:
    """The same memory as other pages; inside jit it stays where it is."""
    return pool.reshape(-1, KV_HEADS, page_size, *pool.shape[3:])


@partial(jax.jit, static_argnames=("page_size", "iterations", "implementation"))
def decode_repeatedly(
    inputs: PagedInputs,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    page_size: int,
    iterations: int,
    implementation: str,
) -> tuple[Array, Array]:
    view = partial(in_pages_of, page_size)
    inputs = inputs._replace(k_pages=view(inputs.k_pages), v_pages=view(inputs.v_pages))
    options = {} if k_scales is None else {"k_scales": view(k_scales), "v_scales": view(v_scales)}
    return attend_repeatedly(inputs, iterations, implementation=implementation, **options)


@partial(jax.jit, static_argnames="page_size")
def exact_row(
    q: Array,  # [q_heads, head_dim]
    pools: tuple[Array, Array, Array | None, Array | None],
    block_table: Array,
    length: Array,
    *,
    page_size: int,
) -> Array:
    """One token's output in float32, from all its keys at once."""

    def read(pool: Array, scales: Array | None) -> Array:  # [kv_heads, kv, head_dim]
        pages = in_pages_of(page_size, pool)[block_table].astype(jnp.float32)
        if scales is not None:
            pages *= in_pages_of(page_size, scales)[block_table][..., None]
        return pages.swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)

    k, v = read(pools[0], pools[2]), read(pools[1], pools[3])
    q = q.astype(jnp.float32).reshape(KV_HEADS, -1, HEAD_DIM)
    exactly = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    scores = exactly("hgd,hkd->hgk", q, k) / np.float32(HEAD_DIM**0.5)
    live = jnp.arange(k.shape[1], dtype=jnp.int32) < length
    weights = jax.nn.softmax(jnp.where(live[None, None, :], scores, -jnp.inf), axis=-1)
    return exactly("hgk,hkd->hgd", weights, v).reshape(-1, HEAD_DIM)


class Decode:
    """All shapes that fit, for pages of one dtype or several."""

    patience = 45.0

    def __init__(
        self, name: str, seconds: float, implementation: str, shapes: Sequence[Shape], pool_tokens: int
    ):
        self.name, self.seconds = name, seconds
        self._implementation = implementation
        self._pool_tokens = pool_tokens
        self._shapes = {str(shape): shape for shape in shapes if shape.tokens <= pool_tokens}

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def prepare(self, names: Sequence[str], until: float) -> None:
        shapes = [self._shapes[name] for name in names]
        num_pages = self._pool_tokens // DRAWN_PAGE
        self._pools = {}
        for dtype in dict.fromkeys(shape.dtype for shape in shapes):
            (k, k_scales), (v, v_scales) = (draw_pool(seed, num_pages, dtype) for seed in (1, 2))
            self._pools[dtype] = jax.block_until_ready((k, v, k_scales, v_scales))
            send(note=f"a pool of {dtype}")
        # Lengths are data: uniform and ragged rows have one program.
        wanted = {self._key(shape): shape for shape in shapes}
        self._programs = Programs({key: partial(self._trace, shape) for key, shape in wanted.items()}, until)

    def _key(self, shape: Shape) -> tuple[int, int, int, str]:
        return shape.rows, shape.kv, shape.page_size, shape.dtype

    def _trace(self, shape: Shape) -> Any:
        inputs, *scales = self._inputs(shape)
        return decode_repeatedly.trace(
            inputs,
            *scales,
            page_size=shape.page_size,
            iterations=self._iterations(shape),
            implementation=self._implementation,
        )

    def _iterations(self, shape: Shape) -> int:
        return iterations_for(shape.tokens * token_bytes(shape.dtype))

    def _inputs(self, shape: Shape) -> tuple[PagedInputs, Array | None, Array | None]:
        k, v, k_scales, v_scales = self._pools[shape.dtype]
        num_pages = k.shape[0] * DRAWN_PAGE // shape.page_size
        width = -(-shape.kv // shape.page_size)
        tables = np.random.default_rng(0).permutation(num_pages)[: shape.rows * width]
        q = jax.random.normal(jax.random.key(0), (shape.rows, Q_HEADS, HEAD_DIM), jnp.bfloat16)
        tables = jnp.asarray(tables.reshape(shape.rows, width), jnp.int32)
        return PagedInputs(q, k, v, tables, jnp.asarray(draw_lengths(shape))), k_scales, v_scales

    def run(self, name: str) -> dict[str, Any]:
        shape = self._shapes[name]
        program = self._programs[self._key(shape)]
        arguments = self._inputs(shape)
        iterations = self._iterations(shape)
        first, _ = program.call(*arguments)
        timing = time_calls(lambda: program.call(*arguments), iterations)
        num_bytes = int(draw_lengths(shape).sum()) * token_bytes(shape.dtype)
        errors = [self._roundings(shape, arguments[0], first, row) for row in {0, shape.rows - 1}]
        return {
            **vars(shape),
            "bytes": num_bytes,
            "seconds": timing.median,
            "fastest": timing.fastest,
            "slowest": timing.slowest,
            "bytes_per_second": num_bytes / timing.median,
            **worst_roundings(errors),
            "iterations": iterations,
            "compile_seconds": program.compile_seconds,
        }

    def _roundings(self, shape: Shape, inputs: PagedInputs, output: Array, row: int) -> float | None:
        """The error of one row in units of that of rounding the exact one."""
        exact = exact_row(
            inputs.q[row],
            self._pools[shape.dtype],
            inputs.block_tables[row],
            inputs.lengths[row],
            page_size=shape.page_size,
        )
        return roundings(np.asarray(output[row]), exact)


def pool_tokens() -> int:
    """As many tokens in bfloat16 as the device's memory has room for, at most 2**24."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return min(2**24, max(0, limit - RESERVE) // token_bytes("bfloat16") // 2**16 * 2**16)


def decode_section(small: bool) -> Decode:
    if small:
        shapes = [
            Shape(2, 64, page, lengths=lengths) for page in (16, 64) for lengths in ("uniform", "ragged")
        ]
        return Decode("decode", 110, "xla", shapes, 2**12)
    grid = itertools.product(
        (4096, 32768, 131072, 512), (32, 128, 256, 8, 1), ("uniform", "ragged"), (16, 64)
    )
    shapes = [Shape(rows, kv, page_size, lengths=lengths) for kv, rows, lengths, page_size in grid]
    return Decode("decode", 110, "mosaic_hopper", shapes, pool_tokens())


def quantised_section(small: bool) -> Decode:
    dtypes = ("int8", "float8_e4m3fn")
    if small:
        return Decode("quantised", 40, "xla", [Shape(2, 64, 16, dtype) for dtype in dtypes], 2**12)
    grid = itertools.product(((32, 4096), (8, 32768), (128, 4096), (128, 32768)), (16, 64), dtypes)
    shapes = [Shape(*size, page_size, dtype) for size, page_size, dtype in grid]
    return Decode("quantised", 40, "mosaic_hopper", shapes, min(2**22, pool_tokens()))
