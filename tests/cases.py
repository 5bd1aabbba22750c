"""The attention calls that every implementation has to get right: one table for all its tests."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.attention import paged_attention
from paged_jax.page_table import NO_PAGE
from paged_jax.testing import PagedInputs, paged_inputs, poison

attention = jax.jit(
    paged_attention,
    static_argnames=("sliding_window", "logits_soft_cap", "return_lse", "implementation", "tiling"),
)
"""One jitted function for all tests, so that calls of the same shapes compile once."""


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call."""

    name: str
    lengths: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # None: decode, one token a row
    heads: tuple[int, int] = (4, 2)  # query heads, kv heads
    head_dim: int = 8
    page_size: int = 4
    width: int | None = None  # of the block tables; None: one entry more than needed
    dtype: str = "float32"
    page_dtype: str | None = None  # None: as dtype; int8 pages come with scales
    num_padding: int = 0
    gain: float = 1.0  # of the queries
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False

    def call(self, dead: float = np.nan) -> tuple[PagedInputs, dict[str, Any]]:
        """Arrays and keyword arguments for `paged_attention`.

        `dead` stands wherever the contract says "anything": slots without a live token, pages that the
        window has left behind, tokens with nothing to attend.
        """
        quantised = self.page_dtype == "int8"
        inputs = paged_inputs(
            self.lengths,
            self.query_lens,
            page_size=self.page_size,
            q_heads=self.heads[0],
            kv_heads=self.heads[1],
            head_dim=self.head_dim,
            dtype="float32" if quantised else self.page_dtype or self.dtype,
            max_pages_per_row=self.width,
        )
        q = np.asarray(inputs.q) * np.asarray(self.gain, inputs.q.dtype)
        q = np.pad(q.astype(self.dtype), ((0, self.num_padding), (0, 0), (0, 0)))
        attends, tables = np.zeros(len(q), bool), np.array(inputs.block_tables)
        starts = np.cumsum([0, *(self.query_lens or np.ones_like(self.lengths))])
        for row, length in enumerate(self.lengths):
            attends[starts[row] : starts[row + 1]] = length > 0
            if self.sliding_window is not None:
                window_start = length - (starts[row + 1] - starts[row]) + 1 - self.sliding_window
                tables[row, : max(window_start, 0) // self.page_size] = NO_PAGE
        live = ~np.isnan(poison(inputs, np.nan, self.sliding_window).k_pages)[..., 0]
        inputs = poison(inputs, dead, self.sliding_window)
        q[~attends] = dead
        inputs = inputs._replace(q=jnp.asarray(q), block_tables=jnp.asarray(tables))
        options = {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": jnp.linspace(-2, 2, self.heads[0], dtype=jnp.float32) if self.sinks else None,
        }
        if quantised:
            (k_pages, k_scales), (v_pages, v_scales) = (_quantise(pages, live, dead) for pages in inputs[1:3])
            inputs = inputs._replace(k_pages=k_pages, v_pages=v_pages)
            options |= {"k_scales": k_scales, "v_scales": v_scales}
        return inputs, {name: value for name, value in options.items() if value is not None}

    def __str__(self) -> str:
        return self.name


def _quantise(pages: jax.Array, live: np.ndarray, dead: float) -> tuple[jax.Array, jax.Array]:
    """int8 and a scale per slot and kv head."""
    scales = np.max(np.abs(pages), axis=-1) / 127
    values = np.where(live[..., None], np.round(pages / scales[..., None]), -99 if np.isnan(dead) else 0)
    return jnp.asarray(values, jnp.int8), jnp.asarray(np.where(live, scales, dead), jnp.float32)


CASES = [
    Case("decode around page edges", (1, 3, 4, 5, 8, 9, 0, 12)),
    Case("decode, group 1, pages of 1", (1, 2, 7), heads=(2, 2), head_dim=40, page_size=1, width=7),
    Case("decode, group 3, pages of 3", (2, 3, 4, 10), heads=(6, 2), head_dim=64, page_size=3, width=5),
    Case("decode, group 7, pages of 2", (1, 2, 3, 9), heads=(14, 2), head_dim=72, page_size=2),
    Case("decode, group 8, pages of 16", (15, 16, 17, 33), heads=(8, 1), head_dim=80, page_size=16),
    Case("decode, pages of 48", (47, 48, 49), head_dim=96, page_size=48),
    Case("decode, pages of 128", (1, 127, 129), heads=(2, 1), head_dim=112, page_size=128),
    Case("decode, table of one page", (16, 5), heads=(2, 1), head_dim=160, page_size=16, width=1),
    Case("decode, table of 295 pages", (295, 17), heads=(2, 2), head_dim=192, page_size=1, width=295),
    Case("decode, bfloat16", (5, 64, 33), heads=(8, 2), head_dim=128, page_size=16, dtype="bfloat16"),
    Case("decode, one long row among short ones", (3, 200, 1), heads=(3, 3)),
    Case("prefill in chunks", (12, 7, 30), (4, 7, 3), heads=(7, 1), page_size=3),
    Case("prefill, bfloat16", (20, 33), (20, 9), heads=(4, 1), head_dim=64, page_size=16, dtype="bfloat16"),
    Case("mixture with padding", (9, 0, 17, 5, 4, 6), (1, 0, 6, 5, 1, 0), heads=(8, 1), num_padding=3),
    Case("mixture of many rows that decode", (5, 1, 13, 9, 8), (1, 1, 7, 1, 1), heads=(3, 1), page_size=2),
    Case("window, decode", (3, 8, 9, 17, 30), sliding_window=8),
    Case("window of itself", (1, 4, 9), (1, 2, 5), sliding_window=1),
    Case("window, mixture", (30, 9, 40, 6), (7, 1, 3, 6), heads=(3, 1), sliding_window=6, num_padding=2),
    Case("soft cap, decode", (3, 16, 21), logits_soft_cap=5.0, gain=8.0),
    Case("soft cap, prefill", (9, 13), (9, 4), logits_soft_cap=20.0, gain=30.0),
    Case("sinks, decode", (1, 0, 9, 40), heads=(8, 2), sinks=True),
    Case(
        "everything, mixture",
        (30, 1, 0, 50, 12),
        (6, 1, 0, 1, 12),
        heads=(7, 1),
        page_size=3,
        num_padding=1,
        gain=4.0,
        scale=0.3,
        sliding_window=11,
        logits_soft_cap=3.0,
        sinks=True,
    ),
    Case(
        "everything, bfloat16",
        (40, 17),
        (4, 17),
        heads=(8, 2),
        head_dim=64,
        page_size=16,
        dtype="bfloat16",
        sliding_window=19,
        logits_soft_cap=10.0,
        sinks=True,
    ),
    Case("float32 queries, bfloat16 pages", (5, 17), (2, 1), page_dtype="bfloat16"),
    Case("bfloat16 queries, float32 pages", (5, 17), (2, 1), dtype="bfloat16", page_dtype="float32"),
    Case("float16 queries, bfloat16 pages", (5, 17), dtype="float16", page_dtype="bfloat16"),
    Case("int8 pages", (6, 0, 13), (3, 0, 1), page_dtype="int8", heads=(6, 2)),
    Case(
        "int8 pages, bfloat16 queries, window", (6, 21), page_dtype="int8", dtype="bfloat16", sliding_window=7
    ),
]
