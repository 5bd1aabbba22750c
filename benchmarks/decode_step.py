"""The decode step that attention is measured on: queries, pages, and the lengths of full and mixed rows."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

ROWS, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, MAX_LENGTH = 16, 32, 8, 128, 16, 2048
MIXED_SHARE = 0.18


class Inputs(NamedTuple):
    q: Array  # [rows, q_heads, head_dim]
    k_pages: Array  # [num_pages, kv_heads, page_size, head_dim]
    v_pages: Array
    block_tables: Array  # [rows, pages_per_row], every entry a page

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def contiguous(self, pages: Array) -> Array:  # [rows, max_length, kv_heads, head_dim]
        kv_heads, _, head_dim = pages.shape[1:]
        tiles = pages[self.block_tables].swapaxes(2, 3)
        return tiles.reshape(len(self.block_tables), -1, kv_heads, head_dim)


def draw(
    rows: int = ROWS,
    q_heads: int = Q_HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    max_length: int = MAX_LENGTH,
) -> tuple[Inputs, dict[str, np.ndarray]]:
    """Pages in any order, and the lengths of each batch."""
    rng = np.random.default_rng(0)
    width = max_length // PAGE_SIZE

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    q = normal(rows, q_heads, head_dim)
    k_pages, v_pages = (normal(rows * width, kv_heads, PAGE_SIZE, head_dim) for _ in range(2))
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    shares = rng.exponential(size=rows)
    mixed = np.clip(shares / shares.sum() * MIXED_SHARE * rows * max_length, 1, max_length)
    lengths = {"full": np.full(rows, max_length, np.int32), "mixed": mixed.astype(np.int32)}
    return Inputs(q, k_pages, v_pages, jnp.asarray(tables)), lengths


@jax.jit
def attend_head_major(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """Of contiguous keys and values, [rows, kv_heads, max_length, head_dim], over their full width."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("rhgd,rhkd->rhgk", grouped, k) / math.sqrt(q.shape[-1])
    live = jnp.arange(k.shape[2])[None] < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(live[:, None, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rhgk,rhkd->rhgd", weights, v).reshape(q.shape)
